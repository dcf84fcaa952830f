"""The tiny example: it learns, it cannot without features, and no stage reads before its fence."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from running import TINY, run_tiny

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.alone  # the example uses both cores, and is promised to end within a minute


@pytest.mark.timeout(300)
def test_the_drafter_learns_from_the_targets_features(tmp_path: Path) -> None:
    from pipeflow_stages.dflash.export import load_drafter
    from pipeflow_stages.weights.filesystem import read, versions

    summary = run_tiny(tmp_path / "run")
    assert summary["status"] == "done"
    assert summary["fit_accuracy"] >= 0.98
    assert summary["tau_start"] < 1.2
    assert summary["tau_end"] >= 6.4
    assert summary["tau_end"] >= summary["tau_constant"] + 0.05
    assert abs(summary["tau_decode"] / summary["tau_end"] - 1) <= 0.05
    assert summary["lossless"] is True
    assert summary["decode_ties"] == 0
    assert summary["steps"] == 240

    drafter, config = load_drafter(tmp_path / "run" / "drafter")
    assert config.block_size == 8
    published = versions(tmp_path / "run" / "weights")
    assert [path.name for path in published] == ["v00000001", "v00000002", "v00000003"]
    tensors, about = read(published[-1])
    assert about["step"] == 240
    saved = drafter.state_dict()
    assert tensors.keys() == saved.keys()
    assert all(tensors[name].equal(saved[name]) for name in saved)

    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line["stage"] == "train"]
    assert steps == list(range(1, 241))
    evaluated = [
        line["step"] for line in lines if line["stage"] == "evaluate" and line["mode"] == "teacher_forced"
    ]
    assert evaluated[1:3] == [120, 240]
    released = [line["step"] for line in lines if line["stage"] == "publish"]
    assert released == [0, 120, 240]


@pytest.mark.timeout(300)
def test_without_features_it_cannot(tmp_path: Path) -> None:
    summary = run_tiny(tmp_path / "run", "features=zero")
    assert summary["fit_accuracy"] >= 0.98
    assert summary["tau_end"] < 2.0


@pytest.mark.timeout(300)
def test_the_stages_read_nothing_before_its_fence_and_keep_nothing_after(tmp_path: Path) -> None:
    """On `cpu-late` outputs are NaN before their fence is reached and after they retired."""
    plain = run_tiny(tmp_path / "plain", "steps=30", "device=cpu")
    late = run_tiny(tmp_path / "late", "steps=30", "device=cpu-late")
    assert late["device"] == ["cpu-late"]
    assert late["tau_end"] == plain["tau_end"]
    first = (tmp_path / "plain" / "drafter" / "model.safetensors").read_bytes()
    assert first == (tmp_path / "late" / "drafter" / "model.safetensors").read_bytes()

    def losses(folder: str) -> list[float]:
        lines = map(json.loads, (tmp_path / folder / "metrics.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if line["stage"] == "train"]

    assert losses("late") == losses("plain")
    assert len(losses("late")) == 30


def test_the_text_is_as_large_as_it_should_be() -> None:
    from pipeflow.check import check

    graph = check(TINY).graph
    assert graph is not None
    book = graph.resources["book"].config
    assert book.phrases >= 32
    assert book.tokens >= 24
    assert book.symbols <= 96
