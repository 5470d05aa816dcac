"""Composes slices, pads, rolls and concatenations along one dim into one `splice`, which reads ranges of operands.

Each op alone would send elements between devices that the next one sends back.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from shardlib.core.aten.schemas import get_argument, get_fill_value
from shardlib.ops.splice import SPLICE

aten = torch.ops.aten


@dataclass(frozen=True)
class _Range:
    """The range `start:stop` of a node, or of the number `fill` without one; perhaps `negated` or in reverse order."""

    source: fx.Node | None
    start: int
    stop: int
    fill: complex = 0
    negated: bool = False
    mirrored: bool = False

    def narrow(self, low: int, high: int) -> _Range:
        """Returns the elements from `low` to `high` of the range."""
        if self.mirrored:
            return replace(self, start=self.stop - high, stop=self.stop - low)
        return replace(self, start=self.start + low, stop=self.start + high)

    def apply_flags(self, outer: _Range) -> _Range:
        """Returns the range as a range of its node shows it: negated and mirrored as the outer one is."""
        mirrored = self.source is not None and self.mirrored != outer.mirrored
        return replace(self, negated=self.negated != outer.negated, mirrored=mirrored)


@dataclass(frozen=True)
class _Splice:
    """The ranges that a node concatenates along a dim."""

    dim: int
    ranges: tuple[_Range, ...]


def splice_moves(gm: fx.GraphModule) -> None:
    """Replaces chains of moves along one dim by one move."""
    forms: dict[fx.Node, _Splice] = {}
    for node in gm.graph.nodes:
        form = _read_negation(node, forms) if node.target is aten.neg.default else _read_move(node)
        forms |= {} if form is None else {node: form}
    inner = {x for x, form in forms.items() if all(_reads_ranges(form, x, forms.get(user), user) for user in x.users)}
    for node, form in forms.items():  # in order, so that what a node reads is flat already
        flat = _Splice(form.dim, tuple(_merge_ranges(_flatten(forms, inner, form))))
        if flat == form or len(flat.ranges) > _MAX_RANGES:
            continue
        if node.target is aten.slice_scatter.default and not _moves(flat, node.meta["val"].shape):
            continue
        forms[node] = flat
        if _takes_half(flat, node.meta["val"].shape[flat.dim]):
            slices = all(x.target is node.target is aten.slice.Tensor for x in node.all_input_nodes)
            if not slices and node.target is not aten.neg.default:
                _write(node, flat)


_MAX_RANGES = 64  # of one splice
_NEAR = 8  # sizes that differ by less than 1/8 count as equal


def _reads_ranges(form: _Splice, node: fx.Node, user_form: _Splice | None, user: fx.Node) -> bool:
    """Returns whether a user of a node reads ranges along the dim of the node's own ranges."""
    return user_form is not None and user_form.dim == form.dim and user.meta["val"].dtype == node.meta["val"].dtype


def _takes_half(form: _Splice, size: int) -> bool:
    """Returns whether a splice reads at least half of each source whose size differs much from its result's.

    Such a source may be sharded where the result is not. If less is read, a slice alone may send the fewest bytes.
    """
    taken: Counter[fx.Node] = Counter()
    for r in form.ranges:
        if r.source is not None:
            taken[r.source] += r.stop - r.start
    sizes = {x: x.meta["val"].shape[form.dim] for x in taken}
    return all(2 * n >= sizes[x] or abs(sizes[x] - size) * _NEAR <= size for x, n in taken.items())


def _moves(form: _Splice, shape: torch.Size) -> bool:
    """Returns whether writes move most of a tensor elsewhere.

    Without a move, one tensor may be written in place, and each part as soon as it is computed.
    """
    begins = itertools.accumulate((r.stop - r.start for r in form.ranges), initial=0)
    kept = [r.source for begin, r in zip(begins, form.ranges, strict=False) if r.start == begin and not r.mirrored]
    longest = max((r.stop - r.start for r in form.ranges if r.source is not None), default=0)
    return 2 * longest > shape[form.dim] and all(x is None or x.meta["val"].shape != shape for x in kept)


