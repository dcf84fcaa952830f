# ruff: noqa: TC003 - stages as an author writes them; annotations are read at run time
"""Inside somebody else's program: their loop, their task group, their cancels."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from flows import collector, document, fine, flow, go, in_loop, registry, settled

import pipeflow
from pipeflow import DROP, Dropped, PipeflowError, Pipeline, StageError, stage

SERVICE = {
    "in": {"uses": "input"},
    "b": {"uses": "work", "from": "in"},
    "out": {"uses": "output", "from": "b"},
}


@stage
def work(item: int) -> int:
    if item == 13:
        raise ValueError("bad luck")
    return DROP if item == 7 else item + 100  # type: ignore[return-value]


@pytest.mark.parametrize("uv", [False, True])
def test_submits_find_their_results(tmp_path: Path, uv: bool) -> None:
    async def act(pipeline: Pipeline) -> Any:
        return await asyncio.gather(*map(pipeline.submit, range(10)), return_exceptions=True)

    outcome = fine(go(tmp_path, SERVICE, {"work": work}, act, uv=uv))
    assert isinstance(outcome.value.pop(7), Dropped)
    assert outcome.value == [100 + n for n in range(10) if n != 7]


def test_a_fault_reaches_every_submit_that_waits_and_every_later_one(tmp_path: Path) -> None:
    async def act(pipeline: Pipeline) -> Any:
        results = await asyncio.gather(*map(pipeline.submit, (13, 14, 15)), return_exceptions=True)
        assert isinstance(results[0], StageError)
        assert all(isinstance(result, (StageError, int)) for result in results)
        await pipeline.submit(1)

    outcome = go(tmp_path, SERVICE, {"work": work}, act)
    assert "has stopped and takes no more items: stage " in str(outcome.error)
    assert isinstance(outcome.error.__cause__, StageError)


def test_a_submit_that_is_cancelled_hurts_nobody(tmp_path: Path) -> None:
    async def act(pipeline: Pipeline) -> Any:
        given_up = asyncio.ensure_future(pipeline.submit(1))
        await asyncio.sleep(0)
        given_up.cancel()
        return await pipeline.submit(2)

    assert fine(go(tmp_path, SERVICE, {"work": work}, act)).value == 102


def test_after_a_drain_nothing_is_taken(tmp_path: Path) -> None:
    async def act(pipeline: Pipeline) -> None:
        pending = [asyncio.ensure_future(pipeline.submit(n)) for n in range(6)]
        await asyncio.sleep(0)
        pipeline.drain()
        with pytest.raises(PipeflowError, match="takes no more items"):
            await pipeline.submit(1)
        assert await asyncio.gather(*pending) == [100 + n for n in range(6)]

    fine(go(tmp_path, SERVICE, {"work": work}, act))


def test_a_stream_goes_through_in_order_and_the_engine_needs_no_aiostream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def numbers():
        for number in (1, 2, 3):
            yield number

    async def act(pipeline: Pipeline) -> Any:
        return [result async for result in pipeline.stream(numbers(), in_flight=2)]

    assert fine(go(tmp_path / "1", SERVICE, {"work": work}, act)).value == [101, 102, 103]
    monkeypatch.setitem(sys.modules, "aiostream", None)
    fine(go(tmp_path / "2", SERVICE, {"work": work}, lambda pipeline: pipeline.submit(1)))


@pytest.mark.parametrize("uv", [False, True])
def test_two_pipelines_in_one_loop_inside_a_task_group(tmp_path: Path, uv: bool) -> None:
    seen: list[list[int]] = [[], []]
    stages = {
        "a": {"uses": "numbers", "with": {"count": 30}},
        "b": {"uses": "double", "from": "a"},
        "c": {"uses": "sink", "from": "b"},
    }

    async def main() -> list[Any]:
        outcomes: list[Any] = []

        async def one(index: int) -> None:
            outcomes.append(await flow(tmp_path / str(index), stages, {"sink": collector(seen[index])}))

        async with anyio.create_task_group() as group:
            group.start_soon(one, 0)
            group.start_soon(one, 1)
        return outcomes

    for outcome in in_loop(main, uv=uv):
        fine(outcome)
        settled(outcome)
    assert seen == [[2 * n for n in range(30)]] * 2


def test_the_callers_own_error_comes_out_as_it_is(tmp_path: Path) -> None:
    async def act(pipeline: Pipeline) -> None:
        asyncio.ensure_future(pipeline.run()).add_done_callback(lambda task: task.exception())
        raise LookupError("the caller's")

    outcome = go(tmp_path, {"a": {"uses": "numbers", "with": {"count": 10**6}}}, {}, act)
    assert type(outcome.error) is LookupError


MIXED = {
    "a": {"uses": "anumbers", "with": {"count": 8}},
    "b": {"uses": "work", "from": "a", "replicas": 2},
    "t": {"uses": "double", "from": "b"},
    "f": {"uses": "split", "from": "t", "launcher": "thread"},
    "e": {"uses": "awork", "from": "f", "in_flight": 2},
    "c": {"uses": "sink", "from": "e"},
}


@stage
def split(item: int):
    yield item
    yield item


@stage
async def awork(item: int) -> int:
    await asyncio.sleep(0)
    return item


async def steps(count: int) -> None:
    """Let the loop go round so many times."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.axiom("7.5")
