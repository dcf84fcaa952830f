# ruff: noqa: RUF012, TC003 - stages as an author writes them; annotations are read at run time
"""Barriers: launches stop, items do not; the section runs alone; faults, ends, other pipelines (axiom 5)."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from flows import LIMIT, collector, fine, flow, go, heard, in_loop, settled, until_it_ends
from test_resources import Box

from pipeflow import DROP, Cancelled, Pipeline, StageError, stage
from pipeflow.barrier import BarrierRunner
from pipeflow.gate import Gate, gates_of_this_loop
from pipeflow.stage import Stage

if TYPE_CHECKING:
    from pipeflow.item import Trigger

RESOURCES = {"box": {"uses": "box"}}


class Busy:
    """Who is inside stage code, and whether a section ever met anybody."""

    def __init__(self) -> None:
        self.inside = 0
        self.lock = threading.Lock()
        self.met: list[str] = []
        self.section = threading.Event()
        """A section has begun."""
        self.triggers: list[Trigger] = []

    def work(self) -> Any:
        busy = self

        class Work(Stage):
            device = True
            writes = {"box": Box}

            def run(self, item: int, ctx: Any) -> int:
                with busy.lock:
                    busy.inside += 1
                ctx.write("box")["log"].append(item)
                with busy.lock:
                    busy.inside -= 1
                return item

        return Work

    def other(self) -> Any:
        busy = self

        class Other(Stage):
            device = True

            def run(self, item: int) -> int:
                with busy.lock:
                    busy.inside += 1
                time.sleep(0.0005)  # slow on purpose: a section that did not wait would meet it
                with busy.lock:
                    busy.inside -= 1
                return item

        return Other

    def publish(self, fails_at: int | None = None, waits: threading.Event | None = None) -> Any:
        busy = self

        class Publish(Stage):
            guarded = True
            device = True
            reads = {"box": Box}

            def run(self, item: Trigger, ctx: Any) -> tuple[int, int]:
                busy.section.set()
                if busy.inside:
                    busy.met.append(f"{busy.inside} at {item.seq}")
                if waits is not None:
                    assert waits.wait(10)
                busy.triggers.append(item)
                if fails_at == item.seq:
                    raise ValueError("disk full")
                return item.seq, len(ctx.read("box")["log"])

        return Publish


def files(count: int = 12, **barrier: Any) -> dict[str, Any]:
    return {
        "a": {"uses": "numbers", "with": {"count": count}},
        "w": {"uses": "work", "from": "a", "on": "cpu", "writes": "box"},
        "o": {"uses": "other", "from": "a", "on": "cpu", "replicas": 2},
        "b": {"uses": "barrier", "from": "w", **barrier},
        "p": {"uses": "publish", "from": "b", "on": "cpu", "reads": "box"},
        "s": {"uses": "sink", "from": "p"},
    }


def uses(busy: Busy, seen: list[Any], **publish: Any) -> dict[str, Any]:
    return {
        "box": Box,
        "work": busy.work(),
        "other": busy.other(),
        "publish": busy.publish(**publish),
        "sink": collector(seen),
    }


@pytest.mark.axiom("5.1")
@pytest.mark.parametrize("uv", [False, True])
def test_the_section_runs_alone_and_sees_its_version(tmp_path: Path, uv: bool) -> None:
    busy, seen = Busy(), []
    outcome = fine(go(tmp_path, files(every=4), uses(busy, seen), uv=uv, resources=RESOURCES))
    assert busy.met == []
    assert seen == [(0, 4), (1, 8), (2, 12)]
    assert [t.versions["box"].step for t in busy.triggers] == [4, 8, 12]
    assert [line["reason"] for line in outcome.lines("metrics.jsonl") if line["stage"] == "b"] == [
        "every"
    ] * 3


@pytest.mark.axiom("1.5")
def test_it_fires_at_the_end_if_anything_came_since(tmp_path: Path) -> None:
    busy, seen = Busy(), []
    fine(go(tmp_path, files(10, every=4), uses(busy, seen), resources=RESOURCES))
    assert seen == [(0, 4), (1, 8), (2, 10)]
    assert [trigger.reason for trigger in busy.triggers] == ["every", "every", "end"]


def test_it_does_not_fire_again_at_the_end_if_nothing_came(tmp_path: Path) -> None:
    busy, seen = Busy(), []
    fine(go(tmp_path, files(8, every=4), uses(busy, seen), resources=RESOURCES))
    assert len(busy.triggers) == 2


@pytest.mark.axiom("1.5")
@pytest.mark.parametrize("lost", ["skipped by the writer", "dropped before it"])
def test_it_fires_on_each_selected_gap_and_holds_the_writer_meanwhile(tmp_path: Path, lost: str) -> None:
    """Number 3 and 7 are gaps: the version before them goes out, not a later one."""
    busy, seen = Busy(), []
    Work = busy.work()

    class Fails(Work):  # type: ignore[misc, valid-type]
        def run(self, item: int, ctx: Any) -> int:
            if item in (3, 7):
                raise ValueError("no")
            return super().run(item, ctx)

    @stage
    def filtered(item: int) -> int:
        return DROP if item in (3, 7) and lost == "dropped before it" else item  # type: ignore[return-value]

    spec = files(every=4)
    spec["f"] = {"uses": "filtered", "from": "a"}
    spec["w"] = spec["w"] | {"from": "f", "on_error": {"skip": 2}}
    given = uses(busy, seen) | {"filtered": filtered}
    if lost == "skipped by the writer":
        given["work"] = Fails
    fine(go(tmp_path, spec, given, resources=RESOURCES))
    assert seen == [(0, 3), (1, 6), (2, 10)]


def test_a_fault_in_the_section_ends_the_run(tmp_path: Path) -> None:
    busy, seen = Busy(), []
    outcome = go(tmp_path, files(100, every=4), uses(busy, seen, fails_at=1), resources=RESOURCES)
    assert isinstance(outcome.error, StageError)
    assert "stage 'p', item 1: ValueError: disk full" in str(outcome.error)
    assert outcome.runner("w").counters.started == 8


@pytest.mark.axiom("5.5")
def test_after_a_fault_gates_stay_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host stage fails while the section is at work, which ends well. Gates are shared with the other
    pipelines of the loop: they open once this one is gone, not before."""
    busy, seen = Busy(), []
    section = BarrierRunner._section
    left_open: list[bool] = []

    async def looked_at(self: BarrierRunner, *arguments: Any) -> Any:
        found = await section(self, *arguments)
        left_open.append(any(gate.open for _, gate in self.scope))
        return found

    monkeypatch.setattr(BarrierRunner, "_section", looked_at)

    class Publish(Stage):
        guarded = True

        def run(self, item: Trigger, ctx: Any) -> None:
            busy.section.set()
            assert ctx._stop.wait(10)

    @stage
    def fails(item: int) -> None:
        assert busy.section.wait(10)
        raise ValueError("elsewhere")

    spec = files(every=4)
    spec["p"] = {"uses": "publishes", "from": "b"}
    del spec["s"]
    spec["x"] = {"uses": "fails", "from": "a"}
    used = uses(busy, seen) | {"publishes": Publish, "fails": fails}
    outcome = go(tmp_path, spec, used, resources=RESOURCES)
    assert "elsewhere" in str(outcome.error)
    assert left_open == [False]


