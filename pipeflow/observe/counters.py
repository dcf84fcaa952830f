"""Counts of one stage. Host seconds are what its code took on its thread; device seconds are not here."""

from __future__ import annotations

__all__ = ["Counters"]


class Counters:
    """Plain numbers, changed on the loop."""

    __slots__ = ("done", "dropped", "gaps", "host_seconds", "latency", "made", "retries", "started")

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
        self.host_seconds = 0.0
        self.latency = 0.0
        """Sum over jobs of the seconds from start to retirement."""
