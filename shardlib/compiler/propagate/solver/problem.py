"""The problem that propagation leaves: kinds of units, the values between them, and the cost of each.

Units and values with the same shape of problem (the layers of a model) are one kind, which counts as often as it
occurs, so the cost of deciding does not grow with the depth of the model. Kinds are as fine as decisions can be: one
for each op or value, or for all that are alike. Kinds of one *group* are parts of one unit, and begin with one choice.

The problem is built once. A dim that may take an axis which no annotation gave it adds choices, and no slots.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

from shardlib.compiler.graph.ir import Graph, Op, Value
from shardlib.compiler.propagate.decision_units import DecisionUnit, Units, build_units, op_cut_slots, value_factors
from shardlib.compiler.propagate.dim_factors import DimFactor
from shardlib.compiler.propagate.propagation import OpFactor, Propagation
from shardlib.compiler.propagate.solver.alike import look, place_members
from shardlib.compiler.propagate.solver.edges import Kind, Record, Records
from shardlib.ops.backend_choice import requested_backend
from shardlib.rules.rule import Rule
from shardlib.sharding.mesh.axis import Axis, group_size
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.reshard import Prices

# Steps, from ops to values and from values to ops, in which units look the same that decide alike, and ops of one unit.
_NEAR, _FAR = 3, 6


@dataclass(frozen=True)
class Role:
    """What the decisions need to know of a class: classes of one role (the heads of every layer) are treated alike."""

    size: int
    requests: tuple[Axis, ...]
    name: str | None
    lent: tuple[Axis, ...] = ()  # those of its requests that another slot of the unit lends it


# Slots in order of precedence for one mesh axis; empty: the axis stays unused. Slot ~s is slot s that takes the axis
# though no annotation requests it.
Choice = tuple[int, ...]
Order = tuple[Choice, ...]  # a choice for every mesh axis


@dataclass(frozen=True)
class Passed:
    """A tensor that ops may pass round: the `bytes` of the whole of it, of all ops that do, which are `times` as many,
    and the unit's slots along its dims.

    With `slot`, factor `name` of `rule`, cut over n devices every piece is sent n - 1 times, or as little as is needed
    (`pieces`). With `slot` whole and `beside` cut, it is gathered instead, and stays so until the backward pass has
    read it: that is charged as if it were sent once more.
    """

    bytes: float
    times: int
    slots: tuple[int, ...]
    slot: int
    beside: int
    operand: bool
    rule: Rule
    name: str

    def pieces(self, n: int) -> float:
        """How many of n pieces a device gets of the others."""
        few = self.rule.window_length(self.name, n)
        return n - 1 if few is None else few * n / self.rule.sizes[self.name]


@dataclass(frozen=True)
class Sender:
    """An op that may send while it runs, by its factors' slots; there are `times` of it."""

    op: Op
    slots: tuple[tuple[OpFactor, int], ...]
    times: int


def work(op: Op, prices: Prices) -> float:
    """Seconds of an op's arithmetic, and of the memory that it touches, on one device."""
    assert op.rule is not None
    nbytes = sum(v.nbytes for v in (*op.operands, *op.results) if v is not None)
    widest = max((r.dtype.itemsize for r in op.results if r is not None), default=0)
    return max(op.rule.flops / prices.flops(widest), nbytes / prices.bandwidth)


def _alike(members: Iterable[DecisionUnit]) -> list[tuple[DecisionUnit, int]]:
    """Units of one kind, of those whose ops stand for as many the first, with their number."""
    found: dict[tuple[int, ...], tuple[DecisionUnit, int]] = {}
    for unit in members:
        key = tuple([op.times for op in unit.ops])
        first, count = found.get(key, (unit, 0))
        found[key] = first, count + 1
    return [*found.values()]


def _families(kinds: Iterable[Sequence[DecisionUnit]]) -> dict[DimFactor, DimFactor]:
    """One leaf for all leaves that units of one kind have in one slot: an offer to one of them is an offer to all."""
    parent: dict[DimFactor, DimFactor] = {}

    def find(leaf: DimFactor) -> DimFactor:
        while (above := parent.setdefault(leaf, leaf)) != leaf:
            leaf = above
        return leaf

    for first, *others in kinds:
        for leaf in first.slots:
            find(leaf)
        for unit in others:
            for a, b in zip(first.slots, unit.slots, strict=True):
                parent[find(b)] = find(a)
    return {leaf: find(leaf) for leaf in parent}


def _beside(unit: DecisionUnit) -> dict[int, set[int]]:
    """For each slot of a unit the others that follow where it does: what is put together of several is cut at once."""
    led: dict[int, set[int]] = defaultdict(set)
    for slot, leader in unit.follows.items():
        led[leader].add(slot)
    return {slot: led[unit.follows[slot]] if slot in unit.follows else set() for slot in range(len(unit.slots))}


