# ruff: noqa: RUF012, TC003 - stages as an author writes them; annotations are read at run time
"""A follower beside its live copy (axiom 3.7): readers go on, and no item sees two versions."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from flows import LIMIT, fine, go, heard, stands_still
from test_follows import PUBLISHES, READS, WRITES, Loop, files, resources
from test_resources import Box

from pipeflow import Pipeline, Stage, StageError

if TYPE_CHECKING:
    from pipeflow.item import Trigger


class Copies(Loop):
    """A loop whose publisher takes its time in the middle of a write, and whose readers look twice."""

    def __init__(self) -> None:
        super().__init__()
        self.made = dict.fromkeys(range(100), 0)
        self.seen: list[tuple[Any, ...]] = []
        """Of each item: what its actor held when it began and when it ended."""
        self.writing = threading.Event()
        self.write = threading.Event()
        self.values: list[int] = []
        """The copies that were written, by identity."""

    def uses(self, **more: Any) -> dict[str, Any]:  # type: ignore[override]
        loop = self

        class Generate(Stage):
            reads = {"actor": Box}

            def run(self, item: int, ctx: Any) -> int:
                actor = ctx.read("actor")
                first = tuple(actor["log"])
                more.get("between", lambda item: None)(item)
                loop.seen.append((item, first, tuple(actor["log"]), ctx.version("actor").step))
                return item

        class Publish(Stage):
            reads = {"drafter": Box}
            writes = {"actor": Box}

            def run(self, item: Any, ctx: Any) -> None:
                actor = ctx.write("actor")
                loop.values.append(id(actor))
                actor["log"].clear()
                loop.writing.set()
                if more.get("held"):
                    assert loop.write.wait(LIMIT)
                actor["log"].extend(ctx.read("drafter")["log"])

        return super().uses() | {"generate": Generate, "publish": Publish}


def spec(count: int = 12, **stages: Any) -> dict[str, Any]:
    made = files(count, 1, **stages)
    del made["b"]
    made["p"] = {"uses": "publish", "from": "t", **PUBLISHES}
    return made


@pytest.mark.axiom("3.7")
@pytest.mark.parametrize("spare", [True, False])
@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("replicas", [1, 3])
def test_no_item_sees_two_versions(tmp_path: Path, spare: bool, staleness: int, replicas: int) -> None:
    loop, stages = Copies(), spec(30)
    stages["g"] |= {"replicas": replicas, "in_flight": 2}
    fine(go(tmp_path, stages, loop.uses(), resources=resources(staleness, spare=spare)))
    for item, first, last, step in loop.seen:
        assert first == last == tuple(range(step)), item
        assert step >= item - staleness
    assert len(set(loop.values)) == 1 + spare
    assert loop.steps == [(n,) for n in range(30)]


@pytest.mark.axiom("3.7")
@pytest.mark.parametrize("spare", [True, False])
def test_readers_go_on_beside_a_write(tmp_path: Path, spare: bool) -> None:
    """The publisher stands in the middle of its first write: with a spare copy the reader starts items as far
    as it may; without one, none."""
    loop = Copies()
    used = loop.uses(held=True)

    async def act(pipeline: Pipeline) -> Any:
        running = asyncio.ensure_future(pipeline.run())
        await heard(loop.writing)
        before = len(loop.seen)
        late.set()
        await stands_still(pipeline, "p")
        counts.append(len(loop.seen) - before)
        loop.write.set()
        return await running

    late, counts = threading.Event(), []

    class Late(Stage):
        """Item 1 comes once the first write is under way."""

        def run(self):
            yield 0
            assert late.wait(LIMIT)
            yield 1
            yield 2

    stages = spec()
    stages["a"] = {"uses": "late"}
    fine(go(tmp_path, stages, used | {"late": Late}, act, resources=resources(5, spare=spare)))
    assert counts == [2 if spare else 0]
    assert [entry[1:3] for entry in loop.seen[1:2]] == [((), ())] if spare else [((0,), (0,))]


@pytest.mark.axiom("3.7")
@pytest.mark.parametrize("spare", [True, False])
def test_a_write_waits_for_readers_of_the_copy_it_overwrites(tmp_path: Path, spare: bool) -> None:
    """Item 0 keeps its copy. Without a spare not one version goes out; with one the first does, the second
    must wait."""
    begun, go_on = threading.Event(), threading.Event()

    def between(item: int) -> None:
        if item == 0:
            begun.set()
            assert go_on.wait(LIMIT)

    loop = Copies()

    class Serves(Stage):
        """A reader that is not held back: it serves, and nothing is trained on what it makes."""

        reads = {"actor": Box}

        def run(self, item: int, ctx: Any) -> int:
            return loop.uses(between=between)["generate"].run(self, item, ctx)

    class After(Stage):
        def run(self, item: int) -> int:
            assert begun.wait(LIMIT)
            return item

    async def act(pipeline: Pipeline) -> Any:
        running = asyncio.ensure_future(pipeline.run())
        await heard(begun)
        await stands_still(pipeline, "serves")
        published.append(len(loop.values))
        go_on.set()
        return await running

    published: list[int] = []
    stages = {
        "one": {"uses": "numbers", "with": {"count": 1}},
        "serves": {"uses": "serves", "from": "one", **READS},
        "a": {"uses": "numbers", "with": {"count": 3}},
        "after": {"uses": "after", "from": "a"},
        "t": {"uses": "train", "from": "after", **WRITES},
        "p": {"uses": "publish", "from": "t", **PUBLISHES},
    }
    used = loop.uses() | {"serves": Serves, "after": After}
    fine(go(tmp_path, stages, used, act, resources=resources(None, spare=spare)))
    assert published == [int(spare)]
    assert len(loop.values) == 3
    assert loop.seen == [(0, (), (), 0)], "its copy was written under it"


def test_a_one_to_many_reader_keeps_the_copy_it_began_with(tmp_path: Path) -> None:
    """A version goes out between its outputs; the next one waits until it is through."""
    loop, seen = Copies(), []

    class Serves(Stage):
        reads = {"actor": Box}

        def run(self, item: int, ctx: Any):
            actor = ctx.read("actor")
            for _ in range(4):
                yield item, tuple(actor["log"]), ctx.read("actor") is actor

    class Looks(Stage):
        def run(self, item: Any) -> None:
            seen.append(item)

    stages = {
        "a": {"uses": "numbers", "with": {"count": 6}},
        "serves": {"uses": "serves", "from": "a", **READS},
        "looks": {"uses": "looks", "from": "serves", "queue": {"items": 1}},
        "t": {"uses": "train", "from": "a", **WRITES},
        "p": {"uses": "publish", "from": "t", **PUBLISHES},
    }
    used = loop.uses() | {"serves": Serves, "looks": Looks}
    fine(go(tmp_path, stages, used, resources=resources(None, spare=True)))
    for number in range(6):
        assert len({held for item, held, same in seen if item == number}) == 1
    assert all(same for *_, same in seen)
    assert len(loop.values) == 6


@pytest.mark.axiom("5.5")
def test_a_write_that_failed_leaves_the_live_copy_alone(tmp_path: Path) -> None:
    loop, seen = Copies(), []
    used = loop.uses()

    class Breaks(used["publish"]):  # type: ignore[misc]
        def run(self, item: Any, ctx: Any) -> Any:
            super().run(item, ctx)
            if item == 1:
                ctx.write("actor")["log"][:] = ["half"]
                raise ValueError("lost")
            return item

    class Looks(Stage):
        reads = {"actor": Box}

        def run(self, item: int, ctx: Any) -> None:
            seen.append((item, tuple(ctx.read("actor")["log"]), ctx.version("actor").step))

    stages = {
        "a": {"uses": "numbers", "with": {"count": 4}},
        "t": {"uses": "train", "from": "a", **WRITES},
        "p": {"uses": "breaks", "from": "t", "on_error": {"skip": 1}, **PUBLISHES},
        "looks": {"uses": "looks", "from": "t", **READS},
    }
    fine(
        go(tmp_path, stages, used | {"breaks": Breaks, "looks": Looks}, resources=resources(None, spare=True))
    )
    assert all(held == tuple(range(step)) for _, held, step in seen), seen
    assert loop.values[1] == loop.values[2], "the copy that was half written is written again"


def test_behind_a_barrier(tmp_path: Path) -> None:
    loop = Copies()
    used = loop.uses()

    class Guarded(used["publish"]):  # type: ignore[misc]
        guarded = True

        def run(self, item: Trigger, ctx: Any) -> None:
            super().run(item, ctx)

    stages = files(12, 2)
    fine(go(tmp_path, stages, used | {"publish": Guarded}, resources=resources(2, spare=True)))
    assert all(first == last == tuple(range(step)) for _, first, last, step in loop.seen)
    assert len(set(loop.values)) == 2


def test_both_copies_are_opened_alike_and_closed(tmp_path: Path) -> None:
    opened, closed = [], []

    class Held(Box):
        def open(self, ctx: Any) -> Any:
            opened.append((ctx.name, ctx.seed))
            return super().open(ctx)

        def close(self, value: Any) -> None:
            closed.append(id(value))

    loop = Copies()
    fine(go(tmp_path, spec(3), loop.uses() | {"box": Held}, resources=resources(0, spare=True)))
    actors = [seed for name, seed in opened if name == "actor"]
    assert len(actors) == 2
    assert len(set(actors)) == 1
    assert len(set(closed)) == 3


@pytest.mark.parametrize("use", ["read", "write"])
def test_setup_may_not_keep_one_of_two_copies(tmp_path: Path, use: str) -> None:
    loop = Copies()
    used = loop.uses()
    name = "generate" if use == "read" else "publish"

    class Keeps(used[name]):  # type: ignore[misc]
        def setup(self, ctx: Any) -> None:
            self.actor = getattr(ctx, use)("actor")

    outcome = go(tmp_path, spec(), used | {name: Keeps}, resources=resources(0, spare=True))
    assert isinstance(outcome.error, StageError)
    assert "uses the resource role 'actor' in setup, but it has a spare copy" in str(outcome.error)


@pytest.mark.parametrize("spare", [True, False])
def test_every_device_gets_the_version(tmp_path: Path, spare: bool) -> None:
    """One copy a device, all leased to the write; to write one of them alone is an error."""
    loop, seen = Copies(), []

    class Everywhere(Stage):
        reads = {"drafter": Box}
        writes = {"actor": Box}

        def run(self, item: int, ctx: Any) -> None:
            places.update(ctx.copies("actor"))
            for actor in ctx.copies("actor").values():
                actor["log"][:] = ctx.read("drafter")["log"]

    class Looks(Stage):
        reads = {"actor": Box}
        device = True

        def run(self, item: int, ctx: Any) -> int:
            seen.append((ctx.device, tuple(ctx.read("actor")["log"]), ctx.version("actor").step))
            return item

    places: dict[str, Any] = {}
    stages = spec(12)
    stages["g"] |= {"uses": "looks", "on": ["cpu", "cpu-late"]}
    stages["p"]["uses"] = "everywhere"
    given = resources(1, spare=spare)
    given["actor"]["on"] = ["cpu", "cpu-late"]
    used = loop.uses() | {"everywhere": Everywhere, "looks": Looks}
    fine(go(tmp_path, stages, used, resources=given))
    assert sorted(places) == ["cpu", "cpu-late"]
    assert all(held == tuple(range(step)) for _, held, step in seen), seen
    stages["p"]["uses"] = "publish"
    outcome = go(tmp_path / "one", stages, used, resources=given)
    assert "is open on cpu, cpu-late: to write one alone" in str(outcome.error)
