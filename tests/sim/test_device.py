"""Streams, marks, queues, hosts, notices and faults of the simulated device."""

from __future__ import annotations

import asyncio
import itertools
import random
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
from scene import MIB, Lane, kinds, noticed, play

from pipeflow.device.base import Permit, map_tensors, tensors_in
from pipeflow.errors import DeviceError
from pipeflow.sim import (
    GARBAGE,
    Deadlock,
    Fault,
    HostBlocked,
    InterpreterLock,
    OutOfMemory,
    SimHost,
    SimTensor,
    World,
)


def times(world: World, kind: str) -> list[tuple[float, str]]:
    """(time, kernel) of each line of a kind in the log."""
    return [(round(entry[0], 9), entry[-1]) for entry in world.log if entry[1] == kind]


def calm(scene, **options) -> World:
    """Played with durations as written and notices at once."""
    world = World(lag=0.0, **options)
    world.run(scene, world)
    return world


# When things happen -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "starts"), [(1, [0, 1, 11, 12, 22]), (2, [0, 0, 1, 2, 10])])
def test_kernels_of_a_device_share_its_engine_as_they_become_ready(width, starts):
    async def scene(world: World) -> None:
        a, b = Lane(world, "a"), Lane(world, "b")
        for name in ("a1", "a2", "a3"):
            a.job(lambda name=name: world.kernel(name, 1))
        _, mark = b.job(lambda: [world.kernel(name, 10) for name in ("b1", "b2")])
        await noticed(world, mark)

    world = calm(scene, devices={"sim:0": {"width": width}})
    assert [at for at, _ in times(world, "start")] == starts
    assert world.devices["sim:0"].compute.busy == 23
    if width == 1:
        assert [name for _, name in times(world, "start")] == ["a1", "b1", "a2", "b2", "a3"]


def test_the_engine_is_given_to_who_was_ready_first():
    async def scene(world: World) -> None:
        lanes = [Lane(world, name) for name in "abcd"]
        marks = [lane.job(lambda lane=lane: world.kernel(lane.name, 1))[1] for lane in lanes]
        for mark in marks:
            await noticed(world, mark)

    assert [name for _, name in times(calm(scene), "start")] == list("abcd")


def test_copies_each_way_run_beside_kernels_at_their_bandwidth():
    async def scene(world: World) -> None:
        a, b, c = (Lane(world, name) for name in "abc")
        device, host = a.device, SimHost(world)
        tensor, mark = a.job(lambda: world.empty(100))
        slots = [device.pinned(100) for _ in range(2)]
        marks = [
            b.job(lambda: [host.copy(slot, device, b.stream) for slot in slots])[1],
            c.job(lambda: device.to_host(tensor, c.stream), waits=[mark])[1],
            a.job(lambda: world.kernel("k", 15))[1],
        ]
        for one in marks:
            await noticed(world, one)

    world = calm(scene, devices={"sim:0": {"host_bandwidth": 10.0}})
    assert sorted(times(world, "end")) == [
        (10.0, "copy to host"),
        (10.0, "copy to sim:0"),
        (15.0, "k"),
        (20.0, "copy to sim:0"),
    ]


def test_a_stream_waits_for_a_mark_of_another_device_and_the_host_for_none():
    async def scene(world: World) -> None:
        a, b = Lane(world, "a"), Lane(world, "b", "sim:1")
        _, made = a.job(lambda: world.kernel("first", 5))
        _, mark = b.job(lambda: world.kernel("second", 1), waits=[made])
        assert world.loop.time() == a.host.now == b.host.now == 0
        await noticed(world, mark)
        assert world.loop.time() == 6

    world = calm(scene, devices={"sim:0": {}, "sim:1": {}})
    assert times(world, "start") == [(0.0, "first"), (5.0, "second")]


def test_many_marks_that_wait_for_each_other_do_not_nest():
    async def scene(world: World) -> None:
        lanes = [Lane(world, str(number)) for number in range(1000)]
        mark = lanes[0].job(lambda: world.kernel("k", 1))[1]
        for lane in lanes[1:]:
            mark = lane.job(waits=[mark])[1]
        await noticed(world, mark)

    calm(scene)


