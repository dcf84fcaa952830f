"""The device protocol, held against every device: order, marks, copies, memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pipeflow.device.base import Permit

if TYPE_CHECKING:
    from targets import Bench, Target

pytestmark = pytest.mark.axiom("9.3")

MIB = 1 << 20


def test_a_stream_runs_in_order(target: Target) -> None:
    async def scene(bench: Bench) -> None:
        stream = bench.device.stream("a")

        def call() -> Any:
            first = bench.kernel(lambda: 1, slow=True)
            return bench.kernel(lambda a: a + 1, first)

        made, first = bench.job(stream, call)
        waits = [first] if bench.by_marks else []
        again, mark = bench.job(stream, lambda: bench.kernel(lambda a: a * 10, made), waits)
        await bench.passed(mark)
        assert bench.look(again) == 20
        assert not bench.hazards()

    target.bench(scene)


def test_a_stream_waits_for_another(target: Target) -> None:
    """The host does not: what is enqueued behind the wait starts after the mark."""

    async def scene(bench: Bench) -> None:
        first, second = bench.device.stream("a"), bench.device.stream("b")
        made, early = bench.job(first, lambda: bench.kernel(lambda: 7, slow=True))
        assert early.passed() is not bench.late
        used, mark = bench.job(second, lambda: bench.kernel(lambda a: a + 1, made), [early])
        await bench.passed(mark)
        assert bench.look(used) == 8
        await bench.passed(early)
        assert early.passed()
        assert bench.look(made) == 7
        assert not bench.hazards()

    target.bench(scene)


def test_one_wait_removed_is_seen(target: Target) -> None:
    """The planted fault of the test above; on the cpu a result is there at once, so none can show."""

    async def scene(bench: Bench) -> None:
        first, second = bench.device.stream("a"), bench.device.stream("b")
        made, filled = bench.job(first, lambda: bench.kernel(lambda: 0))
        await bench.passed(filled)
        made, early = bench.job(first, lambda: bench.kernel(lambda: 7, into=made, slow=True))
        used, mark = bench.job(second, lambda: bench.kernel(lambda a: a + 1, made))
        await bench.passed(mark)
        if not bench.late:
            assert bench.look(used) == 8
        else:
            assert bench.hazards() or bench.look(used) != 8
        await bench.passed(early)

    target.bench(scene)


def test_a_mark_is_passed_after_the_work_before_it(target: Target) -> None:
    async def scene(bench: Bench) -> None:
        stream = bench.device.stream("a")
        made, mark = bench.job(stream, lambda: bench.kernel(lambda: 3, slow=True))
        assert mark.passed() is not bench.late
        if bench.by_marks:
            assert bench.look(made) != 3
        await bench.passed(mark)
        assert mark.passed()
        assert bench.look(made) == 3
        await bench.passed(mark)  # again, at once

    target.bench(scene)


def test_marks_pass_in_the_order_of_their_stream(target: Target) -> None:
    async def scene(bench: Bench) -> None:
        stream = bench.device.stream("a")
        jobs = [bench.job(stream, lambda n=n: bench.kernel(lambda: n)) for n in range(20)]
        await bench.passed(jobs[-1][1])
        assert bench.by_marks or all(mark.passed() for _, mark in jobs)
        for number, (made, mark) in enumerate(jobs):
            await bench.passed(mark)
            assert bench.look(made) == number

    target.bench(scene)


def test_streams_can_be_entered_within_each_other(target: Target) -> None:
    """What is enqueued goes to the innermost, and to the outer one again behind it."""

    async def scene(bench: Bench) -> None:
        outer, inner = bench.device.stream("outer"), bench.device.stream("inner")
        with bench.on(outer), bench.device.entered(outer):
            first = bench.kernel(lambda: 1)
            with bench.device.entered(inner):
                within = bench.kernel(lambda: 2, slow=True)
                behind = inner.record()
            third = bench.kernel(lambda a: a + 2, first)
            mark = outer.record()
        await bench.passed(mark)
        assert bench.by_marks or behind.passed() is not bench.late
        assert (bench.look(first), bench.look(third)) == (1, 3)
        await bench.passed(behind)
        assert bench.look(within) == 2
        assert not bench.hazards()

    target.bench(scene)


@pytest.mark.parametrize("place", ["here", "beside"])
def test_a_copy_has_the_values_and_memory_of_its_own(target: Target, place: str) -> None:
    async def scene(bench: Bench) -> None:
        device = bench.device
        to = device if place == "here" else bench.beside
        stream = device.stream("a")

        def call() -> Any:
            made = {"a": bench.kernel(lambda: 5, slow=True), "more": [bench.kernel(lambda: 6), "text"]}
            copied = device.copy(made, to, stream)
            bench.kernel(lambda: 9, into=made["a"])
            return [made, copied]

        (made, copied), mark = bench.job(stream, call)
        await bench.passed(mark)
        assert list(copied) == ["a", "more"]
        assert copied["more"][1] == "text"
        assert (bench.look(copied["a"]), bench.look(copied["more"][0])) == (5, 6)
        assert bench.look(made["a"]) == 9
        addresses = [buffer.address for buffer in device.buffers([made, copied])]
        assert len(set(addresses)) == 4
        assert not bench.hazards()

    target.bench(scene)


def test_what_the_host_will_read_is_copied_behind_the_work(target: Target) -> None:
    async def scene(bench: Bench) -> None:
        stream = bench.device.stream("a")

        def call() -> Any:
            made = bench.kernel(lambda: 4, slow=True)
            return bench.device.to_host(made, stream)

        value, mark = bench.job(stream, call)
        await bench.passed(mark)
        assert bench.look(value) == 4
        assert str(value.device) == "cpu"
        assert not bench.hazards()

    target.bench(scene)


def test_buffers_are_the_distinct_storages(target: Target) -> None:
    async def scene(bench: Bench) -> None:
        def call() -> Any:
            big, small = bench.empty(4096 * 8), bench.empty(1024 * 8)
            value = {"big": big, "views": [bench.view(big), bench.view(big)], "small": (small, small), "n": 3}
            found = sorted(bench.device.buffers(value), key=lambda buffer: buffer.nbytes)
            assert [buffer.nbytes for buffer in found] == [1024 * 8, 4096 * 8]
            assert len({buffer.address for buffer in found}) == 2
            assert not bench.device.buffers(["text", 3, None])

        bench.job(bench.device.stream("a"), call)

    target.bench(scene)


def test_a_drain_is_over_once_everything_is(target: Target) -> None:
    async def scene(bench: Bench) -> None:
        streams = [bench.device.stream(name) for name in "ab"]
        jobs = [bench.job(stream, lambda: bench.kernel(lambda: 1, slow=True)) for stream in streams]
        await bench.call(bench.device.drain)
        assert bench.by_marks or all(mark.passed() for _, mark in jobs)
        for made, mark in jobs:
            await bench.passed(mark)
            assert bench.look(made) == 1
        assert not bench.hazards()

    target.bench(scene)


def test_memory_is_counted_and_goes_back_by_a_permit(target: Target) -> None:
    async def scene(bench: Bench) -> None:
        device, stream = bench.device, bench.device.stream("a")
        await bench.call(lambda: device.release(Permit(device.name)))
        before = device.memory()
        big = 64 * MIB
        held, mark = bench.job(stream, lambda: [bench.kernel(lambda: 1, into=bench.empty(big))])
        await bench.passed(mark)
        used = device.memory()
        # The cpu counts the whole process's, in which others may move a little.
        assert used.used - before.used >= big - 4 * MIB
        assert used.used <= used.reserved <= used.total
        del held, mark
        assert device.memory().used <= used.used - big + 4 * MIB or target.name.startswith("cpu")
        await bench.call(device.drain)
        freed = await bench.call(lambda: device.release(Permit(device.name)))
        after = device.memory()
        assert freed.device == device.name
        assert freed.before >= freed.after
        assert freed.after <= used.reserved - big + 4 * MIB
        assert after.releases == before.releases + 1
        assert not bench.hazards()

    target.bench(scene)


@pytest.mark.parametrize("kept", [True, False])
def test_what_is_kept_for_a_stream_is_not_given_on_under_its_work(target: Target, kept: bool) -> None:
    """Freed on the stream that owns it while another one still reads it (axiom 4.4). Not kept: the planted
    fault."""

    async def scene(bench: Bench) -> None:
        device = bench.device
        owner, reader = device.stream("owner"), device.stream("reader")
        made, filled = bench.job(owner, lambda: [bench.kernel(lambda: 1)])
        await bench.passed(filled)

        def use() -> Any:
            late = bench.kernel(lambda: 5, slow=True)
            if kept:
                count = device.keep([*made, bench.view(made[0])], reader)
                assert (count > 0) is bench.keeps
            return bench.kernel(lambda a, b: a + b, late, made.pop())

        used, mark = bench.job(reader, use)
        over, last = bench.job(owner, lambda: [bench.kernel(lambda: 100) for _ in range(4)])
        assert mark.passed() is not bench.late
        await bench.passed(mark)
        await bench.passed(last)
        assert [bench.look(each) for each in over] == [100] * 4
        if kept or not bench.keeps:
            assert bench.look(used) == 6
            assert not bench.hazards()
        else:
            assert bench.hazards() or bench.look(used) == 105

    target.bench(scene)
