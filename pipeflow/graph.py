"""The graph that a file describes, and its facts: order, domains, ancestors, devices, lanes, sections.

A stage whose class was not found stays in the graph as `Unresolved`, so that the rules see the rest. Nothing
here imports torch or asks a machine; `auto` stays symbolic. `pipeflow.build` makes one from a file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeflow.stage import Kind, Resource, Stage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import msgspec

    from pipeflow.spec import ResourceSpec, StageSpec

__all__ = ["Graph", "Link", "Node", "Path", "ResourceNode", "Unresolved", "UnresolvedResource", "devices_of"]

Path = tuple[str | int, ...]
"""Where in the file: `("stages", "train", "from", 0)`."""


class Unresolved(Stage[Any, Any]):
    """Stands for a stage whose class was not found: it fits everything, and rules leave it alone."""

    def run(self, item: Any) -> Any:
        """Never called: a graph that holds it carries an error."""
        return item


class UnresolvedResource(Resource):
    """Stands for a resource whose class was not found."""


class Link(NamedTuple):
    """One in-edge of a stage, as the file writes it."""

    source: str
    port: str | None
    name: str | None
    """Of a named input."""
    path: Path
    """Where in the file."""


@dataclass(slots=True, eq=False)
class Node:
    """A stage of the file with all that is known before a run."""

    name: str
    spec: StageSpec
    cls: type[Stage[Any, Any]]
    config: msgspec.Struct
    kind: Kind
    devices: tuple[str, ...]
    """Device literals it runs on, without repeats; empty: the host; `auto` where the file leaves it open."""
    inputs: list[Link] = field(default_factory=list[Link])
    consumers: list[str] = field(default_factory=list[str])
    """In file order; a stage that takes two ports is there once."""
    reads: dict[str, str] = field(default_factory=dict[str, str])
    """Role to resource name."""
    writes: dict[str, str] = field(default_factory=dict[str, str])
    domain: str = ""
    """The stage that started the numbering of its output (axiom 1.1)."""
    ancestors: int = 0
    """Bit i: `graph.order[i]` lies upstream."""
    rank: int = 0
    """Its place in `graph.order`."""

    @property
    def known(self) -> bool:
        """Whether its class was found."""
        return self.cls is not Unresolved

    @property
    def configured(self) -> bool:
        """Whether its class was found and its options were converted."""
        return self.known and isinstance(self.config, self.cls.Config)

    @property
    def barrier(self) -> bool:
        """Whether it is a barrier."""
        return self.kind is Kind.BARRIER

    @property
    def guarded(self) -> bool:
        """Whether it needs a barrier: a class trait, whatever the stage is called."""
        return self.cls.guarded

    @property
    def lanes(self) -> int:
        """Devices times replicas. `auto` and the host count as one place."""
        return max(len(self.devices), 1) * self.spec.replicas

    @property
    def joins(self) -> bool:
        """Whether its inputs are named, so that items meet by number."""
        return isinstance(self.spec.from_, dict)

    @property
    def selects_ports(self) -> bool:
        """Whether its inputs are several ports of one stage, which share one numbering."""
        return (
            len(self.inputs) > 1
            and not self.joins
            and len({link.source for link in self.inputs}) == 1
            and all(link.port is not None for link in self.inputs)
        )

    @property
    def ports(self) -> tuple[str, ...]:
        """Names of its outputs: the class's, or its options `ports` and `otherwise`, where it has these."""
        fixed = tuple(self.cls.ports)
        if fixed:
            return fixed
        chosen = (*getattr(self.config, "ports", ()), getattr(self.config, "otherwise", None))
        return tuple(dict.fromkeys(port for port in chosen if isinstance(port, str)))

    @property
    def retriable(self) -> bool:
        """Whether `on_error: retry` may run an item again."""
        if self.kind in (Kind.SOURCE, Kind.FLAT, Kind.BARRIER):
            return False  # part of its output may be gone already
        if self.cls.retriable is not None:
            return self.cls.retriable
        return not (self.cls.stateful or self.writes or self.cls.writes)


@dataclass(slots=True, eq=False)
class ResourceNode:
    """A resource of the file."""

    name: str
    spec: ResourceSpec
    cls: type[Resource]
    config: msgspec.Struct
    devices: tuple[str, ...]
    """Device literals it is opened on; empty: wherever its stages run."""
    reads: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def known(self) -> bool:
        """Whether its class was found."""
        return self.cls is not UnresolvedResource