def test_work_starts_no_earlier_than_its_host_was():
    async def scene(world: World) -> None:
        lane = Lane(world, "lane")

        def work():
            lane.host.work(3, lock=False)
            world.kernel("k", 1)

        _, mark = lane.job(work)
        assert lane.host.now == 3
        assert world.loop.time() == 0
        returned = lane.back()
        await returned
        assert world.loop.time() == 3
        await noticed(world, mark)

    assert times(calm(scene), "start") == [(3.0, "k")]

    async def behind(world: World) -> None:
        lane = Lane(world, "lane")

        def work():
            world.kernel("first", 1)
            lane.host.work(5)
            world.kernel("second", 1)

        await noticed(world, lane.job(work)[1])

    assert times(calm(behind), "start") == [(0.0, "first"), (5.0, "second")]


def test_a_mark_is_never_passed_before_its_call_is_over_and_passed_orders_who_asks():
    async def scene(world: World) -> None:
        lane = Lane(world, "lane")
        tensor, mark = lane.job(lambda: world.empty(10))
        assert not mark.passed()
        await asyncio.sleep(0)
        _, mark = lane.job(lambda: world.kernel("k", 1, [], [tensor], lambda: 5))
        assert not mark.passed()
        await asyncio.sleep(2)
        assert mark.passed()
        assert world.read(tensor) == 5

    assert calm(scene).hazards == []


def test_a_host_that_is_told_knows_what_the_one_who_told_it_knew_then():
    async def scene(world: World) -> None:
        a, b = Lane(world, "a"), Lane(world, "b")
        tensor, _ = a.job(lambda: world.empty(10))
        _, mark = a.job(lambda: world.kernel("k", 1, [], [tensor]))
        early = world.send()  # a job given before the notice ...
        await noticed(world, mark)
        with world.on(b.host, since=early):  # ... and begun after it
            world.read(tensor)
        assert kinds(world) == {"read-early"}
        world.hazards.clear()
        with world.on(b.host):
            world.read(tensor)
        assert world.hazards == []

    calm(scene)


# Launch queue -------------------------------------------------------------------------------------------


def test_a_full_launch_queue_pushes_the_host_and_leaves_the_lock_free():
    async def scene(world: World) -> None:
        lane, other = Lane(world, "lane"), world.make_host("other")

        def work():
            for _ in range(1021):
                world.kernel("k", 1)
            assert lane.host.now == 0
            world.kernel("k", 1)
            assert lane.host.now == 1
            for _ in range(10):
                world.kernel("k", 1)
            assert lane.host.now == 11

        lane.job(work)
        with world.on(other):
            other.work(2)
        assert other.now == 2
        await lane.back()
        assert world.loop.time() == 11
        lane.job(lambda: world.kernel("k", 1))  # 11 are done, the queue is full again
        assert lane.host.now == 12

    world = calm(scene)
    assert world.created_while_full == 0  # pooled events block nobody
    assert len(times(world, "full")) == 12


def test_the_estimate_follows_what_other_streams_did_to_the_queue():
    async def scene(world: World) -> None:
        a, b = Lane(world, "a"), Lane(world, "b")
        b.job(lambda: world.kernel("in the way", 100))
        a.job(lambda: [world.kernel("k", 1) for _ in range(3)])
        await asyncio.sleep(50)
        a.job(lambda: world.kernel("k", 1))
        assert a.host.now == 51  # behind by 50 already; how much longer nobody knows
        await asyncio.sleep(51.5)  # 101.5: the second of the three runs since 101
        a.job(lambda: world.kernel("k", 1))
        assert a.host.now == 102

    calm(scene, devices={"sim:0": {"queue": 3}})


