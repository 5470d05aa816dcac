"""Merges two partial results of attention, over different keys for the same queries, by their log-sum-exps.

o1, o2  [B, H, S, D]   partial outputs, each normalized by its own lse; of any floating dtype
lse1, lse2  [B, H, S]  -inf where a part saw no key
o  [B, H, S, D]        in the accumulator's dtype: float32, or float64 if o1 is; cast it once, after the last merge
lse  [B, H, S]
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shardlib.ops.attention.variant import accumulator


def merge(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the result over the keys of both parts, in new tensors."""
    wide = accumulator(o1.dtype)
    return torch.lerp(o1.to(wide), o2.to(wide), _second_share(lse1, lse2)), torch.logaddexp(lse1, lse2)


def merge_(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Merges in place into o1 and lse1; o1 must be in the accumulator's dtype."""
    o1.lerp_(o2.to(o1.dtype), _second_share(lse1, lse2))
    torch.logaddexp(lse1, lse2, out=lse1)
    return o1, lse1


def merge_with_plain_ops(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Merges in plain ops, which have tangents and gradients of every order, also in rows without a key."""
    wide, first, second = accumulator(o1.dtype), _second_share(lse2, lse1), _second_share(lse1, lse2)
    dead = lse1.isneginf() & lse2.isneginf()
    lse = torch.logaddexp(*(x.masked_fill(dead, 0) for x in (lse1, lse2))).masked_fill(dead, -math.inf)
    return first * o1.to(wide) + second * o2.to(wide), lse


def _second_share(lse1: Tensor, lse2: Tensor) -> Tensor:
    """Returns the second part's share of the probability, `[B, H, S, 1]`; 0 where neither part saw a key."""
    difference = (lse2 - lse1).nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    return torch.sigmoid(difference)[..., None]


class Merge(torch.autograd.Function):
    """`shardlib::attention_merge`, differentiable in all four inputs."""

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
        second = _second_share(lse1, lse2)
        first = _second_share(lse2, lse1)
        shift = (grad_o * (o2.to(grad_o.dtype) - o1.to(grad_o.dtype))).sum(-1, keepdim=True) * first * second
        d1, d2 = first * grad_lse[..., None] - shift, second * grad_lse[..., None] + shift
        return (first * grad_o).to(o1.dtype), d1[..., 0], (second * grad_o).to(o2.dtype), d2[..., 0]
