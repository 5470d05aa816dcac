"""Spreads the decisions about a folded graph to the whole: layers that were left out repeat their representative's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from shardlib.compiler.graph.ir import Graph, Op, Value
from shardlib.compiler.layer_folding.fold_graph import Folded, Layer
from shardlib.compiler.propagate import Decisions, collect_decisions
from shardlib.compiler.propagate.decision_units import DecisionUnit
from shardlib.compiler.propagate.dim_factors import DimFactor
from shardlib.compiler.propagate.pins import Pins
from shardlib.compiler.propagate.propagate_axes import propagate_annotations
from shardlib.compiler.propagate.propagation import Assignment, Message, Propagation
from shardlib.compiler.propagate.solver.problem import Order, Problem
from shardlib.compiler.propagate.solver.search import Search
from shardlib.sharding.mesh.mesh import Mesh

Member = Op | Value


def spread_decisions(
    folded: Folded,
    short: Decisions,
    mesh: Mesh,
    pins: Pins,
    sends: Callable[[Propagation, Op, Assignment], tuple[Message, ...]],
) -> Decisions:
    """Returns the decisions about the whole graph, after those about the short one."""
    graph, near = folded.whole, short.propagation
    relaxed = {key: dims for mine, dims in near.relaxed.items() for key, _ in _represented(folded, mine)}
    borrowed = {
        key: tuple(p and (folded.seen(p[0], folded.layer(mine), layer), p[1]) for p in places)
        for mine, places in near.borrowed.items()
        for key, layer in _represented(folded, mine)
    }
    whole = propagate_annotations(graph, pins, relaxed, borrowed)
    factors = _factors(folded, graph, near, whole)
    requests = {
        factor: [
            next((own for own in whole.requests.get(factor, ()) if own.axis == request.axis), request)
            for request in near.requests[mine]
        ]
        for factor, mine in factors.items()
        if mine in near.requests
    }
    pinned = {twin: whole.pin_twins[key] for twin, key in folded.twins.items()}
    whole = replace(
        whole,
        requests=requests,
        copies=dict(folded.twins),
        value=whole.value | {twin: whole.value[seen] for twin, seen in pinned.items()},
        twins=whole.twins | {twin: whole.twins[seen] for twin, seen in pinned.items()},
    )
    units = short.search.problem.units
    problem = Problem(graph, whole, mesh, partial(sends, whole))

    def start(member: Member) -> Order:
        mine = folded.representative_member(member)
        return _with_slots(short.search.order(mine), units.unit[mine], problem.units.unit[member], factors)

    return collect_decisions(Search(problem, start), pins)


def _represented(folded: Folded, mine: Any) -> Iterator[tuple[Any, Layer]]:
    """Yields the item of the whole behind one of the short graph, and those that it represents, with their layers."""
    yield folded.original[mine], None
    if folded.layer(mine) == folded.near:
        for layer in folded.left_out:
            yield folded.in_layer(mine, layer), layer


def _factors(folded: Folded, graph: Graph, near: Propagation, whole: Propagation) -> dict[DimFactor, DimFactor]:
    """Maps the dim factors of the whole to those of the short graph that represent them."""
    short: dict[DimFactor, DimFactor] = {}
    for op in graph.ops:
        mine = folded.representative(op)[0]
        for name, leaves in whole.labels.get(op, {}).items():
            short.update(zip(leaves, near.labels[mine].get(name, ()), strict=False))
    for value in graph.values():
        if value in whole.value:
            short.update(
                zip(whole.dim_factors(value), near.dim_factors(folded.representative_value(value)), strict=False)
            )
    return short


def _with_slots(order: Order, mine: DecisionUnit, unit: DecisionUnit, leaves: Mapping[DimFactor, DimFactor]) -> Order:
    """Translates a choice of one unit to another, whose slots may have another order."""
    places = {leaf: slot for slot, leaf in enumerate(mine.slots)}
    slots = {places.get(leaves.get(leaf, -1), slot): slot for slot, leaf in enumerate(unit.slots)}
    slots |= {~theirs: ~slot for theirs, slot in slots.items()}
    return tuple(tuple(slots.get(slot, slot) for slot in choice) for choice in order)
