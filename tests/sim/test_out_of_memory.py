"""A job runs out of device memory: it is parked, memory is released, and it runs again (axiom 7.3)."""

from __future__ import annotations

import gc
from itertools import pairwise
from typing import Any

import pytest
from kit import SEEDS, Box, fine, parts_of, run, sink, times

from pipeflow import DROP, Cancelled, Resource, Stage, StageError, testing
from pipeflow.checker import check_operations
from pipeflow.operations import OperationLog

MIB = 1 << 20
SMALL = {"cuda:0": {"total": 100 * MIB, "width": 8}}
ENGINE = "the engine, for memory"


def checked(stages: Any, uses: Any = None, **more: Any) -> tuple[testing.Simulated, list[Any]]:
    """Run it, and hold its operation log against every promise; the log's entries without their thread."""
    log = OperationLog()
    ran = run(stages, uses, operations=log, **more)
    check_operations(log.entries)
    return ran, [entry[1:] for entry in log.entries]


def lines(ran: testing.Simulated, event: str) -> list[dict[str, Any]]:
    return [line for line in ran.lines("log.jsonl") if line["event"] == event]


CHAIN = {
    "a": {"uses": "numbers"},
    "up": {"uses": "lift", "from": "a", "on": "cuda:0", "replicas": 2, "in_flight": 2},
    "work": {"uses": "work", "from": "up", "on": "cuda:0"},
    "batch": {"uses": "batch", "from": "work", "on": "cuda:0", "with": {"size": 4}},
    "sink": {"uses": "sink", "from": "batch"},
}


@pytest.mark.axiom("7.3")
@pytest.mark.parametrize("stage", ["up", "work", "batch", "batch > cpu"])
@pytest.mark.parametrize("seed", SEEDS)
def test_once_changes_nothing(seed: int, stage: str) -> None:
    """Also in a copy between devices, which the engine put in."""
    seen: list[Any] = []
    fault = testing.Fault("oom", stage=stage, number=seed % (2 if "batch" in stage else 8))
    if ">" in stage:  # the copy is to the host, whose memory has no end: its device's is asked for here
        stages = CHAIN | {"batch": CHAIN["batch"] | {"on": "cuda:1"}}
        fault.stage = "work > cuda:1"
    else:
        stages = CHAIN
    ran, _ = checked(stages, {"sink": sink(seen)}, seed=seed, faults=[fault])
    fine(ran)
    assert fault.struck
    assert seen == [(0, 1, 2, 3), (4, 5, 6, 7)]
    (parked,) = lines(ran, "parked")
    assert parked["stage"] == fault.stage
    assert "out of memory. Tried to allocate" in parked["error"]
    assert [line["sequence"] for line in lines(ran, "run again")] == [parked["sequence"]]
    assert {line["device"] for line in lines(ran, "released")} == set(ran.world.devices)
    assert ran.pipeline is not None
    runners = ran.pipeline._assembly.runners
    assert {name: runner.counters.parked for name, runner in runners.items() if runner.counters.parked} == {
        fault.stage: 1
    }


