"""`x.data = value` in a traced function: a node that records it, which functionalization removes."""

from __future__ import annotations

import torch
from torch import Tensor

from shardlib.core.errors import ShardingError
from shardlib.ops import define_op

OP = define_op("set_data(Tensor x, Tensor value) -> ()", lambda x, value: None, lambda x, value: None)


def set_data(x: Tensor, value: Tensor) -> None:
    """Makes `x` use the memory of `value`; other views of x's old memory keep it.

    Raises `ShardingError` if shapes or dtypes differ.
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
