"""What a jitted call refuses: values that its function keeps, tensors on other devices than the mesh's."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from shardlib.calls.state import Leak, State
from shardlib.errors import ShardingError
from shardlib.meshes.mesh import Mesh
from shardlib.plans.plan import Plan
from shardlib.tensors.tensor import typeof


def forgotten(before: State, after: State) -> list[Leak]:
    """Values of a trace are none of this world: whoever holds one gets back what he had.

    Returns those that nobody may have kept: not in a `functools.cache` or a `cached_property`.
    """
    misses = {id(cache): count for cache, count in before.caches}
    for cache, count in after.caches:
        if misses.get(id(cache)) != count and _holds_fakes(cache):
            cache.cache_clear()
    known = {id(x) for x in before.tensors}
    leaks = [leak for leak in after.leaks if id(leak.value) not in known]
    for leak in leaks:
        leak.undo(before)
    return [leak for leak in leaks if not leak.is_cached]


def _holds_fakes(cache: Any) -> bool:
    """Whether some result that a `functools.cache` keeps is of a trace."""
    held, seen = [cache], 0
    while held and seen < 10_000:
        x = held.pop()
        seen += 1
        if isinstance(x, FakeTensor):
            return True
        if x is cache or isinstance(x, list | tuple | dict) or type(x).__name__ == "_lru_list_elem":
            held += gc.get_referents(x)
    return seen >= 10_000


def refuse_leaks(name: str, leaks: Sequence[Leak]) -> None:
    """Refuse values of a trace that a function keeps."""
    if leaks:
        raise ShardingError(
            f"{name} keeps tensors that it computes while it is traced",
            [f"{leak.name} has become a value of the trace, {typeof(leak.value)}" for leak in leaks],
            rule="a jitted function runs once, on shapes: its tensors have no values, and leave it only as results",
            remedy="return the tensor, and keep it outside; or register it as a buffer and write to it in place",
        )


def refuse_tangents(name: str, leaves: Sequence[Any]) -> None:
    """Refuse dual tensors, whose tangents a program would drop."""
    wrong = [x for x in leaves if isinstance(x, torch.Tensor) and _tangent(x) is not None]
    if wrong:
        raise ShardingError(
            f"{name} is called with dual tensors of forward-mode AD",
            [typeof(x) for x in wrong],
            rule="a jitted call has a program for its values, and one for its gradients",
            remedy="torch.func.jvp around the call, or inside the function",
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


def _tangent(x: torch.Tensor) -> Any:
    return forward_ad.unpack_dual(x).tangent  # type: ignore[no-untyped-call]
