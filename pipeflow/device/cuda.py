"""The `cuda` device: streams and events of torch, and one function of the driver.

Marks are `torch.cuda.Event(blocking=True)`: a waiter thread that sleeps in the driver costs under one
percent of a core, where polling from the loop costs a whole one. `torch.Event(blocking=True)` would ignore
the flag. Events come from a pool made at load, since a new one blocks while any stream's queue is full.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from pipeflow.device.base import Buffer, Freed, Memory, Permit, map_tensors, refusal, tensors_in
from pipeflow.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Generator

    from pipeflow.device.base import Device, Mark, Stream, Words

__all__ = ["Cuda"]

_POOL = 256
"""Events made at load: more than lanes times in-flight items of any file seen; more are made if needed."""


class CudaMark:
    """An event of the pool. It goes back when nobody holds the mark any more."""

    __slots__ = ("_pool", "event")

    def __init__(self, pool: _Events, event: Any) -> None:
        self._pool = pool
        self.event = event

    def passed(self) -> bool:
        """Without waiting. A fault of the device is left for `wait` to report."""
        if self._pool.lost is not None:
            return False
        try:
            return self.event.query()
        except RuntimeError:
            return False

    def wait(self) -> None:
        if self._pool.lost is not None:
            raise DeviceError(self._pool.lost)
        try:
            self.event.synchronize()
        except RuntimeError as error:
            raise DeviceError(f"while an event was awaited: {error}") from error

    def __del__(self) -> None:
        self._pool.give_back(self.event)


class _Events:
    """A pool: an event is used again only once its mark is gone, never while someone may wait for it."""

    def __init__(self) -> None:
        import torch

        self.lost: str | None = None
        """As the device's: no mark is asked for any more."""
        self._make = lambda: torch.cuda.Event(blocking=True)
        self._free: deque[Any] = deque()
        stream = torch.cuda.current_stream()
        for _ in range(_POOL):
            event = self._make()
            event.record(stream)  # torch creates the driver's event at the first record
            self._free.append(event)

    def take(self) -> Any:
        try:
            return self._free.popleft()
        except IndexError:
            return self._make()

    def give_back(self, event: Any) -> None:
        self._free.append(event)


class CudaStream:
    """A side stream of one device."""

    def __init__(self, device: Cuda, stream: Any) -> None:
        self._device = device
        self.stream = stream

    def record(self, value: Any = None, given: Any = None) -> Mark:
        mark = CudaMark(self._device.events, self._device.events.take())
        mark.event.record(self.stream)
        return mark

    def wait(self, mark: Mark) -> None:
        if isinstance(mark, CudaMark):
            self.stream.wait_event(mark.event)
        else:
            mark.wait()


class CudaWords:
    """Two words of pinned memory, which the stream writes by `cuStreamWriteValue64`: no kernel, no copy, no
    memory of the device. H200: a word costs the host 2.8 us and the stream 2 (a copy of torch's: 9 and 5)."""

    def __init__(self, device: Cuda, stream: CudaStream, write: Any) -> None:
        import torch

        self._device = device
        self._stream = stream.stream.cuda_stream
        self._write = write
        self._words: Any = torch.zeros(2, dtype=torch.int64, pin_memory=True)
        self._address = self._words.data_ptr()  # the device's too: addresses are unified

    def begin(self, number: int) -> None:
        self._put(self._address, number)

    def end(self, number: int) -> None:
        self._put(self._address + 8, number)

    def read(self) -> tuple[int, int]:
        begin, end = self._words.tolist()
        return begin, end

    def _put(self, address: int, number: int) -> None:
        if (code := self._write(self._stream, address, number, 0)) != 0:
            raise DeviceError(f"device {self._device.name!r}: cuStreamWriteValue64 failed with {code}")


@cache
def _stream_write() -> Any:
    """The driver's `cuStreamWriteValue64`; None where there is none."""
    import ctypes

    try:
        driver = ctypes.CDLL("libcuda.so.1")
        write = driver.cuStreamWriteValue64_v2
    except (OSError, AttributeError):
        return None
    write.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint]
    write.restype = ctypes.c_int
    return write


