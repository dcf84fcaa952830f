"""A drafter's snapshot: the same weights in memory of its own, which training does not change."""

from __future__ import annotations

from typing import Any

import torch

from pipeflow_stages.dflash.drafter import DrafterResource


def test_a_snapshot_shares_nothing_that_training_changes(tiny: Any) -> None:
    drafter = tiny.drafter(tiny.config(tiny.target()))
    for weight in drafter.parameters():
        weight.grad = torch.ones_like(weight)
    resource: Any = DrafterResource.__new__(DrafterResource)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    copy = resource.snapshot(drafter)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.add_(1.0)
    held = copy.state_dict()
    assert held.keys() == before.keys()
    assert all(torch.equal(held[name], before[name]) for name in before)
    assert all(weight.grad is None for weight in copy.parameters())
    mine = {tensor.untyped_storage().data_ptr() for tensor in drafter.state_dict().values()}
    assert mine.isdisjoint(tensor.untyped_storage().data_ptr() for tensor in held.values())
