"""Programs of further kinds: losses with queues, local attention, capsules, graphs with relations, spectral flow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import shardlib as sl
from tests.validation.best import Row, exchanged, f32, gathered, ints, reduced

X = {"x": 8}
D, V, N = 512, 32768, 4096
OR = reduced(N * 4, 8)
ACT = N * D * 4


def _of_loss(program: Callable[..., Tensor], *which: int) -> Callable[..., Any]:
    return sl.grad(lambda *args: program(*args).sin().sum(), which or 0)


# Losses ---------------------------------------------------------------------------------------------------------------


def _jensen(a: Tensor, b: Tensor) -> Tensor:
    """Jensen and Shannon's divergence."""
    p, q = a.softmax(-1), b.softmax(-1)
    middle = (0.5 * (p + q)).log()
    return 0.5 * ((p * (p.log() - middle)).sum(-1) + (q * (q.log() - middle)).sum(-1)).mean()


def _queued(q: Tensor, k: Tensor, queue: Tensor) -> Tensor:
    """MoCo: negatives of batches before (He et al. 2019, arXiv:1911.05722)."""
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    logits = torch.cat([(q * k).sum(-1, keepdim=True), q @ queue.t()], 1) / 0.07
    return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


def _dice(logits: Tensor, y: Tensor) -> Tensor:
    p = logits.sigmoid()
    return (1 - 2 * (p * y).sum((2, 3)) / (p.sum((2, 3)) + y.sum((2, 3)) + 1)).mean()


