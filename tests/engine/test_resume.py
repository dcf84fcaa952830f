"""Kill anywhere: a resumed run sees each item exactly once, the same items, to the same bits (axiom 8.2)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from flows import fine
from kills import World, run_of

from pipeflow.checkpoint import station
from pipeflow.errors import Cancelled

if TYPE_CHECKING:
    from pathlib import Path

TRAIN = {"uses": "train", "writes": "weights"}
SINK = {"uses": "ledger", "from": "train"}

GRAPHS: dict[str, dict[str, Any]] = {
    "chain": {
        "rows": {"uses": "records"},
        "add": {"uses": "add", "from": "rows"},
        "train": {**TRAIN, "from": "add"},
        "sink": SINK,
    },
    "forgetful source": {
        "rows": {"uses": "forgetful"},
        "train": {**TRAIN, "from": "rows"},
        "sink": SINK,
    },
    "gaps": {
        "rows": {"uses": "records"},
        "odd": {"uses": "odd", "from": "rows"},
        "faulty": {"uses": "faulty", "from": "odd", "on_error": {"skip": 9}},
        "train": {**TRAIN, "from": "faulty"},
        "sink": SINK,
    },
    "one-to-many": {
        "rows": {"uses": "records", "with": {"count": 16}},
        "spread": {"uses": "spread", "from": "rows"},
        "train": {**TRAIN, "from": "spread"},
        "sink": SINK,
    },
    "gather": {
        "rows": {"uses": "records", "with": {"count": 29}},
        "odd": {"uses": "odd", "from": "rows"},
        "gathered": {"uses": "gathered", "from": "odd"},
        "train": {**TRAIN, "from": "gathered"},
        "sink": SINK,
    },
    "flat, gather, limit": {
        "rows": {"uses": "records", "with": {"count": 99}},
        "spread": {"uses": "spread", "from": "rows"},
        "gathered": {"uses": "gathered", "from": "spread", "limit": 11},
        "train": {**TRAIN, "from": "gathered"},
        "sink": SINK,
    },
    "scatter": {
        "rows": {"uses": "records"},
        "odd": {"uses": "odd", "from": "rows"},
        "scattered": {"uses": "scattered", "from": "odd"},
        "train": {**TRAIN, "from": "scattered"},
        "sink": SINK,
    },
    "replicas": {
        "rows": {"uses": "records"},
        "add": {"uses": "add", "from": "rows", "replicas": 3},
        "more": {"uses": "add_async", "from": "add", "in_flight": 4},
        "train": {**TRAIN, "from": "more"},
        "sink": SINK,
    },
    "every": {
        "rows": {"uses": "records", "with": {"count": 40}},
        "add": {"uses": "add", "from": "rows", "every": 2},
        "train": {**TRAIN, "from": "add", "every": 2},
        "reader": {"uses": "reader", "reads": "weights", "from": "train", "every": 4},
        "sink": {"uses": "ledger", "from": "reader"},
    },
    "turns": {
        "rows": {"uses": "records", "with": {"count": 7}},
        "others": {"uses": "records", "with": {"count": 13}},
        "far": {"uses": "add", "from": "others"},
        "both": {"uses": "add_async", "from": ["rows", "far"]},
        "train": {**TRAIN, "from": "both"},
        "sink": SINK,
    },
    "diamond": {
        "rows": {"uses": "records"},
        "a": {"uses": "odd", "from": "rows"},
        "b": {"uses": "running", "from": "rows"},
        "both": {"uses": "both", "from": {"a": "a", "b": "b"}},
        "train": {**TRAIN, "from": "both"},
        "sink": SINK,
    },
    "ports": {
        "rows": {"uses": "records"},
        "route": {"uses": "route", "from": "rows"},
        "add": {"uses": "add", "from": "route.odd"},
        "train": {**TRAIN, "from": "add"},
        "sink": SINK,
        "even": {"uses": "ledger", "from": "route.even", "with": {"name": "even"}},
    },
    "a state before": {
        "rows": {"uses": "records"},
        "running": {"uses": "running", "from": "rows"},
        "train": {**TRAIN, "from": "running"},
        "sink": SINK,
    },
    "a state before, forgotten": {
        "rows": {"uses": "records"},
        "running": {"uses": "running_forgetful", "from": "rows"},
        "train": {**TRAIN, "from": "running"},
        "sink": SINK,
    },
    "behind": {
        "rows": {"uses": "records"},
        "train": {**TRAIN, "from": "rows"},
        "spread": {"uses": "spread", "from": "train"},
        "running": {"uses": "running", "from": "spread"},
        "sink": {"uses": "ledger", "from": "running"},
        "reader": {"uses": "reader", "reads": "weights", "from": "train", "every": 2},
        "with": {"uses": "both", "from": {"a": "rows", "b": "train"}},
        "log": {"uses": "ledger", "from": "with", "with": {"name": "log"}},
        "few": {"uses": "records", "with": {"count": 5}},
        "short": {"uses": "both", "from": {"a": "train", "b": "few"}},
        "ends": {"uses": "ledger", "from": "short", "with": {"name": "ends"}},
    },
    "barrier": {
        "rows": {"uses": "records"},
        "train": {**TRAIN, "from": "rows"},
        "barrier": {"uses": "barrier", "from": "train", "every": 4},
        "publish": {"uses": "publish", "reads": "weights", "from": "barrier"},
        "sink": {"uses": "ledger", "from": "publish"},
    },
}


def told(outcome: Any) -> list[Any]:
    """Lines of metrics.jsonl without their times."""
    lines = [
        {k: v for k, v in line.items() if not k.endswith(("_s", "t"))}
        for line in outcome.lines("metrics.jsonl")
    ]
    return sorted(map(repr, lines))


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(station, "CADENCE", 4)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # no power is cut here


@pytest.mark.parametrize("graph", GRAPHS)
def test_killed_at_any_call(graph: str, tmp_path: Path) -> None:
    stages = GRAPHS[graph]
    whole = World()
    end = fine(whole.go(tmp_path / "whole", stages, run={"checkpoint": {"of": "train", "every": 3}}))
    calls = whole.killer.calls
    assert calls > 40
    for at in range(1, calls + 1):
        world, folder = World(), tmp_path / str(at)
        world.killer.at = at
        first = world.go(folder, stages, run=run_of())
        assert first.error is None or isinstance(first.error, Cancelled), first.error
        world.killer.at = None
        second = fine(world.go(folder, stages, run=run_of()))
        assert world.ledgers == whole.ledgers, at
        assert world.weights == whole.weights, at
        assert told(second) == told(end), at
