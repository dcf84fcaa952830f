"""Jobs, marks, and how long memory lives, on simulated devices (axioms 4.1 to 4.11)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kit import SEEDS, Lift, fine, run, sink, times

from pipeflow import Cancelled, Stage, StageError, testing
from pipeflow.sim import Sim, World

CHAIN = {
    "a": {"uses": "numbers", "with": {"count": 10}},
    "up": {"uses": "lift", "from": "a", "on": "cuda:0", "in_flight": 2, "replicas": 2},
    "work": {"uses": "work", "from": "up", "on": "cuda:0", "in_flight": 3},
    "batch": {"uses": "batch", "from": "work", "on": "cuda:1"},
    "sink": {"uses": "sink", "from": "batch"},
}
GRACE = {"stop": {"grace": "1000s"}}


@pytest.mark.axiom("4.1")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_waits_for_its_inputs_then_runs_then_records(seed: int) -> None:
    """On each stream, and every wait is for a mark that was recorded before: no circle on the device."""
    ran = fine(run(CHAIN, {"sink": sink([])}, seed=seed))
    recorded: set[str] = set()
    for _, kind, *names in ran.log:
        if kind == "record":
            recorded.add(names[0])
        elif kind == "wait":
            assert names[1] in recorded, f"{names[0]} waits for {names[1]}, which nobody recorded"
    per_stream: dict[str, list[str]] = {}
    for _, kind, *names in ran.log:
        stream = names[2] if kind == "launch" else names[0].partition(" mark ")[0] if kind != "end" else ""
        if kind in ("wait", "launch", "record") and stream.startswith("cuda:0/work"):
            per_stream.setdefault(stream, []).append(kind)
    for steps in per_stream.values():
        jobs = " ".join(steps).split("record")
        assert all(job.split() in (["wait", "launch"], ["launch"], []) for job in jobs), jobs
        assert sum("launch" in job for job in jobs) == 10


class Raises(Stage[Any, Any]):
    """Enqueues a long kernel on its input, and raises."""

    def run(self, item: Any, ctx: Any) -> Any:
        scratch = testing.empty(4096)
        testing.kernel(30.0, [item], [scratch], name="raises")
        raise ValueError("on purpose")


@pytest.mark.axiom("4.1")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_that_raised_has_a_mark_too(seed: int) -> None:
    """Its input stays until its kernel is over: skipped at once, it would be given on and overwritten."""
    stages = {
        "a": {"uses": "numbers", "with": {"count": 6}},
        "up": {"uses": "lift", "from": "a", "on": "cuda:0", "with": {"seconds": 0.1}},
        "raises": {"uses": "raises", "from": "up", "on": "cuda:0", "on_error": {"skip": 9}},
    }
    ran = fine(run(stages, {"raises": Raises}, seed=seed, devices={"cuda:0": {"width": 2}}))
    assert ran.summary["skipped"] == {"raises": 6}


@pytest.mark.axiom("4.2")
@pytest.mark.parametrize("seed", SEEDS)
def test_the_loop_makes_no_device_call(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams, marks, waits, copies, drains and releases are calls of lanes and helpers, also in async
    stages, barriers and what stages log."""
    running: list[bool] = []
    calls: list[str] = []
    enter_call = Sim.enter_call

    def entering(self: Sim) -> None:
        if running:
            assert self.world.host is not self.world.loop_host, "a device call of the loop"
            calls.append(self.world.host.name)
        enter_call(self)

    monkeypatch.setattr(Sim, "enter_call", entering)

    class Async(Stage[Any, Any]):
        device = True

        async def run(self, item: Any, ctx: Any) -> Any:
            outs: list[Any] = []

            def launch() -> None:
                outs.append(testing.empty(4096))
                testing.kernel(1.0, [item], outs[-1:], lambda value: value, name="async")

            await ctx.enqueue(launch)
            await asyncio.sleep(1)
            await ctx.enqueue(launch)
            ctx.log(loss=outs[-1])
            return outs[-1]

    async def act(pipeline: Any) -> Any:
        running.append(True)
        return await pipeline.run()

    stages = CHAIN | {
        "async": {"uses": "async", "from": "work", "on": "cuda:0", "in_flight": 2},
        "quiesce": {"uses": "barrier", "from": "async", "every": 3},
        "guarded": {"uses": "guarded", "from": "quiesce"},
        "release": {"uses": "release_cache", "from": "quiesce", "on": "cuda:0"},
    }
    ran = run(stages, {"sink": sink([]), "async": Async}, seed=seed, act=act)
    fine(ran)
    assert {"up[0]", "work[0]", "async[0]"} <= set(calls)
    assert any(name.startswith("call ") for name in calls), "drains are beside the loop"


