"""Hazards are found by the order that a program guarantees, in every schedule; and memory is given on."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
from typing import Any

import pytest
from scene import MIB, SEEDS, Lane, kinds, noticed, play

from pipeflow.device.base import Permit
from pipeflow.errors import DeviceError
from pipeflow.sim import GARBAGE, OutOfMemory, Part, SimHost, World

# Planted hazards, each with the same program put right --------------------------------------------------


def two_lanes(*, wait: bool):
    async def scene(world: World, seconds) -> None:
        make, use = Lane(world, "make"), Lane(world, "use")

        def write():
            tensor = world.empty(MIB)
            world.kernel("write", seconds(), writes=[tensor], compute=lambda: "made")
            return tensor

        tensor, made = make.job(write, item=3)
        out = []

        def read():
            out.append(world.empty(MIB))
            world.kernel("read", seconds(), [tensor], out, lambda value: value)

        _, used = use.job(read, waits=[made] if wait else [], item=3)
        await noticed(world, used)
        scene.seen = world.read(out[0])

    return scene


@pytest.mark.parametrize("seed", SEEDS)
def test_a_missing_wait_is_a_race_whatever_the_timing(seed):
    scene = two_lanes(wait=False)
    world = play(scene, seed)
    assert [hazard.kind for hazard in world.hazards] == ["race"]
    hazard = world.hazards[0]
    assert hazard.first == ("make", 3, "sim:0/make", "write")
    assert hazard.second == ("use", 3, "sim:0/use", "read")
    assert "nothing orders 'read' of 'use' item 3 on sim:0/use after 'write' of 'make' item 3" in str(hazard)
    assert scene.seen is GARBAGE  # in this schedule too, where the writer may have been first

    scene = two_lanes(wait=True)
    assert play(scene, seed).hazards == []
    assert scene.seen == "made"


def write_again(*, wait: bool):
    async def scene(world: World, seconds) -> None:
        make, use = Lane(world, "make"), Lane(world, "use")

        def write(tensor=None):
            tensor = world.empty(MIB) if tensor is None else tensor
            world.kernel("write", seconds(), writes=[tensor])
            return tensor

        tensor, made = make.job(write)
        _, used = use.job(lambda: world.kernel("read", seconds(), [tensor]), waits=[made])
        _, again = make.job(lambda: write(tensor), waits=[used] if wait else [])
        await noticed(world, again)

    return scene


@pytest.mark.parametrize("seed", SEEDS)
def test_a_write_after_a_read_needs_order(seed):
    hazards = play(write_again(wait=False), seed).hazards
    assert [(hazard.kind, hazard.first.name, hazard.second.name) for hazard in hazards] == [
        ("race", "read", "write")
    ]
    assert play(write_again(wait=True), seed).hazards == []


def test_two_unordered_writes_are_a_race():
    async def scene(world: World, seconds) -> None:
        a, b = Lane(world, "a"), Lane(world, "b")
        tensor, mark = a.job(lambda: world.empty(10))
        a.job(lambda: world.kernel("first", seconds(), writes=[tensor]))
        b.job(lambda: world.kernel("second", seconds(), writes=[tensor]), waits=[mark])

    hazards = play(scene).hazards
    assert [(h.kind, h.first.name, h.second.name) for h in hazards] == [("race", "first", "second")]


def reuse(*, keep: bool, told: bool = False):
    """A reader on another stream; the tensor is dropped under it; its stream allocates again."""

    async def scene(world: World, seconds) -> None:
        make, use = Lane(world, "make"), Lane(world, "use")

        def write(name: str):
            tensor = world.empty(3 * MIB)
            world.kernel(name, seconds(), writes=[tensor], compute=lambda: name)
            return tensor

        tensor, made = make.job(lambda: write("old"))
        address = tensor.data_ptr()
        out = []

        def read():
            out.append(world.empty(10))
            world.kernel("late read", seconds(), [tensor], out, lambda value: value)

        _, used = use.job(read, waits=[made])
        if keep:
            assert world.devices["sim:0"].keep([tensor], use.stream) == 1
        if told:
            await noticed(world, used)
        tensor = None
        fresh, again = make.job(lambda: write("new"))
        scene.reused = fresh.data_ptr() == address
        await noticed(world, again)
        await noticed(world, used)
        scene.seen = world.read(out[0])
        del fresh  # and once the reader is known to be done, the block comes back
        fresh, again = make.job(lambda: write("newer"))
        other, again = make.job(lambda: write("newest"))
        scene.back = address in (fresh.data_ptr(), other.data_ptr())
        await noticed(world, again)

    return scene


@pytest.mark.parametrize("seed", SEEDS)
def test_a_block_given_on_under_a_reader_is_found_and_keep_holds_it_back(seed):
    scene = reuse(keep=False)
    world = play(scene, seed)
    assert scene.reused
    assert [(h.kind, h.first.name, h.second.name) for h in world.hazards] == [("reused", "late read", "new")]
    assert scene.seen in ("old", GARBAGE)  # by luck

    scene = reuse(keep=True)
    assert play(scene, seed).hazards == []
    assert not scene.reused
    assert scene.back
    assert scene.seen == "old"

    scene = reuse(keep=False, told=True)  # the host knew that the reader was done
    assert play(scene, seed).hazards == []
    assert scene.reused
    assert scene.seen == "old"


def test_a_reader_that_is_late_gets_garbage_once_the_new_owner_wrote():
    async def scene(world: World, _) -> None:
        make, use = Lane(world, "make"), Lane(world, "use")
        tensor, made = make.job(lambda: world.empty(MIB))
        _, made = make.job(lambda: world.kernel("old", 1, writes=[tensor]))
        out, _ = use.job(lambda: world.empty(10))

        def read():
            world.sleep(100)
            world.kernel("read", 1, [tensor], [out], lambda value: value)

        _, used = use.job(read, waits=[made])
        tensor = None
        fresh, _ = make.job(lambda: world.empty(MIB))
        make.job(lambda: world.kernel("new", 1, writes=[fresh]))
        await noticed(world, used)
        scene.seen = world.read(out)

    assert kinds(play(scene)) == {"reused"}
    assert scene.seen is GARBAGE


def test_what_the_dropping_host_knew_to_be_done_needs_no_order_any_more():
    """A job given before the notice takes the block after it: no hazard, as it got the block by the drop."""

    async def scene(world: World, seconds) -> None:
        make, use = Lane(world, "make"), Lane(world, "use")
        tensor, made = make.job(lambda: world.empty(MIB))
        _, used = use.job(lambda: world.kernel("read", seconds(), [tensor]), waits=[made])
        early = world.send()
        await noticed(world, used)
        address = tensor.data_ptr()
        tensor = None
        with world.on(make.host, since=early), make.device.entered(make.stream):
            fresh = world.empty(MIB)
            world.kernel("write", seconds(), [], [fresh])
        assert fresh.data_ptr() == address

    assert play(scene).hazards == []


def test_what_was_kept_comes_back_once_its_stream_is_through_and_needs_no_order_then():
    async def scene(world: World, _) -> None:
        make, use = Lane(world, "make"), Lane(world, "use")
        tensor, made = make.job(lambda: world.empty(MIB))
        use.job(lambda: world.kernel("read", 1, [tensor]), waits=[made])
        make.device.keep(tensor, use.stream)
        address = tensor.data_ptr()
        tensor = None
        await asyncio.sleep(5)  # the allocator asks the device itself; no lane was told
        fresh, _ = make.job(lambda: world.empty(MIB))
        make.job(lambda: world.kernel("write", 1, [], [fresh]))
        assert fresh.data_ptr() == address

    assert play(scene).hazards == []


@pytest.mark.parametrize("used", ["low", "high"])
@pytest.mark.parametrize("taken", ["low", "high", "both"])
def test_who_used_which_bytes_is_remembered_as_blocks_grow_together_and_are_cut(used, taken):
    """Two neighbours, one still in use by another stream; both are dropped; one range or all is given on."""

    async def scene(world: World, seconds) -> None:
        make, use = Lane(world, "make"), Lane(world, "use")
        (low, high), made = make.job(lambda: (world.empty(9 * MIB), world.empty(11 * MIB // 2)))
        rest, _ = make.job(lambda: world.empty(11 * MIB // 2))  # the segment is full
        assert high.data_ptr() - low.data_ptr() == 9 * MIB
        old = low if used == "low" else high
        _, mark = use.job(lambda: world.kernel("late read", seconds(), [old]), waits=[made])
        spans = {"low": low.block.span, "high": high.block.span}
        old = low = high = None
        if taken == "both":
            fresh, _ = make.job(lambda: world.empty(29 * MIB // 2))
            assert fresh.block.span == (spans["low"][0], spans["high"][1])
        else:
            first, _ = make.job(lambda: world.empty(9 * MIB))
            fresh = first
            if taken == "high":
                fresh, _ = make.job(lambda: world.empty(11 * MIB // 2))
            assert fresh.block.span == spans[taken]
        fresh, _ = make.job(lambda: fresh)
        make.job(lambda: world.kernel("write", seconds(), [], [fresh]))
        await noticed(world, mark)
        del rest

    assert kinds(play(scene)) == ({"reused"} if taken in (used, "both") else set())


def test_a_block_nobody_used_in_between_hides_no_earlier_user():
    async def scene(world: World, seconds) -> None:
        make, use = Lane(world, "make"), Lane(world, "use")
        tensor, made = make.job(lambda: world.empty(MIB))
        use.job(lambda: world.kernel("late read", seconds(), [tensor]), waits=[made])
        tensor = None
        between, _ = make.job(lambda: world.empty(MIB))
        del between
        fresh, _ = make.job(lambda: world.empty(MIB))
        make.job(lambda: world.kernel("write", seconds(), [], [fresh]))

    assert kinds(play(scene)) == {"reused"}


def test_pinned_memory_is_given_on_only_when_no_copy_uses_it_any_more():
    async def scene(world: World, _) -> None:
        lane = Lane(world, "lane")
        tensor, _ = lane.job(lambda: world.empty(MIB))
        addresses = []
        for wait in (0, 0, 1):
            await asyncio.sleep(wait)
            pinned, _ = lane.job(lambda: lane.device.to_host(tensor, lane.stream))
            addresses.append(pinned.data_ptr())
            del pinned
        first, second, third = addresses
        assert first != second
        assert third in (first, second)

    assert play(scene).hazards == []


def release(*, awaited: str):
    async def scene(world: World, seconds) -> None:
        device = world.devices["sim:0"]
        lane, helper = Lane(world, "work"), Lane(world, "helper")

        def work():
            tensor = world.empty(30 * MIB)
            world.kernel("work", seconds(), writes=[tensor])

        _, mark = lane.job(work, item=7)
        if awaited == "the mark":
            await noticed(world, mark)
        elif awaited == "a drain":
            with world.on(helper.host):
                device.drain()
            assert await helper.back() is None
        with world.on(helper.host):
            scene.freed = device.release(Permit(device.name))
        scene.fault = await noticed(world, mark)

    return scene


@pytest.mark.parametrize("seed", SEEDS)
def test_a_release_under_work_in_flight_faults_and_a_quiet_one_is_clean(seed):
    scene = release(awaited="nothing")
    world = play(scene, seed)
    assert kinds(world) == {"unmapped"}
    assert world.hazards[0].first == ("work", 7, "sim:0/work", "work")
    assert isinstance(scene.fault, DeviceError)
    assert "illegal memory access" in str(scene.fault)

    for awaited in ("the mark", "a drain"):
        scene = release(awaited=awaited)
        world = play(scene, seed)
        assert world.hazards == []
        assert scene.fault is None
        assert scene.freed == ("sim:0", 30 * MIB, 0)
        assert world.devices["sim:0"].memory()[:2] == (0, 0)
        assert world.devices["sim:0"].memory().releases == 1


def test_a_release_after_work_that_merely_happened_to_end_is_a_hazard_but_no_fault():
    async def scene(world: World, _) -> None:
        device = world.devices["sim:0"]
        lane, helper = Lane(world, "work"), Lane(world, "helper")

        def work():
            tensor = world.empty(30 * MIB)
            world.kernel("work", 1.0, writes=[tensor])

        lane.job(work)
        await asyncio.sleep(5)
        with world.on(helper.host):
            device.release(Permit(device.name))
        assert device.fault is None

    assert kinds(play(scene)) == {"unmapped"}


def test_release_unmaps_all_that_is_free_beside_what_is_in_use():
    async def scene(world: World, _) -> None:
        device = world.devices["sim:0"]
        lane = Lane(world, "a")
        kept, _ = lane.job(lambda: world.empty(MIB // 2))  # cut from a segment of 2 MiB
        big, _ = lane.job(lambda: world.empty(40 * MIB))
        del big
        assert device.memory()[:2] == (MIB // 2, 42 * MIB)
        with world.on(lane.host):
            freed = device.release(Permit(device.name))
        assert freed == ("sim:0", 42 * MIB, MIB // 2)
        del kept  # and grows into nothing that was unmapped
        fresh, _ = lane.job(lambda: world.empty(MIB))
        assert device.memory()[:2] == (MIB, 2 * MIB + MIB // 2)
        del fresh

    assert play(scene).hazards == []


def test_an_address_kept_beyond_its_tensor_is_use_after_free_and_faults_once_unmapped():
    async def scene(world: World, _) -> None:
        device = world.devices["sim:0"]
        lane = Lane(world, "graph")
        tensor, _ = lane.job(lambda: world.empty(MIB))
        storage = tensor.untyped_storage()
        del tensor
        _, mark = lane.job(lambda: world.kernel("replay", 1, [storage]))
        assert await noticed(world, mark) is None
        assert kinds(world) == {"use-after-free"}
        with world.on(lane.host):
            device.release(Permit(device.name))
        _, mark = lane.job(lambda: world.kernel("replay", 1, [storage]))
        assert "illegal memory access" in str(await noticed(world, mark))

    assert kinds(play(scene)) == {"use-after-free"}


def host_read(*, told: bool):
    async def scene(world: World, seconds) -> None:
        lane = Lane(world, "lane")

        def work():
            tensor = world.empty(MIB)
            world.kernel("work", seconds(), writes=[tensor], compute=lambda: 42)
            return lane.device.to_host(tensor, lane.stream)

        value, mark = lane.job(work, item=1)
        if told:
            await noticed(world, mark)
        else:
            await asyncio.sleep(seconds())
        scene.seen = world.read(value)

    return scene


@pytest.mark.parametrize("seed", SEEDS)
def test_a_host_read_before_its_mark_is_found_though_the_work_may_be_done(seed):
    scene = host_read(told=False)
    world = play(scene, seed)
    assert [(h.kind, h.first.name, h.second.line) for h in world.hazards] == [
        ("read-early", "copy to host", "loop")
    ]
    assert scene.seen is GARBAGE
    scene = host_read(told=True)
    assert play(scene, seed).hazards == []
    assert scene.seen == 42


def pinned(*, told: bool):
    async def scene(world: World, seconds) -> None:
        lane = Lane(world, "lane", "sim:0")
        slot = lane.device.pinned(MIB)
        host = world.loop_host
        world.write(slot, "first")

        def load():
            return SimHost(world).copy(slot, lane.device, lane.stream)

        value, mark = lane.job(load)
        if told:
            await noticed(world, mark)
        assert world.host is host
        world.write(slot, "second")
        _, last = lane.job(lambda: world.kernel("use", seconds(), [value]))
        await noticed(world, last)
        scene.seen = world.peek(value)

    return scene


@pytest.mark.parametrize("seed", SEEDS)
def test_a_pinned_slot_rewritten_under_a_copy_is_found(seed):
    world = play(pinned(told=False), seed)
    assert [(h.kind, h.first.name, h.second.name) for h in world.hazards] == [
        ("race", "copy to sim:0", "write on the host")
    ]
    scene = pinned(told=True)
    assert play(scene, seed).hazards == []
    assert scene.seen == "first"


# What memory holds --------------------------------------------------------------------------------------


def test_memory_never_written_is_garbage_and_garbage_spreads():
    async def scene(world: World, _) -> None:
        lane = Lane(world, "lane")

        def work():
            a, b = world.empty(10), world.empty(10)
            world.kernel("sum", 1, [a], [b], lambda value: 1 / 0)  # is not called with garbage
            return b

        tensor, mark = lane.job(work)
        await noticed(world, mark)
        assert world.read(tensor) is GARBAGE

    assert play(scene).hazards == []


def test_compute_runs_as_the_kernel_ends():
    async def scene(world: World, _) -> None:
        lane = Lane(world, "lane")
        times = []

        def work():
            a, b, c = (world.empty(10) for _ in range(3))
            world.kernel("one", 2, [], [a], lambda: times.append(world.loop.time()) or 5)
            world.kernel("two", 3, [a], [b, c], lambda a: (a + 1, a + 2))
            world.kernel("plain", 1, [b], [a])
            return a, b, c

        tensors, mark = lane.job(work)
        assert times == []
        await noticed(world, mark)
        assert times == [2.0]
        assert [world.read(tensor) for tensor in tensors] == [("plain", 6), 6, 7]

    world = World(lag=0.0)
    world.run(scene, world, None)
    assert world.hazards == []


def test_a_compute_function_that_fails_is_told_as_a_fault_of_its_kernel():
    async def scene(world: World, _) -> None:
        lane = Lane(world, "lane")
        tensor, _ = lane.job(lambda: world.empty(10))
        _, mark = lane.job(lambda: world.kernel("bad", 1, [], [tensor], lambda: {}["key"]), item=4)
        fault = await noticed(world, mark)
        assert "'bad' of 'lane' item 4 on sim:0/lane raised KeyError: 'key'" in str(fault)

    play(scene)


def test_views_share_memory_and_versions_and_are_checked_by_range():
    async def scene(world: World, _) -> None:
        a, b = Lane(world, "a"), Lane(world, "b")
        tensor, mark = a.job(lambda: world.empty(100, shape=(10, 10)))
        low, high = tensor.view(0, 40), tensor.view(40, 60)
        assert (low.shape, tensor.shape, tensor.detach().shape) == ((40,), (10, 10), (10, 10))
        assert tensor.untyped_storage().data_ptr() == tensor.data_ptr() == high.data_ptr() - 40
        assert tensor.untyped_storage().nbytes() == 100
        _, first = a.job(lambda: world.kernel("low", 1, [], [low], lambda: "l"))
        _, second = b.job(lambda: world.kernel("high", 1, [], [high], lambda: "h"), waits=[mark])
        assert world.hazards == []  # two ranges
        assert (tensor._version, low._version) == (2, 2)
        await noticed(world, first)
        await noticed(world, second)
        assert world.read(tensor) == ("l", "h")
        assert world.read(high.view(10, 5)) == Part("h", 10, 5)
        assert world.read(tensor.view(30, 20)) is GARBAGE  # a part of each
        assert not world.hazards
        b.job(lambda: world.kernel("all", 1, [], [tensor]))
        a.job(lambda: world.kernel("late", 1, [low]))
        assert kinds(world) == {"race"}
        with pytest.raises(ValueError, match="lie outside"):
            tensor.view(90, 20)
        memory = a.device.memory().used
        tensor = high = None
        assert a.device.memory().used == memory  # `low` holds the block
        low = None
        assert a.device.memory().used == 0

    play(scene)


# The allocator ------------------------------------------------------------------------------------------


def test_sizes_are_rounded_and_reserved_as_torch_does():
    async def scene(world: World, _) -> None:
        lane = Lane(world, "lane")
        memory = lane.device.memory

        def sizes(nbytes: int) -> tuple[int, int]:
            before = memory()
            tensor, _ = lane.job(lambda: world.empty(nbytes))
            after = memory()
            scene.held.append(tensor)
            return after.used - before.used, after.reserved - before.reserved

        assert sizes(1) == (512, 2 * MIB)
        assert sizes(513) == (1024, 0)
        assert sizes(MIB) == (MIB, 0)
        assert sizes(MIB) == (MIB, 2 * MIB)
        assert sizes(3 * MIB) == (3 * MIB, 20 * MIB)
        assert sizes(9 * MIB) == (9 * MIB, 0)
        assert sizes(33 * MIB) == (34 * MIB, 34 * MIB)  # the rest is too small to be cut off
        scene.held.clear()
        assert memory().used == 0
        before = memory().reserved
        assert sizes(20 * MIB) == (20 * MIB, 0)  # free neighbours grew together again
        assert sizes(30 * MIB)[1] == 0
        assert memory().reserved == before

    scene.held = []
    assert play(scene).hazards == []


def test_blocks_are_given_on_at_once_but_only_on_their_stream():
    async def scene(world: World, _) -> None:
        a, b = Lane(world, "a"), Lane(world, "b")
        tensor, _ = a.job(lambda: world.empty(50 * MIB))
        address = tensor.data_ptr()
        del tensor
        other, _ = b.job(lambda: world.empty(50 * MIB))
        assert other.data_ptr() != address
        again, _ = a.job(lambda: world.empty(50 * MIB))
        assert again.data_ptr() == address
        assert a.device.memory().reserved == 100 * MIB
        log = [entry[1:] for entry in world.log if entry[1] in ("alloc", "reuse", "free")]
        assert [kind for kind, *_ in log] == ["alloc", "free", "alloc", "reuse"]

    assert play(scene).hazards == []


def test_where_nothing_fits_cached_memory_goes_back_first():
    """As in torch: the host waits for the work under it, and what it enqueues then starts after that."""

    async def scene(world: World, _) -> None:
        lane, other = Lane(world, "lane"), Lane(world, "other")
        device = lane.device

        def work() -> None:
            world.kernel("long", 5.0, [], [world.empty(60 * MIB)])

        lane.job(work)
        assert device.memory()[:2] == (0, 60 * MIB)
        begun: list[float] = []

        def ask() -> Any:
            made = world.empty(70 * MIB)
            world.kernel("after", 1.0, [], [made], lambda: begun.append(world.loop.time()))
            return made

        made, mark = other.job(ask)
        assert device.memory()[:2] == (70 * MIB, 70 * MIB)
        assert await noticed(world, mark) is None
        assert begun == [pytest.approx(6.0, abs=4)]
        assert begun[0] >= 2.5, "the memory under the long kernel was not there before"
        assert made is not None

    world = play(scene, devices={"sim:0": {"total": 100 * MIB}})
    assert world.hazards == []


def test_what_another_stream_may_still_use_is_a_hazard_as_it_goes_back():
    """Torch with expandable segments waits for a segment's own stream alone."""

    async def scene(world: World, _) -> None:
        lane, other = Lane(world, "lane"), Lane(world, "other")

        def make() -> Any:
            made = world.empty(60 * MIB)
            world.kernel("make", 0.1, [], [made])
            return made

        held = [lane.job(make)]
        other.job(lambda: world.kernel("read", 5.0, [held[0][0]], []), waits=[held[0][1]])
        held.clear()
        with pytest.raises(DeviceError, match="illegal memory access"):
            lane.job(lambda: world.empty(70 * MIB))

    world = play(scene, devices={"sim:0": {"total": 100 * MIB}})
    assert kinds(world) == {"unmapped"}


