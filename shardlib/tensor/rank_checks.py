"""Values that every rank has whole, the same on all of them: compared, sent by one rank, or made of pieces.

A plain tensor on ranks is taken as one value that all processes have. Whether they do is found out by a digest of its
bytes: at every `shard`, at the first call of a jitted function for each signature, at the first call of an eager op
for each kind of operands. Later calls of jitted functions compare a few elements (`distributed/provenance.sample`);
`SHARDLIB_CHECK=always` compares all of them at every call, `off` never any.
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
from shardlib.core.strided_only import as_bytes, refuse_dtensors
from shardlib.core.torch_private import is_wrapped, schema_of
from shardlib.distributed.store import names
from shardlib.distributed.turns import Turn, current
from shardlib.ops.collectives import all_gather, all_reduce
from shardlib.ops.collectives.transport.groups import together
from shardlib.sharding.layout import Layout
from shardlib.sharding.mesh.axis import Axis, alike
from shardlib.sharding.mesh.mesh import Mesh, current_mesh
from shardlib.sharding.placement import Fixed
from shardlib.sharding.spec import P, Spec, axes_of_dims, resolve_many
from shardlib.tensor.hooks import above
from shardlib.tensor.local_shards import refuse_misfits
from shardlib.tensor.sharded_tensor import ShardedTensor
from shardlib.tensor.tensor_meta import Form

if TYPE_CHECKING:
    from shardlib.compiler.plan.plan import Plan

_RULE = "a plain tensor is whole, and the same, on every rank"
_REMEDY = (
    "torch.manual_seed(...) on every rank before it is made; shard(x, spec, src=0) takes the values of rank 0; "
    "sl.from_local(x, spec) makes one tensor of each rank's own piece"
)


def policy() -> str:
    """What SHARDLIB_CHECK says: "first", "always" or "off"."""
    said = os.environ.get("SHARDLIB_CHECK", "first")
    if said not in ("first", "always", "off"):
        raise ShardingError(f"SHARDLIB_CHECK={said!r} is not known", remedy="first, always or off")
    return said


ALWAYS = policy() == "always"


def digest(x: Tensor) -> int:
    """A number that stands for the bytes of a tensor.

    Example:
        >>> digest(torch.zeros(2)) == digest(torch.zeros(3)), digest(torch.zeros(2)) == digest(torch.zeros(2))
        (False, True)
    """
    return zlib.crc32(as_bytes(x.cpu()).numpy().data) if x.numel() else 0


def same(
    mesh: Mesh,
    what: str,
    tensors: Sequence[tuple[str, Tensor]],
    layouts: Sequence[Layout] = (),
    remedy: str = _REMEDY,
) -> Sequence[int]:
    """Refuse tensors, each called by a name, whose values are not the same on all ranks; all ranks come here together.

    They come with the same `layouts`, if some are given. Returns their digests; nothing where none are compared.

    Raises `ShardingError` that names the tensors and the ranks.
    """
    known = [(name, x) for name, x in tensors if x.device.type != "meta"]
    if mesh.kind != "distributed" or mesh.size == 1 or not known or policy() == "off":
        return ()
    digests = [digest(x) for _, x in known]
    mine = torch.tensor(digests, dtype=torch.int64)
    said = [f"{name} of shape {list(x.shape)}" for name, x in known]
    kinds = [str(x.dtype) for _, x in known]
    placed = f" as {', '.join(f'[{layout}]' for layout in layouts)}" if layouts else ""
    every = _gathered(mesh, Turn(f"comparing the values of {', '.join(said)} ({what}{placed} on {mesh})", *kinds), mine)
    wrong = []
    for i, text in enumerate(said):
        holders: dict[int, list[int]] = {}
        for rank, row in enumerate(every):
            holders.setdefault(row[i], []).append(rank)
        if len(holders) > 1:
            verbs = ("has" if len(ranks) == 1 else "have" for ranks in holders.values())
            parts = zip(holders.values(), verbs, ("one value", *["another"] * len(holders)), strict=False)
            wrong.append(f"{text}: {', '.join(f'{names(ranks)} {verb} {value}' for ranks, verb, value in parts)}")
    if wrong:
        raise ShardingError(f"{what}: the ranks have different values", wrong, rule=_RULE, remedy=remedy)
    return digests


def compare_arguments(plan: Plan, mesh: Mesh, leaves: Sequence[Any]) -> None:
    """`same` of the plain tensors and the numbers among a call's leaves."""
    if mesh.kind == "distributed":
        traced = plan.compiled.traced
        given = [(name, leaves[i]) for name, i in zip(traced.input_names, traced.input_leaves, strict=True) if i >= 0]
        tensors = [(name, x) for name, x in given if _is_plain(x)]
        said = [x for x in leaves if type(x) is int or type(x) is float]
        numbers = [("the numbers among the arguments", torch.tensor(zlib.crc32(repr(said).encode())))] if said else []
        same(mesh, plan.name, [*tensors, *numbers])


