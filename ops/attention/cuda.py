"""Attention by shardlib's own kernels in cuda/: for Hopper (sm_90a), and for every card from Ampere on (sm_80).

Shapes: q, o `[B, H, S, D]`, k and v `[B, KV, T, D]`, lse `[B, H, S]`. The kernels read rows of whole 16-byte words;
what is laid out otherwise is copied first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardlib.build.build_recipe import Missing
from shardlib.ops import native_libs, tuning
from shardlib.ops.attention.variant import Variant, sum_to
from shardlib.ops.backend_choice import wanted

CARDS = {"sm_90a": "attention", "sm_80": "attention_sm80"}  # kernels for which cards: the stem of their torch ops
_HALF = (torch.bfloat16, torch.float16)


def unable(q: Tensor, k: Tensor, variant: Variant, need_bias: bool) -> str | None:
    """Why these kernels do not compute this, or None when they do; empty where nobody would expect them to."""
    asked = wanted("attention") == "cuda"
    if q.device.type != "cuda":
        return f"shardlib's CUDA kernels take no tensors on {q.device.type}" if asked else ""
    if not (q.numel() and k.numel()):
        return "a size is 0"
    if q.dtype not in _HALF:
        return f"shardlib's kernels take bfloat16 and float16, not {str(q.dtype).removeprefix('torch.')}"
    if q.shape[3] % 8 or q.shape[3] > 256:
        return f"shardlib's kernels take head sizes of a multiple of 8, up to 256, not {q.shape[3]}"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    name = torch.cuda.get_device_name(q.device)
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return f"{name} is older than sm_80, for which shardlib's kernels are"
    if not asked and (why := _unmeasured(name, q, k, variant)):
        return f"{why} (SHARDLIB_OPS=attention=cuda takes them)"
    library = native_libs.cuda()
    return str(library) if isinstance(library, Missing) else None


def _unmeasured(card: str, q: Tensor, k: Tensor, variant: Variant) -> str:
    """Why the kernels are not taken unasked; empty where they were measured, and are faster."""
    if q.shape[2] < tuning.SHORTEST:
        return f"shardlib's own kernels are not measured below {tuning.SHORTEST:,} queries"
    return tuning.slower(card, q.shape[3], general(variant), q.shape[1] != k.shape[1])


def general(variant: Variant) -> bool:
    """Whether the kernels look at every logit by itself: see `has_extras` in `cuda/attention.cuh`."""
    extras = variant.mask, variant.bias, variant.alibi
    return any(x is not None for x in extras) or variant.dropout > 0 or not variant.scale > 0


def way(q: Tensor, k: Tensor, variant: Variant) -> str:
    """For which card the kernels are that run."""
    return card_of(q.device)


def card_of(device: torch.device) -> str:
    """Hopper has kernels of its own, and no other card runs those."""
    return "sm_90a" if torch.cuda.get_device_capability(device) == (9, 0) else "sm_80"


def forward(q: Tensor, k: Tensor, v: Tensor, variant: Variant, card: str = "") -> tuple[Tensor, Tensor]:
    """o, laid out as q is, and lse; `card` names the kernels, else the device does."""
    o, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    written = o if _fits(o) else torch.empty_like(o, memory_format=torch.contiguous_format)
    run = kernel(card or card_of(q.device), "forward")
    run(*(_fitting(x) for x in (q, k, v)), written, lse, *_arguments(variant))
    return o if written is o else o.copy_(written), lse


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
    card: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv, and dbias in the shape of the bias, four dims.

    Under `torch.use_deterministic_algorithms` the sums have a fixed order. A gradient of the bias then needs memory for
    all `[B, H, S, T]` logits.
    """
    repeatable = torch.are_deterministic_algorithms_enabled()
    dq, dk, dv = (_heads_last(x) for x in (q, k, v))
    bias = variant.bias if need_bias else None
    sums: Tensor | None = None
    if bias is not None:  # where it is broadcast, kernels add to one element from many CTAs, in any order
        shape = (*q.shape[:3], k.shape[2]) if repeatable else bias.shape
        sums = q.new_zeros(shape, dtype=torch.float32)
    run = kernel(card or card_of(q.device), "backward")
    inputs = (*(_fitting(x) for x in (q, k, v, o)), lse)
    run(_fitting(grad_o), grad_lse, *inputs, dq, dk, dv, sums, repeatable, *_arguments(variant))
    dbias = None if sums is None or bias is None else sum_to(sums, bias.shape).to(bias.dtype)
    return dq, dk, dv, dbias


def kernel(card: str, direction: str) -> Any:
    """The torch op of one card and direction; `native_libs.cuda()` has loaded it."""
    return getattr(torch.ops.shardlib_cuda, f"{CARDS[card]}_{direction}")


def _arguments(variant: Variant) -> tuple[Any, ...]:
    """The variant as the kernels take it: a bias of at most 32 bits, small tensors dense."""
    bias, alibi, key = variant.bias, variant.alibi, variant.key
    return variant._replace(
        bias=bias if bias is None or bias.dtype in (*_HALF, torch.float32) else bias.float(),
        alibi=None if alibi is None else alibi.contiguous(),
        key=None if key is None else key.contiguous(),
    )


def _fits(x: Tensor) -> bool:
    """Whether rows are dense and begin at multiples of 16 bytes, none of them twice."""
    steps = [step for n, step in zip(x.shape[:3], x.stride()[:3], strict=True) if n > 1]
    return x.stride(3) == 1 and x.data_ptr() % 16 == 0 and all(step > 0 and step % 8 == 0 for step in steps)


def _fitting(x: Tensor) -> Tensor:
    return x if _fits(x) else x.clone(memory_format=torch.contiguous_format)


def _heads_last(x: Tensor) -> Tensor:
    """Memory for a gradient of `x`, `[B, S, H, D]`, seen as `[B, H, S, D]`."""
    b, h, s, d = x.shape
    return x.new_empty(b, s, h, d).transpose(1, 2)
