"""Annotations and rules -> one layout decision per op, with its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shardlib.compiler.graph.ir import Graph, Op, Value
from shardlib.compiler.propagate.decision_units import DecisionUnit, Units
from shardlib.compiler.propagate.fused_weights import find_borrowed_dims
from shardlib.compiler.propagate.pins import PinKey, Pins
from shardlib.compiler.propagate.propagate_axes import propagate_annotations
from shardlib.compiler.propagate.propagation import (
    Assignment,
    AxisRequest,
    BorrowedDims,
    Message,
    Propagation,
    RelaxedDims,
)
from shardlib.compiler.propagate.relax_pins import find_misfits, would_split_compute
from shardlib.compiler.propagate.solver.effort import Effort, Planning
from shardlib.compiler.propagate.solver.hidden_messages import find_hidden_values
from shardlib.compiler.propagate.solver.problem import Problem
from shardlib.compiler.propagate.solver.propose_axes import offer_axes
from shardlib.compiler.propagate.solver.search import Search, choose_search
from shardlib.compiler.propagate.solver.split_units import hide_messages, send_less, split_units
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.reshard import FactorAxes

# Shares of the effort after which each phase stops.
_FIRST, _OTHER, _SPLIT, _LESS = 0.4, 0.5, 0.7, 0.9
_OFFER = "an offer: nothing else would use it there"


@dataclass(frozen=True)
class Decisions:
    """The result: `propagation` has factors and requests, `units` choose together, and `search` has the decisions."""

    propagation: Propagation
    units: Units
    search: Search
    pins: Pins

    def unit_axes(self, unit: DecisionUnit) -> tuple[tuple[Axis, ...], ...]:
        """Returns the mesh axes on each slot of `unit`, in prime parts."""
        return self.search.slot_axes(unit.first_member)

    def assignment(self, op: Op) -> Assignment:
        """Returns the mesh axes over which each factor of `op` is sharded."""
        axes = self.search.slot_axes(op)
        return {x: axes[s] for x, s in self.units.op_slots[op].items() if axes[s]}

    def placed_input(self, value: Value) -> tuple[Value, FactorAxes]:
        """Returns the value that the call passes for an input (its twin, if any), and its axes."""
        placed, fixed = self.propagation.pin_twins.get(value, value), self.propagation.pinned_values
        return placed, fixed[placed][0] if placed in fixed else self.input_axes(value)

    def input_axes(self, value: Value) -> FactorAxes:
        """Returns the axes of an input, as pinned or as inferred."""
        if value in self.propagation.pinned_values:
            return self.propagation.pinned_values[value][0]
        if value not in self.units.unit:
            return ((),) * len(self.propagation.dim_factors(value))
        axes = self.search.slot_axes(value)
        return tuple(axes[s] for s in self.units.value_slots[value])


def _same(member: Op | Value) -> Any:
    return member


@dataclass(frozen=True)
class GraphDecisions:
    """The decisions about a graph. Of equal layers it may have only some; `representative` maps all items to it."""

    graph: Graph
    decisions: Decisions
    representative: Callable[[Any], Any] = _same


def propagate(
    graph: Graph,
    mesh: Mesh,
    pins: Pins,
    sends: Callable[[Propagation, Op, Assignment], tuple[Message, ...]],
    planning: Planning = None,
) -> Decisions:
    """Decides the sharding of every op within `pins`.

    `sends` returns the messages inside an op under an assignment.

    Each problem is built once, for one search. Whole units choose first, then single ops. Dims without an annotation
    are offered axes. Messages that arithmetic can hide count less. Of two decisions that take about as long, the one
    that sends less stands. `planning` limits the time, as in `jit`.
    """
    effort = Effort.limited(planning, len(graph.ops))
    effort.share = _FIRST
    hidden = find_hidden_values(graph, mesh)

    def propagate_relaxed(relaxed: RelaxedDims, borrowed: BorrowedDims) -> Propagation:
        return propagate_annotations(graph, pins, relaxed, borrowed)

    def begin(propagation: Propagation) -> Search:
        search = Search(Problem(graph, propagation, mesh, partial(sends, propagation), hidden), effort=effort)
        search.minimize(search.domains(search.problem.groups))
        return search

    search = begin(propagate_relaxed({}, {}))
    effort.share = _OTHER
    if (borrowed := find_borrowed_dims(search.problem.propagation, graph)) and not effort.stops():
        search = choose_search(search, begin(propagate_relaxed({}, borrowed)))
    now, relaxed = search.problem.propagation, dict[PinKey, frozenset[int]]()
    misfits = find_misfits(now, graph)
    if misfits and would_split_compute(now, misfits, graph) and not effort.stops():
        while misfits.keys() - relaxed.keys():
            relaxed |= misfits
            now = propagate_relaxed(relaxed, now.borrowed)
            misfits = find_misfits(now, graph)
        search = choose_search(search, begin(now))
    first = search.state
    effort.share = _SPLIT
    split_units(search)
    if offer_axes(search, first):
        split_units(search)
    effort.share = _LESS
    send_less(search)
    effort.share = 1.0
    hide_messages(search)
    return collect_decisions(search, pins)


def collect_decisions(search: Search, pins: Pins) -> Decisions:
    """Returns the decisions of a search, with its offers as requests, and with units whose parts choose alike."""
    problem, requests = search.problem, dict(search.problem.propagation.requests)
    for factor, name in search.offers:
        for member in [x for x, family in problem.families.items() if family == factor]:
            own = requests.get(member, [])
            used = {request.axis for request in own}
            new = [AxisRequest(a, _OFFER, True) for a in problem.atoms[name] if a not in used]
            requests[member] = own + new

    def part(member: Op | Value) -> object:
        unit_class = problem.class_of.get(problem.units.unit[member])
        return None if unit_class is None else search.choices[unit_class]

    is_split = len(search.variables()) > len(problem.groups)
    units = problem.unsplit_units.split(part) if is_split else problem.unsplit_units
    return Decisions(replace(problem.propagation, requests=requests), units, search, pins)
