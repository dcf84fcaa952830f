"""How well the drafter drafts now: teacher-forced on held-out text, and by the true loop at the end."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import Meta

import pipeflow
from pipeflow_stages.dflash.drafter import DrafterResource
from pipeflow_stages.dflash.target import tapper_for
from pipeflow_stages.hf.causal_lm import CausalLM
from pipeflow_stages.rows import Rows

if TYPE_CHECKING:
    from pipeflow import Context
    from pipeflow_stages.types import TokenRow

__all__ = ["DRAIN_SECONDS", "Evaluate"]

DRAIN_SECONDS = 5.0
"""What a measurement may still take once a drain is seen: a first signal ends a run within 30 s."""


class Evaluate(pipeflow.Stage[object, None]):
    """Measures tau = tokens accepted / verifications, the bonus token included (see `decode.py`).

    Before the first step: `tau_start` and `tau_constant`, the best fixed draft. On every item: the
    teacher-forced tau. At the end: `tau_end`, then the draft-and-verify loop on `decode_rows` prompts
    against plain greedy decoding in float32: `tau_decode`, both speeds, and `lossless`.

    A drain shortens it: a measurement under way, and the last one, go on for `DRAIN_SECONDS` at most, and
    no decoding begins. A tau over fewer rows than the others would not compare, so it is not told.
    """

    class Config(pipeflow.Config, frozen=True, kw_only=True):
        taps: Annotated[int, Meta(ge=1, description="as the target's stage")] = 5
        features: Annotated[Literal["tapped", "zero"], Meta(description="as the target's stage")] = "tapped"
        rows_at_once: Annotated[int, Meta(ge=1)] = 8
        decode_rows: Annotated[int, Meta(ge=0, description="prompts of the true loop")] = 4
        decode_tokens: Annotated[int, Meta(ge=1, description="new tokens a prompt, at most")] = 64

    reads: ClassVar = {"target": CausalLM, "drafter": DrafterResource, "rows": Rows}
    device: ClassVar = True

    def setup(self, ctx: Context) -> None:
        from pipeflow_stages.dflash.decode import constant_tau

        target, drafter = ctx.read("target"), ctx.read("drafter")
        rows: list[TokenRow] = ctx.read("rows")
        self._tapper: Any = tapper_for(target, self.config.taps)
        if self.config.features == "zero":
            self._tapper = _Zero(self._tapper)
        self._batches: list[tuple[Any, Any, Any, list[list[int]]]] = []
        by_length = sorted(rows, key=lambda row: len(row.input_ids))
        for start in range(0, len(by_length), self.config.rows_at_once):
            if ctx.stopping:  # in the load: there is nothing to measure
                self._batches.clear()
                return
            self._batches.append(
                self._batch(target, by_length[start : start + self.config.rows_at_once], ctx.device)
            )
        constant = constant_tau([(row.input_ids, row.loss_mask) for row in rows], drafter.config.block_size)
        ctx.report(tau_constant=round(constant.tau, 6))
        if not ctx.resumed:  # then it was measured, before the first step
            self._teacher_forced(ctx, step=0, report="tau_start")

    def _batch(self, target: Any, rows: list[TokenRow], device: str) -> tuple[Any, Any, Any, list[list[int]]]:
        """Rows of like length, padded on the right, with their features: the target is frozen, so once."""
        import torch

        length = max(len(row.input_ids) for row in rows)
        ids = torch.tensor(
            [row.input_ids + [0] * (length - len(row.input_ids)) for row in rows], device=device
        )
        supervised = [row.loss_mask + [0] * (length - len(row.loss_mask)) for row in rows]
        mask = torch.tensor(supervised, dtype=torch.bool, device=device)
        with target.autocast():
            features = self._tapper.features(ids).to(target.compute_dtype)
        return features, ids, mask, supervised

    def run(self, item: object, ctx: Context) -> None:
        if ctx.stopping:  # the last measurement follows soon
            return
        step = getattr(item, "step", None)
        self._teacher_forced(ctx, step=step if isinstance(step, int) else (ctx.sequence or 0) + 1)

    def _teacher_forced(self, ctx: Context, step: int, report: str = "") -> None:
        """Counts stay on the device; they are read when the job's fence is reached."""
        from pipeflow_stages.dflash.decode import teacher_forced

        target, drafter = ctx.read("target"), ctx.read("drafter")
        total: list[Any] = []
        end = math.inf
        for features, ids, mask, supervised in self._batches:
            if ctx.stopping:
                end = min(end, time.monotonic() + DRAIN_SECONDS)
            if time.monotonic() > end:
                return
            with target.autocast():
                found = teacher_forced(
                    drafter, features, ids, mask, target.embedding, target.head, supervised=supervised
                )
            total = list(found) if not total else [a + b for a, b in zip(total, found, strict=True)]
        if not total:
            return
        accepted, blocks, histogram = total
        tau = accepted.float() / blocks.clamp(min=1)
        ctx.log(
            step=step, mode="teacher_forced", tau=tau, accepted=accepted, blocks=blocks, histogram=histogram
        )
        if report:
            ctx.report(**{report: tau})

    def finish(self, ctx: Context) -> None:
        self._teacher_forced(ctx, step=ctx.version("drafter").step, report="tau_end")
        if self.config.decode_rows and not ctx.stopping:
            self._decode(ctx)

    def _decode(self, ctx: Context) -> None:
        """The true loop, one prompt at a time, in float32. It reads each token, so the host waits: after
        the last item, when nothing else runs."""
        from pipeflow_stages.dflash.decode import compare, plain_greedy, speculative_greedy

        target, drafter = ctx.read("target"), ctx.read("drafter")
        verdicts: list[str] = []
        accepted: list[int] = []
        seconds = [0.0, 0.0]
        tokens = [0, 0]
        limit = self.config.decode_tokens
        for row in ctx.read("rows")[: self.config.decode_rows]:
            if ctx.stopping:
                break
            # Plain text is supervised from its first token on; a prompt has at least one.
            prompt = row.input_ids[: max(1, row.loss_mask.index(1))]
            begun = time.perf_counter()
            plain = plain_greedy(target.model, prompt, limit, target.stop_ids, tapper=self._tapper)
            between = time.perf_counter()
            drafted = speculative_greedy(
                target.model, drafter, prompt, limit, target.stop_ids, tapper=self._tapper
            )
            seconds[0] += between - begun
            seconds[1] += time.perf_counter() - between
            tokens[0] += len(plain.tokens)
            tokens[1] += len(drafted.tokens)
            accepted += drafted.accepted
            verdicts.append(compare(plain, drafted))
        if not accepted:
            return
        tau = sum(accepted) / len(accepted)
        speeds = [count / max(took, 1e-9) for count, took in zip(tokens, seconds, strict=True)]
        size = drafter.config.block_size
        ctx.log(
            step=ctx.version("drafter").step,
            mode="decode",
            tau=tau,
            accepted=sum(accepted),
            blocks=len(accepted),
            histogram=[accepted.count(n) for n in range(size + 1)],
            plain_tokens_per_s=speeds[0],
            decode_tokens_per_s=speeds[1],
            ties=verdicts.count("tie"),
            different=verdicts.count("different"),
        )
        ctx.report(
            tau_decode=tau,
            plain_tokens_per_s=speeds[0],
            decode_tokens_per_s=speeds[1],
            speed_up=speeds[1] / speeds[0],
            lossless="different" not in verdicts,
            decode_ties=verdicts.count("tie"),
        )


class _Zero:
    """A tapper whose features are zeros: the ablation."""

    def __init__(self, tapper: Any) -> None:
        self._tapper = tapper

    def features(self, ids: Any) -> Any:
        return self._tapper.features(ids).zero_()

    def forward(self, ids: Any, cache: Any = None) -> tuple[Any, Any]:
        logits, features = self._tapper.forward(ids, cache)
        return logits, features.zero_()