class Problem:
    """Kinds of units: `members`, `slots` (a role each), `rounds`, `candidates` (slots that want an axis), `compute` and
    `passed` and `senders` (costs of their ops); and `records`, the values between them, with those that are `settled`
    because nothing beside them has a choice.

    `coarse` are the units before they were taken apart; `groups` holds the kinds that are parts of one, for every kind
    of these; `alike` says how many units of that kind there are.
    """

    def __init__(self, graph: Graph, propagation: Propagation, mesh: Mesh) -> None:
        self.graph, self.propagation, self.mesh, self.prices = graph, propagation, mesh, Prices.for_mesh(mesh)
        self.atoms = {name: mesh.axis(name).primes() for name in mesh.axis_names}
        self.coarse = build_units(graph, propagation)
        self._role_memo: dict[DimFactor, Role] = {}
        self.looks = look(graph, _NEAR)
        whole = self._find_kinds(self.coarse)
        self.families = _families(whole)
        number = {unit: k for k, units in enumerate(whole) for unit in units}
        places = place_members(self.coarse.unit, number, look(graph, _FAR))
        self.units = self.coarse.apart(places.__getitem__)
        self.members = self._find_kinds(self.units)
        self.kind: dict[DecisionUnit, Kind] = {unit: k for k, units in enumerate(self.members) for unit in units}
        self.alike = [len(units) for units in whole]
        self.groups = self._group(whole)
        self.group_of = {kind: group for group in self.groups for kind in group}
        self.slots: list[list[Role]] = [self._roles(m[0]) for m in self.members]
        self.rounds = [{**m[0].rounds, **m[0].follows} for m in self.members]
        self.beside = [_beside(m[0]) for m in self.members]
        self.candidates = [self._candidates(k) for k in range(len(self.members))]
        self.records, self.settled = Counter[Record](), Counter[Record]()
        for record, times in Records(propagation, self.units, self.kind).of(graph):
            (self.records if record.kinds else self.settled)[record] += times
        alike = [_alike(m) for m in self.members]
        self.compute = [self._compute(m) for m in alike]
        self.senders = [list(self._senders(m)) for m in self.members]
        self.passed = [[p for unit, count in m for p in self._passed(unit, count)] for m in alike]

    def _find_kinds(self, units: Units) -> list[list[DecisionUnit]]:
        """Units that share every decision: with members that look the same, of the same roles and pins, on the same
        slots."""
        described: dict[DecisionUnit, set[object]] = defaultdict(set)
        fixed = self.propagation.fixed
        for op in self.graph.ops:
            unit = units.unit.get(op)
            if unit is not None and unit.slots:
                pins = []
                for value in (*op.operands, *op.results):
                    if value is not None and not value.constant:
                        root, _ = units.root(value)
                        pins.append(fixed[root][0] if root in fixed else None)
                described[unit].add((self.looks[op], tuple(units.op_slots[op].items()), tuple(pins)))
        for member, unit in units.unit.items():
            if isinstance(member, Value) and unit.slots:
                described[unit].add((self.looks[member], units.value_slots[member]))
        kinds: dict[object, list[DecisionUnit]] = {}
        for unit, what in described.items():
            kinds.setdefault((tuple(self._roles(unit)), frozenset(what), unit.part), []).append(unit)
        return [*kinds.values()]

    def _group(self, whole: Sequence[Sequence[DecisionUnit]]) -> list[tuple[Kind, ...]]:
        """The kinds that are parts of the units of each coarse kind."""
        number = {unit: k for k, units in enumerate(whole) for unit in units}
        groups: list[dict[Kind, None]] = [{} for _ in whole]
        for member, unit in self.units.unit.items():
            if unit in self.kind:
                groups[number[self.coarse.unit[member]]][self.kind[unit]] = None
        return [tuple(group) for group in groups]

    def count(self, kind: Kind) -> int:
        """How many units decide as those of a kind do."""
        return self.alike[self.groups.index(self.group_of[kind])]

    def first(self, kind: Kind) -> Op | Value:
        """A member of a kind."""
        unit = self.members[kind][0]
        return unit.ops[0] if unit.ops else unit.values[0]

    @cached_property
    def ordered(self) -> dict[tuple[DimFactor, DimFactor], bool]:
        """Two leaves of one dim, the major one first: whether nothing is between them."""
        pairs: dict[tuple[DimFactor, DimFactor], bool] = {}
        for dim in {dim for dims in self.propagation.value.values() for dim in dims}:
            for (i, a), (j, b) in combinations(enumerate(dim), 2):
                pairs[a, b] = pairs.get((a, b), False) or j == i + 1
        return pairs

    @cached_property
    def doubled(self) -> frozenset[DimFactor]:
        """The families of leaves that some unit has twice (a matrix times itself, turned round)."""
        slots = [units[0].slots for units in self.members]
        return frozenset(self.families[leaf] for some in slots for leaf in some if some.count(leaf) > 1)

    def _role(self, leaf: DimFactor) -> Role:
        role = self._role_memo.get(leaf)
        if role is None:
            f = self.propagation
            requests = tuple(w.axis for w in f.requests.get(leaf, ()) if not w.offered)
            role = Role(f.dims.size(leaf), requests, f.names.get(leaf))
            self._role_memo[leaf] = role
        return role

    def _roles(self, unit: DecisionUnit) -> list[Role]:
        """Returns the roles of a unit's slots; a slot that borrows has its lender's requests after its own."""
        roles = [self._role(leaf) for leaf in unit.slots]
        for slot, lender in unit.lends.items():
            mine = roles[slot]
            lent = tuple(a for a in roles[lender].requests if a not in mine.requests)
            roles[slot] = replace(mine, requests=mine.requests + lent, lent=lent)
        return roles

    def _candidates(self, kind: Kind) -> dict[str, list[int]]:
        """For each mesh axis, the slots that want a part of it."""
        out: dict[str, list[int]] = {}
        slots, rounds = self.slots[kind], self.rounds[kind]
        for name, atoms in self.atoms.items():
            wanting = [
                i
                for i, role in enumerate(slots)
                if any(axis in atoms and axis in slots[rounds.get(i, i)].requests for axis in role.requests)
            ]
            if wanting := self._requested_slots(kind, wanting, atoms):
                out[name] = wanting
        return out

    def _requested_slots(self, kind: Kind, wanting: list[int], atoms: tuple[Axis, ...]) -> list[int]:
        """The slots that `SHARDLIB_OPS=sequence=...` leaves; all of them where it leaves none, or too few heads."""
        unit, how = self.members[kind][0], requested_backend("sequence")
        if how is None or not unit.alone:
            return wanting
        around = [i for i in wanting if i in unit.rounds]
        lent = [i for i in wanting if set(self.slots[kind][i].lent) & set(atoms)]
        own = [i for i in wanting if i not in (*around, *lent)]
        if math.prod(self.slots[kind][i].size for i in lent) < group_size(atoms):
            lent = []
        return {"ring": around, "zigzag": around, "heads": lent, "gather": own}[how] or wanting

    @cached_property
    def undecided(self) -> float:
        """Seconds of the ops, on one device, of units that have nothing to decide."""
        still = dict.fromkeys(u for u in self.units.unit.values() if u not in self.kind)
        return sum(seconds for unit in still for seconds, _ in self._compute([(unit, 1)]))

    def _compute(self, units: Iterable[tuple[DecisionUnit, int]]) -> list[tuple[float, tuple[int, ...]]]:
        """(seconds on one device, the slots that divide them) of the ops of units, of which there are so many."""
        totals: dict[tuple[int, ...], float] = defaultdict(float)
        for unit, count in units:
            for op in unit.ops:
                assert op.rule is not None
                slots = set(self.units.op_slots[op].values()) - unit.rounds.keys() - unit.follows.keys()
                if op.owns is not None and not op.owns.begins:
                    slots.discard(self.units.op_slots[op].get((op.owns.factor, 0), -1))
                totals[tuple(sorted(slots))] += work(op, self.prices) * count * op.times
        return [(s, slots) for slots, s in totals.items()]

    def _passed(self, unit: DecisionUnit, count: int) -> Iterable[Passed]:
        """The tensors that go round if their unit decides so."""
        for op in unit.ops if unit.rounds else ():
            assert op.rule is not None
            for values, operand in ((op.operands, True), (op.results, False)):
                for i, value in enumerate(values):
                    if value is None or value.constant:
                        continue
                    slots = op_cut_slots(self.units, op, value_factors(self.propagation, op, i, operand=operand))
                    cut = tuple(s for s in slots if s is not None)
                    for slot in unit.rounds.keys() & set(cut):
                        n, beside = count * op.times, unit.rounds[slot]
                        name = next(f for (f, _), s in self.units.op_slots[op].items() if s == slot)
                        yield Passed(value.nbytes * n, n, cut, slot, beside, operand, op.rule, name)

    def _senders(self, units: Iterable[DecisionUnit]) -> Iterable[Sender]:
        """The ops of a kind's units with a local form, each with all that send what it sends; attention, which has
        choices of its own, is priced by what is passed."""
        found: dict[object, tuple[Op, int]] = {}
        for op in (op for unit in units for op in unit.ops):
            slots = self.units.op_slots[op]
            if op.rule is None or op.rule.local.emit is None or op.rule.ties.ring:
                continue
            if any(f in op.rule.local.factors for f, _ in slots):
                key = id(op.rule), tuple(slots.items()), tuple(self._leaf_sizes(op))
                first, times = found.get(key, (op, 0))
                found[key] = first, times + op.times
        for op, times in found.values():
            yield Sender(op, tuple(self.units.op_slots[op].items()), times)

    def _leaf_sizes(self, op: Op) -> Iterable[tuple[int, ...]]:
        return (tuple(map(self.propagation.dims.size, leaves)) for leaves in self.propagation.labels[op].values())
