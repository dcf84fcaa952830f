"""What the command line imports, cannot write, or is given in the place of a file."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from commands import ROOT, pipeflow

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """\
from collections.abc import Iterator

import pipeflow


@pipeflow.stage
def src() -> Iterator[int]:
    yield 1
"""
FILE = "pipeflow: 1\nname: n\nstages: {a: {uses: 'MODULE:src'}}\n"


def write(folder: Path, module: str, source: str = SOURCE) -> str:
    (folder / f"{module}.py").write_text(source)
    file = folder / "n.yaml"
    file.write_text(FILE.replace("MODULE", module))
    return str(file)


@pytest.mark.parametrize("raised", ["sys.exit(7)", "sys.exit(0)", "raise GeneratorExit"])
def test_a_module_that_exits_is_a_finding(raised: str, tmp_path: Path) -> None:
    done = pipeflow("check", write(tmp_path, "leaves", f"import sys\n{raised}\n"))
    assert done.returncode == 1
    assert "[broken-stage]" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("module", ["queue", "random", "types", "click"])
@pytest.mark.parametrize("here", [True, False])
def test_a_module_named_as_another_hides_none(module: str, here: bool, tmp_path: Path) -> None:
    done = pipeflow("check", write(tmp_path, module), cwd=None if here else tmp_path.parent)
    assert done.returncode == 1, done.stderr
    assert "[broken-stage]" in done.stdout
    whose = "the one in" if module == "click" else "the standard library's"
    assert f"module {module!r} is {whose}" in done.stdout
    assert f"not {module}.py beside the file" in done.stdout
    assert "rename yours" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("module", ["queue", "random", "types", "selectors"])
def test_a_module_that_no_stage_names_hides_none(module: str, tmp_path: Path) -> None:
    file = write(tmp_path, "good_source")
    (tmp_path / f"{module}.py").write_text("raise RuntimeError('imported')\n")
    for command in ("check", "graph"):
        done = pipeflow(command, file)
        assert (done.returncode, done.stderr) == (0, "")
    done = pipeflow("run", file, "--run-dir", str(tmp_path / "r"))
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "command",
    [
        "schema",
        "stages",
        "check FILE",
        "check FILE --json",
        "graph FILE",
        "run FILE --json",
        "run FILE",
        "--help",
    ],
)
def test_a_full_stdout_is_a_line_and_exit_1(command: str, unbuffered: str, tmp_path: Path) -> None:
    file = write(tmp_path, "good_source")
    argv = [file if each == "FILE" else each for each in command.split()]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "stages")]),
        "PYTHONUNBUFFERED": unbuffered,
    }
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pipeflow", *argv],
            cwd=tmp_path, env=env, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if not line.startswith("run folder")]
    assert lines == ["pipeflow: cannot write to stdout: No space left on device"]


def test_a_device_is_no_pipeline_file() -> None:
    done = pipeflow("check", os.devnull)
    assert done.returncode == 2
    assert "is not a regular file" in done.stderr
    assert "does not exist" not in done.stderr


ROUTE = """\
pipeflow: 1
name: n
stages:
  a: {uses: input}
  r: {uses: route, from: a, with: {by: kind, ports: [x, PORT], otherwise: rest}}
  x: {uses: output, from: r.x}
  y: {uses: output, from: r.y}
  z: {uses: output, from: r.rest}
"""


def test_ports_of_a_route(tmp_path: Path) -> None:
    file = tmp_path / "n.yaml"
    file.write_text(ROUTE.replace("PORT", "y"))
    told = pipeflow("check", str(file)).stdout
    assert "more than once" not in told
    assert "has no output" not in told
    file.write_text(ROUTE.replace("PORT", "x"))
    assert "`ports` names 'x' more than once" in pipeflow("check", str(file)).stdout
