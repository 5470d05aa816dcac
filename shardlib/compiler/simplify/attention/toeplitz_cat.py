"""Computes flips, concatenations and pads of compact values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from shardlib.compiler.simplify.attention.toeplitz import Values, are_equal, is_large
from shardlib.core.aten.schemas import get_argument

aten = torch.ops.aten


def find_flipped(node: Any) -> tuple[Any, set[int]]:
    """Returns the operand of a chain of flips, and the dims that the chain flips."""
    dims = set[int]()
    while node.target is aten.flip.default:
        dims ^= {dim % node.meta["val"].dim() for dim in node.args[1]}
        node = node.args[0]
    return node, dims


def flip(values: Values, dims: set[int]) -> Values | None:
    """Returns flipped values; None if one of two dims that are stored by distance is flipped alone."""
    rank = values.numbers.dim() + values.by_distance
    if not values.by_distance or dims.isdisjoint({rank - 2, rank - 1}):
        return values._replace(numbers=values.numbers.flip(sorted(dims)))
    if not dims >= {rank - 2, rank - 1}:
        return None
    return values._replace(numbers=values.numbers.flip(sorted(dims - {rank - 1})))


class Part(NamedTuple):
    """Values of one operand, with its shape."""

    values: Values | None
    shape: torch.Size


def concatenate(parts: Sequence[Part], dim: int) -> Values | None:
    """Concatenates parts along a dim; None if the result is unknown.

    Along one of the last two dims, parts by distance must have equal numbers at the distances that they share.
    """
    operands = [(values, shape) for values, shape in parts if values is not None]
    if len(operands) < len(parts) or len({values.numbers.dtype for values, _ in operands}) != 1:
        return None
    rank = len(operands[0][1])
    dim %= rank
    if not any(values.by_distance for values, _ in operands):
        return _cat([values.numbers for values, _ in operands], dim, [shape[dim] for _, shape in operands])
    if any(not values.by_distance and values.numbers.shape[-2:].numel() > 1 for values, _ in operands):
        return None
    lines = [values.numbers if values.by_distance else values.numbers[..., 0] for values, _ in operands]
    if dim < rank - 2:
        leading = _cat(lines, dim, [shape[dim] for _, shape in operands])
        return leading and leading._replace(by_distance=True)
    whole: Tensor | None = None
    for line, (_, shape) in zip(lines, operands, strict=True):
        line = line.expand(*line.shape[:-1], shape[-2] + shape[-1] - 1)
        if whole is not None:
            left, right = (whole, line) if dim == rank - 1 else (line, whole)
            lead = torch.broadcast_shapes(left.shape[:-1], right.shape[:-1])  # type: ignore[no-untyped-call]
            left, right = (x.expand(*lead, x.shape[-1]) for x in (left, right))
            shared = shape[-2 if dim == rank - 1 else -1] - 1  # distances that both have
            if not are_equal(left[..., left.shape[-1] - shared :], right[..., :shared]):
                return None
            line = torch.cat([left, right[..., shared:]], -1)
        whole = line
    return None if whole is None else Values(whole, by_distance=True)


def _cat(parts: Sequence[Tensor], dim: int, sizes: Sequence[int]) -> Values | None:
    """Concatenates parts of these sizes along a dim; dims of size 1 broadcast."""
    others = [[1 if d == dim else n for d, n in enumerate(x.shape)] for x in parts]
    lead = torch.broadcast_shapes(*others)  # type: ignore[no-untyped-call]
    if is_large(torch.Size([*lead, sum(sizes)])):
        return None
    full = (
        x.expand([size if d == dim else n for d, n in enumerate(lead)]) for x, size in zip(parts, sizes, strict=True)
    )
    return Values(torch.cat([*full], dim))


def pad(node: Any, part: Part, val: Tensor) -> Values | None:
    """Returns the values of a pad with a constant; None if it crops, or if the number is unknown."""
    sizes, number, rank = get_argument(node, "pad"), get_argument(node, "value"), val.dim()
    if min(sizes) < 0 or isinstance(number, fx.Node):
        return None
    around = Values(torch.full([1] * rank, number, dtype=val.dtype, device="cpu"))
    for dim, ends in zip(range(rank - 1, -1, -1), zip(sizes[::2], sizes[1::2], strict=True), strict=False):
        parts = [Part(around, _resize(part.shape, dim, n)) for n in ends]
        parts = [x for x in (parts[0], part, parts[1]) if x.shape[dim]]
        part = Part(concatenate(parts, dim), _resize(part.shape, dim, part.shape[dim] + sum(ends)))
    return part.values


def _resize(shape: torch.Size, dim: int, size: int) -> torch.Size:
    return torch.Size([*shape[:dim], size, *shape[dim + 1 :]])
