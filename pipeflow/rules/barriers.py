"""The barrier rules (axioms, section 6): what gives back device memory, or shows it to readers that the
engine cannot see, runs while all is quiet.

*Guarded* is a class trait, never a name. section(b): guarded stages reached from barrier b through guarded
ones. R1 every input of a guarded stage is a barrier or guarded, and exactly one barrier reaches it so. R2 a
barrier feeds guarded stages only, at least one. R3 its scope holds the devices of its section. R4 whoever
may launch in scope can be stopped. R5 what the section reads is of the barrier's item. R6 no replicas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeflow.graph import devices_of
from pipeflow.rules.case import Findings, listed
from pipeflow.stage import Stage

if TYPE_CHECKING:
    from pipeflow.graph import Graph, Node
    from pipeflow.rules.case import Case

__all__ = [
    "fed_by",
    "feed_it",
    "idle_barrier",
    "many_barriers",
    "narrow_scope",
    "release_without_barrier",
    "replicated_barrier",
    "stale_barrier",
    "unquiet_background",
    "work_beside_barrier",
]


def _covered(graph: Graph, node: Node) -> bool:
    """Whether a barrier (or a stage that was not found) stands on every way to a stage."""
    seen = {node.name}
    todo = [node]
    while todo:
        current = todo.pop()
        if current.barrier or not current.known:
            continue
        if not current.inputs:
            return False
        for link in current.inputs:
            if link.source not in seen:
                seen.add(link.source)
                todo.append(graph.nodes[link.source])
    return True


def release_without_barrier(case: Case) -> Findings:
    """R1: a way to a guarded stage on which no barrier stands."""
    for node in case.graph.guarded:
        what = f"{node.name!r} needs quiet devices"
        remedy = "put a stage with `uses: barrier` directly before it, and nothing between"
        if not node.inputs and node.spec.from_ is None:
            yield case.at(("stages", node.name, "uses"), "release-without-barrier",
                          f"{what}, but no barrier stands before it", remedy)  # fmt: skip
        for link in node.inputs:
            source = case.graph.nodes[link.source]
            if not (source.barrier or source.guarded) and not _covered(case.graph, source):
                message = f"{what}, but no barrier stands between it and {source.name!r}"
                yield case.at(link.path, "release-without-barrier", message, remedy)


def many_barriers(case: Case) -> Findings:
    """R1: exactly one barrier reaches a guarded stage. Reported at the first stage where they meet."""
    for node in case.graph.guarded:
        barriers = case.graph.barriers_of(node)
        before = _guarded_inputs(case.graph, node)
        met_before = any(len(case.graph.barriers_of(source)) > 1 for source in before)
        if len(barriers) > 1 and not met_before:
            names = [barrier.name for barrier in barriers]
            message = f"several barriers stand before {node.name!r}: {listed(names)}"
            remedy = "let one barrier wait for a join of what they wait for"
            yield case.of(node, "from", "many-barriers", message, remedy)


def _guarded_inputs(graph: Graph, node: Node) -> list[Node]:
    sources = [graph.nodes[link.source] for link in node.inputs]
    return [source for source in sources if source.guarded]


def work_beside_barrier(case: Case) -> Findings:
    """R1 and R2: unguarded work between a barrier and what it guards, or started by it beside that."""
    graph = case.graph
    for node in graph.nodes.values():
        if not node.known:
            continue
        for link in node.inputs:
            source = graph.nodes[link.source]
            if node.guarded and not (source.barrier or source.guarded) and source.known:
                if _covered(graph, source):
                    message = f"{source.name!r} works between a barrier and {node.name!r}, which it guards"
                    remedy = f"feed {node.name!r} by the barrier, {source.name!r} by what feeds the barrier"
                    yield case.at(link.path, "work-beside-barrier", message, remedy)
            elif source.barrier and not node.guarded and _guards_now(graph, source):
                message = f"barrier {source.name!r} would start {node.name!r} beside what it guards"
                remedy = f"feed {node.name!r} by what feeds {source.name!r}, or by the last guarded stage"
                yield case.at(link.path, "work-beside-barrier", message, remedy)


def idle_barrier(case: Case) -> Findings:
    """R2: a barrier that guards nothing. Where only work stands between, `work_beside_barrier` says so."""
    for barrier in case.graph.barriers:
        if not _guards_later(case.graph, barrier):
            message = f"{barrier.name!r} stops the devices, but guards nothing"
            remedy = (
                "remove it: the order of items needs no barrier; only stages such as release_cache or a "
                "weight broadcast do"
            )
            yield case.at(("stages", barrier.name), "idle-barrier", message, remedy, key=True)


def _guards_now(graph: Graph, barrier: Node) -> bool:
    return any(graph.nodes[name].guarded for name in barrier.consumers)


def _guards_later(graph: Graph, barrier: Node) -> bool:
    """Whether a guarded (or unknown) stage is reached without coming by another barrier."""
    seen: set[str] = set()
    todo = list(barrier.consumers)
    while todo:
        name = todo.pop()
        node = graph.nodes[name]
        if node.guarded or not node.known:
            return True
        if name not in seen and not node.barrier:
            seen.add(name)
            todo.extend(node.consumers)
    return False


# Scope ---------------------------------------------------------------------------------------------------


def _scope(case: Case, barrier: Node) -> set[str] | None:
    """Devices whose launches it holds; None: all."""
    names = barrier.spec.scope
    if names is None or names == "all" or (isinstance(names, list) and "all" in names):
        return None
    return set(devices_of(names, case.spec.devices))


def narrow_scope(case: Case) -> Findings:
    """R3: the scope has the devices of the section and its resources; with a release, all of the process."""
    graph = case.graph
    for barrier in graph.barriers:
        scope = _scope(case, barrier)
        if scope is None:
            continue
        section = graph.section(barrier)
        releasing = next((node.name for node in section if node.cls.releases), None)
        if releasing is not None:
            needed = graph.devices()
            why = f"{releasing!r} frees memory on every device of the process"
        else:
            needed = {device for node in section for device in _touched(graph, node)}
            why = f"what it guards ({listed([node.name for node in section])}) works there" if section else ""
        missing = sorted(needed - scope)
        if missing:
            message = f"its scope lacks {', '.join(missing)}: {why}"
            path = ("stages", barrier.name, "scope")
            yield case.at(path, "narrow-barrier", message, "remove `scope`, which then is `all`, or add them")


def _touched(graph: Graph, node: Node) -> set[str]:
    found = set(node.devices)
    for name in (*node.reads.values(), *node.writes.values()):
        resource = graph.resources[name]
        found |= set(resource.devices) or _users(graph, name)
    return found


def _users(graph: Graph, resource: str) -> set[str]:
    """Devices of all stages that lease a resource whose own place the file leaves open."""
    return {
        device
        for node in graph.nodes.values()
        if resource in (*node.reads.values(), *node.writes.values())
        for device in node.devices
    }


def unquiet_background(case: Case) -> Findings:
    """R4: whoever may launch in scope is a lane, or says `background` and joins that work in `quiesce()`."""
    if not case.graph.barriers:
        return
    for node in case.graph.nodes.values():
        if not node.cls.background or "quiesce" in _own(node.cls):
            continue
        for barrier in case.graph.barriers:
            scope = _scope(case, barrier)
            if scope is None or not node.devices or scope & set(node.devices):
                message = (
                    f"{node.name!r} starts work outside its lane, and its class has no `quiesce()` by which "
                    f"barrier {barrier.name!r} could wait for it"
                )
                remedy = f"write `quiesce(self)` in {node.cls.__name__}, which joins that work"
                yield case.at(("stages", node.name, "uses"), "unquiet-background", message, remedy)
                break


def _own(cls: type) -> set[str]:
    """Names that a class or its bases define, those of `Stage` itself left out."""
    return {name for base in cls.__mro__ if base not in (Stage, object) for name in vars(base)}


# What the section sees -----------------------------------------------------------------------------------


def fed_by(node: Node, writer: Node) -> bool:
    """Whether each of its items comes with one of the writer's: by it alone, or by a join with it."""
    sources = [link.source for link in node.inputs]
    return writer.name in sources if node.joins else bool(sources) and set(sources) == {writer.name}


