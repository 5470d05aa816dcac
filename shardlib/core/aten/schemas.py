"""Reads the schemas of ATen ops: their arguments, which ops write, and how to write through a view."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from shardlib.core.aten.op_traits import has_trait, is_view
from shardlib.core.torch_internals.torch_private import OpOverload, pytree, schema_of

aten = torch.ops.aten

Emit = Callable[..., fx.Node]  # emit(target, *args, **kwargs): a new node with its value
Inverse = Callable[[Emit, fx.Node, fx.Node, fx.Node], fx.Node | None]  # (emit, view, base, value) -> the new base


@cache
def written_arguments(target: Any) -> tuple[str, ...]:
    """Returns the names of the arguments that an op writes, out= first, in the order of functional results."""
    if not isinstance(target, OpOverload):
        return ()
    written = [a for a in schema_of(target).arguments if a.alias_info is not None and a.alias_info.is_write]
    return tuple(a.name for a in sorted(written, key=lambda a: not a.kwarg_only))


def may_draw_random(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a call draws random numbers; attention and rrelu do so only with dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    parameters = schema_of(target).arguments
    values = {a.name: a.default_value for a in parameters if a.has_default_value()}
    values |= {a.name: x for a, x in zip(parameters, args, strict=False)} | dict(kwargs)
    return all(values.get(name, True) not in (0, False) for name in ("dropout_p", "training", "train"))


def find_written_nodes(graph: fx.Graph) -> dict[fx.Node, None]:
    """Returns the nodes of a graph whose memory some op writes, directly or through views."""
    owners: dict[fx.Node, fx.Node] = {}
    written: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op != "call_function" or not node.args:
            continue
        if isinstance(node.args[0], fx.Node) and (node.target is operator.getitem or is_view(node.target)):
            owners[node] = owners.get(node.args[0], node.args[0])
        names = written_arguments(node.target)
        for i, a in enumerate(schema_of(node.target).arguments if names else ()):
            if a.name in names:
                value = node.args[i] if i < len(node.args) else node.kwargs.get(a.name)
                written |= dict.fromkeys(owners.get(x, x) for x in pytree.tree_leaves(value) if isinstance(x, fx.Node))
    return written


def get_argument(node: fx.Node, name: str) -> Any:
    """Returns the argument `name` of a call, passed by position or by name, or its default."""
    assert isinstance(node.target, OpOverload)
    for i, a in enumerate(schema_of(node.target).arguments):
        if a.name == name:
            return node.args[i] if i < len(node.args) else node.kwargs.get(name, a.default_value)
    raise KeyError(name)


def get_fill_value(node: fx.Node) -> Any:
    """Returns the number with which a call fills a tensor; None for other calls."""
    if not has_trait(node.target, "fills"):
        return None
    return 0 if has_trait(node.target, "zeros") else get_argument(node, "fill_value")


def get_arguments(node: fx.Node) -> dict[str, Any]:
    """Returns all arguments of a call by name, in the order of its schema."""
    assert isinstance(node.target, OpOverload)
    return {a.name: get_argument(node, a.name) for a in schema_of(node.target).arguments}


def traced_values(node: fx.Node) -> list[torch.Tensor]:
    """Returns the fake tensors of a node's results."""
    return [x for x in pytree.tree_leaves(node.meta.get("val")) if isinstance(x, torch.Tensor)]


def find_nodes(value: Any) -> list[fx.Node]:
    """Returns the nodes in an argument: a node, or lists of nodes."""
    if isinstance(value, fx.Node):
        return [value]
    return [x for item in value for x in find_nodes(item)] if isinstance(value, list | tuple) else []


# --- writing through views --------------------------------------------------------------------------------------------


