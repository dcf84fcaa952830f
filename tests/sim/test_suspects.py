"""A device fails: those in whose work it was are named, and nobody calls it again (axiom 7.2)."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from kit import run, sink

from pipeflow import DeviceError, Stage, testing

SEEDS = range(50)
MANY = {"cuda:0": {"width": 8}}
"""Kernels of all lanes side by side."""


class Closes(Stage[Any, Any]):
    """A kernel, on a device that it would call once more as it is closed."""

    closed: list[str] = []  # noqa: RUF012

    def run(self, item: Any, ctx: Any) -> Any:
        self.stage = ctx.stage
        out = testing.empty(4096)
        reads = [item] if isinstance(item, testing.SimTensor) else []
        testing.kernel(1.0, reads, [out], lambda *_: item if not reads else _[0], name=ctx.stage)
        return out

    def close(self) -> None:
        self.closed.append(self.stage)


def suspects(error: BaseException | None) -> list[str]:
    """The names of an error, as `stage[lane] item N`."""
    assert isinstance(error, DeviceError), repr(error)
    found = re.search(r"suspects: (.*?)\. ", f"{error}. ")
    assert found is not None, str(error)
    return found[1].split(", ")


class GoesOn(Stage[Any, Any]):
    """Its code on the loop hears nothing of a fault, and would launch for ever."""

    async def run(self, item: Any, ctx: Any) -> Any:
        for _ in range(100):
            await asyncio.sleep(0.3)
            await ctx.enqueue(lambda: testing.kernel(0.1, [], [testing.empty(512)], name="more"))


LANES = {
    "a": {"uses": "numbers", "with": {"count": 60}},
    "target": {"uses": "lift", "from": "a", "on": "cuda:0", "replicas": 3, "in_flight": 2},
    "other": {"uses": "lift", "from": "a", "on": "cuda:0", "every": 50},
    "sink": {"uses": "sink", "from": "target"},
}
"""Three busy lanes, and one that has an item in fifty."""


@pytest.mark.axiom("7.2")
@pytest.mark.parametrize("seed", SEEDS)
def test_the_culprit_is_among_the_suspects_and_an_idle_lane_never(seed: int) -> None:
    culprit = 6 + seed % 30
    fault = testing.Fault("illegal access" if seed % 2 else "assert", stage="target", sequence=culprit)
    lag = (0.0, 0.01, 3.0)[seed % 3]
    ran = run(LANES, {"sink": sink([])}, seed=seed, faults=[fault], devices=MANY, lag=lag)
    names = suspects(ran.error)
    assert fault.struck
    assert f"target[{culprit % 3}] item {culprit}" in names
    assert len(names) <= 3
    assert all(re.fullmatch(r"target\[\d\] item \d+", name) for name in names), names
    assert "an illegal memory access" in str(ran.error) or "assert triggered" in str(ran.error)
    in_work = {(stage, seq) for stage, seq in _under_way(ran) if stage == "target"}
    for name in names:
        assert ("target", int(name.rpartition(" ")[2])) in in_work, f"{name} was not in work"


def _under_way(ran: testing.Simulated) -> set[tuple[str, int]]:
    """Stage and item of kernels that were launched and did not end."""
    left: set[tuple[str, int]] = set()
    for _, kind, *names in ran.log:
        if kind == "launch":
            left.add((names[0], names[1]))
        elif kind == "end":
            left.discard((names[0], names[1]))
    return left


@pytest.mark.axiom("7.2")
def test_the_first_notice_often_is_of_another_item() -> None:
    """So the words are needed: whom the host awaited as it heard of the fault proves nothing."""
    wrong = 0
    for seed in SEEDS:
        fault = testing.Fault("assert", stage="target", sequence=6 + seed)
        ran = run(LANES, {"sink": sink([])}, seed=seed, faults=[fault], devices=MANY, lag=3.0)
        assert f"target[{fault.sequence % 3}] item {fault.sequence}" in suspects(ran.error)
        wrong += f"awaited stage 'target', item {fault.sequence}:" not in str(ran.error)
    assert wrong >= len(SEEDS) // 2


@pytest.mark.axiom("7.2")
@pytest.mark.parametrize("seed", range(20))
def test_debug_sync_leaves_one_suspect(seed: int) -> None:
    fault = testing.Fault("illegal access", stage="target", sequence=6 + seed)
    ran = run(LANES, {"sink": sink([])}, seed=seed, faults=[fault], devices=MANY, debug_sync=True)
    assert suspects(ran.error) == [f"target[{fault.sequence % 3}] item {fault.sequence}"]
    assert "one by one" in str(ran.error)
    assert "--debug-sync" not in str(ran.error)


def test_debug_sync_changes_nothing_else() -> None:
    seen: list[Any] = []
    ran = run(LANES, {"sink": sink(seen)}, devices=MANY, debug_sync=True)
    assert ran.error is None
    assert seen == list(range(60))
    running = 0
    for _, kind, *_ in ran.log:
        running += (kind == "start") - (kind == "end")
        assert running <= 1, "two lanes worked at a time"


class Twice(Stage[Any, Any]):
    """Raises once an item, after a kernel, and is called again."""

    retriable = True

    def setup(self, ctx: Any) -> None:
        self.tried: set[int] = set()

    def run(self, item: Any, ctx: Any) -> Any:
        out = testing.empty(4096)
        first = ctx.sequence not in self.tried
        testing.kernel(1.0, [item], [out], lambda value: value, name="first" if first else "again")
        if first:
            self.tried.add(ctx.sequence)
            raise ValueError("on purpose")
        return out


@pytest.mark.axiom("7.2")
def test_a_retry_is_a_suspect_like_the_first_try() -> None:
    """Its number was written to both words before: so launches are counted, not told by number."""
    stages = {
        "a": {"uses": "numbers"},
        "up": {"uses": "lift", "from": "a", "on": "cuda:1"},
        "twice": {"uses": "twice", "from": "up", "on": "cuda:0", "on_error": {"retry": 1}},
        "sink": {"uses": "sink", "from": "twice"},
    }
    fault = testing.Fault("assert", stage="twice", sequence=2, kernel="again")
    ran = run(stages, {"twice": Twice, "sink": sink([])}, faults=[fault])
    assert suspects(ran.error) == ["twice[0] item 2"]


class Calls(Stage[Any, Any]):
    """Two kernels an item, one after the other, from the loop."""

    async def run(self, item: Any, ctx: Any) -> Any:
        def work(name: str) -> Any:
            out = testing.empty(4096)
            testing.kernel(1.0, [], [out], lambda: item, name=name)
            return out

        await ctx.enqueue(lambda: work("first"))
        return await ctx.enqueue(lambda: work("second"))


@pytest.mark.axiom("7.2")
@pytest.mark.parametrize("kernel", ["first", "second"])
def test_what_an_async_stage_enqueues_has_its_item_too(kernel: str) -> None:
    stages = {
        "a": {"uses": "numbers"},
        "calls": {"uses": "calls", "from": "a", "on": "cuda:0", "in_flight": 3},
        "sink": {"uses": "sink", "from": "calls"},
    }
    fault = testing.Fault("assert", kernel=kernel, number=4)
    ran = run(stages, {"calls": Calls, "sink": sink([])}, faults=[fault], lag=0.0)
    assert suspects(ran.error) == ["calls[0] item 4"]


@pytest.mark.axiom("7.2")
@pytest.mark.parametrize("seed", SEEDS)
def test_no_call_of_the_device_follows_and_other_devices_are_closed(seed: int) -> None:
    Closes.closed.clear()
    stages = {
        "a": {"uses": "numbers", "with": {"count": 30}},
        "bad": {"uses": "closes", "from": "a", "on": "cuda:0", "replicas": 2, "in_flight": 3},
        "mate": {"uses": "closes", "from": "bad", "on": "cuda:0", "in_flight": 2},
        "well": {"uses": "closes", "from": "a", "on": "cuda:1"},
        "goes_on": {"uses": "goes_on", "from": "a", "on": "cuda:0", "queue": {"items": 1}},
        "quiesce": {"uses": "barrier", "from": "mate", "every": 2},
        "guarded": {"uses": "guarded", "from": "quiesce"},
    }
    fault = testing.Fault("illegal access", device="cuda:0", number=10 + seed)
    ran = run(
        stages, {"closes": Closes, "goes_on": GoesOn}, seed=seed, faults=[fault], devices=MANY,
        lag=(0.0, 0.01, 3.0)[seed % 3], settings={"stop": {"grace": "100s"}},
    )  # fmt: skip
    assert isinstance(ran.error, DeviceError)
    assert not [line for line in ran.log if line[1] == "call-after-loss"]
    assert "well" in Closes.closed
    assert not {"bad", "mate"} & set(Closes.closed), "it might call the device"
    left_out = [line["stage"] for line in ran.lines("log.jsonl") if line["event"] == "close left out"]
    assert sorted(left_out) == ["stage 'bad'", "stage 'bad'", "stage 'goes_on'", "stage 'mate'"]


@pytest.mark.axiom("7.2")
def test_a_later_run_on_the_device_is_refused() -> None:
    """In the same world, which stands for the process."""
    fault = testing.Fault("assert", stage="up")
    stages = {"a": {"uses": "numbers"}, "up": {"uses": "lift", "from": "a", "on": "cuda:0"}}
    refused: list[str] = []

    async def act(pipeline: Any) -> None:
        try:
            await pipeline.run()
        finally:
            with pytest.raises(DeviceError) as caught:
                pipeline.engine.machine.device("cuda:0")
            refused.append(str(caught.value))

    run(stages, faults=[fault], act=act)
    assert len(refused) == 1
    assert "device 'cuda:0' failed earlier in this process: " in refused[0]
    assert "device-side assert triggered" in refused[0]
    assert refused[0].endswith("; start a new process")


class Stray(Stage[Any, Any]):
    """Enqueues a kernel on a stream that is no lane's."""

    def run(self, item: Any) -> Any:
        device = testing.current_world().devices["cuda:0"]
        with device.entered(device.default):
            out = testing.empty(4096)
            testing.kernel(5.0, [], [out], name="stray")
        return item


