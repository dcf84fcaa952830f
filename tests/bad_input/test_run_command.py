"""`pipeflow run`: what goes to which stream, the live view, the run folder, and what the options do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bad_input_kit import KEYS, ROOT, Run, all_whole, lines_of, summary_of, tiny

NUMBERS = """\
pipeflow: 1
name: numbers
params: {count: 5, key: "${secret:PIPEFLOW_TEST_SECRET}"}
stages:
  numbers: {uses: "numbers_stages:numbers", with: {count: "${params.count}"}}
  show: {uses: "numbers_stages:show", from: numbers, with: {key: "${params.key}"}}
run: {step: show}
"""
STAGES = """\
from collections.abc import Iterator

import pipeflow


@pipeflow.stage
def numbers(*, count: int) -> Iterator[int]:
    yield from range(count)


@pipeflow.stage
def show(item: int, ctx: pipeflow.Context, *, key: str, loss: float = 0.5) -> None:
    ctx.log(loss=loss + item)
"""


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    (tmp_path / "numbers_stages.py").write_text(STAGES)
    file = tmp_path / "numbers.yaml"
    file.write_text(NUMBERS)
    return file


def command(*argv: str, cwd: Path, script: bool = False, **options: Any) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter: the installed command, or `python -m pipeflow`."""
    start = (
        [str(Path(sys.executable).with_name("pipeflow"))] if script else [sys.executable, "-m", "pipeflow"]
    )
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "stages")]),
        "PIPEFLOW_TEST_SECRET": "hush",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [*start, *argv], cwd=cwd, env=env, text=True, timeout=60, check=False,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )  # fmt: skip


# Streams -------------------------------------------------------------------------------------------


