# ruff: noqa: TC003 - stages as an author writes them; annotations are read at run time
"""Stage code at its worst: cancels swallowed, odd errors, odd batches. The run ends and says who did it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flows import LIMIT, collector, fine, flow, go

import pipeflow
from pipeflow import DROP, Gather, GraphError, Port, Stage, StageError, StallError, Stuck, stage

# Linger ------------------------------------------------------------------------------------------------


class Lingering(Gather):
    linger = 0.0

    def full(self, members):
        return len(members) == 3

    def run(self, items: list) -> int:
        return len(items)


@pytest.mark.parametrize("uv", [False, True])
def test_a_linger_of_nothing_lets_every_batch_leave(tmp_path: Path, uv: bool) -> None:
    """uvloop gives a handle without a time where the time has passed."""
    seen: list[int] = []
    stages = {
        "a": {"uses": "numbers", "with": {"count": 20}},
        "b": {"uses": "gather", "from": "a"},
        "c": {"uses": "sink", "from": "b"},
    }
    fine(go(tmp_path, stages, {"gather": Lingering, "sink": collector(seen)}, uv=uv))
    assert sum(seen) == 20


def test_a_handle_need_not_know_its_time() -> None:
    from pipeflow.linger import Linger

    calls: list[tuple[float, Any]] = []

    class Handle:
        def cancel(self) -> None:
            calls.append((-1.0, None))

    class Loop:
        def call_at(self, when: float, call: Any, *args: Any) -> Handle:
            calls.append((when, args))
            return Handle()

    class Fake:
        name = "b"
        since = 5.0

        def __init__(self) -> None:
            self.engine = self
            self.loop = Loop()

        def waits_since(self) -> float:
            return self.since

    fake: Any = Fake()
    linger = Linger(fake, fake, 2.0)
    linger.keep()
    linger.keep()
    fake.since = 6.0
    linger.keep()
    assert calls == [(7.0, (5.0,)), (-1.0, None), (8.0, (6.0,))]


@pytest.mark.parametrize("seconds", [-0.5, float("nan")])
def test_a_linger_that_is_no_time_is_refused_at_load(tmp_path: Path, seconds: float) -> None:
    class Odd(Lingering):
        linger = seconds

    stages = {"a": {"uses": "numbers"}, "b": {"uses": "gather", "from": "a"}}
    outcome = go(tmp_path, stages, {"gather": Odd})
    assert isinstance(outcome.error, StageError)
    assert outcome.error.stage == "b"
    assert "linger" in str(outcome.error)


# A cancel swallowed ------------------------------------------------------------------------------------


def test_a_task_that_swallows_its_cancel_is_named_and_holds_nobody(tmp_path: Path) -> None:
    begun = asyncio.Event()
    release: list[asyncio.Future[None]] = []
    tasks: list[Any] = []

    async def waits_on(future: asyncio.Future[None]) -> None:
        while not future.done():
            try:
                await asyncio.shield(future)  # here
            except asyncio.CancelledError:
                continue

    @stage
    async def swallows(item: int) -> int:
        tasks.append(asyncio.current_task())
        release.append(asyncio.get_running_loop().create_future())
        begun.set()
        await waits_on(release[0])
        return item

    stages = {"a": {"uses": "numbers"}, "b": {"uses": "swallows", "from": "a"}}

    async def main() -> BaseException | None:
        async def act(pipeline: Any) -> None:
            pipeline._engine.open_sources()
            await begun.wait()
            pipeline.cancel()

        outcome = await flow(tmp_path, stages, {"swallows": swallows}, act, run={"stop": {"grace": "100ms"}})
        for future in release:
            future.set_result(None)
        await asyncio.wait(tasks)  # it ends, and nobody minds what it brings
        return outcome.error

    error = asyncio.run(asyncio.wait_for(main(), 10))
    assert isinstance(error, Stuck)
    text = str(error)
    assert "1 tasks did not come back within 0.1 s" in text
    assert "task b[0], in item 0" in text
    assert "await asyncio.shield(future)  # here" in text
    assert "await waits_on(release[0])" in text


def test_a_generator_whose_end_swallows_its_cancel_is_named(tmp_path: Path) -> None:
    release: list[asyncio.Future[None]] = []
    tasks: list[Any] = []
    made = asyncio.Event()

    class Source(Stage):
        async def run(self) -> Any:
            try:
                number = 0
                while True:
                    made.set()
                    yield number
                    number += 1
            finally:
                tasks.append(asyncio.current_task())
                release.append(asyncio.get_running_loop().create_future())
                while not release[0].done():
                    try:
                        await asyncio.shield(release[0])  # in its end
                    except asyncio.CancelledError:
                        continue

    stages = {
        "a": {"uses": "source"},
        "b": {"uses": "held", "from": "a", "queue": {"items": 1}},
    }
    go_on = threading.Event()

    @stage
    def held(item: int) -> None:
        assert go_on.wait(LIMIT)

    async def main() -> BaseException | None:
        async def act(pipeline: Any) -> None:
            pipeline._engine.open_sources()
            await made.wait()
            pipeline.cancel()
            go_on.set()

        uses = {"source": Source, "held": held}
        outcome = await flow(tmp_path, stages, uses, act, run={"stop": {"grace": "100ms"}})
        for future in release:
            future.set_result(None)
        await asyncio.wait(tasks)
        return outcome.error

    error = asyncio.run(asyncio.wait_for(main(), 10))
    assert isinstance(error, Stuck)
    assert "in the end of its generator" in str(error)
    assert "# in its end" in str(error)


SCRIPT = """
import asyncio
import sys
import pipeflow
from pipeflow import stage

