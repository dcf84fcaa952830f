"""The engine of one run: who may move next, how it stops, and what it says when nothing can.

State changes on the loop alone. A node that may have something to do is queued once; `_turn` pumps the
queue until it is empty, or hands the loop back after a while. When the queue is empty, no launch is in hand
and the caller cannot bring anything, then nothing will ever move: that is a stall, told at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import anyio

from pipeflow.errors import Cancelled, Dropped, PipeflowError, StageError, StallError
from pipeflow.lifetime import LiveStorages
from pipeflow.parking import Parking
from pipeflow.settle import settle

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from anyio.abc import TaskGroup

    from pipeflow.checkpoint.saver import Saver
    from pipeflow.context import Context
    from pipeflow.device.base import Device
    from pipeflow.fence import Fence
    from pipeflow.item import Item
    from pipeflow.launch import Launcher, StuckThread
    from pipeflow.machine import Machine
    from pipeflow.observe.folder import RunFolder
    from pipeflow.operations import OperationLog
    from pipeflow.resource import Shared
    from pipeflow.runner import Runner
    from pipeflow.spec import RunSpec

__all__ = ["Engine", "Ticket"]

_TURN = 512
"""Pumps before the loop gets its turn."""


class Ticket:
    """A submit that waits for its result."""

    __slots__ = ("carriers", "future")

    def __init__(self, future: asyncio.Future[Any]) -> None:
        self.future = future
        self.carriers = 0
        """Items and outputs on their way that may still bring the result."""


class Engine:
    """Owns nodes, edges and launchers of one run. Built by `build.py`, driven by `pipeline.py`."""

    def __init__(
        self,
        spec: RunSpec,
        folder: RunFolder,
        group: TaskGroup,
        device_names: Mapping[str, str | list[str]],
        machine: Machine,
    ) -> None:
        self.machine = machine
        machine.report_to(self.fail)
        self.now = machine.now
        """Seconds, for every time that the engine takes."""
        self.spec = spec
        self.device_names = device_names
        self.folder = folder
        self.loop = asyncio.get_running_loop()
        self.nodes: list[Runner] = []
        self.launchers: list[Launcher] = []
        self.poisons: Any = None
        """The test device that wants to hear of retirements; None in real runs."""
        self.stop = threading.Event()
        """Stage code sees it as `ctx.stopping`."""
        self.halted = threading.Event()
        """As `stop`, but not for a drain: then what is in flows out whole."""
        self.in_hand = 0
        """Launches, hooks, marks and sections under way: while there is one, something will happen."""
        self.progress = 0
        self.admitting = True
        self.sources_open = False
        self.begun = False
        """What runs before the first item is through."""
        self.sources_ended = False
        """A drain was asked for: sources end where they stand."""
        self.strict = False
        """A loss that is not finite fails the run."""
        self.debug_sync = False
        """Lanes wait for the device after every launch."""
        self.error: BaseException | None = None
        self.callers = 0
        """Inputs that a caller can still feed."""
        self.ended = asyncio.Event()
        self.started = self.now()
        self._group = group
        self._ready: deque[Runner] = deque()
        self._turning = False
        self._scheduled = False
        self._waiting: list[asyncio.Future[None]] = []
        self._open_nodes = 0
        self.metric_sinks: list[Callable[[dict[str, Any]], None]] = []
        self.reported: dict[str, Any] = {}
        self.storages = LiveStorages()
        self.tickets: dict[Ticket, None] = {}
        """Submits without a result yet."""
        self.operations: OperationLog | None = None
        """What it does, entry by entry, where someone asked for that before the load."""
        self.devices: Mapping[str, Device] = {}
        """By name, once they are made."""
        self.shared: Mapping[str, Shared] = {}
        """Resources by name, once they are open."""
        self.parking = Parking(self)
        """Jobs that wait for memory."""
        self.saver: Saver | None = None
        """Makes the checkpoints, where the file asks for some."""

    # Turning ---------------------------------------------------------------------------------------

    def ready(self, node: Runner) -> None:
        """Queue a node that may have something to do."""
        self._ready.append(node)
        if not self._turning:
            self._schedule()

    def _turn(self) -> None:
        self._scheduled = False
        self._turning = True
        ready = self._ready
        for _ in range(_TURN):
            if not ready:
                break
            node = ready.popleft()
            try:
                node.pump()
                if node.station is not None:
                    node.station.look()
            except Exception as error:
                if not isinstance(error, PipeflowError):
                    error.add_note(f"in the engine, at stage {node.name!r}")
                self.fail(error)
        self._turning = False
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)
        if ready:
            self._schedule()
        elif self.in_hand == 0 and self._open_nodes and self.admitting:
            self._look_for_stall()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self.loop.call_soon(self._turn)

    def _look_for_stall(self) -> None:
        """Nothing to do, nothing in hand: the run is over, waits for its caller, or will never end."""
        waits_for_caller = self.callers or not (self.sources_open or self.sources_ended)
        if waits_for_caller or any(node.lingering or node.at_gate for node in self.nodes):
            return
        self.fail(StallError("nothing can move:\n" + self.why()))

    def why(self) -> str:
        """What each open stage waits for, a line each."""
        lines = [f"  {node.name}: waits for {node.waits_for()}" for node in self.nodes if not node.closed]
        return "\n".join(lines)

    async def next_progress(self) -> None:
        """Until the nodes have had a turn after something changed."""
        future: asyncio.Future[None] = self.loop.create_future()
        self._waiting.append(future)
        await future

    # Parts of the run ------------------------------------------------------------------------------

    def add(self, node: Runner) -> None:
        self.nodes.append(node)
        self._open_nodes += 1

    def node_closed(self, node: Runner) -> None:
        """One stage has ended; the run ends with the last."""
        self._open_nodes -= 1
        self.progress += 1
        self.look_for_end()

    def look_for_end(self) -> None:
        """The run is over once every stage has ended and no checkpoint is on its way to the disk."""
        if self._open_nodes == 0 and (self.saver is None or self.saver.may_begin()):
            if self.operations is not None and not self.ended.is_set():
                self.operations.add("ended")
            self.ended.set()

    def start_soon(
        self, function: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any, name: str
    ) -> None:
        """A task of the run's group."""
        self._group.start_soon(function, *arguments, name=name)

    async def off_loop(self, call: Callable[[], Any], name: str) -> Any:
        """Run a call beside the loop and await it. A cancel does not wait for it."""
        return await self.machine.off_loop(call, name)

    # Going, stopping, failing ----------------------------------------------------------------------

    def open_sources(self) -> None:
        """Sources may start."""
        self.sources_open = not self.sources_ended
        self.wake_all()

    def wake_all(self) -> None:
        for node in self.nodes:
            node.wake()

    def drain(self) -> None:
        """Sources end where they stand; all that is in flows out; `finish` runs (axiom 7.4)."""
        if not self.sources_ended:
            self.sources_ended = True
            self.sources_open = False
            self.stop.set()
            self.note("drain")
            self.wake_all()

    def cancel(self) -> None:
        """No more starts. Jobs in hand are awaited by `settle`, within the grace period."""
        if not self.ended.is_set():
            self.fail(Cancelled("the run was cancelled"))

    @property
    def failed(self) -> bool:
        return self.error is not None

    def fail(self, error: BaseException) -> None:
        """The first error ends the run; later ones are added to it as notes."""
        if self.error is None:
            self.error = error
            self.note("failed", error=error)
            if self.operations is not None:
                self.operations.add("failed", type(error).__name__)
        elif error is not self.error:
            with contextlib.suppress(Exception):
                self.error.add_note(f"then: {error}")
        self.admitting = False
        self.stop.set()
        self.halted.set()
        self.ended.set()
        for node in self.nodes:
            node.stop_waiting()
        self.refuse_tickets(error)

    def refuse_tickets(self, error: BaseException) -> None:
        """Nobody will answer what is still submitted."""
        tickets, self.tickets = self.tickets, {}
        for ticket in tickets:
            if not ticket.future.done():
                ticket.future.set_exception(error)

    async def settle(self, grace: float) -> None:
        """After the end: let launches in hand come back, close generators, stop every task and thread.

        Raises Stuck, naming threads, items and stacks, if some are not back within `grace` seconds.
        """
        await settle(self, grace)

    def stuck_threads(self) -> list[StuckThread]:
        """Every thread of a lane, with what it does."""
        return [thread for launcher in self.launchers for thread in launcher.stuck()]

    # What stages and callers hear ------------------------------------------------------------------

    def answer(self, tickets: tuple[Any, ...], value: Any, fence: Fence) -> None:
        """A submitted item has its result; the caller gets it complete."""

        def tell() -> None:
            for ticket in tickets:
                self.tickets.pop(ticket, None)
                if not ticket.future.done():
                    ticket.future.set_result(value)

        if tickets:
            fence.when_reached(tell)

    def drop(self, tickets: tuple[Any, ...], stage: str) -> None:
        """A submitted item left the pipeline without a result."""
        for ticket in tickets:
            self.tickets.pop(ticket, None)
            if not ticket.future.done():
                ticket.future.set_exception(Dropped(f"dropped by stage {stage!r}"))

    def put_down(self, tickets: tuple[Any, ...]) -> None:
        """A carrier is gone. With the last one goes the hope of a result: `every` passed the item over, a
        port led elsewhere, or nothing was made of it."""
        for ticket in tickets:
            ticket.carriers -= 1
            if ticket.carriers == 0:
                self.tickets.pop(ticket, None)
                if not ticket.future.done():
                    ticket.future.set_exception(Dropped("nothing that was made of it reached the output"))

    def released(self, item: Item) -> None:
        """No stage needs the item's memory any more."""
        stamp, item.stamp = item.stamp, None
        assert stamp is not None
        try:
            self.storages.leave(stamp)
        except StageError as error:
            if not self.failed:
                self.fail(error)

    def retired(self, value: Any) -> None:
        """No stage needs the value any more."""
        if self.poisons is not None and value is not None:
            self.poisons.retired(value)

    # Records ---------------------------------------------------------------------------------------

    def logged(self, node: Runner, seq: int | None, context: Context) -> None:
        """What a job logged and reported, now that its values are there."""
        if context.logged:
            lines, context.logged = context.logged, []
            for values in lines:
                step = values.pop("step", seq + 1 if seq is not None else None)
                self.record(node.name, step=step, **{key: _plain(value) for key, value in values.items()})
        if context.reported:
            reported, context.reported = context.reported, {}
            self.reported.update({key: _plain(value) for key, value in reported.items()})

    def record(self, stage: str, **values: Any) -> None:
        """One line of metrics.jsonl."""
        loss = values.get("loss")
        if isinstance(loss, float) and not math.isfinite(loss):
            self.note("loss is not finite", stage, step=values.get("step"), loss=str(loss))
            if self.strict:
                self.fail(StageError(f"the loss is {loss} at step {values.get('step')}", stage=stage))
        line = {"t": round(self.now() - self.started, 6), "stage": stage, **values}
        if self.saver is not None:
            self.saver.recorded(line)
        try:
            self.folder.metric(line)
        except OSError as error:
            self.fail(error)
        for sink in self.metric_sinks:
            try:
                sink(line)
            except Exception as error:
                error.add_note("in a function given to Pipeline.on_metric")
                self.fail(error)

    def tell(self, kind: str, *what: Any) -> None:
        """One entry of the operation log, if there is one."""
        if self.operations is not None:
            self.operations.add(kind, *what)

    def note(self, event: str, stage: str | None = None, **values: Any) -> None:
        """One line of log.jsonl."""
        with contextlib.suppress(OSError):  # the log must not hide the error that it reports
            self.folder.log(event, stage, **values)

    def dead_letter(self, stage: str, seq: int | None, error: Exception, record: object) -> None:
        """A skipped item, for the person who mends the data."""
        self.note("skipped", stage, sequence=seq, error=error)
        try:
            self.folder.dead_letter(stage, seq, error, record)
        except OSError as fault:
            self.fail(fault)

    # The guard -------------------------------------------------------------------------------------

    async def watch_progress(self) -> None:
        """Fail after `run.stall` seconds without a launch coming back, naming what each stage waits for."""
        limit = self.spec.stall
        seen, since = self.progress, self.now()
        while True:
            await anyio.sleep(min(1.0, limit / 4))
            waits_for_caller = self.in_hand == 0
            if self.progress != seen or waits_for_caller:
                seen, since = self.progress, self.now()
            elif self.now() - since > limit:
                stacks = [t for t in self.stuck_threads() if t.doing != "nothing"]
                text = "\n".join(f"{t.name}, in {t.doing}:\n{t.stack}" for t in stacks)
                self.fail(StallError(f"no progress for {limit:g} s:\n{self.why()}\n{text}"))
                return


def _plain(value: Any) -> Any:
    """A logged value as JSON takes it; a tensor of one element becomes a number."""
    if hasattr(value, "tolist") and hasattr(value, "detach"):
        return value.tolist()
    return value
