"""`shard(x, spec)` in a traced function: a node that constrains the layout of a value and of its cotangent.

The node computes nothing. It is an op, not an annotation on a node: the same value may have two different constraints,
and vmap and grad transform ops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from shardlib.core.context import is_tracing
from shardlib.core.torch_internals.torch_private import count_function_modes
from shardlib.ops import define_op

# A clone, since an op's result must not alias its operand.
define_op("constrain(Tensor x, str spec) -> Tensor", lambda x, spec: x.clone(), lambda x, spec: torch.empty_like(x))


def constrain(x: Tensor, spec: str, back: str | None = None) -> Tensor:
    """Constrains x, of any shape, to the spec `spec`, and its gradient to `back` (by default `spec`).

    Under vmap the batch dim is the first, and open (`_?`): the compiler decides it.
    """
    if is_tracing() and count_function_modes() and has_torch_function((x,)):  # torch function modes see this call
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
