"""A stage at run time: takes inputs, starts jobs, and ends when nothing will come.

Everything here happens on the loop, in `pump`, which the engine calls whenever something changed. A job
starts with all it needs or not at all: an input, a free lane, an open gate, a credit on every out-edge, its
leases. So nobody holds one thing while waiting for another, and what waits can always be named.

The parts of a job's life are modules of their own: `launching` (stage code is called and comes back),
`outcome` (what it returned means), `production` (generators go on), `handover` (outputs leave, inputs
retire), `finishing` (the `finish` hook).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from pipeflow import finishing, handover, production, unused
from pipeflow.inputs import Batches
from pipeflow.job import Job
from pipeflow.lacks import lacks
from pipeflow.launching import launch
from pipeflow.linger import Linger
from pipeflow.observe.counters import Counters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeflow.checkpoint.station import Station
    from pipeflow.device.base import Buffer
    from pipeflow.edge import Edge
    from pipeflow.engine import Engine
    from pipeflow.inputs import Policy, Taken
    from pipeflow.item import Item
    from pipeflow.lane import Lane
    from pipeflow.resource import Shared
    from pipeflow.spec import OnError
    from pipeflow.stage import Kind
    from pipeflow.staleness import Admission, Track

__all__ = ["Runner"]

HAND_LIMIT = 64
"""Finished jobs (and gaps) that wait for an older one to leave; behind it nothing more starts. The oldest
job never waits for a younger one, so the limit cannot stop the stage."""


class Runner:
    """One stage of the file, with its lanes and edges."""

    fires_on_gaps = False
    """A barrier: a gap that it selects runs its section too."""
    in_section = False
    """A guarded stage at work: gates are closed for others, and it need not queue for leases."""
    taken: Taken | None = None
    """Of a barrier: what its section runs for."""
    relays = False
    """A copy: it passes on the hold of a pinned reader behind it (axiom 3.4)."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        *,
        kind: Kind,
        ordered: bool,
        on_host: bool,
        starts_domain: bool,
        on_error: OnError | None,
        retriable: bool,
        scatters: bool = False,
        ports: tuple[str, ...] = (),
        timeout: float | None = None,
    ) -> None:
        self.engine = engine
        self.name = name
        self.kind = kind
        self.ordered = ordered
        self.on_host = on_host
        """Runs on the host, so its inputs' fences are reached before it starts."""
        self.starts_domain = starts_domain
        self.on_error = on_error
        self.retriable = retriable
        self.scatters = scatters
        self.ports = ports
        self.timeout = timeout
        self.source = kind.value == "source"
        self.flat = kind.value == "one-to-many"
        self.numbered = not self.flat and not scatters
        """One job (a source's: one step) makes one output, so its number is known when it starts."""
        self.steps = self.source or self.flat or scatters
        """Jobs in hand go on by themselves: generators, and scatters that wait for credits."""
        self.lanes: list[Lane] = []
        self.free = 0
        """Jobs that its lanes could take beside those they have."""
        self.inputs: Policy | None = None
        """None: a source."""
        self.outs: list[Edge] = []
        self.counters = Counters()
        self.writes: list[Shared] = []
        self.admissions: list[Admission] = []
        """Of each follower that it reads: how far it may run ahead."""
        self.tracks: list[Track] = []
        """Whom it tells what becomes of a reader's items."""
        self.answers = False
        """What leaves (or ends) here is the result of a submit."""
        self.feeds_answer = False
        """A gap here means that a submitted item has no result."""
        self.limit: int | None = None
        self.sources: list[Runner] = []
        """Sources it is fed by, which end with it once `limit` is reached."""

        self.hand: deque[Job] = deque()
        """Jobs in the order they were started, until all they made has left."""
        self.next_seq: int = 0
        """The next number of the domain it starts."""
        self.pins = 0
        """Readers that must launch before the next item may change what they read."""
        self.pinned_behind: list[Edge] = []
        """Of a copy: in-edges whose producer is held until its own pins are gone."""
        self.outlasts: list[Runner] = []
        """Of a source: a drain lets it go on until these have ended (see `checkpoint.saver`)."""
        self.outlasted_by: list[Runner] = []
        self.skipped = 0
        self.retrying = 0
        """Jobs in hand that raised and will be launched again."""
        self.exhausted = False
        self.ending = False
        """A source that ends where it stands."""
        self.finishing = 0
        """Lanes whose `finish` is under way."""
        self.finished = False
        self.closed = False
        self.queued_for_pump = False
        self.station: Station | None = None
        """Where its checkpoints are taken, if the run makes some."""
        self._next_lane = 0
        self._awaited: Item | None = None
        self._linger: Linger | None = None

    # Waking ----------------------------------------------------------------------------------------

    def add_lane(self, lane: Lane) -> None:
        """At load."""
        self.lanes.append(lane)
        self.free += lane.in_flight

    def take_from(self, inputs: Policy) -> None:
        """At load, after its lanes."""
        self.inputs = inputs
        if isinstance(inputs, Batches) and inputs.linger is not None:
            self._linger = Linger(self, inputs, inputs.linger)

    def wake(self) -> None:
        """Something changed that this stage may wait for."""
        if not self.queued_for_pump:
            self.queued_for_pump = True
            self.engine.ready(self)

    def pump(self) -> None:
        """Do all that can be done now."""
        self.queued_for_pump = False
        if self.closed:
            unused.discard(self)
            return
        moved = True
        while moved:
            moved = self.inputs is not None and self._absorb(self.inputs)
            if self.free and self._start():
                moved = True
            if self.hand:
                if self.steps or self.retrying:
                    moved = production.produce(self) or moved
                moved = handover.emit(self) or moved
        if not self.hand:
            self.try_close()

    # Inputs ----------------------------------------------------------------------------------------

    def _absorb(self, inputs: Policy) -> bool:
        """Let gaps pass, and a gather take its members. A gap keeps its turn, so it goes through the hand."""
        if len(self.hand) > HAND_LIMIT:
            return False
        if self.limit is not None and self.sated:
            for source in self.sources:
                source.end()
            return unused.discard(self)
        passed = inputs.gaps()
        if self._linger is not None:
            self._linger.keep()
        for seq in passed:
            for track in self.tracks:
                if track.writes is not None:
                    track.lost(seq)
            unused.pass_gap(self, seq)
        return bool(passed)

    @property
    def sated(self) -> bool:
        """It has taken as many items as `limit` says."""
        return self.limit is not None and self.counters.started >= self.limit

    @property
    def drained(self) -> bool:
        """Of a source: a drain ends it where it stands."""
        return self.engine.sources_ended and all(runner.closed for runner in self.outlasts)

    def end(self) -> None:
        """Of a source: make no more."""
        if not self.ending:
            self.ending = True
            self.wake()

    def retire(self, edge: Edge, item: Item, *, passes: bool = False) -> None:
        """An item that no job of this stage will use leaves once its own fence is reached. `passes`: its
        number goes on, as a gap."""
        handover.retire_unused(self, edge, item)
        if edge.pinned and not (passes and self.fires_on_gaps):
            edge.producer.unpin()

    @property
    def lingering(self) -> bool:
        """A timer will close a batch: something will happen."""
        return self._linger is not None and self._linger.waiting

    @property
    def at_gate(self) -> bool:
        """A gate is closed before it; with nothing in hand here, another pipeline's barrier holds it."""
        return any(lane.gate is not None and not lane.gate.open for lane in self.lanes)

    def stop_waiting(self) -> None:
        """No job will start here any more: drop the timer, and the places in queues for leases."""
        if self._linger is not None:
            self._linger.stop()
        for lane in self.lanes:
            if lane.leases:
                lane.leases.forget()

    # Start -----------------------------------------------------------------------------------------

    def _start(self) -> bool:
        """Start one job if all it needs is there."""
        if self.pins or self.finishing or not self.engine.admitting or len(self.hand) > HAND_LIMIT:
            return False
        if self.limit is not None and self.sated:
            return False
        lane = self._free_lane()
        if lane is None:
            return False
        if self.inputs is None:
            return self._start_source(lane)
        taken = self.inputs.peek()
        if taken is None or (self.on_host and self._awaits(taken)):
            return False
        seq = None if self.starts_domain else taken.seq
        if seq is None and self.numbered and self.ordered:
            seq = self.next_seq
        if not self.admitted():
            return False
        edges = self.edges_for(seq)
        for edge in edges:
            if not edge.admits():
                return False
        if lane.leases and lane.leases.blocker() is not None:
            return False
        self.inputs.take(taken)
        if self.starts_domain and seq is not None:
            self.next_seq += 1
        job = Job(lane, seq, taken, self.engine.now())
        self.charge(job, edges)
        job.inherit(taken)
        if self.station is not None:
            self.station.starts(job)
        self.begin(job, lane)
        for admission in self.admissions:
            assert seq is not None
            admission.start(seq)
        for track in self.tracks:
            track.began(self, job)
        launch(self, job)
        return True

    def admitted(self) -> bool:
        """Whether the followers that it reads are new enough for one more item (axiom 3.6)."""
        return not self.admissions or all(admission.open for admission in self.admissions)

    def _start_source(self, lane: Lane) -> bool:
        """Its generator, once; each of its steps is started by `production`."""
        engine = self.engine
        open_ = engine.sources_open or (engine.sources_ended and not self.drained)
        if self.exhausted or self.hand or self.ending or not (open_ and engine.begun):
            return False
        job = Job(lane, None, None, self.engine.now())
        lane.busy += 1
        self.free -= 1
        self.hand.append(job)
        return True

    def begin(self, job: Job, lane: Lane) -> None:
        """Count a job in."""
        if job.number is None:
            job.number = self.counters.started
        lane.busy += 1
        self.free -= 1
        self.counters.started += 1
        self.hand.append(job)
        if len(self.lanes) > 1:
            self._next_lane = (lane.index + 1) % len(self.lanes)
            for other in self.lanes:  # this item is what they waited with
                if other.leases:
                    other.leases.forget()

    def edges_for(self, seq: int | None) -> Sequence[Edge]:
        """Out-edges that will take what gets this number; all of them while it has none."""
        if seq is None:
            return self.outs
        for edge in self.outs:
            if edge.every != 1:
                return [edge for edge in self.outs if edge.selects(seq)]
        return self.outs

    def charge(self, job: Job, edges: Sequence[Edge]) -> None:
        """Take a credit on each edge for the next output, and hold the next item back for pinned readers."""
        for edge in edges:
            edge.take()
            if edge.pinned:
                self.pins += 1
        job.charged = edges

    def uncharge(self, edges: Sequence[Edge]) -> None:
        """Nothing came of it."""
        for edge in edges:
            edge.untake()
            if edge.pinned:
                self.unpin()

    def unpin(self) -> None:
        """One reader of this writer's last item has launched, or will not."""
        self.pins -= 1
        if self.pins == 0:
            for edge in self.pinned_behind:
                edge.producer.unpin()
            self.pinned_behind.clear()
        self.wake()

    def _awaits(self, taken: Taken) -> bool:
        """Whether an input's fence is still to be reached, which the host must wait for."""
        for _, item in taken.parts:
            if not item.fence.reached:
                if item is not self._awaited:
                    self._awaited = item
                    item.fence.when_reached(self.wake)
                return True
        return False

    def _free_lane(self) -> Lane | None:
        """The next lane in turn that has room and an open gate. One that waits in a line for leases comes
        first: with its place there it holds up others, and only a job of its own takes it out."""
        lanes = self.lanes
        count = len(lanes)
        if count == 1:
            lane = lanes[0]
            return lane if lane.gate is None or lane.gate.open else None
        found: Lane | None = None
        for offset in range(count):
            lane = lanes[(self._next_lane + offset) % count]
            if lane.busy < lane.in_flight and (lane.gate is None or lane.gate.open):
                if lane.leases and lane.leases.waits:
                    return lane
                found = found or lane
        return found

    def buffers(self, item: Item) -> Sequence[Buffer]:
        """The storages of an item, for an edge with a byte budget."""
        if item.buffers is None:
            device = self.lanes[0].device if self.lanes else None
            item.buffers = device.buffers(item.value) if device is not None else ()
        return item.buffers

    # The end ---------------------------------------------------------------------------------------

    def try_close(self) -> None:
        """When nothing is left and nothing will come: `finish` on every lane, then tell the consumers."""
        if self.hand or self.finishing or self.closed or not self.engine.admitting:
            return
        if self.inputs is not None:
            if not self.inputs.ended():
                return
        elif not self.exhausted:
            if not (self.ending or self.drained):
                return
            self.exhausted = True
        for lane in self.lanes:
            if lane.busy:
                return
        if self.station is not None and not self.finished and self.station.holds_close():
            return  # it is woken once its last state is taken
        if not self.finished:
            finishing.finish(self)
        if self.finished:
            self.close()

    def close(self) -> None:
        """Nothing more will leave."""
        self.closed = True
        self.stop_waiting()
        for edge in self.outs:
            edge.closed = True
            edge.consumer.wake()
        for source in self.outlasted_by:
            source.wake()
        self.wake()
        self.engine.node_closed(self)

    def waits_for(self) -> str:
        """For a stall report: the first thing it lacks, in words."""
        return lacks(self)

    def __repr__(self) -> str:
        return f"Runner({self.name})"
