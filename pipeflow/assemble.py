"""From a checked graph to the engine's parts: devices, resources, lanes, edges. Made at load, once.

Copies between places are stages of their own (axiom 2.6), put in here: one a producer and place, named
`target > cpu`, with own lane and credits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeflow.barrier import BarrierRunner
from pipeflow.checkpoint.cut_edge import CutEdge
from pipeflow.context import seed_of
from pipeflow.device.cpu_late import CpuLate
from pipeflow.edge import Edge
from pipeflow.enqueue import make_enqueue
from pipeflow.errors import StageError
from pipeflow.gate import gates_of_this_loop
from pipeflow.guarded import GuardedRunner
from pipeflow.input_runner import InputRunner
from pipeflow.inputs import Arrivals, Batches, Join, Select, Single, Turns
from pipeflow.lane import Lane
from pipeflow.launch import TaskLauncher
from pipeflow.one_by_one import OneByOne, Turn
from pipeflow.runner import Runner
from pipeflow.spec import OnError
from pipeflow.stage import Gather, Kind, Stage, scatters
from pipeflow.suspects import Trace

if TYPE_CHECKING:
    from pipeflow.device.base import Device
    from pipeflow.engine import Engine
    from pipeflow.graph import Graph, Node
    from pipeflow.inputs import Policy
    from pipeflow.launch import Launcher
    from pipeflow.resource import Shared

__all__ = ["Assembly", "Copy", "InputRunner"]


class Copy(Stage[Any, Any]):
    """An inserted stage: a value's tensors in another place."""

    def __init__(self, config: Any, source: Device, to: Device) -> None:
        super().__init__(config)
        self.source = source
        self.to = to
        self.stream: Any = None

    def run(self, item: Any) -> Any:
        return self.source.copy(item, self.to, self.stream)


