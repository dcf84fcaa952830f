"""A job: one call of stage code, from its start until everything it made is handed over and reached."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from pipeflow.fence import Fence

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeflow.context import Context
    from pipeflow.device.base import Mark
    from pipeflow.edge import Edge
    from pipeflow.inputs import Taken
    from pipeflow.item import Item, Version
    from pipeflow.lane import Lane

__all__ = ["END", "Job", "Launched", "Output"]


class _End:
    def __repr__(self) -> str:
        return "END"


END = _End()
"""What a generator's step returns once it is exhausted."""


class Launched:
    """What a lane hands back from one launch: the value, the mark behind its work, what it logged."""

    __slots__ = ("context", "error", "mark", "seconds", "value")

    def __init__(
        self, value: Any, mark: Mark, context: Context | None, error: Exception | None, seconds: float
    ) -> None:
        self.value = value
        self.mark = mark
        self.context = context
        self.error = error
        """What stage code raised, after its mark was recorded: the launch is over, not the device's work."""
        self.seconds = seconds


class Output:
    """A value (or a gap, `live` False) that waits for its turn to leave its stage."""

    __slots__ = ("charged", "fence", "live", "port", "seq", "tickets", "value", "versions")

    def __init__(
        self,
        *,
        value: Any = None,
        live: bool = True,
        fence: Fence,
        charged: tuple[Edge, ...] = (),
        seq: int | None = None,
        port: str | None = None,
        versions: Mapping[str, Version] | None = None,
        tickets: tuple[Any, ...] = (),
    ) -> None:
        self.value = value
        self.live = live
        self.fence = fence
        self.charged = charged
        self.seq = seq
        self.port = port
        self.versions = versions
        self.tickets = tickets


class Job:
    """Changes on the loop only; its lane reads `value`, `seq` and `generator` while a launch runs."""

    __slots__ = ("charged", "failures", "fence", "gaps", "generator", "generator_context", "lane", "launching",
                 "outputs", "parts", "pending", "retired", "retry", "retry_due", "returned", "seq", "started",
                 "tickets", "unpinned", "unreached", "value", "versions")  # fmt: skip

    def __init__(self, lane: Lane | None, seq: int | None, taken: Taken | None, started: float) -> None:
        self.lane = lane
        self.seq = seq
        """Its number where one job makes one output; None where outputs are numbered as they leave."""
        self.parts: list[tuple[Edge, Item]] = taken.parts if taken is not None else []
        self.value: Any = taken.value if taken is not None else None
        self.charged: tuple[Edge, ...] = ()
        """Edges on which it holds a credit for an output that is not made yet."""
        self.outputs: deque[Output] = deque()
        self.pending: deque[Output] = deque()
        """What a scattering stage made at once, waiting for credits one by one."""
        self.generator: Any = None
        self.launching = False
        self.returned = False
        """No more launches."""
        self.unreached = 0
        """Launches whose fence is not reached."""
        self.fence = Fence()
        """Of its latest launch."""
        self.started = started
        self.failures = 0
        self.retry = False
        """It raised and will be launched again; `retry_due` once the fence of the failed launch is reached."""
        self.retry_due = False
        self.unpinned = False
        self.gaps: tuple[int, ...] = ()
        self.generator_context: Context | None = None
        self.versions: Mapping[str, Version] | None = None
        self.tickets: tuple[Any, ...] = ()
        self.retired = False

    @property
    def over(self) -> bool:
        """Returned, and every fence reached."""
        return self.returned and self.unreached == 0 and not self.launching

    def kept(self) -> int:
        """Credits an edge counts for it in hand: one in production, and what waits to leave."""
        return (1 if self.charged else 0) + sum(1 for output in self.outputs if output.live)
