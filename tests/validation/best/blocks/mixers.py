"""Mixers of tokens beside plain attention, over a cut sequence, cut heads, and caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from tests.validation.best import Row, exchanged, f32, gathered, ints, reduced

X = {"x": 8}


def _of_loss(program: Callable[..., Tensor], *which: int) -> Callable[..., Any]:
    return sl.grad(lambda *args: program(*args).sin().sum(), which or 0)


B, S, D, H = 4, 2048, 1024, 16
E = D // H
ACT = B * S * D * 4
N = B * S


def _mla(
    x: Tensor, dkv: Tensor, dq: Tensor, kr: Tensor, uk: Tensor, uv: Tensor, uq: Tensor, qr: Tensor, o: Tensor
) -> Any:
    c = x @ dkv
    ql = x @ dq
    k = (c @ uk).unflatten(-1, (H, E))
    v = (c @ uv).unflatten(-1, (H, E))
    q = (ql @ uq).unflatten(-1, (H, E))
    rope = (x @ kr)[:, :, None].expand(-1, -1, H, -1)
    rq = (ql @ qr).unflatten(-1, (H, 32))
    k = torch.cat([k, rope], -1)
    q = torch.cat([q, rq], -1)
    y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
    return y.transpose(1, 2).flatten(2) @ o


MLA = (
    f32(B, S, D),
    f32(D, 256),
    f32(D, 384),
    f32(D, 32),
    f32(256, D),
    f32(256, D),
    f32(384, D),
    f32(384, H * 32),
    f32(D, D),
)
MS = "b s d", "...", "...", "...", *["r h@x"] * 4, "h@x d"


def _linformer(x: Tensor, ek: Tensor, ev: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Any:
    qq = (x @ q).unflatten(-1, (H, E)).transpose(1, 2)
    kk, vv = (
        torch.einsum("sr,bsd->brd", e, x @ w).unflatten(-1, (H, E)).transpose(1, 2) for e, w in ((ek, k), (ev, v))
    )
    return F.scaled_dot_product_attention(qq, kk, vv).transpose(1, 2).flatten(2) @ o


LF = (f32(B, S, D), f32(S, 256), f32(S, 256), *[f32(D, D)] * 4)


def _mixer(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Any:
    x = x + (F.gelu(F.layer_norm(x, (D,)).mT @ a) @ b).mT
    return x + F.gelu(F.layer_norm(x, (D,)) @ c) @ d


MX = (f32(32, 256, D), f32(256, 512), f32(512, 256), f32(D, 4 * D), f32(4 * D, D))
MXA = 32 * 256 * D * 4


def _gmlp(x: Tensor, u: Tensor, w: Tensor, bias: Tensor, o: Tensor) -> Any:
    a, b = F.gelu(x @ u).chunk(2, -1)
    b = torch.einsum("st,btd->bsd", w, F.layer_norm(b, (D,))) + bias[:, None]
    return x + a * b @ o


def _segsum(a: Tensor) -> Any:
    T = a.size(-1)
    c = a.cumsum(-1)
    s = c[..., :, None] - c[..., None, :]
    return s.masked_fill(~torch.ones(T, T).bool().tril(), -torch.inf)


def _ssd(x: Tensor, a: Tensor, b: Tensor, c: Tensor, size: int = 64) -> Any:
    x, a, b, c = (v.unflatten(1, (-1, size)) for v in (x, a, b, c))
    a = a.permute(0, 3, 1, 2)
    ac = a.cumsum(-1)
    y = torch.einsum("bcln,bcsn,bhcls,bcshp->bclhp", c, b, _segsum(a).exp(), x)
    st = torch.einsum("bcln,bhcl,bclhp->bchpn", b, (ac[..., -1:] - ac).exp(), x)
    st = torch.cat([torch.zeros_like(st[:, :1]), st], 1)
    dec = _segsum(F.pad(ac[..., -1], (1, 0))).exp()
    st = torch.einsum("bhzc,bchpn->bzhpn", dec, st)[:, :-1]
    return (y + torch.einsum("bcln,bchpn,bhcl->bclhp", c, st, ac.exp())).flatten(1, 2)


SS = (f32(2, 2048, 16, 32), f32(2, 2048, 16), f32(2, 2048, 16), f32(2, 2048, 16))
ST = 2 * 32 * 16 * 32 * 16 * 4


def _mingru(x: Tensor, wz: Tensor, wh: Tensor) -> Any:
    k = x @ wz
    lz, lc = (-F.softplus(-k), -F.softplus(k))
    lh = (x @ wh).abs().add(0.001).log()
    a = lc.cumsum(1)
    return (a + (lz + lh - a).logcumsumexp(1)).exp()


def _s4d(x: Tensor, la: Tensor, c: Tensor, dt: Tensor) -> Any:
    t = torch.arange(x.shape[1])
    a = -la.exp() * dt.exp()[:, None]
    k = (c[..., None] * torch.exp(a[..., None] * t)).sum(1)
    n = 2 * x.shape[1]
    return torch.fft.irfft(torch.fft.rfft(x.mT, n) * torch.fft.rfft(k, n), n)[..., : x.shape[1]].mT


S4 = (f32(B, S, 256), f32(256, 16), f32(256, 16), f32(256))


def _gqa(x: Tensor, kc: Tensor, vc: Tensor, wq: Tensor, wo: Tensor) -> Any:
    q = (x @ wq).view(len(x), H, 1, E)
    return F.scaled_dot_product_attention(q, kc, vc, enable_gqa=True).reshape(len(x), D) @ wo


def _rolling(x: Tensor, kc: Tensor, vc: Tensor, pos: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor) -> Any:
    q, k, v = ((x @ w).view(len(x), H, 1, E) for w in (wq, wk, wv))
    Wn = kc.shape[2]
    kc = kc.index_copy(2, pos % Wn, k)
    vc = vc.index_copy(2, pos % Wn, v)
    m = torch.arange(Wn) <= pos
    return (F.scaled_dot_product_attention(q, kc, vc, attn_mask=m[None, None, None]).reshape(len(x), D) @ wo, kc, vc)


RO = (f32(32, D), *[f32(32, H, 1024, E)] * 2, ints(1), *[f32(D, D)] * 4)


def _t5(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Any:
    i = (torch.arange(512)[:, None] - torch.arange(512)).clamp(-16, 15) + 16
    return F.scaled_dot_product_attention(q, k, v, attn_mask=table[i].permute(2, 0, 1)[None])


T5 = (*[f32(B, H, 512, E)] * 3, f32(32, H))


def _alibi(q: Tensor, k: Tensor, v: Tensor) -> Any:
    m = 2.0 ** (-8 * torch.arange(1, H + 1) / H)
    d = torch.arange(512) - torch.arange(512)[:, None]
    b = (m[:, None, None] * d).masked_fill(d > 0, -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=b)


def _diffatt(q: Tensor, k: Tensor, v: Tensor, lam: Tensor) -> Any:
    q1, q2 = q.chunk(2, -1)
    k1, k2 = k.chunk(2, -1)
    s = lambda q, k: (torch.einsum("bhqe,bhke->bhqk", q, k) / 8).softmax(-1)
    y = torch.einsum("bhqk,bhke->bhqe", s(q1, k1) - lam * s(q2, k2), v)
    return F.rms_norm(y, (E,)) * (1 - 0.8)


def _talking(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Any:
    s = torch.einsum("bhqe,bhke->bhqk", q, k)
    s = torch.einsum("bhqk,hg->bgqk", s, a).softmax(-1)
    return torch.einsum("bhqk,bhke->bhqe", torch.einsum("bgqk,gh->bhqk", s, b), v)


def _sink(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Any:
    a = torch.cat(
        [torch.einsum("bhqe,bhke->bhqk", q, k), s.view(1, -1, 1, 1).expand(len(q), -1, q.shape[2], 1)], -1
    ).softmax(-1)[..., :-1]
    return torch.einsum("bhqk,bhke->bhqe", a, v)


def _performer(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    f = lambda t: (t @ w - t.square().sum(-1, keepdim=True) / 2).exp()
    q, k = (f(q), f(k))
    return q @ (k.mT @ v) / (q @ k.sum(2, keepdim=True).mT)


def _delta(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Any:
    st, out = (torch.zeros(len(q), H, E, E), [])
    for t in range(4):
        kt = k[:, t]
        st = st + torch.einsum(
            "bhe,bhf->bhef", kt, b[:, t, :, None] * (v[:, t] - torch.einsum("bhef,bhe->bhf", st, kt))
        )
        out.append(torch.einsum("bhef,bhe->bhf", st, q[:, t]))
    return torch.stack(out, 1)


def _hyena(x: Tensor, w: Tensor, k: Tensor) -> Any:
    a, b, c = (x @ w).chunk(3, -1)
    n = 2 * S
    y = torch.fft.irfft(torch.fft.rfft(a * b, n, dim=1) * torch.fft.rfft(k, n, dim=0), n, dim=1)[:, :S]
    return y * c


def _conformer(x: Tensor, u: Tensor, w: Tensor, o: Tensor) -> Any:
    a, b = (x @ u).chunk(2, -1)
    h = (a * b.sigmoid()).mT
    h = F.conv1d(h, w, padding=15, groups=256)
    h = F.silu(F.batch_norm(h, None, None, training=True)).mT
    return x + h @ o


def _chunked(q: Tensor, k: Tensor, v: Tensor, start: Tensor) -> Any:
    i = start + torch.arange(q.shape[2])
    m = torch.arange(k.shape[2]) <= i[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=m)


ROWS = [
    Row("multi-head latent attention, heads cut", _mla, MLA, MS, X, reduced(ACT, 8), 1, out_specs="b s d", work=1.6),
    Row("gradients of multi-head latent attention, heads cut", _of_loss(_mla, *range(9)), MLA, MS, X,
        reduced(ACT, 8) + reduced(N * (256 + 384 + 32) * 4, 8), 4, work=1.6),
    Row("Linformer, sequence cut", _linformer, LF, ("b s@x d", "s@x r", "s@x r", *["..."] * 4), X,
        2 * reduced(B * 256 * D * 4, 8), 2),
    Row("gradients of Linformer, sequence cut", _of_loss(_linformer, *range(7)), LF,
        ("b s@x d", "s@x r", "s@x r", *["..."] * 4), X, 4 * reduced(B * 256 * D * 4, 8) + 4 * reduced(D * D * 4, 8),
        8),
    Row("MLP-Mixer, tokens cut", _mixer, MX, ("b s@x d", *["..."] * 4), X, 2 * exchanged(MXA, 8), 2,
        out_specs="b s@x d"),
    Row("gradients of MLP-Mixer, tokens cut", _of_loss(_mixer, *range(5)), MX, ("b s@x d", *["..."] * 4), X,
        2 * exchanged(MXA, 8) + reduced((2 * 256 * 512 + 8 * D * D) * 4, 8), 6),
    Row("gradients of MLP-Mixer, batch cut", _of_loss(_mixer, 1, 2, 3, 4), MX, ("b@x s d", *["..."] * 4), X,
        reduced((2 * 256 * 512 + 8 * D * D) * 4, 8), 4),
    Row("gMLP, sequence cut", _gmlp, (f32(32, 256, D), f32(D, 2 * D), f32(256, 256), f32(256), f32(D, D)),
        ("b s@x d", "...", "s@x t", "s@x", "..."), X, 2 * exchanged(MXA, 8) + gathered(256 * 256 * 4, 8), 3,
        out_specs="b s@x d"),
    Row("SSD by sums of segments, sequence cut", _ssd, SS, ("b l@x h p", "b l@x h", "b l@x n", "b l@x n"), X,
        2 * exchanged(ST, 8) + gathered(2 * 32 * 16 * 4, 8), 3),
    Row("gradients of SSD by sums of segments, heads cut", _of_loss(_ssd, 0, 1, 2, 3), SS,
        ("b l h@x p", "b l h@x", "b l n", "b l n"), X, 2 * reduced(2 * 2048 * 16 * 4, 8), 2, work=1.13),
    Row("minGRU as a parallel scan, sequence cut", _mingru, (f32(B, S, D), f32(D, D), f32(D, D)),
        ("b s@x d", "...", "..."), X, 2 * gathered(8 * B * D * 4, 8), 2),
    Row("gradients of S4D, channels cut", _of_loss(_s4d, 0, 1, 2, 3), S4, ("b s d@x", "d@x n", "d@x n", "d@x"), X),
    Row("S4D, sequence cut", _s4d, S4, ("b s@x d", *["..."] * 3), X, 2 * exchanged(B * S * 256 * 4, 8), 2,
        out_specs="b s@x d"),
    Row("decoding with two heads of keys, tensor 2 x data 4", _gqa,
        (f32(32, D), *[f32(32, 2, 4096, E)] * 2, f32(D, D), f32(D, D)),
        ("b@data d", "b@data h@tensor t e", "b@data h@tensor t e", "d h@tensor", "h@tensor d"),
        {"data": 4, "tensor": 2}, reduced(8 * D * 4, 2), 1, out_specs="b@data d"),
    Row("sliding window in a rolling cache, heads cut", _rolling, RO,
        ("b d", *["b h@x t e"] * 2, "_", *["d h@x"] * 3, "h@x d"), X, reduced(32 * D * 4, 8), 1,
        out_specs=("b d", None, None)),
    Row("sliding window in a rolling cache, batch cut", _rolling, RO,
        ("b@x d", *["b@x h t e"] * 2, "_", *["..."] * 4), X),
    Row("gradients of a relative bias, heads cut", _of_loss(_t5, 0, 1, 2, 3), T5, (*["b h@x s e"] * 3, "r h@x"), X),
    Row("gradient of a relative bias, batch cut", _of_loss(_t5, 3), (*[f32(8, H, 512, E)] * 3, f32(32, H)),
        (*["b@x h s e"] * 3, "..."), X, reduced(32 * H * 4, 8), 1),
    Row("linear biases of attention, heads cut", _alibi, (f32(B, H, 512, E),) * 3, ("b h@x s e",) * 3, X),
    Row("differential attention, heads cut", _diffatt, (*[f32(B, H, 512, E)] * 3, f32(H, 1, 1)),
        (*["b h@x s e"] * 3, "h@x _ _"), X),
    Row("talking heads, heads cut", _talking, (*[f32(B, H, 512, E)] * 3, f32(H, H), f32(H, H)),
        (*["b h@x s e"] * 3, "...", "..."), X, 2 * exchanged(B * H * 512 * 512 * 4, 8), 2, out_specs="b h@x s e"),
    Row("talking heads, queries cut", _talking, (*[f32(B, H, 512, E)] * 3, f32(H, H), f32(H, H)),
        ("b h s@x e", "b h s e", "b h s e", "...", "..."), X),
    Row("gradients of attention with sinks, heads cut", _of_loss(_sink, 0, 1, 2, 3),
        (*[f32(B, H, 512, E)] * 3, f32(H)), (*["b h@x s e"] * 3, "h@x"), X),
    Row("gradient of attention's sinks, batch cut", _of_loss(_sink, 3), (*[f32(8, H, 512, E)] * 3, f32(H)),
        (*["b@x h s e"] * 3, "..."), X, reduced(H * 4, 8), 1),
    Row("random-feature attention, sequence cut", _performer, (*[f32(B, H, S, E)] * 3, f32(E, 128)),
        (*["b h s@x e"] * 3, "..."), X, reduced(B * H * 128 * (E + 1) * 4, 8), 2),
    Row("gradients of the delta rule, heads cut", _of_loss(_delta, 0, 1, 2, 3),
        (*[f32(B, 4, H, E)] * 3, f32(B, 4, H)), (*["b t h@x e"] * 3, "b t h@x"), X),
    Row("Hyena, sequence cut", _hyena, (f32(B, S, 256), f32(256, 768), f32(S, 256)), ("b s@x d", "...", "..."), X,
        2 * exchanged(B * S * 256 * 4, 8), 2, out_specs="b s@x d"),
    Row("Conformer's convolutions, time cut", _conformer,
        (f32(B, S, 256), f32(256, 512), f32(256, 1, 31), f32(256, 256)), ("b s@x d", *["..."] * 3), X,
        2 * 15 * B * 256 * 4 + 2 * reduced(256 * 4, 8), 4),
    Row("cached prefixes reordered by beams",
        lambda c, i: c.unflatten(0, (-1, 4)).gather(1, i[..., None, None, None].expand(-1, -1, H, 64, E)).flatten(0, 1),
        (f32(128, H, 64, E), ints(32, 4)), ("b@x h t e", "b@x k"), X),
    Row("cached prefixes reordered by a flat index, heads cut", lambda c, i: c.index_select(0, i),
        (f32(128, H, 64, E), ints(128)), ("b h@x t e", "..."), X),
    Row("prefill of a chunk against its cache, heads cut", _chunked,
        (f32(B, H, 256, E), *[f32(B, H, 4096, E)] * 2, ints(1)), (*["b h@x s e"] * 3, "_"), X),
]  # fmt: skip
