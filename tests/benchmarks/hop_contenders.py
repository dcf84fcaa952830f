"""The pipelines that `hop_cost` compares, each doing the same: a source, maps that do nothing, a sink.

All of them pass the integers 0 to n - 1 from an async generator through `hops` stages of the form
`async def f(item)`, the last of which is the sink. A *hop* is one stage that an item passes; the cost of the
source is counted too and spread over the hops, as is what a framework needs to pull at the end.

The clock is in the source and the sink, the same for all: it starts when the source is asked for its first
item and stops when the sink has the last one, so that opening and closing a pipeline are not in the figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil

__all__ = ["CONTENDERS", "Case", "Contender", "Meter", "Reading", "Skipped", "measure"]

Step = Callable[[int], Awaitable[Any]]

SAMPLES = 20
"""Times that memory is looked at in a run."""


class Skipped(Exception):
    """This contender cannot run here; the message says why."""


@dataclass(frozen=True)
class Case:
    """What is run: `items` items over `hops` stages with queues of `queue` items, on a kind of loop."""

    items: int
    hops: int = 4
    queue: int = 16
    loop: str = "uvloop"
    memory: bool = False
    """Look at the resident memory on the way."""


@dataclass(frozen=True)
class Reading:
    """One run. Microseconds an item a hop; MiB."""

    wall: float
    cpu: float
    """Processor time of the whole process, all threads."""
    ends: float
    """Milliseconds of the call outside the clock: opening and closing."""
    memory: dict[str, float] = field(default_factory=dict[str, float])


class Meter:
    """The clock, the source and the sink of one run."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.seen = 0
        self.samples: list[float] = []
        marks = {case.items - 1}
        if case.memory:
            marks |= {case.items * part // SAMPLES - 1 for part in range(2, SAMPLES + 1)}
        self._marks = frozenset(marks)
        self._process = psutil.Process()
        self._begun = (0.0, 0.0)
        self._ended: tuple[float, float] | None = None
        self._before = self._resident() if case.memory else 0.0

    async def source(self) -> AsyncIterator[int]:
        self._begun = time.perf_counter(), time.process_time()
        for number in range(self.case.items):
            yield number

    async def noop(self, item: int) -> int:
        return item

    async def sink(self, item: int) -> None:
        self.seen += 1
        if item in self._marks:
            if self.case.memory:
                self.samples.append(self._resident())
            if item == self.case.items - 1:
                self._ended = time.perf_counter(), time.process_time()

    def steps(self) -> list[Step]:
        """The stages behind the source."""
        return [*[self.noop] * (self.case.hops - 1), self.sink]

    def reading(self, whole: float) -> Reading:
        """The figures, once all is through. `whole` is how many seconds the call took."""
        if self._ended is None or self.seen != self.case.items:
            raise RuntimeError(f"{self.seen} of {self.case.items} items came to the sink")
        wall, cpu = (end - begin for begin, end in zip(self._begun, self._ended, strict=True))
        passed = self.case.items * self.case.hops
        memory: dict[str, float] = {}
        if self.case.memory:
            # The first sample is at a tenth: by then queues, free lists and caches are as full as they get.
            memory = {
                "before": self._before,
                "tenth": self.samples[0],
                "end": self.samples[-1],
                "growth": max(self.samples) - self.samples[0],
            }
        return Reading(wall / passed * 1e6, cpu / passed * 1e6, (whole - wall) * 1e3, memory)

    def _resident(self) -> float:
        return self._process.memory_info().rss / 2**20


@dataclass(frozen=True)
class Contender:
    """A way to build the pipeline. `call` runs it to its end and returns."""

    name: str
    settings: str
    call: Callable[[Meter], None]
    queued: bool = True
    """Has queues, so their size matters."""


def measure(contender: Contender, case: Case, *, meter: Meter | None = None) -> Reading:
    """Run once. Raises Skipped if the contender or the loop is not to be had here."""
    meter = meter or Meter(case)
    gc.collect()
    begun = time.perf_counter()
    contender.call(meter)
    return meter.reading(time.perf_counter() - begun)


# Loops ---------------------------------------------------------------------------------------------------


def loop_factory(kind: str) -> Callable[[], asyncio.AbstractEventLoop]:
    if kind == "asyncio":
        return asyncio.new_event_loop
    try:
        import uvloop
    except ImportError as error:
        raise Skipped(f"uvloop: {error}") from error
    return uvloop.new_event_loop


def on_loop(main: Callable[[Meter], Awaitable[None]]) -> Callable[[Meter], None]:
    """Run a coroutine function on a new loop of the case's kind."""

    def call(meter: Meter) -> None:
        async def coroutine() -> None:
            await main(meter)

        with asyncio.Runner(loop_factory=loop_factory(meter.case.loop)) as runner:
            runner.run(coroutine())

    return call


# pipeflow ------------------------------------------------------------------------------------------------


def pipeflow_spec(case: Case, *, in_flight: int) -> dict[str, Any]:
    """The pipeline as a file has it. Credits, fences and counters have no switch: they are always on."""
    stages: dict[str, Any] = {"source": {"uses": "numbers"}}
    before = "source"
    for hop in range(1, case.hops):
        stages[f"hop{hop}"] = {"uses": "noop", "from": before, "in_flight": in_flight}
        before = f"hop{hop}"
    stages["sink"] = {"uses": "sink", "from": before}
    return {"pipeflow": 1, "name": "hop-cost", "run": {"queue": {"items": case.queue}}, "stages": stages}


def stage_classes(meter: Meter) -> dict[str, Any]:
    """Stages as a class each; the sources, maps and sinks are the peers' own, called the same way."""
    import pipeflow

    class Numbers(pipeflow.Stage[Any, int]):
        async def run(self) -> AsyncIterator[int]:
            async for number in meter.source():
                yield number

    class Noop(pipeflow.Stage[int, int]):
        async def run(self, item: int) -> int:
            return item

    class Sink(pipeflow.Stage[int, None]):
        async def run(self, item: int) -> None:
            await meter.sink(item)

    return {"numbers": Numbers, "noop": Noop, "sink": Sink}


def stage_functions(meter: Meter) -> dict[str, Any]:
    """Stages as three-line functions."""
    import pipeflow

    functions = {"numbers": meter.source, "noop": meter.noop, "sink": meter.sink}
    return {name: pipeflow.stage(function) for name, function in functions.items()}


def run_pipeflow(
    *, in_flight: int = 1, stages: Callable[[Meter], dict[str, Any]] = stage_classes
) -> Callable[[Meter], None]:
    async def main(meter: Meter) -> None:
        import pipeflow

        registry = pipeflow.Registry()
        for name, made in stages(meter).items():
            registry.add(name, made)
        spec = pipeflow_spec(meter.case, in_flight=in_flight)
        with tempfile.TemporaryDirectory() as folder:
            async with pipeflow.open(spec, registry=registry, run_dir=folder) as pipeline:
                summary = await pipeline.run()
        counted = {counts["made"] for counts in summary["stages"].values()}
        if counted != {meter.case.items}:
            raise RuntimeError(f"the statistics are off: {summary['stages']}")

    return on_loop(main)


# Bare queues ---------------------------------------------------------------------------------------------


async def bare_queues(meter: Meter) -> None:
    """One task a stage, a bounded asyncio.Queue before each: the least that queues can cost."""
    end = -1
    steps = meter.steps()
    queues: list[asyncio.Queue[int]] = [asyncio.Queue(meter.case.queue) for _ in steps]

    async def feed() -> None:
        async for item in meter.source():
            await queues[0].put(item)
        await queues[0].put(end)

    async def work(step: Step, inbox: asyncio.Queue[int], outbox: asyncio.Queue[int] | None) -> None:
        while (item := await inbox.get()) != end:
            made = await step(item)
            if outbox is not None:
                await outbox.put(made)
        if outbox is not None:
            await outbox.put(end)

    async with asyncio.TaskGroup() as group:
        group.create_task(feed())
        for number, step in enumerate(steps):
            outbox = queues[number + 1] if number + 1 < len(queues) else None
            group.create_task(work(step, queues[number], outbox))


# aiostream -----------------------------------------------------------------------------------------------


def run_aiostream(task_limit: int) -> Callable[[Meter], None]:
    """Pulled from the end; it has no queues. `task_limit=1` runs one stage at a time, no two overlap."""

    async def main(meter: Meter) -> None:
        from aiostream import stream

        made: Any = stream.iterate(meter.source())
        for step in meter.steps():
            made = stream.map(made, step, task_limit=task_limit)
        async with made.stream() as results:
            async for _ in results:
                pass

    return on_loop(main)


# SPDL ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def default_loop(kind: str) -> Iterator[None]:
    """SPDL starts its loop by `asyncio.run` in its own thread, so only the policy can say which kind."""
    if kind == "asyncio":
        yield
        return
    loop_factory(kind)
    import uvloop

    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(before)


def run_spdl(*, statistics: bool) -> Callable[[Meter], None]:
    """`pipe` has no size for the queue before it (2 by default), so a queue class sets ours.

    The sink returns None, which SPDL does not pass on: no item crosses to the caller's thread, a cost that
    the others do not have. With `statistics`, its default hook and queue count and time each item.
    """

    def call(meter: Meter) -> None:
        try:
            from spdl.pipeline import AsyncQueue, PipelineBuilder, StatsQueue
        except ImportError as error:
            raise Skipped(f"SPDL: {error} (pip install spdl-core)") from error

        class Sized(StatsQueue if statistics else AsyncQueue):  # type: ignore[misc]
            def __init__(self, info: Any, *, buffer_size: int = 1) -> None:
                super().__init__(info, buffer_size=meter.case.queue)

        builder: Any = PipelineBuilder().add_source(meter.source())
        for step in meter.steps():
            builder = builder.pipe(step, concurrency=1)
        pipeline = builder.add_sink(meter.case.queue).build(
            num_threads=1, queue_class=Sized, task_hook_factory=None if statistics else lambda _info: []
        )
        with default_loop(meter.case.loop), pipeline.auto_stop():
            for _ in pipeline:
                pass

    return call


CONTENDERS = (
    Contender("pipeflow", "in_flight 1; credits, fences, statistics on", run_pipeflow()),
    Contender("pipeflow, 8 in flight", "in_flight 8, ordered; the rest as above", run_pipeflow(in_flight=8)),
    Contender("pipeflow functions", "@stage, else as the first", run_pipeflow(stages=stage_functions)),
    Contender("asyncio.Queue", "a task a stage; no fences, statistics or faults", on_loop(bare_queues)),
    Contender("aiostream map 1", "task_limit=1: one stage at a time", run_aiostream(1), queued=False),
    Contender("aiostream map 8", "task_limit=8, ordered", run_aiostream(8), queued=False),
    Contender("SPDL", "concurrency=1, TaskStatsHook, StatsQueue: its defaults", run_spdl(statistics=True)),
    Contender("SPDL, bare", "concurrency=1, no hooks, AsyncQueue: no statistics", run_spdl(statistics=False)),
)
