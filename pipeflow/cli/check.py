"""`pipeflow check`: every fault of a file, with its place and a remedy."""

from __future__ import annotations

import json
import sys

import click

from pipeflow.cli.common import counted, pipeline_file, show, valid_overrides

__all__ = ["command"]


@click.command("check", short_help="Check a pipeline file.")
@click.argument("file", metavar="FILE")
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as a JSON list.")
@click.option("--here", is_flag=True, help="Ask this machine for the devices too (may import torch).")
def command(file: str, overrides: tuple[str, ...], as_json: bool, here: bool) -> None:
    """Check a pipeline file, and report every fault at once.

    Exit code 0 without errors (warnings are no errors), 1 with any, 2 if there is no such file.

    \b
    pipeflow check examples/dflash_tiny.yaml
    pipeflow check pipeline.yaml steps=50 --here
    """
    path, given = pipeline_file(file), valid_overrides(overrides)
    from pipeflow.check import check

    report = check(path, given, here=here)
    if as_json:
        click.echo(json.dumps([found.as_dict() for found in report.diagnostics], indent=2))
    else:
        show(report.diagnostics)
        errors = len(report.errors)
        warnings = len(report.diagnostics) - errors
        noted = f", {counted(warnings, 'warning')}" if warnings else ""
        if errors:
            click.echo(f"{file}: {counted(errors, 'error')}{noted}")
        else:
            assert report.spec is not None
            click.echo(f"{file}: ok, {counted(len(report.spec.stages), 'stage')}{noted}")
    sys.exit(1 if report.errors else 0)
