# ruff: noqa: RUF012, TC003 - stages as an author writes them; annotations are read at run time
"""Readers that work on their own copy: the writer does not wait for them (axioms 3.4 and 5.6)."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from flows import LIMIT, collector, fine, go, heard, stands_still, turns_until
from test_resources import Box, Writes

from pipeflow import DROP, Cancelled, Pipeline, Stage, StageError
from pipeflow.gate import gates_of_this_loop

if TYPE_CHECKING:
    from pipeflow.item import Trigger

RESOURCES = {"box": {"uses": "box"}, "frozen": {"uses": "frozen"}}


class Copied(Box):
    """A box that can be copied; it counts its copies."""

    made: list[int] = []

    def open(self, ctx: Any) -> Any:
        Copied.made = []
        return super().open(ctx)

    def snapshot(self, value: Any) -> Any:
        Copied.made.append(len(value["log"]))
        return {"log": list(value["log"])}


class Frozen(Box):
    """Nobody writes it, so nobody copies it."""


class Looks(Stage):
    """Notes how many writes its box holds, at the begin and at the end."""

    reads = {"box": Box, "frozen": Frozen}
    seen: list[Any]

    def run(self, item: Any, ctx: Any) -> Any:
        box = ctx.read("box")
        first = len(box["log"])
        self.between(item)
        self.seen.append((item, first, len(box["log"]), ctx.version("box").step))
        assert "lock" in ctx.read("frozen")
        return item

    def between(self, item: Any) -> None:
        pass


def files(count: int = 12, **reader: Any) -> dict[str, Any]:
    return {
        "a": {"uses": "numbers", "with": {"count": count}},
        "w": {"uses": "writes", "from": "a", "writes": "box"},
        "r": {"uses": "looks", "from": "w", "reads": {"box": "box", "frozen": "frozen"}, **reader},
    }


def uses(looks: Any, seen: list[Any]) -> dict[str, Any]:
    looks = type("Looks", (looks,), {"seen": seen})
    return {"box": Copied, "frozen": Frozen, "writes": Writes, "looks": looks}


@pytest.mark.axiom("3.4")
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("place", [None, "cpu", "cpu-late"])
def test_the_reader_sees_its_items_version(tmp_path: Path, every: int, replicas: int, place: Any) -> None:
    seen: list[Any] = []
    spec = files(every=every, replicas=replicas, snapshot=True)
    if place is not None:
        for name in "wr":
            spec[name]["on"] = place
    fine(go(tmp_path, spec, uses(Looks, seen), resources=RESOURCES))
    assert sorted(seen) == [(n, n + 1, n + 1, n + 1) for n in range(every - 1, 12, every)]
    assert len(Copied.made) == len(seen)


@pytest.mark.axiom("3.4")
@pytest.mark.parametrize("snapshot", [True, False])
def test_the_writer_goes_on_beside_the_reader(tmp_path: Path, snapshot: bool) -> None:
    seen: list[Any] = []
    begun, go_on = threading.Event(), threading.Event()

    class Holds(Looks):
        def between(self, item: Any) -> None:
            if item == 0:
                begun.set()
                assert go_on.wait(LIMIT)

    async def act(pipeline: Pipeline) -> Any:
        running = asyncio.ensure_future(pipeline.run())
        await heard(begun)
        await stands_still(pipeline, "r")
        made.append(pipeline._assembly.runners["w"].counters.made)
        go_on.set()
        return await running

    made: list[int] = []
    spec = files(snapshot=snapshot, queue={"items": 3})
    fine(go(tmp_path, spec, uses(Holds, seen), act, resources=RESOURCES))
    # Beside the item in work one more is made (its pin is gone with the copy): that one's copy comes only
    # once the lane is free, so the writer stops there.
    assert made == [2 if snapshot else 1]
    assert seen == [(n, n + 1, n + 1, n + 1) for n in range(12)]


@pytest.mark.parametrize("kind", ["async", "one-to-many", "async one-to-many"])
@pytest.mark.parametrize("place", [None, "cpu", "cpu-late"])
def test_every_kind_of_reader(tmp_path: Path, kind: str, place: Any) -> None:
    seen: list[Any] = []

    class Many(Stage):
        reads = {"box": Box, "frozen": Frozen}

        def run(self, item: int, ctx: Any):
            box = ctx.read("box")
            for _ in range(3):
                yield item, len(box["log"]), ctx.version("box").step

    class ManyAsync(Stage):
        reads = {"box": Box, "frozen": Frozen}

        async def run(self, item: int, ctx: Any):
            box = ctx.read("box")
            for _ in range(3):
                await asyncio.sleep(0)
                yield item, len(box["log"]), ctx.version("box").step

    class Async(Stage):
        reads = {"box": Box, "frozen": Frozen}

        async def run(self, item: int, ctx: Any) -> Any:
            box = ctx.read("box")
            first = len(box["log"])
            await asyncio.sleep(0)
            assert first == len(box["log"])
            return item, first, ctx.version("box").step

    looks = {"async": Async, "one-to-many": Many}.get(kind, ManyAsync)
    spec = files(snapshot=True)
    if place is not None:
        spec["r"]["on"] = spec["w"]["on"] = place
    spec["s"] = {"uses": "sink", "from": "r", "queue": {"items": 1}}
    used = uses(Looks, []) | {"looks": looks, "sink": collector(seen)}
    fine(go(tmp_path, spec, used, resources=RESOURCES))
    times = 3 if "many" in kind else 1
    assert seen == [(n, n + 1, n + 1) for n in range(12) for _ in range(times)]


def test_a_one_to_many_reader_goes_on_beside_a_write(tmp_path: Path) -> None:
    """The writer stands in its second write until the reader's last output of the first item is there."""
    seen: list[Any] = []
    third = threading.Event()

    class Many(Stage):
        reads = {"box": Box, "frozen": Frozen}

        def run(self, item: int, ctx: Any):
            for number in range(3):
                if item == 0 and number == 2:
                    third.set()
                yield item, number, len(ctx.read("box")["log"])

    class Waits(Writes):
        def run(self, item: int, ctx: Any) -> int:
            assert item == 0 or third.wait(LIMIT), "the reader waited for the writer"
            return super().run(item, ctx)

    spec = files(3, snapshot=True)
    spec["s"] = {"uses": "sink", "from": "r"}
    used = uses(Looks, []) | {"looks": Many, "writes": Waits, "sink": collector(seen)}
    fine(go(tmp_path, spec, used, resources=RESOURCES))
    assert seen == [(item, number, item + 1) for item in range(3) for number in range(3)]


