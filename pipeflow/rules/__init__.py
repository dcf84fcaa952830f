"""The static rules: what a graph must satisfy before anything starts. One small function a rule.

Each rule takes a `Case` and yields findings, each with its place and a remedy. They hang on class traits
(`guarded`, `releases`, `background`, ..), never on names. All are run, and all findings reported at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeflow.rules import (
    barriers,
    checkpoints,
    credits,
    embedding,
    followers,
    keys,
    machine,
    resources,
    snapshots,
    wiring,
)
from pipeflow.rules.case import Case, Rule

if TYPE_CHECKING:
    from pipeflow.diagnostic import Diagnostic

__all__ = ["RULES", "Case", "Rule", "run_rules"]

RULES: tuple[Rule, ...] = (
    wiring.no_stages,
    wiring.item_circle,
    wiring.same_input,
    wiring.gathered_fan_in,
    wiring.unfed_join,
    wiring.unordered_join,
    wiring.type_mismatch,
    wiring.mutated_twice,
    wiring.step_stage,
    keys.misplaced_key,
    keys.two_starts,
    keys.slow_inline,
    keys.one_policy,
    keys.not_retriable,
    barriers.release_without_barrier,
    barriers.many_barriers,
    barriers.work_beside_barrier,
    barriers.idle_barrier,
    barriers.narrow_scope,
    barriers.unquiet_background,
    barriers.stale_barrier,
    barriers.replicated_barrier,
    resources.resource_circle,
    resources.two_writers,
    resources.unfed_reader,
    resources.replicated_state,
    resources.resource_elsewhere,
    followers.unfed_follower,
    followers.idle_staleness,
    followers.unbounded_staleness,
    followers.small_staleness,
    followers.unpublished_version,
    followers.spare_in_generator,
    snapshots.idle_snapshot,
    snapshots.no_snapshot,
    checkpoints.resume_without_checkpoint,
    checkpoints.checkpoint_stage,
    checkpoints.unsaved_state,
    checkpoints.unsaved_writer,
    checkpoints.gathered_behind,
    checkpoints.inexact,
    embedding.split_answer,
    credits.idle_lanes,
    machine.no_such_device,
    machine.queue_over_budget,
    machine.allocator_transport,
    machine.unguarded_autotuner,
)


def run_rules(case: Case) -> list[Diagnostic]:
    """Every finding of every rule, in the order of the table."""
    return [finding for rule in RULES for finding in rule(case)]
