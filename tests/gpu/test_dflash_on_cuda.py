"""The tiny example on a GPU: the same file, the same results as on the CPU, and no host wait in a stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from running import run_tiny

if TYPE_CHECKING:
    from pathlib import Path

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


@pytest.mark.timeout(300)
def test_the_same_file_uses_the_gpu(tmp_path: Path) -> None:
    summary = run_tiny(tmp_path / "run")
    assert summary["device"] == ["cuda:0"]
    assert summary["fit_accuracy"] >= 0.98
    assert summary["tau_end"] >= 6.4
    assert summary["lossless"] is True


@pytest.mark.timeout(300)
def test_no_stage_makes_the_host_wait(tmp_path: Path) -> None:
    """torch raises at every synchronizing call inside `run` of the target, pack and train stages."""
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    run_tiny(tmp_path / "run", "steps=20", imports=tmp_path)
