"""Queues that keep lanes idle: a warning, with the figure that would not."""

from __future__ import annotations

import pytest
from checking import checked


@pytest.mark.parametrize(
    ("work", "queue", "jobs", "items"),
    [
        ("replicas: 5", "", 5, 4),
        ("on: [cuda:0, cuda:1, cuda:2], in_flight: 2", "", 6, 4),
        ("replicas: 2", ", queue: {items: 1}", 2, 1),
        ("on: cpu, replicas: 2, in_flight: 3", ", queue: {items: 5}", 6, 5),
    ],
)
def test_more_jobs_than_credits_is_a_warning(work: str, queue: str, jobs: int, items: int) -> None:
    report = checked(
        f"stages:\n  rows: {{uses: rows}}\n  a: {{uses: step, from: rows, {work}}}\n"
        f"  b: {{uses: step, from: a{queue}}}\n"
    )
    (found,) = report.diagnostics
    assert (found.code, found.severity) == ("idle-lanes", "warning")
    assert f"at most {items} items may be alive between 'a' and 'b'" in found.message
    assert f"{jobs - items} wait for a credit" in found.message
    assert f"queue: {{items: {jobs}}}" in found.remedy
    assert not report.errors


@pytest.mark.parametrize(
    ("work", "queue"),
    [("replicas: 4", ""), ("in_flight: 1", ", queue: {items: 1}"), ("replicas: 8", ", queue: {items: 8}")],
)
def test_enough_credits_pass(work: str, queue: str) -> None:
    report = checked(
        f"stages:\n  rows: {{uses: rows}}\n  a: {{uses: step, from: rows, {work}}}\n"
        f"  b: {{uses: step, from: a{queue}}}\n"
    )
    assert not report.diagnostics
