# ruff: noqa: TC003 - stages as an author writes them; annotations are read at run time
"""`cpu-late`: results are there once their fence is reached, and gone once the item is retired. Planted
faults show in the result; honest stages give what they give on `cpu`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from flows import fine, go

from pipeflow import Gather, Resource, stage
from pipeflow.stage import Stage


@stage
def rows():
    for number in range(12):
        yield torch.full((4,), float(number))


class Scale(Stage):
    device = True

    def run(self, item):
        return {"x": item * 2, "same": item}


class Pairs(Gather):
    device = True

    def full(self, members):
        return len(members) == 2

    def run(self, items: list) -> Any:
        return torch.stack([item["x"] + item["same"] for item in items]).sum(0)


class Spread(Stage):
    device = True

    def run(self, item):
        yield item[:2]
        yield item[2:] + 1


class Learn(Stage):
    """Adds what it gets to a weight, and hands on a copy."""

    device = True

    def run(self, item, ctx):
        weight = ctx.write("weight")
        weight.add_(item)
        ctx.log(total=weight.sum())
        return weight.clone()


class Weight(Resource):
    def open(self, ctx):
        return torch.zeros(2)


HONEST = {"scale": Scale, "pairs": Pairs, "spread": Spread, "learn": Learn, "weight": Weight, "rows": rows}


def run(folder: Path, device: str, uses: dict[str, Any], stages: dict[str, Any]) -> tuple[list[Any], Any]:
    seen: list[Any] = []

    @stage
    def sink(item) -> None:
        seen.append(item.clone() if isinstance(item, torch.Tensor) else item)

    placed = {
        name: spec | ({"on": device} if name not in ("rows", "sink") else {}) for name, spec in stages.items()
    }
    more = {"resources": {"weight": {"uses": "weight"}}} if "learn" in stages else {}
    outcome = fine(go(folder, placed, uses | {"sink": sink}, **more))
    return seen, outcome


CHAIN = {
    "rows": {"uses": "rows"},
    "scale": {"uses": "scale", "from": "rows", "replicas": 2},
    "pairs": {"uses": "pairs", "from": "scale"},
    "spread": {"uses": "spread", "from": "pairs"},
    "learn": {"uses": "learn", "from": "spread", "writes": "weight"},
    "sink": {"uses": "sink", "from": "learn"},
}


@pytest.mark.parametrize("launcher", ["thread", "inline"])
def test_honest_stages_give_the_same_bits(tmp_path: Path, launcher: str) -> None:
    stages = CHAIN | {"scale": CHAIN["scale"] | {"launcher": launcher}}
    now, outcome = run(tmp_path / "cpu", "cpu", HONEST, stages)
    late, late_outcome = run(tmp_path / "late", "cpu-late", HONEST, stages)
    assert len(now) == len(late) == 12
    assert all(torch.equal(a, b) for a, b in zip(now, late, strict=True))
    assert [line["total"] for line in outcome.lines("metrics.jsonl") if "total" in line] == [
        line["total"] for line in late_outcome.lines("metrics.jsonl") if "total" in line
    ]
    assert late_outcome.engine.poisons.poisoned > 0
    assert late_outcome.engine.poisons._live == {}


PEEKS = {
    "rows": {"uses": "rows"},
    "scale": {"uses": "scale", "from": "rows"},
    "peeks": {"uses": "peeks", "from": "scale"},
    "sink": {"uses": "sink", "from": "peeks"},
}


def test_a_read_on_another_lane_before_the_fence_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted in the engine: a lane does not wait for its input's mark."""

    class Peeks(Stage):
        device = True

        def run(self, item):
            return item["x"] + 0

    uses = HONEST | {"peeks": Peeks}
    assert all(not t.isnan().any() for t in run(tmp_path / "1", "cpu-late", uses, PEEKS)[0])
    monkeypatch.setattr("pipeflow.launching._marks_of_inputs", lambda job: [])
    monkeypatch.setattr("pipeflow.device.cpu_late.LAG", 0.05)
    seen, _ = run(tmp_path / "2", "cpu-late", uses, PEEKS)
    assert any(t.isnan().any() for t in seen)


