"""The `sim` device: the device protocol in virtual time, one thread, no GPU.

It is harsher than one. A mark is never passed before the call that recorded it is over; a free block is given
on at once; `release` unmaps all that is free; a fault is sticky, and told by every mark of the device.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeflow.device.base import Buffer, Freed, Memory, Permit, map_tensors, tensors_in
from pipeflow.device.cpu import Cpu
from pipeflow.errors import DeviceError
from pipeflow.sim.access import Where
from pipeflow.sim.memory import Allocator, OutOfMemory
from pipeflow.sim.queue import Engine, Range, SimStream
from pipeflow.sim.tensor import SimTensor, blocks_in

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from pipeflow.device.base import Device, Stream
    from pipeflow.sim.memory import Chunk
    from pipeflow.sim.world import World

__all__ = ["DeviceOptions", "Sim", "SimHost"]


@dataclass(frozen=True)
class DeviceOptions:
    """What a device can do. The defaults are an H200's; launches were counted on one."""

    total: float = 141 * 2**30
    """Bytes of memory."""
    width: int = 1
    """Kernels that run side by side, each as fast as alone."""
    queue: int = 1021
    """Unfinished launches of a stream, from which on the next one blocks."""
    events: int = 256
    """Marks made at load; one more than these is created when it is recorded."""
    host_bandwidth: float = 50e9
    """Bytes per second to or from the host, each."""
    peer_bandwidth: float = 300e9
    """Bytes per second to another device."""
    memory_bandwidth: float = 2e12
    """Bytes per second of a copy within the device."""


