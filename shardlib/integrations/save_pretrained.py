"""`save_pretrained` of transformers and peft: the file holds whole tensors, which plain code loads.

All ranks gather them, and rank 0 writes the file unless the caller passes `is_main_process`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from shardlib.core.torch_internals.torch_private import pytree
from shardlib.distributed import world
from shardlib.integrations.on_import import replaces, when_imported
from shardlib.tensor.sharded_tensor import ShardedTensor


def _gather(state: Any) -> Any:
    """Replaces ShardedTensors by plain tensors; a tensor with two names stays one tensor."""
    whole: dict[int, Any] = {}  # with the tensor itself, so that its id stays taken

    def full(x: Any) -> Any:
        if id(x) not in whole:
            whole[id(x)] = x, x.detach().full_tensor()
        return whole[id(x)][1]

    return pytree.tree_map_only(ShardedTensor, full, state)


def _patch_save(name: str, *, gathers: bool) -> None:
    """Patches a `save_pretrained` method, which writes on rank 0, and with `gathers` whole tensors."""

    @replaces(name)
    def save_pretrained(original: Callable[..., Any], self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if any(type(x) is ShardedTensor for x in (*self.parameters(), *self.buffers())):
            arguments = inspect.signature(original).bind(self, *args, **kwargs).arguments
            if "is_main_process" not in arguments:
                kwargs["is_main_process"] = world.rank() == 0
            if gathers and arguments.get("state_dict") is None:
                kwargs["state_dict"] = _gather(self.state_dict(keep_vars=True))  # tied parameters stay one tensor
        return original(self, *args, **kwargs)


@when_imported("transformers.modeling_utils")
def _patch_model(_: Any) -> None:
    _patch_save("transformers.modeling_utils.PreTrainedModel.save_pretrained", gathers=True)


@when_imported("peft.peft_model")
def _patch_adapters(_: Any) -> None:
    """Gathers only the parameters of the adapter."""

    @replaces("peft.peft_model.get_peft_model_state_dict")
    def get_state(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return _gather(original(*args, **kwargs))

    _patch_save("peft.peft_model.PeftModel.save_pretrained", gathers=False)
