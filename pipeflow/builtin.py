"""Stages of the framework itself: `barrier`, `release_cache`, `input`, `output`, `route`."""

from __future__ import annotations

from typing import Any, ClassVar, cast

from pipeflow.config import Config
from pipeflow.item import Port, Trigger
from pipeflow.stage import Stage

__all__ = ["Barrier", "Input", "Output", "ReleaseCache", "Route"]


class Barrier(Stage[Any, Trigger]):
    """Waits until every device in scope is quiet, then runs the guarded stages behind it, one at a time.

    Stands only before cache release and weight broadcast. It stops launches, not items: queues stay as
    they are. `every` says after which items, `scope` which devices, `timeout` how long it may take.
    """

    is_barrier: ClassVar[bool] = True

    def run(self, item: Any) -> Trigger:
        """Never called: the engine runs a barrier's phases itself."""
        raise RuntimeError("a barrier has no work of its own; the engine runs it")


class ReleaseCache(Stage[Trigger, Trigger]):
    """Gives cached device memory back to the system, behind a barrier. Logs the bytes that it freed."""

    guarded: ClassVar[bool] = True
    releases: ClassVar[bool] = True

    def run(self, item: Trigger, ctx: Any) -> Trigger:
        freed = sum(max(0, f.before - f.after) for f in item.freed)
        ctx.log(step=item.seq + 1, freed_bytes=freed, reason=item.reason)
        return item


class Input(Stage[Any, Any]):
    """Where `Pipeline.submit` and `Pipeline.stream` put items in. A file with it is for embedding."""

    is_input: ClassVar[bool] = True

    def run(self):  # pyright: ignore
        """Never called: items come from the caller."""
        yield from ()


class Output(Stage[Any, Any]):
    """What arrives here is the result of the `submit` it came from."""

    is_output: ClassVar[bool] = True
    inline: ClassVar[bool] = True

    def run(self, item: Any) -> Any:
        return item


class Route(Stage[Any, Port[Any]]):
    """Sends an item out by the port that a key of it names: `from: route.math`.

    `by` is a key (of a dict) or an attribute; its text must be one of `ports`, else the item goes to the
    port `otherwise`, which may be one of `ports` or one more.
    """

    class Config(Config, frozen=True, kw_only=True):
        by: str
        ports: list[str]
        otherwise: str | None = None

        def __post_init__(self) -> None:
            twice = sorted({port for port in self.ports if self.ports.count(port) > 1})
            if twice:
                raise ValueError(f"`ports` names {', '.join(map(repr, twice))} more than once")

    inline: ClassVar[bool] = True

    def run(self, item: Any) -> Port[Any]:
        by: str = self.config.by
        name = str(cast("dict[str, Any]", item)[by] if isinstance(item, dict) else getattr(item, by))
        if name not in self.config.ports:
            if self.config.otherwise is None:
                known = ", ".join(self.config.ports)
                raise ValueError(f"{by} is {name!r}, which is no port ({known}) and there is no `otherwise`")
            name = self.config.otherwise
        return Port(name, cast("Any", item))
