# ruff: noqa: RUF012, TC003 - classes as a stage author writes them
"""Rules on `run.checkpoint`: each refuses what it is for, at its place, and lets the rest pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from checking import HEAD, Log, Model, Row, Rows, Sink, Step, Weights

import pipeflow.registry
from pipeflow.check import check_document
from pipeflow.document import parse
from pipeflow.item import Scatter
from pipeflow.stage import Gather, Resource, Stage


class Saved(Resource):
    def state(self, value: Any) -> dict[str, Any]:
        return {}

    def load(self, value: Any, state: dict[str, Any]) -> None:
        return None


class Train(Stage):
    writes = {"model": Resource}

    def run(self, item: Any) -> Row:
        return Row()


class Reads(Stage):
    reads = {"model": Resource}

    def run(self, item: Any) -> Any:
        return item


class Forgets(Stage):
    stateful = True

    def run(self, item: Any) -> Any:
        return item


class Remembers(Forgets):
    def state(self) -> dict[str, Any]:
        return {}


class Dice(Stage):
    deterministic = False

    def run(self, item: Any) -> Any:
        return item


class Spread(Stage):
    def run(self, item: Any) -> Iterator[Row]:
        yield item


class Collect(Gather):
    def full(self, members: Any) -> bool:
        return True

    def run(self, items: list[Any]) -> Row:
        return Row()


class Lingers(Collect):
    linger = 0.1


class Scatters(Collect):
    def run(self, items: list[Any]) -> Scatter[Row]:  # type: ignore[override]
        return Scatter(items)


class Sorts(Scatters):
    def bucket(self, item: Any) -> int:
        return 0


CLASSES: dict[str, Any] = {
    "rows": Rows, "step": Step, "sink": Sink, "log": Log, "train": Train, "reads": Reads, "forgets": Forgets,
    "remembers": Remembers, "dice": Dice, "spread": Spread, "collect": Collect, "lingers": Lingers,
    "scatters": Scatters, "sorts": Sorts, "model": Model, "weights": Weights, "saved": Saved,
}  # fmt: skip

GOOD = """\
resources:
  model: {uses: saved}
stages:
  rows: {uses: rows}
  step: {uses: step, from: rows}
  train: {uses: train, from: step, writes: model}
  sink: {uses: sink, from: train}
"""


def found(stages: str, run: str = "{checkpoint: {of: train}}") -> list[tuple[str, str]]:
    registry = pipeflow.registry.Registry()
    for name, cls in CLASSES.items():
        registry.add(name, cls)
    report = check_document(parse(f"{HEAD}{stages}run: {run}\n"), registry=registry)
    return [(each.code, each.path) for each in report.diagnostics]


def changed(**lines: str) -> str:
    """GOOD with stages of these names in place of its own, or beside them."""
    kept = [line for line in GOOD.splitlines() if line.split(":")[0].strip() not in lines]
    return "\n".join([*kept, *(f"  {name}: {text}" for name, text in lines.items())]) + "\n"


def test_a_good_file_passes() -> None:
    assert found(GOOD) == []
    assert found(GOOD, "{resume: auto, checkpoint: {of: train, every: 5, keep: 1, best: sink.tau}}") == []


OF = "run.checkpoint.of"
STEP = "{checkpoint: {of: step}}"
TRAIN = "{checkpoint: {of: train}}"
THEIRS = GOOD.replace("model:", "theirs: {uses: saved}\n  model:", 1)


@pytest.mark.parametrize(
    ("stages", "run", "fault"),
    [
        (GOOD, "{resume: auto}", ("misplaced-key", "run.resume")),
        (GOOD, "{checkpoint: {of: tran}}", ("unknown-input", OF)),
        (GOOD, "{checkpoint: {of: train, best: eval.tau}}", ("unknown-input", "run.checkpoint.best")),
        (GOOD, "{checkpoint: {of: rows}}", ("checkpoint-of", OF)),
        (changed(step="{uses: step, from: rows, replicas: 2}"), STEP, ("checkpoint-of", OF)),
        (changed(step="{uses: step, from: rows, ordered: false}"), STEP, ("checkpoint-of", OF)),
        (changed(step="{uses: step, from: [rows, more]}", more="{uses: rows}"), STEP,
         ("checkpoint-of", OF)),
        (changed(step="{uses: collect, from: rows}"), STEP, ("checkpoint-of", OF)),
        (GOOD.replace("saved", "model"), TRAIN, ("no-state", "stages.train.writes")),
        (changed(sink="{uses: forgets, from: train}"), TRAIN, ("no-state", "stages.sink.uses")),
        (changed(step="{uses: forgets, from: rows}"), "{checkpoint: {of: step, exact: false}}",
         ("no-state", "stages.step.uses")),
        (THEIRS.replace("stages:", "stages:\n  other: {uses: train, from: rows, writes: theirs}"),
         TRAIN, ("unsaved-writer", "stages.other.writes")),
        (changed(sink="{uses: collect, from: train}"), "{checkpoint: {of: train, exact: false}}",
         ("gathered-behind", "stages.sink.from")),
    ],
)  # fmt: skip
def test_what_cannot_be_saved_is_refused(stages: str, run: str, fault: tuple[str, str]) -> None:
    assert fault in found(stages, run)


@pytest.mark.parametrize(
    ("step", "key"),
    [
        ("{uses: step, from: rows, replicas: 2, ordered: false}", "ordered"),
        ("{uses: step, from: [rows, more], ordered: false}", "ordered"),
        ("{uses: dice, from: rows}", "uses"),
        ("{uses: lingers, from: rows}", "uses"),
        ("{uses: sorts, from: rows}", "uses"),
        ("{uses: reads, from: rows, reads: model}", "reads"),
    ],
)
def test_what_may_come_out_otherwise_is_inexact(step: str, key: str) -> None:
    stages = changed(step=step, more="{uses: rows}", end="{uses: sink, from: more}")
    assert found(stages) == [("inexact", f"stages.step.{key}")]
    assert found(stages, "{checkpoint: {of: train, exact: false}}") == []


@pytest.mark.parametrize(
    "step",
    [
        "{uses: step, from: rows, replicas: 2}",
        "{uses: step, from: [rows, more]}",
        "{uses: scatters, from: rows}",
        "{uses: spread, from: rows}",
        "{uses: collect, from: rows}",
        "{uses: forgets, from: rows}",
    ],
)
def test_what_comes_out_the_same_is_exact(step: str) -> None:
    assert found(changed(step=step, more="{uses: rows}", end="{uses: sink, from: more}")) == []


def test_a_submit_is_not_made_again() -> None:
    stages = changed(rows="{uses: input}")
    assert found(stages) == [("inexact", "stages.rows.uses")]
    assert found(stages, "{checkpoint: {of: train, exact: false}}") == []


def test_behind_it_a_state_of_its_own_is_enough() -> None:
    assert found(changed(sink="{uses: remembers, from: train}")) == []
    assert (
        found(changed(sink="{uses: forgets, from: train}"), "{checkpoint: {of: train, exact: false}}") == []
    )
