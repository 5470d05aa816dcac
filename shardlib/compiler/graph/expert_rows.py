"""Which values devices may have in part: where groups of rows are cut, as a mixture's experts are, a device makes the
rows of its own groups, and what works row by row goes on with these. Whatever the others hold there is never read.

    first product -> silu, mul, + bias -> second product -> * weight of the route -> (sum over the devices) -> combine

What begins with a grouped product is marked here (`Value.rows`, `Op.owns`); whether groups are cut is decided later.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from shardlib.compiler.graph.ir import Graph, Op, Owns, Rows, Value
from shardlib.core.aten.op_traits import has_trait, is_view
from shardlib.rules.rule import OWNED, Rule

_OWNER = "owner"  # the factor of groups, in rules of ops that have none


def mark(graph: Graph) -> None:
    """Mark values of which rows of own groups are enough, and the ops that may have no more."""
    for op in graph.ops:
        if op.rule is None or op.constant or op.manual or op.constrains:
            continue
        if op.rule.groups is not None:
            _begin(op, op.rule)
        elif any(x.rows for x in op.operands):
            _go_on(op, op.rule)


def _begin(op: Op, rule: Rule) -> None:
    """Of a grouped product."""
    assert rule.groups is not None
    factor, along, ends = rule.groups.factor, rule.groups.along, op.operands[rule.groups.ends]
    dims = [next((d for d, dim in enumerate(labels) if along in dim), None) for labels in rule.operands]
    known = zip(op.operands, dims, strict=True)
    reads = frozenset(i for i, (x, d) in enumerate(known) if d is not None and x.rows == Rows(ends, d))
    for x, labels in zip(op.results, rule.results, strict=True):
        if x is not None and factor not in {f for dim in labels for f in dim}:
            x.rows = Rows(ends, next(d for d, dim in enumerate(labels) if along in dim))
    op.owns = Owns(factor, ends, reads, begins=True)
    op.rule = replace(rule, reduce={f: OWNED if f == factor else kind for f, kind in rule.reduce.items()})


def _go_on(op: Op, rule: Rule) -> None:
    """Of what works row by row."""
    rows = next(x.rows for x in op.operands if x.rows)
    reads = frozenset(i for i, x in enumerate(op.operands) if x.rows == rows)
    (row, *others) = {rule.operands[i][rows.dim] for i in reads}
    dims = [None if x is None else _only(labels, row) for x, labels in zip(op.results, rule.results, strict=True)]
    made = [(x, d) for x, d in zip(op.results, dims, strict=True) if x is not None]
    if others or not row or not _by_row(op, rule, row) or any(d is None or _counts(x) for x, d in made):
        return
    for x, d in made:
        assert d is not None
        x.rows = Rows(rows.ends, d)
    if not rule.transparent:
        op.owns = Owns(_OWNER, rows.ends, reads)
        sizes, reduce = {**rule.sizes, _OWNER: rows.ends.shape[0]}, {**rule.reduce, _OWNER: OWNED}
        op.rule = replace(rule, sizes=sizes, reduce=reduce)


def _only(labels: tuple[tuple[str, ...], ...], row: tuple[str, ...]) -> int | None:
    """The dim that is `row`, and no other has a part of it."""
    having = [d for d, dim in enumerate(labels) if set(dim) & set(row)]
    return having[0] if len(having) == 1 and labels[having[0]] == row else None


def _counts(x: Value) -> bool:
    """Whether its numbers may be places, which have to be right wherever they are."""
    return not (x.dtype.is_floating_point or x.dtype == torch.bool)


def _by_row(op: Op, rule: Rule, row: tuple[str, ...]) -> bool:
    """Whether a row of the results needs the same row of the operands only, and no other row can make the op fail."""
    tags = getattr(op.target, "tags", ())
    plain = torch.Tag.pointwise in tags or torch.Tag.reduction in tags or has_trait(op.target, "moves_data")
    tied = {*rule.whole, *rule.local_factors, *rule.reduce, *(f for tie in _ties(rule) for f in tie)}
    return (
        (plain or rule.transparent or is_view(op.target))
        and torch.Tag.nondeterministic_seeded not in tags
        and not tied & set(row)
        and all(_only(labels, row) is not None for labels in rule.operands if {f for d in labels for f in d} & set(row))
        and {*rule.reduce.values()} <= {"sum", "none"}
    )


def _ties(rule: Rule) -> list[tuple[str, str]]:
    return [*rule.rounds.items(), *rule.follows.items(), *rule.lends.items()]
