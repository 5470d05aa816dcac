"""Grouped products, as in a mixture of experts: rows in consecutive groups, a matrix for each group.

`ends` says behind which row every group ends. Rows may be cut: a device then holds some groups, some only in part, and
counts their ends from its own first row.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardlib.rules.nonempty import nonempty
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Labels, Local, Rule, RuleFn

aten = torch.ops.aten


def _product(local: Local) -> Any:
    """The op with the ends of groups that this device's rows have."""
    mine = copy.copy(local)
    if local.axes("s"):
        rows = local.rule.sizes.get("s_in_block", 1)
        ends = local.op(aten.sub.Tensor, local.args[2], local.offset("s") * rows)
        ends = local.op(aten.clamp.default, ends, 0, local.size("s") * rows)
        mine.args = (*local.args[:2], ends, *local.args[3:])
    return nonempty(mine)


# By the ranks of the two factors: rows in groups, columns in groups, a sum in groups, and one product for each group.
_PRODUCTS = {
    (2, 3): "s k, e k n, e -> s n | s:local e:whole k:sum {0} {1}",
    (3, 2): "e m k, k s, e -> m s | s:local e:whole k:sum {0} {1}",
    (2, 2): "m s, s n, e -> e m n | s:sum s:local e:whole {0} {1}",
    (3, 3): "e m k, e k n -> e m n | k:sum {0} {1}",
}


def _grouped_mm(call: Call) -> Rule:
    """Torch's kernels want rows of 16 bytes, so that nothing is cut within these."""
    a, b = call.operands[:2]
    ranks = len(a.shape), len(b.shape)
    groups = 1 if ranks == (3, 3) else call.operands[2].shape[0]
    rule = pattern(_PRODUCTS[ranks], local=_product, flops=lambda _, points: 2 * points // groups)(call)
    rows = "kmn" if ranks == (2, 3) else "kmns"  # s is never the last dim of rows in groups
    return _in_blocks(rule, rows, 16 // a.dtype.itemsize)


def _in_blocks(rule: Rule, factors: Iterable[str], block: int) -> Rule:
    """`rule` with `factors` cut in multiples of `block` only, or not at all."""
    sizes, whole, split = dict(rule.sizes), set(rule.whole), {}
    for f in sizes.keys() & set(factors):
        if sizes[f] % block or sizes[f] == block:
            whole.add(f)
        else:
            split[f] = (f, f"{f}_in_block")
            sizes[f], sizes[f"{f}_in_block"] = sizes[f] // block, block
            whole.add(f"{f}_in_block")

    def blocked(tensors: Sequence[Labels]) -> tuple[Labels, ...]:
        return tuple(tuple(tuple(g for f in d for g in split.get(f, (f,))) for d in labels) for labels in tensors)

    return replace(
        rule,
        local=_product,
        local_factors=(rule.local_factors | split.keys()) - whole,
        operands=blocked(rule.operands),
        results=blocked(rule.results),
        sizes=sizes,
        whole=frozenset(whole),
        reduce={f: kind for f, kind in rule.reduce.items() if f not in whole},
    )


# S rows, E groups, K in, N out: `x[S, K]`, `weight[E, K, N]`, `ends[E]`, and the gradient of the product.
ROWS: dict[str, RuleFn | str] = {
    "_grouped_mm": _grouped_mm,
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
