"""The drafter: what a block may depend on, and that training computes what drafting computes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from pipeflow_stages.dflash import loss as loss_module
from pipeflow_stages.dflash import mask as mask_module
from pipeflow_stages.dflash.mask import dense_mask
from pipeflow_stages.dflash.model import Drafter, Rotation
from pipeflow_stages.dflash.taps import Tapper

FAULTS = ("label shift", "position shift", "context leak", "block leak", "feature shift")


@pytest.fixture
def target(tiny):
    return tiny.target()


@pytest.fixture
def drafter(tiny, target):
    # Wide weights, so that whatever a block wrongly sees changes it visibly.
    return tiny.drafter(tiny.config(target, initializer_range=0.2)).requires_grad_(False)


def _batch(tiny, rows=2, length=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(tiny.mask_token, (rows, length), generator=generator)
    features = torch.randn(rows, length, 64, generator=generator)
    return input_ids, features


ANCHORS = [[3, 5, 6, 17], [0, 9, 10, 22]]  # closer than a block, at the start, and past the end


def _changed_blocks(before, after):
    return (before - after).abs().amax(dim=(2, 3)) > 1e-4


def test_context_from_the_anchor_on_changes_nothing(tiny, target, drafter):
    input_ids, features = _batch(tiny)
    anchors = torch.tensor(ANCHORS)
    before = tiny.forward(drafter, target, features, input_ids, anchors)
    for position in range(features.shape[1]):
        touched = features.clone()
        touched[:, position] += 3.0
        after = tiny.forward(drafter, target, touched, input_ids, anchors)
        # A block depends on exactly the positions before its anchor.
        assert torch.equal(_changed_blocks(before, after), anchors > position)


def test_a_block_and_a_document_change_no_other(tiny, target, drafter):
    input_ids, features = _batch(tiny)
    anchors = torch.tensor(ANCHORS)
    before = tiny.forward(drafter, target, features, input_ids, anchors)
    for row in range(2):
        for j, anchor in enumerate(ANCHORS[row]):
            touched = input_ids.clone()
            touched[row, anchor] = (touched[row, anchor] + 7) % tiny.mask_token
            after = tiny.forward(drafter, target, features, touched, anchors)
            expected = torch.zeros(2, 4, dtype=torch.bool)
            expected[row, j] = True
            assert torch.equal(_changed_blocks(before, after), expected)
    touched = features.clone()
    touched[0] = torch.randn_like(touched[0])
    after = tiny.forward(drafter, target, touched, input_ids, anchors)
    assert torch.equal(before[1], after[1])
    assert not torch.allclose(before[0], after[0])


def test_all_slots_of_a_block_see_each_other(tiny, target, drafter):
    input_ids, features = _batch(tiny, rows=1)
    before = tiny.forward(drafter, target, features, input_ids, torch.tensor([[5]]))
    ids = input_ids.clone()
    ids[0, 5] = (ids[0, 5] + 1) % tiny.mask_token
    after = tiny.forward(drafter, target, features, ids, torch.tensor([[5]]))
    assert ((before - after).abs().amax(dim=-1) > 1e-4).all()


def _training_equals_drafting(tiny, target, drafter, fault=None):
    """Invariant 4. Training: whole text, several blocks, mask. Drafting: the prefix alone, one block."""
    input_ids, _ = _batch(tiny, rows=1)
    size, length = drafter.config.block_size, input_ids.shape[1]
    anchors = torch.tensor([[1, 5, 7, 12]])
    tapper = Tapper(target, drafter.config.tap_layer_ids)
    features = tapper.features(input_ids)
    if fault == "feature shift":
        features = features.roll(-1, dims=1)
    hidden = tiny.forward(drafter, target, features, input_ids, anchors)
    judged = loss_module.labels(input_ids, anchors, size)
    embed, head = target.get_input_embeddings(), target.get_output_embeddings()
    for j, a in enumerate(anchors[0].tolist()):
        prefix = tapper.features(input_ids[:, :a])
        block = torch.tensor([[input_ids[0, a]] + [tiny.mask_token] * (size - 1)])
        context = drafter.context_kv(prefix, torch.arange(a)[None])
        drafted = drafter.draft(embed(block), torch.arange(a, a + size)[None], context)
        if not torch.allclose(head(hidden[0, j]), head(drafted[0]), rtol=0, atol=1e-4):
            return False
        # Slot k of a draft is compared with the target's token at a + k.
        reach = min(size, length - a)
        if not torch.equal(judged[0, j, :reach], input_ids[0, a : a + reach]):
            return False
    return True


def test_training_forward_of_a_block_equals_the_draft_call(tiny, target, drafter):
    assert _training_equals_drafting(tiny, target, drafter)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_equality_catches(fault, tiny, target, drafter, monkeypatch):
    conftest = tiny.forward.__globals__
    real_labels, real_positions = loss_module.labels, mask_module.slot_positions

    def leaky_context(anchors, keep, lengths, positions, size):
        return dense_mask(anchors + 1, keep, lengths, positions, size)

    def leaky_blocks(anchors, keep, lengths, positions, size):
        mask = dense_mask(anchors, keep, lengths, positions, size)
        mask[..., positions:] = True
        return mask

    if fault == "label shift":
        monkeypatch.setattr(loss_module, "labels", lambda ids, a, b: real_labels(ids.roll(-1, 1), a, b))
    elif fault == "position shift":
        monkeypatch.setitem(conftest, "slot_positions", lambda a, b: real_positions(a, b) + 1)
    elif fault == "context leak":
        monkeypatch.setitem(conftest, "dense_mask", leaky_context)
    elif fault == "block leak":
        monkeypatch.setitem(conftest, "dense_mask", leaky_blocks)
    assert not _training_equals_drafting(tiny, target, drafter, fault)


def test_context_may_be_appended_in_pieces(tiny, target, drafter):
    _, features = _batch(tiny, rows=1)
    positions = torch.arange(24)[None]
    whole = drafter.context_kv(features, positions)
    pieces = [drafter.context_kv(features[:, a:b], positions[:, a:b]) for a, b in ((0, 9), (9, 10), (10, 24))]
    for layer, (k, v) in enumerate(whole):
        torch.testing.assert_close(torch.cat([p[layer][0] for p in pieces], 2), k, rtol=0, atol=1e-5)
        torch.testing.assert_close(torch.cat([p[layer][1] for p in pieces], 2), v, rtol=0, atol=1e-5)


def test_a_layer_computes_what_the_paper_says(tiny, target, drafter):
    """One layer by hand, from the formulas alone: no fused attention, no grouped heads."""
    _, features = _batch(tiny, rows=1, length=5)
    x = torch.randn(1, 4, 32)
    c = drafter.config
    for name, weight in drafter.named_parameters():
        if "norm" in name:  # ones would hide which norm comes where
            weight.uniform_(0.5, 1.5)
    layer = drafter.layers[0]
    p = dict(layer.named_parameters())

    def norm(t, weight):
        return t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps) * weight

    def rope(t, position):  # one head, one position: pairs (i, i + d/2) turn by position * theta^(-2i/d)
        half = c.head_dim // 2
        angle = torch.tensor([position * c.rope_theta ** (-2 * i / c.head_dim) for i in range(half)])
        a, b = t[:half], t[half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])

    fused = norm(features[0] @ drafter.fc.weight.T, drafter.hidden_norm.weight)
    inner = norm(x[0], p["input_layernorm.weight"])
    both = torch.cat([fused, inner])
    heads = []
    for h in range(c.num_heads):
        g = h // (c.num_heads // c.num_kv_heads)
        own, kv = slice(h * c.head_dim, (h + 1) * c.head_dim), slice(g * c.head_dim, (g + 1) * c.head_dim)
        q = norm(inner @ p["self_attn.q_proj.weight"][own].T, p["self_attn.q_norm.weight"])
        k = norm(both @ p["self_attn.k_proj.weight"][kv].T, p["self_attn.k_norm.weight"])
        v = both @ p["self_attn.v_proj.weight"][kv].T
        q = torch.stack([rope(t, 5 + i) for i, t in enumerate(q)])
        k = torch.stack([rope(t, i) for i, t in enumerate(k)])
        heads.append(torch.softmax(q @ k.T / c.head_dim**0.5, dim=-1) @ v)
    y = x[0] + torch.cat(heads, dim=-1) @ p["self_attn.o_proj.weight"].T
    z = norm(y, p["post_attention_layernorm.weight"])
    gated = F.silu(z @ p["mlp.gate_proj.weight"].T) * (z @ p["mlp.up_proj.weight"].T)
    expected = y + gated @ p["mlp.down_proj.weight"].T

    context = drafter.context_kv(features, torch.arange(5)[None])
    rotation = Rotation(torch.arange(5, 9)[None], c.head_dim, c.rope_theta)
    torch.testing.assert_close(layer(x, rotation, context[0], None)[0], expected, rtol=1e-4, atol=1e-4)


def test_dead_blocks_are_finite_and_disturb_nobody(tiny, target, drafter):
    input_ids, features = _batch(tiny)
    anchors = torch.tensor(ANCHORS)
    keep = torch.tensor([[True, True, False, False], [False] * 4])
    hidden = tiny.forward(drafter, target, features, input_ids, anchors, keep)
    assert hidden.isfinite().all()
    alive = tiny.forward(drafter, target, features, input_ids, anchors)
    torch.testing.assert_close(hidden[0, :2], alive[0, :2])


def test_parameters_have_the_published_names(tiny, target):
    drafter = Drafter(tiny.config(target, num_layers=5))
    names = set(drafter.state_dict())
    assert len(names) == 58
    inner = ["q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"]
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    for i in range(5):
        expected |= {f"layers.{i}.self_attn.{n}.weight" for n in inner}
        expected |= {f"layers.{i}.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
        expected |= {f"layers.{i}.{n}_layernorm.weight" for n in ("input", "post_attention")}
    assert names == expected


def test_a_generator_fixes_the_new_weights(tiny, target):
    config = tiny.config(target)
    one, two, other = tiny.drafter(config), tiny.drafter(config), tiny.drafter(config, seed=2)
    assert torch.equal(one.fc.weight, two.fc.weight)
    assert not torch.equal(one.fc.weight, other.fc.weight)


def test_bfloat16_autocast_runs_and_gradients_flow(tiny, target):
    drafter = tiny.drafter(tiny.config(target))
    input_ids, features = _batch(tiny)
    anchors = torch.tensor(ANCHORS)
    exact = tiny.forward(drafter, target, features, input_ids, anchors)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = tiny.forward(drafter, target, features.bfloat16(), input_ids, anchors)
    torch.testing.assert_close(hidden.float(), exact, rtol=0, atol=0.1)
    hidden.float().pow(2).mean().backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32, name
        assert parameter.grad.abs().sum() > 0, name
        assert parameter.grad.isfinite().all(), name


def test_rope_keeps_its_precision_in_a_bfloat16_drafter(tiny, target):
    drafter = tiny.drafter(tiny.config(target)).bfloat16()
    assert list(drafter.buffers()) == []
    x = torch.randn(1, 1, 1, 8)
    turned = Rotation(torch.tensor([[4097]]), 8, 1e6)(x)
    angle = torch.tensor([4097 * 1e6 ** (-2 * i / 8) for i in range(4)], dtype=torch.float64)
    a, b = x[0, 0, 0, :4], x[0, 0, 0, 4:]
    expected = torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])
    torch.testing.assert_close(turned[0, 0, 0], expected.float(), rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": 61}, "mask_token_id 61 is outside the target's vocabulary of 61"),
        ({"mask_token_id": -1}, "mask_token_id -1"),
        ({"block_size": 1}, "block_size"),
        ({"num_kv_heads": 3}, "cannot share 3"),
        ({"head_dim": 7}, "even head_dim"),
        ({"num_layers": 0}, "num_layers"),
        ({"tap_layer_ids": (3, 1)}, "must ascend"),
        ({"tap_layer_ids": (1, 6)}, r"within 0\.\.5"),
        ({"tap_layer_ids": ()}, "must ascend"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(tiny, target, changes, message):
    with pytest.raises(ValueError, match=message):
        tiny.config(target, **changes)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_config_takes_the_targets_geometry(tiny, family):
    target = tiny.target(family)
    config = tiny.config(target)
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (32, 4, 2, 8)
    assert config.rope_theta == target.config.rope_parameters["rope_theta"]
    assert config.num_target_layers == 6
    assert config.num_taps == 2
