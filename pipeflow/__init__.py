"""pipeflow: an asyncio pipeline framework for GPU work.

    async with pipeflow.open("file.yaml") as pipeline:
        summary = await pipeline.run()

Names are imported when they are first used, so that `import pipeflow` costs next to nothing and never
imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# Not lazily: the decorator has its module's name, and importing the module later would put it in the way.
from pipeflow.stage import stage

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from pipeflow.check import Report
    from pipeflow.config import Config, Duration, InputPath, OutputPath, Size
    from pipeflow.context import Context, ResourceContext
    from pipeflow.diagnostic import Diagnostic, Place
    from pipeflow.errors import (
        Cancelled,
        DeviceError,
        DocumentError,
        Dropped,
        GraphError,
        PipeflowError,
        StageError,
        StallError,
        Stopped,
        Stuck,
    )
    from pipeflow.item import DROP, Failed, Port, Scatter, Trigger, Version
    from pipeflow.pipeline import Pipeline
    from pipeflow.pipeline import open_pipeline as open
    from pipeflow.registry import Registry
    from pipeflow.stage import Gather, Resource, Stage

_HOMES = {
    "check": "Report",
    "config": "Config Duration InputPath OutputPath Size",
    "context": "Context ResourceContext",
    "diagnostic": "Diagnostic Place",
    "errors": "Cancelled DeviceError DocumentError Dropped GraphError PipeflowError StageError StallError "
    "Stopped Stuck",
    "item": "DROP Failed Port Scatter Trigger Version",
    "pipeline": "Pipeline open",
    "registry": "Registry",
    "stage": "Gather Resource Stage",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [
    "DROP",
    "Cancelled",
    "Config",
    "Context",
    "DeviceError",
    "Diagnostic",
    "DocumentError",
    "Dropped",
    "Duration",
    "Failed",
    "Gather",
    "GraphError",
    "InputPath",
    "OutputPath",
    "PipeflowError",
    "Pipeline",
    "Place",
    "Port",
    "Registry",
    "Report",
    "Resource",
    "ResourceContext",
    "Scatter",
    "Size",
    "Stage",
    "StageError",
    "StallError",
    "Stopped",
    "Stuck",
    "Trigger",
    "Version",
    "open",
    "stage",
]


def __getattr__(name: str) -> Any:
    """Import a public name's module on first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'pipeflow' has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f"pipeflow.{_HOME[name]}")
    value = getattr(module, "open_pipeline" if name == "open" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
