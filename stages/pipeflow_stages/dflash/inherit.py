"""A drafter that starts from its target's last layers instead of noise.

The drafter feeds the target's LM head, so the target's final norm already has the right scale, and its last
layers write into the right space. With few steps to train, that start is worth more than the training: see
BENCHMARKS.md. Published recipes start from random weights; so does `init: random`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeflow.errors import PipeflowError

if TYPE_CHECKING:
    from pipeflow_stages.dflash.model import Drafter

__all__ = ["inherit"]

_PARTS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm",
    "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm",
    "post_attention_layernorm",
)  # fmt: skip


def inherit(drafter: Drafter, model: Any) -> None:
    """Copy the weights of a causal LM's last layers, one for each drafter layer, and of its final norm.

    The fusion passes the last tap on as it is and damps the others tenfold; its norm is that before the
    first copied layer. Norms of queries and keys are copied where the target has them, else they stay 1.
    Raises PipeflowError where the target has fewer layers, or layers of another shape.
    """
    import torch

    decoder, layers = model.model, list(drafter.layers)
    if len(decoder.layers) < len(layers):
        raise PipeflowError(
            f"init: target: at least {len(layers)} layers are needed, the target has {len(decoder.layers)}. "
            "Set fewer `layers`, or init: random"
        )
    sources = list(decoder.layers)[-len(layers) :]
    hidden = drafter.config.hidden_size
    with torch.no_grad():
        drafter.norm.weight.copy_(decoder.norm.weight)
        drafter.hidden_norm.weight.copy_(sources[0].input_layernorm.weight)
        drafter.fc.weight[:, :-hidden].mul_(0.1)
        drafter.fc.weight[:, -hidden:].copy_(torch.eye(hidden))
        for layer, source in zip(layers, sources, strict=True):
            for part in _PARTS:
                _copy(layer, source, part)


def _copy(layer: Any, source: Any, part: str) -> None:
    ours = layer.get_submodule(part).weight
    try:
        theirs = source.get_submodule(part).weight
    except AttributeError:
        if part.endswith(("q_norm", "k_norm")):
            return
        raise PipeflowError(f"init: target does not know this target's layers: there is no {part}") from None
    if ours.shape != theirs.shape:
        raise PipeflowError(
            f"init: target needs layers of one shape, but {part} is {tuple(theirs.shape)} in the target and "
            f"{tuple(ours.shape)} in the drafter. Leave `intermediate_size` out, or set init: random"
        )
    ours.copy_(theirs)
