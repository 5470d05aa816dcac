"""What is known of values that depend on no input: they are worked out, without the squares that are made of them.

Values that do not change along a dim are there once, and what rows and columns of counted places are compared by is a
number for each distance between the two. So a causal mask of 128k places is a line of 256k numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from shardlib.compiler.simplify.attention.toeplitz import Values, distances, is_large, line_of, places, short
from shardlib.compiler.simplify.attention.toeplitz_cat import Piece, flipped, padded, side_by_side, turned
from shardlib.compiler.simplify.basic import dims_of
from shardlib.core.aten.op_traits import has_trait, is_deterministic, is_view
from shardlib.core.aten.schemas import get_argument
from shardlib.core.call_scalar import Scalar
from shardlib.core.torch_private import OpOverload, pytree, schema_of, without_modes
from shardlib.frontend.hazards.constant_values import is_literal
from shardlib.ops.splice import SPLICE

aten = torch.ops.aten
_MOST = 1 << 26  # elements that are worked out in all
_EXACT = 1 << 20  # numbers up to which sums are exact in all of these
_COUNTING = (torch.int32, torch.int64, torch.float32, torch.float64)
_BY_DISTANCE = {  # f(a + x, b + x) is f(a, b)
    getattr(aten, name).Tensor for name in ("le", "lt", "ge", "gt", "eq", "ne", "sub")
}


class Constants:
    """Values of the nodes of a graph that depend on no input, each worked out once."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        self._known: dict[fx.Node, Values | None] = {}
        self._left = _MOST

    def of(self, node: fx.Node) -> Values | None:
        """The values of a node; None where it depends on an input, or is too large."""
        needed, todo = set[fx.Node](), [node]
        while todo:
            if (x := todo.pop()) not in self._known and x not in needed:
                needed.add(x)
                todo += x.all_input_nodes
        with without_modes():
            for x in sorted(needed):
                self._known[x] = self._find(x)
        return self._known[node]

    def _find(self, node: Any) -> Values | None:
        val = node.meta.get("val")
        if not isinstance(val, Tensor) or not val.numel() or self._left < 0:
            return None
        made = self._made(node, val)
        if made is None or made.numbers.dtype != val.dtype or not _fits(made, val.shape):
            return None
        self._left -= made.numbers.numel()
        return short(made)

    def _made(self, node: Any, val: Tensor) -> Values | None:
        if node.op == "get_attr":
            return Values(getattr(self._gm, node.target).detach().cpu()) if is_literal(node) else None
        leaves = pytree.tree_leaves((node.args, node.kwargs))
        if not isinstance(node.target, OpOverload) or any(isinstance(x, Scalar) for x in leaves):
            return None
        if (made := _filled(node, val) or self._laid(node, val)) is not None:
            return made
        known = {x: found for x in node.all_input_nodes if (found := self._known[x]) is not None}
        if len(known) < len(node.all_input_nodes) or not (is_deterministic(node.target) or node.target is SPLICE):
            return None
        return _moved(node, known, val) or _pointwise(node, known, val) or _worked_out(node, known, val)

    def _laid(self, node: Any, val: Tensor) -> Values | None:
        """Of ops that turn values round, or lay them side by side."""
        if node.target is aten.flip.default:
            source, dims = turned(node)
            found = self._known[source]
            return None if found is None else flipped(found, dims)
        if node.target is aten.cat.default:
            full = [x for x in node.args[0] if x.meta["val"].numel()]
            return side_by_side([Piece(self._known[x], x.meta["val"].shape) for x in full], get_argument(node, "dim"))
        if node.target is aten.constant_pad_nd.default:
            source, *_ = node.args
            return padded(node, Piece(self._known[source], source.meta["val"].shape), val)
        return None


def _fits(made: Values, shape: torch.Size) -> bool:
    sizes = [*shape[:-2], shape[-2] + shape[-1] - 1] if made.by_distance else [*shape]
    found = made.numbers.shape
    return len(found) == len(sizes) and all(n in (1, size) for n, size in zip(found, sizes, strict=True))


# --- ops --------------------------------------------------------------------------------------------------------------


def _filled(node: Any, val: Tensor) -> Values | None:
    """One number everywhere: of an operand that gives a shape, or a dtype, nothing need be known."""
    if has_trait(node.target, "fills"):
        number = 0 if has_trait(node.target, "zeros") else get_argument(node, "fill_value")
    elif schema_of(node.target).name in ("aten::ones", "aten::new_ones", "aten::ones_like"):
        number = 1
    else:
        return None
    if isinstance(number, fx.Node):
        return None
    return Values(torch.full([1] * val.dim(), number, dtype=val.dtype, device="cpu"))


