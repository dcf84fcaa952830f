"""Circles, joins, types, shared inputs, keys of the wrong kind: a passing and a failing file each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from checking import checked, fails, passes

if TYPE_CHECKING:
    from pathlib import Path

PASS = {
    "a join of one numbering": """
        stages:
          rows: {uses: rows}
          a: {uses: step, from: rows}
          b: {uses: step, from: rows}
          join: {uses: step, from: {x: a, y: b}}
    """,
    "a join with a gap-making arm": """
        stages:
          rows: {uses: rows}
          two: {uses: two, from: rows}
          good: {uses: step, from: two.good}
          join: {uses: step, from: {x: good, y: rows}}
    """,
    "a join of sources that nothing else links": """
        stages:
          a: {uses: rows}
          b: {uses: batches}
          join: {uses: step, from: {x: a, y: b}}
    """,
    "turns of sources that nothing else links, gathers and all": """
        stages:
          a: {uses: rows}
          b: {uses: rows}
          gather: {uses: collect, from: b}
          turns: {uses: step, from: [a, gather]}
    """,
    "arrivals of linked inputs of two numberings": """
        stages:
          rows: {uses: rows}
          gather: {uses: collect, from: rows}
          any: {uses: step, from: [rows, gather], ordered: false}
    """,
    "ports of one stage, selected by number": """
        stages:
          rows: {uses: rows}
          two: {uses: two, from: rows}
          both: {uses: step, from: [two.good, two.bad]}
          join: {uses: step, from: {x: both, y: rows}}
    """,
    "an output taken twice by name": """
        stages:
          rows: {uses: rows}
          join: {uses: step, from: {x: rows, y: rows}}
    """,
    "an unordered stage before the fork": """
        stages:
          rows: {uses: rows}
          loose: {uses: step, from: rows, replicas: 2, ordered: false}
          a: {uses: step, from: loose}
          b: {uses: step, from: loose}
          join: {uses: step, from: {x: a, y: b}}
    """,
    "an unordered stage in turns of separate sources": """
        stages:
          a: {uses: rows}
          loose: {uses: step, from: a, replicas: 2, ordered: false}
          b: {uses: rows}
          turns: {uses: step, from: [loose, b]}
    """,
    "ports of the route stage are its options": """
        stages:
          rows: {uses: rows}
          route: {uses: route, from: rows, with: {by: kind, ports: [math, code], otherwise: rest}}
          math: {uses: step, from: route.math}
          rest: {uses: step, from: route.rest}
    """,
    "a writer into its only input": """
        stages:
          rows: {uses: rows}
          change: {uses: in_place, from: rows}
    """,
    "a writer and a reader of two ports": """
        stages:
          rows: {uses: rows}
          two: {uses: two, from: rows}
          change: {uses: in_place, from: two.good}
          look: {uses: step, from: two.bad}
    """,
    "types that fit, a subclass among them": """
        stages:
          rows: {uses: long_rows}
          a: {uses: on_row, from: rows}
          gather: {uses: collect, from: a}
          b: {uses: on_batch, from: gather}
          join: {uses: joined, from: {left: r, right: s}}
          r: {uses: rows}
          s: {uses: batches}
          spread: {uses: spread, from: join}
          c: {uses: on_row, from: spread}
    """,
    "keys in their place": """
        stages:
          rows: {uses: rows, on_error: {skip: 3}}
          a: {uses: step, from: rows, launcher: inline, on_error: {retry: 2}, queue: {items: 2}}
          b: {uses: careful, from: a, on_error: {retry: 2}, in_flight: 2, launcher: thread}
          c: {uses: async_step, from: b, in_flight: 8}
        run: {step: b, queue: {total: 1GiB}}
    """,
}


@pytest.mark.parametrize("text", PASS.values(), ids=PASS.keys())
def test_passes(text: str) -> None:
    passes(text)


FAIL = {
    "no stages": ("no-stages", "§stages: {}"),
    "a circle": ("cycle", """
        stages:
          rows: {uses: rows}
          a: {uses: step, from: [rows, §c], ordered: false}
          b: {uses: step, from: a}
          c: {uses: step, from: b}
    """),
    "a stage that feeds itself": ("cycle", """
        stages:
          a: {uses: step, from: §a}
    """),
    "axiom 1.4: A > B(gather) > D, A > C > D": ("unfed-join", """
        stages:
          a: {uses: rows}
          b: {uses: collect, from: a}
          c: {uses: step, from: a}
          d: {uses: step, from: {x: b, y: §c}}
    """),
    "a list that takes turns": ("unfed-join", """
        stages:
          a: {uses: rows}
          b: {uses: split, from: a}
          d: {uses: step, from: [a, §b]}
    """),
    "`every` starts a numbering": ("unfed-join", """
        stages:
          a: {uses: rows}
          b: {uses: step, from: a, every: 2}
          d: {uses: step, from: {x: a, y: §b}}
    """),
    "a scattering gather waits for its batch": ("unfed-join", """
        stages:
          a: {uses: rows}
          b: {uses: spread, from: a}
          d: {uses: step, from: {x: a, y: §b}}
    """),
    "separate sources linked by a third stage": ("unfed-join", """
        stages:
          a: {uses: rows}
          b: {uses: rows}
          link: {uses: step, from: [a, b], ordered: false}
          d: {uses: step, from: {x: a, y: §b}}
    """),
    "two ports of one stage never meet": ("unfed-join", """
        stages:
          a: {uses: rows}
          two: {uses: two, from: a}
          d: {uses: step, from: {x: two.good, y: §two.bad}}
    """),
    "unordered between fork and join": ("unordered-join", """
        stages:
          a: {uses: rows}
          b: {uses: step, from: a, replicas: 2, ordered: §false}
          c: {uses: step, from: a}
          d: {uses: step, from: {x: b, y: c}}
    """),
    "an unordered piece of a join by number": ("unordered-join", """
        stages:
          a: {uses: rows}
          b: {uses: step, from: a, replicas: 2, ordered: §false}
          c: {uses: rows}
          d: {uses: step, from: {x: b, y: c}}
    """),
    "a gather takes from one stage": ("gathered-fan-in", """
        stages:
          a: {uses: rows}
          b: {uses: rows}
          d: {uses: collect, from: §[a, b]}
    """),
    "an output that does not fit": ("type-mismatch", """
        stages:
          a: {uses: rows}
          b: {uses: on_batch, from: §a}
    """),
    "one of a list": ("type-mismatch", """
        stages:
          a: {uses: rows}
          b: {uses: batches}
          c: {uses: on_row, from: [a, §b], ordered: false}
    """),
    "a member of a gather": ("type-mismatch", """
        stages:
          a: {uses: batches}
          b: {uses: collect, from: §a}
    """),
    "what a port carries": ("type-mismatch", """
        stages:
          a: {uses: rows}
          two: {uses: two, from: a}
          b: {uses: on_batch, from: §two.good}
    """),
    "a producer that returns nothing": ("type-mismatch", """
        stages:
          a: {uses: rows}
          b: {uses: sink, from: a}
          c: {uses: step, from: §b}
    """),
    "a field of named inputs": ("type-mismatch", """
        stages:
          a: {uses: rows}
          b: {uses: rows}
          c: {uses: joined, from: {left: a, right: §b}}
    """),
    "named inputs for one item": ("type-mismatch", """
        stages:
          a: {uses: rows}
          b: {uses: rows}
          c: {uses: on_row, from: §{left: a, right: b}}
    """),
    "an input that the stage does not have": ("type-mismatch", """
        stages:
          a: {uses: rows}
          b: {uses: batches}
          d: {uses: batches}
          c: {uses: joined, from: {left: a, right: b, §more: d}}
    """),
    "an input that is not fed": ("type-mismatch", """
        stages:
          a: {uses: rows}
          c: {uses: joined, §from: {left: a}}
    """),
    "a writer into an input with two readers": ("mutates-shared", """
        stages:
          a: {uses: rows}
          b: {uses: in_place, from: §a}
          c: {uses: step, from: a}
    """),
    "an output taken twice by a list": ("unknown-input", """
        stages:
          rows: {uses: rows}
          two: {uses: two, from: rows}
          a: {uses: step, from: [two.good, two.bad, §two.good]}
          b: {uses: step, from: [rows, §rows], ordered: false}
    """),
    "a step stage that is not there": ("unknown-input", """
        stages:
          rows: {uses: rows}
        run: {step: §row}
    """),
    "a source that is not there": ("unknown-input", """
        stages:
          rows: {uses: rows}
          a: {uses: step, from: §row}
    """),
    "an output that is not there": ("unknown-input", """
        stages:
          rows: {uses: rows}
          two: {uses: two, from: rows}
          a: {uses: step, from: §two.god}
          b: {uses: step, from: §rows.good}
    """),
    "a stage without input": ("unknown-input", """
        stages:
          §a: {uses: step}
    """),
    "a source with input": ("unknown-input", """
        stages:
          a: {uses: rows}
          b: {uses: rows, §from: a}
    """),
    "an empty list": ("unknown-input", """
        stages:
          a: {uses: step, from: §[]}
    """),
    "`scope` on a stage": ("misplaced-key", """
        stages:
          a: {uses: rows}
          b: {uses: step, from: a, §scope: all}
    """),
    "`every` on a source": ("misplaced-key", """
        stages:
          a: {uses: rows, §every: 2}
    """),
    "`queue` on a source": ("misplaced-key", """
        stages:
          a: {uses: rows, §queue: {items: 2}}
    """),
    "`limit` on a source": ("misplaced-key", """
        stages:
          a: {uses: rows, §limit: 2}
    """),
    "`total` on a stage": ("misplaced-key", """
        stages:
          a: {uses: rows}
          b: {uses: step, from: a, queue: {§total: 1GiB}}
    """),
    "keys on a barrier": ("misplaced-key", """
        stages:
          a: {uses: rows}
          b:
            uses: barrier
            from: a
            §on: cuda:0
            §in_flight: 2
            §launcher: thread
            §limit: 3
          c: {uses: release, from: b}
    """),
    "keys on what a barrier guards": ("misplaced-key", """
        stages:
          a: {uses: rows}
          b: {uses: barrier, from: a}
          c:
            uses: release
            §from: {x: b}
            §every: 2
            §queue: {items: 1}
            §limit: 3
    """),
    "an inline generator": ("misplaced-key", """
        stages:
          a: {uses: rows, launcher: §inline}
          b: {uses: split, from: a, launcher: §inline}
    """),
    "a launcher for an async stage": ("misplaced-key", """
        stages:
          a: {uses: rows}
          b: {uses: async_step, from: a, launcher: §thread}
    """),
    "neither skip nor retry, or both": ("wrong-type", """
        stages:
          rows: {uses: rows}
          a: {uses: step, from: rows, on_error: §{}}
          b: {uses: step, from: rows, on_error: §{skip: 2, retry: 3}}
    """),
    "retry of a stateful stage": ("not-retriable", """
        stages:
          a: {uses: rows}
          b: {uses: counting, from: a, on_error: {§retry: 2}}
    """),
    "retry of a one-to-many stage": ("not-retriable", """
        stages:
          a: {uses: rows}
          b: {uses: split, from: a, on_error: {§retry: 2}}
    """),
    "retry of a writer": ("not-retriable", """
        resources: {drafter: {uses: weights}}
        stages:
          a: {uses: rows}
          b: {uses: train, from: a, writes: drafter, on_error: {§retry: 2}}
    """),
}  # fmt: skip


@pytest.mark.axiom("1.4", "4.5")
@pytest.mark.parametrize(("code", "text"), FAIL.values(), ids=FAIL.keys())
def test_fails(code: str, text: str) -> None:
    fails(text, code)


@pytest.mark.axiom("2.7")
def test_a_circle_is_shown_from_its_first_stage() -> None:
    report = checked("""
        stages:
          a: {uses: step, from: c}
          b: {uses: step, from: a}
          c: {uses: step, from: b}
    """)
    assert [found.message for found in report.errors] == ["items would run in a circle: a > b > c > a"]


def test_types_are_named_in_the_message() -> None:
    report = checked("stages: {a: {uses: rows}, b: {uses: on_batch, from: a}}")
    (found,) = report.errors
    assert found.message == "'b' takes Batch, but 'a' gives Row"
    assert found.remedy == "put a stage between them that makes Batch of Row"


def test_near_matches() -> None:
    report = checked("""
        stages:
          rows: {uses: rowz}
          two: {uses: two, from: row}
          a: {uses: step, from: two.god}
    """)
    assert [found.remedy for found in report.errors] == [
        "did you mean 'rows'?", "did you mean 'rows'?", "did you mean 'good'?"
    ]  # fmt: skip


def test_a_stage_that_could_not_be_read_is_no_unknown_input() -> None:
    report = checked("""
        stages:
          rows: {uses: rows, replicas: many}
          a: {uses: step, from: rows}
    """)
    assert [(found.code, found.path) for found in report.errors] == [("wrong-type", "stages.rows.replicas")]


def test_options_are_checked_against_the_class() -> None:
    report = checked("""\
        stages:
          rows: {uses: rows}
          a: {uses: scaled, from: rows, with: {factr: 2, name: 5}}
          b: {uses: scaled, from: rows}
          c: {uses: scaled, from: rows, with: {factor: 2}}
    """)
    assert [(found.path, found.line, found.column) for found in report.errors] == [
        ("stages.a.with.factor", 5, 39),
        ("stages.a.with.factr", 5, 40),
        ("stages.a.with.name", 5, 56),
        ("stages.b.with.factor", 6, 13),
    ]
    assert report.graph is not None
    assert report.graph.nodes["c"].config.factor == 2.0  # pyright: ignore


def test_every_fault_of_a_file_is_told_at_once() -> None:
    report = checked("""
        stages:
          rows: {uses: rows, evry: 3}
          a: {uses: stepp, from: rows}
          b: {uses: on_batch, from: rows2}
          release: {uses: release, from: a2}
          §: {uses: x}
    """)
    codes = {found.code for found in report.errors}
    assert {"unknown-key", "unknown-stage", "unknown-input"} <= codes
    places = [(found.line, found.column) for found in report.errors]
    assert places == sorted(places)


def test_a_missing_file_is_a_finding(tmp_path: Path) -> None:
    from pipeflow.check import check

    report = check(tmp_path / "no.yaml")
    assert report.spec is None
    assert report.graph is None
    assert report.errors
