"""Launchers: where a lane's stage code runs, and how its results get back to the loop.

`thread`  a daemon thread a lane runs jobs in order; a second one waits for marks, if the device has any
          that are not passed at once. Results come back in batches: one wake of the loop for all that is
          ready (axiom 7.5).
`inline`  the loop itself, for calls of microseconds.
`task`    the loop too, for `async def`: one worker task a job in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
import traceback
from collections import deque
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pipeflow.tasks import end_tasks, stack_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pipeflow.device.base import Mark

__all__ = ["Inbox", "InlineLauncher", "Launcher", "StuckThread", "TaskLauncher", "ThreadLauncher",
           "off_loop", "stuck_task", "stuck_thread"]  # fmt: skip


class StuckThread(NamedTuple):
    """A thread or task that did not come back: its name, what it runs, and its stack now."""

    name: str
    doing: str
    stack: str
    kind: str = "thread"


class Inbox:
    """The one way from a thread to the loop: results queue up, one wake takes them all."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_fault: Callable[[BaseException], None] | None = None
    ) -> None:
        self._loop = loop
        self._on_fault = on_fault
        """Hears what a `then` raised, so that one fault does not lose the results behind it."""
        self._queue: deque[tuple[Callable[[Any, BaseException | None], None], Any, BaseException | None]] = (
            deque()
        )
        self._lock = threading.Lock()
        self._called = False

    def post(
        self, then: Callable[[Any, BaseException | None], None], value: Any, error: BaseException | None
    ) -> None:
        """From any thread. Dropped if the loop is closed: nobody is left to hear it."""
        with self._lock:
            self._queue.append((then, value, error))
            if self._called:
                return
            self._called = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop was closed under a thread that came back late
            with self._lock:
                self._queue.clear()

    def _deliver(self) -> None:
        with self._lock:
            batch, self._queue = self._queue, deque()
            self._called = False
        for then, value, error in batch:
            try:
                then(value, error)
            except Exception as fault:
                if self._on_fault is None:
                    raise
                self._on_fault(fault)


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
        value = error = None  # the error's traceback holds this frame

    thread = threading.Thread(target=work, name=f"pipeflow {name}", daemon=True)
    if threads is not None:
        threads[thread] = name
    thread.start()
    return await future


def stuck_thread(thread: threading.Thread, doing: str) -> StuckThread | None:
    """What a thread does now; None if it has ended."""
    if not thread.is_alive():
        return None
    frame = sys._current_frames().get(thread.ident or 0)  # pyright: ignore[reportPrivateUsage]
    stack = "".join(traceback.format_stack(frame)) if frame else "(no stack)"
    return StuckThread(thread.name, doing, stack)


def stuck_task(task: asyncio.Task[Any], doing: str) -> StuckThread:
    """What a task that is not done awaits."""
    return StuckThread(f"task {task.get_name()}", doing, stack_of(task), "task")


class Launcher(Protocol):
    """Runs the jobs of one lane. `doing` says what a job is, should it get stuck: its `str` is taken then."""

    def submit(
        self, doing: object, job: Callable[[], Any], then: Callable[[Any, BaseException | None], None]
    ) -> None:
        """Run `job`, first in first out; then `then(value, None)` or `then(None, error)` on the loop."""
        ...

    def watch(self, doing: object, mark: Mark, then: Callable[[Any, BaseException | None], None]) -> None:
        """Wait for the mark off the loop; then `then(None, None)` or `then(None, fault)` on the loop."""
        ...

    def drop_queued(self) -> None:
        """Jobs that have not begun never will; what has begun is finished."""
        ...

    def stop_jobs(self) -> None:
        """End after what is queued."""
        ...

    def stop_marks(self) -> None:
        """Take no more marks; those in hand are awaited. After the jobs have ended, as they bring marks."""
        ...

    def join(self, seconds: float) -> None:
        """Block until the threads that were stopped have ended, at most `seconds`. Off the loop."""
        ...

    def stuck(self) -> list[StuckThread]:
        """Threads and tasks not ended yet, with what they do."""
        ...


class _Worker:
    """A daemon thread that runs calls in order. Made at load, so nothing is created during a run."""

    def __init__(self, name: str, inbox: Inbox) -> None:
        self._inbox = inbox
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._stopped = False
        self.doing: object = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(
        self, doing: object, call: Callable[[], Any], then: Callable[[Any, BaseException | None], None]
    ) -> None:
        self._queue.put((doing, call, then))

    def clear(self) -> None:
        """Drop what has not begun."""
        with contextlib.suppress(Empty):
            while True:
                self._queue.get_nowait()

    def stop(self) -> None:
        """End after what is queued."""
        if not self._stopped:
            self._stopped = True
            self._queue.put(None)

    def join(self, seconds: float) -> None:
        if self._stopped:
            self._thread.join(seconds)

    def stuck(self) -> StuckThread | None:
        doing = self.doing
        return stuck_thread(self._thread, "nothing" if doing is None else str(doing))

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
            self.doing = None
            self._inbox.post(then, value, error)
            # What was run must not outlive its turn in this frame: it holds the item's tensors.
            del entry, call, then, value, error


