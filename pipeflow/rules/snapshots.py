"""Rules on `snapshot: true`: something to copy, by a class that can, and nothing that needs quiet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeflow.stage import Kind, Resource

if TYPE_CHECKING:
    from pipeflow.graph import Graph, Node
    from pipeflow.rules.case import Case, Findings

__all__ = ["idle_snapshot", "no_snapshot"]


def idle_snapshot(case: Case) -> Findings:
    """Where it has no meaning: nothing written is read, or what works on a copy writes or frees memory."""
    graph = case.graph
    for node in graph.nodes.values():
        if not node.spec.snapshot or not node.known:
            continue
        why = _useless(graph, node)
        if why is not None:
            path = ("stages", node.name, "snapshot")
            yield case.at(
                path, "misplaced-key", f"`snapshot` has no meaning here: {why[0]}", why[1], key=True
            )


def _useless(graph: Graph, node: Node) -> tuple[str, str] | None:
    if node.guarded:
        return "it runs when its barrier says", "write it at the barrier, for all that this guards"
    if node.kind is Kind.SOURCE:
        return "a source is one call, which would see its first copy for ever", "remove `snapshot`"
    readers = graph.section(node) if node.barrier else [node]
    for reader in readers:
        if not reader.known:
            return None
        if reader.writes:
            written = next(iter(reader.writes.values()))
            return f"{reader.name!r} writes {written!r}, which nobody may read meanwhile", "remove `snapshot`"
        if node.barrier and reader.cls.releases:
            return (
                f"{reader.name!r} frees memory, which needs quiet devices",
                "put it behind a barrier of its own",
            )
    if not any(_written(graph, reader) for reader in readers):
        return "nothing that is read here is written by any stage", "remove `snapshot`"
    return None


def _written(graph: Graph, node: Node) -> list[str]:
    return [name for name in node.reads.values() if graph.writer(name) is not None]


def no_snapshot(case: Case) -> Findings:
    """A resource is copied by its own class."""
    graph = case.graph
    for node in graph.nodes.values():
        if not node.spec.snapshot:
            continue
        for reader in graph.section(node) if node.barrier else [node]:
            for name in _written(graph, reader):
                cls = graph.resources[name].cls
                if graph.resources[name].known and cls.snapshot is Resource.snapshot:
                    message = (
                        f"{reader.name!r} reads {name!r}, and {cls.__name__} does not say how it is copied"
                    )
                    remedy = f"write `snapshot(self, value)` in {cls.__name__}, or remove `snapshot`"
                    path = ("stages", node.name, "snapshot")
                    yield case.at(path, "no-snapshot", message, remedy)
