"""Axiom 4.2 under every test of the engine: its state changes on the loop's thread alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pipeflow.edge import Edge
from pipeflow.fence import Fence
from pipeflow.gate import Gate
from pipeflow.resource import Leases
from pipeflow.runner import Runner

STATE = {
    Edge: "take untake put pop give_back",
    Fence: "reach when_reached",
    Gate: "enter leave close reopen forget",
    Leases: "blocker take give_back forget",
    Runner: "pump wake charge uncharge unpin begin retire close",
}


def on_loop(method: Any) -> Any:
    """The method, with an assertion that a loop runs in this thread."""

    def checked(*args: Any, **options: Any) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise AssertionError(f"{method.__qualname__} was called off the loop") from None
        return method(*args, **options)

    return checked


@pytest.fixture(autouse=True)
def state_changes_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls, names in STATE.items():
        for name in names.split():
            monkeypatch.setattr(cls, name, on_loop(getattr(cls, name)))