@stage
def numbers():
    yield from range(10)

@stage
async def swallows(item: int) -> int:
    while True:
        try:
            await asyncio.get_running_loop().create_future()  # for ever
        except asyncio.CancelledError:
            pass

async def main():
    stages = {"a": {"uses": "numbers"}, "b": {"uses": "swallows", "from": "a"}}
    registry = pipeflow.Registry()
    registry.add("numbers", numbers)
    registry.add("swallows", swallows)
    document = {"pipeflow": 1, "name": "t", "stages": stages,
                "run": {"stall": "200ms", "stop": {"grace": "100ms"}}}
    async with pipeflow.open(document, registry=registry, run_dir=sys.argv[1]) as pipeline:
        await pipeline.run()

if __name__ == "__main__":
    asyncio.run(main())
"""


def _python(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(pipeflow.__file__).parent.parent)
    path = os.pathsep.join([root, str(tmp_path), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_a_process_ends_though_a_task_swallows_its_cancel(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = _python(tmp_path, "script.py", str(tmp_path / "run"))
    assert done.returncode == 1
    assert "no progress for 0.2 s" in done.stderr
    assert "1 tasks did not come back" in done.stderr


def test_the_command_ends_though_a_task_swallows_its_cancel(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "p.yaml").write_text(
        textwrap.dedent("""
            pipeflow: 1
            name: t
            stages:
              a: {uses: "script:numbers"}
              b: {uses: "script:swallows", from: a}
            run: {stall: 200ms, stop: {grace: 100ms}}
        """)
    )
    done = _python(tmp_path, "-m", "pipeflow", "run", "p.yaml", "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 1, done.stderr
    assert "no progress for 0.2 s" in done.stderr


def test_a_cancelled_task_cleans_up_before_the_stage_is_closed(tmp_path: Path) -> None:
    """And scopes within stage code work as in any task."""
    import anyio

    heard: list[str] = []
    begun = asyncio.Event()

    class Tidy(Stage):
        async def run(self, item: int) -> int:
            async with anyio.create_task_group() as group:
                group.start_soon(anyio.sleep, 0)
            with anyio.move_on_after(0.01):
                await anyio.sleep_forever()
            begun.set()
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                await asyncio.sleep(0.01)  # slow on purpose: a close that did not wait would come first
                heard.append("run")
            return item

        def close(self) -> None:
            heard.append("close")

        def setup(self, ctx) -> None:
            return

    async def act(pipeline: Any) -> None:
        pipeline._engine.open_sources()
        await begun.wait()
        pipeline.cancel()

    stages = {"a": {"uses": "numbers"}, "b": {"uses": "tidy", "from": "a"}}
    go(tmp_path, stages, {"tidy": Tidy}, act, run={"stop": {"grace": "200ms"}})
    assert heard == ["run", "close"]


# Stalls ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generates", [False, True])
def test_a_stall_shows_where_an_async_stage_awaits(tmp_path: Path, generates: bool) -> None:
    async def deep() -> None:
        await asyncio.get_running_loop().create_future()  # for ever

    if generates:

        @stage
        async def waits(item: int) -> Any:
            await deep()
            yield item
    else:

        @stage
        async def waits(item: int) -> int:
            await deep()
            return item

    stages = {"a": {"uses": "numbers"}, "b": {"uses": "waits", "from": "a"}}
    outcome = go(tmp_path, stages, {"waits": waits}, run={"stall": "200ms", "stop": {"grace": "100ms"}})
    assert isinstance(outcome.error, StallError)
    text = str(outcome.error)
    assert "task b[0], in item 0" in text
    assert "await deep()" in text
    assert "create_future()  # for ever" in text
    assert "does not end when cancelled" not in text
    assert not getattr(outcome.error, "__notes__", [])


# Gathers -----------------------------------------------------------------------------------------------


def _gather(run: Any) -> Any:
    return type("Odd", (Gather,), {"full": lambda self, members: len(members) == 2, "run": run})


def test_a_gather_that_yields_is_refused(tmp_path: Path) -> None:
    from pipeflow.stage import kind_of

    def generator(self: Any, items: list) -> Iterator[int]:
        yield from items

    async def agenerator(self: Any, items: list) -> Any:
        for item in items:
            yield item

    for run in (generator, agenerator):
        stages = {"a": {"uses": "numbers"}, "b": {"uses": "odd", "from": "a"}}
        outcome = go(tmp_path / run.__name__, stages, {"odd": _gather(run)})
        assert isinstance(outcome.error, GraphError)
        assert "one-to-many stage behind it" in str(outcome.error)
        with pytest.raises(TypeError, match="a gather makes one value"):
            kind_of(_gather(run))


def test_what_full_sees_is_not_built_anew_for_each_member(tmp_path: Path) -> None:
    shown: list[Any] = []

    class Big(Gather):
        def full(self, members):
            shown.append(members)
            return len(members) == 50

        def run(self, items: list) -> int:
            return len(items)

    seen: list[int] = []
    stages = {
        "a": {"uses": "numbers", "with": {"count": 100}},
        "b": {"uses": "big", "from": "a"},
        "c": {"uses": "sink", "from": "b"},
    }
    fine(go(tmp_path, stages, {"big": Big, "sink": collector(seen)}))
    assert seen == [50, 50]
    assert len({id(members) for members in shown}) == 2


def test_a_bucket_must_be_hashable_and_the_error_says_so(tmp_path: Path) -> None:
    class Listed(Lingering):
        linger = None

        def bucket(self, item):
            return [item]

    stages = {"a": {"uses": "numbers"}, "b": {"uses": "gather", "from": "a"}}
    outcome = go(tmp_path, stages, {"gather": Listed})
    assert isinstance(outcome.error, StageError)
    assert (outcome.error.stage, outcome.error.sequence) == ("b", 0)
    assert "the result of bucket must be hashable, but it is a list" in str(outcome.error)


# Ports -------------------------------------------------------------------------------------------------


class Parity(Stage):
    ports = ("even", "odd")

    def run(self, item: int) -> Any:
        return DROP if item == 4 else Port("odd" if item % 2 else "even", item)


def test_an_input_named_twice_is_refused_and_never_loses_items(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = {
        "a": {"uses": "numbers"},
        "b": {"uses": "parity", "from": "a"},
        "c": {"uses": "sink", "from": ["b.even", "b.odd", "b.even"]},
    }
    uses = {"parity": Parity, "sink": collector([])}
    refused = go(tmp_path / "on", stages, uses)
    assert isinstance(refused.error, GraphError)
    assert "'c' takes 'b.even' twice" in str(refused.error)

    import pipeflow.rules

    monkeypatch.setattr(pipeflow.rules, "RULES", ())
    outcome = go(tmp_path / "off", stages, uses)
    assert isinstance(outcome.error, StageError)
    assert outcome.error.stage == "c"
    assert "2 of its inputs from 'b' have an item" in str(outcome.error)


def test_a_generator_may_fill_many_ports_from_one_item(tmp_path: Path) -> None:
    class Both(Stage):
        ports = ("left", "right")

        def run(self, item: int) -> Any:
            yield Port("left", (item, "left"))
            yield Port("right", (item, "right"))

    seen: list[Any] = []
    stages = {
        "a": {"uses": "numbers", "with": {"count": 5}},
        "b": {"uses": "both", "from": "a"},
        "c": {"uses": "sink", "from": ["b.left", "b.right"]},
    }
    fine(go(tmp_path, stages, {"both": Both, "sink": collector(seen)}))
    assert seen == [(item, port) for item in range(5) for port in ("left", "right")]


# Errors ------------------------------------------------------------------------------------------------


def _raising(error: type[BaseException], where: str) -> tuple[Any, dict[str, Any]]:
    if where == "async":

        @stage
        async def bad(item: int) -> int:
            raise error

        return bad, {}
    if where == "bucket":

        class bad(Lingering):
            def bucket(self, item):
                raise error

        return bad, {}

    @stage
    def bad(item: int) -> int:
        raise error

    return bad, {"launcher": "inline"} if where == "inline" else {}


@pytest.mark.parametrize("where", ["thread", "inline", "async", "bucket"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_raised_by_stage_code_is_its_own_error(
    tmp_path: Path, where: str, error: type[BaseException]
) -> None:
    bad, more = _raising(error, where)
    stages = {"a": {"uses": "numbers"}, "b": {"uses": "bad", "from": "a", **more}}
    outcome = go(tmp_path, stages, {"bad": bad})
    assert type(outcome.error) is StageError
    assert (outcome.error.stage, outcome.error.sequence) == ("b", 0)
    assert isinstance(outcome.error.__cause__, error)


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize("where", ["thread", "async", "bucket", "setup", "finish"])
def test_an_error_without_a_text_names_its_stage_all_the_same(tmp_path: Path, where: str) -> None:
    if where in ("setup", "finish"):

        def hook(self: Any, ctx: Any) -> None:
            raise Mute

        bad: Any = type("Bad", (Stage,), {where: hook, "run": lambda self, item: None})
    else:
        bad, _ = _raising(Mute, where)
    stages = {"a": {"uses": "numbers"}, "b": {"uses": "bad", "from": "a"}}
    outcome = go(tmp_path, stages, {"bad": bad})
    assert type(outcome.error) is StageError
    assert outcome.error.stage == "b"
    assert "Mute: (no text: its __str__ raised ValueError)" in str(outcome.error)


def test_an_error_without_a_text_is_skipped_like_any_other(tmp_path: Path) -> None:
    bad, _ = _raising(Mute, "thread")
    stages = {
        "a": {"uses": "numbers", "with": {"count": 2}},
        "b": {"uses": "bad", "from": "a", "on_error": {"skip": 2}},
    }
    fine(go(tmp_path, stages, {"bad": bad}))
