"""One launch: stage code is called on a lane, comes back, and its fence is reached."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pipeflow import handover, outcome
from pipeflow.errors import StageError
from pipeflow.faults import device_failed
from pipeflow.fence import REACHED, Fence
from pipeflow.job import END
from pipeflow.observe.profile import observe
from pipeflow.snapshot import copy_first

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Sequence

    from pipeflow.context import Context
    from pipeflow.device.base import Mark
    from pipeflow.job import Job, Launched
    from pipeflow.lane import Lane
    from pipeflow.runner import Runner

__all__ = ["Launch", "device_fault", "launch"]


def launch(runner: Runner, job: Job) -> None:
    """Submit one call of stage code, and before it that of a snapshot, where the stage works on one. Its
    credits are taken and its leases are free."""
    lane = job.lane
    assert lane is not None
    leased: Sequence[Mark] = ()
    if lane.leases and not job.leased and job.snapshot is None:
        leased = lane.leases.take()
        job.held = lane.leases.taken
        job.versions = {**(job.versions or {}), **lane.leases.versions()}
        if lane.snapshots:
            copy_first(runner, job, leased, partial(_call, runner, job, lane))
            return
        job.leased = lane.leases.keeps
    _call(runner, job, lane, leased)


def _call(runner: Runner, job: Job, lane: Lane, leased: Sequence[Mark] = ()) -> None:
    waits = [*(() if runner.on_host else _marks_of_inputs(job)), *leased]
    _look_at_inputs(runner, job, lane)
    context = None
    if lane.wants_context:
        context = job.context
        if context is None:
            context = lane.context(job.number, snapshot=job.snapshot)
            if lane.generates:
                job.context = context
    started = Launch(runner, job, lane, waits, context)
    job.launching = True
    job.unreached += 1
    runner.engine.in_hand += 1
    if runner.engine.operations is not None:
        runner.engine.operations.submits(job, lane)
        started.launch = job.launch
    if lane.gate is not None and lane.enqueue is None:
        lane.gate.enter(lane, job.number)
    if lane.is_async:
        lane.launcher.submit(started, started.call_async, started.returned)
        return
    if lane.timeout is not None:
        started.timer = runner.engine.loop.call_later(lane.timeout, started.over_time)
    lane.launcher.submit(started, started.call, started.returned)


def _look_at_inputs(runner: Runner, job: Job, lane: Lane) -> None:
    """Their memory must still hold what was handed on (axiom 4.6)."""
    for _, item in job.parts:
        stamp = item.stamp
        if stamp is None:
            continue
        if lane.stage.mutates:
            runner.engine.storages.excuse(item)
        elif stamp.rewritten() is not None:
            runner.engine.fail(stamp.error(f"before stage {runner.name!r} read it"))


def _marks_of_inputs(job: Job) -> list[Mark]:
    """What the job's stream must wait for: input fences that the host has not seen reached."""
    fences = [item.fence for _, item in job.parts if not item.fence.reached]
    return [fence.mark for fence in fences if fence.mark is not None]


def device_fault(runner: Runner, lane: Lane, number: int | None, error: BaseException | None) -> None:
    """What was awaited failed outside stage code: the run ends (axiom 7.2)."""
    of = "" if number is None else f", item {number}"
    device_failed(runner.engine, lane.device, error, f"stage {runner.name!r}{of}")


