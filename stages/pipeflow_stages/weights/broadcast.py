"""Stage `weights/broadcast`: publishes a resource's weights, behind a barrier."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import Meta

import pipeflow
from pipeflow.errors import PipeflowError
from pipeflow.item import Trigger
from pipeflow.stage import Resource

if TYPE_CHECKING:
    from pipeflow import Context

__all__ = ["Broadcast"]


class Broadcast(pipeflow.Stage[Trigger, Trigger]):
    """Hands the weights of the resource that it reads to readers the engine cannot see.

    Backend `filesystem`: each trigger is a version of its own below `path` (see `filesystem.py`); the
    newest `keep` stay. The first one goes out before the first item (`at_start`). Guarded: it does not load
    without a barrier in front of it.
    """

    class Config(pipeflow.Config, frozen=True, kw_only=True):
        backend: Literal["filesystem"]
        path: pipeflow.OutputPath
        keep: Annotated[int | None, Meta(description="versions that stay; all")] = None

    guarded: ClassVar = True
    device: ClassVar = True
    stateful: ClassVar = True
    at_start: ClassVar = True
    reads: ClassVar = {"weights": Resource}

    def setup(self, ctx: Context) -> None:
        from pipeflow_stages.weights.filesystem import versions

        if self.config.keep is not None and self.config.keep < 1:
            raise PipeflowError(
                f"keep must be 1 or more, got {self.config.keep}; leave it out to keep all versions"
            )
        found = versions(ctx.output(self.config.path))
        self._number = int(found[-1].name[1:]) if found else 0

    def state(self) -> dict[str, Any]:
        """Nothing: the versions on the disk say which number comes next. What a run published after its last
        checkpoint stays there, and is published again under a new number."""
        return {}

    def run(self, item: Trigger, ctx: Context) -> Trigger:
        from pipeflow_stages.weights.filesystem import publish, remove, versions

        begun = time.perf_counter()
        weights: Any = ctx.read("weights")
        if not hasattr(weights, "state_dict"):
            raise PipeflowError(
                f"the resource it reads is a {type(weights).__name__}, which has no weights to publish"
            )
        # Behind a barrier the device is quiet, so this copy waits for nothing but itself.
        tensors = {
            name: tensor.detach().to("cpu", copy=True).contiguous()
            for name, tensor in weights.state_dict().items()
        }
        version = ctx.version("weights")
        about = {"step": version.step, "incarnation": version.incarnation, "reason": item.reason}
        folder = ctx.output(self.config.path)
        self._number += 1
        publish(folder, self._number, tensors, about)
        if self.config.keep is not None:
            for old in versions(folder)[: -self.config.keep]:
                remove(old)
        ctx.log(
            step=version.step,
            version=self._number,
            bytes=sum(tensor.nbytes for tensor in tensors.values()),
            seconds=time.perf_counter() - begun,
        )
        return item
