"""A world: simulated devices, the threads of their host, and the time they share.

    world = World(seed=7, devices={"sim:0": {"total": 2**30}})
    world.run(main)          # a coroutine function, on the world's virtual-time loop
    assert not world.hazards

Everything is settled by the program, the options and the seed: the same world runs the same way each time,
and `log` tells it operation by operation.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from zlib import crc32

from pipeflow.sim import clock
from pipeflow.sim.access import GARBAGE, Checker, Event, Hazard, Where
from pipeflow.sim.device import DeviceOptions, Sim, copied
from pipeflow.sim.host import Host, InterpreterLock
from pipeflow.sim.memory import Allocator
from pipeflow.sim.order import Order
from pipeflow.sim.queue import Range
from pipeflow.sim.tensor import SimStorage, SimTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence

    from pipeflow.errors import DeviceError
    from pipeflow.sim.access import Block
    from pipeflow.sim.order import Snapshot
    from pipeflow.sim.queue import SimMark, SimStream

__all__ = ["Fault", "World"]

_T = TypeVar("_T")

_MESSAGES = {
    "illegal access": "an illegal memory access was encountered",
    "assert": "device-side assert triggered",
}


@dataclass
class Fault:
    """A planned fault. It happens once, to the kernel (for `oom`: the allocation) that fits, after `number`
    that fit were spared."""

    kind: str
    """`illegal access` or `assert` (both sticky), `hang` (the kernel never ends), `oom` (changes nothing)."""
    device: str | None = None
    stage: str | None = None
    sequence: int | None = None
    kernel: str | None = None
    number: int = 0

    def __post_init__(self) -> None:
        if self.kind not in (*_MESSAGES, "hang", "oom"):
            known = ", ".join((*_MESSAGES, "hang", "oom"))
            raise ValueError(f"there is no fault {self.kind!r}; known are {known}")
        self._left = self.number + 1

    def strikes(self, device: str, kernel: str, host: Host) -> bool:
        """Whether it happens here."""
        asked = (self.device, self.stage, self.sequence, self.kernel)
        found = (device, host.stage, host.sequence, kernel)
        if any(want is not None and want != is_ for want, is_ in zip(asked, found, strict=True)):
            return False
        self._left -= 1
        return self._left == 0

    @property
    def struck(self) -> bool:
        """Whether it has happened."""
        return self._left <= 0


class World:
    """See the module's text."""

    def __init__(
        self,
        seed: int = 0,
        devices: Mapping[str, Mapping[str, Any] | DeviceOptions] | None = None,
        *,
        lag: float = 1e-3,
        jitter: float = 0.0,
        faults: Iterable[Fault] = (),
        loop: clock.VirtualLoop | None = None,
    ) -> None:
        """`devices`: options of DeviceOptions by name. `lag`: seconds, at most, that the host hears late of a
        mark. `jitter`: a kernel takes up to that share more or less. `loop`: to run on another world's."""
        self.seed = seed
        self.lag = lag
        self.jitter = jitter
        self.loop = clock.VirtualLoop() if loop is None else loop
        self.order = Order()
        self.log: list[tuple[Any, ...]] = []
        """(time, kind, names...) of every operation."""
        self.hazards: list[Hazard] = []
        self.checker = Checker(self._found)
        self.faults: list[Fault] = list(faults)
        self.lock = InterpreterLock()
        self.created_while_full = 0
        """Events, device and pinned memory that were made while a launch queue was full."""
        self.loop_host = Host(self, "loop", self.order.timeline("loop"))
        self.host: Host = self.loop_host
        """Who runs now."""
        self.hosts: list[Host] = [self.loop_host]
        self.host_memory = Allocator("host", 1 << 40, math.inf, self.record)
        self._kernels = 0
        self.devices: dict[str, Sim] = {}
        for number, (name, options) in enumerate((devices or {"sim:0": {}}).items(), 1):
            made = options if isinstance(options, DeviceOptions) else DeviceOptions(**options)
            self.devices[name] = Sim(self, name, made, (1 << 40) + (number << 44))

    def run(self, main: Callable[..., Coroutine[Any, Any, _T]], *arguments: Any) -> _T:
        """Run a coroutine function on the world's loop, and close that. Once a world."""
        return clock.run(main, *arguments, loop=self.loop)

    def record(self, kind: str, *names: Any) -> None:
        """One line of the log, at the time of who runs now."""
        self.log.append((self.host.now, kind, *names))

    # Hosts ------------------------------------------------------------------------------------------

    def make_host(self, name: str) -> Host:
        """A thread of the host; made at load."""
        made = Host(self, name, self.order.timeline(name))
        self.hosts.append(made)
        return made

    def send(self) -> Snapshot:
        """What whoever runs now knows: goes with a job to the host that will run it (`since` of `on`)."""
        return self.host.timeline.snapshot()

    @contextmanager
    def on(
        self,
        host: Host,
        *,
        since: Snapshot | None = None,
        stage: str | None = None,
        sequence: int | None = None,
    ) -> Generator[Host]:
        """Run what is inside on `host`: its time, its clock, its current stream. It knows what `since` knew:
        what gave it the job, as it gave it (left out: as it begins)."""
        host.timeline.join(self.send() if since is None else since)
        before = self.host, host.stage, host.sequence
        self.host, host.stage, host.sequence = host, stage, sequence
        try:
            yield host
        finally:
            self.host, host.stage, host.sequence = before

    def returned(self, host: Host, then: Callable[[DeviceError | None], None]) -> None:
        """After a call on `host`: `then(fault)` on the loop when a thread would have come back from it, which
        is at the host's time and after what it blocked on. Never, if that is never. The loop then knows what
        the host did; `fault` is that of a device it waited for."""
        if host.blocked is not None:
            return
        sent = host.timeline.snapshot()
        waited = list(host.unpassed())
        left = len(waited)

        def come_back() -> None:
            fault = next((mark.failed for mark in waited if mark.failed is not None), None)
            self.loop.call_at(host.now, tell, fault)

        def tell(fault: DeviceError | None) -> None:
            host.advance(self.loop.time())
            self.loop_host.timeline.join(sent)
            then(fault)

        def one_less(_: SimMark) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                come_back()

        if not waited:
            come_back()
        for mark in waited:
            mark.when_passed(one_less)

    def notice(self, mark: SimMark, then: Callable[[DeviceError | None], None]) -> None:
        """`then(None)` on the loop some time after the mark is passed, `then(fault)` if its device has failed
        by then. Each mark has a lag of its own, so they arrive out of order. The loop then knows all that
        came before the mark."""

        def tell() -> None:
            fault = mark.failed
            if fault is None:
                self.loop_host.timeline.join(mark.clock)
            self.record("notice", mark.name, "reached" if fault is None else "failed")
            then(fault)

        def passed(mark: SimMark) -> None:
            self.loop.call_at(self.loop.time() + self.lag * self._draw(mark.name), tell)

        mark.when_passed(passed)

    # Operations of stage code -----------------------------------------------------------------------

    def empty(self, nbytes: int, shape: tuple[int, ...] | None = None, dtype: str = "uint8") -> SimTensor:
        """Memory on the current device, belonging to the current stream; pinned memory of the host where none
        is entered. It holds GARBAGE. Raises OutOfMemory."""
        host = self.host
        if host.entered:
            device, stream = host.entered[-1]
            made = device.allocate(nbytes, stream)
        else:
            made = self.empty_on_host(nbytes)
        made.shape, made.dtype = made.shape if shape is None else shape, dtype
        return made

    def kernel(
        self,
        name: str,
        seconds: float,
        reads: Sequence[SimTensor | SimStorage] = (),
        writes: Sequence[SimTensor | SimStorage] = (),
        compute: Callable[..., Any] | None = None,
    ) -> None:
        """Enqueue a kernel on the current stream. `compute(*values read)` gives the value written, or one for
        each of several; it is called as the kernel ends. Without one they are (name, values read...)."""
        device, stream = self._current(f"kernel {name!r}")
        device.enter_call()
        self._kernels += 1
        if self.jitter:
            seconds *= 1 + self.jitter * (2 * self._draw(f"kernel {self._kernels}") - 1)
        planned = self.planned("kernel", device.name, name)
        fault = None if planned is None else _MESSAGES.get(planned.kind)
        if planned is not None and planned.kind == "hang":
            seconds = math.inf
        if any(self._is_unmapped(tensor) for tensor in (*reads, *writes)):
            fault = _MESSAGES["illegal access"]
        stream.launch(
            name,
            seconds,
            device.compute,
            [self._range(tensor, device, name) for tensor in reads],
            [self._range(tensor, device, name) for tensor in writes],
            compute,
            fault,
        )

    def clone(self, tensor: SimTensor) -> SimTensor:
        """A copy of a tensor in fresh memory of the same place, made by the current stream or by the host."""
        if tensor.home is self.host_memory and not self.host.entered:
            made = self.empty_on_host(tensor.nbytes)
            self.write(made, self.read(tensor))
        else:
            made = copied(self, tensor, *self._current("a clone"))
        made.shape, made.dtype = tensor.shape, tensor.dtype
        return made

    def sleep(self, seconds: float) -> None:
        """Enqueue a pause of the current stream, which takes no engine."""
        device, stream = self._current("a sleep")
        device.enter_call()
        stream.launch("sleep", seconds, None, (), (), None)

    def read(self, tensor: SimTensor) -> Any:
        """Read on the host. GARBAGE, and a hazard, unless the host knows that it is written."""
        host = self.host
        if pending := host.unpassed():
            raise RuntimeError(
                f"{tensor.block.name} was read in the call that still waits for {pending[0].name}: in "
                "virtual time a wait is over only after the call. Await the mark's notice, and read then"
            )
        low, high = tensor.span
        event = self._host_event("read on the host")
        self.record("read", tensor.block.name, host.name)
        if not self.checker.read(tensor.block, low, high, event, host.timeline, "read-early"):
            return GARBAGE
        return tensor.block.value(low, high)

    def write(self, tensor: SimTensor, value: Any) -> None:
        """Write pinned memory on the host: a hazard while a copy may read it."""
        if tensor.home is not self.host_memory:
            raise RuntimeError(
                f"the host cannot write to {tensor.block.name}; copy it there, or use a kernel"
            )
        low, high = tensor.span
        event = self._host_event("write on the host")
        self.record("write", tensor.block.name, self.host.name)
        self.checker.write(tensor.block, low, high, event, self.host.timeline)
        tensor.block.version += 1
        tensor.block.fill(low, high, value)

    def peek(self, tensor: SimTensor) -> Any:
        """What is there just now, asking for no order: for words that are read after a fault."""
        return tensor.block.value(*tensor.span)

    # Of the simulation ------------------------------------------------------------------------------

    def tensor(
        self, home: Allocator, nbytes: int, stream: SimStream | None, device: str, growing: Callable[[], None]
    ) -> SimTensor:
        """A tensor of a fresh block."""
        return SimTensor(self, SimStorage(home.allocate(nbytes, stream, growing), home), device=device)

    def empty_on_host(self, nbytes: int, growing: Callable[[], None] = lambda: None) -> SimTensor:
        """A tensor in pinned memory. `growing` is called before more of that is reserved."""
        return self.tensor(self.host_memory, nbytes, None, "cpu", growing)

    def free(self, block: Block, home: Allocator) -> None:
        """The last tensor of a block is gone."""
        home.give_up(block, self._where("free"), self.host.timeline)

    def planned(self, of: str, device: str, kernel: str) -> Fault | None:
        """The planned fault that strikes here, if any. `of`: `kernel` or `oom`."""
        for fault in self.faults:
            if (fault.kind == "oom") == (of == "oom") and fault.strikes(device, kernel, self.host):
                return fault
        return None

    def _current(self, what: str) -> tuple[Sim, SimStream]:
        if not self.host.entered:
            raise RuntimeError(f"{what} needs a device: enter one first, by `device.entered(stream)`")
        return self.host.entered[-1]

    def _range(self, tensor: SimTensor | SimStorage, device: Sim, kernel: str) -> Range:
        if tensor.home is not device.allocator and tensor.home is not self.host_memory:
            raise RuntimeError(
                f"kernel {kernel!r} runs on {device.name}, but {tensor.block.name} is on {tensor.home.name}: "
                "copy it"
            )
        return Range(tensor.block, *tensor.span)

    def _is_unmapped(self, tensor: SimTensor | SimStorage) -> bool:
        return tensor.block.freed is not None and tensor.home.is_unmapped(tensor.block.address)

    def _where(self, name: str) -> Where:
        host = self.host
        return Where(host.stage, host.sequence, host.name, name)

    def _host_event(self, name: str) -> Event:
        stamp = self.host.timeline.tick()
        return Event(stamp.line, stamp.number, self._where(name), done=True)

    def _found(self, hazard: Hazard) -> None:
        self.hazards.append(hazard)
        self.record("hazard", hazard.kind, hazard.block, *hazard.first, *hazard.second)

    def _draw(self, name: str) -> float:
        """A number from 0 to 1, settled by the seed and the name alone."""
        mixed = crc32(name.encode()) * 0x9E3779B97F4A7C15 + self.seed * 0xD1342543DE82EF95
        mixed &= (1 << 64) - 1
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
        return (mixed ^ (mixed >> 31)) / 2**64
