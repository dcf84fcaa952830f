"""`snapshot: true`: a reader works on its own copy, so the writer need not wait for it (axioms 3.4, 5.6).

The copy is made on the reader's lane and stream, by the resource's own `snapshot`, in a launch of its own
before stage code is called. Once that has returned the lease is given back and the pin is gone: the writer's
stream waits for the copy on the device, and nobody on the host for the reader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeflow import outcome
from pipeflow.error_text import named_error
from pipeflow.errors import StageError
from pipeflow.faults import device_failed
from pipeflow.fence import REACHED, Fence

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pipeflow.context import Context
    from pipeflow.device.base import Mark
    from pipeflow.item import Version
    from pipeflow.job import Job, Launched
    from pipeflow.lane import Lane
    from pipeflow.resource import Leases
    from pipeflow.runner import Runner

__all__ = ["Snapshot", "copied_roles", "copy_first"]


class Snapshot:
    """What a job reads: copies of what is written meanwhile, and the versions that they are of."""

    __slots__ = ("values", "versions")

    def __init__(self, values: Mapping[str, Any], versions: Mapping[str, Version]) -> None:
        self.values = values
        self.versions = versions


def copied_roles(leases: Leases) -> tuple[str, ...]:
    """Roles of which a snapshot is taken: those that some stage writes. Once all lanes have leases."""
    return tuple(role for role, held in leases.reads.items() if held.shared.writer is not None)


def copy_first(runner: Runner, job: Job, waits: Sequence[Mark], then: Callable[[], None]) -> None:
    """Copy what the job has leased, give the leases back, and call `then`, if the run still goes on."""
    _Copying(runner, job, waits, then).start()


class _Copying:
    def __init__(self, runner: Runner, job: Job, waits: Sequence[Mark], then: Callable[[], None]) -> None:
        assert job.lane is not None
        self._runner = runner
        self._job = job
        self._lane: Lane = job.lane
        self._waits = waits
        self._then = then
        leases = self._lane.leases
        self._values = leases.values()
        self._resources = {role: leases.reads[role].copies[0].resource for role in self._lane.snapshots}
        self._versions = leases.roles()
        self._context = self._lane.context(job.number)
        self._fence = REACHED
        self._launch = 0

    def __str__(self) -> str:
        return f"the snapshot for item {self._job.number}"

    def start(self) -> None:
        job, lane = self._job, self._lane
        job.launching = True
        job.unreached += 1
        self._runner.engine.in_hand += 1
        if lane.operations is not None:
            lane.operations.submits(job, lane, "copy")
            self._launch = job.launch
        if lane.gate is not None:
            lane.gate.enter(lane, job.number)
        lane.hook_launcher.submit(self, self._call, self._returned)

    def _call(self) -> Launched:
        return self._lane.hook(self._copy, self._context, waits=self._waits, launch=self._launch)

    def _copy(self, context: Context) -> None:
        for role, resource in self._resources.items():
            assert resource is not None
            self._values[role] = resource.snapshot(self._values[role])

    def _returned(self, launched: Launched | None, error: BaseException | None) -> None:
        runner, job, lane = self._runner, self._job, self._lane
        engine = runner.engine
        engine.in_hand -= 1
        engine.progress += 1
        job.launching = False
        if lane.operations is not None:
            lane.operations.came_back(self._launch, launched)
        if launched is None:
            self._fault(error)
            return
        self._fence = REACHED if launched.passed else Fence(launched.mark)
        lane.leases.give_back(self._fence, job.held)
        job.held = ()
        if self._fence.reached:
            self._reached()
        else:
            engine.in_hand += 1
            lane.watcher.watch(f"the fence of {self}", launched.mark, self._passed)
        if launched.starved is not None:
            runner.engine.parking.starved(runner, job, self._fence, launched)
            runner.wake()
            return
        if launched.error is not None:
            said = f"while a snapshot of what it reads was made: {named_error(launched.error)}"
            failure = StageError(said, stage=runner.name, sequence=job.number)
            failure.__cause__ = launched.error
            engine.fail(failure)
            return
        job.snapshot = Snapshot(self._values, self._versions)
        outcome.launched_once(runner, job)
        if engine.admitting:
            self._then()
        runner.wake()

    def _passed(self, _: Any, fault: BaseException | None) -> None:
        engine = self._runner.engine
        engine.in_hand -= 1
        engine.progress += 1
        if engine.operations is not None:
            engine.operations.noticed(self._launch, fault)
        if fault is not None:
            self._fault(fault)
            return
        self._fence.reach()
        self._reached()
        self._runner.wake()

    def _reached(self) -> None:
        if self._lane.gate is not None:
            self._lane.gate.leave(self._lane, self._job.number)
        self._job.unreached -= 1
        if self._lane.operations is not None:
            self._lane.operations.add("reached", self._launch)

    def _fault(self, error: BaseException | None) -> None:
        where = f"a snapshot for stage {self._runner.name!r}, item {self._job.number}"
        device_failed(self._runner.engine, self._lane.device, error, where)
