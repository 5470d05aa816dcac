"""Which ops a pending sum passes: those that are linear in it, where that costs nothing and makes nothing larger."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from shardlib.aten.traits import has
from shardlib.graph import Graph, Op, Value
from shardlib.lower.local import Assignment
from shardlib.lower.values import SETTLED, Owed, Values
from shardlib.propagate import Propagated
from shardlib.propagate.units import may_cut, value_factors


def carried(values: Values, op: Op, readers: Mapping[Value, int]) -> tuple[Assignment, Owed, frozenset[int]] | None:
    """How `op` runs on operands whose sum is pending, if it may: (its assignment, what is owed, which operands)."""
    rule = op.rule
    assert rule is not None
    for linear in rule.linear:
        forms = [values.owing(op.operands[i]) for i in sorted(linear)]
        if not forms or any(form is None for form in forms) or any(readers[op.operands[i]] > 1 for i in linear):
            continue
        _meet(values, [op.operands[i] for i in sorted(linear)])
        forms = [values.owing(op.operands[i]) for i in sorted(linear)]
        if len({form[1] for form in forms if form}) > 1:
            continue
        pairs = [
            (x, axes)
            for i, form in zip(sorted(linear), forms, strict=True)
            for x, axes in zip(value_factors(values.flood, op, i, operand=True), form[0] if form else (), strict=True)
        ]
        assignment = {x: axes for x, axes in pairs if x is not None and axes}
        # A factor that one addend has cut must be cut the same way in all.
        fits = all(
            not axes if x is None else assignment.get(x, ()) == axes and (not axes or may_cut(values.flood, op, x))
            for x, axes in pairs
        )
        for t, s in (*rule.rounds.items(), *rule.follows.items()):
            fits = fits and set(assignment.get((t, 0), ())) <= set(assignment.get((s, 0), ()))
        owed = forms[0][1] if forms[0] else SETTLED
        if fits and _worth(values, op, linear, assignment, owed):
            return assignment, owed, linear
    return None


def _meet(values: Values, operands: Sequence[Value]) -> None:
    """Where some of these pending sums were scattered already, the others are, too."""
    forms = [(x, form) for x in operands if (form := values.owing(x)) is not None]
    first, (cut, owed) = min(forms, key=lambda known: len(known[1][1].axes))
    for x, (mine, all_owed) in forms:
        more = [b[len(a) :] for a, b in zip(mine, cut, strict=False) if b[: len(a)] == a]
        left = {*all_owed.axes} - {axis for axes in more for axis in axes}
        same = values.flood.value[x] == values.flood.value[first] and len(more) == len(cut)
        if same and all_owed != owed and (left, all_owed.kind) == ({*owed.axes}, owed.kind):
            values.scatter(x, cut)


def _worth(values: Values, op: Op, linear: frozenset[int], assignment: Assignment, owed: Owed) -> bool:
    """No growth, no further reshards for the other operands, and no other kind of reduction on top."""
    assert op.rule is not None
    if owed.kind != "sum":
        return False
    for x, axes in assignment.items():
        if axes and op.rule.reduce.get(x[0], "sum") not in ("sum", "none"):
            return False
    most = max(op.operands[i].nbytes for i in linear)
    if sum(r.nbytes for r in op.results if r is not None) > most and not has(op.target, "casts terms"):
        return False
    for i, value in enumerate(op.operands):
        if i not in linear and not value.constant:
            want = tuple(assignment.get(x, ()) if x else () for x in value_factors(values.flood, op, i, operand=True))
            if values.price(value, want) > 0:
                return False
    return True


def reader_counts(graph: Graph, p: Propagated) -> dict[Value, int]:
    """How often a value is read, views looked through; a view counts as its root."""
    counts: dict[Value, int] = defaultdict(int)
    for value, (root, _) in p.units.roots.items():
        counts[root] += sum(not op.transparent for op, _ in value.readers)
    for out in graph.outputs:
        if isinstance(out, Value) and not out.constant:
            counts[p.units.root(out)[0]] += 1
    return {value: counts[root] for value, (root, _) in p.units.roots.items()}
