"""`torch.distributed`'s own collectives, and wrappers that place a module's parameters by themselves: refused.

Both are per-rank code: they take a rank's own tensors, and read their memory. A ShardedTensor is a whole tensor whose
sums and copies are ordinary ops, and whose pieces shardlib moves.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from shardlib.core.errors import ShardingError
from shardlib.core.torch_private import C10D, C10D_CHECKS, C10D_STEPS, FSDP_PARAMETERS
from shardlib.eager import unsupported
from shardlib.frontend.hazards.collectives import refuse_while_tracing
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof


def _checked(check: Callable[[Any, str], None]) -> Callable[[Any, str], None]:
    """One of c10d's checks of its arguments, which every function of its Python API calls before it does anything."""

    @functools.wraps(check)
    def checked(param: Any, param_name: str) -> None:
        tensors = param if isinstance(param, list | tuple) else (param,)
        found = [f"{param_name} is {typeof(x)}" for x in tensors if isinstance(x, ShardedTensor)]
        if found:
            unsupported.refuse_collective(f"torch.distributed.{sys._getframe(1).f_code.co_name}", found)
        refuse_while_tracing(param_name)
        check(param, param_name)

    return checked


def _outside_traces(function: Callable[..., Any]) -> Callable[..., Any]:
    """One of c10d's functions by which ranks communicate without a tensor."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        refuse_while_tracing(function.__name__)
        return function(*args, **kwargs)

    return called


def _c10d(_: Any) -> None:
    for slot in C10D_CHECKS:
        slot.value = _checked(slot.value)
    for slot in C10D_STEPS:
        slot.value = _outside_traces(slot.value)


def _wrapper(name: str, argument: str = "module") -> Callable[[Any], None]:
    """Refuse modules with ShardedTensors where the class `name` is made."""

    def teach(module: Any) -> None:
        cls = getattr(module, name)
        init = cls.__init__

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            _refuse_module(name, args[0] if args else kwargs.get(argument))
            init(self, *args, **kwargs)

        cls.__init__ = checked

    return teach


def _refuse_module(name: str, given: Any) -> None:
    named = given.named_parameters() if isinstance(given, torch.nn.Module) else [("the parameter", given)]
    found = [f"{path} is {typeof(x)}" for path, x in named if isinstance(x, ShardedTensor)]
    if found:
        raise ShardingError(
            f"{'fully_shard' if name == 'FSDPParam' else name} on parameters that are placed already",
            found,
            rule="a ShardedTensor says where it lives, and its gradients are reduced by the ops that make them",
            remedy="leave the wrapper out: cut the batch (and the parameters, as FSDP does) by shard(x, spec)",
        )


TAUGHT: dict[str, Callable[[Any], None]] = {
    C10D: _c10d,
    "torch.nn.parallel.distributed": _wrapper("DistributedDataParallel"),
    "torch.nn.parallel.data_parallel": _wrapper("DataParallel"),
    "torch.distributed.fsdp.fully_sharded_data_parallel": _wrapper("FullyShardedDataParallel"),
    FSDP_PARAMETERS: _wrapper("FSDPParam", "param"),
}