def test_a_skipped_fault_in_the_section_goes_on(tmp_path: Path) -> None:
    busy, seen = Busy(), []
    spec = files(every=4)
    spec["p"]["on_error"] = {"skip": 1}
    fine(go(tmp_path, spec, uses(busy, seen, fails_at=1), resources=RESOURCES))
    assert seen == [(0, 4), (2, 12)]


@pytest.mark.axiom("5.5")
def test_a_retried_fault_in_the_section_runs_again_behind_closed_gates(tmp_path: Path) -> None:
    busy, seen, tries = Busy(), [], []
    Publish = busy.publish()

    class Flaky(Publish):  # type: ignore[misc, valid-type]
        def run(self, item: Trigger, ctx: Any) -> Any:
            tries.append(item.seq)
            if len(tries) == 2:
                raise ValueError("once")
            return super().run(item, ctx)

    spec = files(every=4)
    spec["p"]["on_error"] = {"retry": 1}
    fine(go(tmp_path, spec, uses(busy, seen) | {"publish": Flaky}, resources=RESOURCES))
    assert tries == [0, 1, 1, 2]
    assert busy.met == []


@pytest.mark.axiom("5.1")
def test_guarded_stages_run_one_by_one_and_one_may_feed_the_next(tmp_path: Path) -> None:
    """B > release > log > publish."""
    busy, seen, order = Busy(), [], []

    class Log(Stage):
        guarded = True

        def run(self, item: Trigger) -> Trigger:
            order.append("log")
            return item

    Publish = busy.publish()

    class Notes(Publish):  # type: ignore[misc, valid-type]
        def run(self, item: Trigger, ctx: Any) -> Any:
            order.append("publish")
            return super().run(item, ctx)

    spec = files(8, every=4)
    spec["r"] = {"uses": "release_cache", "from": "b", "on": "cpu"}
    spec["l"] = {"uses": "log", "from": "r"}
    spec["p"]["from"] = "l"
    outcome = fine(go(tmp_path, spec, uses(busy, seen) | {"log": Log, "publish": Notes}, resources=RESOURCES))
    assert order == ["log", "publish"] * 2
    freed = [line for line in outcome.lines("metrics.jsonl") if line["stage"] == "r"]
    assert [line["step"] for line in freed] == [1, 2]


