"""Random pipelines for the simulated machine, and what must come of each: a plain evaluation by lists.

`Drawn(seed)` draws a graph that keeps the rules, with stages on the host and on two devices, and now and then
a fault or a cancel. `check(seed)` runs it and raises AssertionError, with the seed, where the engine breaks a
promise: a value, a number, an order, a credit, a block of memory, a hazard, a hang, an unnamed culprit.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from pipeflow import (
    DROP,
    Cancelled,
    Context,
    DeviceError,
    Gather,
    Registry,
    Resource,
    Stage,
    StageError,
    release,
    testing,
)
from pipeflow.errors import PipeflowError, StallError, Stuck

GAP = object()
DEVICES = ("cuda:0", "cuda:1")
LIMIT = 5000.0
"""Virtual seconds in which any of these graphs ends many times over."""


def chance(of: int, *parts: Any) -> int:
    """A number in [0, of) that depends on the parts alone."""
    return zlib.crc32(repr(parts).encode()) % of


def leaves(item: Any) -> list[Any]:
    """What an item holds, in a fixed order: values of the host, and simulated tensors."""
    if isinstance(item, dict):
        return [leaf for key in sorted(item) for leaf in leaves(item[key])]
    if isinstance(item, list):
        return [leaf for each in item for leaf in leaves(each)]
    return [item]


def spend(stage: Stage[Any, Any], item: Any, ctx: Context, *more: Any) -> Any:
    """One output of a stage: (name, leaves..., more...), by a kernel where it runs on a device."""
    name, seconds = stage.config.name, stage.config.seconds * (1 + chance(3, ctx.sequence, stage.config.name))
    parts = leaves(item)
    tensors = [part for part in parts if isinstance(part, testing.SimTensor)]
    if ctx.device == "cpu":
        if not isinstance(stage, Async):
            testing.work(seconds, lock=chance(2, name) == 0)
        return (name, *[testing.read(p) if isinstance(p, testing.SimTensor) else p for p in parts], *more)
    out = testing.empty(stage.config.nbytes)

    def compute(*values: Any) -> Any:
        found = iter(values)
        return (name, *[next(found) if isinstance(p, testing.SimTensor) else p for p in parts], *more)

    testing.kernel(seconds, tensors, [out], compute, name=name)
    return out


class Config(Stage.Config, frozen=True, kw_only=True):
    name: str
    seconds: float = 0.0
    nbytes: int = 512
    count: int = 0
    size: int = 1
    drops: int = 0
    """One of so many is dropped; 0: none."""
    raises: int = 0
    """One of so many raises; with `again` only the first time."""
    again: bool = False


class Source(Stage[None, Any]):
    Config = Config

    def run(self, ctx: Context):
        for number in range(self.config.count):
            yield spend(self, number, ctx)


class Map(Stage[Any, Any]):
    Config = Config
    retriable = True

    def setup(self, ctx: Context) -> None:
        self.tried: set[Any] = set()

    def run(self, item: Any, ctx: Context) -> Any:
        config = self.config
        due = config.raises and chance(config.raises, config.name, ctx.sequence, "raises") == 0
        if due and not (config.again and ctx.sequence in self.tried):
            self.tried.add(ctx.sequence)
            spend(self, item, ctx)  # it has enqueued work when it raises
            raise ValueError("on purpose")
        out = spend(self, item, ctx)
        return DROP if config.drops and chance(config.drops, config.name, ctx.sequence) == 0 else out


class Async(Stage[Any, Any]):
    Config = Config

    async def run(self, item: Any, ctx: Context) -> Any:
        import asyncio

        await asyncio.sleep(self.config.seconds)
        return spend(self, item, ctx)


class Flat(Stage[Any, Any]):
    Config = Config

    def run(self, item: Any, ctx: Context):
        for number in range(chance(4, self.config.name, ctx.sequence)):
            yield spend(self, item, ctx, number)


class Batch(Gather[Any, Any]):
    Config = Config

    def full(self, members: Any) -> bool:
        return len(members) == self.config.size

    def run(self, items: list[Any], ctx: Context) -> Any:
        return spend(self, items, ctx)


class Box(Resource):
    """Memory that a writer fills in place with the number of its step. Kernels of every device reach it."""

    def open(self, ctx: Any) -> Any:
        return testing.empty(8)


class Writes(Stage[Any, Any]):
    Config = Config
    writes = {"box": Box}  # noqa: RUF012

    def run(self, item: Any, ctx: Context) -> Any:
        out, box, step = spend(self, item, ctx), ctx.write("box"), ctx.sequence + 1
        if ctx.device == "cpu":
            testing.write(box, step)
        else:
            testing.kernel(self.config.seconds, [], [box], lambda: step, name="fill")
        return out


class Reads(Stage[Any, Any]):
    """Behind the writer: it must see the version that its item made."""

    Config = Config
    reads = {"box": Box}  # noqa: RUF012
    wrong: list[str] = []  # noqa: RUF012

    def run(self, item: Any, ctx: Context) -> Any:
        every = self.config.size
        expected = (ctx.sequence + 1) * every
        if ctx.version("box").step != expected:
            self.wrong.append(f"{self.config.name} {ctx.sequence}: {ctx.version('box').step}, not {expected}")
        return spend(self, [item, ctx.read("box")], ctx)


class Loose(Stage[Any, Any]):
    """Reads the box from elsewhere: whatever version, but a whole one."""

    Config = Config
    reads = {"box": Box}  # noqa: RUF012

    def run(self, item: Any, ctx: Context) -> Any:
        if ctx.device == "cpu":
            assert isinstance(testing.read(ctx.read("box")), int) or ctx.version("box").step == 0
        else:
            testing.kernel(self.config.seconds, [ctx.read("box")], [], name="look")
        return spend(self, item, ctx)


class Publish(Stage[Any, Any]):
    """In its section nothing runs and nothing is launched on any device."""

    Config = Config
    guarded = True

    def run(self, item: Any, ctx: Context) -> Any:
        testing.work(self.config.seconds, lock=False)
        testing.note("section", self.config.seconds)
        return (self.config.name, item.seq, item.reason)


@dataclass(eq=False)
class Stream:
    """A stage's output as lists give it."""

    name: str
    values: list[Any]
    domain: object
    ordered: bool = True
    """False: the order, and with it what a gather makes of it, is free."""
    piece: set[str] = field(default_factory=set)

    @property
    def live(self) -> list[Any]:
        return [value for value in self.values if value is not GAP]


