"""What the README shows works as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(kind: str, holding: str) -> str:
    """The fenced block of a kind that holds a text; exactly one does."""
    found = [text for text in re.findall(rf"```{kind}\n(.*?)```", README, re.DOTALL) if holding in text]
    assert len(found) == 1, f"{len(found)} blocks of {kind} hold {holding!r}"
    return found[0]


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_the_pipeline_line_by_line_runs(tmp_path: Path) -> None:
    (tmp_path / "squares.yaml").write_text(block("yaml", "name: squares"))
    (tmp_path / "my_stages.py").write_text(block("python", "def numbers"))
    done = call(tmp_path, "-m", "pipeflow", "run", "squares.yaml", "count=25")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == ["81", "361"]
    assert "2 steps" in done.stdout


def test_the_simulated_stage_runs(tmp_path: Path) -> None:
    (tmp_path / "try_it.py").write_text(block("python", "testing.simulate"))
    done = call(tmp_path, "try_it.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:8] == [str(2 * number) for number in range(8)]
    assert "3.2 virtual seconds" in done.stdout


def test_the_class_runs_on_a_device(tmp_path: Path) -> None:
    source = """
@pipeflow.stage
def batches():
    import torch
    for number in range(3):
        yield Batch(torch.full((2,), float(number)))

@pipeflow.stage
def show(item: Batch) -> None:
    print(item.x.tolist())
"""
    (tmp_path / "my_stages.py").write_text(block("python", "class Scale") + source)
    (tmp_path / "scale.yaml").write_text(
        "pipeflow: 1\nname: scale\nstages:\n"
        "  batches: {uses: my_stages:batches}\n"
        "  scale: {uses: my_stages:Scale, from: batches, on: cpu, with: {factor: 3}}\n"
        "  show: {uses: my_stages:show, from: scale}\n"
    )
    done = call(tmp_path, "-m", "pipeflow", "run", "scale.yaml", "--run-dir", "r")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:3] == ["[0.0, 0.0]", "[3.0, 3.0]", "[6.0, 6.0]"]
    assert '"mean": 6.0' in (tmp_path / "r" / "metrics.jsonl").read_text()


def test_the_service_answers(tmp_path: Path) -> None:
    (tmp_path / "service.yaml").write_text(block("yaml", "name: service"))
    (tmp_path / "my_stages.py").write_text(block("python", "def numbers"))
    (tmp_path / "main.py").write_text(
        block("python", "async def serve")
        + "\nasync def requests():\n    for number in range(4):\n        yield number\n"
        + "\nimport asyncio\nasyncio.run(serve(requests()))\n"
    )
    done = call(tmp_path, "main.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["49", "0", "1", "4", "9"]


def test_ci_runs_the_second_command() -> None:
    found = re.search(r"<!-- command 2 -->\n```bash\n(.*?)\n```\n<!-- end -->", README, re.DOTALL)
    assert found is not None
    runs = re.findall(r"-m pytest (.*?)(?: &&|$)", found[1])
    assert runs == ["-n 2 -m 'not slow and not alone'", "-m 'alone and not slow'"], "all but the slow ones"
    assert "command 2" in (ROOT / ".ci" / "run").read_text()
