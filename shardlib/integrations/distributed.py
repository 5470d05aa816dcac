"""`torch.distributed`'s own collectives, and wrappers that place a module's parameters themselves: refused.

Both are code per rank, which reads the memory of a rank's own tensors. A ShardedTensor is a whole tensor: its sums and
copies are ordinary ops, and shardlib moves its shards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.private_names import Slot
from shardlib.core.torch_internals.torch_private import C10D, C10D_CHECKS, C10D_STEPS, FSDP_PARAMETERS
from shardlib.eager import unsupported
from shardlib.frontend.hazards.collectives import refuse_while_tracing
from shardlib.integrations.on_import import replaces, when_imported
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof


def _patch_check(slot: Slot) -> None:
    """Patches a check of arguments, which every function of c10d's Python API calls first."""

    @replaces(slot)
    def check(original: Callable[[Any, str], None], param: Any, param_name: str) -> None:
        tensors = param if isinstance(param, list | tuple) else (param,)
        offenders = [f"{param_name} is {typeof(x)}" for x in tensors if isinstance(x, ShardedTensor)]
        if offenders:
            collective = sys._getframe(2).f_code.co_name  # the caller of the patched check
            unsupported.refuse_collective(f"torch.distributed.{collective}", offenders)
        refuse_while_tracing(param_name)
        original(param, param_name)


def _patch_step(slot: Slot) -> None:
    """Patches a function by which ranks communicate without a tensor."""

    @replaces(slot)
    def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        refuse_while_tracing(original.__name__)
        return original(*args, **kwargs)


@when_imported(C10D)
def _patch_c10d(_: Any) -> None:
    for slot in C10D_CHECKS:
        _patch_check(slot)
    for slot in C10D_STEPS:
        _patch_step(slot)


def _refuse_in_constructor(module: str, name: str, argument: str = "module") -> None:
    """Refuses modules with ShardedTensors in the constructor of class `name`."""

    @when_imported(module)
    def patch(_: Any) -> None:
        @replaces(f"{module}.{name}.__init__")
        def init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
            _refuse_placed(name, args[0] if args else kwargs.get(argument))
            original(self, *args, **kwargs)


def _refuse_placed(name: str, value: Any) -> None:
    named = value.named_parameters() if isinstance(value, torch.nn.Module) else [("the parameter", value)]
    offenders = [f"{path} is {typeof(x)}" for path, x in named if isinstance(x, ShardedTensor)]
    if offenders:
        raise ShardingError(
            f"{'fully_shard' if name == 'FSDPParam' else name} on parameters that are placed already",
            offenders,
            rule="a ShardedTensor says where it lives, and its gradients are reduced by the ops that make them",
            remedy="leave the wrapper out: cut the batch (and the parameters, as FSDP does) by shard(x, spec)",
        )


_refuse_in_constructor("torch.nn.parallel.distributed", "DistributedDataParallel")
_refuse_in_constructor("torch.nn.parallel.data_parallel", "DataParallel")
_refuse_in_constructor("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
_refuse_in_constructor(FSDP_PARAMETERS, "FSDPParam", "param")
