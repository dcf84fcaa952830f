"""Followers: resources that publish another one's versions, and the loop from their readers to its writer.

    drafter: {uses: .., on: trainer}
    actor:   {uses: .., on: targets, follows: drafter, max_staleness: 1}

The *writer* makes steps on what is followed; the *publisher* reads that and writes the follower; a *reader*
of the follower makes the items that the writer's next steps are made of. How far it may run ahead can be said
in items only where each step is made of a fixed number of them (axiom 3.6): what follows finds that number,
or says why there is none. Facts of the graph alone; `staleness` keeps the counts of a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pipeflow.stage import Gather, Kind, scatters

if TYPE_CHECKING:
    from pipeflow.graph import Graph, Node, ResourceNode

__all__ = ["Follower", "Loop", "Misfit", "batch_of", "followers", "loops", "publishes_every"]


_ONE_BUCKET: Any = cast("Any", Gather).bucket


class Misfit(NamedTuple):
    """Why the way from a reader to the writer has no fixed number of items a step."""

    node: Node
    key: str
    """Of the stage, at which the finding stands."""
    why: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Follower:
    """A follower whose every part is there. `writer` makes the steps, `publisher` hands them on."""

    resource: ResourceNode
    followed: ResourceNode
    writer: Node
    publisher: Node


@dataclass(frozen=True, slots=True)
class Loop:
    """A reader and the way that its items take: `path` are the stages behind it, up to the writer."""

    follower: Follower
    reader: Node
    path: tuple[Node, ...]


def followers(graph: Graph) -> list[Follower]:
    """Those with a writer and a publisher; for the others the rules have findings."""
    found: list[Follower] = []
    for resource in graph.resources.values():
        followed = graph.resources.get(resource.spec.follows or "")
        if followed is None:
            continue
        writer, publisher = graph.writer(followed.name), graph.writer(resource.name)
        if writer is not None and publisher is not None and followed.name in publisher.reads.values():
            found.append(Follower(resource, followed, writer, publisher))
    return found


def loops(graph: Graph, follower: Follower) -> list[Loop]:
    """One for each reader whose items reach the writer. What others make is never trained on."""
    writer = follower.writer
    found: list[Loop] = []
    for reader in graph.nodes.values():
        if follower.resource.name in reader.reads.values() and graph.behind(writer, reader):
            behind = [graph.nodes[name] for name in graph.order if graph.behind(graph.nodes[name], reader)]
            path = [node for node in behind if node is writer or graph.behind(writer, node)]
            found.append(Loop(follower, reader, tuple(path)))
    return found


def batch_of(loop: Loop) -> int | Misfit:
    """The reader's items in one step of the writer: the product of the gathers on the way (B)."""
    size = 1
    for node in (loop.reader, *loop.path):
        if not node.configured:
            return size  # it has a finding of its own
        misfit = _reader_misfit(node) if node is loop.reader else _misfit(node)
        misfit = misfit or _order_misfit(node)
        if misfit is not None:
            return misfit
        if node.kind is Kind.GATHER and node is not loop.reader:
            size *= gathers(node) or 1
    return size


def gathers(node: Node) -> int | None:
    """Members of each batch of a gathering stage, where they are fixed."""
    cls: Any = node.cls
    if node.kind is not Kind.GATHER or cls.linger is not None or cls.bucket is not _ONE_BUCKET:
        return None
    return cls.gathers(node.config)


def publishes_every(graph: Graph, follower: Follower) -> tuple[Node, int] | None:
    """The stage whose `every` says after how many steps a version goes out, and that number; None where the
    publisher does not go by the writer's steps."""
    publisher, writer = follower.publisher, follower.writer
    barriers = graph.barriers_of(publisher) if publisher.guarded else [publisher]
    if publisher is writer:
        return publisher, 1
    if len(barriers) != 1 or writer.name not in {link.source for link in barriers[0].inputs}:
        return None
    return barriers[0], barriers[0].spec.every or 1


def _reader_misfit(node: Node) -> Misfit | None:
    if node.guarded or node.barrier:
        why = "it runs when its barrier fires, not once an item"
        return Misfit(node, "reads", why, "read the follower in a stage that no barrier guards")
    if node.kind is Kind.FLAT or _scatters(node):
        why = "one call of it makes many items"
        return Misfit(node, "reads", why, "put the one-to-many stage before it, or behind the writer")
    return None


def _misfit(node: Node) -> Misfit | None:
    if node.barrier or node.guarded:
        why = "a barrier hands on no items"
        return Misfit(node, "from", why, "feed it by what feeds the barrier")
    if node.kind is Kind.FLAT or _scatters(node):
        why = "the number of items that one makes is not fixed"
        return Misfit(node, "uses", why, "use one-to-one stages and gathers of a fixed size on this way")
    if (node.spec.every or 1) > 1:
        return Misfit(node, "every", "`every` passes items over", "drop items before the reader instead")
    if len(node.inputs) > 1 and not node.joins and not node.selects_ports:
        why = "a list takes items of others too"
        return Misfit(node, "from", why, "join them by named inputs, or merge them before the reader")
    if node.kind is Kind.GATHER and gathers(node) is None:
        why = f"{node.cls.__name__} does not gather a fixed number of items"
        remedy = (
            "use a gather whose class says `gathers(config)`, with neither `bucket` nor `linger` of its own"
        )
        return Misfit(node, "uses", why, remedy)
    return None


def _order_misfit(node: Node) -> Misfit | None:
    if node.spec.ordered or node.writes:
        return None
    why = "it hands items on out of order"
    return Misfit(node, "ordered", why, "remove `ordered: false`")


def _scatters(node: Node) -> bool:
    return node.kind is Kind.GATHER and scatters(node.cls)
