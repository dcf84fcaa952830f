# ruff: noqa: RUF012 - classes as a stage author writes them
"""Roles, writers, readers behind them, replicated state: a passing and a failing file each."""

from __future__ import annotations

import pytest
from checking import Model, Row, Weights, checked, fails, passes

from pipeflow.stage import Resource, Stage, stage

HEAD = """
resources: {drafter: {uses: weights}, target: {uses: model}}
stages:
  rows: {uses: rows}
"""


class Pair(Stage):
    """Two roles of one class."""

    reads = {"big": Model, "small": Model}

    def run(self, item: Row) -> Row:
        return item


class Distil(Stage):
    """Reads one, writes another, and may look at what it writes."""

    reads = {"target": Model, "drafter": Weights}
    writes = {"drafter": Weights}

    def run(self, item: Row) -> Row:
        return item


class AnyRole(Stage):
    """Takes whatever is a resource."""

    reads = {"thing": Resource}

    def run(self, item: Row) -> Row:
        return item


class TinyModel(Model):
    """A narrower class."""


@stage
def peek(item: Row) -> Row:
    """A function declares no roles, so it reads what the file gives."""
    return item


MORE = {"pair": Pair, "distil": Distil, "any_role": AnyRole, "tiny_model": TinyModel, "peek": peek}

PASS = {
    "a bare name goes to the only role that fits": """
        train: {uses: distil, from: rows, reads: target, writes: drafter}
    """,
    "a list of bare names": """
        both: {uses: any_role, from: rows, reads: [target]}
    """,
    "roles by name": """
        pair: {uses: pair, from: rows, reads: {big: target, small: target}}
    """,
    "a function reads anything, by name or role": """
        a: {uses: peek, from: rows, reads: [target, drafter]}
        b: {uses: peek, from: rows, reads: {net: target}}
    """,
    "a reader fed by the writer": """
        train: {uses: train, from: rows, writes: drafter}
        evaluate: {uses: evaluate, from: train, every: 10, reads: drafter}
    """,
    "a reader fed by a join with the writer": """
        train: {uses: train, from: rows, writes: drafter}
        evaluate: {uses: evaluate, from: {step: train, row: rows}, reads: drafter}
    """,
    "a reader that is not behind the writer": """
        evaluate: {uses: evaluate, from: rows, reads: drafter}
        train: {uses: train, from: evaluate, writes: drafter}
    """,
    "replicas of a stage without state": """
        forward: {uses: forward, from: rows, replicas: 2, reads: target}
    """,
    "several jobs of a sync stateful lane keep their order": """
        a: {uses: counting, from: rows, in_flight: 2}
    """,
    "roles of a stage that was not found": """
        a: {uses: rows_2, from: rows, reads: target}
    """,
}


@pytest.mark.parametrize("stages", PASS.values(), ids=PASS.keys())
def test_passes(stages: str) -> None:
    if "rows_2" in stages:
        report = checked(HEAD + _body(stages), more=MORE)
        assert [found.code for found in report.diagnostics] == ["unknown-stage"]
    else:
        passes(HEAD + _body(stages), more=MORE)


def _body(stages: str) -> str:
    return "".join(f"  {line.strip()}\n" for line in stages.strip().splitlines())


