"""The package as it is installed: names, imports, entry points, the wheel."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STAGES = ROOT / "stages"
LINES = 450
"""A module beyond it holds more than one concept."""


def sources(*packages: str) -> list[Path]:
    homes = {"pipeflow": ROOT / "pipeflow", "pipeflow_stages": STAGES / "pipeflow_stages"}
    return [
        path
        for name in packages
        for path in sorted(homes[name].rglob("*.py"))
        if "templates" not in path.parts
    ]


def module_of(path: Path) -> str:
    base = STAGES if path.is_relative_to(STAGES) else ROOT
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def fresh(code: str, *argv: str, path: tuple[Path, ...] = ()) -> str:
    """What a new interpreter prints."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT, STAGES))),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, text=True, env=env, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Names ---------------------------------------------------------------------------------------------


def test_every_public_name_is_there_and_listed() -> None:
    code = (
        "import json, pipeflow\n"
        "missing = [n for n in pipeflow.__all__ if getattr(pipeflow, n, None) is None]\n"
        "unlisted = sorted(set(pipeflow.__all__) - set(dir(pipeflow)))\n"
        "print(json.dumps([missing, unlisted, pipeflow.__version__]))"
    )
    missing, unlisted, version = json.loads(fresh(code))
    assert missing == []
    assert unlisted == []
    assert version


@pytest.mark.parametrize("package", ["pipeflow", "pipeflow_stages"])
def test_all_lists_what_a_module_has(package: str) -> None:
    """Public names are exported on purpose: each module says which, sorted, and none is missing."""
    faults = []
    for path in sources(package):
        tree = ast.parse(path.read_text())
        exports = [
            node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
        ]
        if not exports:
            if path.name not in ("__init__.py", "__main__.py"):
                faults.append(f"{module_of(path)} has no __all__")
            continue
        names = ast.literal_eval(exports[0])
        defined = {
            n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef))
        }
        for node in ast.walk(tree):
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                defined |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                defined |= {a.asname or a.name for a in node.names}
        faults += [f"{module_of(path)}.{name} is not defined" for name in names if name not in defined]
    assert faults == []


# Imports -------------------------------------------------------------------------------------------


def imports_of(source: str) -> set[str]:
    """Top packages that a module imports anywhere: at its top, in functions, for type checking."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                found.add(node.args[0].value.split(".")[0])
    return found


def importers(package: str, paths: list[Path]) -> list[str]:
    return [module_of(path) for path in paths if package in imports_of(path.read_text())]


def test_the_framework_never_imports_the_stage_library() -> None:
    assert importers("pipeflow_stages", sources("pipeflow")) == []


def test_aiostream_is_imported_in_one_module() -> None:
    assert importers("aiostream", sources("pipeflow", "pipeflow_stages")) == ["pipeflow.streams"]


@pytest.mark.parametrize(
    "planted",
    [
        "import pipeflow_stages",
        "def f():\n    from pipeflow_stages.types import Step",
        "import importlib\nimportlib.import_module('pipeflow_stages.types')",
        "__import__('pipeflow_stages')",
        "if 0:\n    import pipeflow_stages.text as t",
    ],
)
def test_the_search_finds_an_import(planted: str) -> None:
    assert "pipeflow_stages" in imports_of(planted)


IMPORT_EACH = """
import importlib, json, os, sys
for name in sys.argv[2:]:
    importlib.import_module(name)
faults = {}
for name in json.loads(sys.argv[1]):
    assert not any(m.partition(".")[0] in ("pipeflow", "pipeflow_stages") for m in sys.modules)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            importlib.import_module(name)
        except BaseException as error:
            os.write(writer, repr(error)[:2000].encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        if text := pipe.read().decode():
            faults[name] = text
    os.waitpid(child, 0)
print(json.dumps(faults))
"""


def test_each_module_may_be_imported_first() -> None:
    """No circle of imports, whichever module comes first."""
    names = [module_of(path) for path in sources("pipeflow", "pipeflow_stages") if path.name != "__main__.py"]
    assert len(names) > 60
    slow = [
        "torch",
        "transformers",
        "safetensors.torch",
        "click",
        "rich.live",
        "uvloop",
    ]  # once, not each time
    assert json.loads(fresh(IMPORT_EACH, json.dumps(names), *slow)) == {}


def test_a_circle_is_found(tmp_path: Path) -> None:
    (tmp_path / "circle_a.py").write_text("from circle_b import y\nx = 1\n")
    (tmp_path / "circle_b.py").write_text("from circle_a import x\ny = 1\n")
    assert "circular" in json.loads(fresh(IMPORT_EACH, '["circle_a"]', path=(tmp_path,)))["circle_a"]


BLOCKED = """
import asyncio, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"aiostream", "uvloop", "torch"}:
            raise ModuleNotFoundError(f"blocked: {name}", name=name)

