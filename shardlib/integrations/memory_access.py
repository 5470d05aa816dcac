"""Functions of torch's C++ that hand out a tensor's memory, or take it over, without asking its class."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from shardlib.core.context import is_tracing
from shardlib.core.errors import ShardingError
from shardlib.ops.set_data import set_data
from shardlib.primitives.per_device import value_of
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof


def _dlpack(module: Any) -> None:
    export = module.to_dlpack

    @functools.wraps(export)
    def to_dlpack(x: Any) -> Any:
        return x.__dlpack__() if isinstance(x, ShardedTensor) or is_tracing() else export(x)

    module.to_dlpack = to_dlpack


def _data(module: Any) -> None:
    """`x.data = y` gives a plain tensor the memory of another one, and a ShardedTensor has none."""
    data = module.Tensor.data

    def setter(self: Any, value: Any) -> None:
        if is_tracing() or value_of(value) is not None:
            set_data(self, value)
            return
        if isinstance(value, ShardedTensor) and not isinstance(self, ShardedTensor):
            raise ShardingError(
                f"the data of a plain tensor of shape {list(self.shape)} is set to {typeof(value)}",
                rule="a plain tensor has memory of its own, and a ShardedTensor has pieces",
                remedy="put the tensor itself there, module.weight = torch.nn.Parameter(value), or its values: "
                "x.copy_(value)",
            )
        data.__set__(self, value)

    module.Tensor.data = property(data.__get__, setter, doc=data.__doc__)


def _torch(module: Any) -> None:
    _dlpack(module)
    _data(module)


TAUGHT: dict[str, Callable[[Any], None]] = {"torch": _torch, "torch.utils.dlpack": _dlpack}
