"""What a launch that returned means for its job: outputs, a gap, a retry, the end, a fault (axiom 7.1)."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from pipeflow.error_text import named_error
from pipeflow.errors import StageError
from pipeflow.item import DROP, Failed, Port, Scatter
from pipeflow.job import END, Output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeflow.fence import Fence
    from pipeflow.job import Job, Launched
    from pipeflow.lifetime import Stamp
    from pipeflow.runner import Runner

__all__ = ["launched_once", "stage_error", "took"]


def took(runner: Runner, job: Job, fence: Fence, launched: Launched) -> None:
    """Draw the conclusions from one launch."""
    value = launched.value
    if launched.starved is not None:
        runner.engine.parking.starved(runner, job, fence, launched)
    elif launched.error is not None:
        _raised(runner, job, fence, launched.error)
    elif value is END:
        _ended(runner, job)
    elif type(value) is Failed:
        _failed(runner, job, fence, value)
    elif runner.scatters or type(value) is Scatter:
        _scattered(runner, job, fence, value, launched.stamps)
    else:
        _made(runner, job, fence, value, launched.stamps)
        job.returned = not (runner.flat or runner.source)
    if not job.retry and not job.unpinned:
        launched_once(runner, job)


def launched_once(runner: Runner, job: Job) -> None:
    """It read what its inputs pin, so their writer may go on (axiom 3.4). A copy holds on for the readers
    behind it."""
    job.unpinned = True
    for edge, _ in job.parts:
        if not edge.pinned:
            continue
        if runner.relays and runner.pins:
            runner.pinned_behind.append(edge)
        else:
            edge.producer.unpin()


def _ended(runner: Runner, job: Job) -> None:
    """A generator has no more."""
    if runner.source:
        runner.exhausted = True
        runner.counters.started -= 1
        if job.seq is not None:
            runner.next_seq -= 1
    charged, job.charged = job.charged, ()
    runner.uncharge(charged)
    job.generator = None
    job.returned = True


def _made(runner: Runner, job: Job, fence: Fence, value: Any, stamp: Any) -> None:
    runner.counters.made += 1
    job.yielded += 1
    charged, job.charged = job.charged, ()
    if runner.source and runner.station is not None and not runner.station.new_record(job):
        value = DROP
    if value is DROP:
        _gap(runner, job, fence, charged)
        return
    port: str | None = None
    kind: Any = cast("Any", type(value))
    if kind is Port:
        port, value = value.name, value.value
    if port not in runner.ports and (port is not None or runner.ports):
        runner.engine.fail(_wrong_port(runner, job, port))
        return
    if runner.answers:
        runner.engine.answer(job.tickets, value, fence)
    elif not runner.outs:
        fence.when_reached(partial(runner.engine.retired, value))
    if runner.outs:
        if stamp is not None:
            _enter(runner, job, stamp)
        job.outputs.append(
            Output(
                value,
                fence,
                charged=charged,
                seq=job.seq,
                port=port,
                versions=job.versions,
                tickets=job.tickets,
                stamp=stamp,
            )
        )


def _enter(runner: Runner, job: Job, stamp: Stamp) -> None:
    """From here on nobody may write the output's memory (axiom 4.6)."""
    stamp.stage, stamp.number = runner.name, job.number
    try:
        runner.engine.storages.enter(stamp, (item for _, item in job.parts))
    except StageError as error:
        runner.engine.fail(error)


def _wrong_port(runner: Runner, job: Job, port: str | None) -> StageError:
    known = ", ".join(runner.ports) or "none"
    if port is None:
        said = f"returned a bare value, but it has ports ({known}). Return Port(name, value)"
    else:
        said = (
            f"returned a value for port {port!r}, which is not among its ports ({known}). Add it to `ports`"
        )
    return StageError(said, stage=runner.name, sequence=job.number)


def _gap(runner: Runner, job: Job, fence: Fence, charged: Any) -> None:
    """Nothing comes of the item: its number passes on alone."""
    runner.counters.dropped += 1
    if runner.feeds_answer:
        runner.engine.drop(job.tickets, runner.name)
    if runner.flat:
        runner.uncharge(charged)  # its outputs have no numbers yet, so none is missing
    elif runner.outs:
        job.outputs.append(Output(None, fence, live=False, charged=charged, seq=job.seq))


# Scatter -----------------------------------------------------------------------------------------


