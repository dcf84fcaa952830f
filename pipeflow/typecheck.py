"""The leaves of validation: does one value suit one type, and how to say it in plain words."""

from __future__ import annotations

import enum
import math
import re
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec.inspect as mi

from pipeflow.nodes import ListNode, MapNode, Node, Scalar
from pipeflow.scalars import parse_duration, parse_size, read_plain

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "FAULTY",
    "Wanted",
    "bounds",
    "choices",
    "describe",
    "fits",
    "key_fault",
    "literal",
    "number",
    "says",
    "stated_remedy",
    "type_remedy",
    "unwrap",
]


class _Faulty(enum.Enum):
    FAULTY = "faulty"


FAULTY: Final = _Faulty.FAULTY
"""Stands for a value that could not be made; its faults have been reported."""

Wanted = tuple[mi.Type, str | None]
"""A type with the kind of `pipeflow.config` that it is marked with: `size`, `duration`, `input-path`.."""

_MAPPINGS = (mi.StructType, mi.DataclassType, mi.DictType, mi.TypedDictType)
_LISTS = (mi.ListType, mi.SetType, mi.FrozenSetType, mi.VarTupleType, mi.TupleType, mi.NamedTupleType)
_KINDS = {
    "size": "a size (bytes, or text such as 512MiB, 8GiB, 2GB)",
    "duration": "a duration (seconds, or text such as 500ms, 30s, 5m, 2h)",
    "input-path": "a path",
    "output-path": "a path",
}
_PLURAL = {"a whole number": "whole numbers", "a number": "numbers", "text": "text", "a path": "paths"}


def unwrap(info: mi.Type) -> Wanted:
    """The type without its `Metadata`, and the kind that this named."""
    kind: str | None = None
    while isinstance(info, mi.Metadata):
        extra = cast("dict[str, Any]", info.extra or {})
        kind = kind or extra.get("pipeflow")
        info = info.type
    return info, kind


def stated_remedy(info: mi.Type) -> str:
    """What the type's own `Meta(extra={"remedy": ..})` says to do about a value that does not fit."""
    extra = cast("dict[str, Any]", info.extra or {}) if isinstance(info, mi.Metadata) else {}
    return extra.get("remedy", "")


def choices(info: mi.LiteralType | mi.EnumType) -> list[Any]:
    """The values that the file may give."""
    if isinstance(info, mi.LiteralType):
        return list(info.values)
    return [member.value for member in info.cls]


def fits(node: Node, info: mi.Type, kind: str | None) -> bool:
    """Whether the node has the shape of the type: what remains to check is the value."""
    if isinstance(info, mi.AnyType):
        return True
    if isinstance(node, MapNode):
        return isinstance(info, _MAPPINGS)
    if isinstance(node, ListNode):
        return isinstance(info, _LISTS)
    got: type = type(node.value)
    if isinstance(info, (mi.LiteralType, mi.EnumType)):
        return any(type(choice) is got for choice in choices(info))
    if kind == "size":
        return got in (int, str)
    if kind == "duration":
        return got in (int, float, str)
    exact: dict[type, tuple[type, ...]] = {
        mi.NoneType: (type(None),),
        mi.BoolType: (bool,),
        mi.IntType: (int,),
        mi.FloatType: (int, float),
        mi.StrType: (str,),
    }
    if type(info) in exact:
        return got in exact[type(info)]
    return got is not type(None) and not isinstance(info, (*_MAPPINGS, *_LISTS))


def number(node: Scalar, info: mi.Type, kind: str | None) -> Any:
    """The int or float of a node that fits the type; FAULTY for a wrong size or duration."""
    value: Any = node.value
    if kind == "size":
        value = parse_size(value) if isinstance(value, str) else value
        return FAULTY if value is None or value < 0 else value
    if kind == "duration":
        value = parse_duration(value) if isinstance(value, str) else value
        if value is None or not 0 <= value < math.inf:
            return FAULTY
    if isinstance(info, mi.FloatType):
        try:
            return float(value)
        except OverflowError:
            return FAULTY
    return value


def literal(node: Scalar, info: mi.LiteralType | mi.EnumType) -> Any:
    """The choice that the node names; FAULTY where it names none. `fits` has seen to its type."""
    for choice in choices(info):
        if choice == node.value:
            return choice if isinstance(info, mi.LiteralType) else info.cls(choice)
    return FAULTY


