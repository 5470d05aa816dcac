"""Attention: softmax(scale q k^T + mask) v, and the log-sum-exp of every row.

Shapes: q `[B, H, S, D]`, k and v `[B, KV, T, D]`, mask broadcastable to `[B, H, S, T]`, lse `[B, H, S]`.
Grouped heads: query head h reads key head `h // (H // KV)`. Causal: query i sees key j if `j + k_offset <= i +
q_offset`, so that a part of a sequence knows its place in the whole. A row that sees no key gives o = 0 and lse = -inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.errors import ShardingError

# --- schema -----------------------------------------------------------------------------------------------------------

_WHERE = "Tensor? mask, bool causal, float scale, SymInt q_offset=0, SymInt k_offset=0"
_BACK = "Tensor grad_o, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse"
_LIB: Any = torch.library.Library("shardlib", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIB.define(f"attention(Tensor q, Tensor k, Tensor v, {_WHERE}) -> (Tensor o, Tensor lse)")
_LIB.define(f"attention_backward({_BACK}, {_WHERE}) -> (Tensor dq, Tensor dk, Tensor dv)")


class Where(NamedTuple):
    """Which keys a query sees, and how logits are scaled: the arguments shared by both ops."""

    mask: Tensor | None
    causal: bool
    scale: float
    q_offset: int = 0
    k_offset: int = 0

    @property
    def shift(self) -> int:
        """Query i sees the keys up to `i + shift`."""
        return self.q_offset - self.k_offset


# --- fake -------------------------------------------------------------------------------------------------------------


def _fake(q: Tensor, k: Tensor, v: Tensor, *where: Any, **named: Any) -> tuple[Tensor, Tensor]:
    _check(q, k, v, Where(*where, **named).mask)
    return torch.empty_like(q), _heads_last(q.new_empty(q.shape[:3], dtype=_accumulator(q.dtype)))


def _fake_backward(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *where: Any, **named: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (_heads_last(x.new_empty(x.shape)) for x in (q, k, v))
    return dq, dk, dv


torch.library.register_fake("shardlib::attention", _fake, lib=_LIB)
torch.library.register_fake("shardlib::attention_backward", _fake_backward, lib=_LIB)


def _heads_last(x: Tensor) -> Tensor:
    """`[B, H, S, ...]` in memory as `[B, S, H, ...]`: torch's choice for all but o, which is laid out as q is."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    def fits(size: int, whole: int) -> bool:
        return size in (1, whole)

    wrong = []
    if not (q.dim() == k.dim() == v.dim() == 4 and k.shape == v.shape and q.shape[0] == k.shape[0]):
        wrong.append("q must be [B, H, S, D], k and v [B, KV, T, D]")
    elif q.shape[3] != k.shape[3]:
        wrong.append(f"q has head size {q.shape[3]}, k has {k.shape[3]}")
    elif q.shape[1] != k.shape[1] and (not k.shape[1] or q.shape[1] % k.shape[1]):
        wrong.append(f"{q.shape[1]} query heads are no multiple of {k.shape[1]} key heads")
    elif mask is not None:
        scores = (*q.shape[:3], k.shape[2])
        if mask.dim() > 4 or not all(map(fits, mask.shape, scores[4 - mask.dim() :])):
            wrong.append(f"a mask {list(mask.shape)} does not broadcast to {list(scores)}")
    if wrong:
        shapes = ", ".join(f"{n} {list(t.shape)}" for n, t in (("q", q), ("k", k), ("v", v)))
        raise ShardingError(f"attention({shapes}) does not fit", wrong)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# --- reference --------------------------------------------------------------------------------------------------------


def reference(q: Tensor, k: Tensor, v: Tensor, where: Where) -> tuple[Tensor, Tensor]:
    """The definition, differentiable and slow; give float64 tensors for a yardstick.

    Example:
        >>> q = torch.zeros(1, 1, 2, 4); k = torch.zeros(1, 1, 3, 4)
        >>> o, lse = reference(q, k, torch.ones(1, 1, 3, 4), Where(None, causal=True, scale=1.0))
        >>> lse.exp().round().tolist()  # the first query sees one key, the second two
        [[[1.0, 2.0]]]
    """
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = _masked(torch.einsum("bhsd,bhtd->bhst", q, k) * where.scale, where)
    lse = scores.logsumexp(-1)
    p = (scores - lse.masked_fill(lse.isneginf(), 0)[..., None]).exp()
    return torch.einsum("bhst,bhtd->bhsd", p, v), lse


def _masked(scores: Tensor, where: Where) -> Tensor:
    """The scores `[..., S, T]`, -inf where a query must not look."""
    mask = where.mask
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
    if where.causal:
        scores = scores.masked_fill(~_visible(scores.shape[-2], scores.shape[-1], where, scores.device), -math.inf)
    return scores


def _visible(s: int, t: int, where: Where, device: torch.device) -> Tensor:
    return torch.ones(s, t, dtype=torch.bool, device=device).tril(where.shift)


