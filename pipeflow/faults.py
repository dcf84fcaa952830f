"""A device has failed: the run ends, naming those in whose work it was, and no call of the device follows.

What the process had on the device is lost. Its memory is not even freed, as that may be a call too; a later
run on the device is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeflow.error_text import error_text
from pipeflow.errors import DeviceError
from pipeflow.gate import gates_of_this_loop
from pipeflow.suspects import suspects

if TYPE_CHECKING:
    from pipeflow.device.base import Device
    from pipeflow.engine import Engine
    from pipeflow.lane import Lane

__all__ = ["device_error", "device_failed"]


def device_failed(engine: Engine, device: Device, error: BaseException | None, where: str) -> None:
    """What was awaited failed outside stage code: the run ends. `where`: what the host awaited. The first
    report of a device counts; that all its other marks fail too says nothing new."""
    if device.lost is None or not engine.failed:
        engine.fail(device_error(engine, device, error, where))


def device_error(engine: Engine, device: Device, error: BaseException | None, where: str) -> DeviceError:
    """The error for it. Marks the device as lost, if the fault is one that it does not survive."""
    heard = f"while the host awaited {where}: {error_text(error)}"
    if error is None or not device.is_fault(error):
        fault = DeviceError(f"device {device.name!r} reported a fault {heard}")
    else:
        gate = gates_of_this_loop().of(device.name)
        lanes = [lane for node in gate.nodes for lane in node.lanes if lane.device.name == device.name]
        told = _told(engine, lanes)
        device.lose(error_text(error))
        fault = DeviceError(f"device {device.name!r} reported a fault {heard}; {told}")
    fault.__cause__ = error
    return fault


def _told(engine: Engine, lanes: list[Lane]) -> str:
    if not any(lane.trace is not None for lane in lanes):
        return "it reports late, so the culprit may be another stage on it"
    names = suspects(lanes)
    if not names:
        return (
            "suspects: none. No lane had work on the device then: whoever made the fault is not among the "
            "file's stages"
        )
    said = f"suspects: {', '.join(names)}"
    if engine.debug_sync:
        return f"{said}. Launches were awaited one by one"
    return f"{said}. A device reports late; run with --debug-sync to have it pinned"
