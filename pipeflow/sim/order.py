"""What comes after what, whatever the timing: vector clocks.

A *timeline* does one thing after another: a stream, a thread of the host, the loop. Each counts its events;
an *event* is (timeline, count). A timeline's *clock* says for every other one up to which count it has
waited. Event a happened before all that a timeline does from now on if, and only if, the timeline's clock
reaches a's count: a dictionary look-up. The clock never tells what merely happened earlier in the schedule at
hand, so one schedule stands for all timings of the same program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Order", "Snapshot", "Stamp", "Timeline", "happened_before"]


class Stamp(NamedTuple):
    """An event: the number of its timeline, and its count there (from 1)."""

    line: int
    number: int


class Snapshot(NamedTuple):
    """A timeline's clock at one moment. Immutable: the timeline copies before it changes `others`."""

    line: int
    number: int
    """Events of the timeline itself until then."""
    others: Mapping[int, int]

    def knows(self, line: int, count: int) -> bool:
        """Whether the event came before this moment."""
        return count <= self.number if line == self.line else self.others.get(line, 0) >= count


def happened_before(event: Stamp, moment: Snapshot) -> bool:
    """Whether the event came before the moment in every timing. O(1)."""
    return moment.knows(event.line, event.number)


class Timeline:
    """See the module's text. Made by `Order.timeline`."""

    __slots__ = ("_lent", "_others", "_seen", "count", "index", "name")

    def __init__(self, index: int, name: str) -> None:
        self.index = index
        self.name = name
        self.count = 0
        self._others: dict[int, int] = {}
        self._lent = False
        """A snapshot shares the dictionary: copy it before the next change."""
        self._seen: dict[int, tuple[int, Mapping[int, int]]] = {}
        """The last snapshot joined of each timeline: the same one again changes nothing."""

    def tick(self) -> Stamp:
        """One more event."""
        self.count += 1
        return Stamp(self.index, self.count)

    def snapshot(self) -> Snapshot:
        """The clock now. Costs nothing; the next join copies."""
        self._lent = True
        return Snapshot(self.index, self.count, self._others)

    def knows(self, line: int, count: int) -> bool:
        """Whether the event comes before everything this timeline does from now on."""
        return count <= self.count if line == self.index else self._others.get(line, 0) >= count

    def join(self, moment: Snapshot) -> None:
        """What this timeline does from now on comes after `moment`, and all that came before that."""
        line, count, others = moment
        seen = self._seen.get(line)
        if seen is not None and seen[0] >= count and seen[1] is others:
            return
        self._seen[line] = (count, others)
        mine = self._others
        changed = {
            key: reached
            for key, reached in (*others.items(), (line, count))
            if reached > mine.get(key, 0) and key != self.index
        }
        if not changed:
            return
        if self._lent:
            self._others = mine = dict(mine)
            self._lent = False
        mine.update(changed)


class Order:
    """Makes the timelines of one world."""

    def __init__(self) -> None:
        self.timelines: list[Timeline] = []

    def timeline(self, name: str) -> Timeline:
        """A new timeline, which knows of nothing yet."""
        made = Timeline(len(self.timelines), name)
        self.timelines.append(made)
        return made
