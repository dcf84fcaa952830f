# ruff: noqa: RUF012, TC003 - stages as an author writes them; annotations are read at run time
"""How far a reader of a follower runs ahead of what is published (axiom 3.6)."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from flows import fine, go, stands_still
from test_resources import Box

from pipeflow import DROP, Pipeline, Stage, StageError, StallError
from pipeflow.resource import Shared
from pipeflow.stage import Gather
from pipeflow.staleness import Admission

if TYPE_CHECKING:
    from pipeflow.item import Trigger


class Loop:
    """Stages of a loop that note what they see: generate (reads the actor) > train (writes the drafter) >
    publish (writes the actor)."""

    def __init__(self) -> None:
        self.made: dict[int, int] = {}
        """Item to the steps in the actor that it was made with."""
        self.steps: list[tuple[int, ...]] = []
        """The items of each step, in order."""
        self.ahead: list[int] = []
        """Of each item that was trained on: steps made before its own that its actor had not seen."""
        self.running = 0
        self.most = 0

    def uses(self, drops: Any = (), skips: Any = (), skips_step: Any = (), **more: Any) -> dict[str, Any]:
        loop = self

        class Generate(Stage):
            reads = {"actor": Box}

            def run(self, item: int, ctx: Any) -> int:
                loop.made[item] = len(ctx.read("actor")["log"])
                if item in skips:
                    raise ValueError("no")
                return DROP if item in drops else item  # type: ignore[return-value]

        class Train(Stage):
            writes = {"drafter": Box}

            def run(self, item: Any, ctx: Any) -> Any:
                items = tuple(item) if isinstance(item, list) else (item,)
                if items[0] in skips_step:
                    raise ValueError("no")
                loop.steps.append(items)
                done = len(loop.steps) - 1
                loop.ahead += [done - loop.made[n] for n in items]
                ctx.write("drafter")["log"].append(item)
                return item

        class Publish(Stage):
            guarded = True
            reads = {"drafter": Box}
            writes = {"actor": Box}

            def run(self, item: Trigger, ctx: Any) -> None:
                drafter, actor = ctx.read("drafter")["log"], ctx.write("actor")["log"]
                actor.extend(drafter[len(actor) :])

        class PublishItem(Publish):
            guarded = False

            def run(self, item: Any, ctx: Any) -> Any:
                super().run(item, ctx)
                return item

        class Pack(Gather):
            class Config(Gather.Config):  # type: ignore[name-defined, misc]
                size: int = 2

            @classmethod
            def gathers(cls, config: Any) -> int:
                return config.size

            def run(self, items: list[Any]) -> list[Any]:
                return [n for item in items for n in (item if isinstance(item, list) else [item])]

        class Filter(Stage):
            def run(self, item: Any) -> Any:
                return (
                    DROP
                    if (item[0] if isinstance(item, list) else item) in more.get("filtered", ())
                    else item
                )

        return {
            "box": Box, "generate": Generate, "train": Train, "publish": Publish, "publish_item": PublishItem,
            "pack": Pack, "filter": Filter,
        }  # fmt: skip


def resources(staleness: int | None, **actor: Any) -> dict[str, Any]:
    if staleness is not None:
        actor["max_staleness"] = staleness
    return {"drafter": {"uses": "box"}, "actor": {"uses": "box", "follows": "drafter", **actor}}


READS = {"reads": {"actor": "actor"}}
WRITES = {"writes": {"drafter": "drafter"}}
PUBLISHES = {"reads": {"drafter": "drafter"}, "writes": {"actor": "actor"}}


def files(count: int = 12, every: int = 1, way: str = "g", **stages: Any) -> dict[str, Any]:
    return {
        "a": {"uses": "numbers", "with": {"count": count}},
        "g": {"uses": "generate", "from": "a", **READS},
        "t": {"uses": "train", "from": way, **WRITES},
        "b": {"uses": "barrier", "from": "t", "every": every},
        "p": {"uses": "publish", "from": "b", **PUBLISHES},
        **stages,
    }


def straight(count: int, every: int, way: str = "g", **stages: Any) -> dict[str, Any]:
    """The same without a barrier: the publisher is a stage behind the writer."""
    spec = files(count, every, way, **stages)
    del spec["b"]
    spec["p"] = {"uses": "publish_item", "from": "t", "every": every, **PUBLISHES}
    return spec


@pytest.mark.axiom("3.6")
@pytest.mark.parametrize("build", [files, straight])
@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("spare", [0, 1, 2])
def test_no_step_is_made_of_older_items(tmp_path: Path, build: Any, every: int, spare: int) -> None:
    loop, staleness = Loop(), every - 1 + spare
    fine(go(tmp_path, build(13, every), loop.uses(), resources=resources(staleness)))
    assert loop.steps == [(n,) for n in range(13)]
    assert max(loop.ahead) <= staleness


@pytest.mark.axiom("3.6")
@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
def test_it_runs_ahead_as_far_as_it_may_and_no_further(tmp_path: Path, staleness: int) -> None:
    """The trainer is held in its first step: what the reader does meanwhile is what it may."""
    loop, training, go_on = Loop(), threading.Event(), threading.Event()
    used = loop.uses()

    class Held(used["train"]):  # type: ignore[misc]
        def run(self, item: Any, ctx: Any) -> Any:
            training.set()
            assert go_on.wait(10)
            return super().run(item, ctx)

    async def act(pipeline: Pipeline) -> Any:
        import asyncio

        running = asyncio.ensure_future(pipeline.run())
        await stands_still(pipeline, "t")
        seen.append(len(loop.made))
        go_on.set()
        return await running

    seen: list[int] = []
    spec = files(10, queue=None)
    del spec["queue"]
    spec["t"]["queue"] = {"items": 9}
    fine(go(tmp_path, spec, used | {"train": Held}, act, resources=resources(staleness or None)))
    assert seen == [staleness + 1]
    assert max(loop.ahead) == staleness


@pytest.mark.axiom("3.6")
@pytest.mark.parametrize("staleness", [0, 1])
def test_gathers_on_the_way_multiply(tmp_path: Path, staleness: int) -> None:
    """Two by two and three by three: six items a step."""
    loop = Loop()
    spec = files(
        30, way="y", x={"uses": "pack", "from": "g"}, y={"uses": "pack", "from": "x", "with": {"size": 3}}
    )
    fine(go(tmp_path, spec, loop.uses(), resources=resources(staleness)))
    assert loop.steps == [tuple(range(n, n + 6)) for n in range(0, 30, 6)]
    assert max(loop.ahead) <= staleness


def test_a_writer_that_gathers_counts_too(tmp_path: Path) -> None:
    loop = Loop()
    used = loop.uses()

    class Trains(used["pack"]):  # type: ignore[misc]
        writes = {"drafter": Box}

        def run(self, items: list[Any], ctx: Any) -> Any:
            return used["train"].run(self, items, ctx)

    fine(go(tmp_path, files(11, way="g"), used | {"train": Trains}, resources=resources(0)))
    assert loop.steps == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10,)]
    assert max(loop.ahead) == 0


def test_a_gap_before_the_reader_never_counted(tmp_path: Path) -> None:
    loop = Loop()
    spec = files(12, f={"uses": "filter", "from": "a"})
    spec["g"]["from"] = "f"
    fine(go(tmp_path, spec, loop.uses(filtered=range(0, 12, 2)), resources=resources(0)))
    assert loop.steps == [(n,) for n in range(1, 12, 2)]
    assert max(loop.ahead) == 0


GONE = [0, 1, 4, 5, 6, 11]
LEFT = [(n,) for n in range(12) if n not in GONE]


@pytest.mark.axiom("3.6")
@pytest.mark.parametrize("where", ["reader drops", "reader skips", "filtered", "writer skips", "routed away"])
@pytest.mark.parametrize("every", [1, 2])
def test_a_gap_gives_its_place_back(tmp_path: Path, where: str, every: int) -> None:
    loop = Loop()
    spec = files(12, every)
    match where:
        case "reader drops":
            used = loop.uses(drops=GONE)
        case "reader skips":
            used = loop.uses(skips=GONE)
            spec["g"]["on_error"] = {"skip": 99}
        case "filtered":
            used = loop.uses(filtered=GONE)
            spec["f"] = {"uses": "filter", "from": "g"}
            spec["t"]["from"] = "f"
        case "writer skips":
            used = loop.uses(skips_step=GONE)
            spec["t"]["on_error"] = {"skip": 99}
        case _:
            used = loop.uses() | {"where": where_to(GONE)}
            spec["r"] = {"uses": "where", "from": "g"}
            spec["t"]["from"] = "r.left"
            spec["s"] = {"uses": "double", "from": "r.gone"}
    fine(go(tmp_path, spec, used, resources=resources(every - 1)))
    assert loop.steps == LEFT
    assert max(loop.ahead) <= every - 1


def where_to(gone: list[int]) -> Any:
    from pipeflow import Port

    class Where(Stage):
        ports = ("left", "gone")

        def run(self, item: int) -> Any:
            return Port("gone" if item in gone else "left", item)

    return Where


def test_a_batch_that_is_dropped_gives_the_places_of_its_members_back(tmp_path: Path) -> None:
    loop = Loop()
    spec = files(
        24,
        way="y",
        x={"uses": "pack", "from": "g"},
        f={"uses": "filter", "from": "x"},
        y={"uses": "pack", "from": "f"},
    )
    # Items 3 and 8 go alone; 0 and 1, 10 and 11 by two.
    fine(go(tmp_path, spec, loop.uses(drops=[3, 8], filtered=[0, 10]), resources=resources(0)))
    assert loop.steps == [(2, 4, 5, 6), (7, 9, 12, 13), (14, 15, 16, 17), (18, 19, 20, 21), (22, 23)]
    assert max(loop.ahead) == 0


def test_a_gap_in_one_arm_of_a_diamond_counts_once(tmp_path: Path) -> None:
    loop = Loop()

    class Join(Stage):
        def run(self, item: dict[str, int]) -> int:
            return item["x"]

    spec = files(
        10,
        way="j",
        x={"uses": "filter", "from": "g"},
        y={"uses": "double", "from": "g"},
        j={"uses": "join", "from": {"x": "x", "y": "y"}},
    )
    fine(go(tmp_path, spec, loop.uses(filtered=[0, 1, 5, 9]) | {"join": Join}, resources=resources(0)))
    assert loop.steps == [(n,) for n in (2, 3, 4, 6, 7, 8)]
    assert max(loop.ahead) == 0


def test_the_count_is_the_stages_over_all_its_lanes(tmp_path: Path) -> None:
    loop = Loop()
    spec = files(20)
    spec["g"] |= {"replicas": 3, "in_flight": 2}
    fine(go(tmp_path, spec, loop.uses(), resources=resources(1)))
    assert loop.steps == [(n,) for n in range(20)]
    assert max(loop.ahead) <= 1


def test_a_source_that_reads_a_follower(tmp_path: Path) -> None:
    loop = Loop()

    class Draws(Stage):
        reads = {"actor": Box}

        def run(self, ctx: Any):
            for number in range(9):
                loop.made[number] = len(ctx.read("actor")["log"])
                yield number

    spec = files(way="g")
    del spec["a"]
    spec["g"] = {"uses": "draws", **READS}
    fine(go(tmp_path, spec, loop.uses() | {"draws": Draws}, resources=resources(0)))
    assert loop.steps == [(n,) for n in range(9)]
    assert max(loop.ahead) == 0


def test_two_readers_each_have_their_own_count(tmp_path: Path) -> None:
    loop, other = Loop(), Loop()

    class Join(Stage):
        def run(self, item: dict[str, int]) -> int:
            return item["g"]

    used = loop.uses() | {"join": Join, "other": other.uses()["generate"]}
    spec = files(8, way="j", j={"uses": "join", "from": {"g": "g", "h": "h"}})
    spec["h"] = {"uses": "other", "from": "a", **READS}
    fine(go(tmp_path, spec, used, resources=resources(0)))
    assert loop.steps == [(n,) for n in range(8)]
    assert loop.made == other.made == {n: n for n in range(8)}


def test_a_reader_that_nothing_is_trained_on_is_not_held_back(tmp_path: Path) -> None:
    """It is behind the publisher, and one is on a way of its own."""
    loop, seen = Loop(), []

    class Serves(Stage):
        reads = {"actor": Box}

        def run(self, item: Any, ctx: Any) -> None:
            seen.append(ctx.version("actor").step)

    spec = straight(6, 1, serves={"uses": "serves", "from": "a", **READS})
    spec["after"] = {"uses": "serves", "from": "p", **READS}
    fine(go(tmp_path, spec, loop.uses() | {"serves": Serves}, resources=resources(0)))
    assert loop.steps == [(n,) for n in range(6)]
    assert set(range(1, 7)) <= set(seen), "behind the publisher each item sees its own version"


@pytest.mark.parametrize("limited", ["t", "f"])
def test_past_a_limit_nobody_waits_for_versions(tmp_path: Path, limited: str) -> None:
    """What still is on its way is thrown away there, so it is in no step to come."""
    loop = Loop()
    spec = files(30, 2, way="f", f={"uses": "filter", "from": "g"})
    spec[limited]["limit"] = 5
    fine(go(tmp_path, spec, loop.uses(drops=[6, 7], filtered=[8]), resources=resources(1)))
    assert loop.steps == [(n,) for n in range(5)]


def test_versions_of_a_follower_are_those_it_was_given(tmp_path: Path) -> None:
    """Every third step goes out; items carry the version by name, and the trainer's own beside it."""
    loop, carried = Loop(), []
    used = loop.uses()

    class Keeps(Stage):
        def run(self, item: int) -> int:
            return item

    spec = files(9, 3, k={"uses": "keeps", "from": "g"})

    async def act(pipeline: Pipeline) -> Any:
        runner = pipeline._assembly.runners["k"]
        take = runner.inputs.take

        def looks(taken: Any) -> None:
            item = taken.parts[0][1]
            carried.append((item.seq, item.versions["actor"]))
            take(taken)

        runner.inputs.take = looks
        return await pipeline.run()

    outcome = fine(go(tmp_path, spec, used | {"keeps": Keeps}, act, resources=resources(2)))
    incarnation = outcome.pipeline._assembly.incarnation
    assert carried == [(n, (incarnation, n - n % 3)) for n in range(9)]


