"""How a stage takes from its in-edges: one policy a class (axioms 1.1 to 1.6).

`peek` says what could start now without taking it, so that nothing is taken before its credits are there;
gaps are consumed at once, as they need none.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from pipeflow.error_text import named_error
from pipeflow.errors import StageError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Hashable, Sequence

    from pipeflow.edge import Edge
    from pipeflow.item import Item
    from pipeflow.stage import Gather

__all__ = ["Arrivals", "Batches", "Join", "Policy", "Select", "Single", "Taken", "Turns"]


class Taken:
    """What a job works on. `seq` is None where the stage starts a domain; `gaps` are the numbers of gaps
    among a batch's members, for a stage that scatters."""

    __slots__ = ("gaps", "parts", "seq", "value")

    def __init__(
        self, seq: int | None, parts: list[tuple[Edge, Item]], value: Any, gaps: tuple[int, ...] = ()
    ) -> None:
        self.seq = seq
        self.parts = parts
        self.value = value
        self.gaps = gaps


class Policy(Protocol):
    """A way to take from in-edges."""

    edges: list[Edge]

    def gaps(self) -> Sequence[int]:
        """Consume the gaps at the front; the numbers that pass through (none where a domain starts)."""
        ...

    def peek(self) -> Taken | None:
        """What could start now, or None."""
        ...

    def take(self, taken: Taken) -> None:
        """Consume what `peek` showed."""
        ...

    def ended(self) -> bool:
        """Whether nothing is left and nothing will come."""
        ...

    def waits_for(self) -> str:
        """For a stall report: what is missing, in words."""
        ...


def _names(edges: list[Edge]) -> str:
    return ", ".join(edge.producer.name for edge in edges if not edge.ended and edge.empty) or "nothing"


@contextmanager
def _naming(edge: Edge, item: Item, hook: str) -> Generator[None]:
    """Stage code that the engine calls outside a job: its faults name the stage all the same."""
    try:
        yield
    except BaseException as error:  # a KeyboardInterrupt that stage code raises is its fault, too
        raise StageError(
            f"in {hook}: {named_error(error)}",
            stage=edge.consumer.name,
            sequence=edge.number(item),
        ) from error


def never() -> bool:
    return False


def _must_hash(bucket: object) -> None:
    try:
        hash(bucket)
    except TypeError as error:
        kind = type(bucket).__name__
        remedy = "Return a number, text or a tuple of these"
        raise TypeError(f"the result of bucket must be hashable, but it is a {kind}. {remedy}") from error


class Single:
    """One in-edge, in order."""

    def __init__(self, edges: list[Edge]) -> None:
        self.edges = edges
        self._edge = edges[0]

    def gaps(self) -> Sequence[int]:
        edge = self._edge
        if (seq := edge.gap()) is None:
            return ()
        found: list[int] = []
        while seq is not None:
            found.append(seq)
            edge.pop()
            seq = edge.gap()
        return found

    def peek(self) -> Taken | None:
        edge = self._edge
        item = edge.first()
        if item is None:
            return None
        return Taken(edge.number(item), [(edge, item)], item.value)

    def take(self, taken: Taken) -> None:
        self._edge.pop()

    def ended(self) -> bool:
        return self._edge.ended

    def waits_for(self) -> str:
        return f"an item from {self._edge.producer.name}"


class Join:
    """Named inputs: waits for the same number on every edge; the value is a dict by input name."""

    def __init__(self, edges: list[Edge]) -> None:
        self.edges = edges

    def _number(self) -> int | None:
        """The number at every head; None while one is missing."""
        found: int | None = None
        for edge in self.edges:
            seq = edge.head()
            if seq is None:
                return None
            if found is not None and seq != found:
                names = ", ".join(f"{e.producer.name}: {e.head()}" for e in self.edges)
                raise RuntimeError(
                    f"the heads of a join differ in number ({names}); this is a fault of the engine"
                )
            found = seq
        return found

    def gaps(self) -> Sequence[int]:
        if self.ended():
            return ()
        passed: list[int] = []
        while (seq := self._number()) is not None and any(edge.gap() is not None for edge in self.edges):
            for edge in self.edges:
                item = edge.pop()
                if item is not None:  # its partner is a gap: it retires here without a job
                    edge.consumer.retire(edge, item, passes=True)
            passed.append(seq)
        return passed

    def peek(self) -> Taken | None:
        parts: list[tuple[Edge, Item]] = []
        for edge in self.edges:
            item = edge.first()
            if item is None:
                return None
            parts.append((edge, item))
        return Taken(self._number(), parts, {edge.name: item.value for edge, item in parts})

    def take(self, taken: Taken) -> None:
        for edge in self.edges:
            edge.pop()

    def ended(self) -> bool:
        """With its shortest input: inputs of separate sources may differ in length. What comes after that
        retires unused (`Runner.pump`)."""
        return any(edge.ended for edge in self.edges)

    def waits_for(self) -> str:
        return f"its partners from {_names(self.edges)}"


