"""The checker of operation logs: each promise that it holds a log against, and a log that breaks it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pipeflow import testing
from pipeflow.checker import RULES, Broken, check_operations
from pipeflow.operations import OperationLog

if TYPE_CHECKING:
    from collections.abc import Callable

sys.path.append(str(Path(__file__).parent / "sim"))

pytestmark = pytest.mark.axiom("9.3")

LOOP, MAKE, USE = 1, 2, 3
"""Threads."""

Log = list[tuple[Any, ...]]


def launch(thread: int, number: int, *waits: int) -> Log:
    """What a lane's thread does for one launch."""
    waited = [(thread, "wait", number, mark) for mark in waits]
    return [(thread, "enter", number), *waited, (thread, "begin", number), (thread, "end", number, False),
            (thread, "record", number)]  # fmt: skip


def a_run() -> Log:
    """A source of two items on one stream; `use` writes a box on another; a section behind a barrier."""

    def on_loop(*entries: tuple[Any, ...]) -> Log:
        return [(LOOP, *entry) for entry in entries]

    def item(number: int, seq: int) -> Log:
        made, used = number + 1, number + 2
        return [
            *on_loop(("credit", 1, 1, 1), ("submit", number, 1, "job", "make", 0, seq, "cuda:0")),
            *launch(MAKE, number),
            *on_loop(
                ("returned", number, False),
                ("made", made, number, "make", seq, {}, [(4096, 512)]),
                ("hand", made, seq), ("put", 1, seq, made, True), ("take", used, 1, made),
                ("lease", "use", 1, "box", True, ("r", seq)),
                ("submit", used, used, "job", "use", 0, seq, "cuda:0"),
            ),
            *launch(USE, used, *([number] if seq == 0 else [number, used - 4])),
            *on_loop(
                ("returned", used, False), ("unlease", "use", 1, True, used),
                ("version", "box", ("r", seq + 1), False),
                ("awaited", number), ("reached", number),
            ),
        ]  # fmt: skip

    def over(number: int, last: int) -> Log:
        made, used = number + 1, number + 2
        return on_loop(
            ("awaited", used), ("reached", used), ("over", used), ("give", 1, made, last), ("retired", made)
        )

    return [
        *on_loop(("lane", "make", 0, 1), ("lane", "use", 0, 2), ("lane", "publish", 0, 1)),
        *on_loop(("edge", 1, "make -> use", True)),
        *item(1, 0),
        *[(*e[:-1], 2) if e[1] == "credit" else e for e in item(5, 1)],
        *over(1, 1), *over(5, 0), *on_loop(("over", 1)),
        *on_loop(("close", "cuda:0", "quiet"), ("drain", "cuda:0"), ("drained", "cuda:0")),
        *on_loop(("release", "cuda:0"), ("section", "publish")),
        *on_loop(("submit", 9, 9, "job", "publish", 0, 0, "cuda:0")),
        *launch(USE, 9),
        *on_loop(("returned", 9, True), ("reached", 9), ("over", 9), ("unsection", "publish")),
        *on_loop(("open", "cuda:0", "quiet"), ("ended",), ("forgotten",)),
    ]  # fmt: skip


def at(log: Log, kind: str, *what: Any) -> int:
    """The place of the one entry that begins like this."""
    (place,) = [i for i, e in enumerate(log) if e[1] == kind and e[2 : 2 + len(what)] == what]
    return place


def without(*entry: Any) -> Callable[[Log], Log]:
    def change(log: Log) -> Log:
        del log[at(log, *entry)]
        return log

    return change


def changed(*entry: Any, to: tuple[Any, ...]) -> Callable[[Log], Log]:
    def change(log: Log) -> Log:
        place = at(log, *entry)
        log[place] = (log[place][0], *to)
        return log

    return change


def moved(*entry: Any, before: tuple[Any, ...]) -> Callable[[Log], Log]:
    def change(log: Log) -> Log:
        moving = log.pop(at(log, *entry))
        log.insert(at(log, *before), moving)
        return log

    return change


def put(*entries: tuple[Any, ...], before: tuple[Any, ...], thread: int = LOOP) -> Callable[[Log], Log]:
    def change(log: Log) -> Log:
        place = at(log, *before)
        log[place:place] = [(thread, *entry) for entry in entries]
        return log

    return change


