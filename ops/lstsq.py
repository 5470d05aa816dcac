"""Least squares as an op that can be traced: torch's own has no shape function.

A[..., M, N] X[..., N, K] = B[..., M, K], or B[..., M] and X[..., N]. Results that a driver does not compute are empty.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("shardlib::lstsq", mutates_args=())
def lstsq(a: Tensor, b: Tensor, rcond: float | None, driver: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes `torch.linalg.lstsq`: X, residuals, rank and singular values.

    `driver` is `gelsy`, `gels` (the only one on GPUs), `gelsd` or `gelss`.
    """
    x, residuals, rank, values = torch.ops.aten.linalg_lstsq.default(a, b, rcond, driver=driver)
    return x.clone(), residuals.clone(), rank.clone(), values.clone()


@lstsq.register_fake
def _(a: Tensor, b: Tensor, rcond: float | None, driver: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *batch, m, n = a.shape
    columns = [b.shape[-1]] if b.dim() == a.dim() else []
    real = a.dtype.to_real()
    rank = [0] if driver == "gels" else batch
    values = [*batch, min(m, n)] if driver in ("gelsd", "gelss") else [0]
    residuals = [*batch, *(columns or [1])] if m > n and driver != "gelsy" else [0]
    return (
        a.new_empty([*batch, n, *columns]),
        a.new_empty(residuals, dtype=real),
        a.new_empty(rank, dtype=torch.int64),
        a.new_empty(values, dtype=real),
    )
