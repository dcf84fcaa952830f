"""Rules on how stages are linked: circles, joins that would wait for ever, types, shared inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeflow.diagnostic import suggest
from pipeflow.rules.case import Findings, listed
from pipeflow.stage import Kind
from pipeflow.typing_fit import NOTHING, fields_of, fits, mapping_value, signature_of, type_name

if TYPE_CHECKING:
    from pipeflow.diagnostic import Diagnostic
    from pipeflow.graph import Graph, Link, Node
    from pipeflow.rules.case import Case

__all__ = [
    "gathered_fan_in",
    "item_circle",
    "mutated_twice",
    "no_stages",
    "same_input",
    "step_stage",
    "type_mismatch",
    "unfed_join",
    "unordered_join",
]


def item_circle(case: Case) -> Findings:
    """Items never run in a circle (axiom 2.7)."""
    for circle in case.graph.circles():
        names = [name for name in case.graph.nodes if name in circle]  # the first in the file is named first
        start = circle.index(names[0])
        shown = [*circle[start:], *circle[:start], names[0]]
        link = next(i for i in case.graph.nodes[names[0]].inputs if i.source == shown[-2])
        message = f"items would run in a circle: {' > '.join(shown)}"
        remedy = "feed state back by a resource, which one stage `writes` and another `reads`"
        yield case.at(link.path, "cycle", message, remedy)


# Fan-ins that wait for one certain input (axiom 1.4) ---------------------------------------------------


def _waiting(node: Node) -> bool:
    """Named inputs wait for one number; a list in order takes turns. Ports of one stage need no waiting."""
    if len(node.inputs) < 2 or node.kind is Kind.GATHER or node.guarded or node.selects_ports:
        return False
    return node.joins or node.spec.ordered


def _pieces(graph: Graph, without: Node) -> dict[str, int]:
    """Stages to the number of the piece in which they lie once `without` is taken out."""
    piece: dict[str, int] = {without.name: -1}
    for start in graph.nodes:
        if start in piece:
            continue
        number = len(piece)
        todo = [start]
        piece[start] = number
        while todo:
            node = graph.nodes[todo.pop()]
            for name in (*(link.source for link in node.inputs), *node.consumers):
                if name not in piece:
                    piece[name] = number
                    todo.append(name)
    return piece


def _inputs_by_piece(graph: Graph, node: Node) -> list[list[Link]]:
    """Its inputs, those that something else links together in one group."""
    if len({graph.nodes[link.source].domain for link in node.inputs}) == 1:
        return [node.inputs]
    pieces = _pieces(graph, node)
    groups: dict[int, list[Link]] = {}
    for link in node.inputs:
        groups.setdefault(pieces[link.source], []).append(link)
    return list(groups.values())


def unfed_join(case: Case) -> Findings:
    """Inputs that something else links must share one numbering, or one waits while the other is full."""
    for node in case.graph.nodes.values():
        if not _waiting(node):
            continue
        yield from _other_ports(case, node)
        for links in _inputs_by_piece(case.graph, node):
            first, *rest = links
            domain = case.graph.nodes[first.source].domain
            other = next((i for i in rest if case.graph.nodes[i.source].domain != domain), None)
            if other is None:
                continue
            how = "joins them by number" if node.joins else "takes turns"
            where = case.graph.nodes[other.source].domain
            message = (
                f"{first.source!r} and {other.source!r} are numbered apart (by {domain!r} and {where!r}), "
                f"and {node.name!r} {how}: one would fill up while the other is waited for"
            )
            if node.joins:
                remedy = f"take both from stages that keep one numbering, so not across {where!r}"
            else:
                remedy = "add `ordered: false` to take what arrives first"
            yield case.at(other.path, "unfed-join", message, remedy)


def _other_ports(case: Case, node: Node) -> Findings:
    """An item leaves by one port, so two ports of one stage never have the same number."""
    seen: dict[str, str] = {}
    for link in node.inputs if node.joins else ():
        if link.port is None:
            continue
        port = seen.setdefault(link.source, link.port)
        if port != link.port:
            message = f"an item of {link.source!r} leaves by {port!r} or {link.port!r}, so these never meet"
            remedy = f"take either: `from: [{link.source}.{port}, {link.source}.{link.port}]`"
            yield case.at(link.path, "unfed-join", message, remedy)


def _same_domain(graph: Graph, name: str) -> set[str]:
    """A stage and those before it that keep its numbering."""
    domain = graph.nodes[name].domain
    found = {name}
    todo = [name]
    while todo:
        current = todo.pop()
        if current == domain:
            continue
        for link in graph.nodes[current].inputs:
            if link.source not in found and graph.nodes[link.source].domain == domain:
                found.add(link.source)
                todo.append(link.source)
    return found


def unordered_join(case: Case) -> Findings:
    """No unordered stage between a fork and its join: numbers would not meet."""
    graph = case.graph
    if all(node.spec.ordered for node in graph.nodes.values()):
        return
    for node in graph.nodes.values():
        if not _waiting(node):
            continue
        groups = [node.inputs] if node.joins else _inputs_by_piece(graph, node)
        for links in groups:
            ways = [_same_domain(graph, link.source) for link in links]
            shared = set[str].intersection(*ways)
            apart = set[str].union(*ways) - shared
            for name in graph.nodes:
                if name in apart and not graph.nodes[name].spec.ordered:
                    message = f"it gives its results as they are done, but {node.name!r} needs them in order"
                    remedy = f"remove `ordered: false`, or the other inputs of {node.name!r}"
                    yield case.of(graph.nodes[name], "ordered", "unordered-join", message, remedy)


def gathered_fan_in(case: Case) -> Findings:
    """A gather takes from one stage: its batches are of one numbering."""
    for node in case.graph.nodes.values():
        if node.kind is Kind.GATHER and len(node.inputs) > 1:
            message = f"{node.name!r} gathers, so it takes from one stage, not from {len(node.inputs)}"
            remedy = "bring them together in a one-to-one stage before it"
            yield case.at(("stages", node.name, "from"), "gathered-fan-in", message, remedy)


def same_input(case: Case) -> Findings:
    """A list takes each output once: an item there twice would be lost, or its work done twice."""
    for node in case.graph.nodes.values():
        if node.joins:
            continue
        seen: set[tuple[str, str | None]] = set()
        for link in node.inputs:
            output = (link.source, link.port)
            if output in seen:
                name = link.source if link.port is None else f"{link.source}.{link.port}"
                message = f"{node.name!r} takes {name!r} twice"
                yield case.at(link.path, "unknown-input", message, "name it once")
            seen.add(output)


# Types --------------------------------------------------------------------------------------------------


def type_mismatch(case: Case) -> Findings:
    """What a stage gives fits what the next one takes."""
    for node in case.graph.nodes.values():
        if not node.known or node.barrier or not node.inputs:
            continue
        takes = signature_of(node.cls, node.kind).takes
        if node.joins:
            if not node.guarded:
                yield from _named_inputs(case, node, takes)
            continue
        for link in node.inputs:
            yield from _one_input(case, node, link, takes)


def _one_input(case: Case, node: Node, link: Link, takes: Any) -> Findings:
    source = case.graph.nodes[link.source]
    if not source.known or (node.guarded and not (source.barrier or source.guarded)):
        return  # the second is what the barrier rules refuse
    gives = signature_of(source.cls, source.kind).gives
    if gives is NOTHING or gives is None:
        message = f"{source.name!r} returns nothing, so it has no items for {node.name!r}"
        yield case.at(link.path, "type-mismatch", message, "take them from the stage before it")
    elif not fits(gives, takes):
        message = f"{node.name!r} takes {type_name(takes)}, but {link.source!r} gives {type_name(gives)}"
        remedy = f"put a stage between them that makes {type_name(takes)} of {type_name(gives)}"
        yield case.at(link.path, "type-mismatch", message, remedy)


def _named_inputs(case: Case, node: Node, takes: Any) -> Findings:
    """A join gets a mapping from input names: compare it field by field."""
    fields = fields_of(takes)
    if fields is None:
        value = mapping_value(takes)
        if value is None and not fits(dict[str, Any], takes):
            path = ("stages", node.name, "from")
            message = (
                f"{node.name!r} takes {type_name(takes)}, but named inputs give a mapping from their names"
            )
            yield case.at(path, "type-mismatch", message, "take a TypedDict whose fields are the inputs")
            return
        for link in node.inputs:
            yield from _one_input(case, node, link, Any if value is None else value)
        return
    for link in node.inputs:
        name = link.name or ""
        if name in fields:
            yield from _one_input(case, node, link, fields[name])
        else:
            remedy = suggest(name, list(fields)) or f"its inputs are: {', '.join(fields)}"
            message = f"{node.name!r} has no input {name!r}"
            yield case.at(link.path, "type-mismatch", message, remedy, key=True)
    yield from _unfed_fields(case, node, takes, set(fields))


def _unfed_fields(case: Case, node: Node, takes: Any, fields: set[str]) -> Findings:
    optional: frozenset[str] = getattr(takes, "__optional_keys__", frozenset())
    given = set(node.spec.from_) if isinstance(node.spec.from_, dict) else set[str]()
    missing = sorted(fields - given - optional)
    if missing:
        path = ("stages", node.name, "from")
        message = f"{node.name!r} also takes {listed(missing)}"
        yield case.at(path, "type-mismatch", message, f"add `{missing[0]}: STAGE` to its `from`", key=True)


# Others -------------------------------------------------------------------------------------------------


def mutated_twice(case: Case) -> Findings:
    """A stage that writes into its input is that input's only reader (axiom 4.5)."""
    for node in case.graph.nodes.values():
        if not node.cls.mutates:
            continue
        for link in node.inputs:
            others = _other_readers(case, link)
            if others:
                message = f"{node.name!r} writes into items of {link.source!r}, also read by {listed(others)}"
                remedy = "let it write into a copy (and drop `mutates`), or give it a producer of its own"
                yield case.at(link.path, "mutates-shared", message, remedy)


def _other_readers(case: Case, link: Link) -> list[str]:
    """Stages that get the items of a link by another one; two ports of a stage share none."""
    found = [
        node.name
        for other, node in case.graph.links()
        if other is not link
        and other.source == link.source
        and (link.port is None or other.port is None or link.port == other.port)
    ]
    return list(dict.fromkeys(found))


def no_stages(case: Case) -> Findings:
    """A pipeline has at least one stage."""
    if not case.graph.nodes:
        yield case.at(("stages",), "no-stages", "the pipeline has no stages", "write at least one", key=True)


def step_stage(case: Case) -> Findings:
    """`run.step` names a stage of the file."""
    step = case.spec.run.step
    if step is not None and step not in case.graph.nodes:
        yield _unknown_step(case, step)


def _unknown_step(case: Case, step: str) -> Diagnostic:
    known = list(case.graph.nodes)
    remedy = suggest(step, known) or f"stages of this file: {', '.join(known)}"
    return case.at(("run", "step"), "unknown-input", f"there is no stage {step!r}", remedy)
