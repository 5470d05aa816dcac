"""Marks values that a device may hold in the rows of its own groups only, as of its own experts in a mixture.

A grouped product with sharded groups computes the rows of the device's groups. Ops that work row by row go on with
these rows. The other rows are never read, so they may hold anything.

    first product -> silu, mul, + bias -> second product -> * weight of the route -> (sum over the devices) -> combine

Chains that begin with a grouped product are marked here (`Value.rows`, `Op.owns`). Propagation decides later whether
groups are sharded.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from shardlib.compiler.graph.ir import Graph, Op, Owns, Rows, Value
from shardlib.core.aten.op_traits import has_trait, is_view
from shardlib.rules.derived_rules import derive_rule
from shardlib.rules.rule import OWNED, Rule

_OWNER = "owner"  # the factor of groups, in rules of ops that have none


def mark_group_rows(graph: Graph) -> None:
    """Marks values whose own rows suffice on each device, and the ops that may compute no more."""
    for op in graph.ops:
        if op.rule is None or op.constant or op.manual or op.constrains:
            continue
        if op.rule.accesses.groups is not None:
            _mark_product(op, op.rule)
        elif any(x.rows for x in op.operands):
            _mark_row_by_row(op, op.rule)


def _mark_product(op: Op, rule: Rule) -> None:
    assert rule.accesses.groups is not None
    factor, along, ends = (
        rule.accesses.groups.factor,
        rule.accesses.groups.along,
        op.operands[rule.accesses.groups.ends],
    )
    dims = [next((d for d, dim in enumerate(labels) if along in dim), None) for labels in rule.operands]
    pairs = enumerate(zip(op.operands, dims, strict=True))
    reads = frozenset(i for i, (x, d) in pairs if d is not None and x.rows == Rows(ends, d))
    for x, labels in zip(op.results, rule.results, strict=True):
        if x is not None and factor not in {f for dim in labels for f in dim}:
            x.rows = Rows(ends, next(d for d, dim in enumerate(labels) if along in dim))
    op.owns = Owns(factor, ends, reads, begins=True)
    reduce = {f: OWNED if f == factor else kind for f, kind in rule.reduce.items()}
    op.rule = derive_rule(rule, OWNED, lambda: replace(rule, reduce=reduce))


def _mark_row_by_row(op: Op, rule: Rule) -> None:
    rows = next(x.rows for x in op.operands if x.rows)
    reads = frozenset(i for i, x in enumerate(op.operands) if x.rows == rows)
    (row, *others) = {rule.operands[i][rows.dim] for i in reads}
    dims = [None if x is None else _only(labels, row) for x, labels in zip(op.results, rule.results, strict=True)]
    results = [(x, d) for x, d in zip(op.results, dims, strict=True) if x is not None]
    if others or not row or not _works_by_row(op, rule, row) or any(d is None or _may_index(x) for x, d in results):
        return
    for x, d in results:
        assert d is not None
        x.rows = Rows(rows.ends, d)
    if not rule.transparent:
        op.owns = Owns(_OWNER, rows.ends, reads)
        sizes, reduce = {**rule.sizes, _OWNER: rows.ends.shape[0]}, {**rule.reduce, _OWNER: OWNED}
        op.rule = derive_rule(rule, (_OWNER, sizes[_OWNER]), lambda: replace(rule, sizes=sizes, reduce=reduce))


def _only(labels: tuple[tuple[str, ...], ...], row: tuple[str, ...]) -> int | None:
    """Returns the dim that consists of the factors `row`, if no other dim has any of them."""
    having = [d for d, dim in enumerate(labels) if set(dim) & set(row)]
    return having[0] if len(having) == 1 and labels[having[0]] == row else None


def _may_index(x: Value) -> bool:
    """True if a value may hold indices, which must be valid in every row."""
    return not (x.dtype.is_floating_point or x.dtype == torch.bool)


def _works_by_row(op: Op, rule: Rule, row: tuple[str, ...]) -> bool:
    """True if a row of the results needs the same row of the operands only, and no other row can make the op fail."""
    tags = getattr(op.target, "tags", ())
    plain = torch.Tag.pointwise in tags or torch.Tag.reduction in tags or has_trait(op.target, "moves_data")
    tied = {*rule.whole, *rule.local.factors, *rule.reduce, *(f for tie in _ties(rule) for f in tie)}
    return (
        (plain or rule.transparent or is_view(op.target))
        and torch.Tag.nondeterministic_seeded not in tags
        and not tied & set(row)
        and all(_only(labels, row) is not None for labels in rule.operands if {f for d in labels for f in d} & set(row))
        and {*rule.reduce.values()} <= {"sum", "none"}
    )


def _ties(rule: Rule) -> list[tuple[str, str]]:
    return rule.ties.pairs
