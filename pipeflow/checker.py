"""Holds an operation log against the promises of the engine, whatever device the run was on.

    log = OperationLog()
    ...                                   # run with `operations=log`
    check_operations(log.entries)         # raises Broken, with the entry that breaks a promise

Each rule reads the whole log and knows one promise. They share what the log has told (`checker_facts`), and
believe its order alone, never the engine's own state, but for the count of credits, which is compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeflow.checker_facts import Broken, Facts
from pipeflow.checker_rules import RULES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeflow.operations import Entry

__all__ = ["RULES", "Broken", "check_operations"]


def check_operations(entries: Sequence[Entry]) -> None:
    """Raises Broken for the first entry that breaks a promise, AssertionError for a log that makes no sense.

    A run that ended by itself must have left nothing; one that failed or was cancelled is held against all
    that it promised until then.
    """
    facts = Facts()
    rules = [rule(facts) for rule in RULES]
    for at, entry in enumerate(entries):
        facts.at, facts.entry = at, entry
        _, kind, *what = entry
        if kind == "submit":  # rules add to the launch
            facts.launched(*what)
        for rule in rules:
            hears = getattr(rule, kind, None)
            if hears is not None:
                hears(*what)
        facts.hear(kind, what)
    facts.at, facts.entry = len(entries), None
    for rule in rules:
        if facts.ended and not facts.failed:
            rule.at_end()
