# ruff: noqa: RUF012 - classes as a stage author writes them
"""ENGINE section 6, its pass and fail lists line by line. Guarded is a trait: `publish` is a user's class."""

from __future__ import annotations

import pytest
from checking import UserBroadcast, checked, fails, passes

RESOURCES = """
devices: {targets: [cuda:0, cuda:1], trainer: cuda:3}
resources:
  drafter: {uses: weights, on: trainer}
stages:
  rows: {uses: rows}
"""
TRAIN = "  train: {uses: train, from: rows, on: trainer, writes: drafter}\n"


def _file(stages: str, head: str = RESOURCES + TRAIN) -> str:
    body = "".join(f"  {line.strip()}\n" for line in stages.strip().splitlines())
    return head + body


PASS = {
    "train > B > release > publish": """
        barrier: {uses: barrier, from: train, every: 50}
        release: {uses: release, from: barrier}
        publish: {uses: publish, from: release, reads: drafter}
    """,
    "B > {release, publish}": """
        barrier: {uses: barrier, from: train}
        release: {uses: release, from: barrier}
        publish: {uses: publish, from: barrier, reads: drafter}
    """,
    "train > evaluate beside train > B": """
        evaluate: {uses: evaluate, from: train, on: trainer, reads: drafter}
        barrier: {uses: barrier, from: train}
        release: {uses: release, from: barrier}
    """,
    "B > release > log": """
        barrier: {uses: barrier, from: train}
        release: {uses: release, from: barrier}
        log: {uses: log, from: release}
    """,
    "scope names all that a release touches": """
        barrier: {uses: barrier, from: train, scope: [trainer]}
        release: {uses: release, from: barrier}
    """,
    "scope names the devices of what is published": """
        forward: {uses: step, from: rows, on: targets}
        barrier: {uses: barrier, from: train, scope: trainer}
        publish: {uses: publish, from: barrier, reads: drafter}
    """,
    "background work with quiesce()": """
        offload: {uses: quiesced, from: train}
        barrier: {uses: barrier, from: train}
        release: {uses: release, from: barrier}
    """,
    "background work without quiesce(), out of scope": """
        offload: {uses: offload, from: train, on: cuda:0}
        barrier: {uses: barrier, from: train, scope: trainer}
        publish: {uses: publish, from: barrier, reads: drafter}
    """,
    "two barriers, each with its own section": """
        first: {uses: barrier, from: train}
        release: {uses: release, from: first}
        second: {uses: barrier, from: train}
        publish: {uses: publish, from: second, reads: drafter}
    """,
}


@pytest.mark.axiom("6.1", "6.2", "6.3", "6.4", "6.5", "6.6")
@pytest.mark.parametrize("stages", PASS.values(), ids=PASS.keys())
def test_passes(stages: str) -> None:
    passes(_file(stages))


def test_join_of_two_writers_before_one_barrier_passes() -> None:
    passes("""
        resources: {left: {uses: weights}, right: {uses: weights}}
        stages:
          rows: {uses: rows}
          a: {uses: train, from: rows, writes: left}
          b: {uses: train, from: rows, writes: right}
          barrier: {uses: barrier, from: {a: a, b: b}}
          publish_a: {uses: publish, from: barrier, reads: left}
          publish_b: {uses: publish, from: barrier, reads: right}
    """)


