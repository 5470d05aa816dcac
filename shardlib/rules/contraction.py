"""Matrix products: the contracted factor leaves a pending sum."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Local, RuleFn
from shardlib.rules.shards import cut, is_zero
from shardlib.rules.writing import once

aten = torch.ops.aten


def _add_once(local: Local) -> Any:
    """`beta * bias + alpha * a @ b` with a summed factor cut: the bias is added where it begins, and nowhere else."""
    return _added(local, local.args[0])


def _addmv(local: Local) -> Any:
    """Torch gives the product with a matrix of no rows the size of the bias that is broadcast, which is 1."""
    (m,) = local.rule.operands[1][0]
    return _added(local, local.op(aten.expand.default, local.args[0], [local.size(m)]))


def _added(local: Local, bias: Any) -> Any:
    a, b = local.args[1:3]
    beta, alpha = local.kwargs.get("beta", 1), local.kwargs.get("alpha", 1)
    if beta == int(beta):
        beta = math.prod(is_zero(local.position(f)) for f in cut(local, local.rule.reduce)) * int(beta)
    else:
        bias = once(local, bias, local.rule.reduce)
    return local.op(local.call.target, bias, a, b, beta=beta, alpha=alpha)


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    product = torch.matmul(x, weight.mT if weight.dim() > 1 else weight)
    return product if bias is None else product + bias


# Composite, but `out=` leaves it as it is.
DECOMPOSED: dict[str, Callable[..., Any]] = {"linear": _linear}

ROWS: dict[str, RuleFn | str] = {
    "mm": "m k, k n -> m n | k:sum {0} {1}",
    "bmm": "b m k, b k n -> b m n | k:sum {0} {1}",
    "mv": "m k, k -> m | k:sum {0} {1}",
    "dot": "k, k -> | k:sum {0} {1}",
    "addmm": pattern("~m n, m k, k n -> m n | k:sum k:local {0,1} {0,2}", local=_add_once),
    "addmv": pattern("~m, m k, k -> m | k:sum k:local m:local {0,1} {0,2}", local=_addmv),
    "addbmm": pattern("~m n, b m k, b k n -> m n | b:sum k:sum b:local k:local {0,1} {0,2}", local=_add_once),
    "addr": "~m n, m, n -> m n | {0,1} {0,2}",
    "vdot": "k, k -> | k:sum {0} {1}",
    "_int_mm": "m k, k n -> m n | k:sum {0} {1}",
    "_addmm_activation": "~m n, m k, k n -> m n | k:whole",
    "baddbmm": pattern("~b m n, b m k, b k n -> b m n | k:sum k:local {0,1} {0,2}", local=_add_once),
}