class Hungry(Stage[Any, Any]):
    """Needs so much while its kernels run: the first half is held as the second one is asked for."""

    class Config(Stage.Config, frozen=True, kw_only=True):
        nbytes: int = 40 * MIB
        host: float = 0.0

    def run(self, item: Any, ctx: Any) -> Any:
        testing.work(self.config.host, lock=False)
        reads = parts_of(item)
        first = testing.empty(self.config.nbytes // 2)
        testing.kernel(1.0, reads, [first], name="first")
        second = testing.empty(self.config.nbytes // 2)
        testing.kernel(1.0, [first], [second], name="second")
        out = testing.empty(MIB)
        value = item if not reads else None
        testing.kernel(1.0, [second, *reads], [out], lambda _, *v: v[0] if v else value, name=ctx.stage)
        return out


@pytest.mark.axiom("7.3")
@pytest.mark.parametrize("seed", range(30))
def test_a_pipeline_that_does_not_fit_side_by_side_goes_through_one_by_one(seed: int) -> None:
    """Real pressure, no planned fault: several jobs need more than there is, each alone does not."""
    seen: list[Any] = []
    stages = {
        "a": {"uses": "numbers", "with": {"count": 20}},
        "hungry": {
            "uses": "hungry", "from": "a", "on": "cuda:0", "replicas": 3, "with": {"nbytes": 80 * MIB},
        },
        "sink": {"uses": "sink", "from": "hungry"},
    }  # fmt: skip
    ran, _ = checked(stages, {"hungry": Hungry, "sink": sink(seen)}, seed=seed, devices=SMALL)
    fine(ran)
    assert seen == list(range(20))
    assert ran.world.devices["cuda:0"].allocator.peak <= 100 * MIB


def halves(item: Any, ctx: Any, used: list[int]) -> Any:
    """Asks for 60 MiB, and while it holds them for 30 more."""
    if ctx.sequence == 2:
        used.append(testing.current_world().devices["cuda:0"].allocator.used)
    first = testing.empty(60 * MIB)
    testing.kernel(1.0, [], [first], name="first")
    ctx.log(kept=first)
    second = testing.empty(30 * MIB)
    testing.kernel(1.0, [first], [second], name="second")
    return DROP


@pytest.mark.axiom("7.3")
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_what_the_failed_call_held_is_free_before_it_runs_again(seed: int, is_async: bool) -> None:
    """The frames of its traceback hold 60 of 100 MiB until that is dropped on the lane. In an async stage
    they are in a circle with the future that brought the error, which the collector alone would find."""
    used: list[int] = []

    class Halves(Stage[Any, Any]):
        def run(self, item: Any, ctx: Any) -> Any:
            return halves(item, ctx, used)

    class AsyncHalves(Stage[Any, Any]):
        async def run(self, item: Any, ctx: Any) -> Any:
            return await ctx.enqueue(lambda: halves(item, ctx, used))

    fault = testing.Fault("oom", stage="halves", number=5)  # the second time that item 2 asks
    stages = {"a": {"uses": "numbers"}, "halves": {"uses": "halves", "from": "a", "on": "cuda:0"}}
    gc.disable()
    try:
        uses = {"halves": AsyncHalves if is_async else Halves}
        ran, _ = checked(stages, uses, seed=seed, devices=SMALL, faults=[fault])
    finally:
        gc.enable()
    assert ran.error is None
    assert fault.struck
    assert used == [0, 0], "the second call begins with what the first one held"


@pytest.mark.axiom("7.3")
@pytest.mark.parametrize("seed", SEEDS)
def test_on_two_lanes_at_once_they_run_again_one_after_the_other(seed: int) -> None:
    seen: list[Any] = []
    faults = [testing.Fault("oom", stage="hungry", sequence=number) for number in (3, 4, 5)]
    stages = {
        "a": {"uses": "numbers", "with": {"count": 12}},
        "hungry": {"uses": "hungry", "from": "a", "on": "cuda:0", "replicas": 3, "with": {"nbytes": MIB}},
        "sink": {"uses": "sink", "from": "hungry"},
    }
    uses = {"hungry": Hungry, "sink": sink(seen)}
    ran, entries = checked(stages, uses, seed=seed, faults=faults, devices=SMALL)
    fine(ran)
    assert seen == list(range(12))
    assert [line["sequence"] for line in lines(ran, "parked")] == sorted(
        line["sequence"] for line in lines(ran, "parked")
    )
    assert len(lines(ran, "parked")) == 3
    spans = []
    for number in (3, 4, 5):
        (begin,), (end,) = times(ran, "start", "hungry", number)[:1], times(ran, "end", "hungry", number)[-1:]
        spans.append((begin, end))
    ordered = sorted(spans)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ordered)), spans
    closed = [entry for entry in entries if entry[0] == "close"]
    assert {entry[2] for entry in closed} == {ENGINE}
    assert 1 <= len(closed) <= 3


BARRIER = {
    "a": {"uses": "numbers", "with": {"count": 12}},
    "side": {"uses": "lift", "from": "a", "on": "cuda:0", "with": {"seconds": 0.1}},
    "quiesce": {"uses": "barrier", "from": "side"},
    "guarded": {"uses": "guarded", "from": "quiesce"},
    "hungry": {"uses": "hungry", "from": "a", "on": "cuda:0", "with": {"nbytes": MIB, "host": 3.0}},
    "sink": {"uses": "sink", "from": "hungry"},
}
"""The barrier closes while `hungry` is in its call, before it asks for memory."""


