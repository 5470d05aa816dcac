"""What becomes of values where ops turn them round, or lay them side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from shardlib.compiler.simplify.attention.toeplitz import Values, are_equal, is_large
from shardlib.core.aten.schemas import get_argument

aten = torch.ops.aten


def turned(node: Any) -> tuple[Any, set[int]]:
    """What is turned round, and along which dims in all."""
    dims = set[int]()
    while node.target is aten.flip.default:
        dims ^= {dim % node.meta["val"].dim() for dim in node.args[1]}
        node = node.args[0]
    return node, dims


def flipped(found: Values, dims: set[int]) -> Values | None:
    """By distance, along both of the last dims or none of them."""
    rank = found.numbers.dim() + found.by_distance
    if not found.by_distance or dims.isdisjoint({rank - 2, rank - 1}):
        return found._replace(numbers=found.numbers.flip(sorted(dims)))
    if not dims >= {rank - 2, rank - 1}:
        return None
    return found._replace(numbers=found.numbers.flip(sorted(dims - {rank - 1})))


class Piece(NamedTuple):
    """Values of a shape."""

    values: Values | None
    shape: torch.Size


def side_by_side(pieces: Sequence[Piece], dim: int) -> Values | None:
    """One behind the other along a dim; along one of the last two, by distance where each goes on as the one before."""
    known = [(values, shape) for values, shape in pieces if values is not None]
    if len(known) < len(pieces) or len({values.numbers.dtype for values, _ in known}) != 1:
        return None
    rank = len(known[0][1])
    dim %= rank
    if not any(values.by_distance for values, _ in known):
        return _cat([values.numbers for values, _ in known], dim, [shape[dim] for _, shape in known])
    if any(not values.by_distance and values.numbers.shape[-2:].numel() > 1 for values, _ in known):
        return None
    lines = [values.numbers if values.by_distance else values.numbers[..., 0] for values, _ in known]
    if dim < rank - 2:
        made = _cat(lines, dim, [shape[dim] for _, shape in known])
        return made and made._replace(by_distance=True)
    whole: Tensor | None = None
    for line, (_, shape) in zip(lines, known, strict=True):
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
    """Parts of these sizes along a dim; along others there may be one of what is the same."""
    others = [[1 if d == dim else n for d, n in enumerate(x.shape)] for x in parts]
    lead = torch.broadcast_shapes(*others)  # type: ignore[no-untyped-call]
    if is_large(torch.Size([*lead, sum(sizes)])):
        return None
    full = (
        x.expand([size if d == dim else n for d, n in enumerate(lead)]) for x, size in zip(parts, sizes, strict=True)
    )
    return Values(torch.cat([*full], dim))


def padded(node: Any, piece: Piece, val: Tensor) -> Values | None:
    """A tensor with a number around it."""
    sizes, number, rank = get_argument(node, "pad"), get_argument(node, "value"), val.dim()
    if min(sizes) < 0 or isinstance(number, fx.Node):
        return None
    around = Values(torch.full([1] * rank, number, dtype=val.dtype, device="cpu"))
    for dim, ends in zip(range(rank - 1, -1, -1), zip(sizes[::2], sizes[1::2], strict=True), strict=False):
        parts = [Piece(around, _resized(piece.shape, dim, n)) for n in ends]
        parts = [x for x in (parts[0], piece, parts[1]) if x.shape[dim]]
        piece = Piece(side_by_side(parts, dim), _resized(piece.shape, dim, piece.shape[dim] + sum(ends)))
    return piece.values


def _resized(shape: torch.Size, dim: int, size: int) -> torch.Size:
    return torch.Size([*shape[:dim], size, *shape[dim + 1 :]])
