# ruff: noqa: TC003 - stages as an author writes them; annotations are read at run time
"""What a job raises: stop, skip with a budget, retry (axiom 7.1)."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from flows import collector, fine, go, until_it_ends

from pipeflow import Failed, StageError, stage

CHAIN = {
    "a": {"uses": "numbers"},
    "b": {"uses": "work", "from": "a"},
    "c": {"uses": "sink", "from": "b"},
}


def chain(**b: Any) -> dict[str, Any]:
    return CHAIN | {"b": CHAIN["b"] | b}


def failing(*bad: int, raises: type[BaseException] = ValueError) -> Any:
    @stage
    def work(item: int) -> int:
        if item in bad:
            raise raises(f"bad {item}")
        return item

    return work


@pytest.mark.parametrize("launcher", ["thread", "inline"])
def test_the_default_stops_naming_stage_and_item(tmp_path: Path, launcher: str) -> None:
    outcome = go(tmp_path, chain(launcher=launcher), {"work": failing(3), "sink": collector([])})
    assert isinstance(outcome.error, StageError)
    assert str(outcome.error) == "stage 'b', item 3: ValueError: bad 3"
    assert isinstance(outcome.error.__cause__, ValueError)


def test_a_system_exit_in_stage_code_is_its_fault_too(tmp_path: Path) -> None:
    outcome = go(tmp_path, chain(), {"work": failing(3, raises=SystemExit), "sink": collector([])})
    assert str(outcome.error) == "stage 'b', item 3: SystemExit: bad 3"


def test_an_async_stage_that_awaits_what_was_cancelled_fails_and_does_not_hang(tmp_path: Path) -> None:
    @stage
    async def work(item: int) -> int:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        return await future

    outcome = go(tmp_path, chain(), {"work": work, "sink": collector([])})
    assert str(outcome.error) == "stage 'b', item 0: CancelledError: CancelledError"


@pytest.mark.axiom("7.1")
@pytest.mark.parametrize("launcher", ["thread", "inline"])
def test_skip_leaves_a_gap_and_a_dead_letter(tmp_path: Path, launcher: str) -> None:
    seen: list[int] = []
    spec = chain(on_error={"skip": 2}, launcher=launcher)
    outcome = fine(go(tmp_path, spec, {"work": failing(3, 5), "sink": collector(seen)}))
    assert seen == [0, 1, 2, 4, 6, 7, 8, 9]
    assert outcome.value["skipped"] == {"b": 2}
    letters = outcome.lines("dead_letter.jsonl")
    assert [(line["stage"], line["sequence"], line["item"]) for line in letters] == [("b", 3, 3), ("b", 5, 5)]
    assert outcome.runner("c").counters.gaps == 2


def test_beyond_its_budget_skip_stops(tmp_path: Path) -> None:
    outcome = go(tmp_path, chain(on_error={"skip": 1}), {"work": failing(3, 5), "sink": collector([])})
    assert "item 5: ValueError: bad 5 (the budget of 1 skipped items is used up)" in str(outcome.error)


@pytest.mark.axiom("7.1")
@pytest.mark.parametrize("is_async", [False, True])
def test_retry_runs_the_item_again_in_its_place(tmp_path: Path, is_async: bool) -> None:
    seen: list[int] = []
    tries: dict[int, int] = {}

    def attempt(item: int) -> int:
        tries[item] = tries.get(item, 0) + 1
        if item % 4 == 1 and tries[item] < 3:
            raise ValueError("not yet")
        return item

    @stage
    def work(item: int) -> int:
        return attempt(item)

    @stage
    async def awork(item: int) -> int:
        return attempt(item)

    uses = {"work": awork if is_async else work, "sink": collector(seen)}
    outcome = fine(go(tmp_path, chain(on_error={"retry": 2}, replicas=2), uses))
    assert seen == list(range(10))
    assert tries == {n: 3 if n % 4 == 1 else 1 for n in range(10)}
    assert outcome.runner("b").counters.retries == 6


def test_a_retry_used_up_stops(tmp_path: Path) -> None:
    outcome = go(tmp_path, chain(on_error={"retry": 2}), {"work": failing(3), "sink": collector([])})
    assert "item 3: ValueError: bad 3 (tried 3 times)" in str(outcome.error)


def test_a_source_says_failed_for_a_record_to_be_skipped(tmp_path: Path) -> None:
    numbers: list[tuple[int, int]] = []

    @stage
    def rows():
        yield 0
        yield Failed(ValueError("line 2"), record="{broken")
        yield 2

    @stage
    def sink(item: int, ctx) -> None:
        numbers.append((ctx.sequence, item))

    stages = {"a": {"uses": "rows", "on_error": {"skip": 1}}, "b": {"uses": "sink", "from": "a"}}
    outcome = fine(go(tmp_path, stages, {"rows": rows, "sink": sink}))
    assert numbers == [(0, 0), (2, 2)]
    assert outcome.lines("dead_letter.jsonl")[0]["item"] == "{broken"


def test_a_source_that_raises_is_never_skipped(tmp_path: Path) -> None:
    """Its generator is over: to skip would lose all the records behind it without a word."""
    seen: list[int] = []

    @stage
    def rows():
        yield 0
        raise OSError("disk gone")

    stages = {"a": {"uses": "rows", "on_error": {"skip": 5}}, "b": {"uses": "sink", "from": "a"}}
    outcome = go(tmp_path, stages, {"rows": rows, "sink": collector(seen)})
    assert "stage 'a', item 1: OSError: disk gone" in str(outcome.error)
    assert "Failed(error)" in str(outcome.error)


def test_a_failed_record_without_a_policy_stops(tmp_path: Path) -> None:
    @stage
    def rows():
        yield Failed(ValueError("line 1"))

    outcome = go(tmp_path, {"a": {"uses": "rows"}}, {"rows": rows})
    assert "stage 'a', item 0: ValueError: line 1" in str(outcome.error)


@pytest.mark.parametrize("hook", ["setup", "finish", "close", "__init__"])
def test_a_fault_in_a_hook_ends_the_run_and_names_the_stage(tmp_path: Path, hook: str) -> None:
    from pipeflow.stage import Stage

    def fails(self, *given):
        raise RuntimeError("hook fault")

    cls = type("Hooked", (Stage,), {"run": lambda self, item: item, hook: fails})
    outcome = go(tmp_path, {"a": {"uses": "numbers"}, "b": {"uses": "hooked", "from": "a"}}, {"hooked": cls})
    assert "hook fault" in str(outcome.error)
    assert "'b'" in str(outcome.error)


def test_finish_runs_on_every_lane_before_consumers_hear_of_the_end(tmp_path: Path) -> None:
    from pipeflow.stage import Stage

    order: list[str] = []

    class Counts(Stage):
        def run(self, item):
            return item

        def finish(self, ctx):
            order.append(f"{ctx.stage}{ctx.lane}")

    stages = {
        "a": {"uses": "numbers"},
        "b": {"uses": "counts", "from": "a", "replicas": 3},
        "c": {"uses": "counts", "from": "b"},
    }
    fine(go(tmp_path, stages, {"counts": Counts}))
    assert sorted(order[:3]) == ["b0", "b1", "b2"]
    assert order[3:] == ["c0"]


def test_an_async_job_past_its_timeout_is_cancelled_and_follows_on_error(tmp_path: Path) -> None:
    seen: list[int] = []

    @stage
    async def work(item: int) -> int:
        if item == 4:
            await asyncio.Event().wait()
        return item

    spec = chain(timeout="50ms", on_error={"skip": 1})
    outcome = fine(go(tmp_path, spec, {"work": work, "sink": collector(seen)}))
    assert seen == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert "timeout of 0.05 s" in outcome.lines("dead_letter.jsonl")[0]["error"]


def test_a_thread_past_its_timeout_ends_the_run(tmp_path: Path) -> None:
    release = threading.Event()

    @stage
    def work(item: int) -> int:
        if item == 4:
            assert release.wait(10)
        return item

    used = {"work": work, "sink": collector([])}
    outcome = go(tmp_path, chain(timeout="50ms"), used, until_it_ends(release))
    assert "stage 'b', item 4: still at work after its timeout of 0.05 s" in str(outcome.error)


def test_a_metric_listener_that_raises_ends_the_run(tmp_path: Path) -> None:
    @stage
    def work(item: int, ctx) -> int:
        ctx.log(n=item)
        return item

    async def act(pipeline: Any) -> Any:
        pipeline.on_metric(lambda line: 1 / 0)
        return await pipeline.run()

    outcome = go(tmp_path, chain(), {"work": work, "sink": collector([])}, act)
    assert isinstance(outcome.error, ZeroDivisionError)
