"""Which source records are through (`exact: false`): an unordered run has no cut behind which all is done.

A record is through when all that was made of it has been used by the stage `of` or has ended on its way. What
was in flight at a checkpoint is read again by a resumed run; a record of which a part had been used already
is used twice in that part (at least once).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pipeflow.job import Job
    from pipeflow.runner import Runner

__all__ = ["Ack", "Acks"]


class _Nobody:
    """Nobody waits for what becomes of a record."""

    @staticmethod
    def done() -> bool:
        return True


class Ack:
    """Rides on items as the ticket of a submit does. Without carriers the record is through."""

    __slots__ = ("carriers", "number")
    future = _Nobody

    def __init__(self, number: int) -> None:
        self.number = number
        self.carriers = 0


class Acks:
    """The records of every source that are not through yet."""

    def __init__(self) -> None:
        self._open: dict[Runner, list[Ack]] = {}
        self._through: dict[Runner, frozenset[int]] = {}
        """Of a resumed run: read before, and through."""
        self._frozen: dict[Runner, tuple[int, list[int]]] = {}

    def bring_back(self, source: Runner, acked: Iterable[int]) -> None:
        """At load of a resumed run."""
        self._through[source] = frozenset(acked)

    def through_before(self, source: Runner, number: int | None) -> bool:
        """Whether a record was through before the run was resumed, so that it passes as a gap."""
        return number in self._through.get(source, ())

    def made(self, source: Runner, job: Job) -> None:
        """A source has made a record."""
        assert job.number is not None
        ack = Ack(job.number)
        job.tickets = (ack,)
        self._open.setdefault(source, []).append(ack)

    def freeze(self, sources: Iterable[Runner]) -> None:
        """The stage `of` stands still: what is not through now is read again."""
        for source in sources:
            acks = self._open.get(source, [])
            left = [ack for ack in acks if ack.carriers]
            self._open[source] = left
            self._frozen[source] = (_made(source), [ack.number for ack in left])

    def first_open(self, source: Runner) -> int:
        """The first record that is read again."""
        made, waiting = self._frozen[source]
        return min(waiting, default=made)

    def through(self, source: Runner, begin: int) -> list[int]:
        """Those from `begin` on that are through, so that a resumed run passes them over."""
        made, waiting = self._frozen[source]
        before = {number for number in self._through.get(source, ()) if number >= made}
        return sorted({*range(begin, made), *before} - {*waiting})


def _made(source: Runner) -> int:
    """Records that it has made; the one in the making is not there yet."""
    return source.counters.started - sum(job.launching for job in source.hand)