# --- autograd partner -------------------------------------------------------------------------------------------------


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    q_offset: int = 0,
    k_offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attention of q `[B, H, S, D]` over k, v `[B, KV, T, D]`; returns o `[B, H, S, D]` and lse `[B, H, S]`.

    A float mask is added to the logits, a boolean mask keeps where it is true. `scale` is `1 / sqrt(D)` unless given.
    Differentiable in q, k and v; lse carries no gradient. Raises ShardingError for shapes that do not fit.

    Example:
        >>> q, kv = torch.zeros(2, 8, 5, 16), torch.ones(2, 4, 7, 16)
        >>> o, lse = attention(q, kv, kv)
        >>> o.shape, round(lse[0, 0, 0].exp().item())
        (torch.Size([2, 8, 5, 16]), 7)
    """
    _check(q, k, v, mask)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    o, lse = _Attention.apply(q, k, v, mask, causal, scale, q_offset, k_offset)  # type: ignore[no-untyped-call]
    return o, lse


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, *where: Any) -> Any:
        return torch.ops.shardlib.attention(q, k, v, *where)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, mask, *ctx.rest = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # else a tensor of zeros is made for lse
        ctx.save_for_backward(q, k, v, *output, mask)

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor, _: None) -> tuple[Tensor | None, ...]:
        if ctx.needs_input_grad[3]:
            raise ShardingError(
                "attention was asked for the gradient of its mask",
                rule="attention is differentiable in q, k and v",
                remedy="add a learned bias to the logits yourself, or detach the mask",
            )
        *tensors, mask = ctx.saved_tensors
        grads = _AttentionBackward.apply(grad_o, *tensors, mask, *ctx.rest)  # type: ignore[no-untyped-call]
        return (*grads, None, None, None, None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        folded = _fold(info.batch_size, in_dims[:3], inputs[:3])
        mask = _fold_mask(info.batch_size, in_dims[3], inputs[3], folded[0].shape[0])
        outputs = _Attention.apply(*folded, mask, *inputs[4:])  # type: ignore[no-untyped-call]
        return tuple(x.unflatten(0, (info.batch_size, -1)) for x in outputs), (0, 0)


class _AttentionBackward(torch.autograd.Function):
    """A function of its own, so that vmap can batch the backward and a second derivative is refused, not wrong."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        return torch.ops.shardlib.attention_backward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ShardingError(
            "attention was differentiated twice",
            rule="attention has a first derivative only",
            remedy="write softmax(q k^T) v with torch ops where second derivatives are needed",
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        folded = _fold(info.batch_size, in_dims[:6], inputs[:6])
        mask = _fold_mask(info.batch_size, in_dims[6], inputs[6], folded[0].shape[0])
        outputs = _AttentionBackward.apply(*folded, mask, *inputs[7:])  # type: ignore[no-untyped-call]
        return tuple(x.unflatten(0, (info.batch_size, -1)) for x in outputs), (0, 0, 0)


def _fold(n: int, dims: Iterable[int | None], tensors: Iterable[Tensor]) -> list[Tensor]:
    """Every tensor with the batch dim of size n in front and melted into its first dim."""
    fronted = (x.expand(n, *x.shape) if d is None else x.movedim(d, 0) for d, x in zip(dims, tensors, strict=True))
    return [x.flatten(0, 1) for x in fronted]


