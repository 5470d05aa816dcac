"""Activations that torch does not tag as pointwise, and those that halve a dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardlib.internals import schema_of
from shardlib.rules.pointwise import pointwise
from shardlib.rules.rule import Call, Meta, Rule, RuleFn
from shardlib.rules.space import Space, arg, axis, numel

# Arguments and results: "x" has both halves, "h" is shaped like one.
_HALVED = {
    "glu": ("x", "h"),
    "glu_backward": ("hx", "x"),
    "glu_jvp": ("hxx", "h"),
    "glu_backward_jvp": ("xhxhx", "x"),
}


def _glu(call: Call) -> Rule:
    """The dim is (two, half): a shard of the half dim has its part of both halves."""
    kinds, outs = _HALVED[schema_of(call.target).name.removeprefix("aten::")]
    shape = call.operands[kinds.index("x")].shape
    space = Space()
    at = axis(arg(call, len(kinds), "dim", -1), len(shape))
    half = [space.dim(n // 2 if i == at else n) for i, n in enumerate(shape)]
    two = space.dim(2, "two", whole=True)
    dims = {"h": half, "x": [two + d if i == at else d for i, d in enumerate(half)]}
    assert all(isinstance(a, Meta) for a in call.args[: len(kinds)])
    return space.rule(
        [dims[k] for k in kinds],
        [dims[k] for k in outs],
        linear=[{0}] if schema_of(call.target).name == "aten::glu_backward" else [],
        flops=5 * numel(shape),
    )


def _rrelu(
    x: torch.Tensor,
    noise: torch.Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """`rrelu_with_noise`, which writes the slopes into `noise`."""
    if not training:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2)
    drawn = torch.empty_like(x).uniform_(lower, upper, generator=generator)
    noise.copy_(torch.where(x > 0, 1, drawn))
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
    """Into a given tensor; nobody reads the buffer, which is for a gradient."""
    return output.copy_(torch.nn.functional.logsigmoid(x)), buffer


ROWS: dict[str, RuleFn | str] = {
    **dict.fromkeys(_HALVED, _glu),
    "hardswish": pointwise(),
    "_prelu_kernel": pointwise(),
    **dict.fromkeys(
        ["_prelu_kernel_backward", "hardshrink_backward", "softshrink_backward", "rrelu_with_noise_backward"],
        pointwise("{0}"),
    ),
    **dict.fromkeys(["_add_relu.Tensor", "_add_relu.Scalar"], pointwise()),
}

DECOMPOSED: dict[str, Callable[..., Any]] = {
    "rrelu_with_noise": _rrelu,
    "rrelu_with_noise_functional": _rrelu_functional,
    "rrelu_with_noise_": _rrelu_in_place,
    "log_sigmoid_forward.output": _log_sigmoid_out,
}
