"""Stage `text/prompts`: conversations of similar length become one batch to be answered."""

from __future__ import annotations

from collections.abc import Sequence  # noqa: TC003  (the engine resolves the hints of run)
from typing import Annotated

from msgspec import Meta

from pipeflow.config import Config as Options
from pipeflow.stage import Gather
from pipeflow_stages.types import Conversation, PromptBatch

__all__ = ["Prompts"]


class Prompts(Gather[Conversation, PromptBatch]):
    """Groups by the number of user turns and by prompt length, so that little of a batch is padding."""

    class Config(Options, frozen=True):
        rows: Annotated[int, Meta(ge=1)] = 16
        """Conversations a batch."""
        characters: Annotated[int, Meta(ge=1)] = 1000
        """Width of a length class, in characters of prompt."""

    def bucket(self, item: Conversation) -> tuple[int, int]:
        asked = [message for message in item.messages if message.role != "assistant"]
        turns = sum(message.role == "user" for message in asked)
        return turns, sum(len(message.content) for message in asked) // self.config.characters

    def full(self, members: Sequence[Conversation]) -> bool:
        return len(members) >= self.config.rows

    def run(self, items: Sequence[Conversation]) -> PromptBatch:
        return PromptBatch(tuple(items))
