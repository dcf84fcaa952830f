"""The tiny example as a user runs it: the real command, the file as it ships, nothing fetched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pipeflow

BESIDE = Path(__file__).parents[1] / "examples"
EXAMPLES = BESIDE if BESIDE.is_dir() else Path(pipeflow.__file__).parents[1] / "examples"
"""Beside the tests; in the checkout that is installed where the tests were copied elsewhere."""
TINY = EXAMPLES / "dflash_tiny.yaml"


def run_tiny(folder: Path, *overrides: str, imports: Path | None = None) -> dict[str, Any]:
    """The summary of `pipeflow run` into `folder`, as the last line of its stdout.

    `imports`: a folder that is first on its path, with a `sitecustomize.py` say.
    """
    env = dict(os.environ)
    if imports is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(imports), env.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pipeflow", "run", str(TINY), *overrides, "--json", "--run-dir", str(folder)],
        capture_output=True, text=True, check=False, timeout=280, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
