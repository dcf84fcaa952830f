"""Runs the command line as a person does: another process, with or without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

BLOCKED = """\
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("torch is blocked here", name="torch")

sys.meta_path.insert(0, Block())
"""


def pipeflow(
    *args: str, cwd: Path | None = None, without_torch: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """`python -m pipeflow ARGS`. `without_torch`: an empty folder for the hook that refuses to import it."""
    paths = [str(ROOT), str(ROOT / "stages")]
    if without_torch is not None:
        (without_torch / "sitecustomize.py").write_text(BLOCKED)
        paths.insert(0, str(without_torch))
    inherited = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    environment = {**inherited, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "100", **env}
    return subprocess.run(
        [sys.executable, "-m", "pipeflow", *args],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
