"""Attention written out in torch: every dtype, device, size and feature, a block of queries at a time.

The scores of a block are `[B, KV, G*rows, T]` in the accumulator's dtype, at most `_ELEMENTS` of them unless one row
has more, so that memory stays linear in the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from shardlib.ops.attention.variant import Variant, accumulator, block_of, blocks, heads_last, sum_to

_ELEMENTS = 1 << 24


def forward(q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> tuple[Tensor, Tensor]:
    """o, laid out as q is, and lse."""
    dtype = accumulator(q.dtype)
    o, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -math.inf, dtype=dtype)
    keys_BKTD, values_BKTD = k.to(dtype), v.to(dtype)
    for rows, keys, here in _blocks(q, k, variant):
        q_BKRD = _per_group(q[:, :, rows], k, dtype)
        scores = _scores(q_BKRD, keys_BKTD[:, :, keys], q.shape[1], here)
        lse[:, :, rows] = scores.logsumexp(-1)
        p = _probabilities(scores, lse[:, :, rows])
        if here.dropout:
            p = p * _kept(p, here)
        mixed = p.view(*q_BKRD.shape[:3], p.shape[3]) @ values_BKTD[:, :, keys]
        o[:, :, rows] = mixed.view(*p.shape[:3], q.shape[3])
    return o, lse


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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv, and dbias in the shape of the bias, four dims."""
    dtype = accumulator(q.dtype)
    delta = delta_of(grad_o, grad_lse, o, dtype)
    keys_BKTD, values_BKTD = k.to(dtype), v.to(dtype)
    dq, dk, dv = torch.zeros_like(q, dtype=dtype), torch.zeros_like(keys_BKTD), torch.zeros_like(values_BKTD)
    dbias = torch.zeros_like(variant.bias, dtype=dtype) if need_bias and variant.bias is not None else None
    for rows, keys, here in _blocks(q, k, variant):
        q_BKRD, do_BKRD = (_per_group(x[:, :, rows], k, dtype) for x in (q, grad_o))
        p = _probabilities(_scores(q_BKRD, keys_BKTD[:, :, keys], q.shape[1], here), lse[:, :, rows])
        dp = (do_BKRD @ values_BKTD[:, :, keys].mT).view(p.shape)
        used = p
        if here.dropout:
            kept = _kept(p, here)
            used, dp = p * kept, dp * kept
        ds = (dp - delta[:, :, rows, None]).mul_(p)
        if dbias is not None:
            spot = block_of(dbias, rows, keys)
            dbias[spot] += sum_to(ds, dbias[spot].shape)
        ds_BKRT, used_BKRT = (x.view(*q_BKRD.shape[:3], p.shape[3]) for x in (ds.mul_(here.scale), used))
        dq[:, :, rows] = (ds_BKRT @ keys_BKTD[:, :, keys]).view(*p.shape[:3], q.shape[3])
        dk[:, :, keys] += ds_BKRT.mT @ q_BKRD
        dv[:, :, keys] += used_BKRT.mT @ do_BKRD
    if dbias is not None and variant.bias is not None:
        dbias = dbias.to(variant.bias.dtype)
    return heads_last(dq.to(q.dtype)), heads_last(dk.to(k.dtype)), heads_last(dv.to(v.dtype)), dbias


def delta_of(grad_o: Tensor, grad_lse: Tensor | None, o: Tensor, dtype: torch.dtype) -> Tensor:
    """What every probability's gradient is measured against, `[B, H, S]`: the sum over D of do * o, less grad_lse."""
    delta = (grad_o.to(dtype) * o).sum(-1)
    return delta if grad_lse is None else delta - grad_lse


def _blocks(q: Tensor, k: Tensor, variant: Variant) -> Iterator[tuple[slice, slice, Variant]]:
    """Blocks of queries; none where no head looks at anything."""
    heads = q.shape[0] * q.shape[1]
    if heads and k.shape[1]:
        yield from blocks(variant, q.shape[2], k.shape[2], _ELEMENTS // max(heads * k.shape[2], 1))


def _scores(q_BKRD: Tensor, k_BKTD: Tensor, heads: int, variant: Variant) -> Tensor:
    """The logits `[B, H, rows, T]`."""
    b, kv, rows, _ = q_BKRD.shape
    scores = (q_BKRD * variant.scale) @ k_BKTD.mT
    return variant.logits(scores.view(b, heads, kv * rows // heads, k_BKTD.shape[2]))


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    return (scores - lse.masked_fill(lse.isneginf(), 0)[..., None]).exp_()


def _kept(p: Tensor, variant: Variant) -> Tensor:
    """1 / (1 - dropout) where a probability is kept, 0 where it is dropped."""
    b, h, s, t = p.shape
    return variant.keep(b, h, s, t, p.device).to(p.dtype).div_(1 - variant.dropout)


def _per_group(x: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
    """`[B, (KV G), S, D] -> [B, KV, (G S), D]`: heads that share their keys become more rows of one product."""
    b, h, s, d = x.shape
    kv = k.shape[1]
    return x.to(dtype).reshape(b, kv, h // kv * s, d)
