# ruff: noqa: TC003 - stages as an author writes them; annotations are read at run time
"""Many-to-one: buckets, the end, `linger`, and results that find their members (axiom 1.6)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from flows import collector, fine, go

from pipeflow import DROP, Dropped, Gather, Pipeline, Scatter, stage


class ByParity(Gather):
    def bucket(self, item):
        return item % 2

    def full(self, members):
        return len(members) == 3

    def run(self, items: list) -> list:
        return list(items)


def test_buckets_fill_apart_and_the_rest_leaves_at_the_end(tmp_path: Path) -> None:
    seen: list[Any] = []
    stages = {
        "a": {"uses": "numbers", "with": {"count": 11}},
        "b": {"uses": "by", "from": "a"},
        "c": {"uses": "sink", "from": "b"},
    }
    fine(go(tmp_path, stages, {"by": ByParity, "sink": collector(seen)}))
    assert seen == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9]]


def test_a_limit_gives_up_unfinished_batches(tmp_path: Path) -> None:
    seen: list[Any] = []
    stages = {
        "a": {"uses": "numbers", "with": {"count": 1000}},
        "b": {"uses": "by", "from": "a", "limit": 2},
        "c": {"uses": "sink", "from": "b"},
    }
    fine(go(tmp_path, stages, {"by": ByParity, "sink": collector(seen)}))
    assert seen == [[0, 2, 4], [1, 3, 5]]


class Doubled(Gather):
    """Gives each member its own result; drops what is divisible by five."""

    linger = 0.01

    def full(self, members):
        return len(members) == 4

    def run(self, items: list) -> Scatter[int]:
        return Scatter([DROP if item % 5 == 0 and item else item * 2 for item in items])


SERVICE = {
    "in": {"uses": "input"},
    "b": {"uses": "doubled", "from": "in", "queue": {"items": 2}},
    "out": {"uses": "output", "from": "b"},
}


@pytest.mark.axiom("1.6")
@pytest.mark.parametrize("uv", [False, True])
def test_a_scatter_gives_each_submit_its_own_result(tmp_path: Path, uv: bool) -> None:
    async def act(pipeline: Pipeline) -> Any:
        numbers = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
        return await asyncio.gather(*map(pipeline.submit, numbers), return_exceptions=True)

    outcome = fine(go(tmp_path, SERVICE, {"doubled": Doubled}, act, uv=uv))
    for number, result in enumerate(outcome.value, 1):
        if number % 5 == 0:
            assert isinstance(result, Dropped)
        else:
            assert result == 2 * number


@pytest.mark.axiom("1.6")
def test_linger_lets_a_single_item_through(tmp_path: Path) -> None:
    async def act(pipeline: Pipeline) -> Any:
        return await pipeline.submit(21)

    assert fine(go(tmp_path, SERVICE, {"doubled": Doubled}, act)).value == 42


def test_linger_of_a_rare_bucket_is_not_put_off_by_busy_ones(tmp_path: Path) -> None:
    """Full batches of one bucket leave all the time; the single item of another leaves in its own time."""

    class Keyed(Gather):
        linger = 0.05

        def bucket(self, item):
            return item > 0

        def full(self, members):
            return len(members) == 2

        def run(self, items: list) -> Scatter[int]:
            return Scatter(items)

    async def act(pipeline: Pipeline) -> Any:
        rare = asyncio.ensure_future(pipeline.submit(-1))
        while not rare.done():
            await asyncio.gather(*(pipeline.submit(1) for _ in range(2)))
        return await rare

    outcome = fine(go(tmp_path, SERVICE, {"doubled": Keyed}, act))
    assert outcome.value == -1


@pytest.mark.axiom("1.6")
def test_a_scatter_keeps_numbers_gaps_too(tmp_path: Path) -> None:
    """Behind a scatter each number is there once: its members', dropped ones, and the gaps between them."""
    numbers: list[tuple[int, int]] = []

    @stage
    def evens(item: int) -> int:
        return item if item % 2 == 0 else DROP  # type: ignore[return-value]

    @stage
    def sink(item, ctx) -> None:
        numbers.append((ctx.sequence, item))

    stages = {
        "a": {"uses": "numbers", "with": {"count": 15}},
        "b": {"uses": "evens", "from": "a"},
        "c": {"uses": "doubled", "from": "b"},
        "d": {"uses": "sink", "from": "c"},
    }
    outcome = fine(go(tmp_path, stages, {"evens": evens, "doubled": Doubled, "sink": sink}))
    assert numbers == [(n, 2 * n) for n in range(0, 15, 2) if n != 10]
    assert outcome.runner("d").counters.gaps == 15 - len(numbers)


def test_a_skipped_batch_of_a_scatter_leaves_a_gap_for_each_member(tmp_path: Path) -> None:
    numbers: list[int] = []

    class Fails(Doubled):
        linger = None

        def run(self, items: list) -> Scatter[int]:
            if 2 in items:
                raise ValueError("no")
            return Scatter(items)

    @stage
    def sink(item, ctx) -> None:
        numbers.append(ctx.sequence)

    stages = {
        "a": {"uses": "numbers", "with": {"count": 10}},
        "b": {"uses": "fails", "from": "a", "on_error": {"skip": 1}},
        "c": {"uses": "sink", "from": "b"},
    }
    outcome = fine(go(tmp_path, stages, {"fails": Fails, "sink": sink}))
    assert numbers == [4, 5, 6, 7, 8, 9]
    assert outcome.runner("c").counters.gaps == 4


@pytest.mark.parametrize(("result", "said"), [(7, "must return a Scatter"), (Scatter([1]), "1 values for 4")])
def test_a_scatter_that_does_not_fit_is_an_error(tmp_path: Path, result: Any, said: str) -> None:
    class Wrong(Doubled):
        def run(self, items: list) -> Scatter[int]:
            return result

    stages = {"a": {"uses": "numbers"}, "b": {"uses": "wrong", "from": "a"}}
    outcome = go(tmp_path, stages, {"wrong": Wrong})
    assert "stage 'b'" in str(outcome.error)
    assert said in str(outcome.error)


@pytest.mark.parametrize("hook", ["bucket", "full"])
def test_a_fault_in_a_hook_names_the_stage(tmp_path: Path, hook: str) -> None:
    def fails(self, given):
        raise KeyError("size")

    Broken = type("Broken", (ByParity,), {hook: fails})
    stages = {"a": {"uses": "numbers"}, "b": {"uses": "broken", "from": "a"}}
    outcome = go(tmp_path, stages, {"broken": Broken})
    assert str(outcome.error) == f"stage 'b', item 0: in {hook}: KeyError: 'size'"
