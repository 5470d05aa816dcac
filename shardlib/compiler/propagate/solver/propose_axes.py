"""Offers a mesh axis to dims that no annotation shards over it, and keeps the offers that pay.

Every device along an axis repeats the ops that no annotation reaches. A chain of ops that each communicate may be
cheaper in a dim that all of them share: a stack of sharded matrices needs two exchanges, and no message between them.
Such dims are offered the axis one by one. An offer stands if the estimate of the whole program gets markedly shorter.
So are the dims of a large partial sum that a few ops turn into little: a device reduces its shard and goes on with it.

Where annotations contradict each other about an axis, dims beside messages are offered it, too: for fewer bytes.
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
    """Offers axes to dims that no annotation shards, and keeps the offers that pay; returns whether any did.

    `first` is the state of `search` before units were taken apart: every trial begins there.
    """
    propagation = search.problem.propagation
    used = {want.axis.name for requests in propagation.requests.values() for want in requests}
    for name in search.problem.mesh.axis_names:
        if name in used and not search.effort.stops():
            kept = search.state
            better = _Offers(search, name, kept, first).better()
            search.state = kept
            if better:
                search.state = first = _best(search, better)
    return bool(search.offers)


class _Offers:
    """The offers of one axis: the dims that are worth a trial, and the states that are `better` than `kept`."""

    def __init__(self, search: Search, name: str, kept: State, first: State) -> None:
        self.search, self.name, self.kept, self.first = search, name, kept, first
        graph, propagation = search.problem.graph, search.problem.propagation
        weights, self.light = _weights(graph, search.problem)
        mixing = dict.fromkeys([*weights, *(op for op in graph.ops if _is_plain(op) and propagation.whole.get(op))])
        self.summed = _summed(weights, search, name)
        few = graph.size <= _DEEP and not any(_has_choices(op) for op in graph.ops)
        self.deep = few and name in search.allowed.contested
        self.eased = _eased(search, name) if self.deep else []
        self.candidates = [*_candidates(weights, search, name), *_beside(mixing, search, name), *self.summed]

    def better(self) -> list[State]:
        """The states with one offer that pays."""
        search, better, near = self.search, list[State](), list[State]()
        for leaf in dict.fromkeys([*self.candidates, *self.eased]):
            if search.effort.stops():
                break
            self._begin(leaf)
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

    def _begin(self, leaf: DimFactor) -> None:
        """Offers the axis to a dim, and lets every variable that has the dim take it."""
        search, offer = self.search, (leaf, self.name)
        search.state = replace(self.first, offers=self.kept.offers | {offer})
        search.settle(search.problem.groups)
        search.take(offer, search.problem.groups)

    def _is_worth(self, leaf: DimFactor) -> bool:
        search, summed = self.search, leaf in self.summed
        tried = leaf in self.candidates
        return tried and _is_better(search, search.state, self.kept, self.light, summed=summed)

    def _is_near(self) -> bool:
        return self.deep and _spares(self.search, self.search.state, self.first)


def _best(search: Search, states: Sequence[State]) -> State:
    """Returns, of the states about as fast as the fastest, the first that sends least."""
    whole = [search.estimate.whole(state.choices) for state in states]
    fastest = min(map(sum, whole))
    near = [i for i, seconds in enumerate(whole) if sum(seconds) <= fastest * TIE]
    return states[min(near, key=lambda i: tuple(map(grained, whole[i][::-1])))]


def _is_better(search: Search, trial: State, before: State, light: bool, summed: bool) -> bool:
    """Returns whether an offer is worth it: markedly faster, and twice as fast if markedly more is sent; where ops are
    light, nothing more may be sent, and where shards of sums are offered (`summed`), it must be markedly less."""
    if light and _bytes(search, trial) > _bytes(search, before):
        return False
    (work, sent), (work_before, sent_before) = (search.estimate.whole(state.choices) for state in (trial, before))
    if summed and sent > sent_before * _WORTH:
        return False
    more = sent > sent_before * TIE or _bytes(search, trial) > _bytes(search, before) * TIE
    share = _WORTH_MORE if more else _WORTH
    return work + sent < (work_before + sent_before) * share


def _spares(search: Search, trial: State, before: State) -> bool:
    """Returns whether an offer sends markedly less, in no more messages unless it is half, and takes no longer."""
    (work, sent), (work_before, sent_before) = (search.estimate.whole(state.choices) for state in (trial, before))
    faster = work + sent <= work_before + sent_before and work <= work_before
    return faster and _less(search, trial, before, _HALF)


def _less(search: Search, trial: State, before: State, share: float) -> bool:
    """Returns whether an offer sends markedly less, in no more messages unless it is such a share of it."""
    few, many = _bytes(search, trial), _bytes(search, before)
    latency, waited = (search.estimate.whole(s.choices)[1] - n for s, n in ((trial, few), (before, many)))
    return few <= many * (_WORTH if grained(latency) <= grained(waited) else share)


def _bytes(search: Search, state: State) -> float:
    """Returns the seconds of all sent bytes, without latency."""
    return search.of_bytes.whole(state.choices)[1]


def _weights(graph: Graph, problem: Problem) -> tuple[dict[Op, float], bool]:
    """Returns the weights of the ops that matter, and whether all ops are light.

    The weight is an op's arithmetic, or its time where no op has much arithmetic. Attention has choices of its own.
    """
    ops = [op for op in graph.ops if op.rule is not None and not (op.constant or op.transparent)]
    alone = {op for op in ops if _has_choices(op)}
    heavy = {op: float(op.rule.flops) for op in ops if op.rule is not None and op not in alone and _is_heavy(op)}
    if heavy or alone or any(op.manual for op in graph.ops):
        return heavy, False
    return {op: work(op, problem.prices) for op in ops}, True


def _has_choices(op: Op) -> bool:
    """Returns whether an op has choices of its own, as attention."""
    return op.rule is not None and bool(op.rule.ties.ring or op.rule.ties.lends)


def _is_plain(op: Op) -> bool:
    """Returns whether an op does something, in one way: what splits a tensor takes nothing together."""
    return not (op.constant or op.transparent or op.manual or is_view(op.target) or _has_choices(op))


def _is_heavy(op: Op) -> bool:
    elements = sum(v.nbytes // max(v.dtype.itemsize, 1) for v in (*op.operands, *op.results) if v is not None)
    return op.rule is not None and op.rule.flops > _HEAVY * elements


def _candidates(weights: Mapping[Op, float], search: Search, name: str) -> list[DimFactor]:
    """Returns the dims which would take most of what is done alike along an axis, or that communicates."""
    problem, gain = search.problem, defaultdict[DimFactor, float](float)
    propagation, units, atoms = problem.propagation, problem.units.unit, problem.atoms[name]
    for op, weight in weights.items():
        if op not in units:
            continue
        used = {a for axes in search.cut(op) for a in axes}
        idle = [a for a in atoms if a not in used]
        if idle or _sent_around(search, op):
            for leaf in _free(op, propagation, idle or atoms, everywhere=not idle):
                gain[problem.families[leaf]] += weight * propagation.times(op, leaf)
    most = _first(gain)[:_TRIED]
    found = [leaf for leaf in most if gain[leaf] >= _SHARE * sum(w * op.times for op, w in weights.items())]
    return list(dict.fromkeys([*found, *_first(_beside_selections(search, atoms))[:1]]))


def _sent_around(search: Search, op: Op) -> float:
    """Returns the seconds of the messages inside an op's unit, and of the reshards of its operands and results."""
    kind = search.problem.kind.get(search.problem.units.unit[op])
    return 0.0 if kind is None else search.estimate.around(search.problem.group_of[kind], search.choices)


