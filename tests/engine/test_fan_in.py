# ruff: noqa: TC003 - stages as an author writes them; annotations are read at run time
"""Lists take turns or arrivals; names join by number (axiom 1.4)."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from flows import collector, fine, go

from pipeflow import DROP, stage


def source_of(values: list[Any]) -> Any:
    @stage
    def source():
        yield from values

    return source


def fan_in(folder: Path, taking: dict[str, Any], **sources: list[Any]) -> list[Any]:
    seen: list[Any] = []

    @stage
    def same(item):
        return item

    @stage
    def drop(item):
        return DROP if item == "gap" else item

    stages: dict[str, Any] = {}
    for name in sources:
        stages[f"{name}0"] = {"uses": name}
        stages[name] = {"uses": "drop", "from": f"{name}0"}
    stages["all"] = {"uses": "same", **taking}
    stages["sink"] = {"uses": "sink", "from": "all"}
    uses = {name: source_of(values) for name, values in sources.items()}
    fine(go(folder, stages, uses | {"same": same, "drop": drop, "sink": collector(seen)}))
    return seen


@pytest.mark.axiom("1.4")
def test_a_list_takes_turns_and_an_ended_input_loses_its_turn(tmp_path: Path) -> None:
    seen = fan_in(tmp_path, {"from": ["x", "y", "z"]}, x=[1, 2, 3, 4], y=[10], z=[100, 200])
    assert seen == [1, 10, 100, 2, 200, 3, 4]


def test_a_gap_takes_its_turn(tmp_path: Path) -> None:
    seen = fan_in(tmp_path, {"from": ["x", "y"]}, x=[1, "gap", 3], y=[10, 20, 30])
    assert seen == [1, 10, 20, 3, 30]


@pytest.mark.axiom("1.4")
def test_arrivals_do_not_wait_for_a_slow_input(tmp_path: Path) -> None:
    seen: list[Any] = []
    release = threading.Event()

    @stage
    def slow():
        assert release.wait(10)
        yield "late"

    @stage
    def sink(item) -> None:
        seen.append(item)
        if len(seen) == 5:
            release.set()

    @stage
    def same(item):
        return item

    stages = {
        "a": {"uses": "numbers", "with": {"count": 5}},
        "b": {"uses": "slow"},
        "c": {"uses": "same", "from": ["b", "a"], "ordered": False},
        "d": {"uses": "sink", "from": "c"},
    }
    fine(go(tmp_path, stages, {"slow": slow, "same": same, "sink": sink}))
    assert seen == [0, 1, 2, 3, 4, "late"]


def test_separate_sources_join_up_to_the_shorter(tmp_path: Path) -> None:
    """What has no partner retires, so its source is not stuck and the run ends."""
    seen = fan_in(tmp_path, {"from": {"p": "x", "q": "y"}}, x=list(range(50)), y=["a", "gap", "c"])
    assert seen == [{"p": 0, "q": "a"}, {"p": 2, "q": "c"}]


def test_an_empty_source_ends_a_join(tmp_path: Path) -> None:
    assert fan_in(tmp_path, {"from": {"p": "x", "q": "y"}}, x=list(range(50)), y=[]) == []


def test_a_join_that_ended_frees_the_longer_source_for_what_lies_behind(tmp_path: Path) -> None:
    """The longer source feeds the join and a second join behind it: the first must end with its shorter
    input, or each of the two would wait for the other (found by the random graphs)."""
    seen: list[Any] = []

    @stage
    def same(item):
        return item

    stages = {
        "short": {"uses": "numbers", "with": {"count": 1}},
        "long": {"uses": "numbers", "with": {"count": 9}},
        "one": {"uses": "same", "from": {"a": "long", "b": "short"}},
        "two": {"uses": "same", "from": {"a": "one", "b": "long"}, "queue": {"items": 1}},
        "sink": {"uses": "sink", "from": "two"},
    }
    fine(go(tmp_path, stages, {"same": same, "sink": collector(seen)}))
    assert seen == [{"a": {"a": 0, "b": 0}, "b": 0}]
