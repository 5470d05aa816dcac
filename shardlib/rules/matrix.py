"""Matrices beside the plain products: distances, complex numbers as pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardlib.rules.pointwise import pointwise
from shardlib.rules.rule import Call, Rule, RuleFn
from shardlib.rules.space import Space, arg, axis
from shardlib.rules.written import by_torch

aten = torch.ops.aten


def _trilinear(call: Call) -> Rule:
    """The product of three tensors, each with new dims of size 1 at its `expand`, summed over `sumdim`."""
    space = Space()
    gaps: list[list[int]] = [list(arg(call, 3 + i, f"expand{i + 1}")) for i in range(3)]
    rank = len(call.operands[0].shape) + len(gaps[0])
    shapes = []
    for m, gap in zip(call.operands, gaps, strict=True):
        sizes = iter(m.shape)
        shapes.append([1 if i in gap else next(sizes) for i in range(rank)])
    dims = space.dims([next((n for n in column if n != 1), 1) for column in zip(*shapes, strict=True)])
    operands = [
        [() if shape[i] == 1 else dims[i] for i in range(rank) if i not in gap]
        for shape, gap in zip(shapes, gaps, strict=True)
    ]
    gone = [axis(d, rank) for d in arg(call, 6, "sumdim")]
    out = [d for i, d in enumerate(dims) if i not in gone]
    reduce = {f: "sum" for i in gone for f in dims[i]}
    return space.rule(operands, [out], reduce=reduce, linear=[{0}, {1}, {2}], flops=3 * space.size(sum(dims, ())))


def _pairs(x: Tensor, p: float = 2) -> Tensor:
    """pdist: the distances between two rows, each pair once."""
    i, j = torch.triu_indices(len(x), len(x), 1, device=x.device)
    distances: Tensor = aten._cdist_forward(x, x, p, None)
    return distances[i, j]


def _pairs_backward(grad: Tensor, x: Tensor, p: float, distances: Tensor) -> Tensor:
    i, j = torch.triu_indices(len(x), len(x), 1, device=x.device)
    both = (torch.cat([i, j]), torch.cat([j, i]))
    square = [x.new_zeros(len(x), len(x)).index_put(both, torch.cat([v, v])) for v in (grad, distances)]
    gradient: Tensor = aten._cdist_backward(square[0], x, x, p, square[1])
    return gradient


ROWS: dict[str, RuleFn | str] = {
    "_trilinear": _trilinear,
    # Distances between rows of m numbers; given the distances, their gradient goes number by number.
    **dict.fromkeys(["_cdist_forward", "_euclidean_dist"], "... p m, ... r m -> ... p r | m:whole"),
    "_cdist_backward": "... p r, ... p m, ... r m, ... p r -> ... p m | r:sum {0}",
    # A complex number as a pair, and what torch does not tag as pointwise.
    **dict.fromkeys(["view_as_real", "view_as_real_copy"], "... -> ... _ | {0}"),
    **dict.fromkeys(["view_as_complex", "view_as_complex_copy"], "... _ -> ... | {0}"),
    **dict.fromkeys(["_conj", "_conj_copy", "conj_physical", "_neg_view", "_neg_view_copy"], pointwise("{0}")),
    "complex": pointwise("{0,1}"),
    "polar": pointwise("{0}"),
}

DECOMPOSED: dict[str, Any] = {
    **by_torch("dist", "block_diag"),
    "_pdist_forward": _pairs,
    "_pdist_backward": _pairs_backward,
}
