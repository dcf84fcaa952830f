"""`pipeflow run`: check, load, run, with a live view; signals drain, cancel, abandon."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import click

from pipeflow.cli.common import counted, pipeline_file, show, valid_overrides
from pipeflow.cli.signals import Signals
from pipeflow.operations import OperationLog
from pipeflow.scrub import Scrubber

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from anyio.abc import TaskGroup

    from pipeflow.observe.summary import Summary
    from pipeflow.pipeline import Pipeline

__all__ = ["command"]

FORCED = 130
"""The exit code after a second signal, as of a process that SIGINT ended."""


@click.command("run", short_help="Run a pipeline.")
@click.argument("file", metavar="FILE")
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@click.option("--run-dir", metavar="DIR", help="Where the run's files go; default runs/NAME-DATE-TIME.")
@click.option(
    "--resume",
    metavar="FOLDER|auto|never",
    help="Go on from a checkpoint, in the folder of its run (run.resume).",
)
@click.option("--json", "as_json", is_flag=True, help="Print summary.json as the last line of stdout.")
@click.option(
    "--strict", is_flag=True, help="Fail on a warning of the check, and on a loss that is not finite."
)
@click.option(
    "--debug-sync", is_flag=True, help="Wait for the device after every launch: slow, but a fault is pinned."
)
@click.option(
    "--operations", is_flag=True, hidden=True, help="Write operations.jsonl: all that the engine does."
)
def command(
    file: str,
    overrides: tuple[str, ...],
    run_dir: str | None,
    resume: str | None,
    as_json: bool,
    strict: bool,
    debug_sync: bool,
    operations: bool,
) -> None:
    """Run a pipeline file.

    The first SIGINT or SIGTERM drains (sources end, all that is in flows out, results are saved; exit 0),
    the second cancels (exit 130), the third leaves at once. Where the file has `run.checkpoint`, a drain
    saves one too, and --resume goes on from it.

    A traceback begins where a stage's own code does; with PIPEFLOW_TRACEBACK=full in the environment it shows
    the engine's frames too.

    \b
    pipeflow run examples/dflash_tiny.yaml
    pipeflow run examples/dflash_tiny.yaml steps=50 --run-dir /tmp/tiny
    """
    path, given = pipeline_file(file), valid_overrides(overrides)
    session = _Session(path, given, run_dir, as_json, strict, debug_sync, resume)
    if operations:
        session.operations = OperationLog()
    with Signals(session.heard) as signals:
        code = session.run(signals)
    if code == FORCED:
        session.leave()  # whatever threads or exit handlers are left do not hold a forced exit
    sys.exit(code)


class _Session:
    """One call of the command: the check, the loop, the signals, what is printed at the end."""

    def __init__(
        self,
        path: str,
        given: Any,
        run_dir: str | None,
        as_json: bool,
        strict: bool,
        debug_sync: bool,
        resume: str | None = None,
    ) -> None:
        self.path = path
        self.given = given
        self.run_dir = run_dir
        self.as_json = as_json
        self.strict = strict
        self.debug_sync = debug_sync
        self.resume = resume
        self.operations: OperationLog | None = None
        self.pipeline: Pipeline | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._views: TaskGroup | None = None
        self._draining = False
        self._over = False
        self._scrub = Scrubber()
        self._deadline: threading.Timer | None = None
        self._leaving = threading.Lock()

    def run(self, signals: Signals) -> int:
        """Check, then run on uvloop where it is installed; the exit code."""
        from pipeflow.check import check

        report = check(self.path, self.given, here=True)
        self._scrub = report.document.scrub
        show(report.diagnostics, err=True)
        findings = report.diagnostics if self.strict else report.errors
        if findings:
            self._say(f"{self.path}: {counted(len(findings), 'finding')}; nothing was started")
            return self._tell_json({"findings": [found.as_dict() for found in findings]}, 1)
        assert report.graph is not None
        for node in report.graph.nodes.values():
            if node.cls.is_input:
                text = (
                    f"stage {node.name!r} takes its items from a program, so there is nothing to run here. "
                    "Open the file with pipeflow.open and submit to it"
                )
                self._say(f"{self.path}: {text}")
                return self._tell_json({"error": text}, 1)
        import asyncio

        try:
            import uvloop

            factory: Any = uvloop.new_event_loop
        except ImportError:
            factory = None
        try:
            with asyncio.Runner(loop_factory=factory) as runner:
                return runner.run(self._main(signals))
        finally:
            if self._deadline is not None:
                self._deadline.cancel()

    async def _main(self, signals: Signals) -> int:
        import asyncio

        import anyio

        from pipeflow.pipeline import open_pipeline

        signals.take_over()
        self._loop = asyncio.get_running_loop()
        failure: Exception | None = None
        async with anyio.create_task_group() as self._views:
            try:
                async with open_pipeline(
                    self.path,
                    overrides=self.given,
                    run_dir=self.run_dir,
                    opening=self._opening,
                    strict=self.strict,
                    debug_sync=self.debug_sync,
                    resume=self.resume,
                    operations=self.operations,
                ) as pipeline:
                    await pipeline.run()
            except Exception as error:
                failure = error
            failure = self._write_operations() or failure
            self._over = True
            self._views.cancel_scope.cancel()
        return self._tell(failure)

    def _write_operations(self) -> Exception | None:
        """What the engine did, beside the run's other files; why that cannot be written."""
        if self.operations is None or self.pipeline is None:
            return None
        try:
            self.operations.write(self.pipeline.run_dir / "operations.jsonl")
        except OSError as error:
            return error
        return None

    def _say(self, text: str, *, nl: bool = True) -> None:
        _say(self._scrub(text), nl=nl)

    def _opening(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self._say(f"run folder: {pipeline.run_dir}")
        pipeline.on_load(self._say)
        if self._views is not None:
            self._views.start_soon(self._view, pipeline)
        if self._draining:
            pipeline.drain()

    async def _view(self, pipeline: Pipeline) -> None:
        from pipeflow.observe.view import show_progress

        try:
            await show_progress(pipeline, pipeline.log_every)
        except Exception as error:  # no fault of what only looks on may end a training
            self._say(f"the view of the run ended: {type(error).__name__}: {error}")

    # Signals ---------------------------------------------------------------------------------------

    def heard(self, count: int) -> None:
        """A signal, on the thread of `Signals`: the loop may be busy, so the last resort is here."""
        if count == 1:
            self._draining = True
            self._on_loop(self._drain)
            self._say_aside("draining: sources end, what is in flows out; again to cancel")
        elif count == 2 and self.pipeline is not None:
            # Whatever holds the loop or a thread beyond the grace period does not hold the command.
            self._deadline = threading.Timer(self.pipeline.grace + 0.5, self.leave)
            self._deadline.daemon = True
            self._deadline.start()
            self._on_loop(self._cancel)
            self._say_aside("cancelling; again to leave at once")
        else:
            self.leave()

    def _say_aside(self, text: str) -> None:
        """On a thread of its own: a stopped terminal must not keep the next signal from being heard."""
        threading.Thread(target=self._say, args=(text,), daemon=True).start()

    def _on_loop(self, call: Callable[[], None]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(call)

    def _drain(self) -> None:
        if self.pipeline is not None and not self._over:
            self.pipeline.drain()

    def _cancel(self) -> None:
        if self.pipeline is not None and not self._over:
            self.pipeline.cancel()

    def leave(self) -> None:
        """Exit 130 now, from any thread. What is told is told within a second, or not at all: a lock or a
        full pipe may stand in its way."""
        with self._leaving:
            if not self._over:
                last = threading.Thread(target=self._last_words, daemon=True)
                last.start()
                last.join(1.0)
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.flush()
                sys.stdout.flush()
            os._exit(FORCED)

    def _last_words(self) -> None:
        if sys.stderr.isatty():
            self._say("\x1b[?25h", nl=False)  # the live view hides the cursor
        pipeline = self.pipeline
        with contextlib.suppress(Exception):  # the loop may change what is read here
            self._say("abandoned" + (f":\n{pipeline.why()}" if pipeline is not None else ""))
        if pipeline is not None:
            with contextlib.suppress(Exception):
                pipeline.abandon()
        self._tell_json(pipeline.told if pipeline is not None else None, FORCED)

    # The end ---------------------------------------------------------------------------------------

    def _tell(self, failure: Exception | None) -> int:
        from pipeflow.error_text import traceback_text
        from pipeflow.errors import DeviceError, PipeflowError, Stopped

        summary = None
        if self.pipeline is not None:
            summary = self.pipeline.told or self.pipeline.summary()
        code = 0 if failure is None else 1
        if failure is not None and summary is not None and summary["exit_code"] != 1:
            # Forced, or a load given up under a drain. A fault that the summary does not know stays one.
            told = summary["exit_code"] == FORCED or isinstance(failure, Stopped)
            code = summary["exit_code"] if told else 1
        text = None
        if failure is not None:
            known = isinstance(failure, (PipeflowError, OSError))
            text = str(failure) if known else f"{type(failure).__name__}: {failure}"
            self._say(f"pipeflow: {text}")
            for note in getattr(failure, "__notes__", ()):
                self._say(f"  {note}")
            unforeseen = failure.__cause__ if known else failure
            told = isinstance(unforeseen, PipeflowError) or isinstance(failure, OSError)
            if unforeseen is not None and not told:
                # A device's fault, or the engine's own, may be anywhere: all of it is shown.
                whole = not known or isinstance(failure, DeviceError) or _wants_whole()
                self._say(traceback_text(unforeseen, engine=whole))
        if summary is not None and not self.as_json:
            shown = _text(summary, str(self.pipeline.run_dir) if self.pipeline else "")
            self._put(self._scrub(shown), code)
        return self._tell_json(summary or {"error": text}, code)

    def _put(self, text: str, code: int) -> None:
        """To stdout. A full disk is told by `main`, with exit code 1; it does not hold up a forced exit."""
        with contextlib.suppress(*((OSError, ValueError) if code == FORCED else ())):
            click.echo(text)

    def _tell_json(self, summary: Summary | None, code: int) -> int:
        """The last line of stdout under `--json`: every key of the contract, null where nothing is known."""
        if self.as_json:
            from pipeflow.observe.folder import strict_json
            from pipeflow.observe.summary import SUMMARY_KEYS

            told: Summary = {**dict.fromkeys(SUMMARY_KEYS), **(summary or {})}
            if told["exit_code"] != code:  # nothing was written, or not what came to pass since
                told |= {"status": "forced" if code == FORCED else "failed", "exit_code": code}
            self._put(strict_json(self._scrub.values(told)), code)
        return code


def _wants_whole() -> bool:
    return os.environ.get("PIPEFLOW_TRACEBACK") == "full"


def _say(text: str, *, nl: bool = True) -> None:
    """To stderr. A closed one must not end a run."""
    with contextlib.suppress(OSError, ValueError):
        click.echo(text, err=True, nl=nl)


def _text(summary: Summary, folder: str) -> str:
    """The summary for people: what is known, a line each."""
    lines = [f"{summary['status']} after {summary['wall_s']:.1f} s: {summary['steps'] or 0} steps"]
    if summary["tokens"]:
        lines.append(f"  tokens     {summary['tokens']:,} ({summary['tokens_per_s']:,.0f} a second)")
    if summary["loss_first"] is not None:
        lines.append(f"  loss       {summary['loss_first']:.3f} -> {summary['loss_last']:.3f}")
    if summary["tau_end"] is not None:
        start, constant = summary["tau_start"] or 0.0, summary["tau_constant"] or 0.0
        lines.append(
            f"  tau        {start:.3f} -> {summary['tau_end']:.3f} (best fixed draft {constant:.3f})"
        )
    if summary["tau_decode"] is not None:
        plain, drafted = summary["plain_tokens_per_s"], summary["decode_tokens_per_s"]
        same = "the same tokens" if summary["lossless"] else "OTHER TOKENS"
        lines.append(
            f"  decoding   tau {summary['tau_decode']:.3f}: {drafted:,.0f} against {plain:,.0f} "
            f"tokens a second, {drafted / plain:.2f} times, {same}"
        )
    if summary["skipped"]:
        lines.append(
            "  skipped    " + ", ".join(f"{name} {count}" for name, count in summary["skipped"].items())
        )
    lines.append(f"  files in   {folder}")
    return "\n".join(lines)