class Drawn:
    """A document with its registry, what each sink must get, and what will be done to the run."""

    def __init__(self, seed: int, without: frozenset[str] = frozenset()) -> None:
        """`without`: stages to leave out of what the seed draws, with all that follows them."""
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.stages: dict[str, Any] = {}
        self.resources: dict[str, Any] = {}
        self.streams: list[Stream] = []
        self.expected: dict[str, Stream] = {}
        self.seen: dict[str, list[Any]] = {}
        self.traits: set[str] = set()
        self.registry = Registry()
        Reads.wrong.clear()
        for cls in (Source, Map, Async, Flat, Batch, Writes, Reads, Loose, Publish, Box):
            self.registry.add(cls.__name__.lower(), cls)
        for _ in range(rng.choice([1, 1, 2, 2])):
            self._source()
        kinds = ["map"] * 4 + ["gather", "join", "barrier"] * 2 + ["flat", "join", "turns", "every", "writer"]
        for _ in range(rng.randint(3, 7)):
            getattr(self, f"_{rng.choice(kinds)}")(rng.choice(self.streams))
        self._sinks()
        self.faults: list[testing.Fault] = []
        self.starves: list[testing.Fault] = []
        """Jobs that run out of memory once, and can be run again: nothing else may change by that."""
        self.cancel_at: float | None = None
        self.drains = False
        self._trouble()
        self._leave_out(without)

    def _leave_out(self, without: frozenset[str]) -> None:
        gone = set(without)
        for name, spec in self.stages.items():  # in order: a stage stands behind those it takes from
            if gone & set(_sources(spec)):
                gone.add(name)
        for name in gone & set(self.stages):
            del self.stages[name]
            self.expected.pop(name, None)
            self.seen.pop(name, None)
        self.faults = [fault for fault in self.faults if fault.stage not in gone]
        self.starves = [fault for fault in self.starves if fault.stage not in gone]

    # Stages ----------------------------------------------------------------------------------------

    def _new(self, uses: str, stream: Any, *, lanes: bool = False, device: bool = True, **config: Any) -> str:
        rng, name = self.rng, f"{uses[0]}{len(self.stages)}"
        spec: dict[str, Any] = {"uses": uses, "with": {"name": name, **config}}
        spec["with"]["seconds"] = rng.choice([0.0, 0.001, 0.01, 0.05])
        if stream is not None:
            spec["from"] = stream
        if device and rng.random() < 0.6:
            spec["on"] = rng.choice(DEVICES)
            if stream is not None:
                spec["in_flight"] = rng.choice([1, 2, 3])
            spec["with"]["nbytes"] = rng.choice([512, 4096, 1 << 20])
        if stream is not None and uses != "publish" and rng.random() < 0.7:
            spec["queue"] = {"items": rng.choice([1, 1, 2, 4])}
            if rng.random() < 0.3:
                spec["queue"]["bytes"] = rng.choice([512, 8192])
        if lanes and rng.random() < 0.5:
            spec["replicas"] = rng.choice([2, 3])
            self.traits.add("replicas")
        self.stages[name] = spec
        return name

    def _add(
        self, name: str, values: list[Any], domain: object, *before: Stream, ordered: bool = True
    ) -> Stream:
        piece = {name}.union(*(stream.piece for stream in before))
        for stream in self.streams:
            if stream.piece & piece:
                stream.piece |= piece
        piece = piece.union(*(stream.piece for stream in self.streams if stream.piece & piece))
        made = Stream(name, values, domain, ordered and all(s.ordered for s in before), piece)
        for stream in self.streams:
            if stream.piece & piece:
                stream.piece = piece
        self.streams.append(made)
        return made

    def _source(self) -> None:
        count = self.rng.randint(3, 12)
        name = self._new("source", None, count=count)
        self._add(name, [(name, number) for number in range(count)], name)

    def _map(self, stream: Stream) -> None:
        rng = self.rng
        kind = "async" if rng.random() < 0.2 else "map"
        if kind == "async":
            name = self._new("async", stream.name, lanes=True, device=False)
            self._add(name, self._mapped(name, stream), stream.domain, stream)
            return
        drops = rng.choice([0, 0, 3])
        raises = rng.choice([0, 0, 4])
        name = self._new("map", stream.name, lanes=True, drops=drops, raises=raises)
        spec = self.stages[name]
        lost = dict.fromkeys(range(len(stream.values)), False)
        if raises:
            again = rng.random() < 0.5
            spec["with"]["again"] = again
            spec["on_error"] = {"retry": 3} if again else {"skip": 100}
            self.traits.add("fault")
            for seq in lost:
                lost[seq] = not again and chance(raises, name, seq, "raises") == 0
        for seq in lost:
            lost[seq] = lost[seq] or bool(drops and chance(drops, name, seq) == 0)
        values = [GAP if lost[seq] else value for seq, value in enumerate(self._mapped(name, stream))]
        ordered = not (spec.get("replicas", 1) > 1 and rng.random() < 0.3)
        spec["ordered"] = ordered
        self._add(name, values, stream.domain, stream, ordered=ordered)

    @staticmethod
    def _mapped(name: str, stream: Stream) -> list[Any]:
        return [GAP if value is GAP else (name, value) for value in stream.values]

    def _flat(self, stream: Stream) -> None:
        if not stream.ordered or len(stream.live) > 40:
            return
        name = self._new("flat", stream.name, lanes=True)
        values = [
            (name, value, number)
            for seq, value in enumerate(stream.values)
            if value is not GAP
            for number in range(chance(4, name, seq))
        ]
        self._add(name, values, name, stream)

    def _gather(self, stream: Stream) -> None:
        if not stream.ordered:
            return
        size = self.rng.choice([1, 2, 3, 5])
        name = self._new("batch", stream.name, size=size)
        live = stream.live
        batches = [(name, *live[at : at + size]) for at in range(0, len(live), size)]
        self._add(name, batches, name, stream)

    def _every(self, stream: Stream) -> None:
        if not stream.ordered:
            return
        every = self.rng.choice([2, 3])
        name = self._new("map", stream.name)
        self.stages[name]["every"] = every
        chosen = stream.values[every - 1 :: every]
        self._add(name, [GAP if v is GAP else (name, v) for v in chosen], (stream.domain, name), stream)

    def _join(self, stream: Stream) -> None:
        others = [s for s in self.streams if s is not stream and s.domain == stream.domain and s.ordered]
        if not others or not stream.ordered:
            return
        other = self.rng.choice(others)
        name = self._new("map", {"a": stream.name, "b": other.name}, lanes=True)
        values = [
            GAP if a is GAP or b is GAP else (name, a, b)
            for a, b in zip(stream.values, other.values, strict=True)
        ]
        self.traits.add("fan-in")
        self._add(name, values, stream.domain, stream, other)

    def _turns(self, stream: Stream) -> None:
        others = [s for s in self.streams if s.ordered and not s.piece & stream.piece]
        others += [s for s in self.streams if s is not stream and s.ordered and s.domain == stream.domain]
        if not others or not stream.ordered:
            return
        other = self.rng.choice(others)
        name = self._new("map", [stream.name, other.name])
        queues = [list(stream.values), list(other.values)]
        taken: list[Any] = []
        turn = 0
        while any(queues):
            if queues[turn]:
                taken.append(queues[turn].pop(0))
            turn = 1 - turn
        self.traits.add("fan-in")
        self._add(name, [(name, value) for value in taken if value is not GAP], name, stream, other)

    def _writer(self, stream: Stream) -> None:
        if not stream.ordered or GAP in stream.values or self.resources:
            return
        self.resources["box"] = {"uses": "box"}
        name = self._new("writes", stream.name)
        self.stages[name]["writes"] = "box"
        made = self._add(name, self._mapped(name, stream), stream.domain, stream)
        every = self.rng.choice([1, 2])
        reader = self._new("reads", made.name, size=every)
        self.stages[reader] |= {"reads": "box", "every": every}
        if (
            "on" in self.stages[reader]
        ):  # a resource on two devices is two, which the writer would fill one by one
            self.stages[reader]["on"] = self.stages[name].get("on", DEVICES[0])
        chosen = made.values[every - 1 :: every]
        seen = [(reader, value, (seq + 1) * every) for seq, value in enumerate(chosen)]
        self._add(reader, seen, (made.domain, reader), made)
        others = [s for s in self.streams if s.ordered and not s.piece & made.piece]
        if others:
            other = self.rng.choice(others)
            loose = self._new("loose", other.name, lanes=True)
            self.stages[loose]["reads"] = "box"
            if "on" in self.stages[loose]:
                self.stages[loose]["on"] = self.stages[name].get("on", DEVICES[0])
            self._add(loose, self._mapped(loose, other), other.domain, other)

    def _barrier(self, stream: Stream) -> None:
        if not stream.ordered:
            return
        every = self.rng.choice([1, 2, 3])
        name = f"barrier{len(self.stages)}"
        self.stages[name] = {"uses": "barrier", "from": stream.name, "every": every, "timeout": "1000s"}
        publish = self._new("publish", name, device=False)
        count = len(stream.values) // every
        fired = [(publish, seq, "every") for seq in range(count)]
        if any(value is not GAP for value in stream.values[count * every :]):
            fired.append((publish, count, "end"))
        self.traits.add("barrier")
        self._add(publish, fired, publish, stream)

    def _sinks(self) -> None:
        taken = {source for spec in self.stages.values() for source in _sources(spec)}
        for stream in [stream for stream in self.streams if stream.name not in taken]:
            name = f"sink{len(self.stages)}"
            seen: list[Any] = []
            self.registry.add(name, _sink(seen))
            self.stages[name] = {"uses": name, "from": stream.name}
            self.seen[name], self.expected[name] = seen, stream

    # Trouble ---------------------------------------------------------------------------------------

    def _trouble(self) -> None:
        rng = self.rng
        on_device = [name for name, spec in self.stages.items() if "on" in spec]
        drawn = rng.random()
        if drawn < 0.3 and on_device:
            kind = rng.choice(["illegal access", "assert", "hang", "oom"])
            self.faults = [testing.Fault(kind, stage=rng.choice(on_device), number=rng.randint(0, 5))]
            self.traits.add("fault")
        elif drawn < 0.72:
            self.cancel_at = rng.uniform(0, 0.4)
            self.drains = rng.random() < 0.3
            self.traits.add("cancel")
        kinds = ("map", "batch", "reads", "loose")
        again = [name for name in on_device if self.stages[name]["uses"] in kinds]
        again = [name for name in again if all(fault.stage != name for fault in self.faults)]
        if again and rng.random() < 0.4:
            count = rng.choice([1, 1, 2, 3])
            self.starves = [  # no item twice: that would be an error
                testing.Fault("oom", stage=rng.choice(again), sequence=seq)
                for seq in rng.sample(range(6), count)
            ]
            self.traits.add("memory")

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = {"pipeflow": 1, "name": "drawn", "stages": self.stages}
        if self.resources:
            found["resources"] = self.resources
        return found | {"run": {"stall": "2000s", "stop": {"grace": "100s"}}}


