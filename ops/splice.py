"""Concatenates ranges of tensors and fills along a dim: the result of any sequence of slices, pads, rolls and cats."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardlib.ops import define_op


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
    """Concatenates ranges: the i-th is `starts[i]:stops[i]` of tensor `sources[i]`, or of `fills[i]` if that is -1.

    `negated` ranges change their sign, `mirrored` ones are flipped; empty flags mean none.
    """
    parts, first = [], tensors[0]
    signs, flips = (flags or [False] * len(fills) for flags in (negated, mirrored))
    for source, start, stop, fill, minus, flipped in zip(sources, starts, stops, fills, signs, flips, strict=True):
        if source < 0:
            part = first.new_full([*first.shape[:dim], stop - start, *first.shape[dim + 1 :]], fill)
        else:
            part = tensors[source].narrow(dim, start, stop - start)
            part = part.flip(dim) if flipped else part
        parts.append(-part if minus else part)
    return torch.cat(parts, dim)


SPLICE = define_op(
    "splice(Tensor[] tensors, int dim, int[] sources, int[] starts, int[] stops, Scalar[] fills, "
    "bool[] negated=[], bool[] mirrored=[]) -> Tensor",
    splice,
)
