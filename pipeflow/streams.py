"""Host streams around a pipeline. The only module that imports aiostream (GPL-3.0-or-later), and only when
it is used: the engine runs without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator

    from pipeflow.pipeline import Pipeline

__all__ = ["submit_all"]


async def submit_all(pipeline: Pipeline, source: AsyncIterable[Any], in_flight: int) -> AsyncIterator[Any]:
    """Results of everything in `source`, in order, with `in_flight` items in the pipeline at a time."""
    from aiostream import stream

    # aiostream runs a limit of 1 in this task; with more, one task an item, which `submit` is made for.
    results = stream.map(source, pipeline.submit, ordered=True, task_limit=in_flight)  # pyright: ignore
    async with results.stream() as streamer:
        async for result in streamer:
            yield result
