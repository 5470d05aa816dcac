"""Gives values the factors of the sharded input that they meet: gradients of a fused weight, beside its moments.

Shards of `[3f, d]` over 4 devices end inside one of the three weights, so the values computed from the three have
other factors than the fused weight. An op that reads both could shard neither. Such a value may take the factors of
the input where it is computed: then it is reduced into the input's layout, and the input does not move.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardlib.compiler.graph.ir import Graph, Value
from shardlib.compiler.propagate.propagation import BorrowedDims, InputDim, Propagation


def find_borrowed_dims(propagation: Propagation, graph: Graph) -> BorrowedDims:
    """Returns the values that shall have the factors of an input's dims, although their ops have other factors.

    An op reads such a value beside the sharded input, or beside a result with the input's dims. Values from which such
    a value is computed, dim by dim, borrow the same dims.
    """
    borrowed: dict[Value, tuple[InputDim | None, ...]] = {}
    if not propagation.dims.refused:
        return borrowed
    ops = [op for op in graph.ops if not (op.rule is None or op.constant or op.constrains)]
    sharded: dict[Value, tuple[InputDim | None, ...]] = {
        v: tuple((v, d) for d in range(len(v.shape))) for v in graph.inputs if _is_sharded(propagation, v)
    }
    operands_of = {op: [*_label_dims(op.operands, op.required_rule.operands)] for op in ops}
    results_of = {op: [*_label_dims(op.results, op.required_rule.results)] for op in ops}
    for op in ops:
        operands, results = operands_of[op], results_of[op]
        dim_of = {name: p for v, names in operands for name, p in zip(names, sharded.get(v, ()), strict=False)}
        for value, names in results:
            if (places := _places(names, dim_of)) and not _differs(propagation, value, places):
                sharded[value] = places
    for op in reversed(ops):
        operands, results = operands_of[op], results_of[op]
        dim_of = {name: p for v, names in results for name, p in zip(names, borrowed.get(v, ()), strict=False)}
        refused = propagation.whole[op] - set(op.required_rule.whole)
        for value, names in operands:
            if refused.intersection(names):
                dim_of |= {name: p for name, p in zip(names, sharded.get(value, ()), strict=False) if name}
        for value, names in operands:
            if value.constant or value in borrowed or value in sharded:
                continue
            places = _places(names, dim_of)
            if places and _differs(propagation, value, places) and _can_borrow(propagation, value, places):
                borrowed[value] = places
    return borrowed


def _places(names: Sequence[str], dim_of: Mapping[str, InputDim | None]) -> tuple[InputDim | None, ...]:
    """Returns the input dim that each dim of a value is; empty if some dim is none."""
    places = tuple(dim_of.get(name) if name else None for name in names)
    return places if any(places) and all(p or not name for p, name in zip(places, names, strict=True)) else ()


def _differs(propagation: Propagation, value: Value, places: Sequence[InputDim | None]) -> bool:
    dims_of = propagation.value
    return any(p is not None and dims_of[value][d] != dims_of[p[0]][p[1]] for d, p in enumerate(places))


def _can_borrow(propagation: Propagation, value: Value, places: Sequence[InputDim | None]) -> bool:
    """Returns whether no annotation pins the value to other factors."""
    if value not in propagation.pinned_values:
        return True
    dims, whole = propagation.pinned_values[value][1].layout.dims, [()]
    theirs = [propagation.pinned_values[p[0]][1].layout.dims[p[1]] if p else dims[d] for d, p in enumerate(places)]
    return all(a == b or [x.axes for x in a] == whole for a, b in zip(dims, theirs, strict=True))


def _is_sharded(propagation: Propagation, value: Value) -> bool:
    return any(propagation.pinned_values.get(value, ((),))[0])


def _label_dims(
    values: Sequence[Value | None], dims_of: Sequence[Sequence[Sequence[str]]]
) -> Iterator[tuple[Value, tuple[str, ...]]]:
    """Yields the values whose dims have one factor at most, with the labels of these, `""` for none."""
    for value, dims in zip(values, dims_of, strict=True):
        if value is not None and all(len(labels) <= 1 for labels in dims):
            yield value, tuple("".join(labels) for labels in dims)
