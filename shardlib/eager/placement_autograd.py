"""Differentiable changes of placement outside `jit`: placing, redistributing and gathering a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from shardlib.core.errors import ShardingError
from shardlib.core.recorders import refuse_recorded
from shardlib.core.torch_internals.batched_grad import loop_over_batches
from shardlib.core.torch_internals.forward_mode import is_forward_mode
from shardlib.core.torch_internals.torch_private import is_excluded
from shardlib.eager.redistribute import relayout
from shardlib.eager.stage_moves import move_to_stage
from shardlib.sharding.layout import Layout
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.placement import FixedLayout
from shardlib.sharding.spec import P, resolve_many
from shardlib.tensor.hooks import tensor_hooks
from shardlib.tensor.local_shards import split_into_owned_shards
from shardlib.tensor.sharded_tensor import ShardedTensor, wrap
from shardlib.tensor.tensor_meta import Form


def redistribute(x: ShardedTensor, resolved: FixedLayout) -> ShardedTensor:
    """Returns `x` in another layout; its gradient has the layout of `x`."""
    refuse_recorded("x.redistribute(spec)", x)
    if is_tracked(x):
        out: ShardedTensor = _Redistribute.apply(x, resolved)  # type: ignore[no-untyped-call]
        return out
    return relayout(x, resolved.layout, resolved.names)


def move(x: ShardedTensor, mesh: Mesh) -> ShardedTensor:
    """Returns `x` on another part of its mesh, one stage or all; its gradient is on the mesh of `x`."""
    if x.mesh == mesh:
        return x
    if is_tracked(x):
        out: ShardedTensor = _Move.apply(x, mesh)  # type: ignore[no-untyped-call]
        return out
    return move_to_stage(x, mesh)


def gather_full(x: ShardedTensor) -> torch.Tensor:
    """Returns `x` as a plain tensor; its gradient, whole in every process, is sharded like `x`."""
    refuse_recorded("x.full_tensor()", x)
    if is_tracked(x):
        out: torch.Tensor = _Gather.apply(x)  # type: ignore[no-untyped-call]
        return out
    return _gather(x)


def place_tracked(
    x: torch.Tensor, resolved: FixedLayout, mesh: Mesh, donate: bool = False, *, leaf: bool = True
) -> ShardedTensor:
    """Places a plain tensor. A computed tensor keeps its history.

    With `leaf`, a leaf of autograd becomes a new leaf; without, the result's gradient flows back to it.
    """
    if is_tracked(x) and not (leaf and x.is_leaf and get_tangent(x) is None):
        out: ShardedTensor = _Place.apply(x, resolved, mesh)  # type: ignore[no-untyped-call]
        return out
    return place(x, resolved, mesh, donate)


def place(x: torch.Tensor, resolved: FixedLayout, mesh: Mesh, donate: bool = False) -> ShardedTensor:
    """Shards a plain tensor that every process has whole; `donate` lets shards use its memory."""
    if mesh.kind == "abstract" and not x.is_meta:
        raise ShardingError(
            f"a tensor of shape {list(x.shape)} cannot be placed on {mesh}",
            rule="an abstract mesh has no devices",
            remedy="place a meta tensor on it, plan on it (step.plan(...)), or use Mesh(...)",
        )
    shards = split_into_owned_shards(x.detach(), resolved.layout, mesh, donate)
    out = wrap(Form.intern(resolved.layout, mesh, x.dtype, x.device, resolved.names), shards)
    return out.requires_grad_() if x.requires_grad else out  # type: ignore[return-value]


def place_like(x: torch.Tensor, like: ShardedTensor) -> ShardedTensor:
    """Places a plain tensor, whole in every process, in the layout of `like`; without history."""
    return place(x.detach(), gradient_placement(like._form), like.mesh)


def _gather(x: ShardedTensor) -> torch.Tensor:
    """Returns the values in new memory, with the strides of a clone."""
    values = _gather_contiguous(x)
    if values.stride() == x._form.strides:
        return values
    shown = torch.empty_strided(x.shape, x._form.strides, dtype=x.dtype, device="meta")
    return torch.empty_like(shown, device=values.device).copy_(values)


def _gather_contiguous(x: ShardedTensor) -> torch.Tensor:
    if x.mesh.kind == "virtual":
        return x.sharding.gather([*zip(x.mesh.own_coords(), x._locals, strict=True)])
    (resolved,) = resolve_many([("x", x.shape, P(), {})], x.mesh, call="full_tensor")
    whole = relayout(x, resolved.layout, resolved.names)
    (out,) = (move_to_stage(whole, x.mesh.whole) if x.mesh.stage is not None else whole)._locals
    return out.clone(memory_format=torch.contiguous_format) if out is x._locals[0] else out


def is_tracked(x: torch.Tensor) -> bool:
    """True if autograd records ops on this tensor, backward or forward."""
    return bool(x.requires_grad and torch.is_grad_enabled()) or get_tangent(x) is not None


def get_tangent(x: torch.Tensor) -> torch.Tensor | None:
    if not is_forward_mode() or is_excluded(torch.DispatchKey.AutogradFunctionality):
        return None
    tangent: torch.Tensor | None = forward_ad.unpack_dual(x).tangent  # type: ignore[no-untyped-call] # torch has no types
    return tangent


def gradient_placement(form: Form) -> FixedLayout:
    """Returns the placement of a gradient: the tensor's, with complete values."""
    return FixedLayout.at(Layout(form.layout.dims), form.names)


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: ShardedTensor, resolved: FixedLayout) -> ShardedTensor:
        ctx.gradient_placement, ctx.mesh, ctx.resolved = gradient_placement(x._form), x.mesh, resolved
        return relayout(x, resolved.layout, resolved.names)

    @staticmethod
    @loop_over_batches
    def backward(ctx: Any, grad: Any) -> Any:
        if not isinstance(grad, ShardedTensor):  # zeros of autograd for a tensor without elements
            return place_tracked(grad, ctx.gradient_placement, ctx.mesh, leaf=False), None
        return redistribute(grad, ctx.gradient_placement), None

    @staticmethod
    @loop_over_batches
    def jvp(ctx: Any, tangent: Any, _: None) -> Any:
        if not isinstance(tangent, ShardedTensor):
            return place_tracked(tangent, ctx.resolved, ctx.mesh, leaf=False)
        return redistribute(tangent, ctx.resolved)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: ShardedTensor, mesh: Mesh) -> ShardedTensor:
        ctx.form, ctx.mesh = x._form, mesh
        return move_to_stage(x, mesh)

    @staticmethod
    @loop_over_batches
    def backward(ctx: Any, grad: Any) -> Any:
        if not isinstance(grad, ShardedTensor):  # zeros of autograd for a tensor without elements
            return place_tracked(grad, gradient_placement(ctx.form), ctx.form.mesh, leaf=False), None
        return move(grad, ctx.form.mesh), None

    @staticmethod
    @loop_over_batches
    def jvp(ctx: Any, tangent: Any, _: None) -> Any:
        if not isinstance(tangent, ShardedTensor):
            return place_tracked(tangent, gradient_placement(ctx.form), ctx.mesh, leaf=False)
        return move(tangent, ctx.mesh)


