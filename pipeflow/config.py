"""What a stage's options are made of: a strict Struct and the few value types that YAML lacks."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

__all__ = ["Config", "Duration", "InputPath", "OutputPath", "Size"]


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every stage's and resource's options (`with:` in the file).

    Frozen, by keyword, unknown keys refused. Bounds are msgspec's: `Annotated[int, Meta(ge=1)]`.
    """


def _kind(name: str, description: str) -> Meta:
    return Meta(extra={"pipeflow": name}, description=description)


Duration = Annotated[float, _kind("duration", "seconds, or text such as 500ms, 30s, 5m, 2h")]
"""Seconds. In the file a number of seconds or text: `500ms`, `30s`, `5m`, `2h`."""

Size = Annotated[int, _kind("size", "bytes, or text such as 512MiB, 8GiB, 2GB")]
"""Bytes. In the file a whole number or text: `64KiB`, `512MiB`, `8GiB`, `2GB`."""

InputPath = Annotated[str, _kind("input-path", "a path, taken from the pipeline file's folder")]
"""A path that is read. Relative ones are taken from the pipeline file's folder."""

OutputPath = Annotated[str, _kind("output-path", "a path, taken from the run folder")]
"""A path that is written. Relative ones are taken from the run folder: use `ctx.output(path)`."""
