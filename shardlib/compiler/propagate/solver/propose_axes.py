"""Offers a mesh axis to dims that no annotation shards over it, and keeps the offers that pay.

Every device along an axis repeats the ops that no annotation reaches. A chain of ops that each communicate may be
cheaper in a dim that all of them share: a stack of sharded matrices needs two exchanges, and no message between them.
Such dims are offered the axis one by one. An offer stands if the estimate of the whole program gets markedly shorter.
The dims of a large partial sum are offered it, too, if a few ops reduce the sum to little: then each device reduces a
shard, and goes on with that.

If annotations contradict each other about an axis, dims of ops that communicate are offered it, too, for fewer bytes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from shardlib.compiler.graph.ir import Graph, Op, Value
from shardlib.compiler.propagate.dim_factors import DimFactor
from shardlib.compiler.propagate.propagation import Propagation
from shardlib.compiler.propagate.solver.bucket_elimination import round_to_grain
from shardlib.compiler.propagate.solver.domains import Variable
from shardlib.compiler.propagate.solver.problem import Problem, estimate_work
from shardlib.compiler.propagate.solver.propose_near_moves import SMALL, find_free_dims, rate_dims_near_reshards
from shardlib.compiler.propagate.solver.search import TIE, Search, SearchState, pick_least_sent
from shardlib.compiler.propagate.solver.split_units import split_units
from shardlib.core.aten.op_traits import is_view
from shardlib.sharding.mesh.axis import Axis

# The most that a program with an offer may take of the estimated time; and if it sends markedly more.
_WORTH, _WORTH_MORE = 0.95, 0.5
_HALF = 0.5  # the share of the bytes that is worth more messages
_SHARE = 0.2  # the least share of all work in ops with a dim that is tried
_TRIED = 3  # dims for each axis
_NEAR = 2  # and dims of ops near reshards
_DEEP = 128  # ops: larger programs are not searched for dims that would save bytes
_SOON = 16  # ops, after which a sum must have become little
_HEAVY = 8  # operations per element that an op reads or writes: lighter ops hardly matter beside such


def offer_axes(search: Search, first: SearchState) -> bool:
    """Offers axes to dims that no annotation shards, and keeps the offers that pay; returns whether any did.

    `first` is the state of `search` before units were taken apart: every trial begins there.
    """
    propagation = search.problem.propagation
    used = {request.axis.name for requests in propagation.requests.values() for request in requests}
    for name in search.problem.mesh.axis_names:
        if name in used and not search.effort.stops():
            kept = search.state
            better = _Offers(search, name, kept, first).better()
            search.state = kept
            if better:
                search.state = first = _best(search, better)
    return bool(search.offers)


class _Offers:
    """Tries to offer one axis to the dims that are worth it; compares with the state `kept`."""

    def __init__(self, search: Search, name: str, kept: SearchState, first: SearchState) -> None:
        self.search, self.name, self.kept, self.first = search, name, kept, first
        graph, propagation = search.problem.graph, search.problem.propagation
        weights, self.light = _weights(graph, search.problem)
        mixing = dict.fromkeys([*weights, *(op for op in graph.ops if _is_plain(op) and propagation.whole.get(op))])
        self.summed = _summed(weights, search, name)
        few = graph.size <= _DEEP and not any(_has_choices(op) for op in graph.ops)
        self.deep = few and name in search.allowed.contested
        self.eased = _eased(search, name) if self.deep else []
        self.candidates = [*_candidates(weights, search, name), *_near_reshards(mixing, search, name), *self.summed]

    def better(self) -> list[SearchState]:
        """Returns the states with one offer that pays."""
        search, better, near = self.search, list[SearchState](), list[SearchState]()
        for dim_factor in dict.fromkeys([*self.candidates, *self.eased]):
            if search.effort.stops():
                break
            self._begin(dim_factor)
            start = search.state
            with search.optimistic():  # the messages inside ops take long to work out
                search.minimize(search.domains(search.problem.groups))
                if not (self._is_worth(dim_factor) or self._is_near()):
                    continue
            search.state = start
            search.minimize(search.domains(search.problem.groups))
            if self._is_worth(dim_factor):
                better.append(search.state)
            elif self._is_near():
                near.append(search.state)
        if near:
            search.state = _best(search, near)
            split_units(search)
            better += [search.state] if _sends_less(search, search.state, self.kept) else []
        return better

    def _begin(self, dim_factor: DimFactor) -> None:
        """Begins anew with one more offer, which every variable with the dim takes."""
        search, offer = self.search, (dim_factor, self.name)
        search.state = replace(self.first, offers=self.kept.offers | {offer})
        search.settle(search.problem.groups)
        search.take(offer, search.problem.groups)

    def _is_worth(self, dim_factor: DimFactor) -> bool:
        search, summed = self.search, dim_factor in self.summed
        tried = dim_factor in self.candidates
        return tried and _is_better(search, search.state, self.kept, self.light, summed=summed)

    def _is_near(self) -> bool:
        return self.deep and _sends_less(self.search, self.search.state, self.first)


def _best(search: Search, states: Sequence[SearchState]) -> SearchState:
    return states[pick_least_sent([search.estimate.program_seconds(state.choices) for state in states])]


def _is_better(search: Search, trial: SearchState, before: SearchState, light: bool, summed: bool) -> bool:
    """Returns whether an offer makes the program markedly faster; twice as fast if it sends markedly more.

    If all ops are `light`, it may not send more; an offer for partial sums (`summed`) must send markedly less.
    """
    if light and _bytes(search, trial) > _bytes(search, before):
        return False
    work, sent = search.estimate.program_seconds(trial.choices)
    work_before, sent_before = search.estimate.program_seconds(before.choices)
    if summed and sent > sent_before * _WORTH:
        return False
    more = sent > sent_before * TIE or _bytes(search, trial) > _bytes(search, before) * TIE
    share = _WORTH_MORE if more else _WORTH
    return work + sent < (work_before + sent_before) * share


def _sends_less(search: Search, trial: SearchState, before: SearchState) -> bool:
    """Returns whether an offer sends markedly less, in no more messages unless it is half, and takes no longer."""
    work, sent = search.estimate.program_seconds(trial.choices)
    work_before, sent_before = search.estimate.program_seconds(before.choices)
    faster = work + sent <= work_before + sent_before and work <= work_before
    return faster and _less(search, trial, before, _HALF)


def _less(search: Search, trial: SearchState, before: SearchState, share: float) -> bool:
    """Returns whether an offer sends markedly less; with more messages, at most this share of the bytes."""
    few, many = _bytes(search, trial), _bytes(search, before)
    latency, waited = (search.estimate.program_seconds(s.choices)[1] - n for s, n in ((trial, few), (before, many)))
    return few <= many * (_WORTH if round_to_grain(latency) <= round_to_grain(waited) else share)


def _bytes(search: Search, state: SearchState) -> float:
    """Returns the seconds of all sent bytes, without latency."""
    return search.of_bytes.program_seconds(state.choices)[1]


def _weights(graph: Graph, problem: Problem) -> tuple[dict[Op, float], bool]:
    """Returns the weights of the ops that matter, and whether all ops are light.

    The weight is an op's arithmetic, or its time where no op has much arithmetic. Attention has choices of its own.
    """
    ops = [op for op in graph.ops if op.rule is not None and not (op.constant or op.transparent)]
    alone = {op for op in ops if _has_choices(op)}
    heavy = {op: float(op.rule.flops) for op in ops if op.rule is not None and op not in alone and _is_heavy(op)}
    if heavy or alone or any(op.manual for op in graph.ops):
        return heavy, False
    return {op: estimate_work(op, problem.prices) for op in ops}, True


def _has_choices(op: Op) -> bool:
    """Returns whether an op has choices of its own, as attention."""
    return op.rule is not None and bool(op.rule.ties.ring or op.rule.ties.lends)


def _is_plain(op: Op) -> bool:
    """Returns whether an op computes something, without choices of its own."""
    return not (op.constant or op.transparent or op.manual or is_view(op.target) or _has_choices(op))


def _is_heavy(op: Op) -> bool:
    elements = sum(v.nbytes // max(v.dtype.itemsize, 1) for v in (*op.operands, *op.results) if v is not None)
    return op.rule is not None and op.rule.flops > _HEAVY * elements


def _candidates(weights: Mapping[Op, float], search: Search, name: str) -> list[DimFactor]:
    """Returns the dims with most of the work that devices along an axis repeat, or that communicates."""
    problem, gain = search.problem, defaultdict[DimFactor, float](float)
    propagation, units, atoms = problem.propagation, problem.units.unit, problem.atoms[name]
    for op, weight in weights.items():
        if op not in units:
            continue
        used = {a for axes in search.slot_axes(op) for a in axes}
        idle = [a for a in atoms if a not in used]
        if idle or _sent_around(search, op):
            for dim_factor in _free(op, propagation, idle or atoms, everywhere=not idle):
                gain[problem.families[dim_factor]] += weight * propagation.times(op, dim_factor)
    most = _first(gain)[:_TRIED]
    worth = [
        dim_factor for dim_factor in most if gain[dim_factor] >= _SHARE * sum(w * op.times for op, w in weights.items())
    ]
    return list(dict.fromkeys([*worth, *_first(_beside_selections(search, atoms))[:1]]))


def _sent_around(search: Search, op: Op) -> float:
    """Returns the seconds of the messages inside an op's unit, and of the reshards of its operands and results."""
    unit_class = search.problem.class_of.get(search.problem.units.unit[op])
    return 0.0 if unit_class is None else search.estimate.around(search.problem.group_of[unit_class], search.choices)


