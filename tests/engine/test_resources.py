# ruff: noqa: RUF012, TC003 - stages as an author writes them; annotations are read at run time
"""Leases and versions (axioms 3.1 to 3.3)."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from flows import collector, fine, go

from pipeflow import Resource, StageError, stage
from pipeflow.fence import REACHED, Fence
from pipeflow.stage import Stage


class Box(Resource):
    """A list with a count of who is inside."""

    def open(self, ctx: Any) -> Any:
        return {"readers": 0, "writers": 0, "log": [], "lock": threading.Lock()}


class Other(Box):
    pass


def inside(box: Any, role: str) -> Any:
    """Enter and leave, with the rule of many readers or one writer checked."""

    class Inside:
        def __enter__(self):
            with box["lock"]:
                box[role] += 1
                assert box["writers"] <= 1
                assert not (box["writers"] and box["readers"]), "read and written at once"

        def __exit__(self, *fault):
            with box["lock"]:
                box[role] -= 1

    return Inside()


class Writes(Stage):
    writes = {"box": Box}

    def run(self, item: int, ctx: Any) -> int:
        box = ctx.write("box")
        with inside(box, "writers"):
            box["log"].append(item)
        return item


class Reads(Stage):
    reads = {"box": Box}

    def run(self, item: int, ctx: Any) -> int:
        with inside(ctx.read("box"), "readers"):
            return item


@pytest.mark.axiom("3.2")
def test_many_read_or_one_writes(tmp_path: Path) -> None:
    seen: list[int] = []
    stages = {
        "a": {"uses": "numbers", "with": {"count": 60}},
        "b": {"uses": "numbers", "with": {"count": 60}},
        "w": {"uses": "writes", "from": "a", "writes": "box"},
        "r": {"uses": "reads", "from": "w", "replicas": 3, "reads": "box"},
        "s": {"uses": "sink", "from": "r"},
    }
    del stages["b"]
    uses = {"box": Box, "writes": Writes, "reads": Reads, "sink": collector(seen)}
    fine(go(tmp_path, stages, uses, resources={"box": {"uses": "box"}}))
    assert seen == list(range(60))


def test_two_readers_are_inside_together(tmp_path: Path) -> None:
    together = threading.Barrier(2, timeout=10)

    class Meets(Stage):
        reads = {"box": Box}

        def run(self, item: int, ctx: Any) -> None:
            together.wait()

    stages = {
        "a": {"uses": "numbers", "with": {"count": 2}},
        "r": {"uses": "meets", "from": "a", "replicas": 2, "reads": "box"},
    }
    fine(go(tmp_path, stages, {"box": Box, "meets": Meets}, resources={"box": {"uses": "box"}}))


@pytest.mark.axiom("3.3")
def test_each_step_of_a_writer_makes_a_version_and_items_carry_it(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    @stage
    def sink(item: int, ctx) -> None:
        seen.append(item)

    versions: list[Any] = []

    class Looks(Stage):
        reads = {"box": Box}

        def run(self, item: int, ctx: Any) -> int:
            versions.append((item, ctx.version("box").step))
            return item

    stages = {
        "a": {"uses": "numbers", "with": {"count": 6}},
        "w": {"uses": "writes", "from": "a", "writes": "box"},
        "r": {"uses": "looks", "from": "w", "reads": "box"},
        "s": {"uses": "sink", "from": "r"},
    }
    uses = {"box": Box, "writes": Writes, "looks": Looks, "sink": sink}
    fine(go(tmp_path, stages, uses, resources={"box": {"uses": "box"}}))
    assert versions == [(n, n + 1) for n in range(6)]


@pytest.mark.axiom("3.1")
def test_undeclared_use_is_an_error(tmp_path: Path) -> None:
    @stage
    def grabs(item: int, ctx) -> None:
        ctx.read("box")

    stages = {"a": {"uses": "numbers"}, "b": {"uses": "grabs", "from": "a"}}
    outcome = go(tmp_path, stages, {"grabs": grabs, "box": Box}, resources={"box": {"uses": "box"}})
    assert isinstance(outcome.error, StageError)
    assert "uses the resource role 'box'" in str(outcome.error)


class Lane:
    """Stands in for a lane's node in tests of the queue alone."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1


@pytest.fixture
def running_loop() -> Any:
    """The queue's tests run in no loop of their own; its methods are checked to be on one."""
    import asyncio

    loop = asyncio.new_event_loop()
    asyncio.events._set_running_loop(loop)
    yield loop
    asyncio.events._set_running_loop(None)
    loop.close()


def leases(*, awaits: bool = False, **given: Any) -> Any:
    from pipeflow.resource import Leases

    reads, writes = given.get("reads", {}), given.get("writes", {})
    return Leases(Lane("n"), reads, writes, awaits=awaits)  # type: ignore[arg-type]


def instances(*names: str) -> list[Any]:
    from pipeflow.resource import Instance, Shared

    return [Instance(Shared(name, "x"), "cpu", None) for name in names]