sys.meta_path.insert(0, Block())
import pipeflow

async def main(folder):
    async with pipeflow.open(folder + "/plain.yaml", run_dir=folder + "/r") as pipeline:
        print((await pipeline.run())["steps"])
    async with pipeflow.open(folder + "/service.yaml", run_dir=folder + "/s") as pipeline:
        print(await pipeline.submit(20))
        async def source():
            yield 1
        try:
            async for _ in pipeline.stream(source()):
                print("streamed")
        except ModuleNotFoundError as error:
            print(error)

asyncio.run(main(sys.argv[1]))
"""


def test_the_engine_runs_without_aiostream(tmp_path: Path) -> None:
    """Nor does it need uvloop, or torch where no stage uses it. Only `stream` asks for aiostream."""
    (tmp_path / "package_stages.py").write_text(
        "from collections.abc import Iterator\nimport pipeflow\n\n"
        "@pipeflow.stage\ndef numbers() -> Iterator[int]:\n    yield from range(7)\n\n"
        "@pipeflow.stage\ndef double(item: int) -> int:\n    return 2 * item\n"
    )
    (tmp_path / "plain.yaml").write_text(
        "pipeflow: 1\nname: plain\nstages:\n  numbers: {uses: 'package_stages:numbers'}\n"
        "  double: {uses: 'package_stages:double', from: numbers}\nrun: {step: double}\n"
    )
    (tmp_path / "service.yaml").write_text(
        "pipeflow: 1\nname: service\nstages:\n  in: {uses: input}\n"
        "  double: {uses: 'package_stages:double', from: in}\n"
    )
    said = fresh(BLOCKED, str(tmp_path), path=(tmp_path,))
    assert said.splitlines() == ["7", "40", "blocked: aiostream"]


# Entry points and size -----------------------------------------------------------------------------


def test_entry_points_resolve_to_stages_and_resources() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    code = (
        "import importlib, json, sys\nfrom pipeflow import Resource, Stage\nfaults = []\n"
        "for kind, names in json.loads(sys.argv[1]).items():\n"
        "    base = Stage if kind == 'pipeflow.stages' else Resource\n"
        "    for name, entry in names.items():\n"
        "        module, _, attribute = entry.partition(':')\n"
        "        cls = getattr(importlib.import_module(module), attribute)\n"
        "        if not issubclass(cls, base) or not (cls.__doc__ or '').strip():\n"
        "            faults.append(name)\n"
        "print(json.dumps(faults))"
    )
    assert json.loads(fresh(code, json.dumps(project["entry-points"]))) == []
    module, _, attribute = project["scripts"]["pipeflow"].partition(":")
    assert fresh(f"from {module} import {attribute} as main\nprint(callable(main))") == "True\n"


def test_the_installed_entry_points_are_those_of_the_project() -> None:
    from importlib import metadata

    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    for group, names in wanted.items():
        installed = {
            entry.name: entry.value
            for entry in metadata.entry_points(group=group)
            if entry.value in names.values()
        }
        assert installed == names, "install the project again: pip install -e ."


def test_modules_hold_one_concept() -> None:
    long = {
        module_of(path): count
        for path in sources("pipeflow", "pipeflow_stages")
        if (count := len(path.read_text().splitlines())) > LINES
    }
    assert long == {}


# The wheel -----------------------------------------------------------------------------------------


def test_the_wheel_holds_both_packages(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="the build backend is not installed")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT, check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = next(name for name in names if name.endswith("METADATA")).rpartition("/")[0]
        entries = archive.read(f"{info}/entry_points.txt").decode()
    for path in sources("pipeflow", "pipeflow_stages"):
        base = STAGES if path.is_relative_to(STAGES) else ROOT
        assert str(path.relative_to(base)) in names
    assert {"pipeflow/py.typed", "pipeflow_stages/py.typed", f"{info}/licenses/LICENSE"} <= names
    templates = ROOT / "pipeflow" / "cli" / "templates"
    for path in templates.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert str(path.relative_to(ROOT)) in names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"pipeflow", "pipeflow_stages", info}
    assert "pipeflow = pipeflow.cli.__main__:main" in entries
    assert "dflash/train = pipeflow_stages.dflash.train:Train" in entries