def _eased(search: Search, name: str) -> list[DimFactor]:
    """Returns the dims of units with the costliest messages: sharded there instead, these might not communicate."""
    problem, gain, part = search.problem, defaultdict[DimFactor, float](float), defaultdict[DimFactor, float](float)
    dims_of: dict[Variable, dict[DimFactor, None]] = defaultdict(dict)
    propagation, atoms = problem.propagation, problem.atoms[name]
    returned = _returned(problem.graph, propagation, atoms)
    for op in problem.graph.ops:
        unit = problem.units.unit.get(op)
        if unit not in problem.class_of or op.rule is None or op.constant or op.transparent:
            continue
        for dim_factor in sorted(_free(op, propagation, atoms, everywhere=False) - returned):
            dims_of[problem.group_of[problem.class_of[unit]]][problem.families[dim_factor]] = None
            part[problem.families[dim_factor]] += estimate_work(op, problem.prices)
    for group, dim_factors in dims_of.items():
        sent = search.estimate.around(group, search.choices)
        for dim_factor in dim_factors if sent else ():
            gain[dim_factor] += sent
    return sorted(
        gain, key=lambda dim_factor: (-round_to_grain(gain[dim_factor]), -round_to_grain(part[dim_factor]), dim_factor)
    )[:_TRIED]


