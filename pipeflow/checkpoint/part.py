"""What is saved of one stage: numbers and counters that the engine keeps, and what its own code gave."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeflow.runner import Runner

__all__ = ["Part", "count_on", "counts_of"]


class Part:
    """A stage at a cut. `facts` are the engine's, JSON; `states` what its lanes gave, by lane, not split."""

    __slots__ = ("facts", "out", "states", "tensors")

    def __init__(self, facts: dict[str, Any], out: int) -> None:
        self.facts = facts
        self.out = out
        """From here on its outputs are numbered the same when it begins here again."""
        self.states: dict[str, Any] = {}
        """What its lanes gave, as JSON; tensors by name beside it."""
        self.tensors: dict[str, Any] = {}


def counts_of(runner: Runner) -> dict[str, Any]:
    """Its numbering and counters, as JSON."""
    counters = runner.counters
    return {
        "next": runner.next_seq,
        "started": counters.started,
        "made": counters.made,
        "dropped": counters.dropped,
        "gaps": counters.gaps,
        "skipped": runner.skipped,
    }


def count_on(runner: Runner, facts: Mapping[str, Any]) -> None:
    """At load of a resumed run: numbers and counters as they were."""
    counters = runner.counters
    runner.next_seq = facts["next"]
    counters.started = counters.done = facts["started"]
    counters.made, counters.dropped, counters.gaps = facts["made"], facts["dropped"], facts["gaps"]
    runner.skipped = facts["skipped"]
