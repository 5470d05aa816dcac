"""Views and re-arrangements: the result holds the operand's elements, elsewhere. All follow from shapes.

A reshape regroups factors. Its boundaries are the products of sizes from the right; a boundary that divides or is
divided by every other one cuts operand and result alike, and what lies between two such boundaries is one shared
factor, unless a boundary in between has no counterpart on the other side: these dims get factors of their own, which
stay whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardlib.rules.rule import Call, Local, Rule, RuleFn
from shardlib.rules.space import (
    Dim,
    Ints,
    Space,
    arg,
    axis,
    path,
    result_shape,
    shape_ints,
)

aten = torch.ops.aten


def regroup(space: Space, old: Sequence[int], new: Sequence[int]) -> tuple[list[Dim], list[Dim]]:
    """The labels of a reshape from `old` to `new`, major factors first.

    Example:
        >>> space = Space()
        >>> regroup(space, (6, 4), (2, 12)), space.sizes
        (([('d', 'd1'), ('d2',)], [('d',), ('d1', 'd2')]), {'d': 2, 'd1': 3, 'd2': 4})
        >>> space = Space()
        >>> regroup(space, (6, 4, 2), (4, 12)), sorted(space.whole)
        (([('d2',), ('d1',), ('d',)], [('d4',), ('d3', 'd')]), ['d1', 'd2', 'd3', 'd4'])
    """
    if math.prod(old) == 0:
        every = range(max(len(old), len(new)))
        return space.dims(old, whole=every), space.dims(new, whole=every)
    bounds = sorted({*_bounds(old), *_bounds(new)})
    shared = [b for b in bounds if all(b % c == 0 or c % b == 0 for c in bounds)]
    parts: dict[tuple[int, int], Dim] = {}
    for low, high in reversed(list(itertools.pairwise(shared))):
        if not any(low < b < high for b in bounds):
            parts[low, high] = space.dim(high // low)

    def label(shape: Sequence[int]) -> list[Dim]:
        dims: list[Dim] = []
        edges = _bounds(shape)
        for low, high in itertools.pairwise(edges):
            inner = sorted({low, high, *(b for b in shared if low < b < high)}, reverse=True)
            pairs = zip(inner[1:], inner, strict=False)
            dims.append(tuple(f for lo, hi in pairs for f in parts.get((lo, hi)) or space.dim(hi // lo, whole=True)))
        return dims[::-1]

    return label(old), label(new)


def _bounds(shape: Sequence[int]) -> list[int]:
    """1, and the products of the last 1, 2, ... sizes."""
    out = [1]
    for n in reversed(shape):
        out.append(out[-1] * n)
    return out


def _reshape(call: Call) -> Rule:
    space = Space()
    old, new = regroup(space, call.operands[0].shape, result_shape(call))
    ints = shape_ints(path(call, 1, "shape" if call.target == aten.reshape.default else "size"), new)

    def local(local: Local) -> Any:
        size = [math.prod(local.size(f) for f in dim) for dim in new]
        return local.op(aten.reshape.default, local.args[0], size)

    # Shards are slices, of which strides may allow no view.
    view = call.target != aten.reshape.default
    return space.rule(
        [old],
        [new],
        linear=[{0}],
        ints=ints,
        local=local if view else None,
        local_factors=space.sizes if view else (),
        transparent=True,
    )


def rearrange(order: Callable[[Call, int], Sequence[int]]) -> RuleFn:
    """The rule of an op whose result dim i is the operand's dim `order[i]`; -1 is a new dim of size 1."""

    def rule(call: Call) -> Rule:
        space = Space()
        x = space.dims(call.operands[0].shape)
        out = [x[i] if i >= 0 else () for i in order(call, len(x))]
        return space.rule([x], [out], linear=[{0}], transparent=True)

    return rule


def _permute(call: Call, rank: int) -> list[int]:
    return [axis(d, rank) for d in arg(call, 1, "dims")]


def _swap(call: Call, rank: int) -> list[int]:
    order = list(range(rank))
    if order:
        i, j = axis(arg(call, 1, "dim0"), rank), axis(arg(call, 2, "dim1"), rank)
        order[i], order[j] = j, i
    return order


