"""One finding about a pipeline file: what is wrong, where, and the remedy."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

__all__ = ["Diagnostic", "Place", "suggest"]


class Place(NamedTuple):
    """A position in a file. `line` and `column` count from 1; (0, 0) is the command line."""

    file: str
    line: int
    column: int
    text: str = ""  # the source line, for the caret; empty where there is none

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


class Diagnostic(msgspec.Struct, frozen=True):
    """A finding. `path` is the dotted key (`stages.train.with.lr`), `remedy` what to do about it."""

    code: str
    message: str
    file: str
    line: int
    column: int
    path: str
    remedy: str = ""
    severity: Literal["error", "warning"] = "error"
    text: str = ""

    @classmethod
    def at(
        cls,
        place: Place,
        code: str,
        path: str,
        message: str,
        remedy: str = "",
        severity: Literal["error", "warning"] = "error",
    ) -> Diagnostic:
        return cls(
            code=code,
            message=message,
            file=place.file,
            line=place.line,
            column=place.column,
            path=path,
            remedy=remedy,
            severity=severity,
            text=place.text,
        )

    def render(self) -> str:
        """`file:line:column - path: message`, the source line, a caret, the remedy."""
        place = Place(self.file, self.line, self.column)
        path = f"{self.path}: " if self.path else ""
        warning = "warning: " if self.severity == "warning" else ""
        lines = [f"{place} - {path}{warning}{self.message} [{self.code}]"]
        if self.text:
            shown = self.text.expandtabs(1)
            lines += [f"    {shown}", "    " + " " * (self.column - 1) + "^"]
        if self.remedy:
            lines.append(f"  remedy: {self.remedy}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, object]:
        """The machine form: `code severity file line column path message remedy`."""
        keys = ("code", "severity", "file", "line", "column", "path", "message", "remedy")
        return {key: getattr(self, key) for key in keys}


def suggest(name: str, known: list[str]) -> str:
    """The near match of a mistyped name, as a remedy; empty where nothing is near."""
    import difflib

    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else ""
