"""`flex_attention` on ShardedTensors outside `jit`: the operators that its plain form is made of, one at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardlib.core.torch_private import TransformType, keys_of
from shardlib.frontend.torch_rewrites import flex_attention
from shardlib.primitives.random.keys import PlainDraws
from shardlib.tensor.sharded_tensor import ShardedTensor

# The key of tensor subclasses, and of modes: plain tensors never come by.
_SNAPSHOT = torch.DispatchKey.PythonTLSSnapshot


@flex_attention.OPERATOR.py_impl(_SNAPSHOT)  # type: ignore[untyped-decorator]
def _caught(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **how: Any) -> Any:
    """Above autograd, which then follows the form's ops as it follows others."""
    if flex_attention.ours(query, key, value):
        sharded = any(isinstance(x, ShardedTensor) for x in (query, key, value))
        return flex_attention.flex_attention(query, key, value, *rest, **how, fused=sharded)
    keys = keys_of((query, key, value, *rest), how, flex_attention.OPERATOR.non_fallthrough_keys.remove(_SNAPSHOT))
    return flex_attention.OPERATOR.dispatch(keys.highestPriorityTypeId(), query, key, value, *rest, **how)


def _transformed(_: Any, *args: Any, **kwargs: Any) -> Any:
    """Under torch.func, for which torch's operator has no rule: its ops have."""
    return flex_attention.flex_attention(*args, **kwargs)


for _kind in (TransformType.Grad, TransformType.Jvp, TransformType.Vmap):
    flex_attention.OPERATOR.py_impl(_kind)(_transformed)
flex_attention.TYPES.add(ShardedTensor)
flex_attention.MODES.add(PlainDraws)  # dynamo goes through no modes but torch's
