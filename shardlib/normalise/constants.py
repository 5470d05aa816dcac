"""What is known of values that depend on no input: they are worked out, without the squares that are made of them.

Values that do not change along a dim are there once, and what rows and columns of counted places are compared by is a
number for each distance between the two. So a causal mask of 128k places is a line of 256k numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from shardlib.aten.traits import has, is_view
from shardlib.aten.views import argument
from shardlib.internals import OpOverload, schema_of, without_modes

aten = torch.ops.aten
_LARGE = 1 << 22  # elements of what is worked out
_BY_DISTANCE = {  # f(a + x, b + x) is f(a, b)
    getattr(aten, name).Tensor for name in ("le", "lt", "ge", "gt", "eq", "ne", "sub")
}
_UNKNOWN = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")


class Values(NamedTuple):
    """The values of a node of shape `[..., S, T]`; along a dim where they are the same there is one.

    By distance: the last two dims are one, of the distances `t - s` from `1 - S` to `T - 1`.
    """

    numbers: Tensor
    by_distance: bool = False


class Constants:
    """Values of nodes that depend on no input, each worked out once."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, Values | None] = {}

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
        val, target = node.meta.get("val"), node.target
        if not isinstance(val, Tensor) or not isinstance(target, OpOverload) or node.op != "call_function":
            return None
        made = _filled(node, val)
        if made is None:
            known = {x: found for x in node.all_input_nodes if (found := self._known[x]) is not None}
            if len(known) < len(node.all_input_nodes) or not _is_plain(target):
                return None
            made = _moved(node, known, val) or _pointwise(node, known, val) or _worked_out(node, known, val)
        return made and _short(made)


def _is_plain(target: OpOverload) -> bool:
    """Whether it makes the same of the same operands in every call."""
    name = schema_of(target).name
    of_torch = name.startswith(("aten::", "prims::")) or name == "shardlib::splice"
    return of_torch and torch.Tag.nondeterministic_seeded not in target.tags and name.split("::")[1] not in _UNKNOWN


def _filled(node: Any, val: Tensor) -> Values | None:
    """One number everywhere: of an operand that gives a shape, or a dtype, nothing need be known."""
    if has(node.target, "fills"):
        number = 0 if has(node.target, "zeros") else argument(node, "fill_value")
    elif schema_of(node.target).name in ("aten::ones", "aten::new_ones", "aten::ones_like"):
        number = 1
    else:
        return None
    return None if isinstance(number, fx.Node) else Values(torch.full([1] * val.dim(), number, dtype=val.dtype))


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
    if found.numbers.numel() == 1 and not any(has(target, t) for t in ("retypes", "marks", "strides", "pairs")):
        return Values(found.numbers.reshape([1] * rank))
    shape = source.meta["val"].shape
    if target is aten.expand.default and not found.by_distance:
        return Values(found.numbers.reshape([1] * (rank - len(shape)) + list(found.numbers.shape)))
    if not found.by_distance or found.numbers.shape[:-1].numel() > 1:
        return None
    line = found.numbers.flatten()
    if (target is aten.expand.default or has(target, "regroups")) and val.shape[-2:] == shape[-2:]:
        return _line(line, rank)
    if target is aten.slice.Tensor and argument(node, "step") == 1:
        dim, start = argument(node, "dim") % rank, argument(node, "start") or 0
        start = min(max(start + shape[dim] if start < 0 else start, 0), shape[dim])
        first = shape[-2] - val.shape[-2] - start if dim == rank - 2 else start if dim == rank - 1 else 0
        return _line(line[first : first + val.shape[-2] + val.shape[-1] - 1], rank)
    return None


def _line(line: Tensor, rank: int) -> Values:
    return Values(line.reshape([1] * (rank - 2) + [-1]), by_distance=True)


def _distances(shape: torch.Size) -> Tensor:
    return torch.arange(1 - shape[-2], shape[-1])


