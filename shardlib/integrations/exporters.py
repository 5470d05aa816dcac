"""`torch.jit.script`, `torch.export` and ONNX export of parallelized modules and jitted functions: refused.

They read the source of a function or the parameters of a module, and do not support placed tensors. The call itself
refuses tracers that call the module instead (`core/recorders.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from shardlib.core.errors import ShardingError
from shardlib.core.recorders import PLAIN
from shardlib.core.torch_internals.private_names import Slot
from shardlib.core.torch_internals.torch_private import EXPORT, EXPORTS, SCRIPT, SCRIPTS
from shardlib.integrations.on_import import replaces, when_imported
from shardlib.jit.call.methods import Method
from shardlib.jit.jit import Jitted
from shardlib.jit.shard_map import ShardMapped
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof


def _refuse_placed(module: str, slot: Slot, exporter: str) -> None:
    """Refuses arguments that live on a mesh in the function of a slot, which users call as `exporter`."""

    @when_imported(module)
    def patch(_: Any) -> None:
        @replaces(slot)
        def export(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            for x in (*args[:1], *kwargs.values()):
                _refuse(exporter, x)
            return original(*args, **kwargs)


def _refuse(exporter: str, exported: Any) -> None:
    placed = list(_placed(exported)) if isinstance(exported, nn.Module) else []
    if isinstance(exported, _CALLS):
        placed = [repr(exported)]
    if placed:
        raise ShardingError(
            f"{exporter} of {'a parallelized module' if isinstance(exported, nn.Module) else 'a jitted function'}",
            placed,
            rule="what is exported is a program for one device, with plain parameters",
            remedy=PLAIN,
        )


def _placed(module: nn.Module) -> Iterator[str]:
    """Yields texts that name the placed parameters, and the forwards that are programs."""
    for name, x in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(x, ShardedTensor):
            yield f"{name} is {typeof(x)}"
    for name, inner in module.named_modules():
        forward = vars(inner).get("forward")
        if isinstance(forward, _CALLS) or isinstance(getattr(forward, "program", None), Jitted):
            yield f"{name or type(module).__name__}.forward is a program for a mesh"


_CALLS = (Jitted, Method, ShardMapped)

_refuse_placed(SCRIPT, SCRIPTS, "torch.jit.script")
_refuse_placed(EXPORT, EXPORTS, "torch.export")
_refuse_placed("torch.onnx", Slot("torch.onnx.export"), "torch.onnx.export")
