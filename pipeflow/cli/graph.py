"""`pipeflow graph`: a pipeline as text, Mermaid or DOT."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from pipeflow.cli.common import counted, pipeline_file, show, valid_overrides
from pipeflow.stage import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pipeflow.graph import Graph, Link, Node

__all__ = ["as_dot", "as_mermaid", "as_text", "command"]


@click.command("graph", short_help="Draw a pipeline.")
@click.argument("file", metavar="FILE")
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@click.option(
    "--format", "form", type=click.Choice(["text", "mermaid", "dot"]), default="text", show_default=True
)
def command(file: str, overrides: tuple[str, ...], form: str) -> None:
    """Draw a pipeline. Faults go to stderr (exit code 1), and what could be read is drawn all the same.

    \b
    pipeflow graph pipeline.yaml --format mermaid > pipeline.mmd
    pipeflow graph pipeline.yaml --format dot | dot -Tsvg > pipeline.svg
    """
    path, given = pipeline_file(file), valid_overrides(overrides)
    from pipeflow.check import check

    report = check(path, given)
    show(report.diagnostics, err=True)
    if report.graph is not None:
        draw = {"text": as_text, "mermaid": as_mermaid, "dot": as_dot}[form]
        click.echo(report.document.scrub(draw(report.graph)), nl=False)
    sys.exit(1 if report.errors else 0)


def _source(link: Link) -> str:
    port = f".{link.port}" if link.port is not None else ""
    name = f"{link.name}: " if link.name is not None else ""
    return f"{name}{link.source}{port}"


def _details(node: Node) -> list[str]:
    """What a line says after the kind."""
    spec = node.spec
    found: list[str] = []
    if node.inputs:
        every = f" (every {spec.every})" if (spec.every or 1) > 1 else ""
        found.append("from " + ", ".join(map(_source, node.inputs)) + every)
    if node.devices:
        found.append("on " + ", ".join(node.devices))
    if spec.replicas > 1:
        found.append(counted(spec.replicas, "replica"))
    found += [f"reads {name}" for name in node.reads.values()]
    found += [f"writes {name}" for name in node.writes.values()]
    return found


def _kind(graph: Graph, node: Node) -> str:
    """The kind's word. A one-to-one stage that nobody takes from is a sink, if it gives nothing; also if it
    does not say what it gives, unless that is the answer to a `submit`."""
    from pipeflow.typing_fit import NOTHING, signature_of

    if node.kind is not Kind.MAP or not node.known or node.consumers:
        return node.kind.value
    gives = signature_of(node.cls, node.kind).gives
    if gives is Any:
        unread = not any(each.cls.is_input for each in graph.upstream(node))
    else:
        unread = gives in (None, NOTHING)
    return "sink" if unread else node.kind.value


def as_text(graph: Graph) -> str:
    """A line a stage, producers first; then a line a resource."""
    nodes = [graph.nodes[name] for name in graph.order]
    rows = [(node.name, node.spec.uses, _kind(graph, node), "  ".join(_details(node))) for node in nodes]
    rows += [
        (each.name, each.spec.uses, "resource", f"on {', '.join(each.devices)}" if each.devices else "")
        for each in map(graph.resources.__getitem__, graph.opening)
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    lines = ["  ".join([*map(str.ljust, row[:3], widths), row[3]]).rstrip() for row in rows]
    return "".join(line + "\n" for line in lines)


def _edges(graph: Graph) -> list[tuple[str, str, str]]:
    """(from, to, label) of each edge; a source that could not be read is left out."""
    found: list[tuple[str, str, str]] = []
    for link, node in graph.links():
        labels = [link.port or "", link.name or "", f"every {node.spec.every}" if node.spec.every else ""]
        found.append((link.source, node.name, ", ".join(filter(None, labels))))
    return found


def _uses(graph: Graph, stage: Mapping[str, str], resource: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(from, to) of each read and write, in the drawing's own names of stages and resources."""
    for node in graph.nodes.values():
        yield from ((resource[name], stage[node.name]) for name in node.reads.values())
        yield from ((stage[node.name], resource[name]) for name in node.writes.values())


def as_mermaid(graph: Graph) -> str:
    """A flow chart. Stages are numbered, as Mermaid keeps words such as `end` to itself."""
    stage = {name: f"s{index}" for index, name in enumerate(graph.order)}
    resource = {name: f"r{index}" for index, name in enumerate(graph.opening)}
    lines = ["flowchart TD"]
    for name, key in stage.items():
        node = graph.nodes[name]
        left, right = ("{{", "}}") if node.barrier else ("[[", "]]") if node.guarded else ("[", "]")
        lines.append(f'    {key}{left}"{name}<br/>{node.spec.uses}"{right}')
    lines += [f'    {key}[("{name}")]' for name, key in resource.items()]
    for source, target, label in _edges(graph):
        arrow = f'-->|"{label}"|' if label else "-->"
        lines.append(f"    {stage[source]} {arrow} {stage[target]}")
    lines += [f"    {first} -.-> {second}" for first, second in _uses(graph, stage, resource)]
    return "\n".join(lines) + "\n"


def as_dot(graph: Graph) -> str:
    """For Graphviz."""
    stage = {name: name for name in graph.order}
    resource = {name: f"resource {name}" for name in graph.opening}
    lines = ["digraph pipeline {", "  node [shape=box];"]
    for name in graph.order:
        node = graph.nodes[name]
        shape = ", shape=octagon" if node.barrier else ", shape=box3d" if node.guarded else ""
        lines.append(f'  "{name}" [label="{name}\\n{_quoted(node.spec.uses)}"{shape}];')
    lines += [f'  "{key}" [label="{name}", shape=cylinder];' for name, key in resource.items()]
    for source, target, label in _edges(graph):
        extra = f' [label="{label}"]' if label else ""
        lines.append(f'  "{source}" -> "{target}"{extra};')
    lines += [f'  "{first}" -> "{second}" [style=dashed];' for first, second in _uses(graph, stage, resource)]
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
