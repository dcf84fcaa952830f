"""Threads of the host, in virtual time.

A job runs to its end at one moment of the loop, while its host's own time may run ahead of the loop's: by
`work`, or as a launch queue was full. What it enqueues starts no earlier than the host was then.

Where a call would block on the device (`mark.wait()`, `drain()`) it returns at once, and the wait is noted as
*pending*: what the host enqueues later starts after it, its clock has waited, and `World.returned` tells the
loop of the job's end only once everything pending has come to pass. A thread that blocks and a call that
comes back later are the same to whoever gave the job. What cannot be had that way, a value read right after
the wait in the same call, is refused.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeflow.sim.device import Sim
    from pipeflow.sim.order import Timeline
    from pipeflow.sim.queue import SimMark, SimStream
    from pipeflow.sim.world import World

__all__ = ["Host", "HostBlocked", "InterpreterLock"]


class HostBlocked(BaseException):
    """The host's call never comes back: it waits for a place in a queue that a hung kernel keeps full.

    No Exception, so that stage code does not take it for a failure of its own."""


class InterpreterLock:
    """One at a time of all hosts. Reservations, so that one who is ahead of the loop does not hold up one who
    comes later and wants it earlier."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        self.held = 0.0
        """Seconds in all."""

    def reserve(self, earliest: float, seconds: float, now: float) -> float:
        """Take it for `seconds` at the first gap from `earliest` on; when that begins. `now`: nobody will
        ask for what lies before."""
        starts, ends = self._starts, self._ends
        over = bisect_right(ends, now)
        del starts[:over], ends[:over]
        self.held += seconds
        at = bisect_right(ends, earliest)
        while at < len(starts) and starts[at] < earliest + seconds:
            earliest = max(earliest, ends[at])
            at += 1
        if at and ends[at - 1] == earliest:
            ends[at - 1] = earliest + seconds
        else:
            starts.insert(at, earliest)
            ends.insert(at, earliest + seconds)
        return earliest


class Host:
    """One thread of the host. Made at load by `World.make_host`."""

    def __init__(self, world: World, name: str, timeline: Timeline) -> None:
        self.world = world
        self.name = name
        self.timeline = timeline
        self.stage: str | None = None
        self.sequence: int | None = None
        """Whose job it runs: names in the log and in hazards, and what a planned fault picks."""
        self.entered: list[tuple[Sim, SimStream]] = []
        self.pending: list[SimMark] = []
        """What its call has blocked on, in order."""
        self.blocked: str | None = None
        """Why its call never returns, if so."""
        self._now = 0.0

    @property
    def now(self) -> float:
        """Its own time: the loop's or later."""
        return max(self._now, self.world.loop.time())

    def advance(self, to: float) -> None:
        """Be no earlier than `to`."""
        self._now = max(self._now, to)

    def work(self, seconds: float, *, lock: bool = True) -> None:
        """Compute for `seconds`: by `lock` with the interpreter lock, so never beside another host."""
        start = self.now
        if lock:
            start = self.world.lock.reserve(start, seconds, self.world.loop.time())
        self._now = start + seconds

    def await_mark(self, mark: SimMark) -> None:
        """Block until the mark is passed (see the module's text)."""
        self.timeline.join(mark.clock)
        if not mark.done:
            self.pending.append(mark)

    def unpassed(self) -> list[SimMark]:
        """What is still pending."""
        self.pending = [mark for mark in self.pending if not mark.done]
        return self.pending

    def block_for_ever(self, why: str) -> None:
        """Raises HostBlocked, and so does every device call of this host from now on."""
        self.blocked = why
        raise HostBlocked(f"{self.name}: {why}")

    def where(self) -> str:
        """Whose job it runs, in words."""
        if self.stage is None:
            return self.name
        return self.stage if self.sequence is None else f"{self.stage} item {self.sequence}"
