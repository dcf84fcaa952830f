"""Every shipped pipeline checks clean, and the shipped text is what it says."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from pipeflow.check import check

EXAMPLES = Path(__file__).parents[2] / "examples"
DATA = EXAMPLES / "data"


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_a_shipped_file_checks_clean(path: Path) -> None:
    report = check(path)
    assert [found.render() for found in report.diagnostics] == []


def test_prompts_are_many_and_different() -> None:
    prompts = rows("prompts.jsonl")
    assert len(prompts) >= 200
    assert len({row["kind"] for row in prompts}) >= 8
    turns = [[m["role"] for m in row["messages"]] for row in prompts]
    assert sum(roles.count("user") > 1 for roles in turns) >= 20
    assert sum("system" in roles for roles in turns) >= 20
    assert not any("assistant" in roles for roles in turns)
    first = [next(m["content"] for m in row["messages"] if m["role"] == "user") for row in prompts]
    assert len(set(first)) == len(first)
    patterns = Counter(" ".join(text.lower().split()[:4]) for text in first)
    assert max(patterns.values()) <= 3, patterns.most_common(3)


def test_the_answers_answer_the_prompts() -> None:
    from pipeflow_stages.text.loops import repeats, units

    asked = {json.dumps(row["messages"], sort_keys=True) for row in rows("prompts.jsonl")}
    answered = rows("smollm2.jsonl")
    assert len(answered) >= 150
    for row in answered:
        turns = row["messages"]
        assert json.dumps([m for m in turns if m["role"] != "assistant"], sort_keys=True) in asked
        users = sum(m["role"] == "user" for m in turns)
        answers = [m["content"] for m in turns if m["role"] == "assistant"]
        assert len(answers) == users
        assert all(text.strip() for text in answers)
        assert all(repeats(units(text), 8) < 4 for text in answers)


def test_a_tenth_is_held_out_and_never_trained_on() -> None:
    from pipeflow_stages.data.jsonl import parse_row, split_of

    parts: dict[str, set[str]] = {"train": set(), "held_out": set()}
    lines = (DATA / "smollm2.jsonl").read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        conversation = parse_row(line, f"smollm2.jsonl:{number}")
        parts[split_of(conversation.key, 0.1)].add(conversation.key)
    assert not parts["train"] & parts["held_out"]
    share = len(parts["held_out"]) / len(lines)
    assert 0.05 <= share <= 0.15
