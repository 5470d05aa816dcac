"""Two partial results of attention, over different keys for the same queries, made one by their log-sum-exps.

o1, o2  [B, H, S, D]   partial outputs, each normalized by its own lse; of any floating dtype
lse1, lse2  [B, H, S]  -inf where a part saw no key
o  [B, H, S, D]        in the accumulator's dtype: float32, or float64 when o1 is; cast it once, behind the last merge
lse  [B, H, S]
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shardlib.ops.attention.variant import accumulator


def merge(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """The result over the keys of both parts, new tensors."""
    wide = accumulator(o1.dtype)
    return torch.lerp(o1.to(wide), o2.to(wide), _share(lse1, lse2)), torch.logaddexp(lse1, lse2)


def merge_(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """The same, written over o1 and lse1; o1 must be in the accumulator's dtype."""
    o1.lerp_(o2.to(o1.dtype), _share(lse1, lse2))
    torch.logaddexp(lse1, lse2, out=lse1)
    return o1, lse1


def written_out(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """The same in plain ops, which have tangents and gradients of every order, in rows without a key, too."""
    wide, first, second = accumulator(o1.dtype), _share(lse2, lse1), _share(lse1, lse2)
    dead = lse1.isneginf() & lse2.isneginf()
    lse = torch.logaddexp(*(x.masked_fill(dead, 0) for x in (lse1, lse2))).masked_fill(dead, -math.inf)
    return first * o1.to(wide) + second * o2.to(wide), lse


def _share(lse1: Tensor, lse2: Tensor) -> Tensor:
    """The second part's share of the probability, `[B, H, S, 1]`; 0 where neither saw a key."""
    apart = (lse2 - lse1).nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    return torch.sigmoid(apart)[..., None]


class Merge(torch.autograd.Function):
    """`shardlib::attention_merge`, differentiable in all four."""

    generate_vmap_rule = True

    @staticmethod
    def forward(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> Any:
        return torch.ops.shardlib.attention_merge(o1, lse1, o2, lse2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor, grad_lse: Tensor) -> tuple[Tensor, ...]:
        o1, lse1, o2, lse2 = ctx.saved_tensors
        second = _share(lse1, lse2)
        first = _share(lse2, lse1)
        moved = (grad_o * (o2.to(grad_o.dtype) - o1.to(grad_o.dtype))).sum(-1, keepdim=True) * first * second
        d1, d2 = first * grad_lse[..., None] - moved, second * grad_lse[..., None] + moved
        return (first * grad_o).to(o1.dtype), d1[..., 0], (second * grad_o).to(o2.dtype), d2[..., 0]