class Turns:
    """A list of inputs, in turns: starts a domain. An ended input loses its turn; a gap takes it."""

    def __init__(self, edges: list[Edge]) -> None:
        self.edges = edges
        self.turn = 0
        self.stops_short: Callable[[], bool] = never
        """Whether inputs ended before their time: then none loses its turn; a resumed run goes on there."""

    def _current(self) -> Edge:
        for _ in self.edges:
            edge = self.edges[self.turn]
            if not edge.ended or self.stops_short():
                return edge
            self._advance()
        return self.edges[self.turn]

    def _advance(self) -> None:
        self.turn = (self.turn + 1) % len(self.edges)

    def gaps(self) -> Sequence[int]:
        while self._current().gap() is not None:
            self._current().pop()
            self._advance()
        return ()

    def peek(self) -> Taken | None:
        edge = self._current()
        item = edge.first()
        return None if item is None else Taken(None, [(edge, item)], item.value)

    def take(self, taken: Taken) -> None:
        taken.parts[0][0].pop()
        self._advance()

    def ended(self) -> bool:
        if self.stops_short():
            return self._current().ended
        return all(edge.ended for edge in self.edges)

    def waits_for(self) -> str:
        return f"the turn of {self._current().producer.name}"


class Arrivals:
    """A list of inputs with `ordered: false`: whatever is there, oldest edge first; starts a domain."""

    def __init__(self, edges: list[Edge]) -> None:
        self.edges = edges
        self._next = 0

    def gaps(self) -> Sequence[int]:
        for edge in self.edges:
            while edge.gap() is not None:
                edge.pop()
        return ()

    def peek(self) -> Taken | None:
        # Start after the edge served last, so that a fast one cannot starve the others.
        for offset in range(len(self.edges)):
            edge = self.edges[(self._next + offset) % len(self.edges)]
            item = edge.first()
            if item is not None:
                return Taken(None, [(edge, item)], item.value)
        return None

    def take(self, taken: Taken) -> None:
        edge = taken.parts[0][0]
        edge.pop()
        self._next = (self.edges.index(edge) + 1) % len(self.edges)

    def ended(self) -> bool:
        return all(edge.ended for edge in self.edges)

    def waits_for(self) -> str:
        return f"an item from any of {_names(self.edges)}"


class Select:
    """A list of ports of one stage: exactly one is live at each number; keeps the domain."""

    def __init__(self, edges: list[Edge]) -> None:
        self.edges = edges

    def _complete(self) -> bool:
        return not any(edge.empty for edge in self.edges)

    def gaps(self) -> Sequence[int]:
        passed: list[int] = []
        while self._complete() and all(edge.gap() is not None for edge in self.edges):
            passed.append(self.edges[0].gap() or 0)
            for edge in self.edges:
                edge.pop()
        return passed

    def peek(self) -> Taken | None:
        if not self._complete():
            return None
        live = [(edge, item) for edge in self.edges if (item := edge.first()) is not None]
        if not live:
            return None
        edge, item = live[0]
        if len(live) > 1:  # to take one would be to lose the others, unsaid
            said = f"{len(live)} of its inputs from {edge.producer.name!r} have an item of this number"
            raise StageError(said, stage=edge.consumer.name, sequence=edge.number(item))
        return Taken(edge.number(item), [(edge, item)], item.value)

    def take(self, taken: Taken) -> None:
        for edge in self.edges:
            edge.pop()

    def ended(self) -> bool:
        return all(edge.ended for edge in self.edges)

    def waits_for(self) -> str:
        return f"an item from {_names(self.edges)}"


class _Batch:
    """The members of a bucket so far."""

    __slots__ = ("members", "values")

    def __init__(self) -> None:
        self.members: list[tuple[Edge, Item]] = []
        self.values: list[Any] = []
        """What `full` sees, kept beside the members: a list anew for each one costs the square of a batch."""


