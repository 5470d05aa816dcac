"""W1 annotated: the single-device step of `w1`, and the places where a mode says that tensors live."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

import shardlib as sl

from . import w1


def mesh_of(mode: w1.Mode, *, abstract: bool = False, machine: str | None = None) -> sl.Mesh:
    make = sl.Mesh.abstract if abstract else sl.Mesh
    return make(**mode.axes, rules=dict(mode.rules), machine=machine)


def sharded_step(mode: w1.Mode, config: w1.Config, **kept: Any) -> Any:
    """The jitted step of a mode; weights and batch are annotated, and the residual stream where the mode does.

    `kept` is what else `jit` is told.
    """

    def residual(x: Tensor) -> Tensor:
        return sl.shard(x, mode.residual) if mode.residual else x

    def step(params: w1.Params, tokens: Tensor, targets: Tensor) -> tuple[Tensor, w1.Params]:
        return w1.step(params, tokens, targets, config, residual, block)

    block = sl.jit(w1.block)  # traced once, not for every layer

    specs = (mode.params, mode.batch, mode.batch)
    return sl.jit(step, in_specs=specs, out_specs=(None, mode.params), donate_argnums=(0,), **kept)


def place(mode: w1.Mode, params: w1.Params, *batch: Tensor) -> tuple[Any, ...]:
    """Parameters and batch as sharded tensors, under the current mesh."""
    placed = pytree.tree_map(lambda p, spec: sl.shard(p, spec), params, mode.params)
    return placed, *(sl.shard(x, mode.batch) for x in batch)
