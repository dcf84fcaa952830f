# ruff: noqa: TC003 - stages as an author writes them; annotations are read at run time
"""Credits bound what is alive, in items and bytes, and never stop a graph (axioms 2.1 to 2.4)."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from flows import collector, fine, go, stands_still, turns_until

from pipeflow import Gather, Pipeline, StallError, stage


@pytest.mark.axiom("2.2")
@pytest.mark.parametrize("items", [1, 2, 5])
def test_no_more_items_are_alive_than_credits(tmp_path: Path, items: int) -> None:
    """Alive: in production, queued, or at work at the consumer. The producer stands still at the bound."""
    stages = {
        "a": {"uses": "anumbers", "with": {"count": 30}},
        "b": {"uses": "holds", "from": "a", "queue": {"items": items}},
    }
    go_on = asyncio.Event()

    @stage
    async def holds(item: int) -> None:
        await go_on.wait()

    async def act(pipeline: Pipeline) -> Any:
        running = asyncio.ensure_future(pipeline.run())
        await stands_still(pipeline, "b")
        assert pipeline._assembly.runners["a"].counters.made == items
        go_on.set()
        return await running

    outcome = fine(go(tmp_path, stages, {"holds": holds}, act))
    assert outcome.runner("b").inputs.edges[0].peak == items


@pytest.mark.axiom("2.1")
def test_a_start_takes_all_credits_or_none(tmp_path: Path) -> None:
    """A fork with one full arm takes nothing on the other: the other's queue stays empty."""
    release = threading.Event()
    first: list[int] = []
    second: list[int] = []

    @stage
    def blocked(item: int) -> None:
        if item == 0:
            assert release.wait(10)
        second.append(item)

    async def act(pipeline: Pipeline) -> Any:
        running = asyncio.ensure_future(pipeline.run())
        free, full = pipeline._assembly.runners["a"].outs
        await stands_still(pipeline, "c")
        assert first == [0]
        assert (free.credits, full.credits) == (0, 1)
        release.set()
        return await running

    @stage
    async def sees(item: int) -> None:
        first.append(item)

    stages = {
        "a": {"uses": "anumbers", "with": {"count": 5}},
        "b": {"uses": "sees", "from": "a", "queue": {"items": 4}},
        "c": {"uses": "blocked", "from": "a", "queue": {"items": 1}},
    }
    fine(go(tmp_path, stages, {"sees": sees, "blocked": blocked}, act))
    assert first == second == list(range(5))


def tensors(sizes: list[int]) -> Any:
    @stage
    def make():
        for size in sizes:
            yield torch.zeros(size, dtype=torch.uint8)

    return make


@pytest.mark.axiom("2.4")
def test_an_item_of_three_times_the_budget_passes(tmp_path: Path) -> None:
    seen: list[int] = []

    @stage
    def sink(item) -> None:
        seen.append(item.numel())

    stages = {
        "a": {"uses": "make"},
        "b": {"uses": "sink", "from": "a", "queue": {"items": 8, "bytes": 100}},
    }
    fine(go(tmp_path, stages, {"make": tensors([300, 10, 300, 20]), "sink": sink}))
    assert seen == [300, 10, 300, 20]


@pytest.mark.axiom("2.3")
def test_a_start_reserves_the_largest_output_seen(tmp_path: Path) -> None:
    """Budget 100, items of 40: two are alive at a time, though eight credits are free."""
    release = threading.Event()

    @stage
    def sink(item) -> None:
        assert release.wait(10)

    async def act(pipeline: Pipeline) -> Any:
        running = asyncio.ensure_future(pipeline.run())
        edge = pipeline._assembly.runners["a"].outs[0]
        await stands_still(pipeline, "b")
        assert edge.credits == 2
        assert edge.bytes_live == 80
        release.set()
        return await running

    stages = {
        "a": {"uses": "make"},
        "b": {"uses": "sink", "from": "a", "queue": {"items": 8, "bytes": 100}},
    }
    outcome = fine(go(tmp_path, stages, {"make": tensors([40] * 6), "sink": sink}, act))
    assert outcome.runner("b").inputs.edges[0].peak == 2


