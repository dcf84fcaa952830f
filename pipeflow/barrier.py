"""Barriers: gates that stop launches, and the section of guarded stages that runs while all is quiet.

A barrier stops launches, not items: queues and half-filled batches stay, sources and host stages go on.
Phases (axiom 5.1): hold: no new readers of what the section writes, and those in hand end; gates of the
lanes in scope close and jobs return; fences are reached; `quiesce` hooks
join host producers; devices are drained off the loop; guarded stages run one at a time; gates open.
"""

from __future__ import annotations

import math
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from pipeflow import handover, unused
from pipeflow.errors import StageError
from pipeflow.gate import gates_of_this_loop
from pipeflow.guarded import RunIsOver, go_on
from pipeflow.inputs import Taken
from pipeflow.item import Trigger
from pipeflow.quiesce import quiesce, release, reopen
from pipeflow.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeflow.device.base import Device
    from pipeflow.edge import Edge
    from pipeflow.gate import Gate
    from pipeflow.guarded import GuardedRunner
    from pipeflow.job import Job
    from pipeflow.lane import Lane
    from pipeflow.quiesce import Permits

__all__ = ["BarrierRunner"]

DEFAULT_TIMEOUT = 300.0
"""Seconds for a barrier to reach quiet and run what it guards, where the file does not say."""


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
        self.permits: Permits = []
        """While its section runs: of the devices that are quiet."""
        self._gaps: deque[int] = deque()
        """Selected gaps that it has not fired for yet."""
        self._busy = False
        self._since_end = False

    def pump(self) -> None:
        self.queued_for_pump = False
        if self.closed:
            unused.discard(self)
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
        except RunIsOver:
            return
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
        go_on(self.engine)
        permits = await quiesce(
            self.engine, self, f"barrier {self.name!r}", self.scope, self.background, self._enter, seq=seq
        )
        self.permits = permits
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
                self.engine.tell("section", node.name)
                copied.append((node, await node.copy(trigger, charges[node.name])))
                self.engine.tell("unsection", node.name)
                continue
            self.phase = f"runs {node.name}"
            freed = await release(self.engine, permits) if node.lanes[0].stage.releases else ()
            self.engine.tell("section", node.name)
            await node.run_guarded(trigger._replace(freed=freed), charges[node.name])
            self.engine.tell("unsection", node.name)
        if self.engine.admitting:
            self.phase = "runs parked jobs"
            await self.engine.parking.run_all(permits)
        self.permits = []
        if self.engine.admitting:  # after a fault in the section gates stay closed (axiom 5.5)
            self.release_gates()
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

    def release_gates(self) -> None:
        """Its section is through; or the run is over, and what it holds closed after a fault opens for
        others."""
        reopen(self.engine, self, f"barrier {self.name!r}", self.scope)

    def _enter(self, phase: str) -> None:
        self.phase = phase

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
