"""Stages that only take time and memory, as `sim:` in the file says: for `plan`, and for files that tell of
a pipeline without its code (`uses: sim/work`).

    target: {uses: sim/work, from: batches, on: targets, sim: {duration: 1.1s, bytes: 2.4GiB}}
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec

from pipeflow.config import Config
from pipeflow.device.base import tensors_in
from pipeflow.errors import StageError
from pipeflow.item import Scatter
from pipeflow.spec import SimSpec
from pipeflow.stage import Gather, Kind, Resource, Stage

if TYPE_CHECKING:
    from pipeflow.graph import Graph, Node
    from pipeflow.sim.world import World

__all__ = ["Batch", "Source", "State", "Work", "current_world", "pretend"]


def current_world() -> World:
    """The world whose loop runs now. RuntimeError outside of one."""
    world = getattr(asyncio.get_running_loop(), "world", None)
    if world is None:
        raise RuntimeError("this works in virtual time only: under `pipeflow plan` or `pipeflow.testing`")
    return world


def spend(sim: SimSpec, name: str, item: Any) -> Any:
    """One call of a pretended stage: its host time, its kernel, its output (or a token of no size)."""
    world = current_world()
    if sim.host:
        world.host.work(sim.host)
    if not world.host.entered:
        world.host.work(sim.duration, lock=False)
        return world.empty_on_host(sim.bytes) if sim.bytes else None
    made = world.empty(max(1, sim.bytes or 0))
    device = world.host.entered[-1][0]
    reads = [tensor for tensor in tensors_in(item) if tensor.device in (device.torch_name, "cpu")]
    world.kernel(name, sim.duration, reads, [made])
    return made


class State(Resource):
    """A resource that holds nothing but its name and version."""

    def open(self, ctx: Any) -> Any:
        return ctx.name


def _only_planned(stage: Stage[Any, Any]) -> StageError:
    return StageError(
        "a stage of sim/.. has no work of its own, only the time that `sim:` tells. Run `pipeflow plan`",
        stage=type(stage).__name__,
    )


class Source(Stage[None, Any]):
    """Makes items for as long as they are taken."""

    def run(self):  # pyright: ignore
        raise _only_planned(self)
        yield


class Work(Stage[Any, Any]):
    """One item in, one out."""

    def run(self, item: Any) -> Any:
        raise _only_planned(self)


class Batch(Gather[Any, Any]):
    """`size` items in, one out."""

    class Config(Config, frozen=True, kw_only=True):
        size: Annotated[int, msgspec.Meta(ge=1, description="items a batch")]

    @classmethod
    def gathers(cls, config: Any) -> int:
        """`size`"""
        return config.size

    def run(self, items: list[Any]) -> Any:
        raise _only_planned(self)


def pretend(graph: Graph, told: dict[str, SimSpec]) -> None:
    """Put pretended stages and resources in the place of a checked graph's own: same names, kinds, traits and
    edges, no code. `told`: by stage, else what the file says under `sim:`, else no time at all."""
    for node in graph.nodes.values():
        if node.kind is not Kind.BARRIER and not node.cls.is_input:
            node.cls = _pretended(node, told.get(node.name) or node.spec.sim or SimSpec())
    for resource in graph.resources.values():
        resource.cls = State


def _pretended(node: Node, sim: SimSpec) -> type[Stage[Any, Any]]:
    base, name = cast("Any", node.cls), node.name
    scatters = "Scatter" in str(base.run.__annotations__.get("return", ""))

    def source(self: Any) -> Any:
        while True:
            yield spend(sim, name, None)

    def one(self: Any, item: Any) -> Any:
        return spend(sim, name, item)

    def many(self: Any, item: Any) -> Any:
        for _ in range(sim.outputs):
            yield spend(sim, name, item)

    def scatter(self: Any, items: list[Any]) -> Any:
        return Scatter([spend(sim, name, items)] * len(items))

    plain, gathering = cast("Any", Stage), cast("Any", Gather)
    body: dict[str, Any] = {"__module__": __name__, "__doc__": base.__doc__}
    body |= {hook: getattr(plain, hook) for hook in ("setup", "finish", "quiesce", "close")}
    if node.kind is Kind.GATHER:
        scatter.__annotations__ = {"return": Scatter if scatters else Any}
        body["bucket"] = gathering.bucket
        body["linger"] = None
        if sim.size is not None:
            size = sim.size
            body["full"] = lambda self, members: len(members) >= size  # pyright: ignore
            body["gathers"] = classmethod(lambda cls, config: size)  # pyright: ignore
        elif base.gathers(node.config) is None:
            raise StageError(
                "how many items it gathers depends on their content. Say it: `sim: {size: N}`", stage=name
            )
    run = {Kind.SOURCE: source, Kind.FLAT: many, Kind.GATHER: scatter if scatters else one}
    body["run"] = run.get(node.kind, one)
    return type(base.__name__, (base,), body)
