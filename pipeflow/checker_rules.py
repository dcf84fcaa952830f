"""The rules that an operation log is held against, one promise each. Numbers are of the engine's axioms."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from pipeflow.checker_facts import Facts, Rule

__all__ = ["RULES"]


class Waits(Rule):
    """4.1: a job begins once its stream waits for every input whose fence the host has not seen reached, and
    waits for what was recorded already."""

    def submit(self, number: int, job: int, what: str, *_: Any) -> None:
        if what != "job":
            return
        facts = self.facts
        for edge, item in facts.inputs[job]:
            maker = facts.items[item].launch
            if not facts.reached(maker):
                facts.launches[number].needs[maker] = f"input {facts.items[item]} on {facts.edges[edge]}"

    def wait(self, launch: int, mark: int) -> None:
        facts = self.facts
        if mark not in facts.launches or not facts.launches[mark].recorded:
            said = f"{facts.launches[launch]} waits for a mark that is not recorded"
            raise facts.broken("4.1", said)
        if facts.launches[launch].begun:
            raise facts.broken("4.1", f"{facts.launches[launch]} waits after it began")

    def enter(self, launch: int) -> None:
        if self.facts.launches[launch].entered:
            raise self.facts.broken("4.1", f"{self.facts.launches[launch]} runs twice")

    def begin(self, launch: int) -> None:
        found = self.facts.launches[launch]
        for maker, why in found.needs.items():
            if maker not in found.waits:
                said = f"{found} began before it waited for {self.facts.launches[maker]}, {why}"
                raise self.facts.broken("3.2" if why.startswith("resource") else "4.1", said)

    def record(self, launch: int) -> None:
        if not self.facts.launches[launch].begun:
            raise self.facts.broken("4.1", f"{self.facts.launches[launch]} never began")


class Fences(Rule):
    """4.1, 4.3: the host takes work for done only once its mark was passed or awaited."""

    def reached(self, launch: int) -> None:
        found = self.facts.launches[launch]
        if found.reached:
            raise self.facts.broken("4.1", f"{found} is reached twice")
        if not found.recorded or not (found.passed or found.awaited):
            raise self.facts.broken("4.3", f"{found} is taken for done, but nobody saw its mark passed")

    def forgotten(self) -> None:
        for found in self.facts.launches.values():
            if found.recorded and not (found.reached or found.lost):
                raise self.facts.broken("4.3", f"what is left is dropped, but {found} may still be at work")

    def at_end(self) -> None:
        for found in self.facts.launches.values():
            if not found.reached:
                raise self.facts.broken("4.3", f"the run has ended, and {found} is not reached")


class Lives(Rule):
    """4.3, 2.2: an item retires, and its credit returns, once its own fence and all its consumers' are
    reached."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._retired: set[int] = set()

    def give(self, edge: int, item: int, _: int) -> None:
        facts = self.facts
        found = facts.items[item]
        if edge not in found.edges:
            raise facts.broken("2.2", f"{found} is not on {facts.edges[edge]}")
        for job in facts.takers[edge, item]:
            if (late := facts.unreached_of(job)) is not None:
                raise facts.broken("4.3", f"{found} retires, but {late} may still read it")
        if not facts.takers[edge, item] and not facts.reached(found.launch):
            raise facts.broken("2.2", f"{found} is dropped while {facts.launches[found.launch]} may write it")

    def take(self, _: int, edge: int, item: int) -> None:
        found = self.facts.items[item]
        if edge not in found.edges or item in self._retired:
            raise self.facts.broken(
                "4.3", f"{found} is taken from {self.facts.edges[edge]}, but is not there"
            )

    def retired(self, item: int) -> None:
        facts = self.facts
        found = facts.items[item]
        if item in self._retired:
            raise facts.broken("4.3", f"{found} retires twice")
        self._retired.add(item)
        if not facts.reached(found.launch):
            raise facts.broken(
                "4.3", f"{found} retires, but {facts.launches[found.launch]} may still write it"
            )
        for edge in found.edges:
            raise facts.broken("4.3", f"{found} retires, but is still needed behind {facts.edges[edge]}")

    def at_end(self) -> None:
        for number, item in self.facts.items.items():
            if number not in self._retired:
                raise self.facts.broken("4.3", f"the run has ended, and {item} is still held")


