"""Facts about a value's numbers that the graph proves: a range, indices, equal rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from shardlib.compiler.graph.ir import Value
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.torch_internals.torch_private import OpOverload, schema_of
from shardlib.rules.iteration_space import arg

_aten = torch.ops.aten
_RANGES = (_aten.arange.default, _aten.arange.start, _aten.arange.start_step)
EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)  # dtypes that hold any index exactly


def uncast(x: Value) -> Value:
    """Returns the value behind views of the same shape and casts to dtypes that hold its numbers."""
    while (op := x.op) is not None and len(op.operands) == 1 and op.operands[0].shape == x.shape:
        if not (op.transparent or has_trait(op.target, "copies")) or x.dtype not in EXACT:
            break
        (x,) = op.operands
    return x


def is_range(x: Value) -> bool:
    """True if a value is 0, 1, 2 ..., along one dim."""
    op, count = x.op, math.prod(x.shape)
    while op is not None and op.transparent and max(x.shape, default=0) == count:
        (x,) = op.operands
        op = x.op
    if op is None or math.prod(x.shape) != count or op.target not in _RANGES:
        return False
    return (arg(op.call, "start", 0), arg(op.call, "step", 1)) == (0, 1)


def is_index(x: Value, *, or_clamped: bool = False) -> bool:
    """True if a value holds indices that an op returned (of topk, say), so that none is negative; or is clamped so."""
    while (op := x.op) is not None and not x.dtype.is_floating_point:
        if op.transparent or has_trait(op.target, "copies"):
            (x,) = op.operands
        elif op.target in (_aten.clamp.default, _aten.clamp_min.default):
            low = arg(op.call, "min")
            return or_clamped and type(low) is int and low >= 0
        else:
            returns: Sequence[Any] = schema_of(op.target).returns if isinstance(op.target, OpOverload) else ()
            return x.index == 1 and len(returns) == 2 and returns[1].name == "indices"
    return False


def has_equal_rows(x: Value, dim: int) -> bool:
    """True if all rows of a constant along `dim` are equal."""
    while x.constant and x.op is not None and x.op.transparent:
        rule = x.op.required_rule
        dims, row = rule.operands[0], rule.results[0][dim]
        if not any({*factors} & {*row} for factors in dims):  # expanded
            return True
        if row not in dims:
            return False
        (x,), dim = x.op.operands, dims.index(row)
    return (
        x.constant and x.op is not None and (has_trait(x.op.target, "fills") or has_trait(x.op.target, "uninitialized"))
    )