@pytest.mark.axiom("5.2")
def test_two_barriers_take_turns(tmp_path: Path) -> None:
    busy, seen = Busy(), []
    spec = files(every=3)
    spec["b2"] = {"uses": "barrier", "from": "o", "every": 2}
    spec["q"] = {"uses": "release_cache", "from": "b2", "on": "cpu"}
    outcome = fine(go(tmp_path, spec, uses(busy, seen), resources=RESOURCES))
    assert busy.met == []
    assert seen == [(0, 3), (1, 6), (2, 9), (3, 12)]
    assert outcome.runner("q").counters.done == 6


def test_the_output_of_one_section_may_feed_another_barrier(tmp_path: Path) -> None:
    """One credit between them, and both want the same gates."""
    busy, seen = Busy(), []
    spec = files(every=2)
    spec["x"] = {"uses": "any", "from": "p", "on": "cpu", "queue": {"items": 1}}
    spec["b2"] = {"uses": "barrier", "from": "x", "queue": {"items": 1}}
    spec["q"] = {"uses": "release_cache", "from": "b2", "on": "cpu"}

    class Anything(Stage):
        device = True

        def run(self, item: Any) -> Any:
            return item

    outcome = fine(go(tmp_path, spec, uses(busy, seen) | {"any": Anything}, resources=RESOURCES))
    assert outcome.runner("q").counters.done == 6


@pytest.mark.axiom("5.1")
def test_background_work_is_joined_and_its_fault_named(tmp_path: Path) -> None:
    busy, seen, joined = Busy(), [], []

    class Background(Stage):
        background = True

        def run(self, item: int) -> int:
            return item

        def quiesce(self) -> None:
            joined.append(1)
            if len(joined) == 2:
                raise OSError("copy lost")

    spec = files(every=4)
    spec["g"] = {"uses": "background", "from": "a"}
    outcome = go(tmp_path, spec, uses(busy, seen) | {"background": Background}, resources=RESOURCES)
    assert "stage 'g', item 1: in quiesce, for barrier 'b': OSError: copy lost" in str(outcome.error)


@pytest.mark.axiom("5.6")
def test_a_timeout_names_the_phase_and_the_lane(tmp_path: Path) -> None:
    busy, seen, release = Busy(), [], threading.Event()

    class Hangs(Stage):
        device = True

        def run(self, item: int, ctx: Any) -> int:
            assert release.wait(LIMIT)
            return item

    spec, given = files(every=2, timeout="100ms"), uses(busy, seen) | {"other": Hangs}
    outcome = go(tmp_path, spec, given, until_it_ends(release), resources=RESOURCES)
    assert isinstance(outcome.error, StageError)
    assert "not done after 0.1 s, in the phase: waits for launches in scope" in str(outcome.error)
    assert "o[0] item 0" in str(outcome.error)