def test_creating_something_while_any_queue_is_full_blocks_and_is_counted():
    async def scene(world: World) -> None:
        full, other = Lane(world, "full"), Lane(world, "other")
        pooled = [other.job()[1] for _ in range(3)]  # the pool holds four
        held, mark = other.job(lambda: world.empty(MIB))
        dropped, _ = other.job(lambda: world.empty(8 * MIB))
        del dropped, _
        await asyncio.sleep(1)
        del mark  # passed, so its event is free again
        full.job(lambda: [world.kernel("k", 1) for _ in range(10)])
        assert other.host.now == 1

        _, mark = other.job(lambda: world.empty(8 * MIB), waits=pooled)  # cached memory, a pooled event
        assert other.host.now == 1
        assert world.created_while_full == 0

        with world.on(other.host), other.device.entered(other.stream):
            fresh = world.empty(50 * MIB)
        assert world.created_while_full == 1
        assert other.host.now == 2  # a place in `full`
        del fresh
        third = world.make_host("third")
        with world.on(third):
            slot = other.device.pinned(64)
        assert (world.created_while_full, third.now) == (2, 2)
        fourth = world.make_host("fourth")
        more = []
        with world.on(fourth):
            more.extend(other.stream.record() for _ in range(other.device.events_free))
            assert fourth.now == 1
            more.append(other.stream.record())
        assert (world.created_while_full, fourth.now) == (3, 2)
        del slot, held, mark

    world = calm(scene, devices={"sim:0": {"queue": 10, "events": 4}})
    assert [entry[3] for entry in world.log if entry[1] == "created-while-full"] == [
        "device memory", "pinned memory", "an event",
    ]  # fmt: skip


def test_a_queue_that_a_hung_kernel_keeps_full_blocks_its_host_for_ever():
    async def scene(world: World) -> None:
        lane = Lane(world, "lane")
        caught = []

        def work():
            try:
                for _ in range(20):
                    world.kernel("k", 1)
            except Exception:  # stage code does not take it for its own
                raise AssertionError from None

        with pytest.raises(HostBlocked, match="launch queue of sim:0/lane"):
            lane.job(work)
        with pytest.raises(HostBlocked):
            lane.job()
        assert "moves no more" in lane.host.blocked
        world.returned(lane.host, caught.append)
        await asyncio.sleep(1e6)
        assert caught == []

    calm(scene, devices={"sim:0": {"queue": 10}}, faults=[Fault("hang", number=3)])


# Hosts --------------------------------------------------------------------------------------------------


def test_the_interpreter_lock_is_held_by_one_host_at_a_time():
    async def scene(world: World) -> None:
        hosts = [world.make_host(str(number)) for number in range(3)]
        for host in hosts:
            host.work(2)
        assert [host.now for host in hosts] == [2, 4, 6]
        free = world.make_host("free")
        free.work(2, lock=False)
        assert free.now == 2
        ahead = world.make_host("ahead")
        ahead.work(100, lock=False)
        ahead.work(1)
        early = world.make_host("early")
        early.work(3)  # is not held up by one who takes it later
        assert (ahead.now, early.now) == (101, 9)
        assert world.lock.held == 10

    calm(scene)


def test_reservations_of_the_lock_never_overlap():
    draw = random.Random(1)
    lock, taken, now = InterpreterLock(), [], 0.0
    for _ in range(2000):
        now += draw.choice([0, 0, 1])
        earliest, seconds = now + draw.choice([0, 0, 3, 50]), draw.randrange(1, 5)
        begins = lock.reserve(earliest, seconds, now)
        assert begins >= earliest
        taken.append((begins, begins + seconds))
    taken.sort()
    assert all(low[1] <= high[0] for low, high in itertools.pairwise(taken))


def test_a_call_that_waits_for_its_mark_comes_back_when_that_is_passed():
    async def scene(world: World) -> None:
        lane, other = Lane(world, "lane"), Lane(world, "other")

        def work():
            world.kernel("k", 5)
            lane.stream.record().wait()  # as --debug-sync does
            return world.empty(10)

        tensor, _ = lane.job(work)
        other.job(lambda: world.kernel("beside", 1))
        with world.on(lane.host), lane.device.entered(lane.stream):
            with pytest.raises(RuntimeError, match="still waits for sim:0/lane mark 1"):
                world.read(tensor)
            with pytest.raises(RuntimeError, match="let the call of `drain` return first"):
                lane.device.release(Permit("sim:0"))
        back = lane.back()
        assert await back is None
        assert world.loop.time() == 5
        lane.job(lambda: world.kernel("next", 1))
        await asyncio.sleep(10)

    assert times(calm(scene), "start") == [(0.0, "k"), (5.0, "beside"), (6.0, "next")]


