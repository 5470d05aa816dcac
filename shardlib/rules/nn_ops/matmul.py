"""Matrix products: the contracted factor leaves a pending sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardlib.rules.local_forms.helpers import cut, once
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Local, RuleFn

aten = torch.ops.aten


def _add_once(local: Local) -> Any:
    """`beta * bias + alpha * a @ b` with a summed factor cut: the bias is added where it begins, and nowhere else; or
    what each device has of it."""
    target, shared = local.call.target, [f for f in cut(local, local.rule.reduce) if not local.owes(0, f)]

    def form(bias: Tensor, a: Tensor, b: Tensor, first: int, beta: Any = 1, alpha: Any = 1) -> Tensor:
        if target is aten.addmv.default:  # a product with no rows has the size of a bias that is broadcast
            bias = bias.expand(len(a))
        if not isinstance(beta, complex) and float(beta).is_integer():
            beta = first * int(beta)
        else:
            bias = once(bias, shared)
        return target(bias, a, b, beta=beta, alpha=alpha)  # type: ignore[no-any-return]

    first = local.calc(lambda *places: int(not any(places)), *map(local.position, shared))
    return local.run(form, *local.args[:3], first, **local.kwargs)


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
    "addmm": pattern("~m n, m k, k n -> m n | k:sum k:local {0,1} {0,2}", local=_add_once, onto=0),
    "addmv": pattern("~m, m k, k -> m | k:sum k:local m:local {0,1} {0,2}", local=_add_once, onto=0),
    "addbmm": pattern("~m n, b m k, b k n -> m n | b:sum k:sum b:local k:local {0,1} {0,2}", local=_add_once, onto=0),
    "addr": "~m n, m, n -> m n | {0,1} {0,2}",
    "vdot": "k, k -> | k:sum {0} {1}",
    "_int_mm": "m k, k n -> m n | k:sum {0} {1}",
    "_addmm_activation": "~m n, m k, k n -> m n | k:whole",
    "baddbmm": pattern("~b m n, b m k, b k n -> b m n | k:sum k:local {0,1} {0,2}", local=_add_once, onto=0),
}
