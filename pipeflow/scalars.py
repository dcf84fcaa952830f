"""The text of one scalar, both ways: YAML 1.2 core values, sizes, durations, and quoting.

YAML 1.2 core schema: https://yaml.org/spec/1.2.2/#103-core-schema. PyYAML's own resolver is YAML 1.1, where
`on` is true, `1e-4` is text and `010` is eight; so it is never asked.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

__all__ = ["Plain", "escape", "parse_duration", "parse_size", "quote", "read_plain", "write"]

Plain = str | int | float | bool | None

_NAMED: dict[str, Plain] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
    **{sign + inf: math.inf for sign in ("", "+") for inf in (".inf", ".Inf", ".INF")},
    **{"-" + inf: -math.inf for inf in (".inf", ".Inf", ".INF")},
}
_DECIMAL = re.compile(r"[-+]?[0-9]+")
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_MAX_DIGITS = 4000  # Python refuses to convert longer ones; a number of that length stays text

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kKMGT]i?)?B")
_UNITS = {
    None: 1,
    **{letter: 1000 ** (i + 1) for i, letter in enumerate("KMGT")},
    **{f"{letter}i": 1024 ** (i + 1) for i, letter in enumerate("KMGT")},
    "k": 1000,
}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(ms|s|m|h)")
_SECONDS = {"ms": Decimal("0.001"), "s": Decimal(1), "m": Decimal(60), "h": Decimal(3600)}

_SAFE = re.compile(r"(?:/|\.\.?/)?[A-Za-z_][A-Za-z0-9_.:/+-]*(?: [A-Za-z0-9_./+][A-Za-z0-9_.:/+-]*)*")
# Words that other YAML readers (1.1) take for booleans. We do not, but resolved files are read by others.
_LEGACY = frozenset({"y", "n", "yes", "no", "on", "off"})
_UNPRINTABLE = re.compile('["\\\\\x00-\x1f\x7f-\xa0\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]')
_SHORT = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def read_plain(text: str) -> Plain:
    """The value of an unquoted scalar in the core schema; what no rule matches is text."""
    if text in _NAMED:
        return _NAMED[text]
    if text[0] not in "+-.0123456789" or len(text) > _MAX_DIGITS:
        return text
    if _DECIMAL.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _BASED.fullmatch(text):
        return int(text[2:], 8 if text[1] == "o" else 16)
    return text


def parse_size(text: str) -> int | None:
    """Bytes of `512MiB`, `8GiB` (1024), `2GB`, `64kB` (1000), `1.5GiB`, `100B`; None where it is no size.

    A fraction of a byte (`2.4GiB`) is rounded up; less than one (`0.5B`) is no size.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match[2] == "ki":
        return None
    exact = Decimal(match[1]) * _UNITS[match[2]]
    return None if 0 < exact < 1 else math.ceil(exact)


def parse_duration(text: str) -> float | None:
    """Seconds of `500ms`, `30s`, `5m`, `2h`, `1.5h`; None where it is no duration."""
    match = _DURATION.fullmatch(text)
    return None if match is None else float(Decimal(match[1]) * _SECONDS[match[2]])


def escape(text: str) -> str:
    """Text whose `${` are literal, as it must stand in a file."""
    return text.replace("${", "$${")


def quote(text: str, *, key: bool = False) -> str:
    """YAML for exactly this text: plain where every reader takes it for text, else double-quoted.

    A key may be one of the legacy booleans (`on:`), since files of this format are full of them.
    """
    plain = _SAFE.fullmatch(text) and ": " not in f"{text} " and isinstance(read_plain(text), str)
    if plain and (key or text.lower() not in _LEGACY):
        return text
    return f'"{_UNPRINTABLE.sub(_escaped, text)}"'


def write(value: Plain) -> str:
    """YAML for a value: text quoted where it must be, `${` in it escaped."""
    if isinstance(value, str):
        return quote(escape(value))
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if math.isnan(value):
        return ".nan"
    if math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    text = repr(value)
    # YAML 1.1 readers take `1e-05` for text, so the point is always there.
    return text if "." in text else text.replace("e", ".0e")


def _escaped(match: re.Match[str]) -> str:
    char = match[0]
    return _SHORT.get(char) or (f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}")
