"""Training of many kinds: margins, clouds of points, graphs, memories, autoencoders, policies."""

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


n, D, V = 4096, 512, 32768
N = 8192


def _arcface(w: Tensor, x: Tensor, y: Tensor) -> Any:
    s = F.normalize(x, dim=-1) @ F.normalize(w, dim=0)
    t = s.gather(1, y[:, None])
    return F.cross_entropy(30 * s.scatter(1, y[:, None], t - 0.35), y)


def _triplet(z: Tensor, y: Tensor) -> Any:
    d = torch.cdist(z, z)
    same = y[:, None] == y
    return F.relu(d.masked_fill(~same, -1000000000.0).amax(1) - d.masked_fill(same, 1000000000.0).amin(1) + 0.2).mean()


def _center(x: Tensor, y: Tensor, c: Tensor) -> Any:
    return (x - c[y]).square().sum(1).mean()


def _chamfer(a: Tensor, b: Tensor) -> Any:
    d = a.square().sum(-1)[:, :, None] + b.square().sum(-1)[:, None] - 2 * a @ b.mT
    return d.amin(2).mean() + d.amin(1).mean()


def _knnlm(h: Tensor, w: Tensor, d: Tensor, ids: Tensor) -> Any:
    p = (h @ w).softmax(-1)
    q = torch.zeros_like(p).scatter_add(1, ids, (-d).softmax(-1))
    return (0.75 * p + 0.25 * q).log()


def _mpnn(h: Tensor, e: Tensor, i: Tensor, j: Tensor, w: Tensor, u: Tensor) -> Any:
    m = F.relu(torch.cat([h[i], h[j], e], 1) @ w)
    a = torch.zeros(len(h), m.shape[1]).index_add(0, j, m)
    return F.relu(torch.cat([h, a], 1) @ u)


ND, EG = 1 << 14, 1 << 18
MP = (f32(ND, 64), f32(EG, 16), ints(EG), ints(EG), f32(144, 64), f32(128, 64))


def _edgesoft(h: Tensor, i: Tensor, j: Tensor, w: Tensor, a: Tensor) -> Any:
    z = h @ w
    s = F.leaky_relu((z @ a)[i] + (z @ a)[j])
    m = torch.full((len(h),), -torch.inf).scatter_reduce(0, j, s, "amax")
    p = (s - m[j]).exp()
    t = torch.zeros(len(h)).index_add(0, j, p)
    return torch.zeros_like(z).index_add(0, j, (p / t[j])[:, None] * z[i])


def _boost(g: Tensor, b: Tensor) -> Any:
    return (
        torch.zeros(64 * 256)
        .index_add(0, (b + 256 * torch.arange(64)).flatten(), g[:, None].expand(-1, 64).flatten())
        .view(64, 256)
    )


def _rbm(v: Tensor, w: Tensor, u: Tensor) -> Any:
    h = (v @ w).sigmoid()
    h = (h > u[0]).float()
    v2 = ((h @ w.t()).sigmoid() > u[1]).float()
    h2 = (v2 @ w).sigmoid()
    return w + 0.01 * (v.t() @ h - v2.t() @ h2) / len(v)


def _syncbn(x: Tensor, w: Tensor, g: Tensor, b: Tensor) -> Any:
    return F.relu(F.batch_norm(F.conv2d(x, w, padding=1), None, None, g, b, training=True))


def _autocorr(x: Tensor) -> Any:
    n = 2 * x.shape[-1]
    f = torch.fft.rfft(x - x.mean(-1, keepdim=True), n)
    return torch.fft.irfft(f * f.conj(), n)[..., : x.shape[-1]]


