# ruff: noqa: TC003 - stages as an author writes them; annotations are read at run time
"""Numbers, order and hand-over (axioms 1.1, 1.3, 1.5)."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from flows import collector, fine, go

from pipeflow import DROP, stage


@pytest.mark.parametrize("uv", [False, True])
@pytest.mark.parametrize("source", ["numbers", "anumbers"])
@pytest.mark.parametrize("launcher", ["thread", "inline"])
def test_a_chain_hands_on_every_item_in_order(tmp_path: Path, uv: bool, source: str, launcher: str) -> None:
    seen: list[int] = []
    stages = {
        "a": {"uses": source, "with": {"count": 50}},
        "b": {"uses": "double", "from": "a", "launcher": launcher},
        "c": {"uses": "sink", "from": "b"},
    }
    fine(go(tmp_path, stages, {"sink": collector(seen)}, uv=uv))
    assert seen == [2 * number for number in range(50)]


def two_speeds(order: list[int]) -> tuple[Any, Any, threading.Event]:
    """A stage of two lanes whose item 0 waits until a sink (or the stage itself) has seen all others."""
    release = threading.Event()

    @stage
    def work(item: int, ctx) -> int:
        if item == 0:
            assert release.wait(10), "the fast lane stood still behind the slow one"
        order.append(item)
        if len(order) == 9:
            release.set()
        return item

    return work, release, release


@pytest.mark.axiom("1.3")
def test_a_fast_lane_goes_on_beside_a_slow_one(tmp_path: Path) -> None:
    """Items 1 to 9 are worked on while 0 is: its lane's inputs retire and its lane is free, order or not."""
    worked: list[int] = []
    seen: list[int] = []
    work, _, _ = two_speeds(worked)
    stages = {
        "a": {"uses": "numbers", "with": {"count": 10}},
        "b": {"uses": "work", "from": "a", "replicas": 2, "queue": {"items": 12}},
        "c": {"uses": "sink", "from": "b", "queue": {"items": 12}},
    }
    fine(go(tmp_path, stages, {"work": work, "sink": collector(seen)}))
    assert worked[-1] == 0
    assert seen == list(range(10))


@pytest.mark.axiom("1.3")
def test_unordered_hands_over_as_fences_are_reached(tmp_path: Path) -> None:
    release = threading.Event()
    seen: list[int] = []

    @stage
    def work(item: int) -> int:
        if item == 0:
            assert release.wait(10)
        return item

    @stage
    def sink(item: int) -> None:
        seen.append(item)
        if len(seen) == 9:
            release.set()

    stages = {
        "a": {"uses": "numbers", "with": {"count": 10}},
        "b": {"uses": "work", "from": "a", "replicas": 2, "ordered": False},
        "c": {"uses": "sink", "from": "b"},
    }
    fine(go(tmp_path, stages, {"work": work, "sink": sink}))
    assert seen == [*range(1, 10), 0]


@pytest.mark.axiom("1.5")
def test_every_selects_by_number_whatever_was_dropped(tmp_path: Path) -> None:
    seen: list[int] = []

    @stage
    def odd_ones_out(item: int) -> int:
        return item if item % 4 != 1 else DROP  # type: ignore[return-value]

    stages = {
        "a": {"uses": "numbers", "with": {"count": 20}},
        "b": {"uses": "odd", "from": "a"},
        "c": {"uses": "sink", "from": "b", "every": 3},
    }
    fine(go(tmp_path, stages, {"odd": odd_ones_out, "sink": collector(seen)}))
    assert seen == [2, 8, 11, 14]  # of 2 5 8 11 14 17 the gaps 5 and 17 are passed by


def test_every_numbers_anew(tmp_path: Path) -> None:
    numbers: list[tuple[int, int]] = []

    @stage
    def sink(item: int, ctx) -> None:
        numbers.append((ctx.sequence, item))

    stages = {
        "a": {"uses": "numbers", "with": {"count": 9}},
        "b": {"uses": "sink", "from": "a", "every": 4},
    }
    fine(go(tmp_path, stages, {"sink": sink}))
    assert numbers == [(0, 3), (1, 7)]


def test_every_of_an_unordered_source_and_flat_map_is_by_number_too(tmp_path: Path) -> None:
    seen: list[int] = []

    @stage
    def three(item: int):
        yield from (item * 3, item * 3 + 1, item * 3 + 2)

    stages = {
        "a": {"uses": "numbers", "with": {"count": 4}, "ordered": False},
        "b": {"uses": "three", "from": "a"},
        "c": {"uses": "sink", "from": "b", "every": 5},
    }
    fine(go(tmp_path, stages, {"three": three, "sink": collector(seen)}))
    assert seen == [4, 9]


def test_the_number_a_stage_hears_is_its_items(tmp_path: Path) -> None:
    """A flat-map's seed follows its input's number: one seed for all would repeat the same draws, and a count
    of jobs would shift with each item dropped before."""
    heard: list[tuple[int, int]] = []

    @stage
    def evens(item: int) -> int:
        return DROP if item % 2 else item  # type: ignore[return-value]

    @stage
    def pair(item: int, ctx):
        heard.append((ctx.sequence, item))
        yield item
        yield item

    stages = {
        "a": {"uses": "numbers", "with": {"count": 6}},
        "e": {"uses": "evens", "from": "a"},
        "b": {"uses": "pair", "from": "e"},
    }
    fine(go(tmp_path, stages, {"pair": pair, "evens": evens}))
    assert heard == [(0, 0), (2, 2), (4, 4)]


def test_no_context_is_made_for_a_stage_that_does_not_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeflow.lane import Lane

    made: list[str] = []
    context = Lane.context

    def noted(lane: Lane, seq: int | None, **more: Any) -> Any:
        made.append(lane.name)
        return context(lane, seq, **more)

    monkeypatch.setattr(Lane, "context", noted)

    @stage
    def asks(item: int, ctx) -> None:
        assert ctx.stage == "c"

    stages = {
        "a": {"uses": "numbers", "with": {"count": 3}},
        "b": {"uses": "double", "from": "a"},
        "c": {"uses": "asks", "from": "b"},
    }
    fine(go(tmp_path, stages, {"asks": asks}))
    assert made == ["c"] * 3


def test_limit_takes_so_many_and_ends_its_sources(tmp_path: Path) -> None:
    seen: list[int] = []

    @stage
    def endless():
        number = 0
        while True:
            yield number
            number += 1

    stages = {
        "a": {"uses": "endless"},
        "b": {"uses": "double", "from": "a"},
        "c": {"uses": "sink", "from": "b", "limit": 7},
    }
    fine(go(tmp_path, stages, {"endless": endless, "sink": collector(seen)}))
    assert seen == [0, 2, 4, 6, 8, 10, 12]
