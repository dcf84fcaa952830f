"""Stage `text/loops`: drops conversations with an answer that runs in a circle."""

from __future__ import annotations

import re
from collections import Counter
from typing import Annotated, Any, Literal, cast

from msgspec import Meta

from pipeflow.config import Config as Options
from pipeflow.context import Context  # noqa: TC001  (the engine resolves the hints of run)
from pipeflow.item import DROP
from pipeflow.stage import Stage
from pipeflow_stages.types import Conversation

__all__ = ["DropLoops", "repeats", "units"]

_LONG = 24


class DropLoops(Stage[Conversation, Conversation]):
    """The rule: an answer loops if one run of `words` words in it occurs `times` times or more.

    Words are runs of letters and digits, in lower case; punctuation does not count; a word of more than 24
    characters counts as its characters. An answer that was cut at its token limit is dropped as well,
    unless `cut` says keep. Both are counted: `dropped_looping` and `dropped_cut` in summary.json.
    """

    class Config(Options, frozen=True):
        words: Annotated[int, Meta(ge=1)] = 8
        times: Annotated[int, Meta(ge=2)] = 4
        cut: Literal["drop", "keep"] = "drop"

    stateful = True  # it counts

    def setup(self, ctx: Context) -> None:
        self._looping = self._cut = self._kept = 0

    def run(self, item: Conversation, ctx: Context) -> Conversation:
        looping = any(self._loops(m.content) for m in item.messages if m.role == "assistant")
        cut = item.cut and self.config.cut == "drop"
        self._looping += looping
        self._cut += cut and not looping
        self._kept += not (looping or cut)
        ctx.report(dropped_looping=self._looping, dropped_cut=self._cut, kept=self._kept)
        if not looping and not cut:
            return item
        ctx.log(**{"dropped_looping" if looping else "dropped_cut": 1}, source=item.source, kind=item.kind)
        return cast("Conversation", DROP)

    def state(self) -> dict[str, Any]:
        """The counts."""
        return {"looping": self._looping, "cut": self._cut, "kept": self._kept}

    def load(self, state: dict[str, Any]) -> None:
        self._looping, self._cut, self._kept = state["looping"], state["cut"], state["kept"]

    def _loops(self, text: str) -> bool:
        return repeats(units(text), self.config.words) >= self.config.times


def units(text: str) -> list[str]:
    """The words that the rule counts."""
    found: list[str] = []
    for word in re.findall(r"\w+", text.lower()):
        found.extend(word if len(word) > _LONG else [word])
    return found


def repeats(words: list[str], length: int) -> int:
    """How often the commonest run of `length` words occurs; runs may overlap."""
    runs = Counter(tuple(words[i : i + length]) for i in range(len(words) - length + 1))
    return max(runs.values(), default=0)
