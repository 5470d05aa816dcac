"""`save_pretrained` of transformers and peft: whole tensors go to the file, which plain code loads.

All ranks gather them, and the first one writes, unless the caller says who does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from shardlib.core.torch_private import pytree
from shardlib.distributed import world
from shardlib.tensor.sharded_tensor import ShardedTensor


def _gathered(state: Any) -> Any:
    """Plain tensors in the place of placed ones; one that has two names stays one."""
    known: dict[int, Any] = {}

    def full(x: Any) -> Any:
        if id(x) not in known:
            known[id(x)] = x, x.detach().full_tensor()
        return known[id(x)][1]

    return pytree.tree_map_only(ShardedTensor, full, state)


def _state_of(module: nn.Module) -> dict[str, Any]:
    """Its state, where parameters are themselves: those that are tied are one tensor."""
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    return state


def _saving(save: Callable[..., Any], gathers: bool) -> Callable[..., Any]:
    signature = inspect.signature(save)

    @functools.wraps(save)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if any(type(x) is ShardedTensor for x in (*self.parameters(), *self.buffers())):
            given = signature.bind(self, *args, **kwargs).arguments
            if "is_main_process" not in given:
                kwargs["is_main_process"] = world.rank() == 0
            if gathers and given.get("state_dict") is None:
                kwargs["state_dict"] = _gathered(_state_of(self))
        return save(self, *args, **kwargs)

    return save_pretrained


def _model(module: Any) -> None:
    module.PreTrainedModel.save_pretrained = _saving(module.PreTrainedModel.save_pretrained, gathers=True)


def _adapters(module: Any) -> None:
    """Of a state, only what is an adapter's is gathered."""
    chosen = module.get_peft_model_state_dict

    @functools.wraps(chosen)
    def get_peft_model_state_dict(*args: Any, **kwargs: Any) -> Any:
        return _gathered(chosen(*args, **kwargs))

    module.get_peft_model_state_dict = get_peft_model_state_dict
    module.PeftModel.save_pretrained = _saving(module.PeftModel.save_pretrained, gathers=False)


TAUGHT: dict[str, Callable[[Any], None]] = {
    "transformers.modeling_utils": _model,
    "peft.peft_model": _adapters,
}
