"""How a stage takes from its in-edges: one policy a class (axioms 1.1 to 1.6).

`peek` says what could start now without taking it, so that nothing is taken before its credits are there;
gaps are consumed at once, as they need none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Hashable

    from pipeflow.edge import Edge
    from pipeflow.item import Item
    from pipeflow.stage import Gather

__all__ = ["Arrivals", "Batches", "Join", "Policy", "Select", "Single", "Taken", "Turns"]


class Taken(NamedTuple):
    """What a job works on. `seq` is None where the stage starts a domain."""

    seq: int | None
    parts: list[tuple[Edge, Item]]
    value: Any
    gaps: tuple[int, ...] = ()
    """Numbers of gaps among a batch's members, for a stage that scatters."""


class Policy(Protocol):
    """A way to take from in-edges."""

    edges: list[Edge]

    def gaps(self) -> list[int]:
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


class Single:
    """One in-edge, in order."""

    def __init__(self, edges: list[Edge]) -> None:
        self.edges = edges
        self._edge = edges[0]

    def gaps(self) -> list[int]:
        found: list[int] = []
        edge = self._edge
        while (head := edge.head()) is not None and head[1] is None:
            found.append(edge.pop()[0])
        return found

    def peek(self) -> Taken | None:
        head = self._edge.head()
        if head is None or head[1] is None:
            return None
        return Taken(head[0], [(self._edge, head[1])], head[1].value)

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

    def _heads(self) -> list[tuple[int, Item | None]] | None:
        heads = [edge.head() for edge in self.edges]
        if any(head is None for head in heads):
            return None
        found = [head for head in heads if head is not None]
        numbers = {seq for seq, _ in found}
        if len(numbers) != 1:
            names = ", ".join(f"{e.producer.name}: {h[0]}" for e, h in zip(self.edges, found, strict=True))
            raise RuntimeError(f"the heads of a join differ in number ({names}); this is a fault of the engine")
        return found

    def gaps(self) -> list[int]:
        passed: list[int] = []
        if any(edge.ended for edge in self.edges):
            # Inputs of separate sources may differ in length: what has no partner left retires here.
            for edge in self.edges:
                while not edge.empty:
                    _, item = edge.pop()
                    if item is not None:
                        edge.consumer.retire(edge, item)
            return passed
        while (heads := self._heads()) is not None and any(item is None for _, item in heads):
            for edge in self.edges:
                _, item = edge.pop()
                if item is not None:  # its partner is a gap: it retires here without a job
                    edge.consumer.retire(edge, item)
            passed.append(heads[0][0])
        return passed

    def peek(self) -> Taken | None:
        heads = self._heads()
        if heads is None:
            return None
        parts: list[tuple[Edge, Item]] = []
        for edge, (_, item) in zip(self.edges, heads, strict=True):
            if item is None:
                return None
            parts.append((edge, item))
        value = {edge.name: item.value for edge, item in parts}
        return Taken(heads[0][0], parts, value)

    def take(self, taken: Taken) -> None:
        for edge in self.edges:
            edge.pop()

    def ended(self) -> bool:
        return all(edge.ended for edge in self.edges)

    def waits_for(self) -> str:
        return f"its partners from {_names(self.edges)}"


class Turns:
    """A list of inputs, in turns: starts a domain. An ended input loses its turn; a gap takes it."""

    def __init__(self, edges: list[Edge]) -> None:
        self.edges = edges
        self._turn = 0

    def _current(self) -> Edge:
        for _ in self.edges:
            edge = self.edges[self._turn]
            if not edge.ended:
                return edge
            self._advance()
        return self.edges[self._turn]

    def _advance(self) -> None:
        self._turn = (self._turn + 1) % len(self.edges)

    def gaps(self) -> list[int]:
        while (head := self._current().head()) is not None and head[1] is None:
            self._current().pop()
            self._advance()
        return []

    def peek(self) -> Taken | None:
        edge = self._current()
        head = edge.head()
        if head is None or head[1] is None:
            return None
        return Taken(None, [(edge, head[1])], head[1].value)

    def take(self, taken: Taken) -> None:
        taken.parts[0][0].pop()
        self._advance()

    def ended(self) -> bool:
        return all(edge.ended for edge in self.edges)

    def waits_for(self) -> str:
        return f"the turn of {self._current().producer.name}"


