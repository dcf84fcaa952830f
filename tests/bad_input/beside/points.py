"""Stages and resources that stop at a known place until the test says go on. Stands beside the pipeline file.

`PIPEFLOW_TEST_POINTS` is the descriptor of a pipe to the test: the place writes its name when it is reached,
the test answers with the same name. Nothing here guesses how long something takes.
"""

from __future__ import annotations

import os
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import pipeflow
from pipeflow.item import Trigger
from pipeflow_stages.dflash.evaluate import Evaluate
from pipeflow_stages.dflash.train import Train
from pipeflow_stages.rows import Rows
from pipeflow_stages.types import Packed, TokenBatch, TokenRow

LIMIT = 60.0
"""Seconds after which the test is taken to be gone."""

_one_at_a_time = threading.Lock()
_left: set[str] = set()
"""Places that may be passed again without leave."""


def reached(name: str) -> Connection:
    """Say so; the leave to go on comes by what is returned."""
    pipe = Connection(os.dup(int(os.environ["PIPEFLOW_TEST_POINTS"])))
    pipe.send_bytes(name.encode())
    return pipe


def stand(name: str, *, busy: bool = False) -> None:
    """Say that the place is reached, and wait for leave to go on.

    `busy`: run Python code all the while, for a test of what that holds up.
    """
    with _one_at_a_time:
        if name in _left:
            return
        with reached(name) as pipe:
            limit = time.monotonic() + LIMIT
            while busy and not pipe.poll(0) and time.monotonic() < limit:
                pass  # the thing under test: bytecode after bytecode
            if not pipe.poll(0 if busy else LIMIT):
                raise TimeoutError(f"nobody let {name} go on")
            said = pipe.recv_bytes().decode()
        if said != name:
            raise ValueError(f"{name} was reached, but {said} may go on")
        _left.add(name)


class Gate(pipeflow.Resource):
    """Stands in the load."""

    def open(self, ctx: pipeflow.ResourceContext) -> str:
        stand("load")
        return "gate"


class AfterGate(pipeflow.Stage[Packed, Packed]):
    """Hands on what it gets; has its gate opened before."""

    reads: ClassVar = {"gate": Gate}

    def run(self, item: Packed) -> Packed:
        return item


class Hold(pipeflow.Stage[Packed, Packed]):
    """Hands on what it gets; stands at item `at`."""

    class Config(pipeflow.Config, frozen=True, kw_only=True):
        at: int | None = None

    def run(self, item: Packed, ctx: pipeflow.Context) -> Packed:
        if ctx.sequence == self.config.at:
            stand("run")
        return item


class Busy(pipeflow.Stage[Packed, Packed]):
    """Blocks the event loop at item `at`: in Python, or in one call into C."""

    class Config(pipeflow.Config, frozen=True, kw_only=True):
        at: int
        how: str = "python"

    inline: ClassVar = True

    def run(self, item: Packed, ctx: pipeflow.Context) -> Packed:
        if ctx.sequence == self.config.at:
            if self.config.how == "python":
                stand("busy", busy=True)
            else:
                os.mkfifo("never")
                with reached("busy"), open("never") as pipe:  # nobody opens the other end
                    pipe.read()
        return item


class Quiet(pipeflow.Stage[Trigger, Trigger]):
    """A guarded stage without work."""

    guarded: ClassVar = True

    def run(self, item: Trigger) -> Trigger:
        return item


class HoldQuiet(pipeflow.Stage[Trigger, Trigger]):
    """A guarded stage that stands: in a barrier's section."""

    guarded: ClassVar = True

    def run(self, item: Trigger) -> Trigger:
        stand("barrier")
        return item


class HoldEvaluate(Evaluate):
    """Stands in the first measurement after a step."""

    def run(self, item: object, ctx: pipeflow.Context) -> None:
        stand("evaluate")
        super().run(item, ctx)


class HoldSave(Train):
    """Stands in the middle of its save, with half of the weights written."""

    def finish(self, ctx: pipeflow.Context) -> None:
        import safetensors.torch as library

        real = library.save_file

        def slow(tensors: Any, path: Any, **options: Any) -> None:
            Path(path).write_bytes(b"half")
            stand("save")
            real(tensors, path, **options)

        library.save_file = slow
        try:
            super().finish(ctx)
        finally:
            library.save_file = real


@pipeflow.stage
def passing(item: Packed) -> Packed:
    """Nothing stands in its way."""
    return item


class Nothing(Rows):
    """Rows of no use."""

    def open(self, ctx: pipeflow.ResourceContext) -> list[TokenRow]:
        return []


class Count(pipeflow.Stage[TokenBatch, None]):
    """Reports how many rows it has seen."""

    reads: ClassVar = {"rows": Rows}
    stateful: ClassVar = True
    seen = 0

    def run(self, item: TokenBatch, ctx: pipeflow.Context) -> None:
        self.seen += len(item.lengths)
        ctx.report(rows_seen=self.seen)
