"""Rules of ops on rows that each device sorts alone.

A device sorts its shard alone, reads and writes rows at the positions that this sort returns, and multiplies them in
groups that it counts itself. `shardlib/compiler/graph/local_sort.py` decides where this is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch import Tensor

from shardlib.rules.local_forms.helpers import positional_args
from shardlib.rules.local_forms.positions import Extents, to_global, to_local
from shardlib.rules.rule import Call, Labels, LocalBuilder, LocalCode, Rule

_ROW, _ENTRY = "t", "k"  # the rows of a table, and the positions per row
ROW_FACTORS = (_ROW,)  # the factors of the rows, in the rules of a sort and of a lookup


def local_sort_rule(call: Call) -> Rule | None:
    """Returns the rule of a sort of one dim where each device sorts its shard."""
    shape = call.operands[0].shape
    if len(call.operands) != 1 or len(shape) != 1 or shape[0] < 2:
        return None
    return _sort_rule(shape[0])


@lru_cache(maxsize=256)
def _sort_rule(size: int) -> Rule:
    labels: Labels = ((_ROW,),)
    return Rule((labels,), (labels, labels), {_ROW: size}, local=_by_row(_sort_shard), flops=size)


def _by_row(emit: Any) -> LocalCode:
    return LocalCode(emit, factors=frozenset(ROW_FACTORS), loose=frozenset(ROW_FACTORS))


def _sort_shard(local: LocalBuilder) -> Any:
    """Sorts the shard; the positions count in the whole."""

    def form(x: Tensor, extents: Extents, *options: Any, **named: Any) -> Any:
        values, index = local.call.target(x, *options, **named)
        return values, to_global(index, extents)

    return local.run(form, local.args[0], local.extents(_ROW), *local.args[1:], **local.kwargs)


def local_lookup_rule(rule: Rule, table: str, entries: str) -> Rule:
    """Returns the rule of a lookup whose positions (factor `entries`) name rows (factor `table`) of the device's shard.

    `rule` is the op's rule for arbitrary positions.
    """
    times = rule.sizes[entries] // rule.sizes[table]
    both = {table: (_ROW,), entries: (_ROW, _ENTRY) if times > 1 else (_ROW,)}
    others = {f: n for f, n in rule.sizes.items() if f not in both}
    names = {f: (f"_{f}",) for f in others} | both

    def rename(tensors: Sequence[Labels]) -> tuple[Labels, ...]:
        return tuple(tuple(tuple(g for f in dim for g in names[f]) for dim in labels) for labels in tensors)

    per_row = {_ENTRY: times} if times > 1 else {}
    return replace(
        rule,
        operands=rename(rule.operands),
        results=rename(rule.results),
        sizes={f"_{f}": n for f, n in others.items()} | {_ROW: rule.sizes[table]} | per_row,
        reduce={f"_{f}": kind for f, kind in rule.reduce.items() if f in others},
        whole=frozenset(f"_{f}" for f in rule.whole if f in others) | per_row.keys(),
        onto=None,
        local=_by_row(_look_up_in_shard),
        accesses=replace(rule.accesses, lookup=None),
        gathers=frozenset(),
    )


def _look_up_in_shard(local: LocalBuilder) -> Any:
    """Runs the op on the shard, with positions that count in it."""

    def form(extents: Extents, x: Any, *rest: Any) -> Any:
        def localize(index: Any) -> Any:
            return to_local(index, extents) if isinstance(index, Tensor) else index

        if isinstance(rest[0], int):  # a dim, and the index
            return local.call.target(x, rest[0], localize(rest[1]), *rest[2:])
        return local.call.target(x, [*map(localize, rest[0])], *rest[1:])

    return local.run(form, local.extents(_ROW), *positional_args(local))


def own_groups_rule(rule: Rule) -> Rule:
    """Returns the rule of a product in groups whose operand `ends` counts the rows of each device alone."""
    groups = rule.accesses.groups
    assert groups is not None
    return replace(
        rule,
        accesses=replace(rule.accesses, groups=groups._replace(own=True)),
        local=replace(rule.local, loose=rule.local.loose | {groups.along}),
    )


def local_count_rule(rule: Rule, rows: Sequence[str]) -> Rule:
    """Returns the rule of an op that counts rows, where each device counts its own."""
    return replace(rule, reduce={**rule.reduce, **dict.fromkeys(rows, "none")})
