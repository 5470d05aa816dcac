"""Plans one function on several meshes, with one trace where calls allow it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardlib.compiler.plan.plan import Plan
from shardlib.core.errors import ShardingError
from shardlib.jit.call.shared_trace import one_trace
from shardlib.sharding.mesh.mesh import Mesh

Arguments = Sequence[Any] | Callable[[Mesh], Sequence[Any]]  # the same on every mesh, or a function of the mesh


def plan_on_meshes(caller: str, step: Any, meshes: Sequence[Mesh], args: Arguments) -> tuple[Plan, ...]:
    """Returns the plan of a jitted function on each mesh; raises `ShardingError`, in the name of `caller`."""
    mesh_list = () if isinstance(meshes, Mesh) else tuple(meshes)
    faults = [f"{mesh!r}, no mesh" for mesh in mesh_list if not isinstance(mesh, Mesh)]
    if not mesh_list:
        faults.append("one mesh, no list of them" if isinstance(meshes, Mesh) else "no mesh")
    if not callable(getattr(step, "plan", None)):
        faults.append(f"{step!r}, which has no plan")
    if isinstance(args, torch.Tensor):
        faults.append(f"a tensor of shape {list(args.shape)} as args, which are a sequence or a function of a mesh")
    if faults:
        remedy = f"{caller}(sl.jit(step), [sl.Mesh.abstract(data=8), ...], machine, (x, w))"
        raise ShardingError(f"{caller}(...) got {', and '.join(faults)}", remedy=remedy)
    plans = []
    with one_trace():
        for mesh in mesh_list:
            with mesh:
                plans.append(step.plan(*(args(mesh) if callable(args) else args)))
    return tuple(plans)
