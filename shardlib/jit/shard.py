"""`shard`: constrains a value's layout inside a program, and places a tensor outside."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardlib.core.context import is_single_device, is_tracing
from shardlib.core.errors import ShardingError
from shardlib.core.recorders import may_be_recorded, refuse_recorders
from shardlib.core.torch_internals.numpy_bridge import to_tensor
from shardlib.core.torch_internals.strided_only import refuse_unstrided
from shardlib.core.torch_internals.torch_private import is_wrapped
from shardlib.eager.placement_autograd import move, place_tracked
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
    """Fixes the layout of `x`: a constraint inside a traced function (also on the gradient), a placement outside.

    `spec` has one entry per dim: logical names (mapped by the mesh's rules), `name@axis`, or factors in parentheses,
    with sizes like einops' lengths. `sizes` may hold these, too, and by name the sizes of a factor's shards. `mesh`
    replaces the current mesh; inside a traced function it must be the program's. (A number as `sizes` or `mesh` is the
    length of a factor of that name.) A tensor that lives elsewhere is moved, also to the stage of `mesh.at(stage=1)`.

    A placement copies this process's shards: writes to `x` do not show, and a rank does not keep the whole. With
    `donate` you promise not to use `x` again, and a whole tensor is not copied. On ranks every process has `x` whole;
    unequal values are refused, unless `src` is the rank whose values count. Inside `no_mesh()` `x` is returned.

    Raises `ShardingError` outside any mesh and if spec, shape and meshes do not fit. Warns of misspelled names.

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
    call = f"shard(x, {str(spec)!r})"
    if not isinstance(x, torch.Tensor):
        x = to_tensor(x, f"the x of {call}")
    refuse_unstrided(call, [("x", x)])
    _refuse_in_whole_body(x, spec)
    if isinstance(mesh, int):
        lengths, mesh = {"mesh": mesh, **lengths}, None
    is_explicit, mesh = mesh is not None, _chosen(mesh, x, spec)
    (resolved,) = resolve_many([("x", x.shape, spec, collect_sizes(sizes, lengths))], mesh)
    if mesh is None:
        return x
    _refuse_manual_axes(x, spec, resolved)
    _refuse_source_or_transform(x, spec, src)
    if is_tracing():
        return constrain(x, str(resolved.spec))
    if may_be_recorded():
        refuse_recorders(call)
    if isinstance(x, ShardedTensor):
        return move(x, mesh if is_explicit or mesh.stage is not None else x.mesh).redistribute(resolved.required_spec)
    warn_of_typo("shard(x)", resolved.required_spec, mesh)
    if src is not None:
        return _placed(broadcast_from_rank(mesh, x, src, f"{call[:-1]}, src={src})"), resolved, mesh, (), donate)
    return _placed(x, resolved, mesh, require_equal_values(mesh, call, [("x", x)], [resolved.layout]), donate)


def _refuse_in_whole_body(x: torch.Tensor, spec: str | P | Spec) -> None:
    """Refuses `shard` inside a shard_map body that leaves no axis to the compiler."""
    body = current_body() if is_tracing() else None
    if body is not None and not body.left:
        raise ShardingError(
            f"shard(x, {str(spec)!r}) on shape {list(x.shape)} is inside a shard_map body",
            rule="a body is one device's program: its tensors are local, and nothing about them is inferred",
            remedy="annotate the arguments and results of the shard_map, by in_specs and out_specs",
        )


def _refuse_manual_axes(x: torch.Tensor, spec: str | P | Spec, resolved: FixedLayout) -> None:
    body = current_body() if is_tracing() else None
    if body is not None and (named := dict.fromkeys(a.name for a in resolved.layout.axes if a.name in body.manual)):
        raise ShardingError(
            f"shard(x, {str(spec)!r}) on shape {list(x.shape)} is inside a shard_map that is manual over "
            f"{', '.join(map(repr, body.manual))}",
            [f"it names {name!r}" for name in named],
            rule="along its manual axes a body holds one device's piece; the compiler places it over the other axes",
            remedy=f"name axes of {', '.join(body.left)}",
        )


def _refuse_source_or_transform(x: torch.Tensor, spec: str | P | Spec, src: int | None) -> None:
    """Refuses `src` for anything but the placement of a plain tensor, and a placement inside a transform."""
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


def _chosen(mesh: Mesh | None, x: torch.Tensor, spec: str | P | Spec) -> Mesh | None:
    """Returns the mesh of a call of `shard`; None inside `no_mesh()`."""
    call = f"shard(x, {str(spec)!r}) on shape {list(x.shape)}"
    current = peek_mesh() if mesh is None else current_mesh()  # reading the current mesh ties a trace to it
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ShardingError(
            f"{call} gets mesh={mesh!r}",
            rule="mesh is the sl.Mesh that x is placed on",
            remedy="give a Mesh; Mesh.from_device_mesh(...) makes one of torch's",
        )
    if is_without_mesh():
        return None
    if mesh is None and current is None:
        raise ShardingError(
            f"{call} is outside any mesh",
            rule="an annotation names axes of the current mesh",
            remedy="put it inside `with Mesh(data=2, tensor=4):`, or give mesh=; `with no_mesh():` runs plain torch",
        )
    own = current if is_tracing() else x.mesh if isinstance(x, ShardedTensor) else None
    if mesh is not None and own is not None and mesh.whole != own.whole:
        raise ShardingError(
            f"{call} is given {mesh}, " + (f"the program runs on {own}" if is_tracing() else f"x lives on {own}"),
            rule="a program runs on one mesh, and a ShardedTensor stays on its own",
            remedy="leave mesh= out, or call the function inside `with mesh:`"
            if is_tracing()
            else "shard(x.full_tensor(), spec, mesh=mesh) places its values on another mesh",
        )
    return mesh or current


def shard_known(name: str, x: torch.Tensor, resolved: FixedLayout, mesh: Mesh, digest: int) -> ShardedTensor:
    """Places a plain tensor outside any program; all ranks are known to have it with this digest."""
    warn_of_typo(name, resolved.required_spec, mesh)
    return _placed(x, resolved, mesh, [digest])


def _placed(
    x: torch.Tensor, resolved: FixedLayout, mesh: Mesh, digests: Sequence[int], donate: bool = False
) -> ShardedTensor:
    out = place_tracked(x, resolved, mesh, donate)
    for digest in digests:
        out._origin = digest + 1
    return out