def _sources(spec: dict[str, Any]) -> list[str]:
    source = spec.get("from", [])
    if isinstance(source, str):
        return [source]
    return list(source.values() if isinstance(source, dict) else source)


def _sink(seen: list[Any]) -> Any:
    class Sink(Stage[Any, None]):
        def run(self, item: Any) -> None:
            parts = [testing.read(p) if isinstance(p, testing.SimTensor) else p for p in leaves(item)]
            seen.append(parts[0] if len(parts) == 1 else tuple(parts))

    return Sink


def run(drawn: Drawn, operations: testing.OperationLog | None = None) -> testing.Simulated:
    """Simulate it, with its faults and its cancel."""

    async def act(pipeline: Any) -> Any:
        if drawn.cancel_at is not None:
            pipeline.engine.loop.call_later(
                drawn.cancel_at, pipeline.drain if drawn.drains else pipeline.cancel
            )
        try:
            return await pipeline.run()
        finally:
            if pipeline.engine.error is None:
                left = _in_flight(pipeline)
                assert not left, f"the run is over, the work is not: {left}"

    return testing.simulate(
        drawn.document, registry=drawn.registry, seed=drawn.seed,
        faults=[*drawn.faults, *drawn.starves], act=act, limit=LIMIT,
        operations=operations,
        lag=drawn.rng.choice([1e-6, 1e-3, 0.02]), jitter=drawn.rng.choice([0.0, 0.3]),
    )  # fmt: skip


