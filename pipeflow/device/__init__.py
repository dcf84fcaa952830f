"""Devices: the protocol (`base`), `cpu`, the test device `cpu-late`, and `cuda`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeflow.errors import DeviceError

if TYPE_CHECKING:
    from pipeflow.device.base import Device

__all__ = ["make_device", "resolve_auto"]


def resolve_auto(name: str) -> str:
    """`auto` is the machine's first GPU, else its processor. Imports torch."""
    if name != "auto":
        return name
    import torch

    return "cuda:0" if torch.cuda.is_available() else "cpu"


def make_device(name: str) -> Device:
    """The device of a name of the file. Raises DeviceError where this machine has none of that name."""
    if name == "cpu":
        from pipeflow.device.cpu import Cpu

        return Cpu()
    if name == "cpu-late":
        from pipeflow.device.cpu_late import CpuLate

        return CpuLate()
    if name.startswith("cuda:"):
        from pipeflow.device.cuda import Cuda

        return Cuda(name)
    raise DeviceError(
        f"there is no device {name!r}; known are cpu, cuda:N, auto and the test device cpu-late"
    )
