"""What travels between stages: items, gaps, and the few values a stage may return to steer them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar, final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeflow.device.base import Freed
    from pipeflow.fence import Fence
    from pipeflow.lifetime import Stamp

__all__ = ["DROP", "Failed", "Item", "Port", "Scatter", "Trigger", "Version"]

T = TypeVar("T")


class Version(NamedTuple):
    """A resource's content: the run that made it, and how many steps its writer had made."""

    incarnation: str
    step: int


class Item:
    """A value on its way, with the number it has in its producer's domain.

    `versions` are those of the resources that made it (a gather keeps the oldest); `tickets` are the
    submits that wait for what becomes of it; `holds` counts the edges and jobs that still need it.
    """

    __slots__ = (
        "buffers",
        "fence",
        "given_away",
        "holds",
        "nbytes",
        "operation",
        "port",
        "seq",
        "stamp",
        "tickets",
        "value",
        "versions",
    )

    def __init__(
        self,
        seq: int,
        value: Any,
        fence: Fence,
        *,
        port: str | None = None,
        versions: Mapping[str, Version] | None = None,
        tickets: tuple[Any, ...] = (),
        nbytes: int = 0,
        stamp: Stamp | None = None,
    ) -> None:
        self.seq = seq
        self.value = value
        self.fence = fence
        self.port = port
        self.versions = versions
        self.tickets = tickets
        self.nbytes = nbytes
        self.stamp = stamp
        """Of its tensors, which nobody may write while it lives (see `lifetime`)."""
        self.holds = 0
        self.operation = 0
        """Its number in the operation log, if there is one."""
        self.buffers: Any = None
        """Its storages, once an edge with a byte budget asked."""
        self.given_away = False
        """A caller has the value now: it is not the engine's to reuse."""

    def forget(self) -> None:
        """Drop what it holds: the run is over."""
        self.value = self.stamp = self.buffers = None

    def __repr__(self) -> str:
        return f"Item({self.seq}, {type(self.value).__name__})"


@final
class _Drop:
    def __repr__(self) -> str:
        return "DROP"


DROP: Final = _Drop()
"""Return it from `run` to filter the item out: its number passes on as a gap."""


class Failed:
    """Yielded by a source in place of a record that it could not read.

    The stage's `on_error` decides, as if `run` had raised for this one item.
    """

    __slots__ = ("error", "record")

    def __init__(self, error: Exception, record: object = None) -> None:
        self.error = error
        self.record = record


class Port(Generic[T]):
    """A value for the named output: `return Port("math", row)` leaves by `from: route.math`."""

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: T) -> None:
        self.name = name
        self.value = value


class Scatter(Generic[T]):
    """Returned by a gathering stage: one value a member, in the members' order.

    The members get their numbers back, so a submitted item finds its own result.
    """

    __slots__ = ("values",)

    def __init__(self, values: Sequence[T]) -> None:
        self.values = list(values)


class Trigger(NamedTuple):
    """What a barrier hands to the stages that it guards."""

    seq: int
    versions: Mapping[str, Version]
    reason: str  # every | end | start
    freed: tuple[Freed, ...] = ()
    """For a stage that `releases`: what the engine gave back before it ran."""