def check(seed: int, without: frozenset[str] = frozenset()) -> set[str]:
    """Draw, run and hold against every promise; the traits of what was drawn."""
    drawn = Drawn(seed, without)
    ran = run(drawn)
    try:
        _judge(drawn, ran)
    except AssertionError as error:
        error.add_note(
            f"seed {seed}: {sorted(drawn.traits)}, faults {drawn.faults}, cancel {drawn.cancel_at}"
        )
        raise
    finally:
        release._held.clear()  # a world is over as its run is: else each hang and fault would stay in memory
    return drawn.traits


def shrink(seed: int) -> tuple[frozenset[str], BaseException]:
    """A seed that fails: which of its stages can be left out and it still fails, and how it does then."""

    def failure(without: frozenset[str]) -> BaseException | None:
        try:
            check(seed, without)
        except Exception as error:
            return error
        return None

    without: frozenset[str] = frozenset()
    found = failure(without)
    assert found is not None, f"seed {seed} does not fail"
    for name in reversed(list(Drawn(seed).stages)):
        if (error := failure(without | {name})) is not None:
            without, found = without | {name}, error
    return without, found


def _judge(drawn: Drawn, ran: testing.Simulated) -> None:
    error = ran.error
    struck = [fault for fault in drawn.faults if fault.struck]
    starved = struck if struck and struck[0].kind == "oom" else []
    if starved and (error is None or not _cannot_again(drawn, starved[0], error)):
        struck = []  # its job ran again: nothing else may have changed
    assert not isinstance(error, (TimeoutError, StallError)) or struck, f"it hangs: {error}"
    assert error is None or isinstance(error, PipeflowError), repr(error)
    unexpected = [h for h in ran.hazards if not struck]
    assert not unexpected, unexpected[0]
    if struck:
        assert error is not None, "a fault went by unheard"
        named = (DeviceError, StageError, StallError, Stuck, Cancelled)
        assert isinstance(error, named), repr(error)
        _culprit(drawn, struck[0], error)
    elif drawn.cancel_at is None or error is None:
        assert error is None, repr(error)
        _outputs(drawn, whole=drawn.cancel_at is None)
        _settled(ran)
        _logged(drawn, ran)
    else:
        assert isinstance(error, Cancelled), repr(error)
        _outputs(drawn, whole=False)
    assert not Reads.wrong, Reads.wrong
    _nothing_left(drawn, ran, struck)


