"""What a stage holds on a simulated device: a reference to a block of memory, by torch's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeflow.device.base import register_tensor_type, tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pipeflow.sim.access import Block
    from pipeflow.sim.memory import Allocator
    from pipeflow.sim.world import World

__all__ = ["SimStorage", "SimTensor", "blocks_in"]


class SimStorage:
    """A block as raw memory: an address, which keeps nothing alive. A kernel may be given one, as a captured
    graph has addresses only: that is `use-after-free` once the last tensor is gone."""

    __slots__ = ("block", "home", "span")

    def __init__(self, block: Block, home: Allocator) -> None:
        self.block = block
        self.home = home
        self.span = (0, block.nbytes)

    def data_ptr(self) -> int:
        """Its address. Given to others once the block is freed."""
        return self.block.address

    def nbytes(self) -> int:
        """Its size."""
        return self.block.nbytes


class SimTensor:
    """A view of a block. The block is freed with the last tensor of it."""

    __slots__ = ("_storage", "_world", "device", "dtype", "grad_fn", "nbytes", "offset", "shape")

    def __init__(
        self,
        world: World,
        storage: SimStorage,
        *,
        device: str,
        offset: int = 0,
        nbytes: int | None = None,
        shape: tuple[int, ...] | None = None,
        dtype: str = "uint8",
    ) -> None:
        self._storage = storage
        storage.block.tensors += 1  # before anything may raise: `__del__` takes one away
        self._world = world
        self.device = device
        """As the device's `torch_name`; `cpu` for memory of the host."""
        self.dtype = dtype
        self.offset = offset
        self.nbytes = storage.block.nbytes - offset if nbytes is None else nbytes
        self.shape = (self.nbytes,) if shape is None else shape
        self.grad_fn = None
        if offset < 0 or self.nbytes < 0 or offset + self.nbytes > storage.block.nbytes:
            raise ValueError(
                f"{self.nbytes} bytes at {offset} lie outside of the {storage.block.nbytes} bytes of "
                f"{storage.block.name}"
            )

    def __del__(self) -> None:
        block = self._storage.block
        block.tensors -= 1
        if block.tensors == 0:
            self._world.free(block, self._storage.home)

    def __repr__(self) -> str:
        return f"SimTensor({self.block.name}, shape={self.shape}, device={self.device!r})"

    @property
    def block(self) -> Block:
        """The memory that it shares with its views."""
        return self._storage.block

    @property
    def home(self) -> Allocator:
        """Where that memory is."""
        return self._storage.home

    @property
    def span(self) -> tuple[int, int]:
        """Its first byte in the block, and the one behind its last."""
        return self.offset, self.offset + self.nbytes

    @property
    def _version(self) -> int:
        return self.block.version

    def is_inference(self) -> bool:
        """Writes are counted."""
        return False

    def untyped_storage(self) -> SimStorage:
        """The block as raw memory."""
        return self._storage

    def data_ptr(self) -> int:
        """The address of its first byte."""
        return self.block.address + self.offset

    def view(self, offset: int, nbytes: int, shape: tuple[int, ...] | None = None) -> SimTensor:
        """`nbytes` from `offset` on, in the same memory."""
        return SimTensor(
            self._world,
            self._storage,
            device=self.device,
            offset=self.offset + offset,
            nbytes=nbytes,
            shape=shape,
            dtype=self.dtype,
        )

    def detach(self) -> SimTensor:
        """Another tensor of the same memory."""
        return self.view(0, self.nbytes, self.shape)

    def clone(self) -> SimTensor:
        """A copy in fresh memory, enqueued on the current stream; of memory of the host made at once."""
        return self._world.clone(self)


register_tensor_type(SimTensor)


def blocks_in(value: Any) -> Iterable[SimTensor]:
    """One tensor for each distinct block in a value."""
    seen: set[int] = set()
    for tensor in tensors_in(value):
        if isinstance(tensor, SimTensor) and tensor.block.address not in seen:
            seen.add(tensor.block.address)
            yield tensor
