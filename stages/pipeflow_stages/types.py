"""What the library's stages hand to each other. Shapes: b rows, S positions, K taps, H hidden size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Conversation", "Features", "Message", "Packed", "PromptBatch", "Step", "TokenBatch", "TokenRow"]


class Message(msgspec.Struct, frozen=True):
    """One turn. `role` is system, user or assistant."""

    role: str
    content: str


class Conversation(msgspec.Struct, frozen=True):
    """One record of text: `messages`, or plain `text`, of which every token is then supervised.

    `source` is `file:line` for messages about it; `key` is the text its hash split is taken from.
    """

    messages: tuple[Message, ...] = ()
    text: str = ""
    source: str = ""
    key: str = ""
    kind: str = ""
    cut: bool = False  # the last answer ended at a token limit, not by its end of turn


class PromptBatch(msgspec.Struct, frozen=True):
    """Conversations of similar length whose user turns are answered together."""

    conversations: tuple[Conversation, ...]


class TokenRow(msgspec.Struct, frozen=True):
    """A tokenised record on the host. `loss_mask[t]` is 1 where token t is supervised."""

    input_ids: list[int]
    loss_mask: list[int]
    source: str = ""
    document: int = 0  # its number in the stream: seeds of its anchors


class TokenBatch(msgspec.Struct, frozen=True):
    """Right-padded rows.

    input_ids int64 [b, S]; loss_mask bool [b, S], False on padding; `lengths` and `documents` are host
    lists of b; `supervised` is the loss mask on the host, one list a row, so that anchors are chosen and
    counted without asking a device. `tokens` counts what is not padding.
    """

    input_ids: Tensor
    loss_mask: Tensor
    lengths: list[int]
    documents: list[int]
    supervised: list[list[int]]
    tokens: int


class Features(msgspec.Struct, frozen=True):
    """A batch with what the frozen target computed for it.

    features [b, S, K*H]: outputs of the tapped layers, concatenated in tap order;
    features[:, t], input_ids[:, t] and loss_mask[:, t] describe the same position t (no shift).
    """

    batch: TokenBatch
    features: Tensor


class Packed(msgspec.Struct, frozen=True):
    """Everything one drafter step needs. N anchors a row, B slots a block.

    anchors int64 [b, N], ascending, dead slots at the end; keep bool [b, N]; block_ids int64 [b, N, B]:
    the anchor's token, then masks;
    labels int64 [b, N, B]: token a+k; weights float32 [b, N, B]: m * w of the loss, 0 where not counted;
    context_lengths int64 [b]; anchor_count and mask_token_id (of block_ids) are host integers.
    """

    features: Tensor
    anchors: Tensor
    keep: Tensor
    block_ids: Tensor
    labels: Tensor
    weights: Tensor
    context_lengths: Tensor
    tokens: int
    anchor_count: int
    mask_token_id: int


class Step(msgspec.Struct, frozen=True):
    """What a training step hands on: its number (from 1) and its loss, a float32 scalar tensor."""

    step: int
    loss: Tensor
    tokens: int
