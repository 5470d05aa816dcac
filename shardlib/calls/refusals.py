"""What a jitted call refuses: values that its function keeps, tensors on other devices than the mesh's."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from shardlib.calls.state import State
from shardlib.errors import ShardingError
from shardlib.meshes.mesh import Mesh
from shardlib.plans.plan import Plan
from shardlib.tensors.tensor import typeof


def refuse_leaks(name: str, before: State, after: State) -> None:
    """Values of a trace are none of this world: nobody may keep them."""
    known = {id(x) for x in before.tensors}
    wrong = [
        f"{where} has become a value of the trace, {typeof(x)}"
        for where, x in zip(after.names, after.tensors, strict=True)
        if isinstance(x, FakeTensor) and id(x) not in known
    ]
    if wrong:
        raise ShardingError(
            f"{name} keeps tensors that it computes while it is traced",
            wrong,
            rule="a jitted function runs once, on shapes: its tensors have no values, and leave it only as results",
            remedy="return the tensor, and keep it outside; or register it as a buffer and write to it in place",
        )


def refuse_other_devices(plan: Plan, mesh: Mesh, leaves: list[Any]) -> None:
    """Every tensor must be where the mesh's devices are."""
    traced = plan.compiled.traced
    there = torch.device(mesh.device).type
    wrong = [
        f"{name} of shape {list(leaves[i].shape)} is on {leaves[i].device}"
        for i, name in zip(traced.input_leaves, traced.input_names, strict=True)
        if i >= 0 and leaves[i].device.type != there
    ]
    if wrong:
        meta = all(leaves[i].device.type in (there, "meta") for i in traced.input_leaves if i >= 0)
        raise ShardingError(
            f"{plan.name} runs on {mesh}, whose devices are {there}",
            wrong,
            rule="arguments live on the devices of the mesh",
            remedy="meta tensors have no values: plan with them (step.plan(...))"
            if meta
            else f"x.to({there!r}) first, or Mesh(..., device=...)",
        )
