"""Moves tensors between the stages of one mesh outside `jit`.

A virtual device holds the shards of all stages, so nothing is sent. On ranks, a tensor that is on all stages has its
shards on each already; one of a single stage is broadcast to the ranks at the same place of the other stages.
"""

from __future__ import annotations

from functools import partial

import torch

from shardlib.core.torch_internals.strided_only import as_bytes
from shardlib.distributed.turns import Turn
from shardlib.ops.collectives.p2p import broadcast
from shardlib.ops.collectives.transport.groups import run_in_turn
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof, wrap
from shardlib.tensor.tensor_meta import Form


def move_to_stage(x: ShardedTensor, mesh: Mesh) -> ShardedTensor:
    """Returns `x` on another part of its mesh, without history; on ranks every rank must call it.

    The result may share shards with `x`.
    """
    form = x._form
    to = Form.intern(form.layout, mesh, form.dtype, form.device, form.names, form.strides, form.offset)
    shards = x._locals
    if mesh.kind == "distributed" and form.device.type != "meta":
        if x.mesh.stage is not None and mesh.stages > 1:
            shards = tuple([_broadcast(x, shard) for shard in shards])
        if mesh.is_elsewhere:
            shards = tuple([shard.to("meta") for shard in shards])
    out = wrap(to, shards)
    out._origin = x._origin
    return out


def _broadcast(x: ShardedTensor, own: torch.Tensor) -> torch.Tensor:
    """Returns a shard that the ranks of one stage have, on the ranks of all stages, in new memory."""
    mesh, stage_axis = x.mesh, Axis(str(x.mesh.stage_axis), x.mesh.stages)
    if mesh.is_elsewhere:
        out = torch.empty(own.shape, dtype=own.dtype, device=mesh.device)
    else:
        out = own.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    source = mesh.rank_of(mesh.coords(mesh.rank))
    turn = Turn(f"sending {typeof(x)} from {mesh} to the other stages")
    run_in_turn(mesh.whole, turn, (stage_axis,), partial(broadcast, as_bytes(out), source))
    return out