def _mttkrp(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Any:
    k = torch.einsum("ijk,jr,kr->ir", x, b, c)
    a = torch.linalg.solve(b.t() @ b * (c.t() @ c) + 0.001 * torch.eye(16), k.t()).t()
    k = torch.einsum("ijk,ir,kr->jr", x, a, c)
    b = torch.linalg.solve(a.t() @ a * (c.t() @ c) + 0.001 * torch.eye(16), k.t()).t()
    return (a, b)


def _ntm(x: Tensor, m: Tensor, k: Tensor, b: Tensor) -> Any:
    w = (b * F.cosine_similarity(k[:, None], m, dim=-1)).softmax(-1)
    r = torch.einsum("bn,bnd->bd", w, m)
    return (r, m + w[..., None] * x[:, None])


def _native(q: Tensor, k: Tensor, v: Tensor, bs: int = 64) -> Any:
    e = k.shape[-1]
    kb = k.unflatten(2, (-1, bs)).mean(3)
    i = torch.einsum("bhe,bhne->bhn", q, kb).topk(4, -1)[1]
    g = lambda t: t.unflatten(2, (-1, bs)).gather(2, i[..., None, None].expand(-1, -1, -1, bs, e)).flatten(2, 3)
    return F.scaled_dot_product_attention(q[:, :, None], g(k), g(v))


def _weightstd(x: Tensor, w: Tensor) -> Any:
    w = (w - w.mean((1, 2, 3), keepdim=True)) / w.std((1, 2, 3), keepdim=True)
    return F.conv2d(x, w, padding=1)


def _gatedtopk(x: Tensor, w: Tensor) -> Any:
    v, i = (x @ w).topk(8, -1)
    return torch.zeros(len(x), w.shape[1]).scatter(1, i, v.softmax(-1))


def _sae(x: Tensor, e: Tensor, d: Tensor, b: Tensor) -> Any:
    h = (x - b) @ e
    v, i = h.topk(32, -1)
    a = torch.zeros_like(h).scatter(1, i, F.relu(v))
    return (a @ d + b - x).square().sum(-1).mean()


def _l1sae(x: Tensor, e: Tensor, d: Tensor, b: Tensor) -> Any:
    a = F.relu((x - b) @ e)
    return (a @ d + b - x).square().sum(-1).mean() + 0.001 * a.sum(-1).mean()


def _vae(x: Tensor, e: Tensor, d: Tensor, eps: Tensor) -> Any:
    m, l = (x @ e).chunk(2, -1)
    z = m + (l / 2).exp() * eps
    return F.mse_loss(z @ d, x) + 0.5 * (m.square() + l.exp() - l - 1).mean()


def _hmm(x: Tensor, t: Tensor, e: Tensor) -> Any:
    a = e[:, x[:, 0]].t().log_softmax(-1)
    for k in range(1, 6):
        a = (a[:, :, None] + t.log_softmax(-1)).logsumexp(1) + e[:, x[:, k]].t()
    return -a.logsumexp(-1).mean()


def _reinforce(w: Tensor, x: Tensor, a: Tensor, r: Tensor) -> Any:
    lp = (x @ w).log_softmax(-1).gather(-1, a[..., None])[..., 0]
    ret = r.flip(1).cumsum(1).flip(1)
    b = ret.mean(0)
    return -(lp * (ret - b)).sum(1).mean()


def _sac(
    x: Tensor, a: Tensor, q1: Tensor, q2: Tensor, t1: Tensor, t2: Tensor, r: Tensor, x2: Tensor, a2: Tensor, lp: Tensor
) -> Any:
    q = lambda w, x, a: (F.relu(torch.cat([x, a], 1) @ w[0]) @ w[1])[:, 0]
    y = r + 0.99 * (torch.min(q(t1, x2, a2), q(t2, x2, a2)) - 0.2 * lp).detach()
    return F.mse_loss(q(q1, x, a), y) + F.mse_loss(q(q2, x, a), y)


QW = [f32(48, 256), f32(256, 1)]


def _deeponet(u: Tensor, y: Tensor, b: Tensor, t: Tensor) -> Any:
    return torch.einsum("np,mp->nm", F.gelu(u @ b), torch.tanh(y @ t))


def _adv(w: Tensor, u: Tensor, x: Tensor, y: Tensor) -> Any:
    f = lambda x: F.cross_entropy(F.gelu(x @ w) @ u, y, reduction="sum")
    d = 0.1 * torch.func.grad(f)(x).sign()
    return F.cross_entropy(F.gelu((x + d.detach()) @ w) @ u, y, reduction="sum")


def _eikonal(w: Tensor, u: Tensor, p: Tensor) -> Any:
    f = lambda q: (F.softplus(q @ w) @ u)[0]
    g = torch.func.vmap(torch.func.grad(f))(p)
    return (g.norm(dim=-1) - 1).square().mean()


ROWS = [
    Row("gradients with margins of angles, classes cut", sl.grad(_arcface, (0, 1)), (f32(D, V), f32(n, D), ints(n)),
        ("d v@x", "n d", "n"), X, 2 * reduced(n * 4, 8) + reduced(n * D * 4, 8), 3),
    Row("gradients with margins of angles, batch and classes cut", sl.grad(_arcface, (0, 1)),
        (f32(D, V), f32(n, D), ints(n)), ("d v@x", "n@x d", "n@x"), X,
        2 * gathered(n * D * 4, 8) + gathered(n * 8, 8) + 2 * reduced(n * 4, 8), 5),
    Row("hardest triplets of a batch, batch cut", _triplet, (f32(n, 128), ints(n)), ("n@x d", "n@x"), X,
        gathered(n * 128 * 4, 8) + gathered(n * 8, 8) + reduced(4, 8), 3),
    Row("gradient of centers of classes, batch cut", sl.grad(_center, (0, 2)),
        (f32(N, 128), ints(N), f32(1000, 128)), ("n@x d", "n@x", "..."), X, reduced(1000 * 128 * 4, 8), 1),
    Row("Chamfer distance, points of one cut", _chamfer, (f32(8, 4096, 3), f32(8, 4096, 3)), ("b n@x c", "b m c"), X,
        reduced(8 * 4096 * 4, 8) + reduced(4, 8), 2),
    Row("Chamfer distance, both cut", _chamfer, (f32(8, 4096, 3), f32(8, 4096, 3)), ("b n@x c", "b m@x c"), X,
        2 * reduced(8 * 4096 * 4, 8) + reduced(4, 8), 3),
    Row("neighbors' words mixed in, vocabulary cut", _knnlm, (f32(256, D), f32(D, V), f32(256, 64), ints(256, 64)),
        ("n d", "d v@x", "n k", "n k"), X, 2 * reduced(256 * 4, 8), 2),
    Row("messages with features of edges, edges cut", _mpnn, MP, ("n d", "e@x f", "e@x", "e@x", "...", "..."), X,
        gathered(ND * 64 * 4, 8), 1, out_specs="n@x d"),
    Row("softmax over edges of each node, edges cut", _edgesoft,
        (f32(ND, 64), ints(EG), ints(EG), f32(64, 64), f32(64)), ("n d", "e@x", "e@x", "...", "..."), X,
        reduced(ND * 4, 8) * 2 + reduced(ND * 64 * 4, 8), 3, out_specs="n d", work=6.05),
    Row("histograms of gradients for trees, samples cut", _boost, (f32(1 << 16), ints(1 << 16, 64)),
        ("n@x", "n@x f"), X, reduced(64 * 256 * 4, 8), 1),
    Row("contrastive divergence, data parallel", lambda v, w, a, b: _rbm(v, w, (a, b)),
        (f32(N, D), f32(D, 256), f32(N, 256), f32(N, D)), ("n@x v", "...", "n@x h", "n@x v"), X,
        reduced(D * 256 * 4, 8), 1),
    Row("gradients of a convolution and batch norm, data parallel", _of_loss(_syncbn, 1, 2, 3),
        (f32(64, 32, 32, 32), f32(64, 32, 3, 3), f32(64), f32(64)), ("n@x c h w", "...", "...", "..."), X,
        2 * reduced(64 * 4, 8) + 2 * reduced(64 * 4, 8) + reduced(64 * 32 * 9 * 4, 8), 5),
    Row("gradients of a convolution and batch norm, channels cut", _of_loss(_syncbn, 1, 2, 3),
        (f32(64, 32, 32, 32), f32(64, 32, 3, 3), f32(64), f32(64)), ("n c h w", "o@x c i j", "o@x", "o@x"), X),
    Row("correlations with itself by transforms, time cut", _autocorr, (f32(64, 8192),), ("b t@x",), X,
        2 * exchanged(64 * 8192 * 4, 8), 2, out_specs="b t@x"),
    Row("factors of a tensor in turn, its first dim cut", _mttkrp,
        (f32(512, 256, 256), f32(512, 16), f32(256, 16), f32(256, 16)), ("i@x j k", "i@x r", "...", "..."), X,
        reduced((256 * 16 + 16 * 16) * 4, 8), 2),
    Row("memory addressed by content, slots cut", _ntm, (f32(32, 128), f32(32, 4096, 128), f32(32, 128), f32(32, 1)),
        ("b d", "b n@x d", "b d", "b _"), X, 2 * reduced(32 * 4, 8) + reduced(32 * 128 * 4, 8), 3,
        out_specs=("b d", None)),
    Row("blocks chosen by their means, heads cut", _native, (f32(8, 16, 64), *[f32(8, 16, 4096, 64)] * 2),
        ("b h@x e", *["b h@x t e"] * 2), X),
    Row("gradient of a standardized kernel, FSDP", _of_loss(_weightstd, 1), (f32(64, 64, 64, 64), f32(64, 64, 3, 3)),
        ("n@x c h w", "o@x c i j"), X, 2 * gathered(64 * 64 * 9 * 4, 8), 2),
    Row("gradient of a sparse gate, batch cut", _of_loss(_gatedtopk, 1), (f32(N, D), f32(D, 64)), ("n@x d", "..."),
        X, reduced(D * 64 * 4, 8), 1),
    Row("gradients of a sparse autoencoder, data parallel", sl.grad(_sae, (1, 2, 3)),
        (f32(N, D), f32(D, 8192), f32(8192, D), f32(D)), ("n@x d", *["..."] * 3), X,
        reduced((2 * D * 8192 + D) * 4, 8), 3),
    Row("gradients of an L1 autoencoder, features cut", sl.grad(_l1sae, (1, 2, 3)),
        (f32(N, D), f32(D, 8192), f32(8192, D), f32(D)), ("n d", "d f@x", "f@x d", "d"), X,
        reduced(N * D * 4, 8) + reduced(D * 4, 8), 2),
    Row("gradients of a variational autoencoder, data parallel", sl.grad(_vae, (1, 2)),
        (f32(N, D), f32(D, 128), f32(64, D), f32(N, 64)), ("n@x d", "...", "...", "n@x z"), X,
        reduced((D * 128 + 64 * D) * 4, 8), 2),
    Row("gradients of a hidden Markov model, batch cut", sl.grad(_hmm, (1, 2)),
        (ints(1024, 6), f32(64, 64), f32(64, 512)), ("b@x t", "...", "..."), X, reduced((64 * 64 + 64 * 512) * 4, 8),
        2),
    Row("gradient of a policy with a baseline, batch cut", sl.grad(_reinforce),
        (f32(64, 16), f32(512, 32, 64), ints(512, 32), f32(512, 32)), ("...", "b@x t s", "b@x t", "b@x t"), X,
        reduced(64 * 16 * 4, 8) + reduced(32 * 4, 8), 2),
    Row("gradients of two critics, data parallel", sl.grad(_sac, (2, 3)),
        (f32(n, 32), f32(n, 16), QW, QW, QW, QW, f32(n), f32(n, 32), f32(n, 16), f32(n)),
        ("n@x s", "n@x a", *[["..."] * 2] * 4, "n@x", "n@x s", "n@x a", "n@x"), X,
        2 * reduced((48 * 256 + 256) * 4, 8), 4),
    Row("gradients of an operator network, functions cut", _of_loss(_deeponet, 2, 3),
        (f32(1024, 128), f32(4096, 2), f32(128, 64), f32(2, 64)), ("n@x s", "...", "...", "..."), X,
        reduced((128 * 64 + 2 * 64) * 4, 8), 2),
    Row("gradients against an adversary, data parallel", sl.grad(_adv, (0, 1)),
        (f32(D, 1024), f32(1024, 10), f32(N, D), ints(N)), ("...", "...", "n@x d", "n@x"), X,
        reduced((D * 1024 + 1024 * 10) * 4, 8), 2),
    Row("gradient of a table of hashed corners, points cut",
        _of_loss(lambda t, i, w: (F.embedding(i, t) * w[..., None]).sum(1), 0),
        (f32(1 << 14, 16), ints(1 << 16, 8), f32(1 << 16, 8)), ("...", "n@x c", "n@x c"), X,
        reduced((1 << 14) * 16 * 4, 8), 1),
    Row("gradients of a distance field's slope, points cut", sl.grad(_eikonal, (0, 1)),
        (f32(3, 256), f32(256, 1), f32(N, 3)), ("...", "...", "n@x c"), X, reduced((3 * 256 + 256) * 4, 8), 2),
]  # fmt: skip
