"""Rules on followers (axioms 3.6 and 3.7): who publishes, and how far readers may run ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeflow.diagnostic import suggest
from pipeflow.follow import Follower, Misfit, batch_of, followers, loops, publishes_every
from pipeflow.spec import OnError
from pipeflow.stage import Kind

if TYPE_CHECKING:
    from pipeflow.follow import Loop
    from pipeflow.graph import ResourceNode
    from pipeflow.rules.case import Case, Findings

__all__ = [
    "idle_staleness",
    "small_staleness",
    "spare_in_generator",
    "unbounded_staleness",
    "unfed_follower",
    "unpublished_version",
]


def unfed_follower(case: Case) -> Findings:
    """What is followed has a writer, and one stage reads it and writes the follower."""
    graph = case.graph
    for resource in graph.resources.values():
        name, followed = resource.name, resource.spec.follows
        if followed is None:
            continue
        path = ("resources", name, "follows")
        if followed not in graph.resources:
            remedy = suggest(followed, list(graph.resources)) or "name a resource of this file"
            yield case.at(path, "unknown-resource", f"there is no resource {followed!r}", remedy)
            continue
        if followed == name or graph.resources[followed].spec.follows is not None:
            what = "itself" if followed == name else f"{followed!r}, which follows another one"
            remedy = "name the resource that a stage makes steps on"
            yield case.at(path, "unfed-follower", f"{name!r} follows {what}", remedy)
            continue
        if graph.writer(followed) is None:
            message = f"no stage writes {followed!r}, so it has no versions to follow"
            yield case.at(path, "unfed-follower", message, "remove `follows`")
            continue
        publisher = graph.writer(name)
        if publisher is not None and not publisher.known:
            continue
        if publisher is None or followed not in publisher.reads.values():
            message = (
                f"no stage writes {name!r}, so it never gets a version of {followed!r}"
                if publisher is None
                else f"{publisher.name!r} writes {name!r}, but does not read {followed!r}, which it follows"
            )
            remedy = f"let one stage have `reads: {followed}` and `writes: {name}`"
            yield case.at(path, "unfed-follower", message, remedy)


def idle_staleness(case: Case) -> Findings:
    """`max_staleness` where it would hold nobody back, and `spare` where nothing is published."""
    known = {follower.resource.name: follower for follower in followers(case.graph)}
    for resource in case.graph.resources.values():
        if resource.spec.spare and resource.spec.follows is None:
            path = ("resources", resource.name, "spare")
            message = "`spare` has no meaning on a resource that follows none"
            yield case.at(path, "misplaced-key", message, "add `follows: RESOURCE`, or remove it", key=True)
        if resource.spec.max_staleness is None:
            continue
        path = ("resources", resource.name, "max_staleness")
        follower = known.get(resource.name)
        if resource.spec.follows is None:
            message = "`max_staleness` has no meaning on a resource that follows none"
            yield case.at(path, "misplaced-key", message, "add `follows: RESOURCE`, or remove it", key=True)
        elif follower is not None and not loops(case.graph, follower):
            message = (
                f"no stage that reads {resource.name!r} feeds {follower.writer.name!r}, so nothing is "
                "trained on what it makes"
            )
            yield case.at(path, "misplaced-key", message, "remove `max_staleness`", key=True)


def _bounded(case: Case) -> list[tuple[Follower, list[Loop]]]:
    """Followers with readers that are held back."""
    both = [(follower, loops(case.graph, follower)) for follower in followers(case.graph)]
    return [(follower, found) for follower, found in both if found]


def unbounded_staleness(case: Case) -> Findings:
    """Between a reader and the writer: in order, one-to-one, and gathers of a fixed size."""
    told: set[tuple[str, str]] = set()
    for follower, found in _bounded(case):
        for loop in found:
            misfit = batch_of(loop)
            if not isinstance(misfit, Misfit) or (misfit.node.name, misfit.key) in told:
                continue
            told.add((misfit.node.name, misfit.key))
            message = (
                f"{loop.reader.name!r} reads {follower.resource.name!r}, which follows "
                f"{follower.followed.name!r}, but how many of its items {follower.writer.name!r} takes for a "
                f"step is not fixed: at {misfit.node.name!r} {misfit.why}"
            )
            yield case.of(misfit.node, misfit.key, "unbounded-staleness", message, misfit.remedy)


def small_staleness(case: Case) -> Findings:
    """Readers stop before the first version goes out where `every` is larger than what they may make."""
    for follower, _ in _bounded(case):
        publishing = publishes_every(case.graph, follower)
        if publishing is None:
            continue
        node, every = publishing
        staleness = follower.resource.spec.max_staleness or 0
        if staleness < every - 1:
            message = (
                f"with max_staleness {staleness} its readers wait for a version after {staleness + 1} "
                f"step{'s' if staleness else ''}, but {node.name!r} lets one out only every {every}"
            )
            remedy = f"raise it to {every - 1} or more, or lower `every` of {node.name!r}"
            yield case.at(_place(case, follower.resource), "small-staleness", message, remedy)


def unpublished_version(case: Case) -> Findings:
    """A version that is not published, whatever for, would leave readers waiting for ever."""
    for follower, _ in _bounded(case):
        node, name = follower.publisher, follower.resource.name
        if not node.known:
            continue
        if publishes_every(case.graph, follower) is None:
            message = (
                f"{node.name!r} writes {name!r} at other times than {follower.writer.name!r} makes a step"
            )
            remedy = f"feed it, or its barrier, by {follower.writer.name!r}"
            yield case.of(node, "from", "unpublished-version", message, remedy)
        elif node is not follower.writer and node.spec.limit is not None:
            message = (
                f"after its `limit` {node.name!r} publishes no more, and readers of {name!r} wait for it"
            )
            remedy = f"put `limit` on {follower.writer.name!r}"
            yield case.of(node, "limit", "unpublished-version", message, remedy)
        elif (
            node is not follower.writer
            and isinstance(node.spec.on_error, OnError)
            and node.spec.on_error.skip
        ):
            message = (
                f"a version that {node.name!r} skips is never published, and readers of {name!r} wait for it"
            )
            yield case.of(node, "on_error", "unpublished-version", message, "use `stop` or `retry`")


def spare_in_generator(case: Case) -> Findings:
    """A generator keeps what it read in its variables, so its copy must be its own until it ends (3.7)."""
    graph = case.graph
    for node in graph.nodes.values():
        if node.kind is not Kind.SOURCE and not (node.kind is Kind.FLAT and node.writes):
            continue
        for name in node.reads.values():
            if not graph.resources[name].spec.spare:
                continue
            message = (
                f"{node.name!r} is one generator for many versions of {name!r}, and would go on with a copy "
                "that is written anew"
            )
            remedy = f"read {name!r} in a stage that takes items and writes nothing, or remove `spare`"
            yield case.of(node, "reads", "spare-in-generator", message, remedy)


def _place(case: Case, resource: ResourceNode) -> tuple[str, str, str]:
    key = "max_staleness" if resource.spec.max_staleness is not None else "follows"
    return ("resources", resource.name, key)
