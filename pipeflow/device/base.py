"""The device protocol. The engine above it is the same on `cpu`, `cpu-late` and `cuda`.

A *stream* runs what is enqueued on it in order. A *mark* is a point in a stream: another stream can be
told to wait for it (no host involved), and a waiter thread can block until it is passed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from pipeflow.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

__all__ = ["Buffer", "Device", "Freed", "Mark", "Memory", "Permit", "Stream", "Words", "holds_none",
           "is_tensor", "refusal", "register_tensor_type", "tensors_in"]  # fmt: skip


class Memory(NamedTuple):
    """Bytes of a device: in live tensors, held by the allocator, on the chip; and releases so far."""

    used: int
    reserved: int
    total: int
    releases: int


class Freed(NamedTuple):
    """What a cache release gave back: bytes held by the allocator before and after."""

    device: str
    before: int
    after: int


class Permit:
    """Proof that a device is quiet. Only a quiesce makes one, so only a quiesce can release memory."""

    __slots__ = ("device",)

    def __init__(self, device: str) -> None:
        self.device = device


class Buffer(NamedTuple):
    """A storage: its address, its bytes, and how many tensors outside the engine hold it (or None)."""

    address: int
    nbytes: int
    holders: int | None


class Mark(Protocol):
    """A point in a stream."""

    def passed(self) -> bool:
        """Whether the device has come by, without waiting. May be called from any thread."""
        ...

    def wait(self) -> None:
        """Block this thread until the device has come by; DeviceError if the device reports a fault."""
        ...


class Stream(Protocol):
    """A queue of device work, used by one thread at a time."""

    def record(self, value: Any = None, given: Any = None) -> Mark:
        """The mark of all that was enqueued so far. `value` is what the job hands on and `given` what it
        was lent: a test device hides the difference until the mark is passed."""
        ...

    def wait(self, mark: Mark) -> None:
        """What is enqueued from here on starts after `mark`. Does not block the host on a GPU."""
        ...


class Words(Protocol):
    """Two numbers in pinned memory, of one stream, which the device writes as it comes by. Used by the
    stream's one thread, but for `read`."""

    def begin(self, number: int) -> None:
        """Enqueue the write of the first one."""
        ...

    def end(self, number: int) -> None:
        """Enqueue the write of the second one."""
        ...

    def read(self) -> tuple[int, int]:
        """Both as they are now, 0 at first: a look at memory, from any thread, also after a fault."""
        ...


class Device(Protocol):
    """One device of this process."""

    name: str
    """As in the file: `cpu`, `cpu-late`, `cuda:0`."""
    torch_name: str
    """As torch says it: `cpu`, `cuda:0`."""
    place: str
    """Where its memory is: devices of one place need no copy between them."""
    copies_out: bool
    """Whether `hand_out` gives anything but the value itself."""
    lost: str | None
    """How it failed: from then on `entered` raises DeviceError, and nobody calls it any more."""

    def stream(self, name: str) -> Stream:
        """A new stream; made at load, never during a run."""
        ...

    def words(self, stream: Stream) -> Words | None:
        """The begin and end words of a lane's stream, made at load; None where no work outlasts its call."""
        ...

    def entered(self, stream: Stream) -> AbstractContextManager[None]:
        """Make device and stream current in this thread."""
        ...

    def buffers(self, value: Any) -> list[Buffer]:
        """The distinct storages in a value."""
        ...

    def hand_out(self, value: Any, given: Any) -> Any:
        """A job's result as it leaves the lane, just before its mark: the value itself, but on a test
        device, where what the engine passes on is memory of its own. `given`: what the job was lent."""
        ...

    def copy(self, value: Any, to: Device, stream: Stream) -> Any:
        """Enqueue a copy of every tensor of `value` to another place; the structure stays."""
        ...

    def to_host(self, value: Any, stream: Stream) -> Any:
        """Enqueue a copy of a tensor that the host will read once the next mark is passed."""
        ...

    def keep(self, value: Any, stream: Stream) -> int:
        """Tell the allocator that `stream` used storages of `value` that others still hold; their count."""
        ...

    def retired(self, value: Any) -> None:
        """The engine has dropped the item that held `value`."""
        ...

    def drain(self) -> None:
        """Block this thread until the device is idle. Only a barrier calls it, off the loop."""
        ...

    def release(self, permit: Permit) -> Freed:
        """Give cached memory back to the system."""
        ...

    def memory(self) -> Memory:
        """A look at the allocator's counters; no wait."""
        ...

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether its allocator raised this: the device is as well as before."""
        ...

    def is_fault(self, error: BaseException) -> bool:
        """Whether this tells that the device is of no more use to the process."""
        ...

    def lose(self, what: str) -> None:
        """It has failed: refuse it from now on, to later runs of the process too."""
        ...

    def close(self) -> None:
        """Give back what the device object itself holds."""
        ...


_torch: Any = None
_registered: tuple[type[Any], ...] = ()
"""Tensor types that are not torch's: a test device's."""
_types: tuple[type[Any], ...] = ()
"""All that can be a tensor as far as known."""


def refusal(name: str, what: str) -> DeviceError:
    """Why a later run of the process cannot have a device that failed."""
    return DeviceError(f"device {name!r} failed earlier in this process: {what}; start a new process")


def imported_torch() -> Any:
    """torch, if this process has imported it; else None, and nothing can hold a tensor.

    None too while another thread is still importing it: its module is there then, but half empty.
    """
    global _torch
    if _torch is None:
        torch = sys.modules.get("torch")
        spec = getattr(torch, "__spec__", None)
        if spec is not None and not getattr(spec, "_initializing", False):
            _torch = torch
            _know_types()
    return _torch


def register_tensor_type(kind: type[Any]) -> None:
    """Have `tensors_in` and `map_tensors` see instances of `kind` as tensors, beside torch's."""
    global _registered
    if kind not in _registered:
        _registered = (*_registered, kind)
        _know_types()