class _Place(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, resolved: FixedLayout, mesh: Mesh) -> ShardedTensor:
        ctx.resolved, ctx.mesh = resolved, mesh
        return place(x.detach(), resolved, mesh)

    @staticmethod
    @loop_over_batches
    def backward(ctx: Any, grad: Any) -> Any:
        return (gather_full(grad) if isinstance(grad, ShardedTensor) else grad), None, None  # zeros are plain

    @staticmethod
    @loop_over_batches
    def jvp(ctx: Any, tangent: Any, *_: None) -> Any:
        return place_tracked(tangent, ctx.resolved, ctx.mesh, leaf=False)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: ShardedTensor) -> torch.Tensor:
        ctx.gradient_placement, ctx.mesh = gradient_placement(x._form), x.mesh
        return _gather(x)

    @staticmethod
    @loop_over_batches
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return (
            grad
            if isinstance(grad, ShardedTensor)
            else place_tracked(grad, ctx.gradient_placement, ctx.mesh, leaf=False)
        )

    @staticmethod
    @loop_over_batches
    def jvp(ctx: Any, tangent: Any) -> Any:
        return gather_full(tangent) if isinstance(tangent, ShardedTensor) else tangent


tensor_hooks.gather_full, tensor_hooks.redistribute = gather_full, redistribute