def _reverse(call: Call, rank: int) -> list[int]:
    return list(reversed(range(rank)))


def _unsqueeze(call: Call, rank: int) -> list[int]:
    order = list(range(rank))
    order.insert(axis(arg(call, 1, "dim"), rank + 1), -1)
    return order


def _squeeze(call: Call) -> Rule:
    """Only dims of size 1 go. A cut dim may have local size 1, so the local form names the dims that go."""
    space = Space()
    shape = call.operands[0].shape
    x = space.dims(shape)
    dims = arg(call, 1, "dim")
    named = [dims] if isinstance(dims, int) else range(len(shape)) if dims is None else dims
    gone = [i for i in sorted({axis(d, len(shape)) for d in named}) if shape and shape[i] == 1]
    out = [d for i, d in enumerate(x) if i not in gone]

    def local(local: Local) -> Any:
        return local.op(aten.squeeze.dims, local.args[0], gone)

    return space.rule([x], [out], linear=[{0}], transparent=True, local=local, local_factors=space.sizes)


def _expand(call: Call) -> Rule:
    space = Space()
    old, new = call.operands[0].shape, result_shape(call)
    extra = len(new) - len(old)
    x = space.dims(old)
    out = [x[i - extra] if i >= extra and old[i - extra] == n else space.dim(n, "e") for i, n in enumerate(new)]
    return space.rule([x], [out], linear=[{0}], ints=shape_ints(path(call, 1, "size"), out), transparent=True)


def _repeat(call: Call) -> Rule:
    space = Space()
    old = call.operands[0].shape
    times = list(arg(call, 1, "repeats"))
    x: list[Dim] = [()] * (len(times) - len(old)) + space.dims(old)
    new = [space.dim(n, "r") for n in times]
    ints = shape_ints(path(call, 1, "repeats"), new)
    out = [(*r, *d) for r, d in zip(new, x, strict=True)]
    return space.rule([x[len(times) - len(old) :]], [out], linear=[{0}], ints=ints)


def _repeat_interleave(call: Call) -> Rule:
    """`(old new)`; without a dim the value is flattened, and then stays whole."""
    space = Space()
    shape = call.operands[0].shape
    dim = arg(call, 2, "dim")
    if dim is None:
        every = range(len(shape))
        return space.rule([space.dims(shape, whole=every)], [space.dims(result_shape(call), "o", whole=[0])])
    x = space.dims(shape)
    at = axis(dim, len(shape))
    new = space.dim(arg(call, 1, "repeats"), "r")
    out = [(*d, *new) if i == at else d for i, d in enumerate(x)]
    ints: Ints = {path(call, 1, "repeats"): (1, new)}
    if arg(call, 3, "output_size") is not None:
        ints[path(call, 3, "output_size")] = (1, out[at])
    return space.rule([x], [out], linear=[{0}], ints=ints)


def _diagonal(call: Call) -> Rule:
    """Both dims of the diagonal stay whole."""
    space = Space()
    shape = call.operands[0].shape
    ends = [axis(arg(call, 2, "dim1", 0), len(shape)), axis(arg(call, 3, "dim2", 1), len(shape))]
    x = space.dims(shape, whole=ends)
    out = [d for i, d in enumerate(x) if i not in ends] + [space.dim(result_shape(call)[-1], "o", whole=True)]
    return space.rule([x], [out], linear=[{0}])


ROWS: dict[str, RuleFn | str] = {
    **dict.fromkeys(["view", "reshape", "_unsafe_view"], _reshape),
    "permute": rearrange(_permute),
    "transpose.int": rearrange(_swap),
    "t": rearrange(_reverse),
    "numpy_T": rearrange(_reverse),
    "unsqueeze": rearrange(_unsqueeze),
    **dict.fromkeys(["squeeze", "squeeze.dim", "squeeze.dims"], _squeeze),
    "expand": _expand,
    "repeat": _repeat,
    "repeat_interleave.self_int": _repeat_interleave,
    "diagonal": _diagonal,
}
