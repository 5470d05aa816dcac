"""Refuses arguments of jitted calls: dual tensors, tensors on other devices than the mesh's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardlib.compiler.plan.plan import Plan
from shardlib.core.errors import ShardingError
from shardlib.eager.placement_autograd import get_tangent
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.tensor.local_shards import is_cpu_scalar
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof


def refuse_others_than_functions(fn: Any) -> None:
    """Refuses objects that `jit` cannot wrap, and classes."""
    refused: dict[Any, tuple[str, str]] = {
        staticmethod: ("a staticmethod", "put @staticmethod above @sl.jit"),
        classmethod: ("a classmethod", "jit a function of tensors, and call it in the classmethod"),
        type: (f"a class, {getattr(fn, '__name__', '')}", "jit an object of it, or one of its methods"),
        torch.Tensor: ("a tensor", "pass the function: sl.jit(f)(x), not sl.jit(f(x))"),
    }
    for kind, (name, remedy) in refused.items():
        if isinstance(fn, kind):
            raise ShardingError(f"jit is given {name}", rule="jit takes a function of tensors", remedy=remedy)
    if not callable(fn):
        raise ShardingError(f"jit is given {fn!r}", rule="jit takes a function of tensors")


def refuse_tangents(name: str, leaves: Sequence[Any]) -> None:
    """Refuses dual tensors, whose tangents a program would drop."""
    wrong = [x for x in leaves if isinstance(x, torch.Tensor) and get_tangent(x) is not None]
    if wrong:
        raise ShardingError(
            f"{name} is called with dual tensors of forward-mode AD",
            [typeof(x) for x in wrong],
            rule="a jitted call has a program for its values, and one for its gradients",
            remedy="torch.func.jvp around the call, or inside the function",
        )


def refuse_other_devices(plan: Plan, mesh: Mesh, leaves: list[Any]) -> None:
    """Refuses tensors on other devices than the mesh's; numbers on the CPU are moved."""
    traced = plan.compiled.traced
    device = torch.device(mesh.device).type
    wrong = [
        f"{name} of shape {list(leaves[i].shape)} is on {leaves[i].device}"
        for i, name in zip(traced.input_leaves, traced.input_names, strict=True)
        if i >= 0 and leaves[i].device.type != device
        if isinstance(leaves[i], ShardedTensor) or not is_cpu_scalar(leaves[i])
    ]
    if wrong:
        meta = all(leaves[i].device.type in (device, "meta") for i in traced.input_leaves if i >= 0)
        raise ShardingError(
            f"{plan.name} runs on {mesh}, whose devices are {device}",
            wrong,
            rule="arguments live on the devices of the mesh",
            remedy="meta tensors have no values: plan with them (step.plan(...))"
            if meta
            else f"x.to({device!r}) first, or Mesh(..., device=...)",
        )
