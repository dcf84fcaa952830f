"""Loading a pipeline and giving everything back: devices, resources, lanes, `setup`, `close`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import anyio

from pipeflow.barrier import BarrierRunner
from pipeflow.context import ResourceContext, seed_of
from pipeflow.error_text import named_error
from pipeflow.errors import PipeflowError, StageError, Stopped, Stuck
from pipeflow.faults import device_error
from pipeflow.observe.loads import Loads
from pipeflow.release import hold_for_ever, release_all
from pipeflow.resource import Instance, Leases, Shared, Spared
from pipeflow.snapshot import copied_roles
from pipeflow.staleness import wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeflow.assemble import Assembly
    from pipeflow.context import Context
    from pipeflow.device.base import Device
    from pipeflow.engine import Engine
    from pipeflow.graph import Graph, ResourceNode
    from pipeflow.job import Launched
    from pipeflow.lane import Lane

__all__ = ["Loader"]


class Loader:
    """Opens resources and sets lanes up, and remembers what has to be closed again."""

    def __init__(self, graph: Graph, engine: Engine, assembly: Assembly) -> None:
        self._graph = graph
        self._engine = engine
        self._assembly = assembly
        self.loads = Loads(engine)
        self._opened: list[tuple[str, Any, Any, Device | None]] = []
        self._set_up: list[Lane] = []

    async def load(self) -> None:
        """Devices, resources, lanes, `setup`. Raises the run's error once the run is cancelled meanwhile."""
        engine = self._engine
        failure: Exception | None = None
        async with anyio.create_task_group() as group:

            async def give_up() -> None:
                await engine.ended.wait()
                group.cancel_scope.cancel()

            group.start_soon(give_up)
            try:
                await self._load()
            except Exception as error:
                failure = _first(error)
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure
        if engine.error is not None:
            raise engine.error

    async def _load(self) -> None:
        engine = self._engine
        with self.loads.devices():
            await engine.off_loop(self._assembly.make_devices, "devices")
        for name in self._graph.opening:
            await self._open_resource(name)
        self._assembly.make_runners()
        self._lease()
        wire(self._graph, self._assembly.runners, self._assembly.shared)
        if engine.saver is not None:
            engine.saver.attach(self._assembly)
        if engine.operations is not None:
            resumed = engine.saver is not None and engine.saver.resumed is not None
            engine.operations.attach(self._assembly.runners.values(), resumed=resumed)
        for name in self._graph.order:
            lanes = self._assembly.runners[name].lanes
            waiting = [lane for lane in lanes if lane.has_setup or self._state_of(lane) is not None]
            self._set_up += [lane for lane in lanes if lane not in waiting]
            if waiting:
                with self.loads.setup(name, self._graph.nodes[name].spec.uses):
                    async with anyio.create_task_group() as group:
                        for lane in waiting:
                            group.start_soon(self._set_up_lane, lane)
        for name in self._graph.order:
            runner = self._assembly.runners[name]
            if isinstance(runner, BarrierRunner) and runner.at_start:
                await runner.start()
        if engine.saver is not None:
            engine.saver.loaded()
        engine.begun = True
        engine.wake_all()

    def _state_of(self, lane: Lane) -> Any:
        """What a resumed run gives the lane's stage; None where nothing was saved."""
        saver = self._engine.saver
        return saver.state_of(lane) if saver is not None else None

    async def _open_resource(self, name: str) -> None:
        assembly = self._assembly
        node = self._graph.resources[name]
        shared = assembly.shared[name] = Shared(name, assembly.incarnation)
        for device_name in assembly.devices_of_resource(name):
            instance = await self._open_on(device_name, node, shared)
            if node.spec.spare:
                shared.instances[device_name] = Spared(
                    instance, await self._open_on(device_name, node, shared)
                )
            else:
                shared.instances[device_name] = instance

    async def _open_on(self, device_name: str, node: ResourceNode, shared: Shared) -> Instance:
        engine, assembly, name = self._engine, self._assembly, node.name
        device = assembly.devices.get(device_name)
        resource = node.cls(node.config)
        context = ResourceContext(
            name=name,
            device=device.torch_name if device is not None else "cpu",
            seed=seed_of(engine.spec.seed, name),
            run_dir=engine.folder.path,
            stop=engine.stop,
            reads={role: assembly.shared[other].on(device_name).value for role, other in node.reads.items()},
        )

        def call(resource: Any = resource, context: ResourceContext = context) -> Any:
            value = resource.open(context)
            # Here: a cancel does not wait, but closes it later.
            self._opened.append((name, resource, value, device))
            if engine.saver is not None:
                engine.saver.opened(name, resource, value)
            return value

        try:
            with self.loads.resource(name, node.spec.uses, device_name):
                value = await engine.off_loop(call, f"opens {name}")
        except Stopped:
            raise
        except PipeflowError as error:
            raise PipeflowError(f"resource {name!r}: {error}") from error
        except Exception as error:
            raise PipeflowError(f"resource {name!r} on {device_name}: {named_error(error)}") from error
        for line in context.logged:
            engine.record(name, **line)
        engine.reported.update(context.reported)
        return Instance(shared, device_name, value, resource)

    def _lease(self) -> None:
        shared = self._assembly.shared
        for lane in self._assembly.lanes:
            node = self._graph.nodes.get(lane.name)
            runner = self._assembly.runners[lane.name]
            device = lane.device.name if not runner.on_host else "cpu"
            lane.leases = Leases(
                runner,
                {role: shared[name].on(device) for role, name in (node.reads if node else {}).items()},
                {role: shared[name].on(device) for role, name in (node.writes if node else {}).items()},
                keeps=runner.flat and not (node and node.writes),
                awaits=runner.on_host,
                beside=[
                    instance
                    for name in (node.writes.values() if node else ())
                    for instance in shared[name].instances.values()
                ],
            )
            for name in set(node.writes.values()) if node else ():
                shared[name].writer = runner
                if shared[name] not in runner.writes:
                    runner.writes.append(shared[name])

        for node in self._graph.nodes.values():
            if node.spec.snapshot:
                for reader in self._graph.section(node) if node.barrier else [node]:
                    for lane in self._assembly.runners[reader.name].lanes:
                        lane.snapshots = copied_roles(lane.leases)

    async def _set_up_lane(self, lane: Lane) -> None:
        engine = self._engine
        context = lane.context(None)
        context.moving = lane.leases.moving()
        done = anyio.Event()
        failure: list[BaseException] = []

        def finished(launched: Any, error: BaseException | None) -> None:
            fault = error if launched is None else launched.error
            if launched is None or fault is not None:
                failure.append(fault or RuntimeError("its setup came back with nothing"))
                done.set()
            elif launched.passed:
                done.set()
            else:
                lane.watcher.watch("the fence of its setup", launched.mark, passed)

        def passed(_: Any, fault: BaseException | None) -> None:
            if fault is not None:
                failure.append(fault)
            done.set()

        state = self._state_of(lane)

        def prepare(context: Context) -> None:
            lane.stage.setup(context)
            if state is not None:
                lane.stage.load(state)

        def set_up() -> Launched:
            launched = lane.hook(prepare, context)
            if launched.error is None:
                self._set_up.append(lane)  # here: a cancel does not wait, but closes it later
            return launched

        while lane.gate is not None and not lane.gate.open:  # of another pipeline's barrier
            await engine.next_progress()
        if lane.gate is not None:
            lane.gate.enter(lane, None)
        lane.hook_launcher.submit("its setup", set_up, finished)
        await done.wait()
        if lane.gate is not None:
            lane.gate.leave(lane, None)
        if failure:
            fault = failure[0]
            if isinstance(fault, Stopped):
                raise fault
            if lane.device.is_fault(fault):
                raise device_error(engine, lane.device, fault, f"the setup of stage {lane.name!r}")
            raise StageError(f"in setup: {named_error(fault)}", stage=lane.name) from fault
        engine.logged(self._assembly.runners[lane.name], None, context)

    async def close(self) -> None:
        """Stop threads, close stages, then resources, then devices. Under a shield."""
        engine = self._engine
        engine.admitting = False
        engine.refuse_tickets(engine.error or PipeflowError("the pipeline has ended"))
        engine.stop.set()
        try:
            await engine.settle(engine.spec.stop.grace)
        except Stuck:
            hold_for_ever(engine)
            raise
        finally:
            self._assembly.release_gates()
        if any(device.lost is not None for device in self._assembly.devices.values()):
            hold_for_ever(engine)  # to free memory there may be a call, too
        else:
            release_all(engine)
        for lane in reversed(self._set_up):
            await self._closing(lane.stage.close, f"stage {lane.name!r}", lane.device)
        for name, resource, value, device in reversed(self._opened):

            def call(resource: Any = resource, value: Any = value) -> None:
                resource.close(value)

            await self._closing(call, f"resource {name!r}", device)
        for device in self._assembly.devices.values():
            if device.lost is None:
                device.close()

    async def _closing(self, call: Callable[[], None], what: str, device: Device | None) -> None:
        """One `close`. After a fault or a cancel it may take the grace period, not for ever. What is on a
        device that failed is left as it is: no call of that follows."""
        engine = self._engine
        if device is not None and device.lost is not None:
            engine.note("close left out", what, device=device.name)
            return
        limit = engine.spec.stop.grace if engine.error is not None else None
        try:
            with anyio.fail_after(limit):
                await engine.off_loop(call, f"close of {what}")
        except TimeoutError:
            engine.fail(Stuck(f"the close of {what} did not come back within {limit:g} s"))
        except Exception as error:
            engine.note("close failed", what, error=error)
            if engine.error is None:
                engine.error = PipeflowError(f"while {what} was closed: {named_error(error)}")
                engine.error.__cause__ = error


def _first(error: Exception) -> Exception:
    """The error itself where lanes that were set up together put it into a group."""
    while isinstance(error, ExceptionGroup):
        error = cast("ExceptionGroup[Exception]", error).exceptions[0]
    return error
