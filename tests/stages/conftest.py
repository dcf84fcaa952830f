"""A context for stages called by hand, and a tiny chat model built from nothing (no download)."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from pipeflow.context import Context

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pipeflow_stages.hf.language_model import LanguageModel

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def make_context(tmp_path: Path) -> Callable[..., Context]:
    """`make_context(reads={...}, sequence=3, stop=event)`: what the engine would hand to a stage."""

    def make(**changes: Any) -> Context:
        given: dict[str, Any] = {
            "stage": "stage",
            "lane": 0,
            "device": "cpu",
            "run_dir": tmp_path / "run",
            "stop": threading.Event(),
            "seed": 7,
            "sequence": None,
            "reads": {},
            "writes": {},
            "versions": {},
        }
        return Context(**(given | changes))

    return make


def make_tokenizer(template: str | None = TEMPLATE) -> Any:
    """Byte-level, one token a byte, two special ones; decoding is exact."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(names[:3])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=names[:2]
    )
    tokenizer.chat_template = template
    return tokenizer


def make_model(vocabulary: int = 259, seed: int = 0, positions: int = 512) -> Any:
    """A random Qwen3 of two layers, float32. Wide weights: its top two logits lie apart."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=positions,
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture
def make_target() -> Callable[..., LanguageModel]:
    """`make_target(template=None, seed=1)`: a `LanguageModel` around the two above, exact in float32."""
    import torch

    from pipeflow_stages.hf.language_model import LanguageModel

    def make(template: str | None = TEMPLATE, **model: Any) -> LanguageModel:
        target = LanguageModel(make_model(**model), make_tokenizer(template), name="tiny", device="cpu")
        target.compute_dtype = torch.float32
        return target

    return make


class DiskFull:
    """The disk is full from write number `after` on: each of the calls that can meet it counts."""

    CALLS = ("open", "write", "fsync", "replace", "rename")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        self._left = after
        self.hit = False
        for name in self.CALLS:
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            writes = name != "open" or (len(args) > 1 and args[1] & (os.O_WRONLY | os.O_RDWR))
            if writes:
                self._left -= 1
                if self._left < 0:
                    self.hit = True
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(args[0]))
            return real(*args, **kwargs)

        return call


@pytest.fixture
def every_full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], None]], int]:
    """Calls `attempt(n)` with a disk that fills at its first, second, .. write, until it does not any more.

    `attempt` catches what it expects; returns the number of places where the disk was full.
    """

    def every(attempt: Callable[[int], None]) -> int:
        for after in range(200):
            with monkeypatch.context() as patch:
                disk = DiskFull(patch, after)
                attempt(after)
            if not disk.hit:
                return after
        raise AssertionError("the disk was full 200 times and still is")

    return every


@pytest.fixture
def one_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def saved_model(tmp_path: Path) -> Callable[..., Path]:
    """`saved_model(template=None)`: the tiny model and tokenizer saved in transformers' layout."""

    def save(template: str | None = TEMPLATE) -> Path:
        folder = tmp_path / "saved"
        make_model().save_pretrained(folder)
        make_tokenizer(template).save_pretrained(folder)
        return folder

    return save
