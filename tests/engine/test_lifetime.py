"""A stage that writes into its input must say so, and no autograd graph crosses an edge."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from flows import collector, fine, go

import pipeflow
from pipeflow import Stage, StageError, stage

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


@pytest.mark.axiom("4.5")
@pytest.mark.parametrize("on", [None, "cpu", "cpu-late"])
def test_a_write_into_the_input_is_refused(tmp_path: Path, on: str | None) -> None:
    error = run(tmp_path, writes, on).error
    assert isinstance(error, StageError)
    assert "wrote into its input, a tensor of shape (2,)" in str(error)
    assert (error.stage, error.sequence) == ("work", 0)


def test_a_write_of_an_async_stage_too(tmp_path: Path) -> None:
    assert "wrote into its input" in str(run(tmp_path, writes_async).error)


@pytest.mark.axiom("4.5")
@pytest.mark.parametrize("work", [says_so, copies, detaches])
def test_what_is_declared_or_copied_passes(tmp_path: Path, work: Any) -> None:
    fine(run(tmp_path, work, "cpu"))


@pytest.mark.axiom("4.7")
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


# A stage's own buffer (axiom 4.6) -------------------------------------------------------------------


class Ring(Stage[int, Any]):
    """Returns one buffer again and again."""

    def setup(self, context: Any) -> None:
        self.buffer = torch.zeros(4)

    def run(self, item: int) -> Any:
        self.buffer.fill_(item)
        return self.fresh(self.buffer)

    def fresh(self, tensor: torch.Tensor) -> Any:
        return tensor


class RingOfViews(Ring):
    def fresh(self, tensor: torch.Tensor) -> Any:
        return {"x": tensor[:2].detach()}


class InferenceRing(Ring):
    def setup(self, context: Any) -> None:
        with torch.inference_mode():
            self.buffer = torch.zeros(4)

    def run(self, item: int) -> Any:
        with torch.inference_mode():
            self.buffer.fill_(item)
            return self.buffer[1:]


class Copies(Ring):
    def fresh(self, tensor: torch.Tensor) -> Any:
        return tensor.clone()


class Constant(Ring):
    def run(self, item: int) -> Any:
        return self.buffer


def ring(tmp_path: Path, maker: Any, consumer: Any, on: str = "cpu", count: int = 3) -> Any:
    stages = {
        "a": {"uses": "numbers", "with": {"count": count}},
        "ring": {"uses": "maker", "from": "a", "on": on, "launcher": "thread"},
        "sink": {"uses": "consumer", "from": "ring"},
    }
    return go(tmp_path, stages, {"maker": maker, "consumer": consumer})


@pytest.mark.axiom("4.6")
@pytest.mark.parametrize("maker", [Ring, RingOfViews, InferenceRing])
@pytest.mark.parametrize("on", ["cpu", "cpu-late"])
def test_a_buffer_handed_on_again_while_an_item_needs_it_is_an_error(
    tmp_path: Path, maker: type[Ring], on: str
) -> None:
    @stage
    def holds(item: Any, ctx: pipeflow.Context) -> None:
        assert ctx._stop.wait(10), "nobody noticed"

    error = ring(tmp_path, maker, holds, on).error
    assert isinstance(error, StageError)
    assert (error.stage, error.sequence) == ("ring", 0)
    assert "Return a new tensor for each item" in str(error)


@pytest.mark.axiom("4.6")
@pytest.mark.parametrize("on", ["cpu", "cpu-late"])
def test_a_buffer_written_again_while_an_item_needs_it_is_an_error(tmp_path: Path, on: str) -> None:
    """Item 1 waits in the queue while its memory is written for item 2, which gets new memory."""
    written = threading.Event()

    class Once(Ring):
        def run(self, item: int) -> Any:
            if item != 1:
                value = torch.zeros(4)
            if item == 2:
                self.buffer.fill_(item)
                written.set()
            return self.buffer if item == 1 else value

    @stage
    def holds(item: Any) -> None:
        assert written.wait(10)

    error = ring(tmp_path, Once, holds, on).error
    assert isinstance(error, StageError)
    assert (error.stage, error.sequence) == ("ring", 1)
    assert "was overwritten before stage 'sink' read it" in str(error)


def test_a_buffer_written_while_it_is_read_names_both(tmp_path: Path) -> None:
    reading, written = threading.Event(), threading.Event()

    class Once(Ring):
        def run(self, item: int) -> Any:
            if item:
                assert reading.wait(10)
            super().run(item)
            if item:
                written.set()
            return self.buffer if item == 0 else self.buffer.clone()

    @stage
    def holds(item: Any) -> None:
        reading.set()
        assert written.wait(10)

    error = ring(tmp_path, Once, holds, count=2).error
    assert isinstance(error, StageError)
    assert "stage 'sink', item 0" in str(error)
    assert "Or stage 'ring', which made it, filled it again meanwhile" in str(error)


@pytest.mark.parametrize("maker", [Copies, Constant])
def test_new_memory_and_one_never_written_pass(tmp_path: Path, maker: type[Ring]) -> None:
    outcome = fine(ring(tmp_path, maker, collector([]), count=40))
    assert len(outcome.engine.storages) == 0


@pytest.mark.axiom("4.6")
def test_a_buffer_filled_in_time_passes(tmp_path: Path) -> None:
    """With one item alive at a time the ring of one is right: nobody reads what is overwritten."""
    seen: list[float] = []

    @stage
    def sink(item: Any) -> None:
        seen.append(float(item[0]))

    stages = {
        "a": {"uses": "numbers", "with": {"count": 5}},
        "ring": {"uses": "ring", "from": "a", "on": "cpu"},
        "sink": {"uses": "sink", "from": "ring", "queue": {"items": 1}},
    }
    fine(go(tmp_path, stages, {"ring": Ring, "sink": sink}))
    assert seen == [0, 1, 2, 3, 4]


def test_slices_of_one_inference_tensor_pass(tmp_path: Path) -> None:
    @stage
    def split(item: int) -> Any:
        with torch.inference_mode():
            rows = torch.arange(6.0).reshape(3, 2) + item
        yield from rows

    seen: list[float] = []

    @stage
    def sink(item: Any) -> None:
        seen.append(float(item.sum()))

    stages = {
        "a": {"uses": "numbers", "with": {"count": 3}},
        "split": {"uses": "split", "from": "a", "on": "cpu"},
        "sink": {"uses": "sink", "from": "split"},
    }
    fine(go(tmp_path, stages, {"split": split, "sink": sink}))
    assert seen == [1.0 + 4 * k + 2 * n for n in range(3) for k in range(3)]


@pytest.mark.parametrize("on", ["cpu", "cpu-late"])
def test_a_declared_write_into_a_handed_on_input_is_no_rewrite(tmp_path: Path, on: str) -> None:
    """rows > passes (the input itself) > says_so (writes it): each the only reader of what it gets."""

    @stage
    def passes(item: dict) -> dict:
        return {"x": item["x"]}

    seen: list[float] = []

    @stage
    def sink(item: dict) -> None:
        seen.append(float(item["x"][0]))

    stages = {
        "rows": {"uses": "rows", "on": on},
        "passes": {"uses": "passes", "from": "rows", "on": on},
        "adds": {"uses": "says_so", "from": "passes", "on": on},
        "sink": {"uses": "sink", "from": "adds"},
    }
    fine(go(tmp_path, stages, {"rows": rows, "passes": passes, "says_so": says_so, "sink": sink}))
    assert seen == [1.0, 2.0, 3.0]


# What a caller gets is his own (axiom 4.9) ---------------------------------------------------------


@pytest.mark.axiom("4.9")
def test_a_submitted_result_is_not_filled_again(tmp_path: Path) -> None:
    async def act(pipeline: Any) -> list[float]:
        results = [await pipeline.submit(number) for number in range(3)]
        return [float(result[0]) for result in results]

    stages = {"in": {"uses": "input"}, "ring": {"uses": "ring", "from": "in", "on": "cpu"}}
    assert fine(go(tmp_path, stages, {"ring": Ring}, act)).value == [0.0, 1.0, 2.0]
