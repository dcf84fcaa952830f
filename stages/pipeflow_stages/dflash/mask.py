"""The geometry of a training step: what each block slot reads, where it stands, and what it may see."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["block_ids", "dense_mask", "slot_positions"]


def slot_positions(anchors: Tensor, block_size: int) -> Tensor:
    """Positions of the slots of blocks at `anchors` int64 [b, N]: a + k, int64 [b, N, B].

    The last blocks of a row may run past its end; such slots are never judged.
    """
    return anchors[..., None] + torch.arange(block_size, device=anchors.device)


def block_ids(input_ids: Tensor, anchors: Tensor, block_size: int, mask_token_id: int) -> Tensor:
    """Input tokens of the blocks, int64 [b, N, B]: slot 0 the anchor's token, then mask tokens.

    `input_ids` is int64 [b, S], `anchors` int64 [b, N] with values in 0..S-1.
    """
    rows, blocks = anchors.shape
    ids = input_ids.new_full((rows, blocks, block_size), mask_token_id)
    ids[..., 0] = input_ids.gather(1, anchors)
    return ids


def dense_mask(
    anchors: Tensor,
    keep: Tensor,
    context_lengths: Tensor,
    positions: int,
    block_size: int,
    window: int | None = None,
) -> Tensor:
    """Who may see whom: bool [b, 1, N*B, S + N*B], True where the query (row) sees the key (column).

    Keys are S context positions, then the N*B block slots. A slot of block j at anchor a sees
    - context p < a, strictly: when the block is drafted the anchor's token is known, but the target has
      not computed its feature yet;
    - the slots of its own block;
    - in a dead block (keep False) nothing but its own block, so that no softmax row is empty.
    With `window` W the layer is a sliding one: slot k sees only p > a + k - W, and in its block only
    slots <= k.

    anchors int64 [b, N], keep bool [b, N], context_lengths int64 [b], positions S. Vectorised; nothing
    is read on the host.
    """
    rows, blocks = anchors.shape
    slots = blocks * block_size
    device = anchors.device
    p = torch.arange(positions, device=device)
    reach = torch.minimum(anchors, context_lengths[:, None])
    context = (p < reach[..., None]) & keep[..., None]
    context = context[:, :, None, :].expand(rows, blocks, block_size, positions)
    slot = torch.arange(slots, device=device)
    block = slot[:, None] // block_size == slot // block_size
    if window is not None:
        context = context & (p > slot_positions(anchors, block_size)[..., None] - window)
        block = block & (slot <= slot[:, None])
    context = context.reshape(rows, slots, positions)
    return torch.cat([context, block.expand(rows, slots, slots)], dim=-1)[:, None]
