"""Functions that a ShardedTensor calls in higher layers, which set them when they are imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardlib.sharding.placement import FixedLayout

if TYPE_CHECKING:
    from shardlib.tensor.sharded_tensor import ShardedTensor
    from shardlib.tensor.tensor_meta import Form


class TensorHooks:
    """Functions of higher layers, set on import."""

    dispatch: Callable[[Any, Any, dict[str, Any], Any], Any]  # an op without a cached program
    trace_op: Callable[[Any, Any, dict[str, Any]], Any]  # an op in a traced function
    restore_shards: Callable[[ShardedTensor], tuple[torch.Tensor, ...]]  # shards that are missing
    gather_full: Callable[[ShardedTensor], torch.Tensor]
    redistribute: Callable[[ShardedTensor, FixedLayout], ShardedTensor]
    local_shards: Callable[[ShardedTensor, Sequence[Any] | None], tuple[torch.Tensor, ...]]
    from_shards: Callable[[Sequence[torch.Tensor], Form], ShardedTensor]
    deep_copy: Callable[[ShardedTensor, dict[int, Any]], ShardedTensor]
    reduce_tensor: Callable[[ShardedTensor], tuple[Any, ...]]
    format_tensor: Callable[[ShardedTensor], str]
    format_with_spec: Callable[[ShardedTensor, str], str]
    draw_html: Callable[[ShardedTensor], str]


tensor_hooks = TensorHooks()
