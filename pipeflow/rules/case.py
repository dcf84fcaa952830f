"""What a rule looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from pipeflow.build import report
from pipeflow.diagnostic import Diagnostic

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeflow.document import Document
    from pipeflow.graph import Graph, Node, Path
    from pipeflow.spec import PipelineSpec

__all__ = ["Case", "Findings", "Rule", "listed"]


@dataclass(frozen=True)
class Case:
    """A file, its graph, and the machine: `env` is the environment, `here` allows to ask for devices."""

    document: Document
    spec: PipelineSpec
    graph: Graph
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    here: bool = False

    def at(
        self, path: Path, code: str, message: str, remedy: str, *, key: bool = False, warning: bool = False
    ) -> Diagnostic:
        """A finding at a path; `key` points at the key instead of its value."""
        return report(self.document, path, code, message, remedy, key=key, warning=warning)

    def of(self, node: Node, key: str, code: str, message: str, remedy: str) -> Diagnostic:
        """A finding at a key of a stage; at `uses` where the file does not write that key."""
        path: Path = ("stages", node.name, key)
        if self.document.node(path) is None:
            path = ("stages", node.name, "uses")
        return self.at(path, code, message, remedy)


Findings: TypeAlias = Iterator[Diagnostic]
Rule: TypeAlias = Callable[[Case], Findings]


def listed(names: list[str] | tuple[str, ...]) -> str:
    """`'a', 'b' and 'c'`"""
    quoted = [repr(name) for name in names]
    return " and ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)
