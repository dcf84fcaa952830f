"""Streams and marks of a simulated device: queues of work that virtual time empties.

The order of what is enqueued, and with it every check of memory, is settled as it is enqueued. When each
operation runs is settled later, by timers of the loop: a stream runs what it holds in turn, and one engine of
the device does all its kernels, one after the other as they become ready. So a host that is ahead in time, or
a job that comes in later, changes when things happen and never what is allowed.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeflow.sim.access import GARBAGE, Block, Event, Where

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from pipeflow.device.base import Mark
    from pipeflow.errors import DeviceError
    from pipeflow.sim.device import Sim
    from pipeflow.sim.host import Host
    from pipeflow.sim.order import Timeline
    from pipeflow.sim.tensor import SimTensor

__all__ = ["Engine", "Range", "SimMark", "SimStream"]


class Range(NamedTuple):
    """Bytes of a block. `valid`: a read that is ordered after what it reads."""

    block: Block
    low: int
    high: int
    valid: bool = True


class SimMark:
    """A point in a stream. Its clock is known as it is recorded, its time as the device comes by."""

    __slots__ = ("__weakref__", "_pooled", "_then", "clock", "due", "name", "passed_at", "stream")

    def __init__(self, stream: SimStream, name: str, due: float, *, pooled: bool = False) -> None:
        self.stream = stream
        self.name = name
        self.clock = stream.timeline.snapshot()
        self.due = due
        """When it will be passed, as far as one can tell."""
        self.passed_at: float | None = None
        self._pooled = pooled
        self._then: list[Callable[[SimMark], None]] = []

    def __del__(self) -> None:
        if self._pooled:
            self.stream.device.events_free += 1

    @property
    def failed(self) -> DeviceError | None:
        """The fault of its device: reported by every mark of it, those passed long ago too."""
        return self.stream.device.fault

    @property
    def done(self) -> bool:
        """Passed or failed, in the schedule at hand. Tells no host: nothing is ordered by it."""
        return self.passed_at is not None or self.failed is not None

    def passed(self) -> bool:
        """Whether the device has come by. True orders what the asking host does next after it."""
        if self.passed_at is None or self.failed is not None:
            return False
        self.stream.device.world.host.timeline.join(self.clock)
        return True

    def wait(self) -> None:
        """Block the host until the device has come by (how, says `pipeflow.sim.host`)."""
        self.stream.device.check()
        world = self.stream.device.world
        if self.passed_at is None and world.host is world.loop_host:
            raise RuntimeError(
                f"the loop must not wait for a device, here for {self.name}: have `world.notice(mark, then)` "
                "tell it"
            )
        world.host.await_mark(self)

    def when_passed(self, then: Callable[[SimMark], None]) -> None:
        """Call `then(mark)` as the device comes by or fails; at once if it has. By itself orders nothing."""
        if self.done:
            then(self)
        else:
            self._then.append(then)

    def settle(self) -> None:
        """Tell those who wait: it is passed, or its device has failed."""
        waiting, self._then = self._then, []
        for then in waiting:
            then(self)


class Engine:
    """What kernels, or copies of one direction, need to run: `width` at a time, first ready first."""

    def __init__(self, name: str, width: int) -> None:
        self.name = name
        self.busy = 0.0
        """Seconds of work done, and under way."""
        self._free = width
        self._waiting: deque[SimStream] = deque()

    def take(self, stream: SimStream) -> bool:
        """A place now; else `stream.granted()` is called in its turn."""
        if self._free:
            self._free -= 1
            return True
        self._waiting.append(stream)
        return False

    def give(self) -> None:
        """A place is free."""
        if self._waiting:
            self._waiting.popleft().granted()
        else:
            self._free += 1


class _Op:
    """One entry of a stream. Without an engine it takes `seconds` of the stream alone."""

    __slots__ = ("began", "compute", "due", "earliest", "engine", "event", "fault", "mark", "reads",
                 "seconds", "start_due", "wait", "word", "writes")  # fmt: skip

    def __init__(self, earliest: float, event: Event | None = None) -> None:
        self.earliest = earliest
        self.event = event
        """Of a launch: kernel, copy or sleep."""
        self.mark: SimMark | None = None
        """To record."""
        self.wait: SimMark | None = None
        """To wait for."""
        self.word: tuple[SimTensor, int] | None = None
        """To write: pinned memory that nobody else writes, and its value."""
        self.seconds = 0.0
        self.engine: Engine | None = None
        self.reads: Sequence[Range] = ()
        self.writes: Sequence[Range] = ()
        self.compute: Callable[..., Any] | None = None
        self.fault: str | None = None
        """What it does to the device as it ends."""
        self.start_due = self.due = self.began = earliest


class SimStream:
    """A stream of one device. Everything enqueued carries the time and the clock of the host that did it."""

    def __init__(self, device: Sim, name: str, timeline: Timeline) -> None:
        self.device = device
        self.name = name
        self.timeline = timeline
        self._ops: deque[_Op] = deque()
        self._launches: deque[_Op] = deque()
        """Those not over: they fill the launch queue."""
        self._running: _Op | None = None
        self._stopped = False
        """The first entry waits for an engine or a mark."""
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        """When all that is enqueued will be over, as far as one can tell."""
        self._marks = 0

    # The protocol -----------------------------------------------------------------------------------

    def record(self, value: Any = None, given: Any = None) -> SimMark:
        """The mark of all that was enqueued so far."""
        self.device.enter_call()
        self.device.take_event()
        self._after_host(self.device.world.host)
        mark = self._record(pooled=True)
        self.device.world.record("record", mark.name)
        return mark

    def wait(self, mark: Mark) -> None:
        """What is enqueued from here on starts after `mark`."""
        if not isinstance(mark, SimMark):
            mark.wait()
            return
        self.device.enter_call()
        self.device.world.record("wait", self.name, mark.name)
        self._after_host(self.device.world.host)
        self._wait(mark)

    def write_word(self, word: SimTensor, value: int) -> None:
        """Have a word of pinned memory written as the stream comes by."""
        self.device.enter_call()
        self._after_host(self.device.world.host)
        op = _Op(self.device.world.host.now)
        op.word = word, value
        self._append(op)

    # What is enqueued -------------------------------------------------------------------------------

    def launch(
        self,
        name: str,
        seconds: float,
        engine: Engine | None,
        reads: Sequence[Range],
        writes: Sequence[Range],
        compute: Callable[..., Any] | None,
        fault: str | None = None,
    ) -> None:
        """A kernel, copy or sleep. Pushes the host's time to when the launch queue has a place."""
        device = self.device
        world = device.world
        host = world.host
        place = self.place_due()
        if place > host.now:
            if math.isinf(place):
                host.block_for_ever(
                    f"waits for a place in the launch queue of {self.name}, which moves no more"
                )
            world.record("full", self.name, host.name)
            host.advance(place)
        self._after_host(host)
        stamp = self.timeline.tick()
        where = Where(host.stage, host.sequence, self.name, name)
        event = Event(stamp.line, stamp.number, where)
        checker, timeline = world.checker, self.timeline
        op = _Op(host.now, event)
        op.reads = [r._replace(valid=checker.read(r.block, r.low, r.high, event, timeline)) for r in reads]
        for _range in writes:
            checker.write(_range.block, _range.low, _range.high, event, timeline)
            _range.block.version += 1
        op.writes = writes
        for _range in (*reads, *writes):
            if _range.block.stream is None:  # of the host: never given on while a stream may use it
                _range.block.kept[self] = None
        op.seconds, op.engine, op.compute, op.fault = seconds, engine, compute, fault
        op.start_due = max(self._due, host.now)
        op.due = self._due = op.start_due + seconds
        world.record("launch", *where)
        self._launches.append(op)
        self._append(op)

    def place_due(self) -> float:
        """When the launch queue has a place, as far as one can tell: what other streams do to this one's
        progress from now on is not foreseen. Now or earlier if there is one."""
        launches = self._launches
        over = len(launches) - self.device.options.queue
        if over < 0:
            return 0.0
        head = launches[0]
        begins = head.began if head is self._running else max(head.start_due, self.device.world.loop.time())
        return launches[over].due + max(0.0, begins - head.start_due)

    @property
    def idle(self) -> bool:
        """Whether all that was enqueued is over."""
        return not self._ops

    def mark_now(self) -> SimMark:
        """A mark of the runtime's own, not of the pool; passed at once if nothing is enqueued."""
        return self._record()

    def await_mark(self, mark: SimMark) -> None:
        """A wait of the runtime's own."""
        self._wait(mark)

    def _record(self, *, pooled: bool = False) -> SimMark:
        self._marks += 1
        world = self.device.world
        due = max(self._due, world.host.now)
        mark = SimMark(self, f"{self.name} mark {self._marks}", due, pooled=pooled)
        if self.device.fault is not None:
            return mark
        if not pooled and not self._ops:
            mark.passed_at = world.loop.time()
            return mark
        op = _Op(world.host.now)
        op.mark = mark
        self._append(op)
        return mark

    def _wait(self, mark: SimMark) -> None:
        self.timeline.join(mark.clock)
        if mark.passed_at is not None or mark.stream is self:
            return
        self._due = max(self._due, mark.due)
        op = _Op(self.device.world.host.now)
        op.wait = mark
        self._append(op)

    def _after_host(self, host: Host) -> None:
        """What comes now starts after all that the host knows, and has blocked on."""
        self.timeline.join(host.timeline.snapshot())
        if host.pending:
            for mark in host.unpassed():
                self._wait(mark)

    # As time passes ---------------------------------------------------------------------------------

    def _append(self, op: _Op) -> None:
        self._ops.append(op)
        if self._running is None and not self._stopped and self._timer is None:
            # Never at once: a mark is not passed before the call that recorded it is over.
            self._come_back(max(op.earliest, self.device.world.loop.time()))

    def _come_back(self, when: float) -> None:
        self._timer = self.device.world.loop.call_at(when, self._go_on)

    def _go_on(self) -> None:
        self._timer = None
        self._stopped = False
        world = self.device.world
        now = world.loop.time()
        while self._ops and self.device.fault is None:
            op = self._ops[0]
            if op.earliest > now:
                self._come_back(op.earliest)
                return
            if op.mark is not None:
                self._ops.popleft()
                op.mark.passed_at = now
                world.record("pass", op.mark.name)
                op.mark.settle()
            elif op.wait is not None:
                if op.wait.passed_at is None:
                    self._stopped = True
                    op.wait.when_passed(self._woken)
                    return
                self._ops.popleft()
            elif op.word is not None:
                word, value = op.word
                self._ops.popleft()
                word.block.fill(*word.span, value)
            else:
                if op.engine is None or op.engine.take(self):
                    self._start(op)
                else:
                    self._stopped = True
                return

    def _woken(self, mark: SimMark) -> None:
        # By a timer, as marks that wait for marks would nest calls without end. A mark whose device failed
        # is never passed, and what waits for it never starts.
        if mark.passed_at is not None:
            self._come_back(self.device.world.loop.time())

    def abandon(self) -> None:
        """The device has failed: nothing more runs, and every mark tells."""
        ops, self._ops = self._ops, deque()
        self._launches.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for op in ops:
            if op.mark is not None:
                op.mark.settle()

    def granted(self) -> None:
        """An engine has a place for the first entry."""
        self._stopped = False
        self._start(self._ops[0])

    def _start(self, op: _Op) -> None:
        self._running = op
        world = self.device.world
        op.began = world.loop.time()
        assert op.event is not None
        world.record("start", *op.event.where)
        if math.isinf(op.seconds):
            return  # hung: it keeps its engine, and nothing behind it ever starts
        if op.engine is not None:
            op.engine.busy += op.seconds
        world.loop.call_at(op.began + op.seconds, self._end, op)

    def _end(self, op: _Op) -> None:
        device = self.device
        if device.fault is not None:
            return
        assert op.event is not None
        where = op.event.where
        if op.fault is not None:
            device.fail(f"{op.fault} (in {where})")
            return
        self._running = None
        self._ops.popleft()
        self._launches.popleft()
        op.event.done = True
        device.world.record("end", *where)
        try:
            _write(op, where)
        except Exception as error:
            device.fail(f"the compute function of {where} raised {type(error).__name__}: {error}", error)
            return
        if op.engine is not None:
            op.engine.give()
        self._go_on()


def _write(op: _Op, where: Where) -> None:
    """What a launch does to memory. Nothing computed survives garbage among what it read."""
    values = [r.block.value(r.low, r.high) if r.valid else GARBAGE for r in op.reads]
    if any(value is GARBAGE for value in values):
        made: Sequence[Any] = [GARBAGE] * len(op.writes)
    elif op.compute is None:
        made = [(where.name, *values)] * len(op.writes)
    else:
        result = op.compute(*values)
        made = [result] if len(op.writes) == 1 else result
        if op.writes and len(made) != len(op.writes):
            raise ValueError(f"it gave {len(made)} values for {len(op.writes)} tensors")
    for (block, low, high, _), value in zip(op.writes, made, strict=False):
        block.fill(low, high, value)
