# ruff: noqa: TC001, TC003 - annotations are read at run time
"""Runs that are killed at one call of stage code after the other, and resumed until they end.

`Killer.tick` is called by every stage of the kit; at the call that it is set to, the run is cancelled,
wherever its items are. What the sinks keep outlives a run as files do: their state is how much of it there
was.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import flows

import pipeflow
from pipeflow import Pipeline
from pipeflow.context import Context
from pipeflow.item import DROP, Port, Scatter
from pipeflow.stage import Gather, Resource, Stage

Uses = dict[str, Any]


class Killer:
    """Counts the calls of stage code; at one of them the run is cancelled."""

    def __init__(self) -> None:
        self.calls = 0
        self.at: int | None = None
        self.kill: Callable[[], None] = lambda: None
        self._lock = threading.Lock()

    def tick(self) -> None:
        with self._lock:
            self.calls += 1
            due = self.calls == self.at
        if due:
            self.kill()


class Weights(Resource):
    """A list of one number: what all steps so far come to."""

    def open(self, ctx: Any) -> list[int]:
        return [1]

    def state(self, value: list[int]) -> dict[str, Any]:
        return {"value": value[0]}

    def load(self, value: list[int], state: dict[str, Any]) -> None:
        value[0] = state["value"]


class World:
    """Stages that share a killer, and what outlives a run."""

    def __init__(self) -> None:
        self.killer = Killer()
        self.ledgers: dict[str, list[Any]] = {}
        self.opened: list[int] = []
        self.weights: list[int] | None = None

    def keep_on_disk(self, path: Path) -> None:
        """The ledger `all` is a file, a line an entry: what a killed process leaves."""
        self.ledgers["all"] = _FileLedger(path)

    def uses(self) -> Uses:
        killer, world = self.killer, self

        class Records(Stage):
            """0, 1, 2 .. with a position."""

            class Config(pipeflow.Config):
                count: int = 20

            def setup(self, ctx: Context) -> None:
                self._next = 0

            def run(self) -> Iterator[int]:
                while self._next < self.config.count:
                    killer.tick()
                    self._next += 1
                    yield self._next - 1

            def state(self) -> dict[str, Any]:
                return {"next": self._next}

            def load(self, state: dict[str, Any]) -> None:
                self._next = state["next"]

        class Forgetful(Stage):
            """The same without one: a resumed run reads it from its start."""

            class Config(pipeflow.Config):
                count: int = 20

            def run(self) -> Iterator[int]:
                for number in range(self.config.count):
                    killer.tick()
                    yield number

        class Add(Stage):
            class Config(pipeflow.Config):
                n: int = 1000

            def run(self, item: Any) -> Any:
                killer.tick()
                return item + self.config.n if isinstance(item, int) else [*item, self.config.n]

        class AddAsync(Stage):
            async def run(self, item: Any) -> Any:
                killer.tick()
                return item

        class Odd(Stage):
            """Drops every third."""

            def run(self, item: int) -> Any:
                killer.tick()
                return DROP if item % 3 == 1 else item

        class Faulty(Stage):
            def run(self, item: int) -> Any:
                killer.tick()
                if item % 5 == 2:
                    raise ValueError(item)
                return item

        class Spread(Stage):
            """item % 4 outputs."""

            def run(self, item: int) -> Iterator[Any]:
                for part in range(item % 4):
                    killer.tick()
                    yield item * 10 + part

        class Gathered(Gather):
            """Two buckets, of three members each."""

            def bucket(self, item: int) -> int:
                return item % 2

            def full(self, members: Any) -> bool:
                return len(members) == 3

            def run(self, items: list[Any], ctx: Context) -> list[Any]:
                killer.tick()
                return [ctx.seed % 1000, *items]

        class Scattered(Gather):
            def full(self, members: Any) -> bool:
                return len(members) == 3

            def run(self, items: list[Any]) -> Scatter[Any]:
                killer.tick()
                return Scatter([DROP if item % 7 == 3 else item + sum(items) * 100 for item in items])

        class Running(Stage):
            """The sum of all items so far."""

            stateful = True

            def setup(self, ctx: Context) -> None:
                self._sum = 0

            def run(self, item: int) -> int:
                killer.tick()
                self._sum += item
                return self._sum

            def state(self) -> dict[str, Any]:
                return {"sum": self._sum}

            def load(self, state: dict[str, Any]) -> None:
                self._sum = state["sum"]

        class RunningForgetful(Stage):
            stateful = True

            def setup(self, ctx: Context) -> None:
                self._sum = 0

            def run(self, item: int) -> int:
                killer.tick()
                self._sum += item
                return self._sum

        class Both(Stage):
            def run(self, item: Any) -> Any:
                killer.tick()
                return [item["a"], item["b"]]

        class Route(Stage):
            ports = ("even", "odd")

            def run(self, item: int) -> Port[int]:
                killer.tick()
                return Port("odd" if item % 2 else "even", item)

        class Train(Stage):
            """Weights and a state of its own; what it makes tells of all that it has seen."""

            writes = {"weights": Weights}  # noqa: RUF012
            stateful = True

            def setup(self, ctx: Context) -> None:
                self._steps = 0

            def run(self, item: Any, ctx: Context) -> Any:
                killer.tick()
                weights = ctx.write("weights")
                for number in item if isinstance(item, list) else [item]:
                    for one in number if isinstance(number, list) else [number]:
                        weights[0] = (weights[0] * 31 + one + ctx.seed % 7) % 1_000_003
                self._steps += 1
                world.weights = list(weights)
                ctx.log(weights=weights[0])
                return weights[0] * 1000 + self._steps

            def state(self) -> dict[str, Any]:
                return {"steps": self._steps}

            def load(self, state: dict[str, Any]) -> None:
                self._steps = state["steps"]

        class Reader(Stage):
            """Behind the writer: sees the version of its item."""

            reads = {"weights": Weights}  # noqa: RUF012

            def run(self, item: Any, ctx: Context) -> Any:
                killer.tick()
                ctx.log(seen=ctx.read("weights")[0])
                return [item, ctx.read("weights")[0], ctx.version("weights").step]

        class Ledger(Stage):
            """A sink whose lines outlive the run; cut back to what the checkpoint knew."""

            class Config(pipeflow.Config):
                name: str = "all"

            stateful = True

            def setup(self, ctx: Context) -> None:
                self._lines = world.ledgers.setdefault(self.config.name, [])
                self._fresh = True

            def _begun(self) -> list[Any]:
                """A run that was not resumed begins with none."""
                if self._fresh:
                    self._lines.clear()
                    self._fresh = False
                return self._lines

            def run(self, item: Any) -> None:
                killer.tick()
                self._begun().append(item)

            def state(self) -> dict[str, Any]:
                return {"count": len(self._begun())}

            def load(self, state: dict[str, Any]) -> None:
                self._fresh = False
                del self._lines[state["count"] :]

        class Publish(Stage):
            guarded = True
            reads = {"weights": Weights}  # noqa: RUF012

            def run(self, item: Any, ctx: Context) -> Any:
                killer.tick()
                return [item.seq, item.reason, ctx.read("weights")[0]]

        return {
            "records": Records, "forgetful": Forgetful, "add": Add, "add_async": AddAsync, "odd": Odd,
            "faulty": Faulty, "spread": Spread, "gathered": Gathered, "scattered": Scattered,
            "running": Running, "running_forgetful": RunningForgetful, "both": Both, "route": Route,
            "train": Train, "reader": Reader, "ledger": Ledger, "publish": Publish,
        }  # fmt: skip

    def go(self, folder: Path, stages: Mapping[str, Any], act: Any = None, **more: Any) -> Any:
        """One run, up to its end or to the kill."""
        uses = self.uses()

        async def run(pipeline: Pipeline) -> Any:
            loop = pipeline._engine.loop
            self.killer.kill = lambda: loop.call_soon_threadsafe(pipeline.cancel)
            return await (act(pipeline) if act is not None else pipeline.run())

        more.setdefault("resources", {"weights": {"uses": "weights"}})
        return flows.go(folder, stages, {**uses, "weights": Weights}, run, **more)


class _FileLedger(list[Any]):
    """A list that is a file too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(
            json.loads(line) for line in (path.read_text().splitlines() if path.exists() else ())
        )

    def append(self, item: Any) -> None:
        super().append(item)
        with self._path.open("a") as file:
            file.write(json.dumps(item) + "\n")

    def clear(self) -> None:
        del self[:]

    def __delitem__(self, what: Any) -> None:
        super().__delitem__(what)
        self._path.write_text("".join(json.dumps(item) + "\n" for item in self))


def run_of(every: int = 3, **more: Any) -> dict[str, Any]:
    return {"checkpoint": {"of": "train", "every": every, **more}, "resume": "auto"}
