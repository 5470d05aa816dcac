"""Records the values between units: their producers and readers, and the partial sums between these.

Equal values, with the same shape and the same layouts at their ends, are one record, which is counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardlib.compiler.graph.ir import Graph, Op, Value, is_zero
from shardlib.compiler.propagate.decision_units import DecisionUnit, Slots, Units, find_slots
from shardlib.compiler.propagate.propagation import Propagation
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.reshard import FactorAxes, FactorSizes

UnitClass = int  # the number of a class of equal units, which share every decision


class ValueEnd(NamedTuple):
    """One end of a value: the slots of the unit that makes or reads it, per factor; or pinned `axes`."""

    unit_class: UnitClass | None
    slots: Slots = ()
    axes: FactorAxes = ()
    partial: tuple[int, ...] = ()  # slots over which the value is a partial sum, or may stay one for a reader
    into: tuple[FactorSizes, FactorAxes] | None = None  # a pin in factors of its own, with its axes
    dims: FactorSizes | None = None  # with `into`: the factors per dim of a view


@dataclass(frozen=True)
class ValueRecord:
    """A value as the estimate sees it, with its ends."""

    sizes: tuple[tuple[int, ...], ...]  # of the factors, per dim
    itemsize: int
    sources: tuple[ValueEnd, ...]
    readers: tuple[ValueEnd, ...]  # each once, in program order
    held: bool = False  # an input that, once gathered, stays in memory for the backward pass
    # For a result of the program without a pin: per factor, the axes that it requests. A partial sum is reduced there,
    # and scattered if a factor requests the axis.
    returned: tuple[tuple[Axis, ...], ...] | None = None
    through: tuple[ValueEnd, ...] = ()  # where its partial sum began, if linear ops passed it on
    joins: tuple[ValueEnd, ...] = ()  # the additions of its sources, which happen in their layouts
    late: bool = False  # readers take its partial sum, and have a record with `through`
    hidden: bool = False  # arithmetic hides its messages

    @cached_property
    def unit_classes(self) -> tuple[UnitClass, ...]:
        ends = (*self.sources, *self.readers, *self.through, *self.joins)
        return tuple(sorted({e.unit_class for e in ends if e.unit_class is not None}))


class RecordFinder:
    """Finds the records of a graph whose units have classes."""

    def __init__(
        self,
        propagation: Propagation,
        units: Units,
        unit_class: Mapping[DecisionUnit, UnitClass],
        hidden: Collection[Value],
    ) -> None:
        self.propagation, self.units, self.class_of, self.hidden = propagation, units, unit_class, hidden
        self.slots = {k: unit.slots for unit, k in unit_class.items()}
        self.directions: dict[Value, set[bool]] = defaultdict(set)  # of passes that read a root: True is backward

    def _end(self, unit: DecisionUnit | None, slots: Slots, partial: tuple[int, ...] = ()) -> ValueEnd:
        if unit is None or unit not in self.class_of:
            return ValueEnd(None, axes=((),) * len(slots))
        return ValueEnd(self.class_of[unit], slots, partial=partial)

    def find(self, graph: Graph) -> Iterable[tuple[ValueRecord, int]]:
        """Yields the record of each root value, and how many values it represents."""
        propagation = self.propagation
        readers, sources = self._ends(graph)
        joins: dict[Value, tuple[ValueEnd, ...]] = {}
        merged = self._meeting_sums(graph, sources, readers, joins)
        through, late = self._sums_of_rows(graph, sources)
        returned = self._returned(graph, readers)
        yield from self._twin_inputs()
        for root, ends in readers.items():
            if root in merged:
                continue
            fixed = propagation.pinned_values.get(root)
            own = sources.get(root) or (self._input(root),) if fixed is None else (ValueEnd(None, axes=fixed[0]),)
            record_ends = tuple(dict.fromkeys(own)), tuple(ends)
            held = root.op is None and len(self.directions[root]) > 1
            record = ValueRecord(
                propagation.sizes(root),
                root.dtype.itemsize,
                *record_ends,
                held,
                returned.get(root),
                through.get(root, ()),
                joins.get(root, ()),
                late=root in late,
                hidden=root in self.hidden,
            )
            yield record, root.times

    def _twin_inputs(self) -> Iterable[tuple[ValueRecord, int]]:
        """Yields the reshards of inputs with twins, from the twin to the input."""
        propagation = self.propagation
        for value, twin in propagation.pin_twins.items():
            if isinstance(value, Value) and twin in propagation.pinned_values:
                axes = propagation.pinned_values[twin][0]
                own, into = propagation.across(axes, twin, value), (propagation.sizes(twin), axes)
                ends = (ValueEnd(None, axes=own, into=into),), (self._input(value),)
                yield ValueRecord(propagation.sizes(value), value.dtype.itemsize, *ends), value.times

    def _ends(self, graph: Graph) -> tuple[dict[Value, dict[ValueEnd, None]], dict[Value, tuple[ValueEnd, ...]]]:
        """Returns the distinct readers of each root value, and its source."""
        readers: dict[Value, dict[ValueEnd, None]] = defaultdict(dict)
        sources: dict[Value, tuple[ValueEnd, ...]] = {}
        for op in graph.ops:
            if op.constant or op.transparent:
                continue
            for i, value in enumerate(op.operands):
                if not value.constant:
                    root, positions = self.units.roots[value]
                    readers[root][self._reader(op, i, value, root, positions)] = None
                    self.directions[root].add(op.backward)
            for index, result in enumerate(op.results):
                if result is not None:
                    sources[result] = (self._source(op, index, result),)
        return readers, sources

    def _meeting_sums(
        self,
        graph: Graph,
        sources: dict[Value, tuple[ValueEnd, ...]],
        readers: dict[Value, dict[ValueEnd, None]],
        joins: dict[Value, tuple[ValueEnd, ...]],
    ) -> set[Value]:
        """Merges partial sums that are read only by additions, and so can be added before they are reduced.

        The sum of two has the sources of both, and the addition among its `joins`. In `(x + a) + b`, with a complete
        `x`, `a` gets the sources and the readers of `b`. Returns the values that have no record of their own.
        """
        propagation, units = self.propagation, self.units
        reads: Counter[Value] | None = None
        merged: set[Value] = set()
        first: dict[Value, tuple[Value, tuple[int | None, ...]]] = {}  # result of an addition -> its first partial sum
        for op in graph.ops:
            if op.constant or op.transparent or op.owns is not None or not self._adds(op):
                continue
            addends = [units.roots[v] for v in op.operands]
            (result,) = op.results
            assert result is not None, "a sum has a value"
            partial = [any(map(self._has_partial, sources.get(r, ()))) for r, _ in addends]
            if not any(partial) or any(propagation.value[v] != propagation.value[result] for v in op.operands):
                continue
            reads = units.reads() if reads is None else reads
            alone = [reads[r] == 1 and not r.is_output for r, _ in addends]
            if all(partial):
                if all(alone):
                    merged.update(r for r, _ in addends)
                    both = (_onto_view(s, positions) for r, positions in addends for s in sources[r])
                    met = [_onto_view(s, positions) for r, positions in addends for s in joins.get(r, ())]
                    joins[result] = tuple(dict.fromkeys([*met, sources[result][0]._replace(partial=())]))
                    sources[result] = tuple(dict.fromkeys(both))
                continue
            (root, positions), (complete, _) = addends[:: 1 if partial[0] else -1]
            if not alone[partial.index(True)]:
                continue
            begun = first.get(complete) if alone[partial.index(False)] else None
            dim_factors = range(len(propagation.dim_factors(begun[0]))) if begun is not None else range(0)
            if begun is not None and len(begun[1]) == len(dim_factors) and {*begun[1]} == {*dim_factors}:
                merged.add(root)
                back = tuple(begun[1].index(i) for i in dim_factors)
                more = (_onto_view(_onto_view(s, positions), back) for s in sources[root])
                sources[begun[0]] = tuple(dict.fromkeys((*sources[begun[0]], *more)))
                readers[begun[0]] |= {_onto_view(_onto_view(end, positions), back): None for end in readers[root]}
            first[result] = begun or (root, positions)
        return merged

    def _sums_of_rows(
        self, graph: Graph, sources: dict[Value, tuple[ValueEnd, ...]]
    ) -> tuple[dict[Value, tuple[ValueEnd, ...]], set[Value]]:
        """Finds partial sums of own rows that a linear op passes on, as the combine of experts.

        Returns, for the op's result, where the sum began, and the values that readers take as partial sums.
        """
        units, through, late = self.units, dict[Value, tuple[ValueEnd, ...]](), set[Value]()
        if not any(root.rows for root, _ in units.roots.values()):
            return through, late
        reads: Counter[Value] = Counter()
        for value, (root, _) in units.roots.items():
            own = (op.owns is not None and i in op.owns.reads for op, i in value.readers)
            reads[root] += value.is_output + sum(
                not (mine or op.transparent or op.constant) for mine, (op, _) in zip(own, value.readers, strict=True)
            )
        for op in graph.ops:
            if op.constant or op.transparent or op.owns is not None or op.rule is None or len(op.results) != 1:
                continue
            for together in op.rule.linear:
                terms = [i for i in together if not is_zero(op.operands[i])]
                (result,) = op.results
                if len(terms) != 1 or op.operands[terms[0]].constant:
                    continue
                root, positions = units.roots[op.operands[terms[0]]]
                if result is None or reads[root] != 1 or not (root.rows or root in through):
                    continue
                others = [v for i, v in enumerate(op.operands) if i not in terms and not v.constant]
                if result.nbytes > root.nbytes or any(v.dtype.is_floating_point for v in others):
                    continue
                factors = self.propagation.value_factors(op, terms[0], operand=True)
                at = dict(zip(factors, positions, strict=True))
                result_positions = tuple(
                    at.get(x) if x else None for x in self.propagation.value_factors(op, 0, operand=False)
                )
                through[result] = tuple(
                    _onto_view(s, result_positions) for s in (*through.get(root, ()), *sources.get(root, ()))
                )
                late.add(root)
        return through, late

    def _returned(
        self, graph: Graph, readers: dict[Value, dict[ValueEnd, None]]
    ) -> dict[Value, tuple[tuple[Axis, ...], ...]]:
        """Returns the axes that results without a pin request; adds a reader for each result with a pin."""
        propagation = self.propagation
        returned: dict[Value, tuple[tuple[Axis, ...], ...]] = {}
        for i, value in enumerate(graph.outputs):
            if not isinstance(value, Value) or value.constant:
                continue
            root, _ = self.units.roots[value]
            if i in propagation.outputs:
                readers[root][self._fixed(propagation.outputs[i][0], propagation.pin_twins.get(i, value), value)] = None
            else:
                readers[root]  # so that it has a record
                requests = (propagation.requests.get(x, ()) for x in propagation.dim_factors(root))
                returned[root] = tuple(tuple(request.axis for request in own) for own in requests)
        return returned

    def _reader(self, op: Op, i: int, value: Value, root: Value, positions: tuple[int | None, ...]) -> ValueEnd:
        if (memo := self.units.operand_slots.get((op, i))) is not None:
            return self._end(self.units.unit[op], *memo)
        n = len(self.propagation.dim_factors(root))
        if op.constrains:
            result = op.results[0]
            assert result is not None
            return self._fixed(self.propagation.pinned_values[result][0], result, value)
        if op in self.propagation.body_inputs:
            return self._fixed(self.propagation.body_inputs[op][0], self.propagation.pin_twins.get(op, value), value)
        if op.rule is None:
            return ValueEnd(None, axes=((),) * n)
        slots = find_slots(self.units, op, self.propagation.value_factors(op, i, operand=True))
        out: list[int | None] = [None] * n
        for slot, position in zip(slots, positions, strict=True):
            if position is not None:
                out[position] = slot
        slot = None
        if op.owns is not None and i in op.owns.reads:
            slot = self.units.op_slots[op].get((op.owns.factor, 0))
        memo = self.units.operand_slots[op, i] = tuple(out), () if slot is None else (slot,)
        return self._end(self.units.unit[op], *memo)

    def _fixed(self, axes: FactorAxes, twin: Value, value: Value) -> ValueEnd:
        """Returns the end of a reader that takes `value` with these axes on the factors of `twin`."""
        propagation, (root, positions) = self.propagation, self.units.roots[value]
        n = len(propagation.dim_factors(root))
        near = _onto_root(propagation.across(axes, twin, value), positions, n)
        if propagation.value[value] != propagation.value[twin] and positions == (*range(n),):
            return ValueEnd(None, axes=near, into=(propagation.sizes(twin), axes), dims=propagation.sizes(value))
        dims, theirs = zip(propagation.sizes(value), propagation.sizes(twin), strict=True), iter(axes)
        feed, count = iter(positions), iter(range(n))
        twin_dims = {tuple(next(feed) for _ in mine): (own, tuple(next(theirs) for _ in own)) for mine, own in dims}
        at = [twin_dims.get(tuple(next(count) for _ in dim)) for dim in propagation.sizes(root)]
        into = [dim for dim in at if dim is not None]
        if propagation.value[value] == propagation.value[twin] or len(into) < len(at):
            return ValueEnd(None, axes=near)
        return ValueEnd(
            None, axes=near, into=(tuple(own for own, _ in into), tuple(a for _, dim_axes in into for a in dim_axes))
        )

    def _source(self, op: Op, index: int, result: Value) -> ValueEnd:
        propagation, units = self.propagation, self.units
        if (memo := units.result_slots.get((op, index))) is not None:
            return self._end(units.unit[op], *memo)
        if result in propagation.pinned_values or op.rule is None:
            replicated: FactorAxes = ((),) * len(propagation.dim_factors(result))
            pinned = propagation.pinned_values.get(result)
            return ValueEnd(None, axes=replicated if pinned is None else pinned[0])
        factors = propagation.value_factors(op, index, operand=False)
        slots = units.op_slots[op].items()
        partial = tuple(s for x, s in slots if x not in factors and op.rule.partial_kind(index, x[0]))
        memo = units.result_slots[op, index] = find_slots(units, op, factors), partial
        return self._end(units.unit[op], *memo)

    def _input(self, value: Value) -> ValueEnd:
        if value in self.propagation.pinned_values or value not in self.units.unit:
            return ValueEnd(None, axes=((),) * len(self.propagation.dim_factors(value)))
        return self._end(self.units.unit[value], self.units.value_slots[value])

    def _has_partial(self, end: ValueEnd) -> bool:
        """Returns whether annotations may make the value of a producer a partial sum."""
        if end.unit_class is None:
            return False
        dim_factors = self.slots[end.unit_class]
        return any(dim_factors[s] in self.propagation.requests for s in end.partial)

    def _adds(self, op: Op) -> bool:
        rule = op.rule
        if rule is None or len(op.operands) != 2 or any(v.constant for v in op.operands):
            return False
        return frozenset({0, 1}) in rule.linear and op.operands[0].shape == op.operands[1].shape


def _onto_view(end: ValueEnd, positions: Slots) -> ValueEnd:
    """Translates the end of a root to the factors of a view of it."""
    if end.unit_class is None:
        return end._replace(axes=tuple(() if p is None else end.axes[p] for p in positions))
    return end._replace(slots=tuple(None if p is None else end.slots[p] for p in positions))


def _onto_root(axes: FactorAxes, positions: tuple[int | None, ...], n: int) -> FactorAxes:
    """Translates the axes of a view to the factors of its root."""
    out: list[tuple[Axis, ...]] = [()] * n
    for factor_axes, position in zip(axes, positions, strict=True):
        if position is not None:
            out[position] = factor_axes
    return tuple(out)
