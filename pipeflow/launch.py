"""Launchers: where a lane's stage code runs, and how its results get back to the loop.

`thread`  a daemon thread a lane runs jobs in order; a second one waits for marks, if the device has any
          that are not passed at once. Results come back in batches: one wake of the loop for all that is
          ready (axiom 7.5).
`inline`  the loop itself, for calls of microseconds.
`task`    the loop too, for `async def`: one worker task a job in flight.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pipeflow.device.base import Mark

__all__ = ["Inbox", "InlineLauncher", "Launcher", "StuckThread", "TaskLauncher", "ThreadLauncher",
           "off_loop", "stuck_thread"]  # fmt: skip


class StuckThread(NamedTuple):
    """A thread that did not come back: its name, what it runs, and its stack now."""

    name: str
    doing: str
    stack: str


class Inbox:
    """The one way from a thread to the loop: results queue up, one wake takes them all."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: deque[tuple[Callable[[Any, BaseException | None], None], Any, BaseException | None]] = deque()
        self._lock = threading.Lock()
        self._called = False

    def post(self, then: Callable[[Any, BaseException | None], None], value: Any, error: BaseException | None) -> None:
        """From any thread. Dropped if the loop is closed: nobody is left to hear it."""
        with self._lock:
            self._queue.append((then, value, error))
            if self._called:
                return
            self._called = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop was closed under a thread that came back late
            self._queue.clear()

    def _deliver(self) -> None:
        with self._lock:
            batch, self._queue = self._queue, deque()
            self._called = False
        for then, value, error in batch:
            then(value, error)


