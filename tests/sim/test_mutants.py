"""Every mutation of the engine is seen by the suite: what no test would notice is not proven."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]


def test_there_are_enough_and_each_has_its_name() -> None:
    assert len(MUTANTS) >= 20
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.timeout(150)
def test_a_mutant_is_killed(mutant: Mutant) -> None:
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("mutants.py")), mutant.name],
        cwd=ROOT, capture_output=True, text=True, timeout=140, check=False,
    )  # fmt: skip
    assert ran.returncode == 1, f"{mutant.name}: it survived\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}"
    assert "its line is there" not in ran.stderr, ran.stderr
    assert "Traceback" not in ran.stderr, ran.stderr