def _flatten(forms: dict[fx.Node, _Splice], inner: set[fx.Node], form: _Splice) -> Iterator[_Range]:
    """Yields the ranges of a splice; ranges of inner moves become ranges of the operands of these moves."""
    for r in form.ranges:
        if r.source is None or r.source not in inner:
            yield r
            continue
        begin, parts = 0, list[_Range]()
        for part in forms[r.source].ranges:
            size = part.stop - part.start
            low, high = max(r.start - begin, 0), min(r.stop - begin, size)
            if low < high:
                parts.append(part.narrow(low, high).apply_flags(r))
            begin += size
        yield from reversed(parts) if r.mirrored else parts


def _merge_ranges(ranges: Iterator[_Range]) -> Iterator[_Range]:
    """Merges ranges that follow each other in one source."""
    last: _Range | None = None
    for r in ranges:
        follows = last is not None and r.source is last.source and (r.source is None or r.start == last.stop)
        in_order = last is not None and not (r.mirrored or last.mirrored)
        if last is not None and follows and in_order and (repr(r.fill), r.negated) == (repr(last.fill), last.negated):
            last = replace(last, stop=last.stop + r.stop - r.start)
            continue
        if last is not None:
            yield last
        last = r
    if last is not None:
        yield last


def _write(node: fx.Node, form: _Splice) -> None:
    """Rewrites a node as a splice, unless it holds one number everywhere."""
    nodes = list(dict.fromkeys(r.source for r in form.ranges if r.source is not None))
    if not nodes:
        return
    sources = [nodes.index(r.source) if r.source is not None else -1 for r in form.ranges]
    starts = [r.start if r.source is not None else 0 for r in form.ranges]
    stops = [r.stop if r.source is not None else r.stop - r.start for r in form.ranges]
    node.target, node.kwargs = SPLICE, {}
    negated, mirrored = [r.negated for r in form.ranges], [r.mirrored for r in form.ranges]
    flags = [negated, mirrored] if any(mirrored) else [negated] if any(negated) else []
    node.args = (nodes, form.dim, sources, starts, stops, [r.fill for r in form.ranges], *flags)


def _read_move(node: fx.Node) -> _Splice | None:
    """Returns the ranges that a move along one dim reads; None for any other op."""
    read = _READERS.get(node.target)
    form = None if read is None else read(node)
    numbers = [] if form is None else [n for r in form.ranges for n in (r.start, r.stop)]
    return form if numbers and all(type(n) is int for n in numbers) else None


def _read_negation(node: fx.Node, forms: Mapping[fx.Node, _Splice]) -> _Splice | None:
    """Returns a negated move as one range; a negation alone becomes no splice."""
    (source,) = node.args
    if not isinstance(source, fx.Node) or source not in forms:
        return None
    dim = forms[source].dim
    return _Splice(dim, (_Range(source, 0, source.meta["val"].shape[dim], negated=True),))


def _read_cat(node: fx.Node) -> _Splice | None:
    val, operands = node.meta["val"], node.args[0]
    assert isinstance(operands, list | tuple)
    dim, ranges = get_argument(node, "dim") % max(val.dim(), 1), []
    for x in operands:
        assert isinstance(x, fx.Node)
        like = x.meta["val"]
        if like.dtype != val.dtype or like.dim() != val.dim():
            return None
        fill = _get_known_fill(x)
        ranges.append(_Range(x, 0, like.shape[dim]) if fill is None else _Range(None, 0, like.shape[dim], fill))
    return _Splice(dim, tuple(ranges))


def _get_known_fill(node: fx.Node) -> complex | None:
    """Returns the number that a tensor holds everywhere; None if it differs or is unknown."""
    fill = get_fill_value(node)
    return fill if type(fill) in (bool, int, float, complex) else None


def _read_slice(node: fx.Node) -> _Splice | None:
    (source, *_), dim = node.args, get_argument(node, "dim")
    assert isinstance(source, fx.Node)
    shape = source.meta["val"].shape
    start, stop, step = slice(*(get_argument(node, name) for name in ("start", "end", "step"))).indices(shape[dim])
    return _Splice(dim % len(shape), (_Range(source, start, max(start, stop)),)) if step == 1 else None


_EMPTY = {aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default}