def feed_it(writer: Node) -> str:
    """The remedy of a stage that `fed_by` says no to."""
    return f"write `from: {writer.name}`, or join: `from: {{step: {writer.name}, ..}}`"


def stale_barrier(case: Case) -> Findings:
    """R5: if the section reads what w writes, the barrier is fed by w alone or by a join with w."""
    graph = case.graph
    for barrier in graph.barriers:
        section = graph.section(barrier)
        inside = {node.name for node in section}
        told: set[str] = set()
        for node in section:
            for name in node.reads.values():
                writer = graph.writer(name)
                if writer is None or writer.name in inside or writer.name in told or fed_by(barrier, writer):
                    continue
                if any(not graph.nodes[link.source].known for link in barrier.inputs):
                    continue
                told.add(writer.name)
                message = (
                    f"{node.name!r} behind it reads {name!r}, which {writer.name!r} writes; not fed by "
                    f"{writer.name!r}, it could show a half-written or another version"
                )
                yield case.of(barrier, "from", "stale-barrier", message, feed_it(writer))


def replicated_barrier(case: Case) -> Findings:
    """R6: no replicas of a barrier or guarded stage."""
    for node in case.graph.nodes.values():
        if not (node.barrier or node.guarded) or node.lanes == 1:
            continue
        key = "replicas" if node.spec.replicas > 1 else "on"
        what = "a barrier" if node.barrier else "what a barrier guards"
        message = f"{what} runs once for all, but {node.name!r} would have {node.lanes} lanes"
        remedy = "remove `replicas`" if key == "replicas" else "name one device"
        yield case.of(node, key, "barrier-in-replica", message, remedy)
