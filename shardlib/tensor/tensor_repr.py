"""Formats a ShardedTensor: its type, its spec, and values as torch prints them.

Formatting never communicates, since a debugger, a log line or a `print` on one rank must not wait for the others. So a
rank shows its own shard.
"""

from __future__ import annotations

from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import without_modes
from shardlib.sharding.chunks import shard_range
from shardlib.tensor.hooks import tensor_hooks
from shardlib.tensor.host_offload import OFFLOADED
from shardlib.tensor.sharded_tensor import ShardedTensor, format_mesh_axes, typeof


def format_tensor(x: ShardedTensor) -> str:
    """Returns the text of `print(x)`."""
    history = " (requires_grad)" if x.requires_grad else ""
    return f"ShardedTensor {typeof(x)} on {format_mesh_axes(x.mesh)}{history}\nspec: {x.spec}\n{_format_values(x)}"


def format_with_spec(x: ShardedTensor, spec: str) -> str:
    """Returns the text of an f-string: a scalar tensor as a number, as torch does; others as `print` does."""
    if x.dim():
        return object.__format__(x, spec)
    if x.mesh.kind == "virtual":
        return format(x.item(), spec)
    if x.mesh.is_elsewhere:
        return _describe_absence(x)
    number = format(x._locals[0].item(), spec)
    return f"{number} (rank {x.mesh.rank}'s part of a {_pending(x)})" if x.sharding.pending else number


def _format_values(x: ShardedTensor) -> str:
    with without_modes():  # also in a traced function
        if x.mesh.kind == "virtual":
            return _format_held_values(x)
        if x.mesh.is_elsewhere:
            return _describe_absence(x)
        if "_locals" not in x.__dict__ and OFFLOADED not in x.__dict__:
            return "its memory was written to by another name: reading the values takes all ranks"
        return f"{_describe_shard(x)}:\n{_format_held_values(x)}"


def _format_held_values(x: ShardedTensor) -> str:
    """Formats the gathered values on virtual devices, and the shard on a rank."""
    try:
        if x.mesh.kind != "virtual":
            return repr(x._locals[0])
        return repr(x.sharding.gather([*zip(x.mesh.own_coords(), x._locals, strict=True)]))
    except ShardingError as error:  # the tensor was donated
        return error.what


def _describe_absence(x: ShardedTensor) -> str:
    return f"rank {x.mesh.rank} holds nothing: the tensor is on stage {x.mesh.stage}"


def _describe_shard(x: ShardedTensor) -> str:
    """Describes this rank's shard: `rank 1 holds [2:4, 0:6]`."""
    rank = x.mesh.rank
    coords = x.mesh.coords(rank)
    spans = [shard_range(dim[0].size, dim[0].axes, coords) if len(dim) == 1 else None for dim in x.sharding.dims]
    where = ", ".join("..." if s is None else f"{s[0]}:{s[1]}" for s in spans)
    part = f"part of a {_pending(x)} in " if x.sharding.pending else ""
    return f"rank {rank} holds {part}[{where}]"


def _pending(x: ShardedTensor) -> str:
    return x.sharding.pending[0].kind


tensor_hooks.format_tensor, tensor_hooks.format_with_spec = format_tensor, format_with_spec
