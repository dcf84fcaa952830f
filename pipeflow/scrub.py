"""Secrets taken out of texts: what a run shows or saves has `${secret:NAME}` in the place of each."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, cast

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeflow.diagnostic import Diagnostic

__all__ = ["SHORTEST", "Scrubber"]

SHORTEST = 4
"""Characters. A shorter secret stands by chance in any text, so it cannot be taken out."""


class Scrubber:
    """Replaces every secret of a document. `secrets`: text to reference (`${secret:NAME}`)."""

    def __init__(self, secrets: Mapping[str, str] | None = None) -> None:
        self._shown: dict[str, str] = {}
        for text, reference in (secrets or {}).items():
            for form in _forms(text):
                self._shown.setdefault(form, reference)
        # A reference stays as it is, though a secret be a part of it: scrubbing twice is scrubbing once.
        # Then the longest first: one secret may begin with another.
        kept = sorted(set(self._shown.values()))
        forms = sorted(self._shown, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, [*kept, *forms]))) if forms else None

    def __bool__(self) -> bool:
        return self._pattern is not None

    def __call__(self, text: str) -> str:
        """The text without secrets."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: self._shown.get(match[0], match[0]), text)

    def values(self, value: Any) -> Any:
        """A value for JSON without secrets: texts, keys, numbers, and what JSON will write as text."""
        if self._pattern is None or value is None or isinstance(value, bool):
            return value
        if isinstance(value, dict):
            return {self.values(k): self.values(v) for k, v in cast("dict[Any, Any]", value).items()}
        if isinstance(value, (list, tuple)):
            return [self.values(each) for each in cast("list[Any]", value)]
        if isinstance(value, (int, float)):
            return self._shown.get(str(value), value)
        return self(str(value))

    def finding(self, found: Diagnostic) -> Diagnostic:
        """A finding without secrets."""
        if self._pattern is None:
            return found
        texts = {key: self(getattr(found, key)) for key in ("message", "path", "remedy", "text")}
        return msgspec.structs.replace(found, **texts)


def _forms(text: str) -> list[str]:
    """How a secret may be written: as it is, without the space around it, within a repr or JSON."""
    found = [text, text.strip()]
    for each in tuple(found):
        quoted = (repr(each)[1:-1], json.dumps(each)[1:-1], json.dumps(each, ensure_ascii=False)[1:-1])
        # repr escapes one kind of quote only where a text has both; other writers escape it always.
        found += [*quoted, each.replace("\\", "\\\\").replace('"', '\\"')]
    return [each for each in dict.fromkeys(found) if len(each) >= SHORTEST]
