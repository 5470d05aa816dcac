"""Several cotangents at once (`is_grads_batched=True`): a program is for its shapes, so it runs for each in turn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.core.torch_private import (
    batch_dim_of,
    depth_of_batches,
    in_batch,
    in_vmap,
    is_batched,
    is_wrapped,
    level_of,
    out_of_batch,
    transform_level,
    unwrapped,
    without_transforms,
)


def one_by_one(fn: Callable[..., Any], *, examples: bool = True) -> Callable[..., Any]:
    """A `backward` or `jvp` of an `autograd.Function` that autograd may call with tensors of a batch.

    Without `examples`, it knows those of a `torch.func.vmap` itself.

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
        for batch in _batches(given, examples):
            rows = [batch.rows(x) if isinstance(x, Tensor) else None for x in given]
            if count := max((len(x) for x in rows if x is not None), default=0):
                break
        else:
            if not examples or transform_level() is None or any(isinstance(x, Tensor) and is_wrapped(x) for x in given):
                return fn(ctx, *given)
            with without_transforms():  # a vmap whose examples are all taken apart
                return fn(ctx, *given)
        columns = [[x] * count if not found else [*found] for x, found in zip(given, rows, strict=True)]
        results = [each(ctx, *row) for row in zip(*columns, strict=True)]
        if not isinstance(results[0], tuple):
            return batch.of(results)
        return tuple(batch.of(column) for column in zip(*results, strict=True))

    return each


def mapped_alike(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Outputs of an `autograd.Function` with `generate_vmap_rule`, each an example of every vmap that an input is of.

    Of outputs only some of which are mapped, torch's rule counts the gradient of the others once for each example.

    Example:
        >>> class Both(torch.autograd.Function):
        ...     generate_vmap_rule = True
        ...
        ...     @staticmethod
        ...     def forward(x, w):
        ...         return mapped_alike((x * w, 3 * w), (x, w))
        ...
        ...     @staticmethod
        ...     def setup_context(ctx, inputs, output):
        ...         ctx.save_for_backward(*inputs)
        ...
        ...     @staticmethod
        ...     def backward(ctx, a, b):
        ...         x, w = ctx.saved_tensors
        ...         return a * w, a * x + 3 * b
        >>> w = torch.tensor(1.0, requires_grad=True)
        >>> rows = torch.func.vmap(lambda x: Both.apply(x, w)[1])(torch.ones(4))
        >>> torch.autograd.grad(rows.sum(), w)[0]
        tensor(12.)
    """
    batched = [x for x in inputs if is_batched(x)]
    if not batched:
        return tuple(outputs)
    example = torch.stack([x.new_zeros((), dtype=torch.bool) for x in batched]).any()
    return tuple(torch.where(example, x, x) for x in outputs)


class _Batch:
    """Cotangents that `is_grads_batched` gives at once, of one of such batches within each other."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def rows(self, x: Tensor) -> Sequence[Tensor]:
        """Each by itself; none of what is not in this batch."""
        found: Tensor = out_of_batch(x, self.depth, 0, 0)
        return found.unbind()

    def of(self, rows: Sequence[Any]) -> Any:
        """The batch of what was made of each."""
        return None if rows[0] is None else self._joined(torch.stack([*rows]))

    def _joined(self, x: Tensor) -> Any:
        return in_batch(x, 0, self.depth)


class _Examples(_Batch):
    """Those of a `torch.func.vmap` around, of this level."""

    def rows(self, x: Tensor) -> Sequence[Tensor]:
        if not is_batched(x) or level_of(x) != self.depth:
            return ()
        found: Tensor = unwrapped(x)
        return found.unbind(batch_dim_of(x))

    def _joined(self, x: Tensor) -> Any:
        return in_vmap(x, 0, self.depth)


def _batches(given: Sequence[Any], examples: bool) -> Iterator[_Batch]:
    """In which tensors may be, the innermost first."""
    transformed = examples and transform_level()
    levels = {level_of(x) for x in given if isinstance(x, Tensor) and is_batched(x)} if transformed else ()
    for level in sorted(levels, reverse=True):
        yield _Examples(level)
    for depth in range(depth_of_batches(), 0, -1):
        yield _Batch(depth)
