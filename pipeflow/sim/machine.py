"""The simulated machine: a world's devices and hosts, for the very engine that drives real ones."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeflow.device.base import refusal
from pipeflow.errors import DeviceError
from pipeflow.launch import StuckThread
from pipeflow.sim.device import SimHost
from pipeflow.sim.host import HostBlocked
from pipeflow.sim.launcher import SimLauncher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pipeflow.device.base import Device
    from pipeflow.graph import Graph
    from pipeflow.launch import Launcher
    from pipeflow.sim.host import Host
    from pipeflow.sim.world import World

__all__ = ["SimMachine", "device_names"]

AUTO = "cuda:0"
"""What `auto` means: a simulated machine has a GPU."""


def device_names(graph: Graph) -> list[str]:
    """The devices of a file that a world must simulate: all but the host's processor."""
    named = [name for node in graph.nodes.values() for name in node.devices]
    named += [name for resource in graph.resources.values() for name in resource.devices]
    found = dict.fromkeys(AUTO if name == "auto" else name for name in named)
    return [name for name in found if not name.startswith("cpu")]


class SimMachine:
    """See `pipeflow.machine.Machine`. Used inside the world's loop."""

    virtual = True

    def __init__(self, world: World) -> None:
        self.world = world
        self._on_fault: Callable[[BaseException], None] | None = None
        self._cpu = SimHost(world)
        self._calls: dict[str, Host] = {}
        self._spare: list[Host] = []

    def now(self) -> float:
        return self.world.host.now

    def report_to(self, on_fault: Callable[[BaseException], None]) -> None:
        self._on_fault = on_fault

    def _fault(self, error: BaseException) -> None:
        if self._on_fault is None:
            raise error
        self._on_fault(error)

    def resolve(self, name: str) -> str:
        return AUTO if name == "auto" else name

    def device(self, name: str) -> Device:
        if name.startswith("cpu"):
            return self._cpu
        if name not in self.world.devices:
            known = ", ".join(self.world.devices)
            raise DeviceError(f"the world has no device {name!r}; it simulates {known}")
        device = self.world.devices[name]
        if device.lost is not None:
            raise refusal(name, device.lost)
        return device

    def host(self, devices: Iterable[Device]) -> Device:
        return self._cpu

    def launcher(self, name: str, *, inline: bool, marks: bool) -> Launcher:
        return SimLauncher(self.world, name, self._fault, inline=inline)

    async def off_loop(self, call: Callable[[], Any], name: str) -> Any:
        world = self.world
        host = self._spare.pop() if self._spare else world.make_host(f"call {len(world.hosts)}")
        future: asyncio.Future[Any] = world.loop.create_future()
        sent = world.send()
        self._calls[name] = host

        def run() -> None:
            value, error = None, None
            with world.on(host, since=sent):
                try:
                    value = call()
                except HostBlocked:
                    pass
                except BaseException as raised:
                    error = raised
            world.returned(host, partial(back, value, error))
            value = error = None  # the error's traceback holds this frame

        def back(value: Any, error: BaseException | None, fault: BaseException | None) -> None:
            error = fault or error
            self._calls.pop(name, None)
            self._spare.append(host)
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)

        world.loop.call_soon(run)
        return await future

    async def join(self, launchers: Iterable[Launcher], deadline: float) -> None:
        for launcher in launchers:
            if isinstance(launcher, SimLauncher):
                await launcher.idle(deadline - self.world.loop.time())

    async def end_calls(self, deadline: float) -> list[StuckThread]:
        while self._calls and self.world.loop.time() < deadline:
            await asyncio.sleep((deadline - self.world.loop.time()) / 8 + 1e-6)
        return [
            StuckThread(f"pipeflow {name}", name, host.blocked or "in virtual time")
            for name, host in self._calls.items()
        ]
