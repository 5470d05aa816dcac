"""Attention by shardlib's own kernels in cuda/: for Hopper (sm_90a), and for every card from Ampere on (sm_80).

Shapes: q, o `[B, H, S, D]`, k and v `[B, KV, T, D]`, lse `[B, H, S]`. The kernels read rows of whole 16-byte words;
tensors in other layouts are copied first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardlib.build.build_recipe import Missing
from shardlib.ops import native_libs, tuning
from shardlib.ops.attention.variant import Variant, sum_to
from shardlib.ops.backend_choice import requested_backend

CARDS = {"sm_90a": "attention", "sm_80": "attention_sm80"}  # the stem of the torch ops for each kind of card
_HALF = (torch.bfloat16, torch.float16)


def find_fault(q: Tensor, k: Tensor, variant: Variant, need_bias: bool) -> str | None:
    """Returns why these kernels cannot compute this, or None if they can; empty if there is no need for a reason."""
    requested = requested_backend("attention") == "cuda"
    if q.device.type != "cuda":
        return f"shardlib's CUDA kernels take no tensors on {q.device.type}" if requested else ""
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
    if not requested and (why := _find_speed_fault(name, q, k, variant)):
        return f"{why} (SHARDLIB_OPS=attention=cuda takes them)"
    library = native_libs.cuda()
    return str(library) if isinstance(library, Missing) else None


def _find_speed_fault(card: str, q: Tensor, k: Tensor, variant: Variant) -> str:
    """Returns why the kernels are not the default; empty if they were measured and are faster."""
    if q.shape[2] < tuning.SHORTEST:
        return f"shardlib's own kernels are not measured below {tuning.SHORTEST:,} queries"
    return tuning.find_speed_fault(card, q.shape[3], has_extras(variant), q.shape[1] != k.shape[1])


def has_extras(variant: Variant) -> bool:
    """True if the kernels change single logits or probabilities: see `has_extras` in `cuda/attention.cuh`."""
    extras = variant.mask, variant.bias, variant.alibi
    return any(x is not None for x in extras) or variant.dropout > 0 or not variant.scale > 0


def way(q: Tensor, k: Tensor, variant: Variant) -> str:
    """Names the kind of card whose kernels run."""
    return choose_card(q.device)


def choose_card(device: torch.device) -> str:
    """Returns the kind of card in `CARDS`: only Hopper runs the kernels for sm_90a."""
    return "sm_90a" if torch.cuda.get_device_capability(device) == (9, 0) else "sm_80"


def forward(q: Tensor, k: Tensor, v: Tensor, variant: Variant, card: str = "") -> tuple[Tensor, Tensor]:
    """Computes o, with q's strides, and lse; `card` chooses the kernels instead of the device."""
    o, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    written = o if _is_aligned(o) else torch.empty_like(o, memory_format=torch.contiguous_format)
    run = get_kernel(card or choose_card(q.device), "forward")
    run(*(_align(x) for x in (q, k, v)), written, lse, *_kernel_arguments(variant))
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
    """Computes dq, dk, dv, and dbias in the bias's shape of four dims.

    Under `torch.use_deterministic_algorithms` the sums have a fixed order. A gradient of the bias then needs memory for
    all `[B, H, S, T]` logits.
    """
    repeatable = torch.are_deterministic_algorithms_enabled()
    dq, dk, dv = (_empty_heads_last(x) for x in (q, k, v))
    bias = variant.bias if need_bias else None
    sums: Tensor | None = None
    if bias is not None:  # many CTAs add to one element of a broadcast bias, in any order
        shape = (*q.shape[:3], k.shape[2]) if repeatable else bias.shape
        sums = q.new_zeros(shape, dtype=torch.float32)
    run = get_kernel(card or choose_card(q.device), "backward")
    inputs = (*(_align(x) for x in (q, k, v, o)), lse)
    run(_align(grad_o), grad_lse, *inputs, dq, dk, dv, sums, repeatable, *_kernel_arguments(variant))
    dbias = None if sums is None or bias is None else sum_to(sums, bias.shape).to(bias.dtype)
    return dq, dk, dv, dbias


def get_kernel(card: str, direction: str) -> Any:
    """Returns the torch op of one card and direction; `native_libs.cuda()` has loaded it."""
    return getattr(torch.ops.shardlib_cuda, f"{CARDS[card]}_{direction}")


def _kernel_arguments(variant: Variant) -> tuple[Any, ...]:
    """Returns the variant as the kernels take it: a bias of at most 32 bits, contiguous small tensors."""
    bias, alibi, key = variant.bias, variant.alibi, variant.key
    return variant._replace(
        bias=bias if bias is None or bias.dtype in (*_HALF, torch.float32) else bias.float(),
        alibi=None if alibi is None else alibi.contiguous(),
        key=None if key is None else key.contiguous(),
    )


def _is_aligned(x: Tensor) -> bool:
    """True if rows are dense, begin at multiples of 16 bytes, and do not coincide."""
    steps = [step for n, step in zip(x.shape[:3], x.stride()[:3], strict=True) if n > 1]
    return x.stride(3) == 1 and x.data_ptr() % 16 == 0 and all(step > 0 and step % 8 == 0 for step in steps)


def _align(x: Tensor) -> Tensor:
    return x if _is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def _empty_heads_last(x: Tensor) -> Tensor:
    """Allocates a gradient of `x`, `[B, H, S, D]`, as `[B, S, H, D]` in memory."""
    b, h, s, d = x.shape
    return x.new_empty(b, s, h, d).transpose(1, 2)
