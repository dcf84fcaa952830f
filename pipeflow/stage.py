"""What a stage author writes: a class, or a function with one decorator.

    class Scale(Stage):
        class Config(pipeflow.Config):
            factor: float = 2.0

        def setup(self, ctx): ...                       # once a lane, before the first item
        def run(self, item: Batch, ctx) -> Batch: ...   # once an item; on a GPU it only enqueues
        def finish(self, ctx): ...                      # once a lane, after the last item

What `run` is decides what the stage is; nothing else is declared:

    run(self, ctx), a generator                  a source
    run(self, item, ctx) -> value                one-to-one (None everywhere: a sink)
    run(self, item, ctx), a generator            one-to-many
    run(self, items, ctx) in a `Gather`          many-to-one; a `Scatter` gives one value a member
    async def (or async generator) of the above  runs on the event loop instead of a lane's thread

`ctx` may be left out. The types of `item` and of the result are checked against the neighbours' before
anything starts. Modules of stages import torch only inside `setup` and `run`, so that `pipeflow check`
works where torch is not installed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import aclosing
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import msgspec

from pipeflow.config import Config

if TYPE_CHECKING:
    from pipeflow.context import Context, ResourceContext

__all__ = ["Gather", "Kind", "Resource", "Stage", "kind_of", "scatters", "stage", "takes_context"]

In = TypeVar("In")
Out = TypeVar("Out")
ResourceT = TypeVar("ResourceT", bound="type[Resource]")


class Resource:
    """Shared state with a name: a model, a drafter, a policy. Stages reach it by `reads` and `writes`.

    `open` builds the value on `ctx.device` before any stage is set up; `close` runs after the last fence.
    Stages get what `open` returned. One instance a device; `version` counts its writer's steps.
    """

    Config: ClassVar[type[msgspec.Struct]] = Config
    reads: ClassVar[Mapping[str, type[Resource]]] = {}
    """Roles of the resources that `open` looks at by `ctx.read(role)`; they are opened before it."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def open(self, ctx: ResourceContext) -> Any:
        """Build the value, on a helper thread. Raise any error; it is reported with the resource's name."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it is opened")

    def snapshot(self, value: Any) -> Any:
        """A copy of the value, for a stage with `snapshot: true`: enqueued like a job, on that stage's lane
        and device. The writer goes on once it is made, so it may share nothing that a writer changes."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it is copied")

    def close(self, value: Any) -> None:
        """Undo `open`. Called once for each opened value, also after a failed run."""

    def state(self, value: Any) -> dict[str, Any]:
        """What a checkpoint saves of an opened value: a dict of JSON values and tensors, nested at will.
        Called on the lane, device and stream of its writer, between two items; the engine copies the tensors,
        so it neither copies them nor waits. A resource that is written needs it, if a run makes checkpoints.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what a checkpoint saves of it")

    def load(self, value: Any, state: dict[str, Any]) -> None:
        """Give a value that was just opened the state of a checkpoint, in place. Tensors come on the CPU."""
        raise NotImplementedError(f"{type(self).__name__} does not say how its state is loaded")


class Stage(Generic[In, Out]):
    """Base of stages written as a class. One instance a lane, so `self` is never shared by two jobs of
    a sync stage. Class attributes are its traits; each default is the careful one."""

    Config: ClassVar[type[msgspec.Struct]] = Config
    reads: ClassVar[Mapping[str, type[Resource]]] = {}
    """Roles of the resources it reads: `{"target": CausalLM}`. `ctx.read("target")` gives the value."""
    writes: ClassVar[Mapping[str, type[Resource]]] = {}
    """Roles of the resources it writes, in place. `ctx.write("drafter")` gives the value."""
    ports: ClassVar[Sequence[str]] = ()
    """Names of its outputs where it returns `Port(name, value)`."""
    stateful: ClassVar[bool] = False
    """True: `run` depends on earlier items, so no replicas."""
    retriable: ClassVar[bool | None] = None
    """`on_error: retry` is allowed. None: exactly if not stateful and without `writes`."""
    mutates: ClassVar[bool] = False
    """True: `run` writes into its input; it must be that input's only reader."""
    guarded: ClassVar[bool] = False
    """True: gives back device memory, or shows it to readers the engine cannot see. Needs a barrier."""
    releases: ClassVar[bool] = False
    """True (guarded stages): the engine returns cached device memory before `run`, which gets the count."""
    background: ClassVar[bool] = False
    """True: starts work outside its lane, which its `quiesce()` joins when a barrier closes."""
    device: ClassVar[bool] = False
    """True: runs on a device (`on:`, default the machine's first); False: on the host unless `on:` says."""
    needs_fixed_segments: ClassVar[bool] = False
    """True: shares device memory with another process by its address. The allocator's expandable segments
    forbid that, so a process that has them switched on does not start."""
    autotunes: ClassVar[bool] = False
    """True: `run` launches kernels of an autotuner (Triton's) that is not safe on several threads. All such
    stages of a file may have one lane together."""
    guards_autotuner: ClassVar[bool] = False
    """True (stages that autotune): the class holds a lock of its own while a kernel is tuned."""
    at_start: ClassVar[bool] = False
    """True (guarded stages): its barrier's section runs once before the first item, unless the file says
    `at_start: false`."""
    deterministic: ClassVar[bool] = True
    """False: the same item may give another result, so an exact resume (`run.checkpoint`) cannot have the
    stage before the one that it saves."""
    is_barrier: ClassVar[bool] = False
    is_input: ClassVar[bool] = False
    is_output: ClassVar[bool] = False
    inline: ClassVar[bool] = False
    """True: `run` takes microseconds and never blocks, so it runs on the loop (`launcher: inline`)."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def setup(self, ctx: Context) -> None:
        """Build what `run` needs, on the lane's thread and device. Resources are open and may be read."""

    def finish(self, ctx: Context) -> None:
        """After the last item, before the consumers hear of the end. Not called after a cancel or fault."""

    def quiesce(self) -> None:
        """Join whatever a `background` stage started; called by a barrier, off the loop."""

    def close(self) -> None:
        """Give back what `setup` took. Called once, also after a cancel or fault."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint saves of this stage: a dict of JSON values and tensors, nested at will; as it is
        after the last item. Called on its lane between two items (a source: while its generator waits behind
        a record). The engine copies the tensors, so it neither copies them nor waits for the device.
        """
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Take up the state of a checkpoint: on its lane, after `setup`, before the first item. Tensors come
        on the CPU."""

    run: Callable[..., Any]


class Gather(Stage[In, Out]):
    """Many-to-one: `run(self, items, ctx)` gets the members of one batch, in the order received."""

    linger: float | None = None
    """Seconds after which an unfinished batch leaves as it is; None: only at the end. A service that
    submits single items needs it; a run that must repeat bit for bit must not have it."""

    def bucket(self, item: In) -> Hashable:
        """Items of one bucket go together. Called on the loop: a look at sizes, nothing heavy."""
        return None

    @classmethod
    def gathers(cls, config: Any) -> int | None:
        """The number of members of every batch but the last, where the options fix it; None: they do not.
        A way on which every step is made of so many items can bound their staleness (`max_staleness`)."""
        return None

    def full(self, members: Sequence[In]) -> bool:
        """Whether the batch leaves now. Called on the loop after each member; at least one is there. A class
        that says `gathers` need not say it again."""
        size = type(self).gathers(self.config)
        if size is not None:
            return len(members) >= size
        raise NotImplementedError(f"{type(self).__name__} does not say when a batch is full")


class Kind(Enum):
    """What a stage does with numbers."""

    SOURCE = "source"
    MAP = "one-to-one"
    FLAT = "one-to-many"
    GATHER = "gather"
    BARRIER = "barrier"


def scatters(cls: type[Stage[Any, Any]]) -> bool:
    """Whether a gather says that it returns a Scatter."""
    import typing

    from pipeflow.item import Scatter

    try:
        result = typing.get_type_hints(cls.run).get("return")
    except NameError:  # a type that is only imported for checking: look at its text
        result = cls.run.__annotations__.get("return")
    if isinstance(result, str):
        return result.startswith("Scatter")
    return (typing.get_origin(result) or result) is Scatter


def takes_context(run: Callable[..., Any]) -> bool:
    """Whether `run` has a parameter named `ctx`."""
    return "ctx" in inspect.signature(run).parameters


def _positional(run: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in inspect.signature(run).parameters.values() if p.kind in kinds]
    return [name for name in names if name not in ("self", "ctx")]


def kind_of(cls: type[Stage[Any, Any]]) -> Kind:
    """Read the kind off the class (see the module's text).

    Raises TypeError where `run` is missing or takes more than one item, and where that of a gather yields.
    """
    if cls.is_barrier:
        return Kind.BARRIER
    run = getattr(cls, "run", None)
    if run is None:
        raise TypeError(f"{cls.__qualname__} has no run method")
    generates = inspect.isgeneratorfunction(run) or inspect.isasyncgenfunction(run)
    if issubclass(cls, Gather):
        if generates:
            raise TypeError(
                f"{cls.__qualname__}.run yields, but a gather makes one value of a batch. "
                "Return a list (or a Scatter), or put a one-to-many stage behind it"
            )
        return Kind.GATHER
    items = _positional(run)
    if not items:
        if not generates:
            raise TypeError(f"{cls.__qualname__}.run takes no item, so it is a source and must yield")
        return Kind.SOURCE
    if len(items) > 1:
        raise TypeError(f"{cls.__qualname__}.run takes one item, not {len(items)}: {', '.join(items)}")
    return Kind.FLAT if generates else Kind.MAP


def stage(function: Callable[..., Any] | None = None, /, **traits: Any) -> Any:
    """Make a stage of a function; its keyword-only parameters become the options under `with:`.

        @pipeflow.stage
        def scale(item: float, *, factor: float = 2.0) -> float:
            return item * factor

    `@pipeflow.stage(stateful=True)` sets class traits. Raises TypeError for a keyword-only parameter
    without a type.
    """

    def build(f: Callable[..., Any]) -> type[Stage[Any, Any]]:
        return _from_function(f, traits)

    return build if function is None else build(function)


def _from_function(f: Callable[..., Any], traits: dict[str, Any]) -> type[Stage[Any, Any]]:
    signature = inspect.signature(f, eval_str=True)
    options = [p for p in signature.parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    fields: list[Any] = []
    for p in options:
        if p.annotation is p.empty:
            raise TypeError(f"option {p.name!r} of stage {f.__qualname__} needs a type")
        fields.append((p.name, p.annotation) if p.default is p.empty else (p.name, p.annotation, p.default))
    config = msgspec.defstruct("Config", fields, bases=(Config,), frozen=True, kw_only=True)
    items = [
        p.name for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY and p.name != "ctx"
    ]
    if len(items) > 1:
        raise TypeError(
            f"stage {f.__qualname__} takes one item, not {len(items)}. Make options keyword-only: "
            f"def {f.__name__}({items[0]}, *, {', '.join(items[1:])})"
        )
    names = [p.name for p in options]
    wants_context = "ctx" in signature.parameters
    has_item = any(p.name != "ctx" and p.kind is not p.KEYWORD_ONLY for p in signature.parameters.values())

    def options_of(self: Stage[Any, Any]) -> dict[str, Any]:
        """Once an instance: its configuration never changes."""
        found = self.__dict__.get("_options")
        if found is None:
            found = self.__dict__["_options"] = {name: getattr(self.config, name) for name in names}
        return found

    run = _method(f, options_of, has_item=has_item, wants_context=wants_context)
    hints = {
        ("item" if name != "return" else name): hint
        for name, hint in _hints(f).items()
        if name not in names and name != "ctx"
    }
    run.__annotations__ = hints
    body = {"Config": config, "run": run, "__doc__": f.__doc__, "__module__": f.__module__, **traits}
    return type(f.__name__, (Stage,), body)


def _method(
    f: Callable[..., Any],
    options_of: Callable[[Any], dict[str, Any]],
    *,
    has_item: bool,
    wants_context: bool,
) -> Any:
    """A `run` of the very kind that `f` is (generator, coroutine, ..), with the options bound and a `ctx`
    only where `f` has one: the engine makes none for stages that do not ask."""

    def call(self: Any, *args: Any) -> Any:
        if wants_context:
            return f(*args[:-1], **options_of(self), ctx=args[-1])
        return f(*args, **options_of(self))

    async def agen(self: Any, *args: Any) -> Any:
        async with aclosing(call(self, *args)) as outputs:
            async for out in outputs:
                yield out

    def gen(self: Any, *args: Any) -> Any:
        yield from call(self, *args)

    async def coro(self: Any, *args: Any) -> Any:
        if wants_context:
            return await f(*args[:-1], **options_of(self), ctx=args[-1])
        return await f(*args, **options_of(self))

    if inspect.isasyncgenfunction(f):
        run: Any = agen
    elif inspect.isgeneratorfunction(f):
        run = gen
    elif not has_item:
        raise TypeError(f"stage {f.__qualname__} takes no item, so it is a source and must yield")
    else:
        run = coro if inspect.iscoroutinefunction(f) else call
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parts = ("self", *(("item",) if has_item else ()), *(("ctx",) if wants_context else ()))
    run.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in parts])
    return run


def _hints(f: Callable[..., Any]) -> dict[str, Any]:
    import typing

    return typing.get_type_hints(f)
