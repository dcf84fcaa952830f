"""Rules on files that a program feeds: what a submit needs to find its result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeflow.stage import Kind

if TYPE_CHECKING:
    from pipeflow.rules.case import Case, Findings

__all__ = ["split_answer"]


def split_answer(case: Case) -> Findings:
    """Between an input and an output no stage may make several items of one: a submit has one result."""
    graph = case.graph
    inputs = [node for node in graph.nodes.values() if node.cls.is_input]
    for output in [node for node in graph.nodes.values() if node.cls.is_output]:
        for node in graph.upstream(output):
            if node.kind is Kind.FLAT and any(graph.behind(node, source) for source in inputs):
                yield case.at(
                    ("stages", node.name),
                    "split-answer",
                    f"stage {node.name!r} makes several items of one on the way to {output.name!r}, "
                    "so a submit would not know which is its result",
                    "return one value that holds them all, or let the stage feed something else",
                )
