"""Views and rearrangements: the result has the operand's elements in another order. All rules follow from shapes.

A reshape regroups factors. Its boundaries are the products of sizes from the right. A boundary is shared if it divides,
or is divided by, every other one. Between two adjacent boundaries that are both shared lies one factor of operand and
result. Dims between other boundaries get factors of their own, which stay whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardlib.core.torch_internals.torch_private import schema_of, without_modes
from shardlib.rules.iteration_space import (
    Dim,
    Ints,
    Space,
    arg,
    argument_path,
    normalize_dim,
    result_shape,
    size_arguments,
)
from shardlib.rules.out_variants import by_torch
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, LocalBuilder, LocalCode, Rule, RuleFn

aten = torch.ops.aten


def regroup(space: Space, old: Sequence[int], new: Sequence[int]) -> tuple[list[Dim], list[Dim]]:
    """Returns the labels of a reshape from `old` to `new`, major factors first.

    Example:
        >>> space = Space()
        >>> regroup(space, (6, 4), (2, 12)), space.sizes
        (([('d', 'd1'), ('d2',)], [('d',), ('d1', 'd2')]), {'d': 2, 'd1': 3, 'd2': 4})
        >>> space = Space()
        >>> regroup(space, (6, 4, 2), (4, 12)), sorted(space.whole)
        (([('d2',), ('d1',), ('d',)], [('d4',), ('d3', 'd')]), ['d1', 'd2', 'd3', 'd4'])
    """
    if math.prod(old) == 0:
        all_dims = range(max(len(old), len(new)))
        return space.dims(old, whole=all_dims), space.dims(new, whole=all_dims)
    old_bounds, new_bounds = _bounds(old), _bounds(new)
    bounds = sorted({*old_bounds, *new_bounds}, reverse=True)
    shared = {b: None for b in bounds if all(b % c == 0 or c % b == 0 for c in bounds)}
    parts: dict[tuple[int, int], Dim] = {}
    for high, low in itertools.pairwise(bounds):
        if low in shared and high in shared:
            parts[low, high] = space.dim(high // low)

    def label(edges: Sequence[int]) -> list[Dim]:
        dims: list[Dim] = []
        for low, high in itertools.pairwise(edges):
            factors: Dim = ()
            if (inner := parts.get((low, high))) is not None:
                factors = inner
            elif low < high:
                for hi, lo in itertools.pairwise((high, *(b for b in shared if low < b < high), low)):
                    factors += parts.get((lo, hi)) or space.dim(hi // lo, whole=True)
            dims.append(factors)
        return dims[::-1]

    return label(old_bounds), label(new_bounds)


def _bounds(shape: Sequence[int]) -> list[int]:
    """Returns 1, and the products of the last 1, 2, ... sizes."""
    out = [1]
    for n in reversed(shape):
        out.append(out[-1] * n)
    return out


def _reshape(call: Call) -> Rule:
    space = Space()
    old, new = regroup(space, call.operands[0].shape, result_shape(call))
    ints = size_arguments(call, "shape" if call.target == aten.reshape.default else "size", new)

    def local(local: LocalBuilder) -> Any:
        return local.op(aten.reshape.default, local.args[0], _sizes(local, new))

    # The strides of a shard, which is a slice, may allow no view.
    view = call.target != aten.reshape.default
    return space.rule(
        [old],
        [new],
        linear=[{0}],
        ints=ints,
        emit=local if view else None,
        local_factors=space.sizes if view else (),
        transparent=True,
    )


def _sizes(local: LocalBuilder, dims: Sequence[Dim]) -> list[Any]:
    return [math.prod(local.size(f) for f in dim) for dim in dims]


def view_labels(
    space: Space, view: Any, shape: Sequence[int], *args: Any, **kwargs: Any
) -> tuple[list[Dim], list[list[Dim]]]:
    """Returns the labels of a value of this shape, and of its views.

    They follow from the strides of the views of a value whose strides are powers of two. A dim that moves along several
    dims, as a diagonal does, is a factor of its own and stays whole, as do the dims that no view has in full.
    """
    with without_modes():
        results = view(torch.empty_strided(shape, [1 << i for i in range(len(shape))], device="meta"), *args, **kwargs)
    views = [
        list(zip(v.shape, v.stride(), strict=True)) for v in ([results] if isinstance(results, Tensor) else results)
    ]
    single = {s.bit_length() - 1: n for v in views for n, s in v if n != 1 and s.bit_count() == 1}
    unchanged = {at for at, n in single.items() if n == shape[at]}
    x = space.dims(shape, whole={*range(len(shape))} - unchanged)

    def label(n: int, stride: int) -> Dim:
        at = stride.bit_length() - 1
        whole = at not in unchanged or stride.bit_count() > 1
        return space.dim(n, "o", whole=stride > 0) if whole else x[at]

    return x, [[label(n, s) if n != 1 else () for n, s in v] for v in views]


def _view(call: Call) -> Rule:
    """Returns the rule of a view, or of its copy."""
    space, schema = Space(), schema_of(call.target)
    name = schema.name.partition("::")[2].removesuffix("_copy")
    view = getattr(getattr(aten, name), schema.overload_name or "default")
    x, out = view_labels(space, view, call.operands[0].shape, *call.args[1:], **call.kwargs)
    return space.rule([x], out, linear=[{0}], transparent=not space.whole and len(out) == 1)


def _squeeze(call: Call) -> Rule:
    """Removes dims of size 1. A sharded dim may have local size 1, so the local form names the removed dims."""
    rule, shape = _view(call), call.operands[0].shape
    dims = arg(call, "dim", None)
    named = range(len(shape)) if dims is None else [dims] if isinstance(dims, int) else dims
    removed = [i for i in sorted({normalize_dim(d, len(shape)) for d in named}) if shape and shape[i] == 1]

    def local(local: LocalBuilder) -> Any:
        return local.op(aten.squeeze.dims, local.args[0], removed)

    return replace(rule, local=LocalCode(local, frozenset(rule.sizes)))


def _expand(call: Call) -> Rule:
    rule = _view(call)
    return replace(rule, ints=size_arguments(call, "size", rule.results[0]))


def _repeat(call: Call) -> Rule:
    space = Space()
    old = call.operands[0].shape
    times = list(arg(call, "repeats"))
    x: list[Dim] = [()] * (len(times) - len(old)) + space.dims(old)
    new = [space.dim(n, "r") for n in times]
    ints = size_arguments(call, "repeats", new)
    out = [(*r, *d) for r, d in zip(new, x, strict=True)]
    return space.rule([x[len(times) - len(old) :]], [out], linear=[{0}], ints=ints)


def _repeat_interleave(call: Call) -> Rule:
    """The dim becomes `(old new)`. Without a dim the op flattens the value, which stays whole."""
    space = Space()
    shape = call.operands[0].shape
    dim = arg(call, "dim")
    if dim is None:
        all_dims = range(len(shape))
        return space.rule([space.dims(shape, whole=all_dims)], [space.dims(result_shape(call), "o", whole=[0])])
    x = space.dims(shape)
    at = normalize_dim(dim, len(shape))
    new = space.dim(arg(call, "repeats"), "r")
    out = [(*d, *new) if i == at else d for i, d in enumerate(x)]
    ints: Ints = {argument_path(call, "repeats"): (1, new)}
    if arg(call, "output_size") is not None:
        ints[argument_path(call, "output_size")] = (1, out[at])
    return space.rule([x], [out], linear=[{0}], ints=ints)


def _reinterpret(call: Call) -> Rule:
    """`view.dtype`: the last dim stays whole if the dtypes differ in size."""
    same_size = call.operands[0].shape == result_shape(call)
    return pattern("... -> ..." if same_size else "... _ -> ... _", flops=0)(call)


def _as_strided_scatter(
    x: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    out = x.clone()
    out.as_strided(size, stride, storage_offset).copy_(src)
    return out


_VIEWS = [("permute", ""), ("transpose", ".int"), ("t", ""), ("unsqueeze", ""), ("unbind", ".int")]

ROWS: dict[str, RuleFn | str] = {
    **dict.fromkeys(["view", "reshape", "_unsafe_view", "view_copy", "_reshape_copy"], _reshape),
    **{f"{view}{copy}{overload}": _view for view, overload in _VIEWS for copy in ("", "_copy")},
    **dict.fromkeys([f"squeeze{copy}{dim}" for copy in ("", "_copy") for dim in ("", ".dim", ".dims")], _squeeze),
    **dict.fromkeys(["expand", "expand_copy"], _expand),
    "repeat": _repeat,
    "repeat_interleave.self_int": _repeat_interleave,
    **dict.fromkeys(["view.dtype", "view_copy.dtype"], _reinterpret),
}

DECOMPOSED: dict[str, Any] = {
    **by_torch("_chunk_cat", "rot90", "channel_shuffle", "pixel_shuffle", "pixel_unshuffle"),
    **by_torch("narrow_copy", "as_strided_copy"),
    "as_strided_scatter": _as_strided_scatter,
}
