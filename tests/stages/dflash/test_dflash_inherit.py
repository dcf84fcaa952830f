"""A drafter that starts from its target's last layers."""

from __future__ import annotations

import pytest
import torch

from pipeflow.errors import PipeflowError
from pipeflow_stages.dflash.inherit import inherit
from pipeflow_stages.dflash.model import Drafter, config_for_target


def _target(family: str):
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 5,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
    }  # fmt: skip
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**sizes))
    return LlamaForCausalLM(LlamaConfig(**sizes))


def _drafter(target, **changes) -> Drafter:
    options = {"num_layers": 2, "tap_layer_ids": (1, 2), "block_size": 4, "mask_token_id": 39} | changes
    return Drafter(config_for_target(target.config, **options), torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_the_last_layers_and_the_final_norm_are_copied(family: str) -> None:
    target = _target(family)
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if "norm" in name:
                weight.copy_(torch.rand_like(weight) + 0.5)
    drafter = _drafter(target)
    inherit(drafter, target)
    for ours, theirs in zip(drafter.layers, target.model.layers[3:], strict=True):
        for name, weight in theirs.named_parameters():
            assert torch.equal(ours.get_parameter(name), weight), name
    assert torch.equal(drafter.norm.weight, target.model.norm.weight)
    assert torch.equal(drafter.hidden_norm.weight, target.model.layers[3].input_layernorm.weight)
    features = torch.randn(1, 3, 32)
    last = features[..., 16:]
    rest = features[..., :16] @ drafter.fc.weight[:, :16].T
    assert torch.allclose(drafter.fc(features), last + rest, atol=1e-5)
    # Copies, not the target's own: training must not change the frozen target.
    assert drafter.norm.weight.data_ptr() != target.model.norm.weight.data_ptr()


def test_layers_of_another_shape_are_refused() -> None:
    target = _target("qwen3")
    with pytest.raises(PipeflowError, match=r"mlp\.gate_proj is \(24, 16\) in the target and \(32, 16\)"):
        inherit(_drafter(target, intermediate_size=32), target)


def test_more_layers_than_the_target_has_are_refused() -> None:
    target = _target("qwen3")
    with pytest.raises(PipeflowError, match="at least 6 layers are needed, the target has 5"):
        inherit(_drafter(target, num_layers=6), target)
