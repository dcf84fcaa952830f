"""A run folder in memory: what a simulated run writes, without a disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeflow.error_text import error_text
from pipeflow.observe.folder import RunFolder

__all__ = ["MemoryFolder"]


class MemoryFolder(RunFolder):
    """Lines by file name; `path` names a folder that is never made."""

    def __init__(self) -> None:
        super().__init__(Path("simulated-run"))
        self.lines: dict[str, list[dict[str, Any]]] = {}
        self.told: dict[str, Any] = {}
        """summary.json."""
        self.costs: dict[str, Any] = {}
        """profile.json."""

    def create(self, *, resumed: bool = False) -> None:
        return

    def document(self, text: str) -> None:
        return

    def _line(self, name: str, values: dict[str, Any]) -> None:
        # An error's traceback would keep alive what its frames hold.
        shown = {k: error_text(v) if isinstance(v, BaseException) else v for k, v in values.items()}
        self.lines.setdefault(name, []).append(shown)

    def summary(self, values: dict[str, Any]) -> None:
        self.told = values

    def profile(self, values: dict[str, Any]) -> None:
        self.costs = values
