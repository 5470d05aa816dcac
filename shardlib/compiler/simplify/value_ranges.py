"""Bounds integers whose values are unknown: counts, positions, remainders.

A loss ignores no target within bounds that exclude its `ignore_index`. The count of targets is then a constant, and no
device sends its own count.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import fx

from shardlib.compiler.simplify.emit import Emit
from shardlib.compiler.simplify.losses import LOSSES, SUM
from shardlib.core.aten.op_traits import has_trait, is_view
from shardlib.core.aten.schemas import get_argument, get_fill_value
from shardlib.core.torch_internals.torch_private import OpOverload, schema_of

aten = torch.ops.aten
_MAX_DEPTH = 64  # operands of operands that are examined


class Range(NamedTuple):
    """The least and the largest possible number."""

    low: int
    high: int

    def __or__(self, other: Range) -> Range:
        return Range(min(self.low, other.low), max(self.high, other.high))


def count_loss_targets(gm: fx.GraphModule) -> None:
    """Replaces the count of a loss by a constant, if no target can be the one that it ignores."""
    ranges = Ranges()
    for node in gm.graph.nodes:
        if (
            node.target not in LOSSES
            or get_argument(node, "reduction") != SUM
            or get_argument(node, "weight") is not None
        ):
            continue
        totals = [user for user in node.users if user.args[1] == 1]
        target, ignored = get_argument(node, "target"), get_argument(node, "ignore_index")
        if not totals or (bounds := ranges.find(target)) is None or bounds.low <= ignored <= bounds.high:
            continue
        for total in totals:
            val = total.meta["val"]
            count = target.meta["val"].numel()
            constant = Emit(gm, total)(aten.full.default, [], count, dtype=val.dtype, device=val.device)
            total.replace_all_uses_with(constant)


class Ranges:
    """The ranges of nodes, each computed once."""

    def __init__(self) -> None:
        self._ranges = dict[fx.Node, Range | None]()
        self._depth = 0

    def find(self, x: Any) -> Range | None:
        """Returns bounds of all elements of a node, or of a number; None if they are unknown."""
        if not isinstance(x, fx.Node):
            return Range(x, x) if isinstance(x, int) else None
        if x not in self._ranges:
            self._depth += 1
            self._ranges[x] = self._compute(x) if self._depth <= _MAX_DEPTH else None
            self._depth -= 1
        return self._ranges[x]

    def _compute(self, x: fx.Node) -> Range | None:
        val = x.meta.get("val")
        if not isinstance(val, torch.Tensor) or val.dtype.is_floating_point or val.dtype.is_complex:
            return None
        limits = Range(0, 1) if val.dtype == torch.bool else Range(*_get_limits(val.dtype))
        bounds = self._bound_call(x) if x.op == "call_function" else None
        if bounds is not None and limits.low <= bounds.low <= bounds.high <= limits.high:
            return bounds
        return limits if limits.low == 0 else None

    def _bound_call(self, x: fx.Node) -> Range | None:
        if x.target is operator.getitem:
            source, index = x.args
            is_position = isinstance(source, fx.Node) and index == 1 and _returns_positions(source.target)
            return _bound_positions(self, source) if is_position else None
        if x.target is aten.scalar_tensor.default:
            return self.find(x.args[0])
        if has_trait(x.target, "fills"):
            return self.find(get_fill_value(x))
        moves = is_view(x.target) or x.target in (aten.cat.default, aten.stack.default) or has_trait(x.target, "copies")
        if moves and not any(has_trait(x.target, trait) for trait in ("bitcasts", "sets_lazy_bit", "takes_strides")):
            return self.find_union(x.all_input_nodes)
        bound = _BOUNDS.get(x.target)
        return None if bound is None else bound(self, x)

    def find_union(self, values: Iterable[Any]) -> Range | None:
        """Returns bounds of all elements of several values."""
        ranges = [self.find(value) for value in values]
        bounded = [each for each in ranges if each is not None]
        return reduce(operator.or_, bounded) if bounded and len(bounded) == len(ranges) else None


def _get_limits(dtype: torch.dtype) -> tuple[int, int]:
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def _returns_positions(target: Any) -> bool:
    """Returns whether the second result of an op holds the positions of the first's elements."""
    results: Sequence[Any] = schema_of(target).returns if isinstance(target, OpOverload) else ()
    return len(results) == 2 and results[1].name == "indices"


def _bound_positions(_: Ranges, x: Any) -> Range:
    return Range(0, max(x.all_input_nodes[0].meta["val"].numel() - 1, 0))


def _bound_arange(_: Ranges, x: fx.Node) -> Range | None:
    args: tuple[Any, ...] = x.args
    start, step = args[0] if len(args) > 1 else 0, args[2] if len(args) > 2 else 1
    if not (isinstance(start, int) and isinstance(step, int)):
        return None
    ends = start, start + step * max(x.meta["val"].numel() - 1, 0)
    return Range(min(ends), max(ends))


def _bound_remainder(_: Ranges, x: fx.Node) -> Range | None:
    n = x.args[1]
    return Range(0, n - 1) if isinstance(n, int) and n > 0 else None


def _bound_sum(ranges: Ranges, x: fx.Node) -> Range | None:
    a, b = map(ranges.find, x.args)
    return None if x.kwargs or a is None or b is None else Range(a.low + b.low, a.high + b.high)


_BOUNDS: Mapping[Any, Callable[[Ranges, fx.Node], Range | None]] = {
    **dict.fromkeys([aten.arange.default, aten.arange.start, aten.arange.start_step], _bound_arange),
    **dict.fromkeys([aten.argmax.default, aten.argmin.default], _bound_positions),
    aten.remainder.Scalar: _bound_remainder,
    aten.add.Tensor: _bound_sum,
    aten.where.self: lambda ranges, x: ranges.find_union(x.args[1:]),
}
