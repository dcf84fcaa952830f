"""Which source records are through (`exact: false`): an unordered run has no cut behind which all is done.

A record is through when all that was made of it has been used by the stage `of` or has ended on its way. What
was in flight at a checkpoint is read again by a resumed run; a record of which a part had been used already
is used twice in that part (at least once).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

    def freeze(self) -> None:
        """The stage `of` stands still: what is not through now is read again."""
        for source, acks in self._open.items():
            left = [ack for ack in acks if ack.carriers]
            self._open[source] = left
            self._frozen[source] = (_made(source), [ack.number for ack in left])

    def records(self, source: Runner) -> tuple[int, dict[str, Any]]:
        """The first record that is read again, and the facts by which those behind it that are through are
        passed over."""
        made, open_ = self._frozen.get(source, (_made(source), []))
        first = min(open_, default=made)
        skipped = self._through.get(source, frozenset())
        acked = sorted((set(range(first, made)) - set(open_)) | {n for n in skipped if n >= first})
        return first, {"acked": acked}


def _made(source: Runner) -> int:
    """Records that it has made; the one in the making is not there yet."""
    return source.counters.started - sum(job.launching for job in source.hand)
