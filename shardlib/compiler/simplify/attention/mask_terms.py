"""Splits masks of attention, and biases that hide keys, into masks that all must show a key, and terms of a sum.

`~(a | b)` is `~a & ~b`, `where(c, x, False)` is `c & x`, and a bias that is -inf where `c` is false, and otherwise `x`,
is the mask `c` and the bias `x`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from shardlib.compiler.simplify.constants.evaluate import Constants
from shardlib.compiler.simplify.emit import add_call
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.aten.schemas import get_argument

aten = torch.ops.aten
_BROADCASTS = (aten.expand.default,)
_NOTS = (aten.bitwise_not.default, aten.logical_not.default)
_ANDS = (aten.bitwise_and.Tensor, aten.logical_and.default, aten.mul.Tensor, aten.minimum.default)
_ORS = (aten.bitwise_or.Tensor, aten.logical_or.default, aten.add.Tensor, aten.maximum.default)


class Mask(NamedTuple):
    """A mask that is true for shown keys, or, if it `hides`, for hidden ones."""

    node: fx.Node
    hides: bool = False


class MaskSplitter:
    """Splits masks and biases; those for which `is_known` is true stay whole."""

    def __init__(self, gm: fx.GraphModule, constants: Constants, is_known: Callable[[Mask], bool]) -> None:
        self.gm, self.constants, self.is_known = gm, constants, is_known

    def split_mask(self, mask: Any, *, hides: bool = False) -> list[Mask]:
        """Returns masks that broadcast; a key is shown if all of them show it."""
        if not isinstance(mask, fx.Node):
            return []
        whole, target = Mask(mask, hides), mask.target
        if self.is_known(whole) or mask.meta["val"].dtype != torch.bool:
            return [whole]
        if target in _NOTS and _have_one_dtype(mask, *mask.args):
            return self.split_mask(mask.args[0], hides=not hides)
        if target in (_ORS if hides else _ANDS) and not mask.kwargs and _have_one_dtype(mask, *mask.args):
            return [part for x in mask.args for part in self.split_mask(x, hides=hides)]
        for choice, kept, other in _list_choices(mask):
            number = self._find_number(kept)
            if self._find_number(other) == hides and (number is None or number != hides):
                return [*self.split_mask(choice.node, hides=choice.hides), *self.split_mask(kept, hides=hides)]
        if (source := _find_source(mask)) is not None:
            parts = self.split_mask(source, hides=hides)
            if parts != [Mask(source, hides)] and (moved := self._apply_view(mask, parts)) is not None:
                return moved
        return [whole]

    def split_bias(self, bias: Any) -> tuple[list[fx.Node], list[Mask]]:
        """Returns the terms that add up to a bias, and the masks that hide keys by -inf."""
        if not isinstance(bias, fx.Node):
            return [], []
        target = bias.target
        if self.is_known(Mask(bias)):
            return [bias], []
        if target is aten.add.Tensor and not bias.kwargs and _have_one_dtype(bias, *bias.args):
            (left, lefts), (right, rights) = map(self.split_bias, bias.args)
            return left + right, lefts + rights
        for choice, kept, other in _list_choices(bias):
            if self._find_number(other) == -math.inf:
                shown = self.split_mask(choice.node, hides=choice.hides)
                if self._find_number(kept) == 0:
                    return [], shown
                if _have_one_dtype(bias, kept):
                    terms, masks = self.split_bias(kept)
                    return terms, shown + masks
        if (source := _find_source(bias)) is not None and source.meta["val"].is_floating_point():
            terms, masks = self.split_bias(source)
            cast = source.meta["val"].dtype != bias.meta["val"].dtype
            is_split = (terms, masks) != ([source], [])
            can_cast = not cast or all(self.is_known(Mask(x)) for x in terms)
            if is_split and can_cast and (moved := self._apply_view(bias, [*map(Mask, terms), *masks])) is not None:
                return [x.node for x in moved[: len(terms)]], moved[len(terms) :]
        return [bias], []

    def join_masks(self, masks: Sequence[Mask]) -> fx.Node | None:
        """Emits the mask of the keys that all masks show."""
        return self.join([self._emit_shown(*x) for x in masks], aten.bitwise_and.Tensor)

    def join(self, parts: Sequence[fx.Node], op: Any) -> fx.Node | None:
        """Emits `op` over all parts, behind the last of them; None without parts."""
        if not parts:
            return None
        whole, *others = sorted(parts)
        for part in others:
            with self.gm.graph.inserting_after(max(whole, part)):
                whole = add_call(self.gm, part, op, whole, part)
        return whole

    def _emit_shown(self, node: fx.Node, hides: bool) -> fx.Node:
        if not hides:
            return node
        with self.gm.graph.inserting_after(node):
            return add_call(self.gm, node, aten.bitwise_not.default, node)

    def _find_number(self, x: Any) -> Any:
        """Returns the number that all elements of a node are; None if they differ or are unknown."""
        if isinstance(x, fx.Node):
            values = self.constants.find(x)
            return values.table.item() if values is not None and values.table.numel() == 1 else None
        return x if isinstance(x, bool | int | float) else None

    def _apply_view(self, mask: fx.Node, parts: Sequence[Mask]) -> list[Mask] | None:
        """Applies the mask's view of its operand to the operand's parts; None if some part has no such view."""
        if mask.target in _BROADCASTS or has_trait(mask.target, "copies"):
            return [*parts]
        source = mask.args[0]
        assert isinstance(source, fx.Node)
        whole = source.meta["val"].shape
        if whole[-2:] != mask.meta["val"].shape[-2:]:
            return None
        with self.gm.graph.inserting_before(mask):
            views = [_view_part(self.gm, mask, x.node, whole) for x in parts]
        masks = [Mask(view, x.hides) for x, view in zip(parts, views, strict=True) if view is not None]
        return masks if len(masks) == len(parts) else None


def _have_one_dtype(mask: fx.Node, *parts: Any) -> bool:
    """Returns whether all are tensors of one dtype: parts of different dtypes would be joined in another dtype."""
    return all(isinstance(x, fx.Node) and x.meta["val"].dtype == mask.meta["val"].dtype for x in parts)


def _list_choices(node: fx.Node) -> Iterator[tuple[Mask, Any, Any]]:
    """Yields the mask, the chosen value and the other value of a `where` or a fill, in both orders."""
    if node.target is aten.where.self:
        mask, chosen, other = node.args
    elif node.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        other, mask, chosen = node.args
    else:
        return
    if isinstance(mask, fx.Node) and mask.meta["val"].dtype == torch.bool:
        yield Mask(mask), chosen, other
        yield Mask(mask, True), other, chosen


def _find_source(mask: fx.Node) -> fx.Node | None:
    """Returns the operand of an expansion, a slice, a reshape or a copy."""
    is_view = (
        mask.target in (*_BROADCASTS, aten.slice.Tensor)
        or has_trait(mask.target, "keeps_order")
        or has_trait(mask.target, "copies")
    )
    return mask.all_input_nodes[0] if is_view and len(mask.all_input_nodes) == 1 else None


def _view_part(gm: fx.GraphModule, mask: fx.Node, part: fx.Node, whole: torch.Size) -> fx.Node | None:
    """Slices or regroups a part's leading dims as the mask does those of `whole`; None if the dims do not match."""
    sizes = [1] * (len(whole) - part.meta["val"].dim()) + list(part.meta["val"].shape)
    if mask.target is aten.slice.Tensor:
        dim = get_argument(mask, "dim") % len(whole)
        if sizes[dim] == 1:
            return part
        at = dim - len(whole)  # from behind
        return add_call(
            gm, mask, aten.slice.Tensor, part, at, *(get_argument(mask, n) for n in ("start", "end", "step"))
        )
    lead = _regroup(list(whole[:-2]), sizes[:-2], list(mask.meta["val"].shape[:-2]))
    return None if lead is None else add_call(gm, mask, aten.reshape.default, part, [*lead, *sizes[-2:]])


def _regroup(whole: list[int], sizes: list[int], new: list[int]) -> list[int] | None:
    """Returns sizes that broadcast to `new`, for `sizes` that broadcast to `whole`, which is reshaped to `new`."""
    if all(size == 1 for size in sizes):
        return [1] * len(new)
    if sizes == whole:
        return new
    kept = [(n, size) for n, size in zip(whole, sizes, strict=True) if n != 1]
    if [n for n, _ in kept] != [n for n in new if n != 1]:
        return None
    return [1 if n == 1 else kept.pop(0)[1] for n in new]
