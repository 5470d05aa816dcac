"""Norms: sums of powers, over cut dims too.

A sum of first powers, a count and a maximum may stay pending; the root of any other sum cannot wait, so devices add up
before they take it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardlib.manual.collectives import psum
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Local, Rule, RuleFn
from shardlib.rules.shards import Rows, wide
from shardlib.rules.space import arg, result_dtype
from shardlib.rules.written import by_torch

aten = torch.ops.aten

_PENDING = {math.inf: "max", -math.inf: "min", 0: "sum", 1: "sum"}


def _vector_norm(call: Call) -> Rule | None:
    """`linalg_vector_norm(x, ord, dim, keepdim, dtype)`."""
    kind = _PENDING.get(arg(call, 1, "ord", 2), "none")
    return pattern(f"[dim] -> ... | dim:{kind} dim:local", local=_root if kind == "none" else _piece)(call)


def _piece(local: Local) -> Any:
    """The norm of this device's piece."""
    held = _held(local, arg(local, 1, "ord", 2))
    form = lambda x, *rest, **how: torch.linalg.vector_norm(held(x), *rest, **how)
    return local.run(form, *local.args, **local.kwargs)


def _held(local: Local, order: float) -> Callable[[Tensor], Tensor]:
    """Of norms that nothing has not, nothing counts as the number that changes no norm."""
    rows = Rows.over(local, "dim")
    return (lambda x: x) if 0 <= order < math.inf else (lambda x: rows.held(x, math.inf if order < 0 else 0))


def _root(local: Local) -> Any:
    call, rows, order = local.call, Rows.over(local, "dim"), arg(local, 1, "ord", 2)
    held, out = _held(local, order), result_dtype(call)
    acc = wide(out).to_complex() if call.operands[0].dtype.is_complex else wide(out)

    def form(x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(held(x), order, rows.dims, rows.kept, dtype=acc)
        return psum(norm**order, rows.factors).pow(1 / order).to(out)  # type: ignore[no-any-return]

    return local.run(form, local.args[0])


# Ops that are norms of something --------------------------------------------------------------------------------------


def _renorm(x: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
    """Every slice along `dim` scaled down to a norm of at most `maxnorm`."""
    others = [d for d in range(x.dim()) if d != dim % x.dim()]
    norm = torch.linalg.vector_norm(x.to(wide(x.dtype)), p, others, keepdim=True)
    scale = torch.where(norm > maxnorm, maxnorm / (norm + 1e-7), torch.ones_like(norm))
    return (x * scale).to(x.dtype)


ROWS: dict[str, RuleFn | str] = {"linalg_vector_norm": _vector_norm}

DECOMPOSED: dict[str, Callable[..., Any]] = {
    **by_torch("norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim_dtype"),
    "renorm": _renorm,
}
