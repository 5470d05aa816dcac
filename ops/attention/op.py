"""Attention: softmax(scale q k^T + bias) v, and the log-sum-exp of every row.

Shapes: q `[B, H, S, D]`, k and v `[B, KV, T, D]`, o `[B, H, S, D]`, lse `[B, H, S]` (float32; float64 for float64),
mask and bias broadcastable to `[B, H, S, T]`, alibi `[H]`. Query head h reads key head `h // (H // KV)`.

Query i is at position `q_offset + i`, key j at `k_offset + j`, in a sequence that these tensors may be a part of.
A row that sees no key has o = 0, lse = -inf and zero gradients. Dropout does not change lse.

The backward reads lse and o. Given those of the whole sequence, a block of keys computes exactly its share of dq, dk
and dv; `merge` merges the forward results of blocks. Ring attention consists of these two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.forward_mode import is_forward_mode
from shardlib.ops.attention import cuda as attention_cuda
from shardlib.ops.attention import math as attention_math
from shardlib.ops.attention import merge as attention_merge
from shardlib.ops.attention import torch_kernels
from shardlib.ops.attention.autograd import Attention
from shardlib.ops.attention.merge import Merge
from shardlib.ops.attention.variant import Variant, accumulator, heads_last
from shardlib.ops.backend_choice import Choice, requested_backend, unavailable_error

# --- schema -----------------------------------------------------------------------------------------------------------

_VARIANT = (
    "Tensor? mask, Tensor? bias, Tensor? alibi, Tensor? key, bool causal, float scale, int window, float dropout, "
    "SymInt q_offset=0, SymInt k_offset=0, SymInt[]? part=None"
)
_BACK = "Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse"
_LIB: Any = torch.library.Library("shardlib", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIB.define(f"attention(Tensor q, Tensor k, Tensor v, {_VARIANT}) -> (Tensor o, Tensor lse)")
_LIB.define(
    f"attention_backward({_BACK}, {_VARIANT}, bool need_bias=False) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)"
)
_LIB.define("attention_merge(Tensor o1, Tensor lse1, Tensor o2, Tensor lse2) -> (Tensor o, Tensor lse)")
_LIB.define(
    "attention_merge_(Tensor(a!) o1, Tensor(b!) lse1, Tensor o2, Tensor lse2) -> (Tensor(a!) o, Tensor(b!) lse)"
)
OPS = (torch.ops.shardlib.attention.default, torch.ops.shardlib.attention_backward.default)


# --- fake -------------------------------------------------------------------------------------------------------------


def _fake(q: Tensor, k: Tensor, v: Tensor, *variant: Any, **named: Any) -> tuple[Tensor, Tensor]:
    check(q, k, v, Variant(*variant, **named))
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=accumulator(q.dtype))


def _fake_backward(
    grad_o: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *variant: Any,
    **named: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    how, need_bias = _split(variant, named)
    dq, dk, dv = (heads_last(x.new_empty(x.shape)) for x in (q, k, v))
    return dq, dk, dv, how.bias.new_empty(how.bias.shape) if need_bias and how.bias is not None else None


def _split(variant: tuple[Any, ...], named: dict[str, Any]) -> tuple[Variant, bool]:
    """Splits the arguments into the variant and `need_bias`, which follows it."""
    n = len(Variant._fields)
    need_bias = bool(variant[n] if len(variant) > n else named.pop("need_bias", False))
    return Variant(*variant[:n], **named), need_bias


def _fake_merge(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(o1, dtype=accumulator(o1.dtype)), torch.empty_like(lse1)


torch.library.register_fake("shardlib::attention", _fake, lib=_LIB)
torch.library.register_fake("shardlib::attention_merge", _fake_merge, lib=_LIB)
torch.library.register_fake("shardlib::attention_merge_", lambda o1, lse1, o2, lse2: (o1, lse1), lib=_LIB)
torch.library.register_fake("shardlib::attention_backward", _fake_backward, lib=_LIB)


def check(q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> None:
    """Raises ShardingError with all arguments that do not fit."""
    wrong = [*_find_wrong_shapes(q, k, v, variant), *_find_wrong_dtypes(q, k, v, variant)]
    wrong += _find_wrong_numbers(variant)
    if wrong:
        shapes = ", ".join(f"{n} {list(t.shape)}" for n, t in (("q", q), ("k", k), ("v", v)))
        raise ShardingError(f"attention({shapes}) does not fit", wrong)


def _find_wrong_shapes(q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> list[str]:
    if not (q.dim() == k.dim() == v.dim() == 4 and k.shape == v.shape and q.shape[0] == k.shape[0]):
        return ["q must be [B, H, S, D], k and v [B, KV, T, D]"]
    wrong = []
    if q.shape[3] != k.shape[3]:
        wrong.append(f"q has head size {q.shape[3]}, k has {k.shape[3]}")
    if q.shape[1] != k.shape[1] and (not k.shape[1] or q.shape[1] % k.shape[1]):
        wrong.append(f"{q.shape[1]} query heads are no multiple of {k.shape[1]} key heads")
    scores = (*q.shape[:3], k.shape[2])
    for name, x in (("mask", variant.mask), ("bias", variant.bias)):
        if x is None:
            continue
        if x.dim() > 4 or not all(n in (1, m) for n, m in zip(x.shape, scores[4 - x.dim() :], strict=True)):
            wrong.append(f"a {name} {list(x.shape)} does not broadcast to {list(scores)}")
    if variant.alibi is not None and tuple(variant.alibi.shape) != (q.shape[1],):
        wrong.append(f"alibi {list(variant.alibi.shape)} must be one slope for each of {q.shape[1]} heads")
    if variant.key is not None and tuple(variant.key.shape) != (2,):
        wrong.append(f"key {list(variant.key.shape)} must be [2], seed and counter")
    return wrong


def _find_wrong_dtypes(q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> list[str]:
    wrong = []
    if not q.dtype == k.dtype == v.dtype:
        wrong.append(f"q is {_name(q)}, k {_name(k)}, v {_name(v)}: they must be of one dtype")
    elif not q.is_floating_point():
        wrong.append(f"q, k and v are {_name(q)}, which is no floating dtype")
    if variant.mask is not None and variant.mask.dtype != torch.bool:
        wrong.append(f"a mask is bool, not {_name(variant.mask)}; what is added to the logits is a bias")
    if variant.bias is not None and not variant.bias.is_floating_point():
        wrong.append(f"a bias is floating, not {_name(variant.bias)}; what hides keys is a mask")
    if variant.alibi is not None and variant.alibi.dtype != torch.float32:
        wrong.append(f"alibi is float32, not {_name(variant.alibi)}")
    if variant.key is not None and variant.key.dtype != torch.int64:
        wrong.append(f"key is int64, not {_name(variant.key)}")
    named = {"q": q, "k": k, "v": v, "mask": variant.mask, "bias": variant.bias, "alibi": variant.alibi}
    devices = {n: str(x.device) for n, x in (named | {"key": variant.key}).items() if x is not None}
    if len(set(devices.values())) > 1:
        wrong.append(f"{', '.join(f'{n} is on {device}' for n, device in devices.items())}: they must be on one device")
    return wrong


def _find_wrong_numbers(variant: Variant) -> list[str]:
    wrong = []
    if not 0 <= variant.dropout < 1:
        wrong.append(f"dropout is {variant.dropout}, not in [0, 1)")
    if variant.dropout and variant.key is None:
        wrong.append("dropout needs a key: an int64 tensor of seed and counter")
    if variant.window < 0:
        wrong.append(f"window is {variant.window}; 0 is none, w sees keys less than w away")
    if len(variant.part or ()) not in (0, 5):
        wrong.append(f"part {list(variant.part or ())} is not [first batch, first head, H, S, T]")
    if variant.dropout and min(variant.q_offset, variant.k_offset) < 0:
        wrong.append(f"with dropout offsets are places in the whole, not {variant.q_offset} and {variant.k_offset}")
    return wrong


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


# --- reference --------------------------------------------------------------------------------------------------------


def reference(q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> tuple[Tensor, Tensor]:
    """Computes the definition in plain ops: slow, with tangents and gradients of every order."""
    variant, wide = variant.explicit(q, k), accumulator(q.dtype)
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = (x.to(wide).repeat_interleave(group, 1) for x in (k, v))
    scores = variant.logits(torch.einsum("bhsd,bhtd->bhst", q.to(wide), k) * variant.scale)
    dead = scores.isneginf().all(-1)  # rows without a key; their gradient would be NaN
    lse = scores.masked_fill(dead[..., None], 0).logsumexp(-1)
    p, lse = (scores - lse[..., None]).exp(), lse.masked_fill(dead, -math.inf)
    if variant.dropout:
        b, h, s, t = p.shape
        p = p * variant.keep(b, h, s, t, p.device) / (1 - variant.dropout)
    return torch.einsum("bhst,bhtd->bhsd", p, v).to(q.dtype), lse


# --- autograd partner -------------------------------------------------------------------------------------------------


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    window: int = 0,
    alibi: Tensor | None = None,
    dropout: float = 0.0,
    key: Tensor | None = None,
    q_offset: int = 0,
    k_offset: int = 0,
    part: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes attention of q `[B, H, S, D]` over k, v `[B, KV, T, D]`; returns o `[B, H, S, D]` and lse `[B, H, S]`.

    * causal: a query sees keys up to its own position. window: only keys less than `window` positions away (0: all).
    * mask: bool, true where a query sees a key. bias: added to the logits. Both broadcast to `[B, H, S, T]`.
    * scale: of q k^T, by default `1 / sqrt(D)`. alibi: slopes float32 `[H]`; `slope * |distance|` is subtracted.
    * dropout: the share of probabilities to drop, by `key` (int64 `[2]`: seed and counter), equal on every device and
      backend: see `shardlib.ops.random.philox`.
    * q_offset, k_offset: the positions of the first query and key. part: `[first batch, first head, H, S, T]`, the
      place of these tensors in the whole and its sizes; only dropout needs it.

    Differentiable in q, k, v and bias, through o and lse. Raises ShardingError if arguments do not fit.
    """
    scale = 1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale
    variant = Variant(mask, bias, alibi, key, causal, scale, window, dropout, q_offset, k_offset, part)
    check(q, k, v, variant)
    if is_forward_mode():
        return reference(q, k, v, variant)
    return tuple(Attention.apply(q, k, v, *variant))  # type: ignore[no-untyped-call]


