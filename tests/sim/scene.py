"""What the tests of the simulated device share: a lane, as an engine would drive one."""

from __future__ import annotations

import random
from typing import Any

from pipeflow.sim import World

SEEDS = range(50)
MIB = 1 << 20


class Lane:
    """A host thread with a stream of one device."""

    def __init__(self, world: World, name: str, device: str = "sim:0") -> None:
        self.world = world
        self.name = name
        self.device = world.devices[device]
        self.host = world.make_host(name)
        self.stream = self.device.stream(name)

    def job(self, call: Any = None, *, waits: Any = (), item: int | None = None) -> tuple[Any, Any]:
        """Run a call as a job: its value, and the mark behind its work."""
        with self.world.on(self.host, stage=self.name, sequence=item), self.device.entered(self.stream):
            for mark in waits:
                self.stream.wait(mark)
            value = call() if call is not None else None
            return value, self.stream.record()

    def back(self) -> Any:
        """Awaits the return of its last call: the fault it came back with, or None."""
        future = self.world.loop.create_future()
        self.world.returned(self.host, future.set_result)
        return future


def noticed(world: World, mark: Any) -> Any:
    """Awaits the host's notice of a mark: the fault, or None."""
    future = world.loop.create_future()
    world.notice(mark, future.set_result)
    return future


def play(scene: Any, seed: int = 0, **options: Any) -> World:
    """A world in which `scene(world, seconds)` was run. `seconds()` draws a duration by the seed: from very
    short to very long, so that every overlap comes about for some seed."""
    world = World(seed, jitter=0.5, **options)
    draw = random.Random(seed)
    world.run(scene, world, lambda: 10 ** draw.uniform(-6, 0))
    return world


def kinds(world: World) -> set[str]:
    return {hazard.kind for hazard in world.hazards}
