"""Numbers, gaps, order, selection and gathers on simulated devices (axioms 1.1 to 1.6)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kit import SEEDS, Batch, fine, run, sink, times

from pipeflow import DROP, Dropped, Gather, Scatter, Stage, StallError, testing
from pipeflow.edge import Edge


@pytest.mark.axiom("1.1")
@pytest.mark.parametrize("seed", SEEDS)
def test_each_edge_sees_each_number_once_and_in_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A domain is 0, 1, 2 .. whatever starts it: a source, one-to-many, a gather, a list, `every`."""
    numbers: dict[str, list[int]] = {}
    put = Edge.put

    def noted(edge: Edge, seq: int, item: Any, charged: bool) -> bool:
        if edge.selects(seq):
            numbers.setdefault(str(edge), []).append(seq if edge.every == 1 else (seq + 1) // edge.every - 1)
        return put(edge, seq, item, charged)

    monkeypatch.setattr(Edge, "put", noted)
    stages = {
        "a": {"uses": "numbers", "with": {"count": 12}},
        "b": {"uses": "numbers", "with": {"count": 5}},
        "up": {"uses": "lift", "from": "a", "on": "cuda:0", "replicas": 2, "with": {"drops": [3, 4, 9]}},
        "also": {"uses": "lift", "from": "b", "on": "cuda:0", "in_flight": 2},
        "many": {"uses": "many", "from": "up", "on": "cuda:0"},
        "batch": {"uses": "batch", "from": "many", "on": "cuda:0", "with": {"size": 4}},
        "turns": {"uses": "work", "from": ["batch", "also"], "on": "cuda:0"},
        "third": {"uses": "sink", "from": "turns", "every": 3},
        "last": {"uses": "sink", "from": "turns"},
    }
    fine(run(stages, {"sink": sink([])}, seed=seed))
    counts = {name: len(seen) for name, seen in numbers.items()}
    assert all(seen == list(range(len(seen))) for seen in numbers.values()), numbers
    assert counts["up -> many"] == 12, "a gap has a number"
    assert counts["many -> batch"] == 27
    assert counts["batch -> turns"] == 7
    assert counts["turns > cpu -> last"] == 12
    assert counts["turns > cpu -> third"] == 4


@pytest.mark.axiom("1.2")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_gap_in_one_arm_of_a_diamond_is_one_of_the_join(seed: int) -> None:
    seen: list[Any] = []
    dropped = {1, 2, 3, 4, 9}
    stages = {
        "a": {"uses": "numbers", "with": {"count": 12}},
        "left": {"uses": "lift", "from": "a", "on": "cuda:0", "in_flight": 3, "with": {"drops": [*dropped]}},
        "right": {"uses": "lift", "from": "a", "on": "cuda:1", "with": {"slow": [0]}, "queue": {"items": 1}},
        "joined": {"uses": "work", "from": {"x": "left", "y": "right"}, "on": "cuda:0"},
        "batch": {"uses": "batch", "from": "joined", "on": "cuda:0", "with": {"size": 3}},
        "sink": {"uses": "sink", "from": "batch"},
    }
    ran = fine(run(stages, {"sink": sink(seen)}, seed=seed))
    live = [(n, n) for n in range(12) if n not in dropped]
    assert seen == [tuple(live[at : at + 3]) for at in range(0, 7, 3)], "a gather counts live items"
    assert ran.pipeline is not None
    assert ran.pipeline._assembly.runners["joined"].counters.gaps == len(dropped)


@pytest.mark.axiom("1.2")
def test_a_run_of_gaps_is_one_entry_and_holds_no_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand numbers are dropped in one arm while the other one stands at its first: the arm with the
    gaps goes on to its end, with a queue of two."""
    lengths: list[int] = []
    put = Edge.put

    def noted(edge: Edge, *arguments: Any) -> bool:
        taken = put(edge, *arguments)
        if str(edge) == "gaps -> joined":
            lengths.append(len(edge._queue))
        return taken

    monkeypatch.setattr(Edge, "put", noted)

    class Firsts(Stage[int, Any]):
        def run(self, item: int) -> Any:
            out = testing.empty(512)
            testing.kernel(1e-3, [], [out], lambda: item)
            return out if item in (0, 1001) else DROP

    class Late(Stage[int, int]):
        async def run(self, item: int) -> int:
            await asyncio.sleep(100 if item == 0 else 0)
            return item

    seen: list[Any] = []
    stages = {
        "a": {"uses": "numbers", "with": {"count": 1002}},
        "gaps": {"uses": "firsts", "from": "a", "on": "cuda:0"},
        "late": {"uses": "late", "from": "a", "queue": {"items": 2000}},
        "joined": {"uses": "work", "from": {"x": "gaps", "y": "late"}, "on": "cuda:0", "queue": {"items": 2}},
        "sink": {"uses": "sink", "from": "joined"},
    }
    ran = fine(run(stages, {"sink": sink(seen), "firsts": Firsts, "late": Late}))
    assert seen == [0, 1001]
    assert len(lengths) == 1002
    assert max(lengths) == 3, "two items, and between them all the gaps"
    assert max(times(ran, "launch", "gaps")) < 100


SPEEDS = {
    "a": {"uses": "numbers", "with": {"count": 10}},
    "first": {"uses": "lift", "from": "a", "on": "cuda:0", "replicas": 2, "with": {"slow": [0]}},
    "second": {"uses": "work", "from": "first", "on": "cuda:0", "queue": {"items": 12}, "in_flight": 12},
}
WIDE = {"cuda:0": {"width": 4}}


def launched(ran: testing.Simulated, stage: str) -> list[int]:
    """The items of a stage's kernels, as they were enqueued."""
    return [line[3] for line in ran.log if line[1:3] == ("launch", stage)]


@pytest.mark.axiom("1.3")
@pytest.mark.parametrize("seed", SEEDS)
def test_in_order_an_item_is_handed_over_before_its_fence_is_reached(seed: int) -> None:
    """Two lanes, one ten times as slow: all leave in order, and each as soon as its job returned: the next
    stage's kernel is enqueued while the one before it runs."""
    ran = fine(run(SPEEDS, seed=seed, devices=WIDE))
    assert launched(ran, "second") == list(range(10))
    for number in range(10):
        (ended,) = times(ran, "end", "first", number)
        (enqueued,) = times(ran, "launch", "second", number)
        assert enqueued < ended


@pytest.mark.axiom("1.3")
@pytest.mark.parametrize("seed", SEEDS)
def test_out_of_order_an_item_is_handed_over_once_its_fence_is_reached(seed: int) -> None:
    """Then a slow item holds up nobody, on the device neither: nothing behind it is enqueued before it."""
    stages = SPEEDS | {"first": SPEEDS["first"] | {"ordered": False}}
    ran = fine(run(stages, seed=seed, devices=WIDE))
    assert sorted(launched(ran, "second")) == list(range(10))
    assert launched(ran, "second")[0] != 0
    for number in range(10):
        (ended,) = times(ran, "end", "first", number)
        (enqueued,) = times(ran, "launch", "second", number)
        assert enqueued >= ended


@pytest.mark.axiom("1.4")
@pytest.mark.parametrize("seed", SEEDS)
def test_with_the_rule_off_a_join_across_a_gather_waits_for_ever_and_is_named(seed: int) -> None:
    """a > batch (gather) > both, a > c > both: the gather waits for items that `a` may not make while `c`
    waits for the gather."""
    stages = {
        "a": {"uses": "numbers", "with": {"count": 100}},
        "up": {"uses": "lift", "from": "a", "on": "cuda:0"},
        "batch": {"uses": "batch", "from": "up", "on": "cuda:0", "with": {"size": 8}, "queue": {"items": 1}},
        "c": {"uses": "work", "from": "up", "on": "cuda:0", "queue": {"items": 1}},
        "both": {"uses": "work", "from": {"x": "batch", "y": "c"}, "on": "cuda:0", "queue": {"items": 1}},
    }
    ran = run(stages, seed=seed, ignore=["unfed-join"])
    assert isinstance(ran.error, StallError)
    assert "up: waits for a credit on up -> c" in str(ran.error)
    assert "both: waits for its partners from batch" in str(ran.error)


@pytest.mark.axiom("1.5")
@pytest.mark.parametrize("seed", SEEDS)
def test_every_selects_by_number_through_replicas_gaps_and_disorder(seed: int) -> None:
    seen: list[Any] = []

    class Sink(Stage[Any, None]):
        def run(self, item: Any, ctx: Any) -> None:
            seen.append((ctx.sequence, testing.read(item)))

    stages = {
        "a": {"uses": "numbers", "with": {"count": 24}},
        "up": {
            "uses": "lift", "from": "a", "on": "cuda:0", "replicas": 3, "ordered": False,
            "with": {"slow": [0, 7, 8], "drops": [4, 5, 6, 16]},
        },
        "some": {"uses": "some", "from": "up", "every": 3},
    }  # fmt: skip
    fine(run(stages, {"some": Sink}, seed=seed, devices=WIDE))
    assert sorted(seen) == [(k, 3 * k + 2) for k in range(8) if 3 * k + 2 != 5]


@pytest.mark.axiom("1.6")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_scatter_finds_the_submit_of_each_member(seed: int) -> None:
    """Of what is gathered on a device, dropped members and batches that `linger` closed early."""

    class Twice(Gather[Any, Any]):
        linger = 5.0

        def full(self, members: Any) -> bool:
            return len(members) == 4

        def run(self, items: list[Any]) -> Scatter[Any]:
            outs = [testing.empty(512) for _ in items]
            for item, out in zip(items, outs, strict=True):
                testing.kernel(1.0, [item], [out], lambda value: value * 2)
            return Scatter([DROP if k == 2 else out for k, out in enumerate(outs)])

    async def act(pipeline: Any) -> Any:
        def late(number: int) -> Any:
            async def submit() -> Any:
                await asyncio.sleep(0.5 * number)
                return testing.read(await pipeline.submit(number))

            return submit()

        return await asyncio.gather(*map(late, range(10)), return_exceptions=True)

    stages = {
        "in": {"uses": "input"},
        "up": {"uses": "lift", "from": "in", "on": "cuda:0", "replicas": 2, "with": {"slow": [1]}},
        "twice": {"uses": "twice", "from": "up", "on": "cuda:0"},
        "out": {"uses": "output", "from": "twice"},
    }
    ran = fine(run(stages, {"twice": Twice}, seed=seed, act=act))
    assert len(ran.value) == 10
    for number, result in enumerate(ran.value):
        assert isinstance(result, Dropped) or result == 2 * number, (number, result)
    assert sum(isinstance(result, Dropped) for result in ran.value) in (2, 3)


@pytest.mark.axiom("1.6")
def test_no_batch_leaves_before_it_is_full_or_its_time_is_over() -> None:
    sizes: list[int] = []

    class Lingers(Batch):
        linger = 7.0

        def run(self, items: list[Any], ctx: Any) -> Any:
            sizes.append(len(items))
            return super().run(items, ctx)

    async def act(pipeline: Any) -> None:
        async def after(seconds: float) -> None:
            await asyncio.sleep(seconds)
            pipeline.drain()

        task = asyncio.ensure_future(after(1000))
        await pipeline.run()
        task.cancel()

    class Slow(Stage[Any, Any]):
        async def run(self, item: Any) -> Any:
            await asyncio.sleep(3)
            return item

    stages = {
        "a": {"uses": "numbers", "with": {"count": 8}},
        "slow": {"uses": "slow", "from": "a"},
        "up": {"uses": "lift", "from": "slow", "on": "cuda:0", "with": {"seconds": 0.01}},
        "batch": {"uses": "lingers", "from": "up", "on": "cuda:0", "with": {"size": 5, "seconds": 0.01}},
    }
    fine(run(stages, {"lingers": Lingers, "slow": Slow}, act=act))
    assert sizes == [3, 3, 2], "one each 3 s, at most 7 s after the first"
