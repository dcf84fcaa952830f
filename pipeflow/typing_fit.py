"""Does what one stage gives fit what the next one takes? Answered from annotations, before anything starts.

The check is for mistakes in wiring, not a type checker: whatever cannot be resolved (a name that only a type
checker sees, a type variable, a missing annotation) fits everything. None and DROP in a result are gaps, so
they are left out of it; `Port[T]` counts as T.
"""

from __future__ import annotations

import collections.abc as abc
import inspect
import sys
import types
import typing
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from pipeflow.item import DROP, Failed, Port, Scatter
from pipeflow.stage import Kind, Stage

__all__ = ["Signature", "fields_of", "fits", "mapping_value", "signature_of", "type_name"]

NOTHING = type(None)
GAPS = (NOTHING, type(DROP), Failed)
STREAMS = (
    abc.Generator, abc.AsyncGenerator, abc.Iterator, abc.AsyncIterator, abc.Iterable, abc.AsyncIterable
)  # fmt: skip
FUNCTION = get_origin(typing.Callable[..., Any])
PROMOTED = {float: (int,), complex: (int, float), bytes: (bytearray, memoryview)}


class Signature(NamedTuple):
    """What a stage takes and gives, item by item; Any where the class does not say."""

    takes: Any
    gives: Any  # NoneType: nothing


@cache
def signature_of(cls: type[Stage[Any, Any]], kind: Kind) -> Signature:
    """Read `run`'s annotations: elements of what a generator yields, members of what a gather gets."""
    run = inspect.unwrap(cls.run)
    hints = _hints(run)
    items = [name for name in inspect.signature(run).parameters if name not in ("self", "ctx")]
    takes = hints.get(items[0], Any) if items and kind is not Kind.SOURCE else Any
    gives = hints.get("return", Any)
    if kind is Kind.GATHER:
        takes = _element(takes)
        gives = _scattered(gives)
    elif kind in (Kind.SOURCE, Kind.FLAT):
        gives = _element(gives)
    return Signature(takes, gives)


def _hints(run: Any) -> dict[str, Any]:
    """Each annotation by itself, so that one that cannot be resolved does not hide the others."""
    scope = getattr(run, "__globals__", {})
    found: dict[str, Any] = {}
    for name, hint in getattr(run, "__annotations__", {}).items():
        alone = types.SimpleNamespace(__annotations__={name: hint})
        try:
            found[name] = typing.get_type_hints(alone, globalns=scope, include_extras=True)[name]
        except Exception:
            # A name that only a type checker sees, or one from inside a function: it fits everything.
            found[name] = Any
    return found


def _bare(hint: Any) -> Any:
    """Without Annotated, Required, NewType, and with a type variable's bound."""
    while True:
        origin = get_origin(hint)
        if origin is Annotated or origin in (typing.Required, typing.NotRequired, typing.Final):
            hint = get_args(hint)[0]
        elif isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        elif isinstance(hint, TypeVar):
            hint = hint.__bound__ if hint.__bound__ is not None else Any
        elif origin is Port:
            hint = get_args(hint)[0]
        elif hint is Port:
            return Any
        elif hint is None:
            return NOTHING
        else:
            return hint


