"""The values between units: where each is made, who reads it in which cut, and what it owes on the way.

Values of one shape (the same cuts at the same ends) are one record, which is counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardlib.compiler.graph.ir import Graph, Op, Value, is_zero
from shardlib.compiler.propagate.decision_units import DecisionUnit, Slots, Units, op_cut_slots, value_factors
from shardlib.compiler.propagate.propagation import Propagation
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.reshard import FactorAxes, FactorSizes

Kind = int  # index of a group of units that share every decision


class End(NamedTuple):
    """One end of a value: the unit that makes or reads it (`kind`, `slots` per leaf), or a cut that is fixed."""

    kind: Kind | None
    slots: Slots = ()
    cut: FactorAxes = ()
    pending: tuple[int, ...] = ()  # slots of the unit whose sum this value still owes, or may owe to a reader
    into: tuple[FactorSizes, FactorAxes] | None = None  # the fixed cut in factors of its own, if `cut` cannot say it
    dims: FactorSizes | None = None  # then, the leaves as the dims of a view have them


@dataclass(frozen=True)
class Record:
    """A value as the estimate sees it."""

    sizes: tuple[tuple[int, ...], ...]  # of the leaves, per dim
    itemsize: int
    sources: tuple[End, ...]
    readers: tuple[End, ...]  # each once, in program order: planning must not depend on the order of a set
    held: bool = False  # an input: what is gathered of it stays in memory from its forward to its backward reader
    # A result of the program, in a layout that nobody fixed: per leaf, the axes that it wants. What is still owed then
    # is paid, in pieces if a leaf wants the axis.
    returned: tuple[tuple[Axis, ...], ...] | None = None
    through: tuple[End, ...] = ()  # where its sum began, if it came through linear ops: the first that owes counts
    joins: tuple[End, ...] = ()  # the additions in which its sources meet: sources are summed in the layouts of these
    late: bool = False  # while its sum is pending, who needs it takes it so, and has a record of `through`
    hidden: bool = False  # nobody waits for its messages while there is arithmetic

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        ends = (*self.sources, *self.readers, *self.through, *self.joins)
        return tuple(sorted({e.kind for e in ends if e.kind is not None}))


class Records:
    """Finds the records of a graph, whose units are of some `kind`."""

    def __init__(self, propagation: Propagation, units: Units, kind: Mapping[DecisionUnit, Kind]) -> None:
        self.propagation, self.units, self.kind = propagation, units, kind
        self.slots = {k: unit.slots for unit, k in kind.items()}
        self.directions: dict[Value, set[bool]] = defaultdict(set)  # in which roots are read: forward, backward

    def _end(self, unit: DecisionUnit | None, slots: Slots, pending: tuple[int, ...] = ()) -> End:
        if unit is None or unit not in self.kind:
            return End(None, cut=((),) * len(slots))
        return End(self.kind[unit], slots, pending=pending)

    def of(self, graph: Graph) -> Iterable[tuple[Record, int]]:
        """What moves between units: each root value, who makes it, and who reads it in which cut; and how often."""
        f = self.propagation
        readers, sources = self._ends(graph)
        joins: dict[Value, tuple[End, ...]] = {}
        merged = self._meeting_sums(graph, sources, readers, joins)
        through, late = self._sums_of_rows(graph, sources)
        returned = self._returned(graph, readers)
        yield from self._given_apart()
        for root, ends in readers.items():
            if root in merged:
                continue
            fixed = f.fixed.get(root)
            made = sources.get(root) or (self._input(root),) if fixed is None else (End(None, cut=fixed[0]),)
            what = f.sizes(root), root.dtype.itemsize, tuple(dict.fromkeys(made)), tuple(ends)
            held = root.op is None and len(self.directions[root]) > 1
            record = Record(
                *what,
                held,
                returned.get(root),
                through.get(root, ()),
                joins.get(root, ()),
                late=root in late,
                hidden=root in f.hidden,
            )
            yield record, root.times

    def _given_apart(self) -> Iterable[tuple[Record, int]]:
        """The inputs that are given in other factors than they have inside."""
        f = self.propagation
        for value, twin in f.apart.items():
            if isinstance(value, Value) and twin in f.fixed:
                cut = f.fixed[twin][0]
                given = End(None, cut=f.across(cut, twin, value), into=(f.sizes(twin), cut))
                yield Record(f.sizes(value), value.dtype.itemsize, (given,), (self._input(value),)), value.times

    def _ends(self, graph: Graph) -> tuple[dict[Value, dict[End, None]], dict[Value, tuple[End, ...]]]:
        """The readers of each root value, each kind of them once, and its source."""
        readers: dict[Value, dict[End, None]] = defaultdict(dict)
        sources: dict[Value, tuple[End, ...]] = {}
        for op in graph.ops:
            if op.constant or op.transparent:
                continue
            for i, value in enumerate(op.operands):
                if not value.constant:
                    root, positions = self.units.root(value)
                    readers[root][self._reader(op, i, value, root, positions)] = None
                    self.directions[root].add(op.backward)
            for index, result in enumerate(op.results):
                if result is not None:
                    sources[result] = (self._source(op, index, result),)
        return readers, sources

    def _meeting_sums(
        self,
        graph: Graph,
        sources: dict[Value, tuple[End, ...]],
        readers: dict[Value, dict[End, None]],
        joins: dict[Value, tuple[End, ...]],
    ) -> set[Value]:
        """Pending sums that only additions read, and that meet there before what is complete: they are no values apart.

        The sum of two has the sources of both, and the addition among its `joins`. Of those that meet behind something
        complete, `(x + a) + b`, the first has them all, and the readers.
        """
        f, u = self.propagation, self.units
        reads: Counter[Value] | None = None
        merged: set[Value] = set()
        first: dict[Value, tuple[Value, tuple[int | None, ...]]] = {}  # behind something complete, of an addition
        for op in graph.ops:
            if op.constant or op.transparent or op.owns is not None or not self._adds(op):
                continue
            addends = [u.root(v) for v in op.operands]
            (result,) = op.results
            assert result is not None, "a sum has a value"
            owing = [any(map(self._owes, sources.get(r, ()))) for r, _ in addends]
            if not any(owing) or any(f.value[v] != f.value[result] for v in op.operands):
                continue
            reads = u.reads() if reads is None else reads
            alone = [reads[r] == 1 and not r.is_output for r, _ in addends]
            if all(owing):
                if all(alone):
                    merged.update(r for r, _ in addends)
                    both = (_seen(s, positions) for r, positions in addends for s in sources[r])
                    met = [_seen(s, positions) for r, positions in addends for s in joins.get(r, ())]
                    joins[result] = tuple(dict.fromkeys([*met, sources[result][0]._replace(pending=())]))
                    sources[result] = tuple(dict.fromkeys(both))
                continue
            (root, positions), (complete, _) = addends[:: 1 if owing[0] else -1]
            if not alone[owing.index(True)]:
                continue
            begun = first.get(complete) if alone[owing.index(False)] else None
            leaves = range(len(f.leaves(begun[0]))) if begun is not None else range(0)
            if begun is not None and len(begun[1]) == len(leaves) and {*begun[1]} == {*leaves}:
                merged.add(root)
                back = tuple(begun[1].index(i) for i in leaves)
                more = (_seen(_seen(s, positions), back) for s in sources[root])
                sources[begun[0]] = tuple(dict.fromkeys((*sources[begun[0]], *more)))
                readers[begun[0]] |= {_seen(_seen(end, positions), back): None for end in readers[root]}
            first[result] = begun or (root, positions)
        return merged

    def _sums_of_rows(
        self, graph: Graph, sources: dict[Value, tuple[End, ...]]
    ) -> tuple[dict[Value, tuple[End, ...]], set[Value]]:
        """Where rows of own groups become a sum that only a linear op reads, as the combine of experts, that op's
        result owes it: who makes the rows is a source of that, too."""
        u, through, late = self.units, dict[Value, tuple[End, ...]](), set[Value]()
        if not any(root.rows for root, _ in u.roots.values()):
            return through, late
        reads: Counter[Value] = Counter()
        for value, (root, _) in u.roots.items():
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
                root, positions = u.root(op.operands[terms[0]])
                if result is None or reads[root] != 1 or not (root.rows or root in through):
                    continue
                others = [v for i, v in enumerate(op.operands) if i not in terms and not v.constant]
                if result.nbytes > root.nbytes or any(v.dtype.is_floating_point for v in others):
                    continue
                factors = value_factors(self.propagation, op, terms[0], operand=True)
                at = dict(zip(factors, positions, strict=True))
                there = tuple(at.get(x) if x else None for x in value_factors(self.propagation, op, 0, operand=False))
                through[result] = tuple(_seen(s, there) for s in (*through.get(root, ()), *sources.get(root, ())))
                late.add(root)
        return through, late

    def _returned(
        self, graph: Graph, readers: dict[Value, dict[End, None]]
    ) -> dict[Value, tuple[tuple[Axis, ...], ...]]:
        """What results that nobody places want to be cut by; where one is fixed, it is one more reader."""
        f = self.propagation
        returned: dict[Value, tuple[tuple[Axis, ...], ...]] = {}
        for i, value in enumerate(graph.outputs):
            if not isinstance(value, Value) or value.constant:
                continue
            root, _ = self.units.root(value)
            if i in f.outputs:
                readers[root][self._fixed(f.outputs[i][0], f.apart.get(i, value), value)] = None
            else:
                readers[root]  # it is read, if by nobody inside
                returned[root] = tuple(tuple(w.axis for w in f.requests.get(x, ())) for x in f.leaves(root))
        return returned

    def _reader(self, op: Op, i: int, value: Value, root: Value, positions: tuple[int | None, ...]) -> End:
        if (known := self.units.read.get((op, i))) is not None:
            return self._end(self.units.unit[op], *known)
        n = len(self.propagation.leaves(root))
        if op.constrains:
            result = op.results[0]
            assert result is not None
            return self._fixed(self.propagation.fixed[result][0], result, value)
        if op in self.propagation.doors:
            return self._fixed(self.propagation.doors[op][0], self.propagation.apart.get(op, value), value)
        if op.rule is None:
            return End(None, cut=((),) * n)
        slots = op_cut_slots(self.units, op, value_factors(self.propagation, op, i, operand=True))
        out: list[int | None] = [None] * n
        for slot, position in zip(slots, positions, strict=True):
            if position is not None:
                out[position] = slot
        slot = None
        if op.owns is not None and i in op.owns.reads:
            slot = self.units.op_slots[op].get((op.owns.factor, 0))
        known = self.units.read[op, i] = tuple(out), () if slot is None else (slot,)
        return self._end(self.units.unit[op], *known)

    def _fixed(self, cut: FactorAxes, said: Value, value: Value) -> End:
        """Who takes `value` as it is said, in `cut` of the factors of `said`; on the leaves of its root."""
        f, (root, positions) = self.propagation, self.units.root(value)
        near, n = _onto_root(f.across(cut, said, value), positions, len(f.leaves(root))), len(f.leaves(root))
        if f.value[value] != f.value[said] and positions == (*range(n),):
            return End(None, cut=near, into=(f.sizes(said), cut), dims=f.sizes(value))
        dims, theirs = zip(f.sizes(value), f.sizes(said), strict=True), iter(cut)
        feed, count = iter(positions), iter(range(n))
        asked = {tuple(next(feed) for _ in mine): (own, tuple(next(theirs) for _ in own)) for mine, own in dims}
        at = [asked.get(tuple(next(count) for _ in dim)) for dim in f.sizes(root)]
        into = [of for of in at if of is not None]
        if f.value[value] == f.value[said] or len(into) < len(at):
            return End(None, cut=near)
        return End(None, cut=near, into=(tuple(own for own, _ in into), tuple(a for _, axes in into for a in axes)))

    def _source(self, op: Op, index: int, result: Value) -> End:
        f, u = self.propagation, self.units
        if (known := u.made.get((op, index))) is not None:
            return self._end(u.unit[op], *known)
        if result in f.fixed or op.rule is None:
            return End(None, cut=f.fixed[result][0] if result in f.fixed else ((),) * len(f.leaves(result)))
        factors = value_factors(f, op, index, operand=False)
        owed = tuple(s for x, s in u.op_slots[op].items() if x not in factors and op.rule.partial_kind(index, x[0]))
        known = u.made[op, index] = op_cut_slots(u, op, factors), owed
        return self._end(u.unit[op], *known)

    def _input(self, value: Value) -> End:
        if value in self.propagation.fixed or value not in self.units.unit:
            return End(None, cut=((),) * len(self.propagation.leaves(value)))
        return self._end(self.units.unit[value], self.units.value_slots[value])

    def _owes(self, end: End) -> bool:
        """Returns whether an annotation may make a partial sum of what an end makes."""
        if end.kind is None:
            return False
        leaves = self.slots[end.kind]
        return any(leaves[s] in self.propagation.requests for s in end.pending)

    def _adds(self, op: Op) -> bool:
        rule = op.rule
        if rule is None or len(op.operands) != 2 or any(v.constant for v in op.operands):
            return False
        return frozenset({0, 1}) in rule.linear and op.operands[0].shape == op.operands[1].shape


def _seen(end: End, positions: Slots) -> End:
    """The end of a root, on the leaves of a view of it."""
    if end.kind is None:
        return end._replace(cut=tuple(() if p is None else end.cut[p] for p in positions))
    return end._replace(slots=tuple(None if p is None else end.slots[p] for p in positions))


def _onto_root(cut: FactorAxes, positions: tuple[int | None, ...], n: int) -> FactorAxes:
    """A cut of a view, on the leaves of its root."""
    out: list[tuple[Axis, ...]] = [()] * n
    for axes, position in zip(cut, positions, strict=True):
        if position is not None:
            out[position] = axes
    return tuple(out)
