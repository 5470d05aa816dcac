"""Grouped products, as in a mixture of experts: rows in consecutive groups, a matrix for each group.

`ends` says behind which row every group ends. Rows may be cut: a device then holds some groups, some only in part, and
counts their ends from its own first row. Groups may be cut: a device then makes the rows of its own groups. It turns
the rows round until these come first, since kernels begin with the first group at row 0 and leave what is behind the
last as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardlib.rules.nonempty import nonempty
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import OWNED, Call, Groups, Labels, Local, Meta, Rule, RuleFn
from shardlib.rules.shards import is_zero

aten = torch.ops.aten
_GROUPS = Groups("e", "s", 2)


def _product(local: Local) -> Any:
    """The op with the ends of groups that this device's rows have, and those of its own groups alone."""
    mine = copy.copy(local)
    rows = local.size("s") * local.rule.sizes.get("s_in_block", 1)
    ends = local.args[2] if len(local.args) > 2 else None
    if local.axes("s"):
        first = local.offset("s") * local.rule.sizes.get("s_in_block", 1)
        ends = local.op(aten.clamp.default, local.op(aten.sub.Tensor, ends, first), 0, rows)
        mine.args = (*local.args[:2], ends, *local.args[3:])
    if not local.axes("e") or ends is None:
        return nonempty(mine)
    first, held = local.offset("e"), local.size("e")
    edges = local.op(aten.constant_pad_nd.default, ends, [1, 0], 0)
    begin = local.op(aten.slice.Tensor, edges, 0, first, first + 1)
    own = local.op(aten.slice.Tensor, edges, 0, first + 1 - is_zero(held), first + held + 1)  # of no group, one of 0
    own = local.op(aten.sub.Tensor, own, begin)
    place = local.op(aten.arange.default, rows, dtype=torch.int64, device=local.device)
    cycle = rows + is_zero(rows)
    ahead, back = (
        local.op(aten.remainder.Scalar, local.op(op, place, begin), cycle) for op in (aten.add.Tensor, aten.sub.Tensor)
    )
    dims = iter(_along(local.rule.operands))
    given = [
        _turned(local, x, next(dims), ahead) if isinstance(whole, Meta) else x
        for x, whole in zip(local.args, local.call.args, strict=True)
    ]
    mine.args = (*given[:2], own, *given[3:])
    found = nonempty(mine)
    total = local.op(aten.sub.Tensor, local.op(aten.slice.Tensor, edges, 0, first + held, first + held + 1), begin)
    others = local.op(aten.ge.Tensor, place, total)
    out = []
    for x, d in zip(found if isinstance(found, tuple) else (found,), _along(local.rule.results), strict=True):
        if d is not None and local.rule.reduce["e"] != OWNED:
            mask = local.op(aten.unsqueeze.default, others, 1) if d == 0 else others
            x = local.op(aten.masked_fill.Scalar, x, mask, 0)
        out.append(_turned(local, x, d, back))
    return tuple(out)


def _along(tensors: Sequence[Labels]) -> list[int | None]:
    """Of each tensor, the dim of rows."""
    return [next((d for d, dim in enumerate(labels) if "s" in dim), None) for labels in tensors]


def _turned(local: Local, x: Any, dim: int | None, index: Any) -> Any:
    """A matrix with its rows, which may be its columns, in another order; as kernels want it, rows stay consecutive."""
    if dim is None:
        return x
    if dim == 0:
        return local.op(aten.index_select.default, x, 0, index)
    return local.op(aten.t.default, local.op(aten.index_select.default, local.op(aten.t.default, x), 0, index))


# By the ranks of the two factors: rows in groups, columns in groups, a sum in groups, and one product for each group.
_PRODUCTS = {
    (2, 3): "s k, e k n, _ -> s n | s:local e:local e:sum k:sum {0} {1}",
    (3, 2): "e m k, k s, _ -> m s | s:local e:local e:sum k:sum {0} {1}",
    (2, 2): "m s, s n, _ -> e m n | s:local e:local s:sum {0} {1}",
    (3, 3): "e m k, e k n -> e m n | k:sum {0} {1}",
}


def _grouped_mm(call: Call) -> Rule:
    """Torch's kernels want rows of 16 bytes, so that nothing is cut within these."""
    a, b = call.operands[:2]
    ranks = len(a.shape), len(b.shape)
    if ranks == (3, 3):
        return _in_blocks(pattern(_PRODUCTS[ranks], local=_product)(call), "kmns", 16 // a.dtype.itemsize)
    rows = "kmn" if ranks == (2, 3) else "kmns"  # s is never the last dim of rows in groups
    return _in_blocks(_ragged(_PRODUCTS[ranks])(call), rows, 16 // a.dtype.itemsize)


def _ragged(text: str, products: int = 1) -> Callable[[Call], Rule]:
    """The rule of so many products in groups: a row meets the matrix of its own group only."""

    def rule(call: Call) -> Rule:
        groups = call.operands[2].shape[0]
        found = pattern(text, local=_product, flops=lambda _, points: 2 * products * points // groups)(call)
        return replace(found, groups=_GROUPS) if "e" in found.sizes else found

    return rule


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
    "transformers::grouped_mm_fallback": _ragged("s k, e k n, _ -> s n | s:local e:local e:sum k:sum {0} {1}"),
    "transformers::grouped_mm_fallback_backward": _ragged(
        "s k, e k n, _, s n -> s k, e k n | s:local e:local s:sum e:sum n:sum {3}", products=2
    ),
}