def _span(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Where an answer begins and ends."""
    a, b = (x @ w).unbind(-1)
    return F.cross_entropy(a, y[:, 0]) + F.cross_entropy(b, y[:, 1])


def _density(h: Tensor, ws: Sequence[Tensor], y: Tensor) -> Tensor:
    """A mixture of Gaussians for each sample."""
    share, mean, log_scale = (h @ w for w in ws)
    scores = share.log_softmax(-1) - 0.5 * ((y[:, None] - mean) * (-log_scale).exp()).square() - log_scale
    return -scores.logsumexp(-1).mean()


def _transport(x: Tensor, y: Tensor) -> Tensor:
    """Sinkhorn's iterations."""
    cost = torch.cdist(x, y)
    k, u = (-cost).exp(), torch.ones(len(x))
    for _ in range(3):
        v = 1 / (k.t() @ u)
        u = 1 / (k @ v)
    return (u[:, None] * k * v * cost).sum()


# Layers ---------------------------------------------------------------------------------------------------------------


def _heads(x: Tensor, n: int) -> Tensor:
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


def _local(x: Tensor, w: Tensor, there: Tensor) -> Tensor:
    """ModernBERT's local attention, of sequences with padding."""
    q, k, v = (_heads(t, 8) for t in (x @ w).chunk(3, -1))
    away = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
    seen = (away.abs() <= 64) & there[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)


def _packed(q: Tensor, k: Tensor, v: Tensor, document: Tensor) -> Tensor:
    """Documents that follow each other, in windows."""
    i = torch.arange(q.shape[2])
    seen = (document[:, None, :, None] == document[:, None, None]) & (i[:, None] >= i) & (i[:, None] - i < 128)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def _hidden(q: Tensor, k: Tensor, v: Tensor) -> Any:
    def near(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where((i >= j) & (i - j < 128), score, -torch.inf)

    return flex_attention(q, k, v, score_mod=near)


def _grouped(x: Tensor, g: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, out: Tensor) -> Tensor:
    """A block of windows, whose heads share keys."""
    h = F.rms_norm(x, (D,), g)
    i = torch.arange(x.shape[1])
    seen = (i[:, None] >= i) & (i[:, None] - i < 256)
    q, k, v = _heads(h @ wq, 8), _heads(h @ wk, 2), _heads(h @ wv, 2)
    return x + F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2).flatten(2) @ out


def _capacity(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Experts that take so many tokens each; the rest get nothing."""
    experts, room = len(up), len(x) // len(up) * 2
    share, expert = (x @ gate).softmax(-1).max(-1)
    chosen = F.one_hot(expert, experts)
    place = (chosen.cumsum(0) * chosen).sum(-1) - 1
    slot = torch.where(place < room, expert * room + place, experts * room)
    held = torch.zeros(experts * room + 1, D).index_copy(0, slot, x)[:-1].view(experts, room, D)
    made = torch.einsum("ecf,efd->ecd", torch.einsum("ecd,edf->ecf", held, up).relu(), down).flatten(0, 1)
    return torch.cat([made, torch.zeros(1, D)])[slot] * (share * (place < room))[:, None]


def _capsules(u: Tensor, w: Tensor) -> Tensor:
    """Sabour et al. 2017, arXiv:1710.09829."""
    votes = torch.einsum("bid,ijde->bije", u, w)
    b = torch.zeros(votes.shape[:3])
    for _ in range(3):
        s = (b.softmax(2)[..., None] * votes).sum(1)
        n = s.square().sum(-1, keepdim=True)
        v = n / (1 + n) * s / (n + 1e-6).sqrt()
        b = b + (votes * v[:, None]).sum(-1)
    return v


def _relations(h: Tensor, source: Tensor, target: Tensor, w: Tensor) -> Tensor:
    """Messages along edges of three kinds."""
    out = torch.zeros(len(h), w.shape[2])
    for k in range(3):
        out = out.index_add(0, target[k], h[source[k]] @ w[k])
    return F.relu(out)


# Science --------------------------------------------------------------------------------------------------------------


def _vorticity(w: Tensor) -> Tensor:
    """A step of flow in two dims, by frequencies."""
    n = len(w)
    freq = torch.fft.rfft2(w)
    kx, ky = torch.fft.fftfreq(n)[:, None] * n, torch.fft.rfftfreq(n)[None] * n
    k2 = (kx * kx + ky * ky).clamp(min=1e-3)
    stream = freq / k2
    u, v, wx, wy = (
        torch.fft.irfft2(1j * k * z, s=(n, n)) for k, z in ((ky, stream), (-kx, stream), (kx, freq), (ky, freq))
    )
    return torch.fft.irfft2(freq - 0.01 * torch.fft.rfft2(u * wx + v * wy) - 0.01 * k2 * freq, s=(n, n))


def _ising(s: Tensor, u: Tensor) -> Tensor:
    """A sweep over a board of spins, in two colors."""
    color = (torch.arange(len(s))[:, None] + torch.arange(len(s))) % 2
    for k in (0, 1):
        around = s.roll(1, 0) + s.roll(-1, 0) + s.roll(1, 1) + s.roll(-1, 1)
        s = torch.where((color == k) & (u[k] < torch.exp(-0.8 * s * around)), -s, s)
    return s


def _advected(u: Tensor, v: Tensor, q: Tensor) -> Tensor:
    qx, qy = (0.5 * (q.roll(-1, d) - q.roll(1, d)) for d in (0, 1))
    spread = q.roll(1, 0) + q.roll(-1, 0) + q.roll(1, 1) + q.roll(-1, 1) - 4 * q
    return q - 0.1 * (u * qx + v * qy) + 0.01 * spread


def _clustered(x: Tensor, c: Tensor) -> Tensor:
    chosen = F.one_hot(torch.cdist(x, c).argmin(1), len(c)).to(x.dtype)
    return (chosen.t() @ x) / chosen.sum(0).clamp(min=1)[:, None]


def _factored(a: Tensor, g: Tensor, left: Tensor, right: Tensor) -> Any:
    """K-FAC's statistics."""
    return 0.95 * left + 0.05 * a.t() @ a / len(a), 0.95 * right + 0.05 * g.t() @ g / len(g)


B, S, H, E = 2, 8192, 8, 64
HALO = B * H * E * 4  # a row of keys, or of values
QUEUE = (f32(1024, 128), f32(1024, 128), f32(65536, 128))
QUEUED = ("n d", "n d", "k@x d")
MASKS = (f32(8, 4, 256, 256),) * 2
BLOCK = (f32(B, S // 2, D), f32(D), f32(D, D), f32(D, D // 4), f32(D, D // 4), f32(D, D))
RELATIONS = (f32(4096, 64), ints(3, 32768), ints(3, 32768), f32(3, 64, 64))
GRID = 2048
ROWS = [
    Row("gradients of Jensen and Shannon's divergence, vocabulary cut", sl.grad(_jensen, (0, 1)), (f32(N, V),) * 2,
        ("n v@x",) * 2, X, 6 * OR, 6),
    Row("contrast with a queue that is cut", _queued, QUEUE, QUEUED, X, 2 * reduced(1024 * 4, 8) + reduced(4, 8), 3,
        out_specs=""),
    Row("Dice of masks, height cut", sl.grad(_dice), MASKS, ("b c h@x w",) * 2, X, 2 * reduced(8 * 4 * 4, 8), 2),
    Row("gradient of a span's ends, sequence cut", sl.grad(_span), (f32(D, 2), f32(32, N, D), ints(32, 2)),
        ("...", "b s@x d", "b k"), X, 4 * reduced(32 * 4, 8) + reduced(D * 2 * 4, 8), 5),
    Row("gradients of mixtures of Gaussians, components cut", sl.grad(_density, (0, 1)),
        (f32(N, D), [f32(D, 64)] * 3, f32(N)), ("n d", ["d k@x"] * 3, "n"), X, 5 * OR + reduced(ACT, 8), 6),
    Row("gradient of Sinkhorn's iterations, rows cut", sl.grad(_transport), (f32(1024, 16),) * 2, ("n@x d", "m d"), X,
        6 * reduced(1024 * 4, 8), 6),
    Row("local attention with padding, sequence cut", _local,
        (f32(B, S, D), f32(D, 3 * D), torch.empty(B, S, dtype=torch.bool, device="meta")), ("b s@x d", "...", "b s@x"),
        X, 2 * 2 * 64 * HALO + gathered(B * S, 8), 5),
    Row("windows by flex attention's scores, sequence cut", _hidden, (f32(B, H, S, E),) * 3, ("b h s@x e",) * 3, X,
        2 * 127 * HALO, 2),
    Row("windows of packed documents, sequence cut", _packed, (*[f32(B, H, S, E)] * 3, ints(B, S)),
        (*["b h s@x e"] * 3, "b s@x"), X, 2 * 127 * HALO + gathered(B * S * 8, 8), 3),
    Row("gradients of a block of windows, sequence cut", _of_loss(_grouped, 0, 1, 2, 3, 4, 5), BLOCK,
        ("b s@x d", *["..."] * 5), X, 4 * 255 * HALO / 4 + reduced((2 * D * D + 2 * D * D // 4 + D) * 4, 8), 9),
    Row("experts with room for so many tokens, experts cut", _capacity,
        (f32(N, D), f32(D, 8), f32(8, D, 1024), f32(8, 1024, D)), ("n d", "...", "e@x d f", "e@x f d"), X,
        reduced(ACT, 8), 1, out_specs="n d"),
    Row("capsules, inputs cut", _capsules, (f32(32, 1024, 8), f32(1024, 10, 8, 16)), ("b i@x d", "i@x j d e"), X,
        3 * reduced(32 * 10 * 16 * 4, 8), 3),
    Row("messages of three kinds, edges cut", _relations, RELATIONS, ("n d", "r e@x", "r e@x", "..."), X,
        reduced(4096 * 64 * 4, 8), 1),
    Row("gradients of messages of three kinds, edges cut", _of_loss(_relations, 0, 3), RELATIONS,
        ("n d", "r e@x", "r e@x", "..."), X, 2 * reduced(4096 * 64 * 4, 8) + reduced(3 * 64 * 64 * 4, 8), 3),
    Row("vorticity by frequencies, rows cut", _vorticity, (f32(GRID, GRID),), ("h@x w",), X,
        7 * exchanged(GRID * (GRID // 2 + 1) * 8, 8), 7, out_specs="h@x w"),
    Row("sweep over spins in two colors, rows cut", _ising, (f32(GRID, GRID), f32(2, GRID, GRID)),
        ("h@x w", "_ h@x w"), X, 4 * GRID * 4, 4),
    Row("advection and diffusion, rows cut", _advected, (f32(GRID, GRID),) * 3, ("h@x w",) * 3, X, 2 * GRID * 4, 2),
    # Of each sample the nearest center, and how far that is.
    Row("step of k-means, centers cut", _clustered, (f32(1 << 16, 64), f32(256, 64)), ("n d", "k@x d"), X,
        reduced((1 << 16) * (4 + 8), 8), 2, out_specs="k@x d"),
    Row("statistics of K-FAC, samples cut", _factored, (f32(8192, 512), f32(8192, 256), f32(512, 512), f32(256, 256)),
        ("n@x d", "n@x e", "...", "..."), X, reduced((512 * 512 + 256 * 256) * 4, 8), 2),
]  # fmt: skip