def _fold_mask(n: int, dim: int | None, mask: Tensor | None, batch: int) -> Tensor | None:
    if mask is None:
        return None
    if dim is None:
        return mask if mask.dim() < 4 or mask.shape[0] == 1 else mask.repeat(n, 1, 1, 1)
    mask = mask.movedim(dim, 0)
    mask = mask.reshape(n, *(1,) * (5 - mask.dim()), *mask.shape[1:])
    return mask.expand(n, batch // n, *mask.shape[2:]).flatten(0, 1)


# --- backends ---------------------------------------------------------------------------------------------------------


def _math(q: Tensor, k: Tensor, v: Tensor, where: Where) -> tuple[Tensor, Tensor]:
    p, lse = _probabilities(q, k, where)
    return torch.empty_like(q).copy_((p @ v.to(p.dtype)).reshape(q.shape)), _heads_last(lse)


def _math_backward(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, where: Where
) -> tuple[Tensor, Tensor, Tensor]:
    p, _ = _probabilities(q, k, where, lse)
    do, qs = _per_group(grad_o, k, p.dtype), _per_group(q, k, p.dtype)
    delta = (do * _per_group(o, k, p.dtype)).sum(-1, keepdim=True)
    ds = (do @ v.to(p.dtype).mT).sub_(delta).mul_(p).mul_(where.scale)
    dq, dk, dv = (ds @ k.to(p.dtype)).reshape(q.shape), ds.mT @ qs, p.mT @ do
    return _heads_last(dq.to(q.dtype)), _heads_last(dk.to(k.dtype)), _heads_last(dv.to(v.dtype))


def _probabilities(q: Tensor, k: Tensor, where: Where, lse: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """softmax of the logits `[B, KV, G*S, T]`, in the accumulator's type, and lse `[B, H, S]`."""
    b, h, s, _ = q.shape
    dtype = _accumulator(q.dtype)
    grouped = (_per_group(q, k, dtype) * where.scale) @ k.to(dtype).mT
    scores = _masked(grouped.reshape(b, h, s, k.shape[2]), where)
    if lse is None:
        lse = scores.logsumexp(-1)
    dead = lse.isneginf()
    p = (scores - lse.masked_fill(dead, 0)[..., None]).exp_()
    return p.reshape(grouped.shape), lse


def _per_group(x: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
    """`[B, (KV G), S, D] -> [B, KV, (G S), D]`: heads that share their keys become more rows of one product."""
    b, h, s, d = x.shape
    kv = k.shape[1]
    return x.to(dtype).reshape(b, kv, (h // kv if kv else 0) * s, d)


def _torch_cpu(q: Tensor, k: Tensor, v: Tensor, where: Where) -> tuple[Tensor, Tensor]:
    q, k, v = _rows(q), _rows(k), _rows(v)
    k, v, mask, causal = _dense(q, k, v, where)
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=where.scale
    )
    if mask is not None and (suspect := lse == 0).any():
        # The kernel gives 0 for a row that sees nothing.
        lse = lse.masked_fill_(suspect & mask.isneginf().all(-1), -math.inf)
    return o, lse


def _torch_cpu_backward(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, where: Where
) -> tuple[Tensor, Tensor, Tensor]:
    keys = k.shape[2]
    grad_o, q, k, v, o = (_rows(x) for x in (grad_o, q, k, v, o))
    k, v, mask, causal = _dense(q, k, v, where)
    if mask is not None:
        lse = lse.masked_fill(lse.isneginf(), 0)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_o, q, k, v, o, lse, 0.0, causal, attn_mask=mask, scale=where.scale
    )
    unseen = keys - k.shape[2]
    if unseen:
        dk, dv = (_heads_last(F.pad(x, (0, 0, 0, unseen))) for x in (dk, dv))
    return dq, dk, dv


def _rows(x: Tensor) -> Tensor:
    """x with its last dim dense in memory: torch's kernel reads and writes whole rows, whatever the strides say."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _dense(q: Tensor, k: Tensor, v: Tensor, where: Where) -> tuple[Tensor, Tensor, Tensor | None, bool]:
    """k, v, mask and flag as torch's kernel wants them: one additive 4-d mask, or its own causal flag, never both."""
    s, t = q.shape[2], k.shape[2]
    mask, causal = where.mask, where.causal and where.shift < t - 1
    if causal and where.shift == 0 and mask is None:
        return k, v, None, True
    if causal:
        seen = max(min(t, where.shift + s), 1)  # no query sees the keys behind these
        k, v = k[:, :, :seen], v[:, :, :seen]
        mask = mask[..., :seen] if mask is not None and mask.shape[-1] > 1 else mask
        visible = _visible(s, seen, where, q.device)
        mask = visible if mask is None else mask & visible if mask.dtype == torch.bool else mask.to(q.dtype)
        mask = mask if mask.dtype == torch.bool else mask.masked_fill(~visible, -math.inf)
    if mask is None:
        return k, v, None, False
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -math.inf)
    mask = mask.to(q.dtype).reshape((1,) * (4 - mask.dim()) + mask.shape)
    return k, v, mask, False


class Choice(NamedTuple):
    """A backend and the reason why it runs."""

    backend: str
    reason: str


FORWARD: Mapping[str, Callable[..., tuple[Tensor, Tensor]]] = {"torch": _torch_cpu, "math": _math}
BACKWARD: Mapping[str, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {
    "torch": _torch_cpu_backward,
    "math": _math_backward,
}


def choose(q: Tensor, k: Tensor, where: Where) -> Choice:
    """Which backend computes attention of these tensors, and why.

    Example:
        >>> choose(torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 0, 8), Where(None, False, 1.0))
        Choice(backend='math', reason='a size is 0')
    """
    if q.device.type != "cpu":
        return Choice("math", f"no kernel for {q.device.type} here")
    if not (q.numel() and k.numel()):
        return Choice("math", "a size is 0")
    if not q.dtype.is_floating_point or q.dtype != k.dtype:
        return Choice("math", f"{q.dtype} queries and {k.dtype} keys")
    return Choice("torch", "torch's flash attention for CPU")


def forward(q: Tensor, k: Tensor, v: Tensor, *where: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """The op itself, by the chosen backend; a program may call it past the dispatcher."""
    how = Where(*where, **named)
    return FORWARD[choose(q, k, how).backend](q, k, v, how)


def backward(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *where: Any, **named: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, by the chosen backend."""
    how = Where(*where, **named)
    return BACKWARD[choose(q, k, how).backend](grad_o, q, k, v, o, lse, how)


_LIB.impl("attention", forward, "CompositeExplicitAutograd")
_LIB.impl("attention_backward", backward, "CompositeExplicitAutograd")
