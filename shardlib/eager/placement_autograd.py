"""Where a tensor lives, changed from outside `jit`: placed, laid out otherwise, or made whole. All have gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from shardlib.core.batched_grad import one_by_one
from shardlib.core.errors import ShardingError
from shardlib.core.forward_mode import is_forward_mode
from shardlib.core.recorders import refuse_recorded
from shardlib.core.torch_private import is_excluded
from shardlib.eager.redistribute import relayout
from shardlib.sharding.layout import Layout
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.placement import Fixed
from shardlib.sharding.spec import P, resolve_many
from shardlib.tensor.hooks import above
from shardlib.tensor.local_shards import owned
from shardlib.tensor.sharded_tensor import ShardedTensor, wrap
from shardlib.tensor.tensor_meta import Form


def redistributed(x: ShardedTensor, resolved: Fixed) -> ShardedTensor:
    """`x` laid out as `resolved` says; its gradient is laid out as `x` is."""
    refuse_recorded("x.redistribute(spec)", x)
    if is_followed(x):
        out: ShardedTensor = _Redistribute.apply(x, resolved)  # type: ignore[no-untyped-call]
        return out
    return relayout(x, resolved.layout, resolved.names)


def whole(x: ShardedTensor) -> torch.Tensor:
    """`x` as a plain tensor; its gradient, which every process has whole, is cut up as `x` is."""
    refuse_recorded("x.full_tensor()", x)
    if is_followed(x):
        out: torch.Tensor = _Gather.apply(x)  # type: ignore[no-untyped-call]
        return out
    return _gathered(x)


def placed(x: torch.Tensor, resolved: Fixed, mesh: Mesh, donate: bool = False, *, leaf: bool = True) -> ShardedTensor:
    """A plain tensor, placed. A leaf makes a leaf: a parameter is placed once; without `leaf` it is what the result
    comes from. What was computed keeps its history."""
    if is_followed(x) and not (leaf and x.is_leaf and tangent_of(x) is None):
        out: ShardedTensor = _Place.apply(x, resolved, mesh)  # type: ignore[no-untyped-call]
        return out
    return place(x, resolved, mesh, donate)


def place(x: torch.Tensor, resolved: Fixed, mesh: Mesh, donate: bool = False) -> ShardedTensor:
    """Cut a plain tensor that every process has whole; `donate` gives its memory up, for pieces to be made of it."""
    if mesh.kind == "abstract" and not x.is_meta:
        raise ShardingError(
            f"a tensor of shape {list(x.shape)} cannot be placed on {mesh}",
            rule="an abstract mesh has no devices",
            remedy="place a meta tensor on it, plan on it (step.plan(...)), or use Mesh(...)",
        )
    pieces = owned(x.detach(), resolved.layout, mesh, donate)
    out = wrap(Form.of(resolved.layout, mesh, x.dtype, x.device, resolved.names), pieces)
    return out.requires_grad_() if x.requires_grad else out  # type: ignore[return-value]


def laid_as(x: torch.Tensor, like: ShardedTensor) -> ShardedTensor:
    """A plain tensor, which every process has whole, laid out as `like` is; without history."""
    return place(x.detach(), home(like._form), like.mesh)


def _gathered(x: ShardedTensor) -> torch.Tensor:
    """The values in memory that nobody else shows: who is given it may write to it. Strides are those of a clone."""
    values = _in_order(x)
    if values.stride() == x._form.strides:
        return values
    shown = torch.empty_strided(x.shape, x._form.strides, dtype=x.dtype, device="meta")
    return torch.empty_like(shown, device=values.device).copy_(values)


def _in_order(x: ShardedTensor) -> torch.Tensor:
    """The values in memory of their own, contiguous."""
    if x.mesh.kind == "virtual":
        return x.sharding.gather([*zip(x.mesh.own_coords(), x._locals, strict=True)])
    (resolved,) = resolve_many([("x", x.shape, P(), {})], x.mesh, what="full_tensor")
    (out,) = relayout(x, resolved.layout, resolved.names)._locals
    return out.clone(memory_format=torch.contiguous_format) if out is x._locals[0] else out


def is_followed(x: torch.Tensor) -> bool:
    """Whether autograd wants to know what becomes of a tensor, backward or forward."""
    return bool(x.requires_grad and torch.is_grad_enabled()) or tangent_of(x) is not None


def tangent_of(x: torch.Tensor) -> torch.Tensor | None:
    """What forward-mode AD follows beside a tensor, where it does."""
    if not is_forward_mode() or is_excluded(torch.DispatchKey.AutogradFunctionality):
        return None
    found: torch.Tensor | None = forward_ad.unpack_dual(x).tangent  # type: ignore[no-untyped-call] # torch has no types
    return found


def home(form: Form) -> Fixed:
    """Returns where the gradient of a tensor of this form lives: as it does, with complete values."""
    return Fixed.at(Layout(form.layout.dims), form.names)


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: ShardedTensor, resolved: Fixed) -> ShardedTensor:
        ctx.home, ctx.mesh, ctx.resolved = home(x._form), x.mesh, resolved
        return relayout(x, resolved.layout, resolved.names)

    @staticmethod
    @one_by_one
    def backward(ctx: Any, grad: Any) -> Any:
        if not isinstance(grad, ShardedTensor):  # zeros that autograd makes for what has no elements
            return placed(grad, ctx.home, ctx.mesh, leaf=False), None
        return redistributed(grad, ctx.home), None

    @staticmethod
    @one_by_one
    def jvp(ctx: Any, tangent: Any, _: None) -> Any:
        if not isinstance(tangent, ShardedTensor):
            return placed(tangent, ctx.resolved, ctx.mesh, leaf=False)
        return redistributed(tangent, ctx.resolved)


class _Place(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, resolved: Fixed, mesh: Mesh) -> ShardedTensor:
        ctx.resolved, ctx.mesh = resolved, mesh
        return place(x.detach(), resolved, mesh)

    @staticmethod
    @one_by_one
    def backward(ctx: Any, grad: Any) -> Any:
        return (whole(grad) if isinstance(grad, ShardedTensor) else grad), None, None  # zeros are plain

    @staticmethod
    @one_by_one
    def jvp(ctx: Any, tangent: Any, *_: None) -> Any:
        return placed(tangent, ctx.resolved, ctx.mesh, leaf=False)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: ShardedTensor) -> torch.Tensor:
        ctx.home, ctx.mesh = home(x._form), x.mesh
        return _gathered(x)

    @staticmethod
    @one_by_one
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad if isinstance(grad, ShardedTensor) else placed(grad, ctx.home, ctx.mesh, leaf=False)

    @staticmethod
    @one_by_one
    def jvp(ctx: Any, tangent: Any) -> Any:
        return whole(tangent) if isinstance(tangent, ShardedTensor) else tangent


above.whole, above.redistributed = whole, redistributed
