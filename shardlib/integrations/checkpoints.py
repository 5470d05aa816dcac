"""`torch.distributed.checkpoint`: what it asks of tensors, whole state dicts, and copies for saving in the background.

The latter two know DTensors by their type, and take every other tensor for a plain one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from shardlib.core.torch_private import FILL_STATE_DICT, GATHER_STATE_DICT, STAGED_COPY, STAGED_MEMORY, pytree
from shardlib.eager.placement_autograd import place_like
from shardlib.tensor.host_offload import stored_shards
from shardlib.tensor.sharded_tensor import ShardedTensor, wrap
from shardlib.tensor.tensor_meta import Form


def _planner(_: Any) -> None:
    """Tensors that know their boxes plan for themselves. (Late: the boxes are written in the planner's types.)"""
    import shardlib.integrations.checkpoint_chunks  # noqa: F401


def _state_dict(_: Any) -> None:
    """`full_state_dict=True`: plain tensors out; plain tensors in, laid out as those that they replace."""
    gather = GATHER_STATE_DICT.value

    @functools.wraps(gather)
    def gathered(state_dict: Any, **how: Any) -> Any:
        return gather(pytree.tree_map_only(ShardedTensor, lambda x: x.detach().full_tensor(), state_dict), **how)

    GATHER_STATE_DICT.value = gathered
    for slot in FILL_STATE_DICT:
        slot.value = _placing(slot.value)


def _placing(distribute: Callable[..., None]) -> Callable[..., None]:
    """One of torch's functions that fill a flat state dict with values of whole ones, and keep the type of DTensors."""

    @functools.wraps(distribute)
    def placing(full: Any, local: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        before = {name: x for name, x in local.items() if isinstance(x, ShardedTensor)}
        distribute(full, local, *args, **kwargs)
        for name, x in before.items():
            now = local.get(name)
            if isinstance(now, torch.Tensor) and not isinstance(now, ShardedTensor):
                local[name] = place_like(now, x)

    return placing


def _stager() -> None:
    """Copies on the CPU that training does not change, of the pieces; pieces that devices share stay shared."""
    offload = STAGED_COPY.value

    @functools.wraps(offload)
    def offloaded(self: Any, x: torch.Tensor, memo: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(x, ShardedTensor):
            copied: torch.Tensor = offload(self, x, memo, *args, **kwargs)
            return copied
        out = _on_cpu(x, self.deepcopy_with_tensor_offload(stored_shards(x), memo, *args, **kwargs))
        memo[id(x)] = out
        return out

    STAGED_COPY.value = offloaded


def _staging(_: Any) -> None:
    """The blocking way makes the memory first, and copies into it later."""
    _stager()
    create = STAGED_MEMORY.value

    @functools.wraps(create)
    def created(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = pytree.tree_flatten(state_dict)
        rest = [None if isinstance(x, ShardedTensor) else x for x in leaves]
        made = pytree.tree_leaves(create(pytree.tree_unflatten(rest, tree), *args, **kwargs))
        whole = [
            _on_cpu(x, tuple(p.cpu() for p in stored_shards(x))) if isinstance(x, ShardedTensor) else y
            for x, y in zip(leaves, made, strict=True)
        ]
        return pytree.tree_unflatten(whole, tree)

    STAGED_MEMORY.value = created


def _on_cpu(x: ShardedTensor, pieces: tuple[torch.Tensor, ...]) -> ShardedTensor:
    form = x._form
    there = Form.intern(form.layout, form.mesh, form.dtype, torch.device("cpu"), form.names, form.strides, form.offset)
    return wrap(there, pieces)


TAUGHT: dict[str, Callable[[Any], None]] = {
    "torch.distributed.checkpoint.planner": _planner,
    "torch.distributed.checkpoint.state_dict": _state_dict,
    "torch.distributed.checkpoint.staging": _staging,
}
