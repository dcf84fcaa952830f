"""What a pipeline file is read into: scalars, mappings and lists that remember where they stood."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from pipeflow import scalars

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pipeflow.diagnostic import Place

__all__ = ["Entry", "ListNode", "MapNode", "Node", "Path_", "Scalar", "dotted", "scalars_of", "to_plain",
           "to_yaml"]  # fmt: skip

Path_: TypeAlias = tuple[str | int, ...]
"""Where a node stands in its document: `("stages", "train", "from", 0)`."""


@dataclass(slots=True, eq=False)
class Scalar:
    """One value. `text` is how the file writes it, `value` what that means.

    `plain`: written without quotes. `secret`: made with `${secret:..}`; then `shown` is the text to show in
    its place. `broken`: a reference in it failed, which has been reported. `folder`: that of its file, from
    which a relative path is taken; None where it came from no file.
    """

    value: scalars.Plain
    place: Place
    text: str = ""
    plain: bool = False
    folder: Path | None = None
    secret: bool = False
    shown: str = ""
    broken: bool = False


class Entry(NamedTuple):
    key_place: Place
    node: Node


@dataclass(slots=True, eq=False)
class MapNode:
    """A mapping; its place is that of its first key (or of its brace)."""

    entries: dict[str, Entry]
    place: Place

    def get(self, key: str) -> Node | None:
        entry = self.entries.get(key)
        return None if entry is None else entry.node


@dataclass(slots=True, eq=False)
class ListNode:
    items: list[Node]
    place: Place


Node: TypeAlias = Scalar | MapNode | ListNode


def dotted(path: Path_) -> str:
    """`stages.train.from[0]`"""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def scalars_of(node: Node, path: Path_ = ()) -> Iterator[tuple[Path_, Scalar]]:
    """Every value below a node, with its path."""
    if isinstance(node, Scalar):
        yield path, node
    elif isinstance(node, MapNode):
        for key, entry in node.entries.items():
            yield from scalars_of(entry.node, (*path, key))
    else:
        for index, item in enumerate(node.items):
            yield from scalars_of(item, (*path, index))


def to_plain(node: Node, *, mask_secrets: bool = True) -> Any:
    """Dicts, lists and values. A masked secret reads as its reference: `${secret:NAME}`."""
    if isinstance(node, Scalar):
        return node.shown if node.secret and mask_secrets else node.value
    if isinstance(node, MapNode):
        return {key: to_plain(entry.node, mask_secrets=mask_secrets) for key, entry in node.entries.items()}
    return [to_plain(item, mask_secrets=mask_secrets) for item in node.items]


def to_yaml(node: Node, *, mask_secrets: bool = True) -> str:
    """Block style. Read again, it gives the same values; a masked secret stays the reference it was."""
    if (isinstance(node, MapNode) and node.entries) or (isinstance(node, ListNode) and node.items):
        return "".join(line + "\n" for line in _lines(node, "", mask_secrets))
    return _inline(node, mask_secrets) + "\n"


def _inline(node: Node, mask: bool) -> str:
    if isinstance(node, MapNode):
        return "{}"
    if isinstance(node, ListNode):
        return "[]"
    if node.secret and mask:
        # Plain only where it was one plain reference: then it may be read as a number again.
        return node.shown if node.plain else scalars.quote(node.shown)
    return scalars.write(node.value)


def _lines(node: Node, pad: str, mask: bool) -> Iterator[str]:
    if isinstance(node, MapNode):
        for key, entry in node.entries.items():
            name = scalars.quote(key, key=True)
            # A key of over 1,024 characters must be marked as one (YAML 1.2, 7.4).
            head = f"{pad}{name}:" if len(name) < 1000 else f"{pad}? {name}\n{pad}:"
            yield from _under(head, entry.node, pad + "  ", mask)
    elif isinstance(node, ListNode):
        for item in node.items:
            if _has_lines(item):
                first, *rest = _lines(item, pad + "  ", mask)
                yield f"{pad}- {first[len(pad) + 2 :]}"
                yield from rest
            else:
                yield f"{pad}- {_inline(item, mask)}"


def _under(head: str, node: Node, pad: str, mask: bool) -> Iterator[str]:
    if _has_lines(node):
        yield head
        yield from _lines(node, pad, mask)
    else:
        yield f"{head} {_inline(node, mask)}"


def _has_lines(node: Node) -> bool:
    return bool(node.entries if isinstance(node, MapNode) else isinstance(node, ListNode) and node.items)