class Gates(Rule):
    """5.1: from the closing of a gate to its opening nothing is launched behind it but by the section; a
    device is drained once all that was launched is over, and released while it is quiet."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._closed: dict[str, str] = {}
        self._drained: set[str] = set()
        self._section: str | None = None

    def close(self, device: str, barrier: str) -> None:
        if device in self._closed:
            said = f"barrier {self._closed[device]} has closed the gate of {device} already"
            raise self.facts.broken("5.2", said)
        self._closed[device] = barrier

    def open(self, device: str, _: str) -> None:
        facts = self.facts
        if device not in self._closed:
            raise facts.broken("5.1", f"the gate of {device} is open")
        del self._closed[device]
        self._drained.discard(device)
        if not facts.failed:
            self._quiet(device, "opens")

    def drain(self, device: str) -> None:
        if device not in self._closed:
            raise self.facts.broken("5.1", f"the gate of {device} is open")
        self._quiet(device, "is drained")

    def drained(self, device: str) -> None:
        self._drained.add(device)

    def section(self, stage: str) -> None:
        self._section = stage
        for device in self._closed:
            if device not in self._drained:
                raise self.facts.broken("5.1", f"a section begins before {device} is drained")

    def unsection(self, _: str) -> None:
        self._section = None

    def release(self, device: str) -> None:
        if device not in self._drained:
            raise self.facts.broken("5.1", f"memory of {device} is released, but it is not drained")

    def submit(self, _: int, __: int, what: str, stage: str, index: int, seq: Any, gate: str | None) -> None:
        if gate in self._closed and stage != self._section:
            said = f"{stage}[{index}] item {seq} is launched behind the closed gate of {gate} ({what})"
            raise self.facts.broken("5.1", said)

    def enter(self, launch: int) -> None:
        found = self.facts.launches[launch]
        if found.gate in self._drained and found.stage != self._section:
            raise self.facts.broken("5.1", f"{found} runs on {found.gate}, which is drained")

    def _quiet(self, device: str, doing: str) -> None:
        for found in self.facts.launches.values():
            if found.gate == device and not (found.reached or found.lost):
                raise self.facts.broken("5.1", f"the gate of {device} {doing} while {found} is in hand")


class Leases(Rule):
    """3.2: many readers or one writer launch at a time; a stream waits for the last write, a writer's for all
    reads since too. 3.3: versions grow with each write, and what is made carries what was read."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._readers: dict[int, int] = defaultdict(int)
        self._writer: dict[int, str] = {}
        self._write: dict[int, int] = {}
        """By instance: the launch of the last write."""
        self._reads: dict[int, set[int]] = defaultdict(set)
        """By instance: launches of reads since."""
        self._versions: dict[str, tuple[str, int]] = {}
        self._next: list[tuple[str, str, bool, tuple[str, int]]] = []
        """Leases of the launch that is submitted next."""
        self._due: dict[int, str] = {}
        self._held: dict[int, list[tuple[str, bool, tuple[str, int]]]] = {}
        """By job."""

    def lease(self, stage: str, instance: int, resource: str, writes: bool, version: tuple[str, int]) -> None:
        facts = self.facts
        version = (version[0], version[1])
        if instance in self._writer:
            raise facts.broken("3.2", f"{stage} leases {resource} while {self._writer[instance]} writes it")
        if writes and self._readers[instance]:
            raise facts.broken("3.2", f"{stage} writes {resource} while it is read")
        if self._versions.setdefault(resource, version) != version:
            known = self._versions[resource]
            raise facts.broken("3.3", f"{resource} has version {known}, and {stage} gets {version}")
        before = [self._write.get(instance, 0), *(self._reads[instance] if writes else ())]
        for launch in before:
            if not facts.reached(launch):
                self._due[launch] = f"resource {resource}"
        if writes:
            self._writer[instance] = stage
        else:
            self._readers[instance] += 1
        self._next.append((stage, resource, writes, version))

    def submit(self, number: int, job: int, what: str, stage: str, *_: Any) -> None:
        if self._next:
            for lease in self._next:
                if lease[0] != stage:
                    said = f"{lease[0]} has a lease of {lease[1]}, but the next launch is of {stage}"
                    raise self.facts.broken("3.2", said)
            if job:
                self._held[job] = [lease[1:] for lease in self._next]
            self.facts.launches[number].needs.update(self._due)
            self._next, self._due = [], {}

    def unlease(self, stage: str, instance: int, writes: bool, launch: int) -> None:
        if writes:
            if self._writer.pop(instance, None) != stage:
                raise self.facts.broken("3.2", f"{stage} gives back a lease that it has not")
            self._write[instance] = launch
            self._reads[instance] = set()
            return
        self._readers[instance] -= 1
        if self._readers[instance] < 0:
            raise self.facts.broken("3.2", f"{stage} gives back a lease that it has not")
        if launch:
            self._reads[instance].add(launch)

    def version(self, resource: str, version: tuple[str, int], follows: bool) -> None:
        version = (version[0], version[1])
        known = self._versions.get(resource)
        if known is not None and known[0] == version[0] and version[1] < known[1] + (not follows):
            raise self.facts.broken("3.3", f"{resource} was at {known}: {version} names two contents")
        self._versions[resource] = version

    def made(self, _: int, launch: int, stage: str, seq: Any, versions: Any, __: Any) -> None:
        job = self.facts.launches[launch].job if launch else 0
        for resource, writes, leased in self._held.get(job, ()):
            wanted = self._versions[resource] if writes else leased
            if tuple(versions.get(resource, ())) != wanted:
                said = f"{stage} {seq} used {wanted} of {resource}, and carries {versions.get(resource)}"
                raise self.facts.broken("3.3", said)

    def at_end(self) -> None:
        if self._writer or any(self._readers.values()):
            raise self.facts.broken("3.2", "the run has ended, and leases are out")