@pytest.mark.axiom("7.3", "5.1")
@pytest.mark.parametrize("seed", SEEDS)
def test_while_a_barrier_drains_the_job_counts_as_quiet_and_runs_before_gates_open(seed: int) -> None:
    seen: list[Any] = []
    fault = testing.Fault("oom", stage="hungry", sequence=2 + seed % 4)
    ran, entries = checked(BARRIER, {"hungry": Hungry, "sink": sink(seen)}, seed=seed, faults=[fault])
    fine(ran)
    assert fault.struck
    assert seen == list(range(12))
    assert not [entry for entry in entries if entry[0] == "close" and entry[2] == ENGINE], "one was under way"
    parked = next(at for at, entry in enumerate(entries) if entry[:2] == ("section", "hungry"))
    before = [entry[0] for entry in entries[:parked] if entry[0] in ("close", "drained", "open", "section")]
    assert before[-1] == "section", "after the section of its barrier"
    after = [entry[0] for entry in entries[parked + 1 :] if entry[0] in ("close", "drained", "open")]
    assert after[0] == "open"


@pytest.mark.axiom("7.3")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_barrier_for_some_devices_leaves_it_to_the_engine(seed: int) -> None:
    """To release memory frees it on all devices of the process, so all must be quiet."""
    seen: list[Any] = []
    fault = testing.Fault("oom", stage="hungry", sequence=2)
    stages = BARRIER | {
        "quiesce": BARRIER["quiesce"] | {"scope": "cuda:0"},
        "far": {"uses": "lift", "from": "a", "on": "cuda:1"},
    }
    ran, entries = checked(stages, {"hungry": Hungry, "sink": sink(seen)}, seed=seed, faults=[fault])
    fine(ran)
    assert seen == list(range(12))
    closed = [entry[1] for entry in entries if entry[0] == "close" and entry[2] == ENGINE]
    assert sorted(closed) == ["cuda:0", "cuda:1"]


class Model(Resource):
    def open(self, ctx: Any) -> Any:
        device = testing.current_world().devices[ctx.device]
        with device.entered(device.default):
            return {"weights": testing.empty(20 * MIB)}


@pytest.mark.axiom("7.3")
def test_twice_says_how_much_was_tried_and_who_holds_the_memory() -> None:
    class Keeps(Hungry):
        reads = {"model": Model}  # noqa: RUF012

        def setup(self, ctx: Any) -> None:
            self.cache = [testing.empty(10 * MIB)]
            self.model = ctx.read("model")

    stages = {
        "a": {"uses": "numbers"},
        "up": {"uses": "lift", "from": "a", "on": "cuda:0", "with": {"nbytes": 8 * MIB, "seconds": 0.01}},
        "keeps": {
            "uses": "keeps", "from": "up", "on": "cuda:0", "reads": "model", "queue": {"items": 2},
            "on_error": {"skip": 5}, "with": {"nbytes": 120 * MIB, "host": 1.0},
        },
    }  # fmt: skip
    ran, _ = checked(
        stages, {"keeps": Keeps, "model": Model}, devices=SMALL, resources={"model": {"uses": "model"}}
    )
    error = ran.error
    assert isinstance(error, StageError)
    assert (error.stage, error.sequence) == ("keeps", 0)
    text = str(error)
    assert "out of memory again, after unused memory was released" in text
    assert "Tried to allocate 60.00 MiB" in text
    assert "in use" in text
    assert "100.00 MiB in all" in text
    held = text[text.index("held by") :].splitlines()[1:]
    assert held == [
        "    resource model: 20.00 MiB",
        "    2 items on up -> keeps: 16.00 MiB",
        "    stage keeps[0]: 10.00 MiB",
    ]
    (where,) = error.__cause__.__notes__
    assert where.startswith("raised at:\n")
    assert "in run\n    second = testing.empty" in where or "in run\n    first = testing.empty" in where
    assert len(lines(ran, "parked")) == 1
    assert not ran.lines("dead_letter.jsonl"), "`on_error` is not for it"


