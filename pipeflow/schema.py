"""The JSON Schema (draft 2020-12) of the file format, for editors and for other tools.

It is made from the same `msgspec.inspect` tree that `validate` walks, rather than by `msgspec.json.schema`:
that one knows nothing of sizes and durations as text, nor of references (`${env:PORT}`), which may stand for
any single value, and as a whole parameter for any value at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec.inspect as mi

from pipeflow.spec import PipelineSpec
from pipeflow.typecheck import choices, unwrap

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeflow.stage import Resource, Stage

__all__ = ["json_schema"]

Schema = dict[str, Any]

_REFERENCE = {
    "description": "a reference: ${params.x}, ${env:NAME}, ${env:NAME:-default}, ${secret:NAME}",
    "type": "string",
    "pattern": r"\$\{",
}
_SIZE = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)? ?([kKMGT]|[KMGT]i)?B$"}
_DURATION = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)? ?(ms|s|m|h)$"}


def json_schema(
    stages: Mapping[str, type[Stage[Any, Any]]] | None = None,
    resources: Mapping[str, type[Resource]] | None = None,
) -> Schema:
    """The schema of a pipeline file. With `stages` and `resources` (by the name that `uses` takes), the
    `with` of those is checked against their `Config`; other names may have any options.

    A file that `extends` another may leave out what its base has: nothing is required of it.
    """
    whole = _Writer({"StageSpec": stages or {}, "ResourceSpec": resources or {}}, part=False)
    part = _Writer({"StageSpec": stages or {}, "ResourceSpec": resources or {}}, part=True)
    full, partial = whole.schema(mi.type_info(PipelineSpec)), part.schema(mi.type_info(PipelineSpec))
    root = part.definitions["PipelineSpecPart"]
    root["properties"]["extends"] = {"type": "string", "minLength": 1, "not": _REFERENCE}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "pipeflow pipeline",
        "if": {"type": "object", "required": ["extends"]},
        "then": partial,
        "else": full,
        "$defs": {"Reference": _REFERENCE, **whole.definitions, **part.definitions},
    }


class _Writer:
    """Writes types as schemas. `part`: those of a file whose base holds the rest, with nothing required."""

    def __init__(self, options: Mapping[str, Mapping[str, Any]], *, part: bool) -> None:
        self.definitions: dict[str, Schema] = {}
        self._options = options
        self._suffix = "Part" if part else ""
        self._part = part
        self._names: dict[type, str] = {}

    def schema(self, info: mi.Type) -> Schema:
        """The schema of a type; any value but the root may be a reference instead."""
        bare, kind = unwrap(info)
        made = self._bare(bare, kind)
        if isinstance(info, mi.Metadata):
            made = cast("Schema", info.extra_json_schema or {}) | made
        return made

    def _value(self, info: mi.Type) -> Schema:
        made = self.schema(info)
        if made == {}:
            return made
        options: list[Schema] = made["anyOf"] if set(made) == {"anyOf"} else [made]
        return {"anyOf": [*options, {"$ref": "#/$defs/Reference"}]}

    def _bare(self, info: mi.Type, kind: str | None) -> Schema:
        if isinstance(info, mi.UnionType):
            return {"anyOf": [self.schema(member) for member in info.types]}
        if kind == "size":
            return {"anyOf": [_number(info, "integer") | {"minimum": 0}, _SIZE]}
        if kind == "duration":
            return {"anyOf": [_number(info, "number") | {"minimum": 0}, _DURATION]}
        if isinstance(info, mi.StrType):
            return _bounded({"type": "string"}, info, "Length") | ({"minLength": 1} if kind else {})
        if isinstance(info, (mi.IntType, mi.FloatType)):
            return _number(info, "integer" if isinstance(info, mi.IntType) else "number")
        if isinstance(info, (mi.BoolType, mi.NoneType)):
            return {"type": "boolean" if isinstance(info, mi.BoolType) else "null"}
        if isinstance(info, (mi.LiteralType, mi.EnumType)):
            return {"enum": choices(info)}
        if isinstance(info, (mi.StructType, mi.DataclassType)):
            return self._struct(info)
        return self._container(info)

    def _container(self, info: mi.Type) -> Schema:
        if isinstance(info, mi.DictType):
            made: Schema = {"type": "object", "additionalProperties": self._value(info.value_type)}
            key, _ = unwrap(info.key_type)
            if isinstance(key, mi.StrType) and (key.pattern or key.min_length or key.max_length):
                made["propertyNames"] = _bounded({}, key, "Length")
            return _bounded(made, info, "Properties")
        if isinstance(info, mi.TupleType):
            items = [self._value(item) for item in info.item_types]
            size = len(items)
            return {"type": "array", "prefixItems": items, "minItems": size, "maxItems": size}
        if isinstance(info, (mi.ListType, mi.SetType, mi.FrozenSetType, mi.VarTupleType)):
            return _bounded({"type": "array", "items": self._value(info.item_type)}, info, "Items")
        return {}  # any value; and types that msgspec reads from text (dates): `check` is the judge of them

    def _struct(self, info: mi.StructType | mi.DataclassType) -> Schema:
        name = self._name(info.cls)
        if name not in self.definitions:
            made: Schema = {"type": "object"}
            self.definitions[name] = made  # before its fields: they may refer to it
            made["properties"] = {field.encode_name: self._value(field.type) for field in info.fields}
            made["additionalProperties"] = False
            required = [field.encode_name for field in info.fields if field.required]
            if required and not self._part:
                made["required"] = required
            if isinstance(info, mi.StructType) and info.tag_field is not None:
                made["properties"][info.tag_field] = {"const": info.tag}
            doc = info.cls.__dict__.get("__doc__")
            if doc:
                made["description"] = " ".join(doc.split())
            classes = self._options.get(info.cls.__name__) if info.cls.__module__ == "pipeflow.spec" else None
            if classes:
                made["allOf"] = [self._options_of(uses, cls) for uses, cls in classes.items()]
        return {"$ref": f"#/$defs/{name}"}

    def _options_of(self, uses: str, cls: Any) -> Schema:
        """If the entry `uses` this class, then its `with` holds this class's options."""
        config = mi.type_info(cls.Config)
        then: Schema = {"properties": {"with": self._value(config)}}
        fields = cast("mi.StructType", config).fields
        if not self._part and any(field.required for field in fields):
            then["required"] = ["with"]
        return {"if": {"properties": {"uses": {"const": uses}}, "required": ["uses"]}, "then": then}

    def _name(self, cls: type) -> str:
        """A definition's name: the class's own where it is alone with it, as `Config` is not."""
        if cls not in self._names:
            plain = cls.__module__ == "pipeflow.spec"
            name = cls.__name__ if plain else f"{cls.__module__}.{cls.__qualname__}"
            name = name.replace("<locals>", "locals")
            taken = set(self._names.values())
            unique, n = name, 2
            while unique + self._suffix in taken:
                unique, n = f"{name}{n}", n + 1
            self._names[cls] = unique + self._suffix
        return self._names[cls]


def _number(info: Any, type: str) -> Schema:
    made: Schema = {"type": type}
    words = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum",
             "multiple_of": "multipleOf"}  # fmt: skip
    for name, word in words.items():
        bound = getattr(info, name, None)
        if bound is not None:
            made[word] = bound
    return made


def _bounded(made: Schema, info: Any, what: str) -> Schema:
    for name, word in (("min_length", "min"), ("max_length", "max")):
        bound = getattr(info, name, None)
        if bound is not None:
            made[word + what] = bound
    if getattr(info, "pattern", None) is not None:
        made["pattern"] = info.pattern
    return made
