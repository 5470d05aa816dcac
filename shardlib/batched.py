"""Several cotangents at once (`is_grads_batched=True`): a program is for its shapes, so it runs for each in turn."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardlib.internals import depth_of_batches, in_batch, out_of_batch


def one_by_one(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A `backward` or `jvp` of an `autograd.Function` that autograd may call with tensors of a batch.

    Example:
        >>> class Double(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         return 2 * x
        ...
        ...     @staticmethod
        ...     @one_by_one
        ...     def backward(ctx, grad):
        ...         return 2 * grad.detach()  # which torch's batches do not know
        >>> x = torch.ones(2, requires_grad=True)
        >>> torch.autograd.grad(Double.apply(x), x, torch.eye(2), is_grads_batched=True)[0]
        tensor([[2., 0.],
                [0., 2.]])
    """

    @functools.wraps(fn)
    def each(ctx: Any, *given: Any) -> Any:
        for depth in range(depth_of_batches(), 0, -1):
            # What is in no batch of this depth becomes one of no rows.
            out = [out_of_batch(x, depth, 0, 0) if isinstance(x, Tensor) else None for x in given]
            count = max((len(x) for x in out if x is not None), default=0)
            if count:
                break
        else:
            return fn(ctx, *given)
        columns = [
            [x] * count if rows is None or not len(rows) else [*rows] for x, rows in zip(given, out, strict=True)
        ]
        results = [each(ctx, *row) for row in zip(*columns, strict=True)]
        if not isinstance(results[0], tuple):
            return _batch(results, depth)
        return tuple(_batch(column, depth) for column in zip(*results, strict=True))

    return each


def _batch(rows: list[Any] | tuple[Any, ...], depth: int) -> Any:
    return None if rows[0] is None else in_batch(torch.stack([*rows]), 0, depth)
