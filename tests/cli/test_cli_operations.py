"""`pipeflow run --operations`: what the engine did, beside the run's other files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from commands import ROOT, pipeflow

from pipeflow.checker import check_operations

if TYPE_CHECKING:
    from pathlib import Path

STAGES = """\
import pipeflow


@pipeflow.stage
def numbers():
    yield from range(5)


@pipeflow.stage
def sink(item):
    pass
"""

FILE = """\
pipeflow: 1
name: t
stages:
  numbers: {uses: "ours:numbers"}
  sink: {uses: "ours:sink", from: numbers}
"""


def test_the_log_of_a_run_can_be_checked(tmp_path: Path) -> None:
    (tmp_path / "ours.py").write_text(STAGES)
    (tmp_path / "file.yaml").write_text(FILE)
    paths = ":".join(map(str, (tmp_path, ROOT)))
    for folder, options in (("with", ["--operations"]), ("without", [])):
        ran = pipeflow("run", "file.yaml", "--run-dir", folder, *options, cwd=tmp_path, PYTHONPATH=paths)
        assert ran.returncode == 0, ran.stderr
        assert (tmp_path / folder / "operations.jsonl").exists() is bool(options)
    lines = (tmp_path / "with" / "operations.jsonl").read_text().splitlines()
    entries = [tuple(json.loads(line)) for line in lines]
    check_operations(entries)
    assert [entry[4] for entry in entries if entry[1] == "made"] == ["numbers"] * 5
    assert "ended" in [entry[1] for entry in entries]


def test_the_option_is_for_those_who_look_for_it() -> None:
    assert "--operations" not in pipeflow("run", "--help").stdout
