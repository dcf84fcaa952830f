"""The `cpu` device: work is done when the call returns, so every mark is passed as it is recorded.

It is also the place of host stages (`host`), which never touch torch unless their values do.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from pipeflow.device.base import Buffer, Freed, Memory, Permit, map_tensors, tensors_in

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from pipeflow.device.base import Device, Mark, Stream, Words

__all__ = ["PASSED", "Cpu", "CpuStream", "buffers_of"]


class _Passed:
    def passed(self) -> bool:
        return True

    def wait(self) -> None:
        return


PASSED = _Passed()
"""The mark of every finished piece of host work."""


class CpuStream:
    """Nothing is ever pending on it."""

    def record(self, value: Any = None, given: Any = None) -> Mark:
        return PASSED

    def wait(self, mark: Mark) -> None:
        # A mark of another kind of device: the host is the one who must wait for it.
        if mark is not PASSED:
            mark.wait()


_ENTERED: AbstractContextManager[None] = contextlib.nullcontext()


class Cpu:
    """The machine's processor as a device."""

    def __init__(self, name: str = "cpu") -> None:
        self.name = name
        self.torch_name = "cpu"
        self.place = "cpu"
        self.copies_out = False
        self.lost: str | None = None
        self._releases = 0

    def stream(self, name: str) -> Stream:
        return CpuStream()

    def words(self, stream: Stream) -> Words | None:
        return None

    def entered(self, stream: Stream) -> AbstractContextManager[None]:
        return _ENTERED

    def buffers(self, value: Any) -> list[Buffer]:
        return buffers_of(value)

    def hand_out(self, value: Any, given: Any) -> Any:
        return value

    def copy(self, value: Any, to: Device, stream: Stream) -> Any:
        import torch

        place = torch.device(to.torch_name)

        def move(tensor: Any) -> Any:
            return tensor.to(place, copy=True)

        return map_tensors(value, move)

    def to_host(self, value: Any, stream: Stream) -> Any:
        return value

    def keep(self, value: Any, stream: Stream) -> int:
        return 0

    def retired(self, value: Any) -> None:
        return

    def drain(self) -> None:
        return

    def release(self, permit: Permit) -> Freed:
        import gc

        before = self.memory().reserved
        gc.collect()
        _trim()
        self._releases += 1
        return Freed(self.name, before, self.memory().reserved)

    def memory(self) -> Memory:
        """Resident bytes stand for both used and reserved: the system allocator tells no more."""
        import os

        resident = 0
        with contextlib.suppress(OSError), open("/proc/self/statm") as statm:
            resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Memory(resident, resident, total, self._releases)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """The host's memory is not the engine's to release."""
        return False

    def is_fault(self, error: BaseException) -> bool:
        return False

    def lose(self, what: str) -> None:
        return

    def close(self) -> None:
        return


def _trim() -> None:
    """Ask glibc to give free pages back; elsewhere there is nothing to ask."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def buffers_of(value: Any) -> list[Buffer]:
    """The distinct storages of a value's tensors."""
    found: dict[int, Buffer] = {}
    for tensor in tensors_in(value):
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address and address not in found:
            found[address] = Buffer(address, storage.nbytes(), None)
    return list(found.values())
