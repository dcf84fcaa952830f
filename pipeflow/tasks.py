"""Tasks that run stage code: how they are ended, and where they wait."""

from __future__ import annotations

import asyncio
import gc
import traceback
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import FrameType

__all__ = ["end_tasks", "give_up", "stack_of"]

_LAST = 0.1
"""Seconds, at least, in which a cancelled task may clean up."""


async def end_tasks(tasks: Collection[asyncio.Task[Any]], grace: float) -> set[asyncio.Task[Any]]:
    """Let them end by themselves for `grace` seconds, cancel the rest, and wait as long again. Those that
    swallowed the cancel are given up and returned."""
    pending = await _wait(tasks, grace)
    for task in pending:
        task.cancel()
    pending = await _wait(pending, max(grace, _LAST))
    for task in pending:
        give_up(task)
    return pending


async def _wait(tasks: Collection[asyncio.Task[Any]], seconds: float) -> set[asyncio.Task[Any]]:
    if not tasks:
        return set()
    _, pending = await asyncio.wait(list(tasks), timeout=seconds)
    return pending


def give_up(task: asyncio.Task[Any]) -> None:
    """Nobody waits for the task any more, the end of its loop neither: `asyncio.run` cancels what
    `all_tasks` shows and waits without a limit, so a task that swallows its cancel would hold the process."""
    asyncio._unregister_task(task)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    cast("Any", task)._log_destroy_pending = False  # Stuck has told of it


def stack_of(task: asyncio.Task[Any]) -> str:
    """Where a suspended task waits, outermost call first. `Task.get_stack` shows the outermost frame only."""
    frames: list[FrameType] = []
    awaitable: Any = task.get_coro()
    while awaitable is not None:
        if isinstance(awaitable, CoroutineType):
            frame, awaitable = awaitable.cr_frame, cast("Any", awaitable.cr_await)
        elif isinstance(awaitable, AsyncGeneratorType):
            frame, awaitable = awaitable.ag_frame, cast("Any", awaitable.ag_await)
        elif isinstance(awaitable, GeneratorType):
            frame, awaitable = awaitable.gi_frame, cast("Any", awaitable.gi_yieldfrom)
        else:
            frame, awaitable = None, _behind(awaitable)
        if cast("Any", frame) is not None:
            frames.append(cast("FrameType", frame))
    lines = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames)
    return "".join(lines.format()) or "(no stack)"


def _behind(step: object) -> Any:
    """What one step of an async generator (`anext(..)`, `asend(..)`) runs: only the collector can tell."""
    if type(step).__name__ not in ("anext_awaitable", "async_generator_asend", "async_generator_athrow",
                                   "coroutine_wrapper"):  # fmt: skip
        return None
    known = (AsyncGeneratorType, CoroutineType)
    for found in gc.get_referents(step):
        if isinstance(found, known) or type(found).__name__.startswith("async_generator_"):
            return cast("Any", found)
    return None
