# ruff: noqa: TC001, TC003, RUF012 - classes as a stage author writes them; annotations are read at run time
"""What a checkpoint holds, when it is there, which ones stay, and what stands when one fails (axiom 8.1)."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from flows import fine, go, heard, numbers
from kills import World, run_of

from pipeflow import Pipeline
from pipeflow.checkpoint import store
from pipeflow.checkpoint.state import join, split
from pipeflow.context import Context
from pipeflow.errors import DeviceError, PipeflowError, StageError
from pipeflow.observe.folder import FolderError
from pipeflow.stage import Resource, Stage

STAGES: dict[str, Any] = {
    "rows": {"uses": "records"},
    "train": {"uses": "train", "writes": "weights", "from": "rows"},
    "sink": {"uses": "ledger", "from": "train"},
}


def steps(folder: Path) -> list[int | None]:
    return [store.step_of(path) for path in store.committed(folder)]


# Content ---------------------------------------------------------------------------------------------------


class Tensor(Resource):
    """Four numbers that are written in place."""

    def open(self, ctx: Any) -> torch.Tensor:
        return torch.zeros(4)

    def state(self, value: torch.Tensor) -> dict[str, Any]:
        return {"tensor": value}

    def load(self, value: torch.Tensor, state: dict[str, Any]) -> None:
        value.copy_(state["tensor"])


class AddOne(Stage):
    """Writes the tensor; its own state is the same number. The state is the live tensors, not copies."""

    device = True
    stateful = True
    writes = {"tensor": Tensor}

    def setup(self, ctx: Context) -> None:
        self._own = torch.zeros((), dtype=torch.int64)

    def run(self, item: int, ctx: Context) -> int:
        ctx.write("tensor").add_(1)
        self._own += 1
        return item

    def state(self) -> dict[str, Any]:
        return {"own": self._own, "list": [self._own, 1.5]}

    def load(self, state: dict[str, Any]) -> None:
        self._own.copy_(state["own"])


@pytest.mark.axiom("3.5", "8.1")
@pytest.mark.parametrize("device", ["cpu", "cpu-late"])
def test_it_is_of_the_version_right_after_its_step(tmp_path: Path, device: str) -> None:
    stages: dict[str, Any] = {
        "rows": {"uses": "numbers", "with": {"count": 30}},
        "add": {"uses": "add", "from": "rows", "writes": "tensor", "on": device},
    }
    fine(
        go(
            tmp_path,
            stages,
            {"add": AddOne, "tensor": Tensor},
            resources={"tensor": {"uses": "tensor"}},
            run={"checkpoint": {"of": "add", "every": 4, "keep": 99}},
        )
    )
    assert steps(tmp_path) == [4, 8, 12, 16, 20, 24, 28, 30]
    for path in store.committed(tmp_path):
        saved = store.read(path)
        step = store.step_of(path)
        states = saved.document["stages"]["add"]["states"]
        own = join(states["add[0]"], saved.tensors)
        assert own["own"].item() == own["list"][0].item() == step
        assert own["list"][1] == 1.5
        assert join(states["resource:tensor"], saved.tensors)["tensor"].tolist() == [step] * 4


KINDS = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def test_tensors_and_json_come_back_to_the_bit(tmp_path: Path) -> None:
    value: dict[str, Any] = {f"{kind}": torch.arange(6).reshape(2, 3).to(kind) for kind in KINDS}
    value |= {
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 3),
        "turned": torch.arange(6).reshape(2, 3).T,
    }
    value |= {"deep": [{"a": None, "b": [True, 1, "é"]}, float("inf"), -0.0], "nan": float("nan")}
    tensors: dict[str, Any] = {}
    plain = split(value, "stage", tensors, lambda tensor: tensor.clone())
    path = tmp_path / store.FOLDER / "step-00000001"
    store.write(path, {"plain": plain}, tensors)
    saved = store.read(path)
    back = join(saved.document["plain"], saved.tensors)
    for name, tensor in value.items():
        if isinstance(tensor, torch.Tensor):
            assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape)
            bits = [each.flatten().view(torch.uint8) for each in (back[name], tensor)]
            assert torch.equal(*bits)
    assert back["deep"] == value["deep"]
    assert str(back["deep"][2]) == "-0.0"
    assert str(back["nan"]) == "nan"
    from safetensors.torch import load_file  # the file is one that others read

    assert set(load_file(path / store.TENSORS)) == set(tensors)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a": [object()]}, r"train\[0\]/a/0: a object cannot be saved"),
        ({"a": {1: 2}}, r"train\[0\]/a: the key 1 of a state must be text"),
        ({"a": {"$tensor": 2}}, "must be text"),
    ],
)
def test_a_state_that_cannot_be_saved_fails_the_run(tmp_path: Path, state: Any, said: str) -> None:
    class Odd(Stage):
        def run(self, item: int) -> int:
            return item

        def state(self) -> dict[str, Any]:
            return state

    stages: dict[str, Any] = {"rows": {"uses": "numbers"}, "train": {"uses": "odd", "from": "rows"}}
    outcome = go(tmp_path, stages, {"odd": Odd}, run={"checkpoint": {"of": "train"}})
    assert isinstance(outcome.error, StageError)
    with pytest.raises(StageError, match=said):
        raise outcome.error


# When ------------------------------------------------------------------------------------------------------


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    class Scored(Stage):
        def run(self, item: int, ctx: Context) -> None:
            ctx.log(tau={7: 5.0}.get(item, item / 10))

    stages: dict[str, Any] = {
        "rows": {"uses": "numbers", "with": {"count": 21}},
        "train": {"uses": "double", "from": "rows"},
        "evaluate": {"uses": "scored", "from": {"a": "rows", "b": "train"}},
    }

    class Both(Scored):
        def run(self, item: Any, ctx: Context) -> None:
            super().run(item["a"], ctx)

    more = {"of": "train", "every": 4, "keep": 2, "best": "evaluate.tau"}
    fine(go(tmp_path, stages, {"scored": Both}, run={"checkpoint": more}))
    assert steps(tmp_path) == [8, 20, 21]


def test_a_score_of_an_earlier_run_counts(tmp_path: Path) -> None:
    class Scored(Stage):
        def run(self, item: Any, ctx: Context) -> None:
            ctx.log(tau=1.0 / (item["a"] + 1))

    stages: dict[str, Any] = {
        "rows": {"uses": "numbers", "with": {"count": 8}},
        "train": {"uses": "double", "from": "rows"},
        "evaluate": {"uses": "scored", "from": {"a": "rows", "b": "train"}},
    }
    run = {"checkpoint": {"of": "train", "every": 2, "keep": 1, "best": "evaluate.tau"}}
    fine(go(tmp_path, stages, {"scored": Scored}, run=run))
    assert steps(tmp_path) == [2, 8]
    stages["rows"]["with"]["count"] = 12
    fine(go(tmp_path, stages, {"scored": Scored}, run={**run, "resume": str(tmp_path)}))
    assert steps(tmp_path) == [2, 12]


def test_gaps_are_steps_too(tmp_path: Path) -> None:
    world = World()
    stages: dict[str, Any] = {
        **STAGES,
        "odd": {"uses": "odd", "from": "rows"},
        "train": {"uses": "train", "writes": "weights", "from": "odd"},
    }
    fine(world.go(tmp_path, stages, run=run_of(every=5, keep=9)))
    assert steps(tmp_path) == [5, 10, 15, 20]


def test_a_drain_saves_what_flowed_out(tmp_path: Path) -> None:
    whole, world = World(), World()
    fine(whole.go(tmp_path / "whole", STAGES, run={"checkpoint": {"of": "train", "every": 100}}))

    async def drain(pipeline: Pipeline) -> Any:
        world.killer.kill = lambda: pipeline._engine.loop.call_soon_threadsafe(pipeline.drain)
        return await pipeline.run()

    world.killer.at = 25
    drained = fine(world.go(tmp_path / "run", STAGES, drain, run=run_of(every=100)))
    assert drained.value["status"] == "drained"
    done = len(world.ledgers["all"])
    assert 0 < done < 20
    assert steps(tmp_path / "run") == [done]
    again = fine(world.go(tmp_path / "run", STAGES, run=run_of(every=100)))
    assert again.value["status"] == "done"
    assert world.ledgers == whole.ledgers
    assert steps(tmp_path / "run") == [done, 20]


def test_it_is_on_the_disk_when_the_run_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    real = store.write

    def slow(*given: Any) -> None:
        begun.set()
        assert goes_on.wait(10)
        real(*given)

    async def act(pipeline: Pipeline) -> Any:
        running = asyncio.ensure_future(pipeline.run())
        await heard(begun)
        while pipeline._engine._open_nodes:
            await asyncio.sleep(0)
        assert not pipeline._engine.ended.is_set()
        goes_on.set()
        await running
        return steps(tmp_path)

    monkeypatch.setattr(store, "write", slow)
    assert fine(World().go(tmp_path, STAGES, act, run=run_of(every=100))).value == [20]


def test_a_run_that_is_through_has_nothing_left_to_do(tmp_path: Path) -> None:
    world = World()
    fine(world.go(tmp_path, STAGES, run=run_of()))
    before, calls = dict(world.ledgers), world.killer.calls
    again = fine(world.go(tmp_path, STAGES, run=run_of()))
    assert world.ledgers == before
    assert world.killer.calls == calls + 20  # of the source, which was cut last before its first record
    assert again.value["stages"]["train"]["made"] == 20


# Faults ----------------------------------------------------------------------------------------------------


@pytest.mark.axiom("8.1")
def test_a_fault_behind_step_k_keeps_its_checkpoint_from_appearing(tmp_path: Path) -> None:
    class Fails(Stage):
        def run(self, item: int) -> None:
            if item == 7:
                raise RuntimeError("at the step of a checkpoint")

    stages: dict[str, Any] = {
        "rows": {"uses": "numbers", "with": {"count": 30}},
        "train": {"uses": "double", "from": "rows"},
        "slow": {"uses": "fails", "from": "join"},
        "join": {"uses": "first", "from": {"a": "rows", "b": "train"}},
    }

    class First(Stage):
        def run(self, item: Any) -> int:
            return item["a"]

    outcome = go(
        tmp_path, stages, {"fails": Fails, "first": First}, run={"checkpoint": {"of": "train", "every": 4}}
    )
    assert isinstance(outcome.error, StageError)
    assert steps(tmp_path) == [4]


@pytest.mark.axiom("8.1")
def test_a_late_device_fault_keeps_its_checkpoint_from_appearing(tmp_path: Path) -> None:
    """The copies of step 8 are on their way when the device reports a fault: step 4 is the last one."""
    stages: dict[str, Any] = {
        "rows": {"uses": "numbers", "with": {"count": 30}},
        "add": {"uses": "add", "from": "rows", "writes": "tensor", "on": "cpu-late"},
    }

    async def act(pipeline: Pipeline) -> Any:
        stream = pipeline._assembly.runners["add"].lanes[0].stream
        record, seen = stream.record, []

        class Faulty:
            def passed(self) -> bool:
                return False

            def wait(self) -> None:
                raise RuntimeError("an illegal access")

        def faulty(*given: Any) -> Any:
            seen.extend([] if given else [None])  # a job's mark is told of its value
            return Faulty() if not given and len(seen) == 2 else record(*given)

        stream.record = faulty  # type: ignore[method-assign]
        return await pipeline.run()

    outcome = go(
        tmp_path, stages, {"add": AddOne, "tensor": Tensor}, act,
        resources={"tensor": {"uses": "tensor"}}, run={"checkpoint": {"of": "add", "every": 4}},
    )  # fmt: skip
    assert isinstance(outcome.error, DeviceError)
    assert steps(tmp_path) == [4]


class FullDisk:
    """`os`, on a disk that is full from call number `after` on that writes."""

    def __init__(self, after: int) -> None:
        self._left = after
        self.hit = False

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in ("open", "write", "fsync", "rename"):
            return real

        def call(*args: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left < 0:
                self.hit = True
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **options)

        return call


def test_a_disk_that_fills_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages: dict[str, Any] = {
        "rows": {"uses": "numbers", "with": {"count": 5}},
        "add": {"uses": "add", "from": "rows", "writes": "tensor", "on": "cpu"},
    }
    for after in range(200):
        folder = tmp_path / str(after)
        disk = FullDisk(after)
        with monkeypatch.context() as patch:
            patch.setattr(store, "os", disk)
            outcome = go(
                folder, stages, {"add": AddOne, "tensor": Tensor},
                resources={"tensor": {"uses": "tensor"}}, run={"checkpoint": {"of": "add", "every": 3}},
            )  # fmt: skip
        left = [path.name for path in (folder / store.FOLDER).iterdir() if path.name != ".lock"]
        found = steps(folder)
        assert sorted(left) == [f"step-{step:08d}" for step in found]
        for path in store.committed(folder):
            tensors = store.read(path).tensors
            assert tensors["resource:tensor/tensor"].tolist() == [store.step_of(path)] * 4
        if not disk.hit:
            break
        assert isinstance(outcome.error, FolderError)
        assert "no space left on the disk" in str(outcome.error)
        assert (folder / "summary.json").is_file()
        assert outcome.lines("log.jsonl")[-1]["event"] in ("failed", "checkpoint")
    else:
        raise AssertionError("the disk was always full")
    assert after > 10
    assert found == [3, 5]


def test_a_half_is_not_there(tmp_path: Path) -> None:
    world = World()
    fine(world.go(tmp_path, STAGES, run=run_of(every=6, keep=9)))
    assert steps(tmp_path) == [6, 12, 18, 20]
    (tmp_path / store.FOLDER / "step-00000020" / store.DOCUMENT).write_text('{"format": 1, "fil')
    (tmp_path / store.FOLDER / "step-00000018" / store.DOCUMENT).unlink()
    half = tmp_path / store.FOLDER / ".step-00000099.abc.part"
    half.mkdir()
    (half / store.DOCUMENT).write_text("{}")
    (tmp_path / store.FOLDER / "step-00000098").mkdir()
    assert steps(tmp_path) == [6, 12]
    lines = list(world.ledgers["all"])
    again = fine(world.go(tmp_path, STAGES, run=run_of(every=6, keep=9)))
    assert any(line["event"] == "resumed" and line["step"] == 12 for line in again.lines("log.jsonl"))
    assert world.ledgers["all"] == lines
    assert not half.exists()
    assert steps(tmp_path) == [6, 12, 18, 20]


def test_tensors_that_are_cut_short_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / store.FOLDER / "step-00000001"
    store.write(path, {}, {"a": torch.zeros(100)})
    assert store.committed(tmp_path) == [path]
    whole = (path / store.TENSORS).read_bytes()
    (path / store.TENSORS).write_bytes(whole[:-1])
    assert store.committed(tmp_path) == []
    with pytest.raises(PipeflowError, match="not a whole checkpoint"):
        store.read(path)


def test_one_run_at_a_time_in_a_folder(tmp_path: Path) -> None:
    world = World()
    found: list[BaseException | None] = []

    async def act(pipeline: Pipeline) -> Any:
        def other() -> None:
            found.append(World().go(tmp_path, STAGES, run=run_of()).error)

        await pipeline._engine.off_loop(other, "the other run")
        return await pipeline.run()

    fine(world.go(tmp_path, STAGES, act, run=run_of()))
    assert isinstance(found[0], PipeflowError)
    assert "a run is at work in this folder" in str(found[0])
    assert len(world.ledgers["all"]) == 20


# No wait ---------------------------------------------------------------------------------------------------


@pytest.mark.axiom("3.5")
def test_the_writer_goes_on_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk holds step 4 until the writer has done three steps more."""
    further = threading.Event()
    real = store.write

    def slow(path: Path, *rest: Any) -> None:
        if store.step_of(path) == 4:
            assert further.wait(10), "the writer waits for the disk"
        real(path, *rest)

    class Tells(Stage):
        def run(self, item: int) -> int:
            if item == 6:
                further.set()
            return item

    monkeypatch.setattr(store, "write", slow)
    stages: dict[str, Any] = {
        "rows": {"uses": "numbers", "with": {"count": 12}},
        "train": {"uses": "tells", "from": "rows"},
    }
    fine(
        go(
            tmp_path,
            stages,
            {"tells": Tells, "numbers": numbers},
            run={"checkpoint": {"of": "train", "every": 4}},
        )
    )
    assert steps(tmp_path) == [4, 8, 12]
