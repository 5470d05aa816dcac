"""ShardedTensors as DTensors of torch.distributed, and back: copies, since a DTensor is written to in place.

(DTensor is imported by who asks for one: that takes as long as a third of torch.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardlib.core.errors import ShardingError
from shardlib.sharding.layout import Factor, Layout, Pieces
from shardlib.sharding.mesh.mesh import Mesh, current_mesh
from shardlib.tensor.local_shards import refuse_misfits
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof, wrap
from shardlib.tensor.tensor_meta import Form, contiguous

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def to_dtensor(x: ShardedTensor) -> DTensor:
    """The same values as a DTensor on the mesh's DeviceMesh; this rank's piece is copied.

    Raises `ShardingError` on virtual devices, and for layouts that DTensor's placements cannot say (an axis on a factor
    in the middle of a dim, parts of axes): redistribute first.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placements: list[Any] = []
    faults = []
    for name in x.mesh.axis_names:
        placement: Any = Replicate()
        for d, dim in enumerate(x.sharding.dims):
            for f in dim:
                for a in f.axes:
                    if a.name == name:
                        if isinstance(f.size, Pieces):
                            faults.append(f"dim {d} is {Layout((dim,))}: DTensor cuts in chunks")
                        elif len(dim) > 1 or not a.whole:
                            text = f"axis {a} cuts one factor of it, or only a part of {name} does"
                            faults.append(f"dim {d} is {Layout((dim,))}: {text}")
                        placement = Shard(d)
        placements.append(placement)
    for d, dim in enumerate(x.sharding.dims):
        order = [x.mesh.axis_names.index(a.name) for f in dim for a in f.axes]
        if order != sorted(order):
            faults.append(f"dim {d} is {Layout((dim,))}: DTensor cuts in the order of the mesh's axes")
    if faults:
        raise ShardingError(
            f"{typeof(x)} has no DTensor placements",
            faults,
            rule="a DTensor cuts whole dims over whole mesh axes, in the mesh's order",
            remedy="x.redistribute(spec) first",
        )
    return DTensor.from_local(
        x.to_local().clone(), x.mesh.device_mesh, placements, run_check=False, shape=x.shape, stride=contiguous(x.shape)
    )


def from_dtensor(x: DTensor, mesh: Mesh | None = None) -> ShardedTensor:
    """A DTensor as a ShardedTensor on `mesh` (by default its own DeviceMesh); this rank's piece is copied.

    Raises `ShardingError` for partial sums, for another mesh, and where the local tensor is no piece of its shape.
    """
    from torch.distributed.tensor import Replicate, Shard

    mesh = mesh or current_mesh() or Mesh.from_device_mesh(x.device_mesh)
    sizes = dict(zip(x.device_mesh.mesh_dim_names or (), x.device_mesh.mesh.shape, strict=False))
    if sizes != dict(mesh.axes):
        raise ShardingError(
            f"a DTensor on {x.device_mesh} is not on {mesh}", rule="both meshes have the same axes in the same order"
        )
    axes: list[list[Any]] = [[] for _ in x.shape]
    for name, placement in zip(mesh.axis_names, x.placements, strict=True):
        if type(placement) is Shard:
            axes[placement.dim].append(mesh.axis(name))
        elif not isinstance(placement, Replicate):
            raise ShardingError(
                f"placement {placement} of a DTensor has no layout here",
                remedy="redistribute it to Shard and Replicate first",
            )
    layout = Layout(tuple((Factor(n, tuple(a)),) for n, a in zip(x.shape, axes, strict=True)))
    piece = x.to_local().detach().clone()
    refuse_misfits(f"a DTensor of shape {list(x.shape)} as {layout}", [piece], layout, mesh)
    return wrap(Form.of(layout, mesh, piece.dtype, piece.device), (piece,))