class Sim:
    """One simulated device. Made by `World`."""

    def __init__(self, world: World, name: str, options: DeviceOptions, base: int) -> None:
        self.world = world
        self.name = name
        self.torch_name = name
        self.place = name
        self.copies_out = False
        self.options = options
        self.allocator = Allocator(name, base, options.total, world.record)
        self.compute = Engine("compute", options.width)
        self.inward = Engine("copy in", 1)
        self.outward = Engine("copy out", 1)
        self.fault: DeviceError | None = None
        """Once set it stays: the device is of no more use to this process."""
        self.lost: str | None = None
        self.events_free = options.events
        self.streams: list[SimStream] = []
        self._releases = 0
        self._closed = False
        self.default = self.stream("default")
        """The stream of what runs on this device for another one's."""

    # The protocol -----------------------------------------------------------------------------------

    def stream(self, name: str) -> SimStream:
        """A new stream; made at load, never during a run."""
        self.enter_call()
        full = f"{self.name}/{name}"
        made = SimStream(self, full, self.world.order.timeline(full))
        self.streams.append(made)
        return made

    def words(self, stream: Stream) -> SimWords:
        """Two words that the stream writes; made at load."""
        assert isinstance(stream, SimStream)
        return SimWords(self, stream)

    @contextmanager
    def entered(self, stream: Stream) -> Generator[None]:
        """Make device and stream current for the host that runs now."""
        assert isinstance(stream, SimStream)
        if self.lost is not None:
            raise DeviceError(f"device {self.name!r} has failed: {self.lost}")
        host = self.world.host
        host.entered.append((self, stream))
        try:
            yield
        finally:
            host.entered.pop()

    def buffers(self, value: Any) -> list[Buffer]:
        """The distinct blocks in a value. `holders`: tensors of the block beside those of the value."""
        return buffers_of(value)

    def hand_out(self, value: Any, given: Any) -> Any:
        """The value itself."""
        return value

    def copy(self, value: Any, to: Device, stream: Stream) -> Any:
        """Enqueue a copy of every tensor of `value` to another place."""
        assert isinstance(stream, SimStream)
        target = to if isinstance(to, Sim) else None

        def move(tensor: Any) -> Any:
            return copied(self.world, tensor, target, stream)

        return map_tensors(value, move)

    def to_host(self, value: Any, stream: Stream) -> Any:
        """Enqueue a copy of a tensor to pinned memory."""
        assert isinstance(stream, SimStream)
        if value.home is self.world.host_memory:
            return value
        return copied(self.world, value, None, stream)

    def keep(self, value: Any, stream: Stream) -> int:
        """When a block of `value` is freed, hold it back until `stream` has done its work up to then."""
        assert isinstance(stream, SimStream)
        kept = 0
        for tensor in blocks_in(value):
            if tensor.home is self.allocator:
                tensor.block.kept[stream] = None
                kept += 1
        return kept

    def retired(self, value: Any) -> None:
        """Tensors count for themselves."""

    def drain(self) -> None:
        """Block the host until all that is enqueued now is done (how, says `pipeflow.sim.host`)."""
        self.enter_call()
        self.world.record("drain", self.name, self.world.host.name)
        for stream in self.streams:
            stream.mark_now().wait()

    def release(self, permit: Permit) -> Freed:
        """Unmap all free memory. What is still in flight there then faults, as on a device."""
        self.enter_call()
        host = self.world.host
        if pending := host.unpassed():
            raise RuntimeError(
                f"{self.name}: memory cannot be released in the call that still waits for {pending[0].name}; "
                "let the call of `drain` return first, and release in the next"
            )
        before = self.allocator.reserved
        self._unmap("release")
        self._releases += 1
        return Freed(self.name, before, self.allocator.reserved)

    def _unmap(self, name: str) -> None:
        """Unmap all that is free. What may still be in use there is a hazard, what is in flight a fault."""
        host = self.world.host
        where = Where(host.stage, host.sequence, host.name, name)
        in_flight: list[Where] = []

        def unmapped(chunk: Chunk) -> None:
            for use in chunk.past:
                event = use.event
                if not host.timeline.knows(event.line, event.count):
                    self.world.checker.report("unmapped", f"memory of {self.name}", event.where, where)
                    if not event.done:
                        in_flight.append(event.where)

        self.allocator.release(unmapped)
        if in_flight:
            self.fail(f"an illegal memory access was encountered (in {in_flight[0]}, after a release)")

    def memory(self) -> Memory:
        """The allocator's counters; of a device that failed too."""
        allocator = self.allocator
        return Memory(allocator.used, allocator.reserved, int(self.options.total), self._releases)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Nothing fitted."""
        return isinstance(error, OutOfMemory)

    def is_fault(self, error: BaseException) -> bool:
        """Its faults are all of one class."""
        return isinstance(error, DeviceError)

    def lose(self, what: str) -> None:
        """Any call from now on is told in the log, as `call-after-loss`."""
        self.lost = what

    def close(self) -> None:
        """No call after this."""
        self._closed = True

    # Of the simulation ------------------------------------------------------------------------------

    def pinned(self, nbytes: int) -> SimTensor:
        """Memory of the host that copies and kernels can reach; made at load."""
        self.enter_call()
        return self.world.empty_on_host(nbytes, growing=lambda: self.creating("pinned memory"))

    def check(self) -> None:
        """Raises DeviceError if the device has failed, or was closed."""
        if self.lost is not None:
            self.world.record("call-after-loss", self.name, self.world.host.name)
        if self.fault is not None:
            raise DeviceError(str(self.fault)) from self.fault.__cause__
        if self._closed:
            raise DeviceError(f"device {self.name!r} was closed; make another World")

    def enter_call(self) -> None:
        """At the start of each device call: the device works, and the calling host is not blocked."""
        self.check()
        host = self.world.host
        if host.blocked is not None:
            host.block_for_ever(host.blocked)

    def take_event(self) -> None:
        """One of the pool; a new one if all are in use."""
        if self.events_free == 0:
            self.creating("an event")
            self.events_free += 1
        self.events_free -= 1

    def creating(self, what: str) -> None:
        """Something new is made in the driver: that blocks while the queue of any stream is full."""
        host = self.world.host
        place = max(stream.place_due() for stream in self.streams)
        if place <= host.now:
            return
        self.world.created_while_full += 1
        self.world.record("created-while-full", self.name, what, host.name)
        if place == float("inf"):
            host.block_for_ever(
                f"creates {what} while a launch queue of {self.name} is full and moves no more"
            )
        host.advance(place)

    def allocate(self, nbytes: int, stream: SimStream) -> SimTensor:
        """A tensor whose block belongs to `stream`. Raises OutOfMemory."""
        self.enter_call()
        if self.world.planned("oom", self.name, "") is not None:
            raise self.allocator.refuse(nbytes)
        try:
            return self._take(nbytes, stream)
        except OutOfMemory:
            if not self._gave_back():
                raise
        return self._take(nbytes, stream)

    def _take(self, nbytes: int, stream: SimStream) -> SimTensor:
        return self.world.tensor(
            self.allocator, nbytes, stream, self.torch_name, lambda: self.creating("device memory")
        )

    def _gave_back(self) -> bool:
        """Nothing fits: give cached memory back, as `pipeflow.sim.memory` says. Whether there was any; never
        on the loop, which cannot wait."""
        host = self.world.host
        before = self.allocator.reserved
        if host is self.world.loop_host or before == self.allocator.used:
            return False
        self.allocator.settle(host.await_mark)
        self._unmap("out of memory")
        self.check()
        return self.allocator.reserved < before

    def fail(self, what: str, cause: BaseException | None = None) -> None:
        """The device is dead: nothing more runs, every mark and every call reports it."""
        if self.fault is not None:
            return
        self.fault = DeviceError(f"device {self.name!r}: {what}")
        self.fault.__cause__ = cause
        self.world.record("fault", self.name, what)
        for stream in self.streams:
            stream.abandon()


class SimWords:
    """A lane's begin and end words. The stream writes them without time, engine or place in its queue, and
    they are not in the log: plans and logs are those of the stages alone."""

    def __init__(self, device: Sim, stream: SimStream) -> None:
        self._stream = stream
        self.begin_word, self.end_word = device.pinned(8), device.pinned(8)
        for word in (self.begin_word, self.end_word):
            word.block.fill(*word.span, 0)

    def begin(self, number: int) -> None:
        """Enqueue the write of the first word."""
        self._stream.write_word(self.begin_word, number)

    def end(self, number: int) -> None:
        """Enqueue the write of the second word."""
        self._stream.write_word(self.end_word, number)

    def read(self) -> tuple[int, int]:
        """What is there now: `World.peek`."""
        peek = self._stream.device.world.peek
        return peek(self.begin_word), peek(self.end_word)


class SimHost(Cpu):
    """The host of a world as a device: `cpu`, whose tensors are the world's pinned memory."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def copy(self, value: Any, to: Device, stream: Stream) -> Any:
        """Enqueue a copy of every simulated tensor to a device."""
        if not isinstance(to, Sim):
            return super().copy(value, to, stream)
        assert isinstance(stream, SimStream)

        def move(tensor: Any) -> Any:
            return copied(self._world, tensor, to, stream)

        return map_tensors(value, move)

    def buffers(self, value: Any) -> list[Buffer]:
        """The distinct blocks in a value."""
        return buffers_of(value)


