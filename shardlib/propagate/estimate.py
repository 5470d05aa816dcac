"""What a decision costs: estimated seconds of the whole program.

Every value pays the reshards from the layout in which it is made to every distinct layout in which it is read (a
pending sum once; sums that only meet in an addition are added first and then paid once). Every unit pays its
arithmetic, divided by the ways in which it is cut: so replicating work costs what it takes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from shardlib import reshard
from shardlib.meshes.axis import Axis
from shardlib.propagate.problem import Choice, End, Kind, Problem, Record
from shardlib.reshard import Cut

# An activation that moves is gone soon, a gathered parameter stays for half a step: near a tie, move activations.
HOLDING = 1.25

Order = tuple[Choice, ...]  # a choice for every mesh axis
Choices = list[Order]  # for every kind


class Estimate:
    """Seconds of choices, memoised per value and choice; `dear` times those that go into communication."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.dear = problem, 1.0
        # Records are known by their number here: they hash slowly.
        self._records = list(problem.records.items())
        self._touching: dict[Kind, list[int]] = defaultdict(list)
        for i, (record, _) in enumerate(self._records):
            for kind in record.kinds:
                self._touching[kind].append(i)
        self._cost_memo: list[dict[tuple[Order, ...], float]] = [{} for _ in self._records]
        self._work_memo: dict[tuple[Kind, Order], tuple[float, float]] = {}
        self._cut_memo: dict[tuple[Kind, Order], tuple[tuple[Axis, ...], ...]] = {}

    def cut(self, kind: Kind, choice: Order) -> tuple[tuple[Axis, ...], ...]:
        """The axes on every slot of a kind under `choice` (one entry per mesh axis, in mesh order)."""
        key = (kind, choice)
        if (known := self._cut_memo.get(key)) is not None:
            return known
        roles = self.problem.slots[kind]
        axes: list[list[Axis]] = [[] for _ in roles]
        for name, order in zip(self.problem.mesh.axis_names, choice, strict=True):
            atoms = self.problem.atoms[name]
            if order and set(roles[order[0]].lent) & set(atoms):
                atoms = atoms[::-1]  # what is lent is the minor part: only that can be exchanged
            for atom in atoms:
                for slot in order:
                    both = {slot, self.problem.rounds[kind].get(slot, slot)}
                    if all(atom in roles[i].wants and roles[i].size >= _ways(axes[i]) * atom.size for i in both):
                        for i in both:
                            axes[i].append(atom)
                        break
        result = [tuple(sorted(mine, key=role.wants.index)) for role, mine in zip(roles, axes, strict=True)]
        self._cut_memo[key] = tuple(result)
        return self._cut_memo[key]

    def record_cost(self, i: int, choices: Choices) -> float:
        """Seconds of the reshards of all values that record number `i` stands for."""
        record, count = self._records[i]
        key = tuple([choices[k] for k in record.kinds])
        memo = self._cost_memo[i]
        if (known := memo.get(key)) is None:
            known = memo[key] = self._reshards(record, choices) * count
        return known * self.dear

    def scopes(self) -> Iterator[tuple[int, tuple[Kind, ...]]]:
        """The number of every record, and the kinds on whose choices its cost depends."""
        return ((i, record.kinds) for i, (record, _) in enumerate(self._records))

    def ends(self, i: int, kind: Kind, choice: Order) -> tuple[object, ...]:
        """What record number `i` sees of a kind under `choice`: where its ends are, and what they owe."""
        record, _ = self._records[i]
        return tuple(
            self._resolved(e, choice) for e in (*record.sources, *record.readers, *record.through) if e.kind == kind
        )

    def _resolved(self, end: End, choice: Order) -> tuple[Cut, tuple[Axis, ...]]:
        assert end.kind is not None
        slots = self.cut(end.kind, choice)
        cut = tuple(() if s is None else slots[s] for s in end.slots)
        # What went round was reduced on the way.
        return cut, tuple(a for s in end.pending for a in slots[s] if not any(a in axes for axes in cut))

    def _reshards(self, record: Record, choices: Choices) -> float:

        def resolve(end: End) -> tuple[Cut, tuple[Axis, ...]]:
            return (end.cut, ()) if end.kind is None else self._resolved(end, choices[end.kind])

        came = next((found for found in map(resolve, record.through) if found[1]), None)
        sources = {resolve(s): None for s in record.sources} if came is None else {came: None}
        late = record.late and any(pending for _, pending in sources)
        readers = [r for r in record.readers if r.pending or not late]
        flat = tuple(n for dim in record.sizes for n in dim)
        # What a reader needs in own rows only it also takes while these are pending.
        wants = sorted(dict.fromkeys(map(resolve, readers)), key=lambda w: reshard.local_numel(flat, w[0]))
        total = 0.0

        def route(source: tuple[Cut, tuple[Axis, ...]], want: tuple[Cut, tuple[Axis, ...]]) -> float:
            left = tuple(a for a in source[1] if a not in want[1])
            return reshard.seconds(reshard.route(record.sizes, record.itemsize, source[0], want[0], left))

        have: list[tuple[Cut, tuple[Axis, ...]]] = list(sources)
        if (
            len(have) > 1 and wants
        ):  # sums that cannot be added first: each goes to the first reader's layout on its own
            total += sum(route(source, wants[0]) for source in have)
            have = [wants[0]]
        for want in wants:
            best, near = min(((route(source, want), source) for source in have), key=lambda found: found[0])
            total += best
            have.append((want[0], tuple(a for a in near[1] if a in want[1])))
        if record.returned is not None and all(pending for _, pending in have):
            flat_wants = list(zip(record.returned, flat, strict=True))
            for cut, pending in have:
                total += route((cut, pending), (settled(cut, pending, flat_wants), ()))
        return total * (HOLDING if record.held else 1.0)

    def work(self, kind: Kind, choices: Choices) -> float:
        """Seconds of a kind's arithmetic, and of what its ops send while they run."""
        key = (kind, choices[kind])
        if (known := self._work_memo.get(key)) is None:
            known = self._work_memo[key] = self._work(kind, choices)
        return known[0] + known[1] * self.dear

    def _work(self, kind: Kind, choices: Choices) -> tuple[float, float]:
        """Seconds of arithmetic, and of communication."""
        cut = self.cut(kind, choices[kind])
        work, total = sum(s / math.prod(_ways(cut[i]) for i in slots) for s, slots in self.problem.compute[kind]), 0.0
        for p in self.problem.passed[kind]:
            local = p.seconds / math.prod(_ways(cut[i]) for i in p.slots)
            passed, wanted = _ways(cut[p.slot]), self.problem.slots[kind][p.slot].wants
            held = _ways([a for a in cut[p.beside] if a in wanted and a not in cut[p.slot]])
            total += local * (passed - 1 + (held - 1) / held)
            # All ways of doing attention on a cut sequence count as many messages: their bytes shall decide.
            total += p.times * reshard.COLLECTIVE_LATENCY * ((held > 1) + 2 * (passed > 1 and p.operand))
        for b in self.problem.borders[kind]:
            if (n := _ways(cut[b.slot])) > 1:
                messages, rows = b.sent(n)
                total += b.seconds * rows / math.prod(_ways(cut[i]) for i in b.slots)
                total += b.times * messages * reshard.COLLECTIVE_LATENCY
        return work, total

    def kind_cost(self, kind: Kind, choices: Choices) -> float:
        return self.work(kind, choices) + sum([self.record_cost(i, choices) for i in self._touching[kind]])

    def moves(self, kind: Kind, choices: Choices) -> bool:
        """Whether a value beside this kind is resharded."""
        return any(self.record_cost(i, choices) for i in self._touching[kind])

    def cost(self, kinds: Sequence[Kind], choices: Choices) -> float:
        """Seconds of everything that touches one of `kinds`."""
        if len(kinds) == 1:
            return self.kind_cost(kinds[0], choices)
        touched = dict.fromkeys(i for k in kinds for i in self._touching[k])
        work = sum(self.work(k, choices) for k in kinds)
        return work + sum([self.record_cost(i, choices) for i in touched])

    def whole(self, choices: Choices) -> tuple[float, float]:
        """Seconds of arithmetic and of communication, with what nobody decides: so estimates of other wants compare."""
        still = dict.fromkeys(u for u in self.problem.units.unit.values() if u not in self.problem.kind)
        work = sum(seconds for unit in still for seconds, _ in self.problem.compute_of(unit, 1))
        sent = sum(self._reshards(record, []) * n for record, n in self.problem.settled.items())
        works = [self._work(kind, choices) for kind in range(len(self.problem.members))]
        moved = sum(self.record_cost(i, choices) for i in range(len(self._records)))
        return work + sum(mine for mine, _ in works), sent + sum(mine for _, mine in works) + moved

    def total(self, choices: Choices) -> float:
        work = sum(self.work(kind, choices) for kind in range(len(self.problem.members)))
        return work + sum([self.record_cost(i, choices) for i in range(len(self._records))])


def settled(cut: Cut, pending: Sequence[Axis], leaves: Sequence[tuple[Sequence[Axis], int]]) -> Cut:
    """Where a sum goes that is returned while it is pending over axes: to leaves, given as (axes it wants, size).

    So gradients land like parameters.
    """
    out = list(cut)
    for axis in pending:
        for j, (wants, size) in enumerate(leaves):
            if axis in wants and size >= _ways(out[j]) * axis.size:
                out[j] = (*out[j], axis)
                break
    return tuple(out)


def _ways(axes: Sequence[Axis]) -> int:
    return math.prod(a.size for a in axes)
