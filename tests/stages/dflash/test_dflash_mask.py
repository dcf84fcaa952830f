"""The dense mask against a plain double loop, and the geometry of blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeflow_stages.dflash.mask import block_ids, dense_mask, slot_positions


def _by_hand(anchors, keep, length, positions, size, window):
    n = len(anchors)
    rows = []
    for query in range(n * size):
        j, k = divmod(query, size)
        row = []
        for p in range(positions):
            seen = keep[j] and p < anchors[j] and p < length
            row.append(seen and (window is None or p > anchors[j] + k - window))
        for key in range(n * size):
            i, m = divmod(key, size)
            row.append(i == j and (window is None or m <= k))
        rows.append(row)
    return rows


@st.composite
def _cases(draw):
    size = draw(st.integers(2, 5))
    lengths = draw(st.lists(st.integers(2, 9), min_size=1, max_size=3))
    n = draw(st.integers(1, 4))
    anchors = [sorted(draw(st.lists(st.integers(0, s - 2), min_size=n, max_size=n))) for s in lengths]
    keep = [draw(st.lists(st.booleans(), min_size=n, max_size=n)) for _ in lengths]
    window = draw(st.none() | st.integers(1, 6))
    return size, lengths, anchors, keep, window


@settings(deadline=None)
@given(_cases())
def test_mask_equals_a_double_loop(case):
    size, lengths, anchors, keep, window = case
    positions = max(lengths)
    mask = dense_mask(
        torch.tensor(anchors), torch.tensor(keep), torch.tensor(lengths), positions, size, window
    )
    slots = len(anchors[0]) * size
    assert mask.shape == (len(lengths), 1, slots, positions + slots)
    assert mask.dtype == torch.bool
    for row, (a, alive, length) in enumerate(zip(anchors, keep, lengths, strict=True)):
        assert mask[row, 0].tolist() == _by_hand(a, alive, length, positions, size, window)


def test_no_query_is_blind():
    mask = dense_mask(torch.tensor([[0, 3]]), torch.tensor([[True, False]]), torch.tensor([5]), 5, 4)
    assert mask.any(dim=-1).all()


def test_the_context_ends_before_the_anchor():
    mask = dense_mask(torch.tensor([[3]]), torch.tensor([[True]]), torch.tensor([6]), 6, 2)
    assert mask[0, 0, :, :6].tolist() == [[True] * 3 + [False] * 3] * 2


def test_slots_follow_their_anchor():
    anchors = torch.tensor([[1, 4]])
    assert slot_positions(anchors, 3).tolist() == [[[1, 2, 3], [4, 5, 6]]]
    ids = torch.tensor([[10, 11, 12, 13, 14]])
    assert block_ids(ids, anchors, 3, 99).tolist() == [[[11, 99, 99], [14, 99, 99]]]


def test_nothing_is_read_on_the_host(monkeypatch):
    def read(*_):
        raise AssertionError("a tensor was read on the host")

    anchors, keep = torch.tensor([[1, 4]]), torch.tensor([[True, False]])
    lengths = torch.tensor([6])
    for name in ("__bool__", "item", "tolist", "__int__", "__float__", "cpu", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, read)
    with pytest.raises(AssertionError):
        bool(keep.any())
    dense_mask(anchors, keep, lengths, 6, 4, window=3)
