"""Attention by torch's own kernels, for a block of queries and keys at a time.

The kernels support causal attention from position 0 and an additive mask. Other variants become such a mask, of at most
`_ELEMENTS` numbers at a time, for a block of queries with the keys that they see.
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
from shardlib.ops.attention.variant import Variant, accumulator, heads_last, split_blocks

_ELEMENTS = 1 << 22
_HIDING_ROWS = 512  # of a block, where positions hide keys
_COLUMNS = 8  # that a gradient of lse adds to each head
_HALF = (torch.float16, torch.bfloat16)


class Block(NamedTuple):
    """One call of torch's kernel; `complete`: no other block has keys for these queries."""

    rows: slice
    keys: slice
    mask: Tensor | None
    causal: bool
    complete: bool = True


def find_fault(q: Tensor, k: Tensor, variant: Variant, need_bias: bool) -> str | None:
    """Returns why torch's kernels cannot compute this, or None if they can."""
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
    """Names the kernel that runs."""
    names = {CPU: "flash for CPU", FLASH: "flash", EFFICIENT: "memory-efficient"}
    return names[_choose_kernels(q, k, variant)]


def forward(q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> tuple[Tensor, Tensor]:
    """Computes o, with q's strides, and lse."""
    run = _choose_kernels(q, k, variant).forward
    original = q
    q, k, v = _make_dense(q), _make_dense(k), _make_dense(v)
    o: Tensor | None = None
    lse = q
    for rows, keys, mask, causal, complete in _split_blocks(q, k, variant):
        part, part_lse = run(
            _select_rows(q, rows), _select_rows(k, keys), _select_rows(v, keys), mask, causal, variant.scale
        )
        if complete and part.shape == q.shape and part.stride() == original.stride():
            return part, part_lse.contiguous()
        if o is None:
            o, lse = _empty_result(original)
        merge_(o[:, :, rows], lse[:, :, rows], part, part_lse)
    if o is None:
        o, lse = _empty_result(original)
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
    """Computes dq, dk and dv; `find_fault` refuses gradients of a bias."""
    assert not need_bias
    d = q.shape[3]
    if grad_lse is not None:
        grad_o, q, k, v, o = _add_lse_column(grad_o, grad_lse, q, k, v, o)
    grad_o, q, k, v, o = (_make_dense(x) for x in (grad_o, q, k, v, o))
    run = _choose_kernels(q, k, variant).backward
    dtype = accumulator(q.dtype)
    sums: tuple[Tensor, Tensor, Tensor] | None = None
    for rows, keys, mask, causal, _ in _split_blocks(q, k, variant):
        grad_o_part, q_part, o_part, lse_part = (_select_rows(x, rows) for x in (grad_o, q, o, lse))
        if mask is not None:  # -inf - -inf is NaN in rows that see no key; their logits alone give 0
            lse_part = lse_part.masked_fill(lse_part.isneginf(), 0)
        parts = run(
            grad_o_part,
            q_part,
            _select_rows(k, keys),
            _select_rows(v, keys),
            o_part,
            lse_part,
            mask,
            causal,
            variant.scale,
        )
        if parts[0].shape == q.shape and parts[1].shape == k.shape:
            sums = parts
            break
        sums = sums or _zeros(q, k, v, dtype)
        sums[0][:, :, rows] += parts[0]
        sums[1][:, :, keys] += parts[1]
        sums[2][:, :, keys] += parts[2]
    dq, dk, dv = (heads_last(x[..., :d].to(q.dtype)) for x in sums or _zeros(q, k, v, dtype))
    return dq, dk, dv, None


def _choose_kernels(q: Tensor, k: Tensor, variant: Variant) -> Kernels:
    if q.device.type == "cpu":
        return CPU
    plain = q.dtype in _HALF and q.shape[3] <= 256 and variant.mask is variant.bias is variant.alibi is None
    s, t = q.shape[2], k.shape[2]
    square = s == t and variant.shift == 0 and variant.causal and not 0 < variant.window < s
    return FLASH if plain and (square or not variant.hides(s, t)) else EFFICIENT


def _split_blocks(q: Tensor, k: Tensor, variant: Variant) -> Iterator[Block]:
    """Yields the calls of torch's kernel. Queries may be in several blocks; those that see no key are in none."""
    s, t, shift = q.shape[2], k.shape[2], variant.shift
    hides = variant.hides(s, t)
    if not (hides or any(x is not None for x in (variant.mask, variant.bias, variant.alibi))):
        yield Block(slice(0, s), slice(0, t), None, False)
        return
    narrow = 0 < variant.window <= shift + s - 1
    if variant.causal and not narrow and variant.mask is variant.bias is variant.alibi is None:
        # All queries see the keys before the first query; queries before the first key see none. The rest is a
        # triangle that begins at position 0 of both.
        first = max(-shift, 0)
        if shift > 0:
            yield Block(slice(0, s), slice(0, shift), None, False, complete=False)
        if first < s:
            yield Block(slice(first, s), slice(max(shift, 0), min(t, s + shift)), None, True, complete=shift <= 0)
        return
    for rows, keys, block in split_blocks(variant, s, t, _choose_rows(q, k, variant, hides)):
        mask = _additive_mask(block, rows.stop - rows.start, keys.stop - keys.start, q)
        yield Block(rows, keys, mask, False)


def _choose_rows(q: Tensor, k: Tensor, variant: Variant, hides: bool) -> int:
    """Chooses the queries per block: few where positions hide keys, since a block omits hidden keys."""
    masks = [x for x in (variant.mask, variant.bias) if x is not None]
    if not hides and variant.alibi is None and all(x.shape[2] == 1 for x in masks):
        return q.shape[2]
    b = max((x.shape[0] for x in masks), default=1)
    h = q.shape[1] if variant.alibi is not None else max((x.shape[1] for x in masks), default=1)
    rows = _ELEMENTS // max(b * h * k.shape[2], 1)
    return min(rows, _HIDING_ROWS) if hides else rows


def _additive_mask(variant: Variant, s: int, t: int, q: Tensor) -> Tensor | None:
    """Sums mask, bias, ALiBi and hidden positions, broadcastable to `[B, H, s, t]`, in the accumulator's dtype."""
    by_position = variant.alibi is not None or variant.hides(s, t)
    if not (by_position or variant.mask is not None or variant.bias is not None):
        return None
    sizes = (s, t) if by_position else (1, 1)
    return variant.logits(q.new_zeros(1, 1, *sizes, dtype=accumulator(q.dtype)))


def _add_lse_column(
    grad_o: Tensor, grad_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Adds columns to the operands; the first column carries the gradient of lse.

    The kernel subtracts the sum of grad_o * o from every probability's gradient. A column of ones in grad_o and of
    -grad_lse in o subtracts grad_lse from that sum, and has no other effect: q, k and v have zeros in it. The other
    columns keep the head's size a multiple of 8, for the kernels for CUDA.
    """
    q, k, v = (F.pad(x, (0, _COLUMNS)) for x in (q, k, v))
    minus = -grad_lse.to(o.dtype)[..., None]
    grad_o, o = (torch.cat([x, column], -1) for x, column in ((grad_o, torch.ones_like(minus)), (o, minus)))
    return F.pad(grad_o, (0, _COLUMNS - 1)), q, k, v, F.pad(o, (0, _COLUMNS - 1))


def _empty_result(q: Tensor) -> tuple[Tensor, Tensor]:
    """Makes o and lse of queries that see no key, in the accumulator's dtype; blocks are merged into them."""
    dtype = accumulator(q.dtype)
    return torch.zeros_like(q, dtype=dtype), q.new_full(q.shape[:3], -math.inf, dtype=dtype)


def _zeros(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros_like(q, dtype=dtype), torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)


def _select_rows(x: Tensor, part: slice) -> Tensor:
    """Returns some rows of `[B, H, S, ...]`."""
    return x if part.stop - part.start == x.shape[2] else x[:, :, part]


def _make_dense(x: Tensor) -> Tensor:
    """Returns x with dense rows that do not overlap: torch's kernels assume both, whatever the strides say."""
    disjoint = x.shape[-2] < 2 or x.stride(-2) >= x.shape[-1]
    return x if x.stride(-1) == 1 and disjoint else x.contiguous()
