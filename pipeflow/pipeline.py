"""A pipeline as a program sees it: open it, run it, submit to it, stop it.

    async with pipeflow.open("file.yaml") as pipeline:
        summary = await pipeline.run()

The caller's loop is used; no signal handler is installed and no other loop is started. The context may be
entered in any task and left by any error; nothing of the run outlives it, or `Stuck` says what does.
"""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from pipeflow.assemble import Assembly, InputRunner
from pipeflow.check import check_here
from pipeflow.checkpoint.resuming import cut_back, find, hold
from pipeflow.checkpoint.saver import Saver
from pipeflow.engine import Engine, Ticket
from pipeflow.errors import Cancelled, DocumentError, GraphError, PipeflowError, Stuck
from pipeflow.loading import Loader
from pipeflow.machine import ThreadMachine
from pipeflow.observe.folder import RunFolder
from pipeflow.observe.profile import profile
from pipeflow.observe.summary import Summary, summarise
from pipeflow.settle import to_the_end

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Mapping, Sequence

    from pipeflow.check import Report
    from pipeflow.checkpoint.store import Saved
    from pipeflow.graph import Graph
    from pipeflow.machine import Machine
    from pipeflow.operations import OperationLog
    from pipeflow.registry import Registry
    from pipeflow.runner import Runner

__all__ = ["Pipeline", "Summary", "open_checked", "open_pipeline"]


