"""Counts of one stage. Host seconds are what its code took on its thread; device seconds are not here."""

from __future__ import annotations

__all__ = ["Counters"]


class Counters:
    """Plain numbers, changed on the loop."""

    __slots__ = ("device_launches", "device_seconds", "done", "dropped", "gaps", "host_seconds", "largest",
                 "latency", "launches", "made", "parked", "retries", "started", "taken")  # fmt: skip

    def __init__(self) -> None:
        self.started = 0
        """Launches of new items (a source: of new outputs)."""
        self.done = 0
        """Jobs retired: returned, and their fences reached."""
        self.made = 0
        """Outputs made."""
        self.gaps = 0
        """Gaps that came in."""
        self.dropped = 0
        """Items dropped or skipped here."""
        self.retries = 0
        self.parked = 0
        """Calls that ran out of device memory, and were made again or will be."""
        self.launches = 0
        """Calls of stage code that came back."""
        self.host_seconds = 0.0
        """What they took, all together."""
        self.device_launches = 0
        self.device_seconds = 0.0
        """Of launches whose fence was not reached as they came back (see `observe.profile`)."""
        self.largest = 0
        """Bytes of the largest output looked at."""
        self.taken = 0
        """Items in the jobs that retired."""
        self.latency = 0.0
        """Sum over jobs of the seconds from start to retirement."""
