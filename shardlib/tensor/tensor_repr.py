"""A ShardedTensor as text: its type, its spec, and values as torch prints them.

Nothing here communicates: a debugger, a log line or a `print` on one rank alone must not wait for the others. On
virtual devices all values are here; a rank shows its own piece, and says so.
"""

from __future__ import annotations

from shardlib.core.errors import ShardingError
from shardlib.core.torch_private import without_modes
from shardlib.sharding.chunks import span
from shardlib.tensor.hooks import above
from shardlib.tensor.host_offload import AWAY
from shardlib.tensor.sharded_tensor import ShardedTensor, axes_of, typeof


def shown(x: ShardedTensor) -> str:
    """What `print(x)` prints.

    Example:
        >>> import torch, shardlib as sl
        >>> with sl.Mesh(data=2, tensor=2):
        ...     print(sl.shard(torch.arange(8.0).view(4, 2), "batch@data feature@tensor"))
        ShardedTensor f32[4@data, 2@tensor] on Mesh(data=2, tensor=2)
        spec: batch@data feature@tensor
        tensor([[0., 1.],
                [2., 3.],
                [4., 5.],
                [6., 7.]])
    """
    history = " (requires_grad)" if x.requires_grad else ""
    return f"ShardedTensor {typeof(x)} on {axes_of(x.mesh)}{history}\nspec: {x.spec}\n{_values(x)}"


def formatted(x: ShardedTensor, spec: str) -> str:
    """What an f-string makes of `x`: of one number that number, as torch does; of anything else what `print` prints."""
    if x.dim():
        return object.__format__(x, spec)
    if x.mesh.kind == "virtual":
        return format(x.item(), spec)
    number = format(x._locals[0].item(), spec)
    return f"{number} (rank {x.mesh.rank}'s part of a {_pending(x)})" if x.sharding.pending else number


def _values(x: ShardedTensor) -> str:
    with without_modes():  # while a function is traced, these values are still values
        if x.mesh.kind == "virtual":
            return _printed(x)
        if "_locals" not in x.__dict__ and AWAY not in x.__dict__:
            return "its memory was written to by another name: reading the values takes all ranks"
        return f"{_place(x)}:\n{_printed(x)}"


def _printed(x: ShardedTensor) -> str:
    try:
        here = x.mesh.kind == "virtual"
        return repr(x.sharding.gather([*zip(x.mesh.own_coords(), x._locals, strict=True)]) if here else x._locals[0])
    except ShardingError as error:  # it was donated
        return error.what


def _place(x: ShardedTensor) -> str:
    """`rank 1 holds [2:4, 0:6]`: what of the whole this rank's piece is."""
    rank = x.mesh.rank
    coords = x.mesh.coords(rank)
    spans = [span(dim[0].size, dim[0].axes, coords) if len(dim) == 1 else None for dim in x.sharding.dims]
    where = ", ".join("..." if s is None else f"{s[0]}:{s[1]}" for s in spans)
    part = f"part of a {_pending(x)} in " if x.sharding.pending else ""
    return f"rank {rank} holds {part}[{where}]"


def _pending(x: ShardedTensor) -> str:
    return x.sharding.pending[0].kind


above.shown, above.formatted = shown, formatted