def _scattered(runner: Runner, job: Job, fence: Fence, scatter: Any, stamps: Any) -> None:
    """One value a member: each goes on with its member's number, gaps between them too."""
    if scatter is DROP:
        _scatter(runner, job, fence, [DROP] * len(job.parts))
        return
    kind: Any = cast("Any", type(scatter))
    if not runner.scatters or kind is not Scatter:
        said = (
            "returned a Scatter, which only a Gather may whose run is annotated `-> Scatter[..]`"
            if kind is Scatter
            else f"must return a Scatter, as its run is annotated, not {kind.__name__}"
        )
        runner.engine.fail(StageError(said, stage=runner.name, sequence=job.number))
        return
    if len(scatter.values) != len(job.parts):
        said = f"returned a Scatter of {len(scatter.values)} values for {len(job.parts)} members"
        runner.engine.fail(StageError(said, stage=runner.name, sequence=job.number))
        return
    _scatter(runner, job, fence, scatter.values, stamps)


def _scatter(
    runner: Runner, job: Job, fence: Fence, values: list[Any], stamps: Sequence[Stamp | None] | None = None
) -> None:
    job.returned = True
    members = [Output(None, fence, live=False, seq=seq) for seq in job.gaps]
    stamps = stamps if runner.outs and stamps is not None else [None] * len(values)
    for value, stamp, (edge, item) in zip(values, stamps, job.parts, strict=True):
        live = value is not DROP
        if stamp is not None:
            _enter(runner, job, stamp)
        members.append(
            Output(
                value if live else None,
                fence,
                live=live,
                seq=edge.number(item),
                versions=job.versions,
                tickets=item.tickets,
                stamp=stamp,
            )
        )
        if live:
            runner.counters.made += 1
            if runner.answers:
                runner.engine.answer(item.tickets, value, fence)
        else:
            runner.counters.dropped += 1
            if runner.feeds_answer:
                runner.engine.drop(item.tickets, runner.name)
    charged, job.charged = job.charged, ()
    if runner.outs:
        members.sort(key=lambda output: output.seq or 0)
        job.pending = deque(members)
        # The credit taken at the start serves the first live member.
        first = next((output for output in members if output.live), None)
        if first is not None:
            first.charged, charged = charged, ()
    runner.uncharge(charged)


# Errors ------------------------------------------------------------------------------------------


def _failed(runner: Runner, job: Job, fence: Fence, failed: Failed) -> None:
    """A record that a generator could not read: it goes on behind it if the budget allows."""
    if _may_skip(runner):
        _skip(runner, job, fence, failed.error, failed.record)
        job.returned = not (runner.flat or runner.source)
    else:
        runner.engine.fail(stage_error(runner, job, failed.error))


def _raised(runner: Runner, job: Job, fence: Fence, error: BaseException) -> None:
    """Stage code raised: skip, retry or stop. Nothing was handed over yet."""
    policy = runner.on_error
    job.failures += 1
    if policy is None or not isinstance(error, Exception):
        runner.engine.fail(stage_error(runner, job, error))
    elif policy.retry is not None and job.failures <= policy.retry and runner.retriable and not runner.flat:
        runner.counters.retries += 1
        runner.engine.note("retry", runner.name, sequence=job.number, attempt=job.failures, error=error)
        job.retry = True
        runner.retrying += 1
        # Once its fence is reached: what it enqueued may still write where the next call writes.
        fence.when_reached(partial(_again, runner, job))
    elif runner.source:
        # A generator that raised is over: to skip would be to lose all the records behind it, unsaid.
        runner.engine.fail(stage_error(runner, job, error))
    elif _may_skip(runner):
        _skip(runner, job, fence, error, job.value)
        job.generator = None
        job.returned = True
    else:
        runner.engine.fail(stage_error(runner, job, error))


def _again(runner: Runner, job: Job) -> None:
    job.retry_due = True
    runner.wake()


def _may_skip(runner: Runner) -> bool:
    policy = runner.on_error
    return policy is not None and policy.skip is not None and runner.skipped < policy.skip


def _skip(runner: Runner, job: Job, fence: Fence, error: Exception, record: object) -> None:
    runner.skipped += 1
    for track in runner.tracks:
        track.skipped(job)
    runner.engine.dead_letter(runner.name, job.number, error, record)
    if runner.scatters:
        _scatter(runner, job, fence, [DROP] * len(job.parts))
        return
    charged, job.charged = job.charged, ()
    _gap(runner, job, fence, charged)


def stage_error(runner: Runner, job: Job, error: BaseException) -> StageError:
    """The error that ends the run, naming stage and item."""
    policy = runner.on_error
    said = ""
    if runner.source and policy is not None and type(error) is not StageError and job.failures:
        said = " (a source that raised is over; it yields Failed(error) for a record to be skipped)"
    elif policy is not None and policy.skip is not None:
        said = f" (the budget of {policy.skip} skipped items is used up)"
    elif policy is not None and policy.retry is not None:
        said = f" (tried {job.failures} times)"
    wrapped = StageError(f"{named_error(error)}{said}", stage=runner.name, sequence=job.number)
    wrapped.__cause__ = error
    return wrapped
