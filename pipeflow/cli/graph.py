"""`pipeflow graph`: a pipeline as text, Mermaid or DOT."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from pipeflow.cli.common import counted, pipeline_file, show, valid_overrides

if TYPE_CHECKING:
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


def as_text(graph: Graph) -> str:
    """A line a stage, producers first; then a line a resource."""
    nodes = [graph.nodes[name] for name in graph.order]
    rows = [(node.name, node.spec.uses, node.kind.value, "  ".join(_details(node))) for node in nodes]
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
    for node in graph.nodes.values():
        lines += [f"    {resource[name]} -.-> {stage[node.name]}" for name in node.reads.values()]
        lines += [f"    {stage[node.name]} -.-> {resource[name]}" for name in node.writes.values()]
    return "\n".join(lines) + "\n"


def as_dot(graph: Graph) -> str:
    """For Graphviz."""
    lines = ["digraph pipeline {", "  node [shape=box];"]
    for name in graph.order:
        node = graph.nodes[name]
        shape = ", shape=octagon" if node.barrier else ", shape=box3d" if node.guarded else ""
        lines.append(f'  "{name}" [label="{name}\\n{_quoted(node.spec.uses)}"{shape}];')
    lines += [f'  "resource {name}" [label="{name}", shape=cylinder];' for name in graph.opening]
    for source, target, label in _edges(graph):
        extra = f' [label="{label}"]' if label else ""
        lines.append(f'  "{source}" -> "{target}"{extra};')
    for node in graph.nodes.values():
        lines += [f'  "resource {name}" -> "{node.name}" [style=dashed];' for name in node.reads.values()]
        lines += [f'  "{node.name}" -> "resource {name}" [style=dashed];' for name in node.writes.values()]
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