class Pipeline:
    """An open pipeline: its resources are loaded and its stages set up. Made by `pipeflow.open`."""

    def __init__(self, graph: Graph, engine: Engine, assembly: Assembly) -> None:
        self._graph = graph
        self._engine = engine
        self._assembly = assembly
        self._loader = Loader(graph, engine, assembly)
        self._run_started: float | None = None
        self._run_ended: float | None = None
        self._error_told = False
        self.told: Summary | None = None
        """What was last written to summary.json."""

    # What callers do -------------------------------------------------------------------------------

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return self._engine.folder.path

    @property
    def engine(self) -> Engine:
        """What moves the items; for those who watch."""
        return self._engine

    @property
    def graph(self) -> Graph:
        """The file's stages, resources and links."""
        return self._graph

    @property
    def name(self) -> str:
        return self._assembly.name

    async def run(self) -> Summary:
        """Let the sources flow until all is consumed, or drained. Returns what summary.json holds.

        Raises StageError, DeviceError, StallError or Cancelled; then the summary is written all the same.
        """
        engine = self._engine
        if self._run_started is None:
            self._run_started = engine.now()
            engine.open_sources()
        await engine.ended.wait()
        self._run_ended = self._run_ended or engine.now()
        if engine.error is not None:
            self._error_told = True
            raise engine.error
        engine.refuse_tickets(PipeflowError("the pipeline has ended"))
        if engine.folder.fault is not None:
            engine.fail(engine.folder.fault)
            self._error_told = True
            raise engine.folder.fault
        return self._tell()

    def _tell(self) -> Summary:
        self.told = self.summary()
        self._engine.folder.summary(self.told)
        self._engine.folder.profile(profile(self._assembly.runners))
        return self.told

    async def submit(self, item: Any, *, to: str | None = None) -> Any:
        """Send one item in by the stage `input` and await what becomes of it at `output` (or at the only
        stage without consumers). The value is complete and the caller's own.

        Raises Dropped if a stage filtered it, the run's error if that failed, PipeflowError where the file
        has no `input`.
        """
        runner = self._input(to)
        engine = self._engine
        answering = self._assembly.answering
        if answering is None or not runner.feeds_answer:
            raise PipeflowError(
                f"nothing leads from {runner.name!r} to {answering or 'an output'!r}: no result would return"
            )
        if engine.error is not None:
            self._error_told = True
            raise PipeflowError(
                f"pipeline {self.name!r} has stopped and takes no more items: {engine.error}"
            ) from engine.error
        if runner.closed or runner.ending or engine.sources_ended:
            raise PipeflowError(f"pipeline {self.name!r} takes no more items: it is draining or has ended")
        ticket = Ticket(engine.loop.create_future())
        engine.tickets[ticket] = None
        runner.offers.append((item, ticket))
        runner.wake()
        return await ticket.future

    def stream(self, source: AsyncIterable[Any], *, in_flight: int = 16) -> AsyncIterator[Any]:
        """Submit everything of an async iterable, `in_flight` at a time, and yield the results in order.
        Close it (`contextlib.aclosing`) if you leave it early. Needs aiostream."""
        from pipeflow.streams import submit_all

        return submit_all(self, source, in_flight)

    def drain(self) -> None:
        """End the sources; what is in flows out, then `run` returns. After `stop.drain` seconds: cancel."""
        engine = self._engine
        if not engine.sources_ended and not engine.ended.is_set():
            engine.drain()
            engine.start_soon(self._limit_drain, name="drain limit")

    def cancel(self) -> None:
        """Stop now: `run` raises Cancelled. Jobs in hand are awaited for `stop.grace` seconds at exit."""
        self._engine.cancel()

    def abandon(self) -> None:
        """Write the summary as it stands, for a caller that is about to leave without waiting."""
        import contextlib

        self.told = self.summary() | {"status": "forced", "exit_code": 130}
        with contextlib.suppress(OSError):
            self._engine.folder.summary(self.told)

    def why(self) -> str:
        """What each open stage waits for, a line each."""
        return self._engine.why()

    def runners(self) -> list[Runner]:
        """The stages at run time, in order, for those who watch."""
        return list(self._assembly.runners.values())

    def steps(self) -> tuple[int, int | None]:
        """Calls of the stage named in `run.step` so far, and how many there will be where `limit` says so."""
        step = self._assembly.runners.get(self._engine.spec.step or "")
        if step is None:
            return 0, None
        node = self._graph.nodes[step.name]
        limits = [n.spec.limit for n in (node, *self._graph.upstream(node)) if n.spec.limit is not None]
        return step.counters.done, min(limits, default=None)

    @property
    def phase(self) -> str:
        """loading | running | draining | ended"""
        engine = self._engine
        if engine.ended.is_set():
            return "ended"
        if engine.sources_ended:
            return "draining"
        return "loading" if self._run_started is None else "running"

    @property
    def grace(self) -> float:
        """Seconds that a cancel waits for work in hand."""
        return self._engine.spec.stop.grace

    @property
    def log_every(self) -> float:
        """Seconds between progress lines."""
        return self._engine.spec.log_every

    def on_metric(self, sink: Callable[[dict[str, Any]], None]) -> None:
        """Call `sink` on the loop with each line of metrics.jsonl as it is written."""
        self._engine.metric_sinks.append(sink)

    def on_load(self, sink: Callable[[str], None]) -> None:
        """Call `sink` on the loop with a line when something begins to load and when it is loaded. From
        `opening`: later all is loaded."""
        self._loader.loads.listeners.append(sink)

    def _input(self, name: str | None) -> InputRunner:
        inputs = [r for r in self._assembly.runners.values() if isinstance(r, InputRunner)]
        for runner in inputs:
            if (name is None and len(inputs) == 1) or runner.name == name:
                if self._assembly.answering is None:
                    raise PipeflowError(
                        f"pipeline {self.name!r} has several ends: "
                        "add a stage that `uses: output` where results leave"
                    )
                return runner
        if not inputs:
            raise PipeflowError(
                f"pipeline {self.name!r} has no stage that `uses: input`, so nothing can be submitted"
            )
        raise PipeflowError(f"say which input: to={' or '.join(repr(r.name) for r in inputs)}")

    async def _limit_drain(self) -> None:
        with anyio.move_on_after(self._engine.spec.stop.drain):
            await self._engine.ended.wait()
            return
        self._engine.note("drain took too long", limit=self._engine.spec.stop.drain)
        self._engine.cancel()

    # Results ---------------------------------------------------------------------------------------

    def summary(self) -> Summary:
        """Status and figures so far, in the contract's keys; stages add theirs by `ctx.report`."""
        ended = self._run_ended or self._engine.now()
        seconds = 0.0 if self._run_started is None else ended - self._run_started
        return summarise(self._engine, self._assembly, seconds)

    # Load and close --------------------------------------------------------------------------------

    async def load(self) -> None:
        """Devices, resources, lanes, `setup`; the run folder is there from the start."""
        await self._loader.load()

    def untold_error(self) -> BaseException | None:
        """What ended the run, if the caller has not heard of it yet."""
        return None if self._error_told else self._engine.error

    async def close(self) -> None:
        """Give everything back. Under a shield."""
        self._run_ended = self._run_ended or self._engine.now()
        await self._loader.close()

    def tell_fault(self) -> None:
        """summary.json of a run that failed, after all was closed: a fault of closing counts too."""
        engine = self._engine
        if engine.error is None:
            return
        try:
            self._tell()
        except OSError as error:
            if error is not engine.error and str(error) != str(engine.error):
                engine.error.add_note(str(error))


