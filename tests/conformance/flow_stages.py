# ruff: noqa: RUF012 - stages as an author writes them; annotations are read at run time
"""Stages written once for every device, and what a file of them must give, by plain arithmetic."""

from __future__ import annotations

from typing import Any

from targets import make, pool, value_of, write

from pipeflow import DROP, Context, Gather, Registry, Resource, Stage, testing

__all__ = ["SKIPPED", "registry"]

SKIPPED = 4
"""The item that a stage with `raises` fails at."""


class Numbers(Stage[None, int]):
    class Config(Stage.Config, frozen=True, kw_only=True):
        count: int = 12

    def run(self):
        yield from range(self.config.count)


class Load(Stage[int, Any]):
    """A number of the host as a tensor."""

    device = True

    def run(self, item: int, ctx: Context) -> Any:
        return make(ctx, lambda: item, slow=item % 5 == 2)


class Add(Stage[Any, Any]):
    """item + `n`; every third is slow."""

    class Config(Stage.Config, frozen=True, kw_only=True):
        n: int = 1
        drops: int | None = None
        raises: int | None = None
        times: int = 0
        """How often it raises at that item; 0: always."""

    device = True
    retriable = True

    def setup(self, ctx: Context) -> None:
        self.raised = 0

    def run(self, item: Any, ctx: Context) -> Any:
        config = self.config
        out = make(ctx, lambda a: a + config.n, item, slow=ctx.sequence % 3 == 0)
        if ctx.sequence == config.raises and not (config.times and self.raised >= config.times):
            self.raised += 1
            raise ValueError("on purpose")
        return DROP if ctx.sequence == config.drops else out


class Sum(Stage[Any, Any]):
    """Of a join: a + 100 b."""

    device = True

    def run(self, item: dict[str, Any], ctx: Context) -> Any:
        return make(ctx, lambda a, b: a + 100 * b, item["a"], item["b"])


class Three(Gather[Any, Any]):
    device = True

    def full(self, members: Any) -> bool:
        return len(members) == 3

    def run(self, items: list[Any], ctx: Context) -> Any:
        return make(ctx, lambda *values: sum(values), *items, slow=ctx.sequence % 2 == 0)


class Spread(Stage[Any, Any]):
    """item, item + 1000, as two outputs."""

    device = True

    def run(self, item: Any, ctx: Context):
        for number in range(2):
            yield make(ctx, lambda a, n=number: a + 1000 * n, item)


class Later(Stage[Any, Any]):
    """An async stage: it launches by `ctx.enqueue` alone."""

    device = True

    async def run(self, item: Any, ctx: Context) -> Any:
        first = await ctx.enqueue(lambda: make(ctx, lambda a: a + 1, item))
        return await ctx.enqueue(lambda: make(ctx, lambda a: a * 2, first))


class Box(Resource):
    """A tensor that a writer fills in place. Its value holds the tensor, made by the first write."""

    def open(self, ctx: Any) -> Any:
        return {"at": None}

    def snapshot(self, value: Any) -> Any:
        return {"at": None if value["at"] is None else _same(value["at"])}


def _same(tensor: Any) -> Any:
    if isinstance(tensor, testing.SimTensor):
        out = testing.empty(tensor.nbytes)
        testing.kernel(0.5, [tensor], [out], lambda a: a)
        return out
    return tensor.clone()


class Writes(Stage[Any, Any]):
    """Adds its item to the box, in place, and hands its item on."""

    writes = {"box": Box}
    device = True

    def run(self, item: Any, ctx: Context) -> Any:
        box = ctx.write("box")
        if box["at"] is None:
            box["at"] = write(ctx, pool(ctx), lambda: 0)
        write(ctx, box["at"], lambda a, b: a + b, box["at"], item, slow=ctx.sequence % 4 == 1)
        return make(ctx, lambda a: a, item)


class Reads(Stage[Any, Any]):
    """item + 1000 times what is in the box."""

    reads = {"box": Box}
    device = True

    def run(self, item: Any, ctx: Context) -> Any:
        return make(ctx, lambda a, b: a + 1000 * b, item, ctx.read("box")["at"], slow=True)


class Publish(Stage[Any, Any]):
    """Guarded: the step whose version its section sees."""

    guarded = True

    def run(self, item: Any) -> Any:
        return item.seq


def registry(seen: list[Any], **more: Any) -> Registry:
    """With a sink that notes the number each item holds."""

    class Sink(Stage[Any, None]):
        def run(self, item: Any) -> None:
            seen.append(item if isinstance(item, int) else value_of(item))

    found = Registry()
    known = (Numbers, Load, Add, Sum, Three, Spread, Later, Box, Writes, Reads, Publish, Sink)
    for cls in known:
        found.add(cls.__name__.lower(), cls)
    for name, cls in more.items():
        found.add(name, cls)
    return found