def merge(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Merges the o `[B, H, S, D]` and lse `[B, H, S]` of two parts into attention over the keys of both.

    The result's o is float32, or float64 if o1 is: cast it once, after the last merge. Differentiable in all four.
    """
    combine: Any = attention_merge.merge_with_plain_ops if is_forward_mode() else Merge.apply
    o, lse = combine(o1, lse1, o2, lse2)
    return o, lse


# --- backends ---------------------------------------------------------------------------------------------------------


class Backend(NamedTuple):
    """One way to compute attention; its functions take an explicit `Variant`.

    * `find_fault(q, k, variant, need_bias)`: returns why it cannot compute this (maybe empty), or None if it can.
    * `way(q, k, variant)`: names the kernel that runs; `reason`: why the backend is taken.
    """

    find_fault: Callable[[Tensor, Tensor, Variant, bool], str | None]
    way: Callable[[Tensor, Tensor, Variant], str]
    reason: str
    forward: Callable[[Tensor, Tensor, Tensor, Variant], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]


# In the order of preference.
BACKENDS: Mapping[str, Backend] = {
    "cuda": Backend(
        attention_cuda.find_fault,
        attention_cuda.way,
        "shardlib's own kernel",
        attention_cuda.forward,
        attention_cuda.backward,
    ),
    "torch": Backend(
        torch_kernels.find_fault,
        torch_kernels.way,
        "torch's own kernel",
        torch_kernels.forward,
        torch_kernels.backward,
    ),
    "math": Backend(
        lambda *_: None, lambda *_: "", "written out in torch", attention_math.forward, attention_math.backward
    ),
}


def choose(q: Tensor, k: Tensor, variant: Variant, need_bias: bool = False) -> Choice:
    """Chooses the backend for attention of these tensors; `need_bias`: for a backward with a bias's gradient.

    `SHARDLIB_OPS` may name one. "torch" is torch's kernels, or plain ops ("math") where the kernels cannot run.
    """
    want = requested_backend("attention")
    candidates = tuple(BACKENDS) if want is None else ("torch", "math") if want == "torch" else (want,)
    fault = None
    for name in candidates:
        backend = BACKENDS.get(name)
        reason, fault = fault, "it is not part of this build"
        if backend and (fault := backend.find_fault(q, k, variant, need_bias)) is None:
            return Choice(name, backend.way(q, k, variant), reason or backend.reason)
    raise unavailable_error("attention", want or "math", fault or "")


def forward(q: Tensor, k: Tensor, v: Tensor, *variant: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """Runs the op on the chosen backend; programs call it directly, without the dispatcher."""
    how = Variant(*variant, **named).explicit(q, k)
    return BACKENDS[choose(q, k, how).backend].forward(q, k, v, how)


def backward(
    grad_o: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *variant: Any,
    **named: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Computes the gradients of q, k, v and, with `need_bias`, of the bias, on the chosen backend."""
    original, need_bias = _split(variant, named)
    explicit = original.explicit(q, k)
    run = BACKENDS[choose(q, k, explicit, need_bias).backend].backward
    dq, dk, dv, dbias = run(grad_o, grad_lse, q, k, v, o, lse, explicit, need_bias)
    return dq, dk, dv, dbias if dbias is None or original.bias is None else dbias.reshape(original.bias.shape)


_LIB.impl("attention", forward, "CompositeExplicitAutograd")
_LIB.impl("attention_backward", backward, "CompositeExplicitAutograd")
_LIB.impl("attention_merge", attention_merge.merge, "CompositeExplicitAutograd")
_LIB.impl("attention_merge_", attention_merge.merge_, "CompositeExplicitAutograd")