@pytest.mark.axiom("2.3")
def test_until_a_size_is_known_one_item_is_in_production(tmp_path: Path) -> None:
    """Four lanes could start four items at once; none knows its size."""
    entered = threading.Semaphore(0)
    release = threading.Event()

    @stage
    def grow(item: int):
        entered.release()
        assert release.wait(10)
        return torch.zeros(10, dtype=torch.uint8)

    async def act(pipeline: Pipeline) -> Any:
        running = asyncio.ensure_future(pipeline.run())
        await stands_still(pipeline, "b")
        assert [job.launching for job in pipeline._assembly.runners["b"].hand] == [True]
        assert await asyncio.to_thread(entered.acquire, timeout=10)
        assert not entered.acquire(blocking=False)
        release.set()
        return await running

    stages = {
        "a": {"uses": "numbers"},
        "b": {"uses": "grow", "from": "a", "replicas": 4},
        "c": {"uses": "sink", "from": "b", "queue": {"items": 8, "bytes": 1000}},
    }
    fine(go(tmp_path, stages, {"grow": grow, "sink": collector([])}, act))


@pytest.mark.axiom("2.3")
def test_declared_bytes_let_several_start_at_once(tmp_path: Path) -> None:
    together = threading.Barrier(2, timeout=10)

    @stage
    def grow(item: int):
        if item < 2:
            together.wait()
        return torch.zeros(10, dtype=torch.uint8)

    stages = {
        "a": {"uses": "numbers", "with": {"count": 2}},
        "b": {"uses": "grow", "from": "a", "replicas": 2, "bytes": 10},
        "c": {"uses": "sink", "from": "b", "queue": {"items": 8, "bytes": 100}},
    }
    fine(go(tmp_path, stages, {"grow": grow, "sink": collector([])}))


@pytest.mark.axiom("2.3")
def test_a_storage_counts_once(tmp_path: Path) -> None:
    """Ten views of one storage are on the edge, all alive: its bytes count once."""
    release, live = threading.Event(), []
    base = torch.zeros(60, dtype=torch.uint8)

    @stage
    def views():
        for number in range(5):
            yield base[number:]

    @stage
    def sink(item) -> None:
        assert release.wait(10)

    async def act(pipeline: Pipeline) -> Any:
        running = asyncio.ensure_future(pipeline.run())
        edge = pipeline._assembly.runners["a"].outs[0]

        def all_out() -> bool:
            assert edge.bytes_live <= 60
            return edge.credits == 5

        await turns_until(pipeline, all_out)
        live.append(edge.bytes_live)
        release.set()
        return await running

    stages = {
        "a": {"uses": "views"},
        "b": {"uses": "sink", "from": "a", "queue": {"items": 5, "bytes": 120}},
    }
    fine(go(tmp_path, stages, {"views": views, "sink": sink}, act))
    assert live == [60]


class Many(Gather):
    def full(self, members):
        return len(members) == 32

    def run(self, items: list) -> int:
        return len(items)


@pytest.mark.axiom("2.4")
def test_a_gather_larger_than_the_queue_fills(tmp_path: Path) -> None:
    seen: list[int] = []
    stages = {
        "a": {"uses": "numbers", "with": {"count": 70}},
        "b": {"uses": "many", "from": "a", "queue": {"items": 4}},
        "c": {"uses": "sink", "from": "b"},
    }
    fine(go(tmp_path, stages, {"many": Many, "sink": collector(seen)}))
    assert seen == [32, 32, 6]


KEPT: list[tuple[int, int]] = [(0, 0), (0, 1), (0, 2), *((n, k) for n in (1, 2, 3) for k in (0, 1))]


def kept_behind(tmp_path: Path) -> Any:
    """Three lanes of a flat-map with two credits. Item 1's output waits in hand for item 0, with one; item 2
    takes the other as soon as the sink gives it back. So item 0 finds both behind itself."""
    seen: list[tuple[int, int]] = []
    younger_made = threading.Event()

    @stage
    def two(item: int):
        if item == 0:
            assert younger_made.wait(10)
        elif item == 1:
            younger_made.set()
        yield (item, 0)
        yield (item, 1)
        if item == 0:
            yield (item, 2)

    @stage
    async def source():
        for number in range(4):
            yield number

    stages = {
        "a": {"uses": "source"},
        "b": {"uses": "two", "from": "a", "replicas": 3},
        "c": {"uses": "sink", "from": "b", "queue": {"items": 2}},
    }
    outcome = go(tmp_path, stages, {"two": two, "source": source, "sink": collector(seen)})
    return outcome, seen


@pytest.mark.axiom("2.4")
def test_the_oldest_job_may_pass_what_its_own_stage_keeps_behind_it(tmp_path: Path) -> None:
    outcome, seen = kept_behind(tmp_path)
    fine(outcome)
    assert seen == KEPT


@pytest.mark.axiom("2.4")
def test_without_the_rule_that_graph_stalls_and_the_error_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeflow.job.Job.kept", lambda job, edge: 0)
    outcome, _ = kept_behind(tmp_path)
    assert isinstance(outcome.error, StallError)
    assert "b: waits for a credit on b -> c (2 of 2 out, 0 queued" in str(outcome.error)
