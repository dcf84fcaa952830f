"""Stage `text/batch`: rows of similar length become one right-padded batch."""

from __future__ import annotations

from collections.abc import Sequence  # noqa: TC003  (the engine resolves the hints of run)
from typing import Annotated

from msgspec import Meta

from pipeflow.config import Config as Options
from pipeflow.errors import PipeflowError
from pipeflow.stage import Gather
from pipeflow_stages.types import TokenBatch, TokenRow

__all__ = ["Batches"]


class Batches(Gather[TokenRow, TokenBatch]):
    """Rows are padded to the next multiple of `bucket`, so few shapes occur; rows of one padded length go
    together until another would exceed `tokens`. A row longer than `max_length` is an error naming it.
    """

    class Config(Options, frozen=True):
        tokens: Annotated[int, Meta(ge=1)] = 4096
        """Positions a batch, padding included: rows times padded length. One row may exceed it."""
        max_length: Annotated[int, Meta(ge=2)] = 1024
        bucket: Annotated[int, Meta(ge=1)] = 64
        pad_id: Annotated[int, Meta(ge=0)] = 0
        """Written into padding. Masks hide it, so any valid id does; 0 always is one."""

    def bucket(self, item: TokenRow) -> int:
        """The row's padded length: the multiple of `bucket` at or above it, at most `max_length`."""
        length = len(item.input_ids)
        if length > self.config.max_length:
            return length  # `run` refuses it: an error there is the item's, under its `on_error`
        step = self.config.bucket
        return min(-(-length // step) * step, self.config.max_length)

    def full(self, members: Sequence[TokenRow]) -> bool:
        length = self.bucket(members[-1])
        return length > self.config.max_length or (len(members) + 1) * length > self.config.tokens

    def run(self, items: Sequence[TokenRow]) -> TokenBatch:
        import torch

        self._check(items)
        width = self.bucket(items[-1])
        lengths = [len(row.input_ids) for row in items]
        ids = torch.full((len(items), width), self.config.pad_id, dtype=torch.int64)
        mask = torch.zeros((len(items), width), dtype=torch.bool)
        for place, row in enumerate(items):
            ids[place, : lengths[place]] = torch.tensor(row.input_ids, dtype=torch.int64)
            mask[place, : lengths[place]] = torch.tensor(row.loss_mask, dtype=torch.bool)
        return TokenBatch(
            input_ids=ids,
            loss_mask=mask,
            lengths=lengths,
            documents=[row.document for row in items],
            supervised=[list(row.loss_mask) for row in items],
            tokens=sum(lengths),
        )

    def _check(self, items: Sequence[TokenRow]) -> None:
        for row in items:
            length, name = len(row.input_ids), row.source or f"document {row.document}"
            if length > self.config.max_length:
                raise PipeflowError(
                    f"{name}: {length} tokens, more than max_length {self.config.max_length}. "
                    "Raise max_length here, or lower it in text/chat"
                )
            if length == 0 or len(row.loss_mask) != length:
                raise PipeflowError(f"{name}: {length} tokens but a loss mask of {len(row.loss_mask)}")
