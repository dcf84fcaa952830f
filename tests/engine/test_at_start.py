# ruff: noqa: RUF012, TC003 - stages as an author writes them; annotations are read at run time
"""What a barrier guards runs once before anything is admitted (axiom 5.4)."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from flows import LIMIT, collector, document, fine, go, heard, in_loop, registry
from test_resources import Box, Writes

import pipeflow
from pipeflow import Cancelled, DocumentError, GraphError, Pipeline, Stage, StageError

if TYPE_CHECKING:
    from pipeflow.item import Trigger

RESOURCES = {"box": {"uses": "box"}}


def publishes(log: list[Any], **traits: Any) -> Any:
    class Publishes(Stage):
        guarded = True
        at_start = traits.get("at_start", True)
        reads = {"box": Box}

        def run(self, item: Trigger, ctx: Any) -> int:
            log.append((item.reason, item.seq, item.versions["box"].step))
            return item.seq

    return Publishes


def logs(log: list[Any]) -> Any:
    class Logs(Stage):
        def run(self, item: int) -> int:
            log.append(item)
            return item

    return Logs


def files(count: int = 4, source: Any = None, **barrier: Any) -> dict[str, Any]:
    return {
        "a": source or {"uses": "numbers", "with": {"count": count}},
        "first": {"uses": "logs", "from": "a"},
        "w": {"uses": "writes", "from": "first", "writes": "box"},
        "b": {"uses": "barrier", "from": "w", **barrier},
        "p": {"uses": "publishes", "from": "b", "reads": "box"},
    }


def uses(log: list[Any], **traits: Any) -> dict[str, Any]:
    return {"box": Box, "writes": Writes, "logs": logs(log), "publishes": publishes(log, **traits)}


@pytest.mark.axiom("5.4")
def test_version_0_goes_out_before_item_0(tmp_path: Path) -> None:
    log: list[Any] = []
    outcome = fine(go(tmp_path, files(every=2), uses(log), resources=RESOURCES))
    assert log[0] == ("start", -1, 0)
    assert [entry for entry in log if isinstance(entry, tuple)] == [
        ("start", -1, 0), ("every", 0, 2), ("every", 1, 4)]  # fmt: skip
    first = next(line for line in outcome.lines("metrics.jsonl") if line["stage"] == "b")
    assert (first["reason"], first["step"]) == ("start", 0)


@pytest.mark.axiom("5.4")
@pytest.mark.parametrize("trait", [True, False])
@pytest.mark.parametrize("barrier", [True, False, None])
@pytest.mark.parametrize("stage", [True, False, None])
def test_the_file_decides_before_the_class_does(
    tmp_path: Path, trait: bool, barrier: bool | None, stage: bool | None
) -> None:
    log: list[Any] = []
    spec = files(every=2)
    if barrier is not None:
        spec["b"]["at_start"] = barrier
    if stage is not None:
        spec["p"]["at_start"] = stage
    outcome = go(tmp_path, spec, uses(log, at_start=trait), resources=RESOURCES)
    if None not in (barrier, stage) and barrier != stage:
        assert isinstance(outcome.error, (GraphError, DocumentError))
        return
    fine(outcome)
    said = next((value for value in (barrier, stage) if value is not None), trait)
    assert (log[0] == ("start", -1, 0)) == said
    assert len([entry for entry in log if isinstance(entry, tuple)]) == 2 + said


def test_a_caller_who_submits_while_it_runs_waits(tmp_path: Path) -> None:
    """Its item is taken as soon as the section is through, not before."""
    log: list[Any] = []
    begun, submitted = threading.Event(), threading.Event()
    Publishes = publishes(log)

    class Waits(Publishes):  # type: ignore[misc, valid-type]
        def run(self, item: Trigger, ctx: Any) -> int:
            if item.reason == "start":
                begun.set()
                assert submitted.wait(LIMIT)
            return super().run(item, ctx)

    async def main() -> Any:
        early: list[Any] = []

        def opening(pipeline: Pipeline) -> None:
            async def submit() -> Any:
                await heard(begun)
                answer = asyncio.ensure_future(pipeline.submit(7))
                for _ in range(20):  # turns in which an input that did not wait would hand it on
                    await asyncio.sleep(0)
                assert not pipeline._assembly.runners["first"].counters.started
                submitted.set()
                return await answer

            early.append(asyncio.ensure_future(submit()))

        spec = files(source={"uses": "input"})
        spec["out"] = {"uses": "output", "from": "w"}
        made = registry(uses(log) | {"publishes": Waits})
        opened = pipeflow.open(
            document(spec, resources=RESOURCES), registry=made, run_dir=tmp_path, opening=opening
        )
        async with opened:
            return await early[0]

    assert in_loop(main) == 7
    assert log[:2] == [("start", -1, 0), 7]


def test_what_it_emits_flows_on(tmp_path: Path) -> None:
    log: list[Any] = []
    seen: list[int] = []
    spec = files(every=2)
    spec["s"] = {"uses": "sink", "from": "p", "queue": {"items": 1}}
    fine(go(tmp_path, spec, uses(log) | {"sink": collector(seen)}, resources=RESOURCES))
    assert seen == [-1, 0, 1]


def test_a_fault_in_it_ends_the_load(tmp_path: Path) -> None:
    log: list[Any] = []

    class Fails(Stage):
        guarded = True
        at_start = True

        def run(self, item: Trigger) -> None:
            raise ValueError("disk full")

    outcome = go(tmp_path, files(), uses(log) | {"publishes": Fails}, resources=RESOURCES)
    assert isinstance(outcome.error, StageError)
    assert "stage 'p', item 0: ValueError: disk full" in str(outcome.error)
    assert outcome.pipeline is None, "it was open"
    assert log == []


def test_a_cancel_meanwhile_ends_the_load(tmp_path: Path) -> None:
    begun, release, log = threading.Event(), threading.Event(), []

    class Hangs(Stage):
        guarded = True
        at_start = True

        def run(self, item: Trigger) -> None:
            begun.set()
            assert release.wait(LIMIT)

    async def main() -> Any:
        def opening(pipeline: Pipeline) -> None:
            async def cancel() -> None:
                await heard(begun)
                pipeline.cancel()
                release.set()

            tasks.append(asyncio.ensure_future(cancel()))

        tasks: list[Any] = []
        made = registry(uses(log) | {"publishes": Hangs})
        opened = pipeflow.open(
            document(files(), resources=RESOURCES), registry=made, run_dir=tmp_path, opening=opening
        )
        with pytest.raises(Cancelled):
            async with opened:
                raise AssertionError("it was opened")
        await tasks[0]

    in_loop(main)
    assert log == []


def test_two_barriers_start_one_after_the_other(tmp_path: Path) -> None:
    log: list[Any] = []
    spec = files(every=4)
    spec["b2"] = {"uses": "barrier", "from": "w", "at_start": True}
    spec["r"] = {"uses": "release_cache", "from": "b2"}
    outcome = fine(go(tmp_path, spec, uses(log), resources=RESOURCES))
    starts = [line["stage"] for line in outcome.lines("metrics.jsonl") if line.get("reason") == "start"]
    assert sorted(starts) == ["b", "b2", "r"]
    assert isinstance(log[0], tuple)
