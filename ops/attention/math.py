"""Attention in plain torch ops: every dtype, device, size and feature, a block of queries at a time.

The scores of a block are `[B, KV, G*rows, T]` in the accumulator's dtype. A block has at most `_ELEMENTS` of them,
unless one row has more: memory stays linear in the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from shardlib.ops.attention.variant import Variant, accumulator, block_slices, heads_last, split_blocks, sum_to

_ELEMENTS = 1 << 24


def forward(q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> tuple[Tensor, Tensor]:
    """Computes o, with q's strides, and lse."""
    dtype = accumulator(q.dtype)
    o, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -math.inf, dtype=dtype)
    keys_BKTD, values_BKTD = k.to(dtype), v.to(dtype)
    for rows, keys, block in _split_blocks(q, k, variant):
        q_BKRD = _group_heads(q[:, :, rows], k, dtype)
        scores = _compute_scores(q_BKRD, keys_BKTD[:, :, keys], q.shape[1], block)
        lse[:, :, rows] = scores.logsumexp(-1)
        p = _compute_probabilities(scores, lse[:, :, rows])
        if block.dropout:
            p = p * _dropout_factors(p, block)
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
    """Computes dq, dk, dv, and dbias in the bias's shape of four dims."""
    dtype = accumulator(q.dtype)
    delta = compute_delta(grad_o, grad_lse, o, dtype)
    keys_BKTD, values_BKTD = k.to(dtype), v.to(dtype)
    dq, dk, dv = torch.zeros_like(q, dtype=dtype), torch.zeros_like(keys_BKTD), torch.zeros_like(values_BKTD)
    dbias = torch.zeros_like(variant.bias, dtype=dtype) if need_bias and variant.bias is not None else None
    for rows, keys, block in _split_blocks(q, k, variant):
        q_BKRD, do_BKRD = (_group_heads(x[:, :, rows], k, dtype) for x in (q, grad_o))
        p = _compute_probabilities(_compute_scores(q_BKRD, keys_BKTD[:, :, keys], q.shape[1], block), lse[:, :, rows])
        dp = (do_BKRD @ values_BKTD[:, :, keys].mT).view(p.shape)
        used = p
        if block.dropout:
            kept = _dropout_factors(p, block)
            used, dp = p * kept, dp * kept
        ds = (dp - delta[:, :, rows, None]).mul_(p)
        if dbias is not None:
            spot = block_slices(dbias, rows, keys)
            dbias[spot] += sum_to(ds, dbias[spot].shape)
        ds_BKRT, used_BKRT = (x.view(*q_BKRD.shape[:3], p.shape[3]) for x in (ds.mul_(block.scale), used))
        dq[:, :, rows] = (ds_BKRT @ keys_BKTD[:, :, keys]).view(*p.shape[:3], q.shape[3])
        dk[:, :, keys] += ds_BKRT.mT @ q_BKRD
        dv[:, :, keys] += used_BKRT.mT @ do_BKRD
    if dbias is not None and variant.bias is not None:
        dbias = dbias.to(variant.bias.dtype)
    return heads_last(dq.to(q.dtype)), heads_last(dk.to(k.dtype)), heads_last(dv.to(v.dtype)), dbias


def compute_delta(grad_o: Tensor, grad_lse: Tensor | None, o: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes delta `[B, H, S]`, the sum over D of do * o minus grad_lse: a logit's gradient is p * (dp - delta)."""
    delta = (grad_o.to(dtype) * o).sum(-1)
    return delta if grad_lse is None else delta - grad_lse


def _split_blocks(q: Tensor, k: Tensor, variant: Variant) -> Iterator[tuple[slice, slice, Variant]]:
    """Yields blocks of queries with the keys that they see; none if there are no heads."""
    heads = q.shape[0] * q.shape[1]
    if heads and k.shape[1]:
        yield from split_blocks(variant, q.shape[2], k.shape[2], _ELEMENTS // max(heads * k.shape[2], 1))


def _compute_scores(q_BKRD: Tensor, k_BKTD: Tensor, heads: int, variant: Variant) -> Tensor:
    """Computes the logits `[B, H, rows, T]`."""
    b, kv, rows, _ = q_BKRD.shape
    scores = (q_BKRD * variant.scale) @ k_BKTD.mT
    return variant.logits(scores.view(b, heads, kv * rows // heads, k_BKTD.shape[2]))


def _compute_probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    return (scores - lse.masked_fill(lse.isneginf(), 0)[..., None]).exp_()


def _dropout_factors(p: Tensor, variant: Variant) -> Tensor:
    """Returns 1 / (1 - dropout) where a probability is kept, 0 where it is dropped."""
    b, h, s, t = p.shape
    return variant.keep(b, h, s, t, p.device).to(p.dtype).div_(1 - variant.dropout)


def _group_heads(x: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
    """Reshapes `[B, (KV G), S, D] -> [B, KV, (G S), D]`: heads that share keys become rows of one product."""
    b, h, s, d = x.shape
    kv = k.shape[1]
    return x.to(dtype).reshape(b, kv, h // kv * s, d)