def _eased(search: Search, name: str) -> list[DimFactor]:
    """The dims beside most of what is sent: where they are cut over the axis from end to end, it need not be."""
    problem, gain, part = search.problem, defaultdict[DimFactor, float](float), defaultdict[DimFactor, float](float)
    beside: dict[Variable, dict[DimFactor, None]] = defaultdict(dict)
    propagation, atoms = problem.propagation, problem.atoms[name]
    at_home = _returned(problem.graph, propagation, atoms)
    for op in problem.graph.ops:
        unit = problem.units.unit.get(op)
        if unit not in problem.kind or op.rule is None or op.constant or op.transparent:
            continue
        for leaf in sorted(_free(op, propagation, atoms, everywhere=False) - at_home):
            beside[problem.group_of[problem.kind[unit]]][problem.families[leaf]] = None
            part[problem.families[leaf]] += work(op, problem.prices)
    for group, leaves in beside.items():
        sent = search.estimate.around(group, search.choices)
        for leaf in leaves if sent else ():
            gain[leaf] += sent
    return sorted(gain, key=lambda leaf: (-grained(gain[leaf]), -grained(part[leaf]), leaf))[:_TRIED]


def _returned(graph: Graph, propagation: Propagation, atoms: Sequence[Axis]) -> set[DimFactor]:
    """The dims of results of which another requests the axis: there, nobody looks for them elsewhere."""
    found = set[DimFactor]()
    for value in graph.outputs:
        if isinstance(value, Value) and not value.constant:
            leaves = propagation.leaves(value)
            if any(want.axis in atoms for leaf in leaves for want in propagation.requests.get(leaf, ())):
                found.update(leaves)
    return found


