"""Iterations of statistics and of learning beside transformers: clusters, codes, components, solvers, rays, states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from tests.validation.best import Row, exchanged, f32, gathered, ints, reduced

X = {"x": 8}
N, D, K = 65536, 64, 256  # samples, features, clusters
DATA = ("n@x d", "...")


def _of_loss(program: Callable[..., Tensor], *which: int) -> Callable[..., Any]:
    return sl.grad(lambda *args: program(*args).sin().sum(), which)


# Data -----------------------------------------------------------------------------------------------------------------


def _clusters(x: Tensor, c: Tensor) -> Tensor:
    """A step of k-means."""
    i = torch.cdist(x, c).argmin(1)
    total = torch.zeros_like(c).index_add(0, i, x)
    return total / torch.zeros(len(c)).index_add(0, i, torch.ones(len(x))).clamp(min=1)[:, None]


def _components(x: Tensor, v: Tensor) -> Tensor:
    x = x - x.mean(0)
    for _ in range(3):
        v = torch.linalg.qr(x.t() @ (x @ v))[0]
    return v


def _codes(z: Tensor, e: Tensor, n: Tensor, m: Tensor) -> Any:
    """VQ-VAE's codebook as moving averages (van den Oord et al. 2017, arXiv:1711.00937)."""
    i = (z.square().sum(1, keepdim=True) - 2 * z @ e.t() + e.square().sum(1)).argmin(1)
    of = F.one_hot(i, len(e)).float()
    n, m = 0.99 * n + 0.01 * of.sum(0), 0.99 * m + 0.01 * of.t() @ z
    return m / n[:, None], n, m


def _quantized(z: Tensor, e: Tensor) -> Tensor:
    q = e[torch.cdist(z, e).argmin(1)]
    return z + (q - z).detach()


def _process(x: Tensor, b: Tensor) -> Tensor:
    """A Gaussian process by conjugate gradients."""
    kernel = (-torch.cdist(x, x).square()).exp() + 1e-2 * torch.eye(len(x))
    u, r, p = torch.zeros_like(b), b, b
    old = r @ r
    for _ in range(3):
        q = kernel @ p
        step = old / (p @ q)
        u, r = u + step * p, r - step * q
        new = r @ r
        p, old = r + new / old * p, new
    return u


def _sinkhorn(c: Tensor) -> Any:
    f, g = torch.zeros(c.shape[0]), torch.zeros(c.shape[1])
    for _ in range(5):
        f = -(g - c).logsumexp(1)
        g = -(f[:, None] - c).logsumexp(0)
    return f, g


def _labels(i: Tensor, j: Tensor, w: Tensor, y: Tensor) -> Tensor:
    for _ in range(3):
        y = torch.zeros_like(y).index_add(0, j, w[:, None] * y[i])
        y = y / y.sum(1, keepdim=True).clamp(min=1e-6)
    return y


NODES = 4096
FROM_DATA = [
    Row("step of k-means, samples cut", _clusters, (f32(N, D), f32(K, D)), DATA, X, reduced(K * (D + 1) * 4, 8), 2),
    Row("principal components, samples cut", _components, (f32(N, K), f32(K, 8)), DATA, X,
        reduced(K * 4, 8) + 3 * reduced(K * 8 * 4, 8), 4),
    Row("codebook as moving averages, samples cut", _codes, (f32(8192, K), f32(1024, K), f32(1024), f32(1024, K)),
        ("n@x d", *["..."] * 3), X, reduced(1024 * (K + 1) * 4, 8), 2),
    Row("gradient through nearest codes, samples cut", _of_loss(_quantized, 0), (f32(8192, K), f32(1024, K)), DATA, X),
    # Everybody has all points, and of the matrix the rows of its own.
    Row("Gaussian process by conjugate gradients, points cut", _process, (f32(NODES, D), f32(NODES)), ("n@x d", "n@x"),
        X, gathered(NODES * D * 4, 8) + 3 * gathered(NODES * 4, 8) + 6 * reduced(4, 8), 10),
    Row("optimal transport, rows cut", _sinkhorn, (f32(NODES, NODES),), ("m@x n",), X, 10 * reduced(NODES * 4, 8), 10),
    # Each label is divided by all, which takes no time beside the messages.
    Row("label propagation, edges cut", _labels, (ints(N), ints(N), f32(N), f32(NODES, 16)),
        ("e@x", "e@x", "e@x", "n c"), X, 3 * reduced(NODES * 16 * 4, 8), 3, work=1.3),
    Row("matrix norm of a product, samples cut", lambda x: (x.t() @ x).square().sum(), (f32(8192, 1024),),
        ("n@x d",), X, gathered(1024 * 1024 * 4, 8) + reduced(4, 8), 2),
]  # fmt: skip