def _culprit(drawn: Drawn, fault: testing.Fault, error: BaseException) -> None:
    """Whoever reads the error must find the device that failed, or the stage that hangs."""
    text = "\n".join([str(error), *getattr(error, "__notes__", [])])
    device = drawn.stages[fault.stage]["on"]
    assert fault.stage in text or device in text or isinstance(error, Cancelled), text


def _cannot_again(drawn: Drawn, fault: testing.Fault, error: BaseException) -> bool:
    """Whether the job that ran out of memory could not be run again, and the error says so."""
    uses = drawn.stages[fault.stage]["uses"]
    assert isinstance(error, StageError), repr(error)
    assert (error.stage, "out of memory and" in str(error)) == (fault.stage, True), str(error)
    return uses in ("source", "flat", "writes")


def _outputs(drawn: Drawn, *, whole: bool) -> None:
    for name, seen in drawn.seen.items():
        stream = drawn.expected[name]
        live = stream.live
        if whole and stream.ordered:
            assert seen == live, f"{name} behind {stream.name}"
        elif whole:
            assert Counter(map(repr, seen)) == Counter(map(repr, live)), f"{name} behind {stream.name}"
        elif stream.ordered and not drawn.drains:
            assert seen == live[: len(seen)], f"{name} behind {stream.name}"


