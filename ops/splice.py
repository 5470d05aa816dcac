"""Ranges of tensors put side by side along a dim, with fillings between them: what slices, pads, rolls and
concatenations come to, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

torch.library.define(
    "shardlib::splice",
    "(Tensor[] tensors, int dim, int[] sources, int[] starts, int[] stops, Scalar[] fills, "
    "bool[] negated=[], bool[] mirrored=[]) -> Tensor",
)


def splice(
    tensors: Sequence[Tensor],
    dim: int,
    sources: Sequence[int],
    starts: Sequence[int],
    stops: Sequence[int],
    fills: Sequence[complex],
    negated: Sequence[bool] = (),
    mirrored: Sequence[bool] = (),
) -> Tensor:
    """Ranges along `dim`: the i-th is `starts[i]:stops[i]` of tensor `sources[i]`, or of `fills[i]` where that is -1.

    `negated` says which change their sign, `mirrored` which are turned round; where they are empty, none is.

    Example:
        >>> x = torch.arange(4)
        >>> splice([x], 0, [-1, 0], [0, 0], [1, 3], [7, 0])
        tensor([7, 0, 1, 2])
    """
    parts, first = [], tensors[0]
    signs, turns = (flags or [False] * len(fills) for flags in (negated, mirrored))
    for source, start, stop, fill, minus, turned in zip(sources, starts, stops, fills, signs, turns, strict=True):
        if source < 0:
            part = first.new_full([*first.shape[:dim], stop - start, *first.shape[dim + 1 :]], fill)
        else:
            part = tensors[source].narrow(dim, start, stop - start)
            part = part.flip(dim) if turned else part
        parts.append(-part if minus else part)
    return torch.cat(parts, dim)


torch.library.impl("shardlib::splice", "CompositeExplicitAutograd", splice)

SPLICE = torch.ops.shardlib.splice.default
