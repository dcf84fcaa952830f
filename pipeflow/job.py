"""A job: one call of stage code, from its start until everything it made is handed over and reached."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeflow.context import Context
    from pipeflow.device.base import Mark, Memory
    from pipeflow.edge import Edge
    from pipeflow.fence import Fence
    from pipeflow.inputs import Taken
    from pipeflow.item import Item, Version
    from pipeflow.lane import Lane
    from pipeflow.lifetime import Stamp
    from pipeflow.resource import Instance
    from pipeflow.snapshot import Snapshot

    Stamps = Sequence[Stamp | None] | Stamp | None
    """Of one result: one, or of a Scatter one a member."""

__all__ = ["END", "Job", "Launched", "Output", "Stamps"]


class _End:
    def __repr__(self) -> str:
        return "END"


END = _End()
"""What a generator's step returns once it is exhausted."""


class Launched:
    """What a lane hands back from one launch: the value, the mark behind its work, what it logged."""

    __slots__ = ("context", "error", "mark", "passed", "seconds", "stamps", "starved", "value")

    def __init__(
        self,
        value: Any,
        mark: Mark,
        context: Context | None,
        error: BaseException | None,
        seconds: float,
        stamps: Stamps = None,
        passed: bool | None = None,
        starved: Memory | None = None,
    ) -> None:
        self.value = value
        self.mark = mark
        self.context = context
        self.error = error
        """What stage code raised, after its mark was recorded: the launch is over, not the device's work."""
        self.seconds = seconds
        self.passed = mark.passed() if passed is None else passed
        """Asked on the lane's thread: the loop makes no device call (axiom 4.2)."""
        self.stamps = stamps
        self.starved = starved
        """It ran out of device memory: the allocator's counters then."""


class Output:
    """A value (or a gap, `live` False) that waits for its turn to leave its stage."""

    __slots__ = ("charged", "fence", "live", "operation", "port", "seq", "stamp", "tickets", "value",
                 "versions")  # fmt: skip

    def __init__(
        self,
        value: Any,
        fence: Fence,
        *,
        live: bool = True,
        charged: Sequence[Edge] = (),
        seq: int | None = None,
        port: str | None = None,
        versions: Mapping[str, Version] | None = None,
        tickets: tuple[Any, ...] = (),
        stamp: Stamp | None = None,
    ) -> None:
        self.value = value
        self.fence = fence
        self.live = live
        self.stamp = stamp
        self.charged = charged
        self.seq = seq
        self.port = port
        self.versions = versions
        self.operation = 0
        """Its number in the operation log, if there is one."""
        self.tickets = tickets
        for ticket in tickets:
            ticket.carriers += 1


class Job:
    """Changes on the loop only; its lane reads `value`, `number` and `generator` while a launch runs."""

    __slots__ = ("charged", "context", "failures", "gaps", "generator", "held", "lane", "launch", "launching",
                 "leased", "number", "operation", "outputs", "parts", "pending", "retired", "retry",
                 "retry_due", "returned", "seq", "snapshot", "started", "starved", "tickets", "unpinned",
                 "unreached", "value", "versions", "yielded")  # fmt: skip

    def __init__(self, lane: Lane | None, seq: int | None, taken: Taken | None, started: float) -> None:
        self.lane = lane
        """None: it only carries a gap to its turn."""
        self.seq = seq
        """Its number where one job makes one output; None where outputs are numbered as they leave."""
        self.number = seq
        """What stage code and people hear: `seq`, or where it is None the number of its input."""
        self.parts: Sequence[tuple[Edge, Item]] = taken.parts if taken is not None else ()
        self.value: Any = taken.value if taken is not None else None
        self.gaps: Sequence[int] = taken.gaps if taken is not None else ()
        self.charged: Sequence[Edge] = ()
        """Edges on which it holds a credit for an output that is not made yet."""
        self.outputs: deque[Output] = deque()
        self.pending: deque[Output] | None = None
        """What a scattering stage made at once, waiting for credits one by one."""
        self.generator: Any = None
        self.launching = False
        self.launch = self.operation = 0
        """In the operation log, if there is one: its last launch, and its first, which is its own number."""
        self.leased = False
        """It keeps its leases until it has returned."""
        self.held: Sequence[tuple[Instance, bool]] = ()
        """What it leases."""
        self.snapshot: Snapshot | None = None
        """What it reads in place of what it leased, and needs no lease for."""
        self.returned = False
        """No more launches."""
        self.unreached = 0
        """Launches whose fence is not reached."""
        self.started = started
        self.failures = 0
        self.starved = 0
        """How often it ran out of device memory."""
        self.yielded = 0
        """Outputs it made."""
        self.retry = False
        """It raised and will be launched again: `retry_due` once that launch's fence is reached."""
        self.retry_due = False
        self.unpinned = False
        self.context: Context | None = None
        """Of a generator, which gets one for all its steps."""
        self.versions: Mapping[str, Version] | None = None
        self.tickets: tuple[Any, ...] = ()
        self.retired = False

    @property
    def over(self) -> bool:
        """Returned, and every fence reached."""
        return self.returned and self.unreached == 0 and not self.launching

    def inherit(self, taken: Taken) -> None:
        """What an item hands on to what is made of it: versions (of several the oldest), tickets."""
        if self.number is None:
            self.number = taken.seq
        parts = taken.parts
        if len(parts) == 1:
            item = parts[0][1]
            self.tickets = item.tickets
            self.versions = item.versions
            return
        self.tickets = tuple(ticket for _, item in parts for ticket in item.tickets)
        merged: dict[str, Version] = {}
        for _, item in parts:
            for name, version in (item.versions or {}).items():
                if name not in merged or version.step < merged[name].step:
                    merged[name] = version
        self.versions = merged or None

    def kept(self, edge: Edge) -> int:
        """Credits of an edge that it holds in hand: one in production, and what waits to leave."""
        waiting = (*self.outputs, *(self.pending or ()))
        return (edge in self.charged) + sum(edge in output.charged for output in waiting)
