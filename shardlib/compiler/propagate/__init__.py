"""Annotations and rules -> one layout decision per op, with its reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shardlib.compiler.graph.ir import Graph, Op, Value
from shardlib.compiler.propagate.decision_units import Unit, Units, build_units
from shardlib.compiler.propagate.fused_weights import met
from shardlib.compiler.propagate.pinned import Key
from shardlib.compiler.propagate.propagate_axes import flood
from shardlib.compiler.propagate.propagation import Assignment, Flood, Message
from shardlib.compiler.propagate.relax_cuts import Loose, matter
from shardlib.compiler.propagate.solver.overlap import SHARE, hidden
from shardlib.compiler.propagate.solver.propose_axes import best, offered
from shardlib.compiler.propagate.solver.refine import refine, spared
from shardlib.compiler.propagate.solver.search import TIE, Decider
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.placement import Fixed
from shardlib.sharding.reshard import Cut


@dataclass(frozen=True)
class Propagated:
    """What propagation found: leaves and wants (`flood`), what is decided together (`units`), the decisions."""

    flood: Flood
    units: Units
    decider: Decider
    doors: Mapping[Op, Fixed]
    outputs: Mapping[int, Fixed]

    def unit_cut(self, unit: Unit) -> tuple[tuple[Axis, ...], ...]:
        """The mesh axes on each slot of `unit`, in prime parts."""
        return self.decider.unit_cut(unit)

    def assignment(self, op: Op) -> Assignment:
        """The mesh axes over which each factor of `op` is cut."""
        cuts = self.unit_cut(self.units.unit[op])
        return {x: cuts[s] for x, s in self.units.op_slots[op].items() if cuts[s]}

    def given(self, value: Value) -> tuple[Value, Cut]:
        """An input as it is given, and its cut."""
        given = self.flood.apart.get(value, value)
        return given, self.flood.fixed[given][0] if given in self.flood.fixed else self.input_cut(value)

    def input_cut(self, value: Value) -> Cut:
        """The cut of an input: as annotated, or as inferred."""
        if value in self.flood.fixed:
            return self.flood.fixed[value][0]
        unit = self.units.unit.get(value)
        if unit is None:
            return ((),) * len(self.flood.leaves(value))
        cuts = self.unit_cut(unit)
        return tuple(() if s is None else cuts[s] for s in self.units.value_slots[value])


def propagate(
    graph: Graph,
    mesh: Mesh,
    fixed: Mapping[Value, Fixed],
    outputs: Mapping[int, Fixed],
    doors: Mapping[Op, Fixed],
    sends: Callable[[Flood, Op, Assignment], tuple[Message, ...]],
) -> Propagated:
    """Decide every op's cut; `fixed`, `outputs` and `doors` hold what the user decided.

    `sends` says what an op sends while it runs, if it is cut in some way. Where arithmetic can hide messages, units
    decide once more, as if these cost little: that stands if it takes markedly less time.
    """

    def flooded(*said: Any, **known: Any) -> Flood:
        found = flood(graph, fixed, outputs, doors, *said, **known)
        found.hidden, found.sends = values, partial(sends, found)
        return found

    values = hidden(graph, mesh)
    decider = _decided(graph, mesh, flooded)
    if values and decider.unhidden > decider.estimate.whole(decider.choices)[0] * TIE:
        cheap = replace(decider.problem.flood, share=SHARE)
        other = Decider(graph, cheap, decider.units, mesh, decider.order)
        decider = other if other.unhidden * TIE < decider.unhidden else decider
    return Propagated(decider.problem.flood, decider.units, decider, doors, outputs)


def _decided(graph: Graph, mesh: Mesh, again: Callable[..., Flood]) -> Decider:
    """The best decision where annotations flood as they do, as inputs meet, or past cuts that stand in the way."""

    def decide(flooded: Flood) -> Decider:
        first = Decider(graph, flooded, build_units(graph, flooded), mesh)
        decided = refine(graph, flooded, mesh, first)
        decider = offered(graph, flooded, mesh, first, decided)
        return decider if decider is decided else refine(graph, flooded, mesh, decider)

    flooded = again()
    decider = decide(flooded)
    if values := met(flooded, graph):
        other = again(met=values)
        decider, flooded = best([(decider, flooded), (decide(other), other)])
        again = partial(again, met=values) if flooded is other else again
    if flooded.tight and matter(flooded, graph):
        other = _loosened(again, flooded)
        decider, flooded = best([(decider, flooded), (decide(other), other)])
    return spared(graph, flooded, mesh, decider)


def _loosened(again: Callable[[Loose], Flood], flooded: Flood) -> Flood:
    """A flood in which no cut of an input or output stands in the way."""
    loose = dict[Key, frozenset[int]]()
    while flooded.tight.keys() - loose.keys():
        loose |= flooded.tight
        flooded = again(loose)
    return flooded
