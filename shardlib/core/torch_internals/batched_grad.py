"""Runs backward functions for batches of cotangents: programs have fixed shapes, so they run once per cotangent."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.core.torch_internals.torch_private import (
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


def loop_over_batches(fn: Callable[..., Any], *, examples: bool = True) -> Callable[..., Any]:
    """Decorates a `backward` or `jvp` of an `autograd.Function` so that autograd may call it with batched tensors.

    With `examples=False`, the function handles examples of a `torch.func.vmap` itself.
    """

    @functools.wraps(fn)
    def each(ctx: Any, *args: Any) -> Any:
        for batch in _batches(args, examples):
            rows = [batch.rows(x) if isinstance(x, Tensor) else None for x in args]
            if count := max((len(x) for x in rows if x is not None), default=0):
                break
        else:
            if not examples or transform_level() is None or any(isinstance(x, Tensor) and is_wrapped(x) for x in args):
                return fn(ctx, *args)
            with without_transforms():  # a vmap whose examples are all unbatched
                return fn(ctx, *args)
        columns = [[*row] if row else [x] * count for x, row in zip(args, rows, strict=True)]
        results = [each(ctx, *row) for row in zip(*columns, strict=True)]
        if not isinstance(results[0], tuple):
            return batch.stack(results)
        return tuple(batch.stack(column) for column in zip(*results, strict=True))

    return each


def batch_all_outputs(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Makes every output of an `autograd.Function` with `generate_vmap_rule` batched if any input is.

    If only some outputs are batched, torch's rule counts the gradients of the others once for each example.
    """
    batched = [x for x in inputs if is_batched(x)]
    if not batched:
        return tuple(outputs)
    example = torch.stack([x.new_zeros((), dtype=torch.bool) for x in batched]).any()
    return tuple(torch.where(example, x, x) for x in outputs)


class _Batch:
    """A batch of cotangents that `is_grads_batched` passes, at one depth of nested batches."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def rows(self, x: Tensor) -> Sequence[Tensor]:
        """Returns the tensors of a batched tensor; () if `x` is not in this batch."""
        unbatched: Tensor = out_of_batch(x, self.depth, 0, 0)
        return unbatched.unbind()

    def stack(self, rows: Sequence[Any]) -> Any:
        """Returns the batched tensor of one result for each row."""
        return None if rows[0] is None else self._batch(torch.stack([*rows]))

    def _batch(self, x: Tensor) -> Any:
        return in_batch(x, 0, self.depth)


class _Examples(_Batch):
    """The examples of a `torch.func.vmap` at one level."""

    def rows(self, x: Tensor) -> Sequence[Tensor]:
        if not is_batched(x) or level_of(x) != self.depth:
            return ()
        examples: Tensor = unwrapped(x)
        return examples.unbind(batch_dim_of(x))

    def _batch(self, x: Tensor) -> Any:
        return in_vmap(x, 0, self.depth)


def _batches(args: Sequence[Any], examples: bool) -> Iterator[_Batch]:
    """Yields the batches that tensors may belong to, innermost first."""
    transformed = examples and transform_level()
    levels = {level_of(x) for x in args if isinstance(x, Tensor) and is_batched(x)} if transformed else ()
    for level in sorted(levels, reverse=True):
        yield _Examples(level)
    for depth in range(depth_of_batches(), 0, -1):
        yield _Batch(depth)