def test_what_is_enqueued_after_a_wait_in_a_call_starts_after_it_on_any_stream():
    async def scene(world: World) -> None:
        lane, other = Lane(world, "lane"), Lane(world, "other", "sim:1")
        tensor, _ = lane.job(lambda: world.empty(10))

        def work():
            world.kernel("k", 5, [], [tensor])
            lane.stream.record().wait()
            with other.device.entered(other.stream):
                world.kernel("after", 1)

        lane.job(work)
        await lane.back()
        assert world.read(tensor) == ("k",)
        await asyncio.sleep(10)

    world = calm(scene, devices={"sim:0": {}, "sim:1": {}})
    assert world.hazards == []
    assert times(world, "start") == [(0.0, "k"), (5.0, "after")]


def test_a_drain_comes_back_when_all_streams_are_idle_and_knows_all():
    async def scene(world: World) -> None:
        lanes = [Lane(world, "a"), Lane(world, "b")]
        tensors = []
        for seconds, lane in zip((3, 4), lanes, strict=True):
            tensor, _ = lane.job(lambda: world.empty(10))
            lane.job(lambda s=seconds, t=tensor: world.kernel("k", s, [], [t]))
            tensors.append(tensor)
        helper = Lane(world, "helper")
        with world.on(helper.host):
            helper.device.drain()
        assert await helper.back() is None
        assert world.loop.time() == 7
        assert [world.read(tensor) for tensor in tensors] == [("k",), ("k",)]

    assert calm(scene).hazards == []


def test_the_loop_never_waits_for_a_device():
    async def scene(world: World) -> None:
        lane = Lane(world, "lane")
        _, mark = lane.job(lambda: world.kernel("k", 1))
        with pytest.raises(RuntimeError, match="the loop must not wait for a device"):
            mark.wait()
        await asyncio.sleep(2)
        mark.wait()  # passed: no wait

    calm(scene)


# Notices and determinism --------------------------------------------------------------------------------


async def busy(world: World, seconds) -> None:
    lanes = [Lane(world, name) for name in "abc"]
    waiting = []
    for item in range(20):
        mark = None
        for lane in lanes:

            def work():
                tensor = world.empty(MIB)
                world.kernel("k", seconds() / 1e4, [], [tensor])

            _, mark = lane.job(work, waits=[mark] if mark else [], item=item)
            waiting.append(noticed(world, mark))
    await asyncio.gather(*waiting)


def test_the_same_seed_gives_the_same_log_and_another_seed_another_order_of_notices():
    logs = [play(busy, seed).log for seed in (1, 1, 2)]
    assert logs[0] == logs[1]

    def notices(log):
        return [entry[2] for entry in log if entry[1] == "notice"]

    assert sorted(notices(logs[0])) == sorted(notices(logs[2]))

    orders = []
    for seed in (1, 1, 2):  # with the same durations, too
        world = World(seed)
        world.run(busy, world, lambda: 0.1)
        orders.append(notices(world.log))
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


@pytest.mark.parametrize("seed", range(10))
def test_notices_come_late_and_out_of_order_also_of_one_stream(seed):
    async def scene(world: World, seconds) -> None:
        lane = Lane(world, "lane")
        marks = [lane.job(lambda: world.kernel("k", 1e-6))[1] for _ in range(20)]
        await asyncio.gather(*(noticed(world, mark) for mark in marks))

    world = play(scene, seed)
    order = [entry[2] for entry in world.log if entry[1] == "notice"]
    passed = [entry[2] for entry in world.log if entry[1] == "pass"]
    assert sorted(order) == sorted(passed)
    assert order != passed
    at = {(entry[1], entry[2]): entry[0] for entry in world.log if entry[1] in ("notice", "pass")}
    lags = [at["notice", name] - at["pass", name] for name in passed]
    assert all(0 <= lag <= world.lag for lag in lags)
    assert max(lags) > world.lag / 2


