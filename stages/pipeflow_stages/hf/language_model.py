"""A frozen causal language model with what the stages ask of it. Built by `hf/causal_lm` and its kin."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from pipeflow.errors import PipeflowError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from pipeflow_stages.types import Message

__all__ = ["LanguageModel", "autocast", "compute_dtype"]

_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>")
"""Ends of turns by name. Only those that the tokenizer has as special tokens count."""


def compute_dtype(device: str) -> torch.dtype:
    """bfloat16 where the device multiplies it in hardware, else float32.

    On a CPU that means AVX512-BF16, AMX or Arm's BF16; without them bfloat16 is slower than float32.
    """
    import torch

    kind = torch.device(device).type
    if kind == "cpu":
        asked = getattr(torch.cpu, "get_capabilities", dict)()
        fast = any(asked.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    elif kind == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = False
    return torch.bfloat16 if fast else torch.float32


def autocast(device: str, dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """Matrix products in `dtype`; nothing at all where `dtype` is float32."""
    import torch

    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(torch.device(device).type, dtype=dtype)


class LanguageModel:
    """`model` (eval, no gradients), `tokenizer` (may be None), `config` (the text model's) and `device`.

    `stop_ids`: whatever ends an answer: end of text and end of turn. `pad_id`: for padding that masks hide,
    so any valid id does; the tokenizer's, else the lowest stop id, else 0. Loaded from GGUF, the pad token
    may be the end of turn: so never tell padding by its id. `compute_dtype`: see `autocast`.
    """

    def __init__(self, model: Any, tokenizer: Any = None, *, name: str, device: str = "cpu") -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config()
        self.name = name
        self.device = device
        self.stop_ids = _stop_ids(model, tokenizer)
        pad = getattr(tokenizer, "pad_token_id", None)
        self.pad_id: int = pad if pad is not None else min(self.stop_ids, default=0)
        self.compute_dtype = compute_dtype(device)

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table, so one above the largest valid id."""
        return self.embedding.shape[0]

    @property
    def max_positions(self) -> int:
        return self.config.max_position_embeddings

    @property
    def embedding(self) -> Tensor:
        """[vocab_size, hidden_size], frozen."""
        return self.model.get_input_embeddings().weight

    @property
    def head(self) -> Tensor:
        """[vocab_size, hidden_size], frozen; the embedding itself where the two are tied."""
        return self.model.get_output_embeddings().weight

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Forwards in `compute_dtype` on this model's device."""
        return autocast(self.device, self.compute_dtype)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of `text`. `special`: also those that the tokenizer puts around a document."""
        if self.tokenizer is None:
            raise PipeflowError(f"model {self.name!r} has no tokenizer. Feed tokens, or use another model")
        return list(self.tokenizer.encode(text, add_special_tokens=special))

    def chat(self, messages: Sequence[Message], *, generation_prompt: bool = False) -> list[int]:
        """Token ids of the turns by the tokenizer's chat template. `generation_prompt`: open the answer.

        PipeflowError: no tokenizer, no template, or the template refuses these turns.
        """
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise PipeflowError(
                f"model {self.name!r} has no chat template, so conversations cannot become tokens. "
                'Use an instruction-tuned model, or rows of plain text ({"text": ...}); a local model gets '
                "a template by a chat_template.jinja file in its folder"
            )
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self.tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=generation_prompt
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise PipeflowError(
                f"the chat template of {self.name!r} refuses the turns "
                f"{', '.join(m.role for m in messages) or '(none)'}: {error}"
            ) from error
        return self.encode(text)


def _stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    ids: set[int] = set()
    for owner in (getattr(model, "generation_config", None), model.config, tokenizer):
        found = getattr(owner, "eos_token_id", None)
        ids.update(found if isinstance(found, list) else [] if found is None else [found])
    if tokenizer is not None:
        special = {str(t): i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        ids.update(special[token] for token in _TURN_ENDS if token in special)
    return frozenset(ids)
