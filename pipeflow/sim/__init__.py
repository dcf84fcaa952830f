"""`sim`: devices, streams, memory and host threads in virtual time, with every access checked.

The very engine that drives a GPU runs above it. No torch, no thread, no sleep.
"""

from pipeflow.sim.access import GARBAGE, Hazard, Part, Where
from pipeflow.sim.clock import Deadlock, VirtualLoop, run
from pipeflow.sim.device import DeviceOptions, Sim, SimHost
from pipeflow.sim.host import Host, HostBlocked, InterpreterLock
from pipeflow.sim.memory import OutOfMemory
from pipeflow.sim.queue import SimMark, SimStream
from pipeflow.sim.tensor import SimStorage, SimTensor
from pipeflow.sim.world import Fault, World

__all__ = [
    "GARBAGE",
    "Deadlock",
    "DeviceOptions",
    "Fault",
    "Hazard",
    "Host",
    "HostBlocked",
    "InterpreterLock",
    "OutOfMemory",
    "Part",
    "Sim",
    "SimHost",
    "SimMark",
    "SimStorage",
    "SimStream",
    "SimTensor",
    "VirtualLoop",
    "Where",
    "World",
    "run",
]
