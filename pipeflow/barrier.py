"""Barriers: gates that stop launches, and the section of guarded stages that runs while all is quiet.

A barrier stops launches, not items: queues and half-filled batches stay, sources and host stages go on.
Phases (axiom 5.1): hold: no new readers of what the section writes, and those in hand end; gates of the
lanes in scope close and jobs return; fences are reached; `quiesce` hooks
join host producers; devices are drained off the loop; guarded stages run one at a time; gates open.
"""

from __future__ import annotations

import asyncio
import math
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from pipeflow import handover, production
from pipeflow.device.base import Permit
from pipeflow.error_text import named_error
from pipeflow.errors import DeviceError, StageError
from pipeflow.inputs import Taken
from pipeflow.item import Trigger
from pipeflow.job import Job
from pipeflow.launching import launch
from pipeflow.runner import Runner
from pipeflow.snapshot import copy_first

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeflow.device.base import Device, Freed
    from pipeflow.edge import Edge
    from pipeflow.lane import Lane

__all__ = ["BarrierRunner", "Gate", "GuardedRunner", "gates_of_this_loop"]

DEFAULT_TIMEOUT = 300.0
"""Seconds for a barrier to reach quiet and run what it guards, where the file does not say."""


class Gate:
    """The launch gate of one device, shared by all pipelines of the process (axiom 5.2)."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.open = True
        self._holder: object = None
        """The barrier that closed it last. Another's reopening changes nothing."""
        self.nodes: dict[Runner, None] = {}
        """Stages with lanes behind it, woken when it opens. In their order: a set's would differ by run."""
        self._in_hand: dict[tuple[Lane, int | None], int] = {}
        """(lane, item) to launches whose fence is not reached."""
        self._quiet: list[asyncio.Future[None]] = []

    def enter(self, lane: Lane, seq: int | None) -> None:
        """A launch begins. Only behind an open gate, or inside a section."""
        key = (lane, seq)
        self._in_hand[key] = self._in_hand.get(key, 0) + 1

    def leave(self, lane: Lane, seq: int | None) -> None:
        """Its fence is reached."""
        key = (lane, seq)
        if key not in self._in_hand:  # of a lane that was forgotten, and came back late
            return
        self._in_hand[key] -= 1
        if not self._in_hand[key]:
            del self._in_hand[key]
            self._look_if_quiet()

    def forget(self, lane: Lane) -> None:
        """The lane is gone, and with it what it never finished: other pipelines must not wait for it."""
        for key in [key for key in self._in_hand if key[0] is lane]:
            del self._in_hand[key]
        self._look_if_quiet()

    def _look_if_quiet(self) -> None:
        if self._in_hand:
            return
        waiting, self._quiet = self._quiet, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def in_hand(self) -> list[str]:
        """The launches that are not over, in words."""
        return [
            f"{lane.name}[{lane.index}]" + ("" if seq is None else f" item {seq}")
            for lane, seq in self._in_hand
        ]

    async def quiet(self) -> None:
        """Wait until every launch behind it is over."""
        while self._in_hand:
            future = asyncio.get_running_loop().create_future()
            self._quiet.append(future)
            await future

    def close(self, holder: object) -> None:
        """No launch begins from here on, but those of the holder's section."""
        self.open = False
        self._holder = holder

    def reopen(self, holder: object) -> None:
        """Only whoever closed it last may open it: the end of one run is not the end of another's section."""
        if self._holder is not holder:
            return
        self._holder = None
        self.open = True
        for node in list(self.nodes):
            node.wake()


class _Gates:
    """The gates of one event loop, and the lock by which one barrier is under way at a time."""

    def __init__(self) -> None:
        self._gates: dict[str, Gate] = {}
        self.one_at_a_time = anyio.Lock()

    def of(self, device: str) -> Gate:
        if device not in self._gates:
            self._gates[device] = Gate(device)
        return self._gates[device]

    def names(self) -> list[str]:
        return list(self._gates)


