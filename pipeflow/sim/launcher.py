"""A lane's thread in virtual time, to the same protocol as the real launchers.

Only `submit` and `watch` cross threads; here they are timers of the loop. A job runs to its end at one moment
of the loop, on a host of its own whose time may run ahead; what it returns reaches the loop when that thread
would have come back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeflow.launch import StuckThread
from pipeflow.sim.host import HostBlocked

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeflow.device.base import Mark
    from pipeflow.errors import DeviceError
    from pipeflow.sim.order import Snapshot
    from pipeflow.sim.world import World

__all__ = ["SimLauncher"]


class SimLauncher:
    """First in, first out. `inline` jobs run at once, on the loop itself."""

    def __init__(
        self, world: World, name: str, on_fault: Callable[[BaseException], None], *, inline: bool = False
    ) -> None:
        self.name = name
        self._world = world
        self._on_fault = on_fault
        self._stage = name.partition("[")[0]
        self._host = world.loop_host if inline else world.make_host(name)
        self._inline = inline
        self._queue: deque[tuple[object, Callable[[], Any], Any, Snapshot]] = deque()
        self._doing: object = None
        self._watched: dict[int, object] = {}
        """Marks that are awaited, with what each is of."""
        self._watches = 0
        self._idle: list[asyncio.Future[None]] = []

    def submit(self, doing: object, job: Callable[[], Any], then: Any) -> None:
        entry = (doing, job, then, self._world.send())
        if self._inline:
            self._run(*entry)
            return
        self._queue.append(entry)
        if self._doing is None:
            self._begin()

    def _begin(self) -> None:
        entry = self._queue.popleft()
        self._doing = entry[0]
        # Never at once: a thread runs beside the loop, not inside its call.
        self._world.loop.call_at(max(self._host.now, self._world.loop.time()), self._run, *entry)

    def _run(self, doing: object, job: Callable[[], Any], then: Any, sent: Snapshot) -> None:
        value, error = None, None
        number = getattr(doing, "number", None)
        with self._world.on(self._host, since=sent, stage=self._stage, sequence=number):
            try:
                value = job()
            except HostBlocked:
                pass  # the thread never comes back, nor does `returned` call
            except BaseException as raised:
                error = raised
        if self._inline:
            self._tell(then, value, error)
        else:
            self._world.returned(self._host, partial(self._came_back, then, value, error))
        value = error = None  # the error's traceback holds this frame

    def _came_back(
        self, then: Any, value: Any, error: BaseException | None, fault: DeviceError | None
    ) -> None:
        self._doing = None
        if fault is not None:
            value, error = None, fault
        if self._queue:
            self._begin()
        self._tell(then, value, error)
        self._look_if_idle()

    def _tell(self, then: Any, value: Any, error: BaseException | None) -> None:
        try:
            then(value, error)
        except Exception as raised:
            self._on_fault(raised)

    def watch(self, doing: object, mark: Mark, then: Any) -> None:
        self._watches += 1
        watch = self._watches
        self._watched[watch] = doing

        def noticed(fault: DeviceError | None) -> None:
            del self._watched[watch]
            self._tell(then, None, fault)
            self._look_if_idle()

        self._world.notice(mark, noticed)  # type: ignore[arg-type]  # of this world's devices

    def drop_queued(self) -> None:
        self._queue.clear()

    def stop_jobs(self) -> None:
        return

    def stop_marks(self) -> None:
        return

    def join(self, seconds: float) -> None:
        raise AssertionError("nothing blocks in virtual time; the machine awaits `idle`")

    @property
    def busy(self) -> bool:
        """A job is in hand or queued, or a mark is awaited."""
        return self._doing is not None or bool(self._queue) or bool(self._watched)

    async def idle(self, seconds: float) -> None:
        """Until it is not busy, at most `seconds`."""
        if self.busy and seconds > 0:
            future: asyncio.Future[None] = self._world.loop.create_future()
            self._idle.append(future)
            await asyncio.wait([future], timeout=seconds)
            future.cancel()

    def _look_if_idle(self) -> None:
        if not self.busy:
            waiting, self._idle = self._idle, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    def stuck(self) -> list[StuckThread]:
        found = list(self._watched.values())
        if self._doing is not None:
            found.insert(0, self._doing)
        where = self._host.blocked or "in virtual time"
        return [StuckThread(f"pipeflow {self.name}", str(doing), where) for doing in found]
