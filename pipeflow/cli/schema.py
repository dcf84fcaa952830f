"""`pipeflow schema`: the JSON Schema of pipeline files, for editors."""

from __future__ import annotations

import json
from typing import Any

import click

__all__ = ["command"]


@click.command("schema", short_help="Print the JSON Schema.")
def command() -> None:
    """Print the JSON Schema of pipeline files, with the options of every installed stage and resource.

    \b
    pipeflow schema > pipeflow.schema.json
    """
    from pipeflow.registry import DEFAULT, RegistryError
    from pipeflow.schema import json_schema

    stages: dict[str, type[Any]] = {}
    resources: dict[str, type[Any]] = {}
    for found, names, find in (
        (stages, DEFAULT.names("stages"), DEFAULT.find_stage),
        (resources, DEFAULT.names("resources"), DEFAULT.find_resource),
    ):
        for name in names:
            try:
                found[name] = find(name)
            except RegistryError as error:  # its options stay unchecked; all others are written
                click.echo(f"left out {name!r}: {error}", err=True)
    click.echo(json.dumps(json_schema(stages, resources), indent=2))
