# ruff: noqa: TC003 - stages as an author writes them; annotations are read at run time
"""A number without a value keeps its turn and passes through (axiom 1.2)."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from flows import collector, fine, go

from pipeflow import DROP, Gather, Port, stage


@stage
def evens(item: int) -> int:
    return item if item % 2 == 0 else DROP  # type: ignore[return-value]


@pytest.mark.axiom("1.2")
@pytest.mark.parametrize("launcher", ["thread", "inline"])
def test_a_join_with_a_gap_in_one_arm_is_a_gap(tmp_path: Path, launcher: str) -> None:
    seen: list[Any] = []
    stages = {
        "a": {"uses": "numbers", "with": {"count": 9}},
        "b": {"uses": "evens", "from": "a", "launcher": launcher},
        "c": {"uses": "double", "from": "a"},
        "d": {"uses": "both", "from": {"x": "b", "y": "c"}},
        "e": {"uses": "sink", "from": "d"},
    }

    @stage
    def both(item: dict) -> tuple:
        return (item["x"], item["y"])

    outcome = fine(go(tmp_path, stages, {"evens": evens, "both": both, "sink": collector(seen)}))
    assert seen == [(n, 2 * n) for n in range(0, 9, 2)]
    assert outcome.runner("d").counters.gaps == 4


@pytest.mark.axiom("1.2")
def test_a_gap_keeps_its_turn_behind_a_slow_item(tmp_path: Path) -> None:
    """Item 1 is dropped while item 0 is still at work: a join downstream needs both numbers, in order."""
    release, seen = threading.Event(), []

    @stage
    def slow_then_gone(item: int) -> int:
        if item == 0:
            assert release.wait(10)
        elif item == 1:
            release.set()
            return DROP  # type: ignore[return-value]
        return item

    stages = {
        "a": {"uses": "numbers", "with": {"count": 4}},
        "b": {"uses": "slow", "from": "a", "replicas": 2},
        "c": {"uses": "both", "from": {"x": "a", "y": "b"}},
        "d": {"uses": "sink", "from": "c"},
    }

    @stage
    def both(item: dict) -> int:
        assert item["x"] == item["y"]
        return item["x"]

    fine(go(tmp_path, stages, {"slow": slow_then_gone, "both": both, "sink": collector(seen)}))
    assert seen == [0, 2, 3]


@pytest.mark.axiom("1.2")
def test_gaps_hold_no_credit(tmp_path: Path) -> None:
    """A thousand gaps behind one item that waits: one entry on the edge, no credit."""
    release, seen, peak = threading.Event(), [], []

    @stage
    def first_only(item: int) -> int:
        if item == 1000:
            release.set()
        return item if item in (0, 1001) else DROP  # type: ignore[return-value]

    @stage
    def waits(item: int, ctx) -> int:
        if item == 0:
            assert release.wait(10), "gaps filled the queue"
        return item

    stages = {
        "a": {"uses": "numbers", "with": {"count": 1002}},
        "b": {"uses": "first", "from": "a", "launcher": "inline"},
        "c": {"uses": "waits", "from": "b", "queue": {"items": 2}},
        "d": {"uses": "sink", "from": "c"},
    }
    outcome = fine(go(tmp_path, stages, {"first": first_only, "waits": waits, "sink": collector(seen)}))
    assert seen == [0, 1001]
    assert outcome.runner("c").inputs.edges[0].peak <= 2
    assert peak == []


@pytest.mark.axiom("1.2")
def test_a_gather_counts_live_items(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Three(Gather):
        def full(self, members):
            return len(members) == 3

        def run(self, items: list) -> list:
            return list(items)

    stages = {
        "a": {"uses": "numbers", "with": {"count": 14}},
        "b": {"uses": "evens", "from": "a"},
        "c": {"uses": "three", "from": "b"},
        "d": {"uses": "sink", "from": "c"},
    }
    fine(go(tmp_path, stages, {"evens": evens, "three": Three, "sink": collector(seen)}))
    assert seen == [[0, 2, 4], [6, 8, 10], [12]]


@pytest.mark.axiom("1.4")
def test_a_port_is_a_gap_on_the_others_and_a_list_of_ports_keeps_the_numbers(tmp_path: Path) -> None:
    seen: list[Any] = []
    left: list[int] = []
    stages = {
        "a": {"uses": "numbers", "with": {"count": 8}},
        "rows": {"uses": "row", "from": "a"},
        "r": {"uses": "route", "from": "rows", "with": {"by": "kind", "ports": ["even", "odd"]}},
        "l": {"uses": "left", "from": "r.even"},
        "s": {"uses": "same", "from": ["r.even", "r.odd"]},
        "j": {"uses": "both", "from": {"x": "a", "y": "s"}},
        "k": {"uses": "sink", "from": "j"},
    }

    @stage
    def row(item: int) -> dict:
        return {"kind": "odd" if item % 2 else "even", "n": item}

    @stage
    def same(item: dict) -> int:
        return item["n"]

    @stage
    def both(item: dict) -> tuple:
        return (item["x"], item["y"])

    @stage
    def left_sink(item: dict) -> None:
        left.append(item["n"])

    uses = {"row": row, "left": left_sink, "same": same, "both": both, "sink": collector(seen)}
    fine(go(tmp_path, stages, uses))
    assert seen == [(n, n) for n in range(8)]
    assert left == [0, 2, 4, 6]


@pytest.mark.parametrize(("value", "said"), [(Port("typo", 1), "typo"), (1, "bare value")])
def test_a_value_for_no_known_port_is_an_error_not_lost(tmp_path: Path, value: Any, said: str) -> None:
    from pipeflow.stage import Stage

    class Sorts(Stage):
        ports = ("yes", "no")

        def run(self, item: int) -> Any:
            return value

    stages = {
        "a": {"uses": "numbers"},
        "b": {"uses": "sorts", "from": "a"},
        "c": {"uses": "sink", "from": "b.yes"},
    }
    outcome = go(tmp_path, stages, {"sorts": Sorts, "sink": collector([])})
    assert said in str(outcome.error)
    assert "stage 'b', item 0" in str(outcome.error)
