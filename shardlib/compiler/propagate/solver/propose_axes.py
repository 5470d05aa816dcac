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
from typing import TypeVar

from shardlib.compiler.graph.ir import Graph, Op, Value
from shardlib.compiler.propagate.decision_units import Unit, build_units
from shardlib.compiler.propagate.dim_factors import Leaf
from shardlib.compiler.propagate.propagation import Flood, Want
from shardlib.compiler.propagate.solver.cost import Estimate, grained
from shardlib.compiler.propagate.solver.deferred_sums import unpaid
from shardlib.compiler.propagate.solver.problem import work
from shardlib.compiler.propagate.solver.propose_near_moves import SMALL, beside_moves, free
from shardlib.compiler.propagate.solver.refine import DEEP, refine
from shardlib.compiler.propagate.solver.search import TIE, Decider
from shardlib.core.aten.op_traits import is_view
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.mesh.mesh import Mesh

_SOURCE = "an offer: nothing else would use it there"
_WORTH = 0.95  # of the estimated time is the most that a program with an offer may take,
_WORTH_MORE = 0.5  # or this, where it sends markedly more
_HALF = 0.5  # of the bytes is worth more messages
_SHARE = 0.2  # of the work of all ops, in which a dim must take part
_TRIED = 3  # dims for each axis
_BESIDE = 2  # and those beside what moves
T = TypeVar("T")
Way = tuple[Decider, dict[Leaf, list[Want]]]
_SOON = 16  # ops in which little is made of a sum, or it is not looked at further
_HEAVY = 8  # operations for every element that an op reads or makes: others do not matter beside such


def offered(graph: Graph, flood: Flood, mesh: Mesh, first: Decider, decider: Decider) -> Decider:
    """`decider`, or a better one with offers among the wants of `flood`; `first` is what it was before units parted."""
    used = {want.axis.name for wants in flood.wants.values() for want in wants}
    weights, light = _weights(graph, decider)
    mixing = dict.fromkeys([*weights, *(op for op in graph.ops if _is_plain(op) and flood.whole.get(op))])
    few = graph.size <= DEEP and not any(_has_choices(op) for op in graph.ops)
    for name in mesh.axis_names:
        if name not in used:
            continue
        wants, found, near = flood.wants, list[Way](), list[Way]()
        deep = few and name in decider.contested
        summed = _summed(weights, flood, mesh, decider, name)
        moved = _beside(graph, mixing, flood, mesh, decider, name)
        idle = [*_candidates(weights, flood, mesh, decider, name), *moved, *summed]
        parts = dict.fromkeys(_candidates(weights, flood, mesh, decider, name, partly=True), _HALF)
        turned = _across(weights, flood, mesh, decider, name)
        fewer = dict.fromkeys(turned, 0.0) | parts
        fewer = {leaf: share for leaf, share in fewer.items() if leaf not in idle}
        leaves = dict.fromkeys([*idle, *fewer, *(_eased(graph, flood, mesh, decider, name) if deep else ())])
        for leaf, place in [*((leaf, None) for leaf in leaves), *turned.items()]:
            mine = wants.get(leaf, [])
            more = [a for a in mesh.axis(name).primes() if all(want.axis != a for want in mine)]
            tried = flood.wants = wants | {leaf: [*mine, *(Want(a, _SOURCE, True) for a in more)]}
            if place is not None:  # in its place
                tried[place] = [want for want in tried[place] if want.axis not in mesh.axis(name).primes()]
            trial = Decider(graph, flood, build_units(graph, flood), mesh)
            enough = _less(trial, decider, fewer[leaf]) if leaf in fewer else leaf in idle
            is_better = enough and _better(trial, decider, light, summed=leaf in summed)
            if is_better and _lasts(graph, trial, decider):
                found.append((trial, tried))
            elif deep and _spares(trial, first):
                near.append((trial, tried))
        if near:
            trial, tried = best(near)
            flood.wants = tried
            trial = refine(graph, flood, mesh, trial)
            found += [(trial, tried)] if _spares(trial, decider) else []
        decider, flood.wants = best(found) if found else (decider, wants)
    return decider


def best(ways: Sequence[tuple[Decider, T]]) -> tuple[Decider, T]:
    """Of those that are about as fast as the fastest, that which sends least; the first where several do."""
    fastest = min(sum(_whole(decider)) for decider, _ in ways)
    near = [way for way in ways if sum(_whole(way[0])) <= fastest * TIE]
    return min(near, key=lambda way: tuple(map(grained, _whole(way[0])[::-1])))


def _better(trial: Decider, decider: Decider, light: bool, summed: bool) -> bool:
    """Whether an offer is worth it: markedly faster, and twice as fast if markedly more is sent; where ops are light,
    nothing more may be sent, and where pieces of sums are offered (`summed`), it must be markedly less."""
    if light and _bytes(trial) > _bytes(decider):
        return False
    (work, sent), (work_before, sent_before) = _whole(trial), _whole(decider)
    if summed and sent > sent_before * _WORTH:
        return False
    more = sent > sent_before * TIE or _bytes(trial) > _bytes(decider) * TIE
    share = _WORTH_MORE if more else _WORTH
    return work + sent < (work_before + sent_before) * share


