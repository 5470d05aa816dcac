"""Rewrites lookups in several tables of one tensor as `gather` along one dim, so that tables may be sharded.

A device that holds a table then looks up the rows of that table. `w[arange(n), i]` is such a lookup, and so is the
embedding of a table under vmap.
"""

from __future__ import annotations

import torch
from torch import fx

from shardlib.compiler.simplify.emit import Emit, Node
from shardlib.compiler.simplify.rewrite import Rewrite, RewritePass
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.aten.schemas import get_argument

aten = torch.ops.aten
_VIEWS = (aten.unsqueeze.default, aten.reshape.default, aten.view.default, aten.expand.default)


# --- what is emitted --------------------------------------------------------------------------------------------------


def _move_dim(emit: Emit, x: Node, source: int, to: int) -> Node:
    """Emits `x` with one of its dims at another position."""
    order = list(range(x.meta["val"].dim()))
    order.insert(to, order.pop(source))
    return x if order == sorted(order) else emit(aten.permute.default, x, order)


def _wrap_index(emit: Emit, index: Node, size: int) -> Node:
    """Emits an index that counts from the front, for one that may count from the end."""
    shift = emit(aten.mul.Tensor, emit(aten.lt.Scalar, index, 0), size)
    return emit(aten.add.Tensor, index, shift)


def _read_rows(emit: Emit, tables: Node, index: Node) -> Node:
    """Emits the rows `index`, `[k, ...]`, of each table in `tables`, `[k, v, ...]`."""
    shape, index_shape = list(tables.meta["val"].shape), list(index.meta["val"].shape)
    rows = emit(aten.gather.default, tables, 1, _spread_index(emit, index, shape))
    return emit(aten.reshape.default, rows, [*index_shape, *shape[2:]])


def _add_rows(emit: Emit, tables: Node, index: Node, rows: Node) -> Node:
    """Emits `tables` with `rows` added to the rows `index`."""
    shape = list(tables.meta["val"].shape)
    flat = emit(aten.reshape.default, rows, [shape[0], index.meta["val"][0].numel(), *shape[2:]])
    return emit(aten.scatter_add.default, tables, 1, _spread_index(emit, index, shape), flat)


def _spread_index(emit: Emit, index: Node, shape: list[int]) -> Node:
    """Emits an index `[k, ...]` of rows in the form that `gather` needs for tables of `shape`, `[k, v, ...]`."""
    rest, count = shape[2:], index.meta["val"][0].numel()
    flat = emit(aten.reshape.default, index, [shape[0], count, *[1] * len(rest)])
    return emit(aten.expand.default, flat, [shape[0], count, *rest]) if rest else flat


# --- rows of the table ------------------------------------------------------------------------------------------------


def _gather_index(emit: Emit, node: Node) -> Node | None:
    tables, match = node.args[0], _match_counted_pair(node)
    if match is None:
        return None
    index, dim = match
    if _stays_whole(tables, 0) and _stays_whole(index, dim):
        return None
    index = _move_dim(emit, index, dim, 0)
    rows = _read_rows(emit, tables, _wrap_index(emit, index, tables.meta["val"].shape[1]))
    return _move_dim(emit, rows, 0, dim)


def _adds_rows(node: Node) -> bool:
    tables, _, rows, *_ = node.args
    return bool(get_argument(node, "accumulate") and tables.meta["val"].dtype == rows.meta["val"].dtype)


def _scatter_index(emit: Emit, node: Node) -> Node | None:
    tables, match, rows = node.args[0], _match_counted_pair(node), node.args[2]
    if match is None:
        return None
    index, dim = match
    if any(user.target is aten.index.Tensor and user.args[1] == node.args[1] for user in index.users):
        return None  # the lookup of this gradient has not been rewritten
    shape = [*index.meta["val"].shape, *tables.meta["val"].shape[2:]]
    rows = _move_dim(emit, emit(aten.expand.default, rows, shape), dim, 0)
    index = _wrap_index(emit, _move_dim(emit, index, dim, 0), tables.meta["val"].shape[1])
    return _add_rows(emit, tables, index, rows)