class Parts(Stage[Any, Any]):
    """Three outputs an item."""

    def run(self, item: Any, ctx: Any):
        for number in range(3):
            out = testing.empty(4096)
            testing.kernel(1.0, [item], [out], lambda value, n=number: (value, n), name=ctx.stage)
            yield out


FLAT = {
    "a": {"uses": "numbers", "with": {"count": 3}},
    "up": {"uses": "lift", "from": "a", "on": "cuda:0"},
    "parts": {"uses": "parts", "from": "up", "on": "cuda:0"},
    "sink": {"uses": "sink", "from": "parts"},
}


@pytest.mark.axiom("7.3")
@pytest.mark.parametrize("number", range(9))
def test_a_one_to_many_job_runs_again_if_nothing_of_it_was_handed_over(number: int) -> None:
    seen: list[Any] = []
    fault = testing.Fault("oom", stage="parts", number=number)
    ran, _ = checked(FLAT, {"parts": Parts, "sink": sink(seen)}, faults=[fault])
    whole = [(item, part) for item in range(3) for part in range(3)]
    if number % 3 == 0:
        fine(ran)
        assert seen == whole
    else:
        assert isinstance(ran.error, StageError)
        assert f"as {number % 3} outputs of it were handed over" in str(ran.error)
        assert "stage 'parts', item" in str(ran.error)
        assert seen == whole[: len(seen)]


class Fills(Stage[Any, Any]):
    """A writer that asks for memory first."""

    writes = {"box": Box}  # noqa: RUF012

    def run(self, item: Any, ctx: Any) -> Any:
        out, step = testing.empty(4096), ctx.sequence + 1
        testing.kernel(1.0, [item], [ctx.write("box")], lambda _: step, name="fill")
        testing.kernel(1.0, [item], [out], lambda value: value, name=ctx.stage)
        return out


class Retries(Fills):
    retriable = True


class Mutates(Stage[Any, Any]):
    mutates = True

    def run(self, item: Any) -> Any:
        testing.kernel(1.0, [item], [item], lambda value: value + 1, name="add")
        testing.empty(4096)
        return item


class Counts(Stage[Any, Any]):
    stateful = True

    def setup(self, ctx: Any) -> None:
        self.count = 0

    def run(self, item: Any) -> Any:
        self.count += 1
        testing.empty(4096)
        return item


WRITER = {
    "a": {"uses": "numbers"},
    "up": {"uses": "lift", "from": "a", "on": "cuda:0"},
    "fills": {"uses": "fills", "from": "up", "on": "cuda:0", "writes": "box"},
    "looks": {"uses": "looks", "from": "fills", "on": "cuda:0", "reads": "box"},
    "sink": {"uses": "sink", "from": "looks"},
}


@pytest.mark.axiom("7.3")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_writer_runs_again_if_it_says_that_it_can(seed: int) -> None:
    seen: list[Any] = []
    fault = testing.Fault("oom", stage="fills", number=seed % 8)
    resources = {"box": {"uses": "box"}}
    uses = {"fills": Retries, "sink": sink(seen)}
    ran, _ = checked(WRITER, uses, seed=seed, faults=[fault], resources=resources)
    fine(ran)
    assert seen == list(range(1, 9)), "each version is seen by its item"
    assert len(lines(ran, "parked")) == 1


@pytest.mark.axiom("7.3")
@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (Fills, "what it writes may be half written"),
        (Mutates, "what it writes may be half written"),
        (Counts, "its state may differ"),
    ],
)
def test_who_may_have_left_something_half_done_fails_at_once(cls: type[Stage[Any, Any]], said: str) -> None:
    fault = testing.Fault("oom", stage="fills", number=1)
    stages = {**WRITER}
    if cls is not Fills:
        stages["fills"] = {"uses": "fills", "from": "up", "on": "cuda:0"}
        del stages["looks"]
        stages["sink"] = {"uses": "sink", "from": "fills"}
    resources = {"box": {"uses": "box"}} if cls is Fills else None
    ran, _ = checked(stages, {"fills": cls, "sink": sink([])}, faults=[fault], resources=resources)
    assert isinstance(ran.error, StageError)
    assert (ran.error.stage, ran.error.sequence) == ("fills", 1)
    assert said in str(ran.error)
    assert "held by" in str(ran.error)
    assert not lines(ran, "parked")


