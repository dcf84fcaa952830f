# ruff: noqa: TC003 - annotations are read at run time
"""Helpers of the engine's tests: run a pipeline of small stages, with a time limit, and see what is left.

Stages of a test say what they wait for by events that the test holds; nothing sleeps and hopes. What the
engine itself does is awaited by its turns: `turns_until`, `stands_still`, `until_it_ends`.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import uvloop

import pipeflow
from pipeflow import Pipeline, Registry, stage

LIMIT = 20.0
"""Seconds after which a run is taken to hang."""

Act = Callable[[Pipeline], Awaitable[Any]]


@stage
def numbers(*, count: int = 10):
    """0, 1, 2 .."""
    yield from range(count)


@stage
async def anumbers(*, count: int = 10):
    for number in range(count):
        yield number


@stage
def double(item: int) -> int:
    return item * 2


def collector(seen: list[Any]) -> Any:
    """A sink that appends what it gets."""

    @stage
    def sink(item):
        seen.append(item)

    return sink


async def heard(event: threading.Event) -> None:
    """Await what a stage sets on its own thread."""
    assert await asyncio.to_thread(event.wait, LIMIT), "a stage never came to it"


async def turns_until(pipeline: Pipeline, happened: Callable[[], bool]) -> None:
    """Look after each turn of the engine, until something that its turns bring about is so."""
    engine = pipeline._engine
    while not happened():
        assert not engine.ended.is_set(), f"the run ended before: {engine.error!r}"
        await engine.next_progress()


async def stands_still(pipeline: Pipeline, name: str) -> None:
    """Until launches of one stage are all that is in hand, and no stage has anything left to do.

    Then nothing can move before one of these comes back: what has not happened by now will not.
    """
    engine, runner = pipeline._engine, pipeline._assembly.runners[name]

    def only_it_is_at_work() -> bool:
        at_work = sum(job.launching for job in runner.hand)
        return at_work > 0 and engine.in_hand == at_work and not engine._ready

    await turns_until(pipeline, only_it_is_at_work)


def until_it_ends(release: threading.Event) -> Act:
    """Run until the engine ends it, whatever for; only then a stage that was held may come back."""

    async def act(pipeline: Pipeline) -> Any:
        running = asyncio.ensure_future(pipeline.run())
        await pipeline._engine.ended.wait()
        release.set()
        return await running

    return act


class Outcome:
    """What came of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.value: Any = None
        """What `act` returned; the summary where a test gave none."""
        self.error: BaseException | None = None
        self.pipeline: Pipeline | None = None

    @property
    def engine(self) -> Any:
        assert self.pipeline is not None
        return self.pipeline._engine

    def runner(self, name: str) -> Any:
        assert self.pipeline is not None
        return self.pipeline._assembly.runners[name]

    def edges(self) -> list[Any]:
        return [edge for runner in self.engine.nodes for edge in runner.outs]

    def lines(self, name: str) -> list[dict[str, Any]]:
        """A file of JSON lines of the run folder."""
        path = self.folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def document(stages: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"pipeflow": 1, "name": "test", "stages": dict(stages), **more}


def registry(uses: Mapping[str, Any]) -> Registry:
    found = Registry()
    for name, cls in {"numbers": numbers, "anumbers": anumbers, "double": double, **uses}.items():
        found.add(name, cls)
    return found


async def _run(pipeline: Pipeline) -> Any:
    return await pipeline.run()


async def flow(
    folder: Path, stages: Mapping[str, Any], uses: Mapping[str, Any], act: Act = _run, **more: Any
) -> Outcome:
    """Open the pipeline in the running loop and let `act` do what the test is about."""
    outcome = Outcome(folder)
    try:
        async with pipeflow.open(
            document(stages, **more), registry=registry(uses), run_dir=folder
        ) as pipeline:
            outcome.pipeline = pipeline
            outcome.value = await act(pipeline)
    except Exception as error:
        outcome.error = error
    return outcome


def in_loop(main: Callable[[], Awaitable[Any]], *, uv: bool = False, limit: float = LIMIT) -> Any:
    """Run a coroutine in a loop of its own, within the limit, and check that it leaves nothing behind."""
    before = set(threading.enumerate())

    async def limited() -> Any:
        async with asyncio.timeout(limit):
            value = await main()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks left: {left}"
        return value

    with asyncio.Runner(loop_factory=uvloop.new_event_loop if uv else None) as runner:
        value = runner.run(limited())
    threads_end(before)
    return value


def threads_end(before: set[threading.Thread]) -> None:
    """A helper's last step is to post its result, so it may end a moment after it was heard."""
    deadline = time.monotonic() + 5
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("pipeflow"):
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), f"thread left: {thread.name}"


def go(
    folder: Path,
    stages: Mapping[str, Any],
    uses: Mapping[str, Any] | None = None,
    act: Act = _run,
    *,
    uv: bool = False,
    limit: float = LIMIT,
    **more: Any,
) -> Outcome:
    """Run one pipeline from start to end. An error is in the outcome; a run that succeeded left no credit."""
    outcome = in_loop(lambda: flow(folder, stages, uses or {}, act, **more), uv=uv, limit=limit)
    if outcome.error is None:
        settled(outcome)
    return outcome


def settled(outcome: Outcome) -> None:
    """After a run that went well: no credit is out, nothing queued, no lane busy, no lease or pin held."""
    for edge in outcome.edges():
        state = (edge.credits, edge.production, edge.gathered, edge.queued, edge.bytes_live)
        assert state == (0, 0, 0, 0, 0), f"{edge}: {state}"
        assert edge.empty
        assert not edge.storages
    for runner in outcome.engine.nodes:
        assert runner.closed, runner
        assert runner.pins == 0, runner
        assert not runner.hand
        for lane in runner.lanes:
            assert lane.busy == 0
            for instance in (*lane.leases.reads.values(), *lane.leases.writes.values()):
                assert (instance.readers, instance.writing, instance.queue) == (0, False, {})
    assert outcome.engine.in_hand == 0
    assert not outcome.engine.tickets


def fine(outcome: Outcome) -> Outcome:
    """The run must have gone well."""
    if outcome.error is not None:
        raise outcome.error
    return outcome
