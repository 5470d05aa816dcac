"""What a tensor asks of floors above it, which fill it in when they are imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardlib.sharding.placement import Fixed

if TYPE_CHECKING:
    from shardlib.tensor.sharded_tensor import ShardedTensor
    from shardlib.tensor.tensor_meta import Form


class Above:
    """What floors above do for a tensor; who does it says so here, when it is imported."""

    dispatch: Callable[[Any, Any, dict[str, Any], Any], Any]  # an op that is not ready yet
    redirected: Callable[[Any, Any, dict[str, Any]], Any]  # an op of a function that is being traced
    remake: Callable[[ShardedTensor], tuple[torch.Tensor, ...]]  # pieces that were written to elsewhere, or are away
    whole: Callable[[ShardedTensor], torch.Tensor]
    redistributed: Callable[[ShardedTensor, Fixed], ShardedTensor]
    local_shards: Callable[[ShardedTensor, Sequence[Any] | None], tuple[torch.Tensor, ...]]
    from_shards: Callable[[Sequence[torch.Tensor], Form], ShardedTensor]
    deep_copy: Callable[[ShardedTensor, dict[int, Any]], ShardedTensor]
    reduced: Callable[[ShardedTensor], tuple[Any, ...]]
    shown: Callable[[ShardedTensor], str]
    formatted: Callable[[ShardedTensor, str], str]
    drawn: Callable[[ShardedTensor], str]


above = Above()
