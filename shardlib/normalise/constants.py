"""What is known of values that depend on no input: they are worked out, without the squares that are made of them.

Values that do not change along a dim are there once, and what rows and columns of counted places are compared by is a
number for each distance between the two. So a causal mask of 128k places is a line of 256k numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from shardlib.aten.traits import has, is_view, repeats
from shardlib.aten.views import argument
from shardlib.internals import OpOverload, pytree, schema_of, without_modes
from shardlib.normalise.passes import dims_of
from shardlib.ops.splice import SPLICE
from shardlib.scalar import Scalar
from shardlib.tracing.known import is_literal

aten = torch.ops.aten
_LARGE, _MOST = 1 << 23, 1 << 26  # elements that are worked out, at once and in all
_EXACT = 1 << 20  # numbers up to which sums are exact in all of these
_COUNTING = (torch.int32, torch.int64, torch.float32, torch.float64)
_BY_DISTANCE = {  # f(a + x, b + x) is f(a, b)
    getattr(aten, name).Tensor for name in ("le", "lt", "ge", "gt", "eq", "ne", "sub")
}


class Values(NamedTuple):
    """The values of a node of shape `[..., S, T]`; along a dim where they are the same there is one.

    By distance: the last two dims are one, of the distances `t - s` from `1 - S` to `T - 1`.
    """

    numbers: Tensor
    by_distance: bool = False

    def spread(self, shape: torch.Size) -> Tensor:
        """All of them."""
        numbers = self.numbers
        if self.by_distance:
            numbers = numbers[..., _places(shape[-1]) - _places(shape[-2])[:, None] + shape[-2] - 1]
        return numbers.expand(shape).contiguous()


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
        return _short(made)

    def _made(self, node: Any, val: Tensor) -> Values | None:
        if node.op == "get_attr":
            return Values(getattr(self._gm, node.target).detach().cpu()) if is_literal(node) else None
        leaves = pytree.tree_leaves((node.args, node.kwargs))
        if not isinstance(node.target, OpOverload) or any(isinstance(x, Scalar) for x in leaves):
            return None
        if (made := _filled(node, val) or self._laid(node, val)) is not None:
            return made
        known = {x: found for x in node.all_input_nodes if (found := self._known[x]) is not None}
        if len(known) < len(node.all_input_nodes) or not (repeats(node.target) or node.target is SPLICE):
            return None
        return _moved(node, known, val) or _pointwise(node, known, val) or _worked_out(node, known, val)

    def _laid(self, node: Any, val: Tensor) -> Values | None:
        """Of ops that turn values round, or lay them side by side."""
        if node.target is aten.flip.default:
            source, dims = _turned(node)
            found = self._known[source]
            return None if found is None else _flipped(found, dims)
        if node.target is aten.cat.default:
            full = [x for x in node.args[0] if x.meta["val"].numel()]
            return _side_by_side([_Piece(self._known[x], x.meta["val"].shape) for x in full], argument(node, "dim"))
        if node.target is aten.constant_pad_nd.default:
            source, *_ = node.args
            return _padded(node, _Piece(self._known[source], source.meta["val"].shape), val)
        return None


def _fits(made: Values, shape: torch.Size) -> bool:
    sizes = [*shape[:-2], shape[-2] + shape[-1] - 1] if made.by_distance else [*shape]
    found = made.numbers.shape
    return len(found) == len(sizes) and all(n in (1, size) for n, size in zip(found, sizes, strict=True))


def _places(n: int) -> Tensor:
    return torch.arange(n, device="cpu")


def _distances(shape: torch.Size) -> Tensor:
    return torch.arange(1 - shape[-2], shape[-1], device="cpu")


def _line(line: Tensor, rank: int) -> Values:
    return Values(line.reshape([1] * (rank - 2) + [-1]), by_distance=True)


# --- ops --------------------------------------------------------------------------------------------------------------


def _filled(node: Any, val: Tensor) -> Values | None:
    """One number everywhere: of an operand that gives a shape, or a dtype, nothing need be known."""
    if has(node.target, "fills"):
        number = 0 if has(node.target, "zeros") else argument(node, "fill_value")
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
    if not (is_view(target) or has(target, "regroups")):
        return None
    numbers, shape = found.numbers, source.meta["val"].shape
    if numbers.numel() == 1 and not any(has(target, t) for t in ("retypes", "marks", "strides", "pairs")):
        return Values(numbers.reshape([1] * rank))
    if target is aten.expand.default and not found.by_distance:
        return Values(numbers.reshape([1] * (rank - len(shape)) + list(numbers.shape)))
    if not found.by_distance or numbers.shape[:-1].numel() > 1:
        return None
    line = numbers.flatten()
    if (target is aten.expand.default or has(target, "regroups")) and val.shape[-2:] == shape[-2:]:
        return _line(line, rank)
    if has(target, "permutes") and rank == 2:
        return _line(line.flip(0) if dims_of(node) == [1, 0] else line, rank)
    if target is aten.slice.Tensor and argument(node, "step") == 1:
        dim, start = argument(node, "dim") % rank, argument(node, "start") or 0
        start = min(max(start + shape[dim] if start < 0 else start, 0), shape[dim])
        first = shape[-2] - val.shape[-2] - start if dim == rank - 2 else start if dim == rank - 1 else 0
        return _line(line[first : first + val.shape[-2] + val.shape[-1] - 1], rank)
    return None


def _triangle(node: Any, found: Values, val: Tensor) -> Values | None:
    numbers = found.numbers
    if not found.by_distance:
        if numbers.shape[-2:].numel() > 1:
            return None
        numbers = numbers[..., 0]
    upto, apart = argument(node, "diagonal"), _distances(val.shape)
    kept = apart <= upto if node.target is aten.tril.default else apart >= upto
    return Values(torch.where(kept, numbers, torch.zeros_like(numbers)), by_distance=True)


def _turned(node: Any) -> tuple[Any, set[int]]:
    """What is turned round, and along which dims in all."""
    dims = set[int]()
    while node.target is aten.flip.default:
        dims ^= {dim % node.meta["val"].dim() for dim in node.args[1]}
        node = node.args[0]
    return node, dims


def _flipped(found: Values, dims: set[int]) -> Values | None:
    """By distance, along both of the last dims or none of them."""
    rank = found.numbers.dim() + found.by_distance
    if not found.by_distance or dims.isdisjoint({rank - 2, rank - 1}):
        return found._replace(numbers=found.numbers.flip(sorted(dims)))
    if not dims >= {rank - 2, rank - 1}:
        return None
    return found._replace(numbers=found.numbers.flip(sorted(dims - {rank - 1})))


class _Piece(NamedTuple):
    """Values of a shape."""

    values: Values | None
    shape: torch.Size


def _side_by_side(pieces: Sequence[_Piece], dim: int) -> Values | None:
    """One behind the other along a dim; along one of the last two, by distance where each goes on as the one before."""
    known = [(values, shape) for values, shape in pieces if values is not None]
    if len(known) < len(pieces) or len({values.numbers.dtype for values, _ in known}) != 1:
        return None
    rank = len(known[0][1])
    dim %= rank
    if not any(values.by_distance for values, _ in known):
        return _cat([values.numbers for values, _ in known], dim, [shape[dim] for _, shape in known])
    if any(not values.by_distance and values.numbers.shape[-2:].numel() > 1 for values, _ in known):
        return None
    lines = [values.numbers if values.by_distance else values.numbers[..., 0] for values, _ in known]
    if dim < rank - 2:
        made = _cat(lines, dim, [shape[dim] for _, shape in known])
        return made and made._replace(by_distance=True)
    whole: Tensor | None = None
    for line, (_, shape) in zip(lines, known, strict=True):
        line = line.expand(*line.shape[:-1], shape[-2] + shape[-1] - 1)
        if whole is not None:
            left, right = (whole, line) if dim == rank - 1 else (line, whole)
            lead = torch.broadcast_shapes(left.shape[:-1], right.shape[:-1])  # type: ignore[no-untyped-call]
            left, right = (x.expand(*lead, x.shape[-1]) for x in (left, right))
            shared = shape[-2 if dim == rank - 1 else -1] - 1  # distances that both have
            if not _equal(left[..., left.shape[-1] - shared :], right[..., :shared]):
                return None
            line = torch.cat([left, right[..., shared:]], -1)
        whole = line
    return None if whole is None else Values(whole, by_distance=True)


def _cat(parts: Sequence[Tensor], dim: int, sizes: Sequence[int]) -> Values | None:
    """Parts of these sizes along a dim; along others there may be one of what is the same."""
    others = [[1 if d == dim else n for d, n in enumerate(x.shape)] for x in parts]
    lead = torch.broadcast_shapes(*others)  # type: ignore[no-untyped-call]
    if lead.numel() * sum(sizes) > _LARGE:
        return None
    full = (
        x.expand([size if d == dim else n for d, n in enumerate(lead)]) for x, size in zip(parts, sizes, strict=True)
    )
    return Values(torch.cat([*full], dim))


def _padded(node: Any, piece: _Piece, val: Tensor) -> Values | None:
    """A tensor with a number around it."""
    sizes, number, rank = argument(node, "pad"), argument(node, "value"), val.dim()
    if min(sizes) < 0 or isinstance(number, fx.Node):
        return None
    around = Values(torch.full([1] * rank, number, dtype=val.dtype, device="cpu"))
    for dim, ends in zip(range(rank - 1, -1, -1), zip(sizes[::2], sizes[1::2], strict=True), strict=False):
        parts = [_Piece(around, _resized(piece.shape, dim, n)) for n in ends]
        parts = [x for x in (parts[0], piece, parts[1]) if x.shape[dim]]
        piece = _Piece(_side_by_side(parts, dim), _resized(piece.shape, dim, piece.shape[dim] + sum(ends)))
    return piece.values


def _resized(shape: torch.Size, dim: int, size: int) -> torch.Size:
    return torch.Size([*shape[:dim], size, *shape[dim + 1 :]])


def _pointwise(node: Any, known: Mapping[fx.Node, Values], val: Tensor) -> Values | None:
    """Element by element: of what there is once, once."""
    if torch.Tag.pointwise not in node.target.tags and not has(node.target, "copies"):
        return None
    if any(found.by_distance for found in known.values()):
        lines = {x: _as_line(x, found, val.shape) for x, found in known.items()}
        operands = {x: line for x, line in lines.items() if line is not None}
        return Values(_run(node, operands), by_distance=True) if len(operands) == len(lines) else None
    ends = [_counted(known.get(x)) for x in node.args] if node.target in _BY_DISTANCE and not node.kwargs else []
    if {end and end[1] for end in ends} == {-2, -1}:
        apart = _distances(val.shape)
        pair = [first + apart.to(first.dtype) * (dim == -1) for first, dim in filter(None, ends)]
        return _line(node.target(*pair), val.dim())
    operands = {x: found.numbers for x, found in known.items()}
    shape = torch.broadcast_shapes(*(x.shape for x in operands.values()))  # type: ignore[no-untyped-call]
    return Values(_run(node, operands)) if shape.numel() <= _LARGE else None


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
    counts = torch.equal(line, int(line[0]) + _places(len(line)).to(line.dtype))
    return (line[:1], dim) if counts else None


def _worked_out(node: Any, known: Mapping[fx.Node, Values], val: Tensor) -> Values | None:
    """By the op itself, of all of its operands."""
    shapes = {x: x.meta["val"].shape for x in known}
    if max([val.numel(), *(shape.numel() for shape in shapes.values())]) > _LARGE:
        return None
    return Values(_run(node, {x: found.spread(shapes[x]) for x, found in known.items()}))


def _run(node: Any, operands: Mapping[fx.Node, Tensor]) -> Tensor:
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), operands.__getitem__)
    if kwargs.get("device") is not None:
        kwargs = dict(kwargs, device="cpu")
    made: Tensor = node.target(*args, **kwargs)
    return made


def _short(made: Values) -> Values:
    """One in place of many that are the same along a dim; a square that goes by distance, by distance."""
    numbers = made.numbers
    for dim, n in enumerate(numbers.shape):
        first = numbers.narrow(dim, 0, 1)
        if n > 1 and _equal(numbers, first.expand_as(numbers)):
            numbers = first
    if made.by_distance:
        return Values(numbers[..., None]) if numbers.shape[-1] == 1 else Values(numbers, by_distance=True)
    if numbers.dim() > 1 and min(numbers.shape[-2:]) > 1 and _equal(numbers[..., 1:, 1:], numbers[..., :-1, :-1]):
        return _short(Values(torch.cat([numbers[..., :, 0].flip(-1), numbers[..., 0, 1:]], -1), by_distance=True))
    return Values(numbers)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two are the same to the bit: 0.0 is not -0.0."""
    return torch.equal(a, b) and (not a.is_floating_point() or torch.equal(a.signbit(), b.signbit()))
