"""The drafter as a resource: built to fit its target, trained in place, read by evaluation and broadcast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec

import pipeflow
from pipeflow.errors import PipeflowError
from pipeflow_stages.hf.causal_lm import CausalLM

if TYPE_CHECKING:
    from pipeflow import ResourceContext

__all__ = ["DrafterResource"]


class DrafterResource(pipeflow.Resource):
    """A DFlash drafter in float32 (matrix products run under autocast). `open` gives a `model.Drafter`.

    Sizes follow the target that it reads. `start` loads an earlier drafter's folder in place of new weights.
    """

    class Config(pipeflow.Config, frozen=True, kw_only=True):
        block_size: Annotated[int, msgspec.Meta(ge=2, description="slots a block, the anchor included")]
        mask_token_id: Annotated[int, msgspec.Meta(ge=0, description="a reserved id, in no data")]
        layers: Annotated[int, msgspec.Meta(ge=1)] = 5
        taps: Annotated[int, msgspec.Meta(ge=1, description="layers of the target tapped")] = 5
        intermediate_size: int | None = None
        init: Annotated[
            Literal["random", "target"], msgspec.Meta(description="target: copies of its last layers")
        ] = "random"
        start: pipeflow.InputPath | None = None

    reads: ClassVar = {"target": CausalLM}

    def open(self, ctx: ResourceContext) -> Any:
        import torch

        from pipeflow_stages.dflash.export import load_drafter
        from pipeflow_stages.dflash.inherit import inherit
        from pipeflow_stages.dflash.model import Drafter, config_for_target
        from pipeflow_stages.dflash.taps import tap_layers

        target, options = ctx.read("target"), self.config
        if options.mask_token_id >= target.vocab_size:
            raise PipeflowError(
                f"mask_token_id {options.mask_token_id} is out of range: {target.name!r} has "
                f"{target.vocab_size} token ids. Choose a reserved id that never occurs in the data"
            )
        try:
            taps = tuple(tap_layers(target.num_layers, options.taps))
        except ValueError as error:
            raise PipeflowError(f"target {target.name!r}: {error}") from None
        config = config_for_target(
            target.config,
            num_layers=options.layers,
            tap_layer_ids=taps,
            block_size=options.block_size,
            mask_token_id=options.mask_token_id,
            intermediate_size=options.intermediate_size,
        )
        if options.start is None:
            drafter = Drafter(config, torch.Generator().manual_seed(ctx.seed))
            if options.init == "target":
                inherit(drafter, target.model)
        else:
            drafter, found = load_drafter(options.start)
            if found != config:
                differ = [
                    name for name in config.__struct_fields__ if getattr(found, name) != getattr(config, name)
                ]
                raise PipeflowError(
                    f"the drafter in {options.start} differs from this file's in {', '.join(differ)}. "
                    "Set the same options, or start with new weights"
                )
        return drafter.to(ctx.device)

    def state(self, value: Any) -> dict[str, Any]:
        """The weights, in float32."""
        return {"weights": value.state_dict()}

    def load(self, value: Any, state: dict[str, Any]) -> None:
        value.load_state_dict(state["weights"])

    def snapshot(self, value: Any) -> Any:
        """Weights and buffers are cloned, without gradients; the host waits for none of it."""
        import copy

        return copy.deepcopy(value)