def test_a_retry_gets_the_same_copy(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Flaky(Looks):
        tries: list[int] = []

        def run(self, item: Any, ctx: Any) -> Any:
            self.tries.append(item)
            if self.tries.count(item) < 3:
                raise ValueError("once more")
            return super().run(item, ctx)

    spec = files(6, snapshot=True, on_error={"retry": 2})
    fine(go(tmp_path, spec, uses(Flaky, seen), resources=RESOURCES))
    assert seen == [(n, n + 1, n + 1, n + 1) for n in range(6)]
    assert len(Copied.made) == 6


def test_a_reader_that_skips_or_drops_lets_go(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Fails(Looks):
        def run(self, item: Any, ctx: Any) -> Any:
            if item % 3 == 0:
                raise ValueError("no")
            return DROP if item % 3 == 1 else super().run(item, ctx)

    spec = files(9, snapshot=True, on_error={"skip": 9})
    fine(go(tmp_path, spec, uses(Fails, seen), resources=RESOURCES))
    assert seen == [(n, n + 1, n + 1, n + 1) for n in (2, 5, 8)]


def test_a_fault_in_the_copy_ends_the_run(tmp_path: Path) -> None:
    class Breaks(Copied):
        def snapshot(self, value: Any) -> Any:
            if len(value["log"]) == 3:
                raise ValueError("no memory")
            return super().snapshot(value)

    outcome = go(tmp_path, files(snapshot=True), uses(Looks, []) | {"box": Breaks}, resources=RESOURCES)
    assert isinstance(outcome.error, StageError)
    assert "stage 'r', item 2: while a snapshot of what it reads was made: ValueError: no memory" in str(
        outcome.error
    )


# Barriers --------------------------------------------------------------------------------------------


class Sends(Looks):
    """A guarded reader."""

    guarded = True

    def run(self, item: Trigger, ctx: Any) -> Any:
        return super().run(item.seq, ctx)


def barrier(count: int = 12, **keys: Any) -> dict[str, Any]:
    spec = files(count)
    spec["b"] = {"uses": "barrier", "from": "w", "snapshot": True, **keys}
    spec["r"] |= {"from": "b"}
    for name in "wr":
        spec[name]["on"] = "cpu"
    return spec


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("start", [True, False])
def test_a_section_on_a_copy_sees_its_version(tmp_path: Path, every: int, start: bool) -> None:
    seen: list[Any] = []
    fine(go(tmp_path, barrier(every=every, at_start=start), uses(Sends, seen), resources=RESOURCES))
    firings = [(n, every * (n + 1), every * (n + 1), every * (n + 1)) for n in range(12 // every)]
    assert seen == ([(-1, 0, 0, 0)] if start else []) + firings


@pytest.mark.axiom("5.6")
@pytest.mark.parametrize("snapshot", [True, False])
def test_gates_open_while_it_is_sent_and_the_next_trigger_waits(tmp_path: Path, snapshot: bool) -> None:
    seen: list[Any] = []
    begun, go_on = threading.Event(), threading.Event()

    class Holds(Sends):
        def between(self, item: Any) -> None:
            if item == 0:
                begun.set()
                assert go_on.wait(LIMIT)

    async def act(pipeline: Pipeline) -> Any:
        running = asyncio.ensure_future(pipeline.run())
        await heard(begun)
        writer, runner = pipeline._assembly.runners["w"], pipeline._assembly.runners["b"]
        if snapshot:
            await turns_until(pipeline, lambda: writer.counters.made == 4)
        for _ in range(20):  # turns in which more would happen, if it might
            await asyncio.sleep(0)
        found.append((gates_of_this_loop().of("cpu").open, writer.counters.made, runner.counters.started))
        go_on.set()
        return await running

    found: list[Any] = []
    spec = barrier(every=2, queue={"items": 2})
    spec["b"]["snapshot"] = snapshot
    fine(go(tmp_path, spec, uses(Holds, seen), act, resources=RESOURCES))
    # With a copy the writer makes the next selected item, which waits in the barrier's queue (its version
    # pinned); without one nothing is launched.
    assert found == [(True, 4, 1) if snapshot else (False, 2, 1)]
    assert seen == [(n, 2 * n + 2, 2 * n + 2, 2 * n + 2) for n in range(6)]


def test_another_barrier_waits_for_what_is_sent(tmp_path: Path) -> None:
    """What is sent is device memory: nobody frees memory meanwhile."""
    seen: list[Any] = []
    inside: list[bool] = []
    sending = threading.Event()

    class Holds(Sends):
        def between(self, item: Any) -> None:
            sending.set()
            threading.Event().wait(0.002)  # slow on purpose: a section that did not wait would meet it
            sending.clear()

    class Frees(Stage):
        guarded = True

        def run(self, item: Trigger) -> None:
            inside.append(sending.is_set())

    spec = barrier(20, every=2)
    spec["b2"] = {"uses": "barrier", "from": "a"}
    spec["f"] = {"uses": "frees", "from": "b2"}
    fine(go(tmp_path, spec, uses(Holds, seen) | {"frees": Frees}, resources=RESOURCES))
    assert inside == [False] * 20
    assert len(seen) == 10


def test_what_is_sent_begins_behind_an_open_gate_only(tmp_path: Path) -> None:
    """Between the two stages that send, another barrier has its turn: the second one waits for it."""
    seen: list[Any] = []
    sending, send, freeing, free = (threading.Event() for _ in range(4))

    class Holds(Sends):
        def between(self, item: Any) -> None:
            sending.set()
            assert send.wait(LIMIT)

    class Frees(Stage):
        guarded = True
        device = True

        def run(self, item: Trigger) -> None:
            freeing.set()
            assert free.wait(LIMIT)

    class After(Stage):
        """An item for the other barrier once the first one sends."""

        def run(self):
            assert sending.wait(LIMIT)
            yield 0

    class Notes(Stage):
        guarded = True

        def run(self, item: Any) -> Any:
            found.append(free.is_set())
            return item

    async def act(pipeline: Pipeline) -> Any:
        running = asyncio.ensure_future(pipeline.run())
        runners = pipeline._assembly.runners
        await turns_until(pipeline, lambda: runners["b2"].phase == "waits for launches in scope")
        send.set()
        await heard(freeing)
        for _ in range(20):  # turns in which the other one's second stage would be called
            await asyncio.sleep(0)
        found.append(gates_of_this_loop().of("cpu").in_hand())
        free.set()
        return await running

    found: list[Any] = []
    spec = barrier(2, every=2)
    spec["n"] = {"uses": "notes", "from": "r", "on": "cpu"}
    spec["late"] = {"uses": "after"}
    spec["b2"] = {"uses": "barrier", "from": "late"}
    spec["f"] = {"uses": "frees", "from": "b2", "on": "cpu"}
    used = uses(Holds, seen) | {"notes": Notes, "after": After, "frees": Frees}
    outcome = fine(go(tmp_path, spec, used, act, resources=RESOURCES))
    assert found == [["f[0] item 0"], True], "it was called while the other section ran"
    assert outcome.runner("n").counters.done == 1


def test_a_barrier_waits_for_a_snapshot_in_hand(tmp_path: Path) -> None:
    copying, copied = threading.Event(), threading.Event()

    class Slow(Copied):
        def snapshot(self, value: Any) -> Any:
            copying.set()
            assert copied.wait(LIMIT)
            return super().snapshot(value)

    class Frees(Stage):
        guarded = True

        def run(self, item: Trigger) -> None:
            pass

    class After(Stage):
        def run(self):
            assert copying.wait(LIMIT)
            yield 0

    async def act(pipeline: Pipeline) -> Any:
        running = asyncio.ensure_future(pipeline.run())
        runner = pipeline._assembly.runners["b2"]
        await turns_until(pipeline, lambda: runner.counters.started)
        found.append(gates_of_this_loop().of("cpu").in_hand())
        copied.set()
        return await running

    found: list[Any] = []
    spec = files(2, snapshot=True, on="cpu")
    spec["late"] = {"uses": "after"}
    spec["b2"] = {"uses": "barrier", "from": "late"}
    spec["f"] = {"uses": "frees", "from": "b2"}
    used = uses(Looks, []) | {"box": Slow, "after": After, "frees": Frees}
    fine(go(tmp_path, spec, used, act, resources=RESOURCES))
    assert found == [["r[0] item 0"]]


def test_a_section_of_several_stages_runs_one_by_one_on_copies(tmp_path: Path) -> None:
    seen, order = [], []

    class Notes(Stage):
        guarded = True

        def run(self, item: Any) -> Any:
            order.append(("n", item))
            return item

    class Ordered(Sends):
        def between(self, item: Any) -> None:
            order.append(("r", item))

    spec = barrier(6, every=3)
    spec["n"] = {"uses": "notes", "from": "r"}
    fine(go(tmp_path, spec, uses(Ordered, seen) | {"notes": Notes}, resources=RESOURCES))
    assert [name for name, _ in order] == ["r", "n"] * 2


@pytest.mark.parametrize("fails", [True, False])
def test_a_fault_or_cancel_while_it_is_sent_ends_the_run(tmp_path: Path, fails: bool) -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Holds(Sends):
        def between(self, item: Any) -> None:
            begun.set()
            if fails:
                raise ValueError("peer lost")
            assert go_on.wait(LIMIT)

    async def act(pipeline: Pipeline) -> Any:
        running = asyncio.ensure_future(pipeline.run())
        await heard(begun)
        if not fails:
            pipeline.cancel()
            go_on.set()
        return await running

    outcome = go(tmp_path, barrier(every=2), uses(Holds, []), act, resources=RESOURCES)
    if fails:
        assert "stage 'r', item 0: ValueError: peer lost" in str(outcome.error)
    else:
        assert isinstance(outcome.error, Cancelled)


def test_a_send_that_hangs_is_named(tmp_path: Path) -> None:
    from flows import until_it_ends

    go_on = threading.Event()

    class Hangs(Sends):
        def between(self, item: Any) -> None:
            assert go_on.wait(LIMIT)

    spec = barrier(every=2, timeout="100ms")
    outcome = go(tmp_path, spec, uses(Hangs, []), until_it_ends(go_on), resources=RESOURCES)
    assert "not done after 0.1 s, in the phase: runs r on its copy; r[0] item 0" in str(outcome.error)
