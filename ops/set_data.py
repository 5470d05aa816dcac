"""`x.data = value` while a function is traced: a node that says so, which functionalization takes away again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardlib.core.errors import ShardingError

_LIB: Any = torch.library.Library("shardlib", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIB.define("set_data(Tensor x, Tensor value) -> ()")


def _nothing(x: Tensor, value: Tensor) -> None:
    pass


_LIB.impl("set_data", _nothing, "CompositeExplicitAutograd")
torch.library.register_fake("shardlib::set_data", _nothing, lib=_LIB)

OP: Any = torch.ops.shardlib.set_data.default


def set_data(x: Tensor, value: Tensor) -> None:
    """From here on `x` shows the memory of `value`; whatever showed that of `x` before goes on to do so.

    Raises `ShardingError` where shapes or dtypes differ.
    """
    if x.shape != value.shape or x.dtype != value.dtype:
        raise ShardingError(
            "the traced function sets the data of a tensor to another shape or dtype",
            [f"{list(x.shape)} of {x.dtype} to {list(value.shape)} of {value.dtype}"],
            rule="a program knows the shapes of all tensors that it is given",
            remedy="return the new tensor, and set it outside",
        )
    with torch.no_grad():
        OP(x, value)
