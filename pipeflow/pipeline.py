"""A pipeline as a program sees it: open it, run it, submit to it, stop it.

    async with pipeflow.open("file.yaml") as pipeline:
        summary = await pipeline.run()

The caller's loop is used; no signal handler is installed and no other loop is started. The context may be
entered in any task and left by any error; nothing of the run outlives it, or `Stuck` says what does.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from pipeflow.assemble import Assembly, InputRunner
from pipeflow.context import ResourceContext, seed_of
from pipeflow.engine import Engine, Ticket
from pipeflow.errors import Cancelled, DocumentError, GraphError, PipeflowError, StageError
from pipeflow.launch import Inbox, off_loop
from pipeflow.observe.folder import RunFolder, write_whole
from pipeflow.resource import Instance, Leases, Shared
from pipeflow.stage import Kind

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence

    from pipeflow.check import Report
    from pipeflow.lane import Lane
    from pipeflow.registry import Registry
    from pipeflow.runner import Runner

__all__ = ["Pipeline", "Summary", "open_pipeline"]

Summary = dict[str, Any]
"""What summary.json holds."""


class Pipeline:
    """An open pipeline: its resources are loaded and its stages set up. Made by `pipeflow.open`."""

    def __init__(self, report: Report, engine: Engine, assembly: Assembly) -> None:
        self._report = report
        self._engine = engine
        self._assembly = assembly
        self._opened: list[tuple[Any, Any]] = []
        self._set_up: list[Lane] = []
        self._run_started: float | None = None
        self._run_ended: float | None = None
        self._error_told = False

    # What callers do -------------------------------------------------------------------------------

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return self._engine.folder.path

    @property
    def name(self) -> str:
        return self._assembly.name

    async def run(self) -> Summary:
        """Let the sources flow until all is consumed, or drained. Returns what summary.json holds.

        Raises StageError, DeviceError, StallError or Cancelled; then the summary is written all the same.
        """
        engine = self._engine
        if self._run_started is None:
            self._run_started = time.monotonic()
            engine.open_sources()
        await engine.ended.wait()
        self._run_ended = self._run_ended or time.monotonic()
        if engine.error is not None:
            self._error_told = True
            raise engine.error
        engine.refuse_tickets(PipeflowError("the pipeline has ended"))
        summary = self.summary()
        engine.folder.summary(summary)
        return summary

    async def submit(self, item: Any, *, to: str | None = None) -> Any:
        """Send one item in by the stage `input` and await what becomes of it at `output` (or at the only
        stage without consumers). The value is complete and the caller's own.

        Raises Dropped if a stage filtered it, the run's error if that failed, PipeflowError where the file
        has no `input`.
        """
        runner = self._input(to)
        engine = self._engine
        if engine.error is not None:
            self._error_told = True
            raise engine.error
        if runner.closed or runner.ending or engine.sources_ended:
            raise PipeflowError(f"pipeline {self.name!r} takes no more items: it is draining or has ended")
        ticket = Ticket(engine.loop.create_future())
        engine.tickets.add(ticket)
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
        if not engine.sources_ended:
            engine.drain()
            engine.start_soon(self._limit_drain, name="drain limit")

    def cancel(self) -> None:
        """Stop now: `run` raises Cancelled. Jobs in hand are awaited for `stop.grace` seconds at exit."""
        self._engine.cancel()

    def abandon(self) -> None:
        """Write the summary as it stands, for a caller that is about to leave without waiting."""
        import contextlib

        with contextlib.suppress(OSError):
            self._engine.folder.summary(self.summary() | {"status": "forced", "exit_code": 130})

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
        node = self._report.graph.nodes[step.name]
        limits = [n.spec.limit for n in (node, *self._report.graph.upstream(node)) if n.spec.limit is not None]
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

    def _input(self, name: str | None) -> InputRunner:
        inputs = [r for r in self._assembly.runners.values() if isinstance(r, InputRunner)]
        for runner in inputs:
            if (name is None and len(inputs) == 1) or runner.name == name:
                if self._assembly.answering is None:
                    raise PipeflowError(
                        f"pipeline {self.name!r} has several ends: add a stage that `uses: output` where results leave"
                    )
                return runner
        if not inputs:
            raise PipeflowError(f"pipeline {self.name!r} has no stage that `uses: input`, so nothing can be submitted")
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
        engine = self._engine
        error = engine.error
        if error is None:
            status, code = ("drained", 0) if engine.sources_ended else ("done", 0)
        elif isinstance(error, Cancelled):
            status, code = "forced", 130
        else:
            status, code = "failed", 1
        step = self._assembly.runners.get(engine.spec.step or "")
        begun = self._run_started or time.monotonic()
        wall = (self._run_ended or time.monotonic()) - begun
        keys = (
            "tokens loss_first loss_last tau_start tau_constant tau_end tau_decode "
            "plain_tokens_per_s decode_tokens_per_s lossless"
        )
        values: Summary = {
            "status": status,
            "exit_code": code,
            "wall_s": round(time.monotonic() - engine.started, 3),
            "run_s": round(wall, 3),
            "steps": step.counters.done if step is not None else None,
            "items": sum(r.counters.made for r in self._assembly.runners.values() if r.kind is Kind.SOURCE),
            **dict.fromkeys(keys.split()),
            "device": sorted({device.name for device in self._assembly.devices.values()}) or ["host"],
            "versions": _versions(),
        }
        values.update(engine.reported)
        if values["tokens"] is not None and wall > 0:
            values.setdefault("tokens_per_s", round(values["tokens"] / wall, 3))
        values.setdefault("tokens_per_s", None)
        values["stages"] = {
            name: {"made": runner.counters.made, "dropped": runner.counters.dropped}
            for name, runner in self._assembly.runners.items()
        }
        values["skipped"] = {n: r._skipped for n, r in self._assembly.runners.items() if r._skipped}
        if error is not None:
            values["error"] = str(error)
        return values

    # Load ------------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Devices, resources, lanes, `setup`; the run folder is there from the start."""
        engine = self._engine
        await engine.off_loop(self._assembly.make_devices, "devices")
        for name in self._report.graph.opening:
            await self._open_resource(name)
        self._assembly.make_runners()
        self._lease()
        for name in self._report.graph.order:
            async with anyio.create_task_group() as group:
                for lane in self._assembly.runners[name].lanes:
                    if lane.has_setup:
                        group.start_soon(self._set_up_lane, lane)
                    else:
                        self._set_up.append(lane)
        engine.wake_all()

    async def _open_resource(self, name: str) -> None:
        engine, assembly = self._engine, self._assembly
        node = self._report.graph.resources[name]
        shared = assembly.shared[name] = Shared(name, assembly.incarnation)
        for device_name in assembly.devices_of_resource(name):
            device = assembly.devices.get(device_name)
            resource = node.cls(node.config)
            context = ResourceContext(
                name=name,
                device=device.torch_name if device is not None else "cpu",
                seed=seed_of(engine.spec.seed, name),
                run_dir=engine.folder.path,
                stop=engine.stop,
                reads={role: assembly.shared[other].on(device_name).value for role, other in node.reads.items()},
            )

            def call(resource: Any = resource, context: ResourceContext = context) -> Any:
                return resource.open(context)

            try:
                value = await engine.off_loop(call, f"opens {name}")
            except PipeflowError:
                raise
            except Exception as error:
                raise PipeflowError(f"resource {name!r} on {device_name}: {type(error).__name__}: {error}") from error
            self._opened.append((resource, value))
            for line in context.logged:
                engine.record(name, **line)
            engine.reported.update(context.reported)
            shared.instances[device_name] = Instance(shared, device_name, value)

    def _lease(self) -> None:
        shared = self._assembly.shared
        for lane in self._assembly.lanes:
            node = self._report.graph.nodes.get(lane.name)
            runner = self._assembly.runners[lane.name]
            device = lane.device.name if not runner.on_host else "cpu"
            lane.leases = Leases(
                runner,
                {role: shared[name].on(device) for role, name in (node.reads if node else {}).items()},
                {role: shared[name].on(device) for role, name in (node.writes if node else {}).items()},
            )
            for name in set(node.writes.values()) if node else ():
                shared[name].writer = runner
                if shared[name] not in runner.writes:
                    runner.writes.append(shared[name])

    async def _set_up_lane(self, lane: Lane) -> None:
        engine = self._engine
        context = lane.context(None)
        done = anyio.Event()
        failure: list[BaseException] = []

        def finished(launched: Any, error: BaseException | None) -> None:
            fault = error if launched is None else launched.error
            if fault is not None:
                failure.append(fault)
                done.set()
            elif launched.mark.passed():
                done.set()
            else:
                lane.watcher.watch("the fence of its setup", launched.mark, passed)

        def passed(_: Any, fault: BaseException | None) -> None:
            if fault is not None:
                failure.append(fault)
            done.set()

        lane.hook_launcher.submit("its setup", lambda: lane.hook(lane.stage.setup, context), finished)
        await done.wait()
        if failure:
            fault = failure[0]
            raise StageError(f"in setup: {type(fault).__name__}: {fault}", stage=lane.name) from fault
        self._set_up.append(lane)
        engine.logged(self._assembly.runners[lane.name], None, context)

    # Close -----------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Stop threads, close stages and resources, write the summary. Under a shield."""
        engine = self._engine
        engine.admitting = False
        engine.refuse_tickets(engine.error or PipeflowError("the pipeline has ended"))
        self._run_ended = self._run_ended or time.monotonic()
        engine.stop.set()
        try:
            await engine.settle(engine.spec.stop.grace)
        finally:
            for lane in self._assembly.lanes:
                if lane.gate is not None:
                    lane.gate.nodes.discard(self._assembly.runners[lane.name])
                    lane.gate.forget(lane)
            for runner in self._assembly.runners.values():
                for _, gate in getattr(runner, "scope", ()):
                    gate.reopen()
            if engine.error is not None:
                engine.folder.summary(self.summary())
        for lane in reversed(self._set_up):
            await self._closing(lane.stage.close, f"stage {lane.name!r}")
        for resource, value in reversed(self._opened):

            def call(resource: Any = resource, value: Any = value) -> None:
                resource.close(value)

            await self._closing(call, "a resource")
        for device in self._assembly.devices.values():
            device.close()

    async def _closing(self, call: Callable[[], None], what: str) -> None:
        try:
            await self._engine.off_loop(call, "close")
        except Exception as error:
            self._engine.note("close failed", what, error=error)
            if self._engine.error is None:
                self._engine.error = PipeflowError(f"while {what} was closed: {type(error).__name__}: {error}")


