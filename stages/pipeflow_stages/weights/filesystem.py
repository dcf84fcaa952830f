"""The `filesystem` backend: a version a folder of safetensors, published whole.

    weights/v00000001/model.safetensors
    weights/v00000001/version.json       {"step": .., "incarnation": .., "reason": ..}
    weights/v00000001/COMPLETE           the last file: a folder without it is nobody's business

A version is written aside, fsynced, marked and then renamed, so a reader never sees half of one.
"""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

from pipeflow.errors import PipeflowError
from pipeflow_stages.files import aside, explain, is_complete, publish_folder

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

__all__ = ["WEIGHTS", "latest", "publish", "read", "remove", "versions"]

WEIGHTS = "model.safetensors"


def publish(folder: Path, number: int, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> Path:
    """Publish version `number` (from 1) below `folder`; returns the version's folder.

    `tensors` are on the CPU and are not changed meanwhile. PipeflowError where the disk is full or the
    folder cannot be written; earlier versions stay whole and nothing half is left.
    """
    from safetensors.torch import save_file

    version = folder / f"v{number:08d}"
    with publish_folder(version) as aside:
        save_file(dict(tensors), aside / WEIGHTS)
        (aside / "version.json").write_text(json.dumps(dict(about)) + "\n", encoding="utf-8")
    return version


def remove(version: Path) -> None:
    """Take a version away in one step: a reader finds it whole or not at all. PipeflowError if it cannot."""
    gone = aside(version)
    try:
        os.rename(version, gone)
    except OSError as error:
        raise explain(error, version) from error
    shutil.rmtree(gone, ignore_errors=True)


def versions(folder: Path) -> list[Path]:
    """Complete versions, oldest first."""
    found = sorted(folder.glob("v[0-9]*")) if folder.is_dir() else []
    return [path for path in found if is_complete(path)]


def latest(folder: Path) -> Path | None:
    """The newest complete version, or None."""
    found = versions(folder)
    return found[-1] if found else None


def read(version: Path, device: str = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and notes of a complete version. PipeflowError where it is not complete."""
    from safetensors.torch import load_file

    if not is_complete(version):
        raise PipeflowError(
            f"{version}: not a complete version: its COMPLETE marker is missing or does not fit"
        )
    about = json.loads((version / "version.json").read_text(encoding="utf-8"))
    return load_file(version / WEIGHTS, device=device), about
