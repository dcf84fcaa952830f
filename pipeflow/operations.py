"""The operation log: what the engine did, in one order, written by the same code on every device.

It is off (`Engine.operations` is None) unless someone asks: each place that would write one then costs one
look at an attribute. `pipeflow.checker` reads it and says which promise a run broke.

An entry is `(thread, kind, ...)`; its place in `entries` is its place in the order, across all threads: what
comes first happened first, or beside it. Numbers are given by the log and count from 1; 0 is none. A launch
is one submission to a lane; the first launch of a job is the job's number too. A mark has the number of the
launch that recorded it.

At load
    lane STAGE INDEX IN_FLIGHT; edge EDGE "a -> b" ORDERED; resumed
On the loop
    take JOB EDGE ITEM              the job works on this item
    lease STAGE INSTANCE RESOURCE WRITES VERSION
                                    of the launch that is submitted next
    submit LAUNCH JOB WHAT STAGE INDEX NUMBER GATE
                                    WHAT: job | copy (a snapshot) | finish | enqueue; GATE: the device's, or
                                    None where no barrier holds it
    returned LAUNCH PASSED          stage code came back; PASSED: its mark was passed by then
    awaited LAUNCH                  a watcher came back from its mark
    reached LAUNCH                  so the host knows that its work is done
    lost LAUNCH                     the device failed: it never will
    unlease STAGE INSTANCE WRITES LAUNCH
                                    the fence behind that use; 0: reached
    version RESOURCE VERSION FOLLOWS
    made ITEM LAUNCH STAGE SEQ VERSIONS STORAGES
                                    storages: (address, bytes); LAUNCH 0: it came from a caller
    hand ITEM SEQ                   it leaves its stage
    put EDGE NUMBER ITEM PAID       ITEM 0: a gap
    credit EDGE CHANGE OUT          taken (1), or nothing came of it (-1); OUT: the edge's count after it
    give EDGE ITEM OUT              the credit of an item that retired at its consumer
    retired ITEM                    nobody needs it any more
    over JOB                        its lane is free of it
    close | open DEVICE BARRIER; drain | drained | release DEVICE; section | unsection STAGE
    failed ERROR; ended; forgotten  the end: by an error, by itself; what was left is dropped
On the lane's thread
    enter LAUNCH; wait LAUNCH MARK; begin LAUNCH; end LAUNCH RAISED; record LAUNCH
"""

from __future__ import annotations

import json
import os
import threading
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from pipeflow.device.base import Mark
    from pipeflow.edge import Edge
    from pipeflow.item import Item
    from pipeflow.job import Job, Output
    from pipeflow.lane import Lane
    from pipeflow.resource import Instance, Shared
    from pipeflow.runner import Runner

__all__ = ["Entry", "OperationLog"]

Entry = tuple[Any, ...]


