"""Leases, versions and pins on simulated devices (axioms 3.1 to 3.5)."""

from __future__ import annotations

from typing import Any

import pytest
from kit import SEEDS, Box, Looks, Numbers, Writes, fine, run, sink, times

from pipeflow import Cancelled, Stage, testing
from pipeflow.edge import Edge

RESOURCES = {"box": {"uses": "box", "on": "cuda:0"}}


class Noted(Box):
    def open(self, ctx: Any) -> Any:
        testing.note("opened")
        return super().open(ctx)

    def close(self, value: Any) -> None:
        testing.note("closed")


class SetUp(Looks):
    def setup(self, ctx: Any) -> None:
        testing.note("setup")
        assert ctx.read("box") is not None

    def close(self) -> None:
        testing.note("stage-closed")


@pytest.mark.axiom("3.1")
@pytest.mark.parametrize("cancel", [None, 0.5, 2.5, 6.5])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_resource_is_there_before_any_setup_and_until_the_last_fence(
    seed: int, cancel: float | None
) -> None:
    async def act(pipeline: Any) -> Any:
        if cancel is not None:
            pipeline.engine.loop.call_later(cancel, pipeline.cancel)
        return await pipeline.run()

    stages = {
        "a": {"uses": "numbers"},
        "up": {"uses": "lift", "from": "a", "on": "cuda:0", "in_flight": 2},
        "looks": {
            "uses": "setup",
            "from": "up",
            "on": "cuda:0",
            "reads": "box",
            "replicas": 2,
            "in_flight": 2,
        },
        "w": {"uses": "writes", "from": "up", "on": "cuda:0", "writes": "box"},
    }
    uses = {"box": Noted, "setup": SetUp}
    settings = {"stop": {"grace": "100s"}}
    ran = run(stages, uses, seed=seed, resources=RESOURCES, act=act, settings=settings)
    assert isinstance(ran.error, Cancelled) if cancel is not None else ran.error is None
    assert not ran.hazards
    (opened,), (closed,) = times(ran, "opened"), times(ran, "closed")
    order = [line[1] for line in ran.log if line[1] in ("opened", "setup", "stage-closed", "closed")]
    assert order == ["opened", "setup", "setup", "stage-closed", "stage-closed", "closed"], (
        "one, on one device"
    )
    ended = max([*times(ran, "end"), *times(ran, "pass"), opened])
    assert closed >= ended
    assert len(times(ran, "end")) == len(times(ran, "launch")), "all that was enqueued is over"


@pytest.mark.axiom("3.2")
@pytest.mark.parametrize("seed", SEEDS)
def test_train_and_generate_on_one_model_are_ordered_by_the_device_alone(seed: int) -> None:
    """No kernel reads half a write, and no lane is held up until a kernel is over: writes are enqueued while
    reads run, and reads while writes run."""
    stages = {
        "a": {"uses": "numbers", "with": {"count": 12}},
        "x": {"uses": "lift", "from": "a", "on": "cuda:0", "with": {"seconds": 0.1}},
        "w": {
            "uses": "writes", "from": "x", "on": "cuda:0", "writes": "box", "in_flight": 3,
            "with": {"seconds": 4.0},
        },
        "b": {"uses": "numbers", "with": {"count": 12}},
        "y": {"uses": "lift", "from": "b", "on": "cuda:0", "with": {"seconds": 0.1}},
        "looks": {
            "uses": "looks", "from": "y", "on": "cuda:0", "reads": "box", "in_flight": 3, "replicas": 2,
            "with": {"seconds": 3.0},
        },
    }  # fmt: skip
    ran = fine(run(stages, seed=seed, resources=RESOURCES, devices={"cuda:0": {"width": 8}}))
    spans = {
        stage: [
            (start, over, times(ran, "launch", stage, number)[0])
            for number in range(12)
            for start, over in zip(
                times(ran, "start", stage, number), times(ran, "end", stage, number), strict=True
            )
        ]
        for stage in ("w", "looks")
    }
    for one, other in (("w", "looks"), ("looks", "w")):
        for start, over, _ in spans[one]:
            assert not [span for span in spans[other] if span[0] < over and start < span[1]], "together"
        assert [
            launch for _, _, launch in spans[other] for start, over, _ in spans[one] if start < launch < over
        ], f"the host waited for {one} before it enqueued {other}"


@pytest.mark.axiom("3.2")
@pytest.mark.parametrize("seed", SEEDS)
def test_many_read_at_a_time(seed: int) -> None:
    class Slowly(Looks):
        def run(self, item: Any, ctx: Any) -> Any:
            testing.work(1.0, lock=False)
            return super().run(item, ctx)

    stages = {
        "a": {"uses": "numbers"},
        "up": {"uses": "lift", "from": "a", "on": "cuda:0", "with": {"seconds": 0.01}},
        "looks": {"uses": "slowly", "from": "up", "on": "cuda:0", "reads": "box", "replicas": 4},
    }
    uses = {"slowly": Slowly}
    ran = fine(run(stages, uses, seed=seed, resources=RESOURCES, devices={"cuda:0": {"width": 8}}))
    starts, ends = times(ran, "start", "looks"), times(ran, "end", "looks")
    assert max(sum(s <= at for s in starts) - sum(e <= at for e in ends) for at in starts) == 4


