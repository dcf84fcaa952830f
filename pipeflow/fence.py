"""A fence says when the host may know that a job's work is done: pending, then reached or failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["REACHED", "Fence"]


class Fence:
    """Belongs to one launch of one lane. Changes on the loop only; nothing here touches a device.

    `mark` is the device's event, set once the launch has recorded it; a stream may wait for it long
    before the host knows that the fence is reached.
    """

    __slots__ = ("_waiters", "error", "mark", "reached")

    def __init__(self) -> None:
        self.mark: object | None = None
        self.reached = False
        self.error: BaseException | None = None
        self._waiters: list[Callable[[], None]] | None = None

    def when_reached(self, then: Callable[[], None]) -> None:
        """Call `then` on the loop once the fence is reached; at once if it is. Never if it fails."""
        if self.reached:
            then()
        elif self._waiters is None:
            self._waiters = [then]
        else:
            self._waiters.append(then)

    def reach(self) -> None:
        """The host knows: tell everyone who waits."""
        self.reached = True
        waiters, self._waiters = self._waiters, None
        for then in waiters or ():
            then()

    def fail(self, error: BaseException) -> None:
        """The device reported a fault. Whoever waits is ended with the run, not called."""
        self.error = error
        self._waiters = None


REACHED = Fence()
"""The fence of what needs no waiting: values that came from outside, or from a host stage."""
REACHED.reached = True
