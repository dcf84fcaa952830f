"""What `pipeflow run` says of a fault in stage code, and of what it loads."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Iterator  # noqa: TC003 - the stage's annotation is read at run time
from typing import TYPE_CHECKING, Any

import pytest
from commands import ROOT, pipeflow

import pipeflow as framework
from pipeflow import Resource, Stage
from pipeflow.observe import loads
from pipeflow.registry import Registry

if TYPE_CHECKING:
    from pathlib import Path

FAULTY = '''\
import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pipeflow
from pipeflow import Resource, Stage
from pipeflow.observe import loads


def boom(where: str) -> None:
    try:
        {}["inner"]
    except KeyError as error:
        raise ValueError(f"boom in {where}") from error


class Faulty(Resource):
    def open(self, ctx: Any) -> Any:
        boom("open")


class Sound(Resource):
    def open(self, ctx: Any) -> int:
        return 1


@pipeflow.stage
def numbers() -> Iterator[int]:
    yield 1
    yield 2


@pipeflow.stage
def source() -> Iterator[int]:
    yield 1
    boom("source")


@pipeflow.stage
async def async_source() -> AsyncIterator[int]:
    yield 1
    boom("async_source")


@pipeflow.stage
def function(item: int) -> int:
    boom("function")
    return item


@pipeflow.stage
async def coroutine(item: int) -> int:
    await asyncio.sleep(0)
    boom("coroutine")
    return item


@pipeflow.stage
def many(item: int) -> Iterator[int]:
    yield item
    boom("many")


class Method(Stage):
    def run(self, item: int, ctx: Any) -> None:
        boom("Method")


class Setup(Stage):
    def setup(self, ctx: Any) -> None:
        boom("Setup")

    def run(self, item: int) -> None:
        return None


class Finish(Stage):
    def finish(self, ctx: Any) -> None:
        boom("Finish")

    def run(self, item: int) -> None:
        return None


class Close(Stage):
    def close(self) -> None:
        boom("Close")

    def run(self, item: int) -> None:
        return None


class Asks(Stage):
    """Calls the engine, which fails in a place below the stage's own."""

    def run(self, item: int, ctx: Any) -> None:
        ctx.generator.no_such_name


class Waits(Stage):
    async def run(self, item: int) -> None:
        await asyncio.sleep(60)
