"""Modules of torch whose Python reads numbers out of tensors: while they are traced, it is arithmetic of tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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


TAUGHT: dict[str, Callable[[Any], None]] = {"torch.nn.modules.batchnorm": _batchnorm}