class Batches:
    """A gather: members collect in buckets; the first full one leaves before anything else is taken.

    A member keeps its credit until its batch retires, so an edge whose credits all sit in unfinished
    batches admits one more (`Edge.admits`).
    """

    def __init__(self, edges: list[Edge], stage: Gather[Any, Any], *, scatters: bool) -> None:
        self.edges = edges
        self._edge = edges[0]
        self._stage = stage
        self.linger = stage.linger
        self._scatters = scatters
        self._open: dict[Hashable, _Batch] = {}  # in the order of their first members
        self._since: dict[Hashable, float] = {}
        """Bucket to when its first member came, by the loop's clock."""
        self._gaps: list[int] = []
        self._due: list[Hashable] = []
        """Buckets that leave next: a full one, or those whose time is over."""
        self._awaited: Item | None = None
        self.lost: list[Callable[[int], None]] = []
        """Who hears of each gap: it goes no further, as batches are numbered anew."""
        self.stops_short: Callable[[], bool] = never
        """Whether its input ended before its time, and a resumed run will go on with what is open here."""

    def gaps(self) -> Sequence[int]:
        edge = self._edge
        while not self._due and not edge.empty:
            seq = edge.gap()
            if seq is not None:
                edge.pop()
                for hears in self.lost:
                    hears(seq)
                if self._scatters:
                    self._gaps.append(seq)
            elif not self._absorb(edge):
                break
        if not self._due and edge.ended and self._open:
            if self.stops_short():
                self._gaps.clear()
                for each, item in self.discard():
                    edge.consumer.retire(each, item)
            else:
                self._due.extend(self._open)
        if self._scatters and not self._open and edge.ended and self._gaps:
            passed, self._gaps = self._gaps, []
            return passed
        return ()

    def _absorb(self, edge: Edge) -> bool:
        """Put the item at the head into its bucket. False: the host may not look at it yet."""
        item = edge.first()
        assert item is not None
        if edge.consumer.on_host and not item.fence.reached:
            if item is not self._awaited:
                self._awaited = item
                item.fence.when_reached(edge.consumer.wake)
            return False
        with _naming(edge, item, "bucket"):
            bucket = self._stage.bucket(item.value)
            _must_hash(bucket)
            batch = self._open.get(bucket)
        if batch is None:
            batch = self._open[bucket] = _Batch()
            self._since[bucket] = edge.consumer.engine.loop.time()
        edge.pop()
        edge.gathered += 1
        batch.members.append((edge, item))
        batch.values.append(item.value)
        edge.producer.wake()  # its edge may admit one more now
        with _naming(edge, item, "full"):
            if self._stage.full(batch.values):
                self._due.append(bucket)
        return True

    def waits_since(self) -> float | None:
        """When the first member of the bucket that has waited longest came; None where none waits."""
        return next(iter(self._since.values()), None) if not self._due else None

    def flush(self, before: float) -> None:
        """Let every batch leave whose first member came before this time."""
        self._due.extend(
            bucket for bucket, since in self._since.items() if since <= before and bucket not in self._due
        )

    @property
    def due(self) -> bool:
        """A batch leaves next."""
        return bool(self._due)

    def gathered(self, edge: Edge) -> list[int]:
        """The numbers that unfinished batches hold; of a stage that scatters, the gaps among them too."""
        members = [edge.number(item) for batch in self._open.values() for _, item in batch.members]
        return sorted([*members, *self._gaps])

    def members(self) -> list[tuple[Edge, Item]]:
        """Of every unfinished batch."""
        return [member for batch in self._open.values() for member in batch.members]

    def discard(self) -> list[tuple[Edge, Item]]:
        """Give up every unfinished batch; its members."""
        members = self.members()
        for edge, _ in members:
            edge.gathered -= 1
        self._open.clear()
        self._since.clear()
        self._due.clear()
        return members

    def peek(self) -> Taken | None:
        if not self._due:
            return None
        members = self._open[self._due[0]].members
        return Taken(None, list(members), [item.value for _, item in members], tuple(self._gaps))

    def take(self, taken: Taken) -> None:
        bucket = self._due.pop(0)
        members = self._open.pop(bucket).members
        del self._since[bucket]
        self._gaps = []
        for edge, _ in members:
            edge.gathered -= 1

    def ended(self) -> bool:
        return self._edge.ended and not self._open

    def waits_for(self) -> str:
        held = sum(len(batch.members) for batch in self._open.values())
        return f"{held} gathered, waits for an item from {self._edge.producer.name} to fill a batch"
