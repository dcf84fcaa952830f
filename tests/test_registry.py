"""Names to classes: built-ins, entry points, `module:Class`, a caller's own; and every way to miss."""

from __future__ import annotations

import sys
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pytest

from pipeflow import registry as default
from pipeflow.builtin import Barrier, Route
from pipeflow.check import check_document
from pipeflow.document import parse
from pipeflow.registry import BrokenClass, Registry, UnknownName
from pipeflow.stage import Resource, Stage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Mine(Stage):
    def run(self, item: Any) -> Any:
        return item


class MyModel(Resource):
    pass


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A distribution with entry points, as an installer leaves it, and its modules."""
    info = tmp_path / "planted-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        dedent("""\
        [pipeflow.stages]
        planted/scale = planted_good:Scale
        planted/late = planted_late:Late
        planted/needs = planted_needs:Needs
        planted/raises = planted_raises:Raises
        planted/beside = planted_beside:Beside
        planted/plain = planted_good:plain
        planted/gone = planted_good:Scal
        planted/nowhere = planted_nowhere:X
        [pipeflow.resources]
        planted/model = planted_good:Model
    """)
    )
    (tmp_path / "planted_good.py").write_text(
        dedent("""\
        import pipeflow
        from pipeflow.stage import Resource, Stage

        class Scale(Stage):
            def run(self, item): return item

        class Model(Resource):
            pass

        def plain(item): return item

        @pipeflow.stage
        def decorated(item: int, *, by: int = 2) -> int: return item * by
    """)
    )
    (tmp_path / "planted_late.py").write_text("from planted_good import Scale as Late\n")
    (tmp_path / "planted_needs.py").write_text("import no_such_dependency\n")
    (tmp_path / "planted_raises.py").write_text("raise ValueError('broken on purpose')\n")
    (tmp_path / "planted_beside.py").write_text("import planted_raises\n")
    (tmp_path / "planted_cut.py").write_text("x = (\n")
    (tmp_path / "planted_also_cut.py").write_text("x = )\n")
    (tmp_path / "planted_counts.py").write_text(
        "import planted_good\nplanted_good.n = getattr(planted_good, 'n', 0) + 1\n"
        "raise ValueError(planted_good.n)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("planted_")]:
        del sys.modules[name]


def test_built_ins() -> None:
    registry = Registry()
    assert registry.find_stage("barrier") is Barrier
    assert registry.find_stage("route") is Route
    assert {"barrier", "release_cache", "input", "output", "route"} <= set(registry.names())


def test_entry_points_are_imported_only_when_used(installed: Path) -> None:
    registry = Registry()
    assert "planted/late" in registry.names()
    assert "planted/model" in registry.names("resources")
    assert registry.target("planted/late") == "planted_late:Late"
    assert "planted_late" not in sys.modules
    assert registry.find_stage("planted/late").__name__ == "Scale"
    assert "planted_late" in sys.modules
    assert registry.find_resource("planted/model").__name__ == "Model"


def test_module_and_class(installed: Path) -> None:
    registry = Registry()
    assert registry.find_stage("planted_good:Scale").__name__ == "Scale"
    assert registry.find_stage("planted_good:decorated").__name__ == "decorated"
    assert registry.find_resource("planted_good:Model").__name__ == "Model"


def test_sys_path_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside_me.py").write_text("import pipeflow\n")
    before = list(sys.path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    with pytest.raises(UnknownName, match="there is no module 'beside_me'"):
        Registry().find_stage("beside_me:Any")
    assert [entry for entry in before if entry not in ("", str(tmp_path))] == sys.path


def test_own_names_come_first_and_stay_with_their_registry() -> None:
    registry = Registry()
    registry.add("barrier", Mine)
    registry.add("model", MyModel)
    assert registry.find_stage("barrier") is Mine
    assert registry.find_resource("model") is MyModel
    assert registry.target("model", "resources").endswith("test_registry:MyModel")
    assert "model" in registry.names("resources")
    assert default.find_stage("barrier") is Barrier
    assert "model" not in default.DEFAULT.names("resources")
    registry.add("barrier", Route)  # a later one replaces it, though it was found before
    assert registry.find_stage("barrier") is Route


def test_only_stages_and_resources_are_added() -> None:
    with pytest.raises(TypeError, match="neither a Stage nor a Resource"):
        Registry().add("text", str)


@pytest.mark.parametrize(("uses", "error", "message", "remedy"), [
    ("planted/scal", UnknownName, "no stage is called 'planted/scal'", "did you mean 'planted/scale'?"),
    ("zzzz", UnknownName, "no stage is called 'zzzz'", "see `pipeflow stages`, or write module:Stage"),
    ("planted/model", UnknownName, "no stage is called 'planted/model'",
     "'planted/model' is a resource: it belongs under `resources:`"),
    ("planted/gone", UnknownName, "module 'planted_good' has no 'Scal'", "did you mean 'Scale'?"),
    ("planted/nowhere", UnknownName, "'planted/nowhere': there is no module 'planted_nowhere'",
     "install it; or put it beside the pipeline file (`pipeflow run` and `check` look there), or where "
     "Python finds it (a program that embeds pipeflow)"),
    ("planted_nowhere.deeper:X", UnknownName,
     "'planted_nowhere.deeper:X': there is no module 'planted_nowhere'",
     "install it; or put it beside the pipeline file (`pipeflow run` and `check` look there), or where "
     "Python finds it (a program that embeds pipeflow)"),
    ("planted/needs", BrokenClass,
     "'planted/needs': module 'planted_needs' needs 'no_such_dependency', which is not installed",
     "install 'no_such_dependency'"),
    ("planted/raises", BrokenClass,
     "'planted/raises': importing 'planted_raises' failed with ValueError: broken on purpose",
     "`python -c 'import planted_raises'` shows where"),
    ("planted/plain", BrokenClass, "planted_good:plain is a function, not a pipeflow.Stage",
     "write @pipeflow.stage above the function"),
    ("planted_good:Model", BrokenClass, "planted_good:Model is a class, not a pipeflow.Stage",
     "derive it from pipeflow.Stage"),
    ("planted_good:", UnknownName, "'planted_good:' is not of the form module:Stage", ""),
])  # fmt: skip
def test_misses(installed: Path, uses: str, error: type[Exception], message: str, remedy: str) -> None:
    with pytest.raises(error) as caught:
        Registry().find_stage(uses)
    came = f" (it came from {installed / 'planted_good.py'})" if "has no" in message else ""
    assert (caught.value.message, caught.value.remedy) == (message + came, remedy)  # pyright: ignore


def told(text: str) -> list[tuple[str, str, str]]:
    """Code, path and message of each finding of a file."""
    document = parse("pipeflow: 1\nname: x\n" + dedent(text), file="p.yaml")
    report = check_document(document, env={}, registry=Registry())
    return [(found.code, found.path, found.message) for found in report.diagnostics]


FAILS = "importing 'planted_raises' failed with ValueError: broken on purpose"


def test_a_module_that_does_not_import_is_told_once(installed: Path) -> None:
    assert told("""
        resources:
          model: {uses: 'planted_raises:Model'}
        stages:
          a: {uses: planted/raises}
          b: {uses: 'planted_raises:B', from: a}
          c: {uses: planted/raises, from: b}
          d: {uses: 'planted_raises:D', from: c}
          e: {uses: planted/raises, from: d}
    """) == [
        ("broken-resource", "resources.model.uses",
         f"'planted_raises:Model': {FAILS} (the same for stages.a, stages.b, stages.c and 2 more)"),
    ]  # fmt: skip
    assert told("stages: {a: {uses: planted/raises}}") == [
        ("broken-stage", "stages.a.uses", f"'planted/raises': {FAILS}")
    ]


def test_modules_that_fail_by_one_line_are_told_once(installed: Path) -> None:
    assert told("""
        stages:
          a: {uses: planted/raises}
          b: {uses: planted/beside, from: a}
          c: {uses: planted/needs, from: b}
          d: {uses: 'planted_needs:D', from: c}
          e: {uses: planted/nowhere, from: d}
          f: {uses: 'planted_nowhere.deeper:F', from: e}
    """) == [
        ("broken-stage", "stages.a.uses", f"'planted/raises': {FAILS} (the same for stages.b)"),
        ("broken-stage", "stages.c.uses", "'planted/needs': module 'planted_needs' needs "
         "'no_such_dependency', which is not installed (the same for stages.d)"),
        ("unknown-stage", "stages.e.uses",
         "'planted/nowhere': there is no module 'planted_nowhere' (the same for stages.f)"),
    ]  # fmt: skip


def test_a_module_that_fails_otherwise_the_second_time_is_told_once(installed: Path) -> None:
    found = told("stages:\n  a: {uses: 'planted_counts:A'}\n  b: {uses: 'planted_counts:B', from: a}\n")
    assert [(path, message[-40:]) for _, path, message in found] == [
        ("stages.a.uses", "with ValueError: 1 (the same for stages.b)"[-40:])
    ]


def test_faults_of_two_modules_or_names_stay_two(installed: Path) -> None:
    found = told("""
        stages:
          a: {uses: 'planted_cut:A'}
          b: {uses: 'planted_also_cut:B', from: a}
          c: {uses: 'planted_good:Scal', from: b}
          d: {uses: 'planted_good:Scal', from: c}
          e: {uses: planted/scal, from: d}
          f: {uses: planted/scal, from: e}
    """)
    assert [path for _, path, _ in found] == [f"stages.{name}.uses" for name in "abcdef"]


def test_a_class_that_is_no_stage_is_told_once(installed: Path) -> None:
    found = told("stages:\n  a: {uses: planted/plain}\n  b: {uses: 'planted_good:plain', from: a}\n")
    assert [message for _, _, message in found] == [
        "planted_good:plain is a function, not a pipeflow.Stage (the same for stages.b)"
    ]


def test_module_functions_use_the_default_registry() -> None:
    assert default.find_stage("barrier") is Barrier
    assert "barrier" in default.names()
    with pytest.raises(UnknownName):
        default.find_resource("barrier")
