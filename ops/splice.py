"""Ranges of tensors put side by side along a dim, with fillings between them: what slices, pads, rolls and
concatenations come to, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

torch.library.define(
    "shardlib::splice",
    "(Tensor[] tensors, int dim, int[] sources, int[] starts, int[] stops, Scalar[] fills, "
    "bool[] negated=[]) -> Tensor",
)


def splice(
    tensors: Sequence[Tensor],
    dim: int,
    sources: Sequence[int],
    starts: Sequence[int],
    stops: Sequence[int],
    fills: Sequence[complex],
    negated: Sequence[bool] = (),
) -> Tensor:
    """Ranges along `dim`: the i-th is `starts[i]:stops[i]` of tensor `sources[i]`, or of `fills[i]` where that is -1.

    `negated` says which change their sign; where it is empty, none does.

    Example:
        >>> x = torch.arange(4)
        >>> splice([x], 0, [-1, 0], [0, 0], [1, 3], [7, 0])
        tensor([7, 0, 1, 2])
    """
    parts, first = [], tensors[0]
    signs = negated or [False] * len(fills)
    for source, start, stop, fill, minus in zip(sources, starts, stops, fills, signs, strict=True):
        if source < 0:
            part = first.new_full([*first.shape[:dim], stop - start, *first.shape[dim + 1 :]], fill)
        else:
            part = tensors[source].narrow(dim, start, stop - start)
        parts.append(-part if minus else part)
    return torch.cat(parts, dim)


torch.library.impl("shardlib::splice", "CompositeExplicitAutograd", splice)

SPLICE = torch.ops.shardlib.splice.default
