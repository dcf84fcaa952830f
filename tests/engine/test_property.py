"""Random graphs, speeds and launchers against a plain evaluation of the same graph (axioms 1.1, 2.1, 2.4).

Every graph must end; every edge must see every number once; what each sink gets must be what lists give; no
credit, task or thread may be left. Where order or the make-up of batches is free, less is compared:

exact     numbers and values are fixed, and the order of arrival too unless `scrambled`
bag       the values are fixed, their numbers are not
elements  the values' elements are fixed, how they are batched is not
count     neither
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from flows import collector, fine, flow, in_loop, settled
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pipeflow import DROP, Gather, GraphError, stage
from pipeflow.edge import Edge

Value = tuple[tuple[str, int], ...]
EXACT, BAG, ELEMENTS, COUNT = range(4)


def chance(value: Value, salt: str, of: int) -> int:
    """A number in [0, of) that depends on the value alone."""
    return zlib.crc32(repr((value, salt)).encode()) % of


# These stages sleep to be slow on purpose, by so little that events come in many orders. What is asserted
# holds for any length.


@stage
def source(*, name: str, count: int, late: float):
    for number in range(count):
        time.sleep(late)
        yield ((name, number),)


@stage
async def asource(*, name: str, count: int, late: float):
    for number in range(count):
        await asyncio.sleep(late)
        yield ((name, number),)


def mapped(item: Any, name: str, skips: bool) -> Any:
    if isinstance(item, dict):
        item = tuple(part for key in sorted(item) for part in item[key])
    return DROP if skips and chance(item, name, 4) == 0 else item


@stage
def step(item, *, name: str, skips: bool, late: float):
    time.sleep(late * (1 + chance(((name, 0),), repr(item), 3)))
    return mapped(item, name, skips)


@stage
def quick(item, *, name: str, skips: bool, late: float):
    return mapped(item, name, skips)


@stage
async def astep(item, *, name: str, skips: bool, late: float):
    await asyncio.sleep(late * chance(((name, 0),), repr(item), 3))
    return mapped(item, name, skips)


@stage
def split(item, *, name: str, late: float):
    for number in range(chance(item, name, 4)):
        time.sleep(late)
        yield (*item, (name, number))


@stage
async def asplit(item, *, name: str, late: float):
    for number in range(chance(item, name, 4)):
        await asyncio.sleep(late)
        yield (*item, (name, number))


class Batch(Gather):
    class Config(Gather.Config, frozen=True, kw_only=True):
        size: int

    def full(self, members: Any) -> bool:
        return len(members) == self.config.size

    def run(self, items: list[Any]) -> Any:
        return tuple(part for item in items for part in item)


@dataclass(eq=False)
class Stream:
    """A stage's output as lists give it: by number a value or None (a gap)."""

    name: str
    values: list[Value | None]
    domain: str
    level: int = EXACT
    scrambled: frozenset[str] = frozenset()
    """Unordered stages since the domain started."""
    piece: set[str] = field(default_factory=set)
    """Stages it is linked with."""

    @property
    def live(self) -> list[Value]:
        return [value for value in self.values if value is not None]


