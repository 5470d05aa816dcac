"""Attention, caught whole while a function is traced, before torch picks a kernel for the device at hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardlib.errors import ShardingError
from shardlib.ops.attention import attention


class AttentionCapture(TorchFunctionMode):
    """While on, `torch.nn.functional.scaled_dot_product_attention` is this op, whole and independent of the device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _SDPA:
            return _captured(*args, **kwargs)
        if func is F.multi_head_attention_forward:  # Python code: the mode is off inside, and it calls attention there
            with _replaced():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


_SDPA = F.scaled_dot_product_attention


@contextmanager
def _replaced() -> Iterator[None]:
    F.scaled_dot_product_attention = _captured
    try:
        yield
    finally:
        F.scaled_dot_product_attention = _SDPA


def _captured(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p > 0:
        raise ShardingError("attention dropout is not supported yet", remedy="set dropout to 0")
    learned = attn_mask is not None and attn_mask.requires_grad
    odd = query.shape[-1] != value.shape[-1] or min(query.dim(), key.dim(), value.dim()) < 3
    if learned or odd or not query.is_floating_point():
        return _SDPA(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    lead = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])  # type: ignore[no-untyped-call]
    q, k, v = (x.expand(*lead, *x.shape[-3:]).reshape(-1, *x.shape[-3:]) for x in (query, key, value))
    heads = q.shape[1] if enable_gqa else max(q.shape[1], k.shape[1])
    if not enable_gqa:  # heads broadcast like any other leading dim
        q, k, v = (x.expand(-1, heads, -1, -1) for x in (q, k, v))
    mask = attn_mask
    if mask is not None and len(lead) != 1 and mask.dim() > 3:
        mask = mask.expand(*lead, *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])
    o, _ = attention(q, k, v, mask, causal=is_causal, scale=scale)
    return o.reshape(*lead, heads, *o.shape[-2:])
