"""Slices, pads, rolls and concatenations along one dim that follow each other become one op, which takes what it needs
from where it was: each of them alone would move what the next one moves back."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from shardlib.core.aten.op_traits import has_trait
from shardlib.core.aten.schemas import get_argument
from shardlib.ops.splice import SPLICE

aten = torch.ops.aten


@dataclass(frozen=True)
class _Range:
    """`start:stop` of a node, or of a filling; `negated` with another sign, `mirrored` turned round."""

    source: fx.Node | None
    start: int
    stop: int
    fill: complex = 0
    negated: bool = False
    mirrored: bool = False

    def within(self, low: int, high: int) -> _Range:
        """Its own elements from `low` to `high`."""
        if self.mirrored:
            return replace(self, start=self.stop - high, stop=self.stop - low)
        return replace(self, start=self.start + low, stop=self.start + high)

    def seen(self, by: _Range) -> _Range:
        """With the other sign where `by` is negated, turned round where it is mirrored."""
        mirrored = self.source is not None and self.mirrored != by.mirrored
        return replace(self, negated=self.negated != by.negated, mirrored=mirrored)


@dataclass(frozen=True)
class _Splice:
    """What a node is made of along a dim."""

    dim: int
    ranges: tuple[_Range, ...]


def join_moves(gm: fx.GraphModule) -> None:
    """Chains of moves along one dim become one move."""
    forms: dict[fx.Node, _Splice] = {}
    for node in gm.graph.nodes:
        form = _negated(node, forms) if node.target is aten.neg.default else _form(node)
        forms |= {} if form is None else {node: form}
    inner = {x for x, form in forms.items() if all(_continues(form, x, forms.get(user), user) for user in x.users)}
    for node, form in forms.items():  # in order, so that what a node reads is flat already
        flat = _Splice(form.dim, tuple(_joined(_flat(forms, inner, form))))
        if flat == form or len(flat.ranges) > _MOST:
            continue
        if node.target is aten.slice_scatter.default and not _moves(flat, node.meta["val"].shape):
            continue
        forms[node] = flat
        if _takes_half(flat, node.meta["val"].shape[flat.dim]):
            slices = all(x.target is node.target is aten.slice.Tensor for x in node.all_input_nodes)
            if not slices and node.target is not aten.neg.default:
                _write(node, flat)


_MOST = 64  # ranges of one splice
_NEAR = 8  # times smaller than a size is what it may differ from one that is nearly the same


def _continues(form: _Splice, node: fx.Node, then: _Splice | None, user: fx.Node) -> bool:
    """Returns whether a user of a node takes ranges of it along the dim along which it was made."""
    return then is not None and then.dim == form.dim and user.meta["val"].dtype == node.meta["val"].dtype


def _takes_half(form: _Splice, size: int) -> bool:
    """Returns whether it reads at least half of each source that has quite another size than it makes, and so may be
    cut where it is not: of less, a slice alone may be the best that can be sent."""
    taken: Counter[fx.Node] = Counter()
    for r in form.ranges:
        if r.source is not None:
            taken[r.source] += r.stop - r.start
    sizes = {x: x.meta["val"].shape[form.dim] for x in taken}
    return all(2 * n >= sizes[x] or abs(sizes[x] - size) * _NEAR <= size for x, n in taken.items())


def _moves(form: _Splice, shape: torch.Size) -> bool:
    """Returns whether writes move most of a tensor elsewhere. Where one stays in its place, it may be written to there;
    and what is written part by part need not wait for the last."""
    at = itertools.accumulate((r.stop - r.start for r in form.ranges), initial=0)
    kept = [r.source for begin, r in zip(at, form.ranges, strict=False) if r.start == begin and not r.mirrored]
    most = max((r.stop - r.start for r in form.ranges if r.source is not None), default=0)
    return 2 * most > shape[form.dim] and all(x is None or x.meta["val"].shape != shape for x in kept)


def _flat(forms: dict[fx.Node, _Splice], inner: set[fx.Node], form: _Splice) -> Iterator[_Range]:
    """Its ranges, of what is no move itself."""
    for r in form.ranges:
        if r.source is None or r.source not in inner:
            yield r
            continue
        at, found = 0, []
        for part in forms[r.source].ranges:
            size = part.stop - part.start
            low, high = max(r.start - at, 0), min(r.stop - at, size)
            if low < high:
                found.append(part.within(low, high).seen(r))
            at += size
        yield from reversed(found) if r.mirrored else found


def _joined(ranges: Iterator[_Range]) -> Iterator[_Range]:
    """Ranges that follow each other in one source are one."""
    last: _Range | None = None
    for r in ranges:
        follows = last is not None and r.source is last.source and (r.source is None or r.start == last.stop)
        plain = last is not None and not (r.mirrored or last.mirrored)
        if last is not None and follows and plain and (repr(r.fill), r.negated) == (repr(last.fill), last.negated):
            last = replace(last, stop=last.stop + r.stop - r.start)
            continue
        if last is not None:
            yield last
        last = r
    if last is not None:
        yield last


def _write(node: fx.Node, form: _Splice) -> None:
    """Make a node of these ranges; one that is a filling alone stays as it was."""
    nodes = list(dict.fromkeys(r.source for r in form.ranges if r.source is not None))
    if not nodes:
        return
    sources = [nodes.index(r.source) if r.source is not None else -1 for r in form.ranges]
    starts = [r.start if r.source is not None else 0 for r in form.ranges]
    stops = [r.stop if r.source is not None else r.stop - r.start for r in form.ranges]
    node.target, node.kwargs = SPLICE, {}
    signs, turns = [r.negated for r in form.ranges], [r.mirrored for r in form.ranges]
    flags = [signs, turns] if any(turns) else [signs] if any(signs) else []
    node.args = (nodes, form.dim, sources, starts, stops, [r.fill for r in form.ranges], *flags)


def _form(node: fx.Node) -> _Splice | None:
    """What a move along one dim takes from where; None of any other op."""
    make = _FORMS.get(node.target)
    form = None if make is None else make(node)
    numbers = [] if form is None else [n for r in form.ranges for n in (r.start, r.stop)]
    return form if numbers and all(type(n) is int for n in numbers) else None


def _negated(node: fx.Node, forms: Mapping[fx.Node, _Splice]) -> _Splice | None:
    """What changes the sign of a move's result, as one that does so of all of it; it becomes no splice itself."""
    (source,) = node.args
    if not isinstance(source, fx.Node) or source not in forms:
        return None
    dim = forms[source].dim
    return _Splice(dim, (_Range(source, 0, source.meta["val"].shape[dim], negated=True),))


