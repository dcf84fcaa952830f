"""Stage modules import no torch: `check` and `schema` work where it is not installed."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]

PROBE = """
import importlib, importlib.abc, json, sys, typing

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "transformers", "safetensors", "tokenizers", "gguf", "numpy"}:
            raise ModuleNotFoundError(f"blocked: {name}")

sys.meta_path.insert(0, Blocked())
faults = {}
for entry in json.loads(sys.argv[1]):
    module, _, name = entry.partition(":")
    try:
        cls = getattr(importlib.import_module(module), name)
        typing.get_type_hints(cls.Config)
        if hasattr(cls, "run"):
            # As the engine does: the item's type and the result's must resolve, that of ctx need not.
            wanted = {k: v for k, v in cls.run.__annotations__.items() if k != "ctx"}
            assert "return" in wanted, "run does not say what it returns"
            scope = vars(sys.modules[cls.run.__module__])
            typing.get_type_hints(type("Probe", (), {"__annotations__": wanted}), globalns=scope)
    except Exception as error:
        faults[entry] = repr(error)
print(json.dumps(faults))
"""


def probe(entries: list[str], path: list[Path]) -> dict[str, str]:
    code = f"import sys; sys.path[:0] = {[str(p) for p in path]!r}\n{PROBE}"
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(entries)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_every_registered_stage_and_resource_imports_without_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    entries = [*project["pipeflow.stages"].values(), *project["pipeflow.resources"].values()]
    assert len(entries) >= 16
    assert probe(entries, [ROOT, ROOT / "stages"]) == {}


def test_the_probe_finds_a_stage_that_imports_torch(tmp_path: Path) -> None:
    (tmp_path / "bad_stage.py").write_text("import torch\nclass Bad: pass\n")
    (tmp_path / "bad_hint.py").write_text(
        "from __future__ import annotations\n"
        "class Bad:\n    class Config: pass\n    def run(self, item: torch.Tensor) -> int: ...\n"
    )
    faults = probe(["bad_stage:Bad", "bad_hint:Bad"], [tmp_path])
    assert "blocked: torch" in faults["bad_stage:Bad"]
    assert "torch" in faults["bad_hint:Bad"]
