"""What a decision costs: estimated seconds of the whole program.

Every value pays the reshards from the layout in which it is made to every distinct layout in which it is read (a
pending sum once; sums that only meet in an addition are added first and then paid once). Every unit pays its
arithmetic, divided by the ways in which it is cut: so replicating work costs what it takes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from shardlib.compiler.propagate.solver.bucket_elimination import GRAIN, Table
from shardlib.compiler.propagate.solver.edge_reshards import Moves, State
from shardlib.compiler.propagate.solver.edges import End, Kind, Record
from shardlib.compiler.propagate.solver.problem import Choice, Problem, Role
from shardlib.sharding.mesh.axis import Axis, ways

# Behind so much of all arithmetic the schedule hides messages, by the simulator's clock: there is none in front of the
# first layer, and messages are not spread as evenly.
_HIDES = 0.5

Order = tuple[Choice, ...]  # a choice for every mesh axis, and what is turned round
Choices = list[Order]  # for every kind


class Estimate:
    """Seconds of choices, memoised per value and choice; `of_bytes`: messages take what their bytes do, no latency."""

    def __init__(self, problem: Problem, *, of_bytes: bool = False) -> None:
        self.problem = problem
        self.prices = problem.prices.of_bytes if of_bytes else problem.prices
        self.moves = [self._moves(record, n) for record, n in problem.records.items()]
        self._touching: dict[Kind, list[int]] = defaultdict(list)
        for i, moves in enumerate(self.moves):
            for kind in moves.record.kinds:
                self._touching[kind].append(i)
        self._ends_memo: list[dict[tuple[Kind, Order], tuple[int, ...]]] = [{} for _ in self.moves]
        self._sent_memo: list[dict[tuple[object, ...], float]] = [{} for _ in self.moves]
        self._work_memo: dict[tuple[Kind, Order], tuple[float, float]] = {}
        self._cut_memo: dict[tuple[Kind, Order], tuple[tuple[Axis, ...], ...]] = {}

    def cut(self, kind: Kind, choice: Order) -> tuple[tuple[Axis, ...], ...]:
        """The axes on every slot of a kind under `choice` (one entry per mesh axis, in mesh order; and one of
        slots whose axes are turned round)."""
        key = (kind, choice)
        if (known := self._cut_memo.get(key)) is not None:
            return known
        roles = self.problem.slots[kind]
        axes: list[list[Axis]] = [[] for _ in roles]
        beside = self.problem.beside[kind]
        *orders, turned = choice
        for name, order in zip(self.problem.mesh.axis_names, orders, strict=True):
            atoms = self.problem.atoms[name]
            if order and self._takes_minor(roles[order[0]], atoms):
                atoms = atoms[::-1]
            for atom in atoms:
                for slot in order:
                    both = {slot, self.problem.rounds[kind].get(slot, slot)}
                    fit = {i for i in both | beside[slot] if self._takes(roles[i], axes[i], atom)}
                    if both <= fit:
                        for i in fit:
                            axes[i].append(atom)
                        break
        stand = [role.turned * (i in turned) + role.wants for i, role in enumerate(roles)]
        result = [tuple(sorted(mine, key=order.index)) for order, mine in zip(stand, axes, strict=True)]
        self._cut_memo[key] = tuple(result)
        return self._cut_memo[key]

    @staticmethod
    def _takes_minor(role: Role, atoms: Sequence[Axis]) -> bool:
        """Whether a slot that may not have all of an axis takes its minor part: only that can be exchanged at once."""
        return bool({*role.lent} & {*atoms}) or ({*atoms} <= role.offered and role.size < ways(atoms))

    @staticmethod
    def _takes(role: Role, axes: Sequence[Axis], atom: Axis) -> bool:
        return atom in role.wants and role.size >= ways(axes) * atom.size

    def _ends(self, i: int, kind: Kind, choice: Order) -> tuple[int, ...]:
        """The states of those ends of record number `i` that a kind decides."""
        memo = self._ends_memo[i]
        if (known := memo.get((kind, choice))) is None:
            moves, slots = self.moves[i], self.cut(kind, choice)
            known = tuple(moves.number(_resolved(moves.ends[p], slots)) for p in moves.places[kind])
            memo[kind, choice] = known
        return known

    def sent(self, i: int, choices: Choices, *, rough: bool = False) -> float:
        """Seconds of the reshards of all values that record number `i` stands for."""
        moves, memo = self.moves[i], self._sent_memo[i]
        states = tuple([self._ends(i, kind, choices[kind]) for kind in moves.places])
        key = (states, rough)
        if (known := memo.get(key)) is None:
            decided = {kind: [of] for kind, of in zip(moves.places, states, strict=True)}
            known = memo[key] = float(moves.seconds(decided, rough=rough).item())
        return known

    def work(self, kind: Kind, choice: Order) -> tuple[float, float]:
        """Seconds of a kind's arithmetic, and of what its ops send while they run."""
        if (known := self._work_memo.get((kind, choice))) is None:
            work, sent = self._work(kind, choice)
            known = self._work_memo[kind, choice] = grained(work), grained(sent)
        return known

    def _work(self, kind: Kind, choice: Order) -> tuple[float, float]:
        cut = self.cut(kind, choice)
        work, total = sum(s / math.prod(ways(cut[i]) for i in slots) for s, slots in self.problem.compute[kind]), 0.0
        prices = self.prices
        for p in self.problem.passed[kind]:
            local = p.bytes / math.prod(ways(cut[i]) for i in p.slots)
            around, wanted = cut[p.slot], self.problem.slots[kind][p.slot].wants
            beside = tuple(a for a in cut[p.beside] if a in wanted and a not in around)
            passed, held = ways(around), ways(beside)
            total += local * (p.pieces(passed) / prices.rate(around) + (held - 1) / held / prices.rate(beside))
            # All ways of doing attention on a cut sequence count as many messages: their bytes shall decide.
            total += p.times * (held > 1) * prices.latency(beside)
            total += p.times * 2 * (passed > 1 and p.operand) * prices.latency(around)
        for sender in self.problem.senders[kind]:
            assignment = {factor: cut[slot] for factor, slot in sender.slots if cut[slot]}
            found = self.problem.flood.sends(sender.op, assignment)
            total += sender.times * sum(prices.sent(axes, nbytes, kind) for kind, axes, nbytes in found)
        return work, total

    def cost(self, kinds: Iterable[Kind], choices: Choices, dear: float = 1.0) -> float:
        """Seconds of everything that touches one of `kinds`."""
        works = [self.work(kind, choices[kind]) for kind in kinds]
        sent = sum([self.sent(i, choices) for i in self._touched(kinds)]) + sum(mine for _, mine in works)
        return sum(mine for mine, _ in works) + sent * dear

    def cheaper(self, kinds: Iterable[Kind], choices: Choices, now: float, dear: float) -> bool:
        """Whether that is less than `now`. What is no less roughly is not looked at closer."""
        works = sum(mine + sent * dear for mine, sent in (self.work(kind, choices[kind]) for kind in kinds))
        for rough in (True, False):
            left = now - works
            for i in self._touched(kinds):
                if left <= 0:
                    return False
                left -= self.sent(i, choices, rough=rough) * dear
        return left > 0

    def around(self, kind: Kind, choices: Choices) -> float:
        """Seconds of what is sent by the ops of a kind, and of the reshards of values beside it."""
        return self.work(kind, choices[kind])[1] + sum(self.sent(i, choices) for i in self._touching[kind])

    def beside(self, *kinds: Kind) -> tuple[Kind, ...]:
        """Kinds and those that share a value with one of them."""
        return tuple(dict.fromkeys([*kinds, *(k for i in self._touched(kinds) for k in self.moves[i].record.kinds)]))

    def worth(
        self, free: Mapping[Kind, Sequence[Order]], choices: Choices, dear: float = 1.0
    ) -> dict[Kind, list[Order]]:
        """The choices of kinds that are `free` with which all could cost less than as chosen: not those whose work
        alone is so much more than the least as all that could be saved. Nobody, where nothing could."""
        works = {k: [mine + sent * dear for mine, sent in (self.work(k, x) for x in free[k])] for k in free}
        floor = {k: min(of) for k, of in works.items()}
        now = sum(of[free[k].index(choices[k])] - floor[k] for k, of in works.items())
        spent = now + dear * sum([self.sent(i, choices) for i in self._touched(free)])
        if not spent:
            return {}
        left = {
            k: [x for x, work in zip(free[k], of, strict=True) if work - floor[k] <= spent] for k, of in works.items()
        }
        return {k: some for k, some in left.items() if len(some) > 1}

    def _touched(self, kinds: Iterable[Kind]) -> list[int]:
        return sorted({i for kind in kinds for i in self._touching[kind]})

    def tables(
        self,
        free: Mapping[Kind, Sequence[Order]],
        choices: Choices,
        largest: float = math.inf,
        at_once: float = math.inf,
        *,
        rough: bool = False,
    ) -> tuple[list[Table], bool]:
        """The costs of all that kinds which are `free` to choose touch, others being as in `choices`, and whether they
        are all there: tables larger than `largest` are left out, and all where they had more than `at_once` entries."""
        tables: list[Table] = []
        for kind, domain in free.items():
            works = np.array([self.work(kind, choice) for choice in domain])
            every = (np.arange(len(domain)),)
            tables += [Table((kind,), works[:, 0], every), Table((kind,), works[:, 1], every, sent=True)]
        asked = []
        for i in self._touched(free):
            # Choices that put the ends of a value alike cost it the same: one of each is tried.
            ends = {k: [self._ends(i, k, choice) for choice in free[k]] for k in self.moves[i].places if k in free}
            known = {kind: list(dict.fromkeys(of)) for kind, of in ends.items()}
            asked.append((i, ends, {kind: some for kind, some in known.items() if len(some) > 1}))
        sizes = [math.prod(map(len, known.values())) for *_, known in asked]
        if sum(sizes) > at_once:
            return [], False
        for size, (i, ends, known) in zip(sizes, asked, strict=True):
            if size <= largest:
                tables.append(self._table(i, ends, known, choices, rough))
        return tables, all(size <= largest for size in sizes)

    def _table(
        self,
        i: int,
        ends: Mapping[Kind, Sequence[tuple[int, ...]]],
        known: Mapping[Kind, Sequence[tuple[int, ...]]],
        choices: Choices,
        rough: bool,
    ) -> Table:
        """The table of record number `i` over the kinds of `known`, whose ends it has there in all ways."""
        moves = self.moves[i]
        fixed = {k: [self._ends(i, k, choices[k])] for k in moves.places if k not in known}
        costs = moves.seconds({**fixed, **known}, rough=rough)
        number = {kind: {states: n for n, states in enumerate(of)} for kind, of in known.items()}
        classes = tuple(np.array([number[kind][x] for x in ends[kind]]) for kind in known)
        return Table(tuple(known), costs, classes, value=i)

    def alike(self, free: Mapping[Kind, Sequence[Order]], at_once: float) -> Iterator[dict[Kind, Order]]:
        """For every value that is shared by kinds with more than `at_once` choices together, and every state of it: the
        least work of each of them with which all its ends are in that state, if there is one."""
        for i, moves in enumerate(self.moves):
            ends = {k: {choice: self._ends(i, k, choice) for choice in free[k]} for k in moves.places if k in free}
            if math.prod(len({*of.values()}) for of in ends.values()) <= at_once:
                continue
            able: dict[int, dict[Kind, Order]] = defaultdict(dict)
            for k, of in ends.items():
                for choice, mine in of.items():
                    if len({*mine}) == 1:
                        best = able[mine[0]].setdefault(k, choice)
                        if sum(self.work(k, choice)) < sum(self.work(k, best)):
                            able[mine[0]][k] = choice
            yield from able.values()

    def corrected(self, tables: Sequence[Table], at: Mapping[Kind, int], choices: Choices) -> bool:
        """Write what the best choices cost in place of rough figures; whether any of these was wrong."""
        wrong = False
        for table in tables:
            if table.value is not None and (seconds := self.sent(table.value, choices)) != table.costs[table.at(at)]:
                table.costs[table.at(at)], wrong = seconds, True
        return wrong

    def whole(self, choices: Choices) -> tuple[float, float]:
        """Seconds of arithmetic and of communication, with what nobody decides: so estimates of other wants compare."""
        mine, moved = self.parts(choices)
        return self.problem.undecided() + mine, moved + sum(seconds for _, seconds in self._settled)

    def unhidden(self, choices: Choices) -> float:
        """Seconds of the whole program where arithmetic hides the messages that nobody waits for, as far as it goes."""
        (work, sent), share = self.whole(choices), self.problem.flood.share
        hidden = sum([self.sent(i, choices) for i, moves in enumerate(self.moves) if moves.record.hidden])
        hidden += sum(seconds for record, seconds in self._settled if record.hidden)
        return work + sent - hidden + max(hidden / share - _HIDES * work, 0.0)

    def parts(self, choices: Choices) -> tuple[float, float]:
        """Seconds of arithmetic and of communication, of all that is decided."""
        works = [self.work(kind, choice) for kind, choice in enumerate(choices)]
        sent = sum([self.sent(i, choices) for i in range(len(self.moves))])
        return sum(mine for mine, _ in works), sent + sum(mine for _, mine in works)

    def total(self, choices: Choices) -> float:
        """Seconds of all that is decided."""
        return sum(self.parts(choices))

    def _moves(self, record: Record, count: int) -> Moves:
        return Moves(record, count, self.problem.prices, self.prices, self.problem.flood.share)

    @cached_property
    def _settled(self) -> list[tuple[Record, float]]:
        """Values that nobody decides about, with the seconds of their reshards."""
        return [(record, self._moves(record, n).seconds({}).item()) for record, n in self.problem.settled.items()]


def grained(seconds: float) -> float:
    """The nearest multiple of `GRAIN`."""
    return round(seconds / GRAIN) * GRAIN


def _resolved(end: End, slots: Sequence[tuple[Axis, ...]]) -> State:
    cut = tuple(() if s is None else slots[s] for s in end.slots)
    # What went round was reduced on the way.
    return cut, tuple(a for s in end.pending for a in slots[s] if not any(a in axes for axes in cut))
