"""Checks that plain tensors are equal on all ranks, sends them from one rank, and joins the ranks' shards.

On ranks a plain tensor counts as one value of all processes. Ranks compare a digest of its bytes: at every `shard`, at
the first call of a jitted function for each signature, and at the first call of an eager op for each kind of operands.
Later calls of jitted functions compare a few elements (`distributed/provenance.sample`). `SHARDLIB_CHECK=always`
compares all elements at every call, `off` none.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardlib.core.context import is_tracing
from shardlib.core.errors import NoProgramError, ShardingError
from shardlib.core.recorders import refuse_recorded
from shardlib.core.source_lines import user_line
from shardlib.core.torch_internals.strided_only import as_bytes, refuse_dtensors
from shardlib.core.torch_internals.torch_private import is_wrapped, schema_of
from shardlib.distributed.store import format_ranks
from shardlib.distributed.turns import Turn, current
from shardlib.ops.collectives import all_gather, all_reduce
from shardlib.ops.collectives.transport.groups import run_in_turn
from shardlib.sharding.layout import Layout
from shardlib.sharding.mesh.axis import Axis, first_replicas
from shardlib.sharding.mesh.mesh import Mesh, current_mesh
from shardlib.sharding.placement import FixedLayout
from shardlib.sharding.spec import P, Spec, axes_of_dims, resolve_many
from shardlib.tensor.hooks import tensor_hooks
from shardlib.tensor.local_shards import device_of, refuse_misfits
from shardlib.tensor.sharded_tensor import ShardedTensor
from shardlib.tensor.tensor_meta import Form

if TYPE_CHECKING:
    from shardlib.compiler.plan.plan import Plan

_RULE = "a plain tensor is whole, and the same, on every rank"
_REMEDY = (
    "torch.manual_seed(...) on every rank before it is made; shard(x, spec, src=0) takes the values of rank 0; "
    "sl.from_local(x, spec) makes one tensor of each rank's own shard"
)


def read_check_policy() -> str:
    """Returns the value of SHARDLIB_CHECK: "first", "always" or "off"."""
    read_check_policy = os.environ.get("SHARDLIB_CHECK", "first")
    if read_check_policy not in ("first", "always", "off"):
        raise ShardingError(f"SHARDLIB_CHECK={read_check_policy!r} is not known", remedy="first, always or off")
    return read_check_policy


ALWAYS = read_check_policy() == "always"


def digest(x: Tensor) -> int:
    """Returns a checksum of the bytes of a tensor."""
    return zlib.crc32(as_bytes(x.cpu()).numpy().data) if x.numel() else 0


def require_equal_values(
    mesh: Mesh,
    caller: str,
    tensors: Sequence[tuple[str, Tensor]],
    layouts: Sequence[Layout] = (),
    remedy: str = _REMEDY,
) -> Sequence[int]:
    """Checks on all ranks together that named tensors have equal values; returns digests, or () without a comparison.

    With `layouts`, the ranks compare these, too. Raises `ShardingError` that names the tensors and the ranks.
    """
    valued = [(name, x) for name, x in tensors if x.device.type != "meta"]
    if mesh.kind != "distributed" or not valued:
        return ()
    mesh.device_mesh  # noqa: B018 - starts torch.distributed if nothing has yet
    if mesh.size == 1 or read_check_policy() == "off":
        return ()
    digests = [digest(x) for _, x in valued]
    mine = torch.tensor(digests, dtype=torch.int64)
    texts = [f"{name} of shape {list(x.shape)}" for name, x in valued]
    dtypes = [str(x.dtype) for _, x in valued]
    placed = f" as {', '.join(f'[{layout}]' for layout in layouts)}" if layouts else ""
    turn = Turn(f"comparing the values of {', '.join(texts)} ({caller}{placed} on {mesh})", *dtypes)
    by_rank = gather_rows(mesh, turn, mine)
    wrong = []
    for i, text in enumerate(texts):
        holders: dict[int, list[int]] = {}
        for rank, row in enumerate(by_rank):
            holders.setdefault(row[i], []).append(rank)
        if len(holders) > 1:
            verbs = ("has" if len(ranks) == 1 else "have" for ranks in holders.values())
            parts = zip(holders.values(), verbs, ("one value", *["another"] * len(holders)), strict=False)
            wrong.append(
                f"{text}: {', '.join(f'{format_ranks(ranks)} {verb} {value}' for ranks, verb, value in parts)}"
            )
    if wrong:
        raise ShardingError(f"{caller}: the ranks have different values", wrong, rule=_RULE, remedy=remedy)
    return digests


def compare_arguments(plan: Plan, mesh: Mesh, leaves: Sequence[Any]) -> None:
    """Checks on ranks that plain tensors and numbers among a call's leaves are equal."""
    if mesh.kind == "distributed":
        traced = plan.compiled.traced
        names_and_leaves = zip(traced.input_names, traced.input_leaves, strict=True)
        compared = [(name, leaves[i]) for name, i in names_and_leaves if i >= 0 and _is_plain(leaves[i])]
        if numbers := [x for x in leaves if type(x) is int or type(x) is float]:
            compared.append(("the numbers among the arguments", torch.tensor(hash_of(repr(numbers)))))
        require_equal_values(mesh, plan.name, compared)


