"""Tiny targets and drafters, float32, one thread."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeflow_stages.dflash.anchors import anchors_of_batch
from pipeflow_stages.dflash.decode import Generation, plain_greedy
from pipeflow_stages.dflash.loss import drafter_loss, labels, loss_weights
from pipeflow_stages.dflash.mask import block_ids, dense_mask, slot_positions
from pipeflow_stages.dflash.model import Drafter, DrafterConfig, config_for_target
from pipeflow_stages.dflash.taps import Tapper

VOCABULARY = 61
MASK_TOKEN = 60


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_target(family: str = "qwen3", layers: int = 6, attention: str = "sdpa", seed: int = 0) -> Any:
    """A random target. Weights are drawn wide, so that its top two logits lie well apart."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "initializer_range": 0.25,
        "attn_implementation": attention,
    }
    if family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    return model.eval().requires_grad_(False)


def make_config(target: Any, block_size: int = 4, **changes: Any) -> DrafterConfig:
    config = config_for_target(
        target.config, num_layers=2, tap_layer_ids=(1, 3), block_size=block_size, mask_token_id=MASK_TOKEN
    )
    return DrafterConfig(**{**{f: getattr(config, f) for f in config.__struct_fields__}, **changes})


def make_drafter(config: DrafterConfig, seed: int = 1) -> Drafter:
    return Drafter(config, torch.Generator().manual_seed(seed))


def forward(
    drafter: Drafter,
    target: Any,
    features: torch.Tensor,
    input_ids: torch.Tensor,
    anchors: torch.Tensor,
    keep: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """A training forward: hidden states [b, N, B, H]."""
    size = drafter.config.block_size
    rows, length = input_ids.shape
    keep = torch.ones_like(anchors, dtype=torch.bool) if keep is None else keep
    ids = block_ids(input_ids, anchors, size, drafter.config.mask_token_id).flatten(1)
    if mask is None:
        mask = dense_mask(anchors, keep, torch.full((rows,), length), length, size)
    hidden = drafter(
        features,
        target.get_input_embeddings()(ids),
        torch.arange(length)[None],
        slot_positions(anchors, size).flatten(1),
        mask,
    )
    return hidden.view(rows, anchors.shape[1], size, -1)


def fit(drafter: Drafter, target: Any, ids: list[int], loss_mask: list[int], steps: int) -> None:
    """Overfit one text: a training step as the trainer does it, `steps` times."""
    size = drafter.config.block_size
    input_ids = torch.tensor([ids])
    supervised = torch.tensor([loss_mask]).bool()
    features = Tapper(target, drafter.config.tap_layer_ids).features(input_ids)
    head = target.get_output_embeddings().weight
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3, weight_decay=0.0)
    for step in range(steps):
        chosen = anchors_of_batch([loss_mask], [0], 24, seed=0, draw=step)
        anchors, keep = torch.tensor(chosen.anchors), torch.tensor(chosen.keep)
        hidden = forward(drafter, target, features, input_ids, anchors, keep)
        weights = loss_weights(anchors, keep, supervised, size)
        loss = drafter_loss(hidden, head, labels(input_ids, anchors, size), weights).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.fixture
def tiny() -> SimpleNamespace:
    return SimpleNamespace(
        target=make_target,
        config=make_config,
        drafter=make_drafter,
        forward=forward,
        vocabulary=VOCABULARY,
        mask_token=MASK_TOKEN,
    )


@pytest.fixture(scope="module")
def fitted() -> SimpleNamespace:
    """A target, a text it decoded greedily, and a drafter that learnt most (not all) of that text."""
    torch.set_num_threads(1)
    target = make_target(layers=6, seed=3)
    prompt = [5, 17, 42, 8, 23, 11]
    text: Generation = plain_greedy(target, prompt, 40)
    ids = prompt + text.tokens
    loss_mask = [0] * len(prompt) + [1] * len(text.tokens)
    half = make_drafter(make_config(target))
    fit(half, target, ids, loss_mask, steps=14)
    full = make_drafter(make_config(target))
    fit(full, target, ids, loss_mask, steps=150)
    embed = target.get_input_embeddings().weight
    head = target.get_output_embeddings().weight
    for drafter in (half, full):
        drafter.requires_grad_(False)
    return SimpleNamespace(
        target=target, prompt=prompt, text=text, ids=ids, loss_mask=loss_mask, half=half, full=full,
        embed=embed, head=head,
    )  # fmt: skip