class Arrivals:
    """A list of inputs with `ordered: false`: whatever is there, oldest edge first; starts a domain."""

    def __init__(self, edges: list[Edge]) -> None:
        self.edges = edges
        self._next = 0

    def gaps(self) -> list[int]:
        for edge in self.edges:
            while (head := edge.head()) is not None and head[1] is None:
                edge.pop()
        return []

    def peek(self) -> Taken | None:
        # Start after the edge served last, so that a fast one cannot starve the others.
        for offset in range(len(self.edges)):
            edge = self.edges[(self._next + offset) % len(self.edges)]
            head = edge.head()
            if head is not None and head[1] is not None:
                return Taken(None, [(edge, head[1])], head[1].value)
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

    def _heads(self) -> list[tuple[int, Item | None]] | None:
        heads = [edge.head() for edge in self.edges]
        found = [head for head in heads if head is not None]
        return found if len(found) == len(heads) else None

    def gaps(self) -> list[int]:
        passed: list[int] = []
        while (heads := self._heads()) is not None and all(item is None for _, item in heads):
            for edge in self.edges:
                edge.pop()
            passed.append(heads[0][0])
        return passed

    def peek(self) -> Taken | None:
        heads = self._heads()
        if heads is None:
            return None
        for edge, (seq, item) in zip(self.edges, heads, strict=True):
            if item is not None:
                return Taken(seq, [(edge, item)], item.value)
        return None

    def take(self, taken: Taken) -> None:
        for edge in self.edges:
            edge.pop()

    def ended(self) -> bool:
        return all(edge.ended for edge in self.edges)

    def waits_for(self) -> str:
        return f"an item from {_names(self.edges)}"


class Batches:
    """A gather: members collect in buckets; the first full one leaves before anything else is taken.

    A member keeps its credit until its batch retires, so an edge whose credits all sit in unfinished
    batches admits one more (`Edge.admits`).
    """

    def __init__(self, edges: list[Edge], stage: Gather[Any, Any], *, scatters: bool) -> None:
        self.edges = edges
        self._edge = edges[0]
        self._stage = stage
        self._scatters = scatters
        self._open: dict[Hashable, list[tuple[Edge, Item]]] = {}  # in the order of their first members
        self._gaps: list[int] = []
        self._due: list[Hashable] = []
        """Buckets that leave next: a full one, or those whose time is over."""

    def gaps(self) -> list[int]:
        edge = self._edge
        while not self._due and (head := edge.head()) is not None:
            seq, item = head
            if item is not None and not item.fence.reached and edge.consumer.on_host:
                item.fence.when_reached(edge.consumer.wake)
                break
            edge.pop()
            if item is None:
                if self._scatters:
                    self._gaps.append(seq)
                continue
            edge.gathered += 1
            bucket = self._stage.bucket(item.value)
            members = self._open.setdefault(bucket, [])
            members.append((edge, item))
            edge.producer.wake()  # its edge may admit one more now
            if self._stage.full([member.value for _, member in members]):
                self._due.append(bucket)
        if not self._due and edge.ended and self._open:
            self._due.extend(self._open)
        if self._scatters and not self._open and edge.ended and self._gaps:
            passed, self._gaps = self._gaps, []
            return passed
        return []

    def first_open(self) -> Hashable | None:
        """The bucket that has waited longest, for `linger`; None if no batch is open."""
        return next(iter(self._open), None)

    @property
    def lingering(self) -> bool:
        """Whether an unfinished batch waits for members."""
        return bool(self._open) and not self._due

    def flush(self) -> None:
        """Let all unfinished batches leave as they are."""
        self._due.extend(bucket for bucket in self._open if bucket not in self._due)

    def discard(self) -> list[tuple[Edge, Item]]:
        """Give up every unfinished batch; its members."""
        members = [member for bucket in self._open.values() for member in bucket]
        for edge, _ in members:
            edge.gathered -= 1
        self._open.clear()
        self._due.clear()
        return members

    def peek(self) -> Taken | None:
        if not self._due:
            return None
        members = self._open[self._due[0]]
        return Taken(None, list(members), [item.value for _, item in members], tuple(self._gaps))

    def take(self, taken: Taken) -> None:
        bucket = self._due.pop(0)
        members = self._open.pop(bucket)
        self._gaps = []
        for edge, _ in members:
            edge.gathered -= 1

    def ended(self) -> bool:
        return self._edge.ended and not self._open

    def waits_for(self) -> str:
        held = sum(map(len, self._open.values()))
        return f"{held} gathered, waits for an item from {self._edge.producer.name} to fill a batch"
