"""Decides which ops a partial sum passes: linear ops whose results are no larger, if that saves more than it costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from shardlib.compiler.graph.ir import Graph, Op, Value, is_zero, viewed
from shardlib.compiler.lower.partial_sums.partial_sum_fanout import Branching, fitting, share
from shardlib.compiler.lower.placement import COMPLETE, Partial
from shardlib.compiler.lower.value_layouts import Values
from shardlib.compiler.propagate import Decisions
from shardlib.compiler.propagate.propagation import Assignment
from shardlib.compiler.propagate.solver.problem import estimate_work
from shardlib.core.aten.op_traits import has_trait

Carried = tuple[Assignment, Partial, frozenset[int]]  # an op's assignment, and the partial sum on which operands


class PartialSums:
    """Decides where the partial sums of a program are reduced.

    `readers` counts the readers of a value and of its views; a view has the count of its root.
    """

    def __init__(self, values: Values, graph: Graph, propagated: Decisions) -> None:
        self.values, self.p = values, propagated
        self.readers = _reader_counts(graph, propagated)
        self.rows = _reader_counts(graph, propagated, rows=True)
        self.branching = Branching(values, graph, propagated)

    def carried(self, op: Op) -> Carried | None:
        """Returns how `op` runs on partial sums, in the way that saves most; None if it needs complete operands."""
        rule, values = op.rule, self.values
        assert rule is not None
        options: list[tuple[float, Carried]] = []
        for together in rule.linear:
            linear = frozenset(i for i in together if not is_zero(op.operands[i]))
            forms = [values.partial_form(op.operands[i]) for i in sorted(linear)]
            if not forms or any(form is None for form in forms):
                continue
            several = [op.operands[i] for i in sorted(linear) if self._summed(op.operands[i]) > 1]
            for value in several:
                self.branching.consider(value)
            branches = self.branching.passed.get(op) == linear
            if several and not branches:
                continue
            self._scatter_alike([op.operands[i] for i in sorted(linear)])
            forms = [values.partial_form(op.operands[i]) for i in sorted(linear)]
            if len({form[1] for form in forms if form}) > 1:
                continue
            shardings = {i: form[0] for i, form in zip(sorted(linear), forms, strict=True) if form}
            if (assignment := fitting(values, op, shardings)) is None:
                continue
            partial = forms[0][1] if forms[0] else COMPLETE
            saved = 0.0 if branches else self._saved(op, linear, assignment, partial)
            if saved is not None:
                options.append((saved, (assignment, partial, linear)))
        return max(options, key=lambda way: way[0])[1] if options else self._onto(op)

    def _onto(self, op: Op) -> Carried | None:
        """Returns how an op runs that adds its own partial sum to an operand that is one over the same axes."""
        if (i := op.required_rule.onto) is None or (value := op.operands[i]).constant or self._summed(value) > 1:
            return None
        if (form := self.values.partial_form(value)) is None:
            return None
        assignment = dict(self.p.assignment(op))
        sharding, partial = self.values.forms.result_form(op, 0, assignment, COMPLETE)
        alike = form[0] == sharding and form[1].kind == partial.kind and {*form[1].axes} == {*partial.axes}
        return (assignment, form[1], frozenset([i])) if alike else None

    def _summed(self, value: Value) -> int:
        """Returns the number of readers that need a value's sum; readers of rows of own groups do not."""
        has_own_rows = self.values.own.forms[value] or self.values.own.forms[viewed(value)]
        return self.readers[value] - (self.rows[value] if has_own_rows else 0)

    def _scatter_alike(self, operands: Sequence[Value]) -> None:
        """Scatters partial sums over the axes over which another operand's sum was scattered already.

        Accumulated gradients need this: the addend of a later microbatch joins a sum that is scattered.
        """
        values = self.values
        forms = [(x, form) for x in operands if (form := values.partial_form(x)) is not None]
        first, (sharding, partial) = min(forms, key=lambda item: len(item[1][1].axes))
        for x, (mine, all_partial) in forms:
            added = [b[len(a) :] for a, b in zip(mine, sharding, strict=False) if b[: len(a)] == a]
            left = {*all_partial.axes} - {axis for axes in added for axis in axes}
            is_same_shape = values.propagation.value[x] == values.propagation.value[first] and len(added) == len(
                sharding
            )
            if is_same_shape and all_partial != partial and (left, all_partial.kind) == ({*partial.axes}, partial.kind):
                values.scatter(x, sharding)

    def _saved(self, op: Op, linear: frozenset[int], assignment: Assignment, partial: Partial) -> float | None:
        """Returns the seconds saved if a sum passes an op; None if it may not pass.

        The result must not be larger, the kind of reduction must be the same, and the saving must exceed the cost of
        other operands' reshards and of repeated arithmetic.
        """
        if partial.kind != "sum" or not op.required_rule.adds_up(x for (x, _), axes in assignment.items() if axes):
            return None
        if has_trait(op.target, "casts_addends"):
            return 0.0  # the cast is free; the cost of reducing these addends is no reason to reduce others
        most = sum(min(x.nbytes, viewed(x).nbytes) for x in (op.operands[i] for i in linear))
        result_bytes = sum(r.nbytes for r in op.results if r is not None)
        if result_bytes > most and not self._joins_wide_sum(op):
            return None
        decided = self.p.assignment(op)
        prices: list[float] = []
        besides = 0.0
        for i, value in enumerate(op.operands):
            if not value.constant:
                factors = self.values.propagation.value_factors(op, i, operand=True)
                now, then = (tuple((x and way.get(x)) or () for x in factors) for way in (assignment, decided))
                if i in linear:
                    prices.append(self.values.price(value, then))
                else:
                    besides += max(0.0, self.values.price(value, now) - self.values.price(value, then))
        saved = sum(prices) - max(prices) * (result_bytes / most if most else 1)
        more = estimate_work(op, self.values.prices) * (share(op, assignment) - share(op, decided))
        if besides:
            return saved - besides if saved - besides > max(more, 0.0) else None
        return None if more > max(saved, 0.0) else saved

    def _joins_wide_sum(self, op: Op) -> bool:
        """True if an op casts a sum to a wider dtype, and enough such casts are added up.

        One message of the wide sum then replaces a message for every narrow one. Mixed precision needs this: gradients
        of 16 bits are added up over microbatches in 32 bits.
        """
        total = op.results[0]
        if not has_trait(op.target, "copies") or total is None:
            return False
        while self.readers[total] == 1 and not total.is_output:
            adder = next((reader for reader, _ in total.readers if _adds(reader)), None)
            if adder is None or (result := adder.results[0]) is None:
                break
            total = result
        casts = [x.op.operands[0] for x in _addends(total) if x.op is not None and x.op.target is op.target]
        narrow = [x for x in casts if x.dtype == op.operands[0].dtype and self.readers[x] == 1 and self._is_summed(x)]
        return sum(x.nbytes for x in narrow) >= total.nbytes

    def _is_summed(self, value: Value) -> bool:
        """True if the op of a value reduces a factor that its decision shards."""
        op, units = viewed(value).op, self.p.units
        if op is None or op not in units.unit or op.rule is None:
            return False
        axes = self.p.unit_axes(units.unit[op])
        kept = self.values.propagation.value_factors(op, viewed(value).index, operand=False)
        return any(
            axes[slot] and factor not in kept and op.rule.partial_kind(viewed(value).index, factor[0]) == "sum"
            for factor, slot in units.op_slots[op].items()
        )


def _adds(op: Op) -> bool:
    return has_trait(op.target, "commutes") and has_trait(op.target, "takes_alpha")


def _addends(value: Value) -> Iterator[Value]:
    """Yields the values that are added up to a value."""
    if value.op is not None and _adds(value.op):
        for x in value.op.operands:
            yield from _addends(x)
    else:
        yield value


def _reader_counts(graph: Graph, p: Decisions, *, rows: bool = False) -> Mapping[Value, int]:
    """Returns the number of readers of each value; with `rows`, only of those that accept rows of own groups."""

    def is_counted(op: Op, i: int) -> bool:
        return bool(op.owns and i in op.owns.reads) if rows else not (op.transparent or op.constant)

    if rows and not any(op.owns for op in graph.ops):
        return dict.fromkeys(p.units.roots, 0)
    counts: dict[Value, int] = defaultdict(int)
    for value, (root, _) in p.units.roots.items():
        counts[root] += sum(is_counted(op, i) for op, i in value.readers)
    for out in graph.outputs if not rows else ():
        if isinstance(out, Value) and not out.constant:
            counts[p.units.roots[out][0]] += 1
    return {value: counts[root] for value, (root, _) in p.units.roots.items()}
