"""Who holds the memory of a device, in words: for the error of a job that did not get any (axiom 7.3).

Sizes are those of the storages that items, resources and stages are known to hold there, each counted once a
line. What lies in objects that cannot be looked into, in graphs of autograd and in workspaces of libraries is
the difference to what the allocator says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from pipeflow.device.base import is_tensor, tensors_in
from pipeflow.inputs import Batches
from pipeflow.resource import Spared

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pipeflow.device.base import Device, Memory
    from pipeflow.edge import Edge
    from pipeflow.engine import Engine
    from pipeflow.runner import Runner

__all__ = ["holders", "size_text"]

_DEPTH = 6
"""Objects within objects that are looked into."""
_OBJECTS = 100_000
"""In all, so that the report of an error takes no minutes."""


def holders(engine: Engine, device: Device, memory: Memory) -> str:
    """A line of the device's counters as the memory ran out, then one for each edge, resource and stage that
    holds some, the largest first. No device call."""
    lines = [
        f"  {device.name}: {size_text(memory.used)} in use, {size_text(memory.reserved)} reserved, "
        f"{size_text(memory.total)} in all; held by"
    ]
    found = [*_edges(engine, device), *_resources(engine, device), *_stages(engine, device)]
    found = [(size, text) for size, text in found if size]
    found.sort(key=lambda entry: -entry[0])
    lines += [f"    {text}: {size_text(size)}" for size, text in found]
    if not found:
        lines.append("    nobody that the engine knows of")
    return "\n".join(lines)


def size_text(nbytes: float) -> str:
    """Bytes, for people."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:g} bytes"


def _bytes_on(device: Device, tensors: Iterable[Any]) -> int:
    there = [tensor for tensor in tensors if str(tensor.device) == device.torch_name]
    return sum(buffer.nbytes for buffer in device.buffers(there))


# Items ---------------------------------------------------------------------------------------------


def _edges(engine: Engine, device: Device) -> Iterator[tuple[int, str]]:
    """Items alive on each edge (queued, gathered, or in work at its consumer), and outputs still in hand."""
    for runner in engine.nodes:
        for edge in runner.outs:
            values = [*edge.values(), *_in_work(edge)]
            size = _bytes_on(device, (tensor for value in values for tensor in tensors_in(value)))
            yield size, f"{_counted(len(values))} on {edge}"
        made = _not_handed_over(runner)
        size = _bytes_on(device, (tensor for value in made for tensor in tensors_in(value)))
        yield size, f"{_counted(len(made))} of {runner.name} that wait for their turn"


def _counted(count: int) -> str:
    return f"{count} item" + ("s" if count != 1 else "")


def _in_work(edge: Edge) -> list[Any]:
    consumer = edge.consumer
    found = [item for job in consumer.hand for each, item in job.parts if each is edge]
    if isinstance(consumer.inputs, Batches):
        found += [item for each, item in consumer.inputs.members() if each is edge]
    if consumer.taken is not None:
        found += [item for each, item in consumer.taken.parts if each is edge]
    return [item.value for item in found]


def _not_handed_over(runner: Runner) -> list[Any]:
    return [
        output.value for job in runner.hand for output in (*job.outputs, *(job.pending or ())) if output.live
    ]


# Resources and stages ------------------------------------------------------------------------------


def _resources(engine: Engine, device: Device) -> Iterator[tuple[int, str]]:
    for shared in engine.shared.values():
        for instance in shared.instances.values():
            copies = instance.copies
            size = sum(_bytes_on(device, _within(copy.value)) for copy in copies)
            spare = " and its spare copy" if type(instance) is Spared else ""
            yield size, f"resource {shared.name}{spare}"


def _stages(engine: Engine, device: Device) -> Iterator[tuple[int, str]]:
    """What stages keep in their attributes, but for values of resources, which are told of by their name."""
    known = {
        id(copy.value)
        for shared in engine.shared.values()
        for instance in shared.instances.values()
        for copy in instance.copies
    }
    for runner in engine.nodes:
        for lane in runner.lanes:
            size = _bytes_on(device, _within(vars(lane.stage), known))
            yield size, f"stage {lane.name}[{lane.index}]"


def _within(value: Any, without: set[int] | None = None) -> Iterator[Any]:
    """Tensors of an object, of what its attributes hold, of modules and optimisers."""
    seen: set[int] = set(without or ())
    stack: list[tuple[Any, int]] = [(value, 0)]
    while stack and len(seen) < _OBJECTS:
        found, depth = stack.pop()
        if id(found) in seen or isinstance(found, (str, bytes, int, float, type)) or found is None:
            continue
        seen.add(id(found))
        if is_tensor(found):
            yield found
            if (gradient := getattr(found, "grad", None)) is not None:
                yield gradient
        elif depth < _DEPTH:
            stack += [(inner, depth + 1) for inner in _parts(found)]


def _parts(found: Any) -> Iterable[Any]:
    if isinstance(found, dict):
        return cast("dict[Any, Any]", found).values()
    if isinstance(found, (list, tuple, set, frozenset)):
        return cast("Iterable[Any]", found)
    if hasattr(found, "__struct_fields__"):
        return [getattr(found, name) for name in found.__struct_fields__]
    parts = list(getattr(found, "__dict__", {}).values())
    if callable(getattr(found, "parameters", None)) and callable(getattr(found, "buffers", None)):
        parts += [*found.parameters(), *found.buffers()]  # a module, however deep
    return parts
