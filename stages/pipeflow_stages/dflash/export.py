"""A drafter's files: `config.json` and `model.safetensors`, in the layout that published DFlash drafts use.

No embedding and no LM head: those are the target's. Written aside, flushed, then renamed, so a reader
sees an old drafter or a new one, whole, never half of one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeflow_stages.dflash.model import Drafter, DrafterConfig
from pipeflow_stages.files import folder_aside, swap_folders, sync_path

if TYPE_CHECKING:
    import os

    import torch
    from torch import Tensor

__all__ = ["config_json", "load_drafter", "read_config", "save_drafter"]

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def config_json(config: DrafterConfig, target_config: Any = None, dtype: str = "float32") -> dict[str, Any]:
    """The contents of config.json. `target_config` (a Hugging Face text config) adds the special tokens.

    The RoPE base stands in the places of transformers 4 (`rope_theta`, `rope_scaling`) and of
    transformers 5 (`rope_parameters`); the block size stands at the top (older servers) and in
    `dflash_config` (newer ones).
    """
    document = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "max_window_layers": config.num_layers,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": config.initializer_range,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "layer_types": ["full_attention"] * config.num_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": config.tie_word_embeddings,
        "use_cache": True,
        "dtype": dtype,
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.tap_layer_ids),
            "block_size": config.block_size,
        },
    }
    tokens = {name: getattr(target_config, name, None) for name in _TOKEN_IDS}
    return {**document, **{name: ids for name, ids in tokens.items() if ids is not None}}


def save_drafter(
    drafter: Drafter,
    config: DrafterConfig,
    folder: str | os.PathLike[str],
    target_config: Any = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a drafter into `folder`, made where it is missing; returns the folder.

    An existing drafter stays whole until the new one replaces it: with the same config only its weights
    change places, in one rename; with another config the whole folder does, in two (a reader between them
    finds no folder, and never a mixture). After any error the old one is still there.
    `dtype` None keeps the weights' own type.

    Raises ValueError when the weights do not fit `config` or the target, or when a folder that holds
    other files would have to be replaced; OSError from the disk.
    """

    kind = dtype or drafter.fc.weight.dtype
    tensors = {name: t.detach().to("cpu", kind).contiguous() for name, t in drafter.state_dict().items()}
    _check_names(tensors, config, "the drafter in memory")
    if target_config is not None and target_config.vocab_size != config.vocab_size:
        raise ValueError(
            f"the target has a vocabulary of {target_config.vocab_size}, the drafter's config says "
            f"{config.vocab_size}: was it made for another target?"
        )
    document = config_json(config, target_config, str(kind).removeprefix("torch."))
    text = json.dumps(document, indent=2) + "\n"
    folder = Path(folder)
    with folder_aside(folder) as new:
        (new / CONFIG).write_text(text, encoding="utf-8")
        _write_weights(tensors, new / WEIGHTS)
        for path in (new / CONFIG, new / WEIGHTS, new):
            sync_path(path)
        _replace(folder, new, text)
    sync_path(folder)
    sync_path(folder.absolute().parent)
    return folder


def _write_weights(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # its writer reports a full disk as one of its own errors
        raise OSError(f"cannot write {path}: {error}") from error


def read_config(folder: str | os.PathLike[str]) -> DrafterConfig:
    """The config of a saved drafter. Raises FileNotFoundError, or ValueError saying what does not fit."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; a drafter's folder holds {CONFIG} and {WEIGHTS}")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if "DFlashDraftModel" not in document["architectures"]:
            raise ValueError(f"architectures is {document['architectures']}, not [DFlashDraftModel]")
        _refuse_other_maths(document)
        dflash = document["dflash_config"]
        rope = document.get("rope_parameters") or {}
        return DrafterConfig(
            hidden_size=document["hidden_size"],
            num_layers=document["num_hidden_layers"],
            num_heads=document["num_attention_heads"],
            num_kv_heads=document["num_key_value_heads"],
            head_dim=document["head_dim"],
            intermediate_size=document["intermediate_size"],
            vocab_size=document["vocab_size"],
            tap_layer_ids=tuple(dflash["target_layer_ids"]),
            num_target_layers=document["num_target_layers"],
            block_size=document["block_size"] if "block_size" in document else dflash["block_size"],
            mask_token_id=dflash["mask_token_id"],
            rope_theta=rope["rope_theta"] if "rope_theta" in rope else document["rope_theta"],
            rms_norm_eps=document["rms_norm_eps"],
            max_position_embeddings=document["max_position_embeddings"],
            initializer_range=document["initializer_range"],
            tie_word_embeddings=document["tie_word_embeddings"],
        )
    except KeyError as error:
        raise ValueError(f"{path}: {error.args[0]} is missing; is this a DFlash drafter?") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def load_drafter(folder: str | os.PathLike[str]) -> tuple[Drafter, DrafterConfig]:
    """A saved drafter, on the host, in the type it was saved in, and its config.

    Raises FileNotFoundError, or ValueError naming tensors that are missing, unknown, or of another shape.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config = read_config(folder)
    path = Path(folder) / WEIGHTS
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; a drafter's folder holds {CONFIG} and {WEIGHTS}")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: not a complete safetensors file ({error})") from error
    drafter = _check_names(tensors, config, str(path))
    drafter.load_state_dict(tensors, assign=True)
    for parameter in drafter.parameters():
        parameter.requires_grad_(True)
    return drafter, config


def _refuse_other_maths(document: dict[str, Any]) -> None:
    """Settings that would change the result and that the model here does not apply: say so, never ignore."""
    kinds = set(document.get("layer_types") or ["full_attention"])
    rope = document.get("rope_parameters") or {}
    if kinds != {"full_attention"}:
        raise ValueError(f"layer_types holds {sorted(kinds)}; only full_attention is known here")
    if document.get("rope_scaling") or rope.get("rope_type", "default") != "default":
        raise ValueError("scaled RoPE (rope_scaling, rope_type) is not known here")
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or document.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is not known here: RoPE covers the full head width")
    if document.get("attention_bias") or document.get("hidden_act", "silu") != "silu":
        raise ValueError("attention_bias, and activations other than silu, are not known here")


def _check_names(tensors: dict[str, Tensor], config: DrafterConfig, where: str) -> Drafter:
    """An empty drafter of `config` (no memory behind it) whose names and shapes `tensors` matches."""
    import torch

    with torch.device("meta"):
        drafter = Drafter(config)
    wanted = {name: tuple(t.shape) for name, t in drafter.state_dict().items()}
    found = {name: tuple(t.shape) for name, t in tensors.items()}
    faults = [f"{name} is missing" for name in sorted(wanted.keys() - found.keys())]
    faults += [f"{name} is unknown" for name in sorted(found.keys() - wanted.keys())]
    faults += [
        f"{name} is {list(found[name])}, its config says {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    if faults:
        more = f", and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise ValueError(f"{where} does not fit its config: {'; '.join(faults[:5])}{more}")
    return drafter


def _replace(folder: Path, new: Path, text: str) -> None:
    if not folder.exists():
        new.rename(folder)
        return
    old_config = folder / CONFIG
    if old_config.is_file() and old_config.read_text(encoding="utf-8") == text:
        (new / WEIGHTS).replace(folder / WEIGHTS)
        return
    others = sorted(path.name for path in folder.iterdir() if path.name not in (CONFIG, WEIGHTS))
    if others:
        raise ValueError(
            f"{folder} holds {others[0]} besides a drafter of another config; replacing it would lose that: "
            "choose another folder, or move it away"
        )
    swap_folders(new, folder)