class Filled(Box):
    def open(self, ctx: Any) -> Any:
        made = super().open(ctx)
        testing.write(made, 0)
        return made


class Reads(Stage[Any, Any]):
    """One-to-many, so it would keep its lease from step to step. Asks for memory late in its call."""

    reads = {"actor": Box}  # noqa: RUF012

    def run(self, item: Any, ctx: Any):
        testing.work(1.5, lock=False)
        out, version = testing.empty(4096), ctx.version("actor").step
        testing.kernel(1.0, [ctx.read("actor")], [out], lambda step: (item, version, step), name=ctx.stage)
        yield out


class Publishes(Stage[Any, Any]):
    guarded = True
    reads = {"box": Box}  # noqa: RUF012
    writes = {"actor": Box}  # noqa: RUF012

    def run(self, item: Any, ctx: Any) -> None:
        testing.kernel(1.0, [ctx.read("box")], [ctx.write("actor")], lambda step: step, name="publish")


@pytest.mark.axiom("7.3")
@pytest.mark.parametrize("sequence", range(3, 12))
def test_for_a_hold_a_parked_reader_counts_as_retired(sequence: int) -> None:
    """The section writes what it reads: it does not wait for the job, which reads the new version then."""
    seen: list[Any] = []
    stages = {
        "a": {"uses": "numbers", "with": {"count": 24}},
        "up": {"uses": "lift", "from": "a", "on": "cuda:0"},
        "writes": {"uses": "writes", "from": "up", "on": "cuda:0", "writes": "box"},
        "quiesce": {"uses": "barrier", "from": "writes"},
        "publishes": {
            "uses": "publishes", "from": "quiesce", "on": "cuda:0", "reads": "box", "writes": "actor",
        },
        "b": {"uses": "numbers", "with": {"count": 16}},
        "reads": {"uses": "reads", "from": "b", "on": "cuda:0", "reads": "actor"},
        "sink": {"uses": "sink", "from": "reads"},
    }  # fmt: skip
    fault = testing.Fault("oom", stage="reads", sequence=sequence)
    uses = {"reads": Reads, "publishes": Publishes, "sink": sink(seen), "filled": Filled}
    ran, entries = checked(
        stages, uses, faults=[fault],
        resources={"box": {"uses": "filled"}, "actor": {"uses": "filled", "follows": "box"}},
        settings={"stall": "500s"},
    )  # fmt: skip
    fine(ran)
    assert fault.struck
    assert [item for item, _, _ in seen] == list(range(16))
    assert all(version == step for _, version, step in seen), seen
    again = next(at for at, entry in enumerate(entries) if entry[:2] == ("section", "reads"))
    before = next(entry for entry in reversed(entries[:again]) if entry[0] in ("section", "close", "open"))
    assert before == ("section", "publishes"), "in the quiesce of the barrier, which had begun its hold"


class Asks(Stage[Any, Any]):
    async def run(self, item: Any, ctx: Any) -> Any:
        def work() -> Any:
            out = testing.empty(4096)
            testing.kernel(1.0, parts_of(item), [out], lambda value: value, name=ctx.stage)
            return out

        await ctx.enqueue(work)
        return await ctx.enqueue(work)


@pytest.mark.axiom("7.3")
@pytest.mark.parametrize("seed", SEEDS)
def test_an_async_job_runs_again_once_gates_are_open(seed: int) -> None:
    """Its launches pass them one by one, so it cannot run behind closed ones."""
    seen: list[Any] = []
    stages = CHAIN | {"work": {"uses": "asks", "from": "up", "on": "cuda:0", "in_flight": 2}}
    fault = testing.Fault("oom", stage="work", number=seed)
    ran, _ = checked(stages, {"asks": Asks, "sink": sink(seen)}, seed=seed, faults=[fault])
    fine(ran)
    assert fault.struck
    assert seen == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert len(lines(ran, "parked")) == 1