def compare_operands(op: Any, operands: Sequence[Tensor], mesh: Mesh) -> None:
    """`same` of the plain tensors among an eager op's operands, on ranks."""
    current()
    plain = [x for x in operands if _is_plain(x)]
    same(mesh, schema_of(op).name.replace("::", "."), [(f"operand {i}", x) for i, x in enumerate(plain)])


def _is_plain(x: Tensor) -> bool:
    return "_form" not in x.__dict__


def everywhere(mesh: Mesh) -> tuple[Axis, ...]:
    """The axes over which all ranks of a mesh are one group, in the order of ranks."""
    return tuple(Axis(name, n) for name, n in mesh.axes.items() if n > 1)


def _gathered(mesh: Mesh, turn: Turn, mine: Tensor) -> list[list[int]]:
    here = mine.to(mesh.device).unsqueeze(0)
    out = together(
        mesh, turn, everywhere(mesh), lambda group: all_gather.start(here, 0, [1] * mesh.size, group).finish()
    )
    found: list[list[int]] = out.tolist()
    return found


def from_rank(mesh: Mesh, x: Tensor, src: int, what: str) -> Tensor:
    """The values that rank `src` has of a tensor, whose shape and dtype are the same on all ranks."""
    if not 0 <= src < mesh.size:
        raise ShardingError(f"{what}: there is no rank {src}", [f"the ranks are 0 to {mesh.size - 1}"])
    if mesh.kind != "distributed" or mesh.size == 1 or not x.numel():
        return x
    sent = as_bytes(x)  # sums of bytes are exact
    sent = sent if mesh.rank == src else torch.zeros_like(sent)
    turn = Turn(f"sending {x.dtype}{list(x.shape)} from rank {src} ({what} on {mesh})")
    got = together(mesh, turn, everywhere(mesh), lambda group: all_reduce.start(sent, group).finish())
    return got.view(x.dtype).view(x.shape).requires_grad_(x.requires_grad)


def from_local(
    x: Tensor | Sequence[Tensor],
    spec: str | P | Spec,
    *,
    sizes: Mapping[str, int | Sequence[int]] | None = None,
    **lengths: int,
) -> ShardedTensor:
    """A global tensor of the pieces that the devices have: of each rank's own `x`, or on virtual devices of a list.

    `spec` says which piece of the whole each is, as `shard` takes it; the sizes of dims that are cut are added up over
    the devices. Uneven pieces are as `shard` would cut the whole, or as `sizes` say. Devices that hold the same piece
    give the same values. The result has the pieces' memory for its own.

    Differentiable, as `DTensor.from_local` is: the gradient of a piece is that piece of the gradient. Copies of a piece
    in one process, which virtual devices have, share its gradient equally, so that a tensor behind all of them gets
    what it gets from `shard`. On ranks each process has the whole gradient of its piece.

    Raises `ShardingError` that lists all pieces that do not fit, and in a traced function.

    Example:
        >>> from shardlib import Mesh, from_local
        >>> with Mesh(data=2):
        ...     batch = from_local([torch.zeros(3, 2), torch.ones(3, 2)], "batch@data _")
        >>> batch
        ShardedTensor(f32[6@data, 2] on Mesh(data=2))
    """
    mesh, what = current_mesh(), f"from_local(x, {str(spec)!r})"
    if is_tracing():
        raise NoProgramError(
            f"{what} is in a traced function",
            [str(user_line(sys._getframe(1)))],
            rule="inside jit every tensor is a whole one, and one program serves all devices",
            remedy="call it outside, and pass the result; a shard_map makes a tensor of what its devices compute",
        )
    if mesh is None or mesh.kind == "abstract":
        raise ShardingError(
            f"{what} is {'outside any mesh' if mesh is None else f'on {mesh}, which has no devices'}",
            rule="pieces lie on the devices of the current mesh",
            remedy="put it inside `with Mesh(data=2, tensor=4):`",
        )
    mine = [x] if isinstance(x, Tensor) else list(x)
    for piece in mine:
        refuse_recorded(what, piece)
    refuse_dtensors(what, [("x", piece) for piece in mine])
    _refuse_without_values(what, mine)
    count = mesh.size if mesh.kind == "virtual" else 1
    if len(mine) != count or any(isinstance(piece, ShardedTensor) for piece in mine):
        raise ShardingError(
            f"{what} on {mesh}",
            [f"{len(mine)} piece{'s' * (len(mine) > 1)} for {count} device{'s' * (count > 1)} of this process"]
            if len(mine) != count
            else ["x is a ShardedTensor, which is global already"],
            rule="on ranks x is this rank's plain piece, on virtual devices a list with one piece for each",
            remedy="shard(x, spec) places a tensor that every process has whole",
        )
    shapes = _shapes(mesh, mine, what)
    resolved = _layout(mesh, spec, {**(sizes or {}), **lengths}, shapes, what)
    _refuse_different_copies(mesh, mine, resolved.layout, what)
    refuse_misfits(what, mine, resolved.layout, mesh)
    return above.from_shards(mine, Form.of(resolved.layout, mesh, mine[0].dtype, mine[0].device, resolved.names))


