"""`shard(x, spec)` while a function is traced: a node that says where a value lives, and its cotangent too.

The node computes nothing. It is an op of its own (not an annotation on some node) because the same value may be
constrained twice, differently, and because vmap and grad must carry it along.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from shardlib.core.context import is_tracing
from shardlib.core.torch_private import count_function_modes

_LIB: Any = torch.library.Library("shardlib", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIB.define("constrain(Tensor x, str spec) -> Tensor")


def _constrain(x: Tensor, spec: str) -> Tensor:
    return x.clone()  # an op's result must not alias its operand


def _fake(x: Tensor, spec: str) -> Tensor:
    return torch.empty_like(x)


_LIB.impl("constrain", _constrain, "CompositeExplicitAutograd")
torch.library.register_fake("shardlib::constrain", _fake, lib=_LIB)


def constrain(x: Tensor, spec: str, back: str | None = None) -> Tensor:
    """The value x, of any shape, laid out as the text `spec` says; so is the gradient that flows back through it,
    unless `back` says otherwise.

    Under vmap the batch dim is put in front and left open (`_?`), for the compiler to decide.

    Example:
        >>> w = torch.ones(2, 3, requires_grad=True)
        >>> constrain(w, "embed ff").sum().backward()
        >>> w.grad.sum().item()
        6.0
    """
    if is_tracing() and count_function_modes() and has_torch_function((x,)):  # as a function of torch
        return handle_torch_function(constrain, (), x, spec, back)
    return _Constrain.apply(x, spec, spec if back is None else back)  # type: ignore[no-any-return,no-untyped-call]


class _Constrain(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, spec: str, back: str) -> Any:
        return torch.ops.shardlib.constrain(x, spec)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str, str], output: Tensor) -> None:
        _, ctx.spec, ctx.back = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return constrain(grad, ctx.back, ctx.spec), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return constrain(tangent, ctx.spec, ctx.back)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, None, None], x: Tensor, spec: str, back: str) -> tuple[Tensor, int]:
        assert in_dims[0] is not None, "vmap rules run for batched operands only"
        return constrain(x.movedim(in_dims[0], 0), *(f"_? {text}".rstrip() for text in (spec, back))), 0