def _first(gain: Mapping[DimFactor, float]) -> list[DimFactor]:
    return sorted(gain, key=lambda leaf: (-gain[leaf], leaf))


def _beside(ops: Collection[Op], search: Search, name: str) -> list[DimFactor]:
    """Returns the dims beside messages that take long enough to matter."""
    gain = beside_moves(ops, search, search.problem.atoms[name])
    least = (1 - _WORTH) * sum(search.estimate.whole(search.choices)) if gain else 0.0
    return [leaf for leaf in _first(gain)[:_BESIDE] if gain[leaf] >= least]


def _summed(weights: Mapping[Op, float], search: Search, name: str) -> list[DimFactor]:
    """Returns the dim that would share out most of the partial sums of which little is made, if these take long enough
    to matter."""
    problem, gain = search.problem, defaultdict[DimFactor, float](float)
    propagation, units, atoms, prices = problem.propagation, problem.units, problem.atoms[name], problem.prices
    for op in weights:
        if op not in units.unit or op.rule is None or "sum" not in op.rule.reduce.values():
            continue
        cuts, slots = search.cut(op), units.op_slots[op].items()
        summed = dict.fromkeys(a for (f, _), s in slots if op.rule.partial_kind(0, f) == "sum" for a in cuts[s])
        if not summed.keys().isdisjoint(atoms) and _is_used_up(op):
            ways = math.prod(a.size for (f, _), s in slots if op.rule.partial_kind(0, f) != "sum" for a in cuts[s])
            nbytes = sum(r.nbytes for r in op.results if r is not None) / ways
            for leaf in _free(op, propagation, atoms, everywhere=False):
                gain[problem.families[leaf]] += prices.comm_seconds(tuple(summed), 2 * nbytes) * propagation.times(
                    op, leaf
                )
    least = (1 - _WORTH) * sum(search.estimate.whole(search.choices)) if gain else 0.0
    return [leaf for leaf in _first(gain)[:1] if gain[leaf] >= least]


def _is_used_up(op: Op) -> bool:
    """Returns whether somebody needs the sum that an op owes, and a few ops make little of it, heavy ones at once (a
    product of scores and values): who adds up a piece can then do all of these on the piece."""
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
    """Returns the dims beside a sharded one of which ops take single elements, each by a sum over the devices. Sharded
    there instead, no message is needed."""
    gain, propagation = defaultdict[DimFactor, float](float), search.problem.propagation
    for op, slots in search.problem.units.op_slots.items():
        if op.rule is None or not op.rule.gathers:
            continue
        taken = [leaf for f, k in slots if f in op.rule.gathers and not k for leaf in propagation.labels[op][f]]
        if any(want.axis in atoms for leaf in taken for want in propagation.requests.get(leaf, ())):
            for leaf in _free(op, propagation, atoms, everywhere=True):
                made = sum(r.nbytes for r in op.results if r is not None)
                gain[search.problem.families[leaf]] += made * propagation.times(op, leaf)
    return gain


def _free(op: Op, propagation: Propagation, atoms: Sequence[Axis], *, everywhere: bool) -> set[DimFactor]:
    """Returns the dims of an op's results that may be sharded over an axis and do not request it; with `everywhere`,
    those that all its operands have, too."""
    read = [i for i, value in enumerate(op.operands) if not value.constant]
    return free(op, propagation, atoms, read if everywhere else None)
