"""The engine on every device: the same files, the same results, and logs that keep every promise."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from flow_stages import SKIPPED, registry
from targets import Ran, Target, make, value_of

from pipeflow import Cancelled, Context, Stage
from pipeflow.checker import Broken

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

pytestmark = pytest.mark.axiom("9.3")

COUNT = 12
ON_HOST = ("numbers", "sink", "barrier", "publish", "release_cache", "input", "output")


class Runs:
    """Runs files on one device."""

    def __init__(self, target: Target, folder: Path) -> None:
        self.target = target
        self.folder = folder
        self.seen: list[Any] = []
        """What the sink got."""

    def __call__(
        self,
        stages: Mapping[str, Any],
        *,
        act: Any = None,
        uses: Any = None,
        hazards: bool = False,
        **more: Any,
    ) -> Ran:
        """Stages behind `x`, which makes a tensor of each number on the device; all but those of the host run
        there too. `hazards`: a device that checks accesses may find some."""
        first: dict[str, Any] = {"numbers": {"uses": "numbers"}, "x": {"uses": "load", "from": "numbers"}}
        if "x" in stages or any(spec["uses"] == "input" for spec in stages.values()):
            first = {}
        found = {name: dict(spec) for name, spec in (first | dict(stages)).items()}
        for spec in found.values():
            if spec["uses"] not in ON_HOST:
                spec["on"] = self.target.on
        document = {"pipeflow": 1, "name": "t", "stages": found, **more}
        ran = self.target.run(self.folder, document, registry(self.seen, **(uses or {})), act)
        assert hazards or not ran.hazards, ran.hazards[0]
        return ran


@pytest.fixture
def runs(target: Target, tmp_path: Path) -> Runs:
    return Runs(target, tmp_path / "run")


def test_a_chain_over_two_streams(runs: Runs) -> None:
    ran = runs(
        {
            "a": {"uses": "add", "from": "x", "in_flight": 3},
            "b": {"uses": "add", "from": "a", "with": {"n": 10}, "in_flight": 2},
            "sink": {"uses": "sink", "from": "b"},
        }
    )
    ran.check()
    assert runs.seen == [n + 11 for n in range(COUNT)]
    if runs.target.name != "cpu":
        assert ran.count("wait") > 0, "no stream waited for another"


def test_a_diamond_with_a_join(runs: Runs) -> None:
    runs(
        {
            "a": {"uses": "add", "from": "x", "in_flight": 2},
            "b": {"uses": "add", "from": "x", "with": {"n": 5, "drops": 3}},
            "join": {"uses": "sum", "from": {"a": "a", "b": "b"}},
            "sink": {"uses": "sink", "from": "join"},
        }
    ).check()
    assert runs.seen == [n + 1 + 100 * (n + 5) for n in range(COUNT) if n != 3]


def test_a_gather(runs: Runs) -> None:
    runs(
        {
            "a": {"uses": "add", "from": "x", "in_flight": 4, "with": {"drops": 1}},
            "three": {"uses": "three", "from": "a", "queue": {"items": 2}},
            "sink": {"uses": "sink", "from": "three"},
        }
    ).check()
    live = [n + 1 for n in range(COUNT) if n != 1]
    assert runs.seen == [sum(live[at : at + 3]) for at in range(0, len(live), 3)]


def test_one_to_many(runs: Runs) -> None:
    runs(
        {
            "spread": {"uses": "spread", "from": "x", "queue": {"items": 1}},
            "a": {"uses": "add", "from": "spread", "queue": {"items": 1}},
            "sink": {"uses": "sink", "from": "a"},
        }
    ).check()
    assert runs.seen == [n + 1000 * part + 1 for n in range(COUNT) for part in range(2)]


@pytest.mark.parametrize("ordered", [True, False])
def test_replicas(runs: Runs, ordered: bool) -> None:
    runs(
        {
            "a": {"uses": "add", "from": "x", "replicas": 3, "in_flight": 2, "ordered": ordered},
            "b": {"uses": "add", "from": "a"},
            "sink": {"uses": "sink", "from": "b"},
        }
    ).check()
    assert (runs.seen if ordered else sorted(runs.seen)) == [n + 2 for n in range(COUNT)]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("snapshot", [False, True])
def test_a_reader_sees_the_version_of_its_item(runs: Runs, every: int, snapshot: bool) -> None:
    ran = runs(
        {
            "w": {"uses": "writes", "from": "x", "writes": "box", "in_flight": 2},
            "r": {"uses": "reads", "from": "w", "reads": "box", "every": every, "snapshot": snapshot},
            "sink": {"uses": "sink", "from": "r"},
        },
        resources={"box": {"uses": "box"}},
    )
    ran.check()
    assert runs.seen == [n + 1000 * sum(range(n + 1)) for n in range(COUNT) if (n + 1) % every == 0]
    assert ran.count("version") == COUNT
    assert {entry[4] for entry in ran.log.entries if entry[1] == "submit"} >= (
        {"copy"} if snapshot else {"job"}
    )


def test_a_barrier_with_a_release_every_second_item(runs: Runs) -> None:
    ran = runs(
        {
            "a": {"uses": "add", "from": "x", "in_flight": 4},
            "quiet": {"uses": "barrier", "from": "a", "every": 2},
            "release": {"uses": "release_cache", "from": "quiet"},
            "publish": {"uses": "publish", "from": "release"},
            "told": {"uses": "sink", "from": "publish"},
            "b": {"uses": "add", "from": "a"},
            "bs": {"uses": "sink", "from": "b"},
        }
    )
    ran.check()
    assert sorted(runs.seen) == sorted([*range(COUNT // 2), *[n + 2 for n in range(COUNT)]])
    for kind in ("close", "drain", "release", "open"):
        assert ran.count(kind) >= COUNT // 2, kind
    assert ran.count("section") == COUNT


@pytest.mark.parametrize("policy", ["skip", "retry"])
def test_an_item_that_raises(runs: Runs, policy: str) -> None:
    times = 0 if policy == "skip" else 2
    runs(
        {
            "a": {
                "uses": "add", "from": "x", "in_flight": 3, "on_error": {policy: 2},
                "with": {"raises": SKIPPED, "times": times},
            },
            "sink": {"uses": "sink", "from": "a"},
        }
    ).check()  # fmt: skip
    assert runs.seen == [n + 1 for n in range(COUNT) if policy == "retry" or n != SKIPPED]


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_cancel_half_way(runs: Runs, after: int) -> None:
    """Whatever is in work is awaited; nothing is given back under it."""

    async def act(pipeline: Any) -> None:
        running = asyncio.ensure_future(pipeline.run())
        while len(runs.seen) < after:
            await pipeline.engine.next_progress()
        pipeline.cancel()
        await running

    ran = runs(
        {
            "numbers": {"uses": "numbers", "with": {"count": 10_000}},
            "x": {"uses": "load", "from": "numbers"},
            "a": {"uses": "add", "from": "x", "in_flight": 3},
            "three": {"uses": "three", "from": "a"},
            "quiet": {"uses": "barrier", "from": "three", "every": 2},
            "release": {"uses": "release_cache", "from": "quiet"},
            "b": {"uses": "add", "from": "a"},
            "sink": {"uses": "sink", "from": "b"},
        },
        act=act,
    )
    assert isinstance(ran.error, Cancelled)
    ran.checked()
    assert runs.seen == [n + 2 for n in range(len(runs.seen))]
    assert len(runs.seen) >= after
    assert ran.count("failed") == 1


def test_a_fault_in_the_middle(runs: Runs) -> None:
    ran = runs(
        {
            "a": {"uses": "add", "from": "x", "in_flight": 3, "with": {"raises": SKIPPED}},
            "sink": {"uses": "sink", "from": "a"},
        }
    )
    assert f"stage 'a', item {SKIPPED}" in str(ran.error)
    ran.checked()


class Entry(Stage[int, Any]):
    """A caller's number as a tensor."""

    device = True

    def run(self, item: int, ctx: Context) -> Any:
        return make(ctx, lambda: item, slow=item % 2 == 0)


