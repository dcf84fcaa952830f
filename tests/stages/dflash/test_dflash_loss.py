"""The loss against plain autograd, its weights by hand, and its edges."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from pipeflow_stages.dflash.loss import (
    accepted_runs,
    default_gamma,
    drafter_loss,
    labels,
    loss_weights,
    score,
    slot_weights,
)


def test_weights_decay_from_the_first_draft():
    assert slot_weights(4, 2.0) == pytest.approx([0.0, 1.0, math.exp(-0.5), math.exp(-1.0)])
    assert slot_weights(16)[8] == pytest.approx(math.exp(-1.0))


def test_default_gamma_is_the_papers():
    assert [default_gamma(b) for b in (8, 10, 16)] == [4, 5, 7]
    assert [default_gamma(b) for b in (2, 4, 9, 13)] == [1, 2, 4.5, 6]
    values = [default_gamma(b) for b in range(2, 40)]
    assert values == sorted(set(values))


@pytest.mark.parametrize("gamma", [0.0, -1.0, math.nan])
def test_gamma_must_be_positive(gamma):
    with pytest.raises(ValueError, match="gamma"):
        slot_weights(4, gamma)


def test_labels_stand_at_their_own_position():
    ids = torch.tensor([[10, 11, 12, 13, 14]])
    got = labels(ids, torch.tensor([[0, 3]]), 4)
    assert got[0, 0].tolist() == [10, 11, 12, 13]
    assert got[0, 1, :2].tolist() == [13, 14]


def test_weights_equal_a_plain_loop():
    generator = torch.Generator().manual_seed(0)
    anchors = torch.randint(0, 11, (3, 5), generator=generator)
    keep = torch.rand(3, 5, generator=generator) < 0.7
    loss_mask = torch.rand(3, 12, generator=generator) < 0.6
    got = loss_weights(anchors, keep, loss_mask, 4, 2.0)
    for r in range(3):
        for j in range(5):
            for k in range(4):
                at = int(anchors[r, j]) + k
                counted = k > 0 and keep[r, j] and at < 12 and loss_mask[r, at]
                expected = math.exp(-(k - 1) / 2.0) if counted else 0.0
                assert got[r, j, k].item() == pytest.approx(expected)


def _case(rows=2, blocks=5, size=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, blocks * size, 16, generator=generator, requires_grad=True)
    head = torch.randn(37, 16, generator=generator)
    label = torch.randint(37, (rows, blocks, size), generator=generator)
    weights = torch.rand(rows, blocks, size, generator=generator)
    weights *= torch.rand(rows, blocks, size, generator=generator) < 0.7
    weights[..., 0] = 0.0
    return hidden, head, label, weights


def _plain(hidden, head, label, weights):
    logits = (hidden @ head.T).view(*label.shape, -1)
    ce = F.cross_entropy(logits.flatten(0, 2), label.flatten(), reduction="none").view(label.shape)
    return (weights * ce).sum() / weights.sum(), logits.argmax(-1)


@pytest.mark.parametrize("chunk", [None, 1, 3, 10, 64])
def test_chunks_change_neither_loss_nor_gradient(chunk):
    hidden, head, label, weights = _case()
    expected, best = _plain(hidden, head, label, weights)
    (wanted,) = torch.autograd.grad(expected, hidden)
    loss, correct, counts = drafter_loss(hidden, head, label, weights, chunk)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    (gradient,) = torch.autograd.grad(3.0 * loss, hidden)
    torch.testing.assert_close(gradient, 3.0 * wanted)
    counted = weights > 0
    torch.testing.assert_close(correct, ((best == label) & counted).sum((0, 1))[1:].float())
    torch.testing.assert_close(counts, counted.sum((0, 1))[1:].float())


def test_gradient_passes_gradcheck_in_double():
    hidden, head, label, weights = _case(rows=1, blocks=2)
    double = hidden.detach().double().requires_grad_()

    def loss(states):
        # Cross-entropy is float32 inside, hence the wide steps and tolerances.
        return score(states, head.double(), label, weights, 1).loss.double()

    assert torch.autograd.gradcheck(loss, double, eps=1e-2, atol=1e-3, rtol=1e-2)


def test_a_label_shift_changes_the_loss():
    hidden, head, label, weights = _case()
    expected, _ = _plain(hidden, head, label, weights)
    shifted = drafter_loss(hidden, head, label.roll(-1, 2), weights).loss
    assert not torch.allclose(shifted, expected, atol=1e-2)


def test_autocast_computes_in_bfloat16_and_sums_in_float32():
    hidden, head, label, weights = _case()
    expected, _ = _plain(hidden, head, label, weights)
    (wanted,) = torch.autograd.grad(expected, hidden)
    with torch.autocast("cpu", torch.bfloat16):
        loss = drafter_loss(hidden, head, label, weights, 2).loss
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=0)
    loss.backward()
    assert hidden.grad.dtype == torch.float32
    torch.testing.assert_close(hidden.grad, wanted, rtol=0, atol=2e-3)


def test_without_anchors_the_loss_is_zero_and_touches_every_parameter(tiny):
    target = tiny.target()
    drafter = tiny.drafter(tiny.config(target))
    input_ids = torch.randint(tiny.mask_token, (2, 9))
    features = torch.randn(2, 9, 64)
    anchors = torch.zeros(2, 3, dtype=torch.int64)
    keep = torch.zeros(2, 3, dtype=torch.bool)
    hidden = tiny.forward(drafter, target, features, input_ids, anchors, keep)
    weights = loss_weights(anchors, keep, torch.zeros(2, 9).bool(), 4)
    head = target.get_output_embeddings().weight
    loss, correct, counts = drafter_loss(hidden, head, labels(input_ids, anchors, 4), weights, 2)
    assert loss.item() == 0.0
    assert correct.sum().item() == counts.sum().item() == 0.0
    loss.backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.eq(0).all(), name


def test_accepted_is_the_leading_run_plus_the_bonus():
    hits = torch.tensor([[[1, 1, 0], [0, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 1]]]).bool()
    weights = torch.tensor(
        [[[0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0]]], dtype=torch.float32
    )
    # A run ends at the first slot that is wrong or is not judged; a dead block accepts nothing.
    assert accepted_runs(hits, weights).tolist() == [[3, 1, 4, 2, 0]]


def test_logits_of_one_chunk_only_are_ever_built(monkeypatch):
    hidden, head, label, weights = _case()
    sizes = []
    real = torch.softmax
    monkeypatch.setattr(torch, "softmax", lambda t, **k: (sizes.append(tuple(t.shape)), real(t, **k))[1])
    drafter_loss(hidden, head, label, weights, 3)
    assert sizes == [(3, 3, 37)] * 3 + [(1, 3, 37)]


def test_nothing_is_read_on_the_host(monkeypatch):
    hidden, head, label, weights = _case()
    anchors, keep = torch.zeros(2, 5, dtype=torch.int64), torch.ones(2, 5, dtype=torch.bool)
    loss_mask = torch.ones(2, 9, dtype=torch.bool)

    def read(*_):
        raise AssertionError("a tensor was read on the host")

    for name in ("__bool__", "item", "tolist", "__int__", "__float__", "cpu", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, read)
    loss_weights(anchors, keep, loss_mask, 4)
    drafter_loss(hidden, head, label, weights, 2).loss.backward()


def test_a_head_that_trains_and_an_empty_chunk_are_refused():
    hidden, head, label, weights = _case()
    with pytest.raises(ValueError, match="frozen"):
        drafter_loss(hidden, head.requires_grad_(), label, weights)
    with pytest.raises(ValueError, match="chunk"):
        drafter_loss(hidden, head.detach(), label, weights, 0)
