"""SIGINT and SIGTERM at every phase of a real run: one drains, two cancel, three leave at once."""

from __future__ import annotations

import shutil
import signal
import time
from typing import TYPE_CHECKING

import pytest
from bad_input_kit import Run, all_whole, lines_of, summary_of, tiny

if TYPE_CHECKING:
    from pathlib import Path

PLACES = {
    "load": {"gate": "points:Gate"},
    "run": {"gate": "data/phrase_book", "hold": "uses: 'points:Hold', with: {at: 3}"},
    "barrier": {"release": "points:HoldQuiet"},
    "evaluate": {"evaluate": "points:HoldEvaluate"},
    "save": {"train": "points:HoldSave"},
}
"""Where a run stands, and what makes it stand there."""


def start(folder: Path, place: str, *options: str, **changes: str) -> Run:
    """A run that stands at a place."""
    file = tiny(folder, **(PLACES[place] | changes))
    run = Run(folder, "run", str(file), "--run-dir", "r", "--json", *options)
    run.reach(place)
    return run


def loaded(run_dir: Path) -> bytes:
    """The saved drafter, loaded for a check; its weights' bytes."""
    from pipeflow_stages.dflash.export import load_drafter

    drafter, _ = load_drafter(run_dir / "drafter")
    assert sum(p.numel() for p in drafter.parameters()) > 0
    return (run_dir / "drafter" / "model.safetensors").read_bytes()


LOADS = {"preparing", "prepared", "loading", "loaded", "setting up", "set up"}
"""What log.jsonl says of every run."""


def told(run: Run) -> None:
    run.until(lambda said: "draining" in said, "says that it drains")


@pytest.mark.parametrize("place", PLACES)
def test_one_signal_drains_and_saves(place: str, tmp_path: Path) -> None:
    steps = 6 if place == "save" else 500
    run = start(tmp_path, place, f"steps={steps}")
    begun = time.monotonic()
    run.signal()
    told(run)
    run.go(place)
    assert run.wait(30) == 0, run.stderr
    assert time.monotonic() - begun < 30
    summary = summary_of(tmp_path / "r")
    assert (summary["status"], summary["exit_code"]) == ("drained", 0)
    assert summary["steps"] < steps or place == "save"
    loaded(tmp_path / "r")
    all_whole(tmp_path / "r")
    events = [line["event"] for line in lines_of(tmp_path / "r" / "log.jsonl")]
    assert [event for event in events if event not in LOADS] == ["drain"]


def test_sigterm_drains_too(tmp_path: Path) -> None:
    run = start(tmp_path, "run")
    run.signal(signal.SIGTERM)
    told(run)
    run.go("run")
    assert run.wait(30) == 0, run.stderr
    assert summary_of(tmp_path / "r")["status"] == "drained"
    loaded(tmp_path / "r")


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that ended well."""
    folder = tmp_path_factory.mktemp("earlier")
    assert Run(folder, "run", str(tiny(folder)), "--run-dir", "r", "steps=2").wait() == 0
    return folder / "r"


@pytest.mark.axiom("7.4")
@pytest.mark.parametrize("place", PLACES)
def test_a_second_signal_ends_within_three_seconds(place: str, tmp_path: Path, earlier: Path) -> None:
    """Though whatever runs there never comes back. What an earlier run saved in the folder stays whole."""
    shutil.copytree(earlier, tmp_path / "r")
    before = loaded(tmp_path / "r")
    grace = "2s" if place in ("run", "save") else "300ms"  # 2s is the default
    run = start(tmp_path, place, grace=grace)
    run.signal()
    told(run)
    second = time.monotonic()
    run.signal()
    assert run.wait(10) == 130, run.stderr
    assert time.monotonic() - second < 3
    summary = summary_of(tmp_path / "r")
    assert (summary["status"], summary["exit_code"]) == ("forced", 130)
    assert '"forced"' in run.stdout.splitlines()[-1]
    assert loaded(tmp_path / "r") == before
    all_whole(tmp_path / "r")


@pytest.mark.axiom("7.4")
def test_a_third_signal_leaves_at_once(tmp_path: Path) -> None:
    run = start(tmp_path, "run", grace="60s")
    run.signal()
    told(run)
    run.signal()
    run.until(lambda said: "cancelling" in said, "says that it cancels")
    third = time.monotonic()
    run.signal()
    assert run.wait(10) == 130, run.stderr
    assert time.monotonic() - third < 1.5
    assert summary_of(tmp_path / "r")["status"] == "forced"
    assert "abandoned" in run.stderr
    assert "hold: waits for its own code" in run.stderr  # what each stage waited for


@pytest.mark.parametrize("how", ["python", "c"])
def test_a_busy_loop_does_not_hold_the_command(how: str, tmp_path: Path) -> None:
    hold = f"uses: 'points:Busy', with: {{at: 2, how: {how}}}"
    file = tiny(tmp_path, hold=hold, grace="200ms")
    run = Run(tmp_path, "run", str(file), "--run-dir", "r")
    run.reach("busy")
    run.signal()
    told(run)  # at once: not when the loop is free again
    second = time.monotonic()
    run.signal(signal.SIGTERM)
    assert run.wait(10) == 130, run.stderr
    assert time.monotonic() - second < 3
    assert summary_of(tmp_path / "r")["status"] == "forced"


def test_a_busy_loop_drains_when_it_is_free(tmp_path: Path) -> None:
    file = tiny(tmp_path, hold="uses: 'points:Busy', with: {at: 2}")
    run = Run(tmp_path, "run", str(file), "--run-dir", "r")
    run.reach("busy")
    run.signal()
    told(run)
    run.go("busy")
    assert run.wait(30) == 0, run.stderr
    assert summary_of(tmp_path / "r")["status"] == "drained"
    loaded(tmp_path / "r")


def checking(folder: Path) -> Run:
    """A run that stands in the check of its file, so before there is a pipeline: a module of its stages."""
    file = tiny(folder, hold="uses: 'slow_import:passing'")
    (folder / "slow_import.py").write_text(
        "import points\npoints.stand('import')\nfrom points import passing\n"
    )
    run = Run(folder, "run", str(file), "--run-dir", "r", "--json")
    run.reach("import")
    return run


def test_a_signal_before_the_pipeline_is_there_drains_it(tmp_path: Path) -> None:
    run = checking(tmp_path)
    run.signal()
    told(run)
    run.go("import")
    assert run.wait(30) == 0, run.stderr
    summary = summary_of(tmp_path / "r")
    assert summary["status"] == "drained"
    assert summary["steps"] == 0
    loaded(tmp_path / "r")


def test_two_signals_before_the_pipeline_is_there_end_at_once(tmp_path: Path) -> None:
    run = checking(tmp_path)
    run.signal()
    told(run)
    second = time.monotonic()
    run.signal()
    assert run.wait(10) == 130, run.stderr
    assert time.monotonic() - second < 1.5
    assert '"exit_code": 130' in run.stdout.splitlines()[-1]
    assert not (tmp_path / "r").exists()


def test_a_drain_in_the_load_invents_no_figures(tmp_path: Path) -> None:
    run = start(tmp_path, "load")
    run.signal()
    told(run)
    run.go("load")
    assert run.wait(30) == 0, run.stderr
    summary = summary_of(tmp_path / "r")
    for key in ("tau_start", "tau_constant", "tau_end", "tau_decode", "lossless", "loss_last"):
        assert summary[key] is None, key
    assert "fit_accuracy" not in summary
