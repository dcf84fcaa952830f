"""Resource `text/rows`: rows of one split, tokenised at load, for evaluation."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from msgspec import Meta

import pipeflow
from pipeflow.errors import PipeflowError
from pipeflow_stages.hf.causal_lm import CausalLM
from pipeflow_stages.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pipeflow import ResourceContext
    from pipeflow_stages.types import Conversation, TokenRow

__all__ = ["TextRows"]


class TextRows(Rows):
    """Reads conversations, keeps those of the split, and tokenises them by the target's chat template.

    Opens to a list of `TokenRow`, at most `rows`, chosen by the run's seed. Over-long rows are left out.
    PipeflowError: a missing file, a malformed row (named by its line) beyond the `skip` allowed, or no row
    left. A malformed row belongs to no split that is known, so it counts in each.
    """

    class Config(pipeflow.Config, frozen=True, kw_only=True):
        path: pipeflow.InputPath
        split: Literal["all", "train", "held_out"] = "held_out"
        held_out: Annotated[float, Meta(ge=0, le=1)] = 0.1
        rows: Annotated[int, Meta(ge=1)] = 64
        max_length: Annotated[int, Meta(ge=2, description="tokens a row")] = 512
        skip: Annotated[int, Meta(ge=0, description="malformed rows passed over; each is logged")] = 0

    reads: ClassVar = {"target": CausalLM}

    def open(self, ctx: ResourceContext) -> list[TokenRow]:
        from pathlib import Path

        from pipeflow_stages.text.chat import tokens_of
        from pipeflow_stages.types import TokenRow

        target, options = ctx.read("target"), self.config
        rows: list[TokenRow] = []
        for conversation in self._conversations(Path(options.path), ctx):
            if ctx.stopping:  # nothing will be measured on them
                return rows
            try:
                ids, mask = tokens_of(target, conversation)
            except PipeflowError as error:
                raise PipeflowError(f"{conversation.source}: {error}") from error
            if len(ids) <= options.max_length and any(mask):
                rows.append(TokenRow(ids, mask, source=conversation.source, document=len(rows)))
        if not rows:
            raise PipeflowError(
                f"{options.path}: no row of the split {options.split!r} has an answer within "
                f"{options.max_length} tokens. Check the file, `held_out` and `max_length`"
            )
        random.Random(ctx.seed).shuffle(rows)
        return rows[: options.rows]

    def _conversations(self, path: Path, ctx: ResourceContext) -> Iterator[Conversation]:
        from pipeflow_stages.data.jsonl import parse_row, split_of

        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise PipeflowError(f"{path}: cannot be read: {error.strerror}. Check `path`") from error
        left = self.config.skip
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                conversation = parse_row(line, f"{path}:{number}")
            except PipeflowError as error:
                if not left:
                    raise
                left -= 1
                ctx.log(skipped=1, source=f"{path}:{number}", error=str(error))
                continue
            if (
                self.config.split == "all"
                or split_of(conversation.key, self.config.held_out) == self.config.split
            ):
                yield conversation
