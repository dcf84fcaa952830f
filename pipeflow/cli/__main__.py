"""`pipeflow`: the group of commands. Imports click and nothing else, so that `--help` is quick."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import Any

import click

__all__ = ["main"]

COMMANDS = {
    "run": "Run a pipeline.",
    "check": "Check a pipeline file; report every fault with its place.",
    "graph": "Draw a pipeline as text, Mermaid or DOT.",
    "plan": "Simulate a pipeline: seconds a step, busy devices, the bottleneck.",
    "schema": "Print the JSON Schema of pipeline files.",
    "stages": "List the stages and resources, or describe one.",
    "init": "Write a first pipeline from a template.",
    "doctor": "Show what this machine has, and what is missing.",
}
"""Name to the line in `--help`. Each has a module of its name here, which defines `command`."""


class LazyGroup(click.Group):
    """Imports a command's module when the command is called; `--help` is written from the table."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        import importlib

        return importlib.import_module(f"pipeflow.cli.{cmd_name}").command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            from pipeflow.diagnostic import suggest

            near = suggest(name, list(COMMANDS)) or f"commands: {', '.join(COMMANDS)}"
            ctx.fail(f"no such command {name!r}: {near}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        import pipeflow

        click.echo(f"pipeflow {pipeflow.__version__}")
        ctx.exit()


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 findings or a failure, 2 usage, 130 forced.",
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version."
)
def cli() -> None:
    """An asyncio pipeline framework for GPU work: a YAML file of stages."""


def main(args: list[str] | None = None) -> Any:
    """Run the command line and exit. `args`: default `sys.argv`."""
    try:
        cli.main(args, prog_name="pipeflow")
    except Exception as error:
        from pipeflow.errors import PipeflowError

        if isinstance(error, PipeflowError):
            text = str(error)
        elif isinstance(error, OSError) and _stdout_fails(error):
            text = f"cannot write to stdout: {error.strerror}"
        else:
            raise
        with contextlib.suppress(OSError):
            click.echo(f"pipeflow: {text}", err=True)
        sys.exit(1)


def _stdout_fails(error: OSError) -> bool:
    """Whether the error is that of stdout: what could not be written is still to be written. It is then
    given up, or the interpreter would try it again at its end, and fail with a traceback."""
    try:
        sys.stdout.flush()
        if error.errno != errno.ENOSPC or error.filename is not None:  # an unbuffered one keeps nothing
            return False
    except OSError:
        pass
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return True


if __name__ == "__main__":
    main()