_by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Gates] = weakref.WeakKeyDictionary()
_driver: dict[str, weakref.ref[asyncio.AbstractEventLoop]] = {}


def gates_of_this_loop(devices: Sequence[str] = ()) -> _Gates:
    """The gates of the running loop.

    A GPU belongs to the first loop that drives it, as a gate could not hold another loop's launches.
    Raises DeviceError where `devices` names one that a second loop drives.
    """
    loop = asyncio.get_running_loop()
    for device in devices:
        if not device.startswith("cuda"):
            continue
        owner = _driver[device]() if device in _driver else None
        if owner is not None and owner is not loop and not owner.is_closed():
            raise DeviceError(
                f"device {device!r} is driven by another event loop of this process. "
                "Run both pipelines in one loop, or in two processes"
            )
        _driver[device] = weakref.ref(loop)
    return _by_loop.setdefault(loop, _Gates())


class GuardedRunner(Runner):
    """A stage that runs only inside a barrier's section; what it emits flows on as from any stage."""

    barrier: BarrierRunner

    def pump(self) -> None:
        self.queued_for_pump = False
        if self.closed:
            return
        while self.hand and (production.produce(self) or handover.emit(self)):
            pass
        if self.barrier.closed and not self.hand:
            self.exhausted = True
            self.try_close()

    async def run_guarded(self, trigger: Trigger, charged: Sequence[Edge]) -> None:
        """One call with the trigger, on its own lane; returns once its fence is reached."""
        lane = self.lanes[0]
        self.in_section = True
        while lane.leases and lane.leases.blocker(first=True) is not None:
            # Only a host stage outside the scope can still hold one; it gives it back when it returns.
            await self.engine.next_progress()
        job = self._job(lane, trigger, charged)
        launch(self, job)
        self.wake()
        await self._retired(job)
        self.in_section = False

    def _job(self, lane: Lane, trigger: Trigger, charged: Sequence[Edge]) -> Job:
        job = Job(lane, self.next_seq, Taken(self.next_seq, [], trigger), self.engine.now())
        self.next_seq += 1
        job.charged = charged
        self.begin(job, lane)
        return job

    async def _retired(self, job: Job) -> None:
        while not job.retired:
            await self.engine.next_progress()

    async def copy(self, trigger: Trigger, charged: Sequence[Edge]) -> Job:
        """Begin a job: make the snapshot that it works on, if it reads what others write. In the section."""
        lane = self.lanes[0]
        while lane.snapshots and lane.leases.blocker(first=True) is not None:
            await self.engine.next_progress()
        job = self._job(lane, trigger, charged)
        if lane.snapshots:
            waits = lane.leases.take()
            job.held = lane.leases.taken
            job.versions = lane.leases.versions()
            copy_first(self, job, waits, lambda: None)
            while job.snapshot is None or job.unreached:
                await self.engine.next_progress()
        return job

    async def run_copied(self, job: Job) -> None:
        """Call it with the snapshot, like any stage: through an open gate."""
        lane = self.lanes[0]
        while (lane.gate is not None and not lane.gate.open) or (
            job.snapshot is None and lane.leases and lane.leases.blocker() is not None
        ):
            await self.engine.next_progress()
        launch(self, job)
        self.wake()
        await self._retired(job)