def test_out_of_memory_changes_nothing():
    async def scene(world: World, _) -> None:
        lane = Lane(world, "lane")
        device = lane.device
        held, _ = lane.job(lambda: world.empty(60 * MIB))
        more, _ = lane.job(lambda: world.empty(30 * MIB))
        before, log = device.memory(), len(world.log)
        with pytest.raises(OutOfMemory) as caught:
            lane.job(lambda: world.empty(40 * MIB))
        said = str(caught.value)
        assert "Tried to allocate 40.00 MiB" in said
        assert "total capacity is 100.00 MiB, of which 10.00 MiB is free" in said
        assert "90.00 MiB is allocated, and 0 bytes is reserved but unallocated" in said
        del caught
        gc.collect()
        assert device.memory() == before
        assert len(world.log) == log
        del more
        fits, _ = lane.job(lambda: world.empty(30 * MIB))
        assert device.memory().reserved == before.reserved
        with world.on(lane.host), pytest.raises(OutOfMemory):
            device.copy(held, device, lane.stream)
        assert fits is not None
        assert device.fault is None

    assert play(scene, devices={"sim:0": {"total": 100 * MIB}}).hazards == []


@pytest.mark.parametrize("seed", range(10))
def test_random_allocations_never_overlap_and_add_up(seed):
    draw = random.Random(seed)

    async def scene(world: World, _) -> None:
        lanes = [Lane(world, "a"), Lane(world, "b")]
        device = lanes[0].device
        held = []
        for _ in range(400):
            if held and draw.random() < 0.5:
                held.pop(draw.randrange(len(held)))
            elif draw.random() < 0.02:
                with world.on(lanes[0].host):
                    device.drain()
                await lanes[0].back()
                with world.on(lanes[0].host):
                    device.release(Permit(device.name))
                assert device.memory().reserved == device.memory().used
            else:
                size = int(2 ** draw.uniform(0, 26))
                held.append(draw.choice(lanes).job(lambda size=size: world.empty(size))[0])
            spans = sorted(tensor.block.span for tensor in held)
            assert all(low[1] <= high[0] for low, high in itertools.pairwise(spans))
            assert all(high - low >= t.nbytes for t in held for low, high in [t.block.span])
            assert device.memory().used == sum(high - low for low, high in spans)
            assert device.memory().used <= device.memory().reserved
        held.clear()
        with world.on(lanes[0].host):
            device.drain()
        await lanes[0].back()
        with world.on(lanes[0].host):
            device.release(Permit(device.name))
        assert device.memory()[:2] == (0, 0)

    assert play(scene, seed).hazards == []
