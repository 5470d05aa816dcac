"""`flex_attention` on ShardedTensors outside `jit`: the operators that its plain form is made of, one at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardlib.internals import TransformType, keys_of
from shardlib.random.draw import PlainDraws
from shardlib.tensors.tensor import ShardedTensor
from shardlib.tracing import flex

# The key of tensor subclasses, and of modes: plain tensors never come by.
_SNAPSHOT = torch.DispatchKey.PythonTLSSnapshot


@flex.OPERATOR.py_impl(_SNAPSHOT)  # type: ignore[untyped-decorator]
def _caught(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **how: Any) -> Any:
    """Above autograd, which then follows the form's ops as it follows others."""
    if flex.ours(query, key, value):
        sharded = any(isinstance(x, ShardedTensor) for x in (query, key, value))
        return flex.flex_attention(query, key, value, *rest, **how, fused=sharded)
    keys = keys_of((query, key, value, *rest), how, flex.OPERATOR.non_fallthrough_keys.remove(_SNAPSHOT))
    return flex.OPERATOR.dispatch(keys.highestPriorityTypeId(), query, key, value, *rest, **how)


def _transformed(_: Any, *args: Any, **kwargs: Any) -> Any:
    """Under torch.func, for which torch's operator has no rule: its ops have."""
    return flex.flex_attention(*args, **kwargs)


for _kind in (TransformType.Grad, TransformType.Jvp, TransformType.Vmap):
    flex.OPERATOR.py_impl(_kind)(_transformed)
flex.TYPES.add(ShardedTensor)
flex.MODES.add(PlainDraws)  # dynamo goes through no modes but torch's
