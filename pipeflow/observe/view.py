"""The live view on a terminal, or a line now and then where there is none. Both go to stderr."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

import anyio

from pipeflow.observe.progress import Progress, duration

if TYPE_CHECKING:
    from pipeflow.observe.progress import Standing
    from pipeflow.pipeline import Pipeline

__all__ = ["line_of", "show_progress"]


async def show_progress(pipeline: Pipeline, every: float, out: TextIO | None = None) -> None:
    """Show a pipeline until cancelled: a table on a terminal, else a line every `every` seconds.

    `out`: stderr. Where it cannot be written any more (a closed pipe) the view ends and the run goes on.
    """
    to = out or sys.stderr
    if to is None:  # a process without streams
        return
    with contextlib.suppress(OSError, ValueError):
        if not to.isatty() or os.environ.get("TERM") == "dumb" or os.environ.get("PIPEFLOW_NO_PROGRESS"):
            await _lines(pipeline, Progress(pipeline), every, to)
        else:
            await _live(pipeline, Progress(pipeline), to)


async def _lines(pipeline: Pipeline, progress: Progress, every: float, out: TextIO) -> None:
    while True:
        await anyio.sleep(every)
        print(line_of(progress.look()), file=out, flush=True)


async def _live(pipeline: Pipeline, progress: Progress, out: TextIO) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(file=out)
    with Live(console=console, refresh_per_second=4, transient=False) as live:
        try:
            while True:
                live.update(_shown(pipeline.name, progress.look(), console.width))
                await anyio.sleep(1.0)
        finally:
            live.update(_shown(pipeline.name, progress.look(), console.width))


def _figures(now: Standing) -> list[str]:
    steps = f"{now.step}/{now.steps}" if now.steps else str(now.step)
    found = [now.phase, f"step {steps}", f"{duration(now.elapsed)} gone", f"ETA {duration(now.eta)}"]
    if now.tokens_per_s is not None:
        found.append(f"{now.tokens_per_s:,.0f} tok/s")
    if now.loss is not None:
        found.append(f"loss {now.loss:.3f}")
    if now.tau is not None:
        found.append(f"tau {now.tau:.3f}")
    if now.bottleneck is not None:
        found.append(f"bottleneck {now.bottleneck}")
    return found


def line_of(now: Standing) -> str:
    """One line of text: figures, then the fill of each queue."""
    queues = " ".join(f"{row.name} {row.queued}/{row.room}" for row in now.rows if row.room)
    return "  ".join(_figures(now)) + f"  queues: {queues}"


def _filled(parts: list[str], width: int) -> list[str]:
    """Parts side by side, as many a line as fit: a figure never stands apart from its name."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += "  " + part
        else:
            lines.append(part)
    return lines


def _shown(name: str, now: Standing, width: int) -> Any:
    from rich.console import Group
    from rich.text import Text

    first, *others = _figures(now)
    figures = _filled([f"{name}: {first}", *others], width)
    return Group(*(Text(line, style="bold") for line in figures), _table(now))


def _table(now: Standing) -> Any:
    from rich.table import Table

    table = Table(expand=False)
    for column in ("stage", "made", "a second", "busy", "queue"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for row in now.rows:
        held = row.name == now.bottleneck
        fill = f"{'#' * round(8 * row.queued / row.room):<8} {row.queued}/{row.room}" if row.room else ""
        table.add_row(
            row.name + (" <- bottleneck" if held else ""),
            f"{row.made:,}",
            f"{row.rate:,.1f}",
            row.state or f"{row.busy:.0%}",
            fill,
            style="bold" if held else "",
        )
    return table
