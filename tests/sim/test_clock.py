"""Virtual time: the loop jumps, refuses what comes from outside, and tells when nothing can happen."""

from __future__ import annotations

import asyncio
import gc
import math
import signal
import sys
import threading
import time

import anyio
import pytest

from pipeflow.errors import StallError
from pipeflow.sim import Deadlock, VirtualLoop, run


def test_virtual_weeks_take_no_time():
    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        for _ in range(20):
            await asyncio.sleep(100_000)
        return begun, loop.time()

    wall = time.perf_counter()
    assert run(main) == (0.0, 2_000_000.0)
    assert time.perf_counter() - wall < 0.5


def test_timers_of_one_moment_fire_in_the_order_they_were_set():
    fired: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in range(300):
            loop.call_at(1.0 + number % 3, fired.append, number)
        await asyncio.sleep(5)

    run(main)
    assert fired == sorted(range(300), key=lambda number: number % 3)


@pytest.mark.parametrize("start", [0.0, 0.1, 1e6, 3e9, 1e15])
def test_a_timer_fires_at_its_time_and_not_before(start):
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        times: list[float] = []
        due = [start, math.nextafter(start, math.inf), math.nextafter(start, math.inf) + 1]
        for when in due:
            loop.call_at(when, lambda: times.append(loop.time()))
        await asyncio.sleep(start + 10)
        assert times == due
        return times

    assert len(run(main)) == 3


def test_anyio_runs_on_it():
    async def main() -> list[object]:
        seen: list[object] = []
        lock, event = anyio.Lock(), anyio.Event()

        async def work(name: str, seconds: float) -> None:
            async with lock:
                await anyio.sleep(seconds)
                seen.append((name, anyio.current_time()))
            event.set()

        async with anyio.create_task_group() as group:
            group.start_soon(work, "a", 1000)
            group.start_soon(work, "b", 10)
            await event.wait()
            with anyio.move_on_after(5) as scope:
                await anyio.sleep(math.inf)
            seen.append((scope.cancelled_caught, anyio.current_time()))
        with pytest.raises(TimeoutError):
            with anyio.fail_after(50):
                await anyio.sleep(51)
        return seen

    assert run(main) == [("a", 1000.0), (True, 1005.0), ("b", 1010.0)]


def test_a_deadlock_names_the_tasks_and_where_they_wait():
    async def waits_for_ever(event: asyncio.Event) -> None:
        await event.wait()

    async def main() -> None:
        task = asyncio.get_running_loop().create_task(waits_for_ever(asyncio.Event()), name="the consumer")
        await asyncio.sleep(3)
        await task

    with pytest.raises(Deadlock) as caught:
        run(main)
    assert isinstance(caught.value, StallError)
    said = str(caught.value)
    assert "at virtual time 3 s" in said
    assert "task the consumer waits at" in said
    assert "in waits_for_ever" in said
    assert "await event.wait()" in said


def test_a_timer_at_infinity_is_a_deadlock_too():
    with pytest.raises(Deadlock):
        run(asyncio.sleep, math.inf)


def test_the_end_closes_everything():
    ended: list[str] = []

    async def lingers() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(1)
            ended.append("task")

    async def generates():
        try:
            yield 1
            yield 2
        finally:
            ended.append("generator")

    async def main() -> str:
        main.task = asyncio.get_running_loop().create_task(lingers())
        main.generator = generates()
        await anext(main.generator)
        await asyncio.sleep(0)
        return "done"

    loop = VirtualLoop()
    assert run(main, loop=loop) == "done"
    assert sorted(ended) == ["generator", "task"]
    assert loop.is_closed()
    assert main.task.cancelled()


def test_a_task_that_swallows_its_cancel_does_not_hold_the_end(caplog):
    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                continue

    async def main() -> None:
        main.task = asyncio.get_running_loop().create_task(stubborn())
        await asyncio.sleep(1)
        raise KeyError("the program's own")

    with pytest.raises(KeyError, match="the program's own"):
        run(main)
    del main.task
    gc.collect()
    assert caplog.records == []  # the task was given up, not lost


def test_what_a_callback_raises_ends_the_run(caplog):
    async def main() -> None:
        asyncio.get_running_loop().call_later(1, {}.__getitem__, "no such key")
        await asyncio.sleep(1000)
        raise AssertionError

    with pytest.raises(KeyError, match="no such key"):
        run(main)
    assert caplog.records == []


def test_other_threads_are_refused():
    async def main() -> BaseException:
        loop = asyncio.get_running_loop()
        loop.call_soon_threadsafe(lambda: None)  # its own thread may
        caught: list[BaseException] = []

        def other() -> None:
            try:
                loop.call_soon_threadsafe(print, "came in")
            except RuntimeError as error:
                caught.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return caught[0]

    said = str(run(main))
    assert "call_soon_threadsafe from another thread" in said
    assert "asyncio.run" in said


@pytest.mark.parametrize(
    "call",
    [
        lambda loop: loop.run_in_executor(None, print),
        lambda loop: loop.add_signal_handler(signal.SIGINT, print),
        lambda loop: loop.add_reader(0, print),
        lambda loop: loop.create_connection(asyncio.Protocol, "localhost", 1),
        lambda loop: loop.subprocess_exec(asyncio.SubprocessProtocol, sys.executable),
    ],
)
def test_what_reaches_outside_is_refused(call):
    async def main() -> None:
        before = threading.active_count()
        with pytest.raises(RuntimeError, match=r"loop\.\w+\(\): a virtual-time loop has one thread"):
            await call(asyncio.get_running_loop())
        assert threading.active_count() == before

    run(main)


def test_run_inside_a_loop_is_refused():
    async def main() -> None:
        with pytest.raises(RuntimeError, match="inside a running loop"):
            run(asyncio.sleep, 1)

    run(main)
