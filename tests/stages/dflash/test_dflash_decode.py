"""Acceptance: the loop keeps its promise, and the teacher-forced measure counts what the loop counts."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from pipeflow_stages.dflash import decode
from pipeflow_stages.dflash.anchors import valid_anchors
from pipeflow_stages.dflash.decode import (
    Generation,
    accepted_at,
    compare,
    constant_tau,
    plain_greedy,
    speculative_greedy,
    teacher_forced,
)
from pipeflow_stages.dflash.taps import Tapper


def _batch(fitted, drafter):
    input_ids = torch.tensor([fitted.ids])
    features = Tapper(fitted.target, drafter.config.tap_layer_ids).features(input_ids)
    return features, input_ids, torch.tensor([fitted.loss_mask]).bool()


def _accepted_at(fitted, drafter, anchors, block_size=None):
    chosen = torch.tensor([anchors])
    keep = torch.ones_like(chosen, dtype=torch.bool)
    features, input_ids, loss_mask = _batch(fitted, drafter)
    runs = accepted_at(
        drafter, features, input_ids, loss_mask, fitted.embed, fitted.head, chosen, keep, block_size
    )
    return runs[0].tolist()


def test_plain_greedy_equals_decoding_without_a_cache(fitted):
    ids = list(fitted.prompt)
    for token in fitted.text.tokens[:12]:
        with torch.no_grad():
            best = fitted.target(input_ids=torch.tensor([ids])).logits[0, -1].argmax().item()
        assert best == token
        ids.append(token)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("block_size", [2, 4, 7])
def test_speculative_decoding_gives_the_plain_tokens(tiny, family, block_size):
    target = tiny.target(family, seed=2)
    drafter = tiny.drafter(tiny.config(target))
    for seed in range(4):
        prompt = torch.randint(tiny.mask_token, (3 + 4 * seed,)).tolist()
        plain = plain_greedy(target, prompt, 25)
        fast = speculative_greedy(target, drafter, prompt, 25, block_size=block_size)
        assert fast.tokens == plain.tokens
        assert plain.ties == fast.ties == []
        assert compare(plain, fast) == "equal"
        assert all(1 <= n <= block_size for n in fast.accepted)


@pytest.mark.parametrize("which", ["half", "full"])
def test_a_drafter_that_drafts_well_changes_no_token_either(fitted, which):
    drafter = getattr(fitted, which)
    fast = speculative_greedy(fitted.target, drafter, fitted.prompt, 40)
    assert fast.tokens == fitted.text.tokens
    assert fast.ties == []
    assert sum(fast.accepted) / len(fast.accepted) > (1.3 if which == "half" else 3.9)


def test_a_broken_cache_is_noticed(fitted, monkeypatch):
    monkeypatch.setattr(decode, "_drop_last", lambda cache, count: None)
    fast = speculative_greedy(fitted.target, fitted.half, fitted.prompt, 40)
    assert compare(fitted.text, fast) == "different"


def test_the_loop_ends_at_the_first_stop_token(fitted):
    stop = fitted.text.tokens[6]
    first = fitted.text.tokens.index(stop)
    plain = plain_greedy(fitted.target, fitted.prompt, 40, {stop})
    fast = speculative_greedy(fitted.target, fitted.full, fitted.prompt, 40, {stop})
    assert plain.tokens == fast.tokens == fitted.text.tokens[: first + 1]
    # The first token comes from the prompt; whole blocks cover the rest, the last one counted in full.
    assert 1 + sum(fast.accepted[:-1]) < first + 1 <= 1 + sum(fast.accepted)


def test_the_loop_ends_at_the_length(fitted):
    for most in (1, 2, 6):
        fast = speculative_greedy(fitted.target, fitted.full, fitted.prompt, most)
        assert fast.tokens == fitted.text.tokens[:most]
        assert len(plain_greedy(fitted.target, fitted.prompt, most).tokens) == most
    assert speculative_greedy(fitted.target, fitted.full, fitted.prompt, 1).accepted == []


def _anchors_of_loop(fitted, accepted):
    at, anchors = len(fitted.prompt), []
    for n in accepted:
        anchors.append(at)
        at += n
    return anchors


@pytest.mark.parametrize("which", ["half", "full"])
def test_teacher_forced_acceptance_is_the_loops(fitted, which):
    drafter = getattr(fitted, which)
    fast = speculative_greedy(fitted.target, drafter, fitted.prompt, 40)
    anchors = _anchors_of_loop(fitted, fast.accepted)
    end = len(fitted.ids)
    inside = [(a, n) for a, n in zip(anchors, fast.accepted, strict=True) if a + n < end]
    assert _accepted_at(fitted, drafter, [a for a, _ in inside]) == [n for _, n in inside]


@pytest.mark.parametrize("block_size", [None, 3])
def test_teacher_forced_acceptance_is_the_loops_from_every_prefix(fitted, block_size):
    anchors = valid_anchors(fitted.loss_mask)
    expected = []
    for a in anchors:
        fast = speculative_greedy(fitted.target, fitted.half, fitted.ids[:a], 4, block_size=block_size)
        assert fast.tokens[0] == fitted.ids[a]
        expected.append(min(fast.accepted[0], len(fitted.ids) - a))  # the text ends, the loop would not
    assert len(set(expected)) > 1
    assert _accepted_at(fitted, fitted.half, anchors, block_size) == expected


@pytest.mark.parametrize("fault", ["labels", "slot_positions"])
def test_a_shift_in_the_measure_is_noticed(fitted, fault, monkeypatch):
    anchors = valid_anchors(fitted.loss_mask)
    right = _accepted_at(fitted, fitted.full, anchors)
    real = getattr(decode, fault)
    if fault == "labels":
        monkeypatch.setattr(decode, fault, lambda ids, a, b: real(ids.roll(-1, 1), a, b))
    else:
        monkeypatch.setattr(decode, fault, lambda a, b: real(a, b) + 1)
    assert sum(_accepted_at(fitted, fitted.full, anchors)) < sum(right)


@pytest.mark.parametrize("blocks_at_once", [1, 7, 999])
def test_teacher_forced_pools_every_valid_anchor_of_a_batch(fitted, blocks_at_once):
    drafter = fitted.half
    features, input_ids, _ = _batch(fitted, drafter)
    gap = list(fitted.loss_mask)
    gap[20] = 0
    masks = [fitted.loss_mask, gap, [0] * len(gap)]
    loss_mask = torch.tensor(masks).bool()
    result = teacher_forced(
        drafter, features.expand(3, -1, -1), input_ids.expand(3, -1), loss_mask, fitted.embed, fitted.head,
        supervised=masks, blocks_at_once=blocks_at_once,
    )  # fmt: skip
    whole = _accepted_at(fitted, drafter, valid_anchors(fitted.loss_mask))
    # With a gap at 20 no run passes it: a block at a accepts at most 20 - a tokens there.
    parts = zip(valid_anchors(fitted.loss_mask), whole, strict=True)
    broken = [min(n, 20 - a) if a < 20 else n for a, n in parts if a in valid_anchors(gap)]
    assert result.blocks.item() == len(whole) + len(broken)
    assert result.accepted.item() == sum(whole) + sum(broken)
    assert result.histogram.tolist() == [0] + [(whole + broken).count(n) for n in (1, 2, 3, 4)]


def test_teacher_forced_on_nothing_is_zero(fitted):
    features, input_ids, loss_mask = _batch(fitted, fitted.half)
    none = torch.zeros_like(loss_mask)
    result = teacher_forced(
        fitted.half, features, input_ids, none, fitted.embed, fitted.head, supervised=[[0] * len(fitted.ids)]
    )
    assert result.accepted.item() == result.blocks.item() == 0


def test_compare_allows_a_difference_only_at_a_tie():
    plain = Generation([1, 2, 3, 4], ties=[2])
    assert compare(plain, Generation([1, 2, 3, 4])) == "equal"
    assert compare(plain, Generation([1, 2, 9, 9])) == "tie"
    assert compare(plain, Generation([1, 9, 3, 4])) == "different"
    assert compare(plain, Generation([1, 2, 3])) == "different"
    assert compare(plain, Generation([1, 2])) == "tie"


def test_ties_of_the_target_are_counted(tiny):
    target = tiny.target()
    head = target.get_output_embeddings().weight
    plain = plain_greedy(target, [1, 2, 3], 8)
    assert plain.ties == []
    twin = next(t for t in range(tiny.vocabulary) if t not in plain.tokens)
    head[twin] = head[plain.tokens[0]]
    again = plain_greedy(target, [1, 2, 3], 8)
    assert again.ties[0] == 0
    fast = speculative_greedy(target, tiny.drafter(tiny.config(target)), [1, 2, 3], 8)
    assert compare(again, fast) in ("equal", "tie")
    assert fast.ties[0] == 0


def test_faulty_requests_are_refused(fitted):
    with pytest.raises(ValueError, match="empty prompt"):
        plain_greedy(fitted.target, [], 4)
    with pytest.raises(ValueError, match="block_size"):
        speculative_greedy(fitted.target, fitted.half, [1], 4, block_size=1)


def test_a_target_whose_cache_cannot_be_cut_back_is_refused(tiny):
    target = tiny.target()
    target.config.layer_types = ["full_attention"] * 5 + ["sliding_attention"]
    with pytest.raises(ValueError, match="sliding_attention"):
        plain_greedy(target, [1], 4)


def test_constant_draft_by_hand():
    row = ([9, 7, 7, 7, 5], [1, 1, 1, 1, 1])
    # Anchors 0..3 with followers 777, 775, 75, 5. Slot 1: 7 (3 of 4). Slot 2: 7 (2 of 3). Slot 3: 5 or 7,
    # one each: 5. Accepted: 4 + 3 + 2 + 1.
    best = constant_tau([row], 4)
    assert (best.tokens, best.accepted, best.blocks) == ([7, 7, 5], 10, 4)
    assert best.tau == 2.5


def test_constant_draft_takes_the_best_token_of_each_slot(fitted):
    rows = [(fitted.ids, fitted.loss_mask)]
    best = constant_tau(rows, 4)

    def accepted(draft):
        total = 0
        for a in valid_anchors(fitted.loss_mask):
            total += 1
            for k, token in enumerate(draft, 1):
                if a + k >= len(fitted.ids) or fitted.ids[a + k] != token:
                    break
                total += 1
        return total

    assert accepted(best.tokens) == best.accepted
    first = {t: accepted([t]) for t in range(61)}
    assert first[best.tokens[0]] == max(first.values())
    second = {t: accepted([best.tokens[0], t]) for t in range(61)}
    assert second[best.tokens[1]] == max(second.values())
    assert best.accepted <= max(accepted(d) for d in product(set(fitted.ids), repeat=3))


def test_constant_draft_counts_supervised_tokens_only():
    assert constant_tau([([1, 1, 1, 1], [1, 1, 0, 1])], 4).accepted == 2
    empty = constant_tau([([1, 1], [0, 0])], 4)
    assert (empty.tokens, empty.blocks, empty.tau) == ([], 0, 0.0)


def test_one_sample_overfit_accepts_whole_blocks(fitted):
    size = fitted.full.config.block_size
    features, input_ids, loss_mask = _batch(fitted, fitted.full)
    result = teacher_forced(
        fitted.full, features, input_ids, loss_mask, fitted.embed, fitted.head, supervised=[fitted.loss_mask]
    )
    # Every block is whole, but for those that the end of the text cuts short.
    expected = [min(size, len(fitted.ids) - a) for a in valid_anchors(fitted.loss_mask)]
    assert result.accepted.item() == sum(expected)
    fast = speculative_greedy(fitted.target, fitted.full, fitted.prompt, len(fitted.text.tokens) - size)
    assert set(fast.accepted) == {size}
    assert fast.tokens == fitted.text.tokens[:-size]
