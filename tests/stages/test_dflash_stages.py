"""The DFlash stages as the engine calls them: what they hand on, and what they refuse."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pipeflow.errors import PipeflowError
from pipeflow_stages.dflash.drafter import DrafterResource
from pipeflow_stages.dflash.pack import Pack
from pipeflow_stages.dflash.target import Target
from pipeflow_stages.dflash.train import Train, learning_rate
from pipeflow_stages.hf.language_model import LanguageModel
from pipeflow_stages.types import Packed, TokenBatch

if TYPE_CHECKING:
    from collections.abc import Callable

VOCABULARY, MASK, BLOCK, TAPS = 40, 39, 4, 2


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target() -> LanguageModel:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=5,
            num_attention_heads=2, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
        )
    )  # fmt: skip
    found = LanguageModel(model, name="tiny")
    found.compute_dtype = torch.float32
    return found


def drafter(target: LanguageModel, **options: Any) -> Any:
    given = {"block_size": BLOCK, "mask_token_id": MASK, "layers": 1, "taps": TAPS} | options
    context = SimpleNamespace(read=lambda role: target, seed=3, device="cpu", stopping=False)
    return DrafterResource(DrafterResource.Config(**given)).open(context)  # type: ignore[arg-type]


def batch(*rows: tuple[list[int], list[int]], documents: list[int] | None = None) -> TokenBatch:
    length = max(len(ids) for ids, _ in rows)
    return TokenBatch(
        input_ids=torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in rows]),
        loss_mask=torch.tensor([mask + [0] * (length - len(mask)) for _, mask in rows], dtype=torch.bool),
        lengths=[len(ids) for ids, _ in rows],
        documents=documents or list(range(len(rows))),
        supervised=[mask for _, mask in rows],
        tokens=sum(len(ids) for ids, _ in rows),
    )


def packed(
    target: LanguageModel, make_context: Callable[..., Any], item: TokenBatch, **options: Any
) -> Packed:
    stage = Target(Target.Config(taps=TAPS))
    context = make_context(reads={"target": target})
    stage.setup(context)
    given = {"block_size": BLOCK, "mask_token_id": MASK, "anchors": 3} | options
    return Pack(Pack.Config(**given)).run(stage.run(item, context), make_context())


ROW = (list(range(1, 13)), [0, 0, 0] + [1] * 9)


def test_a_row_is_packed_the_same_in_any_company(target: LanguageModel, make_context: Any) -> None:
    alone = packed(target, make_context, batch(ROW, documents=[5]))
    other = (list(range(20, 38)), [1] * 18)
    together = packed(target, make_context, batch(other, ROW, documents=[2, 5]))
    assert alone.anchors[0].tolist() == together.anchors[1].tolist()
    assert torch.equal(alone.labels[0], together.labels[1])
    assert torch.allclose(alone.features[0], together.features[1, :12], atol=1e-5)
    assert (alone.tokens, together.anchor_count) == (12, 6)


def test_a_document_that_comes_again_gets_other_anchors(target: LanguageModel, make_context: Any) -> None:
    chosen = {
        tuple(packed(target, make_context, batch(ROW, documents=[number])).anchors[0].tolist())
        for number in range(8)
    }
    assert len(chosen) > 1


def test_what_is_packed_describes_one_position(target: LanguageModel, make_context: Any) -> None:
    out = packed(target, make_context, batch(ROW))
    for block, anchor in enumerate(out.anchors[0].tolist()):
        assert out.block_ids[0, block].tolist() == [ROW[0][anchor]] + [MASK] * (BLOCK - 1)
        for slot in range(1, BLOCK):
            counted = out.weights[0, block, slot].item() > 0
            assert counted == (anchor + slot < 12)
            if counted:
                assert out.labels[0, block, slot].item() == ROW[0][anchor + slot]


def trainer(target: LanguageModel, make_context: Any, **options: Any) -> tuple[Train, Any, Any]:
    model = drafter(target)
    stage = Train(Train.Config(**({"steps": 10} | options)))
    context = make_context(reads={"target": target}, writes={"drafter": model})
    stage.setup(context)
    return stage, model, context


def test_a_step_lowers_the_loss_and_changes_every_parameter(target: LanguageModel, make_context: Any) -> None:
    stage, model, context = trainer(target, make_context, lr=1e-2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    item = packed(target, make_context, batch(ROW))
    losses = [stage.run(item, context).loss.item() for _ in range(6)]
    assert losses[-1] < losses[0]
    unchanged = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert unchanged == []


def test_a_batch_without_an_anchor_is_a_step_of_loss_zero(target: LanguageModel, make_context: Any) -> None:
    stage, model, context = trainer(target, make_context)
    item = packed(target, make_context, batch((ROW[0], [0] * 12)))
    assert item.anchor_count == 0
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert stage.run(item, context).loss.item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_blocks_of_another_size_are_refused(target: LanguageModel, make_context: Any) -> None:
    stage, _, context = trainer(target, make_context)
    item = packed(target, make_context, batch(ROW), block_size=BLOCK + 1)
    with pytest.raises(PipeflowError, match=r"blocks of 5 .* wants blocks of 4"):
        stage.run(item, context)


def test_a_mask_token_beyond_the_vocabulary_is_refused(target: LanguageModel) -> None:
    with pytest.raises(PipeflowError, match="mask_token_id 40 is out of range: 'tiny' has 40"):
        drafter(target, mask_token_id=VOCABULARY)


def test_the_learning_rate_rises_then_falls_as_a_cosine() -> None:
    rates = [learning_rate(step, 100, 1.0, 0.04) for step in range(101)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert math.isclose(rates[52], 0.5)
    assert rates[100] == 0.0
    assert all(a >= b for a, b in itertools.pairwise(rates[4:]))
    assert learning_rate(5, 0, 1.0, 0.04) == 0.0
