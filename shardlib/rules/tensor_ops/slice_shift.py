"""Slices of a sharded dim, their gradients, and writes to slices.

With I = gcd(start, stop, size) a sliced dim is `(p I)` and its result `(q I)`. A sharding of I needs no communication:
the slice arguments are multiples of its local size, so a fused `[768, 3 * 768]` weight is sliced however the 768 are
sharded. For a sharding of p and q each device fetches the blocks of its shard. A result of one block is a partial sum:
the block on its owner, and zeros elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardlib.core.torch_internals.torch_private import schema_of
from shardlib.rules.iteration_space import (
    Dim,
    Ints,
    Space,
    arg,
    argument_path,
    normalize_dim,
    result_shape,
    size_arguments,
)
from shardlib.rules.local_forms.halo import crop_or_pad, fetch, length, shard_length, shard_range
from shardlib.rules.local_forms.helpers import can_add, from_torch_code, neutral_addend
from shardlib.rules.local_forms.window import Window
from shardlib.rules.rule import Call, LocalBuilder, Path, Rule, RuleFn, SingleBlock, WindowMap

aten = torch.ops.aten


@dataclass
class Shift:
    """A long dim and its slice, in blocks: `window` maps each block of the slice to its block in the long dim.

    `outer` are the factors of the two dims that count blocks, () where they stay whole; `counts` are their sizes.
    """

    long: Dim
    short: Dim
    outer: tuple[Dim, Dim]
    inner: Dim
    counts: tuple[int, int]
    block: int
    window: Window

    @staticmethod
    def of_slice(space: Space, sizes: tuple[int, int], start: int, step: int = 1) -> Shift:
        """Returns the shift for the `sizes` of the long dim and of its slice from `start`."""
        block = block_size(math.gcd(*sizes, start), sizes[0], sizes[1]) if step == 1 else 1
        if sizes[0] == sizes[1] and not start and step == 1:
            same = space.dim(sizes[0], "i")
            return Shift(same, same, ((), ()), same, (1, 1), sizes[0], Window(1))
        inner = space.dim(block, "i") if block else ()
        counts = tuple(n // block if block else n for n in sizes)
        p, q = (space.dim(n, "p" if i == 0 else "q") for i, n in enumerate(counts))
        labels = (*p, *inner), (*q, *inner)
        if not (p and block and all(counts)):
            space.whole |= {*p, *q}
            p = q = ()
        window = Window(1, step, -(start // block if block else 0))
        return Shift(*labels, (p, q), inner, (counts[0], counts[1]), block, window)


def block_size(block: int, long: int, together: int) -> int:
    """Returns the block size for a dim of `long` elements where `together` move together by multiples of `block`.

    If these are most of the dim, only the borders move, which may lie between any two elements. Then blocks too small
    to be sharded themselves become single elements.
    """
    return 1 if 2 * together > long and block * block < long else block


def split_blocks(x: Tensor, at: int, outer: Dim, count: int, inner: Dim, block: int) -> Tensor:
    """Splits dim `at` of a shard into blocks (`count` in the whole, with label `outer`) and the elements of a block."""
    return x.reshape(*x.shape[:at], shard_length(outer, count), shard_length(inner, block), *x.shape[at + 1 :])


def join_blocks(x: Tensor, at: int) -> Tensor:
    """Returns the inverse of `split_blocks`."""
    return x.flatten(at, at + 1)


def _range_rule(call: Call) -> Rule:
    """Reads a range of a dim (`slice`) or one element (`select`), or writes it to another value (`_scatter`) or to
    zeros (`_backward`)."""
    name = schema_of(call.target).name
    one, zeros, scatters = (word in name for word in ("select", "backward", "scatter"))
    reads = not (zeros or scatters)
    shape = result_shape(call) if zeros else call.operands[0].shape
    space, at = Space(), normalize_dim(arg(call, "dim"), len(shape))
    start, stop, step = _range(call, shape[at], one=one)
    count = len(range(start, stop, step))
    shift = Shift.of_slice(space, (shape[at], count), start if count else 0, step)
    whole = [shift.long if i == at else space.dim(n) for i, n in enumerate(shape)]
    part = [*whole[:at], *([] if one else [shift.short]), *whole[at + 1 :]]
    ints: Ints = size_arguments(call, "input_sizes", whole) if zeros else {}
    if shift.block and step == 1 and not one:
        ends = {argument_path(call, "start"): start, argument_path(call, "end"): stop}
        ints |= {where: (n // shift.block, shift.inner) for where, n in ends.items() if _is_number(call, where)}

    def form(_: LocalBuilder, *args: Any) -> Tensor:
        *base, x = args[: len(call.operands)]
        if reads:
            x = _read(x, at, shift)
            return x.select(at, 0) if one else x
        x = x.unsqueeze(at) if one else x
        return _write(base[0] if base else _zeros(x, at, shift), x, at, shift)

    long, short = shift.outer
    if reads and not short and not can_add(call.operands[0].dtype):
        space.whole |= {*long}  # one block is a partial sum
    single, at_block = () if short else long, -shift.window.padding
    follows = dict(zip(long, short, strict=False)) if reads else dict(zip(short, long, strict=False))
    windows = {p: WindowMap(q, step, at_block, at_block, shift.counts[1]) for p, q in zip(long, short, strict=False)}
    return space.rule(
        [whole, part] if scatters else [part] if zeros else [whole],
        [part if reads else whole],
        reduce=dict.fromkeys(follows, "none") | (dict.fromkeys(single, "sum") if reads else {}),
        linear=[range(len(call.operands))],
        ints=ints,
        emit=from_torch_code(form),
        local_factors={*long, *short},
        gathers=single if reads else (),
        follows=follows,
        windows=windows,
        blocks=tuple(SingleBlock(f, at_block, None if reads else len(call.operands) - 1) for f in single),
    )


def _range(call: Call, size: int, *, one: bool) -> tuple[int, int, int]:
    """Returns start, stop and step of the range, as in Python's `range`."""
    if one:
        index = arg(call, "index") % size
        return index, index + 1, 1
    step = arg(call, "step")
    start, stop, _ = slice(arg(call, "start"), arg(call, "end")).indices(size)
    return start, max(start, stop), step


