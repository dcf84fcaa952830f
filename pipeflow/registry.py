"""Names to classes, found when they are first asked for.

`uses:` takes a name or `package.module:Class`. Names come from three places, the first wins: what a caller
added to its own `Registry`, the framework's built-ins, and the entry points `pipeflow.stages` and
`pipeflow.resources` of installed distributions. A class is imported only when a file uses it.

`sys.path` is never touched here. The command line puts the pipeline file's folder last on it, so that a
module beside the file is found by `pipeflow run`; a program that embeds pipeflow says itself what it imports.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any, Literal

from pipeflow.diagnostic import suggest
from pipeflow.error_text import named_error
from pipeflow.errors import PipeflowError
from pipeflow.stage import Resource, Stage

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["DEFAULT", "BrokenClass", "Registry", "RegistryError", "UnknownName", "find_resource",
           "find_stage", "names"]  # fmt: skip

Group = Literal["stages", "resources"]

BUILT_IN: dict[Group, dict[str, str]] = {
    "stages": {
        "barrier": "pipeflow.builtin:Barrier",
        "input": "pipeflow.builtin:Input",
        "output": "pipeflow.builtin:Output",
        "release_cache": "pipeflow.builtin:ReleaseCache",
        "route": "pipeflow.builtin:Route",
        "sim/gather": "pipeflow.sim.stages:Batch",
        "sim/source": "pipeflow.sim.stages:Source",
        "sim/work": "pipeflow.sim.stages:Work",
    },
    "resources": {"sim/state": "pipeflow.sim.stages:State"},
}


class RegistryError(PipeflowError):
    """A name leads to no usable class. `remedy` says what to do about it.

    `culprits` are what is to blame where that is not the name: a module, the line that raised in it. Errors
    that have one in common are one fault.
    """

    def __init__(self, message: str, remedy: str = "", culprits: tuple[str, ...] = ()) -> None:
        self.message = message
        self.remedy = remedy
        self.culprits = culprits
        super().__init__(f"{message}. {remedy}" if remedy else message)


class UnknownName(RegistryError):
    """Nothing is registered under the name, or the module or its attribute does not exist."""


class BrokenClass(RegistryError):
    """The name leads somewhere, but its module does not import or the object is of the wrong kind."""


class Registry:
    """Names known to one pipeline: built-ins and entry points, with what `add` puts on top."""

    def __init__(self) -> None:
        self._added: dict[Group, dict[str, type[Any]]] = {"stages": {}, "resources": {}}
        self._installed: dict[Group, dict[str, str]] = {}
        self._found: dict[tuple[Group, str], type[Any]] = {}
        self.beside: str | None = None
        """The folder last on `sys.path`, if the command line put one there. A module in it that another one
        hides is a fault, not silently the other."""

    def add(self, name: str, cls: type[Any]) -> None:
        """Make a stage or resource class known under `name`, before anything installed.

        Raises TypeError if `cls` is neither.
        """
        group = _group_of(cls)
        if group is None:
            raise TypeError(f"{cls!r} is neither a Stage nor a Resource")
        self._added[group][name] = cls
        self._found.pop((group, name), None)

    def find_stage(self, uses: str) -> type[Stage[Any, Any]]:
        """The stage class that `uses` names. Raises UnknownName or BrokenClass, each with a remedy."""
        return self._find("stages", uses, Stage)

    def find_resource(self, uses: str) -> type[Resource]:
        """The resource class that `uses` names. Raises UnknownName or BrokenClass, each with a remedy."""
        return self._find("resources", uses, Resource)

    def names(self, group: Group = "stages") -> list[str]:
        """Every registered name of a group, sorted. Imports none of the classes."""
        known = {*self._added[group], *BUILT_IN[group], *self._entry_points(group)}
        return sorted(known)

    def target(self, name: str, group: Group = "stages") -> str:
        """`module:Class` behind a registered name, without importing it. Raises UnknownName."""
        if name in self._added[group]:
            cls = self._added[group][name]
            return f"{cls.__module__}:{cls.__qualname__}"
        found = BUILT_IN[group].get(name) or self._entry_points(group).get(name)
        if found is None:
            raise self._unknown(group, name)
        return found

    def _find(self, group: Group, uses: str, base: type[Any]) -> type[Any]:
        known = self._found.get((group, uses))
        if known is None:
            known = self._added[group].get(uses)
            if known is None:
                if self.beside is not None and ":" in uses:
                    _not_hidden(uses, self.beside)
                known = _load(uses, uses if ":" in uses else self.target(uses, group), base)
            self._found[group, uses] = known
        return known

    def _entry_points(self, group: Group) -> dict[str, str]:
        if group not in self._installed:
            from importlib.metadata import entry_points

            found = entry_points(group=f"pipeflow.{group}")
            self._installed[group] = {point.name: point.value for point in found}
        return self._installed[group]

    def _unknown(self, group: Group, name: str) -> UnknownName:
        one, other = ("stage", "resource") if group == "stages" else ("resource", "stage")
        opposite: Group = "resources" if group == "stages" else "stages"
        message = f"no {one} is called {name!r}"
        if name in self.names(opposite):
            return UnknownName(message, f"{name!r} is a {other}: it belongs under `{opposite}:`")
        remedy = suggest(name, self.names(group))
        return UnknownName(message, remedy or f"see `pipeflow stages`, or write module:{one.title()}")


def _group_of(cls: object) -> Group | None:
    if not isinstance(cls, type):
        return None
    if issubclass(cls, Stage):
        return "stages"
    return "resources" if issubclass(cls, Resource) else None


def _load(uses: str, target: str, base: type[Any]) -> type[Any]:
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise UnknownName(f"{uses!r} is not of the form module:{base.__name__}")
    found: object = _import(uses, module_name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = suggest(part, [name for name in vars(found) if not name.startswith("_")])
            where = getattr(found, "__file__", None)
            came = f" (it came from {where})" if where else ""
            raise UnknownName(f"module {module_name!r} has no {attribute!r}{came}", near)
        found = getattr(found, part)
    if not (isinstance(found, type) and issubclass(found, base)):
        wanted = f"pipeflow.{base.__name__}"
        what = "class" if isinstance(found, type) else type(found).__name__
        function = base is Stage and callable(found) and not isinstance(found, type)
        remedy = "write @pipeflow.stage above the function" if function else f"derive it from {wanted}"
        raise BrokenClass(f"{target} is a {what}, not a {wanted}", remedy, (target,))
    return found


def _not_hidden(uses: str, folder: str) -> None:
    """Raises BrokenClass where `folder` has the module that `uses` names, but Python takes another."""
    name = uses.partition(":")[0].partition(".")[0]
    for file in (f"{name}.py", os.path.join(name, "__init__.py")):
        if name and os.path.isfile(os.path.join(folder, file)):
            break
    else:
        return
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module without a spec, such as __main__
        return
    origin = None if spec is None else spec.origin
    if spec is None or (origin and os.path.realpath(origin) == os.path.realpath(os.path.join(folder, file))):
        return
    other = "the standard library's" if name in sys.stdlib_module_names else f"the one in {origin}"
    message = f"{uses!r}: module {name!r} is {other}, not {file} beside the file"
    raise BrokenClass(message, "rename yours", (f"module {name}",))


def _import(uses: str, module_name: str) -> ModuleType:
    module = f"module {module_name}"
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Only the module that was asked for is "unknown"; one missing inside it is a fault of its own.
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise UnknownName(
                f"{uses!r}: there is no module {error.name!r}",
                "install it; or put it beside the pipeline file (`pipeflow run` and `check` look there), "
                "or where "
                "Python finds it (a program that embeds pipeflow)",
                (f"module {error.name}",),
            ) from error
        raise BrokenClass(
            f"{uses!r}: module {module_name!r} needs {error.name!r}, which is not installed",
            f"install {error.name!r}",
            (module, f"needs {error.name}"),
        ) from error
    except KeyboardInterrupt:
        raise
    except SystemExit as error:
        raise BrokenClass(
            f"{uses!r}: module {module_name!r} calls sys.exit({error.code!r}) while it is imported",
            'put what it does as a program under `if __name__ == "__main__":`',
            (module, _raised_at(error)),
        ) from error
    except BaseException as error:  # whatever a module does while it is imported is its own affair
        raise BrokenClass(
            f"{uses!r}: importing {module_name!r} failed with {type(error).__name__}: {error}",
            f"`python -c 'import {module_name}'` shows where",
            (module, _raised_at(error)),
        ) from error


def _raised_at(error: BaseException) -> str:
    """The line that raised: several modules fail by one that they all import."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
    if isinstance(error, SyntaxError):  # raised by the import system, whichever module it is in
        where = f"{error.filename}:{error.lineno}"
    return f"{where}: {named_error(error)}"


DEFAULT = Registry()
"""What `pipeflow.open` and the command line use where no other registry is given."""


def find_stage(uses: str) -> type[Stage[Any, Any]]:
    """`Registry.find_stage` of the default registry."""
    return DEFAULT.find_stage(uses)


def find_resource(uses: str) -> type[Resource]:
    """`Registry.find_resource` of the default registry."""
    return DEFAULT.find_resource(uses)


def names(group: Group = "stages") -> list[str]:
    """`Registry.names` of the default registry."""
    return DEFAULT.names(group)
