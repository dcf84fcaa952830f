"""`pipeflow run`: check, load, run, with a live view; signals drain, cancel, abandon."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import click

from pipeflow.cli.common import counted, pipeline_file, show, valid_overrides

if TYPE_CHECKING:
    import asyncio

    from pipeflow.pipeline import Pipeline, Summary

__all__ = ["command"]


@click.command("run", short_help="Run a pipeline.")
@click.argument("file", metavar="FILE")
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@click.option("--run-dir", metavar="DIR", help="Where the run's files go; default runs/NAME-DATE-TIME.")
@click.option("--json", "as_json", is_flag=True, help="Print summary.json as the last line of stdout.")
@click.option("--strict", is_flag=True, help="Fail on a warning of the check, and on a loss that is not finite.")
@click.option("--debug-sync", is_flag=True, help="Wait for the device after every launch: slow, but a fault is pinned.")
def command(
    file: str, overrides: tuple[str, ...], run_dir: str | None, as_json: bool, strict: bool, debug_sync: bool
) -> None:
    """Run a pipeline file.

    The first SIGINT or SIGTERM drains (sources end, all that is in flows out, results are saved; exit 0),
    the second cancels (exit 130), the third leaves at once.

    \b
    pipeflow run examples/dflash_tiny.yaml
    pipeflow run examples/dflash_tiny.yaml steps=50 --run-dir /tmp/tiny
    """
    path, given = pipeline_file(file), valid_overrides(overrides)
    from pipeflow.check import check

    report = check(path, given, here=True)
    findings = report.diagnostics if strict else report.errors
    if findings:
        show(report.diagnostics, err=True)
        click.echo(f"{file}: {counted(len(findings), 'finding')}; nothing was started", err=True)
        if as_json:
            click.echo(json.dumps({"status": "failed", "exit_code": 1, "findings": [f.as_dict() for f in findings]}))
        sys.exit(1)
    show(report.diagnostics, err=True)
    sys.exit(_Session(path, given, run_dir, as_json, strict, debug_sync).run())


class _Session:
    """One call of the command: the loop, the signals, what is printed at the end."""

    def __init__(
        self, path: str, given: Any, run_dir: str | None, as_json: bool, strict: bool, debug_sync: bool
    ) -> None:
        self.path = path
        self.given = given
        self.run_dir = run_dir
        self.as_json = as_json
        self.strict = strict
        self.debug_sync = debug_sync
        self.pipeline: Pipeline | None = None
        self.signals = 0

    def run(self) -> int:
        """Run on uvloop where it is installed; the exit code."""
        import asyncio

        try:
            import uvloop

            factory: Any = uvloop.new_event_loop
        except ImportError:
            factory = None
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(self._main())

    async def _main(self) -> int:
        import asyncio

        import anyio

        from pipeflow.errors import PipeflowError
        from pipeflow.observe.view import show_progress
        from pipeflow.pipeline import open_pipeline

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled, loop)
        failure: Exception | None = None
        summary: Summary | None = None
        try:
            async with anyio.create_task_group() as group:
                try:
                    async with open_pipeline(
                        self.path,
                        overrides=self.given,
                        run_dir=self.run_dir,
                        opening=self._opening,
                        strict=self.strict,
                        debug_sync=self.debug_sync,
                    ) as pipeline:
                        group.start_soon(show_progress, pipeline, pipeline.log_every)
                        summary = await pipeline.run()
                except Exception as error:
                    failure = error
                group.cancel_scope.cancel()
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        if self.pipeline is not None:
            summary = self.pipeline.summary()
        return self._tell(summary, failure, PipeflowError)

    # Signals ---------------------------------------------------------------------------------------

    def _opening(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        click.echo(f"run folder: {pipeline.run_dir}", err=True)
        if self.signals:
            pipeline.drain()

    def _signalled(self, loop: asyncio.AbstractEventLoop) -> None:
        self.signals += 1
        if self.signals == 1:
            click.echo("draining: sources end, what is in flows out; again to cancel", err=True)
            if self.pipeline is not None:
                self.pipeline.drain()
        elif self.signals == 2 and self.pipeline is not None:
            click.echo("cancelling; again to leave at once", err=True)
            self.pipeline.cancel()
            # Whatever holds the loop or a thread beyond the grace period does not hold the command.
            loop.call_later(self.pipeline.grace + 0.5, self._abandon)
        else:
            self._abandon()

    def _abandon(self) -> None:
        click.echo("abandoned" + (f":\n{self.pipeline.why()}" if self.pipeline is not None else ""), err=True)
        if self.pipeline is not None:
            self.pipeline.abandon()
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(130)

    # The end ---------------------------------------------------------------------------------------

    def _tell(self, summary: Summary | None, failure: Exception | None, known: type[Exception]) -> int:
        code = 0
        if failure is not None:
            code = 130 if summary is not None and summary["exit_code"] == 130 else 1
            text = str(failure) if isinstance(failure, (known, OSError)) else f"{type(failure).__name__}: {failure}"
            click.echo(f"pipeflow: {text}", err=True)
            for note in getattr(failure, "__notes__", ()):
                click.echo(f"  {note}", err=True)
            cause = failure.__cause__
            if cause is not None and not isinstance(cause, known):
                import traceback

                click.echo("".join(traceback.format_exception(cause)), err=True)
        if summary is not None:
            summary["exit_code"] = code
            if not self.as_json:
                click.echo(_text(summary, str(self.pipeline.run_dir) if self.pipeline else ""))
        if self.as_json:
            click.echo(json.dumps(summary or {"status": "failed", "exit_code": code, "error": str(failure)}, default=str))
        return code


def _text(summary: Summary, folder: str) -> str:
    """The summary for people: what is known, a line each."""
    lines = [f"{summary['status']} after {summary['wall_s']:.1f} s: {summary['steps'] or 0} steps"]
    if summary["tokens"]:
        lines.append(f"  tokens     {summary['tokens']:,} ({summary['tokens_per_s']:,.0f} a second)")
    if summary["loss_first"] is not None:
        lines.append(f"  loss       {summary['loss_first']:.3f} -> {summary['loss_last']:.3f}")
    if summary["tau_end"] is not None:
        start, constant = summary["tau_start"] or 0.0, summary["tau_constant"] or 0.0
        lines.append(f"  tau        {start:.3f} -> {summary['tau_end']:.3f} (best fixed draft {constant:.3f})")
    if summary["tau_decode"] is not None:
        plain, drafted = summary["plain_tokens_per_s"], summary["decode_tokens_per_s"]
        same = "the same tokens" if summary["lossless"] else "OTHER TOKENS"
        lines.append(
            f"  decoding   tau {summary['tau_decode']:.3f}: {drafted:,.0f} against {plain:,.0f} tokens a second, "
            f"{drafted / plain:.2f} times, {same}"
        )
    if summary["skipped"]:
        lines.append("  skipped    " + ", ".join(f"{name} {count}" for name, count in summary["skipped"].items()))
    lines.append(f"  files in   {folder}")
    return "\n".join(lines)