def _returned(graph: Graph, propagation: Propagation, atoms: Sequence[Axis]) -> set[DimFactor]:
    """Returns the dims of results that have another dim which requests the axis."""
    dims = set[DimFactor]()
    for value in graph.outputs:
        if isinstance(value, Value) and not value.constant:
            dim_factors = propagation.dim_factors(value)
            if any(
                request.axis in atoms
                for dim_factor in dim_factors
                for request in propagation.requests.get(dim_factor, ())
            ):
                dims.update(dim_factors)
    return dims


def _first(gain: Mapping[DimFactor, float]) -> list[DimFactor]:
    return sorted(gain, key=lambda dim_factor: (-gain[dim_factor], dim_factor))


def _near_reshards(ops: Collection[Op], search: Search, name: str) -> list[DimFactor]:
    """Returns the dims of ops near reshards that take long enough to matter."""
    gain = rate_dims_near_reshards(ops, search, search.problem.atoms[name])
    least = (1 - _WORTH) * sum(search.estimate.program_seconds(search.choices)) if gain else 0.0
    return [dim_factor for dim_factor in _first(gain)[:_NEAR] if gain[dim_factor] >= least]


def _summed(weights: Mapping[Op, float], search: Search, name: str) -> list[DimFactor]:
    """Returns the dim that shards most of the partial sums that become little, if these take long enough to matter."""
    problem, gain = search.problem, defaultdict[DimFactor, float](float)
    propagation, units, atoms, prices = problem.propagation, problem.units, problem.atoms[name], problem.prices
    for op in weights:
        if op not in units.unit or op.rule is None or "sum" not in op.rule.reduce.values():
            continue
        slot_axes, slots = search.slot_axes(op), units.op_slots[op].items()
        summed = dict.fromkeys(a for (f, _), s in slots if op.rule.partial_kind(0, f) == "sum" for a in slot_axes[s])
        if not summed.keys().isdisjoint(atoms) and _is_used_up(op):
            ways = math.prod(a.size for (f, _), s in slots if op.rule.partial_kind(0, f) != "sum" for a in slot_axes[s])
            nbytes = sum(r.nbytes for r in op.results if r is not None) / ways
            for dim_factor in _free(op, propagation, atoms, everywhere=False):
                gain[problem.families[dim_factor]] += prices.comm_seconds(
                    tuple(summed), 2 * nbytes
                ) * propagation.times(op, dim_factor)
    least = (1 - _WORTH) * sum(search.estimate.program_seconds(search.choices)) if gain else 0.0
    return [dim_factor for dim_factor in _first(gain)[:1] if gain[dim_factor] >= least]


