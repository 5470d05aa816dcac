"""Differentiable conversions from a tensor to its plain shards, and from plain shards to a tensor.

A rank has one shard. A process of virtual devices has all shards, and may have several copies of one. Autograd treats a
tensor made of copies as their mean, and each copy of a tensor's shard as a use of the shard. So within a process the
gradients of copies add up to the gradient of the shard, and a rank gets the gradient that DTensor gives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.batched_grad import loop_over_batches
from shardlib.eager.placement_autograd import gather_full, gradient_placement, is_tracked, place_tracked, redistribute
from shardlib.sharding.layout import Layout
from shardlib.sharding.mesh.axis import first_replicas
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.tensor.dtensor import layout_of_placements
from shardlib.tensor.hooks import tensor_hooks
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof, wrap
from shardlib.tensor.tensor_meta import Form


def local_shards(x: ShardedTensor, grad_placements: Sequence[Any] | None = None) -> tuple[Tensor, ...]:
    """Returns this process's shards of `x`, with its history; their gradients have these DTensor placements.

    Raises `ShardingError` for the addends of a partial sum that requires gradients, and for other local shapes.
    """
    grad_layout = (
        x.sharding if grad_placements is None else layout_of_placements(tuple(x.shape), grad_placements, x.mesh)
    )
    wrong = [
        f"rank {rank} has a shard of shape {list(shape)}, and a gradient of {list(grad_shape)}"
        for rank, coords in enumerate(x.mesh.all_coords() if grad_placements is not None else ())
        if (shape := x.sharding.local_shape(coords)) != (grad_shape := grad_layout.local_shape(coords))
    ]
    if wrong:
        raise ShardingError(
            f"to_local(grad_placements={grad_placements}) of {typeof(x)}",
            wrong,
            rule="a shard and its gradient have one shape",
            remedy="Shard the dims that the tensor is sharded in; other axes are Replicate or Partial",
        )
    if not is_tracked(x):
        return x._locals
    if x.sharding.pending:
        raise ShardingError(
            f"the addends of {typeof(x)} are read, and a gradient is recorded",
            rule="the gradient of a partial sum belongs to the sum, and not to its addends",
            remedy="x.redistribute(spec) first, or x.detach()",
        )
    out: tuple[Tensor, ...] = _Split.apply(x, x._locals, grad_layout)  # type: ignore[no-untyped-call]
    return out


def from_shards(shards: Sequence[Tensor], form: Form) -> ShardedTensor:
    """Returns the tensor of this form that consists of these shards, with their histories."""
    if any(is_tracked(shard) for shard in shards):
        out: ShardedTensor = _Join.apply(form, *shards)  # type: ignore[no-untyped-call]
        return out
    return wrap(form, tuple(shard.detach() for shard in shards))


def _copies(layout: Layout, mesh: Mesh) -> list[int]:
    """Returns, for each device of this process, the first one with the same shard."""
    return first_replicas(mesh.own_coords(), (*layout.axes, *layout.pending_axes))


def _sum_copies(parts: Sequence[Tensor | None], layout: Layout, mesh: Mesh) -> list[Tensor] | None:
    """Returns the sums over copies of a shard, zeros where a shard has no part; None if there is no part at all."""
    first = _copies(layout, mesh)
    sums: dict[int, Tensor] = {}
    for i, part in zip(first, parts, strict=True):
        if part is not None:
            sums[i] = sums[i] + part if i in sums else part.clone(memory_format=torch.contiguous_format)
    if not sums:
        return None
    like = next(iter(sums.values()))
    for i, coords in enumerate(mesh.own_coords()):
        if first[i] == i and i not in sums:
            sums[i] = like.new_zeros(layout.local_shape(coords))
    return [sums[i] for i in first]


def _place_gradient(x: Tensor, form: Form) -> ShardedTensor:
    """Returns a gradient or a tangent in the layout of this form; zeros from autograd are plain."""
    placement = gradient_placement(form)
    return (
        redistribute(x, placement)
        if isinstance(x, ShardedTensor)
        else place_tracked(x, placement, form.mesh, leaf=False)
    )


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: ShardedTensor, shards: tuple[Tensor, ...], grad_layout: Layout) -> tuple[Tensor, ...]:
        ctx.form, ctx.grad_layout = x._form, grad_layout
        ctx.set_materialize_grads(False)
        return tuple(shard.detach() for shard in shards)

    @staticmethod
    @loop_over_batches
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        form, mesh, layout = ctx.form, ctx.form.mesh, ctx.grad_layout
        parts = [gather_full(grad) if isinstance(grad, ShardedTensor) else grad for grad in grads]
        if (total := _sum_copies(parts, layout, mesh)) is None:
            return None, None, None
        grad_form = Form.intern(layout, mesh, total[0].dtype, total[0].device, form.names)
        return _place_gradient(from_shards(total, grad_form), form), None, None

    @staticmethod
    @loop_over_batches
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        return tuple(shard.clone() for shard in local_shards(_place_gradient(tangent, ctx.form)))


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: Form, *shards: Tensor) -> ShardedTensor:
        ctx.form = form
        return wrap(form, tuple(shard.detach() for shard in shards))

    @staticmethod
    @loop_over_batches
    def backward(ctx: Any, grad: Tensor) -> Any:
        tracked, first = ctx.needs_input_grad[1:], _copies(ctx.form.layout, ctx.form.mesh)
        uses = [i for i, is_used in zip(first, tracked, strict=True) if is_used]
        shards = local_shards(_place_gradient(grad, ctx.form))
        grads = [
            _share(shard, uses.count(i)) if is_used else None
            for i, shard, is_used in zip(first, shards, tracked, strict=True)
        ]
        return (None, *grads)

    @staticmethod
    @loop_over_batches
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Any:
        first, form = _copies(ctx.form.layout, ctx.form.mesh), ctx.form
        moving = [i for i, tangent in zip(first, tangents, strict=True) if tangent is not None]
        parts = [
            None if tangent is None else _share(tangent, moving.count(i))
            for i, tangent in zip(first, tangents, strict=True)
        ]
        total = _sum_copies(parts, form.layout, form.mesh)
        assert total is not None, "a jvp has a tangent"
        return from_shards(total, form)


def _share(shard: Tensor, copies: int) -> Tensor:
    """Returns one copy's share of a gradient, in memory of its own."""
    return shard.clone(memory_format=torch.contiguous_format) if copies == 1 else shard / copies


tensor_hooks.local_shards, tensor_hooks.from_shards = local_shards, from_shards
