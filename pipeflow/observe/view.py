"""The live view on a terminal, or a line now and then where there is none. Both go to stderr."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

import anyio

from pipeflow.observe.progress import Progress, duration

if TYPE_CHECKING:
    from pipeflow.observe.progress import Standing
    from pipeflow.pipeline import Pipeline

__all__ = ["line_of", "show_progress"]


async def show_progress(pipeline: Pipeline, every: float, out: TextIO = sys.stderr) -> None:
    """Show a pipeline until cancelled: a table on a terminal, else a line every `every` seconds."""
    progress = Progress(pipeline)
    if not out.isatty() or os.environ.get("TERM") == "dumb" or os.environ.get("PIPEFLOW_NO_PROGRESS"):
        while True:
            await anyio.sleep(every)
            print(line_of(progress.look()), file=out, flush=True)
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(file=out), refresh_per_second=4, transient=False) as live:
        try:
            while True:
                live.update(_table(pipeline.name, progress.look()))
                await anyio.sleep(1.0)
        finally:
            live.update(_table(pipeline.name, progress.look()))


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


def _table(name: str, now: Standing) -> Any:
    from rich.table import Table

    table = Table(title=f"{name}: " + "  ".join(_figures(now)), title_justify="left", expand=False)
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
