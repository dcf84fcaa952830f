"""Length buckets, right padding, the token budget."""

from __future__ import annotations

from typing import Any

import pytest

from pipeflow.errors import PipeflowError
from pipeflow_stages.text.batch import Batches
from pipeflow_stages.types import TokenRow


def row(length: int, document: int = 0) -> TokenRow:
    return TokenRow(list(range(1, length + 1)), [0] * (length // 2) + [1] * (length - length // 2),
                    source=f"a.jsonl:{document}", document=document)  # fmt: skip


def batches(rows: list[TokenRow], **config: Any) -> list[Any]:
    """What the engine does with a gather: a batch a bucket, the rest at the end."""
    stage = Batches(Batches.Config(**config))
    waiting: dict[Any, list[TokenRow]] = {}
    out = []
    for each in rows:
        members = waiting.setdefault(stage.bucket(each), [])
        members.append(each)
        if stage.full(members):
            out.append(stage.run(waiting.pop(stage.bucket(each))))
    return out + [stage.run(members) for members in waiting.values()]


def test_right_padding() -> None:
    (batch,) = batches([row(3, 5), row(7, 6)], bucket=8, tokens=64, pad_id=2)
    assert batch.input_ids.tolist() == [[1, 2, 3, 2, 2, 2, 2, 2], [1, 2, 3, 4, 5, 6, 7, 2]]
    assert batch.loss_mask.int().tolist() == [[0, 1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 0]]
    assert str(batch.input_ids.dtype) == "torch.int64"
    assert str(batch.loss_mask.dtype) == "torch.bool"
    assert batch.lengths == [3, 7]
    assert batch.documents == [5, 6]
    assert batch.supervised == [[0, 1, 1], [0, 0, 0, 1, 1, 1, 1]]
    assert batch.tokens == 10


def test_one_length_class_a_batch_and_never_above_the_budget() -> None:
    rows = [row(1 + n * 7 % 60, n) for n in range(200)]
    made = batches(rows, bucket=16, tokens=100, max_length=64)
    assert sorted(d for b in made for d in b.documents) == list(range(200))
    for batch in made:
        width = batch.input_ids.shape[1]
        assert width % 16 == 0
        assert all(width - 16 < length <= width for length in batch.lengths)
        assert batch.input_ids.numel() <= 100
    # Full ones are as full as they can be: another row would not fit.
    full = [b for b in made if b.input_ids.shape[1] == 32]
    assert full[0].input_ids.shape == (3, 32)


def test_the_last_bucket_ends_at_max_length() -> None:
    (batch,) = batches([row(50)], bucket=16, tokens=10, max_length=50)
    assert batch.input_ids.shape == (1, 50)


def test_a_row_above_max_length_is_named() -> None:
    with pytest.raises(PipeflowError, match=r"a\.jsonl:3: 65 tokens, more than max_length 64"):
        batches([row(65, 3)], max_length=64)


def test_a_mask_of_another_length_is_named() -> None:
    with pytest.raises(PipeflowError, match=r"a\.jsonl:9: 2 tokens but a loss mask of 1"):
        batches([TokenRow([1, 2], [1], source="a.jsonl:9")])
