"""profile.json: what each stage cost in a run, in the keys of `sim:`, so that `pipeflow plan` can replay it.

Device time is seen from the host, without a wait: from the moment at which a job could begin (it was
launched, its lane's last job was over, its inputs were there) to its fence. So it is late by a notice, tens
of microseconds, and holds what other lanes of the same device took meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeflow.stage import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeflow.launching import Launch
    from pipeflow.runner import Runner

__all__ = ["observe", "profile"]


def observe(launch: Launch, now: float) -> None:
    """A launch's fence is reached now."""
    lane, counters = launch.lane, launch.runner.counters
    begun = max(launch.submitted, lane.reached_at, *(fence.at for fence in launch.awaited))
    counters.device_seconds += max(0.0, now - begun)
    counters.device_launches += 1
    lane.reached_at = now


def profile(runners: Mapping[str, Runner]) -> dict[str, Any]:
    """Costs by stage: seconds an output, bytes, and the size of batches. What never ran is not there."""
    stages: dict[str, dict[str, Any]] = {}
    for name, runner in runners.items():
        counters = runner.counters
        if not counters.launches or runner.relays:
            continue
        generates = runner.kind in (Kind.SOURCE, Kind.FLAT)  # one more call finds the end, for each item
        host = counters.host_seconds / max(1, counters.made if generates else counters.launches)
        if counters.device_launches:
            found: dict[str, Any] = {
                "duration": round(counters.device_seconds / counters.device_launches, 9),
                "host": round(host, 9),
            }
        else:
            found = {"duration": round(host, 9)}
        if counters.largest:
            found["bytes"] = counters.largest
        if runner.kind is Kind.GATHER and counters.done:
            found["size"] = max(1, round(counters.taken / counters.done))
        if runner.kind is Kind.FLAT and counters.done:
            found["outputs"] = max(1, round(counters.made / counters.done))
        stages[name] = found
    return {"stages": stages}
