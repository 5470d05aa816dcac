"""Other ops of matrices: distances, complex numbers as pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardlib.rules.iteration_space import normalize_dims
from shardlib.rules.out_variants import by_torch
from shardlib.rules.rule import RuleFn
from shardlib.rules.tensor_ops.pointwise import pointwise

aten = torch.ops.aten


def _trilinear(
    x: Tensor, y: Tensor, z: Tensor, expand1: Any, expand2: Any, expand3: Any, sumdim: Any, unroll_dim: int = 1
) -> Tensor:
    """Returns the product of three tensors, each with new dims of size 1 at its `expand`, summed over `sumdim`."""
    rank = x.dim() + len(expand1)
    dims_x, dims_y, dims_z, out = (
        [d for d in range(rank) if d not in normalize_dims(absent, rank)] if absent else [*range(rank)]
        for absent in (expand1, expand2, expand3, sumdim)
    )
    return torch.einsum(x, dims_x, y, dims_y, z, dims_z, out)


def _pairs(x: Tensor, p: float = 2) -> Tensor:
    """pdist: the distances between all pairs of rows."""
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
    # Distances between rows of m numbers; the gradient takes the distances, and is pointwise in m.
    **dict.fromkeys(["_cdist_forward", "_euclidean_dist"], "... p m, ... r m -> ... p r | m:whole"),
    "_cdist_backward": "... p r, ... p m, ... r m, ... p r -> ... p m | r:sum {0}",
    # Complex numbers as pairs, and pointwise ops without torch's tag.
    **dict.fromkeys(["view_as_real", "view_as_real_copy"], "... -> ... _ | {0}"),
    **dict.fromkeys(["view_as_complex", "view_as_complex_copy"], "... _ -> ... | {0}"),
    **dict.fromkeys(["_conj", "_conj_copy", "conj_physical", "_neg_view", "_neg_view_copy"], pointwise("{0}")),
    "complex": pointwise("{0,1}"),
    "polar": pointwise("{0}"),
}

DECOMPOSED: dict[str, Any] = {
    **by_torch("dist", "block_diag"),
    "_trilinear": _trilinear,
    "_pdist_forward": _pairs,
    "_pdist_backward": _pairs_backward,
}