# Faults -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["illegal access", "assert"])
def test_a_fault_is_sticky_and_told_by_every_mark_of_the_device(kind):
    async def scene(world: World) -> None:
        lane, other, far = Lane(world, "lane"), Lane(world, "other"), Lane(world, "far", "sim:1")
        _, old = lane.job(lambda: world.kernel("k", 1), item=0)
        assert await noticed(world, old) is None
        assert old.passed()
        tensor, beside = other.job(lambda: world.empty(10), item=0)
        _, beside = other.job(lambda: world.kernel("k", 1), item=1)
        late = noticed(world, beside)
        _, bad = lane.job(lambda: world.kernel("k", 1), item=1)
        _, fine = far.job(lambda: world.kernel("k", 100))
        fault = await noticed(world, bad)
        assert isinstance(fault, DeviceError)
        said = {"assert": "device-side assert", "illegal access": "illegal memory access"}[kind]
        assert said in str(fault)
        assert "'k' of 'lane' item 1 on sim:0/lane" in str(fault)
        await late
        for mark in (old, beside, bad):
            assert mark.failed is not None
            assert not mark.passed()
            with pytest.raises(DeviceError, match=said):
                mark.wait()
            assert isinstance(await noticed(world, mark), DeviceError)
        device = lane.device
        host = SimHost(world)
        pinned = world.empty(10)
        for call in (
            lane.job,
            lambda: device.stream("new"),
            lambda: device.pinned(10),
            device.drain,
            lambda: device.release(Permit("sim:0")),
            lambda: device.to_host(tensor, lane.stream),
            lambda: host.copy(pinned, device, lane.stream),
            lambda: lane.stream.wait(fine),
        ):
            with pytest.raises(DeviceError, match=said):
                call()
        with device.entered(lane.stream):
            for call in (lambda: world.empty(10), lambda: world.kernel("k", 1), lambda: world.sleep(1)):
                with pytest.raises(DeviceError, match=said):
                    call()
        assert device.memory().used == 512  # a look at counters is no call
        assert await noticed(world, fine) is None  # the other device goes on

    world = calm(
        scene,
        devices={"sim:0": {}, "sim:1": {}},
        faults=[Fault(kind, device="sim:0", stage="lane", sequence=1, kernel="k")],
    )
    assert len(times(world, "fault")) == 1


def test_a_notice_under_way_tells_the_fault_and_a_blocked_call_comes_back_with_it():
    async def scene(world: World) -> None:
        lane, helper = Lane(world, "lane"), Lane(world, "helper")
        _, good = lane.job(lambda: world.kernel("k", 1))
        under_way = noticed(world, good)
        lane.job(lambda: world.kernel("bad", 1e-9))
        with world.on(helper.host):
            helper.device.drain()
        assert isinstance(await helper.back(), DeviceError)
        assert good.passed_at == 1.0
        assert isinstance(await under_way, DeviceError)

    world = World(seed=3, lag=1.0, faults=[Fault("assert", kernel="bad")])
    world.run(scene, world)


def test_what_runs_as_its_device_fails_never_ends():
    async def scene(world: World) -> None:
        lane, other = Lane(world, "lane"), Lane(world, "other")
        tensor, _ = other.job(lambda: world.empty(10))
        other.job(lambda: world.kernel("beside", 5, [], [tensor]))
        _, bad = lane.job(lambda: world.kernel("bad", 1))
        await noticed(world, bad)
        await asyncio.sleep(10)
        assert world.peek(tensor) is GARBAGE

    world = calm(scene, devices={"sim:0": {"width": 2}}, faults=[Fault("assert", kernel="bad")])
    assert times(world, "end") == []