def _is_number(call: Call, where: Path) -> bool:
    (key,) = where
    return isinstance(call.args[key] if isinstance(key, int) else call.kwargs.get(key), int)


def _read(x: Tensor, at: int, shift: Shift) -> Tensor:
    """This device's shard of a slice. A single block is zeros on all devices but its owner."""
    (p, q), (long, short) = shift.outer, shift.counts
    target = shard_range(q, short)
    need = shift.window.reads(target) if length(target) else (0, 0)
    x = split_blocks(x, at, p, long, shift.inner, shift.block)
    if not q:
        return join_blocks(crop_or_pad(x, at, shard_range(p, long), need, neutral_addend(x.dtype)), at)
    if shift.window.stride == 1:
        (x,) = fetch(x, at, p, [need], "input")
        return join_blocks(x, at)
    # The results whose elements this device holds itself.
    first, mine = shard_range(p, long)[0], shift.window.readers(shard_range(p, long), short)
    low = mine[0] * shift.window.stride - shift.window.padding - first
    low, high = (low, low + (length(mine) - 1) * shift.window.stride + 1) if length(mine) else (0, 0)
    x = aten.slice.Tensor(x, at, low, high, shift.window.stride)
    (x,) = fetch(x, at, p, [target], "input", have=mine)
    return join_blocks(x, at)


def _write(base: Tensor, value: Tensor, at: int, shift: Shift) -> Tensor:
    """Writes `value` to its slice of `base`."""
    (p, q), (long, short), step = shift.outer, shift.counts, shift.window.stride
    inside = shift.inner, shift.block
    mine = shard_range(p, long)
    need = shift.window.readers(mine, short)
    (part,) = fetch(split_blocks(value, at, q, short, *inside), at, q, [need], "input")
    low = need[0] * step - shift.window.padding - mine[0]
    low, high = (low, low + (length(need) - 1) * step + 1) if length(need) else (0, 0)
    return join_blocks(
        aten.slice_scatter.default(split_blocks(base, at, p, long, *inside), part, at, low, high, step), at
    )


def _zeros(like: Tensor, at: int, shift: Shift) -> Tensor:
    """Returns zeros for this device's shard of the long dim; `like` has a slice of it."""
    n = shard_length(shift.outer[0], shift.counts[0]) * shard_length(shift.inner, shift.block)
    return like.new_zeros([*like.shape[:at], n, *like.shape[at + 1 :]])


ROWS: dict[str, RuleFn | str] = {
    **dict.fromkeys(["slice.Tensor", "slice_copy.Tensor", "slice_backward", "slice_scatter"], _range_rule),
    **dict.fromkeys(["select.int", "select_copy.int", "select_backward", "select_scatter"], _range_rule),
}
