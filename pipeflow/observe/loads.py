"""What a pipeline loads, told as it begins and when it is done: two lines for people, two of log.jsonl.

Resources are told at once. Setups are many and mostly quick: people hear of one only if it takes a while.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager

    from pipeflow.engine import Engine

__all__ = ["PATIENCE", "Loads"]

PATIENCE = 0.5
"""Seconds that a setup may take unsaid."""


class Loads:
    """Of one pipeline. What it gives is entered on the loop, around the loading that it tells of."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.listeners: list[Callable[[str], None]] = []
        """Each is called with every line."""

    def devices(self) -> AbstractContextManager[None]:
        """Around the making of devices, which imports torch."""
        return self._told("preparing", "prepared", "devices", "", PATIENCE, what="devices")

    def resource(self, name: str, uses: str, device: str) -> AbstractContextManager[None]:
        """Around one `Resource.open`."""
        values = {"resource": name, "uses": uses, "device": device}
        return self._told("loading", "loaded", name, f" ({uses}) on {device}", 0.0, **values)

    def setup(self, name: str, uses: str) -> AbstractContextManager[None]:
        """Around `Stage.setup` of a stage's lanes."""
        return self._told("setting up", "set up", name, f" ({uses})", PATIENCE, stage=name, uses=uses)

    @contextmanager
    def _told(
        self, doing: str, done: str, name: str, details: str, patience: float, *,
        stage: str | None = None, **values: Any,
    ) -> Generator[None]:  # fmt: skip
        engine = self._engine
        begun = time.monotonic()
        said = False

        def begin() -> None:
            nonlocal said
            said = True
            self._say(f"{doing} {name}{details} ...")

        engine.note(doing, stage, **values)
        timer = None
        if patience:
            timer = engine.loop.call_later(patience, begin)
        else:
            begin()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
        seconds = time.monotonic() - begun
        engine.note(done, stage, **values, seconds=round(seconds, 3))
        if said:
            self._say(f"{done} {name} in {seconds:.1f} s")

    def _say(self, line: str) -> None:
        for listener in self.listeners:
            try:
                listener(line)
            except Exception as error:
                error.add_note("in a function given to Pipeline.on_load")
                self._engine.fail(error)
