"""The run folder: what a run leaves behind. Lines are written as they come; whole files appear whole."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import time
import uuid
from pathlib import Path
from typing import Any, cast

from pipeflow.error_text import error_text, named_error
from pipeflow.errors import PipeflowError
from pipeflow.scrub import Scrubber

__all__ = ["FolderError", "RunFolder", "default_run_dir", "strict_json", "write_whole"]


def _number(path: Path) -> None:
    """`metrics.jsonl` becomes `metrics.1.jsonl`, or the next free number."""
    if not path.exists():
        return
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)


class FolderError(PipeflowError, OSError):
    """A file of the run folder cannot be written: which, why, and what to do. `errno` is the system's."""

    def __init__(self, path: Path, cause: OSError) -> None:
        if cause.errno in (errno.ENOSPC, errno.EDQUOT):
            text = (
                f"no space left on the disk. Free some under {path.parent}, or take another place (--run-dir)"
            )
        else:
            text = (
                f"cannot be written: {cause.strerror or cause}. Check the folder, or take another (--run-dir)"
            )
        super().__init__(f"{path}: {text}")
        self.errno = cause.errno

    def __str__(self) -> str:  # OSError would show its own two fields
        return str(self.args[0])


def default_run_dir(name: str, base: Path | None = None) -> Path:
    """`runs/NAME-YYYYmmdd-HHMMSS` below the working folder; a number is added where that is taken."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = (base or Path.cwd()) / "runs"
    path = folder / stem
    number = 1
    while path.exists():
        number += 1
        path = folder / f"{stem}-{number}"
    return path


def write_whole(path: Path, text: str) -> None:
    """Write beside, fsync, rename: a reader sees the old file or the new one, never half of one.

    Raises FolderError (disk full, no permission) and then leaves the old file as it was.
    """
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(beside, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
    except OSError as error:
        raise FolderError(path, error) from error


def _sync_folder(path: Path) -> None:
    """So that a rename in it outlives a power cut."""
    if os.name != "posix":
        return  # other systems cannot open a folder, and order its names by themselves
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _text(value: object) -> str:
    return error_text(value) if isinstance(value, BaseException) else str(value)


def strict_json(value: dict[str, Any], indent: int | None = None) -> str:
    """Strict JSON: NaN and infinities become null, what JSON lacks becomes text."""
    try:
        return json.dumps(value, default=str, allow_nan=False, indent=indent)
    except ValueError:
        return json.dumps(_finite(value), default=_text, indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in cast("list[Any]", value)]
    return value


class _Lines:
    """A file that grows by whole lines. One that does not fit is taken back, so none is ever half there.

    Straight to the system: a buffer above it would try its bytes again when it is closed.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._size = os.fstat(self._descriptor).st_size

    def add(self, line: str) -> None:
        data = memoryview(line.encode() + b"\n")
        written = 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise
        self._size += written

    def close(self) -> None:
        os.close(self._descriptor)


class RunFolder:
    """Files of one run. Each is opened when its first line comes. FolderError where one cannot be written.

    `scrub` takes the secrets out of all that is written here.
    """

    def __init__(self, path: Path, scrub: Scrubber | None = None) -> None:
        self.path = path
        self._scrub = scrub or Scrubber()
        self.fault: FolderError | None = None
        """Why log.jsonl lacks a line. The log never stops a run on its way; whoever ends it asks here."""
        self._files: dict[str, _Lines] = {}
        self._closed = False

    def create(self, *, resumed: bool = False) -> None:
        """Make the folder. Line files of an earlier run in it get a number, so that no two runs mix; a
        resumed run adds to them."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for name in () if resumed else ("metrics", "log", "dead_letter"):
                _number(self.path / f"{name}.jsonl")
        except OSError as error:
            raise FolderError(self.path, error) from error

    def document(self, text: str) -> None:
        """pipeline.yaml: the file as it was resolved."""
        write_whole(self.path / "pipeline.yaml", text)

    def _line(self, name: str, values: dict[str, Any]) -> None:
        if self._closed:
            return
        try:
            if name not in self._files:
                self._files[name] = _Lines(self.path / name)
            self._files[name].add(strict_json(self._scrub.values(values)))
        except OSError as error:
            raise FolderError(self.path / name, error) from error

    def metric(self, line: dict[str, Any]) -> None:
        """A line of metrics.jsonl."""
        self._line("metrics.jsonl", line)

    def log(self, event: str, stage: str | None, **values: Any) -> None:
        """A line of log.jsonl, with the time of day."""
        line: dict[str, Any] = {"time": time.time(), "event": event}
        if stage is not None:
            line["stage"] = stage
        try:
            self._line("log.jsonl", line | values)
        except FolderError as error:
            self.fault = self.fault or error
            raise

    def dead_letter(self, stage: str, seq: int | None, error: Exception, record: object) -> None:
        """A line of dead_letter.jsonl: what was skipped, and why."""
        shown = record if isinstance(record, (str, int, float, type(None))) else repr(record)
        if isinstance(shown, str):
            shown = self._scrub(shown)  # before the cut: half a secret would not be known again
        if isinstance(shown, str) and len(shown) > 2000:
            shown = shown[:2000] + "..."
        self._line(
            "dead_letter.jsonl",
            {"stage": stage, "sequence": seq, "error": f"{named_error(error)}", "item": shown},
        )

    def summary(self, values: dict[str, Any]) -> None:
        """summary.json, whole."""
        write_whole(self.path / "summary.json", strict_json(self._scrub.values(values), indent=2) + "\n")

    def profile(self, values: dict[str, Any]) -> None:
        """profile.json, whole: costs by stage, for `pipeflow plan`."""
        write_whole(self.path / "profile.json", strict_json(values, indent=2) + "\n")

    def close(self) -> None:
        """No line is taken any more."""
        self._closed = True
        for file in self._files.values():
            file.close()
        self._files.clear()
