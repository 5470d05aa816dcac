"""Offers: dims that nobody annotated may take an axis that is in use elsewhere, where that pays.

Annotations say what is cut over an axis. Ops that none of them reaches are done by every device along the axis; and a
chain of ops that is cut where each of them has to communicate may be cheaper in a dim that all of them have (matrices
cut inside, in a stack: two exchanges, and the chain runs alone). Such dims are offered the axis, one after the other;
an offer stands if the whole program becomes markedly faster, by the same estimate that decides everything. So are the
dims of a large sum over devices that few ops turn into little: who adds up a piece goes on with it.

Where annotations contradict each other about an axis, dims beside what is sent are offered it, too: for fewer bytes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from shardlib.compiler.graph.ir import Graph, Op, Value
from shardlib.compiler.propagate.dim_factors import DimFactor
from shardlib.compiler.propagate.propagation import Propagation
from shardlib.compiler.propagate.solver.cost import grained
from shardlib.compiler.propagate.solver.deferred_sums import unpaid
from shardlib.compiler.propagate.solver.domains import Variable
from shardlib.compiler.propagate.solver.problem import Problem, work
from shardlib.compiler.propagate.solver.propose_near_moves import SMALL, beside_moves, free
from shardlib.compiler.propagate.solver.search import TIE, Search, State
from shardlib.compiler.propagate.solver.take_apart import take_apart
from shardlib.core.aten.op_traits import is_view
from shardlib.sharding.mesh.axis import Axis

_WORTH = 0.95  # of the estimated time is the most that a program with an offer may take,
_WORTH_MORE = 0.5  # or this, where it sends markedly more
_HALF = 0.5  # of the bytes is worth more messages
_SHARE = 0.2  # of the work of all ops, in which a dim must take part
_TRIED = 3  # dims for each axis
_BESIDE = 2  # and those beside what moves
_DEEP = 128  # ops: in larger programs nobody looks for fewer bytes in dims beside what is sent
_SOON = 16  # ops in which little is made of a sum, or it is not looked at further
_HEAVY = 8  # operations for every element that an op reads or makes: others do not matter beside such


def offer_axes(search: Search, first: State) -> bool:
    """Offer axes to dims that nobody annotated, and keep what pays; whether anything did. `first` is the state of
    `search` before units were taken apart: there every trial begins."""
    flood = search.problem.flood
    used = {want.axis.name for wants in flood.wants.values() for want in wants}
    for name in search.problem.mesh.axis_names:
        if name in used and not search.effort.stops():
            kept = search.state
            better = _Offers(search, name, kept, first).better()
            search.state = kept
            if better:
                search.state = first = _best(search, better)
    if search.withheld:  # beside all that was offered, what was withheld may be as good
        search.withheld = frozenset()
        search.minimize(search.domains(search.problem.groups))
    return bool(search.offers)


class _Offers:
    """The offers of one axis: the dims that are worth a trial, and `better` states than the one that is `kept`."""

    def __init__(self, search: Search, name: str, kept: State, first: State) -> None:
        self.search, self.name, self.kept, self.first = search, name, kept, first
        graph, flood = search.problem.graph, search.problem.flood
        weights, self.light = _weights(graph, search.problem)
        mixing = dict.fromkeys([*weights, *(op for op in graph.ops if _is_plain(op) and flood.whole.get(op))])
        few = graph.size <= _DEEP and not any(_has_choices(op) for op in graph.ops)
        self.deep = few and name in search.allowed.contested
        self.summed = _summed(weights, search, name)
        self.idle = [*_candidates(weights, search, name), *_beside(mixing, search, name), *self.summed]
        parts = dict.fromkeys(_candidates(weights, search, name, partly=True), _HALF)
        self.turned = _across(weights, search, name)
        fewer = dict.fromkeys(self.turned, 0.0) | parts
        self.fewer = {leaf: share for leaf, share in fewer.items() if leaf not in self.idle}
        self.eased = _eased(search, name) if self.deep else []

    def better(self) -> list[State]:
        """The states with one offer that pays."""
        search, better, near = self.search, list[State](), list[State]()
        leaves = dict.fromkeys([*self.idle, *self.fewer, *self.eased])
        for leaf, place in [*((leaf, None) for leaf in leaves), *self.turned.items()]:
            if search.effort.stops():
                break
            self._begin(leaf, place)
            start = search.state
            with search.optimistic():  # the messages inside ops take long to work out
                search.minimize(search.domains(search.problem.groups))
                if not (self._is_worth(leaf) or self._is_near()):
                    continue
            search.state = start
            search.minimize(search.domains(search.problem.groups))
            if self._is_worth(leaf):
                better.append(search.state)
            elif self._is_near():
                near.append(search.state)
        if near:
            search.state = _best(search, near)
            take_apart(search)
            better += [search.state] if _spares(search, search.state, self.kept) else []
        return better

    def _begin(self, leaf: DimFactor, place: DimFactor | None) -> None:
        """Offer the axis to a dim, in place of another one if there is a `place`, and give it to all that hold it."""
        search, offer = self.search, (leaf, self.name)
        search.state = replace(self.first, offers=self.kept.offers | {offer}, withheld=self.kept.withheld)
        if place is not None:
            search.withheld |= {(place, self.name)}
            search.choices = [search.domain((kind,)).orders[0] for kind in range(len(search.choices))]
        search.settle(search.problem.groups)
        search.take(offer, search.problem.groups)

    def _is_worth(self, leaf: DimFactor) -> bool:
        search, trial = self.search, self.search.state
        if leaf in self.fewer and not _less(search, trial, self.kept, self.fewer[leaf]):
            return False
        tried = leaf in self.fewer or leaf in self.idle
        better = tried and _is_better(search, trial, self.kept, self.light, summed=leaf in self.summed)
        return better and _lasts(search, trial, self.kept)

    def _is_near(self) -> bool:
        return self.deep and _spares(self.search, self.search.state, self.first)


def _best(search: Search, states: Sequence[State]) -> State:
    """Of those that are about as fast as the fastest, that which sends least; the first where several do."""
    whole = [search.estimate.whole(state.choices) for state in states]
    fastest = min(map(sum, whole))
    near = [i for i, seconds in enumerate(whole) if sum(seconds) <= fastest * TIE]
    return states[min(near, key=lambda i: tuple(map(grained, whole[i][::-1])))]


def _is_better(search: Search, trial: State, before: State, light: bool, summed: bool) -> bool:
    """Whether an offer is worth it: markedly faster, and twice as fast if markedly more is sent; where ops are light,
    nothing more may be sent, and where shards of sums are offered (`summed`), it must be markedly less."""
    if light and _bytes(search, trial) > _bytes(search, before):
        return False
    (work, sent), (work_before, sent_before) = (search.estimate.whole(state.choices) for state in (trial, before))
    if summed and sent > sent_before * _WORTH:
        return False
    more = sent > sent_before * TIE or _bytes(search, trial) > _bytes(search, before) * TIE
    share = _WORTH_MORE if more else _WORTH
    return work + sent < (work_before + sent_before) * share


def _lasts(search: Search, trial: State, before: State) -> bool:
    """Whether an offer is still faster where sums that go on are paid as what they become."""
    seconds = []
    for search.state in (before, trial):
        seconds.append(sum(search.estimate.whole(search.choices)) - unpaid(search))
    return seconds[1] < seconds[0] * _WORTH


def _spares(search: Search, trial: State, before: State) -> bool:
    """Whether an offer sends markedly less, in no more messages unless it is half of it, and takes no longer."""
    (work, sent), (work_before, sent_before) = (search.estimate.whole(state.choices) for state in (trial, before))
    faster = work + sent <= work_before + sent_before and work <= work_before
    return faster and _less(search, trial, before, _HALF)


def _less(search: Search, trial: State, before: State, share: float) -> bool:
    """Whether an offer sends markedly less, in no more messages unless it is such a share of it."""
    few, many = _bytes(search, trial), _bytes(search, before)
    latency, waited = (search.estimate.whole(s.choices)[1] - n for s, n in ((trial, few), (before, many)))
    return few <= many * (_WORTH if grained(latency) <= grained(waited) else share)


def _bytes(search: Search, state: State) -> float:
    """Seconds that the bytes take which are sent."""
    return search.of_bytes.whole(state.choices)[1]


def _weights(graph: Graph, problem: Problem) -> tuple[dict[Op, float], bool]:
    """The ops that matter: by their arithmetic, or by their time where none has much, which then are light. Attention
    has its own choices."""
    ops = [op for op in graph.ops if op.rule is not None and not (op.constant or op.transparent)]
    alone = {op for op in ops if _has_choices(op)}
    heavy = {op: float(op.rule.flops) for op in ops if op.rule is not None and op not in alone and _is_heavy(op)}
    if heavy or alone or any(op.manual for op in graph.ops):
        return heavy, False
    return {op: work(op, problem.prices) for op in ops}, True


def _has_choices(op: Op) -> bool:
    """Whether an op has choices of its own, as attention."""
    return op.rule is not None and bool(op.rule.rounds or op.rule.lends)


def _is_plain(op: Op) -> bool:
    """Whether an op does something, in one way: what splits a tensor takes nothing together."""
    return not (op.constant or op.transparent or op.manual or is_view(op.target) or _has_choices(op))


def _is_heavy(op: Op) -> bool:
    elements = sum(v.nbytes // max(v.dtype.itemsize, 1) for v in (*op.operands, *op.results) if v is not None)
    return op.rule is not None and op.rule.flops > _HEAVY * elements


def _candidates(weights: Mapping[Op, float], search: Search, name: str, *, partly: bool = False) -> list[DimFactor]:
    """The dims which would take most of what is done alike along an axis, or that communicates; with those among the
    latter that could take a part of the axis, if `partly`."""
    problem, gain = search.problem, defaultdict[DimFactor, float](float)
    flood, units, atoms = problem.flood, problem.units.unit, problem.atoms[name]
    for op, weight in weights.items():
        if op not in units:
            continue
        used = {a for axes in search.cut(op) for a in axes}
        idle = [a for a in atoms if a not in used]
        if idle or _sent_around(search, op):
            for leaf in _free(op, flood, idle or atoms, everywhere=not idle, partly=partly and not idle):
                gain[problem.families[leaf]] += weight * flood.times(op, leaf)
    most = _first(gain)[:_TRIED]
    found = [leaf for leaf in most if gain[leaf] >= _SHARE * sum(w * op.times for op, w in weights.items())]
    return list(dict.fromkeys([*found, *_first(_beside_selections(search, atoms))[:1]]))


def _sent_around(search: Search, op: Op) -> float:
    """Seconds of what is sent by an op's unit, and of the reshards of values beside that."""
    kind = search.problem.kind.get(search.problem.units.unit[op])
    return 0.0 if kind is None else search.estimate.around(search.problem.group_of[kind], search.choices)


