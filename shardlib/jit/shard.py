"""`shard`: where a tensor lives, said inside a program or done outside."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardlib.core.context import is_single_device, is_tracing
from shardlib.core.errors import ShardingError
from shardlib.core.numpy_bridge import to_tensor
from shardlib.core.recorders import may_be_recorded, refuse_recorders
from shardlib.core.strided_only import refuse_unstrided
from shardlib.core.torch_private import is_wrapped
from shardlib.eager.placement_autograd import place_tracked
from shardlib.ops.constraint import constrain
from shardlib.primitives.body import current_body
from shardlib.sharding.mesh.mesh import Mesh, current_mesh, is_without_mesh, peek_mesh
from shardlib.sharding.placement import FixedLayout
from shardlib.sharding.spec import P, Sizes, Spec, collect_sizes, resolve_many
from shardlib.sharding.typos import warn_of_typo
from shardlib.tensor.rank_checks import broadcast_from_rank, require_equal_values
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof


def shard(
    x: torch.Tensor,
    spec: str | P | Spec,
    /,
    *,
    mesh: Mesh | int | None = None,
    sizes: Sizes | int | None = None,
    src: int | None = None,
    donate: bool = False,
    **lengths: int,
) -> torch.Tensor:
    """Say where `x` lives: a constraint inside a traced function (also on its gradient), a placement outside.

    A placement copies what this process keeps of a plain tensor, so that writing to `x` afterwards changes nothing and
    a rank that keeps a piece does not keep the whole. With `donate`, the caller promises not to use `x` again, and what
    is kept whole is taken over as it is.

    `mesh` is the mesh to place `x` on, in place of the current one. Inside a traced function it has to be the mesh of
    the program. (`mesh=4` is the length of a factor of that name.)

    Of a tensor that lives elsewhere it is a move, inside and outside: the result lives where the last `shard` says.
    `spec` has one entry per dim: logical names (mapped by the mesh's rules), `name@axis`, or factors in parentheses,
    whose sizes are given like einops' lengths. `sizes` may hold them too, and by name the pieces into which a factor is
    cut, one for each device along its axes. (`sizes=4` is the length of a factor of that name.) Inside `no_mesh()` the
    spec is read, and `x` returned as it is, whatever `mesh` is. Warns of a name that has no rule and is near to one
    that has. On ranks every process has `x` whole, and they place it together: values that differ are refused, unless
    `src` is the rank whose values count.

    Raises `ShardingError` outside any mesh, where spec, shape and mesh do not fit, and for a `mesh` other than that of
    the program or of `x`.

    Example:
        >>> from shardlib.sharding.mesh.mesh import Mesh
        >>> with Mesh(data=2, tensor=4, rules={"heads": "tensor"}):
        ...     w = shard(torch.zeros(3 * 8 * 16, 128), "(three heads hd) embed", three=3, heads=8)
        >>> typeof(w)
        'f32[(3 8@tensor 16), 128]'
        >>> with Mesh(data=4):
        ...     x = shard(torch.zeros(16, 2), "batch@data embed", sizes={"batch": [5, 3, 8, 0]})
        >>> typeof(x), [len(s.data) for s in x.shards]
        ('f32[16@data=[5 3 8 0], 2]', [5, 3, 8, 0])
    """
    if is_single_device():
        return x
    if not isinstance(x, torch.Tensor):
        x = to_tensor(x, f"the x of shard(x, {str(spec)!r})")
    refuse_unstrided(f"shard(x, {str(spec)!r})", [("x", x)])
    body = current_body() if is_tracing() else None
    if body is not None and not body.left:
        raise ShardingError(
            f"shard(x, {str(spec)!r}) on shape {list(x.shape)} is inside a shard_map body",
            rule="a body is one device's program: its tensors are local, and nothing about them is inferred",
            remedy="annotate the arguments and results of the shard_map, by in_specs and out_specs",
        )
    if isinstance(mesh, int):
        lengths, mesh = {"mesh": mesh, **lengths}, None
    mesh = _chosen(mesh, x, spec)
    (resolved,) = resolve_many([("x", x.shape, spec, collect_sizes(sizes, lengths))], mesh)
    if mesh is None:
        return x
    if body is not None and (named := dict.fromkeys(a.name for a in resolved.layout.axes if a.name in body.manual)):
        raise ShardingError(
            f"shard(x, {str(spec)!r}) on shape {list(x.shape)} is inside a shard_map that is manual over "
            f"{', '.join(map(repr, body.manual))}",
            [f"it names {name!r}" for name in named],
            rule="along its manual axes a body holds one device's piece; the compiler places it over the other axes",
            remedy=f"name axes of {', '.join(body.left)}",
        )
    if src is not None and (is_tracing() or isinstance(x, ShardedTensor)):
        raise ShardingError(
            f"shard(x, {str(spec)!r}, src={src}) on {typeof(x)}",
            ["x is a value of the program" if is_tracing() else "x is placed already"],
            rule="src says whose values count where plain tensors are placed, outside jit",
            remedy="leave src out",
        )
    if not is_tracing() and is_wrapped(x):
        raise ShardingError(
            f"shard(x, {str(spec)!r}) on shape {list(x.shape)} is inside a transform of torch.func, outside jit",
            rule="a transform hands on values of its own, which are placed in a program only",
            remedy="put jit around the transform: sl.jit(sl.grad(f))(x)",
        )
    if is_tracing():
        return constrain(x, str(resolved.spec))
    if may_be_recorded():
        refuse_recorders(f"shard(x, {str(spec)!r})")
    if isinstance(x, ShardedTensor):
        return x.redistribute(resolved.required_spec)
    warn_of_typo("shard(x)", resolved.required_spec, mesh)
    found: Sequence[int] = ()
    if src is not None:
        x = broadcast_from_rank(mesh, x, src, f"shard(x, {str(spec)!r}, src={src})")
    else:
        found = require_equal_values(mesh, f"shard(x, {str(spec)!r})", [("x", x)], [resolved.layout])
    return _placed(x, resolved, mesh, found, donate)


def _chosen(mesh: Mesh | None, x: torch.Tensor, spec: str | P | Spec) -> Mesh | None:
    """Returns the mesh that a call of `shard` means; None inside `no_mesh()`."""
    what = f"shard(x, {str(spec)!r}) on shape {list(x.shape)}"
    current = peek_mesh() if mesh is None else current_mesh()  # a trace that names its mesh is for no other one
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ShardingError(
            f"{what} gets mesh={mesh!r}",
            rule="mesh is the sl.Mesh that x is placed on",
            remedy="give a Mesh; Mesh.from_device_mesh(...) makes one of torch's",
        )
    if is_without_mesh():
        return None
    if mesh is None and current is None:
        raise ShardingError(
            f"{what} is outside any mesh",
            rule="an annotation names axes of the current mesh",
            remedy="put it inside `with Mesh(data=2, tensor=4):`, or give mesh=; `with no_mesh():` runs plain torch",
        )
    home = current if is_tracing() else x.mesh if isinstance(x, ShardedTensor) else None
    if mesh is not None and home is not None and mesh != home:
        raise ShardingError(
            f"{what} is given {mesh}, " + (f"the program runs on {home}" if is_tracing() else f"x lives on {home}"),
            rule="a program runs on one mesh, and a ShardedTensor stays on its own",
            remedy="leave mesh= out, or call the function inside `with mesh:`"
            if is_tracing()
            else "shard(x.full_tensor(), spec, mesh=mesh) places its values on another mesh",
        )
    return mesh or current


def shard_known(name: str, x: torch.Tensor, resolved: FixedLayout, mesh: Mesh, digest: int) -> ShardedTensor:
    """`shard`, outside any program, of a plain tensor that all ranks have with this digest, as they know already."""
    warn_of_typo(name, resolved.required_spec, mesh)
    return _placed(x, resolved, mesh, [digest])


def _placed(
    x: torch.Tensor, resolved: FixedLayout, mesh: Mesh, digests: Sequence[int], donate: bool = False
) -> ShardedTensor:
    out = place_tracked(x, resolved, mesh, donate)
    for digest in digests:
        out._origin = digest + 1
    return out
