"""The drafter's loss: cross-entropy of each slot with the token at its own position, decaying by slot.

Slot k of a block at anchor a predicts the token at a + k (no shift); slot 0 holds that token already and
never counts. Source: DFlash paper, equation 4 and appendix A.1.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeflow_stages.dflash.mask import slot_positions

__all__ = [
    "DrafterLoss",
    "SlotScores",
    "accepted_runs",
    "default_gamma",
    "drafter_loss",
    "labels",
    "loss_weights",
    "score",
    "slot_weights",
]


class DrafterLoss(NamedTuple):
    """`loss`, a float32 scalar; `correct` and `counts`, float32 [B - 1]: judged slots 1..B-1, and hits."""

    loss: Tensor
    correct: Tensor
    counts: Tensor


class SlotScores(NamedTuple):
    """`loss`, a float32 scalar; `hits` bool [b, N, B - 1]: where the argmax of slots 1..B-1 is the label."""

    loss: Tensor
    hits: Tensor


def default_gamma(block_size: int) -> float:
    """The paper's decay: 4 for B = 8, 5 for 10, 7 for 16; straight lines between; B / 2 below 8; from 16
    on the last line goes on (a third a slot)."""
    if block_size <= 8:
        return block_size / 2
    if block_size <= 10:
        return 4 + (block_size - 8) / 2
    return 5 + (block_size - 10) / 3


def slot_weights(block_size: int, gamma: float | None = None) -> list[float]:
    """w_k = exp(-(k - 1) / gamma) for slots k = 1..B-1; 0 for slot 0. Gamma None: `default_gamma`.

    Raises ValueError unless gamma is above 0.
    """
    decay = _gamma(block_size, gamma)
    return [0.0] + [math.exp(-(k - 1) / decay) for k in range(1, block_size)]


def labels(input_ids: Tensor, anchors: Tensor, block_size: int) -> Tensor:
    """The token at a + k: int64 [b, N, B] of input_ids [b, S]. Past the end it repeats the last token,
    where `loss_weights` is 0."""
    rows, blocks = anchors.shape
    positions = slot_positions(anchors, block_size).clamp(max=input_ids.shape[1] - 1)
    return input_ids.gather(1, positions.view(rows, -1)).view(rows, blocks, block_size)


def loss_weights(
    anchors: Tensor, keep: Tensor, loss_mask: Tensor, block_size: int, gamma: float | None = None
) -> Tensor:
    """w_k where slot k counts, else 0: float32 [b, N, B].

    It counts when its block is live (keep bool [b, N]), a + k < S, loss_mask [b, S] is set there, k > 0.
    """
    rows, blocks = anchors.shape
    length = loss_mask.shape[1]
    positions = slot_positions(anchors, block_size)
    inside = positions < length
    supervised = loss_mask.bool().gather(1, positions.clamp(max=length - 1).view(rows, -1))
    counted = keep[..., None] & inside & supervised.view(rows, blocks, block_size)
    # Not a tensor made from `slot_weights`: copying a list to a GPU would make the host wait.
    slot = torch.arange(block_size, device=anchors.device, dtype=torch.float32)
    decay = torch.exp((1 - slot) / _gamma(block_size, gamma))
    return counted * torch.where(slot > 0, decay, 0.0)


def drafter_loss(
    hidden: Tensor, head_weight: Tensor, labels: Tensor, weights: Tensor, chunk: int | None = None
) -> DrafterLoss:
    """sum(w * CE) / sum(w) over counted slots, with hits and counts a slot. Arguments as for `score`."""
    result = score(hidden, head_weight, labels, weights, chunk)
    counted = weights[..., 1:] > 0
    hits = (result.hits & counted).sum(dim=(0, 1), dtype=torch.float32)
    return DrafterLoss(result.loss, hits, counted.sum(dim=(0, 1), dtype=torch.float32))


def score(
    hidden: Tensor, head_weight: Tensor, labels: Tensor, weights: Tensor, chunk: int | None = None
) -> SlotScores:
    """Weighted mean cross-entropy, and where the argmax is right.

    hidden [b, N*B, H] or [b, N, B, H]; head_weight [V, H], frozen; labels int64 and weights float32
    [b, N, B]. Logits are built for `chunk` blocks at a time (None: all at once) and never kept: the
    gradient is made beside them, so memory does not grow with N * V. Cross-entropy is float32; under
    autocast the two matrix products run in its type (a head already in that type spares its conversion).
    With no counted slot the loss is exactly 0, and every parameter behind `hidden` gets a zero gradient.
    Raises ValueError when head_weight asks for a gradient, or when chunk is below 1.
    """
    if head_weight.requires_grad:
        raise ValueError("the LM head must be frozen: call head_weight.requires_grad_(False), or detach it")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk, in blocks, must be at least 1, got {chunk}")
    rows, blocks, block_size = labels.shape
    # Slot 0 never counts: left out by shape, which saves one B-th of the LM head.
    states = hidden.view(rows * blocks, block_size, -1)[:, 1:]
    device = hidden.device.type
    kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head_weight.dtype
    loss, hits = _LinearCrossEntropy.apply(
        states, head_weight.to(kind), labels.reshape(-1, block_size)[:, 1:],
        weights.reshape(-1, block_size)[:, 1:].float(), chunk,
    )  # fmt: skip
    return SlotScores(loss, hits.view(rows, blocks, block_size - 1))


def accepted_runs(hits: Tensor, weights: Tensor) -> Tensor:
    """Tokens a verification would accept, bonus included: int64 [b, N], 0 for dead blocks.

    1 + the length of the leading run of slots that are right and counted. hits bool [b, N, B - 1] from
    `score`, weights [b, N, B]. A live block is one whose first draft counts, as every valid anchor's does.
    """
    counted = weights[..., 1:] > 0
    run = (hits & counted).to(torch.int64).cumprod(dim=-1).sum(dim=-1)
    return torch.where(counted[..., 0], 1 + run, 0)


def _gamma(block_size: int, gamma: float | None) -> float:
    decay = default_gamma(block_size) if gamma is None else gamma
    if not decay > 0:
        raise ValueError(f"gamma, the decay of slot weights, must be above 0, got {decay}")
    return decay


class _LinearCrossEntropy(torch.autograd.Function):
    """LM head and weighted cross-entropy in one, so that a chunk's logits live only inside its turn.

    states [n, s, H], head [V, H], labels [n, s], weights [n, s]. The head is frozen, so the only gradient
    is d loss / d states = w (softmax - onehot) head / sum(w): linear in what comes from above, hence made
    in the forward pass from the logits at hand. That spares the recomputation of logits.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, head: Tensor, labels: Tensor, weights: Tensor, chunk: int | None
    ) -> tuple[Tensor, Tensor]:
        total = weights.sum()
        scale = weights / torch.where(total > 0, total, 1.0)
        wanted = ctx.needs_input_grad[0]
        gradient = torch.empty_like(states, memory_format=torch.contiguous_format) if wanted else None
        hits = torch.empty(labels.shape, dtype=torch.bool, device=labels.device)
        loss = torch.zeros((), dtype=torch.float32, device=states.device)
        step = chunk or max(1, len(states))
        with torch.autocast(states.device.type, enabled=False):
            for start in range(0, len(states), step):
                part = slice(start, start + step)
                logits = (states[part].to(head.dtype) @ head.T).float()
                label = labels[part][..., None]
                best = logits.argmax(dim=-1, keepdim=True)
                hits[part] = best.eq(label)[..., 0]
                picked = logits.gather(-1, label)
                top = logits.gather(-1, best)
                probability = torch.softmax(logits, dim=-1)
                # The log of the sum of exponentials, from the largest probability: never below 1 / V.
                total_log = top - probability.gather(-1, best).log()
                loss += ((total_log - picked)[..., 0] * scale[part]).sum()
                if gradient is not None:
                    probability.scatter_add_(-1, label, torch.full_like(picked, -1.0))
                    gradient[part] = (probability.to(head.dtype) @ head) * scale[part][..., None]
        ctx.mark_non_differentiable(hits)
        ctx.save_for_backward(gradient)
        return loss, hits

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0].to(gradient.dtype), None, None, None, None
