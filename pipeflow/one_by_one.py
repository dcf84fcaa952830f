"""Under `--debug-sync` a device has one call at a time, of all lanes, and each awaits its own work.

So when one fails, no other lane has work there: the suspect is the culprit.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeflow.device.base import Mark
    from pipeflow.engine import Engine
    from pipeflow.launch import Launcher, StuckThread

__all__ = ["OneByOne", "Turn"]


class Turn:
    """Who may call a device now. Changes on the loop only."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._taken = False
        self._waiting: deque[Callable[[], None]] = deque()

    def take(self, begin: Callable[[], None]) -> None:
        """Call `begin` once it is its turn. Once the run is over nothing takes turns: what waits never
        begins, and what still comes (a generator is closed) begins at once."""
        if self._taken and self._engine.admitting:
            self._waiting.append(begin)
        else:
            self._taken = True
            begin()

    def give(self) -> None:
        """It is back."""
        if self._waiting and self._engine.admitting:
            self._waiting.popleft()()
        else:
            self._taken = False


class OneByOne:
    """A lane's launcher whose jobs take turns with those of other lanes."""

    def __init__(self, inner: Launcher, turn: Turn) -> None:
        self._inner = inner
        self._turn = turn

    def submit(
        self, doing: object, job: Callable[[], Any], then: Callable[[Any, BaseException | None], None]
    ) -> None:
        def back(value: Any, error: BaseException | None) -> None:
            try:
                then(value, error)  # first: a fault must be heard before the next call of the device
            finally:
                self._turn.give()

        self._turn.take(lambda: self._inner.submit(doing, job, back))

    def watch(self, doing: object, mark: Mark, then: Callable[[Any, BaseException | None], None]) -> None:
        self._inner.watch(doing, mark, then)

    def drop_queued(self) -> None:
        self._inner.drop_queued()

    def stop_jobs(self) -> None:
        self._inner.stop_jobs()

    def stop_marks(self) -> None:
        self._inner.stop_marks()

    def join(self, seconds: float) -> None:
        self._inner.join(seconds)

    def stuck(self) -> list[StuckThread]:
        return self._inner.stuck()