def _moved(node: Any, known: Mapping[fx.Node, Values], val: Tensor) -> Values | None:
    """Of ops that move elements about: those along the last two dims stay where they are, or there is one of all."""
    target, rank = node.target, val.dim()
    if len(known) != 1:
        return None
    ((source, found),) = known.items()
    if target in (aten.tril.default, aten.triu.default):
        return _triangle(node, found, val)
    if not (is_view(target) or has_trait(target, "keeps_order")):
        return None
    numbers, shape = found.numbers, source.meta["val"].shape
    if numbers.numel() == 1 and not any(
        has_trait(target, t) for t in ("bitcasts", "sets_lazy_bit", "takes_strides", "complex_pairs")
    ):
        return Values(numbers.reshape([1] * rank))
    if target is aten.expand.default and not found.by_distance:
        return Values(numbers.reshape([1] * (rank - len(shape)) + list(numbers.shape)))
    if not found.by_distance or numbers.shape[:-1].numel() > 1:
        return None
    line = numbers.flatten()
    if (target is aten.expand.default or has_trait(target, "keeps_order")) and val.shape[-2:] == shape[-2:]:
        return line_of(line, rank)
    if has_trait(target, "permutes") and rank == 2:
        return line_of(line.flip(0) if dims_of(node) == [1, 0] else line, rank)
    if target is aten.slice.Tensor and get_argument(node, "step") == 1:
        dim, start = get_argument(node, "dim") % rank, get_argument(node, "start") or 0
        start = min(max(start + shape[dim] if start < 0 else start, 0), shape[dim])
        first = shape[-2] - val.shape[-2] - start if dim == rank - 2 else start if dim == rank - 1 else 0
        return line_of(line[first : first + val.shape[-2] + val.shape[-1] - 1], rank)
    return None


def _triangle(node: Any, found: Values, val: Tensor) -> Values | None:
    numbers = found.numbers
    if not found.by_distance:
        if numbers.shape[-2:].numel() > 1:
            return None
        numbers = numbers[..., 0]
    upto, apart = get_argument(node, "diagonal"), distances(val.shape)
    kept = apart <= upto if node.target is aten.tril.default else apart >= upto
    return Values(torch.where(kept, numbers, torch.zeros_like(numbers)), by_distance=True)


def _pointwise(node: Any, known: Mapping[fx.Node, Values], val: Tensor) -> Values | None:
    """Element by element: of what there is once, once."""
    if torch.Tag.pointwise not in node.target.tags and not has_trait(node.target, "copies"):
        return None
    if any(found.by_distance for found in known.values()):
        lines = {x: _as_line(x, found, val.shape) for x, found in known.items()}
        operands = {x: line for x, line in lines.items() if line is not None}
        return Values(_run(node, operands), by_distance=True) if len(operands) == len(lines) else None
    ends = [_counted(known.get(x)) for x in node.args] if node.target in _BY_DISTANCE and not node.kwargs else []
    if {end and end[1] for end in ends} == {-2, -1}:
        apart = distances(val.shape)
        pair = [first + apart.to(first.dtype) * (dim == -1) for first, dim in filter(None, ends)]
        return line_of(node.target(*pair), val.dim())
    operands = {x: found.numbers for x, found in known.items()}
    shape = torch.broadcast_shapes(*(x.shape for x in operands.values()))  # type: ignore[no-untyped-call]
    return None if is_large(shape) else Values(_run(node, operands))


def _as_line(x: fx.Node, found: Values, shape: torch.Size) -> Tensor | None:
    """An operand by distance; None of one that is not. What has no dims has none then: it says less of a dtype."""
    numbers = found.numbers
    if found.by_distance:
        return numbers if x.meta["val"].shape[-2:] == shape[-2:] else None
    if numbers.shape[-2:].numel() > 1:
        return None
    return numbers if numbers.dim() < 2 else numbers[..., 0]


def _counted(found: Values | None) -> tuple[Tensor, int] | None:
    """Of whole numbers that count up along one of the last two dims: the first, and which dim."""
    if found is None or found.numbers.dtype not in _COUNTING:
        return None
    numbers = found.numbers
    if not 1 < numbers.numel() == max(numbers.shape[-2:]) or not numbers.abs().max() <= _EXACT:
        return None
    line, dim = numbers.flatten(), -1 if numbers.shape[-1] > 1 else -2
    counts = torch.equal(line, int(line[0]) + places(len(line)).to(line.dtype))
    return (line[:1], dim) if counts else None


def _worked_out(node: Any, known: Mapping[fx.Node, Values], val: Tensor) -> Values | None:
    """By the op itself, of all of its operands."""
    shapes = {x: x.meta["val"].shape for x in known}
    if any(map(is_large, (val.shape, *shapes.values()))):
        return None
    return Values(_run(node, {x: found.spread(shapes[x]) for x, found in known.items()}))


def _run(node: Any, operands: Mapping[fx.Node, Tensor]) -> Tensor:
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), operands.__getitem__)
    if kwargs.get("device") is not None:
        kwargs = dict(kwargs, device="cpu")
    made: Tensor = node.target(*args, **kwargs)
    return made
