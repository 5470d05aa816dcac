"""Matrix products: the contracted factor leaves a pending sum."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Local, RuleFn
from shardlib.rules.shards import is_zero

aten = torch.ops.aten


def _add_once(local: Local) -> Any:
    """`beta * bias + alpha * a @ b` with k cut: the bias is added where k begins, and nowhere else."""
    bias, a, b = local.args[:3]
    beta, alpha = local.kwargs.get("beta", 1), local.kwargs.get("alpha", 1)
    first = is_zero(local.offset("k"))
    if beta == int(beta):
        beta = first * int(beta)
    else:
        bias = local.op(aten.mul.Scalar, bias, first)
    return local.op(local.call.target, bias, a, b, beta=beta, alpha=alpha)


ROWS: dict[str, RuleFn | str] = {
    "mm": "m k, k n -> m n | k:sum {0} {1}",
    "bmm": "b m k, b k n -> b m n | k:sum {0} {1}",
    "mv": "m k, k -> m | k:sum {0} {1}",
    "dot": "k, k -> | k:sum {0} {1}",
    "addmm": pattern("~m n, m k, k n -> m n | k:sum k:local {0,1} {0,2}", local=_add_once),
    "addmv": pattern("~m, m k, k -> m | k:sum k:local {0,1} {0,2}", local=_add_once),
    "baddbmm": pattern("~b m n, b m k, b k n -> b m n | k:sum k:local {0,1} {0,2}", local=_add_once),
}
