"""`cpu-late`: a test device on which a result is there only once its mark is passed.

On a GPU a tensor exists as soon as the kernel is enqueued, with garbage in it until the kernel ran; on
`cpu` it is always ready, so a missing wait never shows. Here a job's outputs are filled with NaN (numbers
far out of range for whole numbers) when it returns, get their values when the mark is passed or a stream
waits for it, and become NaN again when the last item that holds them is retired. Stages that give the same
bits here as on `cpu` read nothing before its fence and keep nothing after.

What a job hands on is copied into memory of its own first, so that a stage's own tensors (a data set, a
model) are never overwritten. What it was lent and hands on is shared, as on a GPU.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from pipeflow.device.base import map_tensors, tensors_in
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


LAG = 0.002
"""Seconds that the host hears of a mark after it was recorded, unless a stream waits for it before: so a
missing wait shows, and not by luck alone."""


class LateMark:
    """Holds the true contents of what a job wrote until the mark is passed."""

    def __init__(self, hidden: list[tuple[Any, Any]]) -> None:
        self._hidden: list[tuple[Any, Any]] | None = hidden
        self._lock = threading.Lock()
        self._passed = threading.Event()

    def passed(self) -> bool:
        return self._passed.is_set()

    def wait(self) -> None:
        self._passed.wait(LAG)
        self.reveal()

    def reveal(self) -> None:
        """The device comes by."""
        with self._lock:
            for storage, truth in self._hidden or ():
                storage.copy_(truth)
            self._hidden = None
            self._passed.set()


class LateStream:
    """A stream of a late device; that of a host stage (`late` False) hides nothing but counts."""

    def __init__(self, device: CpuLate, late: bool) -> None:
        self._device = device
        self._late = late

    def record(self, value: Any = None, given: Any = None) -> Mark:
        lent = _addresses(given)
        hidden: list[tuple[Any, Any]] = []
        seen: set[int] = set()
        for tensor in tensors_in(value):
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if not address or address in seen:
                continue
            seen.add(address)
            self._device.hold(address)
            if self._late and address not in lent:
                hidden.append((storage, storage.clone()))
                _poison(storage, tensor.dtype)
        return LateMark(hidden) if hidden else PASSED

    def wait(self, mark: Mark) -> None:
        if isinstance(mark, LateMark):
            mark.reveal()
        else:
            mark.wait()


class CpuLate(Cpu):
    """See the module's text. Serves the run's host stages too, so that it sees every item."""

    def __init__(self, name: str = "cpu-late") -> None:
        super().__init__(name)
        self.copies_out = True
        self._live: dict[int, int] = {}
        self._lock = threading.Lock()
        self.poisoned = 0

    def stream(self, name: str) -> Stream:
        return LateStream(self, late=True)

    def host_stream(self) -> Stream:
        """A stream for host stages: their values are there at once."""
        return LateStream(self, late=False)

    def hand_out(self, value: Any, given: Any) -> Any:
        if next(iter(tensors_in(value)), None) is None:
            return value
        import torch

        lent = _addresses(given)
        owned: dict[int, Any] = {}

        def own(tensor: Any) -> Any:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if not address or address in lent:
                return tensor
            if address not in owned:
                owned[address] = storage.clone()
            place = torch.empty(0, dtype=tensor.dtype)
            return place.set_(owned[address], tensor.storage_offset(), tensor.size(), tensor.stride())

        return map_tensors(value, own)

    def to_host(self, value: Any, stream: Stream) -> Any:
        return value.clone()

    def hold(self, address: int) -> None:
        """One more item has this storage."""
        with self._lock:
            self._live[address] = self._live.get(address, 0) + 1

    def retired(self, value: Any) -> None:
        """One item less has the storages of `value`; those that none has are overwritten. What the engine
        did not make (a caller's own tensor) is left alone."""
        seen: set[int] = set()
        for tensor in tensors_in(value):
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if not address or address in seen:
                continue
            seen.add(address)
            with self._lock:
                left = self._live.get(address, 0) - 1
                if left < 0:
                    continue
                if left > 0:
                    self._live[address] = left
                    continue
                del self._live[address]
            _poison(storage, tensor.dtype)
            self.poisoned += 1


def _addresses(value: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_in(value)}
