"""`pipeflow run` is signalled or killed, and `--resume` goes on: the shipped source and sink, real files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

ROWS = 90
FILE = """\
pipeflow: 1
name: copy
stages:
  rows: {uses: data/jsonl, with: {path: rows.jsonl, epochs: 2}}
  step: {uses: "beside:Step", from: rows}
  out: {uses: data/write_jsonl, from: step, with: {path: out.jsonl}}
run:
  checkpoint: {of: step, every: 10}
  queue: {items: 2}
"""
BESIDE = """\
import os
from pipeflow.stage import Stage
from pipeflow_stages.types import Conversation

class Step(Stage):
    def run(self, item: Conversation, ctx) -> Conversation:
        name, _, step = os.environ.get("AT", "").partition(":")
        if step == str(ctx.sequence):
            os.kill(os.getpid(), int(name))
        ctx.log(text=item.text)
        return item
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "copy.yaml").write_text(FILE)
    (tmp_path / "beside.py").write_text(BESIDE)
    rows = [json.dumps({"text": f"row {number}"}) for number in range(ROWS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    return tmp_path


def run(folder: Path, *options: str, at: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipeflow", "run", "copy.yaml", "--json", *options],
        cwd=folder, env={**os.environ, "AT": at}, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def summary(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def logged(run_dir: Path) -> list[Any]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["text"]) for line in lines if line["stage"] == "step"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_it_goes_on_where_it_was(folder: Path, how: signal.Signals) -> None:
    whole = summary(run(folder, "--run-dir", "whole"))
    assert whole["status"] == "done"
    first = run(folder, at=f"{how.value}:70")
    if how is signal.SIGINT:
        assert summary(first)["status"] == "drained"
    else:
        assert first.returncode == -signal.SIGKILL
    second = summary(run(folder, "--resume", "auto"))
    (run_dir,) = (folder / "runs").iterdir()
    assert second["status"] == "done"
    assert second["rows_written"] == 2 * ROWS
    assert (run_dir / "out.jsonl").read_bytes() == (folder / "whole" / "out.jsonl").read_bytes()
    assert logged(run_dir) == logged(folder / "whole")
    assert [path.name for path in run_dir.glob(".*")] == []


def test_auto_without_a_run_starts_one(folder: Path) -> None:
    assert summary(run(folder, "--resume", "auto"))["status"] == "done"


def test_another_file_is_refused_by_name(folder: Path) -> None:
    assert run(folder, at=f"{signal.SIGKILL.value}:70").returncode == -signal.SIGKILL
    (folder / "copy.yaml").write_text(FILE.replace("epochs: 2", "epochs: 1"))
    done = run(folder, "--resume", "auto")
    assert done.returncode == 1
    assert "made by another file (stages.rows.with.epochs)" in done.stderr
    (run_dir,) = (folder / "runs").iterdir()
    done = run(folder, "--resume", str(run_dir))
    assert summary(done)["rows_written"] == ROWS


def test_a_file_without_checkpoints_has_nothing_to_go_on_from(folder: Path) -> None:
    (folder / "copy.yaml").write_text(FILE.replace("  checkpoint: {of: step, every: 10}\n", ""))
    done = run(folder, "--resume", "auto")
    assert done.returncode == 1
    assert "the file has no `run.checkpoint`" in done.stderr