def _versions() -> dict[str, str]:
    from importlib import metadata

    found: dict[str, str] = {}
    for name in ("pipeflow", "torch", "transformers", "anyio", "msgspec"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def default_run_dir(name: str, base: Path | None = None) -> Path:
    """`runs/NAME-YYYYmmdd-HHMMSS` below the working folder; a number is added where that is taken."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = (base or Path.cwd()) / "runs"
    path = folder / stem
    number = 1
    while path.exists():
        number += 1
        path = folder / f"{stem}-{number}"
    return path


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
) -> AsyncIterator[Pipeline]:
    """Check a file (or a mapping of the same shape), load it, and hand over the open pipeline.

    Raises DocumentError or GraphError with every fault before anything is loaded, StageError or
    PipeflowError where loading fails. `opening` is called with the pipeline before it loads, so that a load
    can be drained or cancelled too. `strict`: a logged loss that is not finite fails the run.
    `debug_sync`: wait for the device after every launch, so that a fault is laid at the right call. On exit without an error a pipeline that still takes items is drained.
    """
    inbox = Inbox(asyncio.get_running_loop())
    report = await off_loop(inbox, lambda: _check(source, overrides, env, registry), "check")
    if report.errors:
        kind = DocumentError if report.graph is None else GraphError
        raise kind(report.errors)
    name = report.spec.name
    folder = RunFolder(Path(run_dir) if run_dir is not None else default_run_dir(name))
    folder.create()
    write_whole(folder.path / "pipeline.yaml", report.document.to_yaml())
    failure: BaseException | None = None
    pipeline: Pipeline | None = None
    try:
        async with anyio.create_task_group() as group:
            engine = Engine(report.spec.run, folder, group, report.spec.devices)
            assembly = Assembly(engine, report.graph, name, os.urandom(4).hex())
            pipeline = Pipeline(report, engine, assembly)
            try:
                engine.strict, engine.debug_sync = strict, debug_sync
                if opening is not None:
                    opening(pipeline)
                async with anyio.create_task_group() as loading:
                    loading.start_soon(_end_with, engine, loading.cancel_scope)
                    await pipeline.load()
                    loading.cancel_scope.cancel()
                if engine.error is not None:
                    raise engine.error
                group.start_soon(engine.watch_progress, name="progress guard")
                yield pipeline
                if not engine.ended.is_set():
                    pipeline.drain()
                    await engine.ended.wait()
            except Exception as error:
                failure = _only(error)
                engine.fail(failure)
            except BaseException:
                engine.fail(Cancelled("the caller was cancelled"))
                raise
            finally:
                with anyio.CancelScope(shield=True):
                    try:
                        await pipeline.close()
                    except Exception as error:
                        failure = failure or error
                        if error is not failure:
                            failure.add_note(str(error))
                group.cancel_scope.cancel()
    finally:
        folder.close()
    if failure is None and engine.error is not None and not pipeline._error_told:
        failure = engine.error
    if failure is not None:
        raise failure


async def _end_with(engine: Engine, scope: anyio.CancelScope) -> None:
    """Give up a load once the run is cancelled."""
    await engine.ended.wait()
    scope.cancel()


def _only(error: Exception) -> Exception:
    """The error itself where a task group put exactly one into a group."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _check(
    source: str | os.PathLike[str] | Mapping[str, Any],
    overrides: Sequence[str],
    env: Mapping[str, str] | None,
    registry: Registry | None,
) -> Report:
    from collections.abc import Mapping

    from pipeflow.check import check_document
    from pipeflow.document import from_dict, load

    read = from_dict if isinstance(source, Mapping) else load
    document = read(source, overrides=overrides, env=env)  # type: ignore[arg-type]
    return check_document(document, env=env, here=True, registry=registry)
