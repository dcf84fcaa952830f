# ruff: noqa: TC001, TC003 - annotations are read at run time
"""Kill anywhere: a resumed run sees each item exactly once, the same items, to the same bits (axiom 8.2)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flows import fine, go, heard
from kills import Weights, World, run_of

from pipeflow.checkpoint import station, store
from pipeflow.context import Context
from pipeflow.errors import Cancelled, PipeflowError
from pipeflow.stage import Stage

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
        "rows": {"uses": "records", "with": {"count": 18}},
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


def killed_and_resumed(graph: str, folder: Path, start: int, stride: int) -> None:
    """Kill at every `stride`th call of stage code; the run that goes on then ends as one that was whole."""
    stages = GRAPHS[graph]
    whole = World()
    end = fine(whole.go(folder / "whole", stages, run={"checkpoint": {"of": "train", "every": 3}}))
    calls = whole.killer.calls
    assert calls > 40
    for at in range(start, calls + 1, stride):
        world, here = World(), folder / str(at)
        world.killer.at = at
        first = world.go(here, stages, run=run_of())
        assert first.error is None or isinstance(first.error, Cancelled), first.error
        world.killer.at = None
        second = fine(world.go(here, stages, run=run_of()))
        assert world.ledgers == whole.ledgers, at
        assert world.weights == whole.weights, at
        assert told(second) == told(end), at


@pytest.mark.axiom("1.5", "8.2", "8.3")
@pytest.mark.parametrize("graph", GRAPHS)
def test_killed_at_some_calls(graph: str, tmp_path: Path) -> None:
    killed_and_resumed(graph, tmp_path, 3 + len(graph) % 7, 7)


@pytest.mark.axiom("8.2")
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("graph", GRAPHS)
def test_killed_at_any_call(graph: str, tmp_path: Path) -> None:
    killed_and_resumed(graph, tmp_path, 1, 1)


@pytest.mark.axiom("8.3")
@pytest.mark.parametrize("graph", GRAPHS)
def test_drained_at_some_calls(graph: str, tmp_path: Path) -> None:
    """What flows out at a drain is what a run that goes on would have made, to the bit."""
    whole = World()
    fine(whole.go(tmp_path / "whole", GRAPHS[graph], run={"checkpoint": {"of": "train", "every": 3}}))
    for at in range(4 + len(graph) % 5, whole.killer.calls, 11):
        world = World()

        async def drain(pipeline: Any, world: World = world) -> Any:
            world.killer.kill = lambda: pipeline._engine.loop.call_soon_threadsafe(pipeline.drain)
            return await pipeline.run()

        world.killer.at = at
        fine(world.go(tmp_path / str(at), GRAPHS[graph], drain, run=run_of(every=1000)))
        fine(world.go(tmp_path / str(at), GRAPHS[graph], run=run_of(every=1000)))
        assert world.ledgers == whole.ledgers, at
        assert world.weights == whole.weights, at


@pytest.mark.axiom("8.3")
def test_no_stage_before_cuts_an_item_short_for_a_drain(tmp_path: Path) -> None:
    """It is not told of the drain, as what it left out would be taken for done."""
    world = World()
    drained, seen = threading.Event(), threading.Event()

    class Hasty(Stage):
        def run(self, item: int, ctx: Context) -> Iterator[int]:
            for part in range(3):
                if item == 2 and part == 1:
                    seen.set()
                    assert drained.wait(10)
                if ctx.stopping:
                    return
                yield item * 10 + part

    uses = {**world.uses(), "weights": Weights, "hasty": Hasty}
    stages = {
        "rows": {"uses": "records", "with": {"count": 20}},
        "hasty": {"uses": "hasty", "from": "rows"},
        "train": {"uses": "add", "from": "hasty"},
        "sink": SINK,
    }

    async def drain(pipeline: Any) -> Any:
        running = asyncio.ensure_future(pipeline.run())
        await heard(seen)
        pipeline.drain()
        drained.set()
        return await running

    fine(go(tmp_path, stages, uses, drain, run=run_of(every=1000)))
    assert len(world.ledgers["all"]) < 60
    fine(go(tmp_path, stages, uses, run=run_of(every=1000)))
    assert world.ledgers["all"] == [1000 + item * 10 + part for item in range(20) for part in range(3)]


@pytest.mark.axiom("8.3")
@pytest.mark.parametrize("endless", [False, True])
def test_a_partner_of_what_was_trained_outlasts_a_drain(tmp_path: Path, endless: bool) -> None:
    """What `train` has made is not made again in a resumed run: it must not be thrown away for want of a
    partner that only the drain kept from coming."""
    world = World()
    drained, seen = threading.Event(), threading.Event()

    class Few(Stage):
        def run(self) -> Iterator[int]:
            for number in range(10**9 if endless else 12):
                if number == 2:
                    seen.set()
                    assert drained.wait(10)
                yield number

    uses = {**world.uses(), "weights": Weights, "few": Few}
    stages = {
        "rows": {"uses": "records"},
        "train": {**TRAIN, "from": "rows"},
        "few": {"uses": "few"},
        "short": {"uses": "both", "from": {"a": "train", "b": "few"}, "queue": {"items": 8}},
        "ends": {"uses": "ledger", "from": "short", "with": {"name": "ends"}},
    }

    async def drain(pipeline: Any) -> Any:
        running = asyncio.ensure_future(pipeline.run())
        await heard(seen)
        pipeline.drain()
        drained.set()
        return await running

    resources = {"weights": {"uses": "weights"}}
    fine(go(tmp_path, stages, uses, drain, run=run_of(every=1000), resources=resources))
    trained = len(world.ledgers["ends"])
    assert trained < 12
    if endless:  # a join ends with its shortest input, its source does not
        return
    fine(go(tmp_path, stages, uses, run=run_of(every=1000), resources=resources))
    whole = World()
    uses = {**whole.uses(), "weights": Weights, "few": Few}
    fine(go(tmp_path / "whole", stages, uses, run=run_of(every=1000), resources=resources))
    assert world.ledgers["ends"] == whole.ledgers["ends"]
    assert len(whole.ledgers["ends"]) == 12


@pytest.mark.axiom("8.2")
@pytest.mark.parametrize(("graph", "calls"), [("flat, gather, limit", 80), ("diamond", 37), ("behind", 100)])
def test_killed_again_and_again(graph: str, calls: int, tmp_path: Path) -> None:
    """Each run gets a few calls further than the one before, until one comes to the end."""
    whole, world = World(), World()
    fine(whole.go(tmp_path / "whole", GRAPHS[graph], run={"checkpoint": {"of": "train", "every": 3}}))
    kills = 0
    while kills < 20:
        kills += 1
        world.killer.at = world.killer.calls + calls
        outcome = world.go(tmp_path / "run", GRAPHS[graph], run=run_of())
        if outcome.error is None:
            break
        assert isinstance(outcome.error, Cancelled)
    else:
        pytest.fail("it comes no further")
    assert kills > 1
    assert world.ledgers == whole.ledgers
    assert world.weights == whole.weights


# A killed process ------------------------------------------------------------------------------------------

CHILD = """
import os, sys
from pathlib import Path
import kills
from kills import World, run_of
import test_resume
world = World()
at = int(sys.argv[3])
world.killer.at = at or None
world.keep_on_disk(Path(sys.argv[2]))
def act(pipeline):
    world.killer.kill = lambda: os.kill(os.getpid(), 9)
    return pipeline.run()