def _lasts(graph: Graph, trial: Decider, decider: Decider) -> bool:
    """Whether an offer is still faster where sums that go on are paid as what they become."""
    now, before = (sum(_whole(x)) - unpaid(graph, x) for x in (trial, decider))
    return now < before * _WORTH


def _spares(trial: Decider, decider: Decider) -> bool:
    """Whether an offer sends markedly less, in no more messages unless it is half of it, and takes no longer."""
    (work, seconds, *_), (more, before, *_) = map(_figures, (trial, decider))
    return seconds <= before and work <= more and _less(trial, decider, _HALF)


def _less(trial: Decider, decider: Decider, share: float) -> bool:
    """Whether an offer sends markedly less, in no more messages unless it is such a share of it."""
    (*_, few, latency), (*_, many, waited) = map(_figures, (trial, decider))
    return few <= many * (_WORTH if grained(latency) <= grained(waited) else share)


def _figures(decider: Decider) -> tuple[float, float, float, float]:
    """Seconds of arithmetic, of all, of the bytes that are sent, and of the latency of messages."""
    work, sent = _whole(decider)
    few = _bytes(decider)
    return work, work + sent, few, sent - few


def _bytes(decider: Decider) -> float:
    """Seconds that the bytes take which are sent."""
    return Estimate(decider.problem, of_bytes=True).whole(decider.choices)[1]


def _whole(decider: Decider) -> tuple[float, float]:
    return decider.estimate.whole(decider.choices)


def _weights(graph: Graph, decider: Decider) -> tuple[dict[Op, float], bool]:
    """The ops that matter: by their arithmetic, or by their time where none has much, which then are light. Attention
    has its own choices."""
    ops = [op for op in graph.ops if op.rule is not None and not (op.constant or op.transparent)]
    alone = {op for op in ops if _has_choices(op)}
    heavy = {op: float(op.rule.flops) for op in ops if op.rule is not None and op not in alone and _is_heavy(op)}
    if heavy or alone or any(op.manual for op in graph.ops):
        return heavy, False
    return {op: work(op, decider.problem.prices) for op in ops}, True


def _has_choices(op: Op) -> bool:
    """Whether an op has choices of its own, as attention."""
    return op.rule is not None and bool(op.rule.rounds or op.rule.lends)


def _is_plain(op: Op) -> bool:
    """Whether an op does something, in one way: what splits a tensor takes nothing together."""
    return not (op.constant or op.transparent or op.manual or is_view(op.target) or _has_choices(op))


