"""Functions of torch's C++ that hand out a tensor's memory without asking its class."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from shardlib.tensors.tensor import ShardedTensor


def _dlpack(module: Any) -> None:
    export = module.to_dlpack

    @functools.wraps(export)
    def to_dlpack(x: Any) -> Any:
        return x.__dlpack__() if isinstance(x, ShardedTensor) else export(x)

    module.to_dlpack = to_dlpack


TAUGHT: dict[str, Callable[[Any], None]] = {"torch": _dlpack, "torch.utils.dlpack": _dlpack}
