"""From where each stage has to begin again, so that what was saved goes on without a hole.

Worked out from the consumers to the producers. A stage at a cut says which numbers of each input it still
needs. Its producer must make these again, with the same numbers: one that keeps points begins at its newest
point at or before them; for a one-to-one stage without a state any number will do. What that repeats beyond
the need is dropped on the edge, by its number. So the items of open batches are never saved: they are made
again from their records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeflow.checkpoint.part import Part
from pipeflow.checkpoint.station import Role

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pipeflow.checkpoint.acks import Acks
    from pipeflow.checkpoint.station import Station
    from pipeflow.runner import Runner

__all__ = ["chosen_parts"]


def chosen_parts(stations: Iterable[Station], acks: Acks | None) -> dict[str, Part]:
    """The part of every stage. `stations` in order, producers first. Points that no later checkpoint can
    need are forgotten. `acks`: of a run that is not exact."""
    parts: dict[str, Part] = {}
    for station in reversed(list(stations)):
        name = station.runner.name
        if station.role is not Role.BEFORE:
            assert station.part is not None
            parts[name] = station.part
            continue
        need = min(_needs(station.runner, parts), default=None)
        if acks is not None:
            parts[name] = _unordered(station, need, acks)
        else:
            parts[name] = _newest(station, need) if station.keeps_points else _at(station, need)
    return parts


def _needs(runner: Runner, parts: dict[str, Part]) -> Iterable[int]:
    """The lowest number that each consumer still needs, in the runner's own numbering."""
    for edge in runner.outs:
        consumer = edge.consumer
        assert consumer.inputs is not None
        facts = parts[consumer.name].facts["edges"][consumer.inputs.edges.index(edge)]
        # The first of those that `every` makes one number of: what it passes over counts for barriers.
        yield min([facts["from"], *facts["wanted"]]) * edge.every


def _newest(station: Station, need: int | None) -> Part:
    """The newest point at or before the need. Its first one is before all."""
    points = station.points
    found = len(points) - 1
    while found and need is not None and points[found].out > need:
        found -= 1
    del points[:found]
    return points[0] if need is not None else points[-1]


def _at(station: Station, need: int | None) -> Part:
    """A stage without a state of its own begins at any number; one that feeds nobody, behind what it used."""
    facts: dict[str, Any] = station.facts_now()
    for edge, saved in zip(station.edges, facts["edges"], strict=True):
        if need is not None:
            saved["from"] = need
        else:
            saved["from"] = edge.position + 1 - len(station.runner.hand)
    return Part(facts, need or 0)


def _unordered(station: Station, need: int | None, acks: Acks) -> Part:
    """Sources begin at the first record that is not through; others number on behind what was used."""
    runner = station.runner
    if runner.source and station.keeps_points:
        point = _newest(station, acks.first_open(runner))
        part = Part({**point.facts, "acked": acks.through(runner, point.out)}, point.out)
        part.states, part.tensors = point.states, point.tensors
        return part
    facts = station.facts_now()
    if runner.starts_domain and need is not None:
        facts["started"] -= max(0, facts["next"] - need)
        facts["next"] = need
    return Part(facts, 0)
