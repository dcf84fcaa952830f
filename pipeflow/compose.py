"""YAML text -> nodes. PyYAML (its C parser where there is one) finds the nodes; what they mean is ours."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import yaml

from pipeflow.diagnostic import Diagnostic, Place
from pipeflow.nodes import Entry, ListNode, MapNode, Node, Path_, Scalar, dotted
from pipeflow.scalars import Plain, read_plain, write

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["compose", "expanded_too_far", "from_python"]

MAX_DEPTH = 64
MAX_SHOWN = 400
"""Characters of a source line that a message may show; a longer one is left out."""
MAX_NODES = 200_000
"""Nodes of a file with every alias and reference written out: a guard against files that explode."""

_CONTROL = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_PLAIN, _QUOTED = "plain", "quoted"

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Nodes(_Loader):
    """Composes only. Tags come back as `_PLAIN` or `_QUOTED`; any other tag was written in the file."""

    def descend_resolver(self, current_node: object, current_index: object) -> None:
        pass

    def ascend_resolver(self) -> None:
        pass

    def resolve(self, kind: object, value: object, implicit: Any) -> str:
        return _QUOTED if isinstance(implicit, tuple) and not implicit[0] else _PLAIN


def compose(
    text: str, *, file: str, folder: Path | None, place: Place | None = None
) -> tuple[Node | None, list[Diagnostic]]:
    """The root node, or None with the reason. `place` (of an override) stands for every place in it.

    Faults: one `syntax` where YAML itself gives up; else every one of `duplicate-key`, `wrong-type` (a key
    that is not text) and `syntax` (tags, merge keys, an alias of its own anchor, nesting beyond 64).
    """
    composer = _Composer(text, file, folder, place)
    control = _CONTROL.search(text)
    if control:
        at = composer.offset(control.start())
        message = f"the control character U+{ord(control[0]):04X} must not stand in a YAML file"
        return None, [Diagnostic.at(at, "syntax", "", message, r'write it as an escape in quotes: "\u0007"')]
    try:
        loader = _Nodes(text)
        try:
            raw: Any = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        return None, [composer.syntax(error)]
    except (yaml.YAMLError, RecursionError) as error:
        return None, [Diagnostic.at(composer.at(0, 0), "syntax", "", f"not YAML: {error}")]
    if raw is None:
        return None, []
    return composer.node(raw, ()), composer.found


class _Composer:
    def __init__(self, text: str, file: str, folder: Path | None, place: Place | None) -> None:
        self.found: list[Diagnostic] = []
        self._text = text
        self._lines = text.splitlines()
        self._file = file
        self._folder = folder
        self._fixed = place
        self._made: dict[int, Node] = {}
        self._open: set[int] = set()

    def at(self, line: int, column: int) -> Place:
        """The place of a position counted from 0."""
        if self._fixed is not None:
            return self._fixed
        shown = self._lines[line] if line < len(self._lines) else ""
        return Place(self._file, line + 1, column + 1, shown if len(shown) <= MAX_SHOWN else "")

    def offset(self, offset: int) -> Place:
        before = self._text[:offset]
        line = before.count("\n")
        return self.at(line, offset - (before.rfind("\n") + 1))

    def node(self, raw: Any, path: Path_) -> Node:
        """The node of a PyYAML node. An alias gives the same node again."""
        made = self._made.get(id(raw))
        if made is not None:
            return made
        mark = raw.start_mark
        place = self.at(mark.line, mark.column)
        if raw.tag is not _PLAIN and raw.tag is not _QUOTED:
            self._fault(place, path, f"the tag {_tag(raw.tag)} is not allowed", "leave it out")
        if isinstance(raw, yaml.ScalarNode):
            return self._scalar(raw, place, path)
        if id(raw) in self._open or len(path) > MAX_DEPTH:
            if id(raw) in self._open:
                self._fault(place, path, "the alias stands inside its own anchor", "write the value out")
            else:
                self._fault(place, path, f"nested deeper than {MAX_DEPTH} levels", "flatten it")
            return Scalar(None, place, broken=True)
        self._open.add(id(raw))
        if isinstance(raw, yaml.MappingNode):
            made = MapNode(self._entries(raw, path), place)
        else:
            made = ListNode([self.node(item, (*path, i)) for i, item in enumerate(raw.value)], place)
        self._open.discard(id(raw))
        self._made[id(raw)] = made
        return made

    def _scalar(self, raw: Any, place: Place, path: Path_) -> Scalar:
        text: str = raw.value
        plain = not raw.style and raw.tag is _PLAIN
        start = raw.start_mark.index
        # Neither parser says that a plain scalar bears the tag `!`, which would make it text.
        marked = plain and self._text[start : start + 1] in ("!", "&")
        if marked and any(word[0] == "!" for word in self._text[start : raw.end_mark.index].split()[:2]):
            self._fault(place, path, "the tag ! is not allowed", "leave it out; quotes make text")
        made = Scalar(read_plain(text) if plain else text, place, text, plain, self._folder)
        self._made[id(raw)] = made
        return made

    def _entries(self, raw: Any, path: Path_) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        for raw_key, raw_value in raw.value:
            key, place = self._key(raw_key, path)
            node = self.node(raw_value, (*path, key))
            first = entries.get(key)
            if first is None:
                entries[key] = Entry(place, node)
                continue
            message = f"the key {key!r} stands here twice, first at {first.key_place}"
            self._fault(place, (*path, key), message, "keep one of them", "duplicate-key")
        return entries

    def _key(self, raw: Any, path: Path_) -> tuple[str, Place]:
        place = self.at(raw.start_mark.line, raw.start_mark.column)
        if not isinstance(raw, yaml.ScalarNode):
            self._fault(place, path, "a key must be text, not a list or mapping", "", "wrong-type")
            return f"?{place.line}:{place.column}", place
        key: str = raw.value
        if raw.tag is not _PLAIN and raw.tag is not _QUOTED:
            self._fault(place, (*path, key), f"the tag {_tag(raw.tag)} is not allowed", "leave it out")
        elif not raw.style:
            if key == "<<":
                self._fault(
                    place, path, "merge keys (`<<`) are not part of this format",
                    "put what is shared into another file and name it with `extends: FILE` at the top",
                )  # fmt: skip
            elif not isinstance(read_plain(key), str):
                message = f"a key must be text, and {key or 'an empty one'} is not"
                self._fault(place, (*path, key), message, f'quote it: "{key}"', "wrong-type")
        if "${" in key:
            self._fault(place, (*path, key), "a key cannot hold a reference `${...}`", "write the key out")
        return key, place

    def _fault(self, place: Place, path: Path_, message: str, remedy: str, code: str = "syntax") -> None:
        self.found.append(Diagnostic.at(place, code, dotted(path), message, remedy))

    def syntax(self, error: yaml.MarkedYAMLError) -> Diagnostic:
        """PyYAML's complaint, in words that name the usual causes."""
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line, mark.column) if mark else (0, 0)
        place = self.at(line, column)
        problem = error.problem or str(error)
        message, remedy = self._explain(problem, line, column)
        opened = error.context_mark
        if opened is not None and opened.line != line and self._fixed is None and "document" not in problem:
            message += f" ({error.context}, which begins at line {opened.line + 1})"
        return Diagnostic.at(place, "syntax", "", message, remedy)

    def _explain(self, problem: str, line: int, column: int) -> tuple[str, str]:
        source = self._lines[line] if line < len(self._lines) else ""
        here = source[column : column + 1]
        if "\t" in source[: len(source) - len(source.lstrip())]:
            return "a tab stands in the indentation", "indent with spaces"
        if "another document" in problem:
            return "a second document begins here", "keep one document a file; `extends: FILE` joins two"
        if "cannot start any token" in problem and here in ("@", "`", "%"):
            return f"unquoted text cannot begin with {here}", f"quote it: '{source[column:].strip()}'"
        if "${" in source and "did not find expected" in problem:
            remedy = "write one key a line; or quote the reference, which makes `${env:..}` text"
            return "`${...}` cannot stand unquoted inside { } or [ ]", remedy
        if "mapping values are not allowed" in problem:
            return "`: ` cannot stand here", "quote the text that holds it, or check the indentation"
        if "undefined alias" in problem:
            return "the alias `*` names no anchor `&` above it", "quote text that begins with *"
        if "end of stream" in problem:
            return "the file ends inside quoted text", "close the quote"
        return f"not YAML: {problem}", ""


