"""A step of Adam on one parameter, as one op: torch's fused kernel, whose rate may be another one in every call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_library: Any = torch.library.Library  # which has no types
_LIB = _library("shardlib", "FRAGMENT")
_LIB.define(
    "adam(Tensor parameter, Tensor gradient, Tensor mean, Tensor square, Tensor step, Scalar rate, Scalar beta1, "
    "Scalar beta2, Scalar eps, Scalar decay, bool decoupled) -> (Tensor, Tensor, Tensor, Tensor)"
)
DTYPES = (torch.float32, torch.float64)  # in others the kernel rounds once where torch's plain form rounds often


def adam(
    parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, step: Tensor, rate: float, beta1: float,
    beta2: float, eps: float, decay: float, decoupled: bool, *, over: Sequence[int | None] = (None,) * 4,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """What a step makes of a parameter, its two moments (all of one shape, and one of `DTYPES`), and its counter [].

    Each is written where the operand of its number in `over` is, or has memory of its own (None).
    Kingma, Ba, "Adam: A Method for Stochastic Optimization" (2014); with `decoupled` decay Loshchilov, Hutter,
    "Decoupled Weight Decay Regularization" (2017).

    Example:
        >>> one, zero = torch.ones(2), torch.zeros(2)
        >>> p, mean, square, step = adam(one, one, zero, zero, torch.tensor(0.0), 0.1, 0.9, 0.999, 1e-8, 0.0, False)
        >>> p, step
        (tensor([0.9000, 0.9000]), tensor(1.))
    """
    dense = torch.contiguous_format  # the kernel goes through all of them as through rows of numbers
    given = (parameter, mean, square)
    made = [x.clone(memory_format=dense) if k is None else x.contiguous() for x, k in zip(given, over[:3], strict=True)]
    count = step.to(parameter.device, torch.float32) + 1  # one in 8 bits of mantissa would stand still
    now = step + 1 if over[3] is None else step.add_(1)
    kernel = aten._fused_adamw_ if decoupled else aten._fused_adam_
    new, m, v = ([x] for x in made)
    kernel(
        new, [gradient.contiguous()], m, v, [], [count], lr=float(rate), beta1=beta1, beta2=beta2, weight_decay=decay,
        eps=eps, amsgrad=False, maximize=False,
    )  # fmt: skip
    for i, x in enumerate(given):
        if over[i] is not None and made[i] is not x:
            made[i] = x.copy_(made[i])
    return made[0], made[1], made[2], now


def _fake(parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, step: Tensor, *_: Any) -> Any:
    made = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (parameter, mean, square))
    return (*made, torch.empty_like(step))


def _refuse(_: Any, *gradients: Tensor | None) -> Any:
    shapes = [list(g.shape) for g in gradients[:1] if g is not None]
    raise NotImplementedError(
        f"shardlib::adam, the step of a parameter of shape {shapes[0] if shapes else 'unknown'}, has no gradient: "
        "differentiate torch's own update, torch.optim.Adam(..., differentiable=True)"
    )


_LIB.impl("adam", adam, "CompositeExplicitAutograd")
torch.library.register_autograd("shardlib::adam", _refuse, lib=_LIB)
torch.library.register_fake("shardlib::adam", _fake, lib=_LIB)

ADAM: Any = torch.ops.shardlib.adam.default
