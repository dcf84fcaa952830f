"""A stage at run time: takes inputs, starts jobs, hands their outputs over, retires what they used.

Everything here happens on the loop, in `pump`, which the engine calls whenever something changed. A job
starts with all it needs or not at all: an input, a free lane, an open gate, a credit on every out-edge, its
leases. So nobody holds one thing while waiting for another, and what waits can always be named.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from pipeflow.context import Context
from pipeflow.errors import DeviceError, StageError
from pipeflow.fence import Fence
from pipeflow.inputs import Batches, Taken
from pipeflow.item import DROP, Failed, Item, Port, Scatter, Version
from pipeflow.job import END, Job, Launched, Output
from pipeflow.observe.counters import Counters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeflow.device.base import Buffer, Mark
    from pipeflow.edge import Edge
    from pipeflow.engine import Engine
    from pipeflow.inputs import Policy
    from pipeflow.lane import Lane
    from pipeflow.resource import Shared
    from pipeflow.spec import OnError
    from pipeflow.stage import Kind

__all__ = ["Runner"]

_HAND_LIMIT = 64
"""Finished jobs (and gaps) that wait for an older one to leave; behind it nothing more starts. The oldest
job never waits for a younger one, so the limit cannot stop the stage."""


class Runner:
    """One stage of the file, with its lanes and edges."""

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
        self.timeout = timeout
        self.lanes: list[Lane] = []
        self.inputs: Policy | None = None
        """None: a source."""
        self.outs: list[Edge] = []
        self.counters = Counters()
        self.writes: list[Shared] = []
        self.pins = 0
        """Readers that must launch before the next item may change what they read."""
        self.closed = False
        self.answers = False
        """What leaves (or ends) here is the result of a submit."""
        self.feeds_answer = False
        """A gap here means that a submitted item has no result."""
        self._hand: deque[Job] = deque()
        """Jobs in the order they were started, until all they made has left."""
        self._next = 0
        """The next number of the domain it starts."""
        self._next_lane = 0
        self._skipped = 0
        self._exhausted = False
        self._finishing = 0
        self._finished = False
        self._single = kind.value in ("one-to-one", "source", "gather") and not scatters
        self._flat = kind.value == "one-to-many"
        self._source = kind.value == "source"
        self._queued_for_pump = False
        self._linger: Any = None
        self._retrying = 0
        self.limit: int | None = None
        self.sources: list[Runner] = []
        """Sources it is fed by, which end with it once `limit` is reached."""
        self.ending = False
        """A source that ends where it stands."""
        self._hand_limit = _HAND_LIMIT

    # Waking ----------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Something changed that this node may wait for."""
        if not self._queued_for_pump:
            self._queued_for_pump = True
            self.engine.ready(self)

    def pump(self) -> None:
        """Do all that can be done now."""
        self._queued_for_pump = False
        if self.closed:
            return
        moved = True
        while moved:
            moved = self._absorb()
            moved = self._start() or moved
            moved = self._produce() or moved
            moved = self._emit() or moved
        self._try_close()

    # Inputs ----------------------------------------------------------------------------------------

    def _absorb(self) -> bool:
        """Let gaps pass, and a gather take its members. A gap keeps its turn, so it goes through the hand."""
        if self.inputs is None or len(self._hand) > self._hand_limit:
            return False
        if self._sated:
            return self._discard(self.inputs)
        passed = self.inputs.gaps()
        if isinstance(self.inputs, Batches):
            self._keep_linger(self.inputs)
        for seq in passed:
            self._pass_gap(seq)
        return bool(passed)

    @property
    def _sated(self) -> bool:
        return self.limit is not None and self.counters.started >= self.limit

    def _discard(self, inputs: Policy) -> bool:
        """Past the limit whatever still comes retires unused, so that nobody upstream waits for a credit."""
        for source in self.sources:
            source.end()
        left = inputs.discard() if isinstance(inputs, Batches) else []
        for edge in inputs.edges:
            while not edge.empty:
                _, item = edge.pop()
                if item is not None:
                    left.append((edge, item))
        for edge, item in left:
            self.retire(edge, item)
        return bool(left)

    def end(self) -> None:
        """Of a source: make no more."""
        if not self.ending:
            self.ending = True
            self.wake()

    def _pass_gap(self, seq: int) -> None:
        self.counters.gaps += 1
        if not self.outs or (self.starts_domain and not self.scatters):
            return
        job = Job(None, seq, None, 0.0)
        job.returned = True
        job.outputs.append(Output(live=False, fence=job.fence, seq=seq))
        self._hand.append(job)

    def _keep_linger(self, batches: Batches) -> None:
        """Close a batch that has waited too long. Never in a batch stage without `linger`."""
        seconds = getattr(self.lanes[0].stage, "linger", None) if self.lanes else None
        if seconds is None:
            return
        if batches.lingering and self._linger is None:

            def over() -> None:
                self._linger = None
                batches.flush()
                self.wake()

            self._linger = self.engine.loop.call_later(seconds, over)
        elif not batches.lingering and self._linger is not None:
            self._linger.cancel()
            self._linger = None

    # Start -----------------------------------------------------------------------------------------

    def _start(self) -> bool:
        """Start one job if all it needs is there."""
        if self._finishing or self.pins or not self.engine.admitting or len(self._hand) > self._hand_limit:
            return False
        if self._sated:
            return False
        taken: Taken | None = None
        if self.inputs is not None:
            taken = self.inputs.peek()
            if taken is None or (self.on_host and self._unreached(taken)):
                return False
        elif self._exhausted or self._hand or self.ending or not self.engine.sources_open:
            return False
        lane = self._free_lane()
        if lane is None:
            return False
        seq = taken.seq if taken is not None and not self.starts_domain else None
        if self._single and seq is None and self.ordered:
            seq = self._next
        edges = tuple(self.outs) if seq is None else tuple(e for e in self.outs if e.selects(seq))
        if not all(edge.admits() for edge in edges):
            return False
        if lane.leases and lane.leases.blocker() is not None:
            return False
        if self.inputs is not None and taken is not None:
            self.inputs.take(taken)
        if seq is not None and (taken is None or self.starts_domain):
            self._next += 1
        job = Job(lane, seq, taken, time.perf_counter())
        for edge in edges:
            edge.take()
            if edge.pinned:
                self.pins += 1
        job.charged = edges
        if taken is not None:
            job.gaps = taken.gaps
            job.tickets = self._tickets(taken)
            job.versions = self._versions_of(taken)
        self._hand.append(job)
        lane.busy += 1
        self.counters.started += 1
        self._launch(job)
        return True

    def _unreached(self, taken: Taken) -> bool:
        for _, item in taken.parts:
            if not item.fence.reached:
                item.fence.when_reached(self.wake)
                return True
        return False

    def _free_lane(self) -> Lane | None:
        """The next lane in turn that has room and an open gate."""
        count = len(self.lanes)
        for offset in range(count):
            lane = self.lanes[(self._next_lane + offset) % count]
            if lane.busy < lane.in_flight and (lane.gate is None or lane.gate.open):
                self._next_lane = (self._next_lane + offset + 1) % count
                return lane
        return None

    @staticmethod
    def _tickets(taken: Taken) -> tuple[Any, ...]:
        if len(taken.parts) == 1:
            return taken.parts[0][1].tickets
        return tuple(ticket for _, item in taken.parts for ticket in item.tickets)

    @staticmethod
    def _versions_of(taken: Taken) -> dict[str, Version] | None:
        """Versions its inputs carry; of several the oldest."""
        merged: dict[str, Version] | None = None
        for _, item in taken.parts:
            if item.versions:
                merged = {} if merged is None else merged
                for name, version in item.versions.items():
                    if name not in merged or version.step < merged[name].step:
                        merged[name] = version
        return merged

    # Launch ----------------------------------------------------------------------------------------

    def _launch(self, job: Job) -> None:
        """Submit one call of stage code. Credits are taken and leases are free."""
        lane = job.lane
        assert lane is not None
        waits: list[Mark] = []
        if not self.on_host:
            for _, item in job.parts:
                if item.fence.mark is not None and not item.fence.reached:
                    waits.append(item.fence.mark)  # type: ignore[arg-type]
        if lane.leases:
            waits.extend(lane.leases.take())
            job.versions = {**(job.versions or {}), **lane.leases.versions()}
        context = None
        if lane._wants_context:
            context = job.generator_context if job.generator_context is not None else lane.context(job.seq)
            if lane.generates:
                job.generator_context = context
        job.launching = True
        job.unreached += 1
        fence = job.fence = Fence()
        if lane.gate is not None and lane.enqueue is None:
            lane.gate.enter(lane, job.seq)
        self.engine.in_hand += 1
        doing = f"item {job.seq}" if job.seq is not None else "an item"

        def returned(launched: Launched | None, error: BaseException | None) -> None:
            self._returned(job, fence, launched, error)

        if lane.is_async:
            lane.launcher.submit(doing, lambda: lane.launch_async(job, context), returned)
        else:
            lane.launcher.submit(doing, lambda: lane.launch(job, waits, context), returned)

    def _returned(self, job: Job, fence: Fence, launched: Launched | None, error: BaseException | None) -> None:
        """Stage code came back (on the loop)."""
        lane = job.lane
        assert lane is not None
        engine = self.engine
        job.launching = False
        engine.in_hand -= 1
        engine.progress += 1
        if launched is None:  # not stage code's fault: the device, or the engine
            self._device_fault(lane, job, error)
            return
        fence.mark = launched.mark
        if lane.leases:
            lane.leases.give_back(launched.mark)
        self.counters.host_seconds += launched.seconds
        if launched.error is None and launched.value is not END and not job.returned:
            for shared in self.writes:
                shared.step = job.seq + 1 if job.seq is not None else shared.step + 1
            if self.writes and job.versions is not None:
                job.versions = {**job.versions, **{shared.name: shared.version for shared in self.writes}}
        context = launched.context

        if launched.mark.passed():
            self._reached(job, fence, context)
        else:
            engine.in_hand += 1

            def passed(_: Any, fault: BaseException | None) -> None:
                engine.in_hand -= 1
                engine.progress += 1
                if fault is not None:
                    self._device_fault(lane, job, fault)
                else:
                    self._reached(job, fence, context)

            lane.watcher.watch(f"the fence of item {job.seq}", launched.mark, passed)
        self._took(job, fence, launched)
        self.wake()

    def _took(self, job: Job, fence: Fence, launched: Launched) -> None:
        """What a launch that returned means for its job: outputs, a gap, a retry, the end, a fault."""
        value = launched.value
        if launched.error is not None:
            self._raised(job, fence, launched.error)
        elif value is END:
            if self._source:
                self._exhausted = True
                if job.seq is not None:
                    self._next -= 1
            self._uncharge(job)
            job.returned = True
        elif isinstance(value, Failed):
            self._raised(job, fence, value.error, record=value.record)
        elif isinstance(value, Scatter):
            self._scattered(job, fence, value)
        else:
            self._made(job, fence, value, job.seq)
            job.returned = not (self._flat or self._source)
        if not job.retry:
            self._unpin(job)

    def _made(self, job: Job, fence: Fence, value: Any, seq: int | None) -> None:
        self.counters.made += 1
        charged, job.charged = job.charged, ()
        if value is DROP:
            self._gap(job, charged, seq)
            return
        port = None
        if isinstance(value, Port):
            port, value = value.name, value.value
        if self.answers:
            self.engine.answer(job.tickets, value, fence)
        if not self.outs:
            return
        job.outputs.append(
            Output(
                value=value,
                fence=fence,
                charged=charged,
                seq=seq,
                port=port,
                versions=job.versions,
                tickets=job.tickets,
            )
        )

    def _gap(self, job: Job, charged: tuple[Edge, ...], seq: int | None) -> None:
        self.counters.dropped += 1
        if self.feeds_answer:
            self.engine.drop(job.tickets, self.name)
        job.outputs.append(Output(live=False, fence=job.fence, charged=charged, seq=seq))

    def _scattered(self, job: Job, fence: Fence, scatter: Scatter[Any]) -> None:
        """One value a member: each goes on with its member's number, gaps between them too."""
        if len(scatter.values) != len(job.parts):
            self._fail(
                StageError(
                    f"returned a Scatter of {len(scatter.values)} values for {len(job.parts)} members",
                    stage=self.name,
                    sequence=job.seq,
                )
            )
            return
        job.returned = True
        self.counters.made += len(scatter.values)
        members: list[Output] = [Output(live=False, fence=fence, seq=seq) for seq in job.gaps]
        for value, (edge, item) in zip(scatter.values, job.parts, strict=True):
            live = value is not DROP
            members.append(
                Output(
                    value=value if live else None,
                    live=live,
                    fence=fence,
                    seq=self.engine.number_on(edge, item),
                    versions=job.versions,
                    tickets=item.tickets,
                )
            )
            if not live and self.feeds_answer:
                self.engine.drop(item.tickets, self.name)
            elif live and self.answers:
                self.engine.answer(item.tickets, value, fence)
        members.sort(key=lambda output: output.seq or 0)
        if self.outs:
            job.pending.extend(members)
            self._uncharge_unless_needed(job)
        else:
            self._uncharge(job)

    def _uncharge_unless_needed(self, job: Job) -> None:
        """The credit taken at the start serves the first live member."""
        for output in job.pending:
            if output.live:
                output.charged, job.charged = job.charged, ()
                break
        self._uncharge(job)

    def _uncharge(self, job: Job) -> None:
        for edge in job.charged:
            edge.untake()
        job.charged = ()

    # Errors ----------------------------------------------------------------------------------------

    def _raised(self, job: Job, fence: Fence, error: Exception, record: object = None) -> None:
        """Stage code raised: skip, retry or stop (axiom 7.1). Nothing was handed over yet."""
        policy = self.on_error
        job.failures += 1
        if policy is not None and policy.retry is not None and self.retriable and not self._flat:
            if job.failures <= policy.retry:
                self.counters.retries += 1
                self.engine.note("retry", self.name, sequence=job.seq, attempt=job.failures, error=error)
                job.retry = True
                self._retrying += 1
                # Once its fence is reached: what it enqueued may still write where the next call writes.
                fence.when_reached(lambda: self._again(job))
                return
        elif policy is not None and policy.skip is not None and self._skipped < policy.skip:
            self._skipped += 1
            self.engine.dead_letter(self.name, job.seq, error, record if record is not None else job.value)
            charged, job.charged = job.charged, ()
            job.generator = None if not self._source else job.generator
            if self._flat:
                for edge in charged:
                    edge.untake()
                if self.feeds_answer:
                    self.engine.drop(job.tickets, self.name)
                self.counters.dropped += 1
            else:
                self._gap(job, charged, job.seq)
            if not self._source:
                job.returned = True
            return
        self._fail(self._stage_error(job, error))

    def _again(self, job: Job) -> None:
        job.retry_due = True
        self.wake()

    def _stage_error(self, job: Job, error: BaseException) -> StageError:
        budget = ""
        if self.on_error is not None and self.on_error.skip is not None:
            budget = f" (the budget of {self.on_error.skip} skipped items is used up)"
        elif self.on_error is not None and self.on_error.retry is not None:
            budget = f" (tried {job.failures} times)"
        text = str(error) or type(error).__name__
        wrapped = StageError(f"{type(error).__name__}: {text}{budget}", stage=self.name, sequence=job.seq)
        wrapped.__cause__ = error
        return wrapped

    def _fail(self, error: BaseException) -> None:
        self.engine.fail(error)

    def _device_fault(self, lane: Lane, job: Job, error: BaseException | None) -> None:
        fault = DeviceError(
            f"device {lane.device.name!r} reported a fault while the host awaited stage {self.name!r}, "
            f"item {job.seq}; a device reports late, so the culprit may be another stage: {error}"
        )
        fault.__cause__ = error
        self._fail(fault)

    # Production: steps of generators, members of a scatter -----------------------------------------

    def _produce(self) -> bool:
        """Go on with jobs in hand that need a credit, a gate or a lease for their next output."""
        if self._single and not self._source and not self._retrying:
            return False
        moved = False
        for index, job in enumerate(self._hand):
            if job.pending:
                moved = self._release_members(job, index) or moved
            elif not job.returned and not job.launching and self._may_step(job, index):
                moved = True
                if job.retry:
                    job.retry = job.retry_due = False
                    self._retrying -= 1
                self._launch(job)
        return moved

    def _release_members(self, job: Job, index: int) -> bool:
        moved = False
        while job.pending:
            output = job.pending[0]
            if output.live and not output.charged:
                edges = tuple(edge for edge in self.outs if edge.selects(output.seq or 0))
                if not all(edge.admits(self._kept_behind(edge, index)) for edge in edges):
                    return moved
                for edge in edges:
                    edge.take()
                output.charged = edges
            job.outputs.append(job.pending.popleft())
            moved = True
        return moved

    def _kept_behind(self, edge: Edge, index: int) -> int | None:
        if index != 0:
            return None
        return sum(job.kept() for job in list(self._hand)[1:])

    def _may_step(self, job: Job, index: int) -> bool:
        """Whether the next launch of a job in hand may go, taking its credits if so."""
        if not (self._flat or self._source or job.retry_due) or not self.engine.admitting:
            return False
        lane = job.lane
        assert lane is not None
        if lane.gate is not None and not lane.gate.open:
            return False
        if self._source and not job.retry:
            return self._may_step_source(job, lane)
        if not job.charged and not job.retry:
            if not all(edge.admits(self._kept_behind(edge, index)) for edge in self.outs):
                return False
            if lane.leases and lane.leases.blocker() is not None:
                return False
            for edge in self.outs:
                edge.take()
            job.charged = tuple(self.outs)
            return True
        return not (lane.leases and lane.leases.blocker() is not None)

    def _may_step_source(self, job: Job, lane: Lane) -> bool:
        if self.ending or self._sated or not self.engine.sources_open:
            self._end_source(job)
            return False
        if job.outputs:  # it makes one at a time; the last one has not left yet
            return False
        seq = self._next if self.ordered else None
        edges = tuple(self.outs) if seq is None else tuple(e for e in self.outs if e.selects(seq))
        if not all(edge.admits() for edge in edges):
            return False
        if lane.leases and lane.leases.blocker() is not None:
            return False
        for edge in edges:
            edge.take()
        job.charged = edges
        job.seq = seq
        self._next += 1
        self.counters.started += 1
        return True

    def _end_source(self, job: Job) -> None:
        """A drain ends sources where they stand: their generator is closed on its own lane."""
        self._exhausted = True
        job.returned = True
        lane = job.lane
        assert lane is not None
        close = lane.close_generator(job)
        if close is not None:
            self.engine.in_hand += 1
            job.unreached += 1

            def closed(_: Any, error: BaseException | None) -> None:
                self.engine.in_hand -= 1
                job.unreached -= 1
                if isinstance(error, Exception):
                    self._fail(self._stage_error(job, error))
                self._over(job)
                self.wake()

            lane.launcher.submit("its end", close, closed)

    # Hand-over and retirement ----------------------------------------------------------------------

    def _emit(self) -> bool:
        """Hand over what is ready: in order (axiom 1.3), or as fences are reached."""
        moved = False
        hand = self._hand
        if self.ordered:
            while hand:
                job = hand[0]
                while job.outputs:
                    self._hand_over(job.outputs.popleft())
                    moved = True
                if not job.returned or job.pending:
                    break
                hand.popleft()
                self._over(job)
                moved = True
            return moved
        for job in list(hand):
            while job.outputs and (job.outputs[0].fence.reached or not job.outputs[0].live):
                self._hand_over(job.outputs.popleft())
                moved = True
            if job.returned and not job.outputs and not job.pending and job.unreached == 0:
                hand.remove(job)
                self._over(job)
                moved = True
        return moved

    def _hand_over(self, output: Output) -> None:
        seq = output.seq
        if seq is None:
            seq = self._next
            self._next += 1
        if not output.live:
            for edge in self.outs:
                charged = edge in output.charged
                edge.put(seq, None, charged)
                if edge.pinned and charged:
                    self.unpin()
            return
        item = Item(
            seq,
            output.value,
            output.fence,
            port=output.port,
            versions=output.versions,
            tickets=output.tickets,
        )
        item.holds = 1  # its own fence's
        for edge in self.outs:
            charged = edge in output.charged
            if not edge.put(seq, item, charged) and edge.pinned and charged:
                self.unpin()
        output.fence.when_reached(lambda: self._let_go(item))
        output.value = None

    def _reached(self, job: Job, fence: Fence, context: Context | None) -> None:
        """The host knows that a launch's device work is done."""
        lane = job.lane
        if lane is not None and lane.gate is not None and lane.enqueue is None:
            lane.gate.leave(lane, job.seq)
        job.unreached -= 1
        if context is not None:
            self.engine.logged(self, job.seq, context)
        fence.reach()
        self._over(job)
        self.wake()

    def _over(self, job: Job) -> None:
        """Retire the job's inputs once it returned and all its fences are reached."""
        if job.retired or not job.over or job.retry:
            return
        job.retired = True
        self.counters.done += 1
        self.counters.latency += time.perf_counter() - job.started
        for edge, item in job.parts:
            self._retire_input(edge, item)
        job.parts = []
        job.value = None
        job.generator = None
        job.generator_context = None
        if job.lane is not None:
            job.lane.busy -= 1
        self.wake()

    def _retire_input(self, edge: Edge, item: Item) -> None:
        edge.give_back(item)
        if edge.consumer.answers and item.tickets:
            item.given_away = True
        self._let_go(item)

    def retire(self, edge: Edge, item: Item) -> None:
        """An item that no job of this stage will use leaves once its own fence is reached."""
        if self.feeds_answer:
            self.engine.drop(item.tickets, self.name)
        if edge.pinned:
            edge.producer.unpin()
        item.fence.when_reached(lambda: self._retire_input(edge, item))

    def _let_go(self, item: Item) -> None:
        item.holds -= 1
        if item.holds == 0:
            value, item.value = item.value, None
            if not item.given_away:
                self.engine.retired(value)

    def _unpin(self, job: Job) -> None:
        """It has launched: its writer may go on (axiom 3.4)."""
        if job.unpinned:
            return
        job.unpinned = True
        for edge, _ in job.parts:
            if edge.pinned:
                edge.producer.unpin()

    def unpin(self) -> None:
        """One reader of this writer's last item has launched, or will not."""
        self.pins -= 1
        self.wake()

    def buffers(self, item: Item) -> Sequence[Buffer]:
        """The storages of an item, for an edge with a byte budget."""
        if item.buffers is None:
            device = self.lanes[0].device if self.lanes else None
            item.buffers = device.buffers(item.value) if device is not None else ()
        return item.buffers

    # The end ---------------------------------------------------------------------------------------

    def _try_close(self) -> None:
        """When nothing is left and nothing will come: `finish` on every lane, then tell the consumers."""
        if self._hand or self._finishing or self.closed or not self.engine.admitting:
            return
        if self.inputs is not None and not self.inputs.ended():
            return
        if self.inputs is None and not self._exhausted:
            if not (self.ending or self._sated or self.engine.sources_ended):
                return
            self._exhausted = True
        if any(lane.busy for lane in self.lanes):
            return
        if not self._finished:
            self._finish()
            return
        self.close()

    def close(self) -> None:
        """Nothing more will leave."""
        self.closed = True
        for edge in self.outs:
            edge.closed = True
            edge.consumer.wake()
        self.engine.node_closed(self)

    def _finish(self) -> None:
        lanes = [lane for lane in self.lanes if lane.has_finish]
        if not lanes:
            self._finished = True
            self.wake()
            return
        if any(lane.gate is not None and not lane.gate.open for lane in lanes) or any(
            lane.leases and lane.leases.blocker() is not None for lane in lanes
        ):
            return  # a gate that opens, or a lease that is given back, wakes this node
        for lane in lanes:
            self._finishing += 1
            self._finish_lane(lane)

    def _finish_lane(self, lane: Lane) -> None:
        waits = lane.leases.take() if lane.leases else []
        if lane.gate is not None:
            lane.gate.enter(lane, None)
        context = lane.context(None)
        self.engine.in_hand += 1

        def run() -> Launched:
            for mark in waits:
                lane.stream.wait(mark)
            return lane.hook(lane.stage.finish, context)

        def returned(launched: Launched | None, error: BaseException | None) -> None:
            self.engine.in_hand -= 1
            self.engine.progress += 1
            job = Job(lane, None, None, 0.0)
            if launched is None:
                self._device_fault(lane, job, error)
                return
            if lane.leases:
                lane.leases.give_back(launched.mark)
            if launched.error is not None:
                error = StageError(
                    f"in finish: {type(launched.error).__name__}: {launched.error}", stage=self.name
                )
                error.__cause__ = launched.error
                self._fail(error)
                return
            self.engine.in_hand += 1
            if launched.mark.passed():
                passed(None, None)
            else:
                lane.watcher.watch("the fence of its finish", launched.mark, passed)

        def passed(_: Any, fault: BaseException | None) -> None:
            self.engine.in_hand -= 1
            if fault is not None:
                self._device_fault(lane, Job(lane, None, None, 0.0), fault)
                return
            if lane.gate is not None:
                lane.gate.leave(lane, None)
            self.engine.logged(self, None, context)
            self._finishing -= 1
            if self._finishing == 0:
                self._finished = True
            self.wake()

        lane.hook_launcher.submit("its finish", run, returned)

    # What it waits for -----------------------------------------------------------------------------

    def waits_for(self) -> str:
        """For a stall report: the first thing it lacks, in words."""
        if self.closed:
            return "ended"
        if self.pins:
            return "readers of its last version, which have not launched"
        for job in self._hand:
            if job.launching:
                return f"its own code, on item {job.seq}"
        blocked = [edge for edge in self.outs if not edge.admits()]
        if blocked:
            edge = blocked[0]
            return (
                f"a credit on {edge} ({edge.credits} of {edge.items_limit} out, {edge.queued} queued, "
                f"{edge.bytes_live} bytes)"
            )
        for lane in self.lanes:
            if lane.gate is not None and not lane.gate.open:
                return f"the gate of {lane.device.name}, which a barrier holds closed"
            if lane.leases and (instance := lane.leases.blocker()) is not None:
                return f"a lease of resource {instance.shared.name}"
        if self.inputs is not None and not self.inputs.ended():
            return self.inputs.waits_for()
        return "its own end"