@pytest.mark.axiom("4.8")
def test_a_host_stage_that_does_not_wait_for_the_fence_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeflow.runner import Runner

    stages = {name: spec for name, spec in PEEKS.items() if name != "peeks"}
    stages["sink"] = stages["sink"] | {"from": "read"}
    stages["read"] = {"uses": "read", "from": "scale"}

    @stage
    def read(item) -> float:
        return float(item["x"].sum())

    stages = {
        "rows": stages["rows"],
        "scale": stages["scale"],
        "read": stages["read"],
        "sink": stages["sink"],
    }
    uses = HONEST | {"read": read}

    def host_reads(folder: Path) -> list[float]:
        seen: list[float] = []

        @stage
        def sink(item) -> None:
            seen.append(item)

        placed = stages | {"scale": stages["scale"] | {"on": "cpu-late"}}
        fine(go(folder, placed, uses | {"sink": sink}))
        return seen

    assert host_reads(tmp_path / "1") == [8.0 * n for n in range(12)]
    monkeypatch.setattr(Runner, "_awaits", lambda runner, taken: False)
    monkeypatch.setattr("pipeflow.device.cpu_late.LAG", 0.05)
    assert any(math.isnan(value) for value in host_reads(tmp_path / "2"))


@pytest.mark.parametrize("as_view", [False, True])
def test_a_kept_input_shows(tmp_path: Path, as_view: bool) -> None:
    class Keeps(Stage):
        device = True

        def setup(self, ctx):
            self.last = None

        def run(self, item):
            last, self.last = self.last, item["x"][:2] if as_view else item["x"]
            return torch.zeros(1) if last is None else last.sum()[None]

    seen, _ = run(tmp_path / "cpu", "cpu", HONEST | {"peeks": Keeps}, PEEKS)
    assert not any(t.isnan().any() for t in seen)
    seen, _ = run(tmp_path / "late", "cpu-late", HONEST | {"peeks": Keeps}, PEEKS)
    assert any(t.isnan().any() for t in seen)


def test_a_stages_own_tensors_are_never_overwritten(tmp_path: Path) -> None:
    """A source that yields rows of a data set that it keeps, twice over."""
    held = [torch.full((4,), float(number)) for number in range(4)]

    @stage
    def epochs():
        for _ in range(2):
            yield from held

    seen, _ = run(tmp_path, "cpu-late", HONEST | {"rows": epochs, "peeks": Last}, PEEKS)
    assert [float(t[0]) for t in seen] == [2.0 * n for n in range(4)] * 2
    assert all(not t.isnan().any() for t in held)


class Last(Stage):
    device = True

    def run(self, item):
        return item["x"]


def test_an_async_stage_waits_for_its_inputs_too(tmp_path: Path) -> None:
    class Async(Stage):
        device = True

        async def run(self, item, ctx):
            total = await ctx.enqueue(lambda: item["x"] + 1)
            ctx.log(first=total[0])
            return total

    uses = HONEST | {"peeks": Async}
    seen, outcome = run(tmp_path, "cpu-late", uses, PEEKS)
    assert [float(t[0]) for t in seen] == [2.0 * n + 1 for n in range(12)]
    assert [line["first"] for line in outcome.lines("metrics.jsonl")] == [2.0 * n + 1 for n in range(12)]


def test_an_async_job_gets_no_input_before_its_fence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeflow.launching._marks_of_inputs", lambda job: [])
    monkeypatch.setattr("pipeflow.device.cpu_late.LAG", 0.05)
    with pytest.raises(AssertionError):
        test_an_async_stage_waits_for_its_inputs_too(tmp_path)
