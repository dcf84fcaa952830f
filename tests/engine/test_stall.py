# ruff: noqa: TC003 - stages as an author writes them; annotations are read at run time
"""When nothing can move the run says so at once, stage by stage; when nothing moves, after `run.stall`."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flows import LIMIT, collector, go, until_it_ends

from pipeflow import Gather, StallError, stage


class Four(Gather):
    def full(self, members):
        return len(members) == 4

    def run(self, items: list) -> int:
        return len(items)


@pytest.mark.axiom("1.4")
def test_rule_14_off_a_join_across_a_gather_is_an_endless_wait_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A > B (gather) > D, A > C > D: the gather waits for items that A may not make while C waits for B."""
    import pipeflow.rules

    @stage
    def both(item: dict) -> int:
        return 0

    stages = {
        "a": {"uses": "numbers", "with": {"count": 100}},
        "b": {"uses": "four", "from": "a", "queue": {"items": 1}},
        "c": {"uses": "double", "from": "a", "queue": {"items": 1}},
        "d": {"uses": "both", "from": {"x": "b", "y": "c"}, "queue": {"items": 1}},
    }
    uses = {"four": Four, "both": both}
    refused = go(tmp_path / "on", stages, uses)
    assert "unfed-join" in str(refused.error)
    monkeypatch.setattr(pipeflow.rules, "RULES", ())
    outcome = go(tmp_path / "off", stages, uses, limit=10)
    assert isinstance(outcome.error, StallError)
    text = str(outcome.error)
    assert "a: waits for a credit on a -> c" in text
    assert (
        "b: waits for 2 gathered, waits for an item from a" in text
        or "gathered, waits for an item from a" in text
    )
    assert "d: waits for its partners from b" in text


def test_no_progress_names_the_stage_and_its_stack(tmp_path: Path) -> None:
    release = threading.Event()

    @stage
    def hangs(item: int) -> int:
        assert release.wait(LIMIT)
        return item

    stages = {
        "a": {"uses": "numbers"},
        "b": {"uses": "hangs", "from": "a"},
        "c": {"uses": "sink", "from": "b"},
    }
    uses = {"hangs": hangs, "sink": collector([])}
    outcome = go(tmp_path, stages, uses, until_it_ends(release), run={"stall": "300ms"})
    assert isinstance(outcome.error, StallError)
    text = str(outcome.error)
    assert "no progress for 0.3 s" in text
    assert "b: waits for its own code, on item 0" in text
    assert "assert release.wait(LIMIT)" in text


def test_a_pipeline_that_waits_for_its_caller_is_no_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller submits only when the guard has looked for five times as long as it is patient."""
    import asyncio

    import anyio

    import pipeflow.engine

    slept: list[float] = []
    looked = asyncio.Event()

    async def sleep(seconds: float) -> None:
        if sum(slept) > 0.5:  # and its look after the last of these has gone by
            looked.set()
        await anyio.sleep(seconds)
        slept.append(seconds)

    monkeypatch.setattr(pipeflow.engine, "anyio", SimpleNamespace(sleep=sleep))
    stages = {"in": {"uses": "input"}, "out": {"uses": "output", "from": "in"}}

    async def act(pipeline: Any) -> Any:
        await looked.wait()
        return await pipeline.submit(5)

    outcome = go(tmp_path, stages, {}, act, run={"stall": "100ms"})
    assert outcome.error is None
    assert outcome.value == 5
