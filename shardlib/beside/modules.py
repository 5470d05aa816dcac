"""Modules of torch whose Python reads numbers out of tensors: while they are traced, it is arithmetic of tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from shardlib.errors import ShardingError
from shardlib.state import is_tracing


def _batchnorm(module: Any) -> None:
    """`momentum=None`: the mean over all batches, whose number is a buffer."""
    cls = module._BatchNorm
    forward = cls.forward

    @functools.wraps(forward)
    def cumulative(self: Any, input: Tensor) -> Tensor:
        counted = self.training and self.track_running_stats and self.num_batches_tracked is not None
        if self.momentum is not None or not counted or not is_tracing():
            result: Tensor = forward(self, input)
            return result
        self._check_input_dim(input)
        self.num_batches_tracked.add_(1)
        mean, var = self.running_mean.clone(), self.running_var.clone()
        out = F.batch_norm(input, mean, var, self.weight, self.bias, True, 1.0, self.eps)
        with torch.no_grad():
            part = 1 / self.num_batches_tracked.to(mean.dtype)
            self.running_mean.lerp_(mean, part)
            self.running_var.lerp_(var, part)
        return out

    cls.forward = cumulative


def _module(module: Any) -> None:
    """`m.to(device)` that changes nothing is fine; a conversion is refused before it begins."""
    cls = module.Module
    apply = cls._apply

    @functools.wraps(apply)
    def converted(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if is_tracing():
            of = {name: x for space in (self._parameters, self._buffers) for name, x in space.items() if x is not None}
            new = {name: fn(x.detach()) for name, x in of.items()}
            wrong = [
                f"{type(self).__name__}.{name} is {list(x.shape)} of {x.dtype}, and would be {y.dtype} on {y.device}"
                for name, x in of.items()
                if not isinstance(x, FakeTensor)  # the function's own
                and ((y := new[name]).dtype != x.dtype or y.device.type != x.device.type)
            ]
            if wrong:
                raise ShardingError(
                    "the traced function converts a module",
                    wrong,
                    rule="what a program is given keeps its dtype and its device",
                    remedy="convert the module before the call; or compute in another dtype, under torch.autocast",
                )
        return apply(self, fn, recurse)

    cls._apply = converted


TAUGHT: dict[str, Callable[[Any], None]] = {
    "torch.nn.modules.module": _module,
    "torch.nn.modules.batchnorm": _batchnorm,
}
