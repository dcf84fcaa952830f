"""Jobs in hand go on: the next step of a generator, the next member of a scatter, a retry.

Each output needs its own credits (axiom 2.5), unless a writer waits for what the job has leased. For the
oldest job the credits that its own stage keeps in hand behind it do not count, as they cannot come back
before it is through (axiom 2.4).
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from pipeflow import handover, outcome
from pipeflow.launching import launch

if TYPE_CHECKING:
    from pipeflow.edge import Edge
    from pipeflow.job import Job
    from pipeflow.lane import Lane
    from pipeflow.runner import Runner

__all__ = ["produce"]


def produce(runner: Runner) -> bool:
    """Let every job in hand go on that can."""
    moved = False
    for index, job in enumerate(runner.hand):
        if job.pending:
            moved = _release_members(runner, job, index) or moved
        elif not job.returned and not job.launching and runner.engine.admitting:
            moved = _step(runner, job, index) or moved
    return moved


def _step(runner: Runner, job: Job, index: int) -> bool:
    lane = job.lane
    assert lane is not None
    if job.retry:
        return job.retry_due and _retry(runner, job, lane)
    if runner.source:
        return _step_source(runner, job, lane)
    return runner.flat and _step_flat(runner, job, lane, index)


def _may_launch(runner: Runner, job: Job, lane: Lane) -> bool:
    if lane.gate is not None and not lane.gate.open and not runner.in_section:
        return False
    if job.snapshot is not None:
        return True
    return not lane.leases or lane.leases.blocker(first=runner.in_section) is None


def _retry(runner: Runner, job: Job, lane: Lane) -> bool:
    """It kept its credits; leases it gave back."""
    if not _may_launch(runner, job, lane):
        return False
    job.retry = job.retry_due = False
    runner.retrying -= 1
    launch(runner, job)
    return True


def _step_flat(runner: Runner, job: Job, lane: Lane, index: int) -> bool:
    if lane.gate is not None and not lane.gate.open and not runner.in_section:
        return False
    if job.leased:
        # Whoever would give it a credit may wait for that writer: it overdraws by what it has in hand.
        if not (_admit(runner, runner.outs, index) or lane.leases.wanted()):
            return False
    elif runner.pins or not _admit(runner, runner.outs, index) or not _may_launch(runner, job, lane):
        return False
    runner.charge(job, runner.outs)
    launch(runner, job)
    return True


def _step_source(runner: Runner, job: Job, lane: Lane) -> bool:
    station = runner.station
    if station is not None and station.capturing:
        return False
    if runner.ending or runner.drained:
        _end_source(runner, job, lane)
        return True
    if job.outputs or runner.pins:  # it makes one at a time; the last one has not left yet
        return False
    if station is not None and station.holds_source:
        return False
    if not runner.admitted():
        return False
    seq = runner.next_seq if runner.ordered else None
    edges = runner.edges_for(seq)
    for edge in edges:
        if not edge.admits():
            return False
    if not _may_launch(runner, job, lane):
        return False
    runner.charge(job, edges)
    job.seq = seq
    job.number = seq if seq is not None else runner.counters.started
    if seq is not None:
        runner.next_seq += 1
    runner.counters.started += 1
    for admission in runner.admissions:
        assert seq is not None
        admission.start(seq)
    launch(runner, job)
    return True


def _end_source(runner: Runner, job: Job, lane: Lane) -> None:
    """A drain ends sources where they stand: their generator is closed on its own lane."""
    runner.exhausted = True
    job.returned = True
    runner.stop_waiting()
    close = lane.close_generator(job)
    if close is None:
        handover.retire_job(runner, job)
        return
    runner.engine.in_hand += 1
    job.unreached += 1

    def closed(_: Any, error: BaseException | None) -> None:
        runner.engine.in_hand -= 1
        job.unreached -= 1
        if error is not None:
            runner.engine.fail(outcome.stage_error(runner, job, error))
        handover.retire_job(runner, job)
        runner.wake()

    lane.launcher.submit("its end", close, closed)


def _release_members(runner: Runner, job: Job, index: int) -> bool:
    moved = False
    while job.pending:
        output = job.pending[0]
        if output.live and not output.charged:
            edges = runner.edges_for(output.seq)
            if edges:
                if runner.pins or not _admit(runner, edges, index):
                    return moved
                runner.charge(job, edges)
                output.charged, job.charged = job.charged, ()
        job.outputs.append(job.pending.popleft())
        moved = True
    return moved


def _admit(runner: Runner, edges: list[Edge] | Any, index: int) -> bool:
    for edge in edges:
        kept = sum(job.kept(edge) for job in islice(runner.hand, 1, None)) if index == 0 else None
        if not edge.admits(kept):
            return False
    return True
