"""A file, checked as a whole: read, converted, linked, and held against every static rule.

    report = check("pipeline.yaml", overrides=["steps=50"])
    report.errors                 what keeps it from starting, sorted by place

Imports no torch, unless `here` asks this machine for its devices.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeflow import registry as names
from pipeflow.build import build
from pipeflow.document import from_dict, load
from pipeflow.rules import Case, run_rules
from pipeflow.validate import spec_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeflow.diagnostic import Diagnostic
    from pipeflow.document import Document
    from pipeflow.graph import Graph
    from pipeflow.spec import PipelineSpec

__all__ = ["Report", "check", "check_document", "check_here"]


@dataclass(frozen=True)
class Report:
    """What a check found. `spec` and `graph` are None where the file could not be read so far."""

    document: Document
    spec: PipelineSpec | None
    graph: Graph | None
    diagnostics: tuple[Diagnostic, ...]
    """Every finding, sorted by place."""

    @property
    def errors(self) -> list[Diagnostic]:
        """Findings that keep the pipeline from starting; warnings do not."""
        return [found for found in self.diagnostics if found.severity == "error"]


def check(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    here: bool = False,
    registry: names.Registry | None = None,
) -> Report:
    """Check a file. `env` defaults to `os.environ`, `registry` to the installed names.

    `here`: also ask this machine whether it has the devices (imports torch where one is a CUDA device).
    A missing file is a finding of the code `syntax`, as any other fault of reading.
    """
    return check_document(load(path, overrides=overrides, env=env), env=env, here=here, registry=registry)


def check_document(
    document: Document,
    *,
    env: Mapping[str, str] | None = None,
    here: bool = False,
    registry: names.Registry | None = None,
) -> Report:
    """Check a document that was read already."""
    spec, faults = spec_of(document)
    found = [*document.diagnostics, *faults, *document.misplaced_secrets()]
    graph = None
    if spec is not None:
        graph, faults = build(document, spec, registry or names.DEFAULT)
        found += faults
        found += run_rules(Case(document, spec, graph, os.environ if env is None else env, here))
    found = [document.scrub.finding(each) for each in found]
    order = sorted(found, key=lambda each: (each.file, each.line, each.column, each.code, each.path))
    return Report(document, spec, graph, tuple(order))


def check_here(
    source: str | os.PathLike[str] | Mapping[str, Any],
    overrides: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    registry: names.Registry | None = None,
) -> Report:
    """Check a file, or a mapping of the same shape, for a run on this machine."""
    if isinstance(source, (str, os.PathLike)):
        document = load(source, overrides=overrides, env=env)
    else:
        document = from_dict(source, overrides=overrides, env=env)
    return check_document(document, env=env, here=True, registry=registry)
