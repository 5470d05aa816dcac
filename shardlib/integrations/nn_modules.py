"""Modules of torch whose Python reads numbers out of tensors: while they are traced, it is arithmetic of tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.core.context import is_tracing
from shardlib.core.errors import ShardingError
from shardlib.core.torch_private import BATCH_NORM, FLATTEN_RNN, MODULE_APPLY, FakeTensor, input_check_of
from shardlib.tensor.sharded_tensor import ShardedTensor


def _batchnorm(_: Any) -> None:
    """`momentum=None`: the mean over all batches, whose number is a buffer."""
    forward = BATCH_NORM.value

    @functools.wraps(forward)
    def cumulative(self: Any, input: Tensor) -> Tensor:
        counted = self.training and self.track_running_stats and self.num_batches_tracked is not None
        if self.momentum is not None or not counted or not is_tracing():
            result: Tensor = forward(self, input)
            return result
        input_check_of(self)(input)
        self.num_batches_tracked.add_(1)
        mean, var = self.running_mean.clone(), self.running_var.clone()
        with torch.no_grad():  # before the op that ends what a checkpoint runs again
            F.batch_norm(input, mean, var, None, None, True, 1.0, self.eps)
            part = 1 / self.num_batches_tracked.to(mean.dtype)
            self.running_mean.lerp_(mean, part)
            self.running_var.lerp_(var, part)
        return F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)

    BATCH_NORM.value = cumulative


def _recurrent(_: Any) -> None:
    """On a GPU, weights are put into one memory where they can be."""
    flatten = FLATTEN_RNN.value

    @functools.wraps(flatten)
    def where_whole(self: Any) -> None:
        if not any(isinstance(w, ShardedTensor) for w in self._flat_weights):
            flatten(self)

    FLATTEN_RNN.value = where_whole


def _replace(self: Any, of: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Give a module that the traced function made other values: torch would write to the old ones' memory."""
    for name, (x, y) in of.items():
        is_param = name in self._parameters
        new = torch.nn.Parameter(y, x.requires_grad) if is_param else y.requires_grad_(x.requires_grad)
        (self._parameters if is_param else self._buffers)[name] = new


def _module(_: Any) -> None:
    """`m.to(device)` that changes nothing is fine; a conversion is refused before it begins."""
    apply = MODULE_APPLY.value

    @functools.wraps(apply)
    def converted(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if is_tracing():
            own = {"recurse": False, "remove_duplicate": False}
            of = dict(chain(self.named_parameters(**own), self.named_buffers(**own)))
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
            if of and all(isinstance(x, FakeTensor) for x in of.values()):
                for child in self.children() if recurse else ():
                    converted(child, fn)
                _replace(self, {k: (x, new[k]) for k, x in of.items()})
                return self
        return apply(self, fn, recurse)

    MODULE_APPLY.value = converted


TAUGHT: dict[str, Callable[[Any], None]] = {
    "torch.nn.modules.module": _module,
    "torch.nn.modules.batchnorm": _batchnorm,
    "torch.nn.modules.rnn": _recurrent,
}