@pytest.mark.axiom("5.5")
@pytest.mark.parametrize("phase", ["waits for launches", "runs p"])
def test_a_cancel_in_a_barrier_ends_the_run(
    tmp_path: Path, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, seen, release = Busy(), [], threading.Event()
    waits_for_quiet = asyncio.Event()
    quiet = Gate.quiet

    async def asked(gate: Gate) -> None:
        waits_for_quiet.set()
        await quiet(gate)

    monkeypatch.setattr(Gate, "quiet", asked)
    spec = files(every=2)

    class Holds(Stage):
        device = True

        def run(self, item: int) -> int:
            assert release.wait(LIMIT)
            return item

    given = uses(busy, seen, waits=release if phase == "runs p" else None)
    if phase != "runs p":
        given["other"] = Holds

    async def act(pipeline: Pipeline) -> Any:
        running = asyncio.ensure_future(pipeline.run())
        await (heard(busy.section) if phase == "runs p" else waits_for_quiet.wait())
        barrier: Any = pipeline._assembly.runners["b"]
        assert barrier.phase.startswith(phase)
        phases.append(barrier.phase)
        pipeline.cancel()
        release.set()
        return await running

    phases: list[str] = []
    outcome = go(tmp_path, spec, given, act, resources=RESOURCES)
    assert isinstance(outcome.error, Cancelled)
    assert len(phases) == 1


@pytest.mark.axiom("5.3")
def test_async_stages_launch_only_through_an_open_gate(tmp_path: Path) -> None:
    """In the middle of a job: what it enqueues waits, and its timeout stands still meanwhile."""
    busy, seen = Busy(), []
    looked, found = threading.Event(), []

    class Async(Stage):
        device = True

        async def run(self, item: int, ctx: Any) -> int:
            gate = gates_of_this_loop().of("cpu")

            def look() -> None:
                found.append((gate.open, gate.in_hand()))
                looked.set()

            def launch() -> None:
                with busy.lock:
                    busy.inside += 1
                with busy.lock:
                    busy.inside -= 1

            if item == 0:  # in the middle of its job when the first section begins
                await heard(busy.section)
                asyncio.get_running_loop().call_soon(look)  # once it has asked for its launch
            for _ in range(3):
                await ctx.enqueue(launch)
                await asyncio.sleep(0)  # a turn of the loop, in which the gate may close
            return item

    class Slow(busy.publish()):  # type: ignore[misc]
        def run(self, item: Trigger, ctx: Any) -> Any:
            busy.section.set()
            assert looked.wait(LIMIT)
            return super().run(item, ctx)

    spec = files(every=4)
    spec["o"] = {"uses": "other", "from": "a", "on": "cpu", "in_flight": 2, "timeout": "5s"}
    given = uses(busy, seen) | {"other": Async, "publish": Slow}
    fine(go(tmp_path, spec, given, resources=RESOURCES))
    assert found == [(False, ["p[0] item 0"])]
    assert busy.met == []
    assert seen == [(0, 4), (1, 8), (2, 12)]


@pytest.mark.axiom("5.2")
def test_a_barrier_stops_the_launches_of_other_pipelines_too(tmp_path: Path) -> None:
    one, two = Busy(), Busy()
    two.inside = 0
    seen: list[Any] = []
    given = uses(one, seen)
    shared = {"numbers2": given["other"]}

    async def main() -> Any:
        other = {
            "a": {"uses": "numbers", "with": {"count": 60}},
            "o": {"uses": "numbers2", "from": "a", "on": "cpu", "replicas": 2},
        }
        return await asyncio.gather(
            flow(tmp_path / "1", files(every=2), given, resources=RESOURCES),
            flow(tmp_path / "2", other, shared),
        )

    for outcome in in_loop(main):
        fine(outcome)
        settled(outcome)
    assert one.met == []


def test_a_run_that_failed_in_its_section_frees_other_pipelines_when_it_is_gone(tmp_path: Path) -> None:
    busy, seen = Busy(), []

    async def main() -> Any:
        spec, given = files(100, every=4), uses(busy, seen, fails_at=0)
        other = {
            "a": {"uses": "anumbers", "with": {"count": 400}},
            "o": {"uses": "other", "from": "a", "on": "cpu", "replicas": 2},
        }
        return await asyncio.gather(
            flow(tmp_path / "1", spec, given, resources=RESOURCES),
            flow(tmp_path / "2", other, {"other": given["other"]}),
        )

    failed, went_on = in_loop(main)
    assert isinstance(failed.error, StageError)
    fine(went_on)
    assert went_on.runner("o").counters.done == 400


@pytest.mark.axiom("5.2")
def test_the_end_of_one_pipeline_does_not_open_another_ones_gates(tmp_path: Path) -> None:
    """A section of the second is under way when the first, which has a barrier of its own, is closed."""
    busy, quick, seen = Busy(), Busy(), []
    inside, release = threading.Event(), threading.Event()

    class Slow(busy.publish()):  # type: ignore[misc]
        def run(self, item: Trigger, ctx: Any) -> Any:
            inside.set()
            assert release.wait(10)
            return super().run(item, ctx)

    async def main() -> Any:
        async def first(pipeline: Pipeline) -> None:
            await pipeline.run()
            second.append(
                asyncio.ensure_future(
                    flow(
                        tmp_path / "2",
                        files(every=6),
                        uses(busy, seen) | {"publish": Slow},
                        resources=RESOURCES,
                    )
                )
            )
            await heard(inside)

        second: list[Any] = []
        outcome = await flow(tmp_path / "1", files(every=6), uses(quick, []), first, resources=RESOURCES)
        assert not gates_of_this_loop().of("cpu").open
        release.set()
        return outcome, await second[0]

    for outcome in in_loop(main):
        fine(outcome)
    assert busy.met == []
