"""A step of Adam on one parameter, as one op: torch's fused kernel, with the rate as an argument of each call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.ops import define_op

aten = torch.ops.aten

DTYPES = (torch.float32, torch.float64)  # in others the kernel rounds less often than torch's unfused form


def adam(
    parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, step: Tensor, rate: float, beta1: float,
    beta2: float, eps: float, decay: float, decoupled: bool, *, over: Sequence[int | None] = (None,) * 4,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Updates a parameter, its two moments (all of one shape, and one of `DTYPES`), and its step counter [].

    A result is written over its operand if its entry of `over` is a number, or has new memory (None).
    Kingma, Ba, "Adam: A Method for Stochastic Optimization" (2014); with `decoupled` decay Loshchilov, Hutter,
    "Decoupled Weight Decay Regularization" (2017).
    """
    dense = torch.contiguous_format  # the kernel ignores strides
    old = (parameter, mean, square)
    new = [x.clone(memory_format=dense) if k is None else x.contiguous() for x, k in zip(old, over[:3], strict=True)]
    count = step.to(parameter.device, torch.float32) + 1  # a counter in bfloat16 stops at 256
    new_step = step + 1 if over[3] is None else step.add_(1)
    kernel = aten._fused_adamw_ if decoupled else aten._fused_adam_
    p, m, v = ([x] for x in new)
    kernel(
        p, [gradient.contiguous()], m, v, [], [count], lr=float(rate), beta1=beta1, beta2=beta2, weight_decay=decay,
        eps=eps, amsgrad=False, maximize=False,
    )  # fmt: skip
    for i, x in enumerate(old):
        if over[i] is not None and new[i] is not x:
            new[i] = x.copy_(new[i])
    return new[0], new[1], new[2], new_step


def _fake(parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, step: Tensor, *_: Any) -> Any:
    new = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (parameter, mean, square))
    return (*new, torch.empty_like(step))


def _refuse(_: Any, *gradients: Tensor | None) -> Any:
    shapes = [list(g.shape) for g in gradients[:1] if g is not None]
    raise NotImplementedError(
        f"shardlib::adam, the step of a parameter of shape {shapes[0] if shapes else 'unknown'}, has no gradient: "
        "differentiate torch's own update, torch.optim.Adam(..., differentiable=True)"
    )


ADAM = define_op(
    "adam(Tensor parameter, Tensor gradient, Tensor mean, Tensor square, Tensor step, Scalar rate, Scalar beta1, "
    "Scalar beta2, Scalar eps, Scalar decay, bool decoupled) -> (Tensor, Tensor, Tensor, Tensor)",
    adam,
    _fake,
)
torch.library.register_autograd("shardlib::adam", _refuse)
