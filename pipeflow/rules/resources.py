"""Rules on resources: one writer, no replica of it, and readers behind it that are fed by it (axioms, 3)."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from pipeflow.rules.barriers import fed_by, feed_it

if TYPE_CHECKING:
    from pipeflow.graph import Node
    from pipeflow.rules.case import Case, Findings

__all__ = ["replicated_state", "resource_circle", "resource_elsewhere", "two_writers", "unfed_reader"]


def resource_circle(case: Case) -> Findings:
    """Resources that look at each other cannot be opened in any order."""
    for circle in case.graph.resource_circles():
        names = [name for name in case.graph.resources if name in circle]
        start = circle.index(names[0])
        shown = " > ".join([*circle[start:], *circle[:start], names[0]])
        message = f"these resources wait for each other to be opened: {shown}"
        yield case.at(("resources", names[0], "reads"), "cycle", message, "take one `reads` out")


def two_writers(case: Case) -> Findings:
    """A resource has one writer (axiom 3.1): its version counts that one's steps."""
    for name in case.graph.resources:
        writers = [node for node in case.graph.nodes.values() if name in node.writes.values()]
        for second in writers[1:]:
            message = f"{second.name!r} writes resource {name!r}, which {writers[0].name!r} writes too"
            remedy = f"let {second.name!r} read it, or give it a resource of its own"
            yield case.of(second, "writes", "two-writers", message, remedy)


def unfed_reader(case: Case) -> Findings:
    """A reader behind the writer sees its item's version, so the writer itself feeds it (axiom 3.4).

    What stands in a barrier's section is `stale_barrier`'s affair.
    """
    graph = case.graph
    for node in graph.nodes.values():
        if node.guarded or node.barrier:
            continue
        for name in node.reads.values():
            writer = graph.writer(name)
            if writer is None or writer is node or not graph.behind(node, writer) or fed_by(node, writer):
                continue
            message = (
                f"{node.name!r} reads {name!r} behind {writer.name!r}, which writes it but does not feed it "
                f"directly: it would see a later version than that of its item"
            )
            yield case.of(node, "from", "unfed-reader", message, feed_it(writer))


def replicated_state(case: Case) -> Findings:
    """A stage that depends on earlier items, or writes, has one lane and one job at a time."""
    for node in case.graph.nodes.values():
        stateful = node.cls.stateful
        if not (stateful or node.writes) or node.barrier or node.guarded:
            continue
        why = "its class is stateful" if stateful else "it writes a resource"
        if node.lanes > 1:
            key = "replicas" if node.spec.replicas > 1 else "on"
            message = f"{node.name!r} cannot be split over {node.lanes} lanes: {why}"
            remedy = "remove `replicas`" if key == "replicas" else "name one device"
            yield case.of(node, key, "replicated-state", message, remedy)
        elif stateful and node.spec.in_flight > 1 and _async(node):
            message = f"async jobs of {node.name!r} would run at the same time: {why}"
            yield case.of(node, "in_flight", "replicated-state", message, "remove `in_flight`")


def _async(node: Node) -> bool:
    run = inspect.unwrap(node.cls.run)
    return inspect.iscoroutinefunction(run) or inspect.isasyncgenfunction(run)


def resource_elsewhere(case: Case) -> Findings:
    """A stage on a device reads resources that are opened on that device too (one instance a device)."""
    graph = case.graph
    for node in graph.nodes.values():
        if not node.devices or "auto" in node.devices:
            continue
        for key, roles in (("reads", node.reads), ("writes", node.writes)):
            for name in roles.values():
                places = graph.resources[name].devices
                missing = [device for device in node.devices if device not in places]
                if not places or "auto" in places or not missing:
                    continue
                message = (
                    f"{node.name!r} runs on {', '.join(missing)}, where resource {name!r} is not opened "
                    f"(it is on {', '.join(places)})"
                )
                remedy = f"add the device to `on` of resource {name!r}"
                yield case.of(node, key, "resource-elsewhere", message, remedy)