class _Marks:
    """The part of a launcher that waits for marks, on a thread of its own; none where they pass at once."""

    def __init__(self, name: str, inbox: Inbox, *, marks: bool) -> None:
        self._marks = _Worker(f"pipeflow {name} marks", inbox) if marks else None

    def watch(self, doing: object, mark: Mark, then: Callable[[Any, BaseException | None], None]) -> None:
        assert self._marks is not None, "this lane's device passes its marks at once"
        self._marks.put(doing, mark.wait, then)

    def stop_marks(self) -> None:
        if self._marks is not None:
            self._marks.stop()

    def _workers(self) -> list[_Worker]:
        return [] if self._marks is None else [self._marks]

    def join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for worker in self._workers():
            worker.join(max(0.0, deadline - time.monotonic()))

    def stuck(self) -> list[StuckThread]:
        found = (worker.stuck() for worker in self._workers())
        return [thread for thread in found if thread is not None]


class ThreadLauncher(_Marks):
    """Jobs on one daemon thread, marks on another."""

    def __init__(self, name: str, inbox: Inbox, *, marks: bool) -> None:
        super().__init__(name, inbox, marks=marks)
        self._jobs = _Worker(f"pipeflow {name}", inbox)

    def submit(
        self, doing: object, job: Callable[[], Any], then: Callable[[Any, BaseException | None], None]
    ) -> None:
        self._jobs.put(doing, job, then)

    def drop_queued(self) -> None:
        self._jobs.clear()

    def stop_jobs(self) -> None:
        self._jobs.stop()

    def _workers(self) -> list[_Worker]:
        return [self._jobs, *super()._workers()]


class InlineLauncher(_Marks):
    """Jobs on the loop. Marks, if any, on a thread: the loop never waits for a device."""

    def submit(
        self, doing: object, job: Callable[[], Any], then: Callable[[Any, BaseException | None], None]
    ) -> None:
        try:
            value = job()
        except Exception as error:
            then(None, error)
        else:
            then(value, None)

    def drop_queued(self) -> None:
        return

    def stop_jobs(self) -> None:
        return


class TaskLauncher:
    """`async def` jobs on worker tasks, which it owns; `job` returns an awaitable.

    They are plain tasks, in no task group: a group waits for its tasks for ever, also for one that swallows
    its cancel. What ends them is `stop_jobs` and `ended`; what does not end is given up and named.
    """

    def __init__(self, name: str, width: int, on_fault: Callable[[BaseException], None]) -> None:
        self._on_fault = on_fault
        self._queue: deque[
            tuple[object, Callable[[], Awaitable[Any]], Callable[[Any, BaseException | None], None]]
        ]
        self._queue = deque()
        self._idle: list[asyncio.Future[None]] = []
        self._stopped = False
        self._given_up = False
        self._tasks: dict[asyncio.Task[None], object] = {}
        """Those not done; what each does."""
        for index in range(width):
            task = asyncio.create_task(self._work(), name=f"{name} {index}" if width > 1 else name)
            self._tasks[task] = None
            task.add_done_callback(self._ended)

    def submit(
        self,
        doing: object,
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

    def watch(self, doing: object, mark: Mark, then: Callable[[Any, BaseException | None], None]) -> None:
        raise AssertionError("async jobs run on the host; what they enqueue goes through their lane's thread")

    def drop_queued(self) -> None:
        self._queue.clear()

    def stop_jobs(self) -> None:
        self._stopped = True
        for future in self._idle:
            self._wake(future)
        self._idle.clear()

    def stop_marks(self) -> None:
        return

    def join(self, seconds: float) -> None:
        return

    def stuck(self) -> list[StuckThread]:
        return [
            stuck_task(task, "nothing" if doing is None else str(doing))
            for task, doing in self._tasks.items()
            if not task.done()
        ]

    async def ended(self, grace: float) -> None:
        """After `stop_jobs`: wait for jobs in hand, cancel them after `grace`, give up as long after."""
        if await end_tasks(self._tasks, grace):
            self._given_up = True

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._on_fault(fault)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
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
            doing, job, then = self._queue.popleft()
            self._tasks[task] = doing
            value, error = None, None
            try:
                value = await job()
            except Exception as raised:
                error = raised
            if self._given_up:
                return  # the run is over and has told of it
            self._tasks[task] = None
            try:
                then(value, error)
            except Exception as fault:  # the engine's own: the run ends by it, not by a dead task
                self._on_fault(fault)
            del doing, job, then, value, error
