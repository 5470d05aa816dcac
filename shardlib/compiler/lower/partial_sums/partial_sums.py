"""Which ops a pending sum passes: those linear in it, where that makes nothing larger and is worth its arithmetic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from shardlib.compiler.graph.ir import Graph, Op, Value, is_zero, viewed
from shardlib.compiler.lower.partial_sums.partial_sum_fanout import Branching, fitting, share
from shardlib.compiler.lower.placement import SETTLED, Owed
from shardlib.compiler.lower.value_layouts import Values
from shardlib.compiler.propagate import Propagated
from shardlib.compiler.propagate.decision_units import value_factors
from shardlib.compiler.propagate.propagation import Assignment
from shardlib.compiler.propagate.solver.problem import estimate_work
from shardlib.core.aten.op_traits import has_trait

Carried = tuple[Assignment, Owed, frozenset[int]]  # an op's assignment, what is owed, on which operands


class PartialSums:
    """What becomes of the pending sums of a program that is being written.

    `readers`: how often a value is read, views looked through; a view counts as its root.
    """

    def __init__(self, values: Values, graph: Graph, propagated: Propagated) -> None:
        self.values, self.p = values, propagated
        self.readers = _reader_counts(graph, propagated)
        self.rows = _reader_counts(graph, propagated, rows=True)
        self.branching = Branching(values, graph, propagated)

    def carried(self, op: Op) -> Carried | None:
        """How `op` runs on operands whose sum is pending, if it may; of several ways, that which saves most."""
        rule, values = op.rule, self.values
        assert rule is not None
        found: list[tuple[float, Carried]] = []
        for together in rule.linear:
            linear = frozenset(i for i in together if not is_zero(op.operands[i]))
            forms = [values.owing(op.operands[i]) for i in sorted(linear)]
            if not forms or any(form is None for form in forms):
                continue
            several = [op.operands[i] for i in sorted(linear) if self._summed(op.operands[i]) > 1]
            for value in several:
                self.branching.consider(value)
            branches = self.branching.passed.get(op) == linear
            if several and not branches:
                continue
            self._scatter_alike([op.operands[i] for i in sorted(linear)])
            forms = [values.owing(op.operands[i]) for i in sorted(linear)]
            if len({form[1] for form in forms if form}) > 1:
                continue
            cuts = {i: form[0] for i, form in zip(sorted(linear), forms, strict=True) if form}
            if (assignment := fitting(values, op, cuts)) is None:
                continue
            owed = forms[0][1] if forms[0] else SETTLED
            saved = 0.0 if branches else self._saved(op, linear, assignment, owed)
            if saved is not None:
                found.append((saved, (assignment, owed, linear)))
        return max(found, key=lambda way: way[0])[1] if found else self._onto(op)

    def _onto(self, op: Op) -> Carried | None:
        """How an op runs that adds to a pending sum what is one over the same axes."""
        assert op.rule is not None
        if (i := op.rule.onto) is None or (value := op.operands[i]).constant or self._summed(value) > 1:
            return None
        if (form := self.values.owing(value)) is None:
            return None
        assignment = dict(self.p.assignment(op))
        cut, owed = self.values.forms.result_form(op, 0, assignment, SETTLED)
        alike = form[0] == cut and form[1].kind == owed.kind and {*form[1].axes} == {*owed.axes}
        return (assignment, form[1], frozenset([i])) if alike else None

    def _summed(self, value: Value) -> int:
        """How many readers need a value's sum: where devices have rows of own groups, who reads these does not."""
        own = self.values.own.forms[value] or self.values.own.forms[viewed(value)]
        return self.readers[value] - (self.rows[value] if own else 0)

    def _scatter_alike(self, operands: Sequence[Value]) -> None:
        """Scatters partial sums over the axes over which another operand's sum was scattered already.

        Accumulated gradients need this: the addend of a later microbatch joins a sum that is scattered.
        """
        values = self.values
        forms = [(x, form) for x in operands if (form := values.owing(x)) is not None]
        first, (cut, owed) = min(forms, key=lambda known: len(known[1][1].axes))
        for x, (mine, all_owed) in forms:
            added = [b[len(a) :] for a, b in zip(mine, cut, strict=False) if b[: len(a)] == a]
            left = {*all_owed.axes} - {axis for axes in added for axis in axes}
            is_same_shape = values.propagation.value[x] == values.propagation.value[first] and len(added) == len(cut)
            if is_same_shape and all_owed != owed and (left, all_owed.kind) == ({*owed.axes}, owed.kind):
                values.scatter(x, cut)

    def _saved(self, op: Op, linear: frozenset[int], assignment: Assignment, owed: Owed) -> float | None:
        """Seconds saved if a sum passes; None if it may not: that takes no growth, no other kind of reduction on
        top, and no more reshards of other operands, or arithmetic that is done more often, than it saves."""
        assert op.rule is not None
        if owed.kind != "sum" or not op.rule.adds_up(x for (x, _), axes in assignment.items() if axes):
            return None
        if has_trait(op.target, "casts_addends"):
            return 0.0  # what it costs to add these up is no reason to add up others
        most = sum(min(x.nbytes, viewed(x).nbytes) for x in (op.operands[i] for i in linear))
        made = sum(r.nbytes for r in op.results if r is not None)
        if made > most:
            return None
        decided = self.p.assignment(op)
        prices: list[float] = []
        besides = 0.0
        for i, value in enumerate(op.operands):
            if not value.constant:
                factors = value_factors(self.values.propagation, op, i, operand=True)
                now, then = (tuple((x and way.get(x)) or () for x in factors) for way in (assignment, decided))
                if i in linear:
                    prices.append(self.values.price(value, then))
                else:
                    besides += max(0.0, self.values.price(value, now) - self.values.price(value, then))
        saved = sum(prices) - max(prices) * (made / most if most else 1)
        more = estimate_work(op, self.values.prices) * (share(op, assignment) - share(op, decided))
        if besides:
            return saved - besides if saved - besides > max(more, 0.0) else None
        return None if more > max(saved, 0.0) else saved


def _reader_counts(graph: Graph, p: Propagated, *, rows: bool = False) -> Mapping[Value, int]:
    """How often each value is read; with `rows`, by ops that may do with rows of own groups."""

    def counts_here(op: Op, i: int) -> bool:
        return bool(op.owns and i in op.owns.reads) if rows else not (op.transparent or op.constant)

    if rows and not any(op.owns for op in graph.ops):
        return dict.fromkeys(p.units.roots, 0)
    counts: dict[Value, int] = defaultdict(int)
    for value, (root, _) in p.units.roots.items():
        counts[root] += sum(counts_here(op, i) for op, i in value.readers)
    for out in graph.outputs if not rows else ():
        if isinstance(out, Value) and not out.constant:
            counts[p.units.root(out)[0]] += 1
    return {value: counts[root] for value, (root, _) in p.units.roots.items()}