def _across(weights: Mapping[Op, float], search: Search, name: str) -> dict[DimFactor, DimFactor]:
    """The dim beside most of what is made of a matrix and itself, turned round, with the dim that it has twice: of two
    dims of one class only one can be cut, and then the other moves, in each op anew."""
    problem, gain = search.problem, defaultdict[DimFactor, float](float)
    flood, atoms, twice = problem.flood, problem.atoms[name], dict[DimFactor, DimFactor]()
    for op, weight in weights.items():
        leaves = [leaf for of in flood.labels[op].values() for leaf in of]
        wanting = [x for x in leaves if any(want.axis in atoms for want in flood.wants.get(x, ()))]
        for leaf in _free(op, flood, atoms, everywhere=False) if len({*wanting}) < len(wanting) else ():
            gain[problem.families[leaf]] += weight * flood.times(op, leaf)
            both = next(x for x in wanting if wanting.count(x) > 1)
            twice.setdefault(problem.families[leaf], problem.families[both])
    return {leaf: twice[leaf] for leaf in _first(gain)[:1]}


def _eased(search: Search, name: str) -> list[DimFactor]:
    """The dims beside most of what is sent: where they are cut over the axis from end to end, it need not be."""
    problem, gain, part = search.problem, defaultdict[DimFactor, float](float), defaultdict[DimFactor, float](float)
    beside: dict[Variable, dict[DimFactor, None]] = defaultdict(dict)
    flood, atoms = problem.flood, problem.atoms[name]
    at_home = _returned(problem.graph, flood, atoms)
    for op in problem.graph.ops:
        unit = problem.units.unit.get(op)
        if unit not in problem.kind or op.rule is None or op.constant or op.transparent:
            continue
        for leaf in sorted(_free(op, flood, atoms, everywhere=False) - at_home):
            beside[problem.group_of[problem.kind[unit]]][problem.families[leaf]] = None
            part[problem.families[leaf]] += work(op, problem.prices)
    for group, leaves in beside.items():
        sent = search.estimate.around(group, search.choices)
        for leaf in leaves if sent else ():
            gain[leaf] += sent
    return sorted(gain, key=lambda leaf: (-grained(gain[leaf]), -grained(part[leaf]), leaf))[:_TRIED]