FAULTS: list[tuple[str, str, Callable[[Log], Log], str]] = [
    # 4.1
    ("an input's mark is not waited for", "4.1", without("wait", 3, 1), "began before it waited"),
    ("it waits after it began", "4.1", moved("begin", 3, before=("wait", 3)), "before it waited"),
    ("it waits for what is recorded later", "4.1", moved("record", 1, before=("begin", 3)), "not recorded"),
    ("it waits for a mark of nobody", "4.1", changed("wait", 3, 1, to=("wait", 3, 0)), "not recorded"),
    ("a launch runs twice", "4.1", put(("enter", 3), before=("begin", 3), thread=USE), "runs twice"),
    ("a mark without its launch", "4.1", without("begin", 9), "never began"),
    # 4.3
    ("nobody saw its mark", "4.3", without("awaited", 1), "nobody saw its mark"),
    ("an item retires under its consumer", "4.3", moved("give", 1, 2, before=("awaited", 3)), "may still"),
    ("and while it is on an edge", "4.3", moved("retired", 2, before=("give", 1, 2)), "still needed"),
    ("it retires before it is there", "4.3", put(("retired", 2), before=("put", 1, 0)), "may still write"),
    ("it retires twice", "4.3", put(("retired", 2), before=("over", 1)), "retires twice"),
    ("it is taken once it is gone", "4.3", put(("take", 5, 1, 2), before=("over", 1)), "is not there"),
    ("a job is over before its fence", "4.3", moved("over", 3, before=("awaited", 3)), "is over"),
    ("what is left is dropped too early", "4.3", put(("forgotten",), before=("awaited", 3)), "is dropped"),
    ("an item is held for ever", "4.3", without("retired", 2), "still held"),
    # 5
    (
        "a launch while devices are drained", "5.1",
        put(("submit", 10, 10, "job", "make", 0, 2, "cuda:0"), before=("drained",)), "closed gate",
    ),
    (
        "a finish in the section", "5.1",
        put(("submit", 10, 0, "finish", "make", 0, None, "cuda:0"), before=("unsection",)), "closed gate",
    ),
    (
        "a drain before all came back", "5.1",
        put(("submit", 10, 0, "finish", "make", 0, None, "cuda:0"), before=("close",)), "is in hand",
    ),
    ("a drain with the gate open", "5.1", moved("close", before=("drained",)), "is open"),
    ("a section before the drain is over", "5.1", moved("section", before=("drained",)), "is drained"),
    ("a release before the drain is over", "5.1", moved("release", before=("drained",)), "is not drained"),
    ("gates open on the section", "5.1", moved("open", before=("reached", 9)), "opens while"),
    ("two barriers close one gate", "5.2", put(("close", "cuda:0", "b"), before=("drain",)), "already"),
    # 3
    (
        "two write at once", "3.2",
        put(("lease", "publish", 1, "box", True, ("r", 1)), before=("unlease", "use", 1, True, 3)),
        "while use",
    ),
    (
        "one reads what is written", "3.2",
        put(("lease", "publish", 1, "box", False, ("r", 1)), before=("unlease", "use", 1, True, 3)),
        "while use",
    ),
    (
        "one writes what is read", "3.2",
        put(("lane", "see", 0, 1), ("lease", "see", 1, "box", False, ("r", 1)),
            ("submit", 10, 10, "job", "see", 0, 0, None),
            before=("lease", "use", 1, "box", True, ("r", 1))),
        "while it is read",
    ),
    ("a writer's stream does not wait for the last write", "3.2", without("wait", 7, 3), "resource box"),
    (
        "a lease is given back twice", "3.2",
        put(("unlease", "use", 1, True, 3), before=("over", 1)), "has not",
    ),
    ("a lease is kept", "3.2", without("unlease", "use", 1, True, 7), "leases are out"),
    (
        "a version is that of another content", "3.3",
        changed("version", "box", ("r", 2), to=("version", "box", ("r", 1), False)), "two contents",
    ),
    (
        "a reader gets an older one", "3.3",
        changed("lease", "use", 1, "box", True, ("r", 1), to=("lease", "use", 1, "box", True, ("r", 0))),
        "gets",
    ),
    (
        "an item does not say what it is made with", "3.3",
        put(("made", 10, 3, "use", 0, {"box": ("r", 0)}, []), before=("awaited", 3)), "carries",
    ),
    # 2
    ("a credit is counted twice", "2.2", changed("give", 1, 2, to=("give", 1, 2, 0)), "0 credits out"),
    ("a credit is lost", "2.2", changed("give", 1, 6, to=("give", 1, 6, 1)), "1 credits out"),
    ("an item without a credit", "2.2", without("credit", 1, 1, 1), "took a credit"),
    ("a credit comes back twice", "2.2", put(("give", 1, 2, 0), before=("retired", 2)), "is not on"),
    ("a credit is out at the end", "2.2", put(("credit", 1, 1, 1), before=("ended",)), "are out"),
    (
        "more jobs than in_flight", "2.1",
        put(*[("submit", n, n, "job", "use", 0, n, None) for n in (10, 11, 12)], before=("over", 1)),
        "3 jobs",
    ),
    ("a job is in hand at the end", "2.1", without("over", 9), "jobs in hand"),
    # 1
    ("a number is left out", "1.3", changed("put", 1, 1, to=("put", 1, 2, 6, True)), "number 2, not 1"),
    ("a number comes twice", "1.1", changed("put", 1, 1, to=("put", 1, 0, 6, True)), "number 0 twice"),
    ("an item comes twice", "1.1", changed("put", 1, 1, to=("put", 1, 1, 2, True)), "twice"),
    # The rest
    ("a launch after the run failed", "7.4", put(("failed", "StageError"), before=("lease", "use", 1, "box",
        True, ("r", 1))), "after the run failed"),
    ("a fence is reached on a lane's thread", "4.2", lambda log: put(("reached", 1), before=("reached", 1),
        thread=USE)(log), "off the loop"),
]  # fmt: skip


