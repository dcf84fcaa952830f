"""Which numbers docs/engine.md has, which tests it names for each, and which tests say they prove one."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "engine.md"

_NUMBER = re.compile(r"^\*\*(\d+\.\d+)\*\* ", re.MULTILINE)
_TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")


class Axiom(NamedTuple):
    """One numbered paragraph of the page, with the tests that it names (`sim/test_x.py::test_y`)."""

    number: str
    text: str
    tests: list[str]


def axioms(page: str | None = None) -> dict[str, Axiom]:
    """Every numbered paragraph: from its number to the next one, or to the next heading."""
    text = PAGE.read_text(encoding="utf-8") if page is None else page
    found: dict[str, Axiom] = {}
    starts = [*_NUMBER.finditer(text)]
    for start in starts:
        number = start[1]
        if number in found:
            raise ValueError(f"docs/engine.md has the number {number} twice")
        body = re.split(r"^(?:#|\*\*\d+\.\d+\*\* )", text[start.end() :], maxsplit=1, flags=re.MULTILINE)[0]
        found[number] = Axiom(number, body, [f"{file}::{name}" for file, name in _TEST.findall(body)])
    return found


def marks(folder: Path = TESTS) -> dict[str, set[str]]:
    """Number to the tests that are marked with it, read from the source: also of those not collected here."""
    found: dict[str, set[str]] = {}
    for path in sorted(folder.rglob("test_*.py")):
        place = path.relative_to(folder).as_posix()
        for name, number in _marks_of(ast.parse(path.read_text(encoding="utf-8"))):
            found.setdefault(number, set()).add(f"{place}::{name}")
    return found


def _marks_of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.axiom":
                if not node.name.startswith("test"):
                    raise ValueError(f"{node.name} is marked as a proof, but is no test")
                for argument in decorator.args:
                    yield node.name, ast.literal_eval(argument)
