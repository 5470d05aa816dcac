"""Proposes dims beside a sharded one that some op needs whole or reduces, such as the channels where tokens are mixed.

Sharded there instead, the op needs no communication, and its operand is resharded once before and once after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from shardlib.compiler.graph.ir import Op, Value
from shardlib.compiler.propagate.decision_units import may_cut
from shardlib.compiler.propagate.dim_factors import DimFactor
from shardlib.compiler.propagate.propagation import Propagation
from shardlib.compiler.propagate.solver.search import Search
from shardlib.sharding.mesh.axis import Axis, group_size

SMALL = 8  # times smaller is what nobody minds to have whole


def beside_moves(ops: Collection[Op], search: Search, atoms: Sequence[Axis]) -> Mapping[DimFactor, float]:
    """Returns such dims of some ops, each with the seconds of the messages that a reshard would replace."""
    gain, moving, propagation = (
        defaultdict[DimFactor, float](float),
        _of_pieces(search, atoms),
        search.problem.propagation,
    )
    for op in ops:
        if op in search.problem.units.unit:
            read, sent = _sent(op, search, atoms, moving)
            for leaf in free(op, propagation, atoms, read) if sent and read else ():
                gain[search.problem.families[leaf]] += sent * propagation.times(op, leaf)
    return gain


def _of_pieces(search: Search, atoms: Sequence[Axis]) -> set[Value]:
    """Returns the values computed from a tensor that is placed in shards over the axis. All others, such as a function
    of whole weights, may be whole or sharded otherwise without any message."""
    found: set[Value] = set()
    for value in search.problem.graph.values():
        comes = value.op is not None and not found.isdisjoint(value.op.operands)
        is_placed = value.op is None or value in search.problem.propagation.fixed
        if comes or (is_placed and any(a in atoms for axes in _lies(search, value) for a in axes)):
            found.add(value)
    return found


def _sent(op: Op, search: Search, atoms: Sequence[Axis], moving: Collection[Value]) -> tuple[list[int], float]:
    """Returns the large operands that are made in shards over the axis and would move, and the seconds of the messages
    for operands that the op takes in other layouts and for partial sums that it makes."""
    units, prices, sent, cut, most = search.problem.units, search.problem.prices, 0.0, list[int](), 0
    cuts = search.cut(op)
    for i, value in enumerate(op.operands):
        if value.constant:
            continue
        root, _ = units.root(value)
        there = [[a for a in axes if a in atoms] for axes in _lies(search, root)]
        if any(there):
            cut += [i] if root in moving else []
            slots, _ = units.read[op, i]
            here = [[] if s is None else [a for a in cuts[s] if a in atoms] for s in slots]
            if here != there:
                sent, most = sent + prices.comm_seconds((*atoms,), root.nbytes), max(most, root.nbytes)
    for i, result in enumerate(op.results):
        owed = (a for s in units.made.get((op, i), ((), ()))[1] for a in cuts[s])
        if result is not None and not {*atoms}.isdisjoint(owed) and not _travels(result):
            sent, most = sent + prices.comm_seconds((*atoms,), result.nbytes), max(most, result.nbytes)
    return [i for i in cut if op.operands[i].nbytes * SMALL >= most], sent


def _lies(search: Search, root: Value) -> Sequence[Sequence[Axis]]:
    """Returns how a value is sharded where it is made."""
    propagation, units = search.problem.propagation, search.problem.units
    if root in propagation.fixed:
        return propagation.fixed[root][0]
    if root not in units.unit:
        return ()
    cuts = search.cut(root)
    return [() if s is None else cuts[s] for s in units.value_slots[root]]


def _travels(value: Value) -> bool:
    """Returns whether a sum may go on through who reads it, views looked through."""
    return any(
        any(map(_travels, filter(None, reader.results)))
        if reader.transparent
        else reader.rule is not None and any(i in together for together in reader.rule.linear)
        for reader, i in value.readers
    )


def free(op: Op, propagation: Propagation, atoms: Sequence[Axis], read: Sequence[int] | None = None) -> set[DimFactor]:
    """Returns the dims of what an op makes that may be sharded over an axis and do not request it; those of all results
    and of the operands at the positions `read`, if these are given."""
    assert op.rule is not None
    results = [labels for labels, r in zip(op.rule.results, op.results, strict=True) if r is not None]
    names = [{f for dim in labels for f in dim} for labels in (*results, *(op.rule.operands[i] for i in read or ()))]
    kept = set[str]().union(*names) if read is None else set.intersection(*names)
    found, least = set(), group_size(atoms)
    for label in kept:
        for k, leaf in enumerate(propagation.labels[op].get(label, ())):
            wanted = {want.axis for want in propagation.requests.get(leaf, ())}
            enough = propagation.dims.size(leaf) >= least
            if enough and wanted.isdisjoint(atoms) and may_cut(propagation, op, (label, k)):
                found.add(leaf)
    return found