class BarrierRunner(Runner):
    """A barrier of the file: fires on the numbers that `every` selects, and once more at the end."""

    fires_on_gaps = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.scope: list[tuple[Device, Gate]] = []
        self.section: list[GuardedRunner] = []
        """Guarded stages behind it, in the order they run."""
        self.background: list[Lane] = []
        """Lanes in scope whose stages start work outside them."""
        self.snapshot = False
        """Its section works on copies, once gates are open again."""
        self.at_start = False
        """Its section runs before the first item too."""
        self.phase = "waits for an item"
        self._gaps: deque[int] = deque()
        """Selected gaps that it has not fired for yet."""
        self._busy = False
        self._since_end = False

    def pump(self) -> None:
        self.queued_for_pump = False
        if self.closed:
            self.discard()
        if self.closed or self._busy or not self.engine.admitting:
            return
        assert self.inputs is not None
        self._gaps.extend(self.inputs.gaps())
        if self._gaps:
            # It fires on a selected gap too: the version before it still has to go out.
            self._fire(Taken(self._gaps.popleft(), [], None), "every")
        elif (taken := self.inputs.peek()) is not None:
            self.inputs.take(taken)
            self._fire(taken, "every")
        elif self.inputs.ended():
            if any(edge.since_selected for edge in self.inputs.edges) and not self._since_end:
                self._since_end = True
                self._fire(Taken(self.next_seq, [], None), "end")
            elif self.station is None or not self.station.holds_close():
                self.close()
                for node in self.section:
                    node.wake()

    @property
    def rests(self) -> bool:
        """No section is under way, and none is due."""
        return not self._busy and not self._gaps

    async def start(self) -> None:
        """Run the section before anything is admitted (axiom 5.4). After a drain there is none."""
        if self.closed or self.engine.sources_ended:
            return
        self._fire(Taken(self.next_seq - 1, [], None), "start")
        while self._busy:
            await self.engine.next_progress()

    def _fire(self, taken: Taken, reason: str) -> None:
        seq = taken.seq if taken.seq is not None else self.next_seq
        self._busy = True
        self.taken = taken
        self.next_seq = seq + 1
        self.engine.in_hand += 1
        self.counters.started += 1
        self.engine.start_soon(self._run, taken, seq, reason, name=f"barrier {self.name}")

    async def _run(self, taken: Taken, seq: int, reason: str) -> None:
        begun = self.engine.now()
        try:
            quiet = await self._in_time(taken, seq, reason)
        except Exception as error:
            self.engine.fail(error)
            return
        finally:
            self.engine.in_hand -= 1
        if self.engine.failed:
            return
        self.engine.record(
            self.name,
            step=seq + 1,
            reason=reason,
            quiet_s=quiet - begun,
            section_s=self.engine.now() - quiet,
        )
        if not self.snapshot:
            self._unpin(reason)
        self.taken = None
        for edge, item in taken.parts:
            item.fence.when_reached(partial(handover.retire_input, self, edge, item))
        self.counters.done += 1
        self._busy = False
        self.phase = "waits for an item"
        self.engine.progress += 1
        self.wake()

    def _unpin(self, reason: str) -> None:
        """The version of the item that it fired for was read."""
        if reason == "every":
            for edge in self.inputs.edges if self.inputs is not None else ():
                if edge.pinned:
                    edge.producer.unpin()

    async def _in_time(self, taken: Taken, seq: int, reason: str) -> float:
        limit = self.timeout if self.timeout is not None else DEFAULT_TIMEOUT
        with anyio.move_on_after(limit) as patience:
            self.phase = "waits for credits of what its section emits"
            charges = await self._charge()
            self.phase = "waits for another barrier"
            patience.deadline = math.inf  # that one has a timeout of its own
            async with gates_of_this_loop().one_at_a_time:
                patience.deadline = anyio.current_time() + limit
                quiet, copied = await self._section(taken, seq, reason, charges)
            for node, job in copied:
                if self.engine.failed:
                    break
                self.phase = f"runs {node.name} on its copy"
                await node.run_copied(job)
            return quiet
        raise self._late(seq, limit)

    async def _section(
        self, taken: Taken, seq: int, reason: str, charges: dict[str, Sequence[Edge]]
    ) -> tuple[float, list[tuple[GuardedRunner, Job]]]:
        """All phases; the time at which everything was quiet, and what is still to be called on a copy. Gates
        open only if the run goes on."""
        await self._hold()
        for _, gate in self.scope:
            gate.close(self)
        self.phase = "waits for launches in scope"
        for _, gate in self.scope:
            await gate.quiet()
        self.phase = "joins background work"
        for lane in self.background:
            await self._quiesce(lane, seq)
        self.phase = "drains devices"
        permits: list[tuple[Device, Permit]] = []
        for device, _ in self.scope:
            await self.engine.off_loop(device.drain, f"drain of {device.name}")
            permits.append((device, Permit(device.name)))
        quiet = self.engine.now()
        versions = {
            instance.shared.name: instance.shared.version
            for node in self.section
            for instance in node.lanes[0].leases.reads.values()
        }
        trigger = Trigger(seq, versions, reason)
        copied: list[tuple[GuardedRunner, Job]] = []
        for node in self.section:
            if self.engine.failed:
                break
            if self.snapshot:
                self.phase = f"copies what {node.name} reads"
                copied.append((node, await node.copy(trigger, charges[node.name])))
                continue
            self.phase = f"runs {node.name}"
            freed = await self._release(permits) if node.lanes[0].stage.releases else ()
            await node.run_guarded(trigger._replace(freed=freed), charges[node.name])
        if self.engine.admitting:  # after a fault in the section gates stay closed (axiom 5.5)
            for _, gate in self.scope:
                gate.reopen(self)
            if self.snapshot:
                self._unpin(reason)
        return quiet, copied

    async def _hold(self) -> None:
        """Until nobody reads what the section writes; with gates open, as a reader may need many launches."""
        self.phase = "waits for readers of what its section writes"
        leases = [node.lanes[0].leases for node in self.section]
        writers = [lease for lease in leases if lease.writes]
        # All of them queue in one turn: a lane that needs two of these cannot come between.
        while any([lease.blocker() is not None for lease in writers]):  # noqa: C419 - each must queue
            await self.engine.next_progress()

    async def _quiesce(self, lane: Lane, seq: int) -> None:
        try:
            await self.engine.off_loop(lane.stage.quiesce, f"{lane.name}.quiesce")
        except Exception as error:
            raise StageError(
                f"in quiesce, for barrier {self.name!r}: {named_error(error)}",
                stage=lane.name,
                sequence=seq,
            ) from error

    def release_gates(self) -> None:
        """The run is over: what it holds closed after a fault opens for others."""
        for _, gate in self.scope:
            gate.reopen(self)

    async def _charge(self) -> dict[str, Sequence[Edge]]:
        """Credits for what the section emits, before any gate closes: a consumer may be behind one.
        And before its turn among barriers, so that none holds up the others while it waits for a consumer."""
        nodes = self.section
        while not all(edge.admits() for node in nodes for edge in node.edges_for(node.next_seq)) or any(
            node.pins for node in nodes
        ):
            await self.engine.next_progress()
        charges: dict[str, Sequence[Edge]] = {}
        for node in nodes:
            charges[node.name] = node.edges_for(node.next_seq)
            for edge in charges[node.name]:
                edge.take()
                if edge.pinned:
                    node.pins += 1
        return charges

    async def _release(self, permits: list[tuple[Device, Permit]]) -> tuple[Freed, ...]:
        freed: list[Freed] = []
        for device, permit in permits:

            def release(device: Device = device, permit: Permit = permit) -> Freed:
                return device.release(permit)

            freed.append(await self.engine.off_loop(release, f"release of {device.name}"))
        return tuple(freed)

    def _late(self, seq: int | None, limit: float) -> StageError:
        in_hand = [text for _, gate in self.scope for text in gate.in_hand()]
        culprits = ", ".join(in_hand) or "no launch in hand"
        return StageError(
            f"not done after {limit:g} s, in the phase: {self.phase}; {culprits}. "
            "Raise `timeout`, or look at the stage named",
            stage=self.name,
            sequence=seq,
        )

    def waits_for(self) -> str:
        if self.closed:
            return "ended"
        if self._busy:
            return self.phase
        return super().waits_for()