def _gather_embedding(emit: Emit, node: Node) -> Node | None:
    table = node.args[0]
    rows, width = table.meta["val"].shape
    if (match := _match_offset_index(node.args[1], rows)) is None:
        return None
    index, n, dim = match
    tables = emit(aten.reshape.default, table, [n, rows // n, width])
    return _move_dim(emit, _read_rows(emit, tables, _move_dim(emit, index, dim, 0)), 0, dim)


def _adds_each_row_once(node: Node) -> bool:
    _, _, _, padding, is_scaled = node.args
    return bool(padding < 0 and not is_scaled)


def _scatter_embedding(emit: Emit, node: Node) -> Node | None:
    grad, _, size, *_ = node.args
    if (match := _match_offset_index(node.args[1], size)) is None:
        return None
    index, n, dim = match
    width = grad.meta["val"].shape[-1]
    zeros = emit(aten.new_zeros.default, grad, [n, size // n, width])
    tables = _add_rows(emit, zeros, _move_dim(emit, index, dim, 0), _move_dim(emit, grad, dim, 0))
    return emit(aten.reshape.default, tables, [size, width])


gather_aligned_rows = RewritePass(
    "gather_aligned_rows",
    Rewrite([[aten.index.Tensor]], _gather_index),  # w[arange(n), i]
    Rewrite([[aten.index_put.default]], _scatter_index, _adds_rows),  # the gradient of w in it
    Rewrite([[aten.embedding.default]], _gather_embedding),  # embedding(w, i + arange(0, n * v, v))
    Rewrite([[aten.embedding_dense_backward.default]], _scatter_embedding, _adds_each_row_once),
    erases=True,
)


# --- conditions -------------------------------------------------------------------------------------------------------


def _find_origin(x: Node) -> Node | None:
    """Returns the input whose elements `x` computes on, each in its position; None if there is none."""
    while x.op == "call_function" and len(x.all_input_nodes) == 1:
        (source,) = x.all_input_nodes
        is_moved = has_trait(x.target, "permutes") or _shape(source) != _shape(x)
        if has_trait(x.target, "constrains") or is_moved:
            return None
        x = source
    return x if x.op == "placeholder" else None


def _shape(x: Node) -> torch.Size | None:
    return getattr(x.meta["val"], "shape", None)


def _stays_whole(x: Node, dim: int) -> bool:
    """Returns whether a dim is one of an input whose annotation leaves the dim whole."""
    x = _find_origin(x)
    return x is not None and bool(x.meta.get("fixed")) and dim not in x.meta["cut"]


def _match_counted_pair(node: Node) -> tuple[Node, int] | None:
    """Returns i and its dim of size n, for `x[arange(n), i]`."""
    indices, x = node.args[1], node.args[0].meta["val"]
    if len([i for i in indices if i is not None]) != 2 or None in indices[:2]:
        return None
    (first, index), n = indices[:2], x.shape[0]
    dim, val = _find_counted_dim(first, 1), index.meta["val"]
    if dim is None or n < 2 or first.meta["val"].numel() != n or val.dtype in (torch.bool, torch.uint8):
        return None
    dim += val.dim()
    return (index, dim) if dim >= 0 and val.shape[dim] == n else None


def _match_offset_index(node: Node, rows: int) -> tuple[Node, int, int] | None:
    """Returns i, the number of tables, and the dim of i that counts them, for `i + arange(0, rows, v)`."""
    if node.target is not aten.add.Tensor or node.kwargs or not all(isinstance(x, fx.Node) for x in node.args):
        return None
    for index, offsets in (node.args, node.args[::-1]):
        n, shape = offsets.meta["val"].numel(), index.meta["val"].shape
        if n > 1 and rows % n == 0 and (dim := _find_counted_dim(offsets, rows // n)) is not None:
            dim += len(shape)
            if dim >= 0 and shape == node.meta["val"].shape and shape[dim] == n:
                return index, n, dim
    return None


def _find_counted_dim(node: Node, step: int) -> int | None:
    """Returns the dim, counted from the last, along which a tensor is 0, `step`, 2 `step` and so on.

    None if it has other numbers, or other dims.
    """
    dims = [d for d, n in enumerate(node.meta["val"].shape) if n != 1]
    source = node
    while source.target in _VIEWS:
        source = source.args[0]
    val = source.meta["val"]
    if len(dims) != 1 or val.numel() != node.meta["val"].numel():
        return None
    if source.target is aten.arange.default:
        begin, by = 0, 1
    elif source.target in (aten.arange.start, aten.arange.start_step):
        begin, by = source.args[0], source.args[2] if len(source.args) > 2 else 1
    else:
        return None
    return dims[0] - node.meta["val"].dim() if (begin, by) == (0, step) and not val.is_floating_point() else None