def _members(hint: Any) -> list[Any]:
    """The members of a union; anything else is its own only member."""
    hint = _bare(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return [member for part in get_args(hint) for member in _members(part)]
    return [hint]


def _element(hint: Any) -> Any:
    hint = _bare(hint)
    arguments = get_args(hint)
    origin = get_origin(hint)
    if not arguments or not isinstance(origin, type):
        return Any
    if origin in STREAMS or issubclass(origin, abc.Iterable):
        return arguments[0]
    return Any


def _scattered(hint: Any) -> Any:
    parts = [get_args(part)[0] if get_origin(part) is Scatter else part for part in _members(hint)]
    parts = [Any if part is Scatter else part for part in parts]
    return parts[0] if len(parts) == 1 else Union[tuple(parts)]  # noqa: UP007 - built at run time


def _open(hint: Any) -> bool:
    """Whether nothing can be said about the type."""
    return hint is Any or hint is object or isinstance(hint, (str, typing.ForwardRef, typing.ParamSpec))


def fits(given: Any, wanted: Any) -> bool:
    """Whether every value of type `given` (gaps aside) may be handed to a `run` that takes `wanted`."""
    given_parts = [part for part in _members(given) if part not in GAPS]
    wanted_parts = _members(wanted)
    if not given_parts or any(_open(part) for part in wanted_parts):
        return True
    return all(_open(part) or any(_fits_one(part, want) for want in wanted_parts) for part in given_parts)


def _fits_one(given: Any, wanted: Any) -> bool:
    if given == wanted:
        return True
    if get_origin(wanted) is Literal:
        return _fits_literal(given, wanted)
    if get_origin(given) is Literal:
        return all(_fits_one(type(value), wanted) for value in get_args(given))
    if typing.is_typeddict(wanted):
        return _fits_fields(given, wanted)
    if typing.is_typeddict(given):
        return _class_fits(dict, get_origin(wanted) or wanted)
    given_class, wanted_class = get_origin(given) or given, get_origin(wanted) or wanted
    return _class_fits(given_class, wanted_class) and _arguments_fit(given, wanted)


def _fits_literal(given: Any, wanted: Any) -> bool:
    values = get_args(wanted)
    if get_origin(given) is Literal:
        return set(get_args(given)) <= set(values)
    return any(_class_fits(given, type(value)) for value in values)  # a str may be the right one


def _fits_fields(given: Any, wanted: Any) -> bool:
    """Field by field; a plain dict may hold anything."""
    if not typing.is_typeddict(given):
        return _class_fits(get_origin(given) or given, abc.Mapping)
    have, want = fields_of(given) or {}, fields_of(wanted) or {}
    required: frozenset[str] = wanted.__required_keys__
    return required <= have.keys() and all(fits(have[key], want[key]) for key in want if key in have)


def _class_fits(given: Any, wanted: Any) -> bool:
    if not isinstance(given, type) or not isinstance(wanted, type):
        return True
    if any(_class_fits(given, base) for base in PROMOTED.get(wanted, ())):
        return True
    try:
        return issubclass(given, wanted)
    except TypeError:  # a protocol with data members answers no such question
        return True


def _arguments_fit(given: Any, wanted: Any) -> bool:
    have, want = get_args(given), get_args(wanted)
    origin = get_origin(given)
    if not have or not want or origin is None or origin is FUNCTION:
        return True
    if origin is tuple:
        return _tuple_fits(have, want, get_origin(wanted))
    if len(have) != len(want):
        return True  # a subclass may bind parameters of its base in any way
    return all(fits(one, other) for one, other in zip(have, want, strict=True))


def _tuple_fits(have: tuple[Any, ...], want: tuple[Any, ...], wanted_class: Any) -> bool:
    if wanted_class is not tuple:  # Sequence[T], Iterable[T]
        return all(fits(part, want[0]) for part in have if part is not ...)
    if ... in want:
        return all(fits(part, want[0]) for part in have if part is not ...)
    if ... in have:
        return all(fits(have[0], part) for part in want)
    return len(have) == len(want) and all(fits(one, other) for one, other in zip(have, want, strict=True))


def fields_of(hint: Any) -> dict[str, Any] | None:
    """Fields and types of a TypedDict; None for other types (named inputs arrive as a dict)."""
    hint = get_origin(_bare(hint)) or _bare(hint)
    if not typing.is_typeddict(hint):
        return None
    scope = vars(sys.modules.get(hint.__module__, types.ModuleType("")))
    return _hints(types.SimpleNamespace(__annotations__=hint.__annotations__, __globals__=scope))


def mapping_value(hint: Any) -> Any:
    """T of `dict[str, T]` or `Mapping[str, T]`; Any for a bare one; None for another type."""
    hint = _bare(hint)
    cls = get_origin(hint) or hint
    if not (isinstance(cls, type) and issubclass(cls, abc.Mapping)):
        return None
    arguments = get_args(hint)
    return arguments[1] if len(arguments) == 2 else Any


def type_name(hint: Any) -> str:
    """As a person would write it: `Batch`, `list[int]`, `int | str`."""
    parts: list[str] = []
    for part in _members(hint):
        if part in GAPS:
            continue
        parts.append(part.__qualname__ if isinstance(part, type) and not get_args(part) else _generic(part))
    return " | ".join(parts) or "nothing"


def _generic(hint: Any) -> str:
    arguments = get_args(hint)
    if get_origin(hint) is Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    name = getattr(get_origin(hint) or hint, "__qualname__", None) or str(hint).removeprefix("typing.")
    inside = ", ".join("..." if part is ... else type_name(part) for part in arguments)
    return f"{name}[{inside}]" if inside else name