def _refuse_without_values(what: str, pieces: Sequence[Tensor]) -> None:
    """Refuse pieces whose values cannot be compared: those that a transform follows, and meta tensors among others."""
    if any(map(is_wrapped, pieces)):
        raise ShardingError(
            f"{what} is inside a transform of torch.func",
            rule="the pieces of all devices are compared and put together outside of programs, where values are there",
            remedy="put from_local in front of the transform, or use a shard_map inside it; backward() goes through it",
        )
    if len(devices := {piece.device.type for piece in pieces}) > 1:
        raise ShardingError(
            f"{what}: the pieces are on {' and '.join(sorted(devices))}",
            rule="all pieces of a tensor are on the devices of its mesh",
            remedy="move them first: [x.to(device) for x in pieces]",
        )


def _shapes(mesh: Mesh, mine: Sequence[Tensor], what: str) -> list[tuple[int, ...]]:
    """The shapes of all devices' pieces."""
    ranks: list[Any] = [(str(piece.dtype), piece.dim()) for piece in mine]
    shapes = [tuple(piece.shape) for piece in mine]
    if mesh.kind == "distributed" and mesh.size > 1:
        head = torch.tensor([hash_of(str(mine[0].dtype)), mine[0].dim()], dtype=torch.int64)
        every = _gathered(mesh, Turn(f"comparing the kinds of pieces ({what})"), head)
        ranks = [tuple(row) for row in every]
        if len(set(ranks)) == 1 and mine[0].dim():
            rows = torch.tensor(mine[0].shape, dtype=torch.int64)
            shapes = [tuple(row) for row in _gathered(mesh, Turn(f"comparing the shapes of pieces ({what})"), rows)]
        elif len(set(ranks)) == 1:
            shapes = [()] * mesh.size
    if len(set(ranks)) > 1:
        raise ShardingError(
            f"{what}: the pieces are of different kinds",
            [f"this rank's is {piece.dtype} of {piece.dim()} dims" for piece in mine],
            rule="all pieces of a tensor have its dtype and its number of dims",
        )
    return shapes


def hash_of(text: str) -> int:
    return zlib.crc32(text.encode())


def _layout(mesh: Mesh, spec: str | P | Spec, sizes: Any, shapes: Sequence[tuple[int, ...]], what: str) -> Fixed:
    axes, coords = axes_of_dims(spec, len(shapes[0]), mesh, what), mesh.all_coords()
    whole = []
    for d, cut in enumerate(axes):
        found: dict[tuple[int, ...], int] = {}
        for c, shape in zip(coords, shapes, strict=True):
            found.setdefault(tuple(axis.coord(c) for axis in cut), shape[d])
        whole.append(sum(found.values()))
    (resolved,) = resolve_many([("x", tuple(whole), spec, sizes)], mesh, what="from_local")
    wrong = [
        f"device {i} has a piece of shape {list(shape)}, [{resolved.layout}] asks for {list(want)}"
        for i, (c, shape) in enumerate(zip(coords, shapes, strict=True))
        if shape != (want := resolved.layout.local_shape(c))
    ]
    if wrong:
        raise ShardingError(
            f"{what}: the pieces do not make a tensor of shape {whole}",
            wrong,
            rule="pieces are chunks of the whole, the last ones shorter or empty, or as `sizes` says",
            remedy='for pieces of other sizes, sizes={"batch": [5, 3, 8, 0]}, by the name of the dim in the spec',
        )
    return resolved


def _refuse_different_copies(mesh: Mesh, mine: Sequence[Tensor], layout: Layout, what: str) -> None:
    """Devices at one place of the layout hold one piece."""
    digests = [digest(piece) for piece in mine]
    if mesh.kind == "distributed" and mesh.size > 1:
        copies = torch.tensor(digests, dtype=torch.int64)
        digests = [row[0] for row in _gathered(mesh, Turn(f"comparing the values of pieces ({what})"), copies)]
    wrong = [
        f"devices {at} and {i} hold the same piece of [{layout}], and have different values"
        for i, at in enumerate(alike(mesh.all_coords(), layout.axes))
        if digests[i] != digests[at]
    ]
    if wrong:
        raise ShardingError(
            f"{what}: copies differ",
            wrong,
            rule="a dim that is not cut is the same on all devices",
            remedy="cut a dim over the axis along which the pieces differ, or give all of them the same values",
        )
