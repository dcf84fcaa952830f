"""Helpers in this folder (`checking`, `running`) may be imported from the folders below it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
