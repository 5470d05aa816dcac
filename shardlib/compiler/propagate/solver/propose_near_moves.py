"""Dims beside one that is cut, but that an op has whole or adds up, however little it works (channels, while tokens are
mixed): cut there instead, the op runs alone, and what is cut moves twice, piece by piece."""

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
    """Such dims of some ops, and the seconds in which is sent what then only moves."""
    gain, moving, flood = defaultdict[DimFactor, float](float), _of_pieces(search, atoms), search.problem.flood
    for op in ops:
        if op in search.problem.units.unit:
            read, sent = _sent(op, search, atoms, moving)
            for leaf in free(op, flood, atoms, read) if sent and read else ():
                gain[search.problem.families[leaf]] += sent * flood.times(op, leaf)
    return gain


def _of_pieces(search: Search, atoms: Sequence[Axis]) -> set[Value]:
    """What something goes into that is cut over an axis where it lies. All else (a function of whole weights) may be
    whole, or cut otherwise, and nothing is sent for it."""
    found: set[Value] = set()
    for value in search.problem.graph.values():
        comes = value.op is not None and not found.isdisjoint(value.op.operands)
        is_placed = value.op is None or value in search.problem.flood.fixed
        if comes or (is_placed and any(a in atoms for axes in _lies(search, value) for a in axes)):
            found.add(value)
    return found


def _sent(op: Op, search: Search, atoms: Sequence[Axis], moving: Collection[Value]) -> tuple[list[int], float]:
    """The large operands that are cut over an axis where they are made, and would move, and seconds for those that the
    op has otherwise and for sums that it owes."""
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
    """How a value is cut where it is made."""
    flood, units = search.problem.flood, search.problem.units
    if root in flood.fixed:
        return flood.fixed[root][0]
    if root not in units.unit:
        return ()
    cuts = search.cut(root)
    return [() if s is None else cuts[s] for s in units.value_slots[root]]


def _travels(value: Value) -> bool:
    """Whether a sum may go on through who reads it, views looked through."""
    return any(
        any(map(_travels, filter(None, reader.results)))
        if reader.transparent
        else reader.rule is not None and any(i in together for together in reader.rule.linear)
        for reader, i in value.readers
    )


def free(
    op: Op, flood: Propagation, atoms: Sequence[Axis], read: Sequence[int] | None = None, *, partly: bool = False
) -> set[DimFactor]:
    """The dims of what an op makes that may be cut over an axis, or `partly`, and do not want it; those of all results
    and of what it reads at the places `read`, if these are given."""
    assert op.rule is not None
    results = [labels for labels, r in zip(op.rule.results, op.results, strict=True) if r is not None]
    names = [{f for dim in labels for f in dim} for labels in (*results, *(op.rule.operands[i] for i in read or ()))]
    kept = set[str]().union(*names) if read is None else set.intersection(*names)
    found, least = set(), min(a.size for a in atoms) if partly else group_size(atoms)
    for label in kept:
        for k, leaf in enumerate(flood.labels[op].get(label, ())):
            wanted = {want.axis for want in flood.wants.get(leaf, ())}
            enough = flood.dims.size(leaf) >= least
            if enough and wanted.isdisjoint(atoms) and may_cut(flood, op, (label, k)):
                found.add(leaf)
    return found
