"""Proposes dims beside a sharded one that some op needs whole or reduces, such as the channels where tokens are mixed.

Sharded there instead, the op needs no communication, and its operand is resharded once before and once after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from shardlib.compiler.graph.ir import Op, Value
from shardlib.compiler.propagate.decision_units import can_shard
from shardlib.compiler.propagate.dim_factors import DimFactor
from shardlib.compiler.propagate.propagation import Propagation
from shardlib.compiler.propagate.solver.search import Search
from shardlib.sharding.mesh.axis import Axis, group_size

SMALL = 8  # times smaller: such a tensor may well be whole


def rate_dims_near_reshards(ops: Collection[Op], search: Search, atoms: Sequence[Axis]) -> Mapping[DimFactor, float]:
    """Returns such dims of `ops`, each with the seconds of the messages that reshards would replace."""
    gain, moving, propagation = (
        defaultdict[DimFactor, float](float),
        _find_sharded(search, atoms),
        search.problem.propagation,
    )
    for op in ops:
        if op in search.problem.units.unit:
            read, sent = _sent(op, search, atoms, moving)
            for dim_factor in find_free_dims(op, propagation, atoms, read) if sent and read else ():
                gain[search.problem.families[dim_factor]] += sent * propagation.times(op, dim_factor)
    return gain


def _find_sharded(search: Search, atoms: Sequence[Axis]) -> set[Value]:
    """Returns the values computed from a tensor that is placed in shards over the axis.

    All others, such as a function of whole weights, may be whole or sharded otherwise without any message.
    """
    sharded: set[Value] = set()
    for value in search.problem.graph.values():
        comes = value.op is not None and not sharded.isdisjoint(value.op.operands)
        is_placed = value.op is None or value in search.problem.propagation.pinned_values
        if comes or (is_placed and any(a in atoms for axes in _axes_of(search, value) for a in axes)):
            sharded.add(value)
    return sharded


def _sent(op: Op, search: Search, atoms: Sequence[Axis], moving: Collection[Value]) -> tuple[list[int], float]:
    """Returns the large operands that have shards over the axis and would move, and the seconds of an op's messages.

    The messages are those of operands that the op takes in other layouts, and of its partial sums.
    """
    units, prices, sent, sharded, most = search.problem.units, search.problem.prices, 0.0, list[int](), 0
    slot_axes = search.slot_axes(op)
    for i, value in enumerate(op.operands):
        if value.constant:
            continue
        root, _ = units.roots[value]
        source = [[a for a in axes if a in atoms] for axes in _axes_of(search, root)]
        if any(source):
            sharded += [i] if root in moving else []
            slots, _ = units.operand_slots[op, i]
            target = [[] if s is None else [a for a in slot_axes[s] if a in atoms] for s in slots]
            if target != source:
                sent, most = sent + prices.comm_seconds((*atoms,), root.nbytes), max(most, root.nbytes)
    for i, result in enumerate(op.results):
        partial = (a for s in units.result_slots.get((op, i), ((), ()))[1] for a in slot_axes[s])
        if result is not None and not {*atoms}.isdisjoint(partial) and not _travels(result):
            sent, most = sent + prices.comm_seconds((*atoms,), result.nbytes), max(most, result.nbytes)
    return [i for i in sharded if op.operands[i].nbytes * SMALL >= most], sent


def _axes_of(search: Search, root: Value) -> Sequence[Sequence[Axis]]:
    """Returns the axes of a value at its producer."""
    propagation, units = search.problem.propagation, search.problem.units
    if root in propagation.pinned_values:
        return propagation.pinned_values[root][0]
    if root not in units.unit:
        return ()
    slot_axes = search.slot_axes(root)
    return [slot_axes[s] for s in units.value_slots[root]]


def _travels(value: Value) -> bool:
    """Returns whether linear readers, behind views, may pass a partial sum on."""
    return any(
        any(map(_travels, filter(None, reader.results)))
        if reader.transparent
        else reader.rule is not None and any(i in together for together in reader.rule.linear)
        for reader, i in value.readers
    )


def find_free_dims(
    op: Op, propagation: Propagation, atoms: Sequence[Axis], read: Sequence[int] | None = None
) -> set[DimFactor]:
    """Returns the dims of an op's results that may be sharded over an axis and do not request it.

    With positions `read`, only dims that all results and these operands have.
    """
    rule = op.required_rule
    results = [labels for labels, r in zip(rule.results, op.results, strict=True) if r is not None]
    names = [{f for dim in labels for f in dim} for labels in (*results, *(rule.operands[i] for i in read or ()))]
    kept = set[str]().union(*names) if read is None else set.intersection(*names)
    dims, least = set(), group_size(atoms)
    for label in kept:
        for k, dim_factor in enumerate(propagation.labels[op].get(label, ())):
            requested = {request.axis for request in propagation.requests.get(dim_factor, ())}
            enough = propagation.dims.size(dim_factor) >= least
            if enough and requested.isdisjoint(atoms) and can_shard(propagation, op, (label, k)):
                dims.add(dim_factor)
    return dims