def compare_operands(op: Any, operands: Sequence[Tensor], mesh: Mesh) -> None:
    """Checks on ranks that plain operands of an eager op are equal."""
    current()
    plain = [x for x in operands if _is_plain(x)]
    require_equal_values(
        mesh, schema_of(op).name.replace("::", "."), [(f"operand {i}", x) for i, x in enumerate(plain)]
    )


def _is_plain(x: Tensor) -> bool:
    return "_form" not in x.__dict__


def all_mesh_axes(mesh: Mesh) -> tuple[Axis, ...]:
    """Returns the axes of more than one device, over which all ranks form one group."""
    return tuple(Axis(name, n) for name, n in mesh.shape.items() if n > 1)


def gather_rows(mesh: Mesh, turn: Turn, mine: Tensor) -> list[list[int]]:
    row = mine.to(mesh.device).unsqueeze(0)
    out = run_in_turn(
        mesh, turn, all_mesh_axes(mesh), lambda group: all_gather.start(row, 0, [1] * mesh.size, group).finish()
    )
    rows: list[list[int]] = out.tolist()
    return rows


def broadcast_from_rank(mesh: Mesh, x: Tensor, src: int, caller: str) -> Tensor:
    """Returns rank `src`'s values of a tensor that has the same shape and dtype on all ranks."""
    if not 0 <= src < mesh.size:
        raise ShardingError(f"{caller}: there is no rank {src}", [f"the ranks are 0 to {mesh.size - 1}"])
    if mesh.kind != "distributed" or mesh.size == 1 or not x.numel():
        return x
    sent = as_bytes(x)  # sums with zeros are exact for bytes
    sent = sent if mesh.rank == src else torch.zeros_like(sent)
    turn = Turn(f"sending {x.dtype}{list(x.shape)} from rank {src} ({caller} on {mesh})")
    received = run_in_turn(mesh, turn, all_mesh_axes(mesh), lambda group: all_reduce.start(sent, group).finish())
    return received.view(x.dtype).view(x.shape).requires_grad_(x.requires_grad)


