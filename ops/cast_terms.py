"""A change of dtype before a sum over devices, which is then taken in the new dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from shardlib.ops import define_op


def cast_terms(x: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Casts `x`, of any shape. If `x` is a partial sum, every device casts its addend: the sum is taken in `dtype`."""
    return x.to(dtype, copy=True)


CAST_TERMS = define_op(
    "cast_terms(Tensor x, *, ScalarType dtype) -> Tensor",
    cast_terms,
    lambda x, *, dtype: torch.empty_like(x, dtype=dtype),
)