def _returned(graph: Graph, flood: Propagation, atoms: Sequence[Axis]) -> set[DimFactor]:
    """The dims of results of which another wants the axis: there, nobody looks for them elsewhere."""
    found = set[DimFactor]()
    for value in graph.outputs:
        if isinstance(value, Value) and not value.constant:
            leaves = flood.leaves(value)
            if any(want.axis in atoms for leaf in leaves for want in flood.wants.get(leaf, ())):
                found.update(leaves)
    return found


def _first(gain: Mapping[DimFactor, float]) -> list[DimFactor]:
    return sorted(gain, key=lambda leaf: (-gain[leaf], leaf))


def _beside(ops: Collection[Op], search: Search, name: str) -> list[DimFactor]:
    """The dims beside what is sent, where that takes long enough to matter."""
    gain = beside_moves(ops, search, search.problem.atoms[name])
    least = (1 - _WORTH) * sum(search.estimate.whole(search.choices)) if gain else 0.0
    return [leaf for leaf in _first(gain)[:_BESIDE] if gain[leaf] >= least]


def _summed(weights: Mapping[Op, float], search: Search, name: str) -> list[DimFactor]:
    """The dim which would share out most of sums over devices that little is made of, where nobody else has it, and
    where these take long enough to matter."""
    problem, gain = search.problem, defaultdict[DimFactor, float](float)
    flood, units, atoms, prices = problem.flood, problem.units, problem.atoms[name], problem.prices
    for op in weights:
        if op not in units.unit or op.rule is None or "sum" not in op.rule.reduce.values():
            continue
        cuts, slots = search.cut(op), units.op_slots[op].items()
        summed = dict.fromkeys(a for (f, _), s in slots if op.rule.owed(0, f) == "sum" for a in cuts[s])
        if not summed.keys().isdisjoint(atoms) and _is_used_up(op):
            ways = math.prod(a.size for (f, _), s in slots if op.rule.owed(0, f) != "sum" for a in cuts[s])
            nbytes = sum(r.nbytes for r in op.results if r is not None) / ways
            for leaf in _free(op, flood, atoms, everywhere=False):
                gain[problem.families[leaf]] += prices.comm_seconds(tuple(summed), 2 * nbytes) * flood.times(op, leaf)
    least = (1 - _WORTH) * sum(search.estimate.whole(search.choices)) if gain else 0.0
    return [leaf for leaf in _first(gain)[:1] if gain[leaf] >= least]


