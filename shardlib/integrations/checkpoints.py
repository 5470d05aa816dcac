"""`torch.distributed.checkpoint`: planning per tensor, whole state dicts, and copies for asynchronous saving.

Torch recognizes DTensors by their type in the latter two, and takes every other tensor for a plain one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardlib.core.torch_internals.private_names import Slot
from shardlib.core.torch_internals.torch_private import (
    FILL_STATE_DICT,
    GATHER_STATE_DICT,
    STAGED_COPY,
    STAGED_MEMORY,
    pytree,
)
from shardlib.eager.placement_autograd import place_like
from shardlib.integrations.on_import import replaces, when_imported
from shardlib.tensor.host_offload import stored_shards
from shardlib.tensor.sharded_tensor import ShardedTensor, wrap
from shardlib.tensor.tensor_meta import Form


def _restore_layouts(slot: Slot) -> None:
    """Patches a function of torch that fills a flat state dict with whole values, and keeps only DTensors' layouts."""

    @replaces(slot)
    def fill(original: Callable[..., None], full: Any, local: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        before = {name: x for name, x in local.items() if isinstance(x, ShardedTensor)}
        original(full, local, *args, **kwargs)
        for name, x in before.items():
            now = local.get(name)
            if isinstance(now, torch.Tensor) and not isinstance(now, ShardedTensor):
                local[name] = place_like(now, x)


def _on_cpu(x: ShardedTensor, shards: tuple[torch.Tensor, ...]) -> ShardedTensor:
    old = x._form
    form = Form.intern(old.layout, old.mesh, old.dtype, torch.device("cpu"), old.names, old.strides, old.offset)
    return wrap(form, shards)


@when_imported("torch.distributed.checkpoint.planner")
def _patch_planner(_: Any) -> None:
    """Gives `ShardedTensor` the planner's methods, whose module imports types of the planner."""
    import shardlib.integrations.checkpoint_chunks  # noqa: F401


@when_imported("torch.distributed.checkpoint.state_dict")
def _patch_state_dict(_: Any) -> None:
    """`full_state_dict=True` returns plain tensors, and loads plain tensors in the layouts of those they replace."""

    @replaces(GATHER_STATE_DICT)
    def gather(original: Callable[..., Any], state_dict: Any, **options: Any) -> Any:
        whole = pytree.tree_map_only(ShardedTensor, lambda x: x.detach().full_tensor(), state_dict)
        return original(whole, **options)

    for slot in FILL_STATE_DICT:
        _restore_layouts(slot)


@when_imported("torch.distributed.checkpoint.staging")
def _patch_staging(_: Any) -> None:
    """Copies shards to the CPU for saving while training continues; shared shards stay shared.

    Blocking saves allocate the memory first, and copy later.
    """

    @replaces(STAGED_COPY)
    def offload(original: Callable[..., Any], self: Any, x: torch.Tensor, memo: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, ShardedTensor):
            return original(self, x, memo, *args, **kwargs)
        out = _on_cpu(x, self.deepcopy_with_tensor_offload(stored_shards(x), memo, *args, **kwargs))
        memo[id(x)] = out
        return out

    @replaces(STAGED_MEMORY)
    def allocate(original: Callable[..., Any], state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = pytree.tree_flatten(state_dict)
        plain = [None if isinstance(x, ShardedTensor) else x for x in leaves]
        copies = pytree.tree_leaves(original(pytree.tree_unflatten(plain, tree), *args, **kwargs))
        whole = [
            _on_cpu(x, tuple(shard.cpu() for shard in stored_shards(x))) if isinstance(x, ShardedTensor) else copy
            for x, copy in zip(leaves, copies, strict=True)
        ]
        return pytree.tree_unflatten(whole, tree)
