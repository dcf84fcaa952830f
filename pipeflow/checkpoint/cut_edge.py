"""An edge of a run with checkpoints: it can stop behind a number, and it drops what a resumed run repeats.

A *cut* is a number of the edge after which the consumer sees nothing more until the cut is passed. So all
that the consumer has, and all its state, comes from what lies before the cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeflow.edge import Edge, Gap

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pipeflow.item import Item

__all__ = ["CutEdge"]


class CutEdge(Edge):
    """Changes on the loop only. Numbers are the edge's own: `every` numbers anew what it selects."""

    __slots__ = ("begins", "cut", "last", "position", "shut", "wanted")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.cut: int | None = None
        self.shut = False
        """The cut is reached: the edge looks empty."""
        self.last = -1
        """What was put last."""
        self.position = -1
        """The highest number that the consumer took."""
        self.begins = 0
        """A resumed run: numbers below it were consumed before, but for those in `wanted`."""
        self.wanted: frozenset[int] = frozenset()

    def begin_at(self, number: int, wanted: Iterable[int], since_selected: int, *, drops: bool) -> None:
        """Of a resumed run, at load. `drops`: what is numbered below came by before, and is not wanted."""
        self.begins = number if drops else 0
        self.wanted = frozenset(wanted)
        self.last = self.position = number - 1
        self.since_selected = since_selected

    def aim(self) -> None:
        """Cut behind what was put last."""
        self.cut = self.last
        self.shut = not self._queue

    def pass_cut(self, cut: int | None) -> None:
        """Let the consumer go on, to the next cut."""
        self.cut = cut
        self.shut = False

    # As an edge ------------------------------------------------------------------------------------

    def put(self, seq: int, item: Item | None, charged: bool) -> bool:
        if self.selects(seq):
            number = (seq + 1) // self.every - 1
            if number < self.begins and number not in self.wanted:
                self.since_selected = 0
                if charged:
                    self.untake()
                return False
            self.last = number
        return super().put(seq, item, charged)

    def pop(self) -> Item | None:
        head = self._queue[0]
        number = head.seq if type(head) is Gap else self.number(head)  # type: ignore[arg-type]
        if number > self.position:
            self.position = number
        if number == self.cut:
            self.shut = True
        return super().pop()

    def throw_away(self) -> Item | None:
        position = self.position
        item = self.pop()
        self.position = position  # it was not used, and comes again in a resumed run
        return item

    def first(self) -> Item | None:
        return None if self.shut else super().first()

    def gap(self) -> int | None:
        return None if self.shut else super().gap()

    def head(self) -> int | None:
        return None if self.shut else super().head()

    @property
    def empty(self) -> bool:
        return self.shut or not self._queue

    @property
    def ended(self) -> bool:
        return not self.shut and self.closed and not self._queue
