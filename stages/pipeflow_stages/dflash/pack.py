"""From features to one drafter step: anchors, block ids, labels and weights, without asking the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

import pipeflow
from pipeflow_stages.types import Features, Packed

if TYPE_CHECKING:
    from pipeflow import Context

__all__ = ["Pack"]


class Pack(pipeflow.Stage[Features, Packed]):
    """Chooses anchors from the host's loss masks and lays out their blocks, vectorised on the device.

    A document's anchors depend on the seed and its number alone, never on the batch around it; a document
    that comes again has a new number, so it gets fresh anchors.
    """

    class Config(pipeflow.Config, frozen=True, kw_only=True):
        block_size: Annotated[int, msgspec.Meta(ge=2, description="slots a block, the anchor included")]
        mask_token_id: Annotated[int, msgspec.Meta(ge=0, description="a reserved id, in no data")]
        anchors: Annotated[int, msgspec.Meta(ge=1, description="blocks a row, at most")] = 512
        gamma: Annotated[float | None, msgspec.Meta(description="decay of slot weights; by block size")] = (
            None
        )
        fixed_width: Annotated[bool, msgspec.Meta(description="always `anchors` slots: static shapes")] = (
            False
        )

    device: ClassVar = True

    def run(self, item: Features, ctx: Context) -> Packed:
        import torch

        from pipeflow_stages.dflash.anchors import anchors_of_batch
        from pipeflow_stages.dflash.loss import labels, loss_weights
        from pipeflow_stages.dflash.mask import block_ids

        config, batch = self.config, item.batch
        chosen = anchors_of_batch(
            batch.supervised, batch.documents, config.anchors, ctx.stage_seed, fixed_width=config.fixed_width
        )
        device = item.features.device
        pin = device.type == "cuda"

        def put(values: list, dtype: torch.dtype) -> torch.Tensor:
            # From pinned memory, so that the copy is enqueued like everything else.
            return torch.tensor(values, dtype=dtype, pin_memory=pin).to(device, non_blocking=True)

        anchors = put(chosen.anchors, torch.int64)
        keep = put(chosen.keep, torch.bool)
        return Packed(
            features=item.features,
            anchors=anchors,
            keep=keep,
            block_ids=block_ids(batch.input_ids, anchors, config.block_size, config.mask_token_id),
            labels=labels(batch.input_ids, anchors, config.block_size),
            weights=loss_weights(anchors, keep, batch.loss_mask, config.block_size, config.gamma),
            context_lengths=put(batch.lengths, torch.int64),
            tokens=batch.tokens,
            anchor_count=chosen.total,
            mask_token_id=config.mask_token_id,
        )
