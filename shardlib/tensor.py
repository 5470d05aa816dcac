"""ShardedTensor: a tensor with a global shape whose pieces live on the devices of a mesh.

On virtual devices every piece is in this process; on ranks only this rank's is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardlib.constraint import constrain
from shardlib.errors import ShardingError
from shardlib.grammar import SpecDim, SpecFactor
from shardlib.layout import Coords, Factor, Layout
from shardlib.manual import current_body
from shardlib.mesh import Mesh, current_mesh
from shardlib.spec import P, Resolved, Spec, resolve_many
from shardlib.state import is_single_device, is_tracing

Names = tuple[tuple[str | None, ...], ...]


@dataclass(frozen=True)
class LocalShard:
    """One device's piece: its rank, coordinates and tensor."""

    rank: int
    coords: Coords
    data: torch.Tensor


class ShardedTensor(torch.Tensor):
    """A tensor of global shape, laid out over a mesh; made by `shard` and by jitted functions.

    Example:
        >>> from shardlib.mesh import Mesh
        >>> with Mesh(data=2, tensor=2):
        ...     x = shard(torch.arange(8.0).view(4, 2), "batch@data feature@tensor")
        >>> x
        ShardedTensor(f32[4@data, 2@tensor] on Mesh(data=2, tensor=2))
        >>> x.shape, [tuple(s.data.shape) for s in x.shards]
        (torch.Size([4, 2]), [(2, 1), (2, 1), (2, 1), (2, 1)])
        >>> x.full_tensor().sum()
        tensor(28.)
    """

    _layout: Layout
    _mesh: Mesh
    _locals: tuple[torch.Tensor, ...]
    _names: Names

    @staticmethod
    def __new__(
        cls,
        locals_: Sequence[torch.Tensor],
        layout: Layout,
        mesh: Mesh,
        names: Names | None = None,
        requires_grad: bool = False,
    ) -> ShardedTensor:
        first = locals_[0]
        self: ShardedTensor = torch.Tensor._make_wrapper_subclass(
            cls, layout.shape, dtype=first.dtype, device=first.device, requires_grad=requires_grad
        )
        self._layout, self._mesh, self._locals = layout, mesh, tuple(locals_)
        self._names = names or tuple((None,) * len(dim) for dim in layout.dims)
        return self

    @property
    def sharding(self) -> Layout:
        """The exact layout (`Tensor.layout` is torch's: strided or sparse)."""
        return self._layout

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def spec(self) -> Spec:
        """Where this tensor lives, as a spec: names that are known, and mesh axes.

        Parts of a mesh axis have no spelling in a spec; `sharding` shows them.
        """
        dims = []
        for factors, names in zip(self._layout.dims, self._names, strict=True):
            one = len(factors) == 1
            dims.append(
                SpecDim(
                    tuple(
                        SpecFactor(name, tuple(a.name for a in f.axes), None if one else f.size)
                        for f, name in zip(factors, names, strict=True)
                    )
                )
            )
        return Spec(tuple(dims))

    @property
    def shards(self) -> tuple[LocalShard, ...]:
        """The pieces that this process holds: all of them on virtual devices, one on a rank."""
        ranks = range(self._mesh.size) if self._mesh.kind == "virtual" else [self._mesh.rank]
        return tuple(LocalShard(r, self._mesh.coords(r), x) for r, x in zip(ranks, self._locals, strict=True))

    def to_local(self) -> torch.Tensor:
        """This rank's piece (rank 0's on virtual devices)."""
        return self._locals[0]

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor as a plain one. On ranks this is a collective: every rank must call it."""
        if self._mesh.kind == "virtual":
            return self._layout.gather([(s.coords, s.data) for s in self.shards])
        return self.redistribute(P()).to_local()

    def redistribute(self, spec: str | P | Spec, **sizes: int) -> ShardedTensor:
        """The same values laid out as `spec` says. On ranks this is a collective: every rank must call it."""
        from shardlib.jit import relayout

        (resolved,) = resolve_many([("x", self.shape, spec, sizes)], self._mesh, what="redistribute")
        return relayout(self, resolved)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """As `Tensor.backward`; raises `ShardingError` for results of jitted functions, which have no history."""
        if not self.requires_grad:
            raise ShardingError(
                f"{typeof(self)} has no history to go back through",
                rule="a jitted function returns values; gradients are taken inside it",
                remedy="jit sl.value_and_grad(loss) (or sl.grad), and use the gradients that it returns",
            )
        super().backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def __float__(self) -> float:
        return float(self.full_tensor())

    def __int__(self) -> int:
        return int(self.full_tensor())

    def __bool__(self) -> bool:
        return bool(self.full_tensor())

    def item(self) -> Any:
        """The value of a tensor of one element."""
        return self.full_tensor().item()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override] # torch's own takes tensor_contents
        return f"ShardedTensor({typeof(self)} on {_axes_of(self._mesh)})"

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        from shardlib.eager import dispatch

        return dispatch(op, args, dict(kwargs or {}))


def _axes_of(mesh: Mesh) -> str:
    return f"Mesh({', '.join(f'{name}={n}' for name, n in mesh.axes.items())})"


def shard(x: torch.Tensor, spec: str | P | Spec, **sizes: int) -> torch.Tensor:
    """Say where `x` lives: a constraint inside a traced function (also on its gradient), a placement outside.

    `spec` has one entry per dim: logical names (mapped by the mesh's rules), `name@axis`, or factors in parentheses,
    whose sizes are given like einops' lengths. Raises `ShardingError` outside any mesh and where spec, shape and mesh
    do not fit.

    Example:
        >>> from shardlib.mesh import Mesh
        >>> with Mesh(data=2, tensor=4, rules={"heads": "tensor"}):
        ...     w = shard(torch.zeros(3 * 8 * 16, 128), "(three heads hd) embed", three=3, heads=8)
        >>> typeof(w)
        'f32[(3 8@tensor 16), 128]'
    """
    if is_single_device():
        return x
    if is_tracing() and current_body() is not None:
        raise ShardingError(
            f"shard(x, {str(spec)!r}) on shape {list(x.shape)} is inside a shard_map body",
            rule="a body is one device's program: its tensors are local, and nothing about them is inferred",
            remedy="annotate the arguments and results of the shard_map, by in_specs and out_specs",
        )
    mesh = current_mesh()
    if mesh is None:
        raise ShardingError(
            f"shard(x, {str(spec)!r}) on shape {list(x.shape)} is outside any mesh",
            rule="an annotation names axes of the current mesh",
            remedy="put it inside `with Mesh(data=2, tensor=4):`",
        )
    (resolved,) = resolve_many([("x", x.shape, spec, sizes)], mesh)
    if is_tracing():
        return constrain(x, str(resolved.spec))
    if isinstance(x, ShardedTensor):
        return x.redistribute(resolved.spec)
    return place(x, resolved, mesh)


def place(x: torch.Tensor, resolved: Resolved, mesh: Mesh) -> ShardedTensor:
    """Cut a plain tensor that every process has whole."""
    if mesh.kind == "abstract":
        raise ShardingError(
            f"a tensor of shape {list(x.shape)} cannot be placed on {mesh}",
            rule="an abstract mesh has no devices",
            remedy="plan on it (step.plan(...)), or use Mesh(...)",
        )
    locals_ = cut_up(x.detach(), resolved.layout, mesh)
    return ShardedTensor(locals_, resolved.layout, mesh, resolved.names, x.requires_grad)


def cut_up(x: torch.Tensor, layout: Layout, mesh: Mesh) -> list[torch.Tensor]:
    """The pieces of a whole tensor that this process holds, equal pieces shared."""
    coords = mesh.all_coords() if mesh.kind == "virtual" else [mesh.coords(mesh.rank)]
    if layout.is_replicated:
        return [x] * len(coords)
    made: dict[tuple[int, ...], torch.Tensor] = {}
    out = []
    for c in coords:
        key = tuple(a.coord(c) for a in layout.axes)
        if key not in made:
            made[key] = layout.scatter(x, c).contiguous()
        out.append(made[key])
    return out


_SHORT = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
}  # fmt: skip


def short_dtype(dtype: torch.dtype) -> str:
    """A dtype as types print it: f32, bf16, i64."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def typeof(x: torch.Tensor) -> str:
    """The type of a tensor with its layout.

    Example:
        >>> typeof(torch.zeros(2, 3))
        'f32[2, 3]'
    """
    layout = x.sharding if isinstance(x, ShardedTensor) else Layout.replicated(x.shape)
    body, plus, pending = str(layout).partition("+")
    if not plus:
        return f"{short_dtype(x.dtype)}[{body}]"
    return f"{short_dtype(x.dtype)}[{body.strip()}] +{pending}"


def to_dtensor(x: ShardedTensor) -> DTensor:
    """The same tensor as a DTensor on the mesh's DeviceMesh; nothing is copied.

    Raises `ShardingError` on virtual devices, and for layouts that DTensor's placements cannot say (an axis on a factor
    in the middle of a dim, parts of axes): redistribute first.
    """
    placements: list[Any] = []
    faults = []
    for name in x.mesh.axis_names:
        placement: Any = Replicate()
        for d, dim in enumerate(x.sharding.dims):
            for f in dim:
                for a in f.axes:
                    if a.name == name:
                        if len(dim) > 1 or not a.whole:
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
        x.to_local(), x.mesh.device_mesh, placements, run_check=False, shape=x.shape, stride=_contiguous(x.shape)
    )


def from_dtensor(x: DTensor, mesh: Mesh | None = None) -> ShardedTensor:
    """A DTensor as a ShardedTensor on `mesh` (by default its own DeviceMesh); nothing is copied."""
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
    return ShardedTensor([x.to_local()], layout, mesh)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))
