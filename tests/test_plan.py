"""`pipeflow plan`: the very engine on simulated devices. The public account of four GPUs, order by order."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from pipeflow.check import check, check_document
from pipeflow.cli.__main__ import cli
from pipeflow.document import from_dict
from pipeflow.errors import GraphError, PipeflowError
from pipeflow.plan import Plan, plan, read_profile
from pipeflow.spec import SimSpec

EXAMPLES = Path(__file__).parents[1] / "examples"


def planned(name: str, *overrides: str, **options: Any) -> Plan:
    report = check(EXAMPLES / f"replay_four_gpus{name}.yaml", overrides)
    assert not report.diagnostics, report.diagnostics
    return plan(report, **options)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("name", "seconds"),
    [("_in_turn", 4.1), ("_third_beside", 3.0), ("_lock_step", 1.9)],
)
def test_the_orders_of_the_account(name: str, seconds: float, seed: int) -> None:
    """2.4 GiB of features from each of three GPUs take 26 ms, which the account's round figures leave out."""
    assert planned(name, seed=seed, lag=1e-4).seconds_per_step == pytest.approx(seconds, abs=0.035)


def test_pipelined_the_forwards_are_the_bound() -> None:
    found = planned("", lag=1e-4)
    assert 1.1 <= found.seconds_per_step <= 1.12
    assert all(found.devices[f"cuda:{index}"].busy >= 0.98 for index in range(3))
    assert found.devices["cuda:3"].busy == pytest.approx(0.8 / found.seconds_per_step, abs=0.01)
    assert found.bottleneck == {"device": "cuda:0", "stage": "target"}
    assert found.stages["target"].items == 3 * found.stages["train"].items
    assert found.devices["cuda:0"].peak_bytes >= 2.4 * 2**30


def test_with_eight_targets_the_drafter_is_the_bound() -> None:
    found = planned("_eight_targets", lag=1e-4)
    assert found.seconds_per_step == pytest.approx(0.80, abs=0.005)
    assert found.devices["cuda:3"].busy >= 0.98
    assert found.bottleneck == {"device": "cuda:3", "stage": "train"}


def test_costs_are_read_from_overrides_and_from_a_profile() -> None:
    assert planned("", "forward=2s").seconds_per_step == pytest.approx(2.0, abs=0.01)
    told = {"target": SimSpec(duration=0.5, bytes=1000), "train": SimSpec(duration=3.0)}
    found = planned("", profile=told)
    assert found.seconds_per_step == pytest.approx(3.0, abs=0.02)
    assert found.bottleneck["stage"] == "train"


def test_the_readme_tells_what_plan_says() -> None:
    readme = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"\| `(replay_four_gpus\w*\.yaml)` \| ([0-9.]+)", readme)
    assert len(rows) == 5
    for name, seconds in rows:
        assert plan(check(EXAMPLES / name)).seconds_per_step == pytest.approx(float(seconds), abs=0.005), name


def test_a_plan_from_a_runs_profile_tells_what_happened() -> None:
    """Stages with code of their own, simulated once; then planned from the costs that the run noted."""
    from pipeflow import Registry, Stage, testing

    class Batches(Stage[None, int]):
        def run(self):
            for number in range(60):
                testing.work(0.01, lock=False)
                yield number

    def on_device(seconds: float, nbytes: int) -> Any:
        class Kernel(Stage[Any, Any]):
            device = True

            def run(self, item: Any) -> Any:
                testing.work(0.002)
                out = testing.empty(nbytes)
                testing.kernel(seconds, list(tensors_in(item)), [out])
                return out

        return Kernel

    from pipeflow.device.base import tensors_in

    registry = Registry()
    uses = {"batches": Batches, "target": on_device(0.3, 1 << 20), "train": on_device(0.2, 512)}
    for name, cls in uses.items():
        registry.add(name, cls)
    stages = {
        "batches": {"uses": "batches"},
        "target": {"uses": "target", "from": "batches", "on": ["cuda:0", "cuda:1"], "in_flight": 2},
        "train": {"uses": "train", "from": "target", "on": "cuda:2", "in_flight": 2},
    }
    file = {"pipeflow": 1, "name": "t", "stages": stages, "run": {"step": "train"}}
    ran = testing.simulate(file, registry=registry)
    assert ran.error is None
    costs = ran.profile["stages"]
    assert costs["batches"]["duration"] == pytest.approx(0.01, rel=0.01)
    assert costs["target"]["duration"] == pytest.approx(0.3, rel=0.02)
    assert costs["train"]["duration"] == pytest.approx(0.2, rel=0.02)
    assert 0.002 <= costs["target"]["host"] <= 0.004, "a call may wait for the other lane's"
    assert costs["target"]["bytes"] == 1 << 20
    told = msgspec.convert(costs, dict[str, SimSpec])
    found = plan(check_document(from_dict(file), registry=registry), profile=told)
    happened = (ran.seconds - 0.3) / 60
    assert found.seconds_per_step == pytest.approx(happened, rel=0.05)


