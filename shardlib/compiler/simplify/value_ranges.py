"""Between which numbers whole ones lie that nobody needs to see: counts, places, rests. A target among them is none
that a loss ignores, so how many count is known, and no device asks the others."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import fx

from shardlib.compiler.simplify.basic import SUM, call
from shardlib.core.aten.op_traits import has_trait, is_view
from shardlib.core.aten.schemas import get_argument
from shardlib.core.torch_private import OpOverload, schema_of

aten = torch.ops.aten
_LOSSES = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}
_DEPTH = 64  # ops behind each other that are looked at


class Range(NamedTuple):
    """The least and the largest number that there may be."""

    low: int
    high: int

    def __or__(self, other: Range) -> Range:
        return Range(min(self.low, other.low), max(self.high, other.high))


def know_counts(gm: fx.GraphModule) -> None:
    """A loss whose targets are never those that it ignores counts all of them."""
    ranges = Ranges()
    for node in gm.graph.nodes:
        if (
            node.target not in _LOSSES
            or get_argument(node, "reduction") != SUM
            or get_argument(node, "weight") is not None
        ):
            continue
        totals = [user for user in node.users if user.args[1] == 1]
        target, ignored = get_argument(node, "target"), get_argument(node, "ignore_index")
        if not totals or (within := ranges.of(target)) is None or within.low <= ignored <= within.high:
            continue
        for total in totals:
            val = total.meta["val"]
            with gm.graph.inserting_before(total):
                like = {"dtype": val.dtype, "device": val.device}
                count = call(gm, total, aten.full.default, [], target.meta["val"].numel(), **like)
            total.replace_all_uses_with(count)


class Ranges:
    """The ranges of nodes, each found once."""

    def __init__(self) -> None:
        self._known = dict[fx.Node, Range | None]()
        self._asked = 0

    def of(self, x: Any) -> Range | None:
        """Where all numbers of a value lie; None where that is not known."""
        if not isinstance(x, fx.Node):
            return Range(x, x) if isinstance(x, int) else None
        if x not in self._known:
            self._asked += 1
            self._known[x] = self._find(x) if self._asked <= _DEPTH else None
            self._asked -= 1
        return self._known[x]

    def _find(self, x: fx.Node) -> Range | None:
        val = x.meta.get("val")
        if not isinstance(val, torch.Tensor) or val.dtype.is_floating_point or val.dtype.is_complex:
            return None
        most = Range(0, 1) if val.dtype == torch.bool else Range(torch.iinfo(val.dtype).min, torch.iinfo(val.dtype).max)
        found = self._made(x) if x.op == "call_function" else None
        if found is not None and most.low <= found.low <= found.high <= most.high:
            return found
        return most if most.low == 0 else None

    def _made(self, x: fx.Node) -> Range | None:
        if x.target is operator.getitem:
            made, index = x.args
            return _place(self, made) if isinstance(made, fx.Node) and index == 1 and _finds(made.target) else None
        if x.target is aten.scalar_tensor.default:
            return self.of(x.args[0])
        if has_trait(x.target, "fills"):
            return Range(0, 0) if has_trait(x.target, "zeros") else self.of(get_argument(x, "fill_value"))
        same = is_view(x.target) or x.target in (aten.cat.default, aten.stack.default) or has_trait(x.target, "copies")
        if same and not any(has_trait(x.target, trait) for trait in ("bitcasts", "sets_lazy_bit", "takes_strides")):
            return self.all(x.all_input_nodes)
        known = _RANGES.get(x.target)
        return None if known is None else known(self, x)

    def all(self, values: Iterable[Any]) -> Range | None:
        """Where all numbers of several values lie."""
        found = [self.of(value) for value in values]
        known = [each for each in found if each is not None]
        return reduce(operator.or_, known) if known and len(known) == len(found) else None


def _finds(target: Any) -> bool:
    """Returns whether the second result of an op says where the first was found."""
    results: Sequence[Any] = schema_of(target).returns if isinstance(target, OpOverload) else ()
    return len(results) == 2 and results[1].name == "indices"


def _place(_: Ranges, x: fx.Node) -> Range:
    return Range(0, max(x.all_input_nodes[0].meta["val"].numel() - 1, 0))


def _counted(_: Ranges, x: fx.Node) -> Range | None:
    args: tuple[Any, ...] = x.args
    start, step = args[0] if len(args) > 1 else 0, args[2] if len(args) > 2 else 1
    if not (isinstance(start, int) and isinstance(step, int)):
        return None
    ends = start, start + step * max(x.meta["val"].numel() - 1, 0)
    return Range(min(ends), max(ends))


def _rest(_: Ranges, x: fx.Node) -> Range | None:
    n = x.args[1]
    return Range(0, n - 1) if isinstance(n, int) and n > 0 else None


def _added(ranges: Ranges, x: fx.Node) -> Range | None:
    a, b = map(ranges.of, x.args)
    return None if x.kwargs or a is None or b is None else Range(a.low + b.low, a.high + b.high)


def _chosen(ranges: Ranges, x: fx.Node) -> Range | None:
    return ranges.all(x.args[1:])


_RANGES: Mapping[Any, Callable[[Ranges, fx.Node], Range | None]] = {
    **dict.fromkeys([aten.arange.default, aten.arange.start, aten.arange.start_step], _counted),
    **dict.fromkeys([aten.argmax.default, aten.argmin.default], _place),
    aten.remainder.Scalar: _rest,
    aten.add.Tensor: _added,
    aten.where.self: _chosen,
}
