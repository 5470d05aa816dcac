"""Masks of attention, and biases that hide keys, taken apart: masks that all must show a key, and terms that add up.

`~(a | b)` is `~a & ~b`, `where(c, x, False)` is `c & x`, and a bias that is -inf where `c` is false, and otherwise `x`,
is the mask `c` beside the bias `x`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from shardlib.compiler.simplify.attention.toeplitz_eval import Constants
from shardlib.compiler.simplify.basic import call
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.aten.schemas import get_argument

aten = torch.ops.aten
_SAME = (aten.expand.default,)
_NOTS = (aten.bitwise_not.default, aten.logical_not.default)
_ANDS = (aten.bitwise_and.Tensor, aten.logical_and.default, aten.mul.Tensor, aten.minimum.default)
_ORS = (aten.bitwise_or.Tensor, aten.logical_or.default, aten.add.Tensor, aten.maximum.default)


class Mask(NamedTuple):
    """A mask of what is seen, or, if it `hides`, of what is not."""

    node: fx.Node
    hides: bool = False


class Apart:
    """`is_known` says of which masks, and terms, one knows enough as they are, though they are made of others."""

    def __init__(self, gm: fx.GraphModule, constants: Constants, is_known: Callable[[Mask], bool]) -> None:
        self.gm, self.constants, self.is_known = gm, constants, is_known

    def masks(self, mask: Any, *, hides: bool = False) -> list[Mask]:
        """The masks of which one is made, as they broadcast: a key is seen that all of them show."""
        if not isinstance(mask, fx.Node):
            return []
        whole, target = Mask(mask, hides), mask.target
        if self.is_known(whole) or mask.meta["val"].dtype != torch.bool:
            return [whole]
        if target in _NOTS and _are_alike(mask, *mask.args):
            return self.masks(mask.args[0], hides=not hides)
        if target in (_ORS if hides else _ANDS) and not mask.kwargs and _are_alike(mask, *mask.args):
            return [part for x in mask.args for part in self.masks(x, hides=hides)]
        for which, kept, other in _choices(mask):
            left = self._number(kept)
            if self._number(other) == hides and (left is None or left != hides):
                return [*self.masks(which.node, hides=which.hides), *self.masks(kept, hides=hides)]
        if (source := _shown(mask)) is not None:
            parts = self.masks(source, hides=hides)
            if parts != [Mask(source, hides)] and (moved := self._moved(mask, parts)) is not None:
                return moved
        return [whole]

    def terms(self, bias: Any) -> tuple[list[fx.Node], list[Mask]]:
        """What adds up to a bias, and the masks by which it is -inf elsewhere."""
        if not isinstance(bias, fx.Node):
            return [], []
        target = bias.target
        if self.is_known(Mask(bias)):
            return [bias], []
        if target is aten.add.Tensor and not bias.kwargs and _are_alike(bias, *bias.args):
            (left, lefts), (right, rights) = map(self.terms, bias.args)
            return left + right, lefts + rights
        for which, kept, other in _choices(bias):
            if self._number(other) == -math.inf:
                shown = self.masks(which.node, hides=which.hides)
                if self._number(kept) == 0:
                    return [], shown
                if _are_alike(bias, kept):
                    terms, masks = self.terms(kept)
                    return terms, shown + masks
        if (source := _shown(bias)) is not None and source.meta["val"].is_floating_point():
            terms, masks = self.terms(source)
            cast = source.meta["val"].dtype != bias.meta["val"].dtype
            goes = (terms, masks) != ([source], []) and not (cast and not all(self.is_known(Mask(x)) for x in terms))
            if goes and (moved := self._moved(bias, [*map(Mask, terms), *masks])) is not None:
                return [x.node for x in moved[: len(terms)]], moved[len(terms) :]
        return [bias], []

    def joined(self, masks: Sequence[Mask]) -> fx.Node | None:
        """The mask of what all of them show."""
        return self.together([self._seen(*x) for x in masks], aten.bitwise_and.Tensor)

    def together(self, parts: Sequence[fx.Node], join: Any) -> fx.Node | None:
        """What is left, behind the last of it."""
        if not parts:
            return None
        whole, *others = sorted(parts)
        for part in others:
            with self.gm.graph.inserting_after(max(whole, part)):
                whole = call(self.gm, part, join, whole, part)
        return whole

    def _seen(self, node: fx.Node, hides: bool) -> fx.Node:
        if not hides:
            return node
        with self.gm.graph.inserting_after(node):
            return call(self.gm, node, aten.bitwise_not.default, node)

    def _number(self, x: Any) -> Any:
        """The one number that something is everywhere; None if that is not known."""
        if isinstance(x, fx.Node):
            values = self.constants.of(x)
            return values.numbers.item() if values is not None and values.numbers.numel() == 1 else None
        return x if isinstance(x, bool | int | float) else None

    def _moved(self, mask: fx.Node, parts: Sequence[Mask]) -> list[Mask] | None:
        """What becomes of parts where what they are parts of is shown otherwise."""
        if mask.target in _SAME or has_trait(mask.target, "copies"):
            return [*parts]
        shown = mask.args[0]
        assert isinstance(shown, fx.Node)
        whole = shown.meta["val"].shape
        if whole[-2:] != mask.meta["val"].shape[-2:]:
            return None
        with self.gm.graph.inserting_before(mask):
            moved = [_moved(self.gm, mask, x.node, whole) for x in parts]
        found = [Mask(new, x.hides) for x, new in zip(parts, moved, strict=True) if new is not None]
        return found if len(found) == len(parts) else None


def _are_alike(mask: fx.Node, *parts: Any) -> bool:
    """Returns whether all are tensors of one dtype: what is left of others would add up in another one."""
    return all(isinstance(x, fx.Node) and x.meta["val"].dtype == mask.meta["val"].dtype for x in parts)


def _choices(node: fx.Node) -> Iterator[tuple[Mask, Any, Any]]:
    """Where a tensor is one of two others: which shows the first of them, that, and the second; and the same turned."""
    if node.target is aten.where.self:
        which, one, other = node.args
    elif node.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        other, which, one = node.args
    else:
        return
    if isinstance(which, fx.Node) and which.meta["val"].dtype == torch.bool:
        yield Mask(which), one, other
        yield Mask(which, True), other, one


def _shown(mask: fx.Node) -> fx.Node | None:
    """What is shown in other dims, or in part, or copied."""
    shows = (
        mask.target in (*_SAME, aten.slice.Tensor)
        or has_trait(mask.target, "keeps_order")
        or has_trait(mask.target, "copies")
    )
    return mask.all_input_nodes[0] if shows and len(mask.all_input_nodes) == 1 else None


def _moved(gm: fx.GraphModule, mask: fx.Node, part: fx.Node, whole: torch.Size) -> fx.Node | None:
    """What becomes of a part where leading dims of the mask are sliced, or regrouped; None of what nobody can say."""
    sizes = [1] * (len(whole) - part.meta["val"].dim()) + list(part.meta["val"].shape)
    if mask.target is aten.slice.Tensor:
        dim = get_argument(mask, "dim") % len(whole)
        if sizes[dim] == 1:
            return part
        at = dim - len(whole)  # from behind
        return call(gm, mask, aten.slice.Tensor, part, at, *(get_argument(mask, n) for n in ("start", "end", "step")))
    lead = _regrouped(list(whole[:-2]), sizes[:-2], list(mask.meta["val"].shape[:-2]))
    return None if lead is None else call(gm, mask, aten.reshape.default, part, [*lead, *sizes[-2:]])


def _regrouped(whole: list[int], sizes: list[int], new: list[int]) -> list[int] | None:
    """Sizes that broadcast to `new`, of those that broadcast to `whole`, which has become `new`."""
    if all(size == 1 for size in sizes):
        return [1] * len(new)
    if sizes == whole:
        return new
    kept = [(n, size) for n, size in zip(whole, sizes, strict=True) if n != 1]
    if [n for n, _ in kept] != [n for n in new if n != 1]:
        return None
    return [1 if n == 1 else kept.pop(0)[1] for n in new]
