"""The run folder: what a run leaves behind. Lines are flushed as they come; whole files appear whole."""

from __future__ import annotations

import json
import math
import os
import time
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["RunFolder", "write_whole"]


def write_whole(path: Path, text: str) -> None:
    """Write beside, fsync, rename: a reader sees the old file or the new one, never half of one.

    Raises OSError (disk full, no permission) and then leaves the old file as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _json(value: dict[str, Any]) -> str:
    """Strict JSON: NaN and infinities become null, what JSON lacks becomes text."""
    try:
        return json.dumps(value, default=str, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


class RunFolder:
    """Files of one run. Each is opened when its first line comes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, IO[str]] = {}

    def create(self) -> None:
        """Make the folder; OSError if that is not possible."""
        self.path.mkdir(parents=True, exist_ok=True)

    def _line(self, name: str, values: dict[str, Any]) -> None:
        if name not in self._files:
            self._files[name] = open(self.path / name, "a", encoding="utf-8")  # noqa: SIM115
        file = self._files[name]
        file.write(_json(values) + "\n")
        file.flush()

    def metric(self, line: dict[str, Any]) -> None:
        """A line of metrics.jsonl."""
        self._line("metrics.jsonl", line)

    def log(self, event: str, stage: str | None, **values: Any) -> None:
        """A line of log.jsonl, with the time of day."""
        line: dict[str, Any] = {"time": time.time(), "event": event}
        if stage is not None:
            line["stage"] = stage
        self._line("log.jsonl", line | values)

    def dead_letter(self, stage: str, seq: int | None, error: Exception, record: object) -> None:
        """A line of dead_letter.jsonl: what was skipped, and why."""
        shown = record if isinstance(record, (str, int, float, type(None))) else repr(record)
        if isinstance(shown, str) and len(shown) > 2000:
            shown = shown[:2000] + "..."
        self._line(
            "dead_letter.jsonl",
            {"stage": stage, "sequence": seq, "error": f"{type(error).__name__}: {error}", "item": shown},
        )

    def summary(self, values: dict[str, Any]) -> None:
        """summary.json, whole."""
        write_whole(self.path / "summary.json", json.dumps(_finite(values), default=str, indent=2) + "\n")

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
