"""Batches equal ops on the slices of a stack into one op on the stack, whose dim 0 counts the slices.

Lookups in the tables of a stack become one `gather`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from shardlib.compiler.simplify.emit import Emit, Node
from shardlib.compiler.simplify.gather.table_gather import add_rows, read_rows, wrap_index
from shardlib.ops.bags import BAGS, BAGS_BACKWARD, MAX, MEAN

aten = torch.ops.aten


def flatten_arguments(x: Any) -> Iterator[Any]:
    """Yields the items of nested arguments."""
    if isinstance(x, list | tuple):
        for y in x:
            yield from flatten_arguments(y)
    elif isinstance(x, Mapping):
        yield from flatten_arguments(tuple(x.values()))
    else:
        yield x


def batch_op(emit: Emit, node: Node, args: list[Any], n: int) -> Any:
    """Emits the op that replaces `n` nodes such as `node`; operands in which they differ are stacked in `args`."""
    stacked = {i for i, x in enumerate(args) if isinstance(node.args[i], fx.Node) and x is not node.args[i]}
    return _RULES.get(node.target, _batch_pointwise)(emit, node, args, stacked, n)


def _stack(emit: Emit, x: Node, is_stacked: bool, n: int) -> Node:
    """Emits an operand with a leading dim of `n`; a common one is expanded."""
    return x if is_stacked else emit(aten.expand.default, x, [n, *x.meta["val"].shape])


def _batch_embedding(emit: Emit, node: Node, args: list[Any], stacked: set[int], n: int) -> Node:
    if 0 not in stacked:
        return emit(aten.embedding.default, *args)
    return read_rows(emit, args[0], _stack(emit, args[1], 1 in stacked, n))


def _batch_index(emit: Emit, node: Node, args: list[Any], stacked: set[int], n: int) -> Node:
    ((index,), (own_index,)) = args[1], node.args[1]
    index = _stack(emit, index, index is not own_index, n)
    tables = _stack(emit, args[0], 0 in stacked, n)
    return read_rows(emit, tables, wrap_index(emit, index, tables.meta["val"].shape[1]))


def _batch_index_select(emit: Emit, node: Node, args: list[Any], stacked: set[int], n: int) -> Node:
    return read_rows(emit, _stack(emit, args[0], 0 in stacked, n), _stack(emit, args[2], 2 in stacked, n))


def _batch_embedding_backward(emit: Emit, node: Node, args: list[Any], stacked: set[int], n: int) -> Node:
    grad, index = (_stack(emit, args[i], i in stacked, n) for i in (0, 1))
    zeros = emit(aten.new_zeros.default, grad, [n, args[2], grad.meta["val"].shape[-1]])
    return add_rows(emit, zeros, index, grad)


def _batch_index_put(emit: Emit, node: Node, args: list[Any], stacked: set[int], n: int) -> Node:
    ((index,), (own_index,)) = args[1], node.args[1]
    index = _stack(emit, index, index is not own_index, n)
    tables, rows = (_stack(emit, args[i], i in stacked, n) for i in (0, 2))
    return add_rows(emit, tables, wrap_index(emit, index, tables.meta["val"].shape[1]), rows)


def _batch_bags(emit: Emit, node: Node, args: list[Any], stacked: set[int], n: int) -> tuple[Node, None, None]:
    rows = read_rows(emit, _stack(emit, args[0], 0 in stacked, n), _stack(emit, args[1], 1 in stacked, n))
    return emit(aten.mean.dim if args[3] == MEAN else aten.sum.dim_IntList, rows, [2]), None, None


def _batch_bags_backward(emit: Emit, node: Node, args: list[Any], stacked: set[int], n: int) -> Node:
    grad, index = (_stack(emit, args[i], i in stacked, n) for i in (0, 1))
    _, bags, width = grad.meta["val"].shape
    length = index.meta["val"].shape[2]
    grad = emit(aten.div.Tensor, grad, length) if args[6] == MEAN else grad
    rows = emit(aten.expand.default, emit(aten.unsqueeze.default, grad, 2), [n, bags, length, width])
    zeros = emit(aten.new_zeros.default, grad, [n, args[4], width])
    return add_rows(emit, zeros, index, rows)


def _batch_item(emit: Emit, node: Node, args: list[Any], stacked: set[int], n: int) -> Any:
    return args[0][args[1]]


def _batch_pointwise(emit: Emit, node: Node, args: list[Any], stacked: set[int], n: int) -> Node:
    rank = node.meta["val"].dim()
    for i in stacked:
        shape = list(args[i].meta["val"].shape)
        if len(shape) <= rank:
            args[i] = emit(aten.reshape.default, args[i], [n, *[1] * (rank + 1 - len(shape)), *shape[1:]])
    return emit(node.target, *args, **node.kwargs)


def _batch_along_dims(emit: Emit, node: Node, args: list[Any], stacked: set[int], n: int) -> Node:
    """Batches an op whose second argument is a dim, or several."""
    rank = node.args[0].meta["val"].dim() + (node.target is aten.unsqueeze.default)
    dims = args[1]
    args[1] = [d % rank + 1 for d in dims] if isinstance(dims, list) else dims % rank + 1
    return emit(node.target, *args, **node.kwargs)


def _batch_to_shape(emit: Emit, node: Node, args: list[Any], stacked: set[int], n: int) -> Node:
    """Batches an op whose second argument is a shape."""
    shape = list(node.meta["val"].shape)
    x, rank = args[0], node.args[0].meta["val"].dim()
    if node.target is aten.new_zeros.default:
        return emit(node.target, x, [n, *shape], **node.kwargs)
    if node.target is aten.expand.default and len(shape) > rank:
        x = emit(aten.reshape.default, x, [n, *[1] * (len(shape) - rank), *x.meta["val"].shape[1:]])
    return emit(node.target, x, [n, *shape])


def _batch_permute(emit: Emit, node: Node, args: list[Any], stacked: set[int], n: int) -> Node:
    rank = node.args[0].meta["val"].dim()
    return emit(aten.permute.default, args[0], [0, *(d % rank + 1 for d in args[1])])


_RULES: dict[Any, Callable[[Emit, Node, list[Any], set[int], int], Any]] = {
    aten.embedding.default: _batch_embedding,
    aten.embedding_dense_backward.default: _batch_embedding_backward,
    aten.index.Tensor: _batch_index,
    aten.index_select.default: _batch_index_select,
    aten.index_put.default: _batch_index_put,
    BAGS: _batch_bags,
    BAGS_BACKWARD: _batch_bags_backward,
    operator.getitem: _batch_item,
    aten.permute.default: _batch_permute,
    **dict.fromkeys(
        (aten.reshape.default, aten.view.default, aten.expand.default, aten.new_zeros.default), _batch_to_shape
    ),
    **dict.fromkeys((aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.select.int), _batch_along_dims),
    **dict.fromkeys((aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.slice.Tensor), _batch_along_dims),
}
LOOKUPS = {
    aten.embedding.default,
    aten.embedding_dense_backward.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.index_put.default,
    BAGS,
    BAGS_BACKWARD,
}


def can_batch(node: Any) -> bool:
    """Returns whether a rule batches nodes such as `node`."""
    tags, args = getattr(node.target, "tags", ()), node.args
    if not all(isinstance(x, _ITEMS) for x in flatten_arguments((args, node.kwargs))):
        return False
    if node.target in _CONDITIONS:
        return bool(_CONDITIONS[node.target](*args))
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


_ITEMS = fx.Node | int | float | torch.dtype | torch.layout | torch.device | None


def _adds_rows(x: Node, indices: list[Node], rows: Node, adds: bool = False) -> bool:
    """Returns whether `index_put` adds rows, one for each index."""
    (index,), x, rows = indices, x.meta["val"], rows.meta["val"]
    shape = (*index.meta["val"].shape, *x.shape[1:])
    return adds and _is_index(index) and rows.shape == shape and x.dtype == rows.dtype


def _is_index(x: Any) -> bool:
    return x is not None and x.meta["val"].dtype not in (torch.bool, torch.uint8)


# Conditions on the arguments of ops that have a rule.
_CONDITIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_RULES, lambda *args: True),
    aten.embedding_dense_backward.default: lambda grad, index, size, padding, scaled: padding < 0 and not scaled,
    aten.index.Tensor: lambda x, indices: len(indices) == 1 and _is_index(indices[0]),
    aten.index_put.default: lambda x, indices, *rest: len(indices) == 1 and _adds_rows(x, indices, *rest),
    aten.index_select.default: lambda x, dim, index: dim % x.meta["val"].dim() == 0,
    BAGS: lambda table, index, weights, mode, padding: weights is None and mode != MAX and padding < 0,
    BAGS_BACKWARD: lambda *args: args[6] != MAX and args[7] is None and args[8] < 0 and not args[5],
    operator.getitem: lambda source, i: source.target is BAGS and i < 2,
    **dict.fromkeys((aten.sum.dim_IntList, aten.mean.dim, aten.amax.default), lambda *args: len(args) > 1 and args[1]),
    aten.slice.Tensor: lambda *args: len(args) > 1,
}
