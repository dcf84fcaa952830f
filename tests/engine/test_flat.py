# ruff: noqa: TC003 - stages as an author writes them; annotations are read at run time
"""One-to-many: a credit and a hand-over an output (axiom 2.5)."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from flows import collector, fine, go

from pipeflow import DROP, Failed, stage


@pytest.mark.axiom("2.5")
@pytest.mark.parametrize("is_async", [False, True])
def test_each_output_leaves_at_once(tmp_path: Path, is_async: bool) -> None:
    """The generator goes on only once its first output was consumed: it is not collected first."""
    seen: list[int] = []
    consumed = threading.Event()

    @stage
    def split(item: int):
        yield 1
        assert consumed.wait(10)
        yield 2

    @stage
    async def asplit(item: int):
        yield 1
        import asyncio

        while not consumed.is_set():
            await asyncio.sleep(0)
        yield 2

    @stage
    def sink(item: int) -> None:
        seen.append(item)
        consumed.set()

    stages = {
        "a": {"uses": "numbers", "with": {"count": 1}},
        "b": {"uses": "split", "from": "a"},
        "c": {"uses": "sink", "from": "b"},
    }
    fine(go(tmp_path, stages, {"split": asplit if is_async else split, "sink": sink}))
    assert seen == [1, 2]


@pytest.mark.parametrize("replicas", [1, 3])
def test_outputs_keep_the_order_of_their_inputs(tmp_path: Path, replicas: int) -> None:
    seen: list[Any] = []

    @stage
    def split(item: int):
        for number in range(item % 4):
            yield (item, number)

    stages = {
        "a": {"uses": "numbers", "with": {"count": 12}},
        "b": {"uses": "split", "from": "a", "replicas": replicas},
        "c": {"uses": "sink", "from": "b", "queue": {"items": 1}},
    }
    fine(go(tmp_path, stages, {"split": split, "sink": collector(seen)}))
    assert seen == [(n, k) for n in range(12) for k in range(n % 4)]


@pytest.mark.axiom("1.1")
def test_a_dropped_output_leaves_no_hole_in_the_numbers(tmp_path: Path) -> None:
    numbers: list[tuple[int, int]] = []

    @stage
    def split(item: int):
        yield DROP
        yield item
        yield DROP

    @stage
    def sink(item: int, ctx) -> None:
        numbers.append((ctx.sequence, item))

    stages = {
        "a": {"uses": "numbers", "with": {"count": 3}},
        "b": {"uses": "split", "from": "a"},
        "c": {"uses": "sink", "from": "b"},
    }
    fine(go(tmp_path, stages, {"split": split, "sink": sink}))
    assert numbers == [(0, 0), (1, 1), (2, 2)]


def test_a_failed_output_is_skipped_and_the_generator_goes_on(tmp_path: Path) -> None:
    seen: list[Any] = []

    @stage
    def split(item: int):
        yield (item, "a")
        yield Failed(ValueError("bad part"), record=f"part of {item}")
        yield (item, "b")

    stages = {
        "a": {"uses": "numbers", "with": {"count": 2}},
        "b": {"uses": "split", "from": "a", "on_error": {"skip": 2}},
        "c": {"uses": "sink", "from": "b"},
    }
    outcome = fine(go(tmp_path, stages, {"split": split, "sink": collector(seen)}))
    assert seen == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
    assert [line["item"] for line in outcome.lines("dead_letter.jsonl")] == ["part of 0", "part of 1"]


def test_a_flat_map_without_consumers_runs_to_its_end(tmp_path: Path) -> None:
    seen: list[int] = []

    @stage
    def split(item: int):
        seen.append(item)
        yield 1
        seen.append(-item)

    stages = {"a": {"uses": "numbers", "with": {"count": 3}}, "b": {"uses": "split", "from": "a"}}
    fine(go(tmp_path, stages, {"split": split}))
    assert seen == [0, 0, 1, -1, 2, -2]