def _is_used_up(op: Op) -> bool:
    """Whether somebody needs the sum that an op owes, and a few ops make little of it, heavy ones at once (a product of
    scores and values): who adds up a piece can then do all of these on the piece."""
    todo, seen, needed = [r for r in op.results if r is not None], set[Op](), False
    owed, most = {*todo}, max(r.nbytes for r in todo)
    while todo:
        value = todo.pop()
        if value.nbytes * SMALL < most:
            continue
        if value.is_output or len(seen) > _SOON:
            return False
        for reader, i in value.readers:
            made = [r for r in reader.results if r is not None]
            goes_on = _is_heavy(reader) and any(r.nbytes * SMALL >= most for r in made)
            if reader.rule is None or reader.manual or reader.constrains or goes_on:
                return False
            passes = value in owed and (reader.transparent or any(i in together for together in reader.rule.linear))
            needed |= value in owed and not passes
            owed.update(made if passes else ())
            todo += made if reader not in seen else ()
            seen.add(reader)
    return needed


def _beside_selections(search: Search, atoms: Sequence[Axis]) -> Mapping[DimFactor, float]:
    """The dims beside one that is cut and of which single elements are taken, each by a sum over the devices: cut there
    instead, nothing is sent for them."""
    gain, flood = defaultdict[DimFactor, float](float), search.problem.flood
    for op, slots in search.problem.units.op_slots.items():
        if op.rule is None or not op.rule.gathers:
            continue
        taken = [leaf for f, k in slots if f in op.rule.gathers and not k for leaf in flood.labels[op][f]]
        if any(want.axis in atoms for leaf in taken for want in flood.wants.get(leaf, ())):
            for leaf in _free(op, flood, atoms, everywhere=True):
                made = sum(r.nbytes for r in op.results if r is not None)
                gain[search.problem.families[leaf]] += made * flood.times(op, leaf)
    return gain


def _free(
    op: Op, flood: Propagation, atoms: Sequence[Axis], *, everywhere: bool, partly: bool = False
) -> set[DimFactor]:
    """The dims of what an op makes that may be cut over an axis and do not want it; `everywhere`: in all that it reads,
    too."""
    read = [i for i, value in enumerate(op.operands) if not value.constant]
    return free(op, flood, atoms, read if everywhere else None, partly=partly)
