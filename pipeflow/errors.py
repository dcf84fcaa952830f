"""The error tree. Everything pipeflow raises on purpose is a `PipeflowError`.

PipeflowError
 +- DocumentError     the file cannot be read as a pipeline (carries every diagnostic, with places)
 +- GraphError        the file reads well, but the pipeline it describes must not start
 +- StageError        stage code failed, or broke a rule of the engine (`stage`, `sequence`)
 +- DeviceError       a device reported a fault
 +- StallError        nothing moves and nothing will, with the reason stage by stage
 +- Dropped           a submitted item was dropped on its way (skipped, or filtered)
 +- Stopped           a load was given up, as the run was told to stop meanwhile
 +- Cancelled         the run was cancelled by its second signal or by `Pipeline.cancel`
 +- Stuck             work could not be awaited within the grace period (threads named)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeflow.diagnostic import Diagnostic

__all__ = [
    "Cancelled",
    "DeviceError",
    "DocumentError",
    "Dropped",
    "GraphError",
    "PipeflowError",
    "StageError",
    "StallError",
    "Stopped",
    "Stuck",
]


class PipeflowError(Exception):
    """Root of every error that pipeflow raises on purpose."""


class _DiagnosedError(PipeflowError):
    def __init__(self, diagnostics: Sequence[Diagnostic]) -> None:
        self.diagnostics = tuple(diagnostics)
        super().__init__("\n".join(d.render() for d in self.diagnostics))


class DocumentError(_DiagnosedError):
    """The file cannot be read as a pipeline; `diagnostics` holds every fault, each with its place."""


class GraphError(_DiagnosedError):
    """The pipeline must not start; `diagnostics` holds every fault, each with its place."""


class StageError(PipeflowError):
    """Stage code failed. `stage` is its name in the file, `sequence` the number of the item in its
    domain (None in `setup` and `finish`). The original exception is `__cause__`."""

    def __init__(self, message: str, *, stage: str, sequence: int | None = None) -> None:
        self.stage = stage
        self.sequence = sequence
        where = f"stage {stage!r}" if sequence is None else f"stage {stage!r}, item {sequence}"
        super().__init__(f"{where}: {message}")


class DeviceError(PipeflowError):
    """A device reported a fault, or a device that was asked for does not exist."""


class StallError(PipeflowError):
    """No stage can move and none will: the message names each one and what it waits for."""


class Dropped(PipeflowError):
    """A submitted item left the pipeline as a gap: a stage skipped or filtered it."""


class Stopped(PipeflowError):
    """Raised by a `Resource.open` or `Stage.setup` that gives up because of `ctx.stopping`: under a drain the
    run ends as drained, with nothing to save."""


class Cancelled(PipeflowError):
    """The run was cancelled before it ended."""


class Stuck(PipeflowError):
    """Threads did not come back within the grace period; each is named with its item and stack."""
