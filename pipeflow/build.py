"""From a file's spec to its graph: classes found, options converted, links and roles resolved.

Every fault is found, each with its place; none stops the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from pipeflow import validate
from pipeflow.config import Config
from pipeflow.diagnostic import Diagnostic, suggest
from pipeflow.graph import Graph, Link, Node, ResourceNode, Unresolved, UnresolvedResource, devices_of
from pipeflow.nodes import MapNode, dotted
from pipeflow.registry import BrokenClass, RegistryError
from pipeflow.roles import assign
from pipeflow.spec import PipelineSpec, ResourceSpec, StageSpec
from pipeflow.stage import Kind, Resource, Stage, kind_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeflow.document import Document
    from pipeflow.graph import Path
    from pipeflow.registry import Registry

__all__ = ["build", "report"]

NAMED = 3
"""Of the others that one broken module concerns."""


def build(document: Document, spec: PipelineSpec, registry: Registry) -> tuple[Graph, list[Diagnostic]]:
    """The graph of a file, and what is wrong with names, options, links and roles."""
    builder = _Builder(document, spec, registry)
    return builder.graph(), builder.found


def report(
    document: Document,
    path: Path,
    code: str,
    message: str,
    remedy: str = "",
    *,
    key: bool = False,
    warning: bool = False,
) -> Diagnostic:
    """A finding at a path of the file; `key` points at the key instead of its value."""
    place = document.place(path, key=key)
    severity = "warning" if warning else "error"
    return Diagnostic.at(place, code, dotted(path), message, remedy, severity)


def _lost_stage(name: str) -> Node:
    return Node(name, StageSpec(uses=""), Unresolved, Config(), Kind.MAP, ())


def _lost_resource(name: str) -> ResourceNode:
    return ResourceNode(name, ResourceSpec(uses=""), UnresolvedResource, Config(), ())


@dataclass
class _Broken:
    """A class that cannot be had: who met it first, and who after it."""

    path: Path
    code: str
    error: RegistryError
    culprits: set[str]
    others: list[str] = field(default_factory=list[str])

    def message(self) -> str:
        """The error's, with the others: three by name."""
        if not self.others:
            return self.error.message
        more = len(self.others) - NAMED
        names = [*self.others[:NAMED], *([f"{more} more"] if more > 0 else [])]
        shown = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
        return f"{self.error.message} (the same for {shown})"


