"""Outputs leave a stage, and what it used retires (axioms 1.3, 2.2, 4.3)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pipeflow.item import Item

if TYPE_CHECKING:
    from pipeflow.edge import Edge
    from pipeflow.job import Job, Output
    from pipeflow.runner import Runner

__all__ = ["emit", "hand_over", "retire_input", "retire_job", "retire_unused"]


LOOK_EVERY = 16
"""Of so many outputs one is looked at for its bytes."""


def emit(runner: Runner) -> bool:
    """Hand over what is ready: in order, or as fences are reached."""
    if not runner.ordered:
        return _emit_reached(runner)
    moved = False
    hand = runner.hand
    while hand:
        job = hand[0]
        outputs = job.outputs
        while outputs:
            hand_over(runner, outputs.popleft())
            moved = True
        if not job.returned or job.pending:
            break
        hand.popleft()
        moved = True
    return moved


def _emit_reached(runner: Runner) -> bool:
    moved = False
    for job in list(runner.hand):
        outputs = job.outputs
        while outputs and (outputs[0].fence.reached or not outputs[0].live):
            hand_over(runner, outputs.popleft())
            moved = True
        if job.returned and not outputs and not job.pending and job.unreached == 0:
            runner.hand.remove(job)
            moved = True
    return moved


def hand_over(runner: Runner, output: Output) -> None:
    """Number what has no number yet, and put it on every out-edge."""
    seq = output.seq
    if seq is None:
        seq = runner.next_seq
        runner.next_seq += 1
    if not output.live:
        _hand_over_gap(runner, output, seq)
        return
    fence = output.fence
    item = Item(
        seq,
        output.value,
        fence,
        port=output.port,
        versions=output.versions,
        tickets=output.tickets,
        stamp=output.stamp,
    )
    if item.stamp is not None and runner.counters.made % LOOK_EVERY == 1:
        size = sum(buffer.nbytes for buffer in runner.buffers(item))
        runner.counters.largest = max(runner.counters.largest, size)
    if runner.engine.operations is not None:
        runner.engine.operations.handed(runner, output, item)
    item.holds = 1  # its own fence's, and this call's while edges take it
    for ticket in item.tickets:
        ticket.carriers += 1
    charged = output.charged
    everywhere = charged is runner.outs
    for edge in runner.outs:
        paid = everywhere or edge in charged
        taken = edge.put(seq, item, paid)
        if edge.pinned and paid and not taken and not _fires(edge, seq):
            runner.unpin()
    if fence.reached:
        let_go(runner, item)
    else:
        fence.when_reached(partial(let_go, runner, item))
    output.value = None
    if output.tickets:
        runner.engine.put_down(output.tickets)


def _hand_over_gap(runner: Runner, output: Output, seq: int) -> None:
    for edge in runner.outs:
        paid = edge in output.charged
        edge.put(seq, None, paid)
        if edge.pinned and paid and not _fires(edge, seq):
            runner.unpin()


def _fires(edge: Edge, seq: int) -> bool:
    """A barrier behind this edge runs its section for the number, item or gap, and unpins after it."""
    return edge.consumer.fires_on_gaps and edge.selects(seq)


def retire_job(runner: Runner, job: Job) -> None:
    """Once a job returned and all its fences are reached: its inputs retire, its lane is free."""
    if job.retired or not job.over or job.retry:
        return
    job.retired = True
    lane = job.lane
    if lane is None:
        return
    if lane.operations is not None:
        lane.operations.add("over", job.operation)
    runner.counters.done += 1
    runner.counters.taken += len(job.parts)
    runner.counters.latency += runner.engine.now() - job.started
    lane.busy -= 1
    runner.free += 1
    for edge, item in job.parts:
        retire_input(runner, edge, item)
    job.parts = ()
    job.value = None
    job.generator = None
    job.context = None
    job.snapshot = None
    runner.wake()


def retire_input(runner: Runner, edge: Edge, item: Item) -> None:
    """The consumer is through with an item: its credit goes back."""
    edge.give_back(item)
    if runner.answers and item.tickets:
        item.given_away = True
    let_go(runner, item)


def retire_unused(runner: Runner, edge: Edge, item: Item) -> None:
    """An item that no job will use: as above, once its own fence is reached (axiom 2.2)."""
    if runner.feeds_answer:
        runner.engine.drop(item.tickets, runner.name)
    item.fence.when_reached(partial(retire_input, runner, edge, item))


def let_go(runner: Runner, item: Item) -> None:
    """One of those who need the item does no more; the last one drops its value."""
    item.holds -= 1
    if item.holds == 0:
        if runner.engine.operations is not None:
            runner.engine.operations.add("retired", item.operation)
        value, item.value = item.value, None
        if item.stamp is not None:
            runner.engine.released(item)
        if item.tickets:
            runner.engine.put_down(item.tickets)
        if not item.given_away:
            runner.engine.retired(value)
