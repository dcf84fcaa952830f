"""Stage `text/chat`: a conversation becomes tokens and the mask of those that are supervised."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, cast

from msgspec import Meta

from pipeflow.config import Config as Options
from pipeflow.context import Context  # noqa: TC001  (the engine resolves the hints of run)
from pipeflow.errors import PipeflowError
from pipeflow.item import DROP
from pipeflow.stage import Stage
from pipeflow_stages.hf.causal_lm import CausalLM
from pipeflow_stages.types import Conversation, TokenRow

if TYPE_CHECKING:
    from pipeflow_stages.hf.language_model import LanguageModel

__all__ = ["Chat", "tokens_of"]


class Chat(Stage[Conversation, TokenRow]):
    """Applies the target's chat template. The mask is 1 on every token of an assistant's answer and on
    the end of turn after it; nothing else. In plain text every token is supervised.

    Raises PipeflowError, naming the row, where nothing would be supervised, where the model has no chat
    template, or where the template renders a turn otherwise once more turns follow (then no mask is right).
    """

    class Config(Options, frozen=True):
        max_length: Annotated[int, Meta(ge=2)] = 1024
        """Tokens a row."""
        over_long: Literal["drop", "truncate", "error"] = "drop"
        """What happens to longer rows. Each dropped one is a line of metrics.jsonl."""

    reads: ClassVar = {"target": CausalLM}

    def run(self, item: Conversation, ctx: Context) -> TokenRow:
        target: LanguageModel = ctx.read("target")
        try:
            ids, mask = tokens_of(target, item)
        except PipeflowError as error:
            raise PipeflowError(f"{_name(item)}: {error}") from error
        limit = self.config.max_length
        if len(ids) > limit:
            if self.config.over_long == "error":
                raise PipeflowError(
                    f"{_name(item)}: {len(ids)} tokens, more than max_length {limit}. "
                    "Raise max_length, or set over_long to drop or truncate"
                )
            if self.config.over_long == "drop":
                ctx.log(dropped_over_long=1, tokens=len(ids), source=item.source)
                return cast("TokenRow", DROP)
            ids, mask = ids[:limit], mask[:limit]
        if not any(mask):
            raise PipeflowError(
                f"{_name(item)}: no token is supervised: the row has no assistant turn, or the answer "
                f"begins beyond max_length ({limit}). Remove the row, or raise max_length"
            )
        return TokenRow(ids, mask, source=item.source, document=ctx.sequence or 0)


def _name(item: Conversation) -> str:
    return item.source or "a conversation without a source"


def tokens_of(target: LanguageModel, item: Conversation) -> tuple[list[int], list[int]]:
    """Token ids, and 1 for each that is supervised. PipeflowError as `run`, without the row's name."""
    if not item.messages:
        ids = target.encode(item.text, special=True)
        return ids, [1] * len(ids)
    ids = target.chat(item.messages)
    mask = [0] * len(ids)
    for turn, message in enumerate(item.messages):
        if message.role == "assistant":
            start, end = _answer(target, item, turn, ids)
            mask[start:end] = [1] * (end - start)
    return ids, mask


def _answer(target: LanguageModel, item: Conversation, turn: int, ids: list[int]) -> tuple[int, int]:
    """Where the answer's tokens lie in `ids`: from the opened turn to its last stop token.

    What a model is asked at inference (the turns so far, the answer opened) must be a prefix of the turns
    with the answer, and those of the whole: else tokens would be trained that are never predicted.
    """
    if not any(message.role == "user" for message in item.messages[:turn]):
        raise PipeflowError("an answer stands before any question. Conversations begin with a user turn")
    asked = target.chat(item.messages[:turn], generation_prompt=True)
    answered = target.chat(item.messages[: turn + 1])
    for part, whole in ((asked, answered), (answered, ids)):
        if whole[: len(part)] != part:
            raise PipeflowError(
                f"the chat template of {target.name!r} renders the turns before turn {turn + 1} otherwise "
                "once more turns follow, so its answer cannot be masked. Use conversations with one answer, "
                "or a model whose template only appends"
            )
    stops = [i for i in range(len(asked), len(answered)) if answered[i] in target.stop_ids]
    # Past the last stop token a template puts a line break, which nobody predicts.
    return len(asked), stops[-1] + 1 if stops else len(answered)