class Launch:
    """The call and what becomes of it. Only `call` runs on the lane's thread."""

    __slots__ = ("_context", "_fence", "_job", "_waits", "awaited", "lane", "launch", "number", "runner",
                 "submitted", "timer")  # fmt: skip

    def __init__(
        self, runner: Runner, job: Job, lane: Lane, waits: Sequence[Mark], context: Context | None
    ) -> None:
        self.runner = runner
        self._job = job
        self.number = job.number
        """Of its item. A source's job has another one for each step, and may be steps ahead of its fences."""
        self.lane = lane
        self._waits = waits
        self.submitted = runner.engine.now()
        self.awaited = [item.fence for _, item in job.parts if not item.fence.reached]
        """Fences of inputs that its stream waits for."""
        self._context = context
        self.launch = 0
        """In the operation log, if there is one."""
        self._fence: Fence | None = None
        """Where its mark was not passed when it returned."""
        self.timer: asyncio.TimerHandle | None = None

    def __str__(self) -> str:
        return f"item {self.number}"

    def call(self) -> Launched:
        return self.lane.launch(self._job, self._waits, self._context)

    def call_async(self) -> Awaitable[Launched]:
        return self.lane.launch_async(self._job, self._waits, self._context)

    def returned(self, launched: Launched | None, error: BaseException | None) -> None:
        """Stage code came back (on the loop)."""
        runner, job, lane = self.runner, self._job, self.lane
        engine = runner.engine
        engine.in_hand -= 1
        engine.progress += 1
        job.launching = False
        if engine.operations is not None:
            engine.operations.came_back(self.launch, launched)
        if launched is None:  # not stage code's fault: the device, or the engine
            device_fault(runner, lane, self.number, error)
            return
        fence = REACHED if launched.passed else Fence(launched.mark)
        if lane.leases and not job.leased:
            lane.leases.give_back(fence, job.held)
        runner.counters.host_seconds += launched.seconds
        runner.counters.launches += 1
        if runner.writes and launched.error is None and launched.value is not END:
            self._written()
        if fence.reached:
            self._reached()
        else:
            self._fence = fence
            engine.in_hand += 1
            lane.watcher.watch(f"the fence of {self}", launched.mark, self._passed)
        outcome.took(runner, job, fence, launched)
        if engine.operations is not None:
            engine.operations.made_by(runner, job)
        if job.leased and job.returned:
            job.leased = False
            lane.leases.give_back(fence, job.held)
        handover.retire_job(runner, job)
        runner.wake()

    def _written(self) -> None:
        """A writer's step gave its resources their next version (axiom 3.3)."""
        runner, job = self.runner, self._job
        for shared in runner.writes:
            if shared.follows is None:
                shared.step = job.seq + 1 if job.seq is not None else shared.step + 1
        for track in runner.tracks:
            track.wrote(job)
        for shared in runner.writes:
            if shared.follows is not None:  # which nobody wrote since it was read: it was leased till now
                shared.publish(shared.follows.step)
            if runner.engine.operations is not None:
                runner.engine.operations.version(shared)
        job.versions = {
            **(job.versions or {}),
            **{shared.name: shared.version for shared in runner.writes},
        }

    def _passed(self, _: Any, fault: BaseException | None) -> None:
        """The mark was awaited off the loop."""
        engine = self.runner.engine
        engine.in_hand -= 1
        engine.progress += 1
        if engine.operations is not None:
            engine.operations.noticed(self.launch, fault)
        if fault is not None:
            device_fault(self.runner, self.lane, self.number, fault)
            return
        self._reached()
        assert self._fence is not None
        self._fence.at = engine.now()
        observe(self, self._fence.at)
        self._fence.reach()
        handover.retire_job(self.runner, self._job)
        self.runner.wake()

    def _reached(self) -> None:
        """The host knows that the launch's device work is done."""
        job, lane, context = self._job, self.lane, self._context
        if self.timer is not None:
            self.timer.cancel()
        if lane.gate is not None and lane.enqueue is None:
            lane.gate.leave(lane, self.number)
        job.unreached -= 1
        if self.runner.engine.operations is not None:
            self.runner.engine.operations.add("reached", self.launch)
        if context is not None and (context.logged or context.reported):
            self.runner.engine.logged(self.runner, self.number, context)

    def over_time(self) -> None:
        """A thread cannot be interrupted, so the run ends; what is still stuck then is named at its close."""
        self.runner.engine.fail(
            StageError(
                f"still at work after its timeout of {self.lane.timeout:g} s",
                stage=self.runner.name,
                sequence=self.number,
            )
        )
