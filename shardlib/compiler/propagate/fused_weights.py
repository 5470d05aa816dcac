"""Gives values the factors of the sharded input that they meet: gradients of a fused weight, beside its moments.

Shards of `[3f, d]` over 4 devices end inside one of the three weights, so the values computed from the three have
other factors than the fused weight. An op that reads both could shard neither. Such a value may take the factors of
the input where it is computed: then it is reduced into the input's layout, and the input does not move.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardlib.compiler.graph.ir import Graph, Op, Value
from shardlib.compiler.propagate.propagation import BorrowedDims, InputDim, Propagation


def find_borrowed_dims(f: Propagation, graph: Graph) -> BorrowedDims:
    """Returns the values that shall have the factors of an input's dims, although their ops have other factors.

    An op reads such a value beside the sharded input, or beside a result with the input's dims. Values from which such
    a value is computed, dim by dim, borrow the same dims.
    """
    borrowed: dict[Value, tuple[InputDim | None, ...]] = {}
    if not f.dims.refused:
        return borrowed
    ops = [op for op in graph.ops if not (op.rule is None or op.constant or op.constrains)]
    sharded: dict[Value, tuple[InputDim | None, ...]] = {
        v: tuple((v, d) for d in range(len(v.shape))) for v in graph.inputs if _is_sharded(f, v)
    }
    for op in ops:
        dim_of = {name: p for v, names in _operands(op) for name, p in zip(names, sharded.get(v, ()), strict=False)}
        for value, names in _results(op):
            if (places := _places(names, dim_of)) and not _differs(f, value, places):
                sharded[value] = places
    for op in reversed(ops):
        assert op.rule is not None
        dim_of = {name: p for v, names in _results(op) for name, p in zip(names, borrowed.get(v, ()), strict=False)}
        refused = f.whole[op] - set(op.rule.whole)
        for value, names in _operands(op):
            if refused.intersection(names):
                dim_of |= {name: p for name, p in zip(names, sharded.get(value, ()), strict=False) if name}
        for value, names in _operands(op):
            if value.constant or value in borrowed or value in sharded:
                continue
            if (places := _places(names, dim_of)) and _differs(f, value, places) and _can_borrow(f, value, places):
                borrowed[value] = places
    return borrowed


def _places(names: Sequence[str], dim_of: Mapping[str, InputDim | None]) -> tuple[InputDim | None, ...]:
    """Returns the input dim that each dim of a value is; empty if some dim is none."""
    places = tuple(dim_of.get(name) if name else None for name in names)
    return places if any(places) and all(p or not name for p, name in zip(places, names, strict=True)) else ()


def _differs(f: Propagation, value: Value, places: Sequence[InputDim | None]) -> bool:
    return any(p is not None and f.value[value][d] != f.value[p[0]][p[1]] for d, p in enumerate(places))


def _can_borrow(f: Propagation, value: Value, places: Sequence[InputDim | None]) -> bool:
    """Returns whether no annotation pins the value to other factors."""
    if value not in f.pinned_values:
        return True
    dims, whole = f.pinned_values[value][1].layout.dims, [()]
    theirs = [f.pinned_values[p[0]][1].layout.dims[p[1]] if p else dims[d] for d, p in enumerate(places)]
    return all(a == b or [x.axes for x in a] == whole for a, b in zip(dims, theirs, strict=True))


def _is_sharded(f: Propagation, value: Value) -> bool:
    return any(f.pinned_values.get(value, ((),))[0])


def _operands(op: Op) -> Iterator[tuple[Value, tuple[str, ...]]]:
    """Yields operands whose dims have one factor at most, with the names of these, `""` for none."""
    assert op.rule is not None
    for value, dims in zip(op.operands, op.rule.operands, strict=True):
        if all(len(names) <= 1 for names in dims):
            yield value, tuple("".join(names) for names in dims)


def _results(op: Op) -> Iterator[tuple[Value, tuple[str, ...]]]:
    assert op.rule is not None
    for value, dims in zip(op.results, op.rule.results, strict=True):
        if value is not None and all(len(names) <= 1 for names in dims):
            yield value, tuple("".join(names) for names in dims)
