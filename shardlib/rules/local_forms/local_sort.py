"""Rows in an order of each device's own: what a sort makes of a piece, what is read and written at the places that it
tells, and products in groups that every device counts for itself. `shardlib/compiler/graph/local_sort.py` says where
that is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from shardlib.rules.local_forms.helpers import positional
from shardlib.rules.rule import Call, Labels, Local, Rule
from shardlib.rules.tensor_ops.sort_topk import in_whole

_ROW, _ENTRY = "t", "k"  # the rows of a table, and how many places in the order each has
PLACES = (_ROW,)  # the factors that are rows, where these are read, written or sorted


def sorts(call: Call) -> Rule | None:
    """The rule of a sort of one dim: every device sorts its piece."""
    shape = call.operands[0].shape
    if len(call.operands) != 1 or len(shape) != 1 or shape[0] < 2:
        return None
    labels: Labels = ((_ROW,),)
    local = frozenset([_ROW])
    results, sizes = (labels, labels), {_ROW: shape[0]}
    return Rule((labels,), results, sizes, local=_sorted, local_factors=local, loose=local, flops=shape[0])


def _sorted(local: Local) -> Any:
    """Places are counted in the whole."""

    def form(x: Tensor, places: Any, *how: Any, **named: Any) -> Any:
        values, index = local.call.target(x, *how, **named)
        return values, in_whole(index, places)

    return local.run(form, local.args[0], local.pieces(_ROW), *local.args[1:], **local.kwargs)


def at_places(rule: Rule, table: str, entries: str) -> Rule:
    """The rule of an op that reads, or writes, rows of a table (factor `table`) at places (`entries`) which all lie in
    the piece that a device has: its own rule, where these are not known."""
    times = rule.sizes[entries] // rule.sizes[table]
    both = {table: (_ROW,), entries: (_ROW, _ENTRY) if times > 1 else (_ROW,)}
    kept = {f: n for f, n in rule.sizes.items() if f not in both}
    names = {f: (f"_{f}",) for f in kept} | both

    def named(tensors: Sequence[Labels]) -> tuple[Labels, ...]:
        return tuple(tuple(tuple(g for f in dim for g in names[f]) for dim in labels) for labels in tensors)

    alone = {_ENTRY: times} if times > 1 else {}
    local = frozenset([_ROW])
    return replace(
        rule,
        operands=named(rule.operands),
        results=named(rule.results),
        sizes={f"_{f}": n for f, n in kept.items()} | {_ROW: rule.sizes[table]} | alone,
        reduce={f"_{f}": kind for f, kind in rule.reduce.items() if f in kept},
        whole=frozenset(f"_{f}" for f in rule.whole if f in kept) | alone.keys(),
        onto=None,
        local=_at_places,
        local_factors=local,
        loose=local,
        gathers=frozenset(),
        looks=None,
    )


def _at_places(local: Local) -> Any:
    """The op itself, at places as they are counted in the piece."""

    def form(places: Any, *args: Any) -> Any:
        def here(x: Any) -> Any:
            return _in_piece(x, places) if isinstance(x, Tensor) else x

        x, *rest = args
        if isinstance(rest[0], int):  # a dim, and the index
            return local.call.target(x, rest[0], here(rest[1]), *rest[2:])
        return local.call.target(x, [*map(here, rest[0])], *rest[1:])

    return local.run(form, local.pieces(_ROW), *positional(local))


def _in_piece(index: Tensor, places: Sequence[tuple[int, int, int]]) -> Tensor:
    """Where an element of the piece is in it, whose place in the whole is `index`."""
    if len(places) == 1:
        return index - places[0][1]
    found, strides = None, [1]
    for *_, whole in reversed(places[1:]):
        strides.insert(0, strides[0] * whole)
    for (size, first, whole), stride in zip(places, strides, strict=True):
        at = index // stride % whole - first
        found = at if found is None else found * size + at
    assert found is not None
    return found


def in_own_groups(rule: Rule) -> Rule:
    """The rule of a product in groups where each device has its own ends of groups, of the rows that it has."""
    assert rule.groups is not None
    return replace(rule, groups=rule.groups._replace(own=True), loose=rule.loose | {rule.groups.along})


def counts(rule: Rule, rows: Sequence[str]) -> Rule:
    """The rule of an op that counts rows, where each device counts its own."""
    return replace(rule, reduce={**rule.reduce, **dict.fromkeys(rows, "none")})
