"""Rules on keys that fit some kinds of stages only. A key that would do nothing is refused, never ignored."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from pipeflow.spec import OnError
from pipeflow.stage import Kind

if TYPE_CHECKING:
    from pipeflow.graph import Node
    from pipeflow.rules.case import Case, Findings

__all__ = ["misplaced_key", "not_retriable", "one_policy", "slow_inline", "two_starts"]

BARRIER_HAS_NO = {
    "on": "it runs on no device; `scope` says whose launches it holds",
    "in_flight": "one barrier runs at a time",
    "launcher": "the engine runs it",
    "on_error": "a fault in what it guards ends the run",
    "ordered": "it keeps its turn",
    "limit": "it fires as often as its input says",
    "bytes": "what it hands on holds no tensors",
}
GUARDED_HAS_NO = {
    "every": "it runs when its barrier fires; put `every` on the barrier",
    "queue": "it gets its barrier's trigger, by no queue",
    "limit": "it runs as often as its barrier fires",
    "in_flight": "what a barrier guards runs one at a time",
    "ordered": "it keeps its turn",
}
SOURCE_HAS_NO = {
    "every": "it takes no items; put `every` on the stage that reads it",
    "limit": "it takes no items; put `limit` on a stage that reads it",
    "queue": "no queue lies before it; put `queue` on the stage that reads it",
    "in_flight": "it is one generator",
}


def misplaced_key(case: Case) -> Findings:
    """Keys of a stage that mean something on other kinds only."""
    for node in case.graph.nodes.values():
        if not node.known:
            continue
        for key, why in _useless(node).items():
            path = ("stages", node.name, key)
            if case.document.node(path) is not None:
                message = f"`{key}` has no meaning on a {_what(node)}: {why}"
                yield case.at(path, "misplaced-key", message, f"remove `{key}`", key=True)
        if node.guarded and node.joins:
            message = "`from` names no inputs here: a stage that needs a barrier gets its trigger"
            path = ("stages", node.name, "from")
            yield case.at(path, "misplaced-key", message, "write the barrier's name alone", key=True)
        if node.spec.queue is not None and node.spec.queue.total is not None:
            path = ("stages", node.name, "queue", "total")
            yield case.at(path, "misplaced-key", "`total` bounds all queues together, not one",
                          "move it to `run: {queue: {total: ..}}`", key=True)  # fmt: skip


def _useless(node: Node) -> dict[str, str]:
    if node.barrier:
        return BARRIER_HAS_NO
    rest = {"scope": "only a barrier holds launches"}
    if node.guarded:
        return rest | GUARDED_HAS_NO
    rest["at_start"] = "only what a barrier guards runs before the first item"
    return rest | SOURCE_HAS_NO if node.kind is Kind.SOURCE else rest


def _what(node: Node) -> str:
    if node.barrier:
        return "barrier"
    if node.guarded:
        return "stage that needs a barrier"
    return "source" if node.kind is Kind.SOURCE else "stage that is no barrier"


def two_starts(case: Case) -> Findings:
    """A barrier's section runs at the start as a whole, or not."""
    for barrier in case.graph.barriers:
        for node in case.graph.section(barrier):
            said = barrier.spec.at_start, node.spec.at_start
            if None not in said and said[0] != said[1]:
                message = f"{barrier.name!r}, which guards it, says the opposite"
                path = ("stages", node.name, "at_start")
                yield case.at(path, "misplaced-key", message, "say it there alone", key=True)


def slow_inline(case: Case) -> Findings:
    """`launcher: inline` runs on the event loop, so only where a call is short and has one end."""
    for node in case.graph.nodes.values():
        if not node.known or node.barrier:
            continue
        launcher = node.spec.launcher
        run = inspect.unwrap(node.cls.run)
        if launcher is not None and (inspect.iscoroutinefunction(run) or inspect.isasyncgenfunction(run)):
            message = "an async stage runs on the event loop, whatever its launcher"
            yield case.of(node, "launcher", "misplaced-key", message, "remove `launcher`")
        elif launcher == "inline" and inspect.isgeneratorfunction(run):
            message = "a generator works between its items, which would block the event loop"
            yield case.of(
                node, "launcher", "misplaced-key", message, "write `launcher: thread`, or remove it"
            )
        elif launcher == "inline" and node.guarded:
            message = "what a barrier guards takes long, which would block the event loop"
            yield case.of(
                node, "launcher", "misplaced-key", message, "write `launcher: thread`, or remove it"
            )


def one_policy(case: Case) -> Findings:
    """`on_error` is `stop`, `skip` or `retry`, never two of them or none."""
    for node in case.graph.nodes.values():
        given = node.spec.on_error
        if isinstance(given, OnError) and (given.skip is None) == (given.retry is None):
            how = "neither `skip` nor `retry`" if given.skip is None else "both `skip` and `retry`"
            path = ("stages", node.name, "on_error")
            yield case.at(path, "wrong-type", f"it says {how}", "write one: `{skip: 10}` or `{retry: 2}`")


def not_retriable(case: Case) -> Findings:
    """A stage that depends on earlier items, or writes, may not run an item twice unless it says so."""
    for node in case.graph.nodes.values():
        given = node.spec.on_error
        if not node.known or not isinstance(given, OnError) or given.retry is None or node.retriable:
            continue
        if node.kind in (Kind.SOURCE, Kind.FLAT):
            why = "some of its outputs may have left already"
        elif node.cls.retriable is False:
            why = "its class says so"
        else:
            why = "it keeps state or writes a resource, and may have changed it"
        message = f"{node.name!r} cannot run an item again: {why}"
        remedy = "use `skip`, or set `retriable = True` on a class that leaves all as it was when it raises"
        yield case.at(("stages", node.name, "on_error", "retry"), "not-retriable", message, remedy, key=True)
