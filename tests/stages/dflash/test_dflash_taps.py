"""Taps: the rule, and that a tapped feature is the output of the layer it names."""

from __future__ import annotations

import threading

import pytest
import torch

from pipeflow_stages.dflash.taps import Tapper, tap_layers


@pytest.mark.parametrize(
    ("layers", "count", "ids"),
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (64, 5, [1, 16, 31, 46, 61]),
        (32, 5, [1, 8, 15, 22, 29]),
        (30, 1, [15]),
        (1, 1, [0]),
        (6, 2, [1, 3]),
        (8, 5, [1, 2, 3, 4, 5]),
    ],
)
def test_rule_gives_the_published_layers(layers, count, ids):
    assert tap_layers(layers, count) == ids


def test_taps_are_different_layers_for_every_size():
    for layers in range(4, 70):
        for count in range(2, layers - 2):
            ids = tap_layers(layers, count)
            assert ids == sorted(set(ids))
            assert (len(ids), ids[0], ids[-1]) == (count, 1, layers - 3)


@pytest.mark.parametrize(("layers", "count"), [(6, 4), (3, 2), (36, 0), (0, 1)])
def test_impossible_counts_are_refused(layers, count):
    with pytest.raises(ValueError, match=r"tap"):
        tap_layers(layers, count)


def _reference(model, input_ids, ids):
    with torch.no_grad():
        states = model(input_ids=input_ids, output_hidden_states=True).hidden_states
    return torch.cat([states[i + 1] for i in ids], dim=-1)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_features_are_the_hidden_states_after_each_tapped_layer(tiny, family, attention):
    model = tiny.target(family, attention=attention)
    input_ids = torch.randint(tiny.vocabulary, (2, 19))
    tapper = Tapper(model, [0, 1, 3])
    cut = tapper.features(input_ids)
    assert cut.shape == (2, 19, 3 * 32)
    torch.testing.assert_close(cut, _reference(model, input_ids, [0, 1, 3]), rtol=0, atol=1e-5)
    logits, uncut = tapper.forward(input_ids)
    torch.testing.assert_close(cut, uncut, rtol=0, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(logits, model(input_ids=input_ids).logits, rtol=0, atol=1e-4)
    # The check sees a tap that is off by one.
    shifted = Tapper(model, [0, 1, 2]).features(input_ids)
    assert not torch.allclose(shifted, cut, atol=1e-2)


def test_nothing_after_the_last_tap_runs(tiny):
    model = tiny.target()
    input_ids = torch.randint(tiny.vocabulary, (1, 9))
    tapper = Tapper(model, [1, 3])
    before = tapper.features(input_ids)
    ran = []
    for module in [*model.model.layers[4:], model.model.norm, model.lm_head]:
        module.register_forward_hook(lambda module, *_: ran.append(module))
    assert torch.equal(tapper.features(input_ids), before)
    assert ran == []
    tapper.forward(input_ids)
    assert len(ran) == 4


def test_the_model_itself_is_left_alone(tiny):
    model = tiny.target()
    input_ids = torch.randint(tiny.vocabulary, (1, 9))
    before = model(input_ids=input_ids).logits
    names = [name for name, _ in model.named_parameters()]
    tapper = Tapper(model, [1, 3])
    assert not any(layer._forward_hooks for layer in model.model.layers)
    assert [name for name, _ in model.named_parameters()] == names
    assert len(model.model.layers) == 6
    assert model.config._attn_implementation == model.model.config._attn_implementation == "sdpa"
    assert torch.equal(model(input_ids=input_ids).logits, before)
    # Parameters are shared: new weights of the model are seen by its views.
    old = tapper.features(input_ids)
    model.model.layers[0].mlp.down_proj.weight.mul_(2.0)
    assert not torch.allclose(tapper.features(input_ids), old)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_the_cut_forward_reads_nothing_on_the_host(tiny, family, monkeypatch):
    model = tiny.target(family)
    input_ids = torch.randint(tiny.vocabulary, (2, 9))
    tapper = Tapper(model, [1, 3])

    def read(*_):
        raise AssertionError("a tensor was read on the host")

    for name in ("__bool__", "item", "tolist", "__int__", "__float__", "cpu", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, read)
    with pytest.raises(AssertionError, match="read on the host"):  # the plain decoder does read
        model.model(input_ids=input_ids, use_cache=False)
    tapper.features(input_ids)


def test_right_padding_changes_no_real_position(tiny):
    model = tiny.target()
    tapper = Tapper(model, [1, 3])
    short = torch.randint(tiny.vocabulary, (1, 7))
    padded = torch.cat([short, torch.zeros(1, 5, dtype=torch.int64)], dim=1)
    torch.testing.assert_close(tapper.features(padded)[:, :7], tapper.features(short), rtol=0, atol=1e-5)


def test_a_cached_forward_in_pieces_equals_one_forward(tiny):
    from transformers import DynamicCache

    model = tiny.target()
    tapper = Tapper(model, [1, 3])
    input_ids = torch.randint(tiny.vocabulary, (1, 12))
    logits, features = tapper.forward(input_ids)
    cache = DynamicCache(config=model.config)
    pieces = [tapper.forward(piece, cache) for piece in input_ids.split([5, 1, 4, 2], dim=1)]
    torch.testing.assert_close(torch.cat([p[0] for p in pieces], 1), logits, rtol=0, atol=1e-4)
    torch.testing.assert_close(torch.cat([p[1] for p in pieces], 1), features, rtol=0, atol=1e-5)


def test_threads_do_not_mix(tiny):
    model = tiny.target()
    tapper = Tapper(model, [1, 3])
    inputs = [torch.randint(tiny.vocabulary, (2, 8 + i)) for i in range(4)]
    expected = [tapper.features(ids) for ids in inputs]
    wrong = []

    def work(i):
        wrong.extend(i for _ in range(10) if not torch.equal(tapper.features(inputs[i]), expected[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("ids", [[], [3, 1], [1, 1], [-1], [6]])
def test_layers_that_do_not_exist_are_refused(tiny, ids):
    with pytest.raises(ValueError, match=r"must ascend within 0\.\.5"):
        Tapper(tiny.target(), ids)


def test_another_shape_of_model_is_refused():
    with pytest.raises(ValueError, match=r"cannot tap Linear"):
        Tapper(torch.nn.Linear(2, 2), [0])