def _cat(node: fx.Node) -> _Splice | None:
    val, operands = node.meta["val"], node.args[0]
    assert isinstance(operands, list | tuple)
    dim, ranges = get_argument(node, "dim") % max(val.dim(), 1), []
    for x in operands:
        assert isinstance(x, fx.Node)
        like = x.meta["val"]
        if like.dtype != val.dtype or like.dim() != val.dim():
            return None
        fill = _filling(x)
        ranges.append(_Range(x, 0, like.shape[dim]) if fill is None else _Range(None, 0, like.shape[dim], fill))
    return _Splice(dim, tuple(ranges))


def _filling(node: fx.Node) -> complex | None:
    """The number that a tensor holds everywhere, if it is known."""
    if not has_trait(node.target, "fills"):
        return None
    fill = 0 if has_trait(node.target, "zeros") else get_argument(node, "fill_value")
    return fill if type(fill) in (bool, int, float, complex) else None


def _slice(node: fx.Node) -> _Splice | None:
    (source, *_), dim = node.args, get_argument(node, "dim")
    assert isinstance(source, fx.Node)
    shape = source.meta["val"].shape
    start, stop, step = slice(*(get_argument(node, name) for name in ("start", "end", "step"))).indices(shape[dim])
    return _Splice(dim % len(shape), (_Range(source, start, max(start, stop)),)) if step == 1 else None


_EMPTY = {aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default}


