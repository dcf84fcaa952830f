"""The text of an error, whatever its class does: a report must name stage and item all the same."""

from __future__ import annotations

__all__ = ["error_text", "named_error"]


def error_text(error: BaseException | None) -> str:
    """What `str` gives; the class's name where that is empty; a plain remark where it raises."""
    try:
        return str(error) or type(error).__name__
    except Exception as fault:
        return f"(no text: its __str__ raised {type(fault).__name__})"


def named_error(error: BaseException | None) -> str:
    """The class's name, then the text."""
    return f"{type(error).__name__}: {error_text(error)}"
