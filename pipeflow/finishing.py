"""The `finish` hook of a stage: after its last item, on every lane, before its consumers hear of the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeflow.error_text import named_error
from pipeflow.errors import StageError
from pipeflow.fence import REACHED, Fence
from pipeflow.launching import device_fault

if TYPE_CHECKING:
    from pipeflow.job import Launched
    from pipeflow.lane import Lane
    from pipeflow.runner import Runner

__all__ = ["finish"]


def finish(runner: Runner) -> None:
    """Start it on all lanes, if gates and leases allow; `runner.finished` once all are through."""
    lanes = [lane for lane in runner.lanes if lane.has_finish]
    if not lanes:
        runner.finished = True
        return
    if any(lane.gate is not None and not lane.gate.open for lane in lanes):
        return  # a gate that opens wakes this stage
    if any(lane.leases and lane.leases.blocker() is not None for lane in lanes):
        return  # so does a lease that is given back
    runner.finishing = len(lanes)
    for lane in lanes:
        _Finish(runner, lane).start()


class _Finish:
    """One lane's call of `finish`, with a fence like a job's."""

    def __init__(self, runner: Runner, lane: Lane) -> None:
        self._runner = runner
        self._lane = lane
        self._marks = lane.leases.take() if lane.leases else []
        self._held = lane.leases.taken
        self._context = lane.context(None)
        self._fence = REACHED
        self._launch = 0

    def __str__(self) -> str:
        return "its finish"

    def start(self) -> None:
        lane = self._lane
        if lane.gate is not None:
            lane.gate.enter(lane, None)
        if lane.operations is not None:
            self._launch = lane.operations.submits_hook(lane, "finish")
        self._runner.engine.in_hand += 1
        lane.hook_launcher.submit(self, self._call, self._returned)

    def _call(self) -> Launched:
        lane = self._lane
        return lane.hook(lane.stage.finish, self._context, waits=self._marks, launch=self._launch)

    def _returned(self, launched: Launched | None, error: BaseException | None) -> None:
        runner, lane = self._runner, self._lane
        engine = runner.engine
        engine.progress += 1
        if lane.operations is not None:
            lane.operations.came_back(self._launch, launched)
        if launched is None:
            engine.in_hand -= 1
            device_fault(runner, lane, None, error)
            return
        self._fence = REACHED if launched.passed else Fence(launched.mark)
        if lane.leases:
            lane.leases.give_back(self._fence, self._held)
        fault = launched.error
        if fault is not None:
            failure = StageError(f"in finish: {named_error(fault)}", stage=runner.name)
            failure.__cause__ = fault
            engine.fail(failure)
        if self._fence.reached:
            self._passed(None, None)
        else:
            lane.watcher.watch("the fence of its finish", launched.mark, self._awaited)

    def _awaited(self, _: Any, fault: BaseException | None) -> None:
        if self._lane.operations is not None:
            self._lane.operations.noticed(self._launch, fault)
        self._passed(None, fault)

    def _passed(self, _: Any, fault: BaseException | None) -> None:
        runner, lane = self._runner, self._lane
        runner.engine.in_hand -= 1
        if fault is not None:
            device_fault(runner, lane, None, fault)
            return
        if lane.operations is not None:
            lane.operations.add("reached", self._launch)
        if not self._fence.reached:
            self._fence.reach()
        if lane.gate is not None:
            lane.gate.leave(lane, None)
        runner.engine.logged(runner, None, self._context)
        runner.finishing -= 1
        runner.finished = runner.finishing == 0
        runner.wake()
