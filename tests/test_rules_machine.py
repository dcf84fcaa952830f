"""Devices, budgets, settings of the process: a passing and a failing file each."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from checking import checked, fails, passes

from pipeflow import rules
from pipeflow.cli.stages import TRAITS
from pipeflow.stage import Stage

ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:True"}


def test_devices_pass() -> None:
    passes("""
        devices: {targets: [cuda:0, cuda:11], trainer: cuda, late: cpu-late}
        resources: {target: {uses: model, on: [targets, trainer, cpu]}}
        stages:
          rows: {uses: rows}
          a: {uses: step, from: rows, on: targets}
          b: {uses: step, from: a, on: [trainer, cpu, cuda:7]}
          c: {uses: step, from: b, on: auto}
          barrier: {uses: barrier, from: c, scope: all}
          shows: {uses: shows, from: barrier}
    """)


def test_devices_fail() -> None:
    fails("""
        devices:
          targets: [cuda:0, §cuda:x]
          trainer: §gpu
          other: §targets
        resources: {target: {uses: model, on: [targets, §trainr]}}
        stages:
          rows: {uses: rows}
          a: {uses: step, from: rows, on: §target}
          b: {uses: step, from: rows, on: §all}
          c: {uses: step, from: rows, on: [cpu, §cuda:01]}
          barrier: {uses: barrier, from: rows, scope: [targets, trainer, cuda:0, §cuda:a]}
          shows: {uses: shows, from: barrier}
    """, "no-such-device")  # fmt: skip


def test_devices_have_near_matches() -> None:
    report = checked("devices: {targets: cpu}\nstages: {rows: {uses: rows, on: target}}")
    assert [found.remedy for found in report.errors] == ["did you mean 'targets'?"]


@pytest.mark.parametrize(("name", "number"), [
    ("gpu", 0), ("GPU", 0), ("gpu1", 1), ("gpu:2", 2), ("cuda0", 0), ("cuda-1", 1), ("CUDA", 0),
    ("cuda:01", 1),
])  # fmt: skip
def test_other_words_for_a_gpu_lead_to_cuda_or_auto(name: str, number: int) -> None:
    for text in (f"stages: {{rows: {{uses: rows, on: '{name}'}}}}",
                 f"devices: {{trainer: '{name}'}}\nstages: {{rows: {{uses: rows}}}}"):  # fmt: skip
        remedies = [found.remedy for found in checked(text).errors]
        assert remedies == [f"write `cuda:{number}`, or `auto` to take what the machine has"]


def test_a_name_of_the_files_own_is_nearer_than_another_word() -> None:
    report = checked("devices: {gpus: cpu}\nstages: {rows: {uses: rows, on: gpu}}")
    assert [found.remedy for found in report.errors] == ["did you mean 'gpus'?"]


def test_here_asks_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))  # pyright: ignore
    text = """
        devices: {targets: [cuda:0, cuda:1]}
        stages:
          rows: {uses: rows}
          a: {uses: step, from: rows, on: targets}
          b: {uses: step, from: rows, on: [cpu, §cuda:2]}
    """
    passes(text.replace("§", ""))
    report = fails(text, "no-such-device", here=True)
    assert report.errors[0].message == "cuda:2 is not here: this machine has 2 CUDA devices"


def test_here_on_a_machine_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(is_available=lambda: False, device_count=lambda: 1)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))  # pyright: ignore
    passes("stages: {rows: {uses: rows, on: cpu}, a: {uses: step, from: rows, on: auto}}", here=True)
    report = checked("stages: {rows: {uses: rows, on: cuda}}", here=True)
    assert [found.message for found in report.errors] == ["cuda is not here: this machine has no CUDA device"]
    assert [found.remedy for found in report.errors] == ["write `auto` to take what the machine has"]


def _queues(total: str, queue: str = "{items: 4}") -> str:
    return f"""
        stages:
          rows: {{uses: rows, bytes: 1GiB}}
          a: {{uses: step, from: rows, queue: {queue}}}
          b: {{uses: step, from: rows}}
        run: {{queue: {{items: 2, total: {total}}}}}
    """


def test_queues_within_the_budget_pass() -> None:
    passes(_queues("6GiB"))  # 4 + 2 items of 1 GiB
    passes(_queues("5GiB", "{items: 4, bytes: 3GiB}"))
    passes("""
        stages:
          rows: {uses: rows}
          a: {uses: step, from: rows}
        run: {queue: {total: 1KiB}}
    """)  # nothing is declared, so nothing is known before the run


def test_queues_over_the_budget_fail() -> None:
    report = fails(_queues("§5GiB"), "queue-over-budget")
    assert report.errors[0].message == "the queues may hold 6 GiB, above the total of 5 GiB"
    fails(_queues("§4.5GiB", "{items: 4, bytes: 3GiB}"), "queue-over-budget")


def test_an_item_larger_than_its_queue_is_a_warning() -> None:
    report = checked(_queues("6GiB", "{items: 4, bytes: 512MiB}"))
    assert [(found.code, found.severity, found.path) for found in report.diagnostics] == [
        ("queue-over-budget", "warning", "stages.rows.bytes")
    ]
    assert report.errors == []


def test_allocator_settings() -> None:
    text = "stages:\n  rows: {uses: rows}\n  a: {uses: §shares, from: rows}\n"
    passes(text.replace("§", ""))
    passes(text.replace("§", ""), env={"PYTORCH_ALLOC_CONF": "expandable_segments:False"})
    passes(text.replace("§shares", "step"), env=ALLOCATOR)
    fails(text, "allocator-transport", env=ALLOCATOR)
    fails(text, "allocator-transport", env={"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


@pytest.mark.parametrize("stages", [
    "a: {uses: tunes, from: rows}",
    "a: {uses: tunes_safely, from: rows, replicas: 2}",
    "a: {uses: tunes, from: rows}\n  b: {uses: tunes_safely, from: rows}",
])  # fmt: skip
def test_one_tuning_lane_passes(stages: str) -> None:
    passes(f"stages:\n  rows: {{uses: rows}}\n  {stages}\n")


@pytest.mark.parametrize("stages", [
    "a: {uses: §tunes, from: rows, replicas: 2}",
    "a: {uses: §tunes, from: rows, on: [cuda:0, cuda:1]}",
    "a: {uses: §tunes, from: rows}\n  b: {uses: §tunes, from: rows}",
])  # fmt: skip
def test_two_tuning_lanes_fail(stages: str) -> None:
    fails(f"stages:\n  rows: {{uses: rows}}\n  {stages}\n", "unguarded-autotuner")


def test_every_trait_that_a_rule_reads_is_declared() -> None:
    """A trait that only a rule knows is found by nobody, and a slip in its name is taken for False."""
    read: set[str] = set()
    for path in Path(rules.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith(".cls"):
                read.add(node.attr)
            elif isinstance(node, ast.Call) and ast.unparse(node).startswith("getattr(node.cls"):
                read.add(str(ast.literal_eval(node.args[1])))
    assert {"needs_fixed_segments", "autotunes", "guards_autotuner", "releases"} <= read
    assert sorted(name for name in read if name not in {*vars(Stage), *dir(type)}) == ["run"]
    assert set(TRAITS) <= {name for name, value in vars(Stage).items() if value is False}
