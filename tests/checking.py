# ruff: noqa: RUF012, TC003 - classes as a stage author writes them; annotations are read at run time
"""Helpers of the tests of graph and rules: small stages, and files whose faults are marked in the text.

A marked text has `§` right before each place at which a finding is expected.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

import pipeflow.registry
from pipeflow.check import Report, check_document
from pipeflow.config import Config
from pipeflow.document import parse
from pipeflow.item import Port, Scatter, Trigger
from pipeflow.stage import Gather, Resource, Stage

MARK = "§"
HEAD = "pipeflow: 1\nname: test\n"


class Row:
    """An item."""


class Batch:
    """Another item."""


class LongRow(Row):
    """A kind of Row."""


class Rows(Stage):
    def run(self) -> Iterator[Row]:
        yield Row()


class LongRows(Stage):
    def run(self) -> Iterator[LongRow]:
        yield LongRow()


class Batches(Stage):
    def run(self) -> Iterator[Batch]:
        yield Batch()


class Step(Stage):
    """One-to-one, any type."""

    def run(self, item: Any) -> Any:
        return item


class OnRow(Stage):
    def run(self, item: Row) -> Row:
        return item


class OnBatch(Stage):
    def run(self, item: Batch) -> Batch:
        return item


class Split(Stage):
    def run(self, item: Any) -> Iterator[Row]:
        yield item


class Collect(Gather):
    def run(self, items: list[Row]) -> Batch:
        return Batch()


class Spread(Gather):
    def run(self, items: list[Row]) -> Scatter[Row]:
        return Scatter(items)


class Sink(Stage):
    def run(self, item: Any) -> None:
        return None


class Log(Stage):
    """Takes whatever a section gives."""

    def run(self, item: Any) -> Any:
        return item


class Pair(TypedDict):
    left: Row
    right: Batch


class Joined(Stage):
    def run(self, item: Pair) -> Row:
        return item["left"]


class Two(Stage):
    ports = ("good", "bad")

    def run(self, item: Any) -> Port[Row]:
        return Port("good", item)


class Model(Resource):
    pass


class Weights(Resource):
    pass


class Train(Stage):
    device = True
    writes = {"drafter": Weights}

    def run(self, item: Any) -> Row:
        return Row()


class Evaluate(Stage):
    device = True
    reads = {"drafter": Weights}

    def run(self, item: Any) -> Any:
        return item


class Forward(Stage):
    device = True
    reads = {"target": Model}

    def run(self, item: Any) -> Any:
        return item


class Release(Stage):
    guarded = True
    releases = True

    def run(self, item: Trigger) -> Trigger:
        return item


class UserBroadcast(Stage):
    """A user's own way to show weights to others: nothing but the trait says so."""

    guarded = True
    reads = {"drafter": Weights}

    def run(self, item: Trigger) -> Trigger:
        return item


class Shows(Stage):
    guarded = True

    def run(self, item: Trigger) -> None:
        return None


class Quiesced(Stage):
    background = True

    def run(self, item: Any) -> Any:
        return item

    def quiesce(self) -> None:
        return None


class Offload(Stage):
    background = True

    def run(self, item: Any) -> Any:
        return item


class Counting(Stage):
    stateful = True

    def run(self, item: Any) -> Any:
        return item


class AsyncCounting(Stage):
    stateful = True

    async def run(self, item: Any) -> Any:
        return item


class AsyncStep(Stage):
    async def run(self, item: Any) -> Any:
        return item


class InPlace(Stage):
    mutates = True

    def run(self, item: Any) -> Any:
        return item


class Careful(Stage):
    stateful = True
    retriable = True

    def run(self, item: Any) -> Any:
        return item


class Shares(Stage):
    needs_fixed_segments = True

    def run(self, item: Any) -> Any:
        return item


class Tunes(Stage):
    autotunes = True

    def run(self, item: Any) -> Any:
        return item


class TunesSafely(Tunes):
    guards_autotuner = True


class Scaled(Stage):
    class Config(Config):
        factor: float
        name: str = "x"

    def run(self, item: Any) -> Any:
        return item


STAGES: dict[str, type[Any]] = {
    "rows": Rows, "long_rows": LongRows, "batches": Batches, "step": Step, "on_row": OnRow,
    "on_batch": OnBatch, "split": Split, "collect": Collect, "spread": Spread, "sink": Sink, "log": Log,
    "joined": Joined, "two": Two, "train": Train, "evaluate": Evaluate, "forward": Forward,
    "release": Release, "publish": UserBroadcast, "shows": Shows, "quiesced": Quiesced, "offload": Offload,
    "counting": Counting, "async_counting": AsyncCounting, "async_step": AsyncStep, "in_place": InPlace,
    "careful": Careful, "shares": Shares, "tunes": Tunes, "tunes_safely": TunesSafely, "scaled": Scaled,
    "model": Model, "weights": Weights,
}  # fmt: skip


def registry(**more: type[Any]) -> pipeflow.registry.Registry:
    """The stages above under their names, and `more`."""
    made = pipeflow.registry.Registry()
    for name, cls in {**STAGES, **more}.items():
        made.add(name, cls)
    return made


def checked(
    text: str,
    *,
    env: Mapping[str, str] | None = None,
    here: bool = False,
    more: Mapping[str, type[Any]] | None = None,
) -> Report:
    """Check a text; the head of a file is put before it where it is missing."""
    text = textwrap.dedent(text)
    if "pipeflow:" not in text:
        text = HEAD + text
    return check_document(
        parse(text, file="p.yaml"), env=env or {}, here=here, registry=registry(**more or {})
    )


def passes(text: str, **options: Any) -> Report:
    """No findings at all."""
    report = checked(text, **options)
    assert [found.render() for found in report.diagnostics] == []
    return report


def fails(text: str, code: str, **options: Any) -> Report:
    """Exactly the findings that the marks show, all of one code, each with a remedy."""
    text = HEAD + textwrap.dedent(text)
    marks = [
        (code, number, line.index(MARK) + 1)
        for number, line in enumerate(text.split("\n"), 1)
        if MARK in line
    ]
    assert marks, "the text marks no place"
    report = checked(text.replace(MARK, ""), **options)
    shown = "\n".join(found.render() for found in report.diagnostics)
    assert [(found.code, found.line, found.column) for found in report.diagnostics] == marks, shown
    assert all(found.remedy for found in report.diagnostics), shown
    return report
