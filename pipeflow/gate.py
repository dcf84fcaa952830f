"""Launch gates: one a device, shared by all pipelines of a loop (axiom 5.2). A barrier closes them."""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING

import anyio

from pipeflow.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeflow.lane import Lane
    from pipeflow.runner import Runner

__all__ = ["Gate", "gates_of_this_loop"]


class Gate:
    """The launch gate of one device, shared by all pipelines of the process (axiom 5.2)."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.open = True
        self._holder: object = None
        """The barrier that closed it last. Another's reopening changes nothing."""
        self.nodes: dict[Runner, None] = {}
        """Stages with lanes behind it, woken when it opens. In their order: a set's would differ by run."""
        self._in_hand: dict[tuple[Lane, int | None], int] = {}
        """(lane, item) to launches whose fence is not reached."""
        self._quiet: list[asyncio.Future[None]] = []

    def enter(self, lane: Lane, seq: int | None) -> None:
        """A launch begins. Only behind an open gate, or inside a section."""
        key = (lane, seq)
        self._in_hand[key] = self._in_hand.get(key, 0) + 1

    def leave(self, lane: Lane, seq: int | None) -> None:
        """Its fence is reached."""
        key = (lane, seq)
        if key not in self._in_hand:  # of a lane that was forgotten, and came back late
            return
        self._in_hand[key] -= 1
        if not self._in_hand[key]:
            del self._in_hand[key]
            self._look_if_quiet()

    def forget(self, lane: Lane) -> None:
        """The lane is gone, and with it what it never finished: other pipelines must not wait for it."""
        for key in [key for key in self._in_hand if key[0] is lane]:
            del self._in_hand[key]
        self._look_if_quiet()

    def _look_if_quiet(self) -> None:
        if self._in_hand:
            return
        waiting, self._quiet = self._quiet, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def in_hand(self) -> list[str]:
        """The launches that are not over, in words."""
        return [
            f"{lane.name}[{lane.index}]" + ("" if seq is None else f" item {seq}")
            for lane, seq in self._in_hand
        ]

    async def quiet(self) -> None:
        """Wait until every launch behind it is over."""
        while self._in_hand:
            future = asyncio.get_running_loop().create_future()
            self._quiet.append(future)
            await future

    def close(self, holder: object) -> None:
        """No launch begins from here on, but those of the holder's section."""
        self.open = False
        self._holder = holder

    def reopen(self, holder: object) -> bool:
        """Only whoever closed it last may open it: the end of one run is not the end of another's section.
        Returns whether it did."""
        if self._holder is not holder:
            return False
        self._holder = None
        self.open = True
        for node in list(self.nodes):
            node.wake()
        return True


class _Gates:
    """The gates of one event loop, and the lock by which one barrier is under way at a time."""

    def __init__(self) -> None:
        self._gates: dict[str, Gate] = {}
        self.one_at_a_time = anyio.Lock()

    def of(self, device: str) -> Gate:
        if device not in self._gates:
            self._gates[device] = Gate(device)
        return self._gates[device]

    def names(self) -> list[str]:
        return list(self._gates)


_by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Gates] = weakref.WeakKeyDictionary()
_driver: dict[str, weakref.ref[asyncio.AbstractEventLoop]] = {}


def gates_of_this_loop(devices: Sequence[str] = ()) -> _Gates:
    """The gates of the running loop.

    A GPU belongs to the first loop that drives it, as a gate could not hold another loop's launches.
    Raises DeviceError where `devices` names one that a second loop drives.
    """
    loop = asyncio.get_running_loop()
    for device in devices:
        if not device.startswith("cuda"):
            continue
        owner = _driver[device]() if device in _driver else None
        if owner is not None and owner is not loop and not owner.is_closed():
            raise DeviceError(
                f"device {device!r} is driven by another event loop of this process. "
                "Run both pipelines in one loop, or in two processes"
            )
        _driver[device] = weakref.ref(loop)
    return _by_loop.setdefault(loop, _Gates())
