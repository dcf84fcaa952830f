"""The file format, version 1, as msgspec Structs. A key that does nothing yet is not here: it is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pipeflow.config import Duration, Size

__all__ = [
    "CheckpointSpec",
    "OnError",
    "PipelineSpec",
    "QueueSpec",
    "ResourceSpec",
    "RunSpec",
    "SimSpec",
    "StageSpec",
    "StopSpec",
]

Count = Annotated[int, Meta(ge=1)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")]
Names = str | list[str]


class _Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class QueueSpec(_Spec, frozen=True, kw_only=True):
    """Bounds of the queue before a stage. The last three apply to each edge, `total` to all of them."""

    items: Count = 4
    """Items alive on an edge: queued, or in work at its consumer."""
    bytes: Size | None = None
    """Bytes of tensors alive on an edge. An idle consumer is fed whatever the budget."""
    total: Size | None = None
    """Only under `run`: what all edges together may hold; checked before the run from declared `bytes`."""


class OnError(_Spec, frozen=True, kw_only=True):
    """What happens when `run` raises. Exactly one of the two is set; the text `stop` is the default."""

    skip: Count | None = None
    """Drop the item, at most this many times in a run; each is written to dead_letter.jsonl."""
    retry: Count | None = None
    """Run the item again, at most this many times an item; then stop."""


class ResourceSpec(_Spec, frozen=True, kw_only=True):
    uses: str
    on: Names | None = None
    reads: str | list[str] | dict[str, str] | None = None
    """Resources opened before it, which its `open` may look at (a drafter sized by its target)."""
    follows: str | None = None
    """The resource whose versions it publishes. A stage that reads that one and writes this one hands them
    on. Stages that read this one and feed that one's writer never run further ahead than `max_staleness`."""
    max_staleness: Annotated[int, Meta(ge=0)] | None = None
    """With `follows`: steps by which an item's version may be older than the step that it goes into. 0, the
    default, is lock-step; at least `every` - 1 of the stage (or barrier) that publishes."""
    spare: bool = False
    """With `follows`: a second copy is opened, and a version is written into it while readers go on with the
    other one. A write must be complete: the copy that it gets holds the version before last."""
    with_: dict[str, Any] = msgspec.field(name="with", default_factory=dict)


class SimSpec(_Spec, frozen=True, kw_only=True):
    """What a stage costs, for `pipeflow plan`. A real run does not look at it."""

    duration: Duration = 0.0
    """Seconds of its device for one output; of its thread where it has no device."""
    host: Duration = 0.0
    """Seconds in which one call keeps the interpreter busy; those of two stages never overlap."""
    bytes: Size | None = None
    """Of one output."""
    size: Count | None = None
    """Of a gather: items a batch, where its class alone does not say."""
    outputs: Count = 1
    """Of a one-to-many stage: outputs an item."""


class StageSpec(_Spec, frozen=True, kw_only=True):
    uses: str
    from_: str | list[str] | dict[str, str] | None = msgspec.field(name="from", default=None)
    """One stage, a list (fan-in), or named inputs (joined by number). `stage.port` names an output."""
    on: Names | None = None
    with_: dict[str, Any] = msgspec.field(name="with", default_factory=dict)
    reads: str | list[str] | dict[str, str] | None = None
    """Resources read: names, or roles to names where the class alone does not decide."""
    writes: str | list[str] | dict[str, str] | None = None
    every: Count | None = None
    """Takes the items whose (number + 1) is a multiple of it."""
    limit: Count | None = None
    """Takes this many items (a gather: makes so many batches), then ends, and with it the sources behind."""
    ordered: bool = True
    replicas: Count = 1
    """Lanes a device."""
    in_flight: Count = 1
    """Jobs a lane."""
    launcher: Literal["thread", "inline"] | None = None
    on_error: Annotated[
        Literal["stop"] | OnError, Meta(extra={"remedy": "write `stop`, `{skip: N}` or `{retry: N}`"})
    ] = "stop"
    queue: QueueSpec | None = None
    bytes: Size | None = None
    """The largest output, where it is known before the first one."""
    scope: Names | None = None
    """Barriers only: `all` (default) or device names whose launches it holds."""
    snapshot: bool = False
    """Readers: a copy of what is written by others is made before the stage is called, and the writer need
    not wait for the stage. Barriers: what it guards works on such copies, with gates open again."""
    at_start: bool | None = None
    """Barriers and what they guard: the section runs once before the first item, with the reason `start`.
    Left out: if a class in the section says so, as `weights/broadcast` does."""
    sim: SimSpec | None = None
    timeout: Duration | None = None
    """Barriers: to reach quiet and run what it guards. Other stages: one job."""


class StopSpec(_Spec, frozen=True, kw_only=True):
    drain: Duration = 25.0
    """Seconds from the first signal until the drain becomes a cancel."""
    grace: Duration = 2.0
    """Seconds that a cancel waits for jobs and fences in hand."""


class CheckpointSpec(_Spec, frozen=True, kw_only=True):
    """When a run is saved, so that another one can go on from there. Also at its end, and at a drain.

    Saved are the resources that the stage `of` and those behind it write, and the states of these stages, of
    the version right after one number of `of`; what lies before is computed again."""

    of: Name
    """The stage whose items are the steps: one-to-one, one lane, in order; as a rule the one that trains."""
    every: Count = 100
    """Steps between two checkpoints."""
    keep: Count = 3
    """The newest so many stay."""
    best: Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*\.[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """`STAGE.KEY` of metrics.jsonl: the checkpoint of the step where it was highest stays too."""
    exact: bool = True
    """A resumed run sees each item exactly once, the same items, in the same order; stages that cannot
    promise that are refused. false: a record is read again unless all that was made of it was used."""


class RunSpec(_Spec, frozen=True, kw_only=True):
    seed: Annotated[int, Meta(ge=0)] = 0
    step: str | None = None
    """The stage whose calls are counted as steps."""
    threads: Literal["auto"] | Count | None = None
    """Threads that torch uses inside one operation on the CPU. Lanes run side by side, each in its own
    thread, so without a GPU fewer are often faster; `auto` shares the cores among the lanes on a CPU
    device. A setting of the whole process; left out, nothing is set."""
    queue: QueueSpec = QueueSpec()
    stop: StopSpec = StopSpec()
    stall: Duration = 600.0
    """Seconds without any progress after which the run fails, naming what each stage waits for."""
    log_every: Duration = 5.0
    """Seconds between two progress lines where there is no terminal."""
    checkpoint: CheckpointSpec | None = None
    resume: str = "never"
    """`never`; `auto`: go on from the newest checkpoint of this pipeline, if there is one; or a run folder,
    or one of its checkpoints (taken from the file's folder), to go on from that one."""


class PipelineSpec(_Spec, frozen=True, kw_only=True):
    pipeflow: Literal[1]
    name: Name
    params: dict[str, Any] = {}
    devices: dict[Name, Names] = {}
    resources: dict[Name, ResourceSpec] = {}
    stages: dict[Name, StageSpec]
    run: RunSpec = RunSpec()