def _triangle(node: Any, found: Values, val: Tensor) -> Values | None:
    values = found.numbers
    if not found.by_distance:
        if values.shape[-2:].numel() > 1:
            return None
        values = values[..., 0]
    upto, below = argument(node, "diagonal"), node.target is aten.tril.default
    apart = _distances(val.shape)
    return Values(torch.where(apart <= upto if below else apart >= upto, values, 0).to(val.dtype), by_distance=True)


def _pointwise(node: Any, known: Mapping[fx.Node, Values], val: Tensor) -> Values | None:
    """Element by element: of what there is once, once."""
    rank = val.dim()
    if torch.Tag.pointwise not in node.target.tags and not has(node.target, "copies"):
        return None
    at = {x: _ranked(found, rank) for x, found in known.items()}
    if any(found.by_distance for found in at.values()):
        if any(found.numbers.shape[-2:].numel() > 1 for found in at.values() if not found.by_distance):
            return None  # of places, too
        operands = {x: found.numbers if found.by_distance else found.numbers[..., 0] for x, found in at.items()}
        return Values(_run(node, operands), by_distance=True)
    operands = {x: found.numbers for x, found in at.items()}
    ends = [_counted(operands.get(x)) for x in node.args] if node.target in _BY_DISTANCE and not node.kwargs else []
    if {end and end[1] for end in ends} == {-2, -1}:
        apart = _distances(val.shape)
        pair = [apart + first if dim == -1 else torch.tensor(first) for first, dim in filter(None, ends)]
        return _line(node.target(*pair), rank)
    shape = torch.broadcast_shapes(*(x.shape for x in operands.values()))  # type: ignore[no-untyped-call]
    return Values(_run(node, operands)) if shape.numel() <= _LARGE else None


def _ranked(found: Values, rank: int) -> Values:
    missing = rank - found.numbers.dim() - found.by_distance
    return found._replace(numbers=found.numbers[(None,) * missing]) if missing > 0 else found


def _counted(values: Tensor | None) -> tuple[int, int] | None:
    """Of whole numbers that count up along one of the last two dims: the first, and which dim."""
    if values is None or values.dtype != torch.int64 or not 1 < values.numel() == max(values.shape[-2:]):
        return None
    line = values.flatten()
    counts = torch.equal(line, torch.arange(len(line)) + line[0])
    return (int(line[0]), -1 if values.shape[-1] > 1 else -2) if counts else None


def _worked_out(node: Any, known: Mapping[fx.Node, Values], val: Tensor) -> Values | None:
    """By the op itself, of all of its operands."""
    shapes = {x: x.meta["val"].shape for x in known}
    if max([val.numel(), *(shape.numel() for shape in shapes.values())]) > _LARGE:
        return None
    return Values(_run(node, {x: spread(found, shapes[x]) for x, found in known.items()}))


def spread(found: Values, shape: torch.Size) -> Tensor:
    """All values."""
    values = found.numbers
    if found.by_distance:
        values = values[..., torch.arange(shape[-1]) - torch.arange(shape[-2])[:, None] + shape[-2] - 1]
    return values.expand(shape)


def _run(node: Any, operands: Mapping[fx.Node, Tensor]) -> Tensor:
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), operands.__getitem__)
    if kwargs.get("device") is not None:
        kwargs = dict(kwargs, device="cpu")
    made: Tensor = node.target(*args, **kwargs)
    return made


def _short(found: Values) -> Values:
    """One in place of many that are the same along a dim; a square that goes by distance, by distance."""
    values = found.numbers
    for dim, n in enumerate(values.shape):
        first = values.narrow(dim, 0, min(n, 1))
        if n > 1 and torch.equal(values, first.expand_as(values)):
            values = first
    if found.by_distance:
        return Values(values[..., None]) if values.shape[-1] == 1 else Values(values, by_distance=True)
    if values.dim() > 1 and min(values.shape[-2:]) > 1 and torch.equal(values[..., 1:, 1:], values[..., :-1, :-1]):
        return _short(Values(torch.cat([values[..., :, 0].flip(-1), values[..., 0, 1:]], -1), by_distance=True))
    return Values(values)
