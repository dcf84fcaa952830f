"""What several commands need: the file argument, overrides, findings on a terminal."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pipeflow.diagnostic import Diagnostic

__all__ = ["counted", "pipeline_file", "see_modules_in", "show", "valid_overrides"]


def pipeline_file(path: str) -> str:
    """The path, if a file is there; else a usage error (exit 2). Its folder goes last on `sys.path`: modules
    beside a pipeline file are found by `uses: module:Class`, and hide no other."""
    if not os.path.isfile(path):
        kind = "does not exist" if not os.path.exists(path) else "is not a regular file"
        kind = "is a folder" if os.path.isdir(path) else kind
        raise click.UsageError(f"the pipeline file {path!r} {kind}")
    see_modules_in(os.path.dirname(os.path.abspath(path)))
    return path


def see_modules_in(folder: str) -> None:
    """Put a folder last on `sys.path`, in the place of the one before. Where it stood already, as `python -m`
    puts the working directory first, it moves; not where PYTHONPATH says that it comes first."""
    from pipeflow.registry import DEFAULT

    for each in (DEFAULT.beside, folder):
        if each in sys.path and each not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
            sys.path.remove(each)
    if folder not in sys.path:
        sys.path.append(folder)
    DEFAULT.beside = folder


def valid_overrides(overrides: Sequence[str]) -> Sequence[str]:
    """`key=value` each; else a usage error (exit 2)."""
    for text in overrides:
        if "=" not in text:
            raise click.UsageError(f"{text!r} is no override: write key=value, such as steps=50")
    return overrides


def show(findings: Iterable[Diagnostic], *, err: bool = False) -> None:
    """Each finding with its source line, caret and remedy. Colour on a terminal, unless NO_COLOR is set."""
    for found in findings:
        text = found.render()
        if not os.environ.get("NO_COLOR"):  # click itself leaves colour out where there is no terminal
            first, _, rest = text.partition("\n")
            colour = "red" if found.severity == "error" else "yellow"
            text = click.style(first, fg=colour) + ("\n" + rest if rest else "")
        click.echo(text, err=err)


def counted(count: int, noun: str) -> str:
    """`1 error`, `2 errors`"""
    return f"{count} {noun}{'' if count == 1 else 's'}"