FAIL = {
    "an unknown resource": ("unknown-resource", """
        forward: {uses: forward, from: rows, reads: §targt}
    """),
    "an unknown resource in a list": ("unknown-resource", """
        a: {uses: peek, from: rows, reads: [target, §darfter]}
    """),
    "an unknown resource in a role": ("unknown-resource", """
        a: {uses: pair, from: rows, reads: {big: target, small: §targets}}
    """),
    "a role that the class has not": ("undeclared-role", """
        a: {uses: pair, from: rows, reads: {big: target, small: target, smal: §target}}
    """),
    "one resource more than roles": ("undeclared-role", """
        a: {uses: forward, from: rows, reads: [target, §drafter]}
    """),
    "a reader that says it writes": ("undeclared-role", """
        a: {uses: forward, from: rows, reads: target, writes: §drafter}
    """),
    "a class that does not fit": ("wrong-type", """
        a: {uses: forward, from: rows, reads: §drafter}
    """),
    "a class that does not fit its role": ("wrong-type", """
        a: {uses: forward, from: rows, reads: {target: §drafter}}
    """),
    "a bare name for two roles": ("wrong-type", """
        a: {uses: pair, from: rows, reads: §target}
    """),
    "a role that is left empty": ("missing-resource", """
        a: {uses: §forward, from: rows}
    """),
    "one of two roles that is left empty": ("missing-resource", """
        a: {uses: pair, from: rows, reads: §{big: target}}
    """),
    "a written role that is left empty": ("missing-resource", """
        a: {uses: §train, from: rows}
    """),
    "two writers": ("two-writers", """
        a: {uses: train, from: rows, writes: drafter}
        b: {uses: train, from: rows, writes: §drafter}
    """),
    "a reader behind a stage behind the writer": ("unfed-reader", """
        train: {uses: train, from: rows, writes: drafter}
        step: {uses: step, from: train}
        evaluate: {uses: evaluate, from: §step, reads: drafter}
    """),
    "a reader that takes turns with the writer": ("unfed-reader", """
        train: {uses: train, from: rows, writes: drafter}
        evaluate: {uses: evaluate, from: §[train, rows], reads: drafter}
    """),
    "replicas of a stateful stage": ("replicated-state", """
        a: {uses: counting, from: rows, replicas: §2}
    """),
    "replicas of a writer": ("replicated-state", """
        a: {uses: train, from: rows, writes: drafter, replicas: §2}
    """),
    "a stateful stage on several devices": ("replicated-state", """
        a: {uses: counting, from: rows, on: §[cuda:0, cuda:1]}
    """),
    "async jobs of a stateful stage": ("replicated-state", """
        a: {uses: async_counting, from: rows, in_flight: §2}
    """),
}  # fmt: skip


@pytest.mark.axiom("3.1")
@pytest.mark.parametrize(("code", "stages"), FAIL.values(), ids=FAIL.keys())
def test_fails(code: str, stages: str) -> None:
    fails(HEAD + _body(stages), code, more=MORE)


def test_resources_that_wait_for_each_other() -> None:
    class Sized(Resource):
        reads = {"other": Resource}

    fails("""
        resources:
          a: {uses: sized, reads: §b}
          b: {uses: sized, reads: a}
        stages:
          rows: {uses: rows}
    """, "cycle", more={"sized": Sized})  # fmt: skip


def test_resources_are_opened_after_those_they_look_at() -> None:
    class Sized(Resource):
        reads = {"model": Model}

    report = passes("""
        resources:
          drafter: {uses: sized, reads: target}
          target: {uses: tiny_model}
        stages:
          rows: {uses: rows}
    """, more={"sized": Sized, **MORE})  # fmt: skip
    assert report.graph is not None
    assert report.graph.opening == ["target", "drafter"]
    assert report.graph.resources["drafter"].reads == {"model": "target"}


def test_unknown_resource_class() -> None:
    fails("""
        resources: {target: {uses: §modell}}
        stages:
          rows: {uses: rows}
          a: {uses: forward, from: rows, reads: target}
    """, "unknown-resource")  # fmt: skip


def test_a_stage_where_a_resource_belongs() -> None:
    report = fails("""
        resources: {target: {uses: §step}}
        stages:
          rows: {uses: rows}
    """, "unknown-resource")  # fmt: skip
    assert report.errors[0].remedy == "'step' is a stage: it belongs under `stages:`"


@pytest.mark.axiom("3.1")
def test_a_resource_is_opened_where_its_stages_run() -> None:
    head = "resources: {target: {uses: model, on: cuda:1}}\nstages:\n  rows: {uses: rows}\n"
    passes(head + "  a: {uses: forward, from: rows, on: cuda:1, reads: target}\n")
    passes(head + "  a: {uses: step, from: rows}\n")
    fails(head + "  a: {uses: forward, from: rows, on: cuda:0, reads: §target}\n", "resource-elsewhere")


def test_roles_are_resolved() -> None:
    report = passes(
        HEAD + _body("train: {uses: distil, from: rows, reads: target, writes: drafter}"), more=MORE
    )
    assert report.graph is not None
    node = report.graph.nodes["train"]
    assert node.reads == {"target": "target"}
    assert node.writes == {"drafter": "drafter"}
