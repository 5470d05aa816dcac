"""Computes the values of nodes that depend on no input.

`_RULES` has rules of single ops, `_list_rules` those of kinds of ops. Any other op runs on whole tensors, unless they
are too large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shardlib.compiler.simplify.constants.lookup import Lookup, compact, count_up, is_large, spread, spread_line
from shardlib.core.aten.op_traits import has_trait, is_deterministic, is_view
from shardlib.core.aten.schemas import get_argument, get_fill_value
from shardlib.core.call_scalar import Scalar
from shardlib.core.torch_internals.torch_private import OpOverload, pytree, schema_of, without_modes
from shardlib.frontend.hazards.constant_values import is_literal

aten = torch.ops.aten
Node = Any  # an fx.Node; its arguments have the types that its op takes
Operands = Mapping[fx.Node, Lookup]
Rule = Callable[[Node, Operands], Lookup | None]  # None where the rule does not apply

_CHANGES_NUMBERS = ("bitcasts", "sets_lazy_bit", "takes_strides", "complex_pairs")  # traits of views
_ONES = ("aten::ones", "aten::new_ones", "aten::ones_like")
_MAX_ELEMENTS = 1 << 26  # of all nodes together
_EXACT = 1 << 20  # numbers up to which sums are exact in all _COUNTING dtypes
_COUNTING = (torch.int32, torch.int64, torch.float32, torch.float64)


class Constants:
    """The values of a graph's nodes that depend on no input, each computed once."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        self._values: dict[fx.Node, Lookup | None] = {}
        self._left = _MAX_ELEMENTS

    def find(self, node: fx.Node) -> Lookup | None:
        """Returns the values of a node; None if it depends on an input, or is too large."""
        needed, todo = set[fx.Node](), [node]
        while todo:
            x = todo.pop()
            if self._values.get(x, ()) is None or not _is_deterministic(x):
                self._values[node] = None
                return None
            if x not in self._values and x not in needed:
                needed.add(x)
                todo += [] if _is_fill(x.target) else x.all_input_nodes
        with without_modes():
            for x in sorted(needed):
                self._values[x] = self._compute(x)
        return self._values[node]

    def find_range(self, node: Node) -> tuple[int, int] | None:
        """Returns bounds of all elements of an int64 tensor: known values, positions, remainders; None for others."""
        values, target = self.find(node), node.target
        if node.meta["val"].dtype is not torch.int64:
            return None
        if values is not None and values.table.numel():
            with without_modes():
                return int(values.table.min()), int(values.table.max())
        if target in (aten.argmax.default, aten.argmin.default):
            return 0, node.args[0].meta["val"].numel() - 1
        if target is aten.remainder.Scalar and isinstance(divisor := node.args[1], int) and divisor > 0:
            return 0, divisor - 1
        moves = is_view(target) or has_trait(target, "copies")
        return self.find_range(node.args[0]) if moves and not has_trait(target, "sets_lazy_bit") else None

    def _compute(self, node: Node) -> Lookup | None:
        val = node.meta.get("val")
        operands = {x: values for x in node.all_input_nodes if (values := self._values.get(x)) is not None}
        is_known = len(operands) == len(node.all_input_nodes) or _is_fill(node.target)
        if not is_known or not isinstance(val, Tensor) or self._left < 0:
            return None
        values = self._read_literal(node) if node.op == "get_attr" else _evaluate(node, operands)
        if values is None or values.table.dtype != val.dtype or values.shape != val.shape:
            return None
        values = compact(values)
        self._left -= values.table.numel()
        return values

    def _read_literal(self, node: Node) -> Lookup:
        literal = getattr(self._gm, node.target).detach().cpu()
        return spread(literal, literal.shape)


def _is_deterministic(node: fx.Node) -> bool:
    """Returns whether equal operands give equal results in every call of the program."""
    if node.op == "get_attr":
        return is_literal(node)
    numbers = pytree.tree_leaves((node.args, node.kwargs))
    return is_deterministic(node.target) and not any(isinstance(x, Scalar) for x in numbers)


def _evaluate(node: Node, operands: Operands) -> Lookup | None:
    return next((values for rule in _list_rules(node.target) if (values := rule(node, operands)) is not None), None)