class Graph:
    """Nodes in file order, and what follows from how they are linked."""

    def __init__(self, nodes: Iterable[Node], resources: Iterable[ResourceNode]) -> None:
        self.nodes: dict[str, Node] = {node.name: node for node in nodes}
        self.resources: dict[str, ResourceNode] = {resource.name: resource for resource in resources}
        for node in self.nodes.values():
            for link in node.inputs:
                consumers = self.nodes[link.source].consumers
                if node.name not in consumers:
                    consumers.append(node.name)
        self.order: list[str] = _sort({n.name: [i.source for i in n.inputs] for n in self.nodes.values()})
        """Producers first. Stages on a circle come last, in file order."""
        self.opening: list[str] = _sort({r.name: list(r.reads.values()) for r in self.resources.values()})
        """Resources, those that another looks at first."""
        for rank, name in enumerate(self.order):
            self.nodes[name].rank = rank
        for name in self.order:
            node = self.nodes[name]
            node.ancestors = self._ancestors(node)
            node.domain = self._domain(node)

    def _ancestors(self, node: Node) -> int:
        bits = 0
        for link in node.inputs:
            source = self.nodes[link.source]
            bits |= source.ancestors | (1 << source.rank)
        return bits

    def _domain(self, node: Node) -> str:
        """Who numbers its output. A gather starts a domain even where it scatters: its members wait for
        one another, so a join with their fork would wait for ever."""
        starts = (
            node.kind is not Kind.MAP
            or not node.inputs
            or (node.spec.every or 1) > 1
            or (len(node.inputs) > 1 and not node.joins and not node.selects_ports)
        )
        return node.name if starts else self.nodes[node.inputs[0].source].domain or node.name

    def behind(self, node: Node, other: Node) -> bool:
        """Whether `node` lies downstream of `other`."""
        return bool(node.ancestors >> other.rank & 1)

    def upstream(self, node: Node) -> list[Node]:
        """Every stage that `node` is fed by, near or far, in order."""
        return [self.nodes[name] for rank, name in enumerate(self.order) if node.ancestors >> rank & 1]

    def links(self) -> Iterator[tuple[Link, Node]]:
        """Every edge: the link and its consumer."""
        for node in self.nodes.values():
            for link in node.inputs:
                yield link, node

    @property
    def barriers(self) -> list[Node]:
        """In file order."""
        return [node for node in self.nodes.values() if node.barrier]

    @property
    def guarded(self) -> list[Node]:
        """Stages that need a barrier, in file order."""
        return [node for node in self.nodes.values() if node.guarded]

    def section(self, barrier: Node) -> list[Node]:
        """Guarded stages reached from `barrier` through guarded ones, in the order in which they run."""
        found: set[str] = set()
        todo = [barrier]
        while todo:
            for name in todo.pop().consumers:
                node = self.nodes[name]
                if node.guarded and name not in found:
                    found.add(name)
                    todo.append(node)
        return [self.nodes[name] for name in sorted(found, key=lambda name: self.nodes[name].rank)]

    def runs_at_start(self, barrier: Node) -> bool:
        """Whether a barrier's section runs before the first item (axiom 5.4)."""
        if barrier.spec.at_start is not None:
            return barrier.spec.at_start
        section = self.section(barrier)
        return any(n.cls.at_start if n.spec.at_start is None else n.spec.at_start for n in section)

    def on_snapshot(self, name: str) -> bool:
        """Whether a stage works on copies of what it reads: by its own key, or its barrier's."""
        node = self.nodes.get(name)
        return node is not None and any(n.spec.snapshot for n in (node, *self.barriers_of(node)))

    def barriers_of(self, guarded: Node) -> list[Node]:
        """Barriers that reach a guarded stage through guarded stages alone, in order."""
        found: dict[str, Node] = {}
        seen = {guarded.name}
        todo = [guarded]
        while todo:
            for link in todo.pop().inputs:
                source = self.nodes[link.source]
                if source.barrier:
                    found[source.name] = source
                elif source.guarded and source.name not in seen:
                    seen.add(source.name)
                    todo.append(source)
        return sorted(found.values(), key=lambda node: node.rank)

    def writer(self, resource: str) -> Node | None:
        """The stage that writes a resource; the first one where a file has two."""
        for node in self.nodes.values():
            if resource in node.writes.values():
                return node
        return None

    def devices(self) -> set[str]:
        """Every device literal that a stage or a resource names."""
        both = (*self.nodes.values(), *self.resources.values())
        return {device for each in both for device in each.devices}

    def circles(self) -> list[list[str]]:
        """Circles of items (axiom 2.7), one for each group of stages that feed each other."""
        return _circles({n.name: [i.source for i in n.inputs] for n in self.nodes.values()})

    def resource_circles(self) -> list[list[str]]:
        """Circles of resources that wait for each other to be opened."""
        return _circles({r.name: list(r.reads.values()) for r in self.resources.values()})


def devices_of(names: str | Sequence[str] | None, devices: Mapping[str, str | list[str]]) -> tuple[str, ...]:
    """The literals that `on:` or `scope:` stands for, without repeats. `cuda` is `cuda:0`."""
    if names is None:
        return ()
    found: dict[str, None] = {}
    for name in [names] if isinstance(names, str) else names:
        meant = devices.get(name, name)
        for literal in [meant] if isinstance(meant, str) else meant:
            found["cuda:0" if literal == "cuda" else literal] = None
    return tuple(found)


def _sort(sources: dict[str, list[str]]) -> list[str]:
    """Kahn's order, ties in file order; what lies on or behind a circle comes last."""
    waits = {name: len(set(feeds)) for name, feeds in sources.items()}
    consumers: dict[str, list[str]] = {name: [] for name in sources}
    for name, feeds in sources.items():
        for source in set(feeds):
            consumers[source].append(name)
    place = {name: index for index, name in enumerate(sources)}
    order = [name for name, count in waits.items() if count == 0]
    for name in order:  # grows while it is walked
        for consumer in sorted(consumers[name], key=place.__getitem__):
            waits[consumer] -= 1
            if waits[consumer] == 0:
                order.append(consumer)
    done = set(order)
    return order + [name for name in sources if name not in done]


def _circles(sources: dict[str, list[str]]) -> list[list[str]]:
    """Walk up from every name; a name met again on the way closes a circle. Each name is in one at most."""
    state: dict[str, int] = {}  # 1: on the way, 2: done
    found: list[list[str]] = []
    for start in sources:
        if start in state:
            continue
        way = [start]
        feeds = [iter(sources[start])]
        state[start] = 1
        while way:
            source = next(feeds[-1], None)
            if source is None:
                state[way.pop()] = 2
                feeds.pop()
            elif source not in state:
                state[source] = 1
                way.append(source)
                feeds.append(iter(sources[source]))
            elif state[source] == 1:
                found.append(way[way.index(source) :][::-1])
    return found
