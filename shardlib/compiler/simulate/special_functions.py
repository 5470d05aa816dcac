"""Counts the special functions of a call: exponentials, logarithms and the like.

GPUs have few units for them, and CPUs sum series, so with fast memory they dominate. There is a row for every op that
evaluates some per element. Ops on earlier results (`tanh_backward`) evaluate none, and roots and quotients are as fast
as memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from shardlib.compiler.program.steps import Compute, Var
from shardlib.core.torch_internals.torch_private import OpOverload, schema_of

_ONE = (
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "erf", "erfc", "erfinv", "lgamma", "digamma"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    *("sigmoid", "silu", "silu_backward", "gelu", "elu", "xlogy", "logit"),
    *("_softmax", "_log_softmax", "_log_softmax_backward_data", "scores_backward", "logsumexp", "softplus_backward"),
)
_TWO = ("softplus", "log_sigmoid_forward", "logaddexp", "logaddexp2", "gelu_backward")
_THREE = ("mish", "mish_backward")

# Functions per element of the largest operand or result, by the name of the op.
PER_ELEMENT: Mapping[str, int] = {
    **dict.fromkeys(_ONE, 1),
    **dict.fromkeys(_TWO, 2),
    **dict.fromkeys(_THREE, 3),
}
# Matrix products of the size of queries times keys in attention, which also evaluates an exponential per score.
PRODUCTS: Mapping[str, int] = {"attention": 2, "attention_backward": 5}
_QUERIES: Mapping[str, int] = {"attention": 0, "attention_backward": 2}  # the position of queries; keys follow


def evaluated(step: Compute, tile: int) -> float:
    """Counts the functions of a call on the fullest device; attention works on tiles of `tile` keys."""
    name = op_name(step.target)
    if name == "pow":
        each = 0 if _is_product(step.args[1]) else 2  # exp(y log x)
    elif name in PRODUCTS:
        return tiled(step, tile) * _scores(step, name)
    else:
        each = PER_ELEMENT.get(name, 0)
    return float(each * max((v.numel for v in (*step.operands, *step.out_vars)), default=0)) if each else 0.0


def tiled(step: Compute, tile: int) -> float:
    """Returns the FLOPs run per counted FLOP: masked attention computes its last tile of keys as a whole."""
    name = op_name(step.target)
    if name not in PRODUCTS or tile == 1 or not (scores := _scores(step, name)):
        return 1.0
    q, k = (_shape(step.args[_QUERIES[name] + i]) for i in range(2))
    seen = scores / math.prod(q[:3])  # keys per query, on average
    return max(1.0, min(k[2], seen + tile / 2) / seen) if k else 1.0


def _scores(step: Compute, name: str) -> float:
    """Counts the pairs of a query and a key in attention; 0 if unknown."""
    q = _shape(step.args[_QUERIES[name]])
    return step.flops / (2 * PRODUCTS[name] * q[3]) if q and step.flops else 0.0


@cache
def op_name(target: Any) -> str:
    """Returns the name of an op without namespace, overload and in-place underscore."""
    return schema_of(target).name.rpartition("::")[2].rstrip("_") if isinstance(target, OpOverload) else ""


def _is_product(exponent: Any) -> bool:
    """True if a power is computed by products and roots."""
    return isinstance(exponent, int | float) and float(2 * exponent).is_integer() and abs(exponent) <= _POWER


_POWER = 3


def _shape(v: Var) -> tuple[int, ...]:
    """Returns the shape on the fullest device, the one at the origin; () if unknown."""
    if v.layout is None:
        return v.shape or ()
    return v.layout.local_shape({axis.name: 0 for axis in v.layout.axes})
