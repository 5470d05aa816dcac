"""Attention's autograd functions and their vmap rules: vmap's dim is flattened into the batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shardlib.core.errors import ShardingError

_Q, _MASK, _BIAS, _ALIBI, _KEY, _REST = 0, 3, 4, 5, 6, 7  # positions of the arguments of `attention`
_GRADS = 2  # arguments of `attention_backward` before these; it also takes o and lse before the mask


class Attention(torch.autograd.Function):
    """`shardlib::attention`, differentiable in q, k, v and bias, through o and lse."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        return torch.ops.shardlib.attention(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.rest = inputs[_REST:]
        ctx.set_materialize_grads(False)  # else autograd allocates zeros for lse
        ctx.save_for_backward(*inputs[:_MASK], *output, *inputs[_MASK:_REST])

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.needs_input_grad[_ALIBI]:
            raise ShardingError(
                "attention was asked for the gradient of its ALiBi slopes",
                rule="attention is differentiable in q, k, v and bias",
                remedy="pass -slope * |qpos - kpos| as a bias where slopes are learned, or detach them",
            )
        tensors = ctx.saved_tensors
        o = tensors[_MASK]
        if grad_o is None:
            grad_o = torch.zeros_like(o)
        need_bias = bool(ctx.needs_input_grad[_BIAS])
        dq, dk, dv, *dbias = AttentionBackward.apply(grad_o, grad_lse, *tensors, *ctx.rest, need_bias)  # type: ignore[no-untyped-call]
        return dq, dk, dv, None, dbias[0] if dbias else None, None, None, *(None,) * len(ctx.rest)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        n = info.batch_size
        folded = _fold(n, in_dims[:_MASK], inputs[:_MASK])
        tensors = _fold_others(n, in_dims[_MASK:_REST], inputs[_MASK:_REST], folded[_Q].shape[0])
        outputs = Attention.apply(*folded, *tensors, *inputs[_REST:])  # type: ignore[no-untyped-call]
        return tuple(x.unflatten(0, (n, -1)) for x in outputs), (0, 0)


class AttentionBackward(torch.autograd.Function):
    """The backward as an autograd function: vmap can batch it, and a second derivative raises an error.

    Returns dq, dk, dv, and dbias if the last argument, `need_bias`, is true.
    """

    @staticmethod
    def forward(*inputs: Any) -> Any:
        grads = torch.ops.shardlib.attention_backward(*inputs)
        return grads if inputs[-1] else grads[:3]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.rest = inputs[_GRADS + _REST + 2 :]
        ctx.save_for_forward(*inputs[_GRADS : _GRADS + _REST + 2])

    @staticmethod
    def jvp(ctx: Any, grad_o: Tensor | None, grad_lse: Tensor | None, *others: Tensor | None) -> Any:
        """Applies the backward to tangents of the cotangents: it is linear in them, and only they have tangents here.

        `attention` runs in plain ops where q, k or v have tangents.
        """
        tensors = ctx.saved_tensors
        grad_o = torch.zeros_like(tensors[_MASK]) if grad_o is None else grad_o
        return AttentionBackward.apply(grad_o, grad_lse, *tensors, *ctx.rest)  # type: ignore[no-untyped-call]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ShardingError(
            "attention was differentiated twice",
            rule="attention has a first derivative only",
            remedy="write softmax(q k^T) v with torch ops where second derivatives are needed",
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        n, first = info.batch_size, _GRADS + _MASK + 2
        grad_lse = None if inputs[1] is None else _fold(n, in_dims[1:2], inputs[1:2])[0]
        grad_o, *folded = _fold(n, (in_dims[0], *in_dims[2:first]), (inputs[0], *inputs[2:first]))
        mask, bias, alibi, key = _fold_others(
            n, in_dims[first : first + 4], inputs[first : first + 4], folded[0].shape[0], whole_bias=inputs[-1]
        )
        rest = inputs[first + 4 :]
        outputs = AttentionBackward.apply(grad_o, grad_lse, *folded, mask, bias, alibi, key, *rest)  # type: ignore[no-untyped-call]
        grads = [x.unflatten(0, (n, -1)) for x in outputs]
        if inputs[-1]:
            dim, whole = in_dims[first + 1], inputs[first + 1]
            shape = whole.shape if dim is None else whole.movedim(dim, 0).shape[1:]
            grads[3] = grads[3].sum_to_size(n, *(1,) * (4 - len(shape)), *shape).reshape(n, *shape)
        return tuple(grads), (0,) * len(grads)


def _fold(n: int, dims: Iterable[int | None], tensors: Iterable[Tensor]) -> list[Tensor]:
    """Moves vmap's dim, of size n, to the front of every tensor and flattens it into the first dim."""
    fronted = (x.expand(n, *x.shape) if d is None else x.movedim(d, 0) for d, x in zip(dims, tensors, strict=True))
    return [x.flatten(0, 1) for x in fronted]


def _fold_others(
    n: int, dims: tuple[int | None, ...], tensors: tuple[Any, ...], batch: int, *, whole_bias: bool = False
) -> tuple[Tensor | None, ...]:
    """Folds mask and bias, and checks alibi and key; `whole_bias` expands the bias, for a gradient per example."""
    mask, bias, alibi, key = tensors
    if wrong := [name for name, d in zip(("alibi", "key"), dims[2:], strict=True) if d is not None]:
        raise ShardingError(
            f"vmap over attention's {' and '.join(wrong)}",
            rule="ALiBi slopes and the dropout key are the same for the whole batch",
            remedy="leave them out of vmap's in_dims (None), or call attention once for each",
        )
    return (
        _fold_mask(n, dims[0], mask, batch, whole=False),
        _fold_mask(n, dims[1], bias, batch, whole=whole_bias),
        alibi,
        key,
    )


def _fold_mask(n: int, dim: int | None, mask: Tensor | None, batch: int, *, whole: bool) -> Tensor | None:
    if mask is None:
        return None
    if dim is None:
        if not whole and (mask.dim() < 4 or mask.shape[0] == 1):
            return mask
        mask = mask.expand(n, *mask.shape)
    else:
        mask = mask.movedim(dim, 0)
    mask = mask.reshape(n, *(1,) * (5 - mask.dim()), *mask.shape[1:])
    return mask.expand(n, batch // n, *mask.shape[2:]).flatten(0, 1)
