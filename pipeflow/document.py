"""A pipeline file, read: its tree with places, its faults, its overrides and references resolved.

    document = load("pipeline.yaml", overrides=["steps=50"])
    document.diagnostics          every fault found, with its place
    document.place(("stages", "train", "with", "lr"))

The order: YAML to nodes, `extends`, overrides, references. Nothing is raised for what a file holds.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeflow.compose import compose, expanded_too_far, from_python
from pipeflow.diagnostic import Diagnostic, Place
from pipeflow.interpolate import interpolate
from pipeflow.nodes import (
    Entry,
    ListNode,
    MapNode,
    Node,
    Path_,
    Scalar,
    dotted,
    scalars_of,
    to_plain,
    to_yaml,
)
from pipeflow.overrides import apply_overrides
from pipeflow.scrub import Scrubber

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Document", "from_dict", "load", "parse"]


@dataclass
class Document:
    """A file as it was read. Where `unreadable`, `root` is not the file's and says nothing about it."""

    file: str
    folder: Path
    """Relative input paths of values that came from no file (overrides, dicts) are taken from here."""
    root: MapNode
    diagnostics: list[Diagnostic] = field(default_factory=list[Diagnostic])
    unreadable: bool = False
    scrub: Scrubber = field(default_factory=Scrubber)
    """Takes the secrets of the file out of whatever is shown or saved."""

    def node(self, path: Path_) -> Node | None:
        """The node at a path; None where the file has none."""
        node: Node | None = self.root
        for part in path:
            if isinstance(part, str) and isinstance(node, MapNode):
                node = node.get(part)
            elif isinstance(part, int) and isinstance(node, ListNode) and part < len(node.items):
                node = node.items[part]
            else:
                return None
        return node

    def place(self, path: Path_, key: bool = False) -> Place:
        """Where the value at a path stands (or its key); else the nearest of its parents that exists."""
        for end in range(len(path), 0, -1):
            node = self.node(path[:end])
            if node is None:
                continue
            parent = self.node(path[: end - 1])
            name = path[end - 1]
            if key and isinstance(parent, MapNode) and isinstance(name, str):
                return parent.entries[name].key_place
            return node.place
        return self.root.place

    def misplaced_secrets(self) -> list[Diagnostic]:
        """Secrets outside of `with` and `params`: names and links are shown, so no secret is one."""
        remedy = "a secret belongs under `with` (or `params`, for a `with`)"
        return [
            Diagnostic.at(node.place, "wrong-type", dotted(path), "a secret cannot stand here", remedy)
            for path, node in scalars_of(self.root)
            if node.secret
            and path[0] != "params"
            and not (path[0] in ("stages", "resources") and path[2:3] == ("with",))
        ]

    def plain(self, mask_secrets: bool = True) -> dict[str, Any]:
        """The resolved document as dicts and lists. A masked secret reads as `${secret:NAME}`."""
        return to_plain(self.root, mask_secrets=mask_secrets)

    def to_yaml(self, mask_secrets: bool = True) -> str:
        """The resolved document. Loaded again it gives the same values; secrets stay references."""
        return to_yaml(self.root, mask_secrets=mask_secrets)


