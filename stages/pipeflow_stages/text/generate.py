"""Stage `text/generate`: the target answers every user turn of a batch of conversations."""

from __future__ import annotations

from collections.abc import Iterator  # noqa: TC003  (the engine resolves the hints of run)
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import msgspec
from msgspec import Meta

from pipeflow.config import Config as Options
from pipeflow.context import Context  # noqa: TC001
from pipeflow.errors import PipeflowError
from pipeflow.stage import Stage
from pipeflow_stages.hf.causal_lm import CausalLM
from pipeflow_stages.types import Conversation, Message, PromptBatch

if TYPE_CHECKING:
    import torch

    from pipeflow_stages.hf.language_model import LanguageModel

__all__ = ["Generate"]


class _Answer(NamedTuple):
    text: str
    cut: bool


class Generate(Stage[PromptBatch, Conversation]):
    """Answers the user turns in order; answers that a row already has are left out and made anew.

    Rows are padded on the left, so that all answers begin at one position. An answer without an end of turn
    within `max_new_tokens` marks its conversation `cut` and ends it; an empty answer drops the conversation,
    counted in metrics.jsonl. Under a drain the batch in hand is given up, counted too.

    Whether to go on depends on the tokens, so unlike other device stages this one reads them: it blocks its
    own lane's thread, never the loop.
    """

    class Config(Options, frozen=True):
        max_new_tokens: Annotated[int, Meta(ge=1)] = 256
        temperature: Annotated[float, Meta(ge=0)] = 0.0
        """0: greedy. Above: sampled, from the run's seed and the batch's number."""
        top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
        """Sample among the likeliest tokens that together have this probability."""

    reads: ClassVar = {"target": CausalLM}
    device = True

    def run(self, item: PromptBatch, ctx: Context) -> Iterator[Conversation]:
        target: LanguageModel = ctx.read("target")
        generator = ctx.generator
        rows = [_Row(conversation) for conversation in item.conversations]
        while asking := [row for row in rows if row.asks()]:
            answers = self._answer(target, [row.turns for row in asking], asking, generator, ctx)
            if ctx.stopping:
                ctx.log(left_out=len(rows))
                return
            for row, answer in zip(asking, answers, strict=True):
                row.take(answer)
        if empty := sum(row.empty for row in rows):
            ctx.log(dropped_empty=empty)
        yield from (row.conversation() for row in rows if not row.empty)

    def _answer(
        self,
        target: LanguageModel,
        turns: list[list[Message]],
        rows: list[_Row],
        generator: torch.Generator,
        ctx: Context,
    ) -> list[_Answer]:
        import torch

        prompts = []
        for row, asked in zip(rows, turns, strict=True):
            try:
                prompts.append(target.chat(asked, generation_prompt=True))
            except PipeflowError as error:
                raise PipeflowError(f"{row.source}: {error}") from error
            if (needed := len(prompts[-1]) + self.config.max_new_tokens) > target.max_positions:
                raise PipeflowError(
                    f"{row.source}: prompt and answer need {needed} positions, and {target.name!r} has "
                    f"{target.max_positions}. Remove the row, or lower max_new_tokens"
                )
        ids, attention = _pad_left(prompts, target.pad_id)
        with torch.inference_mode(), target.autocast():
            out = target.model.generate(
                ids.to(target.device),
                attention_mask=attention.to(target.device),
                generation_config=_options(target, self.config.max_new_tokens),
                logits_processor=_processors(self.config.temperature, self.config.top_p, generator),
                stopping_criteria=_stop_with(ctx),
            )
        return [_read(target, row) for row in out[:, ids.shape[1] :].tolist()]


class _Row:
    """A conversation on its way: what was asked and answered so far, and what is still to ask."""

    def __init__(self, conversation: Conversation) -> None:
        self._origin = conversation
        self.source = conversation.source or "a conversation without a source"
        self.turns: list[Message] = []
        self._waiting = [message for message in conversation.messages if message.role != "assistant"]
        self._cut = False
        self.empty = False
        if not any(message.role == "user" for message in self._waiting):
            raise PipeflowError(f"{self.source}: nothing to answer: it has no user turn")

    def asks(self) -> bool:
        """Move on to the next user turn; False if there is none or the conversation ended early."""
        if self._cut or self.empty or not any(message.role == "user" for message in self._waiting):
            return False
        while not self.turns or self.turns[-1].role != "user":
            self.turns.append(self._waiting.pop(0))
        return True

    def take(self, answer: _Answer) -> None:
        self.turns.append(Message("assistant", answer.text))
        self._cut = answer.cut
        self.empty = not answer.text.strip()

    def conversation(self) -> Conversation:
        return msgspec.structs.replace(self._origin, messages=tuple(self.turns), cut=self._cut)


def _pad_left(prompts: list[list[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [b, S] ids and attention mask, each row at the right edge."""
    import torch

    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad_id, dtype=torch.int64)
    attention = torch.zeros_like(ids)
    for place, prompt in enumerate(prompts):
        ids[place, width - len(prompt) :] = torch.tensor(prompt, dtype=torch.int64)
        attention[place, width - len(prompt) :] = 1
    return ids, attention


def _read(target: LanguageModel, ids: list[int]) -> _Answer:
    """The answer's text up to its end of turn; what follows that is padding of the batch."""
    end = next((place for place, token in enumerate(ids) if token in target.stop_ids), None)
    text = target.tokenizer.decode(ids[:end], skip_special_tokens=True)
    return _Answer(text, cut=end is None)


def _options(target: LanguageModel, max_new_tokens: int) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=sorted(target.stop_ids) or None,
        pad_token_id=target.pad_id,
    )


def _processors(temperature: float, top_p: float, generator: torch.Generator) -> Any:
    """Sampling as greedy decoding of disturbed scores: argmax(logits / T + Gumbel noise) is distributed as
    softmax(logits / T) (Gumbel-max; Gumbel 1954). So the noise is ours, and the global generator stays."""
    import torch
    from transformers import LogitsProcessor, LogitsProcessorList, TopPLogitsWarper

    class Noise(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            draws = torch.empty(scores.shape).exponential_(generator=generator)
            return scores.float() - draws.log().to(scores.device)

    class Temper(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores.float() / temperature

    if temperature == 0:
        return LogitsProcessorList()
    warp = [TopPLogitsWarper(top_p)] if top_p < 1 else []
    return LogitsProcessorList([Temper(), *warp, Noise()])


def _stop_with(ctx: Context) -> Any:
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Stopping(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            return torch.full((len(input_ids),), ctx.stopping, device=input_ids.device)

    return StoppingCriteriaList([Stopping()])
