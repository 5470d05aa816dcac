"""Grouped products, as in a mixture of experts: rows in consecutive groups, and a matrix per group.

`ends` holds the end row of each group. Where the rows are sharded, a device holds some groups, some only in part, and
counts their ends from its first row. Where the groups are sharded, a device computes the rows of its own groups. It
rotates the rows so that these come first: kernels start the first group at row 0, and skip the rows after the last one.
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
from shardlib.rules.rule import OWNED, Call, Groups, Labels, LocalBuilder, Rule, RuleFn

aten = torch.ops.aten
_GROUPS = Groups("e", "s", 2)


def _product(local: LocalBuilder) -> Any:
    """Returns the op with the ends of groups in this device's rows, and of its own groups alone."""
    rows, groups = bool(local.axes("s")), bool(local.axes("e"))
    if not rows and not groups:
        return nonempty(local)
    block = local.rule.sizes.get("s_in_block", 1)
    operands, results = _row_dims(local.rule.operands), _row_dims(local.rule.results)
    masked = local.rule.reduce.get("e") != OWNED
    ragged = local.rule.accesses.groups
    own = ragged is not None and ragged.own

    def run(local: LocalBuilder, args: dict[str, Any], begins: Any) -> Any:
        tensors = dict(zip((name for name, x in args.items() if isinstance(x, Tensor)), operands, strict=True))
        count = next(args[name].shape[at] for name, at in tensors.items() if at is not None)
        ends_name = [*tensors][_GROUPS.ends]
        ends = args[ends_name]
        if rows and not own:
            start, size, _ = piece("s")
            ends = (ends - start * block).clamp(0, size * block)
        if not groups:
            return local.call.target(**args | {ends_name: ends})
        first, size, _ = piece("e")
        edges = aten.constant_pad_nd.default(ends, [1, 0], 0)
        begin = edges.narrow(0, first, 1)
        mine = edges.narrow(0, first + 1 - (not size), max(size, 1)) - begin  # without groups, one empty group
        row = torch.arange(count, device=ends.device)
        ahead, back = ((row + begin) % max(count, 1), (row - begin) % max(count, 1))
        args |= {name: _take_rows(args[name], d, ahead) for name, d in tensors.items()} | {ends_name: mine}
        products = local.call.target(**args)
        others = row >= edges.narrow(0, first + size, 1) - begin
        out = []
        for x, d in zip(products if isinstance(products, tuple) else (products,), results, strict=True):
            if d is not None and masked:
                x = x.masked_fill(others.unsqueeze(1) if d == 0 else others, 0)
            out.append(_take_rows(x, d, back))
        return tuple(out) if isinstance(products, tuple) else out[0]

    return Stencil({}, run=run).local(local)


def _row_dims(tensors: Sequence[Labels]) -> list[int | None]:
    """Returns the dim of rows of each tensor."""
    return [next((d for d, dim in enumerate(labels) if "s" in dim), None) for labels in tensors]


def _take_rows(x: Tensor, dim: int | None, index: Tensor) -> Tensor:
    """Reorders the rows, or the columns for dim 1, which stay consecutive in memory, as kernels require."""
    if dim is None:
        return x
    return x.index_select(0, index) if dim == 0 else x.t().index_select(0, index).t()


# By the ranks of the two factors: rows in groups, columns in groups, sums in groups, and one product per group.
_PRODUCTS = {
    (2, 3): "s k, e k n, _ -> s n | s:local e:local e:sum k:sum {0} {1}",
    (3, 2): "e m k, k s, _ -> m s | s:local e:local e:sum k:sum {0} {1}",
    (2, 2): "m s, s n, _ -> e m n | s:local e:local s:sum {0} {1}",
    (3, 3): "e m k, e k n -> e m n | k:sum {0} {1}",
}


def _grouped_mm(call: Call) -> Rule:
    """Torch's kernels require rows of 16 bytes, which stay whole."""
    a, b = call.operands[:2]
    ranks = len(a.shape), len(b.shape)
    if ranks == (3, 3):
        return _in_blocks(pattern(_PRODUCTS[ranks])(call), "kmns", 16 // a.dtype.itemsize)
    rows = "kmn" if ranks == (2, 3) else "kmns"  # s is never the last dim of rows in groups
    return _in_blocks(_ragged(_PRODUCTS[ranks])(call), rows, 16 // a.dtype.itemsize)


def _ragged(text: str, products: int = 1) -> Callable[[Call], Rule]:
    """Returns the rule of `products` products in groups: each row meets the matrix of its own group."""

    def rule(call: Call) -> Rule:
        groups = call.operands[2].shape[0]
        ragged = _GROUPS if groups != 1 else None
        flops = lambda _, points: 2 * products * points // groups
        return pattern(text, emit=_product, flops=flops, groups=ragged)(call)

    return rule


def _in_blocks(rule: Rule, factors: Iterable[str], block: int) -> Rule:
    """Returns `rule` with `factors` sharded in multiples of `block`, or kept whole."""
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
        local=replace(
            rule.local, emit=rule.local.emit or nonempty, factors=(rule.local.factors | split.keys()) - whole
        ),
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
