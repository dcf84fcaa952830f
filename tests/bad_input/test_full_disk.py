"""ENOSPC at each write of a run: a clear message, exit code 1, and nothing lost or half written."""

from __future__ import annotations

import builtins
import errno
import io
import os
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
from bad_input_kit import all_whole, lines_of, summary_of, tiny

from pipeflow.cli.__main__ import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def full(path: object) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


class Half:
    """A file of which half of each write arrives, then the disk is full."""

    def __init__(self, file: Any, path: object) -> None:
        self._file, self._path = file, path

    def write(self, data: Any) -> int:
        self._file.write(data[: len(data) // 2])
        self._file.flush()
        raise full(self._path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Half:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class Disk:
    """Fails one operation on paths that `matches`, from its `after`-th time on. `hit`: how often it did."""

    OPERATIONS = ("open", "write", "fsync", "rename")

    def __init__(
        self, patch: pytest.MonkeyPatch, operation: str, matches: Callable[[str], bool], after: int
    ) -> None:
        assert operation in self.OPERATIONS
        self.operation, self._matches, self._left = operation, matches, after
        self.hit = 0
        for module, name in ((os, "open"), (os, "write"), (os, "fsync"), (os, "rename"), (os, "replace")):
            patch.setattr(module, name, self._system(name, getattr(module, name)))
        opened = self._opened(builtins.open)
        patch.setattr(builtins, "open", opened)
        patch.setattr(io, "open", opened)
        patch.setattr(safetensors.torch, "save_file", self._save(safetensors.torch.save_file))

    def _due(self, operation: str, path: object) -> bool:
        if operation != self.operation or not self._matches(str(path)):
            return False
        self._left -= 1
        self.hit += self._left < 0
        return self._left < 0

    def _system(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        operation = "rename" if name == "replace" else name

        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "open":
                path, due = args[0], bool(args[1] & (os.O_WRONLY | os.O_RDWR)) and self._due("open", args[0])
            elif name in ("rename", "replace"):
                path, due = args[1], self._due(operation, args[1])
            else:
                path = os.readlink(f"/proc/self/fd/{args[0]}")
                due = self._due(operation, path)
            if not due:
                return real(*args, **kwargs)
            if name == "write":
                real(args[0], bytes(args[1])[: len(args[1]) // 2])
            raise full(path)

        return call

    def _opened(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            writes = isinstance(file, (str, os.PathLike)) and set(mode) & set("wax+")
            if writes and self._due("open", file):
                raise full(file)
            opened = real(file, mode, *args, **kwargs)
            return Half(opened, file) if writes and self._due("write", file) else opened

        return call

    def _save(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """The library writes by itself and tells the system's words in an error of its own."""

        def call(tensors: Any, path: Any, **options: Any) -> None:
            if not self._due("write", path):
                return real(tensors, path, **options)
            real(tensors, path, **options)
            os.truncate(path, os.path.getsize(path) // 2)
            raise safetensors.SafetensorError(
                'I/O error: Os { code: 28, kind: StorageFull, message: "No space left on device" }'
            )

        return call


def run(file: Path, run_dir: Path, capfd: pytest.CaptureFixture[str], *more: str) -> tuple[int, str]:
    """The command in this process: exit code and stderr."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as left:
        main(["run", str(file), "--run-dir", str(run_dir), *more])
    return int(left.value.code or 0), capfd.readouterr().err


@pytest.fixture(autouse=True)
def one_thread_and_clean_path() -> Iterator[None]:
    import sys

    import torch

    path, threads = list(sys.path), torch.get_num_threads()
    yield
    sys.path[:] = path
    sys.modules.pop("points", None)
    torch.set_num_threads(threads)


def below(*parts: str) -> Callable[[str], bool]:
    """Whether a path lies in the run folder `r` and all of the parts occur in what follows."""
    return lambda path: "/r/" in path and all(part in path.rpartition("/r/")[2] for part in parts)


HALF_NAMES = (".part", ".tmp", ".new", ".old")

PLACES = [
    # what is written, the operation, which time, what the message names
    ("pipeline.yaml", "open", 0, "pipeline.yaml"),
    ("pipeline.yaml", "write", 0, "pipeline.yaml"),
    ("pipeline.yaml", "fsync", 0, "pipeline.yaml"),
    ("pipeline.yaml", "rename", 0, "pipeline.yaml"),
    ("metrics.jsonl", "open", 0, "metrics.jsonl"),
    ("metrics.jsonl", "write", 0, "metrics.jsonl"),
    ("metrics.jsonl", "write", 7, "metrics.jsonl"),
    ("summary.json", "open", 0, "summary.json"),
    ("summary.json", "write", 0, "summary.json"),
    ("summary.json", "fsync", 0, "summary.json"),
    ("summary.json", "rename", 0, "summary.json"),
    ("drafter config.json", "open", 0, "/drafter:"),
    ("drafter config.json", "write", 0, "/drafter:"),
    ("drafter config.json", "fsync", 0, "/drafter:"),
    ("drafter model.safetensors", "write", 0, "/drafter:"),
    ("drafter model.safetensors", "fsync", 0, "/drafter:"),
    ("drafter", "rename", 0, "/drafter:"),
    ("weights v00000002 model.safetensors", "write", 0, "weights/v00000002:"),
    ("weights v00000002 version.json", "open", 0, "weights/v00000002:"),
    ("weights v00000002 version.json", "write", 0, "weights/v00000002:"),
    ("weights v00000002 version.json", "fsync", 0, "weights/v00000002:"),
    ("weights v00000002 COMPLETE", "open", 0, "weights/v00000002"),
    ("weights v00000002 COMPLETE", "write", 0, "weights/v00000002"),
    ("weights v00000002 COMPLETE", "fsync", 0, "weights/v00000002"),
    ("weights v00000002 COMPLETE", "rename", 0, "weights/v00000002"),
    ("weights v00000002", "rename", 1, "weights/v00000002"),
]


@pytest.mark.parametrize(("what", "operation", "after", "named"), PLACES)
def test_a_full_disk_at_each_write(
    what: str,
    operation: str,
    after: int,
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    file, run_dir = tiny(tmp_path, release="points:Quiet"), tmp_path / "r"
    with monkeypatch.context() as patch:
        disk = Disk(patch, operation, below(*what.split()), after)
        code, stderr = run(file, run_dir, capfd)
    assert disk.hit, "nothing was written there: the test tests nothing"
    assert code == 1, stderr
    assert "no space left on the disk" in stderr
    assert named in stderr
    assert "Free" in stderr  # the remedy
    assert "Traceback" not in stderr
    all_whole(run_dir)
    assert [str(p) for p in run_dir.rglob("*") if p.name.endswith(HALF_NAMES)] == []
    if what not in ("pipeline.yaml", "summary.json"):
        summary = summary_of(run_dir)
        assert (summary["status"], summary["exit_code"]) == ("failed", 1)
        assert "no space left" in summary["error"]
    if what == "summary.json":
        assert not (run_dir / "summary.json").exists()
        assert (run_dir / "drafter").exists()  # saved before
    if "v00000002" in what:
        assert [p.name for p in sorted((run_dir / "weights").glob("v*"))] == ["v00000001"]


@pytest.mark.parametrize("operation", ["open", "write"])
def test_a_full_disk_at_the_log(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The log does not stop a training, but that it lacks a line is told at the end, when all is saved."""
    file, run_dir = malformed(tmp_path, budget=3), tmp_path / "r"
    with monkeypatch.context() as patch:
        disk = Disk(patch, operation, below("log.jsonl"), 0)
        code, stderr = run(file, run_dir, capfd)
    assert disk.hit
    assert code == 1
    assert "log.jsonl: no space left on the disk" in stderr
    assert len(lines_of(run_dir / "rows.jsonl")) == 3
    assert summary_of(run_dir)["status"] == "failed"
    all_whole(run_dir)


@pytest.mark.parametrize(("operation", "after"), [("open", 0), ("write", 0), ("write", 1)])
def test_a_full_disk_at_the_dead_letters(
    operation: str,
    after: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    file, run_dir = malformed(tmp_path, budget=3), tmp_path / "r"
    with monkeypatch.context() as patch:
        disk = Disk(patch, operation, below("dead_letter.jsonl"), after)
        code, stderr = run(file, run_dir, capfd)
    assert disk.hit
    assert code == 1
    assert "dead_letter.jsonl: no space left on the disk" in stderr
    assert summary_of(run_dir)["exit_code"] == 1
    all_whole(run_dir)
    if after:
        assert len(lines_of(run_dir / "dead_letter.jsonl")) == after


def malformed(folder: Path, budget: int) -> Path:
    """Two bad rows among three good ones, copied to rows.jsonl."""
    (folder / "data.jsonl").write_text('{"text": "a"}\n{"text": 1}\n{"text": "b"}\nnonsense\n{"text": "c"}\n')
    file = folder / "copy.yaml"
    file.write_text(
        "pipeflow: 1\nname: copy\nstages:\n"
        "  rows:\n    uses: data/jsonl\n    with: {path: data.jsonl, shuffle: false}\n"
        f"    on_error: {{skip: {budget}}}\n"
        "  keep: {uses: data/write_jsonl, from: rows, with: {path: rows.jsonl}}\n"
    )
    return file


@pytest.mark.parametrize("operation", ["write", "fsync", "rename"])
def test_an_earlier_drafter_stays_when_the_disk_is_full(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from pipeflow_stages.dflash.export import load_drafter

    file, run_dir = tiny(tmp_path), tmp_path / "r"
    assert run(file, run_dir, capfd, "steps=1")[0] == 0
    before = {p.name: p.read_bytes() for p in (run_dir / "drafter").iterdir()}
    with monkeypatch.context() as patch:
        disk = Disk(patch, operation, below("drafter"), 0)
        code, stderr = run(file, run_dir, capfd, "steps=2")
    assert disk.hit
    assert code == 1
    assert "no space left" in stderr
    assert {p.name: p.read_bytes() for p in (run_dir / "drafter").iterdir()} == before
    load_drafter(run_dir / "drafter")


def test_the_disk_that_is_never_full_lets_the_run_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The hook itself changes nothing: what the tests above see is the full disk."""
    file, run_dir = tiny(tmp_path), tmp_path / "r"
    with monkeypatch.context() as patch:
        disk = Disk(patch, "write", below(), 10**9)
        code, stderr = run(file, run_dir, capfd)
    assert disk.hit == 0
    assert code == 0, stderr
    assert summary_of(run_dir)["status"] == "done"
    all_whole(run_dir)
