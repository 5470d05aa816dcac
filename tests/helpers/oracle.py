"""The oracle of border cases: the same Python, run as plain torch and with sharded tensors, leaves the same behind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardlib import ShardedTensor


def whole(x: Any) -> Any:
    """Values as plain tensors, without history."""
    return pytree.tree_map_only(Tensor, lambda t: _whole(t).detach().clone(), x)


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, ShardedTensor) else x


def same(found: Any, expected: Any) -> None:
    """Assert that two pytrees hold the same values; tensors in whatever form."""
    a, one = pytree.tree_flatten(whole(found))
    b, two = pytree.tree_flatten(whole(expected))
    assert one == two
    for x, y in zip(a, b, strict=True):
        if isinstance(y, Tensor):
            assert x.dtype == y.dtype, f"{x.dtype} for {y.dtype}"
            torch.testing.assert_close(x, y, equal_nan=True)
        else:
            assert type(x) is type(y)
            assert x == y or (x != x and y != y)
