"""Models in float64 throughout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Wide(TorchFunctionMode):
    """While on, what a model casts to float32 (norms, softmax, rotary angles, logits of the loss) becomes float64.

    A rounding in the middle of a model would hide errors: sums in another order differ by its step then.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        if func in (torch.Tensor.to, torch.Tensor.type):
            args = tuple(map(_widened, args))
        return func(*args, **{name: _widened(x) for name, x in (kwargs or {}).items()})


def _widened(x: Any) -> Any:
    return torch.float64 if not isinstance(x, Tensor) and x is torch.float32 else x
