"""Annotations and rules -> one layout decision per op, with its reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from shardlib.compiler.graph.ir import Graph, Op, Value
from shardlib.compiler.propagate.decision_units import DecisionUnit, Units
from shardlib.compiler.propagate.fused_weights import Met
from shardlib.compiler.propagate.fused_weights import met as find_met
from shardlib.compiler.propagate.pinned import Key
from shardlib.compiler.propagate.propagate_axes import spread_annotations
from shardlib.compiler.propagate.propagation import Assignment, AxisRequest, Message, Propagation
from shardlib.compiler.propagate.relax_cuts import Loose, matter
from shardlib.compiler.propagate.solver.effort import Effort, Planning
from shardlib.compiler.propagate.solver.overlap import hidden
from shardlib.compiler.propagate.solver.problem import Order, Problem
from shardlib.compiler.propagate.solver.propose_axes import offer_axes
from shardlib.compiler.propagate.solver.search import Search, better
from shardlib.compiler.propagate.solver.take_apart import hide_messages, send_less, take_apart
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.placement import FixedLayout
from shardlib.sharding.reshard import FactorAxes

# Of the effort, the share that is spent at most when the first decision stands, and that in another problem; when units
# are parted and offers made; and when fewer bytes are sent.
_FIRST, _OTHER, _PARTED, _LESS = 0.4, 0.5, 0.7, 0.9
_OFFER = "an offer: nothing else would use it there"


@dataclass(frozen=True)
class Propagated:
    """The result: `propagation` has factors and requests, `units` choose together, and `search` has the decisions."""

    propagation: Propagation
    units: Units
    search: Search
    doors: Mapping[Op, FixedLayout]
    outputs: Mapping[int, FixedLayout]

    def unit_cut(self, unit: DecisionUnit) -> tuple[tuple[Axis, ...], ...]:
        """The mesh axes on each slot of `unit`, in prime parts."""
        return self.search.cut(unit.ops[0] if unit.ops else unit.values[0])

    def assignment(self, op: Op) -> Assignment:
        """The mesh axes over which each factor of `op` is cut."""
        cuts = self.search.cut(op)
        return {x: cuts[s] for x, s in self.units.op_slots[op].items() if cuts[s]}

    def given(self, value: Value) -> tuple[Value, FactorAxes]:
        """An input as it is given, and its cut."""
        given = self.propagation.apart.get(value, value)
        return given, self.propagation.fixed[given][0] if given in self.propagation.fixed else self.input_cut(value)

    def input_cut(self, value: Value) -> FactorAxes:
        """The cut of an input: as annotated, or as inferred."""
        if value in self.propagation.fixed:
            return self.propagation.fixed[value][0]
        if value not in self.units.unit:
            return ((),) * len(self.propagation.leaves(value))
        cuts = self.search.cut(value)
        return tuple(() if s is None else cuts[s] for s in self.units.value_slots[value])


def propagate(
    graph: Graph,
    mesh: Mesh,
    fixed: Mapping[Value, FixedLayout],
    outputs: Mapping[int, FixedLayout],
    doors: Mapping[Op, FixedLayout],
    sends: Callable[[Propagation, Op, Assignment], tuple[Message, ...]],
    planning: Planning = None,
) -> Propagated:
    """Decide every op's cut; `fixed`, `outputs` and `doors` hold the user's decisions.

    `sends` says what an op sends while it runs, if it is cut in some way.

    There is one problem, which is built once, and one search in it. Whole units choose first, then their ops alone;
    dims that nobody annotated are offered axes; messages that arithmetic can hide count less; and of two decisions that
    take about as long, the one that sends less stands. `planning` says how long that may take, as in `jit`.
    """
    effort = Effort.of(planning, len(graph.ops))
    effort.share = _FIRST

    def spread(loose: Loose, met: Met) -> Propagation:
        return spread_annotations(graph, fixed, outputs, doors, loose, met)

    def begin(propagation: Propagation, start: Callable[[Op | Value], Order] | None = None) -> Search:
        propagation.hidden, propagation.sends = hidden(graph, mesh), partial(sends, propagation)
        search = Search(Problem(graph, propagation, mesh), start, effort)
        search.minimize(search.domains(search.problem.groups))
        return search

    search = begin(spread({}, {}))
    effort.share = _OTHER
    if (met := find_met(search.problem.propagation, graph)) and not effort.stops():
        search = better(search, begin(spread({}, met)))
    now, loose = search.problem.propagation, dict[Key, frozenset[int]]()
    if now.tight and matter(now, graph) and not effort.stops():
        while now.tight.keys() - loose.keys():
            loose |= now.tight
            now = spread(loose, now.met)
        search = better(search, begin(now))
    first = search.state
    effort.share = _PARTED
    take_apart(search)
    if offer_axes(search, first):
        take_apart(search)
    effort.share = _LESS
    send_less(search)
    effort.share = 1.0
    hide_messages(search)
    return propagated(search, doors, outputs)


def propagated(search: Search, doors: Mapping[Op, FixedLayout], outputs: Mapping[int, FixedLayout]) -> Propagated:
    """The decisions of a search, with units whose parts choose alike."""
    problem = search.problem
    for leaf, name in search.offers:
        for member in [leaf for leaf, family in problem.families.items() if family == leaf]:
            requests = problem.propagation.requests.setdefault(member, [])
            requests += [
                AxisRequest(a, _OFFER, True) for a in problem.atoms[name] if all(want.axis != a for want in requests)
            ]

    def part(member: Op | Value) -> object:
        kind = problem.kind.get(problem.units.unit[member])
        return None if kind is None else search.choices[kind]

    units = problem.coarse.apart(part) if len(search.variables()) > len(problem.groups) else problem.coarse
    return Propagated(problem.propagation, units, search, doors, outputs)
