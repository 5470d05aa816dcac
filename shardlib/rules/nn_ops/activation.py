"""Activations that torch does not tag as pointwise, and activations that halve a dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardlib.rules.notation import gradient_pattern
from shardlib.rules.rule import RuleFn
from shardlib.rules.tensor_ops.pointwise import pointwise


def _rrelu(
    x: torch.Tensor,
    noise: torch.Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """`rrelu_with_noise`, which writes the slopes to `noise`."""
    if not training:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2)
    slopes = torch.empty_like(x).uniform_(lower, upper, generator=generator)
    noise.copy_(torch.where(x > 0, 1, slopes))
    return x * noise


def _rrelu_functional(
    x: torch.Tensor, noise: torch.Tensor, *rest: Any, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    noise = noise.clone()
    return _rrelu(x, noise, *rest, **named), noise


def _rrelu_in_place(x: torch.Tensor, noise: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    return x.copy_(_rrelu(x, noise, *rest, **named))


def _log_sigmoid_out(
    x: torch.Tensor, *, output: torch.Tensor, buffer: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Leaves the buffer unchanged: it serves gradients, and out= ops have none."""
    return output.copy_(torch.nn.functional.logsigmoid(x)), buffer


_GLU = "[two dim] -> [dim] | two:whole"

ROWS: dict[str, RuleFn | str] = {
    "glu": _GLU,
    "glu_backward": gradient_pattern(_GLU, "0"),
    "glu_jvp": "[dim], [two dim], [two dim] -> [dim] | two:whole",
    "glu_backward_jvp": "[two dim], [dim], [two dim], [dim], [two dim] -> [two dim] | two:whole",
    "hardswish": pointwise(),
    "_prelu_kernel": pointwise(),
    **dict.fromkeys(["_add_relu.Tensor", "_add_relu.Scalar"], pointwise()),
}

DECOMPOSED: dict[str, Callable[..., Any]] = {
    "rrelu_with_noise": _rrelu,
    "rrelu_with_noise_functional": _rrelu_functional,
    "rrelu_with_noise_": _rrelu_in_place,
    "log_sigmoid_forward.output": _log_sigmoid_out,
}