@pytest.mark.axiom("7.2")
def test_where_no_lane_had_work_there_the_error_says_so() -> None:
    stages = {
        "a": {"uses": "numbers", "with": {"count": 1}},
        "stray": {"uses": "stray", "from": "a", "on": "cuda:0"},
        "up": {"uses": "lift", "from": "stray", "on": "cuda:0"},
        "quiesce": {"uses": "barrier", "from": "up"},
        "guarded": {"uses": "guarded", "from": "quiesce"},
    }
    fault = testing.Fault("illegal access", kernel="stray")
    ran = run(stages, {"stray": Stray}, faults=[fault], devices=MANY)
    assert "suspects: none. No lane had work on the device then" in str(ran.error)


@pytest.mark.axiom("7.2")
def test_a_fault_in_setup_names_the_stage() -> None:
    class Sets(Stage[Any, Any]):
        def setup(self, ctx: Any) -> None:
            testing.kernel(1.0, [], [testing.empty(512)], name="init")

        def run(self, item: Any) -> Any:
            return item

    stages = {"a": {"uses": "numbers"}, "sets": {"uses": "sets", "from": "a", "on": "cuda:0"}}
    ran = run(stages, {"sets": Sets}, faults=[testing.Fault("assert", kernel="init")])
    assert "the setup of stage 'sets'" in str(ran.error)
    assert suspects(ran.error) == ["sets[0] in a hook"]
