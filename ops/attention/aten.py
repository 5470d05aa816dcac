"""torch's attention kernels, each as a pair of plain functions: forward -> (o, lse), backward -> (dq, dk, dv).

q  [B, H, S, D]; k, v  [B, KV, T, D]; mask  additive, broadcast to [B, H, S, T]; causal: query i sees keys 0 to i.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.ops.attention.variant import heads_last

_aten = torch.ops.aten
_LSE_ROWS = 32  # the memory-efficient kernels pad lse to a multiple of these rows
_MASK_KEYS = 16  # and read mask rows that are aligned to a multiple of these elements


class Kernels(NamedTuple):
    """One of torch's kernels and its backward."""

    forward: Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float], tuple[Tensor, Tensor]]
    backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, bool, float], tuple[Tensor, Tensor, Tensor]
    ]


# --- CPU --------------------------------------------------------------------------------------------------------------


def _cpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    o, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    if mask is not None and (suspect := lse == 0).any():
        # The kernel writes 0 for a row that sees no key.
        lse = lse.masked_fill_(suspect & mask.isneginf().all(-1), -math.inf)
    return o, lse


def _cpu_backward(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    mask: Tensor | None, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_o, q, k, v, o, lse, 0.0, causal, attn_mask=mask, scale=scale
    )
    return dq, dk, dv


# --- CUDA -------------------------------------------------------------------------------------------------------------


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    assert mask is None
    o, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return o, lse


def _flash_backward(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    mask: Tensor | None, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert mask is None
    none, seed = None, torch.zeros(2, dtype=torch.int64, device=q.device)  # read only where there is dropout
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
        grad_o, q, k, v, o, lse, none, none, q.shape[2], k.shape[2], 0.0, causal, seed, seed, scale=scale
    )
    return dq, dk, dv


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    o, lse, *_ = _aten._scaled_dot_product_efficient_attention(
        q, k, v, _align_mask(mask, q, k), True, 0.0, causal, scale=scale
    )
    lse = lse[:, :, : q.shape[2]]
    if mask is not None:
        unseen = mask.isneginf().all(-1)
        o, lse = o.masked_fill(unseen[..., None], 0), lse.masked_fill(unseen, -math.inf)
    return o, lse


def _efficient_backward(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    mask: Tensor | None, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    kv, group = k.shape[1], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    lse = F.pad(lse, (0, -q.shape[2] % _LSE_ROWS), value=math.inf)
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # read only where there is dropout
    o = heads_last(o)  # the kernel ignores its strides, and assumes the layout of its own forward
    gradient_mask = [True, True, True, False]
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        grad_o, q, k, v, _align_mask(mask, q, k), o, lse, seed, seed, 0.0, gradient_mask, causal, scale=scale
    )
    dk, dv = (x.unflatten(1, (kv, group)).sum(2) for x in (dk, dv))
    return dq, dk, dv


def _align_mask(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Returns the mask in q's dtype and full shape, with rows aligned to 16 bytes for vector loads."""
    if mask is None:
        return None
    t = k.shape[2]
    mask = mask.to(q.dtype).expand(*mask.shape[:2], q.shape[2], t)
    return F.pad(mask, (0, -t % _MASK_KEYS))[..., :t].expand(*q.shape[:3], t)


CPU = Kernels(_cpu, _cpu_backward)
FLASH = Kernels(_flash, _flash_backward)
EFFICIENT = Kernels(_efficient, _efficient_backward)
