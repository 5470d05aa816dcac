"""Modules of torch whose Python code reads values of tensors or replaces their memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.core.context import is_tracing
from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import (
    BATCH_NORM,
    FLATTEN_RNN,
    MODULE_APPLY,
    FakeTensor,
    input_check_of,
)
from shardlib.integrations.on_import import replaces, when_imported
from shardlib.tensor.sharded_tensor import ShardedTensor


@when_imported("torch.nn.modules.batchnorm")
def _patch_batchnorm(_: Any) -> None:
    """Traces `momentum=None`, the mean over all batches, as tensor arithmetic: their number is a buffer."""

    @replaces(BATCH_NORM)
    def forward(original: Callable[..., Tensor], self: Any, input: Tensor) -> Tensor:
        counts = self.training and self.track_running_stats and self.num_batches_tracked is not None
        if self.momentum is not None or not counts or not is_tracing():
            return original(self, input)
        input_check_of(self)(input)
        self.num_batches_tracked.add_(1)
        mean, var = self.running_mean.clone(), self.running_var.clone()
        with torch.no_grad():  # before the last op that a checkpoint recomputes
            F.batch_norm(input, mean, var, None, None, True, 1.0, self.eps)
            part = 1 / self.num_batches_tracked.to(mean.dtype)
            self.running_mean.lerp_(mean, part)
            self.running_var.lerp_(var, part)
        return F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)


@when_imported("torch.nn.modules.rnn")
def _patch_recurrent(_: Any) -> None:
    """Keeps ShardedTensors out of the one block of memory that cuDNN uses for weights."""

    @replaces(FLATTEN_RNN)
    def flatten_parameters(original: Callable[..., None], self: Any) -> None:
        if not any(isinstance(w, ShardedTensor) for w in self._flat_weights):
            original(self)


def _replace_values(self: Any, values: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Gives new values to a module that the traced function created; torch would write to the old ones' memory."""
    for name, (x, y) in values.items():
        is_param = name in self._parameters
        new = torch.nn.Parameter(y, x.requires_grad) if is_param else y.requires_grad_(x.requires_grad)
        (self._parameters if is_param else self._buffers)[name] = new


@when_imported("torch.nn.modules.module")
def _patch_module(_: Any) -> None:
    """Refuses conversions of modules in a trace before they begin, but not a `m.to(device)` that changes nothing."""

    @replaces(MODULE_APPLY)
    def apply(original: Callable[..., Any], self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if is_tracing():
            own = {"recurse": False, "remove_duplicate": False}
            tensors = dict(chain(self.named_parameters(**own), self.named_buffers(**own)))
            new = {name: fn(x.detach()) for name, x in tensors.items()}
            offenders = [
                f"{type(self).__name__}.{name} is {list(x.shape)} of {x.dtype}, and would be {y.dtype} on {y.device}"
                for name, x in tensors.items()
                if not isinstance(x, FakeTensor)  # created by the function
                and ((y := new[name]).dtype != x.dtype or y.device.type != x.device.type)
            ]
            if offenders:
                raise ShardingError(
                    "the traced function converts a module",
                    offenders,
                    rule="what a program is given keeps its dtype and its device",
                    remedy="convert the module before the call; or compute in another dtype, under torch.autocast",
                )
            if tensors and all(isinstance(x, FakeTensor) for x in tensors.values()):
                for child in self.children() if recurse else ():
                    apply(child, fn)
                _replace_values(self, {name: (x, new[name]) for name, x in tensors.items()})
                return self
        return original(self, fn, recurse)