def write_through_view(emit: Emit, view: fx.Node, base: fx.Node, value: fx.Node) -> fx.Node | None:
    """Emits `base` with the elements of `view` replaced by `value`; None for views without an inverse."""
    if view.target is operator.getitem:
        parts, index = view.args
        assert isinstance(parts, fx.Node)
        assert isinstance(index, int)
        dim = get_argument(parts, "dim")
        if parts.target is aten.unbind.int:
            return emit(aten.select_scatter.default, base, value, dim, index)
        start = sum(p.shape[dim] for p in parts.meta["val"][:index])
        return emit(aten.slice_scatter.default, base, value, dim, start, start + value.meta["val"].shape[dim])
    inverse = _INVERSE.get(view.target)
    return inverse(emit, view, base, value) if inverse else None


def _same(emit: Emit, view: fx.Node, base: fx.Node, value: fx.Node) -> fx.Node:
    return value


def _reshape(emit: Emit, view: fx.Node, base: fx.Node, value: fx.Node) -> fx.Node:
    return emit(aten.reshape.default, value, list(base.meta["val"].shape))


def _permute(emit: Emit, view: fx.Node, base: fx.Node, value: fx.Node) -> fx.Node:
    rank = base.meta["val"].dim()
    dims = [d % rank for d in get_argument(view, "dims")]
    return emit(aten.permute.default, value, sorted(range(rank), key=dims.__getitem__))


def _itself(emit: Emit, view: fx.Node, base: fx.Node, value: fx.Node) -> fx.Node:
    return emit(view.target, value, *view.args[1:], **view.kwargs)


def _scattered(target: OpOverload) -> Inverse:
    return lambda emit, view, base, value: emit(target, base, value, *view.args[1:], **view.kwargs)


def _contiguous(emit: Emit, value: fx.Node) -> fx.Node:
    """Makes the value contiguous, which a view as another dtype needs."""
    if value.meta["val"].is_contiguous():
        return value
    return emit(aten.clone.default, value, memory_format=torch.contiguous_format)


_INVERSE: dict[Any, Inverse] = {
    **dict.fromkeys((aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift.default), _same),
    # In a body that was traced separately, views are `reshape`.
    **dict.fromkeys(
        (getattr(aten, x).default for x in ("view", "_unsafe_view", "_reshape_alias", "reshape")), _reshape
    ),
    aten.unsqueeze.default: _reshape,
    **dict.fromkeys((aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims), _reshape),
    **dict.fromkeys((aten.t.default, aten.transpose.int), _itself),
    aten._conj.default: lambda emit, view, base, value: emit(aten.conj_physical.default, value),
    aten._neg_view.default: lambda emit, view, base, value: emit(aten.neg.default, value),
    aten.permute.default: _permute,
    aten.slice.Tensor: _scattered(aten.slice_scatter.default),
    aten.select.int: _scattered(aten.select_scatter.default),
    aten.diagonal.default: _scattered(aten.diagonal_scatter.default),
    aten.index.Tensor: lambda emit, view, base, value: _unindexed(emit, view, base, value),
    aten.view_as_real.default: lambda emit, view, base, value: emit(
        aten.view_as_complex.default, _contiguous(emit, value)
    ),
    aten.view_as_complex.default: lambda emit, view, base, value: emit(aten.view_as_real.default, value),
}


# --- as_strided -------------------------------------------------------------------------------------------------------