def _is_heavy(op: Op) -> bool:
    elements = sum(v.nbytes // max(v.dtype.itemsize, 1) for v in (*op.operands, *op.results) if v is not None)
    return op.rule is not None and op.rule.flops > _HEAVY * elements


def _candidates(
    weights: Mapping[Op, float], flood: Flood, mesh: Mesh, decider: Decider, name: str, *, partly: bool = False
) -> list[Leaf]:
    """The dims which would take most of what is done alike along an axis, or that communicates; with those among the
    latter that could take a part of the axis, if `partly`."""
    atoms, gain = mesh.axis(name).primes(), defaultdict[Leaf, float](float)
    for op, weight in weights.items():
        unit = decider.units.unit.get(op)
        if unit is None:
            continue
        used = {a for axes in decider.unit_cut(unit) for a in axes}
        idle = [a for a in atoms if a not in used]
        moves = (
            unit in decider.problem.kind and decider.estimate.around(decider.problem.kind[unit], decider.choices) > 0
        )
        if idle or moves:
            for leaf in _free(op, flood, idle or atoms, everywhere=not idle, partly=partly and not idle):
                gain[leaf] += weight * flood.times(op, leaf)
    most = _first(gain)[:_TRIED]
    found = [leaf for leaf in most if gain[leaf] >= _SHARE * sum(w * op.times for op, w in weights.items())]
    return list(dict.fromkeys([*found, *_first(_beside_selections(flood, decider, atoms))[:1]]))


def _across(weights: Mapping[Op, float], flood: Flood, mesh: Mesh, decider: Decider, name: str) -> dict[Leaf, Leaf]:
    """The dim beside most of what is made of a matrix and itself, turned round, with the dim that it has twice: of two
    dims of one class only one can be cut, and then the other moves, in each op anew."""
    atoms, gain = mesh.axis(name).primes(), defaultdict[Leaf, float](float)
    twice = dict[Leaf, Leaf]()
    for op, weight in weights.items():
        leaves = [leaf for of in flood.labels[op].values() for leaf in of]
        wanting = [x for x in leaves if any(want.axis in atoms for want in flood.wants.get(x, ()))]
        for leaf in _free(op, flood, atoms, everywhere=False) if len({*wanting}) < len(wanting) else ():
            gain[leaf] += weight * flood.times(op, leaf)
            twice.setdefault(leaf, next(x for x in wanting if wanting.count(x) > 1))
    return {leaf: twice[leaf] for leaf in _first(gain)[:1]}


def _eased(graph: Graph, flood: Flood, mesh: Mesh, decider: Decider, name: str) -> list[Leaf]:
    """The dims beside most of what is sent: where they are cut over the axis from end to end, it need not be."""
    atoms, gain, part = mesh.axis(name).primes(), defaultdict[Leaf, float](float), defaultdict[Leaf, float](float)
    beside: dict[Unit, dict[Leaf, None]] = defaultdict(dict)
    at_home = _returned(graph, flood, atoms)
    for op in graph.ops:
        unit = decider.units.unit.get(op)
        if unit in decider.problem.kind and op.rule is not None and not (op.constant or op.transparent):
            for leaf in sorted(_free(op, flood, atoms, everywhere=False) - at_home):
                beside[unit][leaf] = None
                part[leaf] += work(op, decider.problem.prices)
    for unit, leaves in beside.items():
        sent = decider.estimate.around(decider.problem.kind[unit], decider.choices)
        for leaf in leaves if sent else ():
            gain[leaf] += sent
    return sorted(gain, key=lambda leaf: (-grained(gain[leaf]), -grained(part[leaf]), leaf))[:_TRIED]


def _returned(graph: Graph, flood: Flood, atoms: Sequence[Axis]) -> set[Leaf]:
    """The dims of results of which another wants the axis: there, nobody looks for them elsewhere."""
    found = set[Leaf]()
    for value in graph.outputs:
        if isinstance(value, Value) and not value.constant:
            leaves = flood.leaves(value)
            if any(want.axis in atoms for leaf in leaves for want in flood.wants.get(leaf, ())):
                found.update(leaves)
    return found


def _first(gain: Mapping[Leaf, float]) -> list[Leaf]:
    return sorted(gain, key=lambda leaf: (-gain[leaf], leaf))


def _beside(graph: Graph, ops: Collection[Op], flood: Flood, mesh: Mesh, decider: Decider, name: str) -> list[Leaf]:
    """The dims beside what is sent, where that takes long enough to matter."""
    gain = beside_moves(graph, ops, flood, decider, mesh.axis(name).primes())
    least = (1 - _WORTH) * sum(_whole(decider)) if gain else 0.0
    return [leaf for leaf in _first(gain)[:_BESIDE] if gain[leaf] >= least]


def _summed(weights: Mapping[Op, float], flood: Flood, mesh: Mesh, decider: Decider, name: str) -> list[Leaf]:
    """The dim which would share out most of sums over devices that little is made of, where nobody else has it, and
    where these take long enough to matter."""
    atoms, gain, prices = mesh.axis(name).primes(), defaultdict[Leaf, float](float), decider.problem.prices
    for op in weights:
        unit = decider.units.unit.get(op)
        if unit is None or op.rule is None or "sum" not in op.rule.reduce.values():
            continue
        cuts, slots = decider.unit_cut(unit), decider.units.op_slots[op].items()
        summed = dict.fromkeys(a for (f, _), s in slots if op.rule.owed(0, f) == "sum" for a in cuts[s])
        if not summed.keys().isdisjoint(atoms) and _is_used_up(op):
            ways = math.prod(a.size for (f, _), s in slots if op.rule.owed(0, f) != "sum" for a in cuts[s])
            nbytes = sum(r.nbytes for r in op.results if r is not None) / ways
            for leaf in _free(op, flood, atoms, everywhere=False):
                gain[leaf] += prices.sent(tuple(summed), 2 * nbytes) * flood.times(op, leaf)
    least = (1 - _WORTH) * sum(_whole(decider)) if gain else 0.0
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


def _beside_selections(flood: Flood, decider: Decider, atoms: Sequence[Axis]) -> Mapping[Leaf, float]:
    """The dims beside one that is cut and of which single elements are taken, each by a sum over the devices: cut there
    instead, nothing is sent for them."""
    gain = defaultdict[Leaf, float](float)
    for op, slots in decider.units.op_slots.items():
        if op.rule is None or not op.rule.gathers:
            continue
        taken = [leaf for f, k in slots if f in op.rule.gathers and not k for leaf in flood.labels[op][f]]
        if any(want.axis in atoms for leaf in taken for want in flood.wants.get(leaf, ())):
            for leaf in _free(op, flood, atoms, everywhere=True):
                gain[leaf] += sum(r.nbytes for r in op.results if r is not None) * flood.times(op, leaf)
    return gain


def _free(op: Op, flood: Flood, atoms: Sequence[Axis], *, everywhere: bool, partly: bool = False) -> set[Leaf]:
    """The dims of what an op makes that may be cut over an axis and do not want it; `everywhere`: in all that it reads,
    too."""
    read = [i for i, value in enumerate(op.operands) if not value.constant]
    return free(op, flood, atoms, read if everywhere else None, partly=partly)
