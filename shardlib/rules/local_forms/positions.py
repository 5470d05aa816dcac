"""Positions along a dim: in a device's shard, and in the whole tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# A shard of a dim, from `LocalBuilder.extents`: local size, offset and global size of each sub-factor, major first.
Extents = Sequence[tuple[int, int, int]]


def to_global(index: Tensor, extents: Extents) -> Tensor:
    """Converts positions in the shard to positions in the whole dim; both count the elements in order."""
    if len(extents) == 1:
        return index + extents[0][1]
    out, stride = torch.zeros_like(index), 1
    for size, offset, whole in reversed(extents):
        out = out + (index % max(size, 1) + offset) * stride
        index, stride = index // max(size, 1), stride * whole
    return out


def to_local(index: Tensor, extents: Extents) -> Tensor:
    """Converts positions in the whole dim, which must all lie in the shard, to positions in the shard."""
    if len(extents) == 1:
        return index - extents[0][1]
    strides = [1]
    for *_, whole in reversed(extents[1:]):
        strides.insert(0, strides[0] * whole)
    coordinates = [index // n % whole - first for (_, first, whole), n in zip(extents, strides, strict=True)]
    out = coordinates[0]
    for (size, *_), coordinate in zip(extents[1:], coordinates[1:], strict=True):
        out = out * size + coordinate
    return out
