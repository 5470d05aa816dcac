"""`flex_attention` on ShardedTensors outside `jit`: the operators that its plain form is made of, one at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

from shardlib import flex
from shardlib.tensor import ShardedTensor

_SNAPSHOT = DispatchKey.PythonTLSSnapshot  # the key of tensor subclasses alone: plain tensors never come by


@flex.OPERATOR.py_impl(_SNAPSHOT)  # type: ignore[untyped-decorator]
def _caught(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **how: Any) -> Any:
    """Above autograd, which then follows the form's ops as it follows others."""
    if any(isinstance(x, ShardedTensor) for x in (query, key, value)):
        return flex.flex_attention(query, key, value, *rest, **how)
    with torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(_SNAPSHOT)):
        return flex.OPERATOR(query, key, value, *rest, **how)


flex.TYPES.add(ShardedTensor)
