"""A stage that writes into its input must say so, and no autograd graph crosses an edge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from flows import fine, go

from pipeflow import StageError, stage

if TYPE_CHECKING:
    from pathlib import Path


@stage
def rows():
    for number in range(3):
        yield {"x": torch.full((2,), float(number))}


@stage
def writes(item: dict) -> dict:
    item["x"] += 1
    return item


@stage(mutates=True)
def says_so(item: dict) -> dict:
    item["x"] += 1
    return item


@stage
async def writes_async(item: dict) -> dict:
    item["x"].zero_()
    return item


@stage
def copies(item: dict) -> dict:
    return {"x": item["x"] + 1}


@stage
def keeps_its_graph(item: dict) -> Any:
    weight = torch.ones(2, requires_grad=True)
    return [item["x"] * weight]


@stage
def detaches(item: dict) -> Any:
    weight = torch.ones(2, requires_grad=True)
    return [(item["x"] * weight).detach()]


def run(tmp_path: Path, work: Any, on: str | None = None) -> Any:
    middle = {"uses": "work", "from": "rows"} | ({"on": on} if on else {})
    stages = {"rows": {"uses": "rows"}, "work": middle}
    return go(tmp_path, stages, {"rows": rows, "work": work})


@pytest.mark.parametrize("on", [None, "cpu", "cpu-late"])
def test_a_write_into_the_input_is_refused(tmp_path: Path, on: str | None) -> None:
    error = run(tmp_path, writes, on).error
    assert isinstance(error, StageError)
    assert "wrote into its input, a tensor of shape (2,)" in str(error)
    assert (error.stage, error.sequence) == ("work", 0)


def test_a_write_of_an_async_stage_too(tmp_path: Path) -> None:
    assert "wrote into its input" in str(run(tmp_path, writes_async).error)


@pytest.mark.parametrize("work", [says_so, copies, detaches])
def test_what_is_declared_or_copied_passes(tmp_path: Path, work: Any) -> None:
    fine(run(tmp_path, work, "cpu"))


def test_an_output_with_a_graph_is_refused(tmp_path: Path) -> None:
    error = run(tmp_path, keeps_its_graph, "cpu").error
    assert isinstance(error, StageError)
    assert "with a grad_fn, and autograd crosses no edge" in str(error)
    assert error.stage == "work"


def test_inference_tensors_pass(tmp_path: Path) -> None:
    @stage
    def infers(item: dict) -> Any:
        with torch.inference_mode():
            return item["x"] * 2

    @stage
    def again(item: Any) -> Any:
        with torch.inference_mode():
            return item * 2

    stages = {
        "rows": {"uses": "rows"},
        "a": {"uses": "infers", "from": "rows", "on": "cpu"},
        "b": {"uses": "again", "from": "a", "on": "cpu"},
    }
    fine(go(tmp_path, stages, {"rows": rows, "infers": infers, "again": again}))