def _list_rules(target: Any) -> Iterator[Rule]:
    """Yields the rules to try for an op, in order."""
    if target in _RULES:
        yield _RULES[target]
    elif _is_fill(target):
        yield _fill
        return
    elif is_view(target) or has_trait(target, "keeps_order"):
        if not any(has_trait(target, trait) for trait in _CHANGES_NUMBERS):
            yield _view
    elif _is_pointwise(target):
        yield _run_on_lines
    yield _run_op


# --- rules ------------------------------------------------------------------------------------------------------------


def _is_fill(target: Any) -> bool:
    """Returns whether an op repeats one number; its operand only passes a shape or a dtype."""
    return has_trait(target, "fills") or (isinstance(target, OpOverload) and schema_of(target).name in _ONES)


def _is_pointwise(target: Any) -> bool:
    return torch.Tag.pointwise in target.tags or has_trait(target, "copies")


def _fill(node: Node, operands: Operands) -> Lookup | None:
    val, number = node.meta["val"], get_fill_value(node) if has_trait(node.target, "fills") else 1
    if isinstance(number, fx.Node):
        return None
    return spread(torch.full([1] * val.dim(), number, dtype=val.dtype, device="cpu"), val.shape)


def _view(node: Node, operands: Operands) -> Lookup | None:
    """Moves offsets as the op moves strides; None if two dims of the result go along one dim of the operand."""
    values, sizes = operands[node.args[0]], node.meta["val"].shape
    if not sizes.numel():
        return spread(values.table.new_empty(sizes), sizes)
    if values.table.numel() == 1:
        return spread(values.table.reshape([1] * len(sizes)), sizes)
    if is_large([max(sizes, default=1)]):
        return None
    whole = torch.empty(values.shape, device="meta")
    keeps_order = has_trait(node.target, "keeps_order")
    view = whole.view(sizes) if keeps_order else node.target(whole, *node.args[1:], **node.kwargs)
    start, offsets, seen = view.storage_offset(), list[Tensor](), set[int]()
    first = torch.unravel_index(torch.tensor(start, device="cpu"), values.shape)
    for n, stride in zip(view.shape, view.stride(), strict=True):
        index = torch.unravel_index(start + stride * count_up(n), values.shape)
        moved = {d for d, at in enumerate(index) if (at != first[d]).any()}
        if moved & seen:
            return None
        seen |= moved
        steps = (values.offsets[d][index[d]] - values.offsets[d][first[d]] for d in moved)
        offsets.append(sum(steps, torch.zeros(n, dtype=torch.int64, device="cpu")))
    base = sum(int(each[at]) for each, at in zip(values.offsets, first, strict=True))
    if not offsets:
        return Lookup(values.table[base : base + 1], ())
    return Lookup(values.table, (offsets[0] + base, *offsets[1:]))


def _flip(node: Node, operands: Operands) -> Lookup:
    values = operands[node.args[0]]
    dims = {dim % len(values.offsets) for dim in node.args[1]}
    return values._replace(offsets=tuple(x.flip(0) if dim in dims else x for dim, x in enumerate(values.offsets)))


def _cat(node: Node, operands: Operands) -> Lookup | None:
    full = [values for x in node.args[0] if (values := operands[x]).shape.numel()]
    return _join(full, get_argument(node, "dim")) if full else None


def _pad(node: Node, operands: Operands) -> Lookup | None:
    sizes, values = get_argument(node, "pad"), operands[node.args[0]]
    fill = values.table.new_full([1] * len(values.shape), get_argument(node, "value"))
    for dim, ends in enumerate(zip(sizes[::2], sizes[1::2], strict=True), 1):
        shape = values.shape
        before, after = (spread(fill, [*shape[:-dim], max(n, 0), *shape[len(shape) - dim + 1 :]]) for n in ends)
        joined = _join([x for x in (before, values, after) if x.shape[-dim]], -dim) if min(ends) >= 0 else None
        if joined is None:
            return None
        values = compact(joined)
    return values


