"""Attention by torch's own kernels, for a block of queries and keys at a time.

They know causal attention from place 0 and an additive mask. Whatever else hides keys or moves logits is turned into
such a mask, of at most `_ELEMENTS` numbers at a time, for a block of queries with the keys that they may see.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.ops.attention.aten import CPU, EFFICIENT, FLASH, Kernels
from shardlib.ops.attention.merge import merge_
from shardlib.ops.attention.variant import Variant, accumulator, blocks, heads_last

_ELEMENTS = 1 << 22
_HIDING_ROWS = 512
_COLUMNS = 8  # more in a head, where lse has a gradient
_HALF = (torch.float16, torch.bfloat16)


class Block(NamedTuple):
    """One call of torch's kernel; `alone`: these queries see no other keys."""

    rows: slice
    keys: slice
    mask: Tensor | None
    causal: bool
    alone: bool = True


def unable(q: Tensor, k: Tensor, variant: Variant, need_bias: bool) -> str | None:
    """Why torch's kernels cannot do this, or None when they can."""
    if q.device.type not in ("cpu", "cuda"):
        return f"torch has no kernel for {q.device.type} here"
    if not (q.numel() and k.numel()):
        return "a size is 0"
    if variant.dropout:
        return "torch's kernels drop out by a generator, not by a key"
    if need_bias:
        return "torch's kernels give no gradient of a bias as it is broadcast here"
    if q.device.type == "cuda" and (q.dtype == torch.float64 or q.shape[3] % 8):
        return f"torch has no kernel for {q.dtype} heads of {q.shape[3]} on CUDA"
    return None


def way(q: Tensor, k: Tensor, variant: Variant) -> str:
    """Which of torch's kernels runs, by its name."""
    names = {CPU: "flash for CPU", FLASH: "flash", EFFICIENT: "memory-efficient"}
    return names[_kernels(q, k, variant)]


