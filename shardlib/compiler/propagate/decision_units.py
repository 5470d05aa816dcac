"""Units: ops and values that are decided together.

Every factor that may be sharded is a *slot* of a unit. An op and a value belong to one unit when the value holds every
slot of the op and nothing more, so a pointwise chain is one unit. A value whose layout is fixed stands alone: units
meet there. So does an op that has a choice of its own: attention may pass its keys round, or exchange the sharded
sequence for sharded heads, where its neighbors can do neither.

Views, transposes and expands are looked through: a reader of a view is a reader of the view's *root*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from shardlib.compiler.graph.ir import Graph, Op, Value
from shardlib.compiler.propagate.dim_factors import DimFactor
from shardlib.compiler.propagate.propagation import OpFactor, Propagation

Slots = tuple[int | None, ...]  # per factor of a value: the unit's slot, or None if it is never sharded


@dataclass(eq=False)
class DecisionUnit:
    """Ops and values that take one layout together; `slots` holds a factor class each.

    `ring` maps a slot to another one: it takes the other's axes, or none, as keys that go round a ring. `follows`
    maps a slot to another one with the same axes, and leaves no choice. `lends` maps a slot to another one, whose axes
    it may take. `gathers` are slots that may stay whole though they request an axis. `part` identifies a part of a
    split unit; units of different parts never share a decision.
    """

    slots: list[DimFactor]
    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    ring: dict[int, int] = field(default_factory=dict)
    lends: dict[int, int] = field(default_factory=dict)
    follows: dict[int, int] = field(default_factory=dict)
    gathers: frozenset[int] = frozenset()
    part: object = None

    @property
    def alone(self) -> bool:
        return bool(self.ring or self.lends)

    @property
    def first_member(self) -> Op | Value:
        return self.ops[0] if self.ops else self.values[0]


@dataclass
class Units:
    """Every op's unit and slots, and every root value's."""

    unit: dict[Op | Value, DecisionUnit] = field(default_factory=dict)
    op_slots: dict[Op, dict[OpFactor, int]] = field(default_factory=dict)
    value_slots: dict[Value, tuple[int, ...]] = field(default_factory=dict)
    owner_slots: dict[Value, int] = field(default_factory=dict)  # of values in rows: the slot of their groups
    # Of each value: the value that it is a view of, and its factors' positions there, None for a missing one.
    roots: dict[Value, tuple[Value, tuple[int | None, ...]]] = field(default_factory=dict)
    # Of operands and results: their slots, and the slots over which they are partial sums. Filled by `RecordFinder`;
    # `propose_near_moves` reads them.
    operand_slots: dict[tuple[Op, int], tuple[Slots, tuple[int, ...]]] = field(default_factory=dict)
    result_slots: dict[tuple[Op, int], tuple[Slots, tuple[int, ...]]] = field(default_factory=dict)

    def reads(self) -> Counter[Value]:
        """Counts how often each root is read or returned."""
        reads: Counter[Value] = Counter()
        for value, (root, _) in self.roots.items():
            reads[root] += sum(not (op.transparent or op.constant) for op, _ in value.readers) + value.is_output
        return reads

    def split(self, part: Callable[[Op | Value], object]) -> Units:
        """Splits each unit into its parts, on the same slots; a result stays with its op."""
        parts: dict[tuple[DecisionUnit, object], DecisionUnit] = {}
        split: dict[Op | Value, DecisionUnit] = {}
        for member, unit in self.unit.items():
            if unit.alone or unit.follows or not unit.slots:
                split[member] = unit
                continue
            producer = member.op if isinstance(member, Value) else None
            key = part(producer if producer is not None and self.unit.get(producer) is unit else member)
            mine = parts.setdefault((unit, key), DecisionUnit(unit.slots, gathers=unit.gathers, part=key))
            if isinstance(member, Op):
                mine.ops.append(member)
            else:
                mine.values.append(member)
            split[member] = mine
        return replace(self, unit=split)


def build_units(graph: Graph, propagation: Propagation) -> Units:
    """Groups ops and values, in program order."""
    units, reads_less = Units(), cache(_reads_less)
    for value in graph.by_use():
        _add_root(units, propagation, value)
    for op in graph.ops:
        results = [r for r in op.results if r is not None]
        if op.constant:
            continue
        if op.transparent:
            _look_through(units, propagation, op)
            continue
        if op.rule is not None and not op.constrains:
            factors = [
                (label, k)
                for label, dim_factors in propagation.labels[op].items()
                for k in range(len(dim_factors))
                if can_shard(propagation, op, (label, k))
            ]
            first = {label for label, k in factors if k == 0}
            tied = op.rule.ties.required
            kept = {(t, 0) for t, s in tied.items() if {t, s} <= first and t not in _find_whole_followers(op)}
            factors = [x for x in factors if x[0] not in tied or x in kept]
            lends = {h: s for h, s in op.rule.ties.lends.items() if s in first and h not in propagation.whole[op]}
            factors += [(h, 0) for h in lends if propagation.labels[op].get(h) and (h, 0) not in factors]
            unit = DecisionUnit([propagation.labels[op][label][k] for label, k in factors], [op])
            slots = units.op_slots[op] = {x: i for i, x in enumerate(factors)}
            unit.ring, unit.follows = (
                {slots[t, 0]: slots[s, 0] for t, s in tie.items() if (t, 0) in kept}
                for tie in (op.rule.ties.ring, op.rule.ties.follows)
            )
            unit.lends = {slots[h, 0]: slots[s, 0] for h, s in lends.items() if (h, 0) in slots}
            if (read := tuple(dict.fromkeys(_gathered(op)))) and reads_less(read):
                unit.gathers = frozenset(slots[x] for x in factors if x[0] in op.rule.gathers)
            units.unit[op] = unit
        for r in results:
            _add_root(units, propagation, r)
        if op in units.unit and not units.unit[op].alone and not (units.unit[op].follows or units.unit[op].gathers):
            _join_members(units, propagation, op)
    return units


def can_shard(propagation: Propagation, op: Op, factor: OpFactor) -> bool:
    """Returns whether `op` can run with a sharded factor; a local form that asks for offsets needs one range."""
    rule = op.required_rule
    label, k = factor
    owner = op.owns is not None and label == op.owns.factor
    is_one_range = owner or label in rule.local.factors - rule.local.loose
    return label not in propagation.whole[op] and not (k and is_one_range)


def _reads_less(read: tuple[Value, ...]) -> bool:
    """Returns whether gathering some operands may send less than summing up results, which sends twice their bytes."""
    others = dict.fromkeys(o for v in read for o, _ in v.readers if v in _gathered(o))
    return sum(v.nbytes for v in read) < 2 * sum(r.nbytes for o in others for r in o.results if r is not None)


def _gathered(op: Op) -> list[Value]:
    """Returns the operands with a factor that may stay whole."""
    if op.rule is None or not op.rule.gathers:
        return []
    return [v for v, t in zip(op.operands, op.rule.operands, strict=True) if any(op.rule.gathers & {*d} for d in t)]


def _find_whole_followers(op: Op) -> set[str]:
    """Returns the followers that only constants have: whole, each device slices them without a message."""
    rule = op.required_rule
    if not rule.ties.follows:
        return set()
    read = [(v, labels) for v, labels in zip(op.operands, rule.operands, strict=True) if not v.constant]
    written = [(v, labels) for v, labels in zip(op.results, rule.results, strict=True) if v is not None]
    live = {f for _, labels in (*read, *written) for dim in labels for f in dim}
    return {t for t in rule.ties.follows if t not in live}


def _add_root(units: Units, propagation: Propagation, value: Value) -> None:
    if value.constant:
        return
    dim_factors = propagation.dim_factors(value)
    units.roots[value] = (value, tuple(range(len(dim_factors))))
    if value in propagation.pinned_values or (value.op is not None and value.op.rule is None):
        return
    unit = DecisionUnit([*dim_factors], [], [value])
    if value.rows is not None:
        units.owner_slots[value] = len(unit.slots)
        unit.slots.append(propagation.group_factors[value.rows.ends][0])
    units.unit[value], units.value_slots[value] = unit, tuple(range(len(dim_factors)))


def _look_through(units: Units, propagation: Propagation, op: Op) -> None:
    source, value = op.operands[0], op.results[0]
    assert value is not None
    root, positions = units.roots[source]
    at = {
        x: p
        for x, p in zip(propagation.value_factors(op, 0, operand=True), positions, strict=True)
        if x and x[0] not in propagation.whole[op]
    }
    factors = propagation.value_factors(op, 0, operand=False)
    units.roots[value] = root, tuple(at.get(x) if x else None for x in factors)


def _join_members(units: Units, propagation: Propagation, op: Op) -> None:
    members = [(v, i, True) for i, v in enumerate(op.operands)] + [(r, i, False) for i, r in enumerate(op.results) if r]
    for value, i, operand in members:
        if value.constant:
            continue
        root, positions = units.roots[value]
        if root not in units.unit:
            continue
        op_slots, root_slots = units.op_slots[op], units.value_slots[root]
        pairs: dict[int, int] = {}
        for factor, position in zip(propagation.value_factors(op, i, operand=operand), positions, strict=True):
            if factor is not None and position is not None and factor in op_slots:
                pairs[op_slots[factor]] = root_slots[position]
        if op.owns is not None and (i in op.owns.reads or not operand) and root in units.owner_slots:
            pairs |= {s: units.owner_slots[root] for x, s in op_slots.items() if x == (op.owns.factor, 0)}
        mine, other = units.unit[op], units.unit[root]
        if len(pairs) == len(mine.slots) == len(other.slots) and len(set(pairs.values())) == len(pairs):
            _merge(units, mine, other, pairs)


def _merge(units: Units, a: DecisionUnit, b: DecisionUnit, pairs: dict[int, int]) -> None:
    """Merges two units; slot i of `a` is slot pairs[i] of `b`."""
    if a is b:
        return  # a second path (x + x.t()) may disagree; then the first one stands, and this operand is resharded
    if len(a.ops) + len(a.values) > len(b.ops) + len(b.values):
        a, b, pairs = b, a, {j: i for i, j in pairs.items()}
    for op in a.ops:
        units.unit[op] = b
        units.op_slots[op] = {x: pairs[i] for x, i in units.op_slots[op].items()}
    for value in a.values:
        units.unit[value] = b
        units.value_slots[value] = tuple(pairs[s] for s in units.value_slots[value])
        if value in units.owner_slots:
            units.owner_slots[value] = pairs[units.owner_slots[value]]
    b.ops += a.ops
    b.values += a.values


def find_slots(units: Units, op: Op, factors: Sequence[OpFactor | None]) -> Slots:
    """Returns the unit's slot of each of `factors`."""
    slots = units.op_slots[op]
    return tuple([None if x is None else slots.get(x) for x in factors])
