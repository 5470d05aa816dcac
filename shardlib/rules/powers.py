"""Norms: sums of powers, over cut dims too.

A sum of first powers, a count and a maximum may stay pending; the root of any other sum cannot wait, so devices add up
before they take it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.rules.reduction import reduction
from shardlib.rules.rule import Call, Local, Rule, RuleFn
from shardlib.rules.shards import cast, cut, never_empty, wide
from shardlib.rules.space import arg

aten = torch.ops.aten

_PENDING = {math.inf: "max", -math.inf: "min", 0: "sum", 1: "sum"}


def _vector_norm(call: Call) -> Rule | None:
    """`linalg_vector_norm(x, ord, dim, keepdim, dtype)`."""
    kind = _PENDING.get(arg(call, 1, "ord", 2), "none")
    return reduction(kind, dim=(2, "dim"), local=_root if kind == "none" else _piece)(call)


def _piece(local: Local, dtype: torch.dtype | None = None) -> Any:
    """The norm of this device's piece; nothing counts as the number that changes no norm."""
    order = arg(local, 1, "ord", 2)
    x = local.args[0]
    if order < 0 or order == math.inf:
        x = never_empty(local, x, 0, cut(local, local.rule.reduce), math.inf if order < 0 else 0)
    keepdim, dtype = arg(local, 3, "keepdim", False), dtype or local.kwargs.get("dtype")
    return local.op(local.call.target, x, order, arg(local, 2, "dim"), keepdim, dtype=dtype)


def _root(local: Local) -> Any:
    out, order = local.call.results[0], arg(local, 1, "ord", 2)
    assert out is not None
    given = local.call.operands[0].dtype
    acc = wide(out.dtype)
    norm = _piece(local, acc.to_complex() if given.is_complex else acc)
    total = local.op(aten.pow.Tensor_Scalar, norm, order)
    for factor in cut(local, local.rule.reduce):
        total = local.all_reduce(total, factor, "sum", local.rule.results[0])
    return cast(local, local.op(aten.pow.Tensor_Scalar, total, 1 / order), acc, out.dtype)


# Ops that are norms of something --------------------------------------------------------------------------------------


def _norm(
    x: Tensor,
    p: float | None = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    out: Tensor = torch.linalg.vector_norm(x, 2 if p is None else p, dim or None, keepdim, dtype=dtype)
    return out


def _renorm(x: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
    """Every slice along `dim` scaled down to a norm of at most `maxnorm`."""
    others = [d for d in range(x.dim()) if d != dim % x.dim()]
    norm = torch.linalg.vector_norm(x.to(wide(x.dtype)), p, others, keepdim=True)
    scale = torch.where(norm > maxnorm, maxnorm / (norm + 1e-7), torch.ones_like(norm))
    return (x * scale).to(x.dtype)


ROWS: dict[str, RuleFn | str] = {"linalg_vector_norm": _vector_norm}

DECOMPOSED: dict[str, Callable[..., Any]] = {
    "norm.Scalar": _norm,
    "norm.ScalarOpt_dim": _norm,
    "norm.ScalarOpt_dtype": _norm,
    "norm.ScalarOpt_dim_dtype": _norm,
    "renorm": _renorm,
}