def load(
    path: str | os.PathLike[str], *, overrides: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> Document:
    """Read a file. Faults, a missing file among them, are in `diagnostics`. `env`: default `os.environ`."""
    file = os.fspath(path)
    folder = Path(os.path.abspath(file)).parent
    reader = _Reader()
    text = reader.text(file, Place(file, 0, 0))
    root = None if text is None else reader.read(text, file, folder, (os.path.realpath(file),))
    return _finish(root, file, folder, reader.found, overrides, env)


def parse(
    text: str,
    *,
    file: str = "<text>",
    folder: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Document:
    """Read a text. `file` is its name in places, `folder` (default: the working directory) where it is."""
    base = Path(os.path.abspath(folder or "."))
    reader = _Reader()
    root = reader.read(text, file, base, (os.path.realpath(base / file),))
    return _finish(root, file, base, reader.found, overrides, env)


def from_dict(
    mapping: Mapping[str, Any],
    *,
    file: str = "<dict>",
    folder: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Document:
    """The document of a dict: places are (0, 0), text stays text (`"5"` is no number), references resolve."""
    base = Path(os.path.abspath(folder or "."))
    place = Place(file, 0, 0)
    reader = _Reader()
    root = from_python(dict(mapping), place=place, folder=base, found=reader.found)
    assert isinstance(root, MapNode)
    merged = reader.extended(root, file, base, ())
    return _finish(merged, file, base, reader.found, overrides, env)


def _finish(
    root: MapNode | None,
    file: str,
    folder: Path,
    found: list[Diagnostic],
    overrides: Sequence[str],
    env: Mapping[str, str] | None,
) -> Document:
    if root is None:
        return Document(file, folder, MapNode({}, Place(file, 0, 0)), found, unreadable=True)
    root, refused = apply_overrides(root, overrides)
    found = found + refused
    scrub = Scrubber()
    too_far = expanded_too_far(root)
    if too_far is None:
        root, unresolved, scrub = interpolate(root, os.environ if env is None else env)
        found += unresolved
        too_far = expanded_too_far(root)
    if too_far is not None:
        node, why = too_far
        found.append(Diagnostic.at(node.place, "syntax", "", why, "write fewer aliases and references"))
        return Document(file, folder, MapNode({}, Place(file, 0, 0)), found, True, scrub)
    return Document(file, folder, root, found, scrub=scrub)


class _Reader:
    """Reads a file and those that it extends; collects the faults of all of them."""

    def __init__(self) -> None:
        self.found: list[Diagnostic] = []

    def text(self, file: str, place: Place, path: str = "") -> str | None:
        """The text of a file. `place` (and its key's `path`) is where it was named."""
        try:
            data = Path(file).read_bytes()
        except OSError as error:
            reason = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror
            self._fault(place, path, f"cannot read {file}: {reason}", "check the path")
            return None
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = data[: error.start].count(b"\n") + 1
            column = error.start - data.rfind(b"\n", 0, error.start)
            message = f"byte 0x{data[error.start]:02x} is not UTF-8"
            self._fault(Place(file, line, column), "", message, "save the file as UTF-8")
            return None

    def read(self, text: str, file: str, folder: Path, chain: tuple[str, ...]) -> MapNode | None:
        """The root of a text, merged over its base. None where there is no tree to look at."""
        root, faults = compose(text, file=file, folder=folder)
        self.found += faults
        if root is None or (isinstance(root, Scalar) and root.value is None):
            if not faults:
                remedy = "begin with `pipeflow: 1`, `name:` and `stages:`"
                self._fault(Place(file, 1, 1), "", "the file is empty", remedy)
            return None
        if not isinstance(root, MapNode):
            got = "a list" if isinstance(root, ListNode) else "a single value"
            message = f"a pipeline file is a mapping, and this is {got}"
            self._fault(root.place, "", message, "begin with `pipeflow: 1`", "wrong-type")
            return None
        return self.extended(root, file, folder, chain)

    def extended(self, root: MapNode, file: str, folder: Path, chain: tuple[str, ...]) -> MapNode | None:
        """The mapping over the file that its key `extends` names; the key itself is taken out."""
        entry = root.entries.get("extends")
        if entry is None:
            return root
        named = entry.node
        rest = MapNode({k: e for k, e in root.entries.items() if k != "extends"}, root.place)
        if not isinstance(named, Scalar) or not isinstance(named.value, str) or not named.value:
            self._fault(named.place, "extends", "expected the path of one file", "", "wrong-type")
            return None
        if "${" in named.value:
            message = "`extends` is read before references are resolved"
            self._fault(named.place, "extends", message, "write the path out")
            return None
        target = os.path.join(folder, os.path.expanduser(named.value))
        real = os.path.realpath(target)
        if real in chain:
            circle = " -> ".join(os.path.basename(name) for name in (*chain[chain.index(real) :], real))
            message = f"files extend each other in a circle: {circle}"
            self._fault(named.place, "extends", message, "take one `extends` out")
            return None
        shown = _shown(target, file, folder)
        text = self.text(shown, named.place, "extends")
        if text is None:
            return None
        base = self.read(text, shown, Path(os.path.abspath(target)).parent, (*chain, real))
        return None if base is None else _merge(base, rest)

    def _fault(self, place: Place, path: str, message: str, remedy: str, code: str = "syntax") -> None:
        self.found.append(Diagnostic.at(place, code, path, message, remedy))


def _shown(target: str, file: str, folder: Path) -> str:
    """The path of a base in messages: relative to the working directory where the file itself was."""
    if os.path.isabs(file):
        return os.path.normpath(target)
    return os.path.relpath(target) if os.path.abspath(file) == str(folder / Path(file).name) else target


def _merge(base: MapNode, over: MapNode) -> MapNode:
    """`over` on `base`: mappings merge key by key, all else is replaced. Places stay those of their files."""
    entries = dict(base.entries)
    for key, entry in over.entries.items():
        old = base.entries.get(key)
        if old is not None and isinstance(old.node, MapNode) and isinstance(entry.node, MapNode):
            entry = Entry(entry.key_place, _merge(old.node, entry.node))
        entries[key] = entry
    return MapNode(entries, over.place)
