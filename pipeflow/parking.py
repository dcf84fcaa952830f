"""Jobs that ran out of device memory: parked, and run again once what is unused was released (axiom 7.3).

A parked job keeps its input and its credits. Its leases are given back and its fence is reached like any, so
whoever waits for quiet, or for readers to be through, does not wait for it. The next quiesce gives cached
memory back to the system and runs parked jobs again, one by one, before its gates open: a barrier's, if one
is under way, else one of the engine's own, which holds all devices of the process as the allocator frees on
all. A job that runs out of memory then too ends the run, with the names of those who hold it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeflow.error_text import named_error
from pipeflow.errors import PipeflowError, StageError
from pipeflow.gate import gates_of_this_loop
from pipeflow.guarded import RunIsOver, go_on
from pipeflow.holders import holders
from pipeflow.launching import launch
from pipeflow.quiesce import quiesce, release, reopen

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeflow.device.base import Device
    from pipeflow.engine import Engine
    from pipeflow.fence import Fence
    from pipeflow.job import Job, Launched
    from pipeflow.lane import Lane
    from pipeflow.quiesce import Permits, Scope
    from pipeflow.runner import Runner

__all__ = ["Parking"]

_NAME = "the engine, for memory"


class Parking:
    """Of one run. Changes on the loop only."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._parked: dict[Job, Runner] = {}
        """In the order in which they came."""
        self._asked = False
        """A quiesce of the engine's own is on its way."""
        self._scope: Scope = []
        self.phase = ""
        """What that waits for; empty where there is none."""

    def __contains__(self, job: object) -> bool:
        return job in self._parked

    # In --------------------------------------------------------------------------------------------

    def starved(self, runner: Runner, job: Job, fence: Fence, launched: Launched) -> None:
        """A call ran out of memory, and has let go of what it held: park its job, or fail."""
        error = launched.error
        assert error is not None
        job.starved += 1
        if (why := self._not_again(runner, job)) is not None:
            self._engine.fail(self._error(runner, job, launched, why))
            return
        job.generator = job.context = None
        if job.leased:
            job.leased = False
            assert job.lane is not None
            job.lane.leases.give_back(fence, job.held)
        job.held = ()
        job.retry, job.retry_due = True, False
        runner.retrying += 1
        runner.counters.parked += 1
        self._engine.note("parked", runner.name, sequence=job.number, error=error)
        self._parked[job] = runner
        if not self._asked:
            self._asked = True
            self._engine.in_hand += 1
            self._engine.start_soon(self._own, name="release of memory")

    @staticmethod
    def _not_again(runner: Runner, job: Job) -> str | None:
        """Why the call cannot be made again; None if it can."""
        lane = job.lane
        assert lane is not None
        cls = type(lane.stage)
        if job.starved > 1:
            return "again, after unused memory was released"
        if runner.source:
            return "and a source that raised is over"
        if runner.flat and job.yielded:
            return f"and its item cannot be run again, as {job.yielded} outputs of it were handed over"
        if cls.retriable or (cls.retriable is None and not (cls.stateful or runner.writes or cls.mutates)):
            return None
        writes = runner.writes or cls.mutates
        what = "what it writes may be half written" if writes else "its state may differ"
        return f"and cannot be run again, as {what} (a class that leaves all as it was says `retriable`)"

    def _error(self, runner: Runner, job: Job, launched: Launched, why: str) -> StageError:
        lane = job.lane
        assert lane is not None
        assert launched.starved is not None
        text = holders(self._engine, lane.device, launched.starved)
        failure = StageError(
            f"out of memory {why}: {named_error(launched.error)}\n{text}",
            stage=runner.name,
            sequence=job.number,
        )
        failure.__cause__ = launched.error
        return failure

    # Out -------------------------------------------------------------------------------------------

    async def _own(self) -> None:
        """A quiesce for the parked jobs alone, unless a barrier's comes before."""
        engine = self._engine
        try:
            self.phase = "waits for a barrier"
            async with gates_of_this_loop().one_at_a_time:
                go_on(engine)
                if self._parked:
                    await self._quiesce()
        except RunIsOver:
            return
        except PipeflowError as error:
            engine.fail(error)
            return
        finally:
            self._asked = False
            self.phase = ""
            engine.in_hand -= 1
            engine.progress += 1
        engine.wake_all()

    async def _quiesce(self) -> None:
        engine = self._engine
        self._scope = self._all_devices()
        background = [lane for node in engine.nodes for lane in node.lanes if lane.stage.background]
        permits = await quiesce(engine, self, _NAME, self._scope, background, self._enter)
        self._enter("runs parked jobs")
        await self.run_all(permits)
        self.release_gates()

    def _enter(self, phase: str) -> None:
        self.phase = phase

    def _all_devices(self) -> Scope:
        """Every device of this process that the loop drives, also for other pipelines."""
        found: dict[str, Device] = dict(self._engine.devices)
        gates = gates_of_this_loop()
        for name in gates.names():
            for node in gates.of(name).nodes:
                for lane in node.lanes:
                    found.setdefault(lane.device.name, lane.device)
        return [(device, gates.of(name)) for name, device in found.items() if device.place != "cpu"]

    def release_gates(self) -> None:
        """All parked jobs were run; or the run is over."""
        reopen(self._engine, self, _NAME, self._scope)

    async def run_all(self, permits: Permits) -> None:
        """In a quiesce, before its gates open: release memory, and run what is parked again, one by one.
        Nothing where the quiesce does not cover all devices: to release memory frees it on all of them."""
        if not self._parked or not self._covers(permits):
            return
        await self._release(permits)
        for job, runner in list(self._parked.items()):
            await self._again(runner, job)

    def _covers(self, permits: Permits) -> bool:
        quiet = {device.name for device, _, _ in permits}
        return quiet.issuperset(device.name for device, _ in self._all_devices())

    async def run_in_section(
        self, runner: Runner, job: Job, permits: Permits, again: Callable[[], None] | None = None
    ) -> None:
        """A guarded stage's job, at once: its section is a quiesce. `again`: what to do in place of
        `launch`."""
        assert job.lane is not None
        while job.unreached or not _leasable(job.lane, job):
            await self._engine.next_progress()
            go_on(self._engine)
        if self._covers(permits):
            await self._release(permits)
        self._take_out(runner, job)
        job.retry = False
        runner.retrying -= 1
        if again is None:
            launch(runner, job)
        else:
            again()

    async def _again(self, runner: Runner, job: Job) -> None:
        engine, lane = self._engine, job.lane
        assert lane is not None
        go_on(engine)
        self._take_out(runner, job)
        if lane.is_async or not _leasable(lane, job):
            # Its launches pass gates one by one, or who holds its lease waits for an open gate: it is the
            # first that runs once they open.
            job.retry_due = True
            return
        job.retry = False
        runner.retrying -= 1
        engine.tell("section", runner.name)
        launch(runner, job)
        while job.launching or job.unreached:
            await engine.next_progress()
            go_on(engine)
        engine.tell("unsection", runner.name)

    def _take_out(self, runner: Runner, job: Job) -> None:
        del self._parked[job]
        self._engine.note("run again", runner.name, sequence=job.number)

    async def _release(self, permits: Permits) -> None:
        freed = await release(self._engine, permits)
        go_on(self._engine)
        for each in freed:
            self._engine.note("released", device=each.device, bytes=each.before - each.after)


def _leasable(lane: Lane, job: Job) -> bool:
    return not lane.leases or job.snapshot is not None or lane.leases.blocker(first=True) is None
