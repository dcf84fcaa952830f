"""Resources at run time: one instance a device, leased while a job runs, versioned by the writer's step.

A lease is a host-side matter: many readers or one writer *launch* at a time. What is still in work on the
device is ordered by marks: a reader's stream waits for the last write, a writer's also for every read
since. A *pin* (axiom 3.4) lives on the edge, see `edge.pinned`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeflow.item import Version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeflow.device.base import Mark
    from pipeflow.runner import Runner

__all__ = ["Instance", "Leases", "Shared"]


class Instance:
    """A resource's value on one device, with who uses it. Changes on the loop only."""

    __slots__ = ("device", "queue", "read_marks", "readers", "shared", "value", "write_mark", "writing")

    def __init__(self, shared: Shared, device: str, value: Any) -> None:
        self.shared = shared
        self.device = device
        self.value = value
        self.readers = 0
        self.writing = False
        self.queue: dict[Leases, bool] = {}
        """Who waits for a lease (True: to write), first come first served: a stream of readers cannot
        starve the writer."""
        self.write_mark: Mark | None = None
        self.read_marks: list[Mark] = []

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


class Shared:
    """A resource of the file: its instances and its version."""

    __slots__ = ("incarnation", "instances", "name", "step", "writer")

    def __init__(self, name: str, incarnation: str) -> None:
        self.name = name
        self.incarnation = incarnation
        self.instances: dict[str, Instance] = {}
        self.step = 0
        self.writer: Runner | None = None

    @property
    def version(self) -> Version:
        return Version(self.incarnation, self.step)

    def on(self, device: str) -> Instance:
        """The instance on a device; a stage elsewhere (on the host) gets the first one."""
        return self.instances.get(device) or next(iter(self.instances.values()))


class Leases:
    """What one lane's jobs lease, all or nothing: roles to instances."""

    __slots__ = ("_all", "_queued", "node", "reads", "writes")

    def __init__(
        self,
        node: Runner,
        reads: dict[str, Instance],
        writes: dict[str, Instance],
    ) -> None:
        self.node = node
        self._queued = False
        self.reads = reads
        self.writes = writes
        written = set(map(id, writes.values()))
        self._all: Sequence[tuple[Instance, bool]] = (
            *((instance, True) for instance in {id(i): i for i in writes.values()}.values()),
            *((i, False) for i in {id(i): i for i in reads.values()}.values() if id(i) not in written),
        )

    def __bool__(self) -> bool:
        return bool(self._all)

    def blocker(self, *, first: bool = False) -> Instance | None:
        """The first resource that cannot be leased now; None if all can.

        A lane that must wait queues at all it needs in one go. So any two lanes stand in the same order
        in every queue: the foremost waits for running jobs only, and nobody waits in a circle.
        """
        for instance, write in self._all:
            if not instance.free_for(self, write, first=first):
                if not self._queued:
                    self._queued = True
                    for needed, writes in self._all:
                        needed.queue[self] = writes
                return instance
        return None

    def blocked_by(self) -> Instance | None:
        """The resource that it queues for and cannot have; for reports, it queues nowhere anew."""
        if not self._queued:
            return None
        return next((i for i, write in self._all if not i.free_for(self, write)), None)

    def take(self) -> list[Mark]:
        """Lease all (after `blocker` said None) and say which marks the job's stream must wait for."""
        self.forget()
        marks: list[Mark] = []
        for instance, write in self._all:
            if instance.write_mark is not None:
                marks.append(instance.write_mark)
            if write:
                instance.writing = True
                marks.extend(instance.read_marks)
            else:
                instance.readers += 1
        return marks

    def give_back(self, mark: Mark) -> None:
        """The job returned; `mark` stands behind its device work."""
        for instance, write in self._all:
            if write:
                instance.writing = False
                instance.write_mark = None if mark.passed() else mark
                instance.read_marks.clear()
            else:
                instance.readers -= 1
                # Marks that were passed protect nothing any more.
                instance.read_marks = [m for m in instance.read_marks if not m.passed()]
                if not mark.passed():
                    instance.read_marks.append(mark)
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
