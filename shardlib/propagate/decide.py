"""Which factor of a unit gets each mesh axis: one global minimum of estimated seconds.

The estimate has two parts. Every value pays the reshards from the layout in which it is made to every distinct layout
in which it is read (a pending sum once; sums that only meet in an addition are added first and then paid once). Every
unit pays its arithmetic, divided by the ways in which it is cut: so replicating work costs what it takes.

Values and units with the same shape of problem (the layers of a model) are counted once with a multiplicity, so the
cost of deciding does not grow with the depth of the model. The search starts from every order of precedence between
classes, improves one unit at a time until nothing improves, and keeps the best end.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardlib import reshard
from shardlib.graph import Graph, Op, Value
from shardlib.layout import Axis
from shardlib.mesh import Mesh
from shardlib.ops._choice import wanted
from shardlib.propagate.flood import Flood
from shardlib.propagate.units import Slots, Unit, Units, is_constraint, looks_through, op_cut_slots, value_factors
from shardlib.reshard import Cut

# An activation that moves is gone soon, a gathered parameter stays for half a step: near a tie, move activations.
HOLDING = 1.25


@dataclass(frozen=True)
class Role:
    """What the decisions need to know of a class: classes of one role (the heads of every layer) are treated alike."""

    size: int
    wants: tuple[Axis, ...]
    name: str | None


Choice = tuple[int, ...]  # slots in order of precedence for one mesh axis; empty: the axis stays unused
Kind = int  # index of a group of units that share every decision


@dataclass(frozen=True)
class End:
    """One end of a value: the unit that makes or reads it (`kind`, `slots` per leaf), or a cut that is fixed."""

    kind: Kind | None
    slots: Slots = ()
    cut: Cut = ()
    pending: tuple[int, ...] = ()  # slots of the unit whose sum this value still owes


@dataclass(frozen=True)
class Record:
    """A value as the estimate sees it."""

    sizes: tuple[tuple[int, ...], ...]  # of the leaves, per dim
    itemsize: int
    sources: tuple[End, ...]
    readers: tuple[End, ...]  # each once, in program order: planning must not depend on the order of a set
    held: bool = False  # an input: what is gathered of it stays in memory from its forward to its backward reader

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(sorted({e.kind for e in (*self.sources, *self.readers) if e.kind is not None}))


@dataclass(frozen=True)
class Decision:
    """Why a kind of unit gives `axis` to `winner`: estimated seconds of the whole program for every alternative."""

    axis: str
    winner: str
    alternatives: tuple[tuple[str, float], ...]
    units: int

    def __str__(self) -> str:
        others = ", ".join(f"{name}: {s * 1e6:.1f} us" for name, s in self.alternatives)
        return f"{self.axis} -> {self.winner} ({others}; {self.units} alike)"


@dataclass(frozen=True)
class Passed:
    """A tensor that ops may pass round: `seconds` to send it whole once, `times` for the ops that do, the unit's slots
    along its dims.

    With `slot` cut over n devices every piece is sent n - 1 times. With `slot` whole and `beside` cut, it is gathered
    instead, and stays so until the backward pass has read it: that is charged as if it were sent once more.
    """

    seconds: float
    times: int
    slots: tuple[int, ...]
    slot: int
    beside: int
    operand: bool


class Decider:
    """Kinds, records and the search; `cuts(unit)` is the answer."""

    def __init__(self, graph: Graph, flood: Flood, units: Units, mesh: Mesh) -> None:
        self.flood, self.units, self.mesh = flood, units, mesh
        self.atoms = {name: mesh.axis(name).primes() for name in mesh.axis_names}
        self.roles = {
            leaf: Role(flood.dims.size(leaf), tuple(w.axis for w in wants), flood.names.get(leaf))
            for leaf, wants in flood.wants.items()
        }
        self.kind: dict[Unit, Kind] = {}
        self.members: list[list[Unit]] = []
        self._find_kinds(graph)
        self.slots: list[list[Role]] = [self._roles(m[0]) for m in self.members]
        self.rounds = [m[0].rounds for m in self.members]
        self.candidates = [self._candidates(k) for k in range(len(self.members))]
        self.records = Counter(self._records(graph))
        self.compute = [self._compute(m[0], len(m)) for m in self.members]
        self.passed = [list(self._passed(m[0], len(m))) for m in self.members]
        self._touching: dict[Kind, list[Record]] = defaultdict(list)
        for record in self.records:
            for kind in record.kinds:
                self._touching[kind].append(record)
        self._cost_memo: dict[tuple[Record, tuple[tuple[Choice, ...], ...]], float] = {}
        self._cut_memo: dict[tuple[Kind, tuple[Choice, ...]], tuple[tuple[Axis, ...], ...]] = {}
        self.choices: list[tuple[Choice, ...]] = self._search()

    # The problem ----------------------------------------------------------------------------------------------------

    def _find_kinds(self, graph: Graph) -> None:
        described: dict[Unit, set[object]] = defaultdict(set)
        for op in graph.ops:
            unit = self.units.unit.get(op)
            if unit is not None and unit.slots:
                pins = []
                for value in (*op.operands, *op.results):
                    if value is not None and not value.constant:
                        root, _ = self.units.root(value)
                        pins.append(self.flood.fixed[root][0] if root in self.flood.fixed else None)
                slots = self.units.op_slots[op]
                described[unit].add((op.target, tuple(slots.items()), tuple(pins)))
        for member, unit in self.units.unit.items():
            if isinstance(member, Value) and unit.slots:
                described[unit].add((member.op is None, self.units.value_slots[member]))
        index: dict[object, Kind] = {}
        for unit, what in described.items():
            key = (tuple(self._roles(unit)), frozenset(what))
            kind = index.setdefault(key, len(index))
            if kind == len(self.members):
                self.members.append([])
            self.members[kind].append(unit)
            self.kind[unit] = kind

    def _roles(self, unit: Unit) -> list[Role]:
        """The roles of a unit's slots; one that others lend to wants what they want, after its own."""
        roles = [self.roles.get(leaf) or Role(self.flood.dims.size(leaf), (), None) for leaf in unit.slots]
        for slot, lender in unit.lends.items():
            mine = roles[slot]
            lent = tuple(a for a in roles[lender].wants if a not in mine.wants)
            roles[slot] = replace(mine, wants=mine.wants + lent, name=mine.name or self.flood.names.get(unit.slots[slot]))
        return roles

    def _candidates(self, kind: Kind) -> dict[str, list[int]]:
        """For each mesh axis, the slots that want a part of it."""
        out: dict[str, list[int]] = {}
        slots, rounds = self.slots[kind], self.rounds[kind]
        for name, atoms in self.atoms.items():
            wanting = [
                i
                for i, role in enumerate(slots)
                if any(axis in atoms and axis in slots[rounds.get(i, i)].wants for axis in role.wants)
            ]
            if wanting := self._as_told(kind, wanting, atoms):
                out[name] = wanting
        return out

    def _as_told(self, kind: Kind, wanting: list[int], atoms: tuple[Axis, ...]) -> list[int]:
        """The slots that `SHARDLIB_OPS=sequence=...` leaves; all of them where it leaves none."""
        unit, how = self.members[kind][0], wanted("sequence")
        own = [i for i in wanting if any(a in atoms for a in self._own_wants(unit, i)) and i not in unit.rounds]
        told = {
            "ring": [i for i in wanting if i in unit.rounds],
            "zigzag": [i for i in wanting if i in unit.rounds],
            "heads": [i for i in wanting if i in unit.lends],
            "gather": own,
        }
        return (told[how] if how and unit.alone else wanting) or wanting

    def _own_wants(self, unit: Unit, slot: int) -> tuple[Axis, ...]:
        role = self.roles.get(unit.slots[slot])
        return role.wants if role else ()

    def _end(self, unit: Unit | None, slots: Slots, pending: tuple[int, ...] = ()) -> End:
        if unit is None or unit not in self.kind:
            return End(None, cut=((),) * len(slots))
        return End(self.kind[unit], slots, pending=pending)

    def _records(self, graph: Graph) -> Iterable[Record]:
        f, u = self.flood, self.units
        readers: dict[Value, dict[End, None]] = defaultdict(dict)
        merged: set[Value] = set()
        sources: dict[Value, tuple[End, ...]] = {}
        counts: Counter[Value] = Counter()
        for value, (root, _) in u.roots.items():
            counts[root] += sum(not looks_through(op) for op, _ in value.readers) + value.is_output
        for op in graph.ops:
            if all(r is None or r.constant for r in op.results) or looks_through(op):
                continue
            for i, value in enumerate(op.operands):
                if not value.constant:
                    root, positions = u.root(value)
                    readers[root][self._reader(op, i, value, root, positions)] = None
            for index, result in enumerate(op.results):
                if result is not None:
                    sources[result] = (self._source(op, index, result),)
            if self._adds(op):
                addends = [u.root(v) for v in op.operands]
                result = op.results[0]
                assert result is not None
                if all(f.value[v] == f.value[result] for v in op.operands) and all(
                    counts[r] == 1 and not r.is_output and any(s.pending for s in sources.get(r, ()))
                    for r, _ in addends
                ):
                    merged.update(r for r, _ in addends)
                    sources[result] = tuple(_seen(s, positions) for r, positions in addends for s in sources[r])
        for i, value in enumerate(graph.outputs):
            if isinstance(value, Value) and not value.constant:
                root, positions = u.root(value)
                if i in f.outputs:
                    cut = f.across(f.outputs[i][0], f.apart.get(i, value), value)
                    readers[root][End(None, cut=_onto_root(cut, positions, len(f.leaves(root))))] = None
        for root, ends in readers.items():
            if root in merged:
                continue
            if root not in sources:
                sources[root] = (self._input(root),)
            if root in f.fixed:
                sources[root] = (End(None, cut=f.fixed[root][0]),)
            record = Record(
                f.sizes(root),
                root.dtype.itemsize,
                tuple(dict.fromkeys(sources[root])),
                tuple(ends),
                root.op is None,
            )
            if record.kinds:
                yield record

    def _reader(self, op: Op, i: int, value: Value, root: Value, positions: tuple[int | None, ...]) -> End:
        n = len(self.flood.leaves(root))
        if is_constraint(op):
            result = op.results[0]
            assert result is not None
            cut = self.flood.across(self.flood.fixed[result][0], result, value)
            return End(None, cut=_onto_root(cut, positions, n))
        if op in self.flood.doors:
            cut = self.flood.across(self.flood.doors[op][0], self.flood.apart.get(op, value), value)
            return End(None, cut=_onto_root(cut, positions, n))
        if op.rule is None:
            return End(None, cut=((),) * n)
        slots = op_cut_slots(self.units, self.flood, op, value_factors(self.flood, op, i, operand=True))
        out: list[int | None] = [None] * n
        for slot, position in zip(slots, positions, strict=True):
            if position is not None:
                out[position] = slot
        return self._end(self.units.unit[op], tuple(out))

    def _source(self, op: Op, index: int, result: Value) -> End:
        f, u = self.flood, self.units
        if result in f.fixed or op.rule is None:
            return End(None, cut=f.fixed[result][0] if result in f.fixed else ((),) * len(f.leaves(result)))
        factors = value_factors(f, op, index, operand=False)
        owed = tuple(
            s for x, s in u.op_slots[op].items() if x not in factors and op.rule.reduce.get(x[0], "none") != "none"
        )
        return self._end(u.unit[op], op_cut_slots(u, f, op, factors), owed)

    def _input(self, value: Value) -> End:
        if value in self.flood.fixed or value not in self.units.unit:
            return End(None, cut=((),) * len(self.flood.leaves(value)))
        return self._end(self.units.unit[value], self.units.value_slots[value])

    def _adds(self, op: Op) -> bool:
        rule = op.rule
        if rule is None or len(op.operands) != 2 or any(v.constant for v in op.operands):
            return False
        return frozenset({0, 1}) in rule.linear and op.operands[0].shape == op.operands[1].shape

    def _compute(self, unit: Unit, count: int) -> list[tuple[float, tuple[int, ...]]]:
        """(seconds on one device, the slots that divide them) of a unit's ops."""
        totals: dict[tuple[int, ...], float] = defaultdict(float)
        for op in unit.ops:
            assert op.rule is not None
            nbytes = sum(v.nbytes for v in (*op.operands, *op.results) if v is not None)
            wide = any(r is not None and r.dtype.itemsize > 2 for r in op.results)
            speed = reshard.WIDE_FLOPS_PER_SECOND if wide else reshard.FLOPS_PER_SECOND
            seconds = max(op.rule.flops / speed, nbytes / reshard.MEMORY_BYTES_PER_SECOND)
            slots = set(self.units.op_slots[op].values()) - unit.rounds.keys()
            totals[tuple(sorted(slots))] += seconds * count
        return [(s, slots) for slots, s in totals.items()]

    def _passed(self, unit: Unit, count: int) -> Iterable[Passed]:
        """The tensors that go round if their unit decides so."""
        for op in unit.ops if unit.rounds else ():
            for values, operand in ((op.operands, True), (op.results, False)):
                for i, value in enumerate(values):
                    if value is None or value.constant:
                        continue
                    slots = op_cut_slots(
                        self.units, self.flood, op, value_factors(self.flood, op, i, operand=operand)
                    )
                    for slot in set(slots) & unit.rounds.keys():
                        seconds = value.nbytes * count / reshard.LINK_BYTES_PER_SECOND
                        cut = tuple(s for s in slots if s is not None)
                        yield Passed(seconds, count, cut, slot, unit.rounds[slot], operand)

    # The estimate ---------------------------------------------------------------------------------------------------

    def cut(self, kind: Kind, choice: tuple[Choice, ...]) -> tuple[tuple[Axis, ...], ...]:
        """The axes on every slot of a kind under `choice` (one entry per mesh axis, in mesh order)."""
        key = (kind, choice)
        if (known := self._cut_memo.get(key)) is not None:
            return known
        roles = self.slots[kind]
        axes: list[list[Axis]] = [[] for _ in roles]
        for name, order in zip(self.mesh.axis_names, choice, strict=True):
            for atom in self.atoms[name]:
                for slot in order:
                    both = {slot, self.rounds[kind].get(slot, slot)}
                    if all(atom in roles[i].wants and roles[i].size >= _ways(axes[i]) * atom.size for i in both):
                        for i in both:
                            axes[i].append(atom)
                        break
        result = [tuple(sorted(mine, key=role.wants.index)) for role, mine in zip(roles, axes, strict=True)]
        self._cut_memo[key] = tuple(result)
        return self._cut_memo[key]

    def _record_cost(self, record: Record, choices: list[tuple[Choice, ...]]) -> float:
        key = (record, tuple(choices[k] for k in record.kinds))
        if (known := self._cost_memo.get(key)) is not None:
            return known

        def resolve(end: End) -> tuple[Cut, tuple[Axis, ...]]:
            if end.kind is None:
                return end.cut, ()
            slots = self.cut(end.kind, choices[end.kind])
            cut = tuple(() if s is None else slots[s] for s in end.slots)
            # What went round was reduced on the way.
            return cut, tuple(a for s in end.pending for a in slots[s] if not any(a in axes for axes in cut))

        sources = {resolve(s): None for s in record.sources}
        flat = tuple(n for dim in record.sizes for n in dim)
        wants = sorted(dict.fromkeys(resolve(r)[0] for r in record.readers), key=lambda c: reshard.local_numel(flat, c))
        total = 0.0
        have: list[tuple[Cut, tuple[Axis, ...]]] = list(sources)
        if (
            len(have) > 1 and wants
        ):  # sums that cannot be added first: each goes to the first reader's layout on its own
            for cut, pending in have:
                total += reshard.seconds(reshard.route(record.sizes, record.itemsize, cut, wants[0], pending))
            have = [(wants[0], ())]
        for want in wants:
            best = min(reshard.seconds(reshard.route(record.sizes, record.itemsize, c, want, p)) for c, p in have)
            total += best
            have.append((want, ()))
        self._cost_memo[key] = total = total * (HOLDING if record.held else 1.0)
        return total

    def _work(self, kind: Kind, choices: list[tuple[Choice, ...]]) -> float:
        """Seconds of a kind's arithmetic, and of what its ops send while they run."""
        cut = self.cut(kind, choices[kind])
        total = sum(s / math.prod(_ways(cut[i]) for i in slots) for s, slots in self.compute[kind])
        for p in self.passed[kind]:
            local = p.seconds / math.prod(_ways(cut[i]) for i in p.slots)
            passed, wanted = _ways(cut[p.slot]), self.slots[kind][p.slot].wants
            held = _ways([a for a in cut[p.beside] if a in wanted and a not in cut[p.slot]])
            total += local * (passed - 1 + (held - 1) / held)
            # All ways of doing attention on a cut sequence count as many messages: their bytes shall decide.
            total += p.times * reshard.COLLECTIVE_LATENCY * ((held > 1) + 2 * (passed > 1 and p.operand))
        return total

    def _kind_cost(self, kind: Kind, choices: list[tuple[Choice, ...]]) -> float:
        return self._work(kind, choices) + sum(self._record_cost(r, choices) * self.records[r] for r in self._touching[kind])

    def _total(self, choices: list[tuple[Choice, ...]]) -> float:
        work = sum(self._work(kind, choices) for kind in range(len(self.members)))
        return work + sum(self._record_cost(r, choices) * n for r, n in self.records.items())

    # The search -----------------------------------------------------------------------------------------------------

    def _search(self) -> list[tuple[Choice, ...]]:
        """Descend from every class first and every class last, on every axis, and with all units that have a choice of
        their own taking it alike; keep the best end."""
        if not self.members:
            return []
        nobody: dict[str, tuple[Role, ...]] = dict.fromkeys(self.atoms, ())
        best = [self._start(kind, nobody, nobody) for kind in range(len(self.members))]
        self._descend(best)
        best_cost = self._total(best)
        improved = True
        while improved:
            improved = False
            for name in self.atoms:
                starts = [
                    [self._start(k, first, last, best[k]) for k in range(len(self.members))]
                    for role in self._rivals(name)
                    for first, last in ((nobody | {name: (role,)}, nobody), (nobody, nobody | {name: (role,)}))
                ]
                for choices in (*starts, *self._alike(name, best)):
                    if choices == best:
                        continue
                    self._descend(choices)
                    cost = self._total(choices)
                    if cost < best_cost * (1 - 1e-6):
                        best, best_cost, improved = choices, cost, True
        return best

    def _alike(self, name: str, given: list[tuple[Choice, ...]]) -> Iterator[list[tuple[Choice, ...]]]:
        """All units that could pass something round do, then all that could cut what is lent: where two units read one
        value, neither gains by doing so alone."""
        a = list(self.atoms).index(name)
        for pick in (lambda unit: unit.rounds, lambda unit: unit.lends):
            choices = list(given)
            for kind, members in enumerate(self.members):
                slots = self.candidates[kind].get(name, ())
                first = [i for i in slots if i in pick(members[0])]
                if first:
                    order = (*first, *(i for i in slots if i not in first))
                    choices[kind] = (*given[kind][:a], order, *given[kind][a + 1 :])
            if choices != given:
                yield choices

    def _rivals(self, name: str) -> list[Role]:
        """The roles that compete for the axis in some unit, in the order of their first appearance."""
        rivals: dict[Role, None] = {}
        for slots, candidates in zip(self.slots, self.candidates, strict=True):
            roles = dict.fromkeys(slots[i] for i in candidates.get(name, ()))
            rivals |= roles if len(roles) > 1 else {}
        return list(rivals)

    def _start(
        self,
        kind: Kind,
        first: dict[str, tuple[Role, ...]],
        last: dict[str, tuple[Role, ...]],
        given: tuple[Choice, ...] | None = None,
    ) -> tuple[Choice, ...]:
        """`given` (or everything that wants an axis, in order) with some classes put first or last on some axes."""
        roles = self.slots[kind]
        choice = []
        for a, name in enumerate(self.atoms):
            slots = tuple(self.candidates[kind].get(name, ()))
            order = slots if given is None or first[name] or last[name] else given[a]
            if given is not None and order is slots and not any(roles[i] in (*first[name], *last[name]) for i in slots):
                order = given[a]
            elif given is not None and order is slots:
                order = tuple(dict.fromkeys((*given[a], *slots)))
            choice.append(
                tuple(sorted(order, key=lambda i: (roles[i] not in first[name]) + 2 * (roles[i] in last[name])))
            )
        return tuple(choice)

    def _alternatives(self, kind: Kind, name: str) -> list[Choice]:
        slots = self.candidates[kind].get(name, [])
        if self.members[kind][0].alone:
            # An axis may be shared: some of it cuts heads, the rest passes keys round. It is never left unused: whoever
            # cuts a sequence has no room for the whole of it.
            orders = [(i, j, *(k for k in slots if k not in (i, j))) for i, j in itertools.permutations(slots, 2)]
            return orders or [tuple(slots)]
        return [(i, *(j for j in slots if j != i)) for i in slots] + ([()] if slots else [])

    def _descend(self, choices: list[tuple[Choice, ...]]) -> None:
        improved = True
        while improved:
            improved = False
            for kind in range(len(self.members)):
                for a, name in enumerate(self.mesh.axis_names):
                    alternatives = self._alternatives(kind, name)
                    if len(alternatives) < 2:
                        continue
                    current = choices[kind]
                    best, best_cost = current, self._kind_cost(kind, choices)
                    for alternative in alternatives:
                        choices[kind] = (*current[:a], alternative, *current[a + 1 :])
                        cost = self._kind_cost(kind, choices)
                        if cost < best_cost * (1 - 1e-9):
                            best, best_cost = choices[kind], cost
                    choices[kind] = best
                    improved |= best != current

    # The answer -----------------------------------------------------------------------------------------------------

    def unit_cut(self, unit: Unit) -> tuple[tuple[Axis, ...], ...]:
        kind = self.kind.get(unit)
        return ((),) * len(unit.slots) if kind is None else self.cut(kind, self.choices[kind])

    def decision(self, unit: Unit, name: str) -> Decision | None:
        """Why the unit uses (or leaves) mesh axis `name`; None where there was nothing to decide."""
        kind = self.kind.get(unit)
        if kind is None or not self.candidates[kind].get(name):
            return None
        a = self.mesh.axis_names.index(name)
        rows = []
        for alternative in self._alternatives(kind, name):
            choices = list(self.choices)
            choices[kind] = (*choices[kind][:a], alternative, *choices[kind][a + 1 :])
            rows.append((self._slot_name(kind, alternative), self._kind_cost(kind, choices)))
        winner = self._slot_name(kind, self.choices[kind][a])
        return Decision(name, winner, tuple(rows), len(self.members[kind]))

    def _slot_name(self, kind: Kind, choice: Choice) -> str:
        if not choice:
            return "nothing"
        slot = choice[0]
        name = self._role_name(kind, slot)
        if (beside := self.rounds[kind].get(slot)) is not None:
            return f"{self._role_name(kind, beside)}, with {name} passed round"
        return name

    def _role_name(self, kind: Kind, slot: int) -> str:
        role = self.slots[kind][slot]
        return role.name or f"a dim of {role.size}"


def _ways(axes: Sequence[Axis]) -> int:
    return math.prod(a.size for a in axes)


def _seen(end: End, positions: Slots) -> End:
    """The end of a root, on the leaves of a view of it."""
    if end.kind is None:
        return replace(end, cut=tuple(() if p is None else end.cut[p] for p in positions))
    return replace(end, slots=tuple(None if p is None else end.slots[p] for p in positions))


def _onto_root(cut: Cut, positions: tuple[int | None, ...], n: int) -> Cut:
    """A cut of a view, on the leaves of its root."""
    out: list[tuple[Axis, ...]] = [()] * n
    for axes, position in zip(cut, positions, strict=True):
        if position is not None:
            out[position] = axes
    return tuple(out)