def test_only_what_is_in_a_published_version_is_through() -> None:
    class Wakes:
        def wake(self) -> None:
            pass

    admission = Admission(Wakes(), Shared("actor", "x"), batch=2, staleness=1, stretches=2)  # type: ignore[arg-type]
    for number in range(4):
        assert admission.open
        admission.start(number)
    assert not admission.open
    admission.gathered(0, [0, 1], 0)
    admission.gathered(0, [2, 3], 1)
    admission.stepped(1, [0], 1)
    admission.stepped(1, [1], 2)
    admission.published(0)
    assert admission.out == 4
    admission.published(1)
    assert admission.out == 2
    admission.published(2)
    assert admission.out == 0


def test_a_stall_names_the_version(tmp_path: Path) -> None:
    """The writer filters the item that the publisher would have taken, so its step never goes out."""
    loop = Loop()
    used = loop.uses()

    class Swallows(used["train"]):  # type: ignore[misc]
        def run(self, item: Any, ctx: Any) -> Any:
            super().run(item, ctx)
            return DROP

    outcome = go(tmp_path, straight(9, 1), used | {"train": Swallows}, resources=resources(0))
    assert isinstance(outcome.error, StallError)
    assert "g: waits for version 1 of actor: it has started 1 items, and max_staleness is 0" in str(
        outcome.error
    )


def test_a_gather_that_does_not_keep_its_word_is_told(tmp_path: Path) -> None:
    loop = Loop()
    used = loop.uses()

    class Lies(used["pack"]):  # type: ignore[misc]
        @classmethod
        def gathers(cls, config: Any) -> int:
            return 3

        def full(self, members: Any) -> bool:
            return len(members) == 2

    spec = files(12, way="x", x={"uses": "pack", "from": "g"})
    outcome = go(tmp_path, spec, used | {"pack": Lies}, resources=resources(0))
    assert isinstance(outcome.error, StageError)
    assert "says that it gathers 3 items, but its batch has 2" in str(outcome.error)