class _Builder:
    def __init__(self, document: Document, spec: PipelineSpec, registry: Registry) -> None:
        self.document = document
        self.spec = spec
        self.registry = registry
        self.found: list[Diagnostic] = []
        self._broken: list[_Broken] = []

    def graph(self) -> Graph:
        resources = [self._resource(name) for name in self.spec.resources]
        resources += [_lost_resource(name) for name in self._left_out("resources", self.spec.resources)]
        classes = {each.name: each.cls if each.known else None for each in resources}
        for each in resources:
            each.reads = self._roles(
                ("resources", each.name), each.spec.reads, each.cls.reads, classes, "reads", known=each.known
            )
        nodes = [self._stage(name) for name in self.spec.stages]
        nodes += [_lost_stage(name) for name in self._left_out("stages", self.spec.stages)]
        by_name = {node.name: node for node in nodes}
        for node in nodes:
            node.inputs = self._links(node, by_name)
            self._fill_roles(node, classes)
        for each in self._broken:
            self._report(each.path, each.code, each.message(), each.error.remedy)
        return Graph(nodes, resources)

    def _left_out(self, group: str, read: Mapping[str, Any]) -> list[str]:
        """Entries that could not be converted: they have their own findings; links to them are no fault."""
        node = self.document.node((group,))
        return [name for name in node.entries if name not in read] if isinstance(node, MapNode) else []

    def _report(self, path: Path, code: str, message: str, remedy: str = "", *, key: bool = False) -> None:
        self.found.append(report(self.document, path, code, message, remedy, key=key))

    # Classes and options -----------------------------------------------------------------------------

    def _resource(self, name: str) -> ResourceNode:
        spec = self.spec.resources[name]
        path: Path = ("resources", name)
        cls: type[Resource] = UnresolvedResource
        try:
            cls = self.registry.find_resource(spec.uses)
        except RegistryError as error:
            self._lacks(path, error, "resource")
        config = self._config(path, cls) if cls is not UnresolvedResource else Config()
        return ResourceNode(name, spec, cls, config, devices_of(spec.on, self.spec.devices))

    def _stage(self, name: str) -> Node:
        spec = self.spec.stages[name]
        path: Path = ("stages", name)
        cls, kind = self._stage_class(path, spec)
        config = self._config(path, cls) if cls is not Unresolved else Config()
        on = "auto" if spec.on is None and cls.device else spec.on
        return Node(name, spec, cls, config, kind, devices_of(on, self.spec.devices))

    def _stage_class(self, path: Path, spec: StageSpec) -> tuple[type[Stage[Any, Any]], Kind]:
        try:
            cls = self.registry.find_stage(spec.uses)
        except RegistryError as error:
            self._lacks(path, error, "stage")
            return Unresolved, Kind.MAP
        try:
            return cls, kind_of(cls)
        except TypeError as error:
            name = f"{cls.__module__}:{cls.__qualname__}"
            self._lacks(path, BrokenClass(str(error), "correct the class", (name,)), "stage")
            return Unresolved, Kind.MAP

    def _lacks(self, path: Path, error: RegistryError, what: str) -> None:
        """A class that cannot be had. What is not the name's own fault is told once for all it concerns."""
        for known in self._broken:
            if not known.culprits.isdisjoint(error.culprits):
                known.culprits.update(error.culprits)
                known.others.append(dotted(path))
                return
        code = f"{'broken' if isinstance(error, BrokenClass) else 'unknown'}-{what}"
        self._broken.append(_Broken((*path, "uses"), code, error, set(error.culprits)))

    def _config(self, path: Path, cls: type[Stage[Any, Any]] | type[Resource]) -> msgspec.Struct:
        node = self.document.node((*path, "with"))
        if node is None:  # missing options are then told at `uses`
            node = MapNode({}, self.document.place((*path, "uses")))
        where = dotted((*path, "with"))
        value, faults = validate.convert(node, cls.Config, path=where, folder=self.document.folder)
        self.found.extend(faults)
        return value if isinstance(value, msgspec.Struct) else Config()

    # Links ---------------------------------------------------------------------------------------------

    def _links(self, node: Node, nodes: Mapping[str, Node]) -> list[Link]:
        given = node.spec.from_
        path: Path = ("stages", node.name, "from")
        if given is None:
            if node.known and node.kind is not Kind.SOURCE:
                remedy = "add `from: STAGE`; only a source has no input"
                self._report(("stages", node.name), "unknown-input", "it takes items, but has no `from`",
                             remedy, key=True)  # fmt: skip
            return []
        if node.kind is Kind.SOURCE:
            self._report(path, "unknown-input", "it is a source, so it takes no items",
                         "remove `from`, or write a stage whose `run` takes an item", key=True)  # fmt: skip
            return []
        if isinstance(given, str):
            entries: list[tuple[str | None, str, Path]] = [(None, given, path)]
        elif isinstance(given, dict):
            entries = [(name, text, (*path, name)) for name, text in given.items()]
        else:
            entries = [(None, text, (*path, index)) for index, text in enumerate(given)]
        if not entries:
            self._report(path, "unknown-input", "`from` names no stage", "name at least one")
        links = [self._link(name, text, where, nodes) for name, text, where in entries]
        return [link for link in links if link is not None]

    def _link(self, name: str | None, text: str, path: Path, nodes: Mapping[str, Node]) -> Link | None:
        source, _, port = text.partition(".")
        if source not in nodes:
            near = suggest(source, list(nodes))
            self._report(path, "unknown-input", f"there is no stage {source!r}", near)
            return None
        producer = nodes[source]
        if not port:
            return Link(source, None, name, path)
        if producer.configured and port not in producer.ports:
            ports = producer.ports
            remedy = suggest(port, list(ports)) or (f"its outputs are: {', '.join(ports)}" if ports else
                                                    f"write `{source}`: it has one output")  # fmt: skip
            self._report(path, "unknown-input", f"stage {source!r} has no output {port!r}", remedy)
            return None
        return Link(source, port, name, path)

    # Roles ---------------------------------------------------------------------------------------------

    def _fill_roles(self, node: Node, classes: Mapping[str, type[Resource] | None]) -> None:
        path: Path = ("stages", node.name)
        cls = node.cls
        anything = not node.known or not (cls.reads or cls.writes)
        node.writes = self._roles(
            path, node.spec.writes, cls.writes, classes, "writes", known=node.known, anything=anything
        )
        node.reads = self._roles(
            path, node.spec.reads, cls.reads, classes, "reads",
            known=node.known, anything=anything, elsewhere=tuple(node.writes),
        )  # fmt: skip

    def _roles(
        self,
        path: Path,
        given: str | list[str] | dict[str, str] | None,
        declared: Mapping[str, type[Resource]],
        classes: Mapping[str, type[Resource] | None],
        verb: str,
        *,
        known: bool,
        anything: bool = False,
        elsewhere: tuple[str, ...] = (),
    ) -> dict[str, str]:
        roles = assign(
            given,
            declared,
            classes,
            verb=verb,
            open_roles=anything or not known,
            filled_elsewhere=elsewhere,
        )
        for fault in roles.faults:
            if given is None:
                where: Path = (*path, "uses")
            else:
                where = (*path, verb) if fault.key is None else (*path, verb, fault.key)
            self._report(where, fault.code, fault.message, fault.remedy)
        return roles.filled
