"""How fast a pipeline would run: the very engine on simulated devices, each stage as long as the file says.

No formula: credits, leases, gates and barriers are the real ones, only time is virtual. Durations come from
`sim:` in the file, or from the profile of a real run (`profile.json` in its folder).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pipeflow.errors import Cancelled, PipeflowError
from pipeflow.sim.stages import pretend
from pipeflow.spec import SimSpec
from pipeflow.stage import Kind
from pipeflow.testing import simulate_checked

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from pipeflow.check import Report
    from pipeflow.graph import Graph
    from pipeflow.pipeline import Pipeline
    from pipeflow.testing import Simulated

__all__ = ["DevicePlan", "Plan", "StagePlan", "plan", "read_profile"]

WARM_UP = 0.25
"""Share of the steps that fill the pipeline and are not measured."""


class StagePlan(NamedTuple):
    """One stage while the steps were measured."""

    items: int
    busy: float
    """Share of the time that its lanes' kernels ran (without a device: that its code ran), of all lanes."""
    waits_for: str
    """At the end, in words."""


class DevicePlan(NamedTuple):
    """One device while the steps were measured."""

    busy: float
    """Share of the time that kernels ran."""
    peak_bytes: int
    """Reserved at most, by what `bytes` says of outputs; weights and workspaces are not among them."""


class Plan(NamedTuple):
    """What `plan` found. Times are virtual seconds."""

    seconds_per_step: float
    steps: int
    """Measured, after the warm-up."""
    seconds: float
    """Of the whole simulated run."""
    devices: dict[str, DevicePlan]
    stages: dict[str, StagePlan]
    bottleneck: dict[str, str | None]
    """`device` and `stage` that are busy most; the device is None where a thread of the host is."""

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        values = self._asdict()
        values["devices"] = {name: device._asdict() for name, device in self.devices.items()}
        values["stages"] = {name: stage._asdict() for name, stage in self.stages.items()}
        return values


