"""The fault that the barrier is for: memory is unmapped while a side stream still works on it.

A stage's temporary is dropped as its call returns: the allocator has it back, while the kernel that uses it
is still to run. On its own stream that is safe. To give free memory back to the system then is not: on a GPU
with expandable segments an illegal access, and the process is lost. Here it comes from sim's memory model.
"""

from __future__ import annotations

from typing import Any

import pytest

from pipeflow import Registry, Stage, testing

OFF = ["release-without-barrier"]
MIB = 1 << 20


class Batches(Stage[None, int]):
    class Config(Stage.Config, frozen=True, kw_only=True):
        count: int = 6

    def run(self):
        yield from range(self.config.count)


class Forward(Stage[int, Any]):
    """Two kernels, with an activation between them that nobody holds after the call."""

    device = True

    def run(self, item: int) -> Any:
        activation, features = testing.empty(8 * MIB), testing.empty(MIB)
        testing.kernel(0.3, [], [activation], name="layers")
        testing.kernel(0.3, [activation], [features], lambda _: item, name="head")
        return features


class Train(Stage[Any, Any]):
    device = True

    def run(self, item: Any) -> Any:
        gradient, loss = testing.empty(8 * MIB), testing.empty(512)
        testing.kernel(0.1, [item], [gradient], name="backward")
        testing.kernel(0.1, [gradient], [loss], lambda _: "loss", name="step")
        return loss


class Empties(Stage[Any, Any]):
    """A user's own stage that calls `torch.cuda.empty_cache()`. On the host it starts once its input's fence
    is reached; the work behind that input is over then, other work is not."""

    guarded = True

    def run(self, item: Any) -> int:
        freed = testing.release_cache("cuda:0")
        return freed.before - freed.after


class Sink(Stage[Any, None]):
    seen: list[int] = []  # noqa: RUF012

    def run(self, item: int) -> None:
        self.seen.append(item)


def file(*, barrier: bool, count: int = 6) -> dict[str, Any]:
    stages: dict[str, Any] = {
        "batches": {"uses": "batches", "with": {"count": count}},
        "target": {"uses": "forward", "from": "batches", "on": "cuda:0", "in_flight": 3, "replicas": 2},
        "train": {"uses": "train", "from": "target", "on": "cuda:0", "in_flight": 2},
        "release": {"uses": "empties", "from": "train"},
        "sink": {"uses": "sink", "from": "release"},
    }
    if barrier:
        stages["quiesce"] = {"uses": "barrier", "from": "train"}
        stages["release"]["from"] = "quiesce"
    return {"pipeflow": 1, "name": "fault", "stages": stages}


def run(seed: int, **options: Any) -> testing.Simulated:
    found = Registry()
    for name, cls in (("batches", Batches), ("forward", Forward), ("train", Train), ("empties", Empties),
                      ("sink", Sink)):  # fmt: skip
        found.add(name, cls)
    Sink.seen.clear()
    return testing.simulate(file(**options), registry=found, seed=seed, ignore=OFF, jitter=0.2)


@pytest.mark.axiom("6.1")
@pytest.mark.parametrize("seed", range(25))
def test_without_the_barrier_a_release_under_work_is_an_illegal_access(seed: int) -> None:
    ran = run(seed, barrier=False)
    assert "an illegal memory access was encountered" in str(ran.error)
    assert any(hazard.kind == "unmapped" for hazard in ran.hazards)


@pytest.mark.parametrize("seed", range(25))
def test_the_same_file_with_its_work_awaited_is_clean(seed: int) -> None:
    """One batch: as the release comes, nothing else is in flight, and its input's fence was awaited."""
    ran = run(seed, barrier=False, count=1)
    assert ran.error is None
    assert not ran.hazards
    assert len(Sink.seen) == 1
    assert Sink.seen[0] >= 16 * MIB, "the temporaries were free, and are given back"


@pytest.mark.axiom("6.1")
@pytest.mark.parametrize("seed", range(25))
def test_with_the_barrier_it_is_clean_for_every_seed(seed: int) -> None:
    ran = run(seed, barrier=True)
    assert ran.error is None
    assert not ran.hazards
    assert len(Sink.seen) == 6
    assert sum(Sink.seen) >= 16 * MIB