class Copied(Box):
    def snapshot(self, value: Any) -> Any:
        return value.clone()


@pytest.mark.axiom("7.3")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_snapshot_that_finds_no_memory_is_made_again(seed: int) -> None:
    seen: list[Any] = []
    stages = WRITER | {"looks": WRITER["looks"] | {"snapshot": True}}
    stages["fills"] = stages["fills"] | {"uses": "writes"}
    fault = testing.Fault("oom", stage="looks", number=2 * (seed % 8))  # every other one is its own output
    resources = {"box": {"uses": "copied"}}
    uses = {"sink": sink(seen), "copied": Copied}
    ran, _ = checked(stages, uses, seed=seed, faults=[fault], resources=resources)
    fine(ran)
    assert fault.struck
    assert seen == list(range(1, 9))
    assert len(lines(ran, "parked")) == 1


class Sends(Stage[Any, Any]):
    """A guarded stage on a device, which asks for memory."""

    guarded = True
    reads = {"box": Box}  # noqa: RUF012

    def run(self, item: Any, ctx: Any) -> Any:
        out = testing.empty(4096)
        testing.kernel(1.0, [ctx.read("box")], [out], lambda value: value, name=ctx.stage)
        return out


@pytest.mark.axiom("7.3")
@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("number", range(6))
def test_a_guarded_stage_runs_again_in_its_section(number: int, snapshot: bool) -> None:
    seen: list[Any] = []
    stages = {
        "a": {"uses": "numbers"},
        "up": {"uses": "lift", "from": "a", "on": "cuda:0"},
        "writes": {"uses": "writes", "from": "up", "on": "cuda:0", "writes": "box"},
        "quiesce": {"uses": "barrier", "from": "writes", "every": 2, "snapshot": snapshot},
        "sends": {"uses": "sends", "from": "quiesce", "on": "cuda:0", "reads": "box"},
        "sink": {"uses": "sink", "from": "sends"},
    }
    fault = testing.Fault("oom", stage="sends", number=number if snapshot else number % 4)
    ran, _ = checked(
        stages, {"sink": sink(seen), "sends": Sends, "copied": Copied}, faults=[fault],
        resources={"box": {"uses": "copied"}},
    )  # fmt: skip
    fine(ran)
    assert fault.struck
    assert seen == [2, 4, 6, 8]
    assert len(lines(ran, "parked")) == 1


@pytest.mark.axiom("7.3")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_cancel_with_a_job_parked_frees_all(seed: int) -> None:
    """A kernel on another device holds the release up until then."""
    fault = testing.Fault("oom", stage="work", number=2)
    stages = CHAIN | {"far": {"uses": "lift", "from": "a", "on": "cuda:1", "with": {"seconds": 50.0}}}

    async def act(pipeline: Any) -> Any:
        pipeline.engine.loop.call_later(10 + seed, pipeline.cancel)
        return await pipeline.run()

    ran, _ = checked(
        stages, {"sink": sink([])}, seed=seed, faults=[fault], act=act, settings={"stop": {"grace": "500s"}}
    )
    assert isinstance(ran.error, Cancelled)
    assert lines(ran, "parked")
    assert not lines(ran, "run again")
    assert not ran.hazards
    ran.pipeline = None
    ran.error.__traceback__ = None
    gc.collect()
    assert all(device.allocator.used == 0 for device in ran.world.devices.values())


@pytest.mark.axiom("7.3")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_drain_takes_parked_jobs_along(seed: int) -> None:
    seen: list[Any] = []
    fault = testing.Fault("oom", stage="work", number=2)
    stages = CHAIN | {"a": {"uses": "numbers", "with": {"count": 400}}}

    async def act(pipeline: Any) -> Any:
        pipeline.engine.loop.call_later(0.5 * seed, pipeline.drain)
        return await pipeline.run()

    ran, _ = checked(stages, {"sink": sink(seen)}, seed=seed, faults=[fault], act=act)
    fine(ran)
    numbers = [n for batch in seen for n in (batch if isinstance(batch, tuple) else [batch])]
    assert numbers == list(range(len(numbers)))
