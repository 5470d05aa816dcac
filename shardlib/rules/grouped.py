"""Grouped products, as in a mixture of experts: rows in consecutive groups, a matrix for each group.

`ends` says behind which row every group ends. Rows may be cut: a device then holds some groups, some only in part, and
counts their ends from its own first row.
"""

from __future__ import annotations

from typing import Any

import torch

from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Local, RuleFn

aten = torch.ops.aten


def _product(local: Local) -> Any:
    x, weight, ends, *grad = local.args
    mine = local.op(aten.sub.Tensor, ends, local.offset("s"))
    mine = local.op(aten.clamp.default, mine, 0, local.size("s"))
    return local.op(local.call.target, x, weight, mine, *grad)


# S rows, E groups, K in, N out: `x[S, K]`, `weight[E, K, N]`, `ends[E]`, and the gradient of the product.
ROWS: dict[str, RuleFn | str] = {
    "transformers::grouped_mm_fallback": pattern(
        "s k, e k n, e -> s n | s:local e:whole k:sum {0} {1}",
        local=_product,
        flops=lambda call, points: 2 * points // call.operands[1].shape[0],
    ),
    "transformers::grouped_mm_fallback_backward": pattern(
        "s k, e k n, e, s n -> s k, e k n | s:sum s:local e:whole n:sum {3}",
        local=_product,
        flops=lambda call, points: 4 * points // call.operands[1].shape[0],
    ),
}
