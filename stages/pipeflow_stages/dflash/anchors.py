"""Where blocks start: chosen on the host from the loss mask, so that no device is ever asked.

An anchor is a position whose token is known when its block is drafted; the block predicts what follows.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BatchAnchors", "anchors_of_batch", "choose", "valid_anchors"]


class BatchAnchors(NamedTuple):
    """Anchors of b rows, N a row: ascending, dead slots (keep False) at the end of a row.

    A dead slot repeats the row's last anchor (0 when it has none), so it is always a position that exists.
    `total` counts live anchors.
    """

    anchors: list[list[int]]
    keep: list[list[bool]]
    total: int


def valid_anchors(loss_mask: Sequence[int]) -> list[int]:
    """Positions t <= S - 2 where `loss_mask[t]` and `loss_mask[t + 1]` are both set, ascending.

    The anchor itself must be text the target wrote, and at least its first draft must be judged.
    """
    return [t for t in range(len(loss_mask) - 1) if loss_mask[t] and loss_mask[t + 1]]


def choose(loss_mask: Sequence[int], count: int, seed: int | str) -> list[int]:
    """Up to `count` valid anchors, uniform without replacement, ascending.

    The same mask, count and seed give the same anchors in every process (no built-in `hash`).
    Ascending anchors keep the attention mask block-sparse.
    """
    valid = valid_anchors(loss_mask)
    if len(valid) <= count:
        return valid
    return sorted(random.Random(seed).sample(valid, count))


def anchors_of_batch(
    supervised: Sequence[Sequence[int]],
    documents: Sequence[int],
    count: int,
    seed: int,
    draw: int = 0,
    *,
    fixed_width: bool = True,
) -> BatchAnchors:
    """Anchors of each row of a batch.

    `supervised` is the loss mask a row, `documents` the rows' document numbers. A document's anchors
    depend on (seed, its number, draw) alone, never on the batch around it; `draw` is the step or the
    epoch, and changes them. Padding at a row's end changes nothing.
    `fixed_width` makes N equal to `count` (static shapes); otherwise N is the most that a row got, at
    least 1. Raises ValueError for a count below 1 or for lists of different lengths.
    """
    if count < 1:
        raise ValueError(f"the number of anchors a row must be at least 1, got {count}")
    if len(supervised) != len(documents):
        raise ValueError(f"{len(supervised)} loss masks but {len(documents)} document numbers")
    rows = [
        choose(mask, count, f"{seed}/{document}/{draw}")
        for mask, document in zip(supervised, documents, strict=True)
    ]
    width = count if fixed_width else max([1, *map(len, rows)])
    anchors = [row + [row[-1] if row else 0] * (width - len(row)) for row in rows]
    keep = [[True] * len(row) + [False] * (width - len(row)) for row in rows]
    return BatchAnchors(anchors, keep, sum(map(len, rows)))