def _tag(tag: str) -> str:
    return tag.replace("tag:yaml.org,2002:", "!!")


def from_python(
    value: object, *, place: Place, folder: Path | None, found: list[Diagnostic], path: Path_ = ()
) -> Node:
    """Nodes of dicts, lists, tuples and values. Text stays text, save for references in it."""
    again: Any = {"place": place, "folder": folder, "found": found}
    if len(path) > MAX_DEPTH:
        message = f"nested deeper than {MAX_DEPTH} levels"
        found.append(Diagnostic.at(place, "syntax", dotted(path[:8]), message, "flatten it"))
        return Scalar(None, place, broken=True)
    if isinstance(value, dict):
        return MapNode(_python_entries(value, path, again), place)  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, (list, tuple)):
        items: list[object] = list(value)  # pyright: ignore[reportUnknownArgumentType]
        return ListNode([from_python(x, path=(*path, i), **again) for i, x in enumerate(items)], place)
    if value is None or isinstance(value, (str, bool, int, float)):
        plain: Plain = value
        text = plain if isinstance(plain, str) else write(plain)
        return Scalar(plain, place, text, plain=True, folder=folder)
    if hasattr(value, "__fspath__"):
        return from_python(str(value), path=path, **again)
    message = f"a {type(value).__name__} cannot stand in a pipeline"
    found.append(Diagnostic.at(place, "wrong-type", dotted(path), message, "use text, numbers, lists, dicts"))
    return Scalar(None, place, broken=True)


def _python_entries(value: Mapping[object, object], path: Path_, again: Any) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            message = f"a key must be text, and {key!r} is not"
            again["found"].append(Diagnostic.at(again["place"], "wrong-type", dotted(path), message))
            continue
        entries[key] = Entry(again["place"], from_python(item, path=(*path, key), **again))
    return entries


def expanded_too_far(root: Node) -> tuple[Node, str] | None:
    """The first node that is too large, or too deep, once every alias in it is written out, and why."""
    measured: dict[int, tuple[int, int]] = {}

    def measure(node: Node, level: int) -> tuple[Node, str] | None:
        if isinstance(node, Scalar) or id(node) in measured:
            return None
        if level > 2 * MAX_DEPTH:
            return node, f"nested deeper than {2 * MAX_DEPTH} levels"
        nodes, depth = 1, 0
        for child in _children(node):
            fault = measure(child, level + 1)
            if fault is not None:
                return fault
            more, deeper = measured.get(id(child), (1, 0))
            nodes, depth = nodes + more, max(depth, deeper)
        measured[id(node)] = (nodes, depth + 1)
        if nodes > MAX_NODES:
            return node, f"written out, the aliases and references in it make over {MAX_NODES:,} values"
        if depth + 1 > 2 * MAX_DEPTH:
            return node, f"nested deeper than {2 * MAX_DEPTH} levels"
        return None

    return measure(root, 0)


def _children(node: MapNode | ListNode) -> list[Node]:
    if isinstance(node, MapNode):
        return [entry.node for entry in node.entries.values()]
    return node.items
