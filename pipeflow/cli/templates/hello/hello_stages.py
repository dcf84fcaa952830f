"""The stages of hello.yaml: three functions. Options are their keyword-only parameters."""

from collections.abc import Iterator

import pipeflow


@pipeflow.stage
def numbers(*, count: int = 10) -> Iterator[int]:
    """A source: yields numbers from 0."""
    yield from range(count)


@pipeflow.stage
def square(item: int, *, power: int = 2) -> int:
    """One result for each item."""
    return item**power


@pipeflow.stage
def show(item: int, ctx: pipeflow.Context) -> None:
    """A sink: the values go to metrics.jsonl in the run folder."""
    ctx.log(value=item)
