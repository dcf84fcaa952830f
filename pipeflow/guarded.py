"""Stages that run only inside a barrier's section."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeflow import handover, production
from pipeflow.inputs import Taken
from pipeflow.job import Job
from pipeflow.launching import launch
from pipeflow.runner import Runner
from pipeflow.snapshot import copy_first

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeflow.barrier import BarrierRunner
    from pipeflow.edge import Edge
    from pipeflow.engine import Engine
    from pipeflow.item import Trigger
    from pipeflow.lane import Lane

__all__ = ["GuardedRunner", "RunIsOver", "go_on"]


class RunIsOver(Exception):
    """The run failed while its section waited for something."""


def go_on(engine: Engine) -> None:
    """After each wait; raises RunIsOver once the run has failed. From then on nothing may be launched,
    closed, drained or released: its devices may be at fault, and its gates were opened for others."""
    if engine.failed:
        raise RunIsOver


class GuardedRunner(Runner):
    """A stage that runs only inside a barrier's section; what it emits flows on as from any stage."""

    barrier: BarrierRunner

    def pump(self) -> None:
        self.queued_for_pump = False
        if self.closed:
            return
        while self.hand and (production.produce(self) or handover.emit(self)):
            pass
        if self.barrier.closed and not self.hand:
            self.exhausted = True
            self.try_close()

    async def run_guarded(self, trigger: Trigger, charged: Sequence[Edge]) -> None:
        """One call with the trigger, on its own lane; returns once its fence is reached."""
        lane = self.lanes[0]
        self.in_section = True
        while lane.leases and lane.leases.blocker(first=True) is not None:
            # Only a host stage outside the scope can still hold one; it gives it back when it returns.
            await self.engine.next_progress()
            go_on(self.engine)
        job = self._job(lane, trigger, charged)
        launch(self, job)
        self.wake()
        await self._retired(job)
        self.in_section = False

    def _job(self, lane: Lane, trigger: Trigger, charged: Sequence[Edge]) -> Job:
        job = Job(lane, self.next_seq, Taken(self.next_seq, [], trigger), self.engine.now())
        self.next_seq += 1
        job.charged = charged
        self.begin(job, lane)
        return job

    async def _retired(self, job: Job) -> None:
        while not job.retired:
            if job in self.engine.parking and self.barrier.permits:
                await self.engine.parking.run_in_section(self, job, self.barrier.permits)
            await self.engine.next_progress()

    async def copy(self, trigger: Trigger, charged: Sequence[Edge]) -> Job:
        """Begin a job: make the snapshot that it works on, if it reads what others write. In the section."""
        lane = self.lanes[0]
        while lane.snapshots and lane.leases.blocker(first=True) is not None:
            await self.engine.next_progress()
            go_on(self.engine)
        job = self._job(lane, trigger, charged)

        def begin() -> None:
            waits = lane.leases.take()
            job.held = lane.leases.taken
            job.versions = lane.leases.versions()
            copy_first(self, job, waits, lambda: None)

        if lane.snapshots:
            begin()
            while job.snapshot is None or job.unreached:
                if job in self.engine.parking:
                    await self.engine.parking.run_in_section(self, job, self.barrier.permits, begin)
                await self.engine.next_progress()
        return job

    async def run_copied(self, job: Job) -> None:
        """Call it with the snapshot, like any stage: through an open gate."""
        lane = self.lanes[0]
        while (lane.gate is not None and not lane.gate.open) or (
            job.snapshot is None and lane.leases and lane.leases.blocker() is not None
        ):
            await self.engine.next_progress()
            go_on(self.engine)
        launch(self, job)
        self.wake()
        await self._retired(job)
