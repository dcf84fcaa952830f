"""Features of a frozen target: the outputs of a few of its decoder layers, concatenated.

Layer ids count decoder layers from 0; the feature of id `i` is that layer's *output*, which Hugging Face
calls `hidden_states[i + 1]` (its index 0 is the embedding).
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

__all__ = ["Tapper", "tap_layers"]

# A name that transformers does not know makes it build no attention mask at all; see `_without_mask`.
_MASKLESS = "pipeflow_causal_without_mask"


def tap_layers(num_layers: int, count: int) -> list[int]:
    """Which layers to tap: `count` ids evenly spaced from 1 to `num_layers - 3`, rounded to nearest
    (halves to even).

    One tap alone is `num_layers // 2`. Source: DFlash paper, section 5 (second layer to third-to-last).
    Raises ValueError when the target has too few layers for `count` different ids.
    """
    if count < 1:
        raise ValueError(f"a drafter needs at least one tapped layer, got {count}; set taps to 1 or more")
    if count == 1:
        if num_layers < 1:
            raise ValueError(f"a target with {num_layers} layers has nothing to tap")
        return [num_layers // 2]
    first, last = 1, num_layers - 3
    most = max(1, last - first + 1)
    if count > most:
        raise ValueError(
            f"{count} taps do not fit a target of {num_layers} layers: ids 1 to {last} leave at most {most}; "
            f"set taps to {most} or fewer"
        )
    return [round(first + i * (last - first) / (count - 1)) for i in range(count)]


class Tapper:
    """Runs a causal LM and returns the outputs of chosen layers.

    The model itself is left alone. The tapper owns two *views* of its decoder that share every parameter:
    a cut one (layers up to the last tap, no final norm, no LM head) for `features`, and a whole one for
    `forward`. Hooks sit only on the views' own copies of the tapped layers. Calls from several threads
    do not mix.

    `model` is a Hugging Face causal LM whose decoder is `model.model` with `layers` and `norm` (Qwen3,
    Llama and their kin). Raises ValueError for another shape of model, or for layer ids that it lacks or
    that do not ascend.
    """

    def __init__(self, model: nn.Module, layer_ids: Sequence[int]) -> None:
        decoder = getattr(model, "model", None)
        layers = cast("nn.ModuleList | None", getattr(decoder, "layers", None))
        if decoder is None or layers is None or not hasattr(decoder, "norm"):
            raise ValueError(
                f"cannot tap {type(model).__name__}: expected a causal LM with model.layers and model.norm, "
                "as Qwen3ForCausalLM and LlamaForCausalLM have"
            )
        ids = list(layer_ids)
        if not ids or ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= len(layers):
            raise ValueError(f"tapped layers {ids} must ascend within 0..{len(layers) - 1} of this target")
        self.layer_ids = ids
        self._model = model
        self._local = threading.local()
        taps = {i: self._hooked(layers[i]) for i in ids}
        tapped: list[nn.Module] = [taps.get(i, layer) for i, layer in enumerate(layers)]
        self._cut = _view(decoder, tapped[: ids[-1] + 1], final_norm=False)
        self._whole = _view(decoder, tapped, final_norm=True)
        self._cache_keyword = _cache_keyword(decoder)

    def features(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Tapped outputs of `input_ids` int64 [b, S]: [b, S, K*H], in tap order, without gradient.

        Nothing after the last tap is computed. Rows padded on the right need no attention mask: the model
        is causal, so real positions never see padding (the features of padding are meaningless).
        Without a mask nothing here makes the host wait for a device.
        """
        import torch

        with torch.no_grad():
            _, taps = self._run(self._cut, input_ids, attention_mask=attention_mask, use_cache=False)
            return torch.cat(taps, dim=-1)

    def forward(self, input_ids: Tensor, cache: Any = None) -> tuple[Tensor, Tensor]:
        """The whole model on `input_ids` int64 [b, s] after what `cache` (a DynamicCache) holds.

        Returns logits [b, s, V] and features [b, s, K*H]; the cache grows by s.
        """
        import torch

        with torch.no_grad():
            arguments = {"use_cache": cache is not None, self._cache_keyword: cache}
            output, taps = self._run(self._whole, input_ids, **arguments)
            head = cast("Any", self._model).get_output_embeddings()
            return head(output.last_hidden_state), torch.cat(taps, dim=-1)

    def _run(self, view: nn.Module, input_ids: Tensor, **arguments: Any) -> tuple[Any, list[Tensor]]:
        taps: list[Tensor] = []
        self._local.taps = taps
        try:
            output = view(input_ids=input_ids, **arguments)
        finally:
            self._local.taps = None
        return output, taps

    def _hooked(self, layer: nn.Module) -> nn.Module:
        clone = _shallow(layer)
        clone.register_forward_hook(self._collect)
        return clone

    def _collect(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        # Older decoder layers return a tuple whose first entry is the hidden state.
        self._local.taps.append(output[0] if isinstance(output, tuple) else output)


def _shallow(module: nn.Module) -> nn.Module:
    """A copy of `module` with its own hooks and child table, and the very same children and parameters."""
    clone = object.__new__(type(module))
    clone.__dict__ = dict(module.__dict__)
    clone.__dict__["_modules"] = dict(module._modules)
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs"):
        clone.__dict__[hooks] = OrderedDict()
    clone.__dict__["training"] = False
    return clone


def _view(decoder: nn.Module, layers: list[nn.Module], *, final_norm: bool) -> nn.Module:
    from torch import nn

    view = cast("Any", _shallow(decoder))
    view.layers = nn.ModuleList(layers)
    if not final_norm:
        view.norm = nn.Identity()
        view.config = _without_mask(view.config)
    return view


def _without_mask(config: Any) -> Any:
    """The decoder's own view of its config, changed so that it builds no mask when SDPA is causal anyway.

    Without a padding mask transformers still looks for packed rows, and that look reads a device value:
    the host would wait for the GPU once a forward. With no mask at all its SDPA attention is causal, so
    the result is the same. Other attentions, and sliding layers, need the mask and keep it.
    """
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if config._attn_implementation != "sdpa" or kinds != {"full_attention"}:
        return config
    changed = copy.copy(config)
    changed._attn_implementation = _MASKLESS
    return changed


def _cache_keyword(decoder: nn.Module) -> str:
    # transformers renamed the argument within 5.x; the old name then warns.
    names = inspect.signature(decoder.forward).parameters
    return "cache" if "cache" in names else "past_key_values"
