"""Credits, bytes, liveness and inserted copies on simulated devices (axioms 2.1 to 2.6)."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from kit import SEEDS, each_turn, fine, run, sink, times

from pipeflow import Stage, StallError, testing
from pipeflow.edge import Edge

LONG = {"seconds": 5.0}
GRAPH = {
    "a": {"uses": "numbers", "with": {"count": 14}},
    "up": {
        "uses": "lift", "from": "a", "on": "cuda:0", "replicas": 2, "in_flight": 2,
        "with": {"drops": [2, 3, 7], "slow": [5]},
    },
    "left": {"uses": "work", "from": "up", "on": "cuda:0", "in_flight": 2, "queue": {"items": 2}},
    "right": {"uses": "work", "from": "up", "on": "cuda:1", "queue": {"items": 1}, "with": {"seconds": 3.0}},
    "many": {"uses": "many", "from": "left", "on": "cuda:0", "replicas": 2, "queue": {"items": 1}},
    "batch": {"uses": "batch", "from": "many", "on": "cuda:0", "with": {"size": 4}, "queue": {"items": 2}},
    "third": {"uses": "sink", "from": "batch", "every": 3},
    "fourth": {"uses": "work", "from": "many", "on": "cuda:0", "every": 4},
    "last": {"uses": "sink", "from": "right"},
}  # fmt: skip


def follow(monkeypatch: pytest.MonkeyPatch) -> dict[Edge, set[Any]]:
    """Edge to the live items that were put on it and did not retire."""
    alive: dict[Edge, set[Any]] = {}
    put, give_back = Edge.put, Edge.give_back

    def putting(edge: Edge, seq: int, item: Any, charged: bool) -> bool:
        taken = put(edge, seq, item, charged)
        if taken:
            alive.setdefault(edge, set()).add(item)
        return taken

    def giving(edge: Edge, item: Any) -> None:
        alive[edge].remove(item)
        give_back(edge, item)

    monkeypatch.setattr(Edge, "put", putting)
    monkeypatch.setattr(Edge, "give_back", giving)
    return alive


@pytest.mark.axiom("2.1", "2.2")
@pytest.mark.parametrize("seed", SEEDS)
def test_at_each_turn_credits_out_are_the_items_alive(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In production, queued, gathered or in work at the consumer; on a fork as many in production on each
    arm, so a start took both or none."""

    alive = follow(monkeypatch)

    def look(engine: Any) -> None:
        if not engine.admitting:
            return
        for node in engine.nodes:
            for edge in node.outs:
                made = sum(job.kept(edge) for job in node.hand)
                items = alive.get(edge, set())
                assert edge.production == made, f"{edge}: {edge.production} in production, not {made}"
                assert edge.credits == made + len(items), f"{edge}: {edge.credits} out, not {made} + {items}"
                assert edge.queued + edge.gathered <= len(items)
            if node.name == "up":
                assert len({edge.production for edge in node.outs}) == 1

    turned = each_turn(monkeypatch, look)
    fine(run(GRAPH, {"sink": sink([])}, seed=seed))
    assert turned["turns"] > 100


@pytest.mark.axiom("2.2")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_credit_comes_back_when_the_fence_of_its_item_is_reached(seed: int) -> None:
    """One credit: the next item is made after the kernel on the one before, not when its job returned."""
    stages = {
        "a": {"uses": "numbers"},
        "up": {"uses": "lift", "from": "a", "on": "cuda:0"},
        "work": {
            "uses": "work",
            "from": "up",
            "on": "cuda:0",
            "queue": {"items": 1},
            "with": {"seconds": 5.0},
        },
    }
    ran = fine(run(stages, seed=seed))
    for number in range(7):
        (over,) = times(ran, "end", "work", number)
        (made,) = times(ran, "launch", "up", number + 1)
        assert made >= over