class Builder:
    """Draws a graph that keeps the rules, and works out what must come of it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.stages: dict[str, Any] = {}
        self.streams: list[Stream] = []
        self.seen: dict[str, list[Any]] = {}

    def build(self) -> None:
        for _ in range(self.rng.choice([1, 1, 2, 3])):
            self.source()
        for _ in range(self.rng.randint(2, 9)):
            kind = self.rng.choice(
                ["map", "map", "map", "flat", "gather", "join", "join", "turns", "arrivals", "every"]
            )
            getattr(self, kind)(self.rng.choice(self.streams))
        taken = {name for spec in self.stages.values() for name in sources_of(spec)}
        for stream in [s for s in self.streams if s.name not in taken]:
            name = f"sink_{stream.name}"
            self.stages[name] = {"uses": name, "from": stream.name, **self.queue()}
            self.seen[stream.name] = []

    def queue(self) -> dict[str, Any]:
        return {"queue": {"items": self.rng.choice([1, 1, 2, 4])}}

    def late(self) -> float:
        return self.rng.choice([0, 0, 0, 0.0003])

    def add(self, kind: str, spec: dict[str, Any], stream: Stream, *sources: Stream) -> None:
        self.stages[stream.name] = spec
        piece = {stream.name}.union(*(source.piece for source in sources))
        for other in [*self.streams, stream]:
            if other.piece & piece or other is stream:
                other.piece |= piece
        self.streams.append(stream)

    def name(self, kind: str) -> str:
        return f"{kind}{len(self.stages)}"

    def source(self) -> None:
        name, count = self.name("source"), self.rng.randint(0, 20)
        uses = self.rng.choice(["source", "asource"])
        spec = {"uses": uses, "with": {"name": name, "count": count, "late": self.late()}}
        self.add("source", spec, Stream(name, [((name, i),) for i in range(count)], name))

    def _map(self, name: str, values: list[Value | None], *, may_skip: bool) -> tuple[dict[str, Any], Any]:
        uses = self.rng.choice(["step", "quick", "astep"])
        skips = may_skip and self.rng.random() < 0.4
        spec = {
            "uses": uses,
            "with": {"name": name, "skips": skips, "late": self.late()},
            "in_flight": self.rng.choice([1, 1, 3]),
            "replicas": self.rng.choice([1, 1, 2, 3]),
            **({"launcher": "inline"} if uses == "quick" else {}),
        }
        kept = [None if v is None or (skips and chance(v, name, 4) == 0) else v for v in values]
        return spec, kept

    def map(self, x: Stream, every: int = 1) -> None:
        name = self.name("map")
        values = x.values if every == 1 else x.values[every - 1 :: every]
        spec, kept = self._map(name, values, may_skip=x.level <= BAG and (every == 1 or x.level == EXACT))
        ordered = self.rng.random() < 0.75
        level = x.level if every == 1 or x.level == EXACT else COUNT
        renewed = every > 1
        self.add(
            "map",
            {
                **spec,
                "from": x.name,
                "ordered": ordered,
                **self.queue(),
                **({"every": every} if renewed else {}),
            },
            Stream(
                name,
                kept,
                name if renewed else x.domain,
                level,
                x.scrambled | (frozenset() if ordered else {name}),
            ),
            x,
        )

    def every(self, x: Stream) -> None:
        self.map(x, self.rng.choice([2, 3]))

    def flat(self, x: Stream) -> None:
        if x.level > BAG:
            return
        name = self.name("flat")
        values = [(*v, (name, i)) for v in x.live for i in range(chance(v, name, 4))]
        ordered = self.rng.random() < 0.75
        spec = {
            "uses": self.rng.choice(["split", "asplit"]),
            "with": {"name": name, "late": self.late()},
            "from": x.name,
            "ordered": ordered,
            "in_flight": self.rng.choice([1, 1, 3]),
            "replicas": self.rng.choice([1, 1, 2]),
            **self.queue(),
        }
        free = not ordered or x.scrambled or x.level > EXACT
        self.add("flat", spec, Stream(name, values, name, BAG if free else EXACT), x)

    def gather(self, x: Stream) -> None:
        if x.level == COUNT:
            return
        name, size = self.name("gather"), self.rng.choice([2, 3, 7])
        live = x.live
        values = [tuple(p for v in live[i : i + size] for p in v) for i in range(0, len(live), size)]
        ordered = self.rng.random() < 0.75
        spec = {"uses": "batch", "with": {"size": size}, "from": x.name, "ordered": ordered, **self.queue()}
        level = ELEMENTS if x.level > EXACT or x.scrambled else EXACT
        self.add(
            "gather", spec, Stream(name, list(values), name, max(level, BAG if not ordered else EXACT)), x
        )

    def join(self, x: Stream) -> None:
        y = self.rng.choice(self.streams)
        if x is y or x.level or y.level:
            return
        if x.domain == y.domain:
            if x.scrambled != y.scrambled:
                return
        elif x.piece & y.piece or x.scrambled or y.scrambled:
            return
        name = self.name("join")
        # Of one domain too: a join with a shorter source ended it early.
        pairs = zip(x.values, y.values, strict=False)
        values = [None if a is None or b is None else (*a, *b) for a, b in pairs]
        spec, kept = self._map(name, values, may_skip=True)
        if x.scrambled:
            return
        self.add(
            "join", {**spec, "from": {"a": x.name, "b": y.name}, **self.queue()},
            Stream(name, kept, x.domain, EXACT, x.scrambled), x, y,
        )  # fmt: skip

    def turns(self, x: Stream) -> None:
        y = self.rng.choice(self.streams)
        if x is y or (x.domain != y.domain and x.piece & y.piece) or x.scrambled or y.scrambled:
            return
        name = self.name("turns")
        spec, kept = self._map(name, list(in_turns(x.values, y.values)), may_skip=x.level == y.level == EXACT)
        level = max(x.level, y.level)
        self.add(
            "turns", {**spec, "from": [x.name, y.name], **self.queue()}, Stream(name, kept, name, level), x, y
        )

    def arrivals(self, x: Stream) -> None:
        y = self.rng.choice(self.streams)
        if x is y:
            return
        name = self.name("arrivals")
        level = max(x.level, y.level, BAG)
        spec, kept = self._map(name, [*x.live, *y.live], may_skip=level == BAG)
        self.add(
            "arrivals",
            {**spec, "from": [x.name, y.name], "ordered": False, **self.queue()},
            Stream(name, kept, name, level, frozenset({name})), x, y,
        )  # fmt: skip


def sources_of(spec: dict[str, Any]) -> list[str]:
    given = spec.get("from", [])
    return [given] if isinstance(given, str) else list(given.values() if isinstance(given, dict) else given)


def in_turns(a: list[Any], b: list[Any]) -> list[Any]:
    """Gaps take a turn; an input that ended loses it."""
    out, left, turn = [], [list(a), list(b)], 0
    while left[0] or left[1]:
        if not left[turn]:
            turn = 1 - turn
        value = left[turn].pop(0)
        turn = 1 - turn
        if value is not None:
            out.append(value)
    return out


def same(stream: Stream, seen: list[Any]) -> None:
    """Compare a sink's items with the plain evaluation, as far as the graph fixes them."""
    live = stream.live
    if stream.level == COUNT:
        return
    if stream.level == EXACT and not stream.scrambled:
        assert seen == live
    elif stream.level <= BAG:
        assert Counter(seen) == Counter(live)
    else:
        assert Counter(p for v in seen for p in v) == Counter(p for v in live for p in v)