_lost: dict[str, str] = {}
"""Devices of this process that failed, and how."""


class Cuda:
    """One GPU."""

    def __init__(self, name: str) -> None:
        import torch

        if name in _lost:
            raise refusal(name, _lost[name])
        self.name = name
        self.torch_name = name
        self.place = name
        index = int(name.removeprefix("cuda:"))
        count = torch.cuda.device_count()
        if index >= count:
            raise DeviceError(f"device {name!r} does not exist: this machine has {count} GPUs")
        self._device = torch.device("cuda", index)
        self.copies_out = False
        self.lost: str | None = None
        self._releases = 0
        self._lock = threading.Lock()
        with torch.cuda.device(self._device):
            self.events = _Events()

    def stream(self, name: str) -> Stream:
        import torch

        return CudaStream(self, torch.cuda.Stream(device=self._device))

    def words(self, stream: Stream) -> Words | None:
        assert isinstance(stream, CudaStream)
        write = _stream_write()
        return None if write is None else CudaWords(self, stream, write)

    @contextmanager
    def entered(self, stream: Stream) -> Generator[None]:
        import torch

        assert isinstance(stream, CudaStream)
        if self.lost is not None:
            raise DeviceError(f"device {self.name!r} has failed: {self.lost}")
        with torch.cuda.device(self._device), torch.cuda.stream(stream.stream):
            yield

    def buffers(self, value: Any) -> list[Buffer]:
        from pipeflow.device.cpu import buffers_of

        return buffers_of(value)

    def hand_out(self, value: Any, given: Any) -> Any:
        return value

    def copy(self, value: Any, to: Device, stream: Stream) -> Any:
        """Into fresh memory of the other place; on the host pinned, so that the copy is asynchronous."""
        import torch

        def move(tensor: Any) -> Any:
            if to.torch_name == "cpu":
                return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
                    tensor, non_blocking=True
                )
            if tensor.device.type == "cpu" and not tensor.is_pinned():
                tensor = tensor.pin_memory()
            return tensor.to(to.torch_name, non_blocking=True, copy=True)

        return map_tensors(value, move)

    def to_host(self, value: Any, stream: Stream) -> Any:
        import torch

        if value.device.type == "cpu":
            return value
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)

    def keep(self, value: Any, stream: Stream) -> int:
        assert isinstance(stream, CudaStream)
        kept = 0
        for tensor in tensors_in(value):
            if tensor.device == self._device:
                tensor.record_stream(stream.stream)
                kept += 1
        return kept

    def retired(self, value: Any) -> None:
        return

    def drain(self) -> None:
        import torch

        torch.cuda.synchronize(self._device)

    def release(self, permit: Permit) -> Freed:
        import torch

        with self._lock, torch.cuda.device(self._device):
            before = torch.cuda.memory_reserved(self._device)
            torch.cuda.empty_cache()
            self._releases += 1
            return Freed(self.name, before, torch.cuda.memory_reserved(self._device))

    def memory(self) -> Memory:
        import torch

        cuda: Any = torch.cuda
        total: int = cuda.get_device_properties(self._device).total_memory
        used = torch.cuda.memory_allocated(self._device)
        return Memory(used, torch.cuda.memory_reserved(self._device), total, self._releases)

    def is_out_of_memory(self, error: BaseException) -> bool:
        import torch

        return isinstance(error, torch.OutOfMemoryError)

    def is_fault(self, error: BaseException) -> bool:
        """What is told by an event or a drain. Torch's other errors of CUDA carry its words."""
        if isinstance(error, DeviceError):
            return True
        return "CUDA error" in str(error) and not self.is_out_of_memory(error)

    def lose(self, what: str) -> None:
        self.lost = self.events.lost = _lost[self.name] = what

    def close(self) -> None:
        return
