"""Barriers on simulated devices, in virtual time (axioms 5.1 to 5.6)."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from kit import SEEDS, Box, Guarded, fine, run, sink, times

from pipeflow import Cancelled, DeviceError, Stage, StageError, testing
from pipeflow.barrier import gates_of_this_loop
from pipeflow.sim import Sim

LOADED = {
    "a": {"uses": "numbers", "with": {"count": 14}},
    "up": {"uses": "lift", "from": "a", "on": "cuda:0", "replicas": 2, "in_flight": 2},
    "batch": {"uses": "batch", "from": "up", "on": "cuda:0", "with": {"size": 4}},
    "sink": {"uses": "sink", "from": "batch"},
    "train": {"uses": "work", "from": "up", "on": "cuda:1", "in_flight": 2},
    "quiesce": {"uses": "barrier", "from": "train", "every": 3},
    "guarded": {"uses": "guarded", "from": "quiesce", "with": {"seconds": 20.0}},
}


def device_queues(engine: Any) -> dict[str, tuple[int, int]]:
    """Edges between lanes of devices: items queued, and gathered."""
    return {
        str(edge): (edge.queued, edge.gathered)
        for node in engine.nodes
        for edge in node.outs
        if not node.on_host and not edge.consumer.on_host and node.lanes and edge.consumer.lanes
    }


@pytest.mark.axiom("5.1")
@pytest.mark.parametrize("seed", SEEDS)
def test_launches_stop_and_items_stay_from_the_drain_to_the_opening(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[dict[str, Any]] = []
    engines: list[Any] = []
    drain = Sim.drain

    def draining(self: Sim) -> None:
        kept.append(device_queues(engines[0]))
        drain(self)

    monkeypatch.setattr(Sim, "drain", draining)

    class Looks(Guarded):
        def run(self, item: Any, ctx: Any) -> Any:
            kept.append(device_queues(engines[0]))
            return super().run(item, ctx)

    async def act(pipeline: Any) -> Any:
        engines.append(pipeline.engine)
        return await pipeline.run()

    seen: list[Any] = []
    ran = fine(run(LOADED, {"sink": sink(seen), "guarded": Looks}, seed=seed, act=act))
    assert [len(batch) for batch in seen] == [4, 4, 4, 2], "half-filled batches stayed as they were"
    sections = list(zip(times(ran, "section"), times(ran, "section-end"), strict=True))
    drains = times(ran, "drain")
    assert len(sections) == 5
    assert len(drains) == 10
    for (_, end), begin in zip(sections, drains[::2], strict=True):
        assert not [at for at in times(ran, "launch") if begin < at < end]
        assert not [at for at in times(ran, "end") if begin < at < end], "fences were reached before"
    for at in range(0, len(kept), 3):
        assert kept[at] == kept[at + 1] == kept[at + 2]
    assert any(gathered for state in kept for _, gathered in state.values()), "none met a half-filled batch"


@pytest.mark.axiom("5.1")
@pytest.mark.parametrize("seed", SEEDS)
def test_sources_and_host_stages_go_on_meanwhile(seed: int) -> None:
    class Host(Stage[int, int]):
        async def run(self, item: int) -> int:
            testing.note("host", item)
            await asyncio.sleep(3)
            return item

    stages = LOADED | {
        "b": {"uses": "numbers", "with": {"count": 60}},
        "host": {"uses": "host", "from": "b"},
    }
    ran = fine(run(stages, {"sink": sink([]), "host": Host}, seed=seed))
    begin, end = times(ran, "section")[0], times(ran, "section-end")[0]
    assert len([at for at in times(ran, "host") if begin < at < end]) >= 5


@pytest.mark.axiom("5.2")
def test_a_device_is_driven_by_one_loop() -> None:
    """The second loop is refused while the first one is there; a barrier could not hold its launches."""

    async def drives() -> None:
        gates_of_this_loop(["cuda:7"])

    with asyncio.Runner() as one, asyncio.Runner() as two:
        one.run(drives())
        one.run(drives())
        with pytest.raises(DeviceError, match="driven by another event loop"):
            two.run(drives())
    asyncio.run(drives())


@pytest.mark.axiom("5.2")
@pytest.mark.parametrize("seed", SEEDS)
def test_one_barrier_at_a_time(seed: int) -> None:
    """Both fire for the same item."""
    stages = LOADED | {
        "second": {"uses": "barrier", "from": "train", "every": 3},
        "also": {"uses": "guarded", "from": "second", "with": {"seconds": 3.0}},
    }
    ran = fine(run(stages, {"sink": sink([])}, seed=seed))
    spans = sorted(zip(times(ran, "section"), times(ran, "section-end"), strict=True))
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans)), spans
    assert len(times(ran, "section", "guarded")) == 5
    assert len(times(ran, "section", "also")) == 5


@pytest.mark.axiom("5.3")
@pytest.mark.parametrize("timeout", ["8s", None])
@pytest.mark.parametrize("seed", SEEDS)
def test_an_async_stage_in_mid_generation_waits_at_the_gate_and_its_timeout_with_it(
    seed: int, timeout: str | None
) -> None:
    class Generates(Stage[Any, Any]):
        """Six tokens, one a second. Its timeout is 8 s, a section takes 20."""

        device = True

        async def run(self, item: Any, ctx: Any) -> Any:
            for _ in range(6):
                out = testing.empty(4096)
                await ctx.enqueue(lambda out=out: testing.kernel(0.01, [], [out], lambda: 1, name="token"))
                await asyncio.sleep(1)
            return item

    stages = LOADED | {
        "generate": {"uses": "generates", "from": "up", "on": "cuda:0", "in_flight": 2},
    }
    if timeout is not None:
        stages["generate"]["timeout"] = timeout
    ran = fine(run(stages, {"sink": sink([]), "generates": Generates}, seed=seed))
    launches = times(ran, "launch", "generate")
    assert len(launches) == 14 * 6
    for begin, end in zip(times(ran, "section"), times(ran, "section-end"), strict=True):
        assert not [at for at in launches if begin <= at < end]


@pytest.mark.axiom("5.3")
def test_a_stage_that_is_too_slow_by_itself_still_has_its_timeout() -> None:
    class Sleeps(Stage[Any, Any]):
        async def run(self, item: Any) -> Any:
            await asyncio.sleep(9)
            return item

    stages = LOADED | {"slow": {"uses": "sleeps", "from": "up", "timeout": "8s"}}
    ran = run(stages, {"sink": sink([]), "sleeps": Sleeps}, settings={"stop": {"grace": "100s"}})
    assert "took longer than its timeout of 8 s" in str(ran.error)


@pytest.mark.axiom("5.4")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_section_hears_number_version_and_reason(seed: int) -> None:
    triggers: list[Any] = []

    class Hears(Guarded):
        reads = {"box": Box}  # noqa: RUF012

        def run(self, item: Any, ctx: Any) -> Any:
            triggers.append((item.seq, item.versions["box"].step, item.reason))
            return super().run(item, ctx)

    stages = {
        "a": {"uses": "numbers", "with": {"count": 7}},
        "up": {"uses": "lift", "from": "a", "on": "cuda:0"},
        "train": {"uses": "writes", "from": "up", "on": "cuda:0", "writes": "box"},
        "quiesce": {"uses": "barrier", "from": "train", "every": 3, "at_start": True},
        "hears": {"uses": "hears", "from": "quiesce", "reads": "box", "on": "cuda:0"},
    }
    ran = fine(run(stages, {"hears": Hears}, seed=seed, resources={"box": {"uses": "box", "on": "cuda:0"}}))
    expected = [(3, "every"), (6, "every"), (7, "end")]
    assert [trigger[1:] for trigger in triggers] == [(0, "start"), *expected]
    assert [trigger[0] for trigger in triggers[1:]] == [0, 1, 2]
    assert times(ran, "section-end")[0] <= times(ran, "launch")[0], "before anything is admitted"


PHASES = [0.5 * step for step in range(1, 60)]


@pytest.mark.axiom("5.5")
@pytest.mark.parametrize("at", PHASES)
def test_after_a_cancel_no_gate_opens_and_the_guarded_job_in_hand_is_awaited(at: float) -> None:
    """At any moment, so in each phase of a barrier."""

    async def act(pipeline: Any) -> Any:
        def cancel() -> None:
            testing.note("cancelled")
            pipeline.cancel()

        pipeline.engine.loop.call_later(at, cancel)
        return await pipeline.run()

    ran = run(LOADED, {"sink": sink([])}, act=act, settings={"stop": {"grace": "1000s"}})
    assert isinstance(ran.error, Cancelled)
    assert not ran.hazards
    (cancelled,) = times(ran, "cancelled")
    late = [line for line in ran.log if line[1] == "launch" and line[0] > cancelled]
    begun = [line for line in ran.log if line[1] == "section" and line[0] > cancelled]
    assert len(times(ran, "section")) == len(times(ran, "section-end"))
    assert begun == []
    assert len(late) <= 5, "no more than the jobs that their lanes had begun"
    inside = any(
        b <= cancelled < e for b, e in zip(times(ran, "section"), times(ran, "section-end"), strict=True)
    )
    assert not (inside and late), "a launch behind a section that was cancelled"
    assert ran.seconds >= max([0.0, *times(ran, "section-end"), *times(ran, "end")])


@pytest.mark.axiom("5.6")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_hung_kernel_is_named_with_lane_item_and_phase(seed: int) -> None:
    stages = LOADED | {"quiesce": LOADED["quiesce"] | {"timeout": "60s"}}
    hang = testing.Fault("hang", stage="batch", sequence=0)
    ran = run(stages, {"sink": sink([])}, seed=seed, faults=[hang])
    assert isinstance(ran.error, StageError)
    assert ran.error.stage == "quiesce"
    text = str(ran.error)
    assert "not done after 60 s, in the phase: waits for launches in scope" in text
    assert "batch[0] item 0" in text
