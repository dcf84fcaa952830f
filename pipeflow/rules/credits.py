"""Rules on queues that keep lanes idle. A job starts only with a credit for its output on every out-edge."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeflow.stage import Kind

if TYPE_CHECKING:
    from pipeflow.graph import Node
    from pipeflow.rules.case import Case, Findings

__all__ = ["idle_lanes"]


def idle_lanes(case: Case) -> Findings:
    """More jobs in flight than items may be alive behind the stage: the rest never start together."""
    for node in case.graph.nodes.values():
        jobs = max(1, len(node.devices)) * node.spec.replicas * node.spec.in_flight
        if node.kind is Kind.SOURCE or node.guarded or node.barrier or jobs == 1:
            continue
        for name in node.consumers:
            consumer = case.graph.nodes[name]
            own = consumer.spec.queue
            items = (own or case.spec.run.queue).items
            if consumer.guarded or items >= jobs:
                continue
            place = _place(case, consumer)
            message = (
                f"at most {items} items may be alive between {node.name!r} and {name!r}, so of its {jobs} "
                f"jobs (devices x replicas x in_flight) {jobs - items} wait for a credit"
            )
            remedy = f"write `queue: {{items: {jobs}}}` or more"
            yield case.at(place, "idle-lanes", message, remedy, warning=True)


def _place(case: Case, consumer: Node) -> tuple[str | int, ...]:
    for path in (("stages", consumer.name, "queue", "items"), ("run", "queue", "items")):
        if case.document.node(path) is not None:
            return path
    return ("stages", consumer.name, "uses")
