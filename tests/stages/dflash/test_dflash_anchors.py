"""Anchors: which are valid, and that a document's anchors are its own."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeflow_stages.dflash.anchors import anchors_of_batch, choose, valid_anchors


def test_an_anchor_and_its_first_draft_are_both_supervised():
    assert valid_anchors([0, 1, 1, 0, 1, 0, 1, 1, 1]) == [1, 6, 7]
    assert valid_anchors([]) == valid_anchors([1]) == valid_anchors([1, 0]) == []


@given(st.lists(st.integers(0, 1), max_size=40), st.integers(1, 20), st.integers(0, 5))
def test_choice_is_sorted_distinct_valid_and_as_many_as_there_are(mask, count, seed):
    chosen = choose(mask, count, seed)
    valid = valid_anchors(mask)
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(valid)
    assert len(chosen) == min(count, len(valid))


def test_choice_is_uniform():
    draws = 4000
    counts = Counter(t for seed in range(draws) for t in choose([1] * 9, 3, seed))
    expected = draws * 3 / 8
    # Five standard deviations of a binomial.
    assert all(abs(counts[t] - expected) < 5 * (draws * 3 / 8 * 5 / 8) ** 0.5 for t in range(8))


def test_batch_composition_changes_no_documents_anchors():
    masks = {d: [0] * d + [1] * (30 + d) for d in range(6)}

    def of(documents, padding=0):
        batch = anchors_of_batch([masks[d] + [0] * padding for d in documents], documents, 8, seed=7, draw=3)
        return dict(zip(documents, batch.anchors, strict=True))

    alone = {d: of([d])[d] for d in masks}
    assert of([5, 1, 3], padding=9) == {d: alone[d] for d in (5, 1, 3)}
    assert of([0, 1, 2, 3, 4, 5]) == alone


def test_seed_document_and_draw_each_change_the_anchors():
    mask = [[1] * 200]
    base = anchors_of_batch(mask, [1], 16, seed=1, draw=1)
    assert base == anchors_of_batch(mask, [1], 16, seed=1, draw=1)
    others = [
        anchors_of_batch(mask, [1], 16, seed=2, draw=1),
        anchors_of_batch(mask, [2], 16, seed=1, draw=1),
        anchors_of_batch(mask, [1], 16, seed=1, draw=2),
    ]
    assert len({tuple(b.anchors[0]) for b in [base, *others]}) == 4


def test_dead_slots_stand_at_the_end_and_are_not_counted():
    batch = anchors_of_batch([[0, 1, 1, 1], [0, 0, 0, 0]], [0, 1], 4, seed=0)
    assert batch.anchors == [[1, 2, 2, 2], [0, 0, 0, 0]]
    assert batch.keep == [[True, True, False, False], [False] * 4]
    assert batch.total == 2
    narrow = anchors_of_batch([[0, 1, 1, 1], [0, 0, 0, 0]], [0, 1], 4, seed=0, fixed_width=False)
    assert narrow.anchors == [[1, 2], [0, 0]]
    assert len(anchors_of_batch([[0]], [0], 4, seed=0, fixed_width=False).anchors[0]) == 1


def test_another_process_chooses_the_same():
    code = "from pipeflow_stages.dflash.anchors import choose; print(choose([1] * 99, 5, '3/4/5'))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": str(seed), "PYTHONPATH": ":".join(sys.path)},
        ).stdout.strip()
        for seed in (1, 2)
    }
    assert outputs == {str(choose([1] * 99, 5, "3/4/5"))}


@pytest.mark.parametrize(("masks", "documents", "count"), [([[1, 1]], [0], 0), ([[1, 1]], [0, 1], 1)])
def test_faults_are_refused(masks, documents, count):
    with pytest.raises(ValueError):
        anchors_of_batch(masks, documents, count, seed=0)
