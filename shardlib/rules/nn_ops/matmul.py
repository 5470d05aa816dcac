"""Matrix products: a sharded contracted factor leaves a partial sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardlib.rules.local_forms.helpers import keep_on_first, sharded_factors
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import LocalBuilder, RuleFn

aten = torch.ops.aten


def _add_once(local: LocalBuilder) -> Any:
    """`beta * bias + alpha * a @ b` with a sharded sum: the first device along it adds the bias.

    If the bias is a partial sum itself, each device adds its own addend.
    """
    target, summed = local.call.target, sharded_factors(local, local.rule.reduce)
    shared = [f for f in summed if not local.has_partial(0, f)]

    def form(bias: Tensor, a: Tensor, b: Tensor, first: int, beta: Any = 1, alpha: Any = 1) -> Tensor:
        if target is aten.addmv.default:  # an empty product would take its size from the broadcast bias
            bias = bias.expand(len(a))
        if not isinstance(beta, complex) and float(beta).is_integer():
            beta = first * int(beta)
        else:
            bias = keep_on_first(bias, shared)
        return target(bias, a, b, beta=beta, alpha=alpha)  # type: ignore[no-any-return]

    first = local.calc(lambda *positions: int(not any(positions)), *map(local.position, shared))
    return local.run(form, *local.args[:3], first, **local.kwargs)


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    product = torch.matmul(x, weight.mT if weight.dim() > 1 else weight)
    return product if bias is None else product + bias


# A composite op, but torch does not decompose it with out=.
DECOMPOSED: dict[str, Callable[..., Any]] = {"linear": _linear}

ROWS: dict[str, RuleFn | str] = {
    "mm": "m k, k n -> m n | k:sum {0} {1}",
    "bmm": "b m k, b k n -> b m n | k:sum {0} {1}",
    "mv": "m k, k -> m | k:sum {0} {1}",
    "dot": "k, k -> | k:sum {0} {1}",
    "addmm": pattern("~m n, m k, k n -> m n | k:sum k:local {0,1} {0,2}", emit=_add_once, onto=0),
    "addmv": pattern("~m, m k, k -> m | k:sum k:local m:local {0,1} {0,2}", emit=_add_once, onto=0),
    "addbmm": pattern("~m n, b m k, b k n -> m n | b:sum k:sum b:local k:local {0,1} {0,2}", emit=_add_once, onto=0),
    "addr": "~m n, m, n -> m n | {0,1} {0,2}",
    "vdot": "k, k -> | k:sum {0} {1}",
    "_int_mm": "m k, k n -> m n | k:sum {0} {1}",
    "_addmm_activation": "~m n, m k, k n -> m n | k:whole",
    "baddbmm": pattern("~b m n, b m k, b k n -> b m n | k:sum k:local {0,1} {0,2}", emit=_add_once, onto=0),
}
