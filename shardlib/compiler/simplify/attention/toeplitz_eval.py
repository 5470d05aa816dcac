"""Computes the values of nodes that depend on no input, in a compact form.

Equal values along a dim are stored once. A comparison of the positions of rows and columns is stored by distance: a
causal mask of 128k positions is a line of 256k numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from shardlib.compiler.simplify.attention.toeplitz import (
    Values,
    compact,
    is_large,
    list_distances,
    list_positions,
    make_line,
)
from shardlib.compiler.simplify.attention.toeplitz_cat import Part, concatenate, find_flipped, flip, pad
from shardlib.compiler.simplify.movement.compose_views import get_permuted_dims
from shardlib.core.aten.op_traits import has_trait, is_deterministic, is_view
from shardlib.core.aten.schemas import get_argument, get_fill_value
from shardlib.core.call_scalar import Scalar
from shardlib.core.torch_internals.torch_private import OpOverload, pytree, schema_of, without_modes
from shardlib.frontend.hazards.constant_values import is_literal
from shardlib.ops.splice import SPLICE

aten = torch.ops.aten
_MAX_ELEMENTS = 1 << 26  # of all nodes together
_EXACT = 1 << 20  # numbers up to which sums are exact in all _COUNTING dtypes
_COUNTING = (torch.int32, torch.int64, torch.float32, torch.float64)
_BY_DISTANCE = {  # f(a + x, b + x) is f(a, b)
    getattr(aten, name).Tensor for name in ("le", "lt", "ge", "gt", "eq", "ne", "sub")
}


class Constants:
    """The values of a graph's nodes that depend on no input, each computed once."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        self._values: dict[fx.Node, Values | None] = {}
        self._left = _MAX_ELEMENTS

    def find(self, node: fx.Node) -> Values | None:
        """Returns the values of a node; None if it depends on an input, or is too large."""
        needed, todo = set[fx.Node](), [node]
        while todo:
            if (x := todo.pop()) not in self._values and x not in needed:
                needed.add(x)
                todo += x.all_input_nodes
        with without_modes():
            for x in sorted(needed):
                self._values[x] = self._compute(x)
        return self._values[node]

    def _compute(self, node: Any) -> Values | None:
        val = node.meta.get("val")
        if not isinstance(val, Tensor) or not val.numel() or self._left < 0:
            return None
        values = self._evaluate(node, val)
        if values is None or values.numbers.dtype != val.dtype or not _fits(values, val.shape):
            return None
        self._left -= values.numbers.numel()
        return compact(values)

    def _evaluate(self, node: Any, val: Tensor) -> Values | None:
        if node.op == "get_attr":
            return Values(getattr(self._gm, node.target).detach().cpu()) if is_literal(node) else None
        leaves = pytree.tree_leaves((node.args, node.kwargs))
        if not isinstance(node.target, OpOverload) or any(isinstance(x, Scalar) for x in leaves):
            return None
        if (values := _evaluate_fill(node, val) or self._evaluate_flip_or_cat(node, val)) is not None:
            return values
        operands = {x: values for x in node.all_input_nodes if (values := self._values[x]) is not None}
        if len(operands) < len(node.all_input_nodes) or not (is_deterministic(node.target) or node.target is SPLICE):
            return None
        return (
            _evaluate_move(node, operands, val)
            or _evaluate_pointwise(node, operands, val)
            or _evaluate_by_op(node, operands, val)
        )

    def _evaluate_flip_or_cat(self, node: Any, val: Tensor) -> Values | None:
        if node.target is aten.flip.default:
            source, dims = find_flipped(node)
            values = self._values[source]
            return None if values is None else flip(values, dims)
        if node.target is aten.cat.default:
            full = [x for x in node.args[0] if x.meta["val"].numel()]
            return concatenate([Part(self._values[x], x.meta["val"].shape) for x in full], get_argument(node, "dim"))
        if node.target is aten.constant_pad_nd.default:
            source, *_ = node.args
            return pad(node, Part(self._values[source], source.meta["val"].shape), val)
        return None


def _fits(values: Values, shape: torch.Size) -> bool:
    sizes = [*shape[:-2], shape[-2] + shape[-1] - 1] if values.by_distance else [*shape]
    stored = values.numbers.shape
    return len(stored) == len(sizes) and all(n in (1, size) for n, size in zip(stored, sizes, strict=True))


# --- ops --------------------------------------------------------------------------------------------------------------


def _evaluate_fill(node: Any, val: Tensor) -> Values | None:
    """Returns one number for all elements; operands that only pass a shape or a dtype may be unknown."""
    if has_trait(node.target, "fills"):
        number = get_fill_value(node)
    elif schema_of(node.target).name in ("aten::ones", "aten::new_ones", "aten::ones_like"):
        number = 1
    else:
        return None
    if isinstance(number, fx.Node):
        return None
    return Values(torch.full([1] * val.dim(), number, dtype=val.dtype, device="cpu"))