def _read_slice_scatter(node: fx.Node) -> _Splice | None:
    """Returns the written range, between ranges of the other tensor."""
    (x, source, *_), shape, dim = node.args, node.meta["val"].shape, get_argument(node, "dim")
    assert isinstance(x, fx.Node)
    assert isinstance(source, fx.Node)
    start, stop, step = slice(*(get_argument(node, name) for name in ("start", "end", "step"))).indices(shape[dim])
    if step != 1 or source.meta["val"].dtype != node.meta["val"].dtype:
        return None
    written = _Range(source, 0, stop - start)
    fill = 0 if x.target in _EMPTY else _get_known_fill(x)  # uninitialized memory may be zeros
    if fill is not None:
        return _Splice(dim % len(shape), _add_fills(written, start, shape[dim] - stop, fill))
    ranges = _Range(x, 0, start), written, _Range(x, stop, shape[dim])
    return _Splice(dim % len(shape), tuple(r for r in ranges if r.stop > r.start))


def _read_slice_backward(node: fx.Node) -> _Splice | None:
    (grad, *_), shape, dim = node.args, node.meta["val"].shape, get_argument(node, "dim")
    assert isinstance(grad, fx.Node)
    start, stop, step = slice(*(get_argument(node, name) for name in ("start", "end", "step"))).indices(shape[dim])
    if step != 1 or stop <= start or grad.meta["val"].dtype != node.meta["val"].dtype:
        return None
    written = _Range(grad, 0, stop - start)
    return _Splice(dim % len(shape), _add_fills(written, start, shape[dim] - stop, 0))


def _read_pad(node: fx.Node) -> _Splice | None:
    (source, *_), amounts, fill = node.args, get_argument(node, "pad"), get_argument(node, "value")
    assert isinstance(source, fx.Node)
    padded = [i for i in range(len(amounts) // 2) if any(amounts[2 * i : 2 * i + 2])]
    if len(padded) != 1 or type(fill) not in (bool, int, float, complex):
        return None
    dim = source.meta["val"].dim() - 1 - padded[0]
    before, after = amounts[2 * padded[0] : 2 * padded[0] + 2]
    size = source.meta["val"].shape[dim]
    kept = _Range(source, max(-before, 0), size - max(-after, 0))
    return _Splice(dim, _add_fills(kept, max(before, 0), max(after, 0), fill))


def _add_fills(part: _Range, before: int, after: int, fill: complex) -> tuple[_Range, ...]:
    fills = [_Range(None, 0, n, fill) for n in (before, after)]
    return tuple(r for r in (fills[0], part, fills[1]) if r.stop > r.start)


def _read_roll(node: fx.Node) -> _Splice | None:
    (source, *_), shifts, dims = node.args, get_argument(node, "shifts"), get_argument(node, "dims")
    assert isinstance(source, fx.Node)
    if len(dims) != 1:
        return None
    size = source.meta["val"].shape[dims[0]]
    first = size - shifts[0] % size if size else 0
    ranges = _Range(source, first, size), _Range(source, 0, first)
    return _Splice(dims[0] % source.meta["val"].dim(), tuple(r for r in ranges if r.stop > r.start))


def _read_flip(node: fx.Node) -> _Splice | None:
    (source, *_), dims = node.args, get_argument(node, "dims")
    assert isinstance(source, fx.Node)
    shape = source.meta["val"].shape
    if len(dims) != 1 or not shape:
        return None
    return _Splice(dims[0] % len(shape), (_Range(source, 0, shape[dims[0]], mirrored=True),))


def _read_splice(node: fx.Node) -> _Splice | None:
    tensors, sources, fills = (get_argument(node, name) for name in ("tensors", "sources", "fills"))
    ends = [get_argument(node, name) for name in ("starts", "stops")]
    flags = [get_argument(node, name) or [False] * len(fills) for name in ("negated", "mirrored")]
    nodes = (tensors[i] if i >= 0 else None for i in sources)
    return _Splice(get_argument(node, "dim"), tuple(map(_Range, nodes, *ends, fills, *flags)))


_READERS: Mapping[Any, Callable[[fx.Node], _Splice | None]] = {
    aten.cat.default: _read_cat,
    aten.slice.Tensor: _read_slice,
    aten.slice_scatter.default: _read_slice_scatter,
    aten.slice_backward.default: _read_slice_backward,
    aten.constant_pad_nd.default: _read_pad,
    aten.roll.default: _read_roll,
    aten.flip.default: _read_flip,
    SPLICE: _read_splice,
}
