"""The `cuda` device keeps the protocol: marks, streams, copies, drain, release."""

from __future__ import annotations

import threading

import pytest
import torch

pytestmark = pytest.mark.gpu

CYCLES = 1_000_000_000
"""About half a second of spinning on a current GPU: the slow work under test. A host cannot hold a kernel of
torch's back, so a test that says "not passed yet" takes it that the host gets there within that time."""


@pytest.fixture
def device():
    from pipeflow.device import make_device

    made = make_device("cuda:0")
    # The first launch of a kernel loads its code, which takes longer than what is measured here.
    stream = made.stream("warm-up")
    with made.entered(stream):
        value = torch.ones(1 << 20, device="cuda:0") * 3
        value += 1
        torch.cuda._sleep(10)
        value.sum()
        made.to_host(value[0], stream)
        torch.full((), 2.5, device="cuda:0")
        stream.record().wait()
    return made


def test_a_mark_is_passed_when_the_work_before_it_is_done(device) -> None:
    stream = device.stream("a")
    with device.entered(stream):
        torch.cuda._sleep(CYCLES)
        out = torch.ones(8, device="cuda:0") * 3
        mark = stream.record()
    assert not mark.passed()
    mark.wait()
    assert mark.passed()
    assert out.sum().item() == 24


def test_a_stream_waits_for_another_without_the_host(device) -> None:
    first, second = device.stream("a"), device.stream("b")
    with device.entered(first):
        value = torch.zeros(1 << 20, device="cuda:0")
        torch.cuda._sleep(CYCLES)
        value += 1
        mark = first.record()
    with device.entered(second):
        second.wait(mark)
        total = value.sum()
        after = second.record()
    assert not mark.passed()  # the host did not wait
    after.wait()
    assert total.item() == 1 << 20


def test_without_the_wait_the_value_is_wrong(device) -> None:
    """The planted fault: what the test above would not notice if streams were ordered by themselves."""
    first, second = device.stream("a"), device.stream("b")
    with device.entered(first):
        value = torch.zeros(1 << 20, device="cuda:0")
        first.record().wait()
        torch.cuda._sleep(CYCLES)
        value += 1
        mark = first.record()
    with device.entered(second):
        total = value.sum()
        second.record().wait()
    assert total.item() == 0
    mark.wait()


def test_a_mark_is_awaited_in_another_thread_with_the_loop_free(device) -> None:
    stream = device.stream("a")
    with device.entered(stream):
        torch.cuda._sleep(CYCLES)
        mark = stream.record()
    done = threading.Event()
    thread = threading.Thread(target=lambda: (mark.wait(), done.set()))
    thread.start()
    assert not done.is_set()
    assert done.wait(30)
    thread.join()


def test_what_the_host_will_read_is_copied_behind_the_work(device) -> None:
    stream = device.stream("a")
    with device.entered(stream):
        torch.cuda._sleep(CYCLES)
        loss = torch.full((), 2.5, device="cuda:0")
        host = device.to_host(loss, stream)
        mark = stream.record()
    assert host.is_pinned()
    mark.wait()
    assert host.item() == 2.5


def test_values_move_between_places(device) -> None:
    from pipeflow.device.cpu import Cpu

    stream = device.stream("a")
    with device.entered(stream):
        there = device.copy({"x": torch.arange(4)}, device, stream)
        back = device.copy(there, Cpu(), stream)
        stream.record().wait()
    assert there["x"].device.type == "cuda"
    assert back["x"].tolist() == [0, 1, 2, 3]


def test_memory_goes_back_only_with_a_permit(device) -> None:
    from pipeflow.device.base import Permit

    held = torch.empty(64 << 20, dtype=torch.uint8, device="cuda:0")
    del held
    device.drain()
    freed = device.release(Permit(device.name))
    assert freed.before - freed.after >= 64 << 20
    assert device.memory().releases == 1


def test_a_second_loop_on_one_gpu_is_refused() -> None:
    import asyncio

    from pipeflow.errors import DeviceError
    from pipeflow.gate import gates_of_this_loop

    async def drive() -> None:
        gates_of_this_loop(["cuda:0"])

    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    try:
        first.run_until_complete(drive())
        with pytest.raises(DeviceError, match="another event loop"):
            second.run_until_complete(drive())
        first.close()
        second.run_until_complete(drive())
    finally:
        first.close()
        second.close()
