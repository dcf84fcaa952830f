"""What an operation log has told so far of launches, jobs and items; for the rules of `checker_rules`."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pipeflow.operations import Entry

__all__ = ["Broken", "Facts", "Launch", "Rule"]


class Broken(AssertionError):
    """A promise is broken. `axiom` is its number, `at` the place of the entry in the log (or its length)."""

    def __init__(self, axiom: str, at: int, said: str, entry: Entry | None) -> None:
        super().__init__(f"entry {at} {entry[1:] if entry else '(the end)'} breaks {axiom}: {said}")
        self.axiom = axiom
        self.at = at


class Launch:
    """One submission to a lane, as far as the log has told."""

    def __init__(self, number: int, job: int, what: str, stage: str, index: int, seq: Any, gate: Any) -> None:
        self.number = number
        self.job = job
        self.what = what
        self.stage = stage
        self.lane = (stage, index)
        self.seq = seq
        self.gate = gate
        self.waits: set[int] = set()
        self.needs: dict[int, str] = {}
        """Launches whose work it must come after, and why."""
        self.entered = self.begun = self.recorded = self.returned = self.passed = self.awaited = False
        self.reached = self.lost = False

    def __str__(self) -> str:
        doing = "" if self.what == "job" else f", its {self.what}"
        return f"{self.stage}[{self.lane[1]}] item {self.seq}{doing} (launch {self.number})"


class Item:
    """What one launch made."""

    def __init__(self, number: int, launch: int, stage: str, seq: Any, storages: Iterable[Any]) -> None:
        self.number = number
        self.launch = launch
        self.name = f"{stage} {seq}"
        self.storages = storages
        self.edges: set[int] = set()
        """Where it is, and was not given back."""

    def __str__(self) -> str:
        held = ", ".join(f"{size} bytes at {address:#x}" for address, size in self.storages)
        return f"item {self.number} ({self.name}{': ' if held else ''}{held})"


class Facts:
    """What is known before the entry at hand."""

    def __init__(self) -> None:
        self.at = 0
        self.entry: Entry | None = None
        self.launches: dict[int, Launch] = {}
        self.by_job: dict[int, list[Launch]] = defaultdict(list)
        self.items: dict[int, Item] = {}
        self.inputs: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """A job's (edge, item)."""
        self.takers: dict[tuple[int, int], list[int]] = defaultdict(list)
        """Jobs by the (edge, item) that they work on."""
        self.edges: dict[int, str] = {}
        self.resumed = self.ended = self.failed = False

    def broken(self, axiom: str, said: str) -> Broken:
        return Broken(axiom, self.at, said, self.entry)

    def reached(self, launch: int) -> bool:
        """Whether the host knows that its work is done. 0: what came from a caller."""
        return launch == 0 or self.launches[launch].reached

    def unreached_of(self, job: int) -> Launch | None:
        """A launch of the job that may still be at work."""
        return next((launch for launch in self.by_job[job] if not launch.reached), None)

    def hear(self, kind: str, what: list[Any]) -> None:
        """The entry is part of what is known from here on."""
        hears = getattr(self, f"_{kind}", None)
        if hears is not None:
            hears(*what)
        elif kind in _FLAGS:
            setattr(self.launches[what[0]], _FLAGS[kind], True)

    def launched(self, number: int, job: int, *what: Any) -> None:
        """There is one more launch."""
        launch = self.launches[number] = Launch(number, job, *what)
        if job:
            self.by_job[job].append(launch)

    def _take(self, job: int, edge: int, item: int) -> None:
        self.inputs[job].append((edge, item))
        self.takers[edge, item].append(job)

    def _wait(self, launch: int, mark: int) -> None:
        self.launches[launch].waits.add(mark)

    def _returned(self, launch: int, passed: bool) -> None:
        self.launches[launch].returned = True
        self.launches[launch].passed = passed

    def _made(self, item: int, launch: int, stage: str, seq: Any, _: Any, storages: Any) -> None:
        self.items[item] = Item(item, launch, stage, seq, storages)

    def _put(self, edge: int, _: int, item: int, __: bool) -> None:
        if item:
            self.items[item].edges.add(edge)

    def _give(self, edge: int, item: int, _: int) -> None:
        self.items[item].edges.discard(edge)

    def _edge(self, edge: int, name: str, _: bool) -> None:
        self.edges[edge] = name

    def _resumed(self) -> None:
        self.resumed = True

    def _ended(self) -> None:
        self.ended = True

    def _failed(self, _: str) -> None:
        self.failed = True


_FLAGS = {"enter": "entered", "begin": "begun", "record": "recorded", "awaited": "awaited",
          "reached": "reached", "lost": "lost"}  # fmt: skip


class Rule:
    """Hears each entry before it is a fact, by a method of the entry's kind."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def at_end(self) -> None:
        """The run ended by itself."""
