"""Small stages and pipelines for the tests of single axioms on the simulated machine."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from pipeflow import DROP, Config, Context, Gather, Registry, Resource, Stage, testing
from pipeflow.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pytest

SEEDS = range(10)


class Numbers(Stage[None, int]):
    """0, 1, 2 .."""

    class Config(Config, frozen=True, kw_only=True):
        count: int = 8

    def run(self):
        yield from range(self.config.count)


class Lift(Stage[int, Any]):
    """A number to a tensor that holds it. Odd numbers of `drops` are dropped."""

    class Config(Config, frozen=True, kw_only=True):
        seconds: float = 1.0
        slow: tuple[int, ...] = ()
        """These take ten times as long."""
        drops: tuple[int, ...] = ()
        nbytes: int = 4096

    def run(self, item: int, ctx: Context) -> Any:
        config = self.config
        out = testing.empty(config.nbytes)
        seconds = config.seconds * (10 if item in config.slow else 1)
        testing.kernel(seconds, [], [out], lambda: item, name=ctx.stage)
        return DROP if item in config.drops else out


class Work(Stage[Any, Any]):
    """A kernel on whatever tensors come; the new one holds their values: the one, or a tuple."""

    class Config(Config, frozen=True, kw_only=True):
        seconds: float = 1.0
        nbytes: int = 4096

    def run(self, item: Any, ctx: Context) -> Any:
        parts = parts_of(item)
        out = testing.empty(self.config.nbytes)
        compute = lambda *values: values[0] if len(values) == 1 else values  # noqa: E731
        testing.kernel(self.config.seconds, parts, [out], compute, name=ctx.stage)
        return out


class Many(Stage[Any, Any]):
    """Several outputs of one, each by a kernel of its own: (value, 0), (value, 1) .."""

    class Config(Config, frozen=True, kw_only=True):
        count: int = 3
        seconds: float = 1.0

    def run(self, item: Any, ctx: Context):
        for number in range(self.config.count):
            out = testing.empty(4096)
            testing.kernel(
                self.config.seconds, [item], [out], lambda value, n=number: (value, n), name=ctx.stage
            )
            yield out


class Batch(Gather[Any, Any]):
    """So many of what comes, as one tensor with the tuple of their values."""

    class Config(Config, frozen=True, kw_only=True):
        size: int = 3
        seconds: float = 1.0

    def full(self, members: Any) -> bool:
        return len(members) == self.config.size

    def run(self, items: list[Any], ctx: Context) -> Any:
        out = testing.empty(4096)
        testing.kernel(self.config.seconds, items, [out], lambda *values: values, name=ctx.stage)
        return out


class Box(Resource):
    """Memory that a writer fills in place."""

    def open(self, ctx: Any) -> Any:
        return testing.empty(4096)


class Writes(Stage[Any, Any]):
    """Fills the box with the number of its step, and hands its item on."""

    class Config(Config, frozen=True, kw_only=True):
        seconds: float = 1.0

    writes = {"box": Box}  # noqa: RUF012

    def run(self, item: Any, ctx: Context) -> Any:
        step = ctx.sequence + 1
        testing.kernel(self.config.seconds, parts_of(item), [ctx.write("box")], lambda *_: step, name="fill")
        return item


class Looks(Stage[Any, Any]):
    """Copies the box: a tensor of what it saw."""

    class Config(Config, frozen=True, kw_only=True):
        seconds: float = 1.0

    reads = {"box": Box}  # noqa: RUF012

    def run(self, item: Any, ctx: Context) -> Any:
        out = testing.empty(4096)
        testing.kernel(self.config.seconds, [ctx.read("box")], [out], lambda value: value, name=ctx.stage)
        return out


class Guarded(Stage[Any, Any]):
    """Notes its section, from its begin to its end."""

    class Config(Config, frozen=True, kw_only=True):
        seconds: float = 1.0

    guarded = True

    def run(self, item: Any, ctx: Context) -> Any:
        testing.note("section", ctx.stage, item.seq)
        testing.work(self.config.seconds, lock=False)
        testing.note("section-end", ctx.stage, item.seq)
        return item.seq


USES: dict[str, Any] = {
    "numbers": Numbers, "lift": Lift, "work": Work, "many": Many, "batch": Batch, "box": Box,
    "writes": Writes, "looks": Looks, "guarded": Guarded,
}  # fmt: skip


def parts_of(item: Any) -> list[Any]:
    """The tensors of an item, in the order of its names."""
    if isinstance(item, dict):
        return [part for name in sorted(item) for part in parts_of(item[name])]
    if isinstance(item, (list, tuple)):
        return [part for each in item for part in parts_of(each)]
    return [item] if isinstance(item, testing.SimTensor) else []


def sink(seen: list[Any]) -> type[Stage[Any, None]]:
    """A host stage that keeps the values of what it gets."""

    class Sink(Stage[Any, None]):
        def run(self, item: Any) -> None:
            parts = [testing.read(part) for part in parts_of(item)]
            seen.append(item if not parts else parts[0] if len(parts) == 1 else tuple(parts))

    return Sink


def run(
    stages: Mapping[str, Any],
    uses: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    resources: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    **more: Any,
) -> testing.Simulated:
    """Simulate it, with kernels that take up to a fifth more or less. `settings`: what is under `run:`."""
    found = Registry()
    for name, cls in {**USES, **(uses or {})}.items():
        found.add(name, cls)
    file: dict[str, Any] = {"pipeflow": 1, "name": "t", "stages": dict(stages)}
    if resources:
        file["resources"] = dict(resources)
    if settings:
        file["run"] = dict(settings)
    return testing.simulate(file, registry=found, seed=seed, **{"jitter": 0.2, **more})


def fine(ran: testing.Simulated) -> testing.Simulated:
    """It went well: no error, no hazard, and no credit, lease, pin or place in a lane is left."""
    if ran.error is not None:
        raise ran.error
    assert not ran.hazards, ran.hazards[0]
    assert ran.pipeline is not None
    for runner in ran.pipeline.engine.nodes:
        assert runner.closed, runner
        assert (runner.pins, len(runner.hand)) == (0, 0), runner
        for edge in runner.outs:
            state = (edge.credits, edge.production, edge.gathered, edge.queued, edge.bytes_live)
            assert state == (0, 0, 0, 0, 0), (edge, state)
    return ran


def times(ran: testing.Simulated, kind: str, *names: Any) -> list[float]:
    """When the log has a line of this kind that begins with these names."""
    return [line[0] for line in ran.log if line[1] == kind and line[2 : 2 + len(names)] == names]


def each_turn(monkeypatch: pytest.MonkeyPatch, look: Callable[[Engine], None]) -> Counter[str]:
    """Call `look(engine)` after each turn of the engine; how often is counted under "turns"."""
    turned: Counter[str] = Counter()
    turn = Engine._turn

    def watched(self: Engine) -> None:
        turn(self)
        turned["turns"] += 1
        try:
            look(self)
        except AssertionError as error:
            self.fail(error)

    monkeypatch.setattr(Engine, "_turn", watched)
    return turned
