# ruff: noqa: RUF012, TC003 - stages as an author writes them; annotations are read at run time
"""A reader behind the writer sees its item's version (axiom 3.4)."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from flows import fine, go
from test_resources import Box, Writes

from pipeflow import DROP
from pipeflow.stage import Stage

RESOURCES = {"box": {"uses": "box"}}


def looks(seen: list[tuple[int, int]], slow: bool = False) -> Any:
    class Looks(Stage):
        reads = {"box": Box}

        def run(self, item: int, ctx: Any) -> int:
            if slow:  # on purpose: a writer that did not wait would be ahead by now
                threading.Event().wait(0.002)
            seen.append((item, len(ctx.read("box")["log"])))
            return item

    return Looks


@pytest.mark.axiom("3.4")
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_slow_reader_holds_the_next_write_back(tmp_path: Path, every: int, replicas: int) -> None:
    seen: list[tuple[int, int]] = []
    stages = {
        "a": {"uses": "numbers", "with": {"count": 12}},
        "w": {"uses": "writes", "from": "a", "writes": "box"},
        "r": {"uses": "looks", "from": "w", "reads": "box", "every": every, "replicas": replicas},
    }
    fine(
        go(tmp_path, stages, {"box": Box, "writes": Writes, "looks": looks(seen, True)}, resources=RESOURCES)
    )
    assert sorted(seen) == [(n, n + 1) for n in range(every - 1, 12, every)]


@pytest.mark.axiom("3.4")
def test_a_skipped_item_of_the_writer_holds_nothing_back(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    class Drops(Writes):
        def run(self, item: int, ctx: Any) -> Any:
            if item == 3:
                raise ValueError("no")
            super().run(item, ctx)
            return DROP if item == 5 else item

    stages = {
        "a": {"uses": "numbers", "with": {"count": 9}},
        "w": {"uses": "drops", "from": "a", "writes": "box", "on_error": {"skip": 1}},
        "r": {"uses": "looks", "from": "w", "reads": "box"},
    }
    fine(go(tmp_path, stages, {"box": Box, "drops": Drops, "looks": looks(seen)}, resources=RESOURCES))
    assert [item for item, _ in seen] == [0, 1, 2, 4, 6, 7, 8]
    assert all(count == item + 1 - (item > 3) for item, count in seen)


def test_a_reader_that_skips_the_item_lets_go(tmp_path: Path) -> None:
    class Fails(Stage):
        reads = {"box": Box}

        def run(self, item: int, ctx: Any) -> int:
            raise ValueError("no")

    stages = {
        "a": {"uses": "numbers", "with": {"count": 5}},
        "w": {"uses": "writes", "from": "a", "writes": "box"},
        "r": {"uses": "fails", "from": "w", "reads": "box", "on_error": {"skip": 9}},
    }
    fine(go(tmp_path, stages, {"box": Box, "writes": Writes, "fails": Fails}, resources=RESOURCES))


def test_a_reader_past_its_limit_lets_go(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    stages = {
        "a": {"uses": "numbers", "with": {"count": 8}},
        "w": {"uses": "writes", "from": "a", "writes": "box"},
        "r": {"uses": "looks", "from": "w", "reads": "box", "limit": 2},
    }
    fine(go(tmp_path, stages, {"box": Box, "writes": Writes, "looks": looks(seen)}, resources=RESOURCES))
    assert seen == [(0, 1), (1, 2)]


def test_a_writer_of_many_outputs_waits_for_the_readers_of_each(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    class Splits(Stage):
        writes = {"box": Box}

        def run(self, item: int, ctx: Any):
            for number in range(3):
                ctx.write("box")["log"].append(item)
                yield 3 * item + number

    stages = {
        "a": {"uses": "numbers", "with": {"count": 3}},
        "w": {"uses": "splits", "from": "a", "writes": "box"},
        "r": {"uses": "looks", "from": "w", "reads": "box"},
    }
    fine(
        go(tmp_path, stages, {"box": Box, "splits": Splits, "looks": looks(seen, True)}, resources=RESOURCES)
    )
    assert seen == [(n, n + 1) for n in range(9)]