class OperationLog:
    """Of one run. Give it to `open_pipeline` or `testing.simulate`, and read `entries` afterwards.

    Holds no value, tensor or mark of the run: only numbers.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._count = count(1)
        self._marks: dict[int, int] = {}
        """A mark's `id` to its launch. Whoever waits for a mark holds it, so no other has its `id` then."""
        self._names: dict[int, int] = {}
        """The `id` of what lives as long as the run to its number."""

    def add(self, kind: str, *what: Any) -> None:
        """One entry. From any thread: an append is one step of the interpreter."""
        self.entries.append((threading.get_ident(), kind, *what))

    def attach(self, runners: Iterable[Runner], *, resumed: bool = False) -> None:
        """At load, once all lanes have their leases: hear what lanes, leases and edges do."""
        if resumed:
            self.add("resumed")
        in_order: dict[Runner, bool] = {}
        for runner in runners:
            for lane in runner.lanes:
                lane.operations = lane.leases.operations = self
                self.add("lane", lane.name, lane.index, lane.in_flight)
            for edge in runner.outs:
                edge.operations = self
                self.add("edge", self._number(edge), str(edge), _in_order(runner, in_order))

    def write(self, path: Path) -> None:
        """As JSON lines, threads numbered by their first entry; the file appears whole."""
        threads: dict[int, int] = {}
        aside = path.with_name(path.name + ".part")
        with aside.open("w", encoding="utf-8") as file:
            for thread, kind, *what in self.entries:
                file.write(json.dumps([threads.setdefault(thread, len(threads)), kind, *what]) + "\n")
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)

    def _number(self, thing: object) -> int:
        return self._names.setdefault(id(thing), len(self._names) + 1)

    # Launches --------------------------------------------------------------------------------------

    def submits(self, job: Job, lane: Lane, what: str = "job") -> None:
        """A launch of a job: a call of stage code, or the copy of what it reads."""
        number = next(self._count)
        if not job.operation:
            job.operation = number
            for edge, item in job.parts:
                self.add("take", number, self._number(edge), item.operation)
        job.launch = number
        self._submit(number, job.operation, what, lane, job.number, gated=lane.enqueue is None)

    def submits_hook(self, lane: Lane, what: str) -> int:
        """A launch of no job; its number."""
        number = next(self._count)
        self._submit(number, 0, what, lane, None)
        return number

    def _submit(
        self, number: int, job: int, what: str, lane: Lane, seq: int | None, *, gated: bool = True
    ) -> None:
        gate = lane.gate.device if lane.gate is not None and gated else None
        self.add("submit", number, job, what, lane.name, lane.index, seq, gate)

    def waited(self, launch: int, mark: Mark) -> None:
        """On the lane's thread: its stream waits for a mark from here on."""
        self.add("wait", launch, self._marks.get(id(mark), 0))

    def recorded(self, launch: int, mark: Mark) -> None:
        """On the lane's thread: a mark stands behind its work."""
        self._marks[id(mark)] = launch
        self.add("record", launch)

    def came_back(self, launch: int, launched: Any) -> None:
        """Stage code returned; None: the device failed under it."""
        if launched is None:
            self.add("lost", launch)
        else:
            self.add("returned", launch, launched.passed)

    def noticed(self, launch: int, fault: BaseException | None) -> None:
        """Its mark was awaited."""
        self.add("awaited" if fault is None else "lost", launch)

    # Items -----------------------------------------------------------------------------------------

    def made_by(self, runner: Runner, job: Job) -> None:
        """What the job's last launch made waits for its turn to leave."""
        for output in (*job.outputs, *(job.pending or ())):
            if output.live and not output.operation:
                self.made(runner, job.launch, output)

    def made(self, runner: Runner, launch: int, output: Output) -> None:
        """A live output is there, though perhaps not its content."""
        output.operation = number = next(self._count)
        lanes = runner.lanes
        buffers = lanes[0].device.buffers(output.value) if lanes else ()
        storages = [(buffer.address, buffer.nbytes) for buffer in buffers]
        versions = {name: tuple[Any, ...](version) for name, version in (output.versions or {}).items()}
        self.add("made", number, launch, runner.name, output.seq, versions, storages)

    def handed(self, runner: Runner, output: Output, item: Item) -> None:
        """An output leaves its stage."""
        if not output.operation:
            self.made(runner, 0, output)
        item.operation = output.operation
        self.add("hand", item.operation, item.seq)

    def put(self, edge: Edge, number: int, item: Item | None, paid: bool) -> None:
        """An item is queued, or (None) a gap."""
        self.add("put", self._number(edge), number, 0 if item is None else item.operation, paid)

    def credit(self, edge: Edge, change: int) -> None:
        """One credit more, or one less as nothing came of it."""
        self.add("credit", self._number(edge), change, edge.credits)

    def gave(self, edge: Edge, item: Item) -> None:
        """An item's credit came back."""
        self.add("give", self._number(edge), item.operation, edge.credits)

    # Resources -------------------------------------------------------------------------------------

    def leased(self, stage: str, taken: Sequence[tuple[Instance, bool]]) -> None:
        """By the launch that is submitted next."""
        for instance, writes in taken:
            shared = instance.shared
            self.add(
                "lease", stage, self._number(instance), shared.name, writes, tuple[Any, ...](shared.version)
            )

    def gave_back(self, stage: str, taken: Sequence[tuple[Instance, bool]], mark: Mark | None) -> None:
        """`mark` stands behind that use; None: it is over."""
        launch = 0 if mark is None else self._marks.get(id(mark), 0)
        for instance, writes in taken:
            self.add("unlease", stage, self._number(instance), writes, launch)

    def version(self, shared: Shared) -> None:
        """A resource has new content."""
        self.add("version", shared.name, tuple[Any, ...](shared.version), shared.follows is not None)


def _in_order(runner: Runner, known: dict[Runner, bool]) -> bool:
    """Whether its outputs leave in the order of their numbers: it keeps the order in which it got them, and
    got them in order, or numbers them as they leave."""
    starts = runner.starts_domain and not runner.scatters
    if runner not in known:
        before = () if runner.inputs is None or starts else runner.inputs.edges
        known[runner] = runner.ordered and all(_in_order(edge.producer, known) for edge in before)
    return known[runner]
