"""Rules on `run.checkpoint`: what can be saved, and what an exact resume needs (axioms, 8)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from pipeflow.diagnostic import suggest
from pipeflow.stage import Gather, Kind, Resource, Stage, scatters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeflow.graph import Node
    from pipeflow.rules.case import Case, Findings

__all__ = ["checkpoint_stage", "gathered_behind", "inexact", "resume_without_checkpoint", "unsaved_state",
           "unsaved_writer"]  # fmt: skip

PATH = ("run", "checkpoint")


def _of(case: Case) -> Node | None:
    spec = case.spec.run.checkpoint
    node = case.graph.nodes.get(spec.of) if spec is not None else None
    return node if node is not None and node.known else None


def _from_it(case: Case, of: Node) -> list[Node]:
    """The stage itself and those behind it."""
    return [node for node in case.graph.nodes.values() if node is of or case.graph.behind(node, of)]


def resume_without_checkpoint(case: Case) -> Findings:
    """Only a run that makes checkpoints can go on from one."""
    if case.spec.run.resume != "never" and case.spec.run.checkpoint is None:
        message = "there is no `run.checkpoint`, so there is nothing to go on from"
        yield case.at(
            ("run", "resume"), "misplaced-key", message, "add `checkpoint: {of: STAGE}` under `run`"
        )


def checkpoint_stage(case: Case) -> Findings:
    """`of` is a stage whose numbers are steps: what it has used is known from a number alone."""
    spec = case.spec.run.checkpoint
    if spec is None:
        return
    for key, name in (("of", spec.of), ("best", (spec.best or "").partition(".")[0])):
        if name and name not in case.graph.nodes:
            message = f"there is no stage {name!r}"
            yield case.at((*PATH, key), "unknown-input", message, suggest(name, list(case.graph.nodes)))
    of = _of(case)
    if of is None:
        return
    why = ""
    if of.kind is not Kind.MAP or of.guarded or of.cls.is_input or of.cls.is_output:
        why = f"it is a {'guarded stage' if of.guarded else of.kind.value}, not a one-to-one stage"
    elif of.lanes > 1:
        why = f"it runs on {of.lanes} lanes"
    elif not of.spec.ordered and not of.writes:
        why = "it does not keep the order"
    elif len(of.inputs) > 1 and not of.joins and not of.selects_ports:
        why = "it takes turns between its inputs"
    if why:
        message = f"{of.name!r} cannot say after which step a checkpoint is: {why}"
        remedy = "name the stage that trains (one-to-one, one lane, in order), or one right behind"
        yield case.at((*PATH, "of"), "checkpoint-of", message, remedy)


def unsaved_state(case: Case) -> Findings:
    """What `of` and those behind it have changed is saved, or a resumed run would go on without it."""
    of, spec = _of(case), case.spec.run.checkpoint
    if of is None or spec is None:
        return
    resource_base, stage_base = cast("Any", Resource), cast("Any", Stage)
    for node in _from_it(case, of):
        for name in dict.fromkeys(node.writes.values()):
            resource = case.graph.resources[name]
            cls: Any = resource.cls
            if resource.known and resource.spec.follows is None and (
                cls.state is resource_base.state or cls.load is resource_base.load
            ):  # fmt: skip
                message = (
                    f"{node.name!r} writes {name!r}, whose class does not say what a checkpoint saves of it"
                )
                remedy = f"give {cls.__name__} the hooks `state(value)` and `load(value, state)`"
                yield case.of(node, "writes", "no-state", message, remedy)
        lost = node.cls.stateful and cast("Any", node.cls).state is stage_base.state
        if node.known and lost and (spec.exact or node is of):
            message = (
                f"{node.name!r} depends on earlier items, but does not say what a checkpoint saves of it"
            )
            remedy = f"give {node.cls.__name__} the hooks `state()` and `load(state)`" + (
                "" if node is of else "; with `exact: false` it starts anew where a run is resumed"
            )
            yield case.of(node, "uses", "no-state", message, remedy)


def unsaved_writer(case: Case) -> Findings:
    """A resource that a stage elsewhere writes has no version that belongs to a step of `of`."""
    of = _of(case)
    if of is None:
        return
    saved = _from_it(case, of)
    for node in case.graph.nodes.values():
        if node not in saved and node.known:
            for name in dict.fromkeys(node.writes.values()):
                message = (
                    f"{node.name!r} writes {name!r}, but is not fed by {of.name!r}: no checkpoint saves it"
                )
                yield case.of(node, "writes", "unsaved-writer", message, f"feed it by {of.name!r}")


def gathered_behind(case: Case) -> Findings:
    """Items in an open batch are made again from their records; those that `of` made cannot be."""
    of = _of(case)
    if of is None:
        return
    for node in _from_it(case, of):
        if node.kind is Kind.GATHER and node.known:
            message = (
                f"{node.name!r} gathers what {of.name!r} has made: a checkpoint would lose its open batch"
            )
            remedy = f"gather before {of.name!r}, or in a stateful one-to-many stage with the hook `state`"
            yield case.of(node, "from", "gathered-behind", message, remedy)


def inexact(case: Case) -> Findings:
    """An exact resume computes again what lies before `of`, so that has to come out the same (axiom 8.3)."""
    of, spec = _of(case), case.spec.run.checkpoint
    if of is None or spec is None or not spec.exact:
        return
    saved = _from_it(case, of)
    written = {name for node in saved for name in node.writes.values()}
    for node in case.graph.nodes.values():
        if node in saved or not node.known:
            continue
        for key, why in _doubts(case, node, written):
            message = f"{node.name!r} {why}, so a resumed run may not see the same items"
            yield case.of(
                node, key, "inexact", message, "change that, or set `exact: false` under run.checkpoint"
            )


def _doubts(case: Case, node: Node, written: set[str]) -> Iterator[tuple[str, str]]:
    cls = node.cls
    if not node.spec.ordered:
        yield "ordered", "does not keep the order"
    if not cls.deterministic:
        yield "uses", "is not deterministic"
    if cls.is_input:
        yield "uses", "takes its items from a program"
    if issubclass(cls, Gather):
        if cls.linger is not None:
            yield "uses", "closes batches by the clock"
        base, bucket = cast("Any", Gather), cast("Any", cls).bucket
        if scatters(cls) and bucket is not base.bucket:
            yield "uses", "scatters the members of several buckets, in the order in which these are full"
    for name in dict.fromkeys(node.reads.values()):
        resource = case.graph.resources[name]
        if resource.spec.follows is not None:
            yield "reads", f"reads {name!r}, which follows another resource"
        elif name in written:
            yield "reads", f"reads {name!r} while it is written"
