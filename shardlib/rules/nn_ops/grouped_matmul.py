"""Grouped products, as in a mixture of experts: rows in consecutive groups, a matrix for each group.

`ends` says behind which row every group ends. Rows may be cut: a device then holds some groups, some only in part, and
counts their ends from its own first row. Groups may be cut: a device then makes the rows of its own groups. It turns
the rows round until these come first, since kernels begin with the first group at row 0 and leave what is behind the
last as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardlib.primitives.collectives import piece
from shardlib.rules.local_forms.stencil import Stencil, nonempty
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import OWNED, Call, Groups, Labels, Local, Rule, RuleFn

aten = torch.ops.aten
_GROUPS = Groups("e", "s", 2)


def _product(local: Local) -> Any:
    """The op with the ends of groups that this device's rows have, and those of its own groups alone."""
    rows, groups = bool(local.axes("s")), bool(local.axes("e"))
    if not rows and not groups:
        return nonempty(local)
    block = local.rule.sizes.get("s_in_block", 1)
    operands, results = _along(local.rule.operands), _along(local.rule.results)
    masked = local.rule.reduce.get("e") != OWNED
    own = local.rule.groups is not None and local.rule.groups.own

    def run(local: Local, given: dict[str, Any], begins: Any) -> Any:
        tensors = dict(zip((name for name, x in given.items() if isinstance(x, Tensor)), operands, strict=True))
        count = next(given[name].shape[at] for name, at in tensors.items() if at is not None)
        at_ends = [*tensors][_GROUPS.ends]
        ends = given[at_ends]
        if rows and not own:
            start, held, _ = piece("s")
            ends = (ends - start * block).clamp(0, held * block)
        if not groups:
            return local.call.target(**given | {at_ends: ends})
        first, held, _ = piece("e")
        edges = aten.constant_pad_nd.default(ends, [1, 0], 0)
        begin = edges.narrow(0, first, 1)
        mine = edges.narrow(0, first + 1 - (not held), max(held, 1)) - begin  # of no group, one of 0
        place = torch.arange(count, device=ends.device)
        ahead, back = ((place + begin) % max(count, 1), (place - begin) % max(count, 1))
        given |= {name: _turned(given[name], d, ahead) for name, d in tensors.items()} | {at_ends: mine}
        found = local.call.target(**given)
        others = place >= edges.narrow(0, first + held, 1) - begin
        out = []
        for x, d in zip(found if isinstance(found, tuple) else (found,), results, strict=True):
            if d is not None and masked:
                x = x.masked_fill(others.unsqueeze(1) if d == 0 else others, 0)
            out.append(_turned(x, d, back))
        return tuple(out) if isinstance(found, tuple) else out[0]

    return Stencil({}, run=run).local(local)


def _along(tensors: Sequence[Labels]) -> list[int | None]:
    """Of each tensor, the dim of rows."""
    return [next((d for d, dim in enumerate(labels) if "s" in dim), None) for labels in tensors]


def _turned(x: Tensor, dim: int | None, index: Tensor) -> Tensor:
    """A matrix with its rows, which may be its columns, in another order; as kernels want it, rows stay consecutive."""
    if dim is None:
        return x
    return x.index_select(0, index) if dim == 0 else x.t().index_select(0, index).t()


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
        return _in_blocks(pattern(_PRODUCTS[ranks])(call), "kmns", 16 // a.dtype.itemsize)
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
        local=rule.local or nonempty,
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
    "transformers::grouped_mm_fallback": _ragged(_PRODUCTS[2, 3]),
    "transformers::grouped_mm_fallback_backward": _ragged(
        "s k, e k n, _, s n -> s k, e k n | s:local e:local s:sum e:sum n:sum {3}", products=2
    ),
}