def read_profile(path: str | os.PathLike[str]) -> dict[str, SimSpec]:
    """Costs by stage from a `profile.json`. PipeflowError for a file that is none."""
    try:
        told = json.loads(Path(path).read_text(encoding="utf-8"))
        return msgspec.convert(told["stages"], dict[str, SimSpec], strict=False)
    except (OSError, ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise PipeflowError(
            f"{path}: not a profile ({type(error).__name__}: {error}). Take profile.json of a run's folder"
        ) from error


def plan(
    report: Report,
    *,
    steps: int = 200,
    profile: Mapping[str, SimSpec] | None = None,
    seed: int = 0,
    lag: float = 0.0,
) -> Plan:
    """Simulate a checked file for so many steps (calls of the stage named in `run.step`).

    `lag`: seconds, at most, that the host hears late of a mark. Raises GraphError for a file with faults,
    PipeflowError where no step was made or a timing of the file would be wrong.
    """
    graph = report.graph
    if graph is not None and not report.errors:
        told = dict(profile or {})
        if unknown := sorted(set(told) - set(graph.nodes)):
            raise PipeflowError(
                f"the profile tells of {', '.join(map(repr, unknown))}, which the file has not. "
                "Take the profile of a run of this file"
            )
        pretend(graph, told)
    step = _step_of(report)
    watch = _Watch(step, steps)
    ran = simulate_checked(_patient(report), seed=seed, act=watch.act, lag=lag)
    if ran.error is not None and not isinstance(ran.error, Cancelled):
        raise ran.error
    if ran.hazards:
        raise PipeflowError("some timing of this file goes wrong:\n" + "\n".join(map(str, ran.hazards[:5])))
    if len(watch.times) < 2:
        raise PipeflowError(f"stage {step!r} made {len(watch.times)} steps in all, too few to measure")
    return _measured(ran, watch)


def _patient(report: Report) -> Report:
    """The same file, waiting as long as it takes for what is in hand when the last step is made."""
    if report.spec is None:
        return report
    replace = msgspec.structs.replace
    run = replace(report.spec.run, stop=replace(report.spec.run.stop, grace=1e9), stall=1e9)
    return dataclasses.replace(report, spec=replace(report.spec, run=run))


def _step_of(report: Report) -> str:
    """The stage whose calls are steps: `run.step`, else the only stage that nothing follows."""
    if report.spec is not None and report.spec.run.step is not None:
        return report.spec.run.step
    nodes = report.graph.nodes.values() if report.graph is not None else ()
    ends = [node.name for node in nodes if not node.consumers and node.kind is not Kind.BARRIER]
    if len(ends) != 1:
        raise PipeflowError("which stage's calls are the steps? Name it: `run: {step: train}`")
    return ends[0]


class _Watch:
    """Runs the pipeline until it has made its steps, and notes when each was made."""

    def __init__(self, step: str, steps: int) -> None:
        self.step = step
        self.steps = steps
        self.times: list[float] = []
        self.items: list[dict[str, int]] = []
        """By stage, as each step was made."""
        self.waits: dict[str, str] = {}

    async def act(self, pipeline: Pipeline) -> None:
        import anyio

        runners = {runner.name: runner for runner in pipeline.runners()}
        runner, engine = runners[self.step], pipeline.engine

        async def watch() -> None:
            while len(self.times) < self.steps:
                await engine.next_progress()
                while len(self.times) < runner.counters.done:
                    self.times.append(engine.now())
                    self.items.append({name: each.counters.done for name, each in runners.items()})
            self.waits = {name: each.waits_for() for name, each in runners.items()}
            pipeline.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            with contextlib.suppress(Cancelled):
                await pipeline.run()
            group.cancel_scope.cancel()


def _measured(ran: Simulated, watch: _Watch) -> Plan:
    first = min(int(len(watch.times) * WARM_UP), len(watch.times) - 2)
    begin, end = watch.times[first], watch.times[-1]
    span = max(end - begin, 1e-12)
    assert ran.pipeline is not None
    graph = ran.pipeline.graph
    busy = _Busy(ran.log, begin, end)
    devices = {
        name: DevicePlan(round(busy.devices.get(name, 0.0) / span, 6), device.allocator.peak)
        for name, device in ran.world.devices.items()
    }
    stages: dict[str, StagePlan] = {}
    for name, node in graph.nodes.items():
        lanes = max(1, len(node.devices) * node.spec.replicas)
        seconds = busy.stages.get(name, 0.0) if node.devices else _host_busy(ran, name, span)
        stages[name] = StagePlan(
            watch.items[-1][name] - watch.items[first][name],
            round(seconds / span / lanes, 6),
            watch.waits.get(name, "ended"),
        )
    count = len(watch.times) - 1 - first
    return Plan(span / count, count, ran.seconds, devices, stages, _bottleneck(graph, devices, stages))


def _host_busy(ran: Simulated, name: str, span: float) -> float:
    """Seconds that a host stage's code ran, at the rate of the whole run."""
    assert ran.pipeline is not None
    runner = next(runner for runner in ran.pipeline.runners() if runner.name == name)
    return runner.counters.host_seconds * span / max(ran.seconds, 1e-12)


class _Busy:
    """Seconds of kernels within a window, by device and by stage, from the operation log."""

    def __init__(self, log: list[tuple[Any, ...]], begin: float, end: float) -> None:
        self.devices: dict[str, float] = {}
        self.stages: dict[str, float] = {}
        started: dict[str, tuple[float, str | None]] = {}
        for time, kind, *names in log:
            if kind == "start" and not names[3].startswith("copy to "):
                stage, _, stream, _ = names
                started[stream] = (time, stage)
            elif kind == "end" and names[2] in started:
                since, stage = started.pop(names[2])
                self._add(names[2], stage, since, time, begin, end)
        for stream, (since, stage) in started.items():
            self._add(stream, stage, since, end, begin, end)

    def _add(
        self, stream: str, stage: str | None, since: float, until: float, begin: float, end: float
    ) -> None:
        seconds = min(until, end) - max(since, begin)
        if seconds > 0:
            device = stream.partition("/")[0]
            self.devices[device] = self.devices.get(device, 0.0) + seconds
            if stage is not None:
                self.stages[stage] = self.stages.get(stage, 0.0) + seconds


def _bottleneck(
    graph: Graph, devices: Mapping[str, DevicePlan], stages: Mapping[str, StagePlan]
) -> dict[str, str | None]:
    """The busiest device and the stage that is busiest on it; or a stage of the host, if that is busier."""
    hosts = {name: plan.busy for name, plan in stages.items() if not graph.nodes[name].devices}
    host = max(hosts, key=lambda name: hosts[name], default=None)
    device = max(devices, key=lambda name: round(devices[name].busy, 3), default=None)  # of equals the first
    if device is None or (host is not None and hosts[host] > devices[device].busy):
        return {"device": None, "stage": host}
    there = [name for name, node in graph.nodes.items() if device in node.devices or "auto" in node.devices]
    return {"device": device, "stage": max(there, key=lambda name: stages[name].busy, default=None)}
