"""Rules of what a stage may do with tensors, held against every call (axioms 4.5 to 4.7).

A stage that writes into its input says `mutates`, as others may read the same memory: a silent race on a
GPU. A stage that returns a buffer of its own and fills it again while an item still needs it gives that
item another one's values. And autograd crosses no edge: an output that remembers how it was made would keep
every buffer behind it alive, and be differentiated on another stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pipeflow.device.base import holds_none, tensors_in
from pipeflow.errors import StageError

if TYPE_CHECKING:
    from pipeflow.item import Item

__all__ = ["LiveStorages", "Stamp", "refuse_writes", "stamp_of", "versions_of"]

Versions = Sequence[tuple[Any, int]]

_REMEDY = "Return a new tensor for each item (`.clone()`), or copy in the stage that keeps the buffer"


def versions_of(value: Any) -> Versions:
    """Tensors of a value with how often each was written in place. Inference tensors do not count writes."""
    if holds_none(value):
        return ()
    return [(tensor, tensor._version) for tensor in tensors_in(value) if not tensor.is_inference()]


def refuse_writes(before: Versions, lent: Iterable[tuple[Any, Item]]) -> None:
    """RuntimeError if a tensor was written since `versions_of`, while the items in `lent` were in work."""
    for tensor, version in before:
        if tensor._version != version:
            raise RuntimeError(
                f"it wrote into its input, a tensor of shape {tuple(tensor.shape)}, which other stages may "
                "read. Copy it first, or set `mutates = True` on the stage's class. (Or stage "
                f"{_makers(lent)}, which made it, filled it again meanwhile; then clone it there)"
            )


def _makers(lent: Iterable[tuple[Any, Item]]) -> str:
    return ", ".join(repr(item.stamp.stage) for _, item in lent if item.stamp is not None) or "before it"


class Stamp:
    """The tensors of one output and their write counters as its call returned: from then on until the last
    stage is through with the item, nobody may write them, but for a stage that says `mutates`."""

    __slots__ = ("addresses", "excused", "number", "stage", "tensors")

    def __init__(self, tensors: Sequence[tuple[Any, int | None]], addresses: Sequence[int]) -> None:
        self.tensors = tensors
        """With the counter; None for an inference tensor, which has none."""
        self.addresses = addresses
        self.excused = False
        """A stage that says `mutates` has it, or had it."""
        self.stage = ""
        self.number: int | None = None

    def rewritten(self) -> Any:
        """A tensor that was written since, or None."""
        if not self.excused:
            for tensor, version in self.tensors:
                if version is not None and tensor._version != version:
                    return tensor
        return None

    def error(self, when: str) -> StageError:
        """For one that was rewritten; `when` ends its sentence."""
        shape = tuple(self.rewritten().shape)
        said = f"its output, a tensor of shape {shape}, was overwritten {when}. {_REMEDY}"
        return StageError(said, stage=self.stage, sequence=self.number)


def stamp_of(value: Any) -> Stamp | None:
    """The stamp of what a call returned; None where it holds no memory. RuntimeError for a grad_fn."""
    if holds_none(value):
        return None
    tensors: list[tuple[Any, int | None]] = []
    addresses: list[int] = []
    for tensor in tensors_in(value):
        if tensor.grad_fn is not None:
            raise RuntimeError(
                f"its output holds a tensor of shape {tuple(tensor.shape)} with a grad_fn, and autograd "
                "crosses no edge. Hand on `tensor.detach()`, or work under torch.no_grad()"
            )
        address = tensor.untyped_storage().data_ptr()
        if address:
            tensors.append((tensor, None if tensor.is_inference() else tensor._version))
            addresses.append(address)
    return Stamp(tensors, addresses) if tensors else None


class LiveStorages:
    """The storages of all items that some stage still needs. Changes on the loop only."""

    def __init__(self) -> None:
        self._by_address: dict[int, list[Stamp]] = {}

    def enter(self, stamp: Stamp, lent: Iterable[Item]) -> None:
        """A new output, made of `lent`. StageError if it lies in the memory of a live item that it
        overwrote. Views of inputs are fine, and so is one tensor handed on twice as it is."""
        given = {address for item in lent if item.stamp is not None for address in item.stamp.addresses}
        for address, (tensor, version) in zip(stamp.addresses, stamp.tensors, strict=True):
            if address in given:
                continue
            for other in self._by_address.get(address, ()):
                if other.rewritten() is not None:
                    raise other.error(f"for item {stamp.number}")
                if version is None:
                    _refuse_overlap(tensor, other, address)
        for address in set(stamp.addresses):
            self._by_address.setdefault(address, []).append(stamp)

    def leave(self, stamp: Stamp) -> None:
        """The last stage is through with the item. StageError if it was overwritten before."""
        for address in set(stamp.addresses):
            stamps = self._by_address[address]
            stamps.remove(stamp)
            if not stamps:
                del self._by_address[address]
        if stamp.rewritten() is not None:
            raise stamp.error("before those who read it were through")

    def excuse(self, item: Item) -> None:
        """A stage that says `mutates` is about to write the item."""
        for address in item.stamp.addresses if item.stamp is not None else ():
            for stamp in self._by_address.get(address, ()):
                stamp.excused = True

    def clear(self) -> None:
        """At the end of a run."""
        self._by_address.clear()

    def __len__(self) -> int:
        return len(self._by_address)


def _refuse_overlap(tensor: Any, other: Stamp, address: int) -> None:
    """Inference tensors do not count writes, so two items must not even share bytes of one."""
    first, end = _span(tensor)
    for held, place in zip(other.tensors, other.addresses, strict=True):
        if place == address:
            start, stop = _span(held[0])
            if start < end and first < stop:
                shape = tuple(held[0].shape)
                said = (
                    f"its output, a tensor of shape {shape}, is still needed, and a later one is in the same"
                )
                why = "memory; under inference mode nobody can see whether it was overwritten"
                raise StageError(f"{said} {why}. {_REMEDY}", stage=other.stage, sequence=other.number)


def _span(tensor: Any) -> tuple[int, int]:
    """The first byte of a tensor and the one behind its last."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (reach + 1) * tensor.element_size()