def bounds(value: Any, info: Any) -> str | None:
    """What the value breaks of its type's bounds, to follow "must"; None where it keeps them."""
    if isinstance(info, (mi.IntType, mi.FloatType)):
        # Each is written so that NaN breaks it.
        if info.ge is not None and not value >= info.ge:
            return f"be at least {info.ge}"
        if info.gt is not None and not value > info.gt:
            return f"be greater than {info.gt}"
        if info.le is not None and not value <= info.le:
            return f"be at most {info.le}"
        if info.lt is not None and not value < info.lt:
            return f"be less than {info.lt}"
        if info.multiple_of is not None and value % info.multiple_of:
            return f"be a multiple of {info.multiple_of}"
        return None
    if isinstance(info, mi.StrType) and info.pattern is not None and re.search(info.pattern, value) is None:
        return f"match the pattern {info.pattern}"
    what = "characters" if isinstance(info, mi.StrType) else "entries"
    least, most = getattr(info, "min_length", None), getattr(info, "max_length", None)
    if least is not None and len(value) < least:
        return f"have at least {least} {what}"
    if most is not None and len(value) > most:
        return f"have at most {most} {what}"
    return None


def key_fault(key: str, info: mi.Type) -> tuple[Any, str | None]:
    """A mapping's key as its type, and what it breaks, to follow "must"."""
    info, _ = unwrap(info)
    if isinstance(info, mi.IntType):
        value = read_plain(key)
        if type(value) is not int:
            return key, "be a whole number"
        return value, bounds(value, info)
    if isinstance(info, (mi.LiteralType, mi.EnumType)):
        if key in choices(info):
            return (key if isinstance(info, mi.LiteralType) else info.cls(key)), None
        return key, f"be {describe([(info, None)])}"
    return key, bounds(key, info) if isinstance(info, mi.StrType) else None


def describe(wanted: Sequence[Wanted]) -> str:
    """`a whole number`, `text or a list of text`, `one of 'a', 'b'`."""
    words = [_word(info, kind) for info, kind in wanted if not isinstance(info, mi.NoneType)]
    return " or ".join(dict.fromkeys(words)) or "null"


def _word(info: mi.Type, kind: str | None) -> str:
    if kind in _KINDS:
        return _KINDS[kind]
    if isinstance(info, mi.UnionType):
        return describe([unwrap(member) for member in info.types])
    if isinstance(info, (mi.LiteralType, mi.EnumType)):
        names = [repr(choice) for choice in choices(info)]
        return names[0] if len(names) == 1 else f"one of {', '.join(names)}"
    if isinstance(info, _LISTS):
        inner: mi.Type | None = getattr(info, "item_type", None)
        item = "" if inner is None else _word(*unwrap(inner))
        return f"a list of {_PLURAL[item]}" if item in _PLURAL else "a list"
    if isinstance(info, _MAPPINGS):
        return "a mapping"
    named: dict[type, str] = {
        mi.BoolType: "true or false",
        mi.IntType: "a whole number",
        mi.FloatType: "a number",
        mi.StrType: "text",
        mi.AnyType: "any value",
    }
    return named.get(type(info), f"a {type(info).__name__.removesuffix('Type').lower()}")


def says(node: Node) -> str:
    """What the file gave: `the text 'eight'`, `a list`. A secret is not shown."""
    if isinstance(node, MapNode):
        return "a mapping"
    if isinstance(node, ListNode):
        return "a list"
    value = node.value
    if node.secret:
        return "a secret value"
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the text {value if len(value) <= 60 else value[:57] + '...'!r}"
    return f"the whole number {value}" if isinstance(value, int) else f"the number {value}"


def type_remedy(node: Node, wanted: Sequence[Wanted]) -> str:
    """The usual cure: quotes put on or left off, a value given."""
    if not isinstance(node, Scalar) or node.secret:
        return ""
    if node.value is None:
        return "give a value, or leave the key out"
    types = [type(info) for info, _ in wanted]
    if isinstance(node.value, str) and not node.plain:
        read = Scalar(read_plain(node.value), node.place)
        if not isinstance(read.value, str) and any(fits(read, info, kind) for info, kind in wanted):
            return "leave the quotes off: quoted values are text"
    if (
        isinstance(node.value, str)
        and mi.BoolType in types
        and node.value.lower() in ("yes", "no", "on", "off")
    ):
        return "write true or false"
    if mi.StrType in types and not isinstance(node.value, str):
        return f'quote it: "{node.text}"'
    return ""
