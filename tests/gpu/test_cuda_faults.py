"""Faults of a real device, each in a process that it may cost: suspects (axiom 7.2), memory (7.3)."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu

HEAD = """
import asyncio, json, sys, torch
import pipeflow
from pipeflow import Registry, Stage
from pipeflow.errors import DeviceError

GIB = 1 << 30

class Numbers(Stage):
    def run(self):
        yield from range(24)

class Lift(Stage):
    def run(self, item):
        torch.cuda._sleep(40_000_000)
        return torch.full((1024,), item, device="cuda:0")

class Sink(Stage):
    seen = []
    def run(self, item):
        self.seen.append(int(item[0]))

def run(stages, folder, debug_sync=False, **uses):
    found = Registry()
    for name, cls in {"numbers": Numbers, "lift": Lift, "sink": Sink, **uses}.items():
        found.add(name, cls)
    file = {"pipeflow": 1, "name": "t", "stages": stages}
    async def main():
        async with pipeflow.open(file, registry=found, run_dir=folder, debug_sync=debug_sync) as pipeline:
            return await pipeline.run()
    asyncio.run(main())
"""


def child(source: str, folder: Path) -> tuple[int, Any, str]:
    """Run it: the exit code, what it printed last as JSON, and what it said besides."""
    done = subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(source), str(folder)],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    lines = done.stdout.strip().splitlines()
    return done.returncode, json.loads(lines[-1]) if lines else None, done.stderr


def test_words_are_written_as_the_device_comes_by() -> None:
    from pipeflow.device import make_device

    device = make_device("cuda:0")
    stream, other = device.stream("a"), device.stream("b")
    words, idle = device.words(stream), device.words(other)
    assert words is not None
    assert words.read() == (0, 0)
    with device.entered(stream):
        words.begin(7)
        torch.cuda._sleep(1_000_000_000)
        words.end(7)
        mark = stream.record()
    with device.entered(other):
        idle.begin(1)
        idle.end(1)
        other.record().wait()
    assert idle.read() == (1, 1)
    assert words.read() == (7, 0)
    mark.wait()
    assert words.read() == (7, 7)


FAULT = """
class Gathers(Stage):
    def run(self, item, ctx):
        torch.cuda._sleep(20_000_000)
        index = torch.full((8,), 10**6 if ctx.sequence == 13 else 1, device="cuda:0")
        return item[index]

    def close(self):
        print("closed", flush=True)

stages = {
    "a": {"uses": "numbers"},
    "lift": {"uses": "lift", "from": "a", "on": "cuda:0"},
    "gathers": {"uses": "gathers", "from": "lift", "on": "cuda:0", "replicas": 3, "in_flight": 2},
    "late": {"uses": "lift", "from": "a", "on": "cuda:0", "every": 100},
    "sink": {"uses": "sink", "from": "gathers"},
}
told = {}
try:
    run(stages, sys.argv[1] + "/run", gathers=Gathers, debug_sync=DEBUG)
except DeviceError as error:
    told["error"] = str(error)
try:
    run(stages, sys.argv[1] + "/again", gathers=Gathers)
except Exception as error:
    told["again"] = str(error)
print(json.dumps(told), flush=True)
"""


@pytest.mark.parametrize("debug_sync", [False, True])
def test_a_gather_out_of_bounds_is_that_stages_error(tmp_path: Path, debug_sync: bool) -> None:
    code, told, said = child(FAULT.replace("DEBUG", str(debug_sync)), tmp_path)
    assert told is not None, said
    names = told["error"].partition("suspects: ")[2].partition(". ")[0].split(", ")
    assert "gathers[1] item 13" in names, told
    assert not [name for name in names if name.startswith("late")], names
    if debug_sync:
        assert names == ["gathers[1] item 13"]
    assert "failed earlier in this process" in told["again"], told
    assert code == 0, f"the process ends by itself, whatever lies on the device: {said}"


PRESSURE = """
free, total = torch.cuda.mem_get_info()
held = torch.empty(free - 6 * GIB, dtype=torch.uint8, device="cuda:0")

class Hungry(Stage):
    def run(self, item):
        big = torch.empty(BYTES, dtype=torch.uint8, device="cuda:0")
        torch.cuda._sleep(200_000_000)
        big.fill_(1)
        return torch.full((8,), item, device="cuda:0")

stages = {
    "a": {"uses": "numbers"},
    "hungry": {"uses": "hungry", "from": "a", "on": "cuda:0", "replicas": 2},
    "sink": {"uses": "sink", "from": "hungry"},
}
told = {}
try:
    run(stages, sys.argv[1] + "/run", hungry=Hungry)
except Exception as error:
    told["error"] = str(error)
told["seen"] = Sink.seen
with open(sys.argv[1] + "/run/log.jsonl") as log:
    told["events"] = [json.loads(line)["event"] for line in log]
print(json.dumps(told), flush=True)
"""


def test_two_lanes_that_fit_one_by_one_go_through(tmp_path: Path) -> None:
    """Of 6 GiB each needs 4, in a pool of its own stream's."""
    code, told, said = child(PRESSURE.replace("BYTES", "4 * GIB"), tmp_path)
    assert told is not None, said
    assert "error" not in told, told
    assert told["seen"] == list(range(24))
    assert "parked" in told["events"]
    assert "released" in told["events"]
    assert code == 0


def test_what_never_fits_says_who_holds_the_memory(tmp_path: Path) -> None:
    code, told, said = child(PRESSURE.replace("BYTES", "9 * GIB"), tmp_path)
    assert told is not None, said
    assert "out of memory again, after unused memory was released" in told["error"]
    assert "Tried to allocate 9.00 GiB" in told["error"]
    assert "in all; held by" in told["error"]
    assert told["events"].count("parked") >= 1
    assert code == 0