class Assembly:
    """Builds one run. `devices`, `shared` and `runners` are by name."""

    def __init__(self, engine: Engine, graph: Graph, name: str, incarnation: str) -> None:
        self.engine = engine
        self.machine = engine.machine
        self.graph = graph
        self.name = name
        self.incarnation = incarnation
        self.devices: dict[str, Device] = {}
        self.shared: dict[str, Shared] = {}
        self.runners: dict[str, Runner] = {}
        self.lanes: list[Lane] = []
        self._edge_class = CutEdge if engine.saver is not None else Edge
        self.answering: str | None = None
        self._turns: dict[str, Turn] = {}
        """By device, where its calls are made one by one."""

    # Devices ---------------------------------------------------------------------------------------

    def make_devices(self) -> None:
        """Every device that the file names; may import torch and take seconds. Off the loop."""
        wanted: dict[str, None] = {}
        for node in self.graph.nodes.values():
            for device in node.devices:
                wanted[self.machine.resolve(device)] = None
        for resource in self.graph.resources:
            for device in self.devices_of_resource(resource):
                wanted[device] = None
        self.devices = {name: self.machine.device(name) for name in wanted}
        self.engine.devices, self.engine.shared = self.devices, self.shared
        self.host: Device = self.machine.host(self.devices.values())
        self.engine.poisons = self.host if isinstance(self.host, CpuLate) else None
        if not self.machine.virtual:
            self._share_cores()

    def _share_cores(self) -> None:
        """Set torch's threads an operation as `run.threads` says."""
        threads = self.engine.spec.threads
        if threads is None:
            return
        import os

        import torch

        if threads == "auto":
            lanes = [
                name
                for node in self.graph.nodes.values()
                if not node.guarded
                for name in node.devices * node.spec.replicas
                if self.devices[self.machine.resolve(name)].place == "cpu"
            ]
            threads = max(1, len(os.sched_getaffinity(0)) // max(1, len(lanes)))
        torch.set_num_threads(threads)

    def devices_of_resource(self, name: str) -> list[str]:
        """Where a resource is opened: where it says, else wherever its stages run, else on the host."""
        resource = self.graph.resources[name]
        found: dict[str, None] = {self.machine.resolve(device): None for device in resource.devices}
        if not found:
            for node in self.graph.nodes.values():
                if name in (*node.reads.values(), *node.writes.values()):
                    found |= {self.machine.resolve(device): None for device in node.devices}
            for other in self.graph.resources.values():
                if name in other.reads.values():
                    found |= dict.fromkeys(self.devices_of_resource(other.name))
        return list(found) or ["cpu"]

    # Runners ---------------------------------------------------------------------------------------

    def make_runners(self) -> None:
        """Stages with lanes and edges, in order. On the loop; starts the lanes' threads."""
        self._find_answer()
        gates = gates_of_this_loop(() if self.machine.virtual else list(self.devices))
        for name in self.graph.order:
            node = self.graph.nodes[name]
            runner = self._runner(node)
            self.runners[name] = runner
            if node.kind is not Kind.BARRIER and not node.cls.is_input:
                self._lanes(node, runner, gates)
            self._edges(node, runner)
            self.engine.add(runner)
        for node in self.graph.barriers:
            self._section(node, gates)
        for lane in self.lanes:
            if lane.gate is not None:
                lane.gate.nodes[self.runners[lane.name]] = None

    def _find_answer(self) -> None:
        nodes = self.graph.nodes.values()
        inputs = [node for node in nodes if node.cls.is_input]
        outputs = [node for node in nodes if node.cls.is_output]
        leaves = [node for node in nodes if not node.consumers and node.kind is not Kind.BARRIER]
        if inputs and (outputs or len(leaves) == 1):
            self.answering = (outputs or leaves)[0].name

    def _runner(self, node: Node) -> Runner:
        spec = node.spec
        cls: type[Runner] = Runner
        if node.kind is Kind.BARRIER:
            cls = BarrierRunner
        elif self._behind_barrier(node):
            cls = GuardedRunner
        elif node.cls.is_input:
            cls = InputRunner
            self.engine.callers += 1
        several = len(node.inputs) > 1
        runner = cls(
            self.engine,
            node.name,
            kind=Kind.MAP if cls is GuardedRunner else node.kind,
            # One lane writes; handing over late would only hide the version that an item carries.
            ordered=spec.ordered or bool(node.writes),
            on_host=not node.devices,
            starts_domain=node.kind is not Kind.MAP
            or (several and not node.joins and not node.selects_ports),
            on_error=spec.on_error if isinstance(spec.on_error, OnError) else None,
            retriable=node.retriable,
            scatters=node.kind is Kind.GATHER and scatters(node.cls),
            ports=node.ports,
            timeout=spec.timeout,
        )
        runner.limit = spec.limit
        runner.sources = [self.runners[n.name] for n in self.graph.upstream(node) if n.kind is Kind.SOURCE]
        if self.answering is not None:
            answer = self.graph.nodes[self.answering]
            runner.answers = node is answer
            runner.feeds_answer = node is answer or self.graph.behind(answer, node)
        return runner

    def _behind_barrier(self, node: Node) -> bool:
        """Whether a barrier runs it: any guarded stage, unless the rule that says so is switched off."""
        return node.guarded and bool(self.graph.barriers_of(node))

    def _edges(self, node: Node, runner: Runner) -> None:
        if isinstance(runner, GuardedRunner):
            return  # its barrier runs it
        edges: list[Edge] = []
        for link in node.inputs:
            producer = self._place(self.runners[link.source], node)
            queue = node.spec.queue or self.engine.spec.queue
            edge = self._edge_class(
                producer,
                runner,
                items=queue.items,
                nbytes=queue.bytes,
                every=node.spec.every or 1,
                port=link.port,
                name=link.name,
                declared=self.graph.nodes[link.source].spec.bytes,
                pinned=self._pinned(self.graph.nodes[link.source], node),
            )
            if edge.pinned and producer.relays and producer.inputs is not None:
                for before in producer.inputs.edges:
                    before.pinned = True
            producer.outs.append(edge)
            edges.append(edge)
        if edges:
            runner.take_from(self._policy(node, edges, runner))

    def _policy(self, node: Node, edges: list[Edge], runner: Runner) -> Policy:
        if node.kind is Kind.GATHER:
            stage = runner.lanes[0].stage
            assert isinstance(stage, Gather)
            return Batches(edges, stage, scatters=runner.scatters)
        if node.joins:
            return Join(edges)
        if node.selects_ports:
            return Select(edges)
        if len(edges) == 1:
            return Single(edges)
        return Turns(edges) if node.spec.ordered else Arrivals(edges)

    def _pinned(self, producer: Node, consumer: Node) -> bool:
        """Whether the consumer (or the section behind it) must see the version that its item made."""
        written = set(producer.writes.values())
        readers = self.graph.section(consumer) if consumer.kind is Kind.BARRIER else [consumer]
        return any(written & set(reader.reads.values()) for reader in readers)

    # Copies ----------------------------------------------------------------------------------------

    def _place(self, producer: Runner, consumer: Node) -> Runner:
        """The producer as the consumer sees it: behind a copy where their memory is not the same."""
        if not producer.lanes or consumer.kind is Kind.BARRIER:
            return producer
        source = producer.lanes[0].device
        targets = [self.devices[self.machine.resolve(device)] for device in consumer.devices] or [self.host]
        if all(target.place == source.place for target in targets):
            return producer
        if len({target.place for target in targets}) > 1:
            return producer  # lanes on several devices: each takes what it needs itself
        target = targets[0]
        name = f"{producer.name} > {target.place}"
        if name in self.runners:
            return self.runners[name]
        gates = gates_of_this_loop()
        runner = Runner(
            self.engine,
            name,
            kind=Kind.MAP,
            ordered=True,
            on_host=False,
            starts_domain=False,
            on_error=None,
            retriable=False,
        )
        runner.relays = True
        device = source if source.place != "cpu" else target
        stage = Copy(None, device, target)
        lane = self._lane(name, 0, stage, device, runner, gates, in_flight=2)
        stage.stream = lane.stream
        runner.add_lane(lane)
        queue = self.engine.spec.queue
        edge = self._edge_class(producer, runner, items=queue.items, nbytes=queue.bytes)
        producer.outs.append(edge)
        runner.take_from(Single([edge]))
        runner.feeds_answer = producer.feeds_answer
        self.runners[name] = runner
        self.engine.add(runner)
        return runner

    # Lanes -----------------------------------------------------------------------------------------

    def _lanes(self, node: Node, runner: Runner, gates: Any) -> None:
        devices = [self.devices[self.machine.resolve(name)] for name in node.devices] or [self.host]
        index = 0
        for device in devices:
            for _ in range(node.spec.replicas):
                try:
                    stage = node.cls(node.config)
                except Exception as error:
                    said = f"could not be made: {type(error).__name__}: {error}"
                    raise StageError(said, stage=node.name) from error
                lane = self._lane(
                    node.name, index, stage, device, runner, gates, node.spec.in_flight, node.spec.launcher
                )
                runner.add_lane(lane)
                index += 1

    def _lane(
        self,
        name: str,
        index: int,
        stage: Stage[Any, Any],
        device: Device,
        runner: Runner,
        gates: Any,
        in_flight: int,
        launcher: str | None = None,
    ) -> Lane:
        on_host = runner.on_host
        stream = device.host_stream() if on_host and isinstance(device, CpuLate) else device.stream(name)
        gated = not on_host or bool(self.graph.nodes[name].writes if name in self.graph.nodes else ())
        lane = Lane(
            name=name,
            index=index,
            stage=stage,
            device=device,
            stream=stream,
            gate=gates.of(device.name if not on_host else "cpu") if gated else None,
            in_flight=in_flight,
            run_dir=self.engine.folder.path,
            stop=self.engine.stop,
            seed=seed_of(self.engine.spec.seed, name),
            now=self.machine.now,
            timeout=runner.timeout,
        )
        if not on_host and (words := device.words(stream)) is not None:
            lane.trace = Trace(words)
        lane.is_source = runner.kind is Kind.SOURCE
        lane.answers = runner.answers
        lane.debug_sync = self.engine.debug_sync
        lane.resumed = self.engine.saver is not None and self.engine.saver.resumed is not None
        self._launchers(lane, runner, launcher)
        self.lanes.append(lane)
        return lane

    def _launchers(self, lane: Lane, runner: Runner, wanted: str | None) -> None:
        engine = self.engine
        name = f"{lane.name}[{lane.index}]"
        marks = (not runner.on_host and lane.device.place != "cpu") or isinstance(lane.device, CpuLate)
        inline = (wanted or ("inline" if lane.stage.inline else "thread")) == "inline"
        if lane.is_async:
            task = TaskLauncher(name, lane.in_flight, engine.fail)
            lane.launcher = task
            engine.launchers.append(task)
            if runner.on_host and not marks:
                lane.watcher = lane.hook_launcher = task
                hooks = lane.has_setup or lane.has_finish or self.graph.on_snapshot(lane.name)
                if hooks or engine.saver is not None:
                    lane.hook_launcher = self._launcher(name, marks=False)
                return
            lane.watcher = lane.hook_launcher = self._one_by_one(lane, self._launcher(name, marks=marks))
            if not runner.on_host:
                lane.enqueue = make_enqueue(lane, engine, lane.hook_launcher)
            return
        launcher = self._one_by_one(lane, self._launcher(name, inline=inline, marks=marks))
        lane.launcher = lane.watcher = lane.hook_launcher = launcher

    def _launcher(self, name: str, *, inline: bool = False, marks: bool) -> Launcher:
        launcher = self.machine.launcher(name, inline=inline, marks=marks)
        self.engine.launchers.append(launcher)
        return launcher

    def _one_by_one(self, lane: Lane, launcher: Launcher) -> Launcher:
        """Under `--debug-sync` lanes of one device take turns."""
        if not lane.debug_sync or lane.trace is None:
            return launcher
        return OneByOne(launcher, self._turns.setdefault(lane.device.name, Turn(self.engine)))

    # Barriers --------------------------------------------------------------------------------------

    def release_gates(self) -> None:
        """After the last launch came back, or was given up: other pipelines of the loop go on."""
        for lane in self.lanes:
            if lane.gate is not None:
                lane.gate.nodes.pop(self.runners[lane.name], None)
                lane.gate.forget(lane)
        for runner in self.runners.values():
            if isinstance(runner, BarrierRunner):
                runner.release_gates()
        self.engine.parking.release_gates()

    def _section(self, node: Node, gates: Any) -> None:
        barrier = self.runners[node.name]
        assert isinstance(barrier, BarrierRunner)
        names = list(self.devices)
        if node.spec.scope is not None and node.spec.scope != "all":
            from pipeflow.graph import devices_of

            named = self.engine.device_names
            names = [self.machine.resolve(name) for name in devices_of(node.spec.scope, named)]
        elif "cpu" not in names and any(lane.gate is gates.of("cpu") for lane in self.lanes):
            barrier.scope.append((self.host, gates.of("cpu")))  # writers on the host
        barrier.scope.extend((self.devices[name], gates.of(name)) for name in names)
        for guarded in self.graph.section(node):
            runner = self.runners[guarded.name]
            assert isinstance(runner, GuardedRunner)
            runner.barrier = barrier
            barrier.section.append(runner)
        barrier.snapshot = node.spec.snapshot
        barrier.at_start = self.graph.runs_at_start(node)
        scope = {id(gate) for _, gate in barrier.scope}
        barrier.background = [
            lane
            for lane in self.lanes
            if lane.stage.background and (lane.gate is None or id(lane.gate) in scope)
        ]
