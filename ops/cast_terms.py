"""A change of dtype that says in which dtype a sum over devices is taken."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LIB: Any = torch.library.Library("shardlib", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIB.define("cast_terms(Tensor x, *, ScalarType dtype) -> Tensor")


def cast_terms(x: Tensor, *, dtype: torch.dtype) -> Tensor:
    """`x`, of any shape, in another dtype. Of a sum over devices that is still to be taken, every term is: the sum is
    then one of numbers of that dtype.

    Example:
        >>> cast_terms(torch.ones(2, dtype=torch.bfloat16), dtype=torch.float32)
        tensor([1., 1.])
    """
    return x.to(dtype, copy=True)


_LIB.impl("cast_terms", cast_terms, "CompositeExplicitAutograd")
torch.library.register_fake("shardlib::cast_terms", lambda x, *, dtype: torch.empty_like(x, dtype=dtype), lib=_LIB)

CAST_TERMS = torch.ops.shardlib.cast_terms.default
