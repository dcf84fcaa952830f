"""How an async stage launches on its device: on its lane's thread and stream, past the gate (axiom 5.3)."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from pipeflow.faults import device_failed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pipeflow.device.base import Mark
    from pipeflow.engine import Engine
    from pipeflow.gate import Gate
    from pipeflow.lane import Lane
    from pipeflow.launch import Launcher

__all__ = ["item_of_task", "make_enqueue"]

item_of_task: ContextVar[int | None] = ContextVar("item", default=None)
"""Of the async job that runs in this task, or in the task that started it."""


def make_enqueue(
    lane: Lane, engine: Engine, launcher: Launcher
) -> Callable[[Callable[[], Any]], Awaitable[Any]]:
    """How an async stage launches on its device: on a thread and the lane's stream, past the gate."""

    async def enqueue(function: Callable[[], Any]) -> Any:
        gate = lane.gate
        if gate is not None:
            if not gate.open:
                await _pass(lane, gate, engine)
            gate.enter(lane, None)
        operations = lane.operations
        number = operations.submits_hook(lane, "enqueue") if operations is not None else 0
        item = item_of_task.get()
        answer: asyncio.Future[Any] = engine.loop.create_future()

        def run() -> tuple[Any, BaseException | None, Mark, bool]:
            value: Any = None
            error: BaseException | None = None
            with lane.device.entered(lane.stream):
                if lane.trace is not None:
                    lane.trace.begin(item)
                if operations is not None:
                    operations.add("enter", number)
                    operations.add("begin", number)
                try:
                    value = function()
                except BaseException as raised:  # it may have enqueued work before
                    error = raised
                try:
                    if lane.trace is not None:
                        lane.trace.end()
                    mark = lane.stream.record()
                    if lane.debug_sync:
                        mark.wait()
                    if operations is not None:
                        operations.add("end", number, error is not None)
                        operations.recorded(number, mark)
                    return value, error, mark, mark.passed()
                finally:
                    value = error = None  # no cycle, as in `launch`

        def awaited(_: Any, fault: BaseException | None) -> None:
            if operations is not None:
                operations.noticed(number, fault)
            reached(None, fault)

        def reached(_: Any, fault: BaseException | None) -> None:
            if operations is not None and fault is None:
                operations.add("reached", number)
            if fault is not None:
                device_failed(engine, lane.device, fault, f"what stage {lane.name!r} enqueued")
            elif gate is not None:
                gate.leave(lane, None)

        def returned(
            launched: tuple[Any, BaseException | None, Mark, bool] | None, fault: BaseException | None
        ) -> None:
            if launched is None:
                if operations is not None:
                    operations.came_back(number, None)
                reached(None, fault)
                answer.cancel()
                return
            value, error, mark, passed = launched
            if operations is not None:
                operations.add("returned", number, passed)
            if passed:
                reached(None, None)
            else:
                launcher.watch("what it enqueued", mark, awaited)
            if answer.done():
                return
            if error is None:
                answer.set_result(value)
            else:
                answer.set_exception(error)

        launcher.submit("what it enqueues", run, returned)
        return await answer

    return enqueue


async def _pass(lane: Lane, gate: Gate, engine: Engine) -> None:
    """Wait at a closed gate. The job's own timeout stands still meanwhile (axiom 5.3)."""
    deadline = lane.deadlines.get(asyncio.current_task())
    left = None
    if deadline is not None and (when := deadline.when()) is not None:
        left = when - engine.loop.time()
        deadline.reschedule(None)
    while not gate.open:
        await engine.next_progress()
    if deadline is not None and left is not None:
        deadline.reschedule(engine.loop.time() + left)
