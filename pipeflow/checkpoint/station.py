"""One stage as checkpoints see it: at a cut it stands still, its state is taken on its own lanes, it goes on.

Where the cuts are is decided by the stage's role:

    OF       the stage that `run.checkpoint.of` names: cut where a checkpoint is due
    BEHIND   fed by it, near or far: cut behind what the stages before it had put out at their own cut
    BEFORE   all others: those that start a numbering, or have a state, are cut every 64th number

At a cut a stage has used all up to a number of each input, and nothing beyond it, and all that it made has
left. A stage without a state costs a few turns of the loop there; no lane waits for a device.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, cast

from pipeflow.barrier import BarrierRunner
from pipeflow.checkpoint.acks import Ack
from pipeflow.checkpoint.part import Part, count_on, counts_of
from pipeflow.checkpoint.state import split
from pipeflow.device.cpu_late import CpuLate
from pipeflow.error_text import named_error
from pipeflow.errors import StageError
from pipeflow.inputs import Batches, Turns
from pipeflow.job import Launched
from pipeflow.launching import device_fault

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeflow.checkpoint.cut_edge import CutEdge
    from pipeflow.checkpoint.saver import Saver
    from pipeflow.job import Job
    from pipeflow.lane import Lane
    from pipeflow.runner import Runner

__all__ = ["CADENCE", "Role", "Station"]

CADENCE = 64
"""A stage before the domain is cut after so many numbers of its input (a source: of its own)."""


class Role(Enum):
    OF = "of"
    BEHIND = "behind"
    BEFORE = "before"


class Station:
    """Belongs to one runner; changes on the loop only."""

    def __init__(self, saver: Saver, runner: Runner, role: Role, *, points: bool, cadence: bool) -> None:
        self._saver = saver
        self.runner = runner
        self.role = role
        self.points: list[Part] = []
        """BEFORE: where it may begin again, oldest first; empty where any number is as good."""
        self.keeps_points = points
        self.part: Part | None = None
        """OF, BEHIND: at the cut of the checkpoint under way."""
        self.final: Part | None = None
        """BEHIND: as it ended, for the checkpoints that come after."""
        self.capturing = False
        self._cadence = cadence
        self._source_cut: int | None = None
        self._aimed = 0
        self._ending = False
        self._owes = False
        """A checkpoint came by while its last state was taken."""
        self._away = 0
        """Lanes whose call has not come back."""
        self._unreached = 0
        """Lanes whose copies are not complete."""
        section = runner.section if isinstance(runner, BarrierRunner) else []
        self.runners: list[Runner] = [runner, *section]
        """With the section of a barrier, which stands still with it."""
        self.edges = [cast("CutEdge", edge) for edge in (runner.inputs.edges if runner.inputs else ())]
        self._behind = [e for e in self.edges if saver.role_of(e.producer) is not Role.BEFORE]
        turns = isinstance(runner.inputs, Turns)
        self._cut_edges = self.edges[:1] if turns else self.edges

    # When ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """At load, once a resumed run is brought back."""
        if self.keeps_points and not self.points:
            self.points.append(Part(self.facts_now(), self._out()))
        self._next_cut()

    def _next_cut(self) -> None:
        if self.role is Role.OF:
            every = self._saver.spec.every
            for edge in self.edges:
                edge.pass_cut((edge.position + 1) // every * every + every - 1)
        elif self.role is Role.BEHIND or not self._cadence:
            for edge in self.edges:
                edge.pass_cut(None)
            self._aimed = 0
        elif self.runner.source:
            self._source_cut = self.runner.counters.started // CADENCE * CADENCE + CADENCE
        else:
            for edge in self.edges:
                edge.pass_cut(None)
            for edge in self._cut_edges:
                edge.pass_cut((edge.position + 1) // CADENCE * CADENCE + CADENCE - 1)

    @property
    def holds_source(self) -> bool:
        """The next record has to wait."""
        cut = self._source_cut
        return self.capturing or (cut is not None and self.runner.counters.started >= cut)

    def aim(self, edge: CutEdge) -> None:
        """BEHIND: one of the stages that feed it stands at its cut."""
        if self._ending or self.runner.closed:
            self._owes = True
            self._give_final()
            return
        edge.aim()
        self._aimed += 1
        self.runner.wake()

    def _give_final(self) -> None:
        """BEHIND: it has ended, so any cut finds it as it is."""
        if self._owes and self.part is None and not self.capturing:
            self._owes = False
            self.part = self.final or Part(self.facts_now(), 0)
            self._aim_behind()
            self._saver.passed(self)

    def starts(self, job: Job) -> None:
        """A job of it was made. What the stage `of` uses is through, whatever comes of it later."""
        if self.role is Role.OF and not self._saver.spec.exact:
            job.tickets = tuple(ticket for ticket in job.tickets if type(ticket) is not Ack)

    def new_record(self, job: Job) -> bool:
        """Of a source, where a run is not exact: whether the record was not through before."""
        return self._saver.new_record(self.runner, job)

    def look(self) -> None:
        """After each turn of its runner: is it time?"""
        if self.capturing or self.runner.closed:
            return
        if self._at_cut() and self._stands():
            if self.role is Role.OF and not self._saver.may_begin():
                return
            self._capture()

    def _at_cut(self) -> bool:
        if self.role is Role.BEHIND:
            return self._aimed == len(self._behind) and all(edge.shut for edge in self._behind)
        if self.runner.source:
            return self.holds_source
        return bool(self._cut_edges) and all(edge.shut for edge in self._cut_edges)

    def _stands(self) -> bool:
        """Nothing is on its way in it, and nothing on its lanes but device work."""
        runner = self.runner
        if not runner.engine.admitting or runner.finishing:
            return False
        if runner.source:
            job = runner.hand[0] if runner.hand else None
            return job is None or not (job.launching or job.outputs or job.retry)
        if isinstance(runner.inputs, Batches) and runner.inputs.due:
            return False
        if isinstance(runner, BarrierRunner) and not runner.rests:
            return False
        if any(each.hand for each in self.runners):
            return False
        if any(lane.gate is not None and not lane.gate.open for lane in self._lanes()):
            return False  # a gate that opens wakes this stage
        return not self._saver.waits_for_fences(self) or not any(lane.busy for lane in self._lanes())

    def holds_close(self) -> bool:
        """Before the runner ends: whether its last state is still to be taken."""
        if self.capturing:
            return True
        if self.final is not None or not self._saver.wants_last(self):
            return False
        if self.role is Role.OF and not self._saver.may_begin():
            return True
        if self._stands():
            self._ending = True
            self._owes = self._aimed > 0  # a join that ended with another input never comes to the cut
            self._capture()
        return True

    # Facts -----------------------------------------------------------------------------------------

    def _lanes(self) -> list[Lane]:
        return [lane for runner in self.runners for lane in runner.lanes]

    def _out(self) -> int:
        """The number of its next output, counted from what it has used."""
        runner = self.runner
        if runner.scatters:
            return min([self.edges[0].position + 1, *self._wanted(self.edges[0])])
        if runner.starts_domain or not self.edges:
            return runner.next_seq
        return max(edge.position for edge in self.edges) + 1

    def _wanted(self, edge: CutEdge) -> list[int]:
        inputs = self.runner.inputs
        return inputs.gathered(edge) if isinstance(inputs, Batches) else []

    def facts_now(self) -> dict[str, Any]:
        """What the engine must know to go on from here."""
        inputs = self.runner.inputs
        return {
            **counts_of(self.runner),
            "turn": inputs.turn if isinstance(inputs, Turns) else 0,
            "versions": {shared.name: shared.step for runner in self.runners for shared in runner.writes},
            "edges": [
                # Before the domain a producer begins with all that `every` makes one number of.
                {
                    "from": edge.position + 1,
                    "wanted": self._wanted(edge),
                    "since": edge.since_selected if edge in self._behind else 0,
                }
                for edge in self.edges
            ],
            "lines": {},
            "section": {runner.name: counts_of(runner) for runner in self.runners[1:]},
        }

    def bring_back(self, facts: Mapping[str, Any]) -> None:
        """At load of a resumed run: numbers and counters as they were."""
        inputs = self.runner.inputs
        count_on(self.runner, facts)
        for edge, saved in zip(self.edges, facts["edges"], strict=True):
            edge.begin_at(saved["from"], saved["wanted"], saved["since"], drops=self._saver.spec.exact)
        if isinstance(inputs, Turns):
            inputs.turn = facts["turn"]
        for runner in self.runners:
            for shared in runner.writes:
                shared.step = facts["versions"].get(shared.name, shared.step)
        for runner in self.runners[1:]:
            count_on(runner, facts["section"].get(runner.name, {}))

    def first_point(self, facts: dict[str, Any], out: int, states: dict[str, Any], saved: Any) -> None:
        """At load of a resumed run: where the saved one could begin again, this one can too."""
        point = Part(facts, out)
        point.states = states
        keys = tuple(f"{lane.name}[{lane.index}]/" for lane in self._lanes())
        point.tensors = {name: tensor for name, tensor in saved.items() if name.startswith(keys)}
        self.points.append(point)

    # Capture ---------------------------------------------------------------------------------------

    def _capture(self) -> None:
        self.capturing = True
        for edge in self.edges:
            edge.shut = True
        part = Part(self.facts_now(), self._out())
        if self.role is Role.OF:
            self._saver.begins(self.edges[0].position + 1)
        lanes = [lane for lane in self._lanes() if self._needs_call(lane)]
        self._away = self._unreached = len(lanes) + 1  # one is this call's own
        for lane in lanes:
            self._call(lane, part)
        self._came_back()
        self._reached(part)

    def _came_back(self) -> None:
        self._away -= 1
        if self._away or self.role is Role.BEFORE:
            return
        if self.role is Role.OF or not self._ending:
            self._aim_behind()
        if self.role is Role.OF:
            self._go_on()  # its lane and stream keep the order: the host need not wait for the copies

    def _aim_behind(self) -> None:
        """Those that it feeds are cut behind what it has put out."""
        for runner in self.runners:
            for edge in runner.outs:
                consumer = edge.consumer.station
                assert consumer is not None
                consumer.aim(cast("CutEdge", edge))

    def _reached(self, part: Part) -> None:
        self._unreached -= 1
        if self._unreached:
            return
        part.facts["lines"] = self._saver.lines_of(self)
        if self.role is Role.BEFORE:
            if self.keeps_points:
                self.points.append(part)
        elif self.role is Role.OF or not self._ending:
            self.part = part
        if self._ending:
            self.final = part
        if self.role is not Role.OF:
            self._go_on()
        if self.part is part:
            self._saver.passed(self)
        self._give_final()

    def _go_on(self) -> None:
        self.capturing = False
        self._next_cut()
        self.runner.wake()

    def _needs_call(self, lane: Lane) -> bool:
        """On the host and without a state there is nothing to take and nothing to wait for."""
        runner = self._saver.runner_of(lane)
        late = isinstance(lane.device, CpuLate) or not runner.on_host
        saves = lane.has_state or bool(self._saver.resources_of(runner))
        return saves or (late and self.role is not Role.BEFORE)

    def _call(self, lane: Lane, part: Part) -> None:
        engine = self.runner.engine
        runner = self._saver.runner_of(lane)
        resources = self._saver.resources_of(runner)
        key = f"{lane.name}[{lane.index}]"
        tensors: dict[str, Any] = {}

        def take(tensor: Any) -> Any:
            """Copied on the lane's stream: its next job may write this memory."""
            tensor = tensor.detach()
            if tensor.device.type == "cpu":
                return tensor.clone()
            return lane.device.to_host(tensor, lane.stream)

        def call() -> Launched:
            begun = lane.now()
            error: BaseException | None = None
            states: dict[str, Any] = {}
            with lane.device.entered(lane.stream):
                try:
                    if lane.has_state:
                        states[key] = split(lane.stage.state(), key, tensors, take)
                    for name, (resource, value) in resources.items():
                        states[name] = split(resource.state(value), name, tensors, take)
                except BaseException as raised:
                    error = raised
                mark = lane.stream.record()
            return Launched(states, mark, None, error, lane.now() - begun)

        def returned(launched: Launched | None, error: BaseException | None) -> None:
            engine.progress += 1
            if launched is None:
                engine.in_hand -= 1
                device_fault(runner, lane, None, error)
                return
            if launched.error is not None:
                engine.in_hand -= 1
                failure = StageError(f"in state: {named_error(launched.error)}", stage=lane.name)
                failure.__cause__ = launched.error
                engine.fail(failure)
                return
            part.states.update(launched.value)
            part.tensors.update(tensors)
            self._came_back()
            if launched.mark.passed():
                passed(None, None)
            else:
                lane.watcher.watch("the fence of its state", launched.mark, passed)

        def passed(_: Any, fault: BaseException | None) -> None:
            engine.in_hand -= 1
            engine.progress += 1
            if fault is not None:
                device_fault(runner, lane, None, fault)
                return
            if lane.gate is not None:
                lane.gate.leave(lane, None)
            self._reached(part)

        engine.in_hand += 1
        if lane.gate is not None:
            lane.gate.enter(lane, None)
        lane.hook_launcher.submit("its state", call, returned)