USES = {
    "source": source, "asource": asource, "step": step, "quick": quick, "astep": astep, "split": split,
    "asplit": asplit, "batch": Batch,
}  # fmt: skip


def check(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    builder = Builder(rng)
    builder.build()
    uses = USES | {f"sink_{name}": collector(seen) for name, seen in builder.seen.items()}
    numbers: dict[Edge, list[int]] = {}
    put = Edge.put

    def recorded(edge: Edge, seq: int, item: Any, charged: bool) -> bool:
        if edge.selects(seq):
            numbers.setdefault(edge, []).append(seq if edge.every == 1 else (seq + 1) // edge.every - 1)
        return put(edge, seq, item, charged)

    with monkeypatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(Edge, "put", recorded)
        outcome = in_loop(lambda: flow(Path(folder), builder.stages, uses), uv=rng.random() < 0.5)
    assume(not isinstance(outcome.error, GraphError))  # linked by what was drawn later
    fine(outcome)
    settled(outcome)
    for edge, seqs in numbers.items():
        assert sorted(seqs) == list(range(len(seqs))), f"{edge}: {seqs}"
    for stream in builder.streams:
        if stream.name in builder.seen:
            same(stream, builder.seen[stream.name])


@pytest.mark.axiom("1.1")
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(seed=st.integers(0, 2**32))
def test_random_graphs_end_and_give_what_lists_give(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(seed, monkeypatch)
