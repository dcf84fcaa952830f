"""A DFlash training that is stopped and resumed gives the bits of one that was not (axiom 8)."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

import pipeflow
from pipeflow.checkpoint import store
from pipeflow.errors import Cancelled

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 14


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def document(**run: Any) -> dict[str, Any]:
    return {
        "pipeflow": 1,
        "name": "tiny",
        "resources": {
            "book": {
                "uses": "data/phrase_book",
                "with": {"phrases": 4, "tokens": 6, "symbols": 12, "length": 24, "lead": 6},
            },
            "target": {
                "uses": "dflash/tiny_target",
                "on": "cpu",
                "reads": "book",
                "with": {
                    "steps": 2, "accuracy": 0, "layers": 6, "hidden_size": 16, "intermediate_size": 24,
                    "rows": 4,
                },
            },
            "rows": {"uses": "data/phrase_rows", "reads": "book", "with": {"rows": 4}},
            "drafter": {
                "uses": "dflash/drafter",
                "on": "cpu",
                "reads": "target",
                "with": {"block_size": 4, "mask_token_id": 12, "layers": 1, "taps": 2},
            },
        },
        "stages": {
            "documents": {"uses": "data/phrases", "reads": "book"},
            "batches": {
                "uses": "text/batch", "from": "documents", "limit": STEPS,
                "with": {"tokens": 96, "max_length": 24, "bucket": 24},
            },
            "target": {
                "uses": "dflash/target", "from": "batches", "on": "cpu", "reads": "target",
                "with": {"taps": 2},
            },
            "pack": {
                "uses": "dflash/pack", "from": "target", "on": "cpu",
                "with": {"block_size": 4, "mask_token_id": 12, "anchors": 6},
            },
            "train": {
                "uses": "dflash/train", "from": "pack", "on": "cpu", "reads": "target", "writes": "drafter",
                "with": {"steps": STEPS, "lr": 0.01},
            },
            "evaluate": {
                "uses": "dflash/evaluate", "from": "train", "every": 3, "on": "cpu",
                "reads": ["target", "drafter", "rows"],
                "with": {"taps": 2, "decode_rows": 1, "decode_tokens": 8},
            },
            "quiesce": {"uses": "barrier", "from": "train", "every": 5},
            "release": {"uses": "release_cache", "from": "quiesce"},
            "publish": {
                "uses": "weights/broadcast", "from": "release", "on": "cpu", "reads": "drafter",
                "with": {"backend": "filesystem", "path": "weights"},
            },
        },
        "run": {
            "step": "train", "queue": {"items": 1}, "checkpoint": {"of": "train", "every": 4},
            "resume": "auto", **run,
        },
    }  # fmt: skip


def train(folder: Path, stop_at: int | None = None, how: str = "cancel") -> dict[str, Any] | None:
    """One run; its summary, or None where it was cancelled at the line of that step."""

    async def main() -> dict[str, Any] | None:
        async with pipeflow.open(document(), run_dir=folder) as pipeline:

            def stop(line: dict[str, Any]) -> None:
                due = stop_at is not None and line["stage"] == "train" and line["step"] >= stop_at
                if due and (how == "drain" or store.committed(folder)):
                    getattr(pipeline, how)()

            pipeline.on_metric(stop)
            return await pipeline.run()

    try:
        return asyncio.run(main())
    except Cancelled:
        return None


def lines(folder: Path) -> list[dict[str, Any]]:
    """Of train and evaluate, without what a clock gave."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [line for line in found if line["stage"] in ("train", "evaluate")]
    return sorted(
        ({k: v for k, v in line.items() if k != "t" and not k.endswith("_per_s")} for line in kept),
        key=lambda line: (line["stage"], str(line.get("mode")), line["step"]),
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("whole")
    summary = train(folder)
    assert summary is not None
    return folder, summary


@pytest.mark.parametrize(("stop_at", "how"), [(5, "cancel"), (8, "cancel"), (13, "cancel"), (3, "drain")])
def test_the_same_drafter(whole: tuple[Path, dict[str, Any]], tmp_path: Path, stop_at: int, how: str) -> None:
    folder, wanted = whole
    first = train(tmp_path, stop_at, how)
    assert (first is None) == (how == "cancel")
    steps = [store.step_of(path) for path in store.committed(tmp_path)]
    assert steps[-1] is not None
    assert max(1, stop_at - 8) <= steps[-1] < STEPS
    summary = train(tmp_path)
    assert summary is not None
    drafter = "drafter/model.safetensors"
    assert (tmp_path / drafter).read_bytes() == (folder / drafter).read_bytes()
    if how == "cancel":  # a drain measures once more at its end
        assert lines(tmp_path) == lines(folder)
    same = ("status", "steps", "tokens", "loss_first", "loss_last", "tau_start", "tau_end", "tau_decode")
    assert {key: summary[key] for key in same} == {key: wanted[key] for key in same}


def test_a_checkpoint_holds_weights_and_moments(whole: tuple[Path, dict[str, Any]]) -> None:
    saved = store.read(store.committed(whole[0])[0])
    state = saved.document["stages"]["train"]["states"]
    assert state["train[0]"]["step"] == saved.document["step"]
    moments = [name for name in saved.tensors if name.endswith("exp_avg_sq")]
    weights = [name for name in saved.tensors if name.startswith("resource:drafter/weights/")]
    assert len(moments) == len(state["train[0]"]["optimizer"]) > 5
    assert len(weights) >= len(moments)
    assert all(saved.tensors[name].dtype == torch.float32 for name in weights)