def _is_used_up(op: Op) -> bool:
    """Returns whether a few ops reduce an op's partial sum to little, a heavy op at once (scores times values).

    Then a device that reduces a shard of the sum can do all of these ops on the shard. False if no op needs the sum.
    """
    todo, seen, needed = [r for r in op.results if r is not None], set[Op](), False
    partial, most = {*todo}, max(r.nbytes for r in todo)
    while todo:
        value = todo.pop()
        if value.nbytes * SMALL < most:
            continue
        if value.is_output or len(seen) > _SOON:
            return False
        for reader, i in value.readers:
            results = [r for r in reader.results if r is not None]
            goes_on = _is_heavy(reader) and any(r.nbytes * SMALL >= most for r in results)
            if reader.rule is None or reader.manual or reader.constrains or goes_on:
                return False
            passes = value in partial and (reader.transparent or any(i in together for together in reader.rule.linear))
            needed |= value in partial and not passes
            partial.update(results if passes else ())
            todo += results if reader not in seen else ()
            seen.add(reader)
    return needed


def _beside_selections(search: Search, atoms: Sequence[Axis]) -> Mapping[DimFactor, float]:
    """Returns the other dims of ops that pick elements along a sharded dim by a sum over the devices.

    Sharded there instead, these ops need no message.
    """
    gain, propagation = defaultdict[DimFactor, float](float), search.problem.propagation
    for op, slots in search.problem.units.op_slots.items():
        if op.rule is None or not op.rule.gathers:
            continue
        taken = [
            dim_factor for f, k in slots if f in op.rule.gathers and not k for dim_factor in propagation.labels[op][f]
        ]
        if any(request.axis in atoms for dim_factor in taken for request in propagation.requests.get(dim_factor, ())):
            for dim_factor in _free(op, propagation, atoms, everywhere=True):
                nbytes = sum(r.nbytes for r in op.results if r is not None)
                gain[search.problem.families[dim_factor]] += nbytes * propagation.times(op, dim_factor)
    return gain


def _free(op: Op, propagation: Propagation, atoms: Sequence[Axis], *, everywhere: bool) -> set[DimFactor]:
    """Returns the dims of an op's results that may be sharded over an axis and do not request it; with `everywhere`,
    those that all its operands have, too."""
    read = [i for i, value in enumerate(op.operands) if not value.constant]
    return find_free_dims(op, propagation, atoms, read if everywhere else None)
