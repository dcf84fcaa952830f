"""A fence says when the host may know that a job's work is done: pending, then reached.

One that fails ends the run, and with it everyone who waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeflow.device.base import Mark

__all__ = ["REACHED", "Fence"]


class Fence:
    """Belongs to one launch of one lane. Changes on the loop only; nothing here touches a device.

    `mark` is the device's event behind the launch; a stream may wait for it long before the host knows that
    the fence is reached. A launch whose mark was passed as it came back shares `REACHED`.
    """

    __slots__ = ("_waiters", "at", "mark", "reached")

    def __init__(self, mark: Mark | None = None) -> None:
        self.mark = mark
        self.reached = False
        self.at = 0.0
        """When the host heard that it is reached."""
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


REACHED = Fence()
"""The fence of what needs no waiting: values that came from outside, or whose work was done on return."""
REACHED.reached = True
