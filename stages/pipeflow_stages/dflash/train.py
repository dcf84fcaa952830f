"""One training step of the drafter: enqueued whole, with no look at a device value."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

import pipeflow
from pipeflow.errors import PipeflowError
from pipeflow_stages.dflash.drafter import DrafterResource
from pipeflow_stages.hf.causal_lm import CausalLM
from pipeflow_stages.types import Packed, Step

if TYPE_CHECKING:
    from torch import Tensor

    from pipeflow import Context

__all__ = ["Train", "learning_rate"]


def learning_rate(step: int, steps: int, peak: float, warm_up: float) -> float:
    """Linear warm-up over the first `warm_up` share of `steps`, then a cosine to 0. `step` counts from 0.

    Source: DFlash paper, appendix A.1 (cosine, warm-up ratio 0.04).
    """
    rising = max(1, round(steps * warm_up))
    if step < rising:
        return peak * (step + 1) / rising
    share = min(1.0, (step - rising) / max(1, steps - rising))
    return peak * 0.5 * (1 + math.cos(math.pi * share))


class Train(pipeflow.Stage[Packed, Step]):
    """AdamW on the drafter: cross-entropy with a fixed decay by slot (loss.py), warm-up, cosine, clip.

    The embedding and LM head are the target's, frozen. At its end it saves the drafter under `save`, in
    the layout of published DFlash drafts. A batch without an anchor is a step of loss 0. The logged
    `tokens_per_s` is a step's tokens over the host's time since the step before: the device is not asked.
    """

    class Config(pipeflow.Config, frozen=True, kw_only=True):
        steps: Annotated[int, msgspec.Meta(ge=1, description="length of the schedule")]
        lr: Annotated[float, msgspec.Meta(gt=0)] = 6e-4
        warm_up: Annotated[float, msgspec.Meta(ge=0, le=1, description="share of the steps")] = 0.04
        clip: Annotated[float, msgspec.Meta(gt=0, description="gradient norm")] = 1.0
        weight_decay: Annotated[float, msgspec.Meta(ge=0)] = 0.0
        betas: tuple[float, float] = (0.9, 0.999)
        chunk: Annotated[int, msgspec.Meta(ge=1, description="blocks of logits in memory at a time")] = 128
        save: pipeflow.OutputPath = "drafter"

    reads: ClassVar = {"target": CausalLM}
    writes: ClassVar = {"drafter": DrafterResource}
    device: ClassVar = True
    stateful: ClassVar = True

    def setup(self, ctx: Context) -> None:
        import torch

        drafter = ctx.write("drafter").train()
        self._parameters = list(drafter.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=self.config.lr,
            betas=self.config.betas,
            weight_decay=self.config.weight_decay,
            fused=torch.device(ctx.device).type == "cuda",
        )
        target = ctx.read("target")
        # Frozen, so its copy in the type of the products is made once and not in every step.
        self._head = target.head.detach().to(target.compute_dtype)
        self._step = 0
        self._tokens = 0
        self._last = time.perf_counter()

    def run(self, item: Packed, ctx: Context) -> Step:
        import torch

        drafter, target = ctx.write("drafter"), ctx.read("target")
        self._check(item, drafter.config)
        rate = learning_rate(self._step, self.config.steps, self.config.lr, self.config.warm_up)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        loss, correct, counts = self._loss(item, drafter, target)
        self._optimizer.zero_grad(set_to_none=False)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self.config.clip, foreach=True)
        self._optimizer.step()
        self._step += 1
        self._tokens += item.tokens
        loss = loss.detach()
        before, self._last = self._last, time.perf_counter()
        ctx.log(
            loss=loss,
            lr=rate,
            grad_norm=norm,
            tokens=item.tokens,
            tokens_per_s=item.tokens / max(self._last - before, 1e-9),
            anchors=item.anchor_count,
            slot_accuracy=correct / counts.clamp(min=1),
        )
        ctx.report(loss_last=loss, tokens=self._tokens)
        if self._step == 1:
            ctx.report(loss_first=loss)
        return Step(self._step, loss, item.tokens)

    def state(self) -> dict[str, Any]:
        """Steps and tokens so far, and what AdamW keeps of each parameter, in their order."""
        kept = [dict(self._optimizer.state.get(parameter, {})) for parameter in self._parameters]
        return {"step": self._step, "tokens": self._tokens, "optimizer": kept}

    def load(self, state: dict[str, Any]) -> None:
        """PipeflowError where the drafter has other parameters now."""
        kept = state["optimizer"]
        if len(kept) != len(self._parameters):
            raise PipeflowError(
                f"the checkpoint is of {len(kept)} parameters, the drafter has {len(self._parameters)}"
            )
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict(
            {"state": {index: one for index, one in enumerate(kept) if one}, "param_groups": groups}
        )
        self._step, self._tokens = state["step"], state["tokens"]

    def _loss(self, item: Packed, drafter, target) -> tuple[Tensor, Tensor, Tensor]:
        import torch
        from torch.nn import functional as F

        from pipeflow_stages.dflash.loss import drafter_loss
        from pipeflow_stages.dflash.mask import dense_mask, slot_positions

        rows, _, size = item.block_ids.shape
        length = item.features.shape[1]
        positions = slot_positions(item.anchors, size).view(rows, -1)
        context = torch.arange(length, device=item.features.device)[None]
        mask = dense_mask(item.anchors, item.keep, item.context_lengths, length, size)
        with target.autocast():
            embedded = F.embedding(item.block_ids.view(rows, -1), target.embedding)
            hidden = drafter(item.features, embedded, context, positions, mask)
            return drafter_loss(hidden, self._head, item.labels, item.weights, self.config.chunk)

    def _check(self, item: Packed, config) -> None:
        width = config.num_taps * config.hidden_size
        if item.block_ids.shape[-1] != config.block_size or item.features.shape[-1] != width:
            raise PipeflowError(
                f"the batch has blocks of {item.block_ids.shape[-1]} and features of width "
                f"{item.features.shape[-1]}, but the drafter wants blocks of {config.block_size} and width "
                f"{width} ({config.num_taps} taps of {config.hidden_size}). Give `block_size` and `taps` one "
                "value everywhere"
            )
        if item.mask_token_id != config.mask_token_id:
            raise PipeflowError(
                f"the batch has blocks filled with token {item.mask_token_id}, but the drafter's "
                f"mask_token_id is {config.mask_token_id}. Give `mask_token_id` one value everywhere"
            )

    def finish(self, ctx: Context) -> None:
        from pipeflow_stages.dflash.export import save_drafter
        from pipeflow_stages.files import explain

        drafter, target = ctx.write("drafter"), ctx.read("target")
        folder = ctx.output(self.config.save)
        try:
            save_drafter(drafter, drafter.config, folder, target.config)
        except OSError as error:
            raise explain(error, folder) from error
