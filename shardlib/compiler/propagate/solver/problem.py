"""The problem of the search: classes of decision units, the values between them, and the costs of each.

Equal units, as those of a model's layers, are one *unit class*, which counts as often as it occurs. So the search
does not take longer for a deeper model. A class has one op or value, or all equal ones. Classes of one *group* are
parts of one unit, and begin with one choice.

The problem is built once. A dim that is offered an axis adds choices, and no slots.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

from shardlib.compiler.graph.ir import Graph, Op, Value
from shardlib.compiler.propagate.decision_units import DecisionUnit, Units, build_units, find_slots
from shardlib.compiler.propagate.dim_factors import DimFactor
from shardlib.compiler.propagate.propagation import Assignment, Message, OpFactor, Propagation
from shardlib.compiler.propagate.solver.classify_members import classify_members, color_members
from shardlib.compiler.propagate.solver.value_records import RecordFinder, UnitClass, ValueRecord
from shardlib.ops.backend_choice import requested_backend
from shardlib.rules.rule import Rule
from shardlib.sharding.mesh.axis import Axis, group_size
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.reshard import Prices

# Units of one class have equal neighbors within the first distance, equal ops of a unit within the second. An op and
# its operand are one step apart.
_NEAR, _FAR = 3, 6


@dataclass(frozen=True)
class Role:
    """Describes a factor class to the search, which treats classes of one role, as the heads of every layer, alike."""

    size: int
    requests: tuple[Axis, ...]
    name: str | None
    lent: tuple[Axis, ...] = ()  # the requests that another slot of the unit lends it


# Slots in order of precedence for one mesh axis; empty: the axis stays unused. Slot ~s is slot s that takes the axis
# though no annotation requests it.
Choice = tuple[int, ...]
Order = tuple[Choice, ...]  # a choice for every mesh axis


def slot_index(slot: int) -> int:
    """Returns the slot s of an entry s or ~s of a `Choice`."""
    return max(slot, ~slot)


@dataclass(frozen=True)
class PassedTensor:
    """A tensor that `times` ops may pass round a ring, with `bytes` in all, and the unit's slots along its dims.

    If `slot`, factor `name` of `rule`, is sharded over n devices, every shard is sent n - 1 times, or fewer
    (`count_received`). If `slot` is whole and `leader` sharded, the tensor is gathered instead, and stays in memory
    until the backward pass has read it. That is charged as if it were sent once more.
    """

    bytes: float
    times: int
    slots: tuple[int, ...]
    slot: int
    leader: int
    operand: bool
    rule: Rule
    name: str

    def count_received(self, n: int) -> float:
        """Returns how many of n shards a device receives from the others."""
        few = self.rule.window_length(self.name, n)
        return n - 1 if few is None else few * n / self.rule.sizes[self.name]


@dataclass(frozen=True)
class MessageSender:
    """An op that may communicate inside, with the slots of its factors; there are `times` equal ones."""

    op: Op
    slots: tuple[tuple[OpFactor, int], ...]
    times: int


def estimate_work(op: Op, prices: Prices) -> float:
    """Returns the seconds of an op on one device: of its arithmetic or its memory traffic, whichever is more."""
    nbytes = sum(v.nbytes for v in (*op.operands, *op.results) if v is not None)
    widest = max((r.dtype.itemsize for r in op.results if r is not None), default=0)
    return max(op.required_rule.flops / prices.flops(widest), nbytes / prices.bandwidth)


def _count_units(members: Iterable[DecisionUnit]) -> list[tuple[DecisionUnit, int]]:
    """Returns one unit, and the number of units, for each way in which their ops represent others (`times`)."""
    counts: dict[tuple[int, ...], tuple[DecisionUnit, int]] = {}
    for unit in members:
        key = tuple([op.times for op in unit.ops])
        first, count = counts.get(key, (unit, 0))
        counts[key] = first, count + 1
    return [*counts.values()]


def _families(unit_classes: Iterable[Sequence[DecisionUnit]]) -> dict[DimFactor, DimFactor]:
    """Maps the factors that units of one class have in one slot to one of them: an offer to one is an offer to all."""
    parent: dict[DimFactor, DimFactor] = {}

    def find(dim_factor: DimFactor) -> DimFactor:
        while (above := parent.setdefault(dim_factor, dim_factor)) != dim_factor:
            dim_factor = above
        return dim_factor

    for first, *others in unit_classes:
        for dim_factor in first.slots:
            find(dim_factor)
        for unit in others:
            for a, b in zip(first.slots, unit.slots, strict=True):
                parent[find(b)] = find(a)
    return {dim_factor: find(dim_factor) for dim_factor in parent}


def _find_siblings(unit: DecisionUnit) -> dict[int, set[int]]:
    """Returns, for each slot of a unit, the other slots that follow the same one, and so take the same axes."""
    led: dict[int, set[int]] = defaultdict(set)
    for slot, leader in unit.follows.items():
        led[leader].add(slot)
    return {slot: led[unit.follows[slot]] if slot in unit.follows else set() for slot in range(len(unit.slots))}


class Problem:
    """Unit classes and the values between them.

    For each unit class: `members`, `slots` (a role each), `leaders`, `candidates` (slots that request an axis), and the
    costs of its ops: `compute`, `passed` and `senders`. `records` are the values between units; those between units
    without a choice are `settled`. `sends` returns the messages inside an op; those of `hidden` values may be hidden.

    `unsplit_units` are the units before they were split. For every class of these, `groups` holds the unit classes that
    are its parts; `alike` has the number of its units for each of these.
    """

    def __init__(
        self,
        graph: Graph,
        propagation: Propagation,
        mesh: Mesh,
        sends: Callable[[Op, Assignment], tuple[Message, ...]],
        hidden: Collection[Value] = (),
    ) -> None:
        self.graph, self.propagation, self.mesh, self.prices = graph, propagation, mesh, Prices.for_mesh(mesh)
        self.sends, self.hidden = sends, hidden
        self.atoms = {name: mesh.axis(name).primes() for name in mesh.axis_names}
        self.unsplit_units = build_units(graph, propagation)
        self._role_memo: dict[DimFactor, Role] = {}
        self.looks = color_members(graph, _NEAR)
        unsplit_classes = self._find_unit_classes(self.unsplit_units)
        self.families = _families(unsplit_classes)
        number = {unit: k for k, units in enumerate(unsplit_classes) for unit in units}
        places = classify_members(self.unsplit_units.unit, number, color_members(graph, _FAR))
        self.units = self.unsplit_units.split(places.__getitem__)
        self.members = self._find_unit_classes(self.units)
        self.class_of: dict[DecisionUnit, UnitClass] = {
            unit: k for k, units in enumerate(self.members) for unit in units
        }
        self.groups = self._group(number, len(unsplit_classes))
        alike = zip(self.groups, unsplit_classes, strict=True)
        self.alike = {unit_class: len(units) for group, units in alike for unit_class in group}
        self.group_of = {unit_class: group for group in self.groups for unit_class in group}
        self.slots: list[list[Role]] = [self._roles(m[0]) for m in self.members]
        self.leaders = [{**m[0].ring, **m[0].follows} for m in self.members]
        self.siblings = [_find_siblings(m[0]) for m in self.members]
        self.candidates = [self._candidates(k) for k in range(len(self.members))]
        self.records, self.settled = Counter[ValueRecord](), Counter[ValueRecord]()
        for record, times in RecordFinder(propagation, self.units, self.class_of, hidden).find(graph):
            (self.records if record.unit_classes else self.settled)[record] += times
        counted = [_count_units(m) for m in self.members]
        self.compute = [self._compute(m) for m in counted]
        self.senders = [list(self._senders(m)) for m in self.members]
        self.passed = [[p for unit, count in m for p in self._passed(unit, count)] for m in counted]

    def _find_unit_classes(self, units: Units) -> list[list[DecisionUnit]]:
        """Returns the units of every class: they have equal members, of equal roles and pins, on the same slots."""
        described: dict[DecisionUnit, set[object]] = defaultdict(set)
        fixed = self.propagation.pinned_values
        for op in self.graph.ops:
            unit = units.unit.get(op)
            if unit is not None and unit.slots:
                pins = []
                for value in (*op.operands, *op.results):
                    if value is not None and not value.constant:
                        root, _ = units.roots[value]
                        pins.append(fixed[root][0] if root in fixed else None)
                described[unit].add((self.looks[op], tuple(units.op_slots[op].items()), tuple(pins)))
        for member, unit in units.unit.items():
            if isinstance(member, Value) and unit.slots:
                described[unit].add((self.looks[member], units.value_slots[member]))
        unit_classes: dict[object, list[DecisionUnit]] = {}
        for unit, descriptions in described.items():
            unit_classes.setdefault((tuple(self._roles(unit)), frozenset(descriptions), unit.part), []).append(unit)
        return [*unit_classes.values()]

    def _group(self, number: Mapping[DecisionUnit, int], count: int) -> list[tuple[UnitClass, ...]]:
        """Returns the unit classes that are parts of each of `count` classes of unsplit units, by their `number`."""
        groups: list[dict[UnitClass, None]] = [{} for _ in range(count)]
        for member, unit in self.units.unit.items():
            if unit in self.class_of:
                groups[number[self.unsplit_units.unit[member]]][self.class_of[unit]] = None
        return [tuple(group) for group in groups]

    @cached_property
    def ordered(self) -> dict[tuple[DimFactor, DimFactor], bool]:
        """Maps two factors of one dim, the major one first, to whether they are adjacent."""
        pairs: dict[tuple[DimFactor, DimFactor], bool] = {}
        for dim in {dim for dims in self.propagation.value.values() for dim in dims}:
            for (i, a), (j, b) in combinations(enumerate(dim), 2):
                pairs[a, b] = pairs.get((a, b), False) or j == i + 1
        return pairs

    @cached_property
    def doubled(self) -> frozenset[DimFactor]:
        """Returns the families of factors that some unit has twice, as a matrix times its own transpose."""
        slots = [units[0].slots for units in self.members]
        return frozenset(
            self.families[dim_factor] for some in slots for dim_factor in some if some.count(dim_factor) > 1
        )

    def _role(self, dim_factor: DimFactor) -> Role:
        role = self._role_memo.get(dim_factor)
        if role is None:
            propagation = self.propagation
            requests = propagation.requests.get(dim_factor, ())
            axes = tuple(request.axis for request in requests if not request.offered)
            role = Role(propagation.dims.size(dim_factor), axes, propagation.names.get(dim_factor))
            self._role_memo[dim_factor] = role
        return role

    def _roles(self, unit: DecisionUnit) -> list[Role]:
        """Returns the roles of a unit's slots; a slot that borrows has its lender's requests after its own."""
        roles = [self._role(dim_factor) for dim_factor in unit.slots]
        for slot, lender in unit.lends.items():
            mine = roles[slot]
            lent = tuple(a for a in roles[lender].requests if a not in mine.requests)
            roles[slot] = replace(mine, requests=mine.requests + lent, lent=lent)
        return roles

    def _candidates(self, unit_class: UnitClass) -> dict[str, list[int]]:
        """Returns, for each mesh axis, the slots that request a part of it."""
        out: dict[str, list[int]] = {}
        slots, leaders = self.slots[unit_class], self.leaders[unit_class]
        for name, atoms in self.atoms.items():
            requesting = [
                i
                for i, role in enumerate(slots)
                if any(axis in atoms and axis in slots[leaders.get(i, i)].requests for axis in role.requests)
            ]
            if requesting := self._requested_slots(unit_class, requesting, atoms):
                out[name] = requesting
        return out

    def _requested_slots(self, unit_class: UnitClass, requesting: list[int], atoms: tuple[Axis, ...]) -> list[int]:
        """Returns the slots that `SHARDLIB_OPS=sequence=...` allows; all slots if it allows none, or too few heads."""
        unit, how = self.members[unit_class][0], requested_backend("sequence")
        if how is None or not unit.alone:
            return requesting
        around = [i for i in requesting if i in unit.ring]
        lent = [i for i in requesting if set(self.slots[unit_class][i].lent) & set(atoms)]
        own = [i for i in requesting if i not in (*around, *lent)]
        if math.prod(self.slots[unit_class][i].size for i in lent) < group_size(atoms):
            lent = []
        return {"ring": around, "zigzag": around, "heads": lent, "gather": own}[how] or requesting

    @cached_property
    def undecided(self) -> float:
        """Returns the seconds, on one device, of the ops of units without a class."""
        still = dict.fromkeys(u for u in self.units.unit.values() if u not in self.class_of)
        return sum(seconds for unit in still for seconds, _ in self._compute([(unit, 1)]))

    def _compute(self, units: Iterable[tuple[DecisionUnit, int]]) -> list[tuple[float, tuple[int, ...]]]:
        """Returns the seconds of units' ops on one device, times the number of units, by the slots that divide them."""
        totals: dict[tuple[int, ...], float] = defaultdict(float)
        for unit, count in units:
            for op in unit.ops:
                slots = set(self.units.op_slots[op].values()) - unit.ring.keys() - unit.follows.keys()
                if op.owns is not None and not op.owns.begins:
                    slots.discard(self.units.op_slots[op].get((op.owns.factor, 0), -1))
                totals[tuple(sorted(slots))] += estimate_work(op, self.prices) * count * op.times
        return [(s, slots) for slots, s in totals.items()]

    def _passed(self, unit: DecisionUnit, count: int) -> Iterable[PassedTensor]:
        """Yields the tensors that a unit may pass round a ring."""
        for op in unit.ops if unit.ring else ():
            for values, operand in ((op.operands, True), (op.results, False)):
                for i, value in enumerate(values):
                    if value is None or value.constant:
                        continue
                    slots = find_slots(self.units, op, self.propagation.value_factors(op, i, operand=operand))
                    sharded = tuple(s for s in slots if s is not None)
                    for slot in unit.ring.keys() & set(sharded):
                        n, leader = count * op.times, unit.ring[slot]
                        name = next(f for (f, _), s in self.units.op_slots[op].items() if s == slot)
                        yield PassedTensor(value.nbytes * n, n, sharded, slot, leader, operand, op.required_rule, name)

    def _senders(self, units: Iterable[DecisionUnit]) -> Iterable[MessageSender]:
        """Yields the ops of units that have a local form, with the number of ops that send the same.

        Attention is priced by its `passed` tensors.
        """
        counts: dict[object, tuple[Op, int]] = {}
        for op in (op for unit in units for op in unit.ops):
            slots = self.units.op_slots[op]
            if op.rule is None or op.rule.local.emit is None or op.rule.ties.ring:
                continue
            if any(f in op.rule.local.factors for f, _ in slots):
                key = id(op.rule), tuple(slots.items()), tuple(self._factor_sizes(op))
                first, times = counts.get(key, (op, 0))
                counts[key] = first, times + op.times
        for op, times in counts.values():
            yield MessageSender(op, tuple(self.units.op_slots[op].items()), times)

    def _factor_sizes(self, op: Op) -> Iterable[tuple[int, ...]]:
        return (
            tuple(map(self.propagation.dims.size, dim_factors)) for dim_factors in self.propagation.labels[op].values()
        )
