"""SIGINT and SIGTERM, counted where nothing can hold them up: not a busy loop, not a long call into C.

Python runs a signal handler between two bytecodes of the main thread, which may be seconds away. The
interpreter's own handler, in C, writes a byte into the wakeup descriptor at once; a thread reads it here.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Signals"]

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


def _nothing(number: int, frame: Any) -> None:
    """Takes the place of the default handlers; the thread does the work."""


class Signals:
    """While it is entered, each SIGINT or SIGTERM calls `heard(count)` on a thread of its own.

    Enter it on the main thread. `count` is how many came so far.
    """

    def __init__(self, heard: Callable[[int], None]) -> None:
        self.count = 0
        self._heard = heard
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1

    def __enter__(self) -> Signals:
        self._ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        self._thread = threading.Thread(target=self._listen, name="pipeflow signals", daemon=True)
        self._thread.start()
        self._wakeup_before = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, _nothing) for number in _NUMBERS}
        return self

    def take_over(self) -> None:
        """Again ours: an event loop takes the wakeup descriptor as it starts. Call it on the loop."""
        signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        with contextlib.suppress(OSError):
            self._theirs.send(b"\0")
        self._thread.join()
        self._ours.close()
        self._theirs.close()

    def _listen(self) -> None:
        while True:
            for number in self._ours.recv(64):
                if number == 0:
                    return
                if number in _NUMBERS:  # another library's handler writes its own numbers
                    self.count += 1
                    self._heard(self.count)
