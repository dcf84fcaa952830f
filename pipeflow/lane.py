"""A lane: one replica of one stage on one device, with its stream, its launcher and its instance."""

from __future__ import annotations

import asyncio
import inspect
import time
from typing import TYPE_CHECKING, Any

from pipeflow.context import Context
from pipeflow.job import END, Launched
from pipeflow.stage import Stage, takes_context

if TYPE_CHECKING:
    import threading
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from pipeflow.barrier import Gate
    from pipeflow.device.base import Device, Mark, Stream
    from pipeflow.engine import Engine
    from pipeflow.job import Job
    from pipeflow.launch import Launcher
    from pipeflow.resource import Leases

__all__ = ["Lane"]


class Lane:
    """Runs the jobs of its stage in order. `launch` is the only place where stage code is called."""

    def __init__(
        self,
        *,
        name: str,
        index: int,
        stage: Stage[Any, Any],
        device: Device,
        stream: Stream,
        gate: Gate | None,
        in_flight: int,
        run_dir: Path,
        stop: threading.Event,
        seed: int,
    ) -> None:
        self.name = name
        """The stage's name in the file."""
        self.index = index
        self.stage = stage
        self.device = device
        self.stream = stream
        self.gate = gate
        """Of the device; None on the host, which no barrier holds."""
        self.in_flight = in_flight
        self.busy = 0
        """Jobs started and not over."""
        self.launcher: Launcher = None  # type: ignore[assignment]  # set by the runner, which owns threads
        self.watcher: Launcher = None  # type: ignore[assignment]  # awaits marks; the launcher but for async lanes
        self.hook_launcher: Launcher = None  # type: ignore[assignment]  # runs setup and finish, off the loop
        self.leases: Leases = None  # type: ignore[assignment]  # set once resources are open
        self._run_dir = run_dir
        self._stop = stop
        self._seed = seed
        run: Any = getattr(stage, "run", None)
        self._run: Callable[..., Any] = run
        self._wants_context = run is not None and takes_context(run)
        self.is_async = inspect.iscoroutinefunction(run) or inspect.isasyncgenfunction(run)
        self.generates = inspect.isgeneratorfunction(run) or inspect.isasyncgenfunction(run)
        self.is_source = False
        self.has_setup = type(stage).setup is not Stage.setup
        self.has_finish = type(stage).finish is not Stage.finish
        self.enqueue: Callable[[Callable[[], Any]], Awaitable[Any]] | None = None
        """Set for async stages on a device: runs a call on the lane's thread and stream, past the gate."""

    def context(self, sequence: int | None) -> Context:
        """The context of one job."""
        leases = self.leases
        return Context(
            stage=self.name,
            lane=self.index,
            device=self.device.torch_name,
            run_dir=self._run_dir,
            stop=self._stop,
            seed=self._seed,
            sequence=sequence,
            reads={role: instance.value for role, instance in leases.reads.items()},
            writes={role: instance.value for role, instance in leases.writes.items()},
            versions={
                role: instance.shared.version for role, instance in (*leases.reads.items(), *leases.writes.items())
            },
            enqueue=self.enqueue,
        )

    # One launch ------------------------------------------------------------------------------------

    def launch(self, job: Job, waits: list[Mark], context: Context | None) -> Launched:
        """Call stage code for one output, on this lane's device and stream. On the launcher's thread.

        Whatever happens a mark is recorded: a call that raised may have enqueued work before.
        """
        begun = time.perf_counter()
        value: Any = None
        error: Exception | None = None
        with self.device.entered(self.stream):
            for mark in waits:
                self.stream.wait(mark)
            try:
                value = self._step(job, context) if self.generates else self._call(job, context)
            except Exception as raised:
                error = raised
            if context is not None and context._logged:
                self._fetch_logged(context)
            mark = self.stream.record(value, job.value)
        return Launched(value, mark, context, error, time.perf_counter() - begun)

    def _call(self, job: Job, context: Context | None) -> Any:
        if self._wants_context:
            return self._run(job.value, context)
        return self._run(job.value)

    def _step(self, job: Job, context: Context | None) -> Any:
        if job.generator is None:
            job.generator = self._generator(job, context)
        return next(job.generator, END)

    def _generator(self, job: Job, context: Context | None) -> Any:
        arguments = [] if self.is_source else [job.value]
        if self._wants_context:
            arguments.append(context)
        return self._run(*arguments)

    async def launch_async(self, job: Job, context: Context | None) -> Launched:
        """The same for `async def` stage code, on the loop. What it enqueues goes through `enqueue`."""
        begun = time.perf_counter()
        value: Any = None
        error: Exception | None = None
        try:
            if self.generates:
                if job.generator is None:
                    job.generator = self._generator(job, context)
                value = await anext(job.generator, END)
            else:
                value = await self._call(job, context)
        except Exception as raised:
            error = raised
        if self.enqueue is None:
            mark = self.stream.record(value, job.value)
        else:  # the loop makes no device call
            mark = await self.enqueue(lambda: self.stream.record(value, job.value))
        return Launched(value, mark, context, error, time.perf_counter() - begun)

    def _fetch_logged(self, context: Context) -> None:
        """Enqueue the copies by which logged tensors reach the host, behind the job's own work."""
        import sys

        torch = sys.modules.get("torch")
        if torch is None:
            return
        for values in context._logged:
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    values[key] = self.device.to_host(value.detach(), self.stream)

    # Hooks -----------------------------------------------------------------------------------------

    def hook(self, call: Callable[[Context], Any], context: Context) -> Launched:
        """Run `setup` or `finish` like a job: on this device and stream, with a mark behind it."""
        begun = time.perf_counter()
        error: Exception | None = None
        with self.device.entered(self.stream):
            try:
                call(context)
            except Exception as raised:
                error = raised
            if context._logged:
                self._fetch_logged(context)
            mark = self.stream.record()
        return Launched(None, mark, context, error, time.perf_counter() - begun)

    def make_enqueue(self, engine: Engine, launcher: Launcher) -> Callable[[Callable[[], Any]], Awaitable[Any]]:
        """How an async stage launches on its device: on a thread and the lane's stream, past the gate."""

        async def enqueue(function: Callable[[], Any]) -> Any:
            while self.gate is not None and not self.gate.open:
                await engine.next_progress()
            if self.gate is not None:
                self.gate.enter(self, None)
            answer: asyncio.Future[Any] = engine.loop.create_future()

            def run() -> tuple[Any, Mark]:
                with self.device.entered(self.stream):
                    value = function()
                    return value, self.stream.record()

            def reached(_: Any, fault: BaseException | None) -> None:
                if fault is not None:
                    engine.fail(fault)
                elif self.gate is not None:
                    self.gate.leave(self, None)

            def returned(pair: tuple[Any, Mark] | None, error: BaseException | None) -> None:
                if pair is None:
                    reached(None, None)
                    if not answer.done():
                        answer.set_exception(error or RuntimeError("no result"))
                    return
                value, mark = pair
                if mark.passed():
                    reached(None, None)
                else:
                    launcher.watch("what it enqueued", mark, reached)
                if not answer.done():
                    answer.set_result(value)

            launcher.submit("what it enqueues", run, returned)
            return await answer

        return enqueue

    def close_generator(self, job: Job) -> Callable[[], Any] | Callable[[], Awaitable[Any]] | None:
        """How to end a generator that will not be asked again; None where there is none."""
        if job.generator is None:
            return None
        return job.generator.aclose if self.is_async else job.generator.close
