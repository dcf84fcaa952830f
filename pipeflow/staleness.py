"""How far a reader of a follower may run ahead of what is published (axiom 3.6).

It starts its live item n only if n < (v + 1 + S) x B; v: steps in the newest published version, B: its items
in one step, S: `max_staleness`. So no step is made of items whose version is more than S steps old. Kept here
is the number of items that are out: started, and in no published step. An item that is lost on the way
(dropped, skipped, routed elsewhere, thrown away past a `limit`) is in no step to come: it is out no more.

Numbers, not items, are followed, as a gap is a number only. Each gather on the way numbers anew, so there is
one table of what is under way for each stretch between two of them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from pipeflow.errors import StageError
from pipeflow.follow import Misfit, batch_of, followers, gathers, loops
from pipeflow.inputs import Batches
from pipeflow.stage import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pipeflow.follow import Loop
    from pipeflow.graph import Graph
    from pipeflow.job import Job
    from pipeflow.resource import Shared
    from pipeflow.runner import Runner

__all__ = ["Admission", "Track", "wire"]


class Admission:
    """Of one reader of one follower, over all its lanes. Changes on the loop only."""

    def __init__(
        self, reader: Runner, follower: Shared, *, batch: int, staleness: int, stretches: int
    ) -> None:
        self.follower = follower
        self.staleness = staleness
        self.out = 0
        """Items started that are in no published step, nor lost."""
        self.started = 0
        """Items that it started and that are not lost."""
        self._reader = reader
        self._limit = (1 + staleness) * batch
        self._under_way: list[dict[int, int]] = [{} for _ in range(stretches)]
        """For each stretch: an item's number there to how many of the reader's it is made of."""
        self._steps: deque[tuple[int, int]] = deque()
        """Steps that are not published: the version each made, and the reader's items in it."""

    @property
    def open(self) -> bool:
        """Whether one more item may start."""
        return self.out < self._limit

    def start(self, number: int) -> None:
        """The reader starts an item."""
        self.out += 1
        self.started += 1
        self._under_way[0][number] = 1

    def lost(self, stretch: int, numbers: Iterable[int]) -> None:
        """These will not reach the writer: their places are free again."""
        count = self._take(stretch, numbers)
        if count:
            self.out -= count
            self.started -= count
            self._reader.wake()

    def gathered(self, stretch: int, numbers: Iterable[int], number: int) -> None:
        """They are one item now, numbered anew."""
        count = self._take(stretch, numbers)
        if count:
            self._under_way[stretch + 1][number] = count

    def stepped(self, stretch: int, numbers: Iterable[int], step: int) -> None:
        """The writer made them into its version `step`."""
        self._steps.append((step, self._take(stretch, numbers)))

    def published(self, step: int) -> None:
        """The follower has this version now."""
        while self._steps and self._steps[0][0] <= step:
            self.out -= self._steps.popleft()[1]
        self._reader.wake()

    def waits_for(self) -> str:
        """What an item that may not start lacks, in words."""
        return (
            f"version {self.follower.step + 1} of {self.follower.name}: it has started {self.started} items, "
            f"and max_staleness is {self.staleness}"
        )

    def _take(self, stretch: int, numbers: Iterable[int]) -> int:
        table = self._under_way[stretch]
        return sum(table.pop(number, 0) for number in set(numbers))


class Track:
    """What a stage on the way tells an admission. `writes`: it is the writer, at the way's end."""

    __slots__ = ("admission", "size", "stretch", "writes")

    def __init__(
        self, admission: Admission, stretch: int, *, size: int | None, writes: Shared | None
    ) -> None:
        self.admission = admission
        self.stretch = stretch
        self.size = size
        """Of a gather: the members that it says it gathers."""
        self.writes = writes

    def lost(self, number: int) -> None:
        """A gap, or an item thrown away, where its stage takes from."""
        self.admission.lost(self.stretch, [number])

    def began(self, runner: Runner, job: Job) -> None:
        """The stage starts a job; one that gathers numbers anew."""
        if self.size is None:
            return
        count = len(job.parts)
        if count > self.size or (count < self.size and not job.parts[0][0].ended):
            said = f"says that it gathers {self.size} items, but its batch has {count}: correct `gathers`"
            runner.engine.fail(StageError(said, stage=runner.name, sequence=job.number))
        if self.writes is None and job.seq is not None:
            self.admission.gathered(self.stretch, _numbers(job), job.seq)

    def wrote(self, job: Job) -> None:
        """Of the writer: the job's step is made."""
        if self.writes is not None:
            self.admission.stepped(self.stretch, _numbers(job), self.writes.step)

    def skipped(self, job: Job) -> None:
        """Of the writer: the job made no step."""
        if self.writes is not None:
            self.admission.lost(self.stretch, _numbers(job))


def _numbers(job: Job) -> list[int]:
    return [edge.number(item) for edge, item in job.parts]


def wire(graph: Graph, runners: Mapping[str, Runner], shared: Mapping[str, Shared]) -> None:
    """At load: every reader of a follower hears of what becomes of its items."""
    for follower in followers(graph):
        shared[follower.resource.name].follows = shared[follower.followed.name]
        for loop in loops(graph, follower):
            _wire(loop, runners, shared)


def _wire(loop: Loop, runners: Mapping[str, Runner], shared: Mapping[str, Shared]) -> None:
    batch = batch_of(loop)
    if isinstance(batch, Misfit):
        return  # only where that rule is switched off
    follower, reader = loop.follower, runners[loop.reader.name]
    published, followed = shared[follower.resource.name], shared[follower.followed.name]
    admission = Admission(
        reader,
        published,
        batch=batch,
        staleness=follower.resource.spec.max_staleness or 0,
        stretches=1 + sum(node.kind is Kind.GATHER for node in loop.path),
    )
    reader.admissions.append(admission)
    published.admissions.append(admission)
    behind = {loop.reader.name: 0}
    """Gathers passed once a stage has handed on."""
    for node in loop.path:
        stretch = max(behind[link.source] for link in node.inputs if link.source in behind)
        gathering = node.kind is Kind.GATHER
        behind[node.name] = stretch + gathering
        writes = followed if node is follower.writer else None
        track = Track(admission, stretch, size=gathers(node) if gathering else None, writes=writes)
        runner = runners[node.name]
        runner.tracks.append(track)
        if isinstance(runner.inputs, Batches):
            if runner.inputs.linger is not None:
                said = "closes batches by time (`linger`), so nobody can say how many items a step is made of"
                raise StageError(said, stage=runner.name)
            runner.inputs.lost.append(track.lost)
