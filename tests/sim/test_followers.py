"""Followers on vector clocks (axioms 3.6, 3.7): what is read on one stream while another writes beside it."""

from __future__ import annotations

from typing import Any

import pytest

from pipeflow import Registry, Resource, Stage, testing

SEEDS = range(8)


class Weights(Resource):
    """Pinned memory, which every device reaches; it holds the number of the version."""

    def open(self, ctx: Any) -> Any:
        weights = testing.empty(4096)
        testing.write(weights, 0)
        return weights


class Batches(Stage[None, int]):
    def run(self):
        yield from range(24)


class Forward(Stage[int, Any]):
    device = True
    reads = {"actor": Weights}  # noqa: RUF012

    def run(self, item: int, ctx: Any) -> Any:
        out, version = testing.empty(512), ctx.version("actor").step
        testing.kernel(0.1, [ctx.read("actor")], [out], lambda content: (item, version, content))
        return out


class Train(Stage[Any, Any]):
    device = True
    writes = {"drafter": Weights}  # noqa: RUF012

    def run(self, item: Any, ctx: Any) -> Any:
        out, step = testing.empty(512), ctx.sequence + 1
        testing.kernel(0.07, [item], [ctx.write("drafter")], lambda _: step)
        testing.kernel(0.01, [item], [out], lambda features: features)
        return out


class Publish(Stage[Any, None]):
    device = True
    reads = {"drafter": Weights}  # noqa: RUF012
    writes = {"actor": Weights}  # noqa: RUF012

    def run(self, item: Any, ctx: Any) -> None:
        testing.kernel(0.05, [ctx.read("drafter")], [ctx.write("actor")], lambda content: content)


class Guarded(Publish):
    guarded = True


class Sink(Stage[Any, None]):
    seen: list[Any] = []  # noqa: RUF012

    def run(self, item: Any) -> None:
        self.seen.append(testing.read(item))


def run(seed: int, *, staleness: int, spare: bool, every: int = 1, barrier: bool = False) -> Any:
    registry = Registry()
    uses = {"weights": Weights, "batches": Batches, "forward": Forward, "train": Train, "publish": Publish,
            "guarded": Guarded, "sink": Sink}  # fmt: skip
    for name, cls in uses.items():
        registry.add(name, cls)
    stages: dict[str, Any] = {
        "batches": {"uses": "batches"},
        "forward": {"uses": "forward", "from": "batches", "on": "cuda:0", "reads": "actor", "in_flight": 3,
                    "replicas": 2},
        "train": {"uses": "train", "from": "forward", "on": "cuda:0", "writes": "drafter"},
        "publish": {"uses": "publish", "from": "train", "on": "cuda:0", "reads": "drafter", "writes": "actor",
                    "every": every},
        "sink": {"uses": "sink", "from": "train"},
    }  # fmt: skip
    if barrier:
        stages["quiesce"] = {"uses": "barrier", "from": "train", "every": every}
        stages["publish"] |= {"uses": "guarded", "from": "quiesce"}
        del stages["publish"]["every"]
    resources = {
        "drafter": {"uses": "weights", "on": "cuda:0"},
        "actor": {"uses": "weights", "on": "cuda:0", "follows": "drafter", "max_staleness": staleness,
                  "spare": spare},
    }  # fmt: skip
    Sink.seen.clear()
    file = {"pipeflow": 1, "name": "t", "resources": resources, "stages": stages}
    return testing.simulate(file, registry=registry, seed=seed, jitter=0.4)


@pytest.mark.axiom("3.6", "3.7")
@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize(("staleness", "every"), [(0, 1), (1, 1), (1, 2), (3, 2)])
def test_each_item_reads_one_whole_version_of_the_age_allowed(
    staleness: int, every: int, spare: bool, barrier: bool
) -> None:
    for seed in SEEDS:
        ran = run(seed, staleness=staleness, spare=spare, every=every, barrier=barrier)
        assert ran.error is None, (seed, ran.error)
        assert not ran.hazards, (seed, ran.hazards[0])
        assert [item for item, _, _ in Sink.seen] == list(range(24))
        for item, version, content in Sink.seen:
            assert content == version, f"seed {seed}: item {item} of version {version} read {content}"
            assert item - version <= staleness, f"seed {seed}: item {item} was made of version {version}"


@pytest.mark.axiom("3.7")
def test_readers_go_on_while_the_spare_copy_is_written() -> None:
    """The same work in less time: without a spare copy the write waits for the readers, and they for it."""
    beside = run(0, staleness=3, spare=True).seconds
    in_turn = run(0, staleness=3, spare=False).seconds
    assert beside <= in_turn
