"""Two rules of what a stage may do with tensors, held against every call (axioms 4.5 and 4.7).

A stage that writes into its input says `mutates`, as others may read the same memory: a silent race on a
GPU. And autograd crosses no edge: an output that remembers how it was made would keep every buffer behind
it alive, and be differentiated on another stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeflow.device.base import imported_torch, tensors_in

__all__ = ["refuse_graph", "refuse_writes", "versions_of"]

Versions = Sequence[tuple[Any, int]]


def versions_of(value: Any) -> Versions:
    """Tensors of a value with how often each was written in place. Inference tensors do not count writes."""
    if imported_torch() is None:
        return []
    return [(tensor, tensor._version) for tensor in tensors_in(value) if not tensor.is_inference()]


def refuse_writes(before: Versions) -> None:
    """RuntimeError if a tensor was written since `versions_of`."""
    for tensor, version in before:
        if tensor._version != version:
            raise RuntimeError(
                f"it wrote into its input, a tensor of shape {tuple(tensor.shape)}, which other stages may "
                "read. Copy it first, or set `mutates = True` on the stage's class"
            )


def refuse_graph(value: Any) -> None:
    """RuntimeError if a tensor in an output has a grad_fn."""
    for tensor in tensors_in(value):
        if tensor.grad_fn is not None:
            raise RuntimeError(
                f"its output holds a tensor of shape {tuple(tensor.shape)} with a grad_fn, and autograd "
                "crosses no edge. Hand on `tensor.detach()`, or work under torch.no_grad()"
            )