# Models ---------------------------------------------------------------------------------------------------------------


def _rays(o: Tensor, d: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Mildenhall et al. 2020, arXiv:2003.08934."""
    p = o[:, None] + d[:, None] * torch.linspace(0, 1, 64)[:, None]
    x = torch.cat([p, *(f(2**k * p) for k in range(6) for f in (torch.sin, torch.cos))], -1)
    y = F.relu(F.relu(x @ a) @ b) @ c
    alpha = 1 - torch.exp(-F.relu(y[..., 3]) / 64)
    left = torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha[:, :-1] + 1e-10], 1).cumprod(1)
    return ((alpha * left)[..., None] * y[..., :3].sigmoid()).sum(1)


def _retention(q: Tensor, k: Tensor, v: Tensor, c: int = 64) -> Tensor:
    """By chunks (Sun et al. 2023, arXiv:2307.08621)."""
    b, s, h, e = q.shape
    decay, i = 1 - 2.0 ** (-5 - torch.arange(h)), torch.arange(c)
    q, k, v = (t.unflatten(1, (-1, c)) for t in (q, k, v))
    mask = (decay[:, None, None] ** (i[:, None] - i)).tril()
    within = torch.einsum("bnhij,bnjhe->bnihe", torch.einsum("bnihe,bnjhe->bnhij", q, k) * mask, v)
    kv = torch.einsum("bnjhe,bnjhf,hj->bnhef", k, v, decay[:, None] ** (c - 1 - i))
    state, states = torch.zeros(b, h, e, e), []
    for n in range(s // c):
        states.append(state)
        state = state * (decay**c)[:, None, None] + kv[:, n]
    before = torch.einsum("bnihe,bnhef,hi->bnihf", q, torch.stack(states, 1), decay[:, None] ** (i + 1))
    return (within + before).flatten(1, 2)


def _wkv(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """RWKV's states (Peng et al. 2024, arXiv:2404.05892), step by step."""
    state, out = torch.zeros(len(r), *w.shape, w.shape[-1]), []
    for t in range(r.shape[1]):
        kv = k[:, t, :, :, None] * v[:, t, :, None]
        out.append(((state + u[..., None] * kv) * r[:, t, :, :, None]).sum(2))
        state = state * w[..., None] + kv
    return torch.stack(out, 1)


def _modulated(x: Tensor, c: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """FiLM (Perez et al. 2017, arXiv:1709.07871)."""
    scale, shift = (c @ a)[:, :, None, None], (c @ b)[:, :, None, None]
    return F.relu(F.conv2d(x, w, padding=1) * (1 + scale) + shift)


def _made_weights(x: Tensor, z: Tensor, w: Tensor) -> Tensor:
    """A hypernetwork's."""
    return torch.bmm(x, (z @ w).view(len(z), K, K))


def _warped(x: Tensor, a: Tensor) -> Tensor:
    return F.grid_sample(x, F.affine_grid(a, list(x.shape), align_corners=False), align_corners=False)


def _crf(e: Tensor, moves: Tensor) -> Tensor:
    a = e[:, 0]
    for t in range(1, 8):
        a = (a[:, :, None] + moves).logsumexp(1) + e[:, t]
    return a.logsumexp(1)


def _thinking_ahead(x: Tensor, ws: list[Tensor], w: Tensor, ys: list[Tensor]) -> Any:
    """Several next tokens at once (Gloeckle et al. 2024, arXiv:2404.19737)."""
    loss: Any = 0
    for head, y in zip(ws, ys, strict=True):
        x = F.gelu(x @ head)
        loss = loss + F.cross_entropy(x @ w, y)
    return loss


def _kto(w: Tensor, x: Tensor, y: Tensor, reference: Tensor, good: Tensor) -> Tensor:
    """Ethayarajh et al. 2024, arXiv:2402.01306."""
    r = (x @ w).log_softmax(-1).gather(-1, y[..., None])[..., 0].sum(-1) - reference
    z = r.mean().clamp(min=0).detach()
    return torch.where(good > 0, 1 - torch.sigmoid(0.1 * (r - z)), 1 - torch.sigmoid(0.1 * (z - r))).mean()


HEADS = (f32(4, 1024, 16, D),) * 3
STATES = (*[f32(4, 8, 16, D)] * 3, *[f32(16, D)] * 2)
RAYS = (f32(NODES, 3), f32(NODES, 3), f32(39, K), f32(K, K), f32(K, 4))
IMAGES = (f32(32, D, 64, 64), f32(32, 128), f32(D, D, 3, 3), f32(128, D), f32(128, D))
MADE = (f32(64, 128, K), f32(64, D), f32(D, K * K))
HW = 64 * 64
FROM_MODELS = [
    Row("gradients of a radiance field, rays cut", _of_loss(_rays, 2, 3, 4), RAYS, ("n@x c", "n@x c", *["..."] * 3), X,
        reduced((39 * K + K * K + 4 * K) * 4, 8), 3),
    Row("gradients of retention, heads cut", _of_loss(_retention, 0, 1, 2), HEADS, ("b s h@x e",) * 3, X),
    # States of chunks meet where their heads are, and go back.
    Row("retention, sequence cut", _retention, HEADS, ("b s@x h e",) * 3, X, 2 * exchanged(4 * 16 * 16 * D * D * 4, 8),
        2),
    Row("gradients of states with decay, heads cut", _of_loss(_wkv, 0, 1, 2, 3, 4), STATES,
        (*["b t h@x e"] * 3, "h@x e", "h@x e"), X),
    Row("modulated convolution, channels cut", _modulated, IMAGES, ("...", "...", "o@x c i j", "d o@x", "d o@x"), X),
    Row("modulated convolution, height cut", _modulated, IMAGES, ("b c h@x w", *["..."] * 4), X, 2 * 32 * HW * 4, 2),
    Row("hypernetwork, its weights cut", _made_weights, MADE, ("...", "...", "z f@x"), X,
        exchanged(64 * K * K * 4, 8), 1),
    Row("affine warps of images, batch cut", _warped, (f32(32, 3, 64, 64), f32(32, 2, 3)), ("b@x c h w", "b@x i j"), X),
    Row("gradient of a linear chain's transitions, batch cut", _of_loss(_crf, 1), (f32(K, 8, D), f32(D, D)),
        ("b@x t k", "..."), X, reduced(D * D * 4, 8), 1),
    # Two sums of a loss say how much there was.
    Row("gradients of several next tokens, data parallel", sl.grad(_thinking_ahead, (1, 2)),
        (f32(8192, 1024), [f32(1024, 1024)] * 2, f32(1024, 8192), [ints(8192)] * 2),
        ("n@x d", ["..."] * 2, "...", ["n@x"] * 2), X, reduced((2 * 1024 + 8192) * 1024 * 4, 8), 5),
    Row("KTO, vocabulary cut", sl.grad(_kto), (f32(1024, 8192), f32(16, 256, 1024), ints(16, 256), f32(16), f32(16)),
        ("d v@x", *["..."] * 4), X, 2 * reduced(16 * 256 * 4, 8) + reduced(16 * 4, 8), 3),
]  # fmt: skip

ROWS = [*FROM_DATA, *FROM_MODELS]
