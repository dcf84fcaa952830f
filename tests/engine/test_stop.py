# ruff: noqa: TC003 - stages as an author writes them; annotations are read at run time
"""Drain, cancel and faults at any moment: what is in hand comes back, nothing is left (axiom 7.4)."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from flows import LIMIT, collector, fine, flow, go, heard, in_loop, turns_until

from pipeflow import Cancelled, Pipeline, StageError, Stuck, stage
from pipeflow.stage import Stage

CHAIN = {
    "a": {"uses": "endless"},
    "b": {"uses": "double", "from": "a"},
    "c": {"uses": "sink", "from": "b"},
}


def endless(closed: list[str], *, is_async: bool = False) -> Any:
    @stage
    def source():
        number = 0
        try:
            while True:
                yield number
                number += 1
        finally:
            closed.append(threading.current_thread().name)

    @stage
    async def asource():
        number = 0
        try:
            while True:
                yield number
                number += 1
        finally:
            closed.append(threading.current_thread().name)

    return asource if is_async else source


async def after(pipeline: Pipeline, seen: list[Any], count: int, then: Any) -> Any:
    """Let the run go until the sink has seen so many, then do it; what `run` returns."""
    running = asyncio.ensure_future(pipeline.run())
    await turns_until(pipeline, lambda: len(seen) >= count)
    then()
    return await running


@pytest.mark.axiom("7.4", "7.5")
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("count", [0, 1, 17])
def test_a_drain_ends_sources_where_they_stand_and_all_flows_out(
    tmp_path: Path, is_async: bool, count: int
) -> None:
    closed: list[str] = []
    seen: list[int] = []
    uses = {"endless": endless(closed, is_async=is_async), "sink": collector(seen)}

    async def act(pipeline: Pipeline) -> Any:
        return await after(pipeline, seen, count, pipeline.drain)

    outcome = fine(go(tmp_path, CHAIN, uses, act))
    assert outcome.value["status"] == "drained"
    assert seen == [2 * n for n in range(len(seen))]
    made = outcome.runner("a").counters.made
    assert len(seen) == made
    where = "MainThread" if is_async else "pipeflow a[0]"
    assert closed == ([where] if made else closed)


def test_leaving_the_context_drains(tmp_path: Path) -> None:
    seen: list[int] = []

    async def act(pipeline: Pipeline) -> Any:
        task = asyncio.ensure_future(pipeline.run())
        await turns_until(pipeline, lambda: len(seen) >= 3)
        task.cancel()

    outcome = fine(go(tmp_path, CHAIN, {"endless": endless([]), "sink": collector(seen)}, act))
    assert outcome.runner("c").closed


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("twice", [False, True])
def test_a_cancel_stops_and_closes_generators(tmp_path: Path, is_async: bool, twice: bool) -> None:
    closed: list[str] = []
    seen: list[int] = []

    async def act(pipeline: Pipeline) -> Any:
        def cancel() -> None:
            pipeline.cancel()
            if twice:
                pipeline.cancel()

        return await after(pipeline, seen, 5, cancel)

    uses = {"endless": endless(closed, is_async=is_async), "sink": collector(seen)}
    outcome = go(tmp_path, CHAIN, uses, act)
    assert isinstance(outcome.error, Cancelled)
    assert not getattr(outcome.error, "__notes__", [])
    assert len(closed) == 1


def test_a_fault_closes_the_generators_of_others(tmp_path: Path) -> None:
    closed: list[str] = []

    @stage
    def sink(item) -> None:
        if item > 4:
            raise ValueError("no")

    outcome = go(tmp_path, CHAIN, {"endless": endless(closed), "sink": sink})
    assert isinstance(outcome.error, StageError)
    assert closed == ["pipeflow a[0]"]


def test_a_generator_that_fails_as_it_is_closed_ends_a_drain_and_is_noted_in_a_cancel(tmp_path: Path) -> None:
    @stage
    def source():
        try:
            while True:
                yield 1
        finally:
            raise OSError("while closing")

    seen: list[int] = []

    async def drains(pipeline: Pipeline) -> Any:
        return await after(pipeline, seen, 2, pipeline.drain)

    async def cancels(pipeline: Pipeline) -> Any:
        return await after(pipeline, seen, 2, pipeline.cancel)

    uses = {"endless": source, "sink": collector(seen)}
    outcome = go(tmp_path / "1", CHAIN, uses, drains)
    assert "stage 'a'" in str(outcome.error)
    assert "while closing" in str(outcome.error)
    seen.clear()
    outcome = go(tmp_path / "2", CHAIN, uses, cancels)
    assert isinstance(outcome.error, Cancelled)
    assert "while closing" in "".join(outcome.error.__notes__)


@pytest.mark.axiom("7.4")
def test_queued_jobs_are_not_begun_after_a_cancel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three jobs are in the lane's queue, one has begun: that one is awaited, the others never run."""
    from pipeflow.launch import ThreadLauncher

    drop_queued = ThreadLauncher.drop_queued
    begun: list[int] = []
    entered, release = threading.Event(), threading.Event()

    @stage
    def work(item: int) -> int:
        begun.append(item)
        entered.set()
        assert release.wait(LIMIT)
        return item

    def dropped(launcher: ThreadLauncher) -> None:
        drop_queued(launcher)
        if launcher is lanes[0].launcher:
            release.set()

    lanes: list[Any] = []
    monkeypatch.setattr(ThreadLauncher, "drop_queued", dropped)

    async def act(pipeline: Pipeline) -> Any:
        running = asyncio.ensure_future(pipeline.run())
        lanes.extend(pipeline._assembly.runners["b"].lanes)
        await turns_until(pipeline, lambda: lanes[0].busy == 3)
        await heard(entered)
        pipeline.cancel()
        return await running

    stages = {"a": {"uses": "numbers"}, "b": {"uses": "work", "from": "a", "in_flight": 3}}
    outcome = go(tmp_path, stages, {"work": work}, act)
    assert isinstance(outcome.error, Cancelled)
    assert begun == [0]


