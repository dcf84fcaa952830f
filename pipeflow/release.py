"""What a run still holds at its end: given back at once, or held for ever (axiom 4.3).

A cancelled run leaves items in queues, batches and jobs. Once all that was launched is over nobody needs
them, and device memory must not wait for the collector to find the cycle they are in. But where some launch
never came back, the device may still write there: then nothing is freed, in all the life of the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeflow.inputs import Batches

if TYPE_CHECKING:
    from pipeflow.engine import Engine
    from pipeflow.runner import Runner

__all__ = ["hold_for_ever", "release_all"]

_held: list[Engine] = []


def hold_for_ever(engine: Engine) -> None:
    """Something of the run is stuck, or a device has failed: leak what may still be used there."""
    _held.append(engine)


def release_all(engine: Engine) -> None:
    """Drop every value in queues, batches and jobs. Only after `settle` came back."""
    if engine.operations is not None:
        engine.operations.add("forgotten")
    for runner in engine.nodes:
        _release(runner)
    engine.storages.clear()


def _release(runner: Runner) -> None:
    for edge in runner.outs:
        edge.clear()
    if isinstance(runner.inputs, Batches):
        for _, item in runner.inputs.discard():
            item.forget()
    if runner.taken is not None:
        for _, item in runner.taken.parts:
            item.forget()
        runner.taken.value = None
    for job in runner.hand:
        job.outputs.clear()
        job.pending = None
        job.value = job.generator = job.context = None
        for _, item in job.parts:
            item.forget()
        job.parts = ()
    runner.hand.clear()
