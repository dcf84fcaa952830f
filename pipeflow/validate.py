"""Nodes + a type -> a value, or every fault with its place.

msgspec's own `convert` stops at the first fault and knows no places, so the walk over the type is ours. It
goes by `msgspec.inspect`, which is also what the JSON Schema is made from.
"""

from __future__ import annotations

import datetime
import decimal
import os
import uuid
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import msgspec.inspect as mi

from pipeflow.diagnostic import Diagnostic, Place, suggest
from pipeflow.nodes import ListNode, MapNode, Node, Path_, Scalar, dotted, to_plain
from pipeflow.spec import PipelineSpec
from pipeflow.typecheck import (
    FAULTY,
    Wanted,
    bounds,
    choices,
    describe,
    fits,
    key_fault,
    literal,
    number,
    says,
    stated_remedy,
    type_remedy,
    unwrap,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pipeflow.document import Document

__all__ = ["convert", "spec_of"]

T = TypeVar("T")

# Entries of these mappings are converted one by one: a faulty stage must not hide the others.
_APART: Final = frozenset({("stages",), ("resources",)})
_Struct = (mi.StructType, mi.DataclassType)
_OTHERS: Final[dict[Any, Any]] = {
    mi.BytesType: bytes,
    mi.DateTimeType: datetime.datetime,
    mi.DateType: datetime.date,
    mi.TimeType: datetime.time,
    mi.TimeDeltaType: datetime.timedelta,
    mi.DecimalType: decimal.Decimal,
    mi.UUIDType: uuid.UUID,
}
_Listed = (mi.ListType, mi.SetType, mi.FrozenSetType, mi.VarTupleType)


@lru_cache(maxsize=256)
def _info(type: Any) -> mi.Type:
    """What msgspec knows of a type; asking takes milliseconds."""
    return mi.type_info(type)


def convert(node: Node, type: type[T], *, path: str, folder: Path) -> tuple[T | None, list[Diagnostic]]:
    """The value of a node as `type`, and every fault; the value is None where there is any.

    `path` is the node's own key, for messages (`stages.train.with`). Relative input paths are taken from the
    folder of the file that the value stands in, else from `folder`. None without a fault: a reference in the
    node is broken, which the document's own diagnostics report.
    """
    walk = _Walk(folder)
    value = walk.value(node, _info(type), (path,) if path else ())
    return (None if value is FAULTY or walk.found else value), walk.found


def spec_of(document: Document) -> tuple[PipelineSpec | None, list[Diagnostic]]:
    """The file as a spec, and its faults beside `document.diagnostics`.

    Stages and resources that could not be converted are left out of the spec, so that the rest can be looked
    at; it is None where anything else could not be. An unreadable document gives None and no more faults.
    """
    if document.unreadable:
        return None, []
    walk = _Walk(document.folder, _APART)
    value = walk.value(document.root, _info(PipelineSpec), ())
    found = [_version(d, document) if d.path == "pipeflow" else d for d in walk.found]
    return (None if value is FAULTY else value), found


def _version(fault: Diagnostic, document: Document) -> Diagnostic:
    if document.node(("pipeflow",)) is None:
        message = "the file does not say in which version of the format it is written"
    else:
        message = f"only version 1 of the format is known: {fault.message}"
    return msgspec.structs.replace(fault, code="version", message=message, remedy="write `pipeflow: 1`")


class _Walk:
    def __init__(self, folder: Path, apart: frozenset[Path_] = frozenset()) -> None:
        self.found: list[Diagnostic] = []
        self._folder = folder
        self._apart = apart

    def value(self, node: Node, info: mi.Type, path: Path_) -> Any:
        """The value, or FAULTY with its faults added to `found`."""
        if isinstance(node, Scalar) and node.broken:
            return FAULTY
        remedy = stated_remedy(info)
        info, kind = unwrap(info)
        if isinstance(info, mi.UnionType):
            return self._union(node, info, path, remedy)
        if not fits(node, info, kind):
            return self._wrong(node, [(info, kind)], path, remedy)
        if isinstance(info, mi.AnyType):
            return FAULTY if _any_broken(node) else to_plain(node, mask_secrets=False)
        if isinstance(node, Scalar):
            return self._scalar(node, info, kind, path)
        if isinstance(node, MapNode):
            if isinstance(info, _Struct):
                return self._struct(node, info, path)
            if isinstance(info, mi.DictType):
                return self._dict(node, info, path)
        elif isinstance(info, mi.TupleType):
            return self._tuple(node, info, path)
        elif isinstance(info, _Listed):
            return self._list(node, info, path)
        return self._other(node, info, path)

    def _union(self, node: Node, info: mi.UnionType, path: Path_, remedy: str) -> Any:
        members = [unwrap(member) for member in info.types]
        fitting = [(type, kind) for type, kind in members if fits(node, type, kind)]
        if len(fitting) > 1 and isinstance(node, MapNode):
            fitting = _tagged(node, fitting) or fitting
        found: list[Diagnostic] = []
        for type, kind in fitting:
            attempt = _Walk(self._folder)
            value = attempt.value(node, mi.Metadata(type, extra={"pipeflow": kind}), path)
            if not attempt.found:
                return value
            found = attempt.found
        if len(fitting) == 1 and not (isinstance(node, Scalar) and found[0].message.startswith("expected")):
            self.found += found
            return FAULTY
        return self._wrong(node, members, path, (found[0].remedy if found else "") or remedy)

    def _scalar(self, node: Scalar, info: mi.Type, kind: str | None, path: Path_) -> Any:
        value: Any = node.value
        if kind in ("size", "duration") or isinstance(info, (mi.IntType, mi.FloatType)):
            value = number(node, info, kind)
            if value is FAULTY:
                return self._wrong(node, [(info, kind)], path)
        elif isinstance(info, (mi.LiteralType, mi.EnumType)):
            value = literal(node, info)
            if value is FAULTY:
                near = "" if node.secret else suggest(str(node.value), [str(c) for c in choices(info)])
                return self._wrong(node, [(info, kind)], path, near)
        elif not isinstance(info, (mi.StrType, mi.BoolType, mi.NoneType)):
            return self._other(node, info, path)
        fault = bounds(value, info)
        if fault is None and kind in ("input-path", "output-path") and not value:
            fault = "be a path, not empty text"
        if fault is not None:
            return self._fault(node.place, path, f"must {fault}; got {says(node)}")
        if kind == "input-path":
            folder = self._folder if node.folder is None else node.folder
            return os.path.abspath(os.path.join(folder, os.path.expanduser(value)))
        return value

    def _struct(self, node: MapNode, info: mi.StructType | mi.DataclassType, path: Path_) -> Any:
        fields = {field.encode_name: field for field in info.fields}
        tag = info.tag_field if isinstance(info, mi.StructType) else None
        values: dict[str, Any] = {}
        failed = False
        for key, (key_place, child) in node.entries.items():
            field = fields.get(key)
            if field is None:
                if key != tag:
                    self._unknown(key, key_place, list(fields), (*path, key))
                continue
            value = self.value(child, field.type, (*path, key))
            if value is FAULTY:
                failed = True
            else:
                values[field.name] = value
        for field in info.fields:
            if field.required and field.encode_name not in node.entries:
                failed = True
                message = f"the key {field.encode_name!r} is missing"
                remedy = f"add `{field.encode_name}:` ({describe([unwrap(field.type)])})"
                self._fault(node.place, (*path, field.encode_name), message, remedy)
        if failed:
            return FAULTY
        try:
            return info.cls(**values)
        except (ValueError, TypeError) as error:  # from the class's own __post_init__
            return self._fault(node.place, path, _unsecret(str(error), node))

    def _dict(self, node: MapNode, info: mi.DictType, path: Path_) -> Any:
        made: dict[Any, Any] = {}
        failed = False
        fault = bounds(node.entries, info)
        if fault is not None:
            failed = True
            self._fault(node.place, path, f"must {fault}; got {len(node.entries)}")
        for key, (key_place, child) in node.entries.items():
            name, wrong = key_fault(key, info.key_type)
            if wrong is not None:
                self._fault(key_place, (*path, key), f"the key {key!r} must {wrong}")
            value = self.value(child, info.value_type, (*path, key))
            if wrong is None and value is not FAULTY:
                made[name] = value
            elif path not in self._apart:
                failed = True
        return FAULTY if failed else made

    def _list(self, node: ListNode, info: Any, path: Path_) -> Any:
        values = [self.value(item, info.item_type, (*path, i)) for i, item in enumerate(node.items)]
        fault = bounds(values, info)
        if fault is not None:
            return self._fault(node.place, path, f"must {fault}; got {len(values)}")
        if any(value is FAULTY for value in values):
            return FAULTY
        makers: dict[Any, Any] = {mi.SetType: set, mi.FrozenSetType: frozenset, mi.VarTupleType: tuple}
        return makers.get(info.__class__, list)(values)

    def _tuple(self, node: ListNode, info: mi.TupleType, path: Path_) -> Any:
        wanted = len(info.item_types)
        if len(node.items) != wanted:
            return self._fault(node.place, path, f"must hold exactly {wanted} values; got {len(node.items)}")
        pairs = zip(node.items, info.item_types, strict=True)
        values = [self.value(item, type, (*path, i)) for i, (item, type) in enumerate(pairs)]
        return FAULTY if any(value is FAULTY for value in values) else tuple(values)

    def _other(self, node: Node, info: mi.Type, path: Path_) -> Any:
        """A type that YAML has no value for (a date, a Decimal): msgspec reads it."""
        target: Any = _OTHERS.get(type(info)) or getattr(info, "cls", None)
        if target is None:
            return self._fault(node.place, path, f"an option cannot be a {type(info).__name__}")
        if _any_broken(node):
            return FAULTY
        try:
            return msgspec.convert(to_plain(node, mask_secrets=False), target)
        except (ValueError, TypeError) as error:  # msgspec.ValidationError is a ValueError
            return self._fault(node.place, path, _unsecret(str(error), node))

    def _unknown(self, key: str, place: Place, known: Sequence[str], path: Path_) -> None:
        near = suggest(key, list(known))
        remedy = near or f"known keys: {', '.join(known) or 'none'}"
        if not near and len(path) == 3 and path[:1] in self._apart:
            remedy += "; options of its own go under `with`"
        self._fault(place, path, f"there is no key {key!r} here", remedy, "unknown-key")

    def _wrong(self, node: Node, wanted: list[Wanted], path: Path_, remedy: str = "") -> Any:
        message = f"expected {describe(wanted)}, got {says(node)}"
        return self._fault(node.place, path, message, remedy or type_remedy(node, wanted))

    def _fault(
        self, place: Place, path: Path_, message: str, remedy: str = "", code: str = "wrong-type"
    ) -> Any:
        self.found.append(Diagnostic.at(place, code, dotted(path), message, remedy))
        return FAULTY


def _tagged(node: MapNode, fitting: list[Wanted]) -> list[Wanted]:
    """Those Structs of a union whose tag the mapping bears."""
    chosen: list[Wanted] = []
    for info, kind in fitting:
        if isinstance(info, mi.StructType) and info.tag_field is not None:
            tag = node.get(info.tag_field)
            if isinstance(tag, Scalar) and tag.value == info.tag:
                chosen.append((info, kind))
    return chosen


def _scalars(node: Node) -> Iterator[Scalar]:
    if isinstance(node, Scalar):
        yield node
        return
    children = node.items if isinstance(node, ListNode) else [entry.node for entry in node.entries.values()]
    for child in children:
        yield from _scalars(child)


def _any_broken(node: Node) -> bool:
    return any(scalar.broken for scalar in _scalars(node))


def _unsecret(message: str, node: Node) -> str:
    """A message that other code wrote, without the secrets of the node."""
    for scalar in _scalars(node):
        if scalar.secret and str(scalar.value):
            message = message.replace(str(scalar.value), scalar.shown)
    return message
