"""What comes to a stage and no job of it will use: gaps, and items past its limit or its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeflow.fence import REACHED
from pipeflow.inputs import Batches
from pipeflow.job import Job, Output

if TYPE_CHECKING:
    from pipeflow.runner import Runner

__all__ = ["discard", "pass_gap"]


def pass_gap(runner: Runner, seq: int) -> None:
    """A number without a value keeps its turn, so it goes through the hand like a job."""
    runner.counters.gaps += 1
    if not runner.outs or (runner.starts_domain and not runner.scatters):
        return
    job = Job(None, seq, None, 0.0)
    job.returned = True
    job.outputs.append(Output(None, REACHED, live=False, seq=seq))
    for edge in runner.outs:
        if edge.pinned and edge.consumer.fires_on_gaps and edge.selects(seq):
            runner.pins += 1
    runner.hand.append(job)


def discard(runner: Runner) -> bool:
    """Past its limit, or its end, whatever still comes retires unused, so that nobody upstream waits for a
    credit. Whether anything was there."""
    inputs = runner.inputs
    if inputs is None:
        return False
    runner.stop_waiting()
    left = inputs.discard() if isinstance(inputs, Batches) else []
    for edge in inputs.edges:
        while not edge.empty:
            if (seq := edge.gap()) is not None:
                _lose(runner, seq)
            item = edge.throw_away()
            if item is not None:
                left.append((edge, item))
    for edge, item in left:
        _lose(runner, edge.number(item))
        runner.retire(edge, item)
    return bool(left)


def _lose(runner: Runner, number: int) -> None:
    for track in runner.tracks:
        track.lost(number)