@pytest.mark.axiom("3.3")
@pytest.mark.parametrize("seed", SEEDS)
def test_items_carry_the_version_that_made_them_and_a_gather_the_oldest(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried: dict[str, list[int]] = {}
    put = Edge.put

    def noted(edge: Edge, seq: int, item: Any, charged: bool) -> bool:
        if item is not None and item.versions:
            carried.setdefault(edge.producer.name, []).append(item.versions["box"].step)
        return put(edge, seq, item, charged)

    monkeypatch.setattr(Edge, "put", noted)
    addresses: set[int] = set()

    class Same(Writes):
        def run(self, item: Any, ctx: Any) -> Any:
            addresses.add(ctx.write("box").data_ptr())
            return super().run(item, ctx)

    stages = {
        "a": {"uses": "numbers", "with": {"count": 9}},
        "up": {"uses": "lift", "from": "a", "on": "cuda:0"},
        "w": {"uses": "same", "from": "up", "on": "cuda:0", "writes": "box"},
        "batch": {"uses": "batch", "from": "w", "on": "cuda:0"},
        "sink": {"uses": "sink", "from": "batch"},
    }
    fine(run(stages, {"same": Same, "sink": sink([])}, seed=seed, resources=RESOURCES))
    assert carried["w"] == list(range(1, 10)), "the writer's number and one"
    assert carried["batch"] == [1, 4, 7]
    assert len(addresses) == 1, "written in place"


@pytest.mark.axiom("3.4")
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_pinned_reader_sees_its_items_version_however_late_it_is(seed: int, every: int) -> None:
    """It launches late, as its host takes its time; the writer's next step is not even enqueued before."""
    seen: list[Any] = []

    class Late(Stage[Any, Any]):
        reads = {"box": Box}  # noqa: RUF012

        def run(self, item: Any, ctx: Any) -> Any:
            testing.work(0.5 + 4 * (ctx.sequence % 3), lock=False)
            out = testing.empty(4096)
            testing.kernel(2.0, [ctx.read("box")], [out], lambda step: step, name="late")
            return out

    stages = {
        "a": {"uses": "numbers", "with": {"count": 12}},
        "up": {"uses": "lift", "from": "a", "on": "cuda:0", "with": {"seconds": 0.1}},
        "w": {"uses": "writes", "from": "up", "on": "cuda:0", "writes": "box", "in_flight": 4},
        "late": {
            "uses": "late", "from": "w", "on": "cuda:0", "reads": "box", "every": every, "in_flight": 2,
            "queue": {"items": 8},
        },
        "sink": {"uses": "sink", "from": "late", "queue": {"items": 20}},
    }  # fmt: skip
    ran = fine(run(stages, {"late": Late, "sink": sink(seen)}, seed=seed, resources=RESOURCES))
    assert seen == list(range(every, 13, every))
    for number, step in enumerate(range(every, 12, every)):
        (looked,) = times(ran, "launch", "late", number)
        (written,) = times(ran, "launch", "w", step)
        assert written >= looked


@pytest.mark.axiom("3.5")
@pytest.mark.parametrize("seed", SEEDS)
def test_an_evaluation_needs_one_version_and_no_quiet_device(seed: int) -> None:
    """Other lanes of the same device, and other writers' items, go on all the while."""
    seen: list[Any] = []

    class Evaluates(Stage[Any, Any]):
        """Looks twice, at the begin and at the end of a long job."""

        reads = {"box": Box}  # noqa: RUF012

        def run(self, item: Any, ctx: Any) -> Any:
            outs = [testing.empty(4096) for _ in range(2)]
            for out in outs:
                testing.kernel(8.0, [ctx.read("box")], [out], lambda step: step, name="evaluate")
            return outs

    stages = {
        "a": {"uses": "numbers", "with": {"count": 12}},
        "up": {"uses": "lift", "from": "a", "on": "cuda:0", "with": {"seconds": 0.1}},
        "w": {"uses": "writes", "from": "up", "on": "cuda:0", "writes": "box", "in_flight": 2},
        "evaluate": {"uses": "evaluates", "from": "w", "on": "cuda:0", "reads": "box", "every": 4},
        "sink": {"uses": "sink", "from": "evaluate"},
        "b": {"uses": "numbers", "with": {"count": 40}},
        "other": {"uses": "lift", "from": "b", "on": "cuda:0"},
    }
    uses = {"evaluates": Evaluates, "sink": sink(seen)}
    ran = fine(run(stages, uses, seed=seed, resources=RESOURCES, devices={"cuda:0": {"width": 4}}))
    assert seen == [(4, 4), (8, 8), (12, 12)]
    starts, ends = times(ran, "start", "evaluate", 0), times(ran, "end", "evaluate", 0)
    begun = [at for at in times(ran, "launch", "other") if starts[0] < at < ends[-1]]
    assert len(begun) > 3, "nothing was launched beside it"


@pytest.mark.axiom("3.1")
def test_what_the_file_does_not_give_is_refused() -> None:
    class Grabs(Numbers):
        def run(self, ctx: Any):
            yield ctx.read("box")

    ran = run({"a": {"uses": "grabs"}}, {"grabs": Grabs}, resources={"box": {"uses": "box"}})
    assert "uses the resource role 'box'" in str(ran.error)
