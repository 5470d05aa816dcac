"""The attention kernels' argument structures for ctypes, filled from tensors; the mirror of cuda/attention_args.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


class AttentionArgs(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("q", "k", "v", "o", "lse", "mask", "bias", "alibi", "key")),
        *((name, c_int64 * 3) for name in ("q_strides", "k_strides", "v_strides", "o_strides", "lse_strides")),
        *((name, c_int64 * 4) for name in ("mask_strides", "bias_strides")),
        *((name, c_int64) for name in ("batch", "heads", "kv_heads", "queries", "keys", "head_dim")),
        *((name, c_int64) for name in ("q_offset", "k_offset", "window")),
        *((name, c_int64) for name in ("first_batch", "first_head", "global_heads", "global_queries", "global_keys")),
        *((name, c_double) for name in ("scale", "dropout")),
        *((name, c_int32) for name in ("dtype", "bias_dtype", "causal")),
    ]


class AttentionBackwardArgs(ctypes.Structure):
    _fields_ = [
        ("forward", AttentionArgs),
        *((name, c_void_p) for name in ("grad_o", "grad_lse", "delta", "dq", "dk", "dv", "dbias", "workspace")),
        *(
            (name, c_int64 * 3)
            for name in ("grad_o_strides", "grad_lse_strides", "dq_strides", "dk_strides", "dv_strides")
        ),
        ("dbias_strides", c_int64 * 4),
        ("repeatable", c_int32),
    ]


def pointer(x: Tensor | None) -> int | None:
    """An address, or null for no tensor and for an empty one."""
    return None if x is None else x.data_ptr() or None


def broadcast_strides(x: Tensor | None, shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of `x` seen as `shape`: 0 where it is broadcast."""
    return (0, 0, 0, 0) if x is None else tuple(x.expand(shape).stride())


def attention_args(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi: Tensor | None = None,
    key: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    dropout: float = 0.0,
    q_offset: int = 0,
    k_offset: int = 0,
    part: Sequence[int] = (),
) -> AttentionArgs:
    """The structure of one call; the tensors must outlive it."""
    batch, heads, queries, dim = q.shape
    keys = k.shape[2]
    shape = (batch, heads, queries, keys)
    first_batch, first_head, global_heads, global_queries, global_keys = part or (0, 0, heads, queries, keys)
    fields: dict[str, Any] = {
        **{name: pointer(x) for name, x in (("q", q), ("k", k), ("v", v), ("o", o), ("lse", lse))},
        **{name: pointer(x) for name, x in (("mask", mask), ("bias", bias), ("alibi", alibi), ("key", key))},
        **{f"{name}_strides": x.stride()[:3] for name, x in (("q", q), ("k", k), ("v", v), ("o", o), ("lse", lse))},
        "mask_strides": broadcast_strides(mask, shape),
        "bias_strides": broadcast_strides(bias, shape),
        "batch": batch,
        "heads": heads,
        "kv_heads": k.shape[1],
        "queries": queries,
        "keys": keys,
        "head_dim": dim,
        "q_offset": q_offset,
        "k_offset": k_offset,
        "window": window,
        "first_batch": first_batch,
        "first_head": first_head,
        "global_heads": global_heads,
        "global_queries": global_queries,
        "global_keys": global_keys,
        "scale": dim**-0.5 if scale is None else scale,
        "dropout": dropout,
        "causal": int(causal),
        "dtype": DTYPES[q.dtype],
        "bias_dtype": 0 if bias is None else DTYPES[bias.dtype],
    }
    args = AttentionArgs()
    for name, value in fields.items():
        kind = dict(AttentionArgs._fields_)[name]
        setattr(args, name, kind(*value) if isinstance(value, tuple) else value)
    return args
