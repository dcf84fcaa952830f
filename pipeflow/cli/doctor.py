"""`pipeflow doctor`: what this machine has, and what is missing."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from importlib import metadata
from typing import Any

import click

__all__ = ["command"]

REQUIRED = ("torch", "anyio", "msgspec", "PyYAML", "click", "rich")
OPTIONAL = {
    "uvloop": "a quicker event loop for `pipeflow run`",
    "aiostream": "Pipeline.stream",
    "transformers": "extra dflash",
    "safetensors": "extra dflash",
    "gguf": "extra dflash",
}
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING",
            "OMP_NUM_THREADS")  # fmt: skip


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _row(mark: str, name: str, text: str) -> None:
    click.echo(f"{mark:8}{name:26}{text}")


@click.command("doctor", short_help="Show what this machine has.")
def command() -> None:
    """Show Python, packages, devices and settings. Exit code 1 if something required is missing."""
    import pipeflow

    missing = sys.version_info < (3, 11)
    _row("missing" if missing else "ok", "python", f"{platform.python_version()} (3.11 or newer is needed)")
    _row("ok", "pipeflow", pipeflow.__version__)
    for name in REQUIRED:
        version = _version(name)
        missing = missing or version is None
        _row("ok" if version else "missing", name, version or f"required: pip install {name}")
    for name, use in OPTIONAL.items():
        version = _version(name)
        _row("ok" if version else "-", name, version or f"not installed ({use})")
    missing = not _devices() or missing
    for name in SETTINGS:
        value = os.environ.get(name)
        _row("ok" if value else "-", name, value or "not set")
    click.echo("something required is missing" if missing else "all that is required is here", err=True)
    sys.exit(1 if missing else 0)


def _devices() -> bool:
    """Whether torch can be imported; says what it finds."""
    try:
        torch: Any = importlib.import_module("torch")
    except Exception as error:  # a broken installation raises anything
        _row("missing", "devices", f"torch does not import: {type(error).__name__}: {error}")
        return False
    _row("ok", "cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads for torch")
    if not torch.cuda.is_available():
        _row("-", "cuda", "no CUDA device")
        return True
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        _row("ok", f"cuda:{index}", f"{found.name}, {found.total_memory / 2**30:.0f} GiB")
    return True
