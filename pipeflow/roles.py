"""Which resource fills which role: `reads:` and `writes:` of the file against those of the class.

The file may name roles (`reads: {target: big}`), or only resources (`reads: big`), which then go to the one
unfilled role whose class they fit. A class that declares no roles takes any resource, under its own name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pipeflow.diagnostic import suggest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeflow.stage import Resource

__all__ = ["RoleFault", "Roles", "assign"]

Key = str | int | None
"""Which entry below `reads:`: a role, a place in the list, or the value itself."""


class RoleFault(NamedTuple):
    """What is wrong with one entry. `key` None: with the value as a whole, or with its absence."""

    code: str
    key: Key
    message: str
    remedy: str


class Roles(NamedTuple):
    """Role to resource name, and what is wrong."""

    filled: dict[str, str]
    faults: list[RoleFault]


def _entries(given: str | Sequence[str] | Mapping[str, str] | None) -> list[tuple[Key, str | None, str]]:
    """(key, role or None, resource) of each entry."""
    if given is None:
        return []
    if isinstance(given, str):
        return [(None, None, given)]
    if isinstance(given, dict):
        return [(role, role, name) for role, name in given.items()]
    return [(index, None, name) for index, name in enumerate(given)]


def _fit(resource: type[Resource] | None, role: type[Resource]) -> bool:
    """A resource fits a role of its own class or of a base, and one of a narrower class too: a file may
    name a user's base class. None: its class was not found, so nothing is said against it."""
    return resource is None or issubclass(resource, role) or issubclass(role, resource)


def assign(
    given: str | Sequence[str] | Mapping[str, str] | None,
    declared: Mapping[str, type[Resource]],
    resources: Mapping[str, type[Resource] | None],
    *,
    verb: str,
    open_roles: bool,
    filled_elsewhere: Sequence[str] = (),
) -> Roles:
    """Fill the roles of one class.

    `verb` is `reads` or `writes`; `open_roles`: the class declares none, so every resource is welcome under
    its own name; `filled_elsewhere`: roles that need nothing here (a written resource may be read as well).
    """
    filled: dict[str, str] = {}
    faults: list[RoleFault] = []
    bare: list[tuple[Key, str]] = []
    for key, role, name in _entries(given):
        if name not in resources:
            known = sorted(resources)
            remedy = suggest(name, known) or (f"resources of this file: {', '.join(known)}" if known else
                                              "declare it under `resources:`")  # fmt: skip
            faults.append(RoleFault("unknown-resource", key, f"there is no resource {name!r}", remedy))
            if role is not None:
                filled.setdefault(role, name)  # the role is not missing as well
        elif role is None:
            bare.append((key, name))
        else:
            faults.extend(_by_role(key, role, name, declared, resources[name], verb, open_roles))
            filled[role] = name
    for key, name in bare:
        role, fault = _place(key, name, declared, resources, filled, verb, open_roles)
        if fault is not None:
            faults.append(fault)
        if role is not None:
            filled[role] = name
    if not any(fault.code in ("unknown-resource", "wrong-type") for fault in faults):
        faults.extend(_missing(declared, filled, filled_elsewhere, verb))
    known_only = {role: name for role, name in filled.items() if name in resources}
    return Roles(known_only, faults)


def _by_role(
    key: Key,
    role: str,
    name: str,
    declared: Mapping[str, type[Resource]],
    cls: type[Resource] | None,
    verb: str,
    open_roles: bool,
) -> list[RoleFault]:
    if open_roles:
        return []
    if role not in declared:
        return [_undeclared(key, role, declared, verb)]
    if not _fit(cls, declared[role]):
        return [_unfit(key, name, cls, role, declared[role])]
    return []


def _place(
    key: Key,
    name: str,
    declared: Mapping[str, type[Resource]],
    resources: Mapping[str, type[Resource] | None],
    filled: Mapping[str, str],
    verb: str,
    open_roles: bool,
) -> tuple[str | None, RoleFault | None]:
    """The role for a bare name."""
    if open_roles:
        return name, None
    free = [role for role in declared if role not in filled]
    fitting = [role for role in free if _fit(resources[name], declared[role])]
    if len(fitting) == 1:
        return fitting[0], None
    if len(fitting) > 1:
        if name in fitting:  # called as its role is: no doubt is left
            return name, None
        example = f"{verb}: {{{fitting[0]}: {name}}}"
        message = f"resource {name!r} fits several roles: {', '.join(fitting)}"
        return None, RoleFault("wrong-type", key, message, f"name the role: `{example}`")
    if not free:
        return None, _undeclared(key, name, declared, verb)
    return None, _unfit(key, name, resources[name], free[0], declared[free[0]])


def _undeclared(key: Key, role: str, declared: Mapping[str, type[Resource]], verb: str) -> RoleFault:
    if not declared:
        return RoleFault("undeclared-role", key, f"this stage {verb} no resource", f"remove `{verb}`")
    remedy = suggest(role, list(declared)) or f"its roles are: {', '.join(declared)}"
    return RoleFault("undeclared-role", key, f"this stage {verb} no {role!r}", remedy)


def _unfit(key: Key, name: str, cls: type[Resource] | None, role: str, wanted: type[Resource]) -> RoleFault:
    is_a = cls.__name__ if cls is not None else "unknown"
    message = f"resource {name!r} is a {is_a}, but the role {role!r} wants a {wanted.__name__}"
    return RoleFault("wrong-type", key, message, f"name a resource whose class is {wanted.__name__}")


def _missing(
    declared: Mapping[str, type[Resource]], filled: Mapping[str, str], elsewhere: Sequence[str], verb: str
) -> list[RoleFault]:
    return [
        RoleFault(
            "missing-resource",
            None,
            f"it {verb} a {cls.__name__} in the role {role!r}, and the file gives it none",
            f"add `{verb}: {{{role}: NAME}}`, with a {cls.__name__} under `resources:`",
        )
        for role, cls in declared.items()
        if role not in filled and role not in elsewhere
    ]