FAIL = {
    "train > release": (
        "release-without-barrier",
        "release: {uses: release, from: §train}",
    ),
    "a user's own broadcast": (
        "release-without-barrier",
        "publish: {uses: publish, from: §train, reads: drafter}",
    ),
    "train > release > publish: only the first is told": (
        "release-without-barrier",
        """
        release: {uses: release, from: §train}
        publish: {uses: publish, from: release, reads: drafter}
        """,
    ),
    "[B, train] > release": (
        "release-without-barrier",
        """
        barrier: {uses: barrier, from: train}
        release: {uses: release, from: [barrier, §train]}
        """,
    ),
    "B > evaluate > publish": (
        "work-beside-barrier",
        """
        barrier: {uses: barrier, from: train}
        evaluate: {uses: step, from: barrier, on: trainer}
        publish: {uses: publish, from: §evaluate, reads: drafter}
        """,
    ),
    "B > {release, log}": (
        "work-beside-barrier",
        """
        barrier: {uses: barrier, from: train}
        release: {uses: release, from: barrier}
        log: {uses: log, from: §barrier}
        """,
    ),
    "[B1, B2] > release": (
        "many-barriers",
        """
        first: {uses: barrier, from: train}
        second: {uses: barrier, from: train}
        release: {uses: release, from: §[first, second]}
        """,
    ),
    "B1 and B2 meet behind guarded stages, told once": (
        "many-barriers",
        """
        first: {uses: barrier, from: train}
        release: {uses: release, from: first}
        second: {uses: barrier, from: train}
        again: {uses: release, from: second}
        both: {uses: release, from: §[release, again]}
        last: {uses: release, from: both}
        """,
    ),
    "B > log": (
        "idle-barrier",
        """
        §barrier: {uses: barrier, from: train}
        log: {uses: log, from: barrier}
        """,
    ),
    "B > nothing": (
        "idle-barrier",
        "§barrier: {uses: barrier, from: train}",
    ),
    "B1 > B2 > release": (
        "idle-barrier",
        """
        §first: {uses: barrier, from: train}
        second: {uses: barrier, from: first}
        release: {uses: release, from: second}
        """,
    ),
    "B scope cuda:3 > release, targets on cuda:0": (
        "narrow-barrier",
        """
        forward: {uses: step, from: rows, on: targets}
        barrier: {uses: barrier, from: train, scope: §cuda:3}
        release: {uses: release, from: barrier}
        """,
    ),
    "scope lacks the device of a published resource": (
        "narrow-barrier",
        """
        barrier: {uses: barrier, from: train, scope: §targets}
        publish: {uses: publish, from: barrier, reads: drafter}
        """,
    ),
    "scope lacks the device of a guarded stage": (
        "narrow-barrier",
        """
        barrier: {uses: barrier, from: train, scope: §[cuda:3]}
        shows: {uses: shows, from: barrier, on: cuda:5}
        """,
    ),
    "offload thread without quiesce()": (
        "unquiet-background",
        """
        offload: {uses: §offload, from: train}
        barrier: {uses: barrier, from: train}
        release: {uses: release, from: barrier}
        """,
    ),
    "replicas of a barrier": (
        "barrier-in-replica",
        """
        barrier: {uses: barrier, from: train, replicas: §2}
        release: {uses: release, from: barrier}
        """,
    ),
    "replicas of a guarded stage": (
        "barrier-in-replica",
        """
        barrier: {uses: barrier, from: train}
        release: {uses: release, from: barrier, replicas: §2}
        """,
    ),
    "a guarded stage on several devices": (
        "barrier-in-replica",
        """
        barrier: {uses: barrier, from: train}
        release: {uses: release, from: barrier, on: §targets}
        """,
    ),
    "pack > B > publish(reads drafter)": (
        "stale-barrier",
        """
        pack: {uses: step, from: rows}
        barrier: {uses: barrier, from: §pack}
        publish: {uses: publish, from: barrier, reads: drafter}
        """,
    ),
    "a list with the writer is no join with it": (
        "stale-barrier",
        """
        pack: {uses: step, from: rows}
        barrier: {uses: barrier, from: §[train, pack]}
        publish: {uses: publish, from: barrier, reads: drafter}
        """,
    ),
}


@pytest.mark.axiom("6.1", "6.2", "6.3", "6.4", "6.5", "6.6")
@pytest.mark.parametrize(("code", "stages"), FAIL.values(), ids=FAIL.keys())
def test_fails(code: str, stages: str) -> None:
    fails(_file(stages), code)


def test_a_guarded_source_needs_a_barrier_too() -> None:
    class Puts(UserBroadcast):
        reads = {}

        def run(self):  # pyright: ignore
            yield 1

    fails("stages: {puts: {uses: §puts}}", "release-without-barrier", more={"puts": Puts})


def test_the_trait_decides_and_not_the_name() -> None:
    class Barrier(UserBroadcast):
        guarded = False
        reads = {}

    report = checked(_file("release_cache: {uses: named, from: train}"), more={"named": Barrier})
    assert [found.code for found in report.diagnostics if "barrier" in found.code] == []


def test_an_unknown_neighbour_is_told_once() -> None:
    """A stage that is not found may be guarded or not, so barrier rules say nothing about it."""
    fails(_file("""
        barrier: {uses: barrier, from: train}
        release: {uses: §relase, from: barrier}
        publish: {uses: publish, from: release, reads: drafter}
    """), "unknown-stage")  # fmt: skip


def test_messages_name_the_stages_and_the_remedy() -> None:
    report = fails(_file("release: {uses: release, from: §train}"), "release-without-barrier")
    (found,) = report.diagnostics
    assert found.path == "stages.release.from"
    assert found.message == "'release' needs quiet devices, but no barrier stands between it and 'train'"
    assert "uses: barrier" in found.remedy


def test_a_long_chain_is_no_deep_recursion() -> None:
    chain = "\n".join(f"s{i}: {{uses: step, from: s{i - 1}}}" for i in range(1, 1500))
    stages = f"s0: {{uses: rows}}\n{chain}\nrelease: {{uses: release, from: §s1499}}"
    fails(_file(stages, "stages:\n"), "release-without-barrier")
