"""`--debug-sync` waits for the device after every launch; what stages log and report is fetched behind it."""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pipeflow import stage
from pipeflow.device import base
from pipeflow.device.base import imported_torch
from pipeflow.lane import Lane
from pipeflow.stage import Stage

if TYPE_CHECKING:
    from pathlib import Path


@stage
def rows():
    for number in range(6):
        yield torch.full((4,), float(number))


class Scale(Stage):
    device = True

    def run(self, item, ctx):
        out = item * 2
        ctx.log(mean=out.mean())
        ctx.report(last=out.sum())
        return out


async def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, debug_sync: bool) -> tuple[list[bool], Any]:
    """Whether each launch's mark was passed when it returned, and the summary."""
    import pipeflow

    passed: list[bool] = []
    launch = Lane.launch

    def watched(self: Lane, *arguments: Any) -> Any:
        launched = launch(self, *arguments)
        if self.name == "scale":
            passed.append(launched.mark.passed())
        return launched

    monkeypatch.setattr(Lane, "launch", watched)
    registry = pipeflow.Registry()
    registry.add("rows", rows)
    registry.add("scale", Scale)
    file = {
        "pipeflow": 1,
        "name": "t",
        "stages": {"rows": {"uses": "rows"}, "scale": {"uses": "scale", "from": "rows", "on": "cpu-late"}},
    }
    async with pipeflow.open(file, registry=registry, run_dir=tmp_path, debug_sync=debug_sync) as pipeline:
        return passed, await pipeline.run()


def test_debug_sync_waits_for_every_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    passed, summary = asyncio.run(_run(tmp_path / "a", monkeypatch, True))
    assert passed == [True] * 6
    assert summary["last"] == 40.0
    passed, summary = asyncio.run(_run(tmp_path / "b", monkeypatch, False))
    assert not all(passed)
    assert summary["last"] == 40.0


@pytest.mark.axiom("4.2")
def test_reported_tensors_are_fetched_by_the_lane_not_by_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a look from the loop would be a look on another stream."""
    import asyncio

    from pipeflow.device.cpu_late import CpuLate

    fetched: list[float] = []
    to_host = CpuLate.to_host

    def watched(self: CpuLate, value: Any, stream: Any) -> Any:
        fetched.append(value.item())
        return to_host(self, value, stream)

    monkeypatch.setattr(CpuLate, "to_host", watched)
    asyncio.run(_run(tmp_path, monkeypatch, False))
    assert fetched == [value for n in range(6) for value in (n * 2.0, n * 8.0)]


def test_a_torch_that_is_half_imported_is_none_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    assert imported_torch() is torch
    monkeypatch.setattr(base, "_torch", None)  # as in a process that has not seen it whole yet
    monkeypatch.setattr(base, "_types", ())
    half = types.ModuleType("torch")
    half.__spec__ = types.SimpleNamespace(_initializing=True)  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "torch", half)
    assert imported_torch() is None
    assert not list(base.tensors_in([1]))
    monkeypatch.delitem(sys.modules, "torch")
    assert imported_torch() is None
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert imported_torch() is torch
    assert list(base.tensors_in([torch.ones(1)]))