class Credits(Rule):
    """2.2: credits out are items in production for an edge, on it, or in work behind it; none at the end."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._production: dict[int, int] = defaultdict(int)
        self._live: dict[int, set[int]] = defaultdict(set)

    def credit(self, edge: int, change: int, out: int) -> None:
        self._production[edge] += change
        self._count(edge, out)

    def put(self, edge: int, _: int, item: int, paid: bool) -> None:
        if not item:
            return
        if item in self._live[edge]:
            raise self.facts.broken("1.1", f"{self.facts.items[item]} is on {self.facts.edges[edge]} twice")
        self._live[edge].add(item)
        if paid:
            self._production[edge] -= 1
            if self._production[edge] < 0:
                said = f"{self.facts.edges[edge]} got an item that nobody took a credit for"
                raise self.facts.broken("2.2", said)

    def give(self, edge: int, item: int, out: int) -> None:
        self._live[edge].discard(item)
        self._count(edge, out)

    def _count(self, edge: int, out: int) -> None:
        producing, live = self._production[edge], len(self._live[edge])
        if producing < 0 or out != producing + live:
            said = f"{self.facts.edges[edge]}: {out} credits out, {producing} in production, {live} live"
            raise self.facts.broken("2.2", said)

    def at_end(self) -> None:
        for edge, name in self.facts.edges.items():
            if self._production[edge] or self._live[edge]:
                raise self.facts.broken("2.2", f"the run has ended, and credits of {name} are out")


class Numbers(Rule):
    """1.1, 1.3: an edge sees each number once, and if it keeps order in order, from 0 (in a resumed run: from
    where that goes on)."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._ordered: dict[int, bool] = {}
        self._seen: dict[int, set[int]] = defaultdict(set)

    def edge(self, edge: int, _: str, ordered: bool) -> None:
        self._ordered[edge] = ordered

    def put(self, edge: int, number: int, _: int, __: bool) -> None:
        facts, seen = self.facts, self._seen[edge]
        if number in seen:
            raise facts.broken("1.1", f"{facts.edges[edge]} got number {number} twice")
        if self._ordered[edge] and not facts.resumed and number != len(seen):
            raise facts.broken("1.3", f"{facts.edges[edge]} got number {number}, not {len(seen)}")
        seen.add(number)

    def at_end(self) -> None:
        for edge, seen in self._seen.items():
            if not self.facts.resumed and seen != set(range(len(seen))):
                raise self.facts.broken("1.1", f"{self.facts.edges[edge]} lacks a number: got {sorted(seen)}")


class Lanes(Rule):
    """A lane has at most `in_flight` jobs, its launches run one after another on one thread, and none starts
    once the run has failed (7.4); what the loop does is on one thread (4.2)."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._most: dict[tuple[str, int], int] = {}
        self._jobs: dict[tuple[str, int], set[int]] = defaultdict(set)
        self._lane_of: dict[int, tuple[str, int]] = {}
        self._loop: Any = None

    def lane(self, stage: str, index: int, in_flight: int) -> None:
        self._most[stage, index] = in_flight
        self._on_loop()

    def submit(self, _: int, job: int, what: str, stage: str, index: int, seq: Any, __: Any) -> None:
        self._on_loop()
        if self.facts.failed and what != "enqueue":
            raise self.facts.broken("7.4", f"{stage} item {seq} is launched after the run failed")
        if not job:
            return
        lane = stage, index
        self._lane_of[job] = lane
        self._jobs[lane].add(job)
        if len(self._jobs[lane]) > self._most[lane]:
            said = f"{stage}[{index}] has {len(self._jobs[lane])} jobs in flight, not {self._most[lane]}"
            raise self.facts.broken("2.1", said)

    def over(self, job: int) -> None:
        self._on_loop()
        if (late := self.facts.unreached_of(job)) is not None:
            raise self.facts.broken("4.3", f"a job is over, but {late} may still be at work")
        if job:
            self._jobs[self._lane_of[job]].discard(job)

    def reached(self, _: int) -> None:
        self._on_loop()

    def put(self, *_: Any) -> None:
        self._on_loop()

    def _on_loop(self) -> None:
        assert self.facts.entry is not None
        thread = self.facts.entry[0]
        if self._loop is None:
            self._loop = thread
        if thread != self._loop:
            raise self.facts.broken("4.2", "the engine's state changed off the loop")

    def at_end(self) -> None:
        for (stage, index), jobs in self._jobs.items():
            if jobs:
                raise self.facts.broken("2.1", f"the run has ended, and {stage}[{index}] has jobs in hand")


RULES: list[type[Rule]] = [Waits, Fences, Lives, Gates, Leases, Credits, Numbers, Lanes]