@pytest.mark.axiom("2.2")
@pytest.mark.parametrize("seed", SEEDS)
def test_of_a_dropped_item_the_credit_comes_back_at_its_own_fence(seed: int) -> None:
    """One arm of a join has a gap, so the other arm's item is used by nobody: it stays until it is made."""
    stages = {
        "a": {"uses": "numbers", "with": {"count": 4}},
        "gap": {"uses": "lift", "from": "a", "on": "cuda:0", "with": {"drops": [0, 1, 2, 3], "seconds": 0.1}},
        "other": {"uses": "lift", "from": "a", "on": "cuda:1"},
        "both": {"uses": "work", "from": {"x": "gap", "y": "other"}, "on": "cuda:0", "queue": {"items": 1}},
    }
    ran = fine(run(stages, seed=seed, devices={"cuda:1": {"peer_bandwidth": 100.0}}))
    assert not times(ran, "launch", "both")
    copies = [line for line in ran.log if line[1] == "launch" and line[2] == "other > cuda:0"]
    assert len(copies) == 4
    for number in range(3):
        (over,) = times(ran, "end", "other > cuda:0", number)
        (made,) = times(ran, "launch", "other > cuda:0", number + 1)
        assert made >= over


@pytest.mark.axiom("2.3")
@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_exceed_the_budget_by_growth_alone(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start reserves the largest item so far; what is over the budget is what items grew beyond that
    while they were made. `over` is 0 for a budget that is kept."""
    sizes = [1000, 1000, 4000, 500, 9000, 9000, 200, 12000, 100, 100, 100, 100, 30000, 100]
    limit = 20000
    reserved: list[int] = []
    alive: dict[Any, int] = {}
    numbers = count()
    take, put, give_back = Edge.take, Edge.put, Edge.give_back

    def taking(edge: Edge) -> None:
        if edge.wants_bytes:
            reserved.append(edge.largest or 0)
        take(edge)

    def putting(edge: Edge, seq: int, item: Any, charged: bool) -> bool:
        if edge.wants_bytes:
            alive[item] = next(numbers)
        return put(edge, seq, item, charged)

    def giving(edge: Edge, item: Any) -> None:
        if edge.wants_bytes:
            del alive[item]
        give_back(edge, item)

    monkeypatch.setattr(Edge, "take", taking)
    monkeypatch.setattr(Edge, "put", putting)
    monkeypatch.setattr(Edge, "give_back", giving)

    class Sized(Stage[int, Any]):
        def run(self, item: int) -> Any:
            out = testing.empty(sizes[item])
            testing.kernel(1.0, [], [out], lambda: item)
            return out

    fullest: list[int] = []

    def look(engine: Any) -> None:
        edge = next(e for node in engine.nodes for e in node.outs if e.wants_bytes)
        growth = sum(max(0, sizes[number] - reserved[number]) for number in alive.values())
        fullest.append(edge.bytes_live)
        assert edge.bytes_live <= limit + growth or edge.credits == 1, f"{edge.bytes_live}, {growth}"
        assert edge.bytes_live == sum(sizes[number] for number in alive.values())

    each_turn(monkeypatch, look)
    stages = {
        "a": {"uses": "numbers", "with": {"count": len(sizes)}},
        "sized": {"uses": "sized", "from": "a", "on": "cuda:0", "in_flight": 4},
        "work": {
            "uses": "work", "from": "sized", "on": "cuda:0",
            "queue": {"items": 6, "bytes": limit}, "with": {"seconds": 4.0},
        },
    }  # fmt: skip
    fine(run(stages, {"sized": Sized}, seed=seed))
    assert max(fullest) > limit * 0.7


@pytest.mark.axiom("2.4")
@pytest.mark.parametrize("seed", SEEDS)
def test_an_item_of_three_times_the_budget_and_a_batch_beyond_it_pass(seed: int) -> None:
    seen: list[Any] = []
    stages = {
        "a": {"uses": "numbers", "with": {"count": 70}},
        "up": {"uses": "lift", "from": "a", "on": "cuda:0", "in_flight": 2, "with": {"nbytes": 3000}},
        "batch": {
            "uses": "batch", "from": "up", "on": "cuda:0", "with": {"size": 32},
            "queue": {"items": 4, "bytes": 1000},
        },
        "sink": {"uses": "sink", "from": "batch"},
    }  # fmt: skip
    fine(run(stages, {"sink": sink(seen)}, seed=seed))
    assert [len(batch) for batch in seen] == [32, 32, 6]


class Uneven(Stage[Any, Any]):
    """Three outputs; of item 0 each comes late, so lanes behind it are ahead."""

    async def run(self, item: int):
        import asyncio

        for number in range(3):
            await asyncio.sleep(10 if item == 0 else 1)
            yield (item, number)


UNEVEN = {
    "a": {"uses": "numbers", "with": {"count": 5}},
    "many": {"uses": "uneven", "from": "a", "replicas": 3},
    "sink": {"uses": "sink", "from": "many", "queue": {"items": 2}},
}


@pytest.mark.axiom("2.4")
@pytest.mark.parametrize("seed", SEEDS)
def test_the_oldest_item_may_pass_what_its_own_stage_keeps_behind_it(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    fine(run(UNEVEN, {"sink": sink(seen), "uneven": Uneven}, seed=seed))
    assert seen == [(item, number) for item in range(5) for number in range(3)]
    monkeypatch.setattr("pipeflow.job.Job.kept", lambda job, edge: 0)
    ran = run(UNEVEN, {"sink": sink(seen), "uneven": Uneven}, seed=seed)
    assert isinstance(ran.error, StallError), "without the rule it waits for itself"


@pytest.mark.axiom("2.5")
@pytest.mark.parametrize("seed", SEEDS)
def test_each_output_of_many_has_its_own_credit_and_mark_and_leaves_at_once(seed: int) -> None:
    """The host reads each output about when its kernel ends, with one credit, and the next one is enqueued
    after that."""
    seen: list[Any] = []
    stages = {
        "a": {"uses": "numbers", "with": {"count": 2}},
        "up": {"uses": "lift", "from": "a", "on": "cuda:0", "with": {"seconds": 0.01}},
        "many": {"uses": "many", "from": "up", "on": "cuda:0", "with": {"seconds": 100.0}},
        "work": {"uses": "work", "from": "many", "on": "cuda:0", "queue": {"items": 1}},
        "sink": {"uses": "sink", "from": "work"},
    }
    ran = fine(run(stages, {"sink": sink(seen)}, seed=seed))
    assert seen == [(item, number) for item in range(2) for number in range(3)]
    made, used = times(ran, "launch", "many"), times(ran, "end", "work")
    reads = [line[0] for line in ran.log if line[1] == "read" and line[3].startswith("sink")]
    assert len(made) == len(used) == len(reads) == 6
    for this, following in zip(range(5), range(1, 6), strict=True):
        assert used[this] <= made[following], "one credit"
        assert reads[this] < used[following], "its own mark"


COPIED = {
    "a": {"uses": "numbers"},
    "target": {"uses": "lift", "from": "a", "on": "cuda:0"},
    "pack": {"uses": "work", "from": "target", "on": "cuda:1"},
    "train": {"uses": "work", "from": "target", "on": "cuda:1", "with": {"seconds": 3.0}},
    "p": {"uses": "sink", "from": "pack"},
    "t": {"uses": "sink", "from": "train"},
}


@pytest.mark.axiom("2.6")
@pytest.mark.parametrize("seed", SEEDS)
def test_two_consumers_of_one_place_share_a_copy_and_its_source_goes_as_it_retires(seed: int) -> None:
    one: list[Any] = []
    two: list[Any] = []

    class Keeps(Stage[int, Any]):
        def run(self, item: int) -> Any:
            out = testing.empty(1 << 22)
            testing.kernel(0.001, [], [out], lambda: item)
            return out

    stages = COPIED | {"target": COPIED["target"] | {"uses": "keeps"}}
    uses = {"sink": sink(one), "keeps": Keeps, "other": sink(two)}
    stages["t"] = {"uses": "other", "from": "train"}
    ran = fine(run(stages, uses, seed=seed, devices={"cuda:0": {"peer_bandwidth": 1 << 22}}))
    assert one == two == list(range(8))
    copies = [line for line in ran.log if line[1] == "launch" and line[2] == "target > cuda:1"]
    assert [line[3] for line in copies] == list(range(8)), "one copy an item"
    assert {line[4] for line in copies} == {"cuda:0/target > cuda:1"}, "a stream of its own"
    blocks = [line for line in ran.log if line[1] == "free" and line[2].startswith("cuda:0 block")]
    ended = times(ran, "end", "target > cuda:1")
    assert len(blocks) == len(ended) == 8
    for over, freed in zip(ended, blocks, strict=True):
        assert freed[0] >= over


@pytest.mark.axiom("2.6")
def test_a_copy_is_named_after_producer_and_place() -> None:
    """What it copies never comes: the stall report names the copy as a stage of its own, with its item."""
    hang = testing.Fault("hang", stage="target", sequence=3)
    ran = run(COPIED, {"sink": sink([])}, faults=[hang], settings={"stall": "60s"})
    assert isinstance(ran.error, StallError)
    assert "target > cuda:1[0], in the fence of item 3" in str(ran.error)
