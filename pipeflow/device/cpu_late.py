"""`cpu-late`: a test device on which a result is there only once its mark is passed.

On a GPU a tensor exists as soon as the kernel is enqueued, with garbage in it until the kernel ran; on
`cpu` it is always ready, so a missing wait never shows. Here a job's outputs are filled with NaN (numbers
far out of range for whole numbers) when it returns, get their values when the mark is passed or a stream
waits for it, and become NaN again when the last item that holds them is retired. Stages that give the same
bits here as on `cpu` read nothing before its fence and keep nothing after.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from pipeflow.device.base import tensors_in
from pipeflow.device.cpu import PASSED, Cpu

if TYPE_CHECKING:
    from pipeflow.device.base import Mark, Stream

__all__ = ["CpuLate"]


def _poison(storage: Any, dtype: Any) -> None:
    """Overwrite a storage with what no computation survives unseen."""
    import torch

    flat = torch.empty(0, dtype=dtype).set_(storage)
    if dtype.is_floating_point or dtype.is_complex:
        flat.fill_(float("nan"))
    elif dtype is torch.bool:
        flat.logical_not_()
    else:
        flat.fill_(torch.iinfo(dtype).min)


class LateMark:
    """Holds the true contents of what a job wrote until the mark is passed."""

    def __init__(self, hidden: list[tuple[Any, Any, Any]]) -> None:
        self._hidden: list[tuple[Any, Any, Any]] | None = hidden
        self._lock = threading.Lock()

    def passed(self) -> bool:
        return self._hidden is None

    def wait(self) -> None:
        with self._lock:
            for storage, _, truth in self._hidden or ():
                storage.copy_(truth)
            self._hidden = None


class LateStream:
    """A stream of a late device; that of a host stage (`late` False) hides nothing but counts."""

    def __init__(self, device: CpuLate, late: bool) -> None:
        self._device = device
        self._late = late

    def record(self, value: Any = None, given: Any = None) -> Mark:
        lent = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(given)}
        hidden: list[tuple[Any, Any, Any]] = []
        seen: set[int] = set()
        for tensor in tensors_in(value):
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if not address or address in seen:
                continue
            seen.add(address)
            self._device.hold(address)
            if self._late and address not in lent:
                hidden.append((storage, tensor.dtype, storage.clone()))
                _poison(storage, tensor.dtype)
        return LateMark(hidden) if hidden else PASSED

    def wait(self, mark: Mark) -> None:
        mark.wait()


class CpuLate(Cpu):
    """See the module's text. Serves the run's host stages too, so that it sees every item."""

    def __init__(self, name: str = "cpu-late") -> None:
        super().__init__(name)
        self._live: dict[int, int] = {}
        self._lock = threading.Lock()
        self.poisoned = 0

    def stream(self, name: str) -> Stream:
        return LateStream(self, late=True)

    def host_stream(self) -> Stream:
        """A stream for host stages: their values are there at once."""
        return LateStream(self, late=False)

    def to_host(self, value: Any, stream: Stream) -> Any:
        return value.clone()

    def hold(self, address: int) -> None:
        with self._lock:
            self._live[address] = self._live.get(address, 0) + 1

    def retired(self, value: Any) -> None:
        import torch

        seen: set[int] = set()
        for tensor in tensors_in(value):
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if not address or address in seen:
                continue
            seen.add(address)
            with self._lock:
                left = self._live.get(address, 0) - 1
                if left > 0:
                    self._live[address] = left
                    continue
                self._live.pop(address, None)
            # The value's tensor and our handle are two holders; a third one keeps it rightfully.
            if torch._C._storage_Use_Count(storage._cdata) <= 2:
                _poison(storage, tensor.dtype)
                self.poisoned += 1
