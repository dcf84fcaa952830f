"""In whose work a device was when it failed (axiom 7.2).

After a fault every mark of the device fails, also those passed long ago: which one the host hears of first
proves nothing. So each lane has two words in pinned memory that the device itself writes as it comes by: the
first operation of a launch writes its count to the begin word, the last one to the end word. The host reads
them after the fault, when every call of the device fails. Where begin is ahead of end, the device was in that
lane's work: a suspect. The culprit is among them, a lane without work never.

Launches are counted a lane, and not told by their item's number, as that is the same for a retry and for each
output of a one-to-many job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pipeflow.device.base import Words
    from pipeflow.lane import Lane

__all__ = ["Trace", "suspects"]

_KEPT = 1024
"""Launches of a lane that are remembered: no more than a stream's queue takes before a launch blocks."""


class Trace:
    """The words of one lane, and whose launch each count was. `begin` and `end` are called on its thread, in
    turn, on its stream."""

    __slots__ = ("_count", "_numbers", "_words")

    def __init__(self, words: Words) -> None:
        self._words = words
        self._count = 0
        self._numbers: list[int | None] = [None] * _KEPT

    def begin(self, number: int | None) -> None:
        """The next launch begins here; `number`: of its item, None for a hook."""
        self._count += 1
        self._numbers[self._count % _KEPT] = number
        self._words.begin(self._count)

    def end(self) -> None:
        """All of it is enqueued."""
        self._words.end(self._count)

    def in_work(self) -> tuple[bool, int | None]:
        """Whether the device was between the words, and the number of that launch's item. No device call."""
        begin, end = self._words.read()
        return begin > end, self._numbers[begin % _KEPT]


def suspects(lanes: Iterable[Lane]) -> list[str]:
    """Those in whose work their device was, with the item."""
    found: list[str] = []
    for lane in lanes:
        if lane.trace is None:
            continue
        in_work, number = lane.trace.in_work()
        if in_work:
            doing = "in a hook" if number is None else f"item {number}"
            found.append(f"{lane.name}[{lane.index}] {doing}")
    return found
