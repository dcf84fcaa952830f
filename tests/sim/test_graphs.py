"""Random graphs x durations x faults x cancels on the simulated machine: every promise, on every one.

A failure names its seed and the few stages that still fail: `graphs.check(SEED, without=..)` runs it again.
`python tests/sim/test_graphs.py FIRST COUNT PROCESSES` runs more of them.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections import Counter

import graphs
import pytest

COUNT = 10_000
CHUNK = 250


def some(first: int, count: int = CHUNK) -> tuple[Counter[str], list[int]]:
    """Traits of these seeds, and the seeds that fail."""
    traits: Counter[str] = Counter()
    failing: list[int] = []
    for seed in range(first, first + count):
        try:
            traits.update(graphs.check(seed))
        except Exception:
            failing.append(seed)
    return traits, failing


def many(first: int, count: int, processes: int) -> tuple[Counter[str], list[int]]:
    """The same for many, on several processes."""
    starts = range(first, first + count, CHUNK)
    traits: Counter[str] = Counter()
    failing: list[int] = []
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=8) as pool:
        for found, failed in pool.starmap(some, [(at, min(CHUNK, first + count - at)) for at in starts]):
            traits.update(found)
            failing += failed
    return traits, sorted(failing)


@pytest.mark.axiom("1.1", "2.1")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("first", range(0, COUNT, 500))
def test_ten_thousand_graphs_keep_every_promise(first: int) -> None:
    failing = some(first, 500)[1]
    if failing:
        without, error = graphs.shrink(failing[0])
        left = graphs.Drawn(failing[0], without).document["stages"]
        raise AssertionError(
            f"{len(failing)} of 500 fail: seeds {failing[:20]}.\nSeed {failing[0]} without "
            f"{sorted(without)} still does: {error!r}\n{left}"
        ) from error


def test_at_least_three_in_ten_have_each_of_the_hard_parts() -> None:
    traits: Counter[str] = Counter()
    for seed in range(COUNT):
        traits.update(graphs.Drawn(seed).traits)
    for trait in ("fan-in", "replicas", "barrier", "fault", "cancel"):
        assert traits[trait] >= 0.3 * COUNT, f"{trait}: {traits[trait]}"


@pytest.mark.parametrize("seed", range(20))
def test_the_same_seed_gives_the_same_run(seed: int) -> None:
    first, second = (graphs.run(graphs.Drawn(seed)) for _ in range(2))
    assert first.log == second.log
    assert repr(first.error) == repr(second.error)
    assert first.lines("metrics.jsonl") == second.lines("metrics.jsonl")


def test_a_failing_seed_shrinks_to_few_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault of the engine: emission in order forgets to wait for the oldest job."""
    from pipeflow.edge import Edge

    put = Edge.put
    monkeypatch.setattr(
        Edge, "put", lambda self, seq, item, charged: put(self, seq + (seq > 2), item, charged)
    )
    failing = next(seed for seed in range(100) if some(seed, 1)[1])
    without, _ = graphs.shrink(failing)
    assert len(graphs.Drawn(failing, without).stages) <= 3


if __name__ == "__main__":
    start, total, workers = (int(text) for text in sys.argv[1:4])
    begun = time.monotonic()
    shares, seeds = many(start, total, workers)
    shown = ", ".join(f"{name} {count / total:.0%}" for name, count in sorted(shares.items()))
    print(
        f"{total} graphs from seed {start} in {time.monotonic() - begun:.0f} s:",
        f"{len(seeds)} fail {seeds[:50]}",
    )
    print(shown)
    sys.exit(bool(seeds))
