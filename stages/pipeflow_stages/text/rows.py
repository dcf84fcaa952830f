"""Resource `text/rows`: rows of one split, tokenised at load, for evaluation."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import pipeflow
from msgspec import Meta
from pipeflow.errors import PipeflowError

from pipeflow_stages.hf.causal_lm import CausalLM
from pipeflow_stages.rows import Rows

if TYPE_CHECKING:
    from pathlib import Path

    from pipeflow import ResourceContext

    from pipeflow_stages.types import TokenRow

__all__ = ["TextRows"]


class TextRows(Rows):
    """Reads conversations, keeps those of the split, and tokenises them by the target's chat template.

    Opens to a list of `TokenRow`, at most `rows`, chosen by the run's seed. Over-long rows are left out.
    PipeflowError: a missing file, a malformed row (named by its line), or no row left.
    """

    class Config(pipeflow.Config, frozen=True, kw_only=True):
        path: pipeflow.InputPath
        split: Literal["all", "train", "held_out"] = "held_out"
        held_out: Annotated[float, Meta(ge=0, le=1)] = 0.1
        rows: Annotated[int, Meta(ge=1)] = 64
        max_length: Annotated[int, Meta(ge=2, description="tokens a row")] = 512

    reads: ClassVar = {"target": CausalLM}

    def open(self, ctx: ResourceContext) -> list[TokenRow]:
        from pathlib import Path

        from pipeflow_stages.text.chat import tokens_of
        from pipeflow_stages.types import TokenRow

        target, options = ctx.read("target"), self.config
        rows: list[TokenRow] = []
        for conversation in self._conversations(Path(options.path)):
            ids, mask = tokens_of(target, conversation)
            if len(ids) <= options.max_length and any(mask):
                rows.append(TokenRow(ids, mask, source=conversation.source, document=len(rows)))
        if not rows:
            raise PipeflowError(
                f"{options.path}: no row of the split {options.split!r} has an answer within {options.max_length} "
                "tokens. Check the file, `held_out` and `max_length`"
            )
        random.Random(ctx.seed).shuffle(rows)
        return rows[: options.rows]

    def _conversations(self, path: Path):  # noqa: ANN202
        from pipeflow_stages.data.jsonl import parse_row, split_of

        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise PipeflowError(f"{path}: cannot be read: {error.strerror}. Check `path`") from error
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            conversation = parse_row(line, f"{path.name}:{number}")
            if self.config.split == "all" or split_of(conversation.key, self.config.held_out) == self.config.split:
                yield conversation
