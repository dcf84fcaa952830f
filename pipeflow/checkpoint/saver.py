"""The checkpoints of one run: when one begins, when all of it is there, and its way to the disk.

A checkpoint of step k + 1 begins when the stage `of` has used its number k and all that it made has left. Its
state is taken on its own lane, then it goes on; the stages behind it follow, each as the items of k come by.
When the copies of all are complete the folder is written off the loop. One checkpoint is under way at a time.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from pipeflow.barrier import BarrierRunner
from pipeflow.checkpoint import store
from pipeflow.checkpoint.acks import Acks
from pipeflow.checkpoint.needs import chosen_parts
from pipeflow.checkpoint.state import join
from pipeflow.checkpoint.station import Role, Station
from pipeflow.errors import PipeflowError
from pipeflow.guarded import GuardedRunner
from pipeflow.input_runner import InputRunner
from pipeflow.inputs import Batches, Join, Turns

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeflow.assemble import Assembly
    from pipeflow.checkpoint.part import Part
    from pipeflow.checkpoint.store import Saved
    from pipeflow.engine import Engine
    from pipeflow.job import Job
    from pipeflow.lane import Lane
    from pipeflow.runner import Runner
    from pipeflow.spec import CheckpointSpec
    from pipeflow.stage import Resource

__all__ = ["Saver"]


class Saver:
    """Made before the load, so that what is loaded can be brought back; changes on the loop only."""

    def __init__(self, engine: Engine, spec: CheckpointSpec, name: str, resumed: Saved | None) -> None:
        self.spec = spec
        self.resumed = resumed
        self._engine = engine
        self._name = name
        self._roles: dict[Runner, Role] = {}
        self._stations: list[Station] = []
        """Producers first."""
        self._of: Runner = None  # type: ignore[assignment]  # set by attach
        self._resources: dict[str, Resource] = {}
        self._lines: Counter[str] = Counter()
        self._scores: dict[int, float] = {}
        self._step: int | None = None
        """Of the checkpoint under way."""
        self._last_step = 0
        self._acks = Acks() if not spec.exact else None
        self._incarnation = ""
        if resumed is not None:
            self._last_step = resumed.document["step"]
            self._scores = {int(step): score for step, score in resumed.document["scores"].items()}

    # Load ------------------------------------------------------------------------------------------

    def opened(self, name: str, resource: Resource, value: Any) -> None:
        """A resource is there: give it what was saved. On a helper thread."""
        self._resources[name] = resource
        state = self._saved_state(f"resource:{name}")
        if state is not None:
            resource.load(value, state)

    def state_of(self, lane: Lane) -> Any:
        """What a lane's stage gave; None where nothing was saved."""
        return self._saved_state(f"{lane.name}[{lane.index}]") if lane.has_state else None

    def _saved_state(self, key: str) -> Any:
        if self.resumed is None:
            return None
        for stage in self.resumed.document["stages"].values():
            if key in stage["states"]:
                return join(stage["states"][key], self.resumed.tensors)
        return None

    def attach(self, assembly: Assembly) -> None:
        """Stages and edges are made: find everybody's role, and bring back where each one stood."""
        self._incarnation = assembly.incarnation
        self._of = assembly.runners[self.spec.of]
        self._roles = dict.fromkeys(_behind(self._of), Role.BEHIND)
        self._roles[self._of] = Role.OF
        for runner in self._engine.nodes:
            if not isinstance(runner, GuardedRunner):
                runner.station = self._station(runner)
                self._stations.append(runner.station)
        if self.spec.exact:
            self._drain_whole()
        if self.resumed is not None:
            self._bring_back(self.resumed)
        for station in self._stations:
            station.begin()

    def _drain_whole(self) -> None:
        """A drain must leave nothing that a run that goes on would have made otherwise: before `of` open
        batches stay unmade, no input loses its turn, and no stage cuts an item short. And a source that does
        not feed `of`, but is joined with what comes of it, goes on until that join has all its partners."""
        engine = self._engine
        for station in self._stations:
            self._outlast(station.runner)
        for station in self._stations:
            inputs = station.runner.inputs
            if station.role is not Role.BEFORE:
                continue
            if isinstance(inputs, (Batches, Turns)):
                inputs.stops_short = lambda: engine.sources_ended
            for lane in station.runner.lanes if not station.runner.source else ():
                lane.stop_only_at(engine.halted)

    def _outlast(self, source: Runner) -> None:
        fed = _behind(source)
        if not source.source or self._of in fed:
            return
        for runner in fed:
            if self.role_of(runner) is Role.BEHIND and isinstance(runner.inputs, Join):
                source.outlasts.append(runner)
                runner.outlasted_by.append(source)
        for lane in source.lanes if source.outlasts else ():
            lane.stop_only_at(self._engine.halted)

    def _station(self, runner: Runner) -> Station:
        stages = [lane.stage for lane in runner.lanes]
        saves = any(lane.has_state for lane in runner.lanes)
        stateful = runner.source or any(stage.stateful for stage in stages)
        counts = runner.flat or runner.starts_domain or runner.limit is not None
        points = stateful or saves or counts or isinstance(runner.inputs, Batches)
        if isinstance(runner, (BarrierRunner, InputRunner)):
            points = False
        cadence = points and (saves or not stateful) and (self.spec.exact or runner.source)
        return Station(self, runner, self.role_of(runner), points=points, cadence=cadence)

    def _bring_back(self, saved: Saved) -> None:
        stages: dict[str, Any] = saved.document["stages"]
        for station in self._stations:
            name = station.runner.name
            if name not in stages:
                raise PipeflowError(f"{saved.path}: it was made by a file without a stage {name!r}")
            about = stages[name]
            station.bring_back(about["facts"])
            if station.keeps_points and station.role is Role.BEFORE:
                station.first_point(about["facts"], about["out"], about["states"], saved.tensors)
            for each, count in about["facts"]["lines"].items():
                self._lines[each] = count
            if self._acks is not None and station.runner.source:
                self._acks.bring_back(station.runner, about["facts"].get("acked", ()))

    def loaded(self) -> None:
        """All is loaded: what a run reported before counts on."""
        if self.resumed is not None:
            self._engine.reported.update(self.resumed.document["reported"])
            self._engine.started -= self.resumed.document["elapsed"]

    # What stations ask -------------------------------------------------------------------------------

    def role_of(self, runner: Runner) -> Role:
        return self._roles.get(runner, Role.BEFORE)

    def runner_of(self, lane: Lane) -> Runner:
        return lane.leases.node

    def resources_of(self, runner: Runner) -> dict[str, tuple[Resource, Any]]:
        """What it writes, and so what is saved with it: key to the resource and its value."""
        if self.role_of(runner) is Role.BEFORE and not isinstance(runner, GuardedRunner):
            return {}
        written = runner.lanes[0].leases.writes.values() if runner.lanes else ()
        return {
            f"resource:{instance.shared.name}": (self._resources[instance.shared.name], instance.value)
            for instance in written
            if instance.shared.follows is None  # else it is written from that one at the start, too
        }

    def may_begin(self) -> bool:
        """Whether no checkpoint is under way; the stage `of` is woken once it is through."""
        return self._step is None

    def begins(self, step: int) -> None:
        """The stage `of` stands at its cut."""
        self._step = self._last_step = step
        if self._acks is not None:
            self._acks.freeze(station.runner for station in self._stations if station.runner.source)

    def wants_last(self, station: Station) -> bool:
        """Whether the state in which a stage ends is still to be taken."""
        if station.role is Role.OF:
            return station.edges[0].position + 1 > self._last_step
        if station.role is Role.BEFORE:
            return False
        return not self._of.closed or (self._step is not None and station.part is None)

    def waits_for_fences(self, station: Station) -> bool:
        """Whether a stage stands only once its device work is done: to know which records are through."""
        return self._acks is not None and station.role is Role.OF

    def lines_of(self, station: Station) -> dict[str, int]:
        """Lines of metrics.jsonl so far."""
        return {runner.name: self._lines[runner.name] for runner in station.runners}

    def recorded(self, line: Mapping[str, Any]) -> None:
        """One more line of metrics.jsonl."""
        stage, step = line["stage"], line.get("step")
        self._lines[stage] += 1
        best, _, key = (self.spec.best or "").partition(".")
        if stage == best and isinstance(step, int) and isinstance(line.get(key), (int, float)):
            self._scores[step] = float(line[key])

    def new_record(self, source: Runner, job: Job) -> bool:
        """Whether a record was not through before the run was resumed; from now on it is known."""
        if self._acks is None:
            return True
        if self._acks.through_before(source, job.number):
            return False
        self._acks.made(source, job)
        return True

    # Commit ------------------------------------------------------------------------------------------

    def passed(self, _: Station) -> None:
        """One more stage has its part. With the last one the checkpoint is written."""
        if self._engine.failed or any(
            station.part is None for station in self._stations if station.role is not Role.BEFORE
        ):
            return
        assert self._step is not None
        parts = chosen_parts(self._stations, self._acks)
        for station in self._stations:
            station.part = None
        tensors: dict[str, Any] = {}
        for part in parts.values():
            tensors.update(part.tensors)
        document = self._document(self._step, parts)
        self._engine.in_hand += 1
        self._engine.start_soon(self._write, self._step, document, tensors, name="checkpoint")

    def _document(self, step: int, parts: Mapping[str, Part]) -> dict[str, Any]:
        engine = self._engine
        return {
            "pipeline": self._name,
            "step": step,
            "incarnation": self._incarnation,
            "elapsed": engine.now() - engine.started,
            "reported": dict(engine.reported),
            "scores": {str(step): score for step, score in self._scores.items()},
            "stages": {
                runner.name: {
                    "facts": parts[runner.name].facts,
                    "out": parts[runner.name].out,
                    "states": parts[runner.name].states,
                    "behind": self.role_of(runner) is Role.BEHIND,
                }
                for runner in (station.runner for station in self._stations)
            },
        }

    async def _write(self, step: int, document: dict[str, Any], tensors: dict[str, Any]) -> None:
        engine = self._engine
        run_dir = engine.folder.path
        path = run_dir / store.FOLDER / f"step-{step:08d}"

        def write() -> None:
            store.write(path, document, tensors)
            store.prune(run_dir, self.spec.keep, self._best(step), step)

        try:
            await engine.off_loop(write, f"writes {path.name}")
            engine.note("checkpoint", step=step)
        except Exception as error:
            engine.fail(error)
        finally:
            engine.in_hand -= 1
            engine.progress += 1
            self._step = None
            self._of.wake()
            engine.look_for_end()

    def _best(self, step: int) -> list[int]:
        """The step with the highest score, of those that may have a checkpoint."""
        known = {at: score for at, score in self._scores.items() if at <= step}
        there = {store.step_of(path) for path in store.committed(self._engine.folder.path)}
        known = {at: score for at, score in known.items() if at in there}
        return [max(known, key=lambda at: (known[at], at))] if known else []


def _behind(runner: Runner) -> list[Runner]:
    """All that it feeds, near or far; a barrier feeds its section."""
    found: dict[Runner, None] = {}
    todo = [runner]
    while todo:
        each = todo.pop()
        fed = [edge.consumer for edge in each.outs]
        if isinstance(each, BarrierRunner):
            fed += each.section
        for consumer in fed:
            if consumer not in found:
                found[consumer] = None
                todo.append(consumer)
    return list(found)