def test_a_hung_kernel_stops_what_is_behind_it_and_the_rest_goes_on():
    async def scene(world: World) -> None:
        lane, far = Lane(world, "lane"), Lane(world, "far", "sim:1")
        marks = [lane.job(lambda: world.kernel("k", 1), item=item)[1] for item in range(4)]
        _, behind = far.job(waits=[marks[3]])
        future = noticed(world, marks[1])
        assert await noticed(world, marks[0]) is None
        await asyncio.sleep(1e6)
        assert not future.done()
        assert [mark.passed() for mark in (*marks, behind)] == [True, False, False, False, False]
        assert lane.device.fault is None
        await future

    world = World(devices={"sim:0": {}, "sim:1": {}}, faults=[Fault("hang", number=1)])
    with pytest.raises(Deadlock, match="await future"):
        world.run(scene, world)


def test_a_planned_out_of_memory_changes_nothing_and_happens_once():
    async def scene(world: World) -> None:
        lane = Lane(world, "lane")
        lane.job(lambda: world.empty(10), item=0)
        before = lane.device.memory()
        with pytest.raises(OutOfMemory):
            lane.job(lambda: world.empty(10), item=1)
        assert lane.device.memory() == before
        lane.job(lambda: world.empty(10), item=1)

    calm(scene, faults=[Fault("oom", stage="lane", sequence=1)])
    with pytest.raises(ValueError, match="no fault 'fire'; known are"):
        Fault("fire")


# The protocol -------------------------------------------------------------------------------------------


@dataclass
class Pair:
    left: object
    right: object


def test_tensors_are_seen_in_values_and_copied_with_their_structure():
    async def scene(world: World) -> None:
        a, b = Lane(world, "a"), Lane(world, "b", "sim:1")

        def work():
            tensor = world.empty(100, shape=(5, 20), dtype="int8")
            world.kernel("k", 1, [], [tensor], lambda: "v")
            return Pair(tensor, {"x": [1, (tensor.view(0, 10),)]})

        value, made = a.job(work)
        assert [t.nbytes for t in tensors_in(value)].count(100) == 1
        assert map_tensors(value, lambda t: t.nbytes) == Pair(100, {"x": [1, (10,)]})
        assert a.device.buffers(value) == [(value.left.data_ptr(), 100, 0)]
        kept = value.left.detach()
        assert a.device.buffers(value)[0].holders == 1
        assert a.device.keep(value, b.stream) == 1
        there, mark = b.job(lambda: a.device.copy(value, b.device, b.stream), waits=[made])
        assert isinstance(there.left, SimTensor)
        assert (there.left.device, there.left.shape, there.left.dtype) == ("sim:1", (5, 20), "int8")
        assert there.left.block.stream is b.stream
        await noticed(world, mark)
        assert world.read(there.left) == "v"
        with pytest.raises(RuntimeError, match="runs on sim:1, but sim:0 block 1 is on sim:0: copy it"):
            b.job(lambda: world.kernel("k", 1, [value.left]))
        for host in (a.host, world.loop_host):  # it has left its device
            with world.on(host), pytest.raises(RuntimeError, match="needs a device"):
                world.kernel("k", 1)
        del kept

    assert calm(scene, devices={"sim:0": {}, "sim:1": {}}).hazards == []


def test_a_copy_to_another_device_is_ordered_with_its_default_stream_both_ways():
    async def scene(world: World, seconds) -> None:
        lane, far = Lane(world, "lane"), world.devices["sim:1"]
        tensor, _ = lane.job(lambda: world.empty(MIB))
        lane.job(lambda: world.kernel("k", seconds(), [], [tensor]))
        for _ in range(2):  # the second takes the first one's block
            there, _ = lane.job(lambda: lane.device.copy(tensor, far, lane.stream))
            assert there.block.stream is far.default
            with world.on(lane.host), far.entered(far.default):
                world.kernel("use", seconds(), [there])
            there = None
        assert far.memory().reserved == 2 * MIB

    assert play(scene, devices={"sim:0": {}, "sim:1": {}}).hazards == []


