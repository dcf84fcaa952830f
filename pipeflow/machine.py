"""What a run runs on: a clock, devices, launchers, and threads for single calls.

`ThreadMachine` is the real one. A simulated one (`pipeflow.sim`) gives the very same engine devices and
launchers in virtual time. Nothing above this line knows which it has, but for `virtual`, where a run would
otherwise touch the real machine (its processor's threads, its event loop's GPUs).
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Protocol

from pipeflow.device import make_device, resolve_auto
from pipeflow.device.cpu import Cpu
from pipeflow.device.cpu_late import CpuLate
from pipeflow.launch import Inbox, InlineLauncher, ThreadLauncher, off_loop, stuck_thread

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable

    from pipeflow.device.base import Device
    from pipeflow.launch import Launcher, StuckThread

__all__ = ["Machine", "ThreadMachine"]


class Machine(Protocol):
    """Made in the run's event loop, for one run."""

    virtual: bool
    """Whether its devices and time are simulated."""

    def now(self) -> float:
        """Seconds on a clock that only goes forward. From any thread."""
        ...

    def report_to(self, on_fault: Callable[[BaseException], None]) -> None:
        """Who hears what a callback raised."""
        ...

    def resolve(self, name: str) -> str:
        """A device's name where the file says `auto`."""
        ...

    def device(self, name: str) -> Device:
        """The device of a name of the file; DeviceError where there is none. Off the loop, at load."""
        ...

    def host(self, devices: Iterable[Device]) -> Device:
        """Where host stages run, beside these devices."""
        ...

    def launcher(self, name: str, *, inline: bool, marks: bool) -> Launcher:
        """Runs the jobs of one lane. `marks`: its device has marks that the host must wait for."""
        ...

    async def off_loop(self, call: Callable[[], Any], name: str) -> Any:
        """Run one call beside the loop and await it. A cancel does not wait for it."""
        ...

    async def join(self, launchers: Iterable[Launcher], deadline: float) -> None:
        """Until what the launchers were told to stop has ended, or `now()` is `deadline`. What they
        posted before is on the loop when this returns."""
        ...

    async def end_calls(self, deadline: float) -> list[StuckThread]:
        """Wait for the calls of `off_loop` in hand; those that do not come back."""
        ...


_IDLE = 1.0
"""Seconds, at least, in which a thread that has nothing to do may end."""


class ThreadMachine:
    """This process: threads, and the devices of torch."""

    virtual = False
    now = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self._on_fault: Callable[[BaseException], None] | None = None
        self._inbox = Inbox(asyncio.get_running_loop(), self._fault)
        self._calls: dict[threading.Thread, str] = {}
        """Threads that run one call each: a load, a drain, a close."""

    def report_to(self, on_fault: Callable[[BaseException], None]) -> None:
        self._on_fault = on_fault

    def _fault(self, error: BaseException) -> None:
        if self._on_fault is None:
            raise error
        self._on_fault(error)

    def resolve(self, name: str) -> str:
        return resolve_auto(name)

    def device(self, name: str) -> Device:
        return make_device(name)

    def host(self, devices: Iterable[Device]) -> Device:
        """A late test device serves host stages too, as it wants to hear of every item."""
        return next((device for device in devices if isinstance(device, CpuLate)), None) or Cpu("host")

    def launcher(self, name: str, *, inline: bool, marks: bool) -> Launcher:
        kind = InlineLauncher if inline else ThreadLauncher
        return kind(name, self._inbox, marks=marks)

    async def off_loop(self, call: Callable[[], Any], name: str) -> Any:
        return await off_loop(self._inbox, call, name, self._calls)

    async def join(self, launchers: Iterable[Launcher], deadline: float) -> None:
        waiting = list(launchers)

        def join() -> None:
            for launcher in waiting:
                # A thread that does nothing ends by itself, however little of the grace others have left it.
                idle = all(thread.doing == "nothing" for thread in launcher.stuck())
                launcher.join(max(self._left(deadline), _IDLE if idle else 0.0))

        await off_loop(self._inbox, join, "settle")

    async def end_calls(self, deadline: float) -> list[StuckThread]:
        calls = dict(self._calls)

        def join() -> None:
            for thread in calls:
                thread.join(self._left(deadline))

        await off_loop(self._inbox, join, "settle")
        return [found for thread, doing in calls.items() if (found := stuck_thread(thread, doing))]

    def _left(self, deadline: float) -> float:
        return max(0.0, deadline - self.now())
