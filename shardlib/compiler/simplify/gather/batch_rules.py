"""One node for what several do, each to its slice of a stack: the same op on the stack, whose dim 0 counts them; what
lookups do in a stack of tables is one `gather`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from shardlib.compiler.simplify.gather.table_gather import Emit
from shardlib.ops.bags import BAGS, BAGS_BACKWARD, MAX, MEAN

aten = torch.ops.aten
Node = Any  # of fx, whose arguments are what its op takes


def flat(x: Any) -> Iterator[Any]:
    """The leaves of arguments."""
    if isinstance(x, list | tuple):
        for y in x:
            yield from flat(y)
    elif isinstance(x, Mapping):
        yield from flat(tuple(x.values()))
    else:
        yield x


def batched(emit: Emit, node: Node, args: list[Any], n: int) -> Any:
    """What `n` nodes such as `node` do, whose tensors are stacked in `args` where these differ."""
    stacked = {i for i, x in enumerate(args) if isinstance(node.args[i], fx.Node) and x is not node.args[i]}
    return _FORMS.get(node.target, _pointwise)(emit, node, args, stacked, n)


def _first(x: Node, n: int) -> list[int]:
    return [n, *x.meta["val"].shape]


def _table(emit: Emit, x: Node, stacked: bool, n: int) -> Node:
    """What is the same for all, for each of them."""
    return x if stacked else emit(aten.expand.default, x, _first(x, n))


def _embedding(emit: Emit, node: Node, args: list[Any], stacked: set[int], n: int) -> Node:
    if 0 not in stacked:
        return emit(aten.embedding.default, *args)
    return emit.read(args[0], _table(emit, args[1], 1 in stacked, n))


def _index(emit: Emit, node: Node, args: list[Any], stacked: set[int], n: int) -> Node:
    ((index,), (mine,)) = args[1], node.args[1]
    index = _table(emit, index, index is not mine, n)
    tables = _table(emit, args[0], 0 in stacked, n)
    return emit.read(tables, emit.wrapped(index, tables.meta["val"].shape[1]))


def _index_select(emit: Emit, node: Node, args: list[Any], stacked: set[int], n: int) -> Node:
    return emit.read(_table(emit, args[0], 0 in stacked, n), _table(emit, args[2], 2 in stacked, n))


def _embedding_backward(emit: Emit, node: Node, args: list[Any], stacked: set[int], n: int) -> Node:
    grad, index = (_table(emit, args[i], i in stacked, n) for i in (0, 1))
    zeros = emit(aten.new_zeros.default, grad, [n, args[2], grad.meta["val"].shape[-1]])
    return emit.added(zeros, index, grad)


def _index_put(emit: Emit, node: Node, args: list[Any], stacked: set[int], n: int) -> Node:
    ((index,), (mine,)) = args[1], node.args[1]
    index = _table(emit, index, index is not mine, n)
    tables, rows = (_table(emit, args[i], i in stacked, n) for i in (0, 2))
    return emit.added(tables, emit.wrapped(index, tables.meta["val"].shape[1]), rows)


def _bags(emit: Emit, node: Node, args: list[Any], stacked: set[int], n: int) -> tuple[Node, None, None]:
    rows = emit.read(_table(emit, args[0], 0 in stacked, n), _table(emit, args[1], 1 in stacked, n))
    return emit(aten.mean.dim if args[3] == MEAN else aten.sum.dim_IntList, rows, [2]), None, None


def _bags_backward(emit: Emit, node: Node, args: list[Any], stacked: set[int], n: int) -> Node:
    grad, index = (_table(emit, args[i], i in stacked, n) for i in (0, 1))
    _, bags, width = grad.meta["val"].shape
    length = index.meta["val"].shape[2]
    grad = emit(aten.div.Tensor, grad, length) if args[6] == MEAN else grad
    rows = emit(aten.expand.default, emit(aten.unsqueeze.default, grad, 2), [n, bags, length, width])
    zeros = emit(aten.new_zeros.default, grad, [n, args[4], width])
    return emit.added(zeros, index, rows)


def _item(emit: Emit, node: Node, args: list[Any], stacked: set[int], n: int) -> Any:
    return args[0][args[1]]


def _pointwise(emit: Emit, node: Node, args: list[Any], stacked: set[int], n: int) -> Node:
    rank = node.meta["val"].dim()
    for i in stacked:
        shape = list(args[i].meta["val"].shape)
        if len(shape) <= rank:
            args[i] = emit(aten.reshape.default, args[i], [n, *[1] * (rank + 1 - len(shape)), *shape[1:]])
    return emit(node.target, *args, **node.kwargs)


def _along(emit: Emit, node: Node, args: list[Any], stacked: set[int], n: int) -> Node:
    """Ops whose second argument is a dim, or several."""
    rank = node.args[0].meta["val"].dim() + (node.target is aten.unsqueeze.default)
    dims = args[1]
    args[1] = [d % rank + 1 for d in dims] if isinstance(dims, list) else dims % rank + 1
    return emit(node.target, *args, **node.kwargs)


def _shaped(emit: Emit, node: Node, args: list[Any], stacked: set[int], n: int) -> Node:
    """Views whose second argument is a shape."""
    shape = list(node.meta["val"].shape)
    x, rank = args[0], node.args[0].meta["val"].dim()
    if node.target is aten.new_zeros.default:
        return emit(node.target, x, [n, *shape], **node.kwargs)
    if node.target is aten.expand.default and len(shape) > rank:
        x = emit(aten.reshape.default, x, [n, *[1] * (len(shape) - rank), *x.meta["val"].shape[1:]])
    return emit(node.target, x, [n, *shape])


def _permute(emit: Emit, node: Node, args: list[Any], stacked: set[int], n: int) -> Node:
    rank = node.args[0].meta["val"].dim()
    return emit(aten.permute.default, args[0], [0, *(d % rank + 1 for d in args[1])])


_FORMS: dict[Any, Callable[[Emit, Node, list[Any], set[int], int], Any]] = {
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.index_put.default: _index_put,
    BAGS: _bags,
    BAGS_BACKWARD: _bags_backward,
    operator.getitem: _item,
    aten.permute.default: _permute,
    **dict.fromkeys((aten.reshape.default, aten.view.default, aten.expand.default, aten.new_zeros.default), _shaped),
    **dict.fromkeys((aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.select.int), _along),
    **dict.fromkeys((aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.slice.Tensor), _along),
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


def has_form(node: Any) -> bool:
    """Returns whether there is one node for what some such nodes do."""
    tags, args = getattr(node.target, "tags", ()), node.args
    if not all(isinstance(x, _LEAVES) for x in flat((args, node.kwargs))):
        return False
    if node.target in _ASKED:
        return bool(_ASKED[node.target](*args))
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


_LEAVES = fx.Node | int | float | torch.dtype | torch.layout | torch.device | None


def _puts(x: Node, indices: list[Node], rows: Node, adds: bool = False) -> bool:
    """Returns whether rows, one for each index, are added."""
    (index,), x, rows = indices, x.meta["val"], rows.meta["val"]
    shape = (*index.meta["val"].shape, *x.shape[1:])
    return adds and _is_index(index) and rows.shape == shape and x.dtype == rows.dtype


def _is_index(x: Any) -> bool:
    return x is not None and x.meta["val"].dtype not in (torch.bool, torch.uint8)


# Which calls of ops with a form have it.
_ASKED: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_FORMS, lambda *args: True),
    aten.embedding_dense_backward.default: lambda grad, index, size, padding, scaled: padding < 0 and not scaled,
    aten.index.Tensor: lambda x, indices: len(indices) == 1 and _is_index(indices[0]),
    aten.index_put.default: lambda x, indices, *rest: len(indices) == 1 and _puts(x, indices, *rest),
    aten.index_select.default: lambda x, dim, index: dim % x.meta["val"].dim() == 0,
    BAGS: lambda table, index, weights, mode, padding: weights is None and mode != MAX and padding < 0,
    BAGS_BACKWARD: lambda *args: args[6] != MAX and args[7] is None and args[8] < 0 and not args[5],
    operator.getitem: lambda source, i: source.target is BAGS and i < 2,
    **dict.fromkeys((aten.sum.dim_IntList, aten.mean.dim, aten.amax.default), lambda *args: len(args) > 1 and args[1]),
    aten.slice.Tensor: lambda *args: len(args) > 1,
}
