"""The text of an error, whatever its class does: a report must name stage and item all the same."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from traceback import TracebackException

__all__ = ["error_text", "named_error", "traceback_text"]

_STAGES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "builtin.py")
"""Stages like any other, though they stand in this package."""


def error_text(error: BaseException | None) -> str:
    """What `str` gives; the class's name where that is empty; a plain remark where it raises."""
    try:
        return str(error) or type(error).__name__
    except Exception as fault:
        return f"(no text: its __str__ raised {type(fault).__name__})"


def named_error(error: BaseException | None) -> str:
    """The class's name, then the text."""
    return f"{type(error).__name__}: {error_text(error)}"


def traceback_text(error: BaseException, *, engine: bool) -> str:
    """The traceback of what stage code raised, and of its causes. Without `engine` each begins at the first
    line that is not this package's, or asyncio's on the way to it."""
    from traceback import TracebackException

    trace = TracebackException.from_exception(error)
    if not engine:
        _cut(trace, _engine_homes())
    return "".join(trace.format())


def _cut(trace: TracebackException, homes: tuple[str, ...]) -> None:
    stack = trace.stack
    first = next((index for index, frame in enumerate(stack) if not _within(frame.filename, homes)), 0)
    del stack[:first]
    for each in (trace.__cause__, trace.__context__, *(trace.exceptions or ())):
        if each is not None:
            _cut(each, homes)


def _engine_homes() -> tuple[str, ...]:
    """Folders of this package and of what calls it back."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in ("pipeflow", "asyncio", "anyio")]
    return tuple(os.path.join(os.path.dirname(os.path.abspath(file)), "") for file in files if file)


def _within(file: str, homes: tuple[str, ...]) -> bool:
    path = os.path.abspath(file)
    return path.startswith(homes) and path != _STAGES
