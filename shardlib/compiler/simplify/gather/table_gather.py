"""Lookups in tables that one tensor holds are one op, `gather`, which reads along one dim of it: the tables may then be
cut, and who has one looks up what is asked of it. `w[arange(n), i]` is one, and what vmap makes of an embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from shardlib.compiler.simplify.basic import call
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.aten.schemas import get_argument

aten = torch.ops.aten
Node = Any  # of fx, whose arguments are what its op takes
_VIEWS = (aten.unsqueeze.default, aten.reshape.default, aten.view.default, aten.expand.default)


class Emit:
    """Writes nodes in front of one, in its name."""

    def __init__(self, gm: fx.GraphModule, like: Node) -> None:
        self.gm, self.like = gm, like

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.gm.graph.inserting_before(self.like):
            return call(self.gm, self.like, target, *args, **kwargs)

    def moved(self, x: Node, source: int, to: int) -> Node:
        """`x` with one of its dims at another place."""
        order = list(range(x.meta["val"].dim()))
        order.insert(to, order.pop(source))
        return x if order == sorted(order) else self(aten.permute.default, x, order)

    def wrapped(self, index: Node, size: int) -> Node:
        """An index that may count from the end, counted from the front."""
        behind = self(aten.mul.Tensor, self(aten.lt.Scalar, index, 0), size)
        return self(aten.add.Tensor, index, behind)

    def spread(self, index: Node, shape: list[int]) -> Node:
        """An index `[k, ...]` of rows, as `gather` takes it of tables `shape`, `[k, v, ...]`."""
        rest, count = shape[2:], index.meta["val"][0].numel()
        flat = self(aten.reshape.default, index, [shape[0], count, *[1] * len(rest)])
        return self(aten.expand.default, flat, [shape[0], count, *rest]) if rest else flat

    def read(self, tables: Node, index: Node) -> Node:
        """What lies at rows `index`, `[k, ...]`, of each table in `tables`, `[k, v, ...]`."""
        shape, at = list(tables.meta["val"].shape), list(index.meta["val"].shape)
        found = self(aten.gather.default, tables, 1, self.spread(index, shape))
        return self(aten.reshape.default, found, [*at, *shape[2:]])

    def added(self, tables: Node, index: Node, rows: Node) -> Node:
        """Tables with `rows` added where the index says."""
        shape = list(tables.meta["val"].shape)
        flat = self(aten.reshape.default, rows, [shape[0], index.meta["val"][0].numel(), *shape[2:]])
        return self(aten.scatter_add.default, tables, 1, self.spread(index, shape), flat)


def origin(x: Node) -> Node | None:
    """The argument of the program that a node is, element by element; None where it is none, or moved on the way."""
    while x.op == "call_function" and len(x.all_input_nodes) == 1:
        (before,) = x.all_input_nodes
        if has_trait(x.target, "constrains") or has_trait(x.target, "permutes") or _shape(before) != _shape(x):
            return None
        x = before
    return x if x.op == "placeholder" else None


def _shape(x: Node) -> torch.Size | None:
    return getattr(x.meta["val"], "shape", None)


def _stays_whole(x: Node, dim: int) -> bool:
    """Returns whether a dim is one of an argument that is said not to be cut there."""
    x = origin(x)
    return x is not None and bool(x.meta.get("fixed")) and dim not in x.meta["cut"]


def look_up_aligned(gm: fx.GraphModule) -> None:
    """Where an index counts the tables themselves, each with rows of its own, that is no lookup of tables; as long as
    somebody may have some of the tables, or of what is looked up in them."""
    for node in list(gm.graph.nodes):
        form = _FORMS.get(node.target)
        if form is not None and (made := form(Emit(gm, node), node)) is not None:
            node.replace_all_uses_with(made)
            gm.graph.erase_node(node)


def _index(emit: Emit, node: Node) -> Node | None:
    tables, pair = node.args[0], _pair(node)
    if pair is None:
        return None
    index, at = pair
    if _stays_whole(tables, 0) and _stays_whole(index, at):
        return None
    index = emit.moved(index, at, 0)
    found = emit.read(tables, emit.wrapped(index, tables.meta["val"].shape[1]))
    return emit.moved(found, 0, at)


def _index_put(emit: Emit, node: Node) -> Node | None:
    tables, pair, rows = node.args[0], _pair(node), node.args[2]
    if pair is None or not get_argument(node, "accumulate") or tables.meta["val"].dtype != rows.meta["val"].dtype:
        return None
    index, at = pair
    if any(user.target is aten.index.Tensor and user.args[1] == node.args[1] for user in index.users):
        return None  # what it is the gradient of has stayed as it is
    shape = [*index.meta["val"].shape, *tables.meta["val"].shape[2:]]
    rows = emit.moved(emit(aten.expand.default, rows, shape), at, 0)
    index = emit.wrapped(emit.moved(index, at, 0), tables.meta["val"].shape[1])
    return emit.added(tables, index, rows)


def _embedding(emit: Emit, node: Node) -> Node | None:
    table, pair = node.args[0], _offset(node.args[1], node.args[0].meta["val"].shape[0])
    if pair is None:
        return None
    index, n, at = pair
    rows, width = table.meta["val"].shape
    tables = emit(aten.reshape.default, table, [n, rows // n, width])
    return emit.moved(emit.read(tables, emit.moved(index, at, 0)), 0, at)


def _embedding_backward(emit: Emit, node: Node) -> Node | None:
    grad, _, size, padding, scaled = node.args
    pair = _offset(node.args[1], size)
    if pair is None or padding >= 0 or scaled:
        return None
    index, n, at = pair
    width = grad.meta["val"].shape[-1]
    zeros = emit(aten.new_zeros.default, grad, [n, size // n, width])
    made = emit.added(zeros, emit.moved(index, at, 0), emit.moved(grad, at, 0))
    return emit(aten.reshape.default, made, [size, width])


_FORMS: dict[Any, Callable[[Emit, Node], Node | None]] = {
    aten.index.Tensor: _index,
    aten.index_put.default: _index_put,
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
}


def _pair(node: Node) -> tuple[Node, int] | None:
    """Of `x[arange(n), i]`: i, which has a dim of n, and which dim that is."""
    given, x = node.args[1], node.args[0].meta["val"]
    if len([i for i in given if i is not None]) != 2 or None in given[:2]:
        return None
    (first, index), n = given[:2], x.shape[0]
    at, whole = _counted(first, 1), index.meta["val"]
    if at is None or n < 2 or first.meta["val"].numel() != n or whole.dtype in (torch.bool, torch.uint8):
        return None
    at += whole.dim()
    return (index, at) if at >= 0 and whole.shape[at] == n else None


def _offset(node: Node, rows: int) -> tuple[Node, int, int] | None:
    """Of `i + arange(0, rows, v)`: i, of how many tables it names rows, and along which of its dims."""
    if node.target is not aten.add.Tensor or node.kwargs or not all(isinstance(x, fx.Node) for x in node.args):
        return None
    for index, offsets in (node.args, node.args[::-1]):
        n = offsets.meta["val"].numel()
        if n > 1 and rows % n == 0 and (at := _counted(offsets, rows // n)) is not None:
            at += index.meta["val"].dim()
            if at >= 0 and index.meta["val"].shape == node.meta["val"].shape and index.meta["val"].shape[at] == n:
                return index, n, at
    return None


def _counted(node: Any, step: int) -> int | None:
    """Along which dim, counted from the last, a tensor is 0, `step`, 2 `step` and so on, if it has no other."""
    dims = [d for d, n in enumerate(node.meta["val"].shape) if n != 1]
    source = node
    while source.target in _VIEWS:
        source = source.args[0]
    val = source.meta["val"]
    if len(dims) != 1 or val.numel() != node.meta["val"].numel():
        return None
    if source.target is aten.arange.default:
        begins, by = 0, 1
    elif source.target in (aten.arange.start, aten.arange.start_step):
        begins, by = source.args[0], source.args[2] if len(source.args) > 2 else 1
    else:
        return None
    return dims[0] - node.meta["val"].dim() if (begins, by) == (0, step) and not val.is_floating_point() else None
