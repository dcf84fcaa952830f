"""summary.json: what a run came to, in the contract's keys."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from pipeflow.errors import Cancelled, Stopped
from pipeflow.stage import Kind

if TYPE_CHECKING:
    from pipeflow.assemble import Assembly
    from pipeflow.engine import Engine

__all__ = ["SUMMARY_KEYS", "Summary", "summarise"]

Summary = dict[str, Any]
"""What summary.json holds."""

SUMMARY_KEYS = (
    "status", "exit_code", "wall_s", "steps", "items", "tokens", "tokens_per_s", "loss_first", "loss_last",
    "tau_start", "tau_constant", "tau_end", "tau_decode", "plain_tokens_per_s", "decode_tokens_per_s",
    "lossless", "device", "versions",
)  # fmt: skip
"""Keys that are always there, null where nothing is known."""


def summarise(engine: Engine, assembly: Assembly, seconds: float) -> Summary:
    """Status and figures so far; stages add theirs by `ctx.report`. `seconds`: since sources were opened."""
    runners = assembly.runners
    step = runners.get(engine.spec.step or "")
    values: Summary = {
        **dict.fromkeys(SUMMARY_KEYS),
        **_status(engine),
        "wall_s": round(engine.now() - engine.started, 3),
        "run_s": round(seconds, 3),
        "steps": step.counters.done if step is not None else None,
        "items": sum(r.counters.made for r in runners.values() if r.kind is Kind.SOURCE),
        "device": sorted({device.name for device in assembly.devices.values()}) or ["host"],
        "versions": _versions(),
    }
    values.update(engine.reported)
    if values["tokens"] is not None and values["tokens_per_s"] is None and seconds > 0:
        values["tokens_per_s"] = round(values["tokens"] / seconds, 3)
    values["stages"] = {
        name: {"made": runner.counters.made, "dropped": runner.counters.dropped}
        for name, runner in runners.items()
    }
    values["skipped"] = {name: runner.skipped for name, runner in runners.items() if runner.skipped}
    if engine.error is not None:
        values["error"] = str(engine.error)
    return values


def _status(engine: Engine) -> Summary:
    if engine.error is None:
        return {"status": "drained" if engine.sources_ended else "done", "exit_code": 0}
    if isinstance(engine.error, Stopped) and engine.sources_ended:
        return {"status": "drained", "exit_code": 0}  # before there was anything to train
    if isinstance(engine.error, Cancelled):
        return {"status": "forced", "exit_code": 130}
    return {"status": "failed", "exit_code": 1}


@cache
def _versions() -> dict[str, str]:
    from importlib import metadata

    found: dict[str, str] = {}
    for name in ("pipeflow", "torch", "transformers", "anyio", "msgspec"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
