"""Promises that random graphs do not reach, each by the smallest pipeline that could break it."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from pipeflow import Registry, Stage, testing
from pipeflow.errors import StallError


class Numbers(Stage[None, int]):
    def run(self):
        yield from range(8)


class Work(Stage[Any, Any]):
    """A kernel of one second, on whatever comes."""

    device = True

    def run(self, item: Any) -> Any:
        out = testing.empty(4096)
        reads = [item] if isinstance(item, testing.SimTensor) else []
        testing.kernel(1.0, reads, [out], lambda *values: "made", name="work")
        return out


class Sink(Stage[Any, None]):
    def run(self, item: Any) -> None:
        assert testing.read(item) == "made"


def registry(**more: Any) -> Registry:
    found = Registry()
    for name, cls in {"numbers": Numbers, "work": Work, "sink": Sink, **more}.items():
        found.add(name, cls)
    return found


def chain() -> dict[str, Any]:
    return {
        "pipeflow": 1,
        "name": "chain",
        "stages": {
            "numbers": {"uses": "numbers"},
            "first": {"uses": "work", "from": "numbers", "on": "cuda:0"},
            "second": {"uses": "work", "from": "first", "on": "cuda:0"},
            "sink": {"uses": "sink", "from": "second"},
        },
        "run": {"stall": "60s"},
    }


@pytest.mark.axiom("4.3")
def test_what_is_stuck_is_never_freed() -> None:
    """A kernel that never ends may still write its buffers, and so may all behind it: they are leaked, those
    in queues too, also when nobody holds the pipeline any more (axiom 4.3)."""
    hang = testing.Fault("hang", stage="first")
    file = chain()
    file["stages"]["first"]["in_flight"] = 4
    ran = testing.simulate(file, registry=registry(), faults=[hang])
    assert isinstance(ran.error, StallError)
    assert "first[0], in the fence of item 0" in str(ran.error)
    ran.pipeline = None
    ran.error = None
    gc.collect()
    assert ran.world.devices["cuda:0"].allocator.used >= 5 * 4096, "one in work, three queued, one made of it"
    assert not ran.hazards


@pytest.mark.axiom("4.3")
@pytest.mark.parametrize("seed", range(10))
def test_a_cancel_frees_all_at_once(seed: int) -> None:
    """No cycle keeps device memory until the collector comes by."""
    gc.disable()
    try:

        async def act(pipeline: Any) -> None:
            pipeline.engine.loop.call_later(0.7 * seed, pipeline.cancel)
            await pipeline.run()

        ran = testing.simulate(chain(), registry=registry(), act=act, seed=seed)
        ran.pipeline = None
        if ran.error is not None:
            ran.error.__traceback__ = None
        assert ran.world.devices["cuda:0"].allocator.used == 0
    finally:
        gc.enable()


class Late(Stage[Any, int]):
    """Enqueues work on a stream that the engine does not own, so no fence of its stands behind it."""

    device = True

    def run(self, item: int) -> int:
        world = testing.current_world()
        device = world.devices["cuda:0"]
        with device.entered(device.default):
            scratch = testing.empty(4096)
            testing.kernel(5.0, [], [scratch], name="stray")
        return item


class Empties(Stage[Any, Any]):
    guarded = True

    def run(self, item: Any) -> None:
        testing.release_cache("cuda:0")


@pytest.mark.axiom("5.1")
@pytest.mark.parametrize("seed", range(5))
def test_a_barrier_drains_what_no_fence_stands_behind(seed: int) -> None:
    """Fences cover the engine's own streams. What else runs on the device is over only after its drain."""
    file = {
        "pipeflow": 1,
        "name": "stray",
        "stages": {
            "numbers": {"uses": "numbers"},
            "late": {"uses": "late", "from": "numbers", "on": "cuda:0"},
            "quiesce": {"uses": "barrier", "from": "late", "every": 4},
            "release": {"uses": "empties", "from": "quiesce"},
        },
    }
    ran = testing.simulate(file, registry=registry(late=Late, empties=Empties), seed=seed)
    assert ran.error is None
    assert not ran.hazards
