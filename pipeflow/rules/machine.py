"""Rules on devices, memory budgets and settings of the process."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pipeflow.diagnostic import suggest
from pipeflow.rules.case import Findings, listed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeflow.graph import Node, Path
    from pipeflow.rules.case import Case
    from pipeflow.spec import Names, QueueSpec

__all__ = ["allocator_transport", "no_such_device", "queue_over_budget", "unguarded_autotuner"]

LITERALS = ("auto", "cpu", "cpu-late", "cuda")
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The first is the newer name of the same setting."""
_GPU = re.compile(r"(?:gpu|cuda)[-_: ]?([0-9]*)", re.IGNORECASE)
"""How people write a GPU, with its number."""


# Devices -------------------------------------------------------------------------------------------------


def no_such_device(case: Case) -> Findings:
    """`on`, `scope` and `devices` name devices; with `here`, ones that this machine has."""
    spec = case.spec
    count: int | None = None
    for path, name, groups in _named_devices(case):
        if groups and (name in spec.devices or ((path[-1] == "scope" or "scope" in path) and name == "all")):
            continue
        if not _is_literal(name):
            remedy = _meant(name, list(spec.devices) if groups else None)
            yield case.at(path, "no-such-device", f"there is no device {name!r}", remedy)
        elif case.here and name.startswith("cuda"):
            count = _cuda_count() if count is None else count
            index = int(name[5:] or 0)
            if index >= count:
                has = f"{count} CUDA device{'s' if count != 1 else ''}" if count else "no CUDA device"
                remedy = "write `auto` to take what the machine has"
                yield case.at(path, "no-such-device", f"{name} is not here: this machine has {has}", remedy)


def _meant(name: str, own: list[str] | None) -> str:
    """The remedy of a name that is no device. `own`: names under `devices:`, where one is welcome."""
    near = suggest(name, own or [])
    if near:
        return near
    if (number := _GPU.fullmatch(name)) is not None:  # before near literals: `gpu` is as near to `cpu`
        return f"write `cuda:{int(number[1] or 0)}`, or `auto` to take what the machine has"
    return suggest(name, [*LITERALS, "cuda:0"]) or (
        "write cpu, cuda:N or auto" + ("" if own is None else ", or a name under `devices:`")
    )


def _is_literal(name: str) -> bool:
    return name in LITERALS or re.fullmatch(r"cuda:(0|[1-9]\d*)", name) is not None


def _cuda_count() -> int:
    import torch  # only `--here` and `run` come here

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _named_devices(case: Case) -> Iterator[tuple[Path, str, bool]]:
    """(path, name, whether a name under `devices:` is welcome) of each device in the file."""
    for name, literals in case.spec.devices.items():
        yield from ((path, text, False) for path, text in _each(("devices", name), literals))
    for name, resource in case.spec.resources.items():
        yield from ((path, text, True) for path, text in _each(("resources", name, "on"), resource.on))
    for name, stage in case.spec.stages.items():
        yield from ((path, text, True) for path, text in _each(("stages", name, "on"), stage.on))
        yield from ((path, text, True) for path, text in _each(("stages", name, "scope"), stage.scope))


def _each(path: Path, names: Names | None) -> Iterator[tuple[Path, str]]:
    if isinstance(names, str):
        yield path, names
    else:
        yield from (((*path, index), name) for index, name in enumerate(names or ()))


# Budgets -------------------------------------------------------------------------------------------------


def queue_over_budget(case: Case) -> Findings:
    """What the edges may hold together fits `run.queue.total`; one item fits its own edge."""
    total = 0
    for link, node in case.graph.links():
        size = case.graph.nodes[link.source].spec.bytes
        if size is None:
            continue
        queue: QueueSpec = node.spec.queue or case.spec.run.queue
        total += queue.items * size if queue.bytes is None else min(queue.items * size, queue.bytes)
        if queue.bytes is not None and size > queue.bytes:
            message = (
                f"one item of {link.source!r} ({_size(size)}) is larger than the queue before {node.name!r} "
                f"({_size(queue.bytes)}), so it holds one at a time"
            )
            path: Path = ("stages", link.source, "bytes")
            yield case.at(path, "queue-over-budget", message, "raise `queue.bytes`", warning=True)
    limit = case.spec.run.queue.total
    if limit is not None and total > limit:
        message = f"the queues may hold {_size(total)}, above the total of {_size(limit)}"
        remedy = "lower `queue.items` or `queue.bytes`, or raise the total"
        yield case.at(("run", "queue", "total"), "queue-over-budget", message, remedy)


def _size(count: int) -> str:
    """Bytes as a person writes them; exact where it is a round number of a unit."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.4g} {unit}"
    return f"{count} bytes"


# Settings of the process ---------------------------------------------------------------------------------


def allocator_transport(case: Case) -> Findings:
    """Expandable segments cannot be shared with another process by the transports that need fixed ones."""
    name = next((key for key in ALLOCATOR if "expandable_segments:true" in _setting(case, key)), None)
    if name is None:
        return
    for node in case.graph.nodes.values():
        if node.cls.needs_fixed_segments:
            message = f"{node.name!r} shares device memory, which {name}=expandable_segments:True forbids"
            remedy = f"unset {name}, or set expandable_segments:False"
            yield case.at(("stages", node.name, "uses"), "allocator-transport", message, remedy)


def _setting(case: Case, key: str) -> str:
    return case.env.get(key, "").replace(" ", "").lower()


def unguarded_autotuner(case: Case) -> Findings:
    """Triton's autotuner is not safe on several threads: one lane of the process at most may use it."""
    tuning = [node for node in case.graph.nodes.values() if _autotunes(node)]
    lanes = sum(node.lanes for node in tuning)
    if lanes < 2:
        return
    for node in tuning:
        names = listed([each.name for each in tuning])
        message = f"kernels of {names} tune themselves on {lanes} lanes at once, which is not safe"
        remedy = "run it on one lane, or lock the tuner in the class and set `guards_autotuner = True`"
        yield case.at(("stages", node.name, "uses"), "unguarded-autotuner", message, remedy)


def _autotunes(node: Node) -> bool:
    return node.cls.autotunes and not node.cls.guards_autotuner
