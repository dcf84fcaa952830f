"""A target that needs no download: a small random Qwen3, fitted to a phrase book while the run loads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from msgspec import Meta

import pipeflow
from pipeflow.context import seed_of
from pipeflow.errors import PipeflowError
from pipeflow_stages.data.phrases import PhraseBook
from pipeflow_stages.hf.causal_lm import CausalLM

if TYPE_CHECKING:
    from torch import Tensor

    from pipeflow import ResourceContext
    from pipeflow_stages.data.phrases import Book
    from pipeflow_stages.hf.language_model import LanguageModel

__all__ = ["TinyTarget"]


class TinyTarget(CausalLM):
    """Opens to a `LanguageModel` of a Qwen3 that predicts the book's text. Logs and reports its accuracy
    on documents it was not fitted to (`fit_accuracy`); PipeflowError where that stays below `accuracy`."""

    class Config(pipeflow.Config, frozen=True, kw_only=True):  # pyright: ignore[reportIncompatibleVariableOverride]
        layers: Annotated[int, Meta(ge=4)] = 6
        hidden_size: Annotated[int, Meta(ge=8)] = 64
        heads: Annotated[int, Meta(ge=1)] = 2
        intermediate_size: Annotated[int, Meta(ge=8)] = 128
        steps: Annotated[int, Meta(ge=1, description="at most; it stops once it is accurate enough")] = 400
        rows: Annotated[int, Meta(ge=1, description="documents a step")] = 16
        lr: Annotated[float, Meta(gt=0)] = 5e-3
        accuracy: Annotated[float, Meta(ge=0, le=1)] = 0.99
        """Of the next supervised token, at which fitting stops; 0.98 is the least that passes."""

    reads: ClassVar = {"book": PhraseBook}

    def open(self, ctx: ResourceContext) -> LanguageModel:
        import torch

        from pipeflow_stages.hf.language_model import LanguageModel

        book: Book = ctx.read("book")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(ctx.seed)
            model = self._model(book)
        model = model.to(ctx.device)
        accuracy, steps = self._fit(model, book, ctx)
        if accuracy is not None:
            ctx.log(fit_accuracy=accuracy, step=steps)
            ctx.report(fit_accuracy=accuracy)
            least = min(0.98, self.config.accuracy)
            if accuracy < least and not ctx.stopping:
                raise PipeflowError(
                    f"the tiny target reached an accuracy of {accuracy:.4f} in {steps} steps, "
                    f"below {least:g}. Give it more `steps`, or an easier book"
                )
        target = LanguageModel(model, name="tiny target", device=ctx.device)
        target.compute_dtype = torch.float32  # at this size a cast costs more than the product
        return target

    def _model(self, book: Book) -> Any:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        options = self.config
        return Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=book.vocab_size,
                hidden_size=options.hidden_size,
                intermediate_size=options.intermediate_size,
                num_hidden_layers=options.layers,
                num_attention_heads=options.heads,
                num_key_value_heads=options.heads,
                head_dim=options.hidden_size // options.heads,
                max_position_embeddings=4 * book.length,
                tie_word_embeddings=False,
                use_cache=True,
                bos_token_id=None,
                eos_token_id=None,
                pad_token_id=None,
            )
        )

    def _fit(self, model: Any, book: Book, ctx: ResourceContext) -> tuple[float | None, int]:
        """Next-token training; every 25 steps a look at 32 fresh documents. Loading may wait for a device.

        Returns the accuracy at the last look (None: a stop came before the first) and the steps taken.
        """
        import torch
        from torch.nn import functional as F

        from pipeflow_stages.dflash.train import learning_rate

        options = self.config
        seed, check = seed_of(ctx.seed, "fit"), seed_of(ctx.seed, "check")
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)
        held = self._batch(book, check, 0, 32, ctx.device)
        accuracy: float | None = None
        step = 0
        while step < options.steps and not ctx.stopping:
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step - 1, options.steps, options.lr, 0.05)
            ids = self._batch(book, seed, step * options.rows, options.rows, ctx.device)
            logits = model(ids, use_cache=False).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 25 == 0 or step == options.steps:
                accuracy = self._accuracy(model, held, book.lead)
                if accuracy >= options.accuracy:
                    break
        return accuracy, step

    @staticmethod
    def _batch(book: Book, seed: int, first: int, count: int, device: str) -> Tensor:
        import torch

        return torch.tensor([book.document(seed, first + i).input_ids for i in range(count)], device=device)

    @staticmethod
    def _accuracy(model: Any, ids: Tensor, lead: int) -> float:
        import torch

        with torch.no_grad():
            right = model(ids, use_cache=False).logits[:, lead - 1 : -1].argmax(-1) == ids[:, lead:]
        return right.float().mean().item()
