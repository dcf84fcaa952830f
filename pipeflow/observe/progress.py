"""How a run stands: counts, rates, queue fill, the newest metrics, and the stage that holds it up."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pipeflow.pipeline import Pipeline
    from pipeflow.runner import Runner

__all__ = ["Progress", "Row", "Standing", "duration"]


class Row(NamedTuple):
    """One stage. `busy` is the share of its lanes' time with a job in hand; `queued` of `room` items wait."""

    name: str
    made: int
    rate: float
    busy: float
    queued: int
    room: int
    state: str


class Standing(NamedTuple):
    """A moment of a run. What is not known is None."""

    elapsed: float
    step: int
    steps: int | None
    eta: float | None
    tokens_per_s: float | None
    loss: float | None
    tau: float | None
    bottleneck: str | None
    rows: list[Row]
    phase: str


class Progress:
    """Watches a pipeline from the loop; `look` compares with the look before."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._begun = time.monotonic()
        self._first_step: float | None = None
        self._last: dict[str, tuple[int, float]] = {}
        self._last_time = self._begun
        self._tokens = 0
        self._tokens_before = 0
        self._loss: float | None = None
        self._tau: float | None = None
        pipeline.on_metric(self._hear)

    def _hear(self, line: dict[str, Any]) -> None:
        if isinstance(line.get("loss"), float):
            self._loss = line["loss"]
            self._tokens += line.get("tokens") or 0
            self._first_step = self._first_step or time.monotonic()
        if isinstance(line.get("tau"), float):
            self._tau = line["tau"]

    def look(self) -> Standing:
        now = time.monotonic()
        passed = max(1e-6, now - self._last_time)
        runners = self._pipeline.runners()
        rows = [self._row(runner, passed) for runner in runners]
        self._last = {runner.name: (runner.counters.made, runner.counters.latency) for runner in runners}
        rate = (self._tokens - self._tokens_before) / passed
        self._tokens_before = self._tokens
        self._last_time = now
        step, steps = self._pipeline.steps()
        working = [row for row in rows if row.busy > 0.05]
        return Standing(
            elapsed=now - self._begun,
            step=step,
            steps=steps,
            eta=self._eta(step, steps, now),
            tokens_per_s=rate if self._tokens else None,
            loss=self._loss,
            tau=self._tau,
            bottleneck=max(working, key=lambda row: row.busy).name if working else None,
            rows=rows,
            phase=self._pipeline.phase,
        )

    def _row(self, runner: Runner, passed: float) -> Row:
        made, latency = self._last.get(runner.name, (0, 0.0))
        slots = sum(lane.in_flight for lane in runner.lanes) or 1
        edges = runner.inputs.edges if runner.inputs is not None else []
        return Row(
            name=runner.name,
            made=runner.counters.made or runner.counters.done,
            rate=(runner.counters.made - made) / passed,
            busy=min(1.0, (runner.counters.latency - latency) / passed / slots),
            queued=sum(edge.queued for edge in edges),
            room=sum(edge.items_limit for edge in edges),
            state="ended" if runner.closed else "",
        )

    def _eta(self, step: int, steps: int | None, now: float) -> float | None:
        if not steps or step < 1 or self._first_step is None:
            return None
        return (now - self._first_step) / step * (steps - step)


def duration(seconds: float | None) -> str:
    """`1:05`, `2:03:04`; a dash where it is not known."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
