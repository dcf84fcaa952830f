"""Every access to memory, checked against the order that the program itself guarantees.

An access is checked as it is enqueued, against the clock of the stream (or host thread) that makes it: what
it needs must come before it in every timing. What goes wrong in some timing is a `Hazard`, found in this one.

kind             the second operation
`race`           reads, with no order to the write; or writes, with no order to a read or write
`reused`         uses a block that was given on while the owner before may still use it
`unmapped`       unmaps memory that may still be in use
`read-early`     reads on the host what the host does not know to be written
`use-after-free` uses, by an address it kept, a block that was freed
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pipeflow.sim.memory import Chunk
    from pipeflow.sim.order import Timeline
    from pipeflow.sim.queue import SimStream

__all__ = ["GARBAGE", "Block", "Checker", "Event", "Hazard", "Part", "Use", "Where"]


class _Garbage:
    def __repr__(self) -> str:
        return "GARBAGE"


GARBAGE: Final = _Garbage()
"""What memory holds that was never written, or that may be written by others just now."""


class Part(NamedTuple):
    """What a read of `nbytes` at `offset` gives, where one write filled more than that with `value`."""

    value: Any
    offset: int
    nbytes: int


class Where(NamedTuple):
    """An operation by name."""

    stage: str | None
    sequence: int | None
    line: str
    """The stream, or the thread of the host."""
    name: str
    """The kernel, or what the host did."""

    def __str__(self) -> str:
        of = "" if self.stage is None else f" of {self.stage!r}"
        item = "" if self.sequence is None else f" item {self.sequence}"
        return f"{self.name!r}{of}{item} on {self.line}"


class Hazard(NamedTuple):
    """Two operations on one block without the order that they need (kinds: see the module's text)."""

    kind: str
    block: str
    first: Where
    second: Where

    def __str__(self) -> str:
        return f"{self.kind}: {self.block}: nothing orders {self.second} after {self.first}"


class Event:
    """One operation's place in the order. `done`: it is over in the schedule at hand."""

    __slots__ = ("count", "done", "line", "where")

    def __init__(self, line: int, count: int, where: Where, *, done: bool = False) -> None:
        self.line = line
        self.count = count
        self.where = where
        self.done = done


class Use(NamedTuple):
    """What an owner before did with a range of addresses; the last of its timeline stands for all."""

    low: int
    high: int
    event: Event


class _Cell:
    """One byte range of a block, as some operation named it."""

    __slots__ = ("high", "low", "reads", "write")

    def __init__(self, low: int, high: int) -> None:
        self.low = low
        self.high = high
        self.write: Event | None = None
        self.reads: dict[int, Event] = {}
        """Since that write, the last of each timeline."""


class Block:
    """One allocation: who used it, and what is in it. Tensors and their views share it."""

    __slots__ = ("_cells", "_contents", "_ordered", "chunk", "freed", "kept", "name", "nbytes", "span",
                 "stream", "tensors", "version")  # fmt: skip

    def __init__(self, name: str, nbytes: int, chunk: Chunk, stream: SimStream | None) -> None:
        self.name = name
        self.nbytes = nbytes
        self.chunk = chunk
        self.stream = stream
        """On which it was allocated; None for memory of the host."""
        self.version = 0
        self.tensors = 0
        """Tensors that hold it. It is freed with the last."""
        self.freed: Where | None = None
        self.span = (chunk.address, chunk.address + chunk.size)
        """Its addresses, also after it was freed and its chunk grew or shrank."""
        self.kept: dict[SimStream, None] = {}
        """Streams whose work is awaited before the block is given on (`Device.keep`)."""
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._contents: dict[tuple[int, int], Any] = {}
        self._ordered: set[int] = set()
        """Timelines known to come after all that the owners before did."""

    @property
    def address(self) -> int:
        return self.span[0]

    def uses(self) -> Iterable[Use]:
        """The last write and the reads since, one a timeline, each as a use of the whole block."""
        last: dict[int, Event] = {}
        for cell in self._cells.values():
            for event in (cell.write, *cell.reads.values()):
                if event is not None and (event.line not in last or last[event.line].count < event.count):
                    last[event.line] = event
        return [Use(*self.span, event) for event in last.values()]

    # What is in it, in the schedule at hand ---------------------------------------------------------

    def value(self, low: int, high: int) -> Any:
        """A range's contents: what was written there, a Part of it, or the values that fill it in order."""
        contents = self._contents
        if (low, high) in contents:
            return contents[low, high]
        inside: list[Any] = []
        reached = low
        for (start, end), value in sorted(contents.items(), key=lambda entry: entry[0]):
            if start <= low and high <= end:
                return GARBAGE if value is GARBAGE else Part(value, low - start, high - low)
            if start == reached and end <= high:
                inside.append(value)
                reached = end
        return tuple(inside) if reached == high and GARBAGE not in inside else GARBAGE

    def fill(self, low: int, high: int, value: Any) -> None:
        """A write happens. What it covers in part is garbage from then on: contents are opaque."""
        contents = self._contents
        if len(contents) > 1 or (contents and (low, high) not in contents):
            for start, end in [key for key in contents if key[0] < high and low < key[1]]:
                del contents[start, end]
        contents[low, high] = value
        if self.chunk.ghosts:
            self._spoil_ghosts()

    def _spoil_ghosts(self) -> None:
        left: list[Block] = []
        for ghost in self.chunk.ghosts:
            if ghost is self or ghost.span[1] <= self.span[0] or self.span[1] <= ghost.span[0]:
                left.append(ghost)
            else:
                ghost._contents.clear()
        self.chunk.ghosts = left

    # Used by the checker ----------------------------------------------------------------------------

    def cell(self, low: int, high: int) -> _Cell:
        found = self._cells.get((low, high))
        if found is None:
            found = self._cells[low, high] = _Cell(low, high)
        return found

    def overlapping(self, low: int, high: int) -> Iterable[_Cell]:
        cells = self._cells
        if len(cells) == 1 and (low, high) in cells:
            return cells.values()
        return [cell for cell in cells.values() if cell.low < high and low < cell.high]

    def unordered_past(self, timeline: Timeline) -> Iterable[Event]:
        """What owners before did, in no order to what the timeline does from now on."""
        if timeline.index in self._ordered:
            return ()
        uses = (use.event for use in self.chunk.past)
        late = [old for old in uses if not timeline.knows(old.line, old.count)]
        if not late:
            self._ordered.add(timeline.index)
        return late


class Checker:
    """Finds hazards. `found` hears of each, once."""

    def __init__(self, found: Callable[[Hazard], None]) -> None:
        self._found = found
        self._seen: set[Hazard] = set()

    def report(self, kind: str, block: str, first: Where, second: Where) -> None:
        """One hazard; the same again says nothing new."""
        hazard = Hazard(kind, block, first, second)
        if hazard not in self._seen:
            self._seen.add(hazard)
            self._found(hazard)

    def read(
        self, block: Block, low: int, high: int, event: Event, timeline: Timeline, kind: str = "race"
    ) -> bool:
        """A read by `timeline`, whose newest event is `event`. Whether it is ordered after what it reads."""
        ordered = self._usable(block, event, timeline)
        for cell in block.overlapping(low, high):
            write = cell.write
            if write is not None and not timeline.knows(write.line, write.count):
                self.report(kind, block.name, write.where, event.where)
                ordered = False
        block.cell(low, high).reads[event.line] = event
        return ordered

    def write(self, block: Block, low: int, high: int, event: Event, timeline: Timeline) -> bool:
        """A write by `timeline`. Whether it is ordered after everything before it."""
        ordered = self._usable(block, event, timeline)
        for cell in block.overlapping(low, high):
            for old in (cell.write, *cell.reads.values()):
                if old is not None and not timeline.knows(old.line, old.count):
                    self.report("race", block.name, old.where, event.where)
                    ordered = False
        cell = block.cell(low, high)
        cell.write = event
        # What comes after this write comes after what came before it; what did not is reported already.
        cell.reads = {}
        return ordered

    def _usable(self, block: Block, event: Event, timeline: Timeline) -> bool:
        if block.freed is not None:
            self.report("use-after-free", block.name, block.freed, event.where)
            block.chunk.past.append(Use(*block.span, event))
            return False
        ordered = True
        if block.chunk.past:
            for old in block.unordered_past(timeline):
                self.report("reused", block.name, old.where, event.where)
                ordered = False
        return ordered