def test_a_stream_of_readers_does_not_starve_the_writer(running_loop: Any) -> None:
    (box,) = instances("box")
    first, second = leases(reads={"b": box}), leases(reads={"b": box})
    writer = leases(writes={"b": box})
    assert first.blocker() is None
    first.take()
    assert writer.blocker() is box
    assert second.blocker() is box  # it would pass for ever, otherwise
    first.give_back(REACHED)
    assert writer.node.woken
    assert writer.blocker() is None
    writer.take()
    assert second.blocker() is box
    writer.give_back(REACHED)
    assert second.blocker() is None


@pytest.mark.axiom("3.2")
def test_two_lanes_that_need_two_resources_never_wait_for_each_other(running_loop: Any) -> None:
    """They queue at both in one go, so the order is the same at each; and nobody starves between the two."""
    one, two = instances("one", "two")
    holds_one, holds_two = leases(reads={"1": one}), leases(reads={"2": two})
    a = leases(writes={"1": one, "2": two})
    b = leases(writes={"2": two, "1": one})
    holds_one.take()
    holds_two.take()
    assert a.blocker() is one
    assert b.blocker() is two
    holds_two.give_back(REACHED)
    assert b.blocker() is two  # free, but it is a's turn there
    reader = leases(reads={"2": two})
    assert reader.blocker() is two  # and no later reader slips in before the writer
    holds_one.give_back(REACHED)
    assert a.blocker() is None
    a.take()
    a.give_back(REACHED)
    assert b.blocker() is None


@pytest.mark.axiom("3.2")
def test_a_host_lane_starts_once_what_it_must_come_after_is_over(running_loop: Any) -> None:
    """A stream waits for marks; a thread of the host would block on them, so it is not started yet."""
    (box,) = instances("box")
    kernel = Fence()
    reader, writer = leases(reads={"b": box}), leases(awaits=True, writes={"b": box})
    reader.take()
    reader.give_back(kernel)
    assert leases(writes={"b": box}).take() == []  # of a device: the fence has no mark here
    box.writing = False
    assert writer.blocker() is box
    assert leases(reads={"b": box}).blocker() is box, "later readers stand behind it"
    kernel.reach()
    assert writer.node.woken
    assert writer.blocker() is None


def test_readers_pass_a_reader_that_waits_for_something_else(running_loop: Any) -> None:
    one, two = instances("one", "two")
    writes_two = leases(writes={"2": two})
    writes_two.take()
    waits = leases(reads={"1": one, "2": two})
    assert waits.blocker() is two
    assert leases(reads={"1": one}).blocker() is None


def test_who_wants_no_more_leaves_the_queue(running_loop: Any) -> None:
    (box,) = instances("box")
    holder, writer, reader = leases(reads={"b": box}), leases(writes={"b": box}), leases(reads={"b": box})
    holder.take()
    assert writer.blocker() is box
    assert reader.blocker() is box
    writer.forget()
    assert reader.node.woken
    assert reader.blocker() is None


def test_a_resource_opened_under_a_cancel_is_closed(tmp_path: Path) -> None:
    import asyncio

    opening, go_on, closed = threading.Event(), threading.Event(), []

    class Slow(Resource):
        def open(self, ctx: Any) -> str:
            opening.set()
            assert go_on.wait(10)
            return "opened"

        def close(self, value: Any) -> None:
            closed.append(value)

    from flows import flow, heard, in_loop

    async def main() -> None:
        task = asyncio.ensure_future(
            flow(tmp_path, {"a": {"uses": "numbers"}}, {"slow": Slow}, resources={"slow": {"uses": "slow"}})
        )
        await heard(opening)
        task.cancel()
        await asyncio.sleep(0)  # a turn of the loop: the cancel strikes while the resource is being opened
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    in_loop(main)
    assert closed == ["opened"]


def test_a_lane_that_waits_in_a_line_takes_the_next_item(tmp_path: Path) -> None:
    """Of two lanes that read, one waits in line with a writer behind it. The next item must be its own: with
    the other lane, behind the writer, all three would wait for ever. Found by random graphs, 4 in 288,000."""
    stages = {
        "a": {"uses": "numbers", "with": {"count": 3}},
        "w": {"uses": "writes", "from": "a", "writes": "box"},
        "r": {"uses": "reads", "from": "w", "reads": "box", "replicas": 2},
    }

    async def act(pipeline: Any) -> Any:
        reader = pipeline._assembly.runners["r"]
        (writer,) = pipeline._assembly.runners["w"].lanes
        first, second = reader.lanes
        assert reader._free_lane() is first
        writer.leases.take()
        assert first.leases.blocker() is not None
        reader._next_lane = 1
        assert reader._free_lane() is first
        first.leases.forget()
        assert reader._free_lane() is second
        writer.leases.give_back(REACHED)
        reader._next_lane = 0
        return await pipeline.run()

    uses = {"box": Box, "writes": Writes, "reads": Reads}
    fine(go(tmp_path, stages, uses, act, resources={"box": {"uses": "box"}}))