def from_local(
    x: Tensor | Sequence[Tensor],
    spec: str | P | Spec,
    *,
    mesh: Mesh | None = None,
    sizes: Mapping[str, int | Sequence[int]] | None = None,
    **lengths: int,
) -> ShardedTensor:
    """Joins shards to a global tensor: each rank's own `x`, or on virtual devices a list of shards.

    `spec` is the layout on `mesh` (None: the current one), as in `shard`; the sizes of sharded dims are added up over
    the devices. Uneven shards have the sizes that `shard` would give them, or those of `sizes`. Devices with the same
    shard must have the same values. The result takes over the shards' memory.

    Differentiable, as `DTensor.from_local` is: the gradient of a shard is a shard of the gradient. On virtual devices,
    copies of a shard share its gradient equally, so that a tensor behind all copies gets the same gradient as through
    `shard`. On ranks each process gets the whole gradient of its shard.

    Raises `ShardingError` that lists all shards that do not fit, and in a traced function.

    Example:
        >>> from shardlib import Mesh, from_local
        >>> with Mesh(data=2):
        ...     batch = from_local([torch.zeros(3, 2), torch.ones(3, 2)], "batch@data _")
        >>> batch
        ShardedTensor(f32[6@data, 2] on Mesh(data=2))
    """
    caller = f"from_local(x, {str(spec)!r})"
    shards = [x] if isinstance(x, Tensor) else list(x)
    mesh = _mesh_with_devices(caller, mesh)
    _check_shards(caller, shards, mesh)
    shapes = _gather_shapes(mesh, shards, caller)
    resolved = _resolve_layout(mesh, spec, {**(sizes or {}), **lengths}, shapes, caller)
    _refuse_different_copies(mesh, shards, resolved.layout, caller)
    if mesh.is_elsewhere:
        shards = [shard.detach().to("meta") for shard in shards]
    refuse_misfits(caller, shards, resolved.layout, mesh)
    form = Form.intern(resolved.layout, mesh, shards[0].dtype, device_of(shards, mesh), resolved.names)
    return tensor_hooks.from_shards(shards, form)


def _mesh_with_devices(caller: str, mesh: Mesh | None) -> Mesh:
    """Returns `mesh`, or the current one; raises `ShardingError` in a trace, and for a mesh without devices."""
    if is_tracing():
        raise NoProgramError(
            f"{caller} is in a traced function",
            [str(user_line(sys._getframe(2)))],
            rule="inside jit every tensor is a whole one, and one program serves all devices",
            remedy="call it outside, and pass the result; a shard_map makes a tensor of what its devices compute",
        )
    mesh = mesh or current_mesh()
    if mesh is None or mesh.kind == "abstract":
        raise ShardingError(
            f"{caller} is {'outside any mesh' if mesh is None else f'on {mesh}, which has no devices'}",
            rule="shards lie on the devices of a mesh",
            remedy="put it inside `with Mesh(data=2, tensor=4):`, or mesh= with devices",
        )
    return mesh


def _check_shards(caller: str, shards: Sequence[Tensor], mesh: Mesh) -> None:
    """Raises `ShardingError` for shards that are no plain tensors of this process's devices of the mesh."""
    for shard in shards:
        refuse_recorded(caller, shard)
    refuse_dtensors(caller, [("x", shard) for shard in shards])
    if any(map(is_wrapped, shards)):
        raise ShardingError(
            f"{caller} is inside a transform of torch.func",
            rule="the shards of all devices are compared and put together outside of programs, where values are there",
            remedy="put from_local in front of the transform, or use a shard_map inside it; backward() goes through it",
        )
    if len(devices := {shard.device.type for shard in shards}) > 1:
        raise ShardingError(
            f"{caller}: the shards are on {' and '.join(sorted(devices))}",
            rule="all shards of a tensor are on the devices of its mesh",
            remedy="move them first: [x.to(device) for x in shards]",
        )
    count = mesh.stage_size if mesh.kind == "virtual" else 1
    if len(shards) != count or any(isinstance(shard, ShardedTensor) for shard in shards):
        raise ShardingError(
            f"{caller} on {mesh}",
            [f"{len(shards)} shard{'s' * (len(shards) > 1)} for {count} device{'s' * (count > 1)} of this process"]
            if len(shards) != count
            else ["x is a ShardedTensor, which is global already"],
            rule="on ranks x is this rank's plain shard, on virtual devices a list with one shard for each",
            remedy="shard(x, spec) places a tensor that every process has whole",
        )


