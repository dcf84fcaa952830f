"""`pipeflow stages`: the names that `uses:` takes, or all about one of them."""

from __future__ import annotations

import inspect
import os
from typing import Any

import click

from pipeflow.cli.common import see_modules_in
from pipeflow.registry import DEFAULT, RegistryError
from pipeflow.stage import Kind, Resource, Stage, kind_of

__all__ = ["command"]

TRAITS = ("device", "stateful", "mutates", "guarded", "at_start", "releases", "background", "inline",
          "needs_fixed_segments", "autotunes", "guards_autotuner")  # fmt: skip


@click.command("stages", short_help="List or describe stages.")
@click.argument("name", required=False)
def command(name: str | None) -> None:
    """List the stages and resources that `uses:` takes; with NAME (or module:Class), describe one.

    \b
    pipeflow stages
    pipeflow stages dflash/train
    """
    see_modules_in(os.getcwd())
    click.echo(_table() if name is None else _one(name), nl=False)


def _summary(cls: type[Any]) -> str:
    """First sentence or line of the class's own text."""
    text = inspect.cleandoc(cls.__doc__ or "")
    paragraph = " ".join(text.split("\n\n")[0].split("\n"))
    end = paragraph.find(". ")
    return paragraph if end < 0 else paragraph[: end + 1]


def _table() -> str:
    lines: list[str] = []
    for title, names, find in (
        ("Stages", DEFAULT.names("stages"), DEFAULT.find_stage),
        ("Resources", DEFAULT.names("resources"), DEFAULT.find_resource),
    ):
        if not names:
            continue
        lines += ["", title] if lines else [title]
        width = max(map(len, names))
        for name in names:
            try:
                text = _summary(find(name))
            except RegistryError as error:
                text = f"(cannot be used: {error.message})"
            lines.append(f"  {name.ljust(width)}  {text}".rstrip())
    return "\n".join(lines) + "\n"


def _find(name: str) -> type[Any]:
    if ":" not in name and name in DEFAULT.names("resources"):
        return DEFAULT.find_resource(name)
    try:
        return DEFAULT.find_stage(name)
    except RegistryError:
        if ":" in name:  # module:Class may be either
            try:
                return DEFAULT.find_resource(name)
            except RegistryError:
                pass
        raise


def _one(name: str) -> str:
    cls: Any = _find(name)
    text = inspect.cleandoc(cls.__doc__ or "")
    lines = [f"{name}  ({cls.__module__}:{cls.__qualname__})"]
    if text:
        lines += ["", *(f"  {line}".rstrip() for line in text.split("\n"))]
    facts = _role_facts("reads", cls) if issubclass(cls, Resource) else _stage_facts(cls)
    if facts:
        width = max(len(key) for key, _ in facts)
        lines += ["", *(f"  {key.ljust(width)}  {value}" for key, value in facts)]
    options = _options(cls)
    lines += ["", "  Options (under `with:`)", *options] if options else ["", "  No options"]
    return "\n".join(lines) + "\n"


def _stage_facts(cls: type[Stage[Any, Any]]) -> list[tuple[str, str]]:
    from pipeflow.typing_fit import NOTHING, signature_of, type_name

    kind = kind_of(cls)
    signature = signature_of(cls, kind)
    nothing = signature.gives in (None, NOTHING)
    facts = [("kind", "sink" if kind is Kind.MAP and nothing else kind.value)]
    if kind is not Kind.SOURCE:
        facts.append(("takes", type_name(signature.takes)))
    facts.append(("gives", "nothing" if nothing else type_name(signature.gives)))
    if cls.ports:
        facts.append(("outputs", ", ".join(cls.ports)))
    facts += [*_role_facts("reads", cls), *_role_facts("writes", cls)]
    traits = [trait for trait in TRAITS if getattr(cls, trait)]
    if cls.retriable is not None:
        traits.append("retriable" if cls.retriable else "not retriable")
    if traits:
        facts.append(("traits", ", ".join(traits)))
    return facts


def _role_facts(verb: str, cls: type[Stage[Any, Any]] | type[Resource]) -> list[tuple[str, str]]:
    roles: dict[str, type[Resource]] = getattr(cls, verb, {})
    listed = ", ".join(f"{role} ({wanted.__name__})" for role, wanted in roles.items())
    return [(verb, listed)] if roles else []


def _options(cls: type[Any]) -> list[str]:
    """A line an option: name, type, default; then what it is for."""
    import msgspec

    from pipeflow.typecheck import describe, unwrap

    info: Any = msgspec.inspect.type_info(cls.Config)
    notes = _field_notes(cls.Config)
    lines: list[str] = []
    for field in info.fields:
        given = "required" if field.required else f"default {_default(field)}"
        lines.append(f"    {field.encode_name}: {describe([unwrap(field.type)])}, {given}")
        note = notes.get(field.name, "")
        lines += [f"        {line}".rstrip() for line in inspect.cleandoc(note).split("\n") if note]
    return lines


def _default(field: Any) -> str:
    import msgspec

    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _field_notes(config: type[Any]) -> dict[str, str]:
    """The text that stands below a field in its class, as in this project's own classes."""
    import ast
    import textwrap

    notes: dict[str, str] = {}
    for cls in reversed(config.__mro__):
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        except (OSError, TypeError, SyntaxError):
            continue  # built by `defstruct`, or without source
        if not isinstance(body, ast.ClassDef):
            continue
        for field, below in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                notes[field.target.id] = below.value.value
    return notes
