"""Functions of torch's C++ that export a tensor's memory or replace it, whatever the tensor's class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardlib.core.context import is_tracing
from shardlib.core.errors import ShardingError
from shardlib.integrations.on_import import replaces, when_imported
from shardlib.ops.set_data import set_data
from shardlib.primitives.per_device import find_per_device
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof


@when_imported("torch")
@when_imported("torch.utils.dlpack")
def _patch_dlpack(module: Any) -> None:
    @replaces(f"{module.__name__}.to_dlpack")
    def to_dlpack(original: Callable[..., Any], x: Any) -> Any:
        return x.__dlpack__() if isinstance(x, ShardedTensor) or is_tracing() else original(x)


@when_imported("torch")
def _patch_data(module: Any) -> None:
    """`x.data = y` gives a plain tensor the memory of `y`, which a ShardedTensor does not have."""
    data = module.Tensor.data

    def setter(self: Any, value: Any) -> None:
        if is_tracing() or find_per_device(value) is not None:
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
