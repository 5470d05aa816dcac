"""Predicates of pointwise ops: which accept any values, and which map zeros to zeros."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from shardlib.compiler.graph.ir import Op
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.torch_internals.torch_private import pytree, without_modes
from shardlib.rules.rule import Meta


def is_total_pointwise(op: Op) -> bool:
    """Returns whether an op is pointwise and accepts undefined values: it divides no integers, say."""
    pointwise = op.target.namespace == "aten" and torch.Tag.pointwise in op.target.tags
    return pointwise and not has_trait(op.target, "raises_on_values")


def keeps_zeros(op: Op) -> bool:
    """Returns whether a pointwise op maps zeros of any signs to zeros."""
    dims, shape = itertools.count(), [2] * len(op.operands)
    plain = (int, float, bool, str, torch.Tensor, type(None))

    def zero(x: Any) -> Any:
        if isinstance(x, Meta):
            dtype = torch.float32 if x.dtype.is_floating_point else x.dtype
            signs = torch.tensor([0.0, -0.0], dtype=dtype).reshape(2, *[1] * next(dims))
            return signs.expand(shape).contiguous()  # each with each
        return x

    with without_modes():
        args, kwargs = pytree.tree_map(zero, (op.call.args, dict(op.call.kwargs)))
        if not all(isinstance(x, plain) for x in pytree.tree_leaves((args, kwargs))):
            return False
        return bool((op.target(*args, **kwargs) == 0).all())
