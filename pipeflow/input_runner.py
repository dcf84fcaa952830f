"""The stage `input` at run time: where a caller puts items in."""

from __future__ import annotations

from collections import deque
from typing import Any

from pipeflow import handover
from pipeflow.fence import REACHED
from pipeflow.job import Output
from pipeflow.runner import Runner

__all__ = ["InputRunner"]


class InputRunner(Runner):
    """The stage `input`: items come from `Pipeline.submit`, each with a ticket."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.offers: deque[tuple[Any, Any]] = deque()

    def pump(self) -> None:
        self.queued_for_pump = False
        if self.closed or not (self.engine.admitting and self.engine.begun):
            return
        while self.offers:
            edges = self.edges_for(self.next_seq)
            for edge in edges:
                if not edge.admits():
                    return
            value, ticket = self.offers.popleft()
            for edge in edges:
                edge.take()
            self.counters.started += 1
            self.counters.made += 1
            handover.hand_over(self, Output(value, REACHED, charged=edges, tickets=(ticket,)))
        if self.ending or self.engine.sources_ended:
            self.engine.callers -= 1
            self.close()

    def waits_for(self) -> str:
        return "ended" if self.closed else "its caller"
