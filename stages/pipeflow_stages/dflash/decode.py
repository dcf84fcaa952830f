"""How well a drafter drafts: the true draft-and-verify loop, and its teacher-forced twin.

tau is counted once and the same everywhere: tokens accepted (the bonus token included) divided by
verifications, as sums that pool exactly. Greedy, one sequence at a time. Source: DFlash paper, 4.1.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeflow_stages.dflash.anchors import valid_anchors
from pipeflow_stages.dflash.loss import accepted_runs, labels, loss_weights, score
from pipeflow_stages.dflash.mask import block_ids, dense_mask, slot_positions
from pipeflow_stages.dflash.taps import Tapper

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pipeflow_stages.dflash.model import ContextKV, Drafter

__all__ = [
    "TIE",
    "Acceptance",
    "ConstantDraft",
    "Generation",
    "accepted_at",
    "compare",
    "constant_tau",
    "plain_greedy",
    "speculative_greedy",
    "teacher_forced",
]

TIE = 1e-4
"""Top two logits closer than this are a tie: one token or B at once may round to either."""


@dataclass
class Generation:
    """New tokens of one sequence, cut after the first stop token.

    `accepted` has n + 1 for each verification (empty for plain decoding; the last one is n + 1 even where
    the text was cut inside it). `ties` are indices into `tokens` whose top two logits lay within `TIE`.
    """

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    ties: list[int] = field(default_factory=list)

    def _add(self, tokens: list[int], gaps: list[float]) -> None:
        self.ties += [len(self.tokens) + i for i, gap in enumerate(gaps) if gap <= TIE]
        self.tokens += tokens

    def _cut(self, most: int, stop_ids: Collection[int]) -> Generation:
        stop = next((i for i, token in enumerate(self.tokens) if token in stop_ids), most)
        self.tokens = self.tokens[: min(most, stop + 1)]
        self.ties = [i for i in self.ties if i < len(self.tokens)]
        return self

    def _ended(self, most: int, stop_ids: Collection[int]) -> bool:
        return len(self.tokens) >= most or any(token in stop_ids for token in self.tokens)


def compare(plain: Generation, speculative: Generation) -> Literal["equal", "tie", "different"]:
    """Whether speculative decoding kept its promise: the same tokens as plain decoding.

    "tie": the first difference stands where the target's top two logits lay within `TIE` (what follows
    then differs by right). "different" is a fault.
    """
    if plain.tokens == speculative.tokens:
        return "equal"
    pairs = zip(plain.tokens, speculative.tokens, strict=False)
    shorter = min(len(plain.tokens), len(speculative.tokens))
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    return "tie" if first in plain.ties or first in speculative.ties else "different"


@torch.no_grad()
def plain_greedy(
    target: Any,
    prompt_ids: Sequence[int],
    max_new: int,
    stop_ids: Collection[int] = (),
    tapper: Tapper | None = None,
) -> Generation:
    """Greedy decoding of a causal LM with a key-value cache, a token a forward.

    Pass the tapper that `speculative_greedy` uses for a fair race.
    Raises ValueError for an empty prompt.
    """
    cache = _new_cache(target, prompt_ids)
    out = Generation()
    ids = _row(prompt_ids, target.device)
    forward = tapper.forward if tapper is not None else Tapper(target, [0]).forward
    while not out._ended(max_new, stop_ids):
        logits, _ = forward(ids, cache)
        out._add(*_greedy(logits[0, -1:]))
        ids = _row(out.tokens[-1:], target.device)
    return out._cut(max_new, stop_ids)


@torch.no_grad()
def speculative_greedy(
    target: Any,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    max_new: int,
    stop_ids: Collection[int] = (),
    block_size: int | None = None,
    tapper: Tapper | None = None,
) -> Generation:
    """Draft B - 1 tokens at a time, verify them in one target forward, keep the leading right ones.

    In float32 the tokens are those of `plain_greedy`, ties apart (see `compare`). The drafter's cache
    holds context only, never a block's keys. `block_size` defaults to the drafter's; smaller is fine,
    larger was never trained. Raises ValueError for an empty prompt, a block below 2, or a target with
    layers whose cache cannot be cut back.
    """
    config = drafter.config
    size = config.block_size if block_size is None else block_size
    if size < 2:
        raise ValueError(f"block_size must be at least 2 (an anchor and a draft), got {size}")
    cache = _new_cache(target, prompt_ids)
    tapper = tapper if tapper is not None else Tapper(target, config.tap_layer_ids)
    out = Generation()
    start = len(prompt_ids)  # position of the newest known token; both caches cover what is before it
    logits, features = tapper.forward(_row(prompt_ids, target.device), cache)
    out._add(*_greedy(logits[0, -1:]))
    context: ContextKV | None = None
    while not out._ended(max_new, stop_ids):
        context = _append(drafter, context, features, start)
        block = [out.tokens[-1], *_draft(target, drafter, out.tokens[-1], start, context, size)]
        logits, features = tapper.forward(_row(block, target.device), cache)
        chosen, gaps = _greedy(logits[0])
        pairs = zip(block[1:], chosen, strict=False)
        right = next((i for i, (draft, token) in enumerate(pairs) if draft != token), size - 1)
        out._add(chosen[: right + 1], gaps[: right + 1])
        out.accepted.append(right + 1)
        start += right + 1
        features = features[:, : right + 1]
        _drop_last(cache, size - right - 1)
    return out._cut(max_new, stop_ids)


class Acceptance(NamedTuple):
    """Sums on the device: tokens accepted (bonus included), blocks, both int64 scalars, and `histogram`
    int64 [B + 1]: blocks by tokens accepted. tau = accepted / blocks."""

    accepted: Tensor
    blocks: Tensor
    histogram: Tensor


@torch.no_grad()
def teacher_forced(
    drafter: Drafter,
    features: Tensor,
    input_ids: Tensor,
    loss_mask: Tensor,
    embed: Tensor,
    head: Tensor,
    *,
    supervised: Sequence[Sequence[int]],
    block_size: int | None = None,
    blocks_at_once: int = 128,
) -> Acceptance:
    """Acceptance with a block at *every* valid anchor of a batch of known text.

    On text that the target itself decoded greedily each block accepts what the true loop would accept
    there, up to the end of the supervised text.

    features [b, S, K*H], input_ids int64 and loss_mask [b, S], embed and head [V, H]; `supervised` is the
    loss mask as host lists, from which anchors are taken, so nothing waits for a device. At most about
    `blocks_at_once` blocks are in memory together.
    """
    size = drafter.config.block_size if block_size is None else block_size
    rows = [valid_anchors(mask) for mask in supervised]
    width = max(1, blocks_at_once // max(1, len(rows)))
    histogram = torch.zeros(size + 1, dtype=torch.int64, device=features.device)
    counts = torch.arange(size + 1, device=features.device)
    context = drafter.context_kv(features, _context_positions(features))
    for start in range(0, max(map(len, rows), default=0), width):
        chunk = [row[start : start + width] for row in rows]
        most = max(map(len, chunk))
        anchors = torch.tensor([row + [0] * (most - len(row)) for row in chunk])
        keep = torch.tensor([[True] * len(row) + [False] * (most - len(row)) for row in chunk])
        anchors = anchors.to(features.device, non_blocking=True)
        keep = keep.to(features.device, non_blocking=True)
        runs = _runs(drafter, context, input_ids, loss_mask, embed, head, anchors, keep, size)
        histogram += (runs[..., None] == counts).sum(dim=(0, 1))
    histogram[0] = 0  # dead slots
    return Acceptance((histogram * counts).sum(), histogram.sum(), histogram)


@torch.no_grad()
def accepted_at(
    drafter: Drafter,
    features: Tensor,
    input_ids: Tensor,
    loss_mask: Tensor,
    embed: Tensor,
    head: Tensor,
    anchors: Tensor,
    keep: Tensor,
    block_size: int | None = None,
) -> Tensor:
    """Tokens accepted (bonus included) by the block at each anchor: int64 [b, N], 0 where keep is False."""
    size = drafter.config.block_size if block_size is None else block_size
    context = drafter.context_kv(features, _context_positions(features))
    return _runs(drafter, context, input_ids, loss_mask, embed, head, anchors, keep, size)


@dataclass(frozen=True)
class ConstantDraft:
    """The best fixed draft: `tokens` for slots 1.., and what it accepts over `blocks` blocks."""

    tokens: list[int]
    accepted: int
    blocks: int

    @property
    def tau(self) -> float:
        return self.accepted / self.blocks if self.blocks else 0.0


def constant_tau(rows: Sequence[tuple[Sequence[int], Sequence[int]]], block_size: int) -> ConstantDraft:
    """The bar a drafter must clear: the same fixed token drafted at each slot, whatever the context.

    `rows` are (input_ids, loss_mask) host lists. Rule: blocks stand at every valid anchor. Slot by slot,
    among the blocks whose earlier slots were all right, the token that is right most often is fixed for
    that slot (the smaller id when equal). Tokens are picked on the very text they are judged on, so the
    bar is, if anything, too high for a fixed draft. Once no block is left, the remaining slots have no
    token.
    """
    alive = [(ids, mask, t) for ids, mask in rows for t in valid_anchors(mask)]
    blocks = accepted = len(alive)
    tokens: list[int] = []
    for k in range(1, block_size):
        inside = [(ids, mask, t) for ids, mask, t in alive if t + k < len(ids) and mask[t + k]]
        counts = Counter(ids[t + k] for ids, _, t in inside)
        if not counts:
            break
        token = min(counts, key=lambda candidate: (-counts[candidate], candidate))
        tokens.append(token)
        alive = [(ids, mask, t) for ids, mask, t in inside if ids[t + k] == token]
        accepted += len(alive)
    return ConstantDraft(tokens, accepted, blocks)


def _runs(
    drafter: Drafter,
    context: ContextKV,
    input_ids: Tensor,
    loss_mask: Tensor,
    embed: Tensor,
    head: Tensor,
    anchors: Tensor,
    keep: Tensor,
    size: int,
) -> Tensor:
    rows, length = input_ids.shape
    ids = block_ids(input_ids, anchors, size, drafter.config.mask_token_id).view(rows, -1)
    positions = slot_positions(anchors, size).view(rows, -1)
    lengths = torch.full((rows,), length, device=anchors.device)
    mask = dense_mask(anchors, keep, lengths, length, size)
    hidden = drafter.draft(F.embedding(ids, embed), positions, context, mask)
    weights = loss_weights(anchors, keep, loss_mask, size)
    scores = score(hidden, head.detach(), labels(input_ids, anchors, size), weights)
    return accepted_runs(scores.hits, weights)


def _context_positions(features: Tensor) -> Tensor:
    return torch.arange(features.shape[1], device=features.device)[None]


def _append(drafter: Drafter, context: ContextKV | None, features: Tensor, start: int) -> ContextKV:
    """The context extended by the newest features, which end just before position `start`."""
    positions = torch.arange(start - features.shape[1], start, device=features.device)[None]
    new = drafter.context_kv(features, positions)
    if context is None:
        return new
    return [
        (torch.cat([k, more_k], dim=2), torch.cat([v, more_v], dim=2))
        for (k, v), (more_k, more_v) in zip(context, new, strict=True)
    ]


def _draft(
    target: Any, drafter: Drafter, anchor: int, start: int, context: ContextKV, size: int
) -> list[int]:
    ids = _row([anchor] + [drafter.config.mask_token_id] * (size - 1), target.device)
    positions = torch.arange(start, start + size, device=target.device)[None]
    hidden = drafter.draft(target.get_input_embeddings()(ids), positions, context)
    head = target.get_output_embeddings().weight
    return (hidden[0, 1:].to(head.dtype) @ head.T).argmax(dim=-1).tolist()


def _greedy(logits: Tensor) -> tuple[list[int], list[float]]:
    """The best token of each row of logits [n, V], and its lead over the second."""
    top = logits.float().topk(2, dim=-1)
    # Not topk's first index: among equal logits only argmax says which one it takes.
    return logits.argmax(dim=-1).tolist(), (top.values[:, 0] - top.values[:, 1]).tolist()


def _row(ids: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([list(ids)], device=device)


def _new_cache(target: Any, prompt_ids: Sequence[int]) -> Any:
    from transformers import DynamicCache

    if not prompt_ids:
        raise ValueError("cannot decode from an empty prompt: give it at least one token")
    kinds = set(getattr(target.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(
            f"decoding needs a cache that can be cut back, which layers of type "
            f"{sorted(kinds - {'full_attention'})} lack; use the teacher-forced measure for this target"
        )
    return DynamicCache(config=target.config)


def _drop_last(cache: Any, count: int) -> None:
    # Negative: so many off the end. Zero must not be passed: older transformers would empty the cache.
    if count > 0:
        cache.crop(-count)