def _join(parts: Sequence[Lookup], dim: int) -> Lookup | None:
    """Concatenates the tables of parts with the same offsets in the other dims; a number has any offsets there."""
    like = next((part for part in parts if part.table.numel() > 1), parts[0])
    dim %= len(like.offsets)
    before, after = like.offsets[:dim], like.offsets[dim + 1 :]
    start, tables, offsets = 0, list[Tensor](), list[Tensor]()
    for part in parts:
        is_number = part.table.numel() == 1
        others = (*zip(part.offsets[:dim], before, strict=True), *zip(part.offsets[dim + 1 :], after, strict=True))
        if part.table.dtype != like.table.dtype or not (is_number or all(torch.equal(a, b) for a, b in others)):
            return None
        tables.append(part.table.expand_as(like.table) if is_number else part.table)
        offsets.append(part.offsets[dim] + start)
        start += len(tables[-1])
    return Lookup(torch.cat(tables), (*before, torch.cat(offsets), *after))


def _keep_triangle(node: Node, operands: Operands) -> Lookup | None:
    values, diagonal = operands[node.args[0]], get_argument(node, "diagonal")
    if (line := values.find_line()) is None:
        return None
    s, t = values.shape[-2:]
    distances = count_up(s + t - 1) - (s - 1)
    kept = distances <= diagonal if node.target is aten.tril.default else distances >= diagonal
    return spread_line(torch.where(kept, line, torch.zeros_like(line)), values.shape)


def _run_on_lines(node: Node, operands: Operands) -> Lookup | None:
    """Runs a pointwise op on the elements by `j - i` of matrices; None if the result depends on more than `j - i`."""
    shape = node.meta["val"].shape
    if len(shape) < 2:
        return None
    wide = {x: values.expand(shape) for x, values in operands.items() if values.offsets}
    if any(values.find_line() is None for values in wide.values()):
        if node.target not in _BY_DISTANCE or node.kwargs or len(wide) < 2:
            return None
        if {_find_count_dim(values) for values in wide.values()} != {-2, -1}:
            return None
    numbers = {x: values.table[0] for x, values in operands.items() if x not in wide}  # without dims, for promotion
    return spread_line(_run(node, {x: values.read_border() for x, values in wide.items()} | numbers), shape)


def _find_count_dim(values: Lookup) -> int | None:
    """Returns the dim, of the last two, along which small integers count up; None for other elements."""
    x = values.fold()
    if x is None or x.dtype not in _COUNTING or not 1 < x.numel() == max(x.shape[-2:]) or not x.abs().max() <= _EXACT:
        return None
    line, dim = x.flatten(), -1 if x.shape[-1] > 1 else -2
    return dim if torch.equal(line, int(line[0]) + count_up(len(line)).to(line.dtype)) else None


def _run_op(node: Node, operands: Operands) -> Lookup | None:
    """Runs the op on all elements; in a pointwise op one stands for all that repeat it."""
    shape, is_pointwise = node.meta["val"].shape, _is_pointwise(node.target)
    dense = {x: values.fold() if is_pointwise else values.to_dense() for x, values in operands.items()}
    tensors = {x: elements for x, elements in dense.items() if elements is not None}
    if len(tensors) < len(operands):
        return None
    sizes = [x.shape for x in tensors.values()] if is_pointwise else [shape]
    if is_large(torch.broadcast_shapes(*sizes)):  # type: ignore[no-untyped-call]
        return None
    result = _run(node, tensors)
    return spread(result, shape if is_pointwise else result.shape)


def _run(node: Node, operands: Mapping[fx.Node, Tensor]) -> Tensor:
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), operands.__getitem__)
    if kwargs.get("device") is not None:
        kwargs = dict(kwargs, device="cpu")
    result: Tensor = node.target(*args, **kwargs)
    return result


_BY_DISTANCE = {  # f(a + x, b + x) is f(a, b)
    getattr(aten, name).Tensor for name in ("le", "lt", "ge", "gt", "eq", "ne", "sub")
}
_RULES: Mapping[Any, Rule] = {
    aten.flip.default: _flip,
    aten.cat.default: _cat,
    aten.constant_pad_nd.default: _pad,
    aten.tril.default: _keep_triangle,
    aten.triu.default: _keep_triangle,
}
