"""A gather's patience: a batch that has waited `linger` seconds for members leaves as it is (axiom 1.6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

    from pipeflow.inputs import Batches
    from pipeflow.runner import Runner

__all__ = ["Linger"]


class Linger:
    """A timer for the batch that has waited longest; each batch is measured from its own first member."""

    def __init__(self, runner: Runner, batches: Batches, seconds: float) -> None:
        self._runner = runner
        self._batches = batches
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> bool:
        """Whether the timer runs."""
        return self._timer is not None

    def keep(self) -> None:
        """Set the timer anew if another batch is the oldest now."""
        since = self._batches.waits_since()
        if self._timer is not None and (since is None or self._timer.when() != since + self._seconds):
            self.stop()
        if since is not None and self._timer is None:
            loop = self._runner.engine.loop
            self._timer = loop.call_at(since + self._seconds, self._over, since)

    def stop(self) -> None:
        """No batch will leave by time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _over(self, since: float) -> None:
        self._timer = None
        self._batches.flush(since)
        self._runner.wake()