def test_a_host_stage_can_be_the_bottleneck() -> None:
    document = from_dict(
        {
            "pipeflow": 1,
            "name": "slow-data",
            "stages": {
                "a": {"uses": "sim/source", "sim": {"duration": "2s"}},
                "b": {"uses": "sim/work", "from": "a", "on": "cuda:0", "sim": {"duration": "1s"}},
            },
        }
    )
    found = plan(check_document(document), steps=40)
    assert found.seconds_per_step == pytest.approx(2.0, abs=0.01)
    assert found.bottleneck == {"device": None, "stage": "a"}
    assert found.devices["cuda:0"].busy == pytest.approx(0.5, abs=0.02)


def test_interpreter_time_of_two_lanes_never_overlaps() -> None:
    def file(host: str) -> Any:
        stages = {
            "a": {"uses": "sim/source"},
            "b": {"uses": "sim/work", "from": "a", "on": ["cuda:0", "cuda:1"], "in_flight": 2,
                  "sim": {"duration": "10ms", "host": host}},
        }  # fmt: skip
        return check_document(from_dict({"pipeflow": 1, "name": "t", "stages": stages}))

    assert plan(file("1ms")).seconds_per_step == pytest.approx(0.005, rel=0.05)
    assert plan(file("8ms")).seconds_per_step == pytest.approx(0.008, rel=0.05)


def test_virtual_hours_run_in_seconds() -> None:
    found = planned("", steps=4000)
    assert found.seconds >= 4000 * 1.1  # 73 minutes
    assert found.seconds_per_step <= 1.12


def test_a_real_example_is_planned_with_its_own_stages() -> None:
    """Names, kinds, gathers, `every`, barrier and resources are the file's; only code and time are not."""
    report = check(EXAMPLES / "dflash_tiny.yaml", ["device=cuda:0"])
    costs = {"target": 0.02, "train": 0.05, "evaluate": 1.0, "publish": 0.1}
    told = {name: SimSpec(duration=seconds) for name, seconds in costs.items()}
    told["batches"] = SimSpec(size=8)
    found = plan(report, profile=told, steps=241)
    # One evaluation and one publication in 120 steps; all on one GPU, so times add up.
    assert found.seconds_per_step == pytest.approx(0.07 + 1.1 / 120, rel=0.06)
    assert found.bottleneck == {"device": "cuda:0", "stage": "train"}


@pytest.mark.parametrize(
    ("told", "said"),
    [({"nobody": SimSpec()}, "'nobody', which the file has not"), ({}, "Say it: `sim: {size: N}`")],
)
def test_what_cannot_be_planned_is_said(told: dict[str, SimSpec], said: str) -> None:
    with pytest.raises(PipeflowError, match="(?s)" + said.replace("{", r"\{").replace("}", r"\}")):
        plan(check(EXAMPLES / "dflash_tiny.yaml", ["device=cuda:0"]), profile=told)


def test_a_file_with_faults_is_not_planned(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("pipeflow: 1\nname: t\nstages:\n  a: {uses: sim/nothing}\n")
    ran = CliRunner().invoke(cli, ["plan", str(path)])
    assert ran.exit_code == 1
    assert "sim/nothing" in ran.output
    with pytest.raises(GraphError):
        plan(check(path))


def test_the_command(tmp_path: Path) -> None:
    file = str(EXAMPLES / "replay_four_gpus.yaml")
    ran = CliRunner().invoke(cli, ["plan", file, "--steps", "40", "--json"])
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)
    assert told["seconds_per_step"] == pytest.approx(1.1, abs=0.02)
    assert told["devices"]["cuda:3"]["busy"] == pytest.approx(0.727, abs=0.01)
    assert told["bottleneck"] == {"device": "cuda:0", "stage": "target"}
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"stages": {"train": {"duration": 4.0}}}))
    ran = CliRunner().invoke(cli, ["plan", file, "--steps", "40", "--profile", str(profile)])
    assert ran.stdout.startswith("4.00")
    assert "bottleneck: train on cuda:3" in ran.stdout
    profile.write_text("{}")
    with pytest.raises(PipeflowError, match="not a profile"):
        read_profile(profile)


def test_pretended_stages_do_not_run_for_real(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(
        "pipeflow: 1\nname: t\nstages:\n  a: {uses: sim/source}\n  b: {uses: sim/work, from: a}\n"
    )
    ran = CliRunner().invoke(cli, ["run", str(path), "--run-dir", str(tmp_path / "run")])
    assert ran.exit_code == 1
    assert "Run `pipeflow plan`" in ran.output
