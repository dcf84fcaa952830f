"""The tiny example on a GPU: the same file, the same results as on the CPU, and no host wait in a stage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

HOOK = """
import importlib

def guard(module, name):
    home = importlib.import_module(module)
    cls = getattr(home, name)
    inner = cls.run

    def run(self, item, ctx):
        import torch

        torch.cuda.set_sync_debug_mode("error")
        try:
            return inner(self, item, ctx)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    run.__annotations__ = inner.__annotations__
    run.__globals__.update({key: value for key, value in vars(home).items() if key[0] != "_"})
    cls.run = run

guard("pipeflow_stages.dflash.target", "Target")
guard("pipeflow_stages.dflash.pack", "Pack")
guard("pipeflow_stages.dflash.train", "Train")
"""

TINY = Path(__file__).parents[2] / "examples" / "dflash_tiny.yaml"


def run(folder: Path, *overrides: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "pipeflow", "run", str(TINY), *overrides, "--json", "--run-dir", str(folder)],
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(300)
def test_the_same_file_uses_the_gpu(tmp_path: Path) -> None:
    summary = run(tmp_path / "run")
    assert summary["device"] == ["cuda:0"]
    assert summary["fit_accuracy"] >= 0.98
    assert summary["tau_end"] >= 6.4
    assert summary["lossless"] is True


@pytest.mark.timeout(300)
def test_no_stage_makes_the_host_wait(tmp_path: Path) -> None:
    """torch raises at every synchronizing call inside `run` of the target, pack and train stages."""
    hook = tmp_path / "sitecustomize.py"
    hook.write_text(HOOK)
    import os

    done = subprocess.run(
        [sys.executable, "-m", "pipeflow", "run", str(TINY), "steps=20", "--run-dir", str(tmp_path / "run")],
        capture_output=True, text=True, check=False, timeout=280,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
