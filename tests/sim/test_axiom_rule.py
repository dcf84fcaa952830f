"""What the static rule is for: files that it refuses, run with the rule off, show a hazard on the simulated
machine; the nearest file that passes shows none (axioms 6.1, 6.3 to 6.5)."""

from __future__ import annotations

from typing import Any

import pytest
from kit import SEEDS, Box, Guarded, fine, run, sink

from pipeflow import Context, DeviceError, GraphError, Stage, testing

MIB = 1 << 20


class Forward(Stage[Any, Any]):
    """Like a forward pass: temporaries that the allocator has back at once, while the stream still works."""

    device = True

    def run(self, item: Any, ctx: Context) -> Any:
        out = testing.empty(MIB)
        for number in range(3):
            temporary = testing.empty(16 * MIB)
            testing.kernel(4.0, [], [temporary], lambda: item, name="temporary")
            testing.kernel(1.0, [temporary], [out], lambda value: value, name=f"part {number}")
        return out


class Empties(Stage[Any, Any]):
    """Returns the memory of every device, as `torch.cuda.empty_cache()` does."""

    guarded = True

    def run(self, item: Any, ctx: Context) -> Any:
        testing.note("released")
        for name in testing.current_world().devices:
            testing.release_cache(name)
        return item


class Background(Stage[Any, Any]):
    """A thread of its own that enqueues work again and again, also when `run` has returned."""

    background = True
    device = True

    def setup(self, ctx: Context) -> None:
        world = testing.current_world()
        self.device = world.devices[ctx.device]
        self.host, self.stream = world.make_host("its own"), self.device.stream("its own")
        self.allowed = True
        self.begun = False

    def run(self, item: Any, ctx: Context) -> Any:
        if not self.begun:
            self.begun = True
            world = testing.current_world()
            world.loop.call_at(world.host.now + 0.4, self.work)
        return item

    def close(self) -> None:
        self.allowed = False

    def work(self) -> None:
        world = testing.current_world()
        if self.allowed:
            with world.on(self.host, stage="background"), self.device.entered(self.stream):
                temporary = testing.empty(16 * MIB)
                testing.kernel(0.3, [], [temporary], lambda: 1, name="late")
            world.loop.call_later(0.4, self.work)


class Joined(Background):
    def quiesce(self) -> None:
        """Joins it: what it has not begun it does not begin."""
        self.allowed = False


USES = {"forward": Forward, "empties": Empties, "background": Background, "joined": Joined, "sink": sink([])}
TARGET = {
    "a": {"uses": "numbers", "with": {"count": 8}},
    "target": {"uses": "forward", "from": "a", "on": "cuda:0", "in_flight": 3, "replicas": 2},
    "train": {"uses": "work", "from": "target", "on": "cuda:1", "in_flight": 2},
}
BARRIER = {"uses": "barrier", "from": "train", "every": 2}

FAILS: dict[str, tuple[str, dict[str, Any]]] = {
    "train > release": (
        "release-without-barrier",
        {"release": {"uses": "empties", "from": "train"}},
    ),
    "B > evaluate > release": (
        "work-beside-barrier",
        {
            "b": BARRIER,
            "first": {"uses": "guarded", "from": "b"},
            "evaluate": {"uses": "any", "from": "first"},
            "release": {"uses": "empties", "from": "evaluate"},
        },
    ),
    "B scope cuda:1 > release, targets on cuda:0": (
        "narrow-barrier",
        {"b": BARRIER | {"scope": "cuda:1"}, "release": {"uses": "releases", "from": "b"}},
    ),
    "a thread of its own without quiesce()": (
        "unquiet-background",
        {
            "own": {"uses": "background", "from": "a", "on": "cuda:0"},
            "b": BARRIER,
            "wait": {"uses": "guarded", "from": "b"},
            "release": {"uses": "empties", "from": "wait"},
        },
    ),
}


class Anything(Stage[Any, Any]):
    def run(self, item: Any) -> Any:
        testing.work(3.0, lock=False)
        return item


class Releases(Empties):
    """Says that it returns memory, as `release_cache` does."""

    releases = True


USES |= {"any": Anything, "releases": Releases}
RULES = ["release-without-barrier", "work-beside-barrier", "narrow-barrier", "unquiet-background"]
PASSES: dict[str, dict[str, Any]] = {
    "train > B > release": {"b": BARRIER, "release": {"uses": "empties", "from": "b"}},
    "B > release > log": {
        "b": BARRIER,
        "release": {"uses": "empties", "from": "b"},
        "log": {"uses": "any", "from": "release"},
    },
    "B > {wait, release}": {
        "b": BARRIER,
        "wait": {"uses": "guarded", "from": "b"},
        "release": {"uses": "empties", "from": "b"},
    },
    "a thread that quiesce() joins": {
        "own": {"uses": "joined", "from": "a", "on": "cuda:0"},
        "b": BARRIER,
        "wait": {"uses": "guarded", "from": "b"},
        "release": {"uses": "empties", "from": "wait"},
    },
}


@pytest.mark.axiom("6.1", "6.2", "6.3", "6.4")
@pytest.mark.parametrize("name", FAILS)
@pytest.mark.parametrize("seed", SEEDS)
def test_what_the_rule_refuses_is_a_hazard_without_it(seed: int, name: str) -> None:
    code, more = FAILS[name]
    with pytest.raises(GraphError, match=code):
        run(TARGET | more, USES)
    ran = run(TARGET | more, USES, seed=seed, ignore=RULES)
    assert any(hazard.kind == "unmapped" for hazard in ran.hazards), ran.error
    assert isinstance(ran.error, DeviceError) or "illegal memory access" in str(ran.error)


@pytest.mark.axiom("6.1", "6.2", "6.3", "6.4")
@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("seed", SEEDS)
def test_what_passes_shows_none(seed: int, name: str) -> None:
    ran = fine(run(TARGET | PASSES[name], USES, seed=seed))
    assert [line for line in ran.log if line[1] == "released"]


@pytest.mark.axiom("6.5")
@pytest.mark.parametrize("fed_by", ["train", "target"])
def test_a_section_fed_past_the_writer_sees_versions_by_chance(fed_by: str) -> None:
    """pack > B > publish(reads drafter): with the rule off its version is whatever the writer has come to."""
    found: dict[int, set[int]] = {}

    class Publishes(Guarded):
        reads = {"box": Box}  # noqa: RUF012

        def run(self, item: Any, ctx: Context) -> Any:
            found.setdefault(item.seq, set()).add(item.versions["box"].step)
            return item.seq

    stages = {
        "a": {"uses": "numbers", "with": {"count": 8}},
        "target": {"uses": "lift", "from": "a", "on": "cuda:0", "replicas": 2, "in_flight": 2},
        "train": {
            "uses": "writes", "from": "target", "on": "cuda:0", "writes": "box", "in_flight": 1,
            "with": {"seconds": 5.0},
        },
        "b": {"uses": "barrier", "from": fed_by, "every": 2},
        "publish": {"uses": "publishes", "from": "b", "reads": "box", "on": "cuda:0"},
    }  # fmt: skip
    for seed in SEEDS:
        more = {"resources": {"box": {"uses": "box", "on": "cuda:0"}}, "ignore": ["stale-barrier"]}
        fine(run(stages, {"publishes": Publishes}, seed=seed, lag=0.9, jitter=0.9, **more))
    right = {seq: {2 * (seq + 1)} for seq in range(4)}
    assert (found == right) == (fed_by == "train"), found
