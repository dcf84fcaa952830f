"""Faults, retries, drains, cancels and what is stuck, on simulated devices (axioms 7.1, 7.4, 7.5)."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from kit import SEEDS, fine, run, sink, times

from pipeflow import Cancelled, DeviceError, Stage, StallError, Stuck, testing


class Flaky(Stage[Any, Any]):
    """Raises after so many kernels into one buffer of its own; with `again` the first time only."""

    retriable = True
    kernels = 2
    again = True

    def setup(self, ctx: Any) -> None:
        self.buffer = testing.empty(4096)
        self.tried: set[int] = set()

    def run(self, item: Any, ctx: Any) -> Any:
        fails = ctx.sequence % 3 == 1 and not (self.again and ctx.sequence in self.tried)
        self.tried.add(ctx.sequence)
        for number in range(3):
            if fails and number == self.kernels:
                raise ValueError("on purpose")
            testing.kernel(5.0, [item], [self.buffer], lambda value: value, name="flaky")
        out = testing.empty(4096)
        testing.kernel(1.0, [self.buffer], [out], lambda value: value, name="out")
        return out


def flaky(kernels: int, *, again: bool) -> type[Stage[Any, Any]]:
    return type("Flaky", (Flaky,), {"kernels": kernels, "again": again})


CHAIN = {
    "a": {"uses": "numbers"},
    "up": {"uses": "lift", "from": "a", "on": "cuda:0", "with": {"seconds": 0.1}},
    "flaky": {"uses": "flaky", "from": "up", "on": "cuda:0"},
    "sink": {"uses": "sink", "from": "flaky"},
}


@pytest.mark.axiom("7.1")
@pytest.mark.parametrize("kernels", [0, 1, 2])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_retry_waits_for_what_the_failed_call_had_enqueued(seed: int, kernels: int) -> None:
    seen: list[Any] = []
    uses = {"flaky": flaky(kernels, again=True), "sink": sink(seen)}
    stages = CHAIN | {"flaky": CHAIN["flaky"] | {"on_error": {"retry": 1}}}
    ran = fine(run(stages, uses, seed=seed))
    assert seen == list(range(8))
    for number in (1, 4, 7):
        launches, ends = times(ran, "launch", "flaky", number), times(ran, "end", "flaky", number)
        assert len(launches) == kernels + 4
        assert launches[kernels] >= max([0.0, *ends[:kernels]])


@pytest.mark.axiom("7.1")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_skipped_item_leaves_once_what_it_enqueued_is_over(seed: int) -> None:
    """Its input is neither freed nor given on under the kernels of the call that raised."""
    seen: list[Any] = []
    uses = {"flaky": flaky(2, again=False), "sink": sink(seen)}
    stages = CHAIN | {"flaky": CHAIN["flaky"] | {"on_error": {"skip": 9}, "queue": {"items": 1}}}
    ran = fine(run(stages, uses, seed=seed, devices={"cuda:0": {"width": 4}}))
    assert seen == [0, 2, 3, 5, 6]
    for number in (1, 4):
        over = max(times(ran, "end", "flaky", number))
        assert times(ran, "launch", "up", number + 1)[0] >= over, "its credit came back before"


@pytest.mark.axiom("7.1")
def test_without_a_policy_the_fault_ends_the_run_and_nothing_of_it_is_handed_over() -> None:
    seen: list[Any] = []
    ran = run(CHAIN, {"flaky": flaky(2, again=False), "sink": sink(seen)})
    assert "stage 'flaky', item 1: ValueError: on purpose" in str(ran.error)
    assert seen in ([], [0])


@pytest.mark.axiom("7.4")
@pytest.mark.parametrize("at", [0.05 * step for step in range(40)])
def test_a_drain_loses_nothing(at: float) -> None:
    """Sources end where they stand, all that is in flows out, and the barrier fires for the rest."""
    seen: list[Any] = []
    stages = {
        "a": {"uses": "numbers", "with": {"count": 100}},
        "up": {"uses": "lift", "from": "a", "on": "cuda:0", "replicas": 2, "with": {"seconds": 0.1}},
        "batch": {"uses": "batch", "from": "up", "on": "cuda:0", "with": {"size": 4, "seconds": 0.1}},
        "quiesce": {"uses": "barrier", "from": "batch", "every": 3},
        "guarded": {"uses": "guarded", "from": "quiesce"},
        "sink": {"uses": "sink", "from": "batch"},
    }

    async def act(pipeline: Any) -> Any:
        pipeline.engine.loop.call_later(at, pipeline.drain)
        return await pipeline.run()

    ran = fine(run(stages, {"sink": sink(seen)}, act=act))
    assert ran.value["status"] == "drained"
    assert ran.pipeline is not None
    made = ran.pipeline._assembly.runners["a"].counters.made
    numbers = [n for batch in seen for n in (batch if isinstance(batch, tuple) else [batch])]
    assert numbers == list(range(made))
    batches = -(-made // 4)
    assert len(times(ran, "section")) == -(-batches // 3)


@pytest.mark.axiom("7.4")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_cancel_starts_nothing_and_awaits_what_is_in_hand(seed: int) -> None:
    """Each lane is in one job, with more in its queue: it ends that one, and begins no other."""

    class Slowly(Stage[Any, Any]):
        def run(self, item: Any, ctx: Any) -> Any:
            testing.work(4.0, lock=False)
            out = testing.empty(4096)
            testing.kernel(1.0, [], [out], lambda: item, name="slowly")
            return out

    stages = {
        "a": {"uses": "numbers", "with": {"count": 100}},
        "up": {"uses": "slowly", "from": "a", "on": "cuda:0", "replicas": 2, "in_flight": 3},
        "work": {"uses": "work", "from": "up", "on": "cuda:0"},
    }

    async def act(pipeline: Any) -> Any:
        def cancel() -> None:
            testing.note("cancelled")
            pipeline.cancel()

        pipeline.engine.loop.call_later(3.3 + seed, cancel)
        return await pipeline.run()

    settings = {"stop": {"grace": "100s"}}
    ran = run(stages, {"slowly": Slowly}, seed=seed, act=act, settings=settings)
    assert isinstance(ran.error, Cancelled)
    assert not getattr(ran.error, "__notes__", []), "nothing was left"
    (cancelled,) = times(ran, "cancelled")
    assert len(times(ran, "launch")) == len(times(ran, "end"))
    assert len([at for at in times(ran, "launch", "up") if at > cancelled]) <= 2
    assert not [at for at in times(ran, "launch", "work") if at > cancelled]


@pytest.mark.axiom("7.4")
@pytest.mark.parametrize("seed", SEEDS)
def test_who_is_stuck_in_a_mark_is_named_after_the_grace_period(seed: int) -> None:
    hang = testing.Fault("hang", stage="up", sequence=2)

    async def act(pipeline: Any) -> Any:
        pipeline.engine.loop.call_later(20, pipeline.cancel)
        return await pipeline.run()

    ran = run(
        CHAIN, {"flaky": flaky(9, again=True), "sink": sink([])}, seed=seed, faults=[hang], act=act,
        settings={"stop": {"grace": "7s"}},
    )  # fmt: skip
    assert isinstance(ran.error, (Cancelled, Stuck))
    text = "\n".join([str(ran.error), *getattr(ran.error, "__notes__", [])])
    assert "did not come back within 7 s" in text
    assert "up[0], in the fence of item 2" in text
    assert 26.9 < ran.seconds < 28


@pytest.mark.axiom("7.4")
@pytest.mark.parametrize("seed", SEEDS)
def test_who_is_stuck_in_a_launch_is_named_after_the_grace_period(seed: int) -> None:
    """The launch queue is full and moves no more: the call itself never comes back."""

    class Fills(Stage[Any, Any]):
        mutates = True

        def run(self, item: Any, ctx: Any) -> Any:
            for _ in range(20):
                testing.kernel(0.01, [], [item], lambda: 1, name="fills")
            return item

    hang = testing.Fault("hang", stage="fills", number=25)
    stages = {
        "a": {"uses": "numbers"},
        "up": {"uses": "lift", "from": "a", "on": "cuda:0", "with": {"seconds": 0.1}},
        "fills": {"uses": "fills", "from": "up", "on": "cuda:0"},
    }
    ran = run(
        stages, {"fills": Fills}, seed=seed, faults=[hang], devices={"cuda:0": {"queue": 8}},
        settings={"stall": "60s", "stop": {"grace": "7s"}},
    )  # fmt: skip
    assert isinstance(ran.error, StallError)
    for text in (str(ran.error), "\n".join(ran.error.__notes__)):
        assert "fills[0], in item 1" in text
        assert "waits for a place in the launch queue" in text
    assert "did not come back within 7 s" in ran.error.__notes__[-1]


@pytest.mark.axiom("7.5")
def test_no_thread_is_made_and_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """On sim lanes are timers of one loop: what crosses threads is `submit` and `watch` alone."""
    before = set(threading.enumerate())
    monkeypatch.setattr(threading.Thread, "start", lambda self: pytest.fail("a thread was started"))
    fine(run(CHAIN, {"flaky": flaky(9, again=True), "sink": sink([])}))
    assert set(threading.enumerate()) == before


@pytest.mark.axiom("7.2")
@pytest.mark.parametrize("kind", ["illegal access", "assert"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_fence_that_fails_ends_the_run_and_no_wrong_value_is_handed_to_the_host(
    seed: int, kind: str
) -> None:
    """The device reports late, by whichever mark is heard first; it is named, and nothing starts any more."""
    seen: list[Any] = []
    fault = testing.Fault(kind, stage="up", sequence=3)
    ran = run(CHAIN, {"flaky": flaky(9, again=True), "sink": sink(seen)}, seed=seed, faults=[fault], lag=0.3)
    assert isinstance(ran.error, DeviceError)
    assert "device 'cuda:0' reported a fault" in str(ran.error)
    assert seen == list(range(len(seen)))
    assert len(seen) <= 3
    failed = [line[0] for line in ran.log if line[1] == "notice" and line[3] == "failed"]
    assert not [at for at in times(ran, "launch") if at > failed[0]]
