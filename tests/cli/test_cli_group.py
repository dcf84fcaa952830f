"""The group: help, usage errors, start-up time, and that nothing here needs torch."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from commands import ROOT, pipeflow

from pipeflow.cli.__main__ import COMMANDS

if TYPE_CHECKING:
    from pathlib import Path

FILE = """\
pipeflow: 1
name: small
stages:
  input: {uses: input}
  route: {uses: route, from: input, with: {by: kind, ports: [a, b]}}
  barrier: {uses: barrier, from: route, every: 5}
  release: {uses: release_cache, from: barrier}
"""


def test_help_lists_every_command() -> None:
    done = pipeflow("--help")
    assert done.returncode == 0
    assert done.stderr == ""
    for name, text in COMMANDS.items():
        assert f"  {name.ljust(6)}  {text}\n" in done.stdout


def test_version() -> None:
    import pipeflow as package

    assert pipeflow("--version").stdout == f"pipeflow {package.__version__}\n"


def test_usage_errors_exit_2() -> None:
    unknown = pipeflow("chek")
    assert unknown.returncode == 2
    assert "no such command 'chek': did you mean 'check'?" in unknown.stderr
    assert unknown.stdout == ""
    assert pipeflow("check").returncode == 2
    assert pipeflow("check", "--no-such-option", "x").returncode == 2


@pytest.mark.parametrize("command", [
    ["--help"], ["check", "small.yaml"], ["check", "small.yaml", "--here"], ["graph", "small.yaml"],
    ["schema"], ["stages"], ["stages", "release_cache"], ["init", "--list"],
], ids=" ".join)  # fmt: skip
def test_works_without_torch(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(FILE)
    hook = tmp_path / "hook"
    hook.mkdir()
    done = pipeflow(*command, cwd=tmp_path, without_torch=hook)
    assert (done.returncode, done.stderr) == (0, "")
    assert "cannot be used" not in done.stdout


def test_the_hook_really_refuses_torch(tmp_path: Path) -> None:
    done = pipeflow("doctor", without_torch=tmp_path)
    assert done.returncode == 1
    assert "torch does not import" in done.stdout


def _best(command: list[str], env: dict[str, str]) -> float:
    def once() -> float:
        begin = time.perf_counter()
        subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=True)
        return time.perf_counter() - begin

    return min(once() for _ in range(12))


@pytest.mark.alone
def test_help_is_quick() -> None:
    """Under 0.15 s beyond a bare interpreter: the best of several, as other work shares the machine."""
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    bare = _best([sys.executable, "-c", "pass"], env)
    shown = _best([sys.executable, "-m", "pipeflow", "--help"], env)
    assert shown - bare < 0.15


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from pipeflow.cli.__main__ import cli\n"
        "cli.main(['--help'], standalone_mode=False)\n"
        "heavy = {'torch', 'yaml', 'rich', 'anyio', 'asyncio', 'importlib.metadata', 'pipeflow.graph'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    env = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"


def test_a_pipeflow_error_is_a_line_and_exit_1() -> None:
    done = pipeflow("stages", "barier")
    assert done.returncode == 1
    assert done.stderr == "pipeflow: no stage is called 'barier'. did you mean 'barrier'?\n"
    assert done.stdout == ""


def test_every_command_has_its_own_help() -> None:
    for name in COMMANDS:
        done = pipeflow(name, "--help")
        assert done.returncode == 0, name
        assert done.stdout.startswith(f"Usage: pipeflow {name} "), name
