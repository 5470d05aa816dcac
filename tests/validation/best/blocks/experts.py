"""Mixtures of experts that are cut by expert: tokens are summed up once, weights stay where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from tests.validation.best import Row, bf16, exchanged, f32, gathered, reduced

T, D, H, E, K, C = 8192, 1024, 2048, 16, 2, 64  # tokens, features, hidden ones, experts, of each token, of each expert
TOKENS = T * D * 2  # bytes
ROUTES = T * K * 2
MESH = {"expert": 8}


def _experts(x: Tensor, router: Tensor, up: Tensor, gate: Tensor, down: Tensor, bias: Tensor | None = None) -> Tensor:
    """No token is dropped: rows in the order of their experts, back again, and their sum with weights."""
    weights, chosen = (x @ router).softmax(-1).topk(K, -1)
    chosen, order = chosen.flatten().sort()
    ends = (chosen[:, None] == torch.arange(E)).sum(0).cumsum(0, dtype=torch.int32)
    rows = x[order // K]
    gated = F.silu(torch._grouped_mm(rows, gate, ends)) * torch._grouped_mm(rows, up, ends)
    out = torch._grouped_mm(gated, down, ends)
    out = out if bias is None else out + bias[chosen]
    out = out * weights.flatten()[order][:, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(T * K)
    return out[back].view(T, K, D).sum(1)


def _loss(*args: Tensor) -> Tensor:
    return (_experts(*args) ** 2).mean()


ARGS = (bf16(T, D), bf16(D, E), bf16(E, D, H), bf16(E, D, H), bf16(E, H, D))
WEIGHTS = ("e@expert _ _",) * 3
FEATURES = ("...", "...", "_ _ h@expert", "_ _ h@expert", "_ h@expert _")
G, S = 8, 512  # groups of tokens, and tokens in each


def _gshard(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Lepikhin et al. 2020, arXiv:2006.16668: a mask sends every token to a place of one expert, or to none."""
    weight, chosen = (x @ router).softmax(-1).max(-1)
    mask = (chosen[..., None] == torch.arange(E)).to(x.dtype)
    place = (mask.cumsum(1) - 1) * mask
    there = (place[..., None] == torch.arange(C)).to(x.dtype) * mask[..., None]
    rows = torch.einsum("gsec,gsd->gecd", there, x)
    hidden = torch.einsum("gecd,edh->gech", rows, up).relu()
    out = torch.einsum("gech,ehd->gecd", hidden, down)
    return torch.einsum("gsec,gecd->gsd", there * weight[..., None, None], out)


DENSE = (f32(G, S, D), f32(D, E), f32(E, D, H), f32(E, H, D))
ROWS_OF_ALL = G * E * C * D * 4  # bytes of what experts are sent


def _row(name: str, program: Callable[..., Any], nbytes: float, collectives: int, x: str = "...", **more: Any) -> Row:
    specs = more.pop("specs", (x, "...", *WEIGHTS))
    return Row(name, program, more.pop("args", ARGS), specs, more.pop("mesh", MESH), nbytes, collectives, **more)


ROWS = [
    _row("experts cut 8 ways", _experts, reduced(TOKENS, 8), 1),
    # The sum of the result, that of the tokens' gradient, and of the routes' gradient.
    _row("gradient of experts cut 8 ways", sl.grad(_loss, (0, 1, 2, 3, 4)),
        2 * reduced(TOKENS, 8) + reduced(ROUTES, 8), 3),
    _row("gradient of experts with biases", sl.grad(_loss, (0, 1, 2, 3, 4, 5)),
        2 * reduced(TOKENS, 8) + reduced(ROUTES, 8) + gathered(E * D * 2, 8), 4,
        args=(*ARGS, bf16(E, D)), specs=("...", "...", *WEIGHTS, "e@expert _")),
    _row("experts, tokens cut over the same axis", _experts, 2 * gathered(TOKENS, 8), 2,
        "t@expert _", out_specs="t@expert _"),
    # Tokens cut, and experts whole, or over another axis: every device sorts its own.
    _row("experts, tokens cut over another axis", _experts, reduced(TOKENS / 4, 8), 1,
        "t@data _", mesh={"data": 4, "expert": 8}, out_specs="t@data _"),
    _row("gradient of experts under data parallelism", sl.grad(_loss, (0, 1, 2, 3, 4)),
        reduced(3 * E * D * H * 2 + D * E * 2, 8), 4, specs=("t@data _", *["..."] * 4), mesh={"data": 8}),
    # Hidden features cut, as Megatron does it: what is added up are tokens, behind their experts.
    _row("experts' features cut 8 ways", _experts, reduced(TOKENS, 8), 1, specs=FEATURES),
    _row("gradient of experts whose features are cut", sl.grad(_loss, (0, 1, 2, 3, 4)),
        2 * reduced(TOKENS, 8) + reduced(ROUTES, 8), 3, specs=FEATURES),
    _row("GShard, tokens cut over the same axis", _gshard, 2 * exchanged(ROWS_OF_ALL, 8), 2, args=DENSE,
        specs=("g@expert _ _", "...", "e@expert _ _", "e@expert _ _"), out_specs="g@expert _ _"),
    _row("GShard, tokens over another axis", _gshard, reduced(G * S * D * 4 / 4, 8), 1, args=DENSE,
        specs=("g@data _ _", "...", "e@expert _ _", "e@expert _ _"), mesh={"data": 4, "expert": 8},
        out_specs="g@data _ _"),
]  # fmt: skip
