"""What a stage waits for, in words: for stall reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeflow.runner import Runner

__all__ = ["lacks"]


def lacks(runner: Runner) -> str:
    """The first thing that it would need to go on."""
    if runner.closed:
        return "ended"
    for job in runner.hand:
        if job.launching:
            return f"its own code, on item {job.number}"
        if job in runner.engine.parking:
            return f"device memory, with item {job.number} parked; its release {runner.engine.parking.phase}"
    if runner.finishing:
        return "its own code, in finish"
    if runner.pins:
        return "readers of its last version, which have not launched"
    if runner.inputs is None or runner.inputs.peek() is not None:
        for admission in runner.admissions:
            if not admission.open:
                return admission.waits_for()
    for edge in runner.outs:
        if not edge.admits():
            return (
                f"a credit on {edge} ({edge.credits} of {edge.items_limit} out, {edge.queued} queued, "
                f"{edge.gathered} gathered, {edge.bytes_live} bytes)"
            )
    for lane in runner.lanes:
        if lane.gate is not None and not lane.gate.open:
            return f"the gate of {lane.device.name}, which a barrier holds closed"
        if lane.leases and (instance := lane.leases.blocked_by()) is not None:
            return f"a lease of resource {instance.shared.name}"
    if runner.inputs is not None and not runner.inputs.ended():
        return runner.inputs.waits_for()
    if any(lane.busy for lane in runner.lanes):
        return "the fences of its last items"
    return "its caller" if runner.inputs is None and not runner.engine.sources_open else "its own end"
