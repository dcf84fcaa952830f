"""Resources at run time: one instance a device, leased while a job runs, versioned by the writer's step.

A one-to-many job that only reads keeps its lease from its first step to its last, so no item sees two
versions. Where a writer waits for it, it goes on without credits: what it waits for may wait for the writer.

A lease is a host-side matter: many readers or one writer *launch* at a time. What is still in work on the
device is ordered by marks: a reader's stream waits for the last write, a writer's also for every read
since. A *pin* (axiom 3.4) lives on the edge, see `edge.pinned`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeflow.fence import REACHED
from pipeflow.item import Version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeflow.device.base import Mark
    from pipeflow.fence import Fence
    from pipeflow.runner import Runner
    from pipeflow.staleness import Admission

__all__ = ["Instance", "Leases", "Shared"]


class Instance:
    """A resource's value on one device, with who uses it. Changes on the loop only."""

    __slots__ = ("device", "keepers", "queue", "read_fences", "readers", "shared", "value", "write_fence",
                 "writing")  # fmt: skip

    def __init__(self, shared: Shared, device: str, value: Any) -> None:
        self.shared = shared
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


class Shared:
    """A resource of the file: its instances and its version."""

    __slots__ = ("admissions", "follows", "incarnation", "instances", "name", "step", "writer")

    def __init__(self, name: str, incarnation: str) -> None:
        self.name = name
        self.incarnation = incarnation
        self.instances: dict[str, Instance] = {}
        self.step = 0
        self.writer: Runner | None = None
        self.follows: Shared | None = None
        """The resource whose versions it has."""
        self.admissions: list[Admission] = []
        """Readers that wait for its next version."""

    def publish(self, step: int) -> None:
        """Of a follower: it was given this version."""
        self.step = step
        for admission in self.admissions:
            admission.published(step)

    @property
    def version(self) -> Version:
        return Version(self.incarnation, self.step)

    def on(self, device: str) -> Instance:
        """The instance on a device; a stage elsewhere (on the host) gets the first one."""
        return self.instances.get(device) or next(iter(self.instances.values()))


class Leases:
    """What one lane's jobs lease, all or nothing: roles to instances."""

    __slots__ = ("_all", "_awaited", "_queued", "awaits", "keeps", "node", "reads", "writes")

    def __init__(
        self,
        node: Runner,
        reads: dict[str, Instance],
        writes: dict[str, Instance],
        *,
        keeps: bool = False,
        awaits: bool = False,
    ) -> None:
        self.node = node
        self.keeps = keeps
        """A job keeps them from its first step to its last. A writer of many outputs does not: its readers
        must see the version of each."""
        self.awaits = awaits
        """A lane of the host: it starts once the device work that it must come after is over. A lane of a
        device has its stream wait instead."""
        self._awaited: Fence | None = None
        self._queued = False
        self.reads = reads
        self.writes = writes
        written = set(map(id, writes.values()))
        self._all: Sequence[tuple[Instance, bool]] = (
            *((instance, True) for instance in {id(i): i for i in writes.values()}.values()),
            *((i, False) for i in {id(i): i for i in reads.values()}.values() if id(i) not in written),
        )
        if self.keeps:
            for instance, _ in self._all:
                instance.keepers.append(node)

    def __bool__(self) -> bool:
        return bool(self._all)

    def blocker(self, *, first: bool = False) -> Instance | None:
        """The first resource that cannot be leased now; None if all can.

        A lane that must wait queues at all it needs in one go. So any two lanes stand in the same order
        in every queue: the foremost waits for running jobs only, and nobody waits in a circle.
        """
        for instance, write in self._all:
            if not self._may_have(instance, write, first=first):
                if not self._queued:
                    self._queued = True
                    for needed, writes in self._all:
                        needed.queue[self] = writes
                        for keeper in needed.keepers if writes else ():
                            keeper.wake()
                return instance
        return None

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
        for instance, write in self._all:
            if not instance.free_for(self, write) or (self.awaits and instance.before(write)):
                return instance
        return None

    def wanted(self) -> bool:
        """Whether a writer waits for one of them."""
        return any(any(instance.queue.values()) for instance, _ in self._all)

    def take(self) -> list[Mark]:
        """Lease all (after `blocker` said None) and say which marks the job's stream must wait for."""
        self.forget()
        marks: list[Mark] = []
        for instance, write in self._all:
            marks.extend(fence.mark for fence in instance.before(write) if fence.mark is not None)
            if write:
                instance.writing = True
            else:
                instance.readers += 1
        return marks

    def give_back(self, fence: Fence) -> None:
        """The job returned; `fence` stands behind its device work."""
        for instance, write in self._all:
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
        self._queued = False
        for instance, _ in self._all:
            del instance.queue[self]
            for waiting in instance.queue:
                waiting.node.wake()

    def versions(self) -> dict[str, Version]:
        """Versions by resource name, as of now."""
        return {instance.shared.name: instance.shared.version for instance, _ in self._all}
