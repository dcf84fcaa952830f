"""Virtual time: an asyncio event loop whose clock jumps to the next timer and never sleeps.

`run` takes the place of `asyncio.run`. Hours of waiting cost only the callbacks in them, and the same
program runs the same way each time: timers of one moment fire in the order they were set, and nothing comes
in from outside. So there are no threads, signals or sockets here. Where nothing is ready and no timer is
left, nothing will ever happen: the loop says so at once and names the tasks that wait.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import threading
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from pipeflow.errors import StallError
from pipeflow.tasks import give_up, stack_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from contextvars import Context

__all__ = ["Deadlock", "VirtualLoop", "run"]

_T = TypeVar("_T")

_PATIENCE = 3600.0
"""Virtual seconds in which cancelled tasks may clean up at the end of `run`."""

_REFUSED = (
    "add_reader", "add_writer", "connect_accepted_socket", "connect_read_pipe", "connect_write_pipe",
    "create_connection", "create_datagram_endpoint", "create_server", "create_unix_connection",
    "create_unix_server", "getaddrinfo", "getnameinfo", "run_in_executor", "sendfile", "sock_accept",
    "sock_connect", "sock_recv", "sock_recv_into", "sock_recvfrom", "sock_sendall", "sock_sendto",
    "start_tls", "subprocess_exec", "subprocess_shell", "add_signal_handler", "remove_signal_handler",
)  # fmt: skip
"""Methods of a loop that reach outside its process's one thread."""


class Deadlock(StallError):
    """Nothing is ready and no timer is left: the tasks named wait for ever."""


class _Timer(asyncio.TimerHandle):
    """Ordered by time, then by when it was set; asyncio's own compares the time alone."""

    __slots__ = ("_order",)

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        arguments: Sequence[Any],
        loop: VirtualLoop,
        context: Context | None,
        order: int,
    ) -> None:
        super().__init__(when, callback, arguments, loop, context)
        self._order = order
        self._scheduled = True

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, _Timer):
            return NotImplemented
        mine, its = self.when(), other.when()
        return self._order < other._order if mine == its else mine < its


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module's text. `time()` starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._timers = 0
        self._broken: BaseException | None = None
        self._owner = threading.get_ident()
        private = cast("Any", self)
        private._selector = self  # what the base class waits with: `select`
        self._scheduled: list[asyncio.TimerHandle]
        self._set_resolution()

    def __del__(self) -> None:
        """Nothing to give back: no socket, no thread. The base class would warn."""

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        cast("Any", self)._check_closed()
        self._timers += 1
        timer = _Timer(when, callback, args, self, context, self._timers)
        heapq.heappush(self._scheduled, timer)
        return timer

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """For code that is written for threads but runs on the loop's own; another thread is refused."""
        if threading.get_ident() != self._owner:
            self._refuse("call_soon_threadsafe from another thread")
        return self.call_soon(callback, *args, context=context)

    def run_forever(self) -> None:
        self._owner = threading.get_ident()
        super().run_forever()

    # What the base class calls ----------------------------------------------------------------------

    def select(self, timeout: float | None) -> list[Any]:
        """Jump to the next timer. `timeout` is None or positive only where nothing is ready."""
        if self._broken is not None:
            error, self._broken = self._broken, None
            raise error
        if timeout is None or (timeout > 0 and self._scheduled[0].when() == math.inf):
            raise Deadlock(self._who_waits())
        if timeout > 0:
            self._now = self._scheduled[0].when()
            self._set_resolution()
        return []

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """What a plain callback raises ends `run`: nobody else would hear of it, and a program that is run to
        find faults must not go on. The rest (a task's error that nobody took) is logged, as ever."""
        if "handle" in context and isinstance(error := context.get("exception"), Exception):
            self._broken = self._broken or error
        else:
            super().default_exception_handler(context)

    def _process_events(self, event_list: list[Any]) -> None:
        return

    def _write_to_self(self) -> None:
        return

    def _set_resolution(self) -> None:
        """The base class fires what is due before now plus this: exactly what is due now."""
        self._clock_resolution = math.ulp(self._now)

    def _who_waits(self) -> str:
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())
        waiting = "".join(f"\ntask {task.get_name()} waits at:\n{stack_of(task).rstrip()}" for task in tasks)
        return (
            f"at virtual time {self._now:g} s nothing is ready and no timer is left, so nothing will ever "
            f"happen. Something that was awaited is never set{waiting or ' (no task waits)'}"
        )

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"{what}: a virtual-time loop has one thread and no way in from outside. Await a timer or a "
            "future that other code of this loop sets, or run this on asyncio.run"
        )


def _refusal(name: str) -> Any:
    def refused(self: VirtualLoop, *_: Any, **__: Any) -> NoReturn:
        self._refuse(f"loop.{name}()")  # pyright: ignore[reportPrivateUsage]

    return refused


for _name in _REFUSED:
    setattr(VirtualLoop, _name, _refusal(_name))


def run(main: Callable[..., Coroutine[Any, Any, _T]], *arguments: Any, loop: VirtualLoop | None = None) -> _T:
    """Run a coroutine function in virtual time and close the loop: `asyncio.run` for a `VirtualLoop`.

    Tasks left over are cancelled and may clean up for an hour of virtual time; who swallows that is given up.
    Raises Deadlock where nothing can happen any more.
    """
    if asyncio._get_running_loop() is not None:
        raise RuntimeError("run() was called inside a running loop; await the coroutine there instead")
    loop = VirtualLoop() if loop is None else loop
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(main(*arguments))
    finally:
        try:
            _end_tasks(loop)
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            loop.close()


def _end_tasks(loop: VirtualLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    if not tasks:
        return
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.wait(tasks, timeout=_PATIENCE))
    for task in tasks:
        if not task.done():
            give_up(task)
        elif not task.cancelled() and (error := task.exception()) is not None:
            said = {"message": "a task left over at the end of run failed", "exception": error, "task": task}
            loop.call_exception_handler(said)