def unstrided(emit: Emit, base: fx.Node, size: Sequence[int], stride: Sequence[int], offset: int) -> fx.Node | None:
    """Emits `as_strided` of a dense tensor as slices, a permutation and a reshape, or as an index; None if not dense.

    Strides describe one device's memory and have no meaning on shards. Autograd calls `as_strided` for writes to
    slices.
    """
    val: Tensor = base.meta["val"]
    if 0 in size:
        nothing = emit(aten.slice.Tensor, emit(aten.reshape.default, base, [val.numel()]), 0, 0, 0)
        return emit(aten.reshape.default, nothing, list(size))
    if any(s == 0 and n > 1 for n, s in zip(size, stride, strict=True)):
        return _indexed(emit, base, size, stride, offset)  # some elements repeat
    view = _sliced(emit, base, size, stride, offset)
    if view is None and val.is_contiguous():  # view the memory as a grid in which every stride is a step along a dim
        steps = sorted({s for n, s in zip(size, stride, strict=True) if n != 1} | {1, val.numel()}, reverse=True)
        if all(a % b == 0 for a, b in pairwise(steps)):
            grid = emit(aten.reshape.default, base, [a // b for a, b in pairwise(steps)])
            view = _sliced(emit, grid, size, stride, offset)
    return view or _windows(emit, base, size, stride, offset) or _indexed(emit, base, size, stride, offset)


def _sliced(emit: Emit, base: fx.Node, size: Sequence[int], stride: Sequence[int], offset: int) -> fx.Node | None:
    val: Tensor = base.meta["val"]
    order = sorted((d for d in range(val.dim()) if val.shape[d] != 1), key=val.stride, reverse=True)
    if not _dense([val.shape[d] for d in order], [val.stride(d) for d in order]):
        return None
    if val.numel() == math.prod(size) and val.is_contiguous() and _dense(size, stride) and not offset:
        return emit(aten.reshape.default, base, list(size))
    long = [(n, s) for n, s in zip(size, stride, strict=True) if n != 1]
    if len(long) <= 1 and val.is_contiguous():  # such as a diagonal: every n-th element of the memory
        count, step = long[0] if long else (1, 1)
        flat = emit(aten.reshape.default, base, [val.numel()])
        line = emit(aten.slice.Tensor, flat, 0, offset, offset + step * (count - 1) + 1, step)
        return emit(aten.reshape.default, line, list(size))
    cuts: dict[int, tuple[int, int, int]] = {}  # base dim -> start, count, step
    for d in order:
        cuts[d] = (offset // val.stride(d), 1, 1)
        offset %= val.stride(d)
    taken: list[int] = []
    for n, s in zip(size, stride, strict=True):
        if n == 1:
            continue
        below = [d for d in order if val.stride(d) <= s]
        if not below or below[0] in taken or s % val.stride(below[0]):
            return None
        d = below[0]
        start, step = cuts[d][0], s // val.stride(d)
        if start + step * (n - 1) >= val.shape[d]:
            return None
        cuts[d] = (start, n, step)
        taken.append(d)
    node = base
    for d, (start, count, step) in cuts.items():
        if (start, count, step) != (0, val.shape[d], 1):
            node = emit(aten.slice.Tensor, node, d, start, start + step * (count - 1) + 1, step)
    rest = [d for d in range(val.dim()) if d not in taken]
    if taken + rest != list(range(val.dim())):
        node = emit(aten.permute.default, node, taken + rest)
    return node if node.meta["val"].shape == torch.Size(size) else emit(aten.reshape.default, node, list(size))


def _windows(emit: Emit, base: fx.Node, size: Sequence[int], stride: Sequence[int], offset: int) -> fx.Node | None:
    """Emits overlapping windows by `unfold`: the minor of two dims reaches beyond one step of the major one."""
    val: Tensor = base.meta["val"]
    order = sorted((d for d, n in enumerate(size) if n != 1), key=lambda d: -stride[d])
    groups: list[list[int]] = []  # dims of the result that are one dim of the memory
    for d in order:
        overlaps = groups and len(groups[-1]) == 1 and size[d] * stride[d] > stride[groups[-1][0]] > stride[d]
        groups = [*groups[:-1], [*groups[-1], d]] if overlaps else [*groups, [d]]
    steps = [val.numel(), *(stride[group[-1]] for group in groups)]
    steps = steps if steps[-1] == 1 else [*steps, 1]
    steps = steps if len(steps) > 1 and steps[0] != steps[1] else steps[1:]
    if any(a % b or a == b for a, b in pairwise(steps)) or (memory := _in_memory(emit, base)) is None:
        return None
    if any(stride[group[0]] % stride[group[-1]] for group in groups):
        return None
    node, windows = emit(aten.reshape.default, memory, [a // b for a, b in pairwise(steps)]), list[int]()
    at = {b: k for k, (_, b) in enumerate(pairwise(steps))}
    for k, (a, b) in enumerate(pairwise(steps)):
        start, offset = divmod(offset, b)
        group = next((group for group in groups if at[stride[group[-1]]] == k), [])
        step = stride[group[0]] // b if group else 1
        reach = step * (size[group[0]] - 1) + 1 if group else 1
        reach += size[group[1]] - 1 if len(group) == 2 else 0
        if start + reach > a // b:
            return None
        if (start, reach) != (0, a // b):
            node = emit(aten.slice.Tensor, node, k, start, start + reach)
        if len(group) == 2:
            node = emit(aten.unfold.default, node, k, size[group[1]], step)
            windows.append(group[1])
        elif step > 1:
            node = emit(aten.slice.Tensor, node, k, 0, reach, step)
    memory_dims = [
        next((group[0] for group in groups if at[stride[group[-1]]] == k), None) for k in range(len(steps) - 1)
    ]
    kept = [d for d in memory_dims if d is not None] + windows
    taken = [k for k, d in enumerate(memory_dims) if d is not None] + [
        len(memory_dims) + i for i in range(len(windows))
    ]
    dims = [k for _, k in sorted(zip(kept, taken, strict=True))] + [k for k, d in enumerate(memory_dims) if d is None]
    if dims != [*range(len(dims))]:
        node = emit(aten.permute.default, node, dims)
    return node if node.meta["val"].shape == torch.Size(size) else emit(aten.reshape.default, node, list(size))


def _indexed(emit: Emit, base: fx.Node, size: Sequence[int], stride: Sequence[int], offset: int) -> fx.Node | None:
    """Emits an index of every element by its position in memory."""
    val: Tensor = base.meta["val"]
    if (memory := _in_memory(emit, base)) is None:
        return None
    flat = emit(aten.reshape.default, memory, [val.numel()])
    where = emit(aten.full.default, [1] * len(size), offset, dtype=torch.int64, device=val.device)
    for d, (n, s) in enumerate(zip(size, stride, strict=True)):
        if s and n > 1:
            steps = emit(aten.arange.start_step, 0, n * s, s, dtype=torch.int64, device=val.device)
            line = emit(aten.reshape.default, steps, [n if i == d else 1 for i in range(len(size))])
            where = emit(aten.add.Tensor, where, line)
    view = emit(aten.index.Tensor, flat, [emit(aten.expand.default, where, list(size))])
    view.meta["overlaps"] = not is_non_overlapping(size, stride)
    return view


def _in_memory(emit: Emit, base: fx.Node) -> fx.Node | None:
    """Permutes the dims of a tensor to their order in memory; None if the memory has gaps."""
    val: Tensor = base.meta["val"]
    order = sorted(range(val.dim()), key=lambda d: (val.stride()[d], val.shape[d]), reverse=True)
    if not _dense([val.shape[d] for d in order], [val.stride(d) for d in order]):
        return None
    return base if order == list(range(val.dim())) else emit(aten.permute.default, base, order)


def _unindexed(emit: Emit, view: fx.Node, base: fx.Node, value: fx.Node) -> fx.Node | None:
    return None if view.meta["overlaps"] else emit(aten.index_put.default, base, view.args[1], value)


def is_non_overlapping(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Returns whether no two elements share memory: each stride exceeds the reach of all smaller ones."""
    reach = 0
    for s, n in sorted((s, n) for n, s in zip(size, stride, strict=True) if n != 1):
        if s <= reach:
            return False
        reach += s * (n - 1)
    return True


def _dense(sizes: Iterable[int], strides: Iterable[int]) -> bool:
    """Returns whether dims, major first, fill their memory without a gap."""
    expected = 1
    for n, s in reversed(list(zip(sizes, strides, strict=True))):
        if n != 1 and s != expected:
            return False
        expected *= n
    return True
