"""The frozen target's forward: features of every position, and nothing after the last tap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec

import pipeflow
from pipeflow_stages.hf.causal_lm import CausalLM
from pipeflow_stages.types import Features, TokenBatch

if TYPE_CHECKING:
    from pipeflow import Context
    from pipeflow_stages.dflash.taps import Tapper
    from pipeflow_stages.hf.language_model import LanguageModel

__all__ = ["Target", "tapper_for"]

Kind = Literal["tapped", "zero"]


def tapper_for(target: LanguageModel, taps: int) -> Tapper:
    """A `Tapper` at the layers of rule 1.2 (see `taps.tap_layers`)."""
    from pipeflow_stages.dflash.taps import Tapper, tap_layers

    return Tapper(target.model, tap_layers(target.num_layers, taps))


class Target(pipeflow.Stage[TokenBatch, Features]):
    """Runs the frozen target over a batch and hands on the outputs of its tapped layers.

    The forward is cut after the last tap, under autocast to the device's fast type. Rows are padded on the
    right, so a causal target needs no attention mask. `features: zero` hands on zeros instead: the
    ablation that shows what the features are worth.
    """

    class Config(pipeflow.Config, frozen=True, kw_only=True):
        taps: Annotated[int, msgspec.Meta(ge=1, description="layers tapped, evenly spaced")] = 5
        features: Annotated[Kind, msgspec.Meta(description="zero: an ablation")] = "tapped"

    reads: ClassVar = {"target": CausalLM}
    device: ClassVar = True

    def setup(self, ctx: Context) -> None:
        self._tapper = tapper_for(ctx.read("target"), self.config.taps)

    def run(self, item: TokenBatch, ctx: Context) -> Features:
        import torch

        target = ctx.read("target")
        if self.config.features == "zero":
            width = self.config.taps * target.hidden_size
            shape = (*item.input_ids.shape, width)
            features = torch.zeros(shape, dtype=target.compute_dtype, device=item.input_ids.device)
        else:
            with target.autocast():
                features = self._tapper.features(item.input_ids)
        ctx.log(tokens=item.tokens)
        return Features(item, features.to(target.compute_dtype))
