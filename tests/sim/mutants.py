"""One-line mutations of the engine, each of which breaks a promise, and what of the suite must see it.

`python tests/sim/mutants.py NAME` runs that against the mutated engine: exit 1 if something failed, as it
must, 0 if the mutant survived. Most are killed by random graphs on the simulated machine; where a promise is
about a phase that those do not reach, by a test of it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from typing import Any, NamedTuple

GRAPHS = 400
"""Random graphs at most; most mutants die within the first few."""


class Mutant(NamedTuple):
    """`by` is a test of the suite (`file::name`), or None for random graphs."""

    name: str
    module: str
    old: str
    new: str
    by: str | None = None


MUTANTS = [
    Mutant(
        "a stream does not wait for its inputs",
        "pipeflow.launching",
        "return [fence.mark for fence in fences if fence.mark is not None]",
        "return []",
    ),
    Mutant(
        "a host stage does not wait for its inputs",
        "pipeflow.runner",
        "if taken is None or (self.on_host and self._awaits(taken)):",
        "if taken is None:",
    ),
    Mutant(
        "a credit comes back before the fence is reached",
        "pipeflow.job",
        "return self.returned and self.unreached == 0 and not self.launching",
        "return self.returned and not self.launching",
    ),
    Mutant(
        "an item is dropped before its last consumer is through",
        "pipeflow.handover",
        "if item.holds == 0:",
        "if item.holds <= 1 and item.value is not None:",
    ),
    Mutant(
        "a gap keeps its credit",
        "pipeflow.edge",
        "self.untake()\n            self._put_gap(seq)",
        "pass\n            self._put_gap(seq)",
    ),
    Mutant(
        "what `every` passes over keeps its credit",
        "pipeflow.edge",
        "                if charged:\n                    self.untake()\n                return False",
        "                return False",
    ),
    Mutant(
        "a retired item keeps its credit",
        "pipeflow.edge",
        '"""The item retired at the consumer."""\n        self.credits -= 1',
        '"""The item retired at the consumer."""',
    ),
    Mutant(
        "`every` counts from the first",
        "pipeflow.edge",
        "return self.every == 1 or (seq + 1) % self.every == 0",
        "return self.every == 1 or seq % self.every == 0",
    ),
    Mutant(
        "no item beyond the budget for an unfinished batch",
        "pipeflow.edge",
        "if self.credits == self.gathered:  # an idle edge too",
        "if self.credits == 0:",
    ),
    Mutant(
        "a lease is not waited for",
        "pipeflow.resource",
        "if self.writing or (write and self.readers):",
        "if False:",
        "tests/engine/test_resources.py::test_a_stream_of_readers_does_not_starve_the_writer",
    ),
    Mutant(
        "a reader's stream does not wait for the last write",
        "pipeflow.resource",
        "fences = [self.write_fence, *self.read_fences] if write else [self.write_fence]",
        "fences = [self.write_fence, *self.read_fences] if write else []",
    ),
    Mutant(
        "a writer's stream does not wait for the reads since",
        "pipeflow.resource",
        "fences = [self.write_fence, *self.read_fences] if write else [self.write_fence]",
        "fences = [self.write_fence]",
    ),
    Mutant(
        "a pinned reader does not hold the writer back",
        "pipeflow.runner",
        "            if edge.pinned:\n                self.pins += 1\n        job.charged = edges",
        "        job.charged = edges",
    ),
    Mutant(
        "a pin is taken off before the reader has launched",
        "pipeflow.outcome",
        "if runner.relays and runner.pins:",
        "if False:",
    ),
    Mutant(
        "outputs leave as they come, ordered or not",
        "pipeflow.handover",
        "    if not runner.ordered:\n        return _emit_reached(runner)",
        "    return _emit_reached(runner)",
    ),
    Mutant(
        "a lane takes more than its jobs in flight",
        "pipeflow.runner",
        "if self.free and self._start():",
        "if self._start():",
    ),
    Mutant(
        "a barrier does not wait for launches in scope",
        "pipeflow.quiesce",
        "        await gate.quiet()\n",
        "        pass\n",
    ),
    Mutant(
        "a launch passes a closed gate",
        "pipeflow.runner",
        "return lane if lane.gate is None or lane.gate.open else None",
        "return lane",
    ),
    Mutant(
        "a launch leaves its gate as it returns",
        "pipeflow.launching",
        "lane.gate.leave(lane, self.number)",
        "lane.gate.leave(lane, job.number)",
    ),
    Mutant(
        "gates open after a fault",
        "pipeflow.barrier",
        "if self.engine.admitting:  # after a fault",
        "if True:  # after a fault",
        "tests/engine/test_barrier.py::test_after_a_fault_gates_stay_closed",
    ),
    Mutant(
        "a section goes on after the run has failed",
        "pipeflow.guarded",
        "    if engine.failed:\n        raise RunIsOver",
        "    if False:\n        raise RunIsOver",
        "tests/test_checker.py::test_three_hundred_random_graphs_keep_to_their_logs",
    ),
    Mutant(
        "the end of one run opens another one's gates",
        "pipeflow.gate",
        "if self._holder is not holder:",
        "if False:",
        "tests/engine/test_barrier.py::test_the_end_of_one_pipeline_does_not_open_another_ones_gates",
    ),
    Mutant(
        "a drain is skipped",
        "pipeflow.quiesce",
        'await engine.off_loop(device.drain, f"drain of {device.name}")',
        "pass",
        "tests/sim/test_promises.py::test_a_barrier_drains_what_no_fence_stands_behind",
    ),
    Mutant(
        "a barrier passes selected gaps by",
        "pipeflow.barrier",
        "self._gaps.extend(self.inputs.gaps())",
        "self.inputs.gaps()",
    ),
    Mutant(
        "a barrier does not fire at the end",
        "pipeflow.barrier",
        "if any(edge.since_selected for edge in self.inputs.edges) and not self._since_end:",
        "if False:",
    ),
    Mutant(
        "a retry does not wait for its fence",
        "pipeflow.outcome",
        "fence.when_reached(partial(_again, runner, job))",
        "_again(runner, job)",
    ),
    Mutant(
        "a stage ends while a lane is busy",
        "pipeflow.runner",
        "            if lane.busy:\n                return\n",
        "            pass\n",
    ),
    Mutant(
        "a failed fence counts as reached",
        "pipeflow.launching",
        "            device_fault(self.runner, self.lane, self.number, fault)\n            return\n",
        "            pass\n",
    ),
    Mutant(
        "a cancelled run keeps what is queued",
        "pipeflow.release",
        "    for runner in engine.nodes:\n        _release(runner)\n",
        "",
    ),
    Mutant(
        "what is stuck is freed under the device's work",
        "pipeflow.release",
        "    _held.append(engine)",
        "    release_all(engine)",
        "tests/sim/test_promises.py::test_what_is_stuck_is_never_freed",
    ),
    Mutant(
        "a list fan-in takes no turns",
        "pipeflow.inputs",
        "        taken.parts[0][0].pop()\n        self._advance()",
        "        taken.parts[0][0].pop()",
    ),
    Mutant(
        "a gather forgets its last batch",
        "pipeflow.inputs",
        "return self._edge.ended and not self._open",
        "return self._edge.ended",
    ),
    Mutant(
        "versions are those of the step before",
        "pipeflow.launching",
        "shared.step = job.seq + 1 if job.seq is not None else shared.step + 1",
        "shared.step = job.seq if job.seq is not None else shared.step + 1",
    ),
    Mutant(
        "an idle lane is a suspect",
        "pipeflow.suspects",
        "return begin > end, self._numbers[begin % _KEPT]",
        "return begin >= end > 0, self._numbers[begin % _KEPT]",
        "tests/sim/test_suspects.py::test_the_culprit_is_among_the_suspects_and_an_idle_lane_never",
    ),
    Mutant(
        "begin words are told by item",
        "pipeflow.suspects",
        "        self._count += 1\n",
        "        self._count = (number or 0) + 1\n",
        "tests/sim/test_suspects.py::test_a_retry_is_a_suspect_like_the_first_try",
    ),
    Mutant(
        "stages on a device that failed are closed",
        "pipeflow.loading",
        "if device is not None and device.lost is not None:",
        "if False:",
        "tests/sim/test_suspects.py::test_no_call_of_the_device_follows_and_other_devices_are_closed",
    ),
    Mutant(
        "a device that failed is called again",
        "pipeflow.sim.device",
        '        if self.lost is not None:\n            raise DeviceError(f"device {self.name!r} has',
        '        if False:\n            raise DeviceError(f"device {self.name!r} has',
        "tests/sim/test_suspects.py::test_no_call_of_the_device_follows_and_other_devices_are_closed",
    ),
    Mutant(
        "under --debug-sync lanes take no turns",
        "pipeflow.one_by_one",
        "if self._taken and self._engine.admitting:",
        "if False:",
        "tests/sim/test_suspects.py::test_debug_sync_leaves_one_suspect",
    ),
    Mutant(
        "a parked job keeps what its call held",
        "pipeflow.lane",
        "error.__traceback__ = error.__context__ = error.__cause__ = None",
        "pass",
        "tests/sim/test_out_of_memory.py::test_what_the_failed_call_held_is_free_before_it_runs_again",
    ),
    Mutant(
        "a parked job keeps its leases",
        "pipeflow.parking",
        "        if job.leased:\n",
        "        if False:\n",
        "tests/sim/test_out_of_memory.py::test_for_a_hold_a_parked_reader_counts_as_retired",
    ),
    Mutant(
        "parked jobs run side by side",
        "pipeflow.parking",
        "        while job.launching or job.unreached:\n",
        "        while False:\n",
        "tests/sim/test_out_of_memory.py::test_on_two_lanes_at_once_they_run_again_one_after_the_other",
    ),
    Mutant(
        "a barrier leaves parked jobs parked",
        "pipeflow.barrier",
        "await self.engine.parking.run_all(permits)",
        "pass",
        "tests/sim/test_out_of_memory.py::"
        "test_while_a_barrier_drains_the_job_counts_as_quiet_and_runs_before_gates_open",
    ),
    Mutant(
        "a narrow barrier releases memory",
        "pipeflow.parking",
        "if not self._parked or not self._covers(permits):",
        "if not self._parked:",
        "tests/sim/test_out_of_memory.py::test_a_barrier_for_some_devices_leaves_it_to_the_engine",
    ),
    Mutant(
        "a one-to-many job runs again after outputs",
        "pipeflow.parking",
        "if runner.flat and job.yielded:",
        "if False:",
        "tests/sim/test_out_of_memory.py::test_a_one_to_many_job_runs_again_if_nothing_of_it_was_handed_over",
    ),
    Mutant(
        "out of memory never ends a run",
        "pipeflow.parking",
        "if job.starved > 1:",
        "if False:",
        "tests/sim/test_out_of_memory.py::test_twice_says_how_much_was_tried_and_who_holds_the_memory",
    ),
    Mutant(
        "an overwritten item is not noticed",
        "pipeflow.lifetime",
        "if version is not None and tensor._version != version:",
        "if False:",
        "tests/engine/test_lifetime.py",
    ),
    Mutant(
        "out of order an item leaves before its fence",
        "pipeflow.handover",
        "while outputs and (outputs[0].fence.reached or not outputs[0].live):",
        "while outputs:",
        "tests/sim/test_axiom_items.py::test_out_of_order_an_item_is_handed_over_once_its_fence_is_reached",
    ),
    Mutant(
        "an item that nobody uses gives its credit back at once",
        "pipeflow.handover",
        "    item.fence.when_reached(partial(retire_input, runner, edge, item))",
        "    retire_input(runner, edge, item)",
        "tests/sim/test_axiom_credits.py::test_of_a_dropped_item_the_credit_comes_back_at_its_own_fence",
    ),
    Mutant(
        "items in production reserve no bytes",
        "pipeflow.edge",
        "return self.bytes_live + (self.production + 1) * self.largest <= self.bytes_limit",
        "return self.bytes_live + self.largest <= self.bytes_limit",
        "tests/sim/test_axiom_credits.py::test_bytes_exceed_the_budget_by_growth_alone",
    ),
    Mutant(
        "readers read one at a time",
        "pipeflow.resource",
        "if self.writing or (write and self.readers):",
        "if self.writing or self.readers:",
        "tests/sim/test_axiom_resources.py::test_many_read_at_a_time",
    ),
    Mutant(
        "a lane of a device waits on the host for what it must come after",
        "pipeflow.resource",
        "        if self.awaits and (before := instance.before(write)):",
        "        if before := instance.before(write):",
        "tests/sim/test_axiom_resources.py::test_train_and_generate_on_one_model_are_ordered_by_the_device_alone",
    ),
    Mutant(
        "a submit is answered before its fence",
        "pipeflow.engine",
        "            fence.when_reached(tell)",
        "            tell()",
        "tests/sim/test_axiom_lifetime.py::test_what_submit_returns_is_complete_and_the_callers_own",
    ),
    Mutant(
        "a caller's result is the stage's own memory",
        "pipeflow.lane",
        "        if self.answers and job.tickets:",
        "        if False:",
        "tests/sim/test_axiom_lifetime.py::test_what_submit_returns_is_complete_and_the_callers_own",
    ),
    Mutant(
        "the loop drains devices itself",
        "pipeflow.quiesce",
        'await engine.off_loop(device.drain, f"drain of {device.name}")',
        "device.drain()",
        "tests/sim/test_axiom_lifetime.py::test_the_loop_makes_no_device_call",
    ),
    Mutant(
        "a timeout runs on at a closed gate",
        "pipeflow.enqueue",
        "        deadline.reschedule(None)",
        "        pass",
        "tests/sim/test_axiom_barrier.py::test_an_async_stage_in_mid_generation_waits_at_the_gate_and_its_timeout_with_it",
    ),
    Mutant(
        "two barriers are under way at a time",
        "pipeflow.barrier",
        "            async with gates_of_this_loop().one_at_a_time:",
        "            async with anyio.Lock():",
        "tests/sim/test_axiom_barrier.py::test_one_barrier_at_a_time",
    ),
    Mutant(
        "background work is not joined",
        "pipeflow.quiesce",
        "        await _join(engine, lane, name, seq)",
        "        pass",
        "tests/sim/test_axiom_rule.py::test_what_passes_shows_none",
    ),
    Mutant(
        "what is queued begins after a cancel",
        "pipeflow.settle",
        "        launcher.drop_queued()",
        "        pass",
        "tests/sim/test_axiom_failure.py::test_a_cancel_starts_nothing_and_awaits_what_is_in_hand",
    ),
]


class _Loader(importlib.machinery.SourceFileLoader):
    mutant: Mutant

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        source = Path(path).read_text(encoding="utf-8")
        if source.count(self.mutant.old) != 1:
            raise SystemExit(f"{self.mutant.name}: its line is there {source.count(self.mutant.old)} times")
        return compile(source.replace(self.mutant.old, self.mutant.new), path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self.mutant.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None
        assert spec.origin is not None
        loader = _Loader(fullname, spec.origin)
        loader.mutant = self.mutant
        return importlib.util.spec_from_file_location(fullname, spec.origin, loader=loader)


def survives(mutant: Mutant) -> bool:
    """Mutate the engine of this process, and run what must see it. Once a process."""
    sys.meta_path.insert(0, _Finder(mutant))
    if mutant.by is not None:
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "--timeout", "60"]
        return pytest.main([*options, mutant.by]) == 0
    import graphs

    for seed in range(GRAPHS):
        try:
            graphs.check(seed)
        except Exception as error:
            print(f"seed {seed}: {error!r}"[:500])
            return False
    return True


if __name__ == "__main__":
    (wanted,) = (mutant for mutant in MUTANTS if mutant.name == sys.argv[1])
    sys.exit(0 if survives(wanted) else 1)
