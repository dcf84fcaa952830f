"""One way to write tests for every device: enqueue work, wait for it, look at it, run a file.

A *bench* drives one device without an engine, as a lane would. A kernel of these tests writes one whole
number all over a tensor; `compute` gives that number of those read, by arithmetic that a tensor knows too.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pipeflow
from pipeflow import testing
from pipeflow.checker import check_operations
from pipeflow.device import make_device
from pipeflow.operations import OperationLog
from pipeflow.sim import World

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
    from pathlib import Path

    from pipeflow import Context, Registry
    from pipeflow.device.base import Device, Mark, Stream

__all__ = ["TARGETS", "Bench", "Ran", "Target", "make", "pool", "value_of", "write"]

LIMIT = 60.0
"""Seconds after which a run is taken to hang."""
SIZE = 1024
"""Numbers in a tensor, of eight bytes each."""
SLOW = 400_000_000
"""Cycles of a slow kernel of CUDA where the host must get on meanwhile: a fifth of a second."""
BUSY = 20_000_000
"""Cycles of a slow kernel in a run."""


class Ran:
    """What came of a run."""

    def __init__(self) -> None:
        self.log = OperationLog()
        self.value: Any = None
        """What `act` returned; the summary where a test gave none."""
        self.error: BaseException | None = None
        self.hazards: Sequence[Any] = ()
        """Accesses that some timing gets wrong, where the device looks for them."""

    def check(self) -> Ran:
        """The run went well, and its log tells of no broken promise."""
        if self.error is not None:
            raise self.error
        return self.checked()

    def checked(self) -> Ran:
        """However it ended, its log tells of no broken promise."""
        check_operations(self.log.entries)
        return self

    def count(self, kind: str) -> int:
        """Entries of a kind."""
        return sum(entry[1] == kind for entry in self.log.entries)


class Bench:
    """One device with what a lane does: `job` on a stream, and the host that awaits its mark."""

    late = True
    """Whether work may be under way once its job has returned."""
    keeps = True
    """Whether the allocator must be told of other streams."""
    by_marks = False
    """Whether a result is there only once someone waits for its mark."""

    def __init__(self, device: Device, beside: Device) -> None:
        self.device = device
        self.beside = beside
        """Another place to copy to, if there is one; else the same."""

    def job(
        self, stream: Stream, call: Callable[[], Any], waits: Sequence[Mark] = (), given: Any = None
    ) -> tuple[Any, Mark]:
        """Run a call on a stream, as a lane does; what it made, and the mark behind it."""
        with self.on(stream), self.device.entered(stream):
            for mark in waits:
                stream.wait(mark)
            value = self.device.hand_out(call(), given)
            return value, stream.record(value, given)

    @contextmanager
    def on(self, stream: Stream) -> Generator[None]:
        """The thread that uses this stream."""
        yield

    async def passed(self, mark: Mark) -> None:
        """Until the host knows that the device came by."""
        await asyncio.to_thread(mark.wait)

    async def call(self, call: Callable[[], Any]) -> Any:
        """Run what may block beside the loop."""
        return await asyncio.to_thread(call)

    def empty(self, nbytes: int = 8 * SIZE) -> Any:
        import torch

        return torch.empty(nbytes // 8, dtype=torch.int64, device=self.device.torch_name)

    def kernel(self, compute: Callable[..., Any], *reads: Any, into: Any = None, slow: bool = False) -> Any:
        """Enqueue a kernel that writes `compute(*reads)`, into fresh memory if `into` is None."""
        return _torch_kernel(compute, reads, self.empty() if into is None else into, SLOW if slow else 0)

    def look(self, tensor: Any) -> Any:
        """The number that a tensor holds all over. The host knows that it is written."""
        return value_of(tensor)

    def view(self, tensor: Any) -> Any:
        """Another tensor of the same memory."""
        return tensor[: SIZE // 2]

    def hazards(self) -> list[Any]:
        """What a device that checks accesses has found."""
        return []


class _CpuBench(Bench):
    late = keeps = False


class _LateBench(Bench):
    keeps = False
    by_marks = True


class _SimBench(Bench):
    def __init__(self, world: World) -> None:
        super().__init__(world.devices["cuda:0"], world.devices["cuda:1"])
        self._world = world
        self._hosts: dict[int, Any] = {}
        self._calls = world.make_host("call")

    @contextmanager
    def on(self, stream: Any) -> Generator[None]:
        world = self._world
        if id(stream) not in self._hosts:
            self._hosts[id(stream)] = world.make_host(stream.name)
        host = self._hosts[id(stream)]
        with world.on(host, since=world.send(), stage=stream.name):
            yield

    async def passed(self, mark: Any) -> None:
        future = self._world.loop.create_future()
        self._world.notice(mark, future.set_result)
        fault = await future
        if fault is not None:
            raise fault

    async def call(self, call: Callable[[], Any]) -> Any:
        future = self._world.loop.create_future()
        with self._world.on(self._calls, since=self._world.send()):
            value = call()
        self._world.returned(self._calls, future.set_result)
        await future
        return value

    def empty(self, nbytes: int = 8 * SIZE) -> Any:
        return self._world.empty(nbytes)

    def kernel(self, compute: Callable[..., Any], *reads: Any, into: Any = None, slow: bool = False) -> Any:
        out = self.empty() if into is None else into
        self._world.kernel("k", 1.0 if slow else 1e-5, reads, [out], compute)
        return out

    def look(self, tensor: Any) -> Any:
        return self._world.read(tensor)

    def view(self, tensor: Any) -> Any:
        return tensor.view(0, tensor.nbytes // 2)

    def hazards(self) -> list[Any]:
        return self._world.hazards


def _torch_kernel(compute: Callable[..., Any], reads: Sequence[Any], out: Any, cycles: int) -> Any:
    if cycles and out.is_cuda:
        import torch

        torch.cuda._sleep(cycles)
    made = compute(*[tensor[0] for tensor in reads])
    if isinstance(made, int):
        out.fill_(made)
    else:
        out.copy_(made.expand_as(out))
    return out


def value_of(tensor: Any) -> Any:
    """The number that a tensor holds all over; None if it holds several. On the host, in a stage there."""
    if isinstance(tensor, testing.SimTensor):
        return testing.read(tensor)
    found = set(tensor.tolist())
    return found.pop() if len(found) == 1 else None


def make(ctx: Context, compute: Callable[..., Any], *reads: Any, slow: bool = False) -> Any:
    """In a stage on a device: a fresh tensor and the kernel that writes `compute(*reads)` to it."""
    return write(ctx, pool(ctx), compute, *reads, slow=slow)


def pool(ctx: Context) -> Any:
    """Memory on the job's device."""
    if _simulated():
        return testing.empty(8 * SIZE)
    import torch

    return torch.empty(SIZE, dtype=torch.int64, device=ctx.device)