kills.flows.fine(world.go(Path(sys.argv[1]), test_resume.GRAPHS["gather"], act, run=run_of()))
"""


@pytest.mark.axiom("8.4")
@pytest.mark.parametrize("at", [31, 52])
def test_a_process_that_is_killed(at: int, tmp_path: Path) -> None:
    """SIGKILL: nothing is closed, flushed or told."""
    whole = World()
    fine(whole.go(tmp_path / "whole", GRAPHS["gather"], run={"checkpoint": {"of": "train", "every": 3}}))

    def child(at: int) -> int:
        arguments = [sys.executable, "-c", CHILD, str(tmp_path / "run"), str(tmp_path / "ledger"), str(at)]
        path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        done = subprocess.run(arguments, check=False, timeout=60, env={**os.environ, "PYTHONPATH": path})
        return done.returncode

    assert child(at) == -signal.SIGKILL
    assert child(0) == 0
    lines = [json.loads(line) for line in (tmp_path / "ledger").read_text().splitlines()]
    assert lines == whole.ledgers["all"]


# Not exact -------------------------------------------------------------------------------------------------

UNORDERED: dict[str, dict[str, Any]] = {
    "lanes": {
        "rows": {"uses": "records", "with": {"count": 40}},
        "add": {"uses": "add", "from": "rows", "replicas": 3, "ordered": False},
        "train": {"uses": "add_async", "from": "add"},
        "sink": {"uses": "ledger", "from": "train"},
    },
    "arrivals": {
        "rows": {"uses": "records", "with": {"count": 20}},
        "others": {"uses": "forgetful", "with": {"count": 20}},
        "add": {"uses": "add", "from": "others"},
        "odd": {"uses": "odd", "from": "add"},
        "both": {"uses": "add_async", "from": ["rows", "odd"], "ordered": False},
        "train": {"uses": "add_async", "from": "both"},
        "sink": {"uses": "ledger", "from": "train"},
    },
    "device": {
        "rows": {"uses": "records", "with": {"count": 30}},
        "add": {"uses": "add", "from": "rows", "replicas": 2, "ordered": False},
        "train": {"uses": "add", "from": "add", "on": "cpu-late"},
        "sink": {"uses": "ledger", "from": "train"},
    },
    "spread": {
        "rows": {"uses": "records", "with": {"count": 20}},
        "spread": {"uses": "spread", "from": "rows", "replicas": 2, "ordered": False},
        "train": {"uses": "add_async", "from": "spread"},
        "sink": {"uses": "ledger", "from": "train"},
    },
}


@pytest.mark.axiom("8.3")
@pytest.mark.parametrize("graph", UNORDERED)
def test_not_exact_a_record_is_read_again_unless_all_of_it_was_used(graph: str, tmp_path: Path) -> None:
    stages = UNORDERED[graph]
    whole = World()
    fine(whole.go(tmp_path / "whole", stages, run={"checkpoint": {"of": "train", "exact": False}}))
    wanted = Counter(whole.ledgers["all"])
    again = 0
    for at in range(5, whole.killer.calls, 6):
        world, here = World(), tmp_path / str(at)
        world.killer.at = at
        first = world.go(here, stages, run=run_of(exact=False))
        assert first.error is None or isinstance(first.error, Cancelled), first.error
        saved = store.committed(here)
        world.killer.at, calls = None, world.killer.calls
        fine(world.go(here, stages, run=run_of(exact=False)))
        found = Counter(world.ledgers["all"])
        assert not wanted - found, at  # at least once
        if graph != "spread":  # of a record that was used in part all is used again
            assert found == wanted, at
        again += bool(saved) and world.killer.calls - calls < whole.killer.calls
    assert again > 3  # not all was read again


# Which checkpoint ------------------------------------------------------------------------------------------


def interrupted(folder: Path, at: int = 40, **more: Any) -> World:
    world = World()
    world.killer.at = at
    assert isinstance(world.go(folder, GRAPHS["chain"], run={**run_of(), **more}).error, Cancelled)
    assert store.committed(folder)
    world.killer.at = None
    return world


def test_never_starts_anew(tmp_path: Path) -> None:
    world = interrupted(tmp_path)
    fine(world.go(tmp_path, GRAPHS["chain"], run={**run_of(), "resume": "never"}))
    assert len(world.ledgers["all"]) == 20
    assert (tmp_path / "metrics.1.jsonl").exists()


def test_another_file_is_not_gone_on_with_unasked(tmp_path: Path) -> None:
    world = interrupted(tmp_path)
    stages = {**GRAPHS["chain"], "add": {"uses": "add", "from": "rows", "with": {"n": 5}}}
    error = world.go(tmp_path, stages, run={**run_of(), "seed": 3}).error
    assert isinstance(error, PipeflowError)
    with pytest.raises(PipeflowError, match=r"another file \(stages.add.with.n, run.seed\).*Name the folder"):
        raise error
    fine(world.go(tmp_path, stages, run={**run_of(), "seed": 3, "resume": str(tmp_path)}))
    assert len(world.ledgers["all"]) == 20


def test_a_checkpoint_can_be_named(tmp_path: Path) -> None:
    """From an earlier one than the newest: those after it are of a run that is no more."""
    world = interrupted(tmp_path, at=50, checkpoint={"of": "train", "every": 3, "keep": 9})
    found = store.committed(tmp_path)
    assert len(found) > 2
    run = {"checkpoint": {"of": "train", "every": 2, "keep": 99}, "resume": str(found[0])}
    outcome = fine(world.go(tmp_path, GRAPHS["chain"], run=run))
    resumed = [line for line in outcome.lines("log.jsonl") if line["event"] == "resumed"]
    assert [line["step"] for line in resumed] == [3]
    assert [store.step_of(path) for path in store.committed(tmp_path)] == [3, *range(4, 21, 2)]
    assert len(world.ledgers["all"]) == 20


@pytest.mark.parametrize("where", ["nowhere", "empty"])
def test_a_folder_without_a_checkpoint_is_told(where: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    outcome = World().go(tmp_path / "run", GRAPHS["chain"], run={**run_of(), "resume": str(tmp_path / where)})
    assert "holds no whole checkpoint" in str(outcome.error)


def test_a_resumed_run_goes_on_in_its_own_folder(tmp_path: Path) -> None:
    world = interrupted(tmp_path / "run")
    error = world.go(
        tmp_path / "other", GRAPHS["chain"], run={**run_of(), "resume": str(tmp_path / "run")}
    ).error
    assert "goes on in its own folder" in str(error)


def test_auto_takes_the_newest_folder_of_the_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = (
        "test-20260101-120000",
        "test-20260102-120000",
        "test-20260102-120000-2",
        "testing-20270101-000000",
    )
    for name in names:
        interrupted(tmp_path / "runs" / name)
    (tmp_path / "runs" / "test-20260103-120000").mkdir()  # it came to no checkpoint

    async def act(pipeline: Any) -> Any:
        return pipeline.run_dir

    world = World()
    outcome = world.go(None, GRAPHS["chain"], act, run=run_of())  # type: ignore[arg-type]
    assert outcome.value == tmp_path / "runs" / "test-20260102-120000-2"


@pytest.mark.axiom("3.3")
def test_no_version_names_two_contents(tmp_path: Path) -> None:
    """Steps go on, under another incarnation (axiom 3.3)."""
    world = interrupted(tmp_path, at=40)
    before = store.read(store.committed(tmp_path)[-1]).document
    at_load: list[int] = []

    async def act(pipeline: Any) -> Any:
        at_load.append(pipeline._assembly.shared["weights"].step)
        return await pipeline.run()

    outcome = fine(world.go(tmp_path, GRAPHS["chain"], act, run=run_of()))
    shared = outcome.pipeline._assembly.shared["weights"]  # type: ignore[union-attr]
    assert at_load == [before["step"]]
    assert before["stages"]["train"]["facts"]["versions"] == {"weights": before["step"]}
    assert shared.step == 20
    assert shared.incarnation != before["incarnation"]


@pytest.mark.axiom("8.4")
def test_what_was_submitted_is_not_made_again(tmp_path: Path) -> None:
    """Steps go on; an item that had no answer when the run ended is its caller's affair (axiom 8.4)."""
    stages = {
        "in": {"uses": "input"},
        "train": {"uses": "train", "writes": "weights", "from": "in"},
    }
    world = World()

    def submits(*items: int) -> Any:
        async def act(pipeline: Any) -> Any:
            return [await pipeline.submit(item) % 1000 for item in items]

        return act

    first = fine(world.go(tmp_path, stages, submits(5, 6, 7, 8), run=run_of(exact=False)))
    assert first.value == [1, 2, 3, 4]
    weights = world.weights
    second = fine(world.go(tmp_path, stages, submits(9), run=run_of(exact=False)))
    assert second.value == [5]
    other = World()
    fine(other.go(tmp_path / "whole", stages, submits(5, 6, 7, 8), run=run_of(exact=False)))
    assert other.weights == weights
    fine(other.go(tmp_path / "whole", stages, submits(9), run=run_of(exact=False)))
    assert other.weights == world.weights