def buffers_of(value: Any) -> list[Buffer]:
    """The distinct blocks in a value, with the count of other tensors that hold each."""
    own: dict[int, int] = {}
    for tensor in tensors_in(value):
        address = tensor.untyped_storage().data_ptr()
        own[address] = own.get(address, 0) + 1
    return [
        Buffer(tensor.block.address, tensor.block.nbytes, tensor.block.tensors - own[tensor.block.address])
        for tensor in blocks_in(value)
    ]


def copied(world: World, tensor: Any, to: Sim | None, stream: SimStream) -> SimTensor:
    """Enqueue on `stream` a copy into fresh memory of another device, or of the host (None).

    As in torch, the memory belongs to `stream` if that is the target's, else to the target's default stream,
    which the copy waits for and which waits for the copy (ATen/native/cuda/Copy.cu, `copy_device_to_device`).
    """
    if not isinstance(tensor, SimTensor):
        raise RuntimeError(
            f"a simulated device copies simulated tensors, not a {type(tensor).__name__}. Make it with "
            "`world.empty`"
        )
    device = stream.device
    device.enter_call()
    other: SimStream | None = None
    if to is None:
        growing: Callable[[], None] = lambda: device.creating("pinned memory")  # noqa: E731
        made = world.empty_on_host(tensor.nbytes, growing=growing)
    else:
        other = to.default if to is not device else None
        made = to.allocate(tensor.nbytes, other or stream)
    made.shape, made.dtype = tensor.shape, tensor.dtype
    if other is not None:
        stream.await_mark(other.mark_now())
    engine, bandwidth = _path(tensor, to, device)
    stream.launch(
        "copy to " + ("host" if to is None else to.name),
        tensor.nbytes / bandwidth,
        engine,
        [Range(tensor.block, *tensor.span)],
        [Range(made.block, *made.span)],
        _same,
    )
    if other is not None:
        other.await_mark(stream.mark_now())
    return made


def _same(value: Any) -> Any:
    return value


def _path(tensor: SimTensor, to: Sim | None, device: Sim) -> tuple[Engine, float]:
    """Which engine of `device` copies the tensor, and its bytes per second."""
    options = device.options
    here = tensor.home is device.allocator
    if here and to is device:
        return device.compute, options.memory_bandwidth
    host = to is None or tensor.home is device.world.host_memory
    return (
        device.outward if here else device.inward,
        options.host_bandwidth if host else options.peer_bandwidth,
    )