def _know_types() -> None:
    global _types
    _types = _registered if _torch is None else (_torch.Tensor, *_registered)


def _tensor_types() -> tuple[type[Any], ...]:
    """What `isinstance` may ask for: none where nothing can be a tensor."""
    if _torch is None:
        imported_torch()
    return _types


_PLAIN = frozenset({int, str, float, bool, bytes, type(None)})


def holds_none(value: Any) -> bool:
    """Quickly, for every call of a stage: surely no tensor in it."""
    return type(value) in _PLAIN or not _tensor_types()


def is_tensor(value: Any) -> bool:
    """Whether it is one of the tensors that a device works with."""
    return isinstance(value, _tensor_types())


def tensors_in(value: Any) -> Iterable[Any]:
    """Every tensor in a value: tensors, lists, tuples, dicts, msgspec Structs, dataclasses.

    Other objects are opaque: a tensor hidden in one is neither counted nor copied.
    """
    kinds = _tensor_types()
    if not kinds:
        return
    stack = [value]
    while stack:
        x = stack.pop()
        if isinstance(x, kinds):
            yield x
        elif isinstance(x, (list, tuple)):
            stack.extend(cast("list[Any]", x))
        elif isinstance(x, dict):
            stack.extend(cast("dict[Any, Any]", x).values())
        elif hasattr(x, "__struct_fields__"):
            stack.extend(getattr(x, name) for name in x.__struct_fields__)
        elif hasattr(x, "__dataclass_fields__") and not isinstance(x, type):
            stack.extend(getattr(x, name) for name in x.__dataclass_fields__)


def map_tensors(value: Any, change: Any) -> Any:
    """A copy of the value's structure with `change(tensor)` in place of each tensor, in a fixed order."""
    import dataclasses

    kinds = _tensor_types()

    def walk(x: Any) -> Any:
        if isinstance(x, kinds):
            return change(x)
        if isinstance(x, dict):
            return {key: walk(item) for key, item in cast("dict[Any, Any]", x).items()}
        if isinstance(x, tuple):
            items = [walk(item) for item in cast("tuple[Any, ...]", x)]
            make = cast("Any", type(cast("Any", x)))
            return make(*items) if hasattr(make, "_fields") else tuple(items)
        if isinstance(x, list):
            return [walk(item) for item in cast("list[Any]", x)]
        if hasattr(x, "__struct_fields__"):
            import msgspec

            return msgspec.structs.replace(
                x, **{name: walk(getattr(x, name)) for name in x.__struct_fields__}
            )
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            return dataclasses.replace(
                x, **{field.name: walk(getattr(x, field.name)) for field in dataclasses.fields(x)}
            )
        return x

    return walk(value)
