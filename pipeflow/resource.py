"""Resources at run time: one instance a device, leased while a job runs, versioned by the writer's step.

A one-to-many job that only reads keeps its lease from its first step to its last, so no item sees two
versions. Where a writer waits for it, it goes on without credits: what it waits for may wait for the writer.

A lease is a host-side matter: many readers or one writer *launch* at a time. What is still in work on the
device is ordered by marks: a reader's stream waits for the last write, a writer's also for every read
since. A *pin* (axiom 3.4) lives on the edge, see `edge.pinned`.

A follower with a spare copy (axiom 3.7) has two instances a device: the writer leases the spare one, readers
the live one, and a write that is through exchanges them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeflow.fence import REACHED
from pipeflow.item import Version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeflow.device.base import Mark
    from pipeflow.fence import Fence
    from pipeflow.operations import OperationLog
    from pipeflow.runner import Runner
    from pipeflow.stage import Resource
    from pipeflow.staleness import Admission

__all__ = ["Instance", "Leases", "Shared", "Spared"]


class Instance:
    """A resource's value on one device, with who uses it. Changes on the loop only."""

    __slots__ = ("device", "keepers", "queue", "read_fences", "readers", "resource", "shared", "value",
                 "write_fence", "writing")  # fmt: skip

    def __init__(self, shared: Shared, device: str, value: Any, resource: Resource | None = None) -> None:
        self.shared = shared
        self.resource = resource
        """What opened the value, and can copy it."""
        self.device = device
        self.value = value
        self.readers = 0
        self.writing = False
        self.queue: dict[Leases, bool] = {}
        """Who waits for a lease (True: to write), first come first served: a stream of readers cannot
        starve the writer."""
        self.keepers: list[Runner] = []
        """Stages whose jobs keep a lease between their steps, and must hear that a writer waits."""
        self.write_fence: Fence = REACHED
        """Of the last write."""
        self.read_fences: list[Fence] = []
        """Of reads since then, those not reached."""

    @property
    def copies(self) -> tuple[Instance, ...]:
        return (self,)

    def free_for(self, asker: Leases, write: bool, *, first: bool = False) -> bool:
        """Whether `asker` may have its lease now. `first` passes the queue (a barrier's section does)."""
        if self.writing or (write and self.readers):
            return False
        if first:
            return True
        for waiting, writes in self.queue.items():
            if waiting is asker:
                return True
            if write or writes:
                return False
        return True

    def before(self, write: bool) -> list[Fence]:
        """What a read (or a write) must come after, and the host has not seen reached."""
        fences = [self.write_fence, *self.read_fences] if write else [self.write_fence]
        return [fence for fence in fences if not fence.reached]


class Spared:
    """A follower's two copies on one device. Which one is live changes on the loop only, and only where its
    one writer is through: so nobody ever queues at a copy that turns into the other one meanwhile."""

    __slots__ = ("live", "spare")

    def __init__(self, live: Instance, spare: Instance) -> None:
        self.live = live
        self.spare = spare

    def switch(self) -> None:
        """The spare copy was written: readers that start from now on get it."""
        self.live, self.spare = self.spare, self.live

    @property
    def copies(self) -> tuple[Instance, ...]:
        return self.live, self.spare

    @property
    def shared(self) -> Shared:
        return self.live.shared

    @property
    def value(self) -> Any:
        """What readers see."""
        return self.live.value

    @property
    def readers(self) -> int:
        return self.live.readers + self.spare.readers

    @property
    def writing(self) -> bool:
        return self.live.writing or self.spare.writing

    @property
    def queue(self) -> dict[Leases, bool]:
        return {**self.live.queue, **self.spare.queue}


class Shared:
    """A resource of the file: its instances and its version."""

    __slots__ = ("admissions", "follows", "incarnation", "instances", "name", "step", "writer")

    def __init__(self, name: str, incarnation: str) -> None:
        self.name = name
        self.incarnation = incarnation
        self.instances: dict[str, Instance | Spared] = {}
        self.step = 0
        self.writer: Runner | None = None
        self.follows: Shared | None = None
        """The resource whose versions it has."""
        self.admissions: list[Admission] = []
        """Readers that wait for its next version."""

    def publish(self, step: int) -> None:
        """Of a follower: it was given this version."""
        self.step = step
        for instance in self.instances.values():
            if type(instance) is Spared:
                instance.switch()
        for admission in self.admissions:
            admission.published(step)

    @property
    def version(self) -> Version:
        return Version(self.incarnation, self.step)

    def on(self, device: str) -> Instance | Spared:
        """The instance on a device; a stage elsewhere (on the host) gets the first one."""
        return self.instances.get(device) or next(iter(self.instances.values()))


