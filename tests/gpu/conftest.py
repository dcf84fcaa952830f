"""Tests that need a CUDA device; skipped where there is none, as in CI."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
# As the folder above does it, whose conftest pytest does not read where this one is its root.
sys.path.insert(0, str(HERE.parent))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
