"""The end of a run: launches in hand come back, generators are closed, tasks and threads end (axiom 7.4).

The order matters. Tasks first, since they use their lanes' threads; then the threads of jobs, since jobs
bring marks; then the threads of marks. Only after that may stages and resources be closed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import anyio

from pipeflow.error_text import error_text
from pipeflow.errors import Stuck
from pipeflow.launch import TaskLauncher, stuck_task
from pipeflow.tasks import end_tasks

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from pipeflow.engine import Engine
    from pipeflow.job import Job
    from pipeflow.lane import Lane
    from pipeflow.launch import StuckThread

__all__ = ["settle"]


async def settle(engine: Engine, grace: float) -> None:
    """Wait at most `grace` seconds for what is in hand. Raises Stuck, naming what does not come back."""
    machine = engine.machine
    deadline = engine.now() + grace
    for launcher in engine.launchers:
        launcher.drop_queued()
    await _end_tasks(engine, deadline)
    left = await _close_generators(engine, deadline)
    for launcher in engine.launchers:
        launcher.stop_jobs()
    await machine.join(engine.launchers, deadline)
    for launcher in engine.launchers:
        launcher.stop_marks()
    await machine.join(engine.launchers, deadline)
    lost = await machine.end_calls(deadline)
    left += engine.stuck_threads() + lost
    if left:
        stacks = "\n".join(f"{t.name}, in {t.doing}:\n{t.stack}" for t in left)
        raise Stuck(f"{_counted(left)} did not come back within {grace:g} s\n{stacks}")


def _counted(left: list[StuckThread]) -> str:
    tasks = sum(found.kind == "task" for found in left)
    counts = {"threads": len(left) - tasks, "tasks": tasks}
    return " and ".join(f"{count} {what}" for what, count in counts.items() if count)


async def to_the_end(closing: Coroutine[Any, Any, None]) -> asyncio.CancelledError | None:
    """Await it whatever cancels arrive meanwhile; the last one is returned, for the caller to raise.

    A shielded scope holds off the cancels of anyio only, not `Task.cancel`.
    """
    task = asyncio.ensure_future(closing)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:
            break  # its own: raised below
    task.result()
    return cancelled


def _left(engine: Engine, deadline: float) -> float:
    return max(0.0, deadline - engine.now())


async def _end_tasks(engine: Engine, deadline: float) -> None:
    tasks = [launcher for launcher in engine.launchers if isinstance(launcher, TaskLauncher)]
    if not tasks:
        return
    for launcher in tasks:
        launcher.stop_jobs()
    async with anyio.create_task_group() as group:
        for launcher in tasks:
            group.start_soon(launcher.ended, _left(engine, deadline))


async def _close_generators(engine: Engine, deadline: float) -> list[StuckThread]:
    """A cancelled run leaves generators half-way: their `finally` runs where their code ran, not whenever
    memory is collected. Those that do not end are returned."""
    left: list[StuckThread] = []
    for node in engine.nodes:
        for job in node.hand:
            if job.generator is not None and job.lane is not None and job.lane.device.lost is None:
                left += await _close(engine, job.lane, job, deadline)
    return left


async def _close(engine: Engine, lane: Lane, job: Job, deadline: float) -> list[StuckThread]:
    close = lane.close_generator(job)
    assert close is not None

    def closed(_: Any, error: BaseException | None) -> None:
        if error is not None:
            engine.note("close failed", lane.name, error=error)
            if engine.error is not None:
                engine.error.add_note(
                    f"then, while the generator of {lane.name!r} was closed: {error_text(error)}"
                )

    if not lane.is_async:
        lane.launcher.submit("its end", close, closed)
        return []

    async def end() -> None:
        try:
            await close()
        except Exception as error:
            closed(None, error)

    # A task of its own: a `finally` that swallows its cancel must not hold the end of the run.
    task = asyncio.create_task(end(), name=f"{lane.name}[{lane.index}]")
    return [
        stuck_task(task, "the end of its generator")
        for task in await end_tasks([task], _left(engine, deadline))
    ]
