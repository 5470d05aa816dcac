"""Pointwise ops: every dim of the result is a factor, and operands broadcast against it.

Torch tags pointwise ops. This table adds the ops without the tag, and the sets of operands in which an op is linear.
Linear in {0,1} means `f(a + a', b + b') = f(a, b) + f(a', b')`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from shardlib.core.torch_internals.torch_private import OpOverload, schema_of
from shardlib.rules.iteration_space import (
    Space,
    arg,
    broadcast_labels,
    broadcast_shapes,
    present_operands,
    result_shape,
    tensor_arguments,
)
from shardlib.rules.patterns import joint, pattern
from shardlib.rules.rule import Call, Rule, RuleFn


def pointwise(sets: str = "", *, transparent: bool = False) -> RuleFn:
    """Returns the rule of a pointwise op that is linear in `sets`, written as in the notation: `{0} {1}`, `{0,1}`."""
    linear = [frozenset(map(int, s.strip("{}").split(","))) for s in sets.split()]
    return lambda call: _pointwise(call, linear, transparent)


def _pointwise(call: Call, linear: Iterable[frozenset[int]], transparent: bool) -> Rule:
    space = Space()
    shape = broadcast_shapes(m.shape for m in call.operands)
    dims = space.dims(shape)
    operands = [broadcast_labels(dims, m.shape) for m in call.operands]
    results = [() if m is None else dims for m in call.results]
    tensors = tensor_arguments(call.target)
    sets = joint(linear, present_operands(call, len(tensors))) if tensors is not None else ()
    return space.rule(
        operands, results, linear=sets, flops=0 if transparent else math.prod(shape), transparent=transparent
    )


def is_pointwise(target: OpOverload) -> bool:
    """Returns whether torch tags the op as pointwise, and it neither writes to an operand nor draws random numbers.

    `aten.equal` has the tag, but returns one answer for all elements.
    """
    return (
        torch.Tag.pointwise in target.tags
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not schema_of(target).is_mutable
        and all(str(r.type) == "Tensor" for r in schema_of(target).returns)
    )


def _to_copy(call: Call) -> Rule:
    (old,), (new,) = call.operands, call.results
    return _pointwise(call, [frozenset({0})], transparent=old == new)


def _by_number(
    fits: Callable[[complex], object],
    tensors: str = "",
    *,
    half: Callable[[complex], object] | None = None,
    name: str = "other",
) -> RuleFn:
    """Returns the rule of an op whose linearity depends on the argument `name`.

    The op is linear in its first operand if the argument is a number that `fits`, and in the sets `tensors` if it is a
    tensor. With a rounding mode it is linear in nothing. In float16, addends may overflow where their sum does not: a
    number must then satisfy `half`, if given, and a tensor never does.
    """
    linear, plain, of_tensors = pointwise("{0}"), pointwise(), pointwise(tensors)

    def rule(call: Call) -> Rule | None:
        value = arg(call, name)
        fit = half if half and call.operands[0].dtype == torch.float16 else fits
        if type(value) not in (int, float, complex):
            return (of_tensors if fit is fits else plain)(call)
        return (linear if fit(value) and call.kwargs.get("rounding_mode") is None else plain)(call)

    return rule


def _log_sigmoid(call: Call) -> Rule:
    """The last tensor is a buffer, which is empty on GPUs."""
    backward = len(call.operands) > 1
    shape, buffer = call.operands[0].shape, call.operands[2].shape if backward else result_shape(call, 1)
    last = "..." if buffer == shape else "_"
    return pattern(f"..., ..., {last} -> ... | {{0}}" if backward else f"... -> ..., {last} | ...:none")(call)


# Parameter, gradient and moments are of one shape; the counter has none.
_ADAM = pattern("..., ..., ..., ..., -> ..., ..., ..., | ...:none", flops=14)

# Identities have no influence on layouts.
IDENTITIES = dict.fromkeys(
    ["alias", "detach", "lift", "lift_fresh", "lift_fresh_copy", "clone", "detach_copy", "alias_copy"],
    pointwise("{0}", transparent=True),
)

# A set applies only if all its members are tensors.
LINEAR = {
    "rsub.Tensor": "{0,1}",
    "where.self": "{1,2}",
    "neg": "{0}",
    "addcmul": "{0,1} {0,2}",
    "lerp.Scalar": "{0,1}",
    "lerp.Tensor": "{0,1}",
}

_BENT = ["gelu", "silu", "tanh", "sigmoid", "threshold", "elu", "leaky_relu", "hardtanh", "softplus", "mish"]
_BENT += ["hardswish", "hardsigmoid", "hardshrink", "softshrink", "_prelu_kernel", "rrelu_with_noise", "native_dropout"]

ROWS: dict[str, RuleFn | str] = {
    **IDENTITIES,
    **{f"{name}_backward": pointwise("{0}") for name in _BENT},
    **{name: pointwise(sets) for name, sets in LINEAR.items()},
    # Adding a number is not linear, unless it is 0, which Python's `sum` begins with.
    **dict.fromkeys(("add.Tensor", "sub.Tensor", "rsub.Scalar"), _by_number(lambda n: n == 0, "{0,1}")),
    # With a number beyond float32, a product of the sum is `s * inf`, and one of an addend is `0 * inf`.
    **dict.fromkeys(
        ("mul.Tensor", "mul.Scalar"), _by_number(lambda n: abs(n) < 1e38, "{0} {1}", half=lambda n: abs(n) <= 1)
    ),
    # A sum divided by 0 is infinite, and an addend divided by 0 may be NaN. The values of tensors are unknown.
    **dict.fromkeys(("div.Tensor", "div.Scalar", "div.Tensor_mode"), _by_number(bool, half=lambda n: abs(n) >= 1)),
    "_to_copy": _to_copy,
    "copy": pointwise("{1}"),  # the values of the second in the shape and dtype of the first
    **dict.fromkeys(["log_sigmoid_forward", "log_sigmoid_backward"], _log_sigmoid),
    **dict.fromkeys(["floor_divide", "floor_divide.Scalar", "fill.Scalar", "fill.Tensor"], pointwise()),
    # Filling with zeros is linear.
    "masked_fill.Scalar": _by_number(lambda n: n == 0, name="value"),
    **dict.fromkeys(["masked_fill.Tensor", "shardlib::within"], pointwise()),
    "shardlib::adam": _ADAM,
    "shardlib::cast_terms": pointwise("{0}"),
    "shardlib::constrain": pointwise("{0}"),
}
