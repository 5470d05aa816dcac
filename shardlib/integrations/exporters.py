"""`torch.jit.script`, `torch.export` and ONNX export of parallelized modules and jitted functions: refused.

They read the source of a function, or the parameters of a module, and know nothing of placed tensors. Tracers that call
the module instead are refused by that call (`core/recorders.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from shardlib.core.errors import ShardingError
from shardlib.core.private_names import Slot
from shardlib.core.recorders import PLAIN
from shardlib.core.torch_private import EXPORT, EXPORTS, SCRIPT, SCRIPTS
from shardlib.jit.call.methods import Method
from shardlib.jit.jit import Jitted
from shardlib.jit.shard_map import ShardMapped
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof


def _refusing(slot: Slot, door: str) -> Callable[[Any], None]:
    """Returns a change of the slot's module: its function refuses what lives on a mesh, for calls of `door`."""

    def teach(_: Any) -> None:
        function = slot.value

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for x in (*args[:1], *kwargs.values()):
                _refuse(door, x)
            return function(*args, **kwargs)

        slot.value = checked

    return teach


def _refuse(door: str, exported: Any) -> None:
    placed = list(_placed(exported)) if isinstance(exported, nn.Module) else []
    if isinstance(exported, _CALLS):
        placed = [repr(exported)]
    if placed:
        raise ShardingError(
            f"{door} of {'a parallelized module' if isinstance(exported, nn.Module) else 'a jitted function'}",
            placed,
            rule="what is exported is a program for one device, with plain parameters",
            remedy=PLAIN,
        )


def _placed(module: nn.Module) -> Iterator[str]:
    """Texts that name the placed parameters and the forwards that are programs."""
    for name, x in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(x, ShardedTensor):
            yield f"{name} is {typeof(x)}"
    for name, inner in module.named_modules():
        forward = vars(inner).get("forward")
        if isinstance(forward, _CALLS) or isinstance(getattr(forward, "program", None), Jitted):
            yield f"{name or type(module).__name__}.forward is a program for a mesh"


_CALLS = (Jitted, Method, ShardMapped)

TAUGHT: dict[str, Callable[[Any], None]] = {
    SCRIPT: _refusing(SCRIPTS, "torch.jit.script"),
    EXPORT: _refusing(EXPORTS, "torch.export"),
    "torch.onnx": _refusing(Slot("torch.onnx.export"), "torch.onnx.export"),
}