async def off_loop(
    inbox: Inbox, call: Callable[[], Any], name: str, threads: dict[threading.Thread, str] | None = None
) -> Any:
    """Run a call on a daemon thread of its own and await it. A cancel does not wait for the thread, which
    is in `threads` while it runs."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def done(value: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)

    def work() -> None:
        value, error = None, None
        try:
            value = call()
        except BaseException as raised:
            error = raised
        if threads is not None:
            threads.pop(threading.current_thread(), None)
        inbox.post(done, value, error)

    thread = threading.Thread(target=work, name=f"pipeflow {name}", daemon=True)
    if threads is not None:
        threads[thread] = name
    thread.start()
    return await future


def stuck_thread(thread: threading.Thread, doing: str) -> StuckThread | None:
    """What a thread does now; None if it has ended."""
    if not thread.is_alive():
        return None
    frame = sys._current_frames().get(thread.ident or 0)
    stack = "".join(traceback.format_stack(frame)) if frame else "(no stack)"
    return StuckThread(thread.name, doing, stack)


class Launcher(Protocol):
    """Runs the jobs of one lane."""

    def submit(self, doing: str, job: Callable[[], Any], then: Callable[[Any, BaseException | None], None]) -> None:
        """Run `job`, first in first out; then `then(value, None)` or `then(None, error)` on the loop."""
        ...

    def watch(self, doing: str, mark: Mark, then: Callable[[Any, BaseException | None], None]) -> None:
        """Wait for the mark off the loop; then `then(None, None)` or `then(None, fault)` on the loop."""
        ...

    def stop(self) -> None:
        """Take no more; threads end after what they have in hand."""
        ...

    def stuck(self) -> list[StuckThread]:
        """Threads still at work, after `stop`."""
        ...

    def join(self, seconds: float) -> None:
        """Block until the threads have ended, at most `seconds`. After `stop`, off the loop."""
        ...


class _Worker:
    """A daemon thread that runs calls in order. Made at load, so nothing is created during a run."""

    def __init__(self, name: str, inbox: Inbox) -> None:
        self._inbox = inbox
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self.doing = ""
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, doing: str, call: Callable[[], Any], then: Callable[[Any, BaseException | None], None]) -> None:
        self._queue.put((doing, call, then))

    def stop(self) -> None:
        self._queue.put(None)

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def stuck(self) -> StuckThread | None:
        return stuck_thread(self._thread, self.doing or "nothing")

    def _work(self) -> None:
        while True:
            entry = self._queue.get()
            if entry is None:
                return
            self.doing, call, then = entry
            value, error = None, None
            try:
                value = call()
            except BaseException as raised:
                error = raised
            self.doing = ""
            self._inbox.post(then, value, error)
            # What was run must not outlive its turn in this frame: it holds the item's tensors.
            del entry, call, then, value, error


class ThreadLauncher:
    """Jobs on one daemon thread, marks on another."""

    def __init__(self, name: str, inbox: Inbox, *, marks: bool) -> None:
        self._jobs = _Worker(f"pipeflow {name}", inbox)
        self._marks = _Worker(f"pipeflow {name} marks", inbox) if marks else None

    def submit(self, doing: str, job: Callable[[], Any], then: Callable[[Any, BaseException | None], None]) -> None:
        self._jobs.put(doing, job, then)

    def watch(self, doing: str, mark: Mark, then: Callable[[Any, BaseException | None], None]) -> None:
        assert self._marks is not None, "this lane's device passes its marks at once"
        self._marks.put(doing, mark.wait, then)

    def _workers(self) -> list[_Worker]:
        return [self._jobs] if self._marks is None else [self._jobs, self._marks]

    def stop(self) -> None:
        for worker in self._workers():
            worker.stop()

    def stuck(self) -> list[StuckThread]:
        found = (worker.stuck() for worker in self._workers())
        return [thread for thread in found if thread is not None]

    def join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for worker in self._workers():
            worker.join(max(0.0, deadline - time.monotonic()))


class InlineLauncher:
    """Jobs on the loop. Marks, if any, on a thread: the loop never waits for a device."""

    def __init__(self, name: str, inbox: Inbox, *, marks: bool) -> None:
        self._marks = _Worker(f"pipeflow {name} marks", inbox) if marks else None

    def submit(self, doing: str, job: Callable[[], Any], then: Callable[[Any, BaseException | None], None]) -> None:
        try:
            value = job()
        except Exception as error:
            then(None, error)
        else:
            then(value, None)

    def watch(self, doing: str, mark: Mark, then: Callable[[Any, BaseException | None], None]) -> None:
        assert self._marks is not None, "this lane's device passes its marks at once"
        self._marks.put(doing, mark.wait, then)

    def stop(self) -> None:
        if self._marks is not None:
            self._marks.stop()

    def stuck(self) -> list[StuckThread]:
        thread = self._marks.stuck() if self._marks is not None else None
        return [] if thread is None else [thread]

    def join(self, seconds: float) -> None:
        if self._marks is not None:
            self._marks.join(seconds)


class TaskLauncher:
    """`async def` jobs on worker tasks of the run's task group; `job` returns an awaitable."""

    def __init__(self, start_soon: Callable[[Callable[[], Awaitable[None]], str], None], name: str, width: int) -> None:
        self._queue: deque[tuple[str, Callable[[], Awaitable[Any]], Callable[[Any, BaseException | None], None]]] = deque()
        self._idle: list[asyncio.Future[None]] = []
        self._stopped = False
        for index in range(width):
            start_soon(self._work, f"{name} {index}" if width > 1 else name)

    def submit(
        self,
        doing: str,
        job: Callable[[], Awaitable[Any]],
        then: Callable[[Any, BaseException | None], None],
    ) -> None:
        self._queue.append((doing, job, then))
        if self._idle:
            self._wake(self._idle.pop())

    @staticmethod
    def _wake(future: asyncio.Future[None]) -> None:
        if not future.done():
            future.set_result(None)

    def watch(self, doing: str, mark: Mark, then: Callable[[Any, BaseException | None], None]) -> None:
        raise AssertionError("async jobs run on the host; what they enqueue goes through their lane's thread")

    def stop(self) -> None:
        self._stopped = True
        for future in self._idle:
            self._wake(future)
        self._idle.clear()

    def stuck(self) -> list[StuckThread]:
        return []

    def join(self, seconds: float) -> None:
        return

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not self._queue:
                if self._stopped:
                    return
                future = loop.create_future()
                self._idle.append(future)
                try:
                    await future
                finally:
                    if future in self._idle:
                        self._idle.remove(future)
            _, job, then = self._queue.popleft()
            try:
                value = await job()
            except Exception as error:
                then(None, error)
                del error
            else:
                then(value, None)
                del value
            del job, then
