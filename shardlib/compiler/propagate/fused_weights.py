"""Gives values the factors of the sharded input that they meet: gradients of a fused weight, beside its moments.

Shards of `[3f, d]` over 4 devices end inside one of the three weights, so the values computed from the three have
other factors than the fused weight. An op that reads both could shard neither. Such a value may take the factors of
the input where it is computed: then it is reduced into the input's layout, and the input does not move.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardlib.compiler.graph.ir import Graph, Op, Value
from shardlib.compiler.propagate.propagation import Propagation

Place = tuple[Value, int]  # an input, and a dim of it
Met = Mapping[Value, tuple[Place | None, ...]]  # for each dim of a value: which one of an input it is


def met(f: Propagation, graph: Graph) -> Met:
    """The values that ops read beside an input, or what is made of one dim by dim, of which some dim has other factors
    than the input's; and, backwards, what these are made of, dim by dim."""
    found: dict[Value, tuple[Place | None, ...]] = {}
    if not f.dims.refused:
        return found
    ops = [op for op in graph.ops if not (op.rule is None or op.constant or op.constrains)]
    cut: dict[Value, tuple[Place | None, ...]] = {
        v: tuple((v, d) for d in range(len(v.shape))) for v in graph.inputs if _is_cut(f, v)
    }
    for op in ops:
        known = {name: p for v, names in _operands(op) for name, p in zip(names, cut.get(v, ()), strict=False)}
        for value, names in _results(op):
            if (places := _places(names, known)) and not _differs(f, value, places):
                cut[value] = places
    for op in reversed(ops):
        assert op.rule is not None
        known = {name: p for v, names in _results(op) for name, p in zip(names, found.get(v, ()), strict=False)}
        refused = f.whole[op] - set(op.rule.whole)
        for value, names in _operands(op):
            if refused.intersection(names):
                known |= {name: p for name, p in zip(names, cut.get(value, ()), strict=False) if name}
        for value, names in _operands(op):
            if value.constant or value in found or value in cut:
                continue
            if (places := _places(names, known)) and _differs(f, value, places) and _may(f, value, places):
                found[value] = places
    return found


def _places(names: Sequence[str], known: Mapping[str, Place | None]) -> tuple[Place | None, ...]:
    """Returns the input dim that each dim of a value is; empty if some dim is none."""
    places = tuple(known.get(name) if name else None for name in names)
    return places if any(places) and all(p or not name for p, name in zip(places, names, strict=True)) else ()


def _differs(f: Propagation, value: Value, places: Sequence[Place | None]) -> bool:
    return any(p is not None and f.value[value][d] != f.value[p[0]][p[1]] for d, p in enumerate(places))


def _may(f: Propagation, value: Value, places: Sequence[Place | None]) -> bool:
    """Returns whether no annotation pins the value to other factors."""
    if value not in f.fixed:
        return True
    dims, whole = f.fixed[value][1].layout.dims, [()]
    theirs = [f.fixed[p[0]][1].layout.dims[p[1]] if p else dims[d] for d, p in enumerate(places)]
    return all(a == b or [x.axes for x in a] == whole for a, b in zip(dims, theirs, strict=True))


def _is_cut(f: Propagation, value: Value) -> bool:
    return any(f.fixed.get(value, ((),))[0])


def _operands(op: Op) -> Iterator[tuple[Value, tuple[str, ...]]]:
    """Operands with a factor for each dim, `""` where there is none."""
    assert op.rule is not None
    for value, dims in zip(op.operands, op.rule.operands, strict=True):
        if all(len(names) <= 1 for names in dims):
            yield value, tuple("".join(names) for names in dims)


def _results(op: Op) -> Iterator[tuple[Value, tuple[str, ...]]]:
    assert op.rule is not None
    for value, dims in zip(op.results, op.rule.results, strict=True):
        if value is not None and all(len(names) <= 1 for names in dims):
            yield value, tuple("".join(names) for names in dims)