def test_an_async_job_in_hand_is_awaited_then_cancelled(tmp_path: Path) -> None:
    """Within the grace period it may end by itself; then it is cancelled, before anything is closed."""
    order: list[str] = []
    begun = asyncio.Event()

    class Waits(Stage):
        async def run(self, item: int) -> int:
            order.append("begun")
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                order.append("cancelled")
            return item

        def close(self) -> None:
            order.append("closed")

    async def act(pipeline: Pipeline) -> Any:
        running = asyncio.ensure_future(pipeline.run())
        await begun.wait()
        pipeline.cancel()
        return await running

    stages = {"a": {"uses": "numbers"}, "b": {"uses": "waits", "from": "a"}}
    outcome = go(tmp_path, stages, {"waits": Waits}, act, run={"stop": {"grace": "1s"}})
    assert isinstance(outcome.error, Cancelled)
    assert order == ["begun", "cancelled", "closed"]


def test_an_async_job_that_ends_in_the_grace_period_is_not_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pipeflow.launch

    order: list[str] = []
    begun, go_on = asyncio.Event(), asyncio.Event()
    end_tasks = pipeflow.launch.end_tasks

    async def ending(tasks: Any, grace: float) -> Any:
        awaited = asyncio.ensure_future(end_tasks(tasks, grace))
        for _ in range(20):  # turns of the loop, in which a cancel that did not wait would strike
            await asyncio.sleep(0)
        go_on.set()
        return await awaited

    monkeypatch.setattr(pipeflow.launch, "end_tasks", ending)

    class Waits(Stage):
        async def run(self, item: int) -> int:
            order.append("begun")
            begun.set()
            await go_on.wait()
            order.append("ended")
            return item

    async def act(pipeline: Pipeline) -> Any:
        running = asyncio.ensure_future(pipeline.run())
        await begun.wait()
        pipeline.cancel()
        return await running

    stages = {"a": {"uses": "numbers"}, "b": {"uses": "waits", "from": "a"}}
    outcome = go(tmp_path, stages, {"waits": Waits}, act)
    assert isinstance(outcome.error, Cancelled)
    assert order == ["begun", "ended"]


@pytest.mark.axiom("7.4")
@pytest.mark.parametrize("where", ["run", "setup", "finish"])
def test_a_thread_that_does_not_come_back_is_named_with_its_stack(tmp_path: Path, where: str) -> None:
    release, entered = threading.Event(), threading.Event()

    def hangs(self, *given):
        entered.set()
        release.wait(20)

    def passes(self, *given):
        return 1

    body = {"run": lambda self, item: item, "setup": passes, "finish": passes} | {where: hangs}
    if where == "run":
        body["run"] = lambda self, item: hangs(self)
    Hangs = type("Hangs", (Stage,), body)

    async def act(pipeline: Pipeline) -> Any:
        running = asyncio.ensure_future(pipeline.run())
        await heard(entered)
        pipeline.cancel()
        return await running

    stages = {"a": {"uses": "numbers"}, "b": {"uses": "hangs", "from": "a"}}

    async def main() -> Any:
        options = {"run": {"stop": {"grace": "50ms"}}}
        task = asyncio.ensure_future(flow(tmp_path, stages, {"hangs": Hangs}, act, **options))
        try:
            if where == "setup":
                await heard(entered)
                task.cancel()
            return (await task).error
        except BaseException as error:
            return error
        finally:
            release.set()

    error = in_loop(main)
    if where == "setup":
        assert isinstance(error, Stuck)
    text = f"{error} {getattr(error, '__notes__', '')}"
    assert "pipeflow b[0]" in text
    assert "release.wait(20)" in text
    assert {"run": "item 0", "setup": "its setup", "finish": "its finish"}[where] in text


def test_no_file_is_left_open(tmp_path: Path) -> None:
    import psutil

    before = {file.path for file in psutil.Process().open_files()}
    fine(go(tmp_path / "1", CHAIN | {"a": {"uses": "numbers"}}, {"sink": collector([])}))
    go(tmp_path / "2", {"a": {"uses": "numbers"}, "b": {"uses": "b", "from": "a"}}, {"b": failing_stage()})
    assert {file.path for file in psutil.Process().open_files()} == before


def failing_stage() -> Any:
    @stage
    def work(item, ctx) -> None:
        ctx.log(n=item)
        if item == 2:
            raise ValueError("no")

    return work
