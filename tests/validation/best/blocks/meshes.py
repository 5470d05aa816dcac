"""Blocks and steps on meshes of several axes and of many devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from tests.validation.best import Row, exchanged, f32, gathered, ints, reduced

X = {"x": 8}


def _of_loss(program: Callable[..., Tensor], *which: int) -> Callable[..., Any]:
    return sl.grad(lambda *args: program(*args).sin().sum(), which or 0)


DT = {"data": 4, "tensor": 4}
CUBE = {"pod": 2, "data": 2, "tensor": 2}
S64 = {"x": 64}
B, S, D, H, FF = 16, 512, 1024, 16, 4096
E = D // H
N = B * S
ACT = N * D * 4


def _block(
    x: Tensor, g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, h: Tensor, up: Tensor, down: Tensor
) -> Any:
    n = lambda x, g: x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt() * g
    y = n(x, g)
    qq, kk, vv = ((y @ w).unflatten(-1, (H, E)).transpose(1, 2) for w in (q, k, v))
    x = x + F.scaled_dot_product_attention(qq, kk, vv, is_causal=True).transpose(1, 2).flatten(2) @ o
    return x + F.gelu(n(x, h) @ up) @ down


BL = (f32(B, S, D), f32(D), *[f32(D, D)] * 4, f32(D), f32(D, FF), f32(FF, D))
WB = (4 * D * D + 2 * D * FF) * 4
V = 32768


def _ema(w: Tensor, m: Tensor, x: Tensor, y: Tensor) -> Any:
    g = torch.func.grad(lambda w: F.cross_entropy(x @ w, y))(w)
    w = w - 0.1 * g
    return (w, 0.999 * m + 0.001 * w)


def _swiglu_moe(x: Tensor, r: Tensor, g: Tensor, u: Tensor, d: Tensor) -> Any:
    p, i = (x @ r).softmax(-1).topk(2, -1)
    w = torch.zeros(len(x), 16).scatter(1, i, p)
    h = F.silu(torch.einsum("nd,edf->enf", x, g)) * torch.einsum("nd,edf->enf", x, u)
    return torch.einsum("enf,efd,ne->nd", h, d, w)


def _switch(x: Tensor, r: Tensor, up: Tensor, down: Tensor, C: int = 1024) -> Any:
    p, i = (x @ r).softmax(-1).max(-1)
    oh = F.one_hot(i, 8)
    pos = (oh.cumsum(0) - 1).gather(1, i[:, None])[:, 0]
    ok = pos < C
    slot = torch.where(ok, i * C + pos, 8 * C)
    buf = torch.zeros(8 * C + 1, x.shape[1]).index_add(0, slot, x)[:-1].view(8, C, -1)
    y = torch.bmm(F.gelu(torch.bmm(buf, up)), down).flatten(0, 1)
    y = torch.cat([y, torch.zeros(1, y.shape[1])])
    return y[slot] * p[:, None]


def _aux(x: Tensor, r: Tensor) -> Any:
    p = (x @ r).softmax(-1)
    i = p.argmax(-1)
    return 16 * (F.one_hot(i, 16).float().mean(0) * p.mean(0)).sum() + 0.001 * (x @ r).logsumexp(-1).square().mean()


def _kd(s: Tensor, t: Tensor, x: Tensor, y: Tensor) -> Any:
    a = x @ s
    b = (x @ t).detach()
    return F.cross_entropy(a, y) + 4 * F.kl_div(
        (a / 2).log_softmax(-1), (b / 2).log_softmax(-1), log_target=True, reduction="batchmean"
    )


def _hidden_kd(s: Tensor, t: Tensor, p: Tensor, x: Tensor) -> Any:
    return F.mse_loss(F.gelu(x @ s) @ p, F.gelu(x @ t).detach())


def _accum(w: Tensor, u: Tensor, xs: Tensor, ys: Tensor) -> Any:
    gw = gu = 0
    for x, y in zip(xs.unbind(0), ys.unbind(0), strict=True):
        a, b = torch.func.grad(lambda w, u, x=x, y=y: F.cross_entropy(F.gelu(x @ w) @ u, y), (0, 1))(w, u)
        gw = gw + a
        gu = gu + b
    return (w - 0.1 * gw / 4, u - 0.1 * gu / 4)


def _adamw(ps: Tensor, gs: Tensor, ms: Tensor, vs: Tensor, t: Tensor) -> Any:
    out = []
    n = reduce(torch.add, [g.square().sum() for g in gs]).sqrt()
    c = (1 / (n + 1e-6)).clamp(max=1)
    for p, g, m, v in zip(ps, gs, ms, vs, strict=True):
        g = g * c
        m = 0.9 * m + 0.1 * g
        v = 0.95 * v + 0.05 * g * g
        out.append((p * (1 - 0.0001) - 0.001 * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8), m, v))
    return out


P3 = [f32(D, FF), f32(FF, D), f32(D)]


def _lookup(x: Tensor, keys: Tensor, values: Tensor) -> Any:
    s = x @ keys
    w, i = s.topk(4, -1)
    w = w.softmax(-1)
    return (values[i] * w[..., None]).sum(1)


def _colbert_loss(q: Tensor, d: Tensor) -> Any:
    s = torch.einsum("qie,dje->qdij", q, d).amax(-1).sum(-1)
    return F.cross_entropy(s, torch.arange(len(q)))


def _tp_vit_head(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Any:
    return F.cross_entropy(F.layer_norm(x.mean(1), (D,)) @ w + b, y)


def _kvquant(x: Tensor, k: Tensor, s: Tensor, v: Tensor, t: Tensor, q: Tensor, o: Tensor) -> Any:
    qq = (x @ q).view(32, H, 1, E)
    kk = k.float() * s
    vv = v.float() * t
    return F.scaled_dot_product_attention(qq, kk, vv).reshape(32, D) @ o


I8 = torch.empty(32, H, 2048, E, dtype=torch.int8, device="meta")


def _w8a8(x: Tensor, w: Tensor, s: Tensor) -> Any:
    a = x.abs().amax(-1, keepdim=True) / 127
    q = (x / a).round().clamp(-128, 127)
    return q @ w.float() * a * s


def _lora_moe(x: Tensor, w: Tensor, a: Tensor, b: Tensor, r: Tensor) -> Any:
    g = (x @ r).softmax(-1)
    return x @ w + torch.einsum("nd,edr,erf,ne->nf", x, a, b, g)


def _galore_svd(x: Tensor, w: Tensor, y: Tensor) -> Any:
    g = torch.func.grad(lambda w: F.mse_loss(x @ w, y))(w)
    p = torch.linalg.svd(g, full_matrices=False)[0][:, :16]
    return w - 0.1 * p @ (p.t() @ g)


def _soap(g: Tensor, ql: Tensor, qr: Tensor, m: Tensor, v: Tensor) -> Any:
    r = torch.einsum("lij,lia,ljb->lab", g, ql, qr)
    m = 0.9 * m + 0.1 * g
    v = 0.99 * v + 0.01 * r * r
    u = torch.einsum("lij,lia,ljb->lab", m, ql, qr) / (v.sqrt() + 1e-8)
    return (torch.einsum("lab,lia,ljb->lij", u, ql, qr), m, v)


SO = (f32(16, 512, 512),) * 5


def _shampoo(g: Tensor, l: Tensor, r: Tensor) -> Any:
    l, r = 0.9 * l + g @ g.mT, 0.9 * r + g.mT @ g

    def root(a: Any) -> Any:
        w, q = torch.linalg.eigh(a)
        return q * w.clamp(min=1e-6).pow(-0.25)[..., None, :] @ q.mT

    return (root(l) @ g @ root(r), l, r)


ROWS = [
    Row("block, 2x2x2: pods and data and tensor", _of_loss(_block, *range(1, 9)), BL,
        ("b@(pod data) s d", "d", *["d h@tensor"] * 3, "h@tensor d", "d", "d f@tensor", "f@tensor d"), CUBE,
        3 * reduced(ACT / 4, 2) + reduced(WB / 2, 4) + 2 * reduced(D * 4, 4), 3 + 8),
    Row("block, HSDP", _of_loss(_block, *range(1, 9)), (f32(128, S, D), *BL[1:]),
        ("b@(pod data) s d", "d", *["d@data h"] * 3, "h@data d", "d", "d@data f", "f@data d"), {"pod": 4, "data": 4},
        2 * gathered(WB, 4) + reduced(WB / 4, 4) + 2 * reduced(D * 4, 16), 6 + 6 + 6 + 2),
    Row("block, FSDP on 64", _of_loss(_block, *range(1, 9)), (f32(1024, S, D), *BL[1:]),
        ("b@x s d", "d@x", *["d@x h"] * 3, "h@x d", "d@x", "d@x f", "f@x d"), S64, 2 * gathered(WB + 2 * D * 4, 64),
        16),
    Row("block, data and sequence and heads (Ulysses)", _block, BL, ("b@data s@tensor d", *["..."] * 8), DT,
        4 * exchanged(ACT / 4, 4), 4),
    Row("EMA of weights, ZeRO-1", _ema, (f32(D, 1024), f32(D, 1024), f32(N, D), ints(N)),
        ("d e", "d@x e", "n@x d", "n@x"), X, 2 * gathered(D * 1024 * 4, 8) + 7, 3, out_specs=("d e", "d@x e")),
    Row("dense mixture with a mask, experts cut, tokens cut", _swiglu_moe,
        (f32(2048, D), f32(D, 16), *[f32(16, D, D)] * 3), ("n@x d", "...", "e@x d f", "e@x d f", "e@x f d"), X,
        2 * gathered(2048 * D * 4, 8) + 0, 2, out_specs="n@x d"),
    Row("dense mixture with a mask, experts and hidden cut", _swiglu_moe,
        (f32(2048, D), f32(D, 16), *[f32(16, D, D)] * 3),
        ("n d", "...", "e@data d f@tensor", "e@data d f@tensor", "e@data f@tensor d"), DT, reduced(2048 * D * 4, 16),
        1, out_specs="n d"),
    Row("Switch by slots, experts cut", _switch, (f32(4096, D), f32(D, 8), f32(8, D, FF), f32(8, FF, D)),
        ("n d", "...", "e@x d f", "e@x f d"), X, gathered(8192 * D * 4, 8), 1, out_specs="n d"),
    Row("Switch by slots, experts and tokens cut", _switch, (f32(4096, D), f32(D, 8), f32(8, D, FF), f32(8, FF, D)),
        ("n@x d", "...", "e@x d f", "e@x f d"), X, 2 * gathered(4096 * D * 4, 8) + gathered(4096 * 8, 8), 4,
        out_specs="n@x d"),
    Row("balance of experts and z-loss of a router, tokens cut", sl.grad(_aux, (1,)), (f32(N, D), f32(D, 16)),
        ("n@x d", "..."), X, reduced(D * 16 * 4, 8) + reduced(16 * 8, 8), 2),
    Row("distillation with temperature, vocabulary cut", sl.grad(_kd),
        (f32(D, V), f32(D, V), f32(2048, D), ints(2048)), ("d v@x", "d v@x", "n d", "n"), X,
        6 * reduced(2048 * 4, 8), 6),
    Row("distillation of hidden states, Megatron", sl.grad(_hidden_kd, (0, 2)),
        (f32(D, 2048), f32(D, FF), f32(2048, FF), f32(2048, D)), ("d f@x", "d f@x", "f@x g", "n d"), X,
        2 * exchanged(2048 * FF * 4, 8) + 2 * gathered(2048 * 2048 * 4, 8), 4),
    Row("four accumulated cross entropies, data parallel", _accum,
        (f32(D, FF), f32(FF, 256), f32(4, 1024, D), ints(4, 1024)), ("...", "...", "a n@x d", "a n@x"), X,
        reduced((D * FF + FF * 256) * 4, 8) + 4 * 7, 6),
    Row("AdamW with clipping, rows cut", _adamw, (P3, P3, P3, P3, f32()), (["d@x f", "f@x d", "d@x"],) * 4 + ("",),
        X, reduced(4, 8), 1),
    Row("AdamW with clipping, tensor cut and norms whole", _adamw, (P3, P3, P3, P3, f32()),
        (["d f@x", "f@x d", "d"],) * 4 + ("",), X, reduced(4, 8), 1),
    Row("memory layer, keys and values cut", _lookup, (f32(1024, 256), f32(256, 65536), f32(65536, 256)),
        ("n d", "d k@x", "k@x e"), X, gathered(1024 * 32 * 12, 8) + reduced(1024 * 256 * 4, 8), 3, out_specs="n e"),
    Row("gradients of late interaction, batch cut", sl.grad(_colbert_loss, (0, 1)),
        (f32(64, 32, 128), f32(64, 128, 128)), ("q@x i e", "d@x j e"), X,
        2 * gathered(64 * 32 * 128 * 4, 8) + 2 * reduced(64 * 4, 8), 4),
    Row("gradients of a pooled head, tokens cut", sl.grad(_tp_vit_head, (0, 1, 2)),
        (f32(B, S, D), f32(D, 1000), f32(1000), ints(B)), ("b s@x d", "...", "...", "b"), X, reduced(B * D * 4, 8),
        1, work=7),
    Row("decoding with a cache of eight bits, heads cut", _kvquant,
        (f32(32, D), I8, f32(32, H, 2048, 1), I8, f32(32, H, 2048, 1), f32(D, D), f32(D, D)),
        ("b d", *["b h@x t e"] * 4, "d h@x", "h@x d"), X, reduced(32 * D * 4, 8), 1, out_specs="b d"),
    Row("decoding with a cache of eight bits, cut in time", _kvquant,
        (f32(32, D), I8, f32(32, H, 2048, 1), I8, f32(32, H, 2048, 1), f32(D, D), f32(D, D)),
        ("b d", *["b h t@x e"] * 4, "...", "..."), X, reduced(32 * D * 4, 8) + 2 * reduced(32 * H * 4, 8), 3,
        out_specs="b d", work=2.4),
    Row("activations of eight bits by token, rows cut", _w8a8,
        (f32(N, FF), torch.empty(FF, D, dtype=torch.int8, device="meta"), f32(D)), ("n f@x", "f@x d", "d"), X,
        reduced(ACT, 8) + reduced(N * 4, 8), 2, out_specs="n d"),
    Row("gradients of a mixture of adapters, data parallel", _of_loss(_lora_moe, 2, 3, 4),
        (f32(N, D), f32(D, D), f32(4, D, 8), f32(4, 8, D), f32(D, 4)), ("n@x d", *["..."] * 4), X,
        reduced((4 * 8 * 2 * D + 4 * D) * 4, 8), 3),
    Row("GaLore with a new basis, data parallel", _galore_svd, (f32(N, 512), f32(512, 512), f32(N, 512)),
        ("n@x d", "...", "n@x e"), X, reduced(512 * 512 * 4, 8), 1, work=1.15),
    Row("SOAP, stack cut", _soap, SO, ("l@x i j",) * 5, X),
    Row("SOAP, gradients cut by rows, states by matrix", _soap, SO,
        ("l i@x j", "l@x i a", "l@x j b", "l i@x j", "l@x a b"), X, exchanged(16 * 512 * 512 * 4, 8) * 3, 3,
        out_specs=("l i@x j", "l i@x j", "l@x a b")),
    Row("Shampoo, gradients cut by rows, states by matrix", _shampoo, SO[:3], ("l i@x j", "l@x a b", "l@x a b"), X,
        2 * exchanged(16 * 512 * 512 * 4, 8), 2, out_specs=("l i@x j", "l@x a b", "l@x a b")),
]  # fmt: skip