def _in_flight(pipeline: Any) -> list[str]:
    devices = pipeline.engine.machine.world.devices.values()
    return [stream.name for device in devices for stream in device.streams if not stream.idle]


def _logged(drawn: Drawn, ran: testing.Simulated) -> None:
    """What the operation log tells: sections alone, jobs in flight within bounds, retries one at a time."""
    running: Counter[Any] = Counter()
    in_hand: Counter[Any] = Counter()
    sections = [(time - names[0], time) for time, kind, *names in ran.log if kind == "section"]
    for time, kind, *names in ran.log:
        if kind not in ("launch", "end"):
            continue
        stage, seq, stream, kernel = names
        one = 1 if kind == "launch" else -1
        if kind == "launch":
            inside = [section for section in sections if section[0] <= time < section[1]]
            assert not inside, f"{stage} {seq} was launched in a section"
            assert not (kernel == stage and in_hand[stage, seq, stream]) or _many(drawn, stage), (
                f"{stage} {seq} was launched again before its work was over"
            )
        in_hand[stage, seq, stream] += one if kernel == stage else 0
        running[stream] += one if kernel == stage else 0
        if stage in drawn.stages and not _many(drawn, stage):
            most = drawn.stages[stage].get("in_flight", 1) * drawn.stages[stage].get("replicas", 1)
            assert running[stream] <= most, f"{running[stream]} jobs in flight on {stream}, not {most}"


def _many(drawn: Drawn, stage: str) -> bool:
    """Several outputs a job, each with a kernel of its own."""
    return stage not in drawn.stages or drawn.stages[stage]["uses"] in ("source", "flat")


def _settled(ran: testing.Simulated) -> None:
    """No credit is out, nothing queued, no lane busy, no lease or pin held."""
    assert ran.pipeline is not None
    engine = ran.pipeline.engine
    for runner in engine.nodes:
        assert runner.closed, runner
        assert (runner.pins, len(runner.hand)) == (0, 0), runner
        for edge in runner.outs:
            state = (edge.credits, edge.production, edge.gathered, edge.queued, edge.bytes_live)
            assert state == (0, 0, 0, 0, 0), (edge, state)
        for lane in runner.lanes:
            assert lane.busy == 0, lane.name
            for instance in (*lane.leases.reads.values(), *lane.leases.writes.values()):
                assert (instance.readers, instance.writing, instance.queue) == (0, False, {})
    assert engine.in_hand == 0
    assert len(engine.storages) == 0


def _nothing_left(drawn: Drawn, ran: testing.Simulated, struck: list[testing.Fault]) -> None:
    """Every block was given back, but under a kernel that never ends (axiom 4.3: leaked, never freed)."""
    if struck:
        return
    ran.pipeline = None
    if ran.error is not None:
        ran.error.__traceback__ = None
    for name, device in ran.world.devices.items():
        assert device.allocator.used == 0, f"{device.allocator.used} bytes left on {name}"