def _gather_shapes(mesh: Mesh, shards: Sequence[Tensor], caller: str) -> list[tuple[int, ...]]:
    """Returns the shapes of the shards of `_coords`; raises `ShardingError` if dtypes or numbers of dims differ."""
    kinds: list[Any] = [(str(shard.dtype), shard.dim()) for shard in shards]
    shapes = [tuple(shard.shape) for shard in shards]
    if mesh.kind == "distributed" and mesh.size > 1:
        own = shards[0]
        kind = torch.tensor([hash_of(str(own.dtype)), own.dim()], dtype=torch.int64)
        kinds = [tuple(row) for row in gather_rows(mesh, Turn(f"comparing the kinds of shards ({caller})"), kind)]
        if len(set(kinds)) == 1 and own.dim():
            turn = Turn(f"comparing the shapes of shards ({caller})")
            rows = gather_rows(mesh, turn, torch.tensor(own.shape, dtype=torch.int64))
            shapes = [tuple(rows[rank]) for rank in mesh.member_ranks]
        elif len(set(kinds)) == 1:
            shapes = [()] * len(mesh.member_ranks)
    if len(set(kinds)) > 1:
        raise ShardingError(
            f"{caller}: the shards are of different kinds",
            [f"this rank's is {shard.dtype} of {shard.dim()} dims" for shard in shards],
            rule="all shards of a tensor have its dtype and its number of dims",
        )
    return shapes


def _coords(mesh: Mesh) -> list[dict[str, int]]:
    """Returns the coordinates of all devices whose shards are joined."""
    return mesh.all_coords() if mesh.kind == "virtual" else [mesh.coords(rank) for rank in mesh.member_ranks]


def hash_of(text: str) -> int:
    return zlib.crc32(text.encode())


def _resolve_layout(
    mesh: Mesh, spec: str | P | Spec, sizes: Any, shapes: Sequence[tuple[int, ...]], caller: str
) -> FixedLayout:
    """Returns the layout of the whole tensor; raises `ShardingError` if the shards do not form it."""
    axes, coords = axes_of_dims(spec, len(shapes[0]), mesh, caller), _coords(mesh)
    whole = []
    for d, dim_axes in enumerate(axes):
        local_sizes: dict[tuple[int, ...], int] = {}
        for c, shape in zip(coords, shapes, strict=True):
            local_sizes.setdefault(tuple(axis.coord(c) for axis in dim_axes), shape[d])
        whole.append(sum(local_sizes.values()))
    (resolved,) = resolve_many([("x", tuple(whole), spec, sizes)], mesh, call="from_local")
    wrong = [
        f"device {i} has a shard of shape {list(shape)}, [{resolved.layout}] asks for {list(expected)}"
        for i, (c, shape) in enumerate(zip(coords, shapes, strict=True))
        if shape != (expected := resolved.layout.local_shape(c))
    ]
    if wrong:
        raise ShardingError(
            f"{caller}: the shards do not make a tensor of shape {whole}",
            wrong,
            rule="shards are chunks of the whole, the last ones shorter or empty, or as `sizes` says",
            remedy='for shards of other sizes, sizes={"batch": [5, 3, 8, 0]}, by the name of the dim in the spec',
        )
    return resolved


def _refuse_different_copies(mesh: Mesh, shards: Sequence[Tensor], layout: Layout, caller: str) -> None:
    digests = [digest(shard) for shard in shards]
    if mesh.kind == "distributed" and mesh.size > 1:
        copies = torch.tensor(digests, dtype=torch.int64)
        rows = gather_rows(mesh, Turn(f"comparing the values of shards ({caller})"), copies)
        digests = [rows[rank][0] for rank in mesh.member_ranks]
    wrong = [
        f"devices {at} and {i} hold the same shard of [{layout}], and have different values"
        for i, at in enumerate(first_replicas(_coords(mesh), layout.axes))
        if digests[i] != digests[at]
    ]
    if wrong:
        raise ShardingError(
            f"{caller}: copies differ",
            wrong,
            rule="a dim that is not sharded is the same on all devices",
            remedy="shard a dim over the axis along which the shards differ, or give all of them the same values",
        )