def test_a_good_log_passes() -> None:
    check_operations(a_run())


@pytest.mark.parametrize(("axiom", "fault", "said"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_a_planted_fault_is_found(axiom: str, fault: Callable[[Log], Log], said: str) -> None:
    with pytest.raises(Broken, match=said) as found:
        check_operations(fault(a_run()))
    assert found.value.axiom == axiom


def test_an_unordered_edge_may_mix_its_numbers_but_not_lose_one() -> None:
    def unordered(log: Log, *numbers: int) -> Log:
        log = changed("edge", 1, to=("edge", 1, "make -> use", False))(log)
        for seq, number in enumerate(numbers):
            log = changed("put", 1, seq, 2 + 4 * seq, to=("put", 1, number + 100, 2 + 4 * seq, True))(log)
        return [(*e[:3], e[3] - 100, *e[4:]) if e[1] == "put" else e for e in log]

    check_operations(unordered(a_run(), 1, 0))
    with pytest.raises(Broken, match="lacks a number") as found:
        check_operations(unordered(a_run(), 2, 0))
    assert found.value.axiom == "1.1"


def test_a_resumed_run_goes_on_at_any_number() -> None:
    log = [(*e[:3], e[3] + 40, *e[4:]) if e[1] == "put" else e for e in a_run()]
    with pytest.raises(Broken, match="number 40, not 0"):
        check_operations(log)
    check_operations([(LOOP, "resumed"), *log])


def test_a_run_that_failed_may_leave_things_but_not_break_promises() -> None:
    log = a_run()
    log = [*log[: at(log, "over", 3)], (LOOP, "failed", "Cancelled"), (LOOP, "lost", 7), (LOOP, "forgotten")]
    check_operations(log)


def test_each_rule_is_needed_for_some_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """So no rule is there only for show."""
    for rule in RULES:
        monkeypatch.setattr("pipeflow.checker.RULES", [other for other in RULES if other is not rule])
        assert any(not _finds(fault) for _, _, fault, _ in FAULTS), rule.__name__


def _finds(fault: Callable[[Log], Log]) -> bool:
    try:
        check_operations(fault(a_run()))
    except Broken:
        return True
    return False


# Mutations of the engine: the log that it writes tells of them -----------------------------------------


def _no_marks(patch: Any) -> None:
    patch("pipeflow.launching._marks_of_inputs", lambda job: [])


def _over_at_once(patch: Any) -> None:
    patch("pipeflow.job.Job.over", property(lambda job: job.returned and not job.launching))


def _nothing_before(patch: Any) -> None:
    patch("pipeflow.resource.Instance.before", lambda self, write: [])


def _all_leases_free(patch: Any) -> None:
    patch("pipeflow.resource.Instance.free_for", lambda self, asker, write, *, first=False: True)


def _not_quiet(patch: Any) -> None:
    async def quiet(self: Any) -> None:
        return

    patch("pipeflow.gate.Gate.quiet", quiet)


def _open_gates(patch: Any) -> None:
    patch("pipeflow.gate.Gate.close", lambda self, holder: setattr(self, "_holder", holder))


def _same_version(patch: Any) -> None:
    from pipeflow.resource import Shared

    patch("pipeflow.resource.Shared.version", Shared.version.getter(lambda self: ("run", 0)))


def _any_number_of_jobs(patch: Any) -> None:
    from pipeflow.runner import Runner

    begin = Runner.begin

    def begun(self: Any, job: Any, lane: Any) -> None:
        begin(self, job, lane)
        self.free += 1

    patch("pipeflow.runner.Runner.begin", begun)


def _any_order(patch: Any) -> None:
    from pipeflow import handover

    patch("pipeflow.handover.emit", handover._emit_reached)


def _fences_at_once(patch: Any) -> None:
    patch("pipeflow.fence.Fence.when_reached", lambda self, then: then())


def _goes_on_after_the_end(patch: Any) -> None:
    patch("pipeflow.barrier.go_on", lambda engine: None)
    patch("pipeflow.quiesce.go_on", lambda engine: None)


MUTATIONS = [
    ("4.1", _no_marks),
    ("4.3", _over_at_once),
    ("3.2", _nothing_before),
    ("3.2", _all_leases_free),
    ("5.1", _not_quiet),
    ("5.1", _open_gates),
    ("3.3", _same_version),
    ("2.1", _any_number_of_jobs),
    ("1.3", _any_order),
    ("4.3", _fences_at_once),
    ("5.1", _goes_on_after_the_end),
]


@pytest.mark.parametrize(
    ("axiom", "mutate"), MUTATIONS, ids=[f"{m.__name__.strip('_')}" for _, m in MUTATIONS]
)
def test_a_mutated_engine_writes_a_log_that_tells(
    axiom: str, mutate: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random graphs on the simulated machine: for some seed the log breaks the very axiom."""
    import graphs

    mutate(monkeypatch.setattr)
    broken: list[str] = []
    for seed in range(200):
        log = OperationLog()
        try:
            graphs.run(graphs.Drawn(seed), operations=log)
        except AssertionError:
            continue
        try:
            check_operations(log.entries)
        except Broken as error:
            broken.append(error.axiom)
            if error.axiom == axiom:
                return
    pytest.fail(f"no log tells of {axiom}; they tell of {sorted(set(broken))}")


KINDS = {"wait", "lease", "version", "close", "drain", "section", "open", "lost", "failed", "ended"}


def test_three_hundred_random_graphs_keep_to_their_logs() -> None:
    import graphs

    kinds: set[str] = set()
    for seed in range(300):
        log = OperationLog()
        graphs.run(graphs.Drawn(seed), operations=log)
        try:
            testing.check_operations(log.entries)
        except Broken as error:
            error.add_note(f"seed {seed}")
            raise
        kinds.update(entry[1] for entry in log.entries)
    assert kinds >= KINDS


def test_without_a_log_nobody_knows_of_one() -> None:
    """Off by default: each place that would write looks at an attribute that is None."""
    import graphs

    def heard(ran: testing.Simulated) -> set[Any]:
        assert ran.pipeline is not None
        engine = ran.pipeline.engine
        lanes = [lane for runner in engine.nodes for lane in runner.lanes]
        edges = [edge for runner in engine.nodes for edge in runner.outs]
        parts = [engine, *lanes, *[lane.leases for lane in lanes], *edges]
        return {part.operations for part in parts}

    assert heard(graphs.run(graphs.Drawn(4))) == {None}
    log = OperationLog()
    assert heard(graphs.run(graphs.Drawn(4), operations=log)) == {log}


def test_the_log_as_a_file(tmp_path: Path) -> None:
    import json

    log = OperationLog()
    log.entries = a_run()
    log.write(tmp_path / "operations.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "operations.jsonl").read_text().splitlines()]
    assert len(lines) == len(log.entries)
    assert lines[0] == [0, "lane", "make", 0, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["operations.jsonl"]
    check_operations([tuple(line) for line in lines])