'''

SOURCES = ("source", "async_source")
STAGES = ("function", "coroutine", "many", "Method", "Setup", "Finish", "Close", "open")


def write(folder: Path, stages: str, more: str = "") -> str:
    (folder / "faulty.py").write_text(FAULTY)
    file = folder / "faulty.yaml"
    file.write_text(f"pipeflow: 1\nname: faulty\n{more}stages:\n{stages}")
    return str(file)


def frames(text: str) -> list[str]:
    """File and function of each frame shown."""
    found = re.findall(r'^ *File "([^"]*)", line \d+, in (\w+)', text, re.MULTILINE)
    return [f"{file.rpartition('/')[2]} {name}" for file, name in found]


def faulty_file(folder: Path, where: str) -> str:
    if where == "open":
        return write(folder, "  a: {uses: 'faulty:numbers'}\n", "resources: {r: {uses: 'faulty:Faulty'}}\n")
    if where in SOURCES:
        return write(folder, f"  a: {{uses: 'faulty:{where}'}}\n")
    return write(folder, f"  a: {{uses: 'faulty:numbers'}}\n  b: {{uses: 'faulty:{where}', from: a}}\n")


OWN = {"Method": "run", "Setup": "setup", "Finish": "finish", "Close": "close", "open": "open"}


@pytest.mark.parametrize("where", [*SOURCES, *STAGES])
def test_a_traceback_begins_where_the_stages_code_does(where: str, tmp_path: Path) -> None:
    file = faulty_file(tmp_path, where)
    done = pipeflow("run", file, "--run-dir", str(tmp_path / "r"))
    assert done.returncode == 1
    assert f"ValueError: boom in {where}" in done.stderr
    inner, outer = ["faulty.py boom"], [f"faulty.py {OWN.get(where, where)}", "faulty.py boom"]
    assert frames(done.stderr) == inner + outer, done.stderr


def test_the_whole_traceback_is_there_for_the_asking(tmp_path: Path) -> None:
    file = faulty_file(tmp_path, "function")
    done = pipeflow("run", file, "--run-dir", str(tmp_path / "r"), PIPEFLOW_TRACEBACK="full")
    assert frames(done.stderr)[-3:] == ["stage.py call", "faulty.py function", "faulty.py boom"]
    assert "lane.py launch" in frames(done.stderr)
    assert "PIPEFLOW_TRACEBACK=full" in pipeflow("run", "--help").stdout


def test_what_lies_below_the_stages_frame_stays(tmp_path: Path) -> None:
    file = write(tmp_path, "  a: {uses: 'faulty:numbers'}\n  b: {uses: 'faulty:Asks', from: a}\n")
    done = pipeflow("run", file, "--run-dir", str(tmp_path / "r"))
    assert frames(done.stderr)[0] == "faulty.py run", done.stderr


def test_a_stage_of_the_package_is_a_stage(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "  a: {uses: 'faulty:numbers'}\n  b: {uses: route, from: a, with: {by: kind, ports: [x]}}\n",
    )
    done = pipeflow("run", file, "--run-dir", str(tmp_path / "r"))
    assert frames(done.stderr) == ["builtin.py run"], done.stderr


def test_an_error_without_a_frame_of_a_stage_keeps_what_it_has(tmp_path: Path) -> None:
    text = "  a: {uses: 'faulty:numbers'}\n  b: {uses: 'faulty:Waits', from: a, timeout: 10ms}\n"
    done = pipeflow("run", write(tmp_path, text), "--run-dir", str(tmp_path / "r"))
    assert "took longer than its timeout" in done.stderr
    shown = frames(done.stderr)
    assert shown[0].startswith("faulty.py run"), done.stderr
    assert "lane.py launch_async" in shown


# Loading ---------------------------------------------------------------------------------------------------

LOADING = ["loading model (faulty:Sound) on cpu ...", "loaded model in N s"]
SOUND = ("  a: {uses: 'faulty:numbers'}\n", "resources: {model: {uses: 'faulty:Sound', on: cpu}}\n")


def loading(text: str) -> list[str]:
    """The lines about the resource, however long it took."""
    return re.findall(r"load(?:ing|ed) model .*", re.sub(r"\d+\.\d s", "N s", text))


def test_what_loads_is_told_without_a_terminal(tmp_path: Path) -> None:
    done = pipeflow("run", write(tmp_path, *SOUND), "--run-dir", str(tmp_path / "r"), "--json")
    assert done.returncode == 0, done.stderr
    assert loading(done.stderr) == LOADING
    assert len(done.stdout.splitlines()) == 1
    lines = [json.loads(line) for line in (tmp_path / "r" / "log.jsonl").read_text().splitlines()]
    (began, ended) = [line for line in lines if line.get("resource") == "model"]
    assert (began["event"], ended["event"]) == ("loading", "loaded")
    assert (began["uses"], began["device"]) == ("faulty:Sound", "cpu")
    assert 0 <= ended["seconds"] < 60


def test_what_loads_is_told_above_the_live_view(tmp_path: Path) -> None:
    file = write(tmp_path, *SOUND)
    ours, theirs = pty.openpty()
    shown = bytearray()

    def read() -> None:
        try:
            while part := os.read(ours, 65536):
                shown.extend(part)
        except OSError:  # nobody holds the other end any more
            return

    reader = threading.Thread(target=read)
    reader.start()
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "stages")]), "TERM": "xterm"}
    done = subprocess.run(
        [sys.executable, "-m", "pipeflow", "run", file, "--run-dir", str(tmp_path / "r")],
        stderr=theirs, stdout=subprocess.PIPE, env=env, timeout=60, check=False,
    )  # fmt: skip
    os.close(theirs)
    reader.join()
    os.close(ours)
    assert done.returncode == 0
    assert "\x1b[?25l" in shown.decode()  # live: the cursor is hidden
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode()).replace("\r", "")
    assert loading(text) == LOADING


def test_what_fails_to_load_is_not_told_as_loaded(tmp_path: Path) -> None:
    file = write(tmp_path, SOUND[0], "resources: {model: {uses: 'faulty:Faulty', on: cpu}}\n")
    done = pipeflow("run", file, "--run-dir", str(tmp_path / "r"))
    assert done.returncode == 1
    assert loading(done.stderr) == ["loading model (faulty:Faulty) on cpu ..."]


@framework.stage
def one() -> Iterator[int]:
    yield 1


def loaded(folder: Path, hear: Any, **classes: type[Any]) -> list[dict[str, Any]]:
    """Run a source into the stage `set`, with the resource `model`; the lines of log.jsonl."""
    registry = Registry()
    for name, cls in {"one": one, **classes}.items():
        registry.add(name, cls)
    spec = {
        "pipeflow": 1, "name": "x", "resources": {"model": {"uses": "model"}},
        "stages": {"a": {"uses": "one"}, "set": {"uses": "stage", "from": "a"}},
    }  # fmt: skip

    async def drive() -> None:
        async with framework.open(
            spec, registry=registry, run_dir=folder, opening=lambda pipeline: pipeline.on_load(hear)
        ) as pipeline:
            await pipeline.run()

    asyncio.run(drive())
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


class Model(Resource):
    def open(self, ctx: Any) -> int:
        return 1


class Set(Stage):
    def setup(self, ctx: Any) -> None:
        return None

    def run(self, item: int) -> None:
        return None


def test_it_is_told_as_it_begins(tmp_path: Path) -> None:
    lines: list[str] = []
    heard = threading.Event()

    class Opens(Model):
        def open(self, ctx: Any) -> int:
            assert lines[-1] == "loading model (model) on cpu ..."
            return 1

    class Slow(Set):
        def setup(self, ctx: Any) -> None:
            assert heard.wait(30), "nothing was said"

    def hear(line: str) -> None:
        lines.append(re.sub(r"\d+\.\d s", "N s", line))
        if line == "setting up set (stage) ...":
            heard.set()

    loaded(tmp_path / "r", hear, model=Opens, stage=Slow)
    assert [line for line in lines if "devices" not in line] == [
        "loading model (model) on cpu ...", "loaded model in N s", "setting up set (stage) ...",
        "set up set in N s",
    ]  # fmt: skip


def test_a_quick_setup_is_for_the_log_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "PATIENCE", 60.0)
    lines: list[str] = []
    log = loaded(tmp_path / "r", lines.append, model=Model, stage=Set)
    assert [line for line in lines if "set" in line] == []
    assert [(line["event"], line.get("stage")) for line in log if "set" in line["event"]] == [
        ("setting up", "set"), ("set up", "set")
    ]  # fmt: skip


def test_a_fault_of_who_listens_is_told_as_his(tmp_path: Path) -> None:
    def hear(line: str) -> None:
        raise OSError("nobody is there")

    with pytest.raises(OSError, match="nobody is there") as caught:
        loaded(tmp_path / "r", hear, model=Model, stage=Set)
    assert caught.value.__notes__ == ["in a function given to Pipeline.on_load"]