def _slice_scatter(node: fx.Node) -> _Splice | None:
    """What is written, between what is kept of the other tensor."""
    (x, source, *_), shape, dim = node.args, node.meta["val"].shape, get_argument(node, "dim")
    assert isinstance(x, fx.Node)
    assert isinstance(source, fx.Node)
    start, stop, step = slice(*(get_argument(node, name) for name in ("start", "end", "step"))).indices(shape[dim])
    if step != 1 or source.meta["val"].dtype != node.meta["val"].dtype:
        return None
    written = _Range(source, 0, stop - start)
    fill = 0 if x.target in _EMPTY else _filling(x)  # what nobody has written to may be zeros
    if fill is not None:
        return _Splice(dim % len(shape), _padded(written, start, shape[dim] - stop, fill))
    ranges = _Range(x, 0, start), written, _Range(x, stop, shape[dim])
    return _Splice(dim % len(shape), tuple(r for r in ranges if r.stop > r.start))


def _slice_backward(node: fx.Node) -> _Splice | None:
    (grad, *_), shape, dim = node.args, node.meta["val"].shape, get_argument(node, "dim")
    assert isinstance(grad, fx.Node)
    start, stop, step = slice(*(get_argument(node, name) for name in ("start", "end", "step"))).indices(shape[dim])
    if step != 1 or stop <= start or grad.meta["val"].dtype != node.meta["val"].dtype:
        return None
    around = _Range(grad, 0, stop - start), start, shape[dim] - stop
    return _Splice(dim % len(shape), _padded(*around, 0))


def _pad(node: fx.Node) -> _Splice | None:
    (source, *_), amounts, fill = node.args, get_argument(node, "pad"), get_argument(node, "value")
    assert isinstance(source, fx.Node)
    padded = [i for i in range(len(amounts) // 2) if any(amounts[2 * i : 2 * i + 2])]
    if len(padded) != 1 or type(fill) not in (bool, int, float, complex):
        return None
    dim = source.meta["val"].dim() - 1 - padded[0]
    before, after = amounts[2 * padded[0] : 2 * padded[0] + 2]
    size = source.meta["val"].shape[dim]
    kept = _Range(source, max(-before, 0), size - max(-after, 0))
    return _Splice(dim, _padded(kept, max(before, 0), max(after, 0), fill))


def _padded(part: _Range, before: int, after: int, fill: complex) -> tuple[_Range, ...]:
    fills = [_Range(None, 0, n, fill) for n in (before, after)]
    return tuple(r for r in (fills[0], part, fills[1]) if r.stop > r.start)


def _roll(node: fx.Node) -> _Splice | None:
    (source, *_), shifts, dims = node.args, get_argument(node, "shifts"), get_argument(node, "dims")
    assert isinstance(source, fx.Node)
    if len(dims) != 1:
        return None
    size = source.meta["val"].shape[dims[0]]
    cut = size - shifts[0] % size if size else 0
    ranges = _Range(source, cut, size), _Range(source, 0, cut)
    return _Splice(dims[0] % source.meta["val"].dim(), tuple(r for r in ranges if r.stop > r.start))


def _flip(node: fx.Node) -> _Splice | None:
    (source, *_), dims = node.args, get_argument(node, "dims")
    assert isinstance(source, fx.Node)
    shape = source.meta["val"].shape
    if len(dims) != 1 or not shape:
        return None
    return _Splice(dims[0] % len(shape), (_Range(source, 0, shape[dims[0]], mirrored=True),))


def _spliced(node: fx.Node) -> _Splice | None:
    """What pads that mirror are from the beginning."""
    tensors, sources, fills = (get_argument(node, name) for name in ("tensors", "sources", "fills"))
    ends = [get_argument(node, name) for name in ("starts", "stops")]
    marks = [get_argument(node, name) or [False] * len(fills) for name in ("negated", "mirrored")]
    of = (tensors[i] if i >= 0 else None for i in sources)
    return _Splice(get_argument(node, "dim"), tuple(map(_Range, of, *ends, fills, *marks)))


_FORMS: Mapping[Any, Callable[[fx.Node], _Splice | None]] = {
    aten.cat.default: _cat,
    aten.slice.Tensor: _slice,
    aten.slice_scatter.default: _slice_scatter,
    aten.slice_backward.default: _slice_backward,
    aten.constant_pad_nd.default: _pad,
    aten.roll.default: _roll,
    aten.flip.default: _flip,
    SPLICE: _spliced,
}