def test_the_command_and_the_module_are_one(numbers: Path, tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("pipeflow")
    assert script.exists(), "pipeflow is not installed beside this interpreter"
    seen = []
    for name, is_script in (("a", True), ("b", False)):
        done = command("run", str(numbers), "--run-dir", name, "--json", cwd=tmp_path, script=is_script)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == 1
        summary = json.loads(done.stdout)
        assert set(KEYS) <= set(summary)
        assert (summary["status"], summary["exit_code"], summary["steps"]) == ("done", 0, 5)
        assert summary == summary_of(tmp_path / name)
        seen.append({k: v for k, v in summary.items() if not k.endswith("_s")})
    assert seen[0] == seen[1]


def test_without_json_the_summary_is_for_people(numbers: Path, tmp_path: Path) -> None:
    done = command("run", str(numbers), cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("done after ")
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"numbers-\d{8}-\d{6}", folder.name)
    assert str(folder) in done.stdout
    assert str(folder) in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def test_a_closed_stderr_does_not_end_a_run(numbers: Path, tmp_path: Path) -> None:
    """`pipeflow run .. 2>&1 | head`: the view has nobody to talk to, the run goes on."""
    numbers.write_text(NUMBERS.replace("step: show", "step: show, log_every: 1ms"))
    reader, writer = os.pipe()
    os.close(reader)
    done = command(
        "run",
        str(numbers),
        "--run-dir",
        "r",
        "count=300",
        cwd=tmp_path,
        stderr=writer,
        stdout=subprocess.DEVNULL,
    )
    os.close(writer)
    assert done.returncode == 0
    assert summary_of(tmp_path / "r")["steps"] == 300


def test_no_progress_bars_without_a_terminal(tmp_path: Path) -> None:
    file = tiny(tmp_path, hold="uses: 'points:Hold', with: {at: 20}", release="points:Quiet")
    run = Run(tmp_path, "run", str(file), "--run-dir", "r", "--json", "steps=30")
    run.reach("run")  # it stands until it was told how it stands
    run.until(lambda said: re.search(r"running .* loss \d.* tau \d", said), "tells how it stands")
    run.go("run")
    assert run.wait() == 0, run.stderr
    (line,) = run.stdout.splitlines()
    assert json.loads(line) == summary_of(tmp_path / "r")
    assert "\x1b" not in run.stderr
    assert "\r" not in run.stderr
    found = [line for line in run.stderr.splitlines() if "running" in line and "loss" in line]
    for part in (r"step \d+/30", r"ETA ", r"[\d,]+ tok/s", r"loss \d", r"tau \d", r"queues: .*train \d/4"):
        assert re.search(part, found[-1]), (part, found[-1])


def test_a_live_view_on_a_terminal(tmp_path: Path) -> None:
    """Throughput, loss, tau, ETA, queue fill and the bottleneck; stdout stays for data."""
    file = tiny(tmp_path, hold="uses: 'points:Hold', with: {at: 20}", release="points:Quiet")
    argv = ["run", str(file), "--run-dir", "r", "--json", "steps=40"]
    run = Run(tmp_path, *argv, terminal=True, TERM="xterm")
    run.reach("run")  # it stands until the view has shown how it stands
    run.until(lambda said: "train" in said and "loss" in said, "shows a view")
    run.go("run")
    assert run.wait() == 0, run.stderr
    shown = run.stderr
    assert "\x1b[?25l" in shown  # live: the cursor is hidden, ..
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    for part in (
        r"step \d+/40",
        r"ETA \d+:\d\d",
        r"[\d,]+ tok/s",
        r"loss \d+\.\d+",
        r"tau \d+\.\d+",
        r"bottleneck \w+",
        r"#+ *[1-9]/4",  # a queue that fills
        r"<- bottleneck",
        "loading",
    ):
        assert re.search(part, text), (part, text[-3000:])
    assert shown.count("\x1b[?25l") <= shown.count("\x1b[?25h")  # the cursor is there again
    assert len(run.stdout.splitlines()) == 1
    assert json.loads(run.stdout)["status"] == "done"


# The folder ----------------------------------------------------------------------------------------


def test_the_run_folder_is_as_promised(tmp_path: Path) -> None:
    file = tiny(tmp_path)
    run = Run(tmp_path, "run", str(file), "--run-dir", "r", "--json")
    assert run.wait() == 0, run.stderr
    folder = tmp_path / "r"
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    version = {"model.safetensors", "version.json", "COMPLETE"}
    assert names == {
        "pipeline.yaml",
        "metrics.jsonl",
        "log.jsonl",
        "summary.json",
        "profile.json",
        "drafter/config.json",
        "drafter/model.safetensors",
        *(f"weights/v{n:08d}/{name}" for n in (1, 2, 3) for name in version),
    }
    all_whole(folder)
    metrics = lines_of(folder / "metrics.jsonl")
    assert all({"t", "stage", "step"} <= set(line) for line in metrics)
    train = [line for line in metrics if line["stage"] == "train"]
    assert [line["step"] for line in train] == [1, 2, 3, 4, 5, 6]
    for line in train:
        assert {"loss", "lr", "grad_norm", "tokens", "tokens_per_s", "anchors", "slot_accuracy"} <= set(line)
        assert line["tokens_per_s"] > 0
        assert len(line["slot_accuracy"]) == 3
    evaluate = [line for line in metrics if line["stage"] == "evaluate"]
    assert [(line["mode"], line["step"]) for line in evaluate] == [
        ("teacher_forced", 0), ("teacher_forced", 2), ("teacher_forced", 4), ("teacher_forced", 6),
        ("teacher_forced", 6), ("decode", 6),
    ]  # fmt: skip
    for line in evaluate:
        assert line["tau"] == pytest.approx(line["accepted"] / line["blocks"])
        assert sum(line["histogram"]) == line["blocks"]
        assert sum(n * count for n, count in enumerate(line["histogram"])) == line["accepted"]
    summary = summary_of(folder)
    assert summary["tau_start"] == evaluate[0]["tau"]
    assert summary["tau_end"] == evaluate[-2]["tau"]
    assert summary["tau_decode"] == evaluate[-1]["tau"]
    assert summary["loss_first"] == train[0]["loss"]
    assert summary["loss_last"] == train[-1]["loss"]
    assert summary["tokens"] == sum(line["tokens"] for line in train)
    assert summary["lossless"] is True
    assert summary["tau_constant"] >= 1.0


def test_tokens_a_second_are_those_between_steps(tmp_path: Path) -> None:
    """The logged rate is tokens over the time since the step before: its times add up to the run's."""
    file = tiny(tmp_path, release="points:Quiet")
    run = Run(tmp_path, "run", str(file), "--run-dir", "r", "steps=30")
    assert run.wait() == 0, run.stderr
    train = [line for line in lines_of(tmp_path / "r" / "metrics.jsonl") if line["stage"] == "train"]
    spent = sum(line["tokens"] / line["tokens_per_s"] for line in train[1:])
    assert spent == pytest.approx(train[-1]["t"] - train[0]["t"], rel=0.1, abs=0.02)


def test_secrets_stay_out_of_the_folder(numbers: Path, tmp_path: Path) -> None:
    done = command("run", str(numbers), "--run-dir", "r", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    kept = "".join(path.read_text() for path in (tmp_path / "r").rglob("*") if path.is_file())
    assert "numbers_stages:show" in kept
    assert "hush" not in kept + done.stdout + done.stderr


# Options -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
def test_strict_fails_on_a_warning_of_the_check(strict: bool, numbers: Path, tmp_path: Path) -> None:
    text = NUMBERS.replace('uses: "numbers_stages:numbers",', 'uses: "numbers_stages:numbers", bytes: 2MiB,')
    numbers.write_text(text.replace("run: {", "run: {queue: {bytes: 1MiB}, "))
    done = command("run", str(numbers), "--run-dir", "r", "--json", *["--strict"] * strict, cwd=tmp_path)
    assert "warning: " in done.stderr
    assert done.returncode == (1 if strict else 0)
    assert json.loads(done.stdout)["status"] == ("failed" if strict else "done")
    assert (tmp_path / "r").exists() is not strict


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_strict_fails_on_a_loss_that_is_not_finite(
    value: str, strict: bool, numbers: Path, tmp_path: Path
) -> None:
    (tmp_path / "numbers_stages.py").write_text(
        STAGES.replace("loss: float = 0.5", f"loss: float = float('{value}')")
    )
    done = command("run", str(numbers), "--run-dir", "r", "--json", *["--strict"] * strict, cwd=tmp_path)
    assert done.returncode == (1 if strict else 0), done.stderr
    first = lines_of(tmp_path / "r" / "metrics.jsonl")[0]
    assert first["loss"] is None  # strict JSON has no NaN
    events = [line["event"] for line in lines_of(tmp_path / "r" / "log.jsonl")]
    assert "loss is not finite" in events
    if strict:
        assert "stage 'show'" in done.stderr
        assert value in done.stderr
        assert "step 1" in done.stderr


def test_debug_sync_reaches_the_engine(
    numbers: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from pipeflow import pipeline
    from pipeflow.cli.__main__ import main

    monkeypatch.setenv("PIPEFLOW_TEST_SECRET", "hush")
    seen = []
    real = pipeline.Pipeline.load

    async def load(self: Any) -> None:
        seen.append((self._engine.debug_sync, self._engine.strict))
        await real(self)

    monkeypatch.setattr(pipeline.Pipeline, "load", load)
    monkeypatch.syspath_prepend(str(tmp_path))
    for options in ([], ["--debug-sync"], ["--strict"]):
        with pytest.raises(SystemExit):
            main(["run", str(numbers), "--run-dir", str(tmp_path / "r"), *options])
    sys.modules.pop("numbers_stages", None)
    assert seen == [(False, False), (True, False), (False, True)]


def test_a_fault_of_the_view_does_not_end_a_run(
    numbers: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from pipeflow.cli.__main__ import main
    from pipeflow.observe import view

    def broken(*_: Any) -> None:
        raise ValueError("a fault of the view")

    async def show(pipeline: Any, every: float) -> None:
        broken()

    monkeypatch.setenv("PIPEFLOW_TEST_SECRET", "hush")
    monkeypatch.setattr(view, "show_progress", show)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SystemExit) as left:
        main(["run", str(numbers), "--run-dir", str(tmp_path / "r")])
    sys.modules.pop("numbers_stages", None)
    assert left.value.code == 0
    assert "a fault of the view" in capfd.readouterr().err


def test_a_stage_that_fails_is_told_with_its_stack(numbers: Path, tmp_path: Path) -> None:
    (tmp_path / "numbers_stages.py").write_text(STAGES.replace("ctx.log(", "ctx.lgo("))
    done = command("run", str(numbers), "--run-dir", "r", "--json", cwd=tmp_path)
    assert done.returncode == 1
    assert "pipeflow: stage 'show', item 0: AttributeError: " in done.stderr
    assert 'numbers_stages.py", line' in done.stderr  # where the author looks
    summary = json.loads(done.stdout)
    assert (summary["status"], summary["exit_code"]) == ("failed", 1)
    assert summary == summary_of(tmp_path / "r")


def test_a_fault_while_closing_is_told_in_the_summary_too(numbers: Path, tmp_path: Path) -> None:
    """summary.json must not say `done` where the command says 1."""
    (tmp_path / "numbers_stages.py").write_text(
        STAGES
        + "\n\nclass Show(show):\n    def close(self) -> None:\n        raise RuntimeError('cannot close')\n"
    )
    numbers.write_text(NUMBERS.replace("numbers_stages:show", "numbers_stages:Show"))
    done = command("run", str(numbers), "--run-dir", "r", "--json", cwd=tmp_path)
    assert done.returncode == 1
    assert "cannot close" in done.stderr
    assert summary_of(tmp_path / "r")["status"] == "failed"
    assert json.loads(done.stdout) == summary_of(tmp_path / "r")


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("stages: [\n", 1, r"file\.yaml:\d+:\d+ - "),
        (
            "pipeflow: 1\nname: x\nstages: {a: {uses: data/jsonll}}\n",
            1,
            r"file\.yaml:3:20 - stages\.a\.uses: ",
        ),
        (
            "pipeflow: 1\nname: x\nstages: {a: {uses: data/jsonl, with: {path: none.jsonl}}}\n",
            1,
            r"none\.jsonl: ",
        ),
        (None, 2, r"file\.yaml"),
    ],
)
def test_exit_codes_of_a_process_of_its_own(text: str | None, code: int, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "file.yaml").write_text(text)
    done = command("run", "file.yaml", "--run-dir", "r", cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert re.search(said, done.stderr), done.stderr
    assert "Traceback" not in done.stderr