def test_submits_get_their_own_results(runs: Runs) -> None:
    async def act(pipeline: Any) -> list[Any]:
        answers = await asyncio.gather(*[pipeline.submit(n) for n in range(COUNT)])
        return [value_of(answer) for answer in answers]

    ran = runs(
        {
            "in": {"uses": "input"},
            "entry": {"uses": "entry", "from": "in", "in_flight": 2},
            "a": {"uses": "add", "from": "entry", "replicas": 2, "ordered": False},
            "out": {"uses": "output", "from": "a"},
        },
        act=act,
        uses={"entry": Entry},
    )
    ran.check()
    assert ran.value == [n + 1 for n in range(COUNT)]


def test_an_async_stage_launches_at_its_gate(runs: Runs) -> None:
    ran = runs(
        {
            "later": {"uses": "later", "from": "x", "in_flight": 3},
            "quiet": {"uses": "barrier", "from": "later", "every": 3},
            "publish": {"uses": "publish", "from": "quiet"},
            "sink": {"uses": "sink", "from": "later"},
            "told": {"uses": "sink", "from": "publish"},
        }
    )
    ran.check()
    assert sorted(runs.seen) == sorted([*range(COUNT // 3), *[2 * (n + 1) for n in range(COUNT)]])
    assert sum(entry[1] == "submit" and entry[4] == "enqueue" for entry in ran.log.entries) >= 2 * COUNT


def test_one_wait_removed_is_told_by_the_log(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: streams that do not wait for what they read. (On the cpu there is nothing to wait
    for: work is done as its job returns.)"""
    monkeypatch.setattr("pipeflow.launching._marks_of_inputs", lambda job: [])

    def run() -> Ran:
        return runs({"a": {"uses": "add", "from": "x"}, "b": {"uses": "add", "from": "a"},
                     "sink": {"uses": "sink", "from": "b"}}, hazards=True)  # fmt: skip

    if runs.target.name == "cpu":
        run().check()
        return
    with pytest.raises(Broken, match="began before it waited for") as found:
        run().checked()
    assert found.value.axiom == "4.1"
