"""Text that needs no download: a few phrases, each document one of them repeated from a random offset.

A model that knows the phrases predicts such text almost surely after a few tokens; a drafter can only do so
from the target's features, since every symbol occurs in many phrases.
"""

from __future__ import annotations

import random
from collections.abc import Iterator  # noqa: TC003  (the type check resolves the hints of run)
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from msgspec import Meta

import pipeflow
from pipeflow.context import seed_of
from pipeflow_stages.rows import Rows
from pipeflow_stages.types import TokenRow

if TYPE_CHECKING:
    from pipeflow import Context, ResourceContext

__all__ = ["Book", "PhraseBook", "PhraseRows", "Phrases"]


class Book:
    """`phrases`: lists of symbols below `symbols`. `vocab_size` has one id more, the mask's, in no text."""

    def __init__(self, phrases: list[list[int]], symbols: int, length: int, lead: int) -> None:
        self.phrases = phrases
        self.symbols = symbols
        self.length = length
        self.lead = lead
        self.vocab_size = symbols + 1
        self.mask_token_id = symbols

    def document(self, seed: int, number: int) -> TokenRow:
        """The document of a number: the same for one seed, in every process. Its first `lead` tokens, from
        which nobody can tell the phrase yet, are not supervised."""
        chance = random.Random(f"{seed}/{number}")
        phrase = chance.choice(self.phrases)
        offset = chance.randrange(len(phrase))
        ids = [phrase[(offset + i) % len(phrase)] for i in range(self.length)]
        mask = [0] * self.lead + [1] * (self.length - self.lead)
        return TokenRow(ids, mask, source=f"document {number}", document=number)


class PhraseBook(pipeflow.Resource):
    """Draws the phrases from the run's seed. Opens to a `Book`."""

    class Config(pipeflow.Config, frozen=True, kw_only=True):
        phrases: Annotated[int, Meta(ge=1)] = 32
        tokens: Annotated[int, Meta(ge=2, description="tokens a phrase")] = 24
        symbols: Annotated[int, Meta(ge=2)] = 96
        length: Annotated[int, Meta(ge=4, description="tokens a document")] = 96
        lead: Annotated[int, Meta(ge=1, description="first tokens, not supervised")] = 8

    def open(self, ctx: ResourceContext) -> Book:
        options = self.config
        chance = random.Random(ctx.seed)
        phrases = [
            [chance.randrange(options.symbols) for _ in range(options.tokens)] for _ in range(options.phrases)
        ]
        return Book(phrases, options.symbols, options.length, options.lead)


class Phrases(pipeflow.Stage[None, TokenRow]):
    """Documents of the book, for ever: every one is new. End it with `limit` on a stage behind it."""

    reads: ClassVar = {"book": PhraseBook}

    def setup(self, ctx: Context) -> None:
        self._next = 0

    def run(self, ctx: Context) -> Iterator[TokenRow]:
        book = ctx.read("book")
        while True:
            self._next += 1
            yield book.document(ctx.stage_seed, self._next - 1)

    def state(self) -> dict[str, Any]:
        """The next document's number."""
        return {"next": self._next}

    def load(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


class PhraseRows(Rows):
    """Held-out documents of the book: drawn from another seed than any source's. Opens to a list of rows."""

    class Config(pipeflow.Config, frozen=True, kw_only=True):
        rows: Annotated[int, Meta(ge=1)] = 32

    reads: ClassVar = {"book": PhraseBook}

    def open(self, ctx: ResourceContext) -> list[TokenRow]:
        seed = seed_of(ctx.seed, "held out")
        return [ctx.read("book").document(seed, number) for number in range(self.config.rows)]
