"""Every number of docs/engine.md has a test that says so, or says what it waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import axioms
import pytest

if TYPE_CHECKING:
    from pathlib import Path

COUNTS = {1: 6, 2: 7, 3: 7, 4: 11, 5: 7, 6: 6, 7: 6, 8: 4}
"""Section to how many statements it has."""

LEFT: dict[str, str] = {
    "4.4": "step 3: `record_stream` for what a stage keeps, with the holders of a storage counted",
    "4.10": "step 3: process lanes, which need a child process",
    "5.7": "step 8: several ranks under torchrun",
    "7.6": "step 3: children of process lanes",
}
"""Numbers without a test: the step that brings what they need."""

PARTLY: dict[str, str] = {
    "4.6": "step 3: copying out of a graph's buffers needs captured graphs",
    "4.7": "step 3: `ctx.side`",
    "4.8": "step 3: pinned slots made at load",
    "4.9": "step 3: a caller's own stream, for tensors that go in",
    "4.11": "step 3: pinned slots made at load, and what a real queue blocks",
}
"""Numbers with tests, of which a part waits all the same."""

PAGE = axioms.axioms()
MARKS = axioms.marks()


def test_the_page_has_every_number_once_and_in_order() -> None:
    assert [*PAGE] == [f"{section}.{at}" for section, count in COUNTS.items() for at in range(1, count + 1)]


@pytest.mark.parametrize("number", PAGE)
def test_a_number_has_a_test_or_says_what_it_waits_for(number: str) -> None:
    if number in LEFT:
        assert number not in MARKS, f"{number} is said to be left, but is tested: {MARKS[number]}"
    else:
        assert number in MARKS, f'no test is marked axiom("{number}")'


def test_no_mark_is_of_a_number_that_does_not_exist() -> None:
    assert sorted(set(MARKS) - set(PAGE)) == []
    assert sorted({*LEFT, *PARTLY} - set(PAGE)) == []


def test_what_is_left_says_when_it_comes_also_to_the_reader() -> None:
    assert not set(LEFT) & set(PARTLY)
    for number, reason in {**LEFT, **PARTLY}.items():
        assert reason.startswith("step "), f"{number}: {reason}"
        assert "Not there yet" in PAGE[number].text, f"the page does not say that {number} is not there yet"


@pytest.mark.parametrize("number", PAGE)
def test_the_page_names_tests_that_exist_and_say_so(number: str) -> None:
    named = PAGE[number].tests
    assert named or number in LEFT, f"the page names no test for {number}"
    for test in named:
        assert test in MARKS.get(number, ()), f'{test} is not there, or is not marked axiom("{number}")'


# The check itself -----------------------------------------------------------------------------------


def test_a_page_is_read_by_its_numbers() -> None:
    page = "# T\n**1.1** One. `sim/test_a.py::test_x`,\n`test_b.py::test_y`\n\n**1.2** Two\n## N\n`c.py::d`"
    found = axioms.axioms(page)
    assert found["1.1"].tests == ["sim/test_a.py::test_x", "test_b.py::test_y"]
    assert found["1.2"].tests == []
    with pytest.raises(ValueError, match="twice"):
        axioms.axioms(page + "\n**1.1** Again")


def test_marks_are_read_from_the_source(tmp_path: Path) -> None:
    source = '@pytest.mark.axiom("1.1", "2.2")\n@pytest.mark.slow\ndef test_a(): ...\ndef test_b(): ...\n'
    (tmp_path / "test_it.py").write_text(source)
    assert axioms.marks(tmp_path) == {"1.1": {"test_it.py::test_a"}, "2.2": {"test_it.py::test_a"}}
    (tmp_path / "test_it.py").write_text('@pytest.mark.axiom("1.1")\ndef helper(): ...\n')
    with pytest.raises(ValueError, match="no test"):
        axioms.marks(tmp_path)
