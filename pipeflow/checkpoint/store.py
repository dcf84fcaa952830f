"""Folders of checkpoints: written aside, fsynced, renamed; so each is there whole or not at all.

    checkpoints/step-00000100/checkpoint.json     what each stage was, and the sizes of the other files
    checkpoints/step-00000100/state.safetensors   every tensor

Every byte passes `os.write`, the one place where a disk can be full.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pipeflow.device.base import imported_torch
from pipeflow.errors import PipeflowError
from pipeflow.observe.folder import FolderError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

__all__ = ["DOCUMENT", "FOLDER", "TENSORS", "Saved", "clear_halves", "committed", "prune", "read", "step_of",
           "write"]  # fmt: skip

FOLDER = "checkpoints"
DOCUMENT = "checkpoint.json"
TENSORS = "state.safetensors"
FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})")
_KINDS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "BOOL": "bool",
}  # fmt: skip
"""Names of the safetensors format, and torch's."""


class Saved(NamedTuple):
    """A checkpoint that was read."""

    path: Path
    document: dict[str, Any]
    tensors: dict[str, Any]


def step_of(path: Path) -> int | None:
    """The step in a checkpoint's name; None for any other name."""
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else None


def committed(run_dir: Path) -> list[Path]:
    """The whole checkpoints of a run folder, oldest first. A half one is passed over."""
    folder = run_dir / FOLDER
    found = [path for path in folder.iterdir() if step_of(path) is not None] if folder.is_dir() else []
    return sorted(
        (path for path in found if _document(path) is not None), key=lambda path: step_of(path) or 0
    )


def _document(path: Path) -> dict[str, Any] | None:
    """Its JSON, if that is whole and every other file still has the size it had then."""
    try:
        document = json.loads((path / DOCUMENT).read_bytes())
        whole = document["format"] == FORMAT and all(
            (path / name).stat().st_size == size for name, size in document["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return cast("dict[str, Any]", document) if whole else None


def read(path: Path) -> Saved:
    """A checkpoint with its tensors, on the CPU. PipeflowError where it is not whole."""
    document = _document(path)
    if document is None:
        raise PipeflowError(f"{path}: it is not a whole checkpoint. Take another one")
    tensors = _read_tensors(path / TENSORS) if TENSORS in document["files"] else {}
    return Saved(path, document, tensors)


def clear_halves(run_dir: Path) -> None:
    """Remove what a process that was killed left half written."""
    for path in (run_dir / FOLDER).glob(".step-*.part"):
        shutil.rmtree(path, ignore_errors=True)


def write(path: Path, document: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Write a checkpoint. It appears last, in one step.

    FolderError where the disk is full or the folder cannot be written; whatever stood there stands.
    """
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        try:
            beside.mkdir(parents=True)
            sizes = {TENSORS: _write_tensors(beside / TENSORS, tensors)} if tensors else {}
            text = json.dumps({**document, "format": FORMAT, "files": sizes}, allow_nan=False)
            _write_file(beside / DOCUMENT, [text.encode()])
            _sync(beside)
            _replace(beside, path)
            _sync(path.parent)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except OSError as error:
        raise FolderError(path, error) from error


def prune(run_dir: Path, keep: int, spare: Iterable[int], newest: int) -> None:
    """Remove all but the newest `keep`, those of the steps in `spare`, and what a run that went on from an
    earlier step has left behind it (steps after `newest`)."""
    found = [path for path in committed(run_dir) if (step_of(path) or 0) <= newest]
    kept = {*found[-keep:], *(path for path in found if step_of(path) in set(spare))}
    for path in (run_dir / FOLDER).iterdir():
        if step_of(path) is not None and path not in kept:
            _remove(path)


def _remove(path: Path) -> None:
    """In one step, as a reader sees it. One that cannot be removed is left."""
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        os.rename(path, aside)
    except OSError:
        return
    shutil.rmtree(aside, ignore_errors=True)


def _replace(new: Path, path: Path) -> None:
    """A folder of this name is of a run that was resumed from an earlier step, or was never whole."""
    if path.exists():
        _remove(path)
    os.rename(new, path)


def _write_file(path: Path, chunks: Iterable[Any]) -> int:
    total = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for chunk in chunks:
            data = memoryview(chunk).cast("B")
            total += len(data)
            while data:
                data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return total


def _sync(folder: Path) -> None:
    if os.name != "posix":
        return  # other systems cannot open a folder, and order its names by themselves
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Tensors: the safetensors format (8 bytes: length of the header, then it, JSON, then the bytes) ----------


def _write_tensors(path: Path, tensors: Mapping[str, Any]) -> int:
    torch = imported_torch()
    names = {getattr(torch, torchs): name for name, torchs in _KINDS.items()}
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in names:
            raise TypeError(f"{name}: a tensor of {tensor.dtype} cannot be saved")
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]
        }  # fmt: skip
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return _write_file(path, _chunks(text, tensors))


def _chunks(header: bytes, tensors: Mapping[str, Any]) -> Iterable[Any]:
    yield len(header).to_bytes(8, "little")
    yield header
    for tensor in tensors.values():
        flat = tensor.contiguous()
        size = flat.numel() * flat.element_size()
        if size:
            yield (ctypes.c_char * size).from_address(flat.data_ptr())


def _read_tensors(path: Path) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {}
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, about in header.items():
            begin, end = about["data_offsets"]
            kind = getattr(torch, _KINDS[about["dtype"]])
            if begin == end:
                found[name] = torch.empty(about["shape"], dtype=kind)
                continue
            data = bytearray(file.read(end - begin))  # the header lists them in the order of their bytes
            found[name] = torch.frombuffer(data, dtype=kind).reshape(about["shape"])
    return found
