"""For stage authors: run a pipeline in virtual time, on devices that check every access to memory.

    from pipeflow import testing

    ran = testing.simulate({"pipeflow": 1, "name": "t", "stages": {...}}, registry=registry, seed=7)
    assert ran.error is None and not ran.hazards

The engine is the one that drives real devices; a stage on `cuda:0` (or any device but `cpu`) enqueues by
`kernel`, holds `empty` tensors, and a host stage reads them by `read`. A `Hazard` is an access that some
timing of the same program would get wrong, whatever happened in this one. Nothing sleeps, no thread starts,
and the same seed gives the same run.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from pipeflow.check import check_document
from pipeflow.checker import check_operations
from pipeflow.device.base import Freed, Permit
from pipeflow.document import from_dict, load
from pipeflow.errors import DocumentError, GraphError
from pipeflow.operations import OperationLog
from pipeflow.pipeline import Pipeline, open_checked
from pipeflow.sim import GARBAGE, Fault, Hazard, OutOfMemory, SimTensor, World
from pipeflow.sim.folder import MemoryFolder
from pipeflow.sim.machine import SimMachine, device_names
from pipeflow.sim.stages import current_world

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

    from pipeflow.check import Report
    from pipeflow.registry import Registry

__all__ = ["GARBAGE", "Fault", "Hazard", "OperationLog", "OutOfMemory", "SimTensor", "Simulated", "World",
           "check_operations", "current_world", "empty", "kernel", "note", "read", "release_cache",
           "simulate", "work", "write"]  # fmt: skip

LIMIT = 1e6
"""Virtual seconds after which a run is taken to hang."""


class Simulated:
    """What came of a simulated run."""

    def __init__(self, world: World, folder: MemoryFolder) -> None:
        self.world = world
        self.value: Any = None
        """What `act` returned; without one the summary."""
        self.error: BaseException | None = None
        """What it raised."""
        self.pipeline: Pipeline | None = None
        self.seconds = 0.0
        """Virtual ones, of the whole run."""
        self._folder = folder

    @property
    def hazards(self) -> list[Hazard]:
        """Accesses that some timing gets wrong."""
        return self.world.hazards

    @property
    def log(self) -> list[tuple[Any, ...]]:
        """(time, kind, names..) of every operation of devices and hosts."""
        return self.world.log

    @property
    def summary(self) -> dict[str, Any]:
        """What summary.json would hold."""
        return self._folder.told

    @property
    def profile(self) -> dict[str, Any]:
        """What profile.json would hold: costs by stage."""
        return self._folder.costs

    def lines(self, name: str) -> list[dict[str, Any]]:
        """A file of JSON lines of the run folder: `metrics.jsonl`, `log.jsonl`, `dead_letter.jsonl`."""
        return self._folder.lines.get(name, [])


def simulate(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    seed: int = 0,
    registry: Registry | None = None,
    overrides: Sequence[str] = (),
    ignore: Collection[str] = (),
    faults: Iterable[Fault] = (),
    devices: Mapping[str, Mapping[str, Any]] | None = None,
    act: Callable[[Pipeline], Awaitable[Any]] | None = None,
    debug_sync: bool = False,
    operations: OperationLog | None = None,
    limit: float = LIMIT,
    **world: Any,
) -> Simulated:
    """Run a file, or a mapping of its shape, in virtual time.

    `seed`: of delays and the order of notices. `ignore`: codes of static rules that are switched off, to see
    what they are good for. `devices`: options by name (`DeviceOptions`). `act` is what a caller does with the
    open pipeline (default: `run`). `operations`: an empty log to fill, for `check_operations`. `limit`:
    virtual seconds. More options are the World's (`lag`, `jitter`).
    Raises DocumentError or GraphError for a file that is wrong; what the run raises is in `error`.
    """
    if isinstance(source, (str, os.PathLike)):
        document = load(source, overrides=overrides)
    else:
        document = from_dict(source, overrides=overrides)
    report = check_document(document, registry=registry)
    return simulate_checked(
        report, seed=seed, ignore=ignore, faults=faults, devices=devices, act=act, debug_sync=debug_sync,
        operations=operations, limit=limit, **world,
    )  # fmt: skip


def simulate_checked(
    report: Report,
    *,
    seed: int = 0,
    ignore: Collection[str] = (),
    faults: Iterable[Fault] = (),
    devices: Mapping[str, Mapping[str, Any]] | None = None,
    act: Callable[[Pipeline], Awaitable[Any]] | None = None,
    debug_sync: bool = False,
    operations: OperationLog | None = None,
    limit: float = LIMIT,
    **world: Any,
) -> Simulated:
    """The same for a file that was checked."""
    if report.graph is None:
        raise DocumentError(report.errors)
    if errors := [found for found in report.errors if found.code not in ignore]:
        raise GraphError(errors)
    options = devices or {}
    names = dict.fromkeys([*device_names(report.graph), *options])
    made = World(seed, {name: options.get(name, {}) for name in names}, faults=faults, **world)
    made.loop.world = made  # type: ignore[attr-defined]  # how stage code finds it
    folder = MemoryFolder()
    ran = Simulated(made, folder)

    async def main() -> None:
        try:
            async with asyncio.timeout(limit):
                opened = open_checked(
                    report, SimMachine(made), folder, debug_sync=debug_sync, operations=operations
                )
                async with opened as pipeline:
                    ran.pipeline = pipeline
                    ran.value = await (pipeline.run() if act is None else act(pipeline))
        except Exception as error:
            ran.error = error
        ran.seconds = made.loop.time()

    made.run(main)
    return ran


def kernel(
    seconds: float,
    reads: Sequence[SimTensor] = (),
    writes: Sequence[SimTensor] = (),
    compute: Callable[..., Any] | None = None,
    *,
    name: str = "kernel",
) -> None:
    """Enqueue a kernel of this duration on the job's stream. `compute(*values read)` gives what it writes."""
    current_world().kernel(name, seconds, reads, writes, compute)


def empty(nbytes: int, shape: tuple[int, ...] | None = None) -> SimTensor:
    """Memory on the job's device (on the host: pinned); it holds GARBAGE until a kernel writes it."""
    return current_world().empty(nbytes, shape)


def read(tensor: SimTensor) -> Any:
    """Read on the host: what was written, or GARBAGE and a hazard if the host cannot know of the write."""
    return current_world().read(tensor)


def note(kind: str, *names: Any) -> None:
    """A line of the operation log, at the time of the job's thread."""
    current_world().record(kind, *names)


def write(tensor: SimTensor, value: Any) -> None:
    """Write pinned memory on the host; a hazard while a kernel or copy may use it."""
    current_world().write(tensor, value)


def release_cache(name: str) -> Freed:
    """What a stage that calls `torch.cuda.empty_cache()` does to a device: unmap its free memory."""
    return current_world().devices[name].release(Permit(name))


def work(seconds: float, *, lock: bool = True) -> None:
    """Let the job's thread compute for a time; by `lock` nothing else of Python runs meanwhile.

    Raises RuntimeError in an async stage (and an inline one): on the loop it would hold up every stage.
    """
    world = current_world()
    if world.host is world.loop_host:
        raise RuntimeError("this would block the event loop, and with it every stage: await asyncio.sleep")
    world.host.work(seconds, lock=lock)