def forward(q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> tuple[Tensor, Tensor]:
    """o, laid out as q is, and lse."""
    run = _kernels(q, k, variant).forward
    laid_out = q
    q, k, v = _dense(q), _dense(k), _dense(v)
    o: Tensor | None = None
    lse = q
    for rows, keys, mask, causal, alone in _blocks(q, k, variant):
        part, part_lse = run(_cut(q, rows), _cut(k, keys), _cut(v, keys), mask, causal, variant.scale)
        if alone and part.shape == q.shape and part.stride() == laid_out.stride():
            return part, part_lse.contiguous()
        if o is None:
            o, lse = _unseen(laid_out)
        merge_(o[:, :, rows], lse[:, :, rows], part, part_lse)
    if o is None:
        o, lse = _unseen(laid_out)
    return o.to(q.dtype), lse


def backward(
    grad_o: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    variant: Variant,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, None]:
    """dq, dk and dv; there is no gradient of a bias here."""
    assert not need_bias
    d = q.shape[3]
    if grad_lse is not None:
        grad_o, q, k, v, o = _widened(grad_o, grad_lse, q, k, v, o)
    grad_o, q, k, v, o = (_dense(x) for x in (grad_o, q, k, v, o))
    run = _kernels(q, k, variant).backward
    dtype = accumulator(q.dtype)
    sums: tuple[Tensor, Tensor, Tensor] | None = None
    for rows, keys, mask, causal, _ in _blocks(q, k, variant):
        grad_o_part, q_part, o_part, lse_part = (_cut(x, rows) for x in (grad_o, q, o, lse))
        if mask is not None:  # rows that see nothing: their logits are -inf already
            lse_part = lse_part.masked_fill(lse_part.isneginf(), 0)
        parts = run(grad_o_part, q_part, _cut(k, keys), _cut(v, keys), o_part, lse_part, mask, causal, variant.scale)
        if parts[0].shape == q.shape and parts[1].shape == k.shape:
            sums = parts
            break
        sums = sums or _zeros(q, k, v, dtype)
        sums[0][:, :, rows] += parts[0]
        sums[1][:, :, keys] += parts[1]
        sums[2][:, :, keys] += parts[2]
    dq, dk, dv = (heads_last(x[..., :d].to(q.dtype)) for x in sums or _zeros(q, k, v, dtype))
    return dq, dk, dv, None


def _kernels(q: Tensor, k: Tensor, variant: Variant) -> Kernels:
    if q.device.type == "cpu":
        return CPU
    plain = q.dtype in _HALF and q.shape[3] <= 256 and variant.mask is variant.bias is variant.alibi is None
    s, t = q.shape[2], k.shape[2]
    square = s == t and variant.shift == 0 and variant.causal and not 0 < variant.window < s
    return FLASH if plain and (square or not variant.hides(s, t)) else EFFICIENT


def _blocks(q: Tensor, k: Tensor, variant: Variant) -> Iterator[Block]:
    """What torch's kernel is called with, some queries more than once; those that see no key are left out."""
    s, t, shift = q.shape[2], k.shape[2], variant.shift
    hides = variant.hides(s, t)
    if not (hides or any(x is not None for x in (variant.mask, variant.bias, variant.alibi))):
        yield Block(slice(0, s), slice(0, t), None, False)
        return
    narrow = 0 < variant.window <= shift + s - 1
    if variant.causal and not narrow and variant.mask is variant.bias is variant.alibi is None:
        # All queries see the keys before the first of them; queries before the first key see nothing. The rest is a
        # triangle that begins at place 0 of both.
        first = max(-shift, 0)
        if shift > 0:
            yield Block(slice(0, s), slice(0, shift), None, False, alone=False)
        if first < s:
            yield Block(slice(first, s), slice(max(shift, 0), min(t, s + shift)), None, True, alone=shift <= 0)
        return
    for rows, keys, here in blocks(variant, s, t, _rows(q, k, variant, hides)):
        mask = _additive(here, rows.stop - rows.start, keys.stop - keys.start, q)
        yield Block(rows, keys, mask, False)


def _rows(q: Tensor, k: Tensor, variant: Variant, hides: bool) -> int:
    """Queries per block: few where places hide keys, since blocks leave those out."""
    given = [x for x in (variant.mask, variant.bias) if x is not None]
    if not hides and variant.alibi is None and all(x.shape[2] == 1 for x in given):
        return q.shape[2]
    b = max((x.shape[0] for x in given), default=1)
    h = q.shape[1] if variant.alibi is not None else max((x.shape[1] for x in given), default=1)
    rows = _ELEMENTS // max(b * h * k.shape[2], 1)
    return min(rows, _HIDING_ROWS) if hides else rows


def _additive(variant: Variant, s: int, t: int, q: Tensor) -> Tensor | None:
    """All that is added to the logits or hides them, broadcast to `[B, H, s, t]`, in the accumulator's dtype."""
    placed = variant.alibi is not None or variant.hides(s, t)
    if not (placed or variant.mask is not None or variant.bias is not None):
        return None
    sizes = (s, t) if placed else (1, 1)
    return variant.logits(q.new_zeros(1, 1, *sizes, dtype=accumulator(q.dtype)))


def _widened(
    grad_o: Tensor, grad_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The operands with more columns, the first of which brings the gradient of lse in.

    The kernel measures the gradient of every probability against the sum of grad_o * o; grad_lse must be taken off
    that. A column of ones in grad_o and of -grad_lse in o does it, and meets zeros everywhere else. The others keep
    the head's size as the kernels for CUDA want it.
    """
    q, k, v = (F.pad(x, (0, _COLUMNS)) for x in (q, k, v))
    minus = -grad_lse.to(o.dtype)[..., None]
    grad_o, o = (torch.cat([x, column], -1) for x, column in ((grad_o, torch.ones_like(minus)), (o, minus)))
    return F.pad(grad_o, (0, _COLUMNS - 1)), q, k, v, F.pad(o, (0, _COLUMNS - 1))


def _unseen(q: Tensor) -> tuple[Tensor, Tensor]:
    """o and lse of queries that see nothing, in the accumulator's dtype; what blocks see is merged in."""
    dtype = accumulator(q.dtype)
    return torch.zeros_like(q, dtype=dtype), q.new_full(q.shape[:3], -math.inf, dtype=dtype)


def _zeros(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros_like(q, dtype=dtype), torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)


def _cut(x: Tensor, part: slice) -> Tensor:
    """Some rows of `[B, H, S, ...]`."""
    return x if part.stop - part.start == x.shape[2] else x[:, :, part]


def _dense(x: Tensor) -> Tensor:
    """x with rows that are dense in memory, and apart: torch's kernels read and write whole ones, whatever the strides
    say, and take rows that overlap (of `unfold`) for columns where there are few."""
    apart = x.shape[-2] < 2 or x.stride(-2) >= x.shape[-1]
    return x if x.stride(-1) == 1 and apart else x.contiguous()