class Leases:
    """What one lane's jobs lease, all or nothing: roles to instances."""

    __slots__ = (
        "_all",
        "_awaited",
        "_queued",
        "_spares",
        "awaits",
        "keeps",
        "node",
        "operations",
        "reads",
        "taken",
        "writes",
    )

    def __init__(
        self,
        node: Runner,
        reads: dict[str, Instance | Spared],
        writes: dict[str, Instance | Spared],
        *,
        beside: Sequence[Instance | Spared] = (),
        keeps: bool = False,
        awaits: bool = False,
    ) -> None:
        self.node = node
        self.operations: OperationLog | None = None
        self.keeps = keeps
        """A job keeps them from its first step to its last. A writer of many outputs does not: its readers
        must see the version of each."""
        self.awaits = awaits
        """A lane of the host: it starts once the device work that it must come after is over. A lane of a
        device has its stream wait instead."""
        self._awaited: Fence | None = None
        self._queued: Sequence[Instance] = ()
        """Where it waits."""
        self.reads = reads
        self.writes = writes
        # `beside`: what it writes on other devices. A reader there must not meet the write either.
        written = {id(i): i for i in (*writes.values(), *beside)}
        read = {id(i): i for i in reads.values() if type(i) is Spared or id(i) not in written}
        self._all: Sequence[tuple[Instance | Spared, bool]] = (
            *((instance, True) for instance in written.values()),
            *((instance, False) for instance in read.values()),
        )
        self._spares = any(type(instance) is Spared for instance, _ in self._all)
        self.taken: Sequence[tuple[Instance, bool]] = ()
        """What the last job took, for it to give back."""
        if self.keeps:
            for instance, _ in self._all:
                for copy in instance.copies:
                    copy.keepers.append(node)

    def __bool__(self) -> bool:
        return bool(self._all)

    def blocker(self, *, first: bool = False) -> Instance | None:
        """The first resource that cannot be leased now; None if all can.

        A lane that must wait queues at all it needs in one go. So any two lanes stand in the same order
        in every queue: the foremost waits for running jobs only, and nobody waits in a circle.
        """
        for instance, write in self._copies():
            if not self._may_have(instance, write, first=first):
                if not self._queued:
                    self._wait()
                return instance
        return None

    def _wait(self) -> None:
        # A live copy is written by nobody, so its readers wait in no line.
        waited = [(self._copy(i, w), w) for i, w in self._all if w or type(i) is not Spared]
        self._queued = [copy for copy, _ in waited]
        for needed, writes in waited:
            needed.queue[self] = writes
            for keeper in needed.keepers if writes else ():
                keeper.wake()

    @staticmethod
    def _copy(instance: Instance | Spared, write: bool) -> Instance:
        if type(instance) is Spared:
            return instance.spare if write else instance.live
        return instance  # type: ignore[return-value]

    def _copies(self) -> Sequence[tuple[Instance, bool]]:
        """What a job that starts now would lease."""
        if not self._spares:
            return self._all  # type: ignore[return-value]
        return [(self._copy(instance, write), write) for instance, write in self._all]

    def _may_have(self, instance: Instance, write: bool, *, first: bool) -> bool:
        if not instance.free_for(self, write, first=first):
            return False
        if self.awaits and (before := instance.before(write)):
            if before[0] is not self._awaited:
                self._awaited = before[0]
                before[0].when_reached(self.node.wake)
            return False
        return True

    def blocked_by(self) -> Instance | None:
        """The resource that it queues for and cannot have; for reports, it queues nowhere anew."""
        if not self._queued:
            return None
        for instance, write in self._copies():
            if not instance.free_for(self, write) or (self.awaits and instance.before(write)):
                return instance
        return None

    @property
    def waits(self) -> bool:
        """Whether it stands in a line."""
        return bool(self._queued)

    def wanted(self) -> bool:
        """Whether a writer waits for one of them."""
        return any(any(instance.queue.values()) for instance, _ in self._all)

    def take(self) -> list[Mark]:
        """Lease all (after `blocker` said None) and say which marks the job's stream must wait for."""
        self.forget()
        self.taken = self._copies()
        marks: list[Mark] = []
        for instance, write in self.taken:
            marks.extend(fence.mark for fence in instance.before(write) if fence.mark is not None)
            if write:
                instance.writing = True
            else:
                instance.readers += 1
        if self.operations is not None:
            self.operations.leased(self.node.name, self.taken)
        return marks

    def give_back(self, fence: Fence, taken: Sequence[tuple[Instance, bool]] | None = None) -> None:
        """The job that took them returned; `fence` stands behind its device work."""
        taken = self.taken if taken is None else taken
        if self.operations is not None:
            self.operations.gave_back(self.node.name, taken, fence.mark)
        for instance, write in taken:
            if write:
                instance.writing = False
                instance.write_fence = fence
                instance.read_fences.clear()
            else:
                instance.readers -= 1
                fences = [other for other in instance.read_fences if not other.reached]
                instance.read_fences = fences if fence.reached else [*fences, fence]
            for waiting in instance.queue:
                waiting.node.wake()

    def forget(self) -> None:
        """Leave every queue, and let those behind look again. For a lane that goes on, or wants no more."""
        if not self._queued:
            return
        queued, self._queued = self._queued, ()
        for instance in queued:
            del instance.queue[self]
            for waiting in instance.queue:
                waiting.node.wake()

    def values(self, *, write: bool = False) -> dict[str, Any]:
        """Roles to what a job that starts now gets."""
        roles = self.writes if write else self.reads
        return {role: self._copy(instance, write).value for role, instance in roles.items()}

    def everywhere(self) -> dict[str, dict[str, Any]]:
        """Roles written to the value on each device."""
        return {
            role: {device: self._copy(i, True).value for device, i in instance.shared.instances.items()}
            for role, instance in self.writes.items()
        }

    def moving(self) -> set[str]:
        """Roles whose value is another one for each version."""
        roles = (*self.reads.items(), *self.writes.items())
        return {role for role, instance in roles if type(instance) is Spared}

    def roles(self) -> dict[str, Version]:
        """Versions by role, as of now."""
        held = (*self.reads.items(), *self.writes.items())
        return {role: instance.shared.version for role, instance in held}

    def versions(self) -> dict[str, Version]:
        """Versions by resource name, as of now."""
        return {instance.shared.name: instance.shared.version for instance, _ in self._all}