@pytest.mark.parametrize("uv", [False, True])
@pytest.mark.parametrize("how", ["cancel", "task", "scope", "drain", "twice"])
@pytest.mark.parametrize("phase", ["load", "run"])
def test_it_may_be_ended_at_any_moment(tmp_path: Path, phase: str, how: str, uv: bool) -> None:
    """At the n-th step of the loop, counted from the start of the load or of the run: all ends, nothing is
    left, a drain loses nothing. `in_loop` looks for tasks and threads after each."""
    moments: list[int | None] = [*range(8), *range(8, 120, 9)]
    for count in [*moments, None]:
        seen: list[int] = []
        uses = {"work": work, "split": split, "awork": awork, "sink": collector(seen)}
        folder = tmp_path / f"{how}{count}"
        in_loop(partial(end_at, folder, uses, seen, phase, how, count), uv=uv)


async def end_at(
    folder: Path, uses: dict[str, Any], seen: list[int], phase: str, how: str, count: int | None
) -> None:
    """End a run in one way at one moment (None: when its last stage has ended, so while it is closed)."""
    found: list[Pipeline] = []
    begun = asyncio.Event()

    async def moment() -> None:
        if phase == "run":
            await begun.wait()
        if count is None:
            await begun.wait()
            await found[0]._engine.ended.wait()
        await steps(count or 0)

    async def run() -> None:
        options: Any = {"registry": registry(uses), "run_dir": folder}
        async with pipeflow.open(document(MIXED), opening=found.append, **options) as pipeline:
            begun.set()
            await pipeline.run()

    if how == "scope":
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(run)
                await moment()
                scope.cancel()
        return
    task = asyncio.ensure_future(run())
    await moment()
    if how == "task":
        task.cancel()
    elif found:
        found[0].drain() if how == "drain" else found[0].cancel()
        if how == "twice":
            await asyncio.sleep(0)
            found[0].cancel()
    try:
        await task
    except (asyncio.CancelledError, pipeflow.Cancelled):
        assert how != "drain"
    if how == "drain":
        assert seen == sorted(seen)
        assert len(seen) == 2 * found[0]._assembly.runners["t"].counters.made if found else True


@stage
def twice(item: int):
    for copy in range(item % 3):
        yield item * 10 + copy


@stage(ports=("a", "b"))
def ports(item: int):
    from pipeflow import Port

    return Port("a" if item % 2 else "b", item)


@pytest.mark.parametrize(
    ("stages", "arrive"),
    [
        ({"o": {"uses": "output", "from": "i", "every": 2}}, {1: 1, 3: 3, 5: 5}),
        (
            {"m": {"uses": "work", "from": "i", "every": 3}, "o": {"uses": "output", "from": "m"}},
            {2: 102, 5: 105},
        ),
        ({"p": {"uses": "ports", "from": "i"}, "o": {"uses": "output", "from": "p.a"}}, {1: 1, 3: 3, 5: 5}),
        (
            {"m": {"uses": "work", "from": "i"}, "o": {"uses": "output", "from": "m"}},
            {n: 100 + n for n in range(6)},
        ),
    ],
    ids=["every", "every before", "port", "all"],
)
def test_a_submit_that_cannot_come_back_is_told_so(
    tmp_path: Path, stages: Any, arrive: dict[int, int]
) -> None:
    async def act(pipeline: Pipeline) -> Any:
        results = await asyncio.gather(*map(pipeline.submit, range(6)), return_exceptions=True)
        assert not pipeline._engine.tickets
        return results

    stages = {"i": {"uses": "input"}, **stages}
    results = fine(go(tmp_path, stages, {"work": work, "ports": ports}, act)).value
    assert {n: result for n, result in enumerate(results) if not isinstance(result, Dropped)} == arrive


def test_an_output_that_no_input_leads_to_is_refused(tmp_path: Path) -> None:
    async def act(pipeline: Pipeline) -> Any:
        await pipeline.submit(1)

    stages = {
        "i": {"uses": "input"},
        "a": {"uses": "work", "from": "i"},
        "n": {"uses": "numbers"},
        "o": {"uses": "output", "from": "n"},
    }
    outcome = go(tmp_path, stages, {"work": work}, act)
    assert "nothing leads from 'i' to 'o'" in str(outcome.error)


def test_one_to_many_on_the_way_to_the_output_is_refused(tmp_path: Path) -> None:
    """Which of the many would be the result?"""

    async def act(pipeline: Pipeline) -> Any:
        await pipeline.submit(1)

    stages = {
        "i": {"uses": "input"},
        "m": {"uses": "twice", "from": "i"},
        "o": {"uses": "output", "from": "m"},
    }
    outcome = go(tmp_path, stages, {"twice": twice}, act)
    assert "makes several items of one" in str(outcome.error)
