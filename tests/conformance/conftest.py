"""Each test of this folder runs on every device: `cpu`, `cpu-late`, `sim`, and `cuda` where there is one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from targets import TARGETS, Target  # noqa: E402

MARKS = {
    "cuda": [
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    ]
}


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, ())) for name in TARGETS])
def target(request: pytest.FixtureRequest) -> Target:
    return TARGETS[request.param]()