@asynccontextmanager
async def open_pipeline(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    overrides: Sequence[str] = (),
    run_dir: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    registry: Registry | None = None,
    opening: Callable[[Pipeline], None] | None = None,
    strict: bool = False,
    debug_sync: bool = False,
    resume: str | None = None,
    operations: OperationLog | None = None,
) -> AsyncGenerator[Pipeline]:
    """Check a file (or a mapping of the same shape), load it, and hand over the open pipeline.

    Raises DocumentError or GraphError with every fault before anything is loaded, StageError or
    PipeflowError where loading fails. `opening` is called with the pipeline before it loads, so that a load
    can be drained or cancelled too. `strict`: a logged loss that is not finite fails the run.
    `debug_sync`: wait for the device after every launch, so that a fault is laid at the right call.
    `resume`: in place of the file's `run.resume`; a folder is taken from the working folder.
    `operations`: an empty log that is to hear of all that the engine does.

    On exit without an error a pipeline that still takes items is drained.
    """
    machine = ThreadMachine()
    report = await machine.off_loop(lambda: check_here(source, overrides, env, registry), "check")
    if report.spec is None or report.graph is None:
        raise DocumentError(report.errors)
    if report.errors:
        raise GraphError(report.errors)
    wanted = Path(run_dir) if run_dir is not None else None
    place = await machine.off_loop(lambda: find(report, wanted, resume), "resume")
    folder = RunFolder(place.run_dir, report.document.scrub)
    opened = open_checked(
        report,
        machine,
        folder,
        opening=opening,
        strict=strict,
        debug_sync=debug_sync,
        operations=operations,
        resumed=place.saved,
    )
    async with opened as pipeline:
        yield pipeline


@asynccontextmanager
async def open_checked(
    report: Report,
    machine: Machine,
    folder: RunFolder,
    *,
    opening: Callable[[Pipeline], None] | None = None,
    strict: bool = False,
    debug_sync: bool = False,
    operations: OperationLog | None = None,
    resumed: Saved | None = None,
) -> AsyncGenerator[Pipeline]:
    """Load a checked file on a machine, writing to a folder, and hand over the open pipeline. `resumed`: what
    it goes on from, in the same folder."""
    spec, graph = report.spec, report.graph
    assert spec is not None
    assert graph is not None
    name = spec.name
    saves = spec.run.checkpoint is not None and type(folder) is RunFolder
    let_go = hold(folder.path) if saves or resumed is not None else None
    if resumed is not None:
        cut_back(resumed)
    folder.create(resumed=resumed is not None)
    folder.document(report.document.to_yaml())
    failure: BaseException | None = None
    late: asyncio.CancelledError | None = None
    pipeline: Pipeline | None = None
    try:
        async with anyio.create_task_group() as group:
            engine = Engine(spec.run, folder, group, spec.devices, machine)
            engine.strict, engine.debug_sync = strict, debug_sync
            engine.operations = operations
            if spec.run.checkpoint is not None and saves:
                engine.saver = Saver(engine, spec.run.checkpoint, name, resumed)
                if resumed is not None:
                    engine.note("resumed", step=resumed.document["step"], path=str(resumed.path))
            pipeline = Pipeline(graph, engine, Assembly(engine, graph, name, os.urandom(4).hex()))
            try:
                if opening is not None:
                    opening(pipeline)
                await pipeline.load()
                group.start_soon(engine.watch_progress, name="progress guard")
                yield pipeline
                if not engine.ended.is_set():
                    pipeline.drain()
                    await engine.ended.wait()
            except Exception as error:
                failure = error
                engine.fail(error)
            except BaseException:
                engine.fail(Cancelled("the caller was cancelled"))
                raise
            finally:
                with anyio.CancelScope(shield=True):
                    try:
                        late = await to_the_end(pipeline.close())
                    except Exception as error:
                        engine.fail(error)
                        failure = failure or error
                        if error is not failure:
                            failure.add_note(str(error))
                    pipeline.tell_fault()
                group.cancel_scope.cancel()
                if late is not None:
                    raise late
    except BaseException:
        if isinstance(failure, Stuck):  # who cancels must hear that something of the run outlives it
            raise failure from None
        raise
    finally:
        folder.close()
        if let_go is not None:
            let_go()
    failure = failure or (pipeline.untold_error() if pipeline is not None else None)
    if failure is not None:
        raise failure