def frees_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the loop freed while it could not know that the last use was over; each is a fault."""
    early: list[str] = []
    free = World.free

    def freeing(self: World, block: Any, home: Any) -> None:
        if self.host is self.loop_host:
            knows = self.host.timeline.knows
            uses = [use.event for use in block.uses()]
            early.extend(f"{block.name} under {e.where}" for e in uses if not knows(e.line, e.count))
        free(self, block, home)

    monkeypatch.setattr(World, "free", freeing)
    return early


@pytest.mark.axiom("4.3")
@pytest.mark.parametrize("seed", SEEDS)
def test_an_item_is_held_until_all_who_use_it_are_through(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    early = frees_of_the_loop(monkeypatch)
    stages = CHAIN | {"slow": {"uses": "work", "from": "up", "on": "cuda:0", "with": {"seconds": 4.0}}}
    ran = fine(run(stages, {"sink": sink([])}, seed=seed))
    assert early == []
    ran.pipeline = None
    assert all(device.allocator.used == 0 for device in ran.world.devices.values())


@pytest.mark.axiom("4.3")
@pytest.mark.parametrize("step", range(40))
def test_a_cancel_at_any_step_frees_nothing_under_work(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    early = frees_of_the_loop(monkeypatch)

    async def act(pipeline: Any) -> None:
        pipeline.engine.loop.call_later(0.37 * step, pipeline.cancel)
        await pipeline.run()

    ran = run(CHAIN, {"sink": sink([])}, seed=step, act=act, settings=GRACE)
    assert ran.error is None or isinstance(ran.error, Cancelled)
    assert early == []
    assert not ran.hazards
    assert len(times(ran, "launch")) == len(times(ran, "end")), "what was enqueued was awaited"
    ran.pipeline = None
    if ran.error is not None:
        ran.error.__traceback__ = None
    assert all(device.allocator.used == 0 for device in ran.world.devices.values())


class InPlace(Stage[Any, Any]):
    def run(self, item: Any, ctx: Any) -> Any:
        testing.kernel(1.0, [item], [item], lambda value: value + 100, name="in place")
        return item


class SaysSo(InPlace):
    mutates = True


@pytest.mark.axiom("4.5")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_kernel_on_its_own_input_must_be_declared(seed: int) -> None:
    seen: list[Any] = []
    stages = {
        "a": {"uses": "numbers", "with": {"count": 4}},
        "up": {"uses": "lift", "from": "a", "on": "cuda:0"},
        "change": {"uses": "change", "from": "up", "on": "cuda:0", "in_flight": 2},
        "sink": {"uses": "sink", "from": "change"},
    }
    fine(run(stages, {"change": SaysSo, "sink": sink(seen)}, seed=seed))
    assert seen == [100, 101, 102, 103]
    ran = run(stages, {"change": InPlace, "sink": sink([])}, seed=seed)
    assert isinstance(ran.error, StageError)
    assert "wrote into its input" in str(ran.error)
    assert (ran.error.stage, ran.error.sequence) == ("change", 0)


class Ring(Stage[Any, Any]):
    """Returns one buffer again and again."""

    def setup(self, ctx: Any) -> None:
        self.buffer = testing.empty(4096)

    def run(self, item: Any, ctx: Any) -> Any:
        testing.kernel(1.0, [item], [self.buffer], lambda value: value, name="ring")
        return self.buffer


@pytest.mark.axiom("4.6")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_ring_of_one_is_noticed_unless_each_item_is_used_in_time(seed: int) -> None:
    stages: dict[str, Any] = {
        "a": {"uses": "numbers", "with": {"count": 6}},
        "up": {"uses": "lift", "from": "a", "on": "cuda:0"},
        "ring": {"uses": "ring", "from": "up", "on": "cuda:0", "in_flight": 2},
        "work": {"uses": "work", "from": "ring", "on": "cuda:0", "with": {"seconds": 5.0}},
    }
    ran = run(stages, {"ring": Ring}, seed=seed)
    assert isinstance(ran.error, StageError)
    assert ran.error.stage == "ring"
    assert "was overwritten" in str(ran.error)
    stages["work"]["queue"] = {"items": 1}
    fine(run(stages, {"ring": Ring}, seed=seed))


@pytest.mark.axiom("4.7")
def test_an_output_that_remembers_how_it_was_made_is_refused() -> None:
    class Remembers(Lift):
        def run(self, item: Any, ctx: Any) -> Any:
            out = super().run(item, ctx)
            out.grad_fn = "MulBackward"
            return {"x": [out]}

    stages = {
        "a": {"uses": "numbers"},
        "up": {"uses": "remembers", "from": "a", "on": "cuda:0"},
        "work": {"uses": "work", "from": "up", "on": "cuda:0"},
    }
    ran = run(stages, {"remembers": Remembers})
    assert isinstance(ran.error, StageError)
    assert ran.error.stage == "up"
    assert "autograd crosses no edge" in str(ran.error)


@pytest.mark.axiom("4.8")
@pytest.mark.parametrize("lag", [1e-6, 5.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_host_reads_nothing_before_it_knows_of_the_write(seed: int, lag: float) -> None:
    """Notices come late and out of order; a host stage, async or not, waits for them."""
    one: list[Any] = []
    two: list[Any] = []

    class Reads(Stage[Any, Any]):
        async def run(self, item: Any) -> Any:
            return testing.read(item)

    stages = {
        "a": {"uses": "numbers"},
        "up": {"uses": "lift", "from": "a", "on": "cuda:0", "replicas": 2},
        "sink": {"uses": "sink", "from": "up"},
        "reads": {"uses": "reads", "from": "up"},
        "other": {"uses": "other", "from": "reads"},
    }
    fine(run(stages, {"sink": sink(one), "reads": Reads, "other": sink(two)}, seed=seed, lag=lag))
    assert one == two == list(range(8))
    assert all(number is not testing.GARBAGE for number in one)


@pytest.mark.axiom("4.9")
@pytest.mark.parametrize("answer", ["cuda:0", "cpu"])
@pytest.mark.parametrize("seed", SEEDS)
def test_what_submit_returns_is_complete_and_the_callers_own(seed: int, answer: str) -> None:
    """The stage fills one buffer again and again; the caller reads each result when all are there."""

    async def act(pipeline: Any) -> list[Any]:
        results = [await pipeline.submit(number) for number in range(5)]
        return [testing.read(result) for result in results]

    stages: dict[str, Any] = {
        "in": {"uses": "input"},
        "up": {"uses": "lift", "from": "in", "on": "cuda:0", "with": {"seconds": 0.1}},
        "ring": {"uses": "ring", "from": "up", "on": "cuda:0"},
    }
    if answer == "cpu":
        stages["out"] = {"uses": "output", "from": "ring"}
    ran = fine(run(stages, {"ring": Ring}, seed=seed, act=act, lag=0.5))
    assert ran.value == [0, 1, 2, 3, 4]


@pytest.mark.axiom("4.11")
@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_made_while_a_launch_queue_is_full(seed: int) -> None:
    """Twelve kernels a job on a queue of six: the lane is pushed, and neither a mark nor a stream is made.
    Of memory only what stages ask for: here none, after their first."""

    class Heavy(Stage[Any, Any]):
        mutates = True

        def run(self, item: Any, ctx: Any) -> Any:
            for _ in range(12):
                testing.kernel(0.5, [item], [item], lambda value: value, name="heavy")
            return item

    stages = {
        "a": {"uses": "numbers", "with": {"count": 30}},
        "up": {"uses": "lift", "from": "a", "on": "cuda:0", "with": {"seconds": 0.01}},
        "heavy": {"uses": "heavy", "from": "up", "on": "cuda:0", "in_flight": 8, "queue": {"items": 16}},
        "light": {"uses": "heavy", "from": "heavy", "on": "cuda:0", "in_flight": 8, "queue": {"items": 16}},
    }
    ran = fine(run(stages, {"heavy": Heavy}, seed=seed, devices={"cuda:0": {"queue": 6, "events": 64}}))
    assert times(ran, "full"), "no queue was ever full"
    assert ran.world.created_while_full == 0


class Keeps(Stage[Any, Any]):
    """Uses the input of the item before, too."""

    keeps = False
    """Whether it tells the allocator so, as `record_stream` does."""

    def setup(self, ctx: Any) -> None:
        self.last: Any = None

    def run(self, item: Any, ctx: Any) -> Any:
        out = testing.empty(4096)
        reads = [item] if self.last is None else [item, self.last]
        testing.kernel(20.0, reads, [out], lambda *values: values, name="keeps")
        if self.keeps:
            world = testing.current_world()
            world.devices[ctx.device].keep(item, world.host.entered[-1][1])
        self.last = item
        return out


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_an_input_kept_one_item_longer_is_a_hazard_unless_it_is_kept_for_the_stream(
    seed: int, keeps: bool, in_flight: int
) -> None:
    """What 4.4 is about. With several jobs in flight the kept input is gone before it retires: the time to
    look whether a stage keeps it is when the call returns."""

    class Slowly(Stage[None, int]):
        async def run(self):
            for number in range(12):
                await asyncio.sleep(7)
                yield number

    stages = {
        "a": {"uses": "slowly"},
        "up": {"uses": "lift", "from": "a", "on": "cuda:0", "with": {"seconds": 0.1}},
        "keeps": {
            "uses": "keeps", "from": "up", "on": "cuda:0", "in_flight": in_flight, "queue": {"items": 12},
        },
    }  # fmt: skip
    cls = type("Kept", (Keeps,), {"keeps": keeps})
    ran = run(stages, {"keeps": cls, "slowly": Slowly}, seed=seed, devices={"cuda:0": {"width": 2}})
    if keeps:
        fine(ran)
    else:
        assert {hazard.kind for hazard in ran.hazards} & {"reused", "race"}
