"""Making devices quiet: gates close, launches come back, background work is joined, devices are drained.

A barrier does so for its section (axiom 5.1), and the engine itself where a job ran out of memory (7.3). Only
here are `Permit`s made, and memory released by them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeflow.device.base import Permit
from pipeflow.error_text import named_error
from pipeflow.errors import StageError
from pipeflow.faults import device_error
from pipeflow.guarded import RunIsOver, go_on

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipeflow.device.base import Device, Freed
    from pipeflow.engine import Engine
    from pipeflow.gate import Gate
    from pipeflow.lane import Lane

__all__ = ["Permits", "Scope", "quiesce", "release", "reopen"]

Scope = list[tuple["Device", "Gate"]]
Permits = list[tuple["Device", "Gate", Permit]]


async def quiesce(
    engine: Engine,
    holder: object,
    name: str,
    scope: Scope,
    background: Sequence[Lane],
    phase: Callable[[str], None],
    *,
    seq: int | None = None,
) -> Permits:
    """Until the devices in scope are quiet; their gates are closed then, by `holder`. `phase` hears what it
    waits for. Raises RunIsOver once the run has failed, DeviceError for a device that did."""
    for _, gate in scope:
        gate.close(holder)
        engine.tell("close", gate.device, name)
    phase("waits for launches in scope")
    for _, gate in scope:
        await gate.quiet()
    go_on(engine)
    phase("joins background work")
    for lane in background:
        await _join(engine, lane, name, seq)
    phase("drains devices")
    permits: Permits = []
    for device, gate in scope:
        go_on(engine)
        engine.tell("drain", gate.device)
        await _drain(engine, device)
        engine.tell("drained", gate.device)
        permits.append((device, gate, Permit(device.name)))
    go_on(engine)
    return permits


async def _join(engine: Engine, lane: Lane, name: str, seq: int | None) -> None:
    try:
        await engine.off_loop(lane.stage.quiesce, f"{lane.name}.quiesce")
    except Exception as error:
        raise StageError(
            f"in quiesce, for {name}: {named_error(error)}", stage=lane.name, sequence=seq
        ) from error


async def _drain(engine: Engine, device: Device) -> None:
    try:
        await engine.off_loop(device.drain, f"drain of {device.name}")
    except Exception as error:
        if device.lost is not None:
            raise RunIsOver from error
        if device.is_fault(error):
            raise device_error(engine, device, error, "its drain") from error
        raise


async def release(engine: Engine, permits: Permits) -> tuple[Freed, ...]:
    """Give cached memory of quiet devices back to the system; how much, by device."""
    freed: list[Freed] = []
    for device, gate, permit in permits:
        go_on(engine)

        def give(device: Device = device, permit: Permit = permit) -> Freed:
            return device.release(permit)

        engine.tell("release", gate.device)
        freed.append(await engine.off_loop(give, f"release of {device.name}"))
    return tuple(freed)


def reopen(engine: Engine, holder: object, name: str, scope: Scope) -> None:
    """Open the gates that `holder` closed."""
    for _, gate in scope:
        if gate.reopen(holder):
            engine.tell("open", gate.device, name)
