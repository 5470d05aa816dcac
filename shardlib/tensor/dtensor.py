"""Converts ShardedTensors to DTensors of torch.distributed and back, by differentiable copies.

DTensor is imported on use, since the import takes a third of the time of torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardlib.core.errors import ShardingError
from shardlib.sharding.layout import REDUCTIONS, Factor, Layout, PartialSum, ShardSizes
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.mesh.mesh import Mesh, current_mesh
from shardlib.tensor.hooks import tensor_hooks
from shardlib.tensor.local_shards import refuse_misfits
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof
from shardlib.tensor.tensor_meta import Form, contiguous_strides

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def to_dtensor(x: ShardedTensor) -> DTensor:
    """Returns a DTensor with the same values on the mesh's DeviceMesh; copies this rank's shard. Differentiable.

    Raises `ShardingError` on virtual devices, and for layouts without DTensor placements (an axis on a factor in the
    middle of a dim, parts of axes): redistribute first.

    Example:
        >>> import torch, shardlib as sl
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> with sl.Mesh(data=1):
        ...     to_dtensor(sl.shard(torch.ones(4, 2), "batch@data _")).placements
        (Shard(dim=0),)
        >>> dist.destroy_process_group()
    """
    from torch.distributed.tensor import DTensor

    placements, faults = placements_of(x.sharding, x.mesh)
    if faults:
        raise ShardingError(
            f"{typeof(x)} has no DTensor placements",
            faults,
            rule="a DTensor shards whole dims over whole mesh axes, in the mesh's order",
            remedy="x.redistribute(spec) first",
        )
    return DTensor.from_local(
        x.to_local().clone(),
        x.mesh.device_mesh,
        placements,
        run_check=False,
        shape=x.shape,
        stride=contiguous_strides(x.shape),
    )


def placements_of(layout: Layout, mesh: Mesh) -> tuple[list[Any], list[str]]:
    """Returns one DTensor placement per mesh axis for a layout, and the reasons why they do not express it."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    placements: list[Any] = []
    faults = []
    for name in mesh.axis_names:
        placement: Any = Replicate()
        uses = [(d, dim, f, a) for d, dim in enumerate(layout.dims) for f in dim for a in f.axes if a.name == name]
        for d, dim, f, a in uses:
            if isinstance(f.size, ShardSizes):
                faults.append(f"dim {d} is {Layout((dim,))}: DTensor shards in chunks")
            elif len(dim) > 1 or not a.whole:
                text = f"axis {a} shards one factor of it, or only a part of {name} does"
                faults.append(f"dim {d} is {Layout((dim,))}: {text}")
            placement = Shard(d)
        for partial, a in ((p, a) for p in layout.pending for a in p.axes if a.name == name):
            placement = Partial(partial.kind)
            if not a.whole or partial.kind == "owned":
                faults.append(f"it is {partial}: DTensor sums over whole mesh axes")
        placements.append(placement)
    for d, dim in enumerate(layout.dims):
        order = [mesh.axis_names.index(a.name) for f in dim for a in f.axes]
        if order != sorted(order):
            faults.append(f"dim {d} is {Layout((dim,))}: DTensor shards in the order of the mesh's axes")
    return placements, faults


def from_dtensor(x: DTensor, mesh: Mesh | None = None) -> ShardedTensor:
    """Returns a DTensor as a ShardedTensor on `mesh`, by default its own; copies this rank's shard. Differentiable.

    Raises `ShardingError` for partial sums, for another mesh, and for a local tensor that does not fit the shape.

    Example:
        >>> import torch, shardlib as sl
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> with sl.Mesh(data=1):
        ...     x = sl.shard(torch.ones(4, 2), "batch@data _")
        ...     typeof(from_dtensor(to_dtensor(x)))
        'f32[4@data, 2]'
        >>> dist.destroy_process_group()
    """
    mesh = mesh or current_mesh() or Mesh.from_device_mesh(x.device_mesh)
    sizes = dict(zip(x.device_mesh.mesh_dim_names or (), x.device_mesh.mesh.shape, strict=False))
    if sizes != dict(mesh.axes):
        raise ShardingError(
            f"a DTensor on {x.device_mesh} is not on {mesh}", rule="both meshes have the same axes in the same order"
        )
    if any(placement.is_partial() for placement in x.placements):
        raise ShardingError(
            f"a DTensor of placements {x.placements} is a partial sum",
            rule="a DTensor comes here with complete values",
            remedy="redistribute it to Shard and Replicate first",
        )
    layout = layout_of_placements(tuple(x.shape), x.placements, mesh)
    shard = x.to_local().clone()
    refuse_misfits(f"a DTensor of shape {list(x.shape)} as {layout}", [shard], layout, mesh)
    return tensor_hooks.from_shards([shard], Form.intern(layout, mesh, shard.dtype, shard.device))


def layout_of_placements(shape: tuple[int, ...], placements: Sequence[Any], mesh: Mesh) -> Layout:
    """Returns the layout of a tensor of this shape with one DTensor placement per mesh axis.

    Raises `ShardingError` for another number of placements, and for kinds other than `Shard`, `Replicate`, `Partial`.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    axes: list[list[Axis]] = [[] for _ in shape]
    pending = []
    wrong = [] if len(placements) == len(mesh.axes) else [f"{len(placements)} placements for {mesh}"]
    for name, placement in zip(mesh.axis_names, placements, strict=False):
        if type(placement) is Shard and -len(shape) <= placement.dim < len(shape):
            axes[placement.dim].append(mesh.axis(name))
        elif type(placement) is Partial and placement.reduce_op in REDUCTIONS:
            pending.append(PartialSum((mesh.axis(name),), placement.reduce_op))
        elif not isinstance(placement, Replicate):
            wrong.append(f"{placement} over {name}, of a tensor of shape {list(shape)}")
    if wrong:
        raise ShardingError(
            "DTensor placements have no layout here",
            wrong,
            rule="there is one for each mesh axis: Shard of a dim, Replicate, or Partial of a sum, max or min",
        )
    return Layout(tuple((Factor(n, tuple(a)),) for n, a in zip(shape, axes, strict=True)), tuple(pending))
