# ruff: noqa: RUF012, TC003 - stages as an author writes them; annotations are read at run time
"""A one-to-many job that reads a resource: no item sees two versions, no writer waits for ever (2.5, 5.1)."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from flows import collector, fine, go
from test_resources import Box, Writes

from pipeflow import Stage
from pipeflow.barrier import BarrierRunner

RESOURCES = {"box": {"uses": "box"}}


class Looks(Stage):
    """For each item three outputs, each with the number of writes that it sees."""

    reads = {"box": Box}

    def run(self, item: int, ctx: Any):
        box = ctx.read("box")
        for _ in range(3):
            yield (item, len(box["log"]))


class LooksAsync(Stage):
    reads = {"box": Box}

    async def run(self, item: int, ctx: Any):
        box = ctx.read("box")
        for _ in range(3):
            yield (item, len(box["log"]))


@pytest.mark.axiom("2.5", "3.2")
@pytest.mark.parametrize("looks", [Looks, LooksAsync])
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_writer_behind_a_reader_of_many_outputs(tmp_path: Path, looks: Any, replicas: int) -> None:
    """The writer takes what the reader makes, one at a time: it waits for the reader, which has no credit."""
    seen: list[tuple[int, int]] = []
    stages = {
        "a": {"uses": "numbers", "with": {"count": 8}},
        "looks": {"uses": "looks", "from": "a", "reads": "box", "replicas": replicas},
        "w": {"uses": "writes", "from": "looks", "writes": "box", "queue": {"items": 1}},
        "s": {"uses": "sink", "from": "w"},
    }
    used = {"box": Box, "looks": looks, "writes": Writes, "sink": collector(seen)}
    outcome = fine(go(tmp_path, stages, used, resources=RESOURCES))
    assert [item for item, _ in seen] == [n for n in range(8) for _ in range(3)]
    versions = {item: {version for number, version in seen if number == item} for item in range(8)}
    assert all(len(found) == 1 for found in versions.values()), versions
    assert outcome.runner("looks").outs[0].peak > 1, "it never had to go on without a credit"


@pytest.mark.axiom("2.5", "5.1")
def test_a_flat_map_into_a_stopped_stage_in_a_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The barrier's section writes what both the flat map and its consumer read: the consumer may not start
    any more, so the flat map gets no credit, and the section waits for it."""
    consuming, holding = threading.Event(), threading.Event()
    hold = BarrierRunner._hold

    async def told(self: BarrierRunner) -> None:
        holding.set()
        await hold(self)

    monkeypatch.setattr(BarrierRunner, "_hold", told)
    seen: list[tuple[tuple[int, int], int]] = []

    class Late(Stage):
        """A source of the barrier's branch, which begins once the flat map's first output is in work."""

        def run(self):
            assert consuming.wait(10)
            yield 0

    class Consumes(Stage):
        reads = {"box": Box}

        def run(self, item: tuple, ctx: Any) -> None:
            consuming.set()
            assert holding.wait(10)
            seen.append((item, len(ctx.read("box")["log"])))

    class Fills(Stage):
        guarded = True
        writes = {"box": Box}

        def run(self, item: Any, ctx: Any) -> None:
            ctx.write("box")["log"].append(item)

    stages = {
        "a": {"uses": "numbers", "with": {"count": 1}},
        "looks": {"uses": "looks", "from": "a", "reads": "box"},
        "c": {"uses": "consumes", "from": "looks", "reads": "box", "queue": {"items": 1}},
        "late": {"uses": "late"},
        "b": {"uses": "barrier", "from": "late", "timeout": "10s"},
        "fills": {"uses": "fills", "from": "b", "writes": "box"},
    }
    used = {"box": Box, "looks": Looks, "consumes": Consumes, "late": Late, "fills": Fills}
    fine(go(tmp_path, stages, used, resources=RESOURCES))
    assert [item for item, _ in seen] == [(0, 0)] * 3, "one item, one version"
    assert [writes for _, writes in seen] == [0, 1, 1], (
        "the section ran while outputs of the item were queued"
    )
