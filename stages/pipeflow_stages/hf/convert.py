"""GGUF to a folder in transformers' layout, once: reading GGUF takes 20 s for 135M parameters, the copy 1 s.

The copy holds float32, the very values that dequantisation gives; bfloat16 would round three quarters of
them. Key of the cache: the file's sha256 and the version of this converter.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

from pipeflow.errors import PipeflowError
from pipeflow_stages.files import is_complete, publish_folder
from pipeflow_stages.hf.locate import cache_folder, sha256_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

T = TypeVar("T")

__all__ = ["CONVERTER", "convert", "converted_folder", "quiet"]

CONVERTER = 1
"""Raise it when the same file is to give another folder."""


def converted_folder(sha256: str) -> Path:
    """Where the copy of a GGUF file with this sum lies, or would."""
    return cache_folder() / "models" / f"gguf-{sha256}-{CONVERTER}"


def convert(gguf: Path, *, expected: str | None = None) -> Path:
    """The folder with float32 safetensors, config and tokenizer of a GGUF file; made if it is not there.

    `expected`: the sum that the file must have. Raises PipeflowError: unreadable, another sum, an
    architecture that transformers does not read, a missing package, a full disk.
    """
    sha256 = sha256_of(gguf)
    if expected is not None and sha256 != expected:
        raise PipeflowError(f"{gguf}: checksum is {sha256}, not {expected}. Delete the file and run again")
    folder = converted_folder(sha256)
    if not is_complete(folder):
        with publish_folder(folder) as temporary:
            _write(gguf, temporary)
    return folder


def _write(gguf: Path, folder: Path) -> None:
    from safetensors.torch import save_file

    model, tokenizer = _read(gguf)
    config = model.config
    # The weights are plain now; save_pretrained would refuse a model that still calls itself quantised.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file(_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})


def _tensors(model: Any) -> dict[str, Any]:
    """The state by name, each storage once: a tied head is the embedding again."""
    seen: set[int] = set()
    tensors: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            tensors[name] = tensor.contiguous()
    return tensors


def _read(gguf: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **options)
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **options)
    except Exception as error:  # transformers and gguf raise what they like for a file they cannot read
        raise PipeflowError(
            f"{gguf}: transformers cannot read this GGUF file: {error}. "
            "Check that the file is whole and that `pip install gguf accelerate` was done, "
            "or use a folder with safetensors"
        ) from error
    return model, tokenizer


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars from transformers meanwhile: they would write over the run's own view."""
    import importlib

    from transformers.utils import logging

    gguf_module: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    # The bar of the dequantisation is a plain tqdm, which that switch does not reach.
    bar = getattr(gguf_module, "tqdm", None)
    if bar is not None:
        gguf_module.tqdm = _no_bar
    try:
        yield
    finally:
        if bar is not None:
            gguf_module.tqdm = bar
        if enabled:
            logging.enable_progress_bar()


def _no_bar(values: Iterable[T], *_: object, **__: object) -> Iterable[T]:
    return values
