"""A gather's patience: a batch that has waited `linger` seconds for members leaves as it is (axiom 1.6)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pipeflow.errors import StageError

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
        if not 0 <= seconds < math.inf:
            said = f"its linger is {seconds} s: a time of 0 s or more, or None to wait for a full batch"
            raise StageError(said, stage=runner.name)
        self._timer: asyncio.Handle | None = None
        self._deadline: float | None = None
        """Kept here: a handle need not know its time (uvloop's does not where the time has passed)."""

    @property
    def waiting(self) -> bool:
        """Whether the timer runs."""
        return self._timer is not None

    def keep(self) -> None:
        """Set the timer anew if another batch is the oldest now."""
        since = self._batches.waits_since()
        deadline = None if since is None else since + self._seconds
        if self._timer is not None and deadline != self._deadline:
            self.stop()
        if since is not None and deadline is not None and self._timer is None:
            self._deadline = deadline
            self._timer = self._runner.engine.loop.call_at(deadline, self._over, since)

    def stop(self) -> None:
        """No batch will leave by time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = self._deadline = None

    def _over(self, since: float) -> None:
        self._timer = self._deadline = None
        self._batches.flush(since)
        self._runner.wake()