def _evaluate_move(node: Any, operands: Mapping[fx.Node, Values], val: Tensor) -> Values | None:
    """Evaluates ops that move elements; None if values by distance lose their form, or values differ."""
    target, rank = node.target, val.dim()
    if len(operands) != 1:
        return None
    ((source, values),) = operands.items()
    if target in (aten.tril.default, aten.triu.default):
        return _evaluate_triangle(node, values, val)
    if not (is_view(target) or has_trait(target, "keeps_order")):
        return None
    numbers, shape = values.numbers, source.meta["val"].shape
    if numbers.numel() == 1 and not any(
        has_trait(target, t) for t in ("bitcasts", "sets_lazy_bit", "takes_strides", "complex_pairs")
    ):
        return Values(numbers.reshape([1] * rank))
    if target is aten.expand.default and not values.by_distance:
        return Values(numbers.reshape([1] * (rank - len(shape)) + list(numbers.shape)))
    if not values.by_distance or numbers.shape[:-1].numel() > 1:
        return None
    line = numbers.flatten()
    if (target is aten.expand.default or has_trait(target, "keeps_order")) and val.shape[-2:] == shape[-2:]:
        return make_line(line, rank)
    if has_trait(target, "permutes") and rank == 2:
        return make_line(line.flip(0) if get_permuted_dims(node) == [1, 0] else line, rank)
    if target is aten.slice.Tensor and get_argument(node, "step") == 1:
        dim, start = get_argument(node, "dim") % rank, get_argument(node, "start") or 0
        start = min(max(start + shape[dim] if start < 0 else start, 0), shape[dim])
        first = shape[-2] - val.shape[-2] - start if dim == rank - 2 else start if dim == rank - 1 else 0
        return make_line(line[first : first + val.shape[-2] + val.shape[-1] - 1], rank)
    return None


def _evaluate_triangle(node: Any, values: Values, val: Tensor) -> Values | None:
    numbers = values.numbers
    if not values.by_distance:
        if numbers.shape[-2:].numel() > 1:
            return None
        numbers = numbers[..., 0]
    diagonal, distances = get_argument(node, "diagonal"), list_distances(val.shape)
    kept = distances <= diagonal if node.target is aten.tril.default else distances >= diagonal
    return Values(torch.where(kept, numbers, torch.zeros_like(numbers)), by_distance=True)


def _evaluate_pointwise(node: Any, operands: Mapping[fx.Node, Values], val: Tensor) -> Values | None:
    """Evaluates an op on the stored numbers; one number may stand for many elements."""
    if torch.Tag.pointwise not in node.target.tags and not has_trait(node.target, "copies"):
        return None
    if any(values.by_distance for values in operands.values()):
        lines = {x: _get_line(x, values, val.shape) for x, values in operands.items()}
        stored = {x: line for x, line in lines.items() if line is not None}
        return Values(_run(node, stored), by_distance=True) if len(stored) == len(lines) else None
    ends = [_find_count(operands.get(x)) for x in node.args] if node.target in _BY_DISTANCE and not node.kwargs else []
    if {end and end[1] for end in ends} == {-2, -1}:
        distances = list_distances(val.shape)
        pair = [first + distances.to(first.dtype) * (dim == -1) for first, dim in filter(None, ends)]
        return make_line(node.target(*pair), val.dim())
    stored = {x: values.numbers for x, values in operands.items()}
    shape = torch.broadcast_shapes(*(x.shape for x in stored.values()))  # type: ignore[no-untyped-call]
    return None if is_large(shape) else Values(_run(node, stored))


def _get_line(x: fx.Node, values: Values, shape: torch.Size) -> Tensor | None:
    """Returns an operand's numbers by distance, or None.

    An operand without dims keeps none: it takes part in type promotion in another way.
    """
    numbers = values.numbers
    if values.by_distance:
        return numbers if x.meta["val"].shape[-2:] == shape[-2:] else None
    if numbers.shape[-2:].numel() > 1:
        return None
    return numbers if numbers.dim() < 2 else numbers[..., 0]


def _find_count(values: Values | None) -> tuple[Tensor, int] | None:
    """Returns the first number and the dim, if integers count up along one of the last two dims."""
    if values is None or values.numbers.dtype not in _COUNTING:
        return None
    numbers = values.numbers
    if not 1 < numbers.numel() == max(numbers.shape[-2:]) or not numbers.abs().max() <= _EXACT:
        return None
    line, dim = numbers.flatten(), -1 if numbers.shape[-1] > 1 else -2
    counts = torch.equal(line, int(line[0]) + list_positions(len(line)).to(line.dtype))
    return (line[:1], dim) if counts else None


def _evaluate_by_op(node: Any, operands: Mapping[fx.Node, Values], val: Tensor) -> Values | None:
    """Runs the op on all elements of its operands."""
    shapes = {x: x.meta["val"].shape for x in operands}
    if any(map(is_large, (val.shape, *shapes.values()))):
        return None
    return Values(_run(node, {x: values.spread(shapes[x]) for x, values in operands.items()}))


def _run(node: Any, operands: Mapping[fx.Node, Tensor]) -> Tensor:
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), operands.__getitem__)
    if kwargs.get("device") is not None:
        kwargs = dict(kwargs, device="cpu")
    result: Tensor = node.target(*args, **kwargs)
    return result