def write(ctx: Context, out: Any, compute: Callable[..., Any], *reads: Any, slow: bool = False) -> Any:
    """The kernel that writes `compute(*reads)` to `out`, in place."""
    if isinstance(out, testing.SimTensor):
        testing.kernel(1.0 if slow else 1e-3, reads, [out], compute)
        return out
    return _torch_kernel(compute, reads, out, BUSY if slow else 0)


def _simulated() -> bool:
    try:
        testing.current_world()
    except RuntimeError:  # no loop in this thread, or a real one
        return False
    return True


class Target:
    """A device, and how a test is run on it."""

    name = "cpu"

    @property
    def on(self) -> str:
        """Its name in a file."""
        return self.name

    def bench(self, scene: Callable[[Bench], Coroutine[Any, Any, Any]]) -> Any:
        """Run a scene on a device without an engine."""
        device = make_device(self.name)

        async def main() -> Any:
            async with asyncio.timeout(LIMIT):
                return await scene(self._bench(device))

        try:
            return asyncio.run(main())
        finally:
            device.close()

    def _bench(self, device: Device) -> Bench:
        return _CpuBench(device, device)

    def run(
        self,
        folder: Path,
        document: Mapping[str, Any],
        registry: Registry,
        act: Callable[[Any], Awaitable[Any]] | None = None,
    ) -> Ran:
        """Open the file, let `act` drive it (default: `run`), and see that no thread is left."""
        ran = Ran()
        before = set(threading.enumerate())

        async def main() -> None:
            try:
                async with (
                    asyncio.timeout(LIMIT),
                    pipeflow.open(document, registry=registry, run_dir=folder, operations=ran.log) as opened,
                ):
                    ran.value = await (opened.run() if act is None else act(opened))
            except Exception as error:
                ran.error = error

        asyncio.run(main())
        for thread in set(threading.enumerate()) - before:
            if thread.name.startswith("pipeflow"):
                thread.join(5)
                assert not thread.is_alive(), f"thread left: {thread.name}"
        return ran


class CpuLateTarget(Target):
    name = "cpu-late"

    def _bench(self, device: Device) -> Bench:
        return _LateBench(device, device)


class CudaTarget(Target):
    name = "cuda"
    on = "cuda:0"

    def bench(self, scene: Callable[[Bench], Coroutine[Any, Any, Any]]) -> Any:
        device = make_device(self.on)
        warm = device.stream("warm-up")
        bench = Bench(device, make_device("cpu"))
        with device.entered(warm):  # the first launch of a kernel loads its code, which takes long
            made = bench.kernel(lambda a: a + 1, bench.kernel(lambda: 1, slow=True))
            device.to_host(made, warm)
            warm.record().wait()

        async def main() -> Any:
            async with asyncio.timeout(LIMIT):
                return await scene(bench)

        return asyncio.run(main())


class SimTarget(Target):
    name = "sim"
    on = "cuda:0"

    def bench(self, scene: Callable[[Bench], Coroutine[Any, Any, Any]]) -> Any:
        world = World(devices={"cuda:0": {"width": 4}, "cuda:1": {}})
        return world.run(scene, _SimBench(world))

    def run(
        self,
        folder: Path,
        document: Mapping[str, Any],
        registry: Registry,
        act: Callable[[Any], Awaitable[Any]] | None = None,
    ) -> Ran:
        ran = Ran()
        simulated = testing.simulate(dict(document), registry=registry, act=act, operations=ran.log)
        ran.value, ran.error, ran.hazards = simulated.value, simulated.error, simulated.hazards
        return ran


TARGETS: dict[str, type[Target]] = {
    "cpu": Target,
    "cpu-late": CpuLateTarget,
    "sim": SimTarget,
    "cuda": CudaTarget,
}