def test_a_copy_within_a_device_is_a_kernel_of_it():
    async def scene(world: World) -> None:
        lane = Lane(world, "lane")
        tensor, _ = lane.job(lambda: world.empty(100))
        _, mark = lane.job(lambda: lane.device.copy(tensor, lane.device, lane.stream))
        await noticed(world, mark)

    device = calm(scene, devices={"sim:0": {"memory_bandwidth": 50.0}}).devices["sim:0"]
    assert (device.compute.busy, device.inward.busy, device.outward.busy) == (2.0, 0, 0)


@pytest.mark.parametrize("pull", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_copies_between_devices_in_a_loop_of_items_are_clean(pull, seed):
    async def scene(world: World, seconds) -> None:
        make, use = Lane(world, "make"), Lane(world, "use", "sim:1")
        copier = Lane(world, "copy", "sim:1" if pull else "sim:0")
        for item in range(6):

            def work(item=item):
                tensor = world.empty(MIB)
                world.kernel("make", seconds(), [], [tensor], lambda: item)
                return tensor

            tensor, made = make.job(work, item=item)
            there, copied = copier.job(
                lambda tensor=tensor: make.device.copy(tensor, use.device, copier.stream), waits=[made]
            )
            _, used = use.job(
                lambda there=there: world.kernel("use", seconds(), [there]), waits=[copied], item=item
            )
            await noticed(world, used)
            assert world.read(there) == item
            del tensor, there

    world = play(scene, seed, devices={"sim:0": {}, "sim:1": {}})
    assert world.hazards == []
    assert world.devices["sim:1"].memory().reserved == 2 * MIB


def test_a_closed_device_and_a_closed_world_take_no_work_but_let_tensors_go():
    async def scene(world: World):
        lane = Lane(world, "lane")
        tensor, _ = lane.job(lambda: world.empty(10))
        lane.device.keep(tensor, lane.device.default)
        lane.job(lambda: world.kernel("k", 100, [], [tensor]))
        with world.on(lane.host), lane.device.entered(lane.device.default):
            world.kernel("k", 100, [tensor])
        lane.device.close()
        with pytest.raises(DeviceError, match="was closed"):
            lane.job()
        return tensor

    world = World()
    tensor = world.run(scene, world)
    del tensor


def test_no_torch_and_no_thread():
    code = (
        "import sys, threading\n"
        "from pipeflow.sim import World\n"
        "from pipeflow.device.base import map_tensors, tensors_in\n"
        "world = World()\n"
        "async def main():\n"
        "    device = world.devices['sim:0']\n"
        "    stream = device.stream('a')\n"
        "    with device.entered(stream):\n"
        "        value = [world.empty(10)]\n"
        "        assert len(list(tensors_in(value))) == 1\n"
        "        device.copy(value, device, stream)\n"
        "    assert map_tensors((1, value), lambda t: t.nbytes) == (1, [10])\n"
        "    done = world.loop.create_future()\n"
        "    world.notice(stream.record(), done.set_result)\n"
        "    await done\n"
        "    assert threading.active_count() == 1\n"
        "world.run(main)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_torch_tensors_are_still_seen_beside_simulated_ones():
    import torch

    async def scene(world: World) -> None:
        simulated, real = world.empty(10), torch.zeros(2)
        assert list(tensors_in([real, simulated, 3])) == [simulated, real]
        assert map_tensors((real, simulated), type) == (torch.Tensor, SimTensor)

    calm(scene)


def test_thirty_thousand_kernels_on_twenty_streams_take_seconds():
    async def scene(world: World) -> None:
        lanes = [Lane(world, str(number)) for number in range(20)]
        mark = None
        for item in range(600):
            lane = lanes[item % 20]

            def work():
                tensor = world.empty(1000)
                for _ in range(50):
                    world.kernel("k", 1e-6, [], [tensor])

            _, mark = lane.job(work, waits=[mark] if mark else [])
            if item % 20 == 0:
                await noticed(world, mark)

    begun = time.process_time()
    world = calm(scene)
    assert time.process_time() - begun < 10
    assert len(times(world, "end")) > 29_000
    assert world.hazards == []
