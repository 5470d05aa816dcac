"""Ranges of tensors put side by side along a dim, with fillings between them: what slices, pads, rolls and
concatenations come to, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

torch.library.define(
    "shardlib::splice",
    "(Tensor[] tensors, int dim, int[] sources, int[] starts, int[] stops, Scalar[] fills) -> Tensor",
)


def splice(
    tensors: Sequence[Tensor],
    dim: int,
    sources: Sequence[int],
    starts: Sequence[int],
    stops: Sequence[int],
    fills: Sequence[complex],
) -> Tensor:
    """Ranges along `dim`: the i-th is `starts[i]:stops[i]` of tensor `sources[i]`, or of `fills[i]` where that is -1.

    Example:
        >>> x = torch.arange(4)
        >>> splice([x], 0, [-1, 0], [0, 0], [1, 3], [7, 0])
        tensor([7, 0, 1, 2])
    """
    parts, first = [], tensors[0]
    for source, start, stop, fill in zip(sources, starts, stops, fills, strict=True):
        if source < 0:
            parts.append(first.new_full([*first.shape[:dim], stop - start, *first.shape[dim + 1 :]], fill))
        else:
            parts.append(tensors[source].narrow(dim, start, stop - start))
    return torch.cat(parts, dim)


torch.library.impl("shardlib::splice", "CompositeExplicitAutograd", splice)

SPLICE = torch.ops.shardlib.splice.default
