"""`pipeflow init`: a first pipeline from a template that runs as it stands."""

from __future__ import annotations

import os
import sys
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

__all__ = ["command"]


def _templates() -> dict[str, Traversable]:
    folder = files("pipeflow.cli").joinpath("templates")
    return {each.name: each for each in sorted(folder.iterdir(), key=lambda each: each.name) if each.is_dir()}


def _parts(template: Traversable) -> list[Traversable]:
    return sorted((each for each in template.iterdir() if each.is_file()), key=lambda each: each.name)


def _about(template: Traversable) -> str:
    """The first comment of its pipeline file."""
    pipeline = next(each for each in _parts(template) if each.name.endswith(".yaml"))
    return pipeline.read_text(encoding="utf-8").split("\n", 1)[0].removeprefix("#").strip()


@click.command("init", short_help="Write a first pipeline.")
@click.argument("template", required=False)
@click.argument("folder", default=".", type=click.Path(file_okay=False))
@click.option("--list", "show_list", is_flag=True, help="List the templates.")
def command(template: str | None, folder: str, show_list: bool) -> None:
    """Write the files of TEMPLATE into FOLDER (default: here). Never overwrites a file.

    \b
    pipeflow init --list
    pipeflow init hello my-pipeline
    """
    known = _templates()
    if show_list:
        width = max(map(len, known))
        for name, each in known.items():
            click.echo(f"{name.ljust(width)}  {_about(each)}")
        return
    if template is None:
        raise click.UsageError(f"name a template: {', '.join(known)}")
    if template not in known:
        from pipeflow.diagnostic import suggest

        near = suggest(template, list(known)) or f"templates: {', '.join(known)}"
        raise click.UsageError(f"no template is called {template!r}: {near}")
    try:
        _write(_parts(known[template]), Path(folder))
    except OSError as error:
        click.echo(f"cannot write to {folder}: {error.strerror}", err=True)
        sys.exit(1)


def _write(parts: list[Traversable], folder: Path) -> None:
    there = [str(folder / part.name) for part in parts if os.path.lexists(folder / part.name)]
    if there:
        verb = "exists" if len(there) == 1 else "exist"
        click.echo(f"nothing written: {', '.join(there)} {verb} already. Choose another folder", err=True)
        sys.exit(1)
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        _write_whole(folder / part.name, part.read_bytes())
        click.echo(folder / part.name)
    pipeline = next(part.name for part in parts if part.name.endswith(".yaml"))
    click.echo(f"Next: pipeflow run {folder / pipeline}", err=True)


def _write_whole(path: Path, data: bytes) -> None:
    """The whole file or none: written aside, synced, renamed."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(aside, path)
    finally:
        aside.unlink(missing_ok=True)
