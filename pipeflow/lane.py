"""A lane: one replica of one stage on one device, with its stream, its launcher and its instance."""

from __future__ import annotations

import asyncio
import inspect
from traceback import format_tb
from typing import TYPE_CHECKING, Any, cast

from pipeflow.context import Context
from pipeflow.device.base import is_tensor, map_tensors, tensors_in
from pipeflow.enqueue import item_of_task
from pipeflow.item import Port, Scatter
from pipeflow.job import END, Launched
from pipeflow.lifetime import refuse_writes, stamp_of, versions_of
from pipeflow.stage import Stage, takes_context

if TYPE_CHECKING:
    import threading
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from pipeflow.device.base import Device, Mark, Memory, Stream
    from pipeflow.gate import Gate
    from pipeflow.job import Job, Stamps
    from pipeflow.launch import Launcher
    from pipeflow.operations import OperationLog
    from pipeflow.resource import Leases
    from pipeflow.snapshot import Snapshot
    from pipeflow.suspects import Trace

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
        now: Callable[[], float],
        timeout: float | None = None,
    ) -> None:
        self.now = now
        self.name = name
        """The stage's name in the file."""
        self.index = index
        self.stage = stage
        self.device = device
        self.stream = stream
        self.gate = gate
        """Of the device; None on the host, which no barrier holds."""
        self.in_flight = in_flight
        self.timeout = timeout
        """Seconds for one job."""
        self.reached_at = 0.0
        """When its last fence was reached."""
        self.busy = 0
        """Jobs started and not over."""
        self.launcher: Launcher = None  # type: ignore[assignment]  # set by the runner, which owns threads
        self.watcher: Launcher = None  # type: ignore[assignment]  # awaits marks; the launcher but for async lanes
        self.hook_launcher: Launcher = None  # type: ignore[assignment]  # runs setup and finish, off the loop
        self.leases: Leases = None  # type: ignore[assignment]  # set once resources are open
        self.snapshots: tuple[str, ...] = ()
        """Roles that are copied before a job is called (see `snapshot`)."""
        self._run_dir = run_dir
        self._stop = stop
        self._seed = seed
        run: Any = getattr(stage, "run", None)
        self._run: Callable[..., Any] = run
        self.wants_context = run is not None and takes_context(run)
        self.is_async = inspect.iscoroutinefunction(run) or inspect.isasyncgenfunction(run)
        self.generates = inspect.isgeneratorfunction(run) or inspect.isasyncgenfunction(run)
        self.is_source = False
        self.resumed = False
        """Its run goes on from a checkpoint."""
        cls: Any = type(stage)
        self.has_setup = cls.setup is not cast("Any", Stage).setup
        self.has_finish = cls.finish is not cast("Any", Stage).finish
        self.has_state = cls.state is not cast("Any", Stage).state
        self.answers = False
        """What it makes is the result of a submit."""
        self.debug_sync = False
        """Wait for the device after each launch, so that its fault is raised at the launch that made it."""
        self.enqueue: Callable[[Callable[[], Any]], Awaitable[Any]] | None = None
        """Set for async stages on a device: runs a call on the lane's thread and stream, past the gate."""
        self.operations: OperationLog | None = None
        """Hears of each step of a launch, if the run keeps such a log."""
        self.trace: Trace | None = None
        """Tells after a fault whether the device was in this lane's work."""
        self.deadlines: dict[asyncio.Task[Any] | None, asyncio.Timeout] = {}
        """Of async jobs under way, by the task that runs them."""

    def context(self, sequence: int | None, *, snapshot: Snapshot | None = None) -> Context:
        """The context of one job. `snapshot`: what it reads, where that is not the resources themselves."""
        leases = self.leases
        return Context(
            stage=self.name,
            lane=self.index,
            device=self.device.torch_name,
            run_dir=self._run_dir,
            stop=self._stop,
            seed=self._seed,
            sequence=sequence,
            reads=leases.values() if snapshot is None else snapshot.values,
            writes=leases.values(write=True),
            copies=leases.everywhere() if leases.writes else {},
            versions=leases.roles() if snapshot is None else snapshot.versions,
            enqueue=self.enqueue,
            resumed=self.resumed,
        )

    def stop_only_at(self, event: threading.Event) -> None:
        """Have `ctx.stopping` tell of this event: of a stage that must not cut an item short for a drain."""
        self._stop = event

    # One launch ------------------------------------------------------------------------------------

    def launch(self, job: Job, waits: Sequence[Mark], context: Context | None) -> Launched:
        """Call stage code for one output, on this lane's device and stream. On the launcher's thread.

        Whatever happens a mark is recorded: a call that raised may have enqueued work before.
        """
        begun = self.now()
        value: Any = None
        stamps: Stamps = None
        error: BaseException | None = None
        operations, number = self.operations, job.launch
        with self.device.entered(self.stream):
            if operations is not None:
                operations.add("enter", number)
            self._wait_for(waits, number)
            if self.trace is not None:
                self.trace.begin(job.number)
            if operations is not None:
                operations.add("begin", number)
            lent = () if self.stage.mutates else versions_of(job.value)
            try:
                value = self._step(job, context) if self.generates else self._call(job, context)
                refuse_writes(lent, job.parts)
                stamps = _stamps(value)
                value = self._hand_out(value, job)
            except BaseException as raised:  # a SystemExit or KeyboardInterrupt too is stage code's fault
                value = stamps = None
                error = raised
            starved = self._starved(error, context)
            if operations is not None:
                operations.add("end", number, error is not None)
            if context is not None and (context.logged or context.reported):
                self._fetch_logged(context)
            if self.trace is not None:
                self.trace.end()
            mark = self.stream.record(_payload(value), job.value)
            if operations is not None:
                operations.recorded(number, mark)
            if self.debug_sync:
                mark.wait()
        try:
            return Launched(value, mark, context, error, self.now() - begun, stamps, starved=starved)
        finally:
            # The error's traceback holds this frame. Without these names there is no cycle, which would keep
            # the item's memory on the device until the collector comes by.
            value = stamps = error = None

    def _call(self, job: Job, context: Context | None) -> Any:
        if self.wants_context:
            return self._run(job.value, context)
        return self._run(job.value)

    def _step(self, job: Job, context: Context | None) -> Any:
        if job.generator is None:
            job.generator = self._generator(job, context)
        return next(job.generator, END)

    def _generator(self, job: Job, context: Context | None) -> Any:
        arguments = [] if self.is_source else [job.value]
        if self.wants_context:
            arguments.append(context)
        return self._run(*arguments)

    async def launch_async(self, job: Job, waits: Sequence[Mark], context: Context | None) -> Launched:
        """The same for `async def` stage code, on the loop. What it enqueues goes through `enqueue`."""
        begun = self.now()
        value: Any = None
        stamps: Stamps = None
        error: BaseException | None = None
        operations, number = self.operations, job.launch
        item_of_task.set(job.number)
        if waits and self.enqueue is not None:
            await self.enqueue(lambda: self._wait_for(waits, number))
        if operations is not None:
            operations.add("begin", number)
        lent = () if self.stage.mutates else versions_of(job.value)
        try:
            if self.timeout is None:
                if self.generates:
                    value = await self._next(job, context)
                else:
                    value = await self._call(job, context)
            else:
                value = await self._await_in_time(job, context, self.timeout)
            refuse_writes(lent, job.parts)
            stamps = _stamps(value)
        except asyncio.CancelledError as raised:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the run's
            error = raised  # stage code's own: it awaited something that was cancelled
        except GeneratorExit:
            raise  # this coroutine was given up
        except BaseException as raised:  # a SystemExit or KeyboardInterrupt too: not the loop's end
            error = raised
        starved = self._starved(error, context)
        if operations is not None:
            operations.add("end", number, error is not None)
        if self.enqueue is None:
            if error is None:
                value = self._hand_out(value, job)
            mark = self.stream.record(_payload(value), job.value)
            if operations is not None:
                operations.recorded(number, mark)
            passed = mark.passed()
        else:  # the loop makes no device call
            value, mark, passed = await self.enqueue(lambda: self._hand_over(value, job, context, error))
        try:
            return Launched(value, mark, context, error, self.now() - begun, stamps, passed, starved)
        finally:
            value = stamps = error = None  # no cycle, as above

    def _wait_for(self, marks: Sequence[Mark], launch: int) -> None:
        for mark in marks:
            self.stream.wait(mark)
            if self.operations is not None:
                self.operations.waited(launch, mark)

    def _next(self, job: Job, context: Context | None) -> Awaitable[Any]:
        if job.generator is None:
            job.generator = self._generator(job, context)
        return anext(job.generator, END)

    async def _await_in_time(self, job: Job, context: Context | None, seconds: float) -> Any:
        task = asyncio.current_task()
        deadline = asyncio.timeout(seconds)
        try:
            async with deadline:
                self.deadlines[task] = deadline
                return await (self._next(job, context) if self.generates else self._call(job, context))
        except TimeoutError as error:
            if deadline.expired():
                raise TimeoutError(f"took longer than its timeout of {seconds:g} s") from error
            raise
        finally:
            self.deadlines.pop(task, None)

    def _hand_over(
        self, value: Any, job: Job, context: Context | None, error: BaseException | None
    ) -> tuple[Any, Mark, bool]:
        """The end of an async job, on its lane's thread: fetch what it logged, record its mark."""
        if context is not None and (context.logged or context.reported):
            self._fetch_logged(context)
        if error is None:
            value = self._hand_out(value, job)
        mark = self.stream.record(_payload(value), job.value)
        if self.operations is not None:
            self.operations.recorded(job.launch, mark)
        return value, mark, mark.passed()

    def _hand_out(self, value: Any, job: Job) -> Any:
        """The result as it leaves the lane: the device's own way, and for a caller memory of his own, which
        no later job fills again (axiom 4.9)."""
        if self.answers and job.tickets:
            value = _with_payload(value, _clone)
        if self.device.copies_out:
            value = _with_payload(value, lambda payload: self.device.hand_out(payload, job.value))
        return value

    def _starved(self, error: BaseException | None, context: Context | None) -> Memory | None:
        """The allocator's counters, if stage code ran out of device memory. Lets go of all that its call
        held: what it logged, and the frames of its traceback, which stays as a text."""
        if error is None or not self.device.is_out_of_memory(error):
            return None
        memory = self.device.memory()
        if context is not None:
            context.logged.clear()
            context.reported.clear()
        error.add_note("raised at:\n" + "".join(format_tb(error.__traceback__)).rstrip())
        error.__traceback__ = error.__context__ = error.__cause__ = None
        return memory

    def _fetch_logged(self, context: Context) -> None:
        """Enqueue the copies by which logged and reported tensors reach the host, behind the job's work."""
        for values in (*context.logged, context.reported):
            for key, value in values.items():
                if is_tensor(value):
                    values[key] = self.device.to_host(value.detach(), self.stream)

    # Hooks -----------------------------------------------------------------------------------------

    def hook(
        self,
        call: Callable[[Context], Any],
        context: Context,
        *,
        waits: Sequence[Mark] = (),
        launch: int = 0,
    ) -> Launched:
        """Run `setup` or `finish` like a job: on this device and stream, with a mark behind it. `launch`: its
        number in the operation log."""
        begun = self.now()
        error: BaseException | None = None
        operations = self.operations if launch else None
        with self.device.entered(self.stream):
            if operations is not None:
                operations.add("enter", launch)
            self._wait_for(waits, launch)
            if self.trace is not None:
                self.trace.begin(context.sequence)
            if operations is not None:
                operations.add("begin", launch)
            try:
                call(context)
            except BaseException as raised:
                error = raised
            starved = self._starved(error, context)
            if operations is not None:
                operations.add("end", launch, error is not None)
            if context.logged or context.reported:
                self._fetch_logged(context)
            if self.trace is not None:
                self.trace.end()
            mark = self.stream.record()
            if operations is not None:
                operations.recorded(launch, mark)
            if self.debug_sync:
                mark.wait()
        try:
            return Launched(None, mark, context, error, self.now() - begun, starved=starved)
        finally:
            error = None  # no cycle, as in `launch`

    def close_generator(self, job: Job) -> Callable[[], Any] | Callable[[], Awaitable[Any]] | None:
        """How to end a generator that will not be asked again; None where there is none."""
        if job.generator is None:
            return None
        return job.generator.aclose if self.is_async else job.generator.close


def _payload(value: Any) -> Any:
    """What of a result may hold tensors."""
    kind: Any = cast("Any", type(value))
    if kind is Port:
        return value.value
    return value.values if kind is Scatter else value


def _with_payload(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same result with `change(payload)` in it."""
    kind: Any = cast("Any", type(value))
    if kind is Port:
        return Port(value.name, change(value.value))
    return Scatter(change(value.values)) if kind is Scatter else change(value)


def _clone(payload: Any) -> Any:
    if next(iter(tensors_in(payload)), None) is None:
        return payload

    def clone(tensor: Any) -> Any:
        return tensor.clone()

    return map_tensors(payload, clone)


def _stamps(value: Any) -> Stamps:
    """What each output of one result holds: of a Scatter one a member. RuntimeError for a grad_fn."""
    if cast("Any", type(value)) is Scatter:
        return [stamp_of(member) for member in value.values]
    return stamp_of(_payload(value))
