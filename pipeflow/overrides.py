"""Overrides from the command line: `key=value`, the value a YAML value, the key dotted.

steps=50                         params.steps, which the file must have
params.optimizer.lr=1e-4         the same, in full, nested
train.lr=1e-4                    an option (`with`) of the stage `train`, which the file need not have set
stages.train.with.lr=1e-4        the same, in full (also train.with.lr)
resources.target.with.model=...  an option of a resource
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from pipeflow.compose import compose
from pipeflow.diagnostic import Diagnostic, Place, suggest
from pipeflow.nodes import Entry, ListNode, MapNode, Node, Scalar

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["apply_overrides"]

_FORMS = "write NAME=value for a parameter, or STAGE.OPTION=value"


class _Refused(Exception):
    def __init__(self, message: str, remedy: str = "", code: str = "unknown-key") -> None:
        self.message = message
        self.remedy = remedy
        self.code = code


def apply_overrides(root: MapNode, overrides: Sequence[str]) -> tuple[MapNode, list[Diagnostic]]:
    """The tree with each override set, in turn (a later one wins), and the faults of all that were refused.

    Values that an override sets carry the place `override 'key=value'`, so later faults name it.
    """
    found: list[Diagnostic] = []
    for override in overrides:
        place = Place(f"override {override!r}", 0, 0)
        key, equals, text = override.partition("=")
        key = key.strip()
        try:
            if not equals:
                raise _Refused("an override needs an `=`", _FORMS, "syntax")
            if not key or "" in key.split("."):
                raise _Refused("an override needs a key before the `=`", _FORMS, "syntax")
            value, faults = compose(text, file=place.file, folder=None, place=place)
            if faults:
                found += [structs.replace(f, path=f"{key}.{f.path}" if f.path else key) for f in faults]
                continue
            path = _target(root, key)
            root = _set(root, path, value or Scalar(None, place, plain=True), place)
        except _Refused as refused:
            found.append(Diagnostic.at(place, refused.code, key, refused.message, refused.remedy))
    return root, found


def _names(root: MapNode, section: str) -> dict[str, Node]:
    node = root.get(section)
    return {name: entry.node for name, entry in node.entries.items()} if isinstance(node, MapNode) else {}


def _target(root: MapNode, key: str) -> tuple[str, ...]:
    """The path that an override's key means."""
    head, *rest = key.split(".")
    params, stages = _names(root, "params"), _names(root, "stages")
    if rest and head == "params":
        return _parameter(root, ("params", *rest))
    if rest and head in ("stages", "resources"):
        return _in_full(root, head, rest)
    if rest and head in stages:
        if isinstance(params.get(head), MapNode):
            remedy = f"write params.{key} or stages.{head}.with.{'.'.join(rest)}"
            raise _Refused(f"{head!r} is a parameter and a stage", remedy)
        option = rest[1:] if rest[0] == "with" else rest
        if not option:
            raise _Refused(f"{key!r} names no option", f"write {head}.OPTION=value")
        return ("stages", head, "with", *option)
    if head in params:
        return _parameter(root, ("params", head, *rest))
    if head in stages:
        raise _Refused(f"{head!r} is a stage, not a parameter", f"write {head}.OPTION=value")
    raise _unknown(head, rest, list(params), list(stages), root)


def _unknown(head: str, rest: list[str], params: list[str], stages: list[str], root: MapNode) -> _Refused:
    what = "parameter or stage" if rest else "parameter"
    near = suggest(head, [*stages, *params] if rest else params)
    if head in root.entries:
        near = "an override reaches only params, and the `with` of stages and resources"
    if not near:
        near = f"parameters: {', '.join(params[:12])}" if params else "the file has no params"
    return _Refused(f"no {what} is called {head!r}", near)


def _in_full(root: MapNode, section: str, rest: list[str]) -> tuple[str, ...]:
    known = _names(root, section)
    name, *option = rest
    kind = section[:-1]
    if name not in known:
        near = suggest(name, list(known)) or f"{section}: {', '.join(list(known)[:12]) or 'none'}"
        raise _Refused(f"no {kind} is called {name!r}", near)
    if len(option) < 2 or option[0] != "with":
        message = f"an override reaches only the options (`with`) of a {kind}"
        raise _Refused(message, f"write {section}.{name}.with.OPTION=value")
    return (section, name, *option)


def _parameter(root: MapNode, path: tuple[str, ...]) -> tuple[str, ...]:
    """The path itself, all of which must be there: a parameter that nothing uses is a typing error."""
    node: Node = root
    for i, name in enumerate(path):
        if not isinstance(node, MapNode):
            raise _Refused(f"{'.'.join(path[:i])} is {_kind(node)}, so it has no key {name!r}")
        child = node.get(name)
        if child is None:
            known = list(node.entries) if i else []
            near = suggest(name, known) or (
                f"known: {', '.join(known[:12])}" if known else "add it to the file"
            )
            raise _Refused(f"there is no {'.'.join(path[: i + 1])}", near)
        node = child
    return path


def _set(
    node: MapNode, path: tuple[str, ...], value: Node, place: Place, done: tuple[str, ...] = ()
) -> MapNode:
    """A copy with one value set. Copied along the path, since an alias may share a mapping with others."""
    name, *rest = path
    old = node.entries.get(name)
    here = (*done, name)
    if rest:
        child = MapNode({}, place) if old is None else old.node
        if isinstance(child, Scalar) and child.value is None:
            child = MapNode({}, place)  # `with:` with nothing after it
        if not isinstance(child, MapNode):
            message = f"{'.'.join(here)} is {_kind(child)}, so it has no key {rest[0]!r}"
            raise _Refused(message, "override what it refers to" if _refers(child) else "")
        value = _set(child, tuple(rest), value, place, here)
    entry = Entry(old.key_place if old is not None and rest else place, value)
    return MapNode({**node.entries, name: entry}, node.place)


def _refers(node: Node) -> bool:
    return isinstance(node, Scalar) and isinstance(node.value, str) and "${" in node.value


def _kind(node: Node) -> str:
    if isinstance(node, MapNode):
        return "a mapping"
    return "a list" if isinstance(node, ListNode) else "a reference" if _refers(node) else "a single value"
