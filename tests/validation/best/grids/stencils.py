"""Images whose height is cut, in networks, and simulations on grids, graphs and particles, on one to three axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from tests.validation.best import Row, exchanged, f32, gathered, ints, reduced

X, PLANE = {"x": 8}, {"x": 4, "y": 2}


def _of_loss(program: Callable[..., Tensor], *which: int) -> Callable[..., Any]:
    return sl.grad(lambda *args: program(*args).sin().sum(), which or 0)


# Images ---------------------------------------------------------------------------------------------------------------

B, C, H, W = 8, 32, 128, 64
IMAGE, LINE = f32(B, C, H, W), B * C * W * 4
CUT = "b c h@x w"


def _strided(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, stride=2, padding=1)


def _transposed(x: Tensor, w: Tensor) -> Tensor:
    return F.conv_transpose2d(x, w, stride=2, padding=1)


def _convolved(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, padding=1)


def _enlarged(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(F.interpolate(x, scale_factor=2, mode="nearest"), w, padding=1)


def _pyramid(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Lin et al. 2016, arXiv:1612.03144."""
    p = F.relu(F.conv2d(x, a, stride=2, padding=1))
    q = F.conv2d(F.relu(F.conv2d(p, b, stride=2, padding=1)), d)
    return F.conv2d(p, c) + F.interpolate(q, scale_factor=2, mode="nearest")


PYRAMID = (IMAGE, f32(64, C, 3, 3), f32(64, 64, 3, 3), f32(C, 64, 1, 1), f32(C, 64, 1, 1))
KERNELS = sum(w.nbytes for w in PYRAMID[1:])


def _median(x: Tensor) -> Tensor:
    around = F.pad(x, (1, 1, 1, 1), mode="replicate").unfold(2, 3, 1).unfold(3, 3, 1)
    return around.flatten(-2).median(-1)[0]


def _correlations(a: Tensor, b: Tensor) -> Tensor:
    """RAFT (Teed and Deng 2020, arXiv:2003.12039)."""
    return torch.einsum("bcij,bckl->bijkl", a, b) / C**0.5


def _overlap(a: Tensor, b: Tensor) -> Any:
    """Which of many boxes covers each of a few best."""
    low, high = torch.maximum(a[:, None, :2], b[:, :2]), torch.minimum(a[:, None, 2:], b[:, 2:])
    both = (high - low).clamp(min=0).prod(-1)
    area = [(t[:, 2] - t[:, 0]) * (t[:, 3] - t[:, 1]) for t in (a, b)]
    return (both / (area[0][:, None] + area[1] - both)).max(0)


def _wavelets(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    details = []
    for _ in range(3):
        even, odd = x[:, 0::2], x[:, 1::2]
        details.append((even - odd) / 2**0.5)
        x = (even + odd) / 2**0.5
    return x, details


def _shifted(x: Tensor, w: Tensor, o: Tensor, table: Tensor) -> Tensor:
    """Swin (Liu et al. 2021, arXiv:2103.14030)."""
    b, h, wide, _ = x.shape
    x = x.roll((-4, -4), (1, 2)).unflatten(2, (-1, 8)).unflatten(1, (-1, 8)).transpose(2, 3)
    q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (x.flatten(0, 2).flatten(1, 2) @ w).chunk(3, -1))
    i = torch.arange(64)
    apart = (i[:, None] // 8 - i // 8 + 7) * 15 + (i[:, None] % 8 - i % 8 + 7)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=table[apart].permute(2, 0, 1)[None])
    y = (y.transpose(1, 2).flatten(2) @ o).unflatten(1, (8, 8)).unflatten(0, (b, h // 8, wide // 8))
    return y.transpose(2, 3).flatten(3, 4).flatten(1, 2).roll((4, 4), (1, 2))


SWIN = (f32(4, 64, 64, 128), f32(128, 384), f32(128, 128), f32(225, 4))
SWIN_WEIGHTS = sum(w.nbytes for w in SWIN[1:])
HALF = 4 * 4 * 64 * 128 * 4  # bytes of half a window's rows

# Simulations ----------------------------------------------------------------------------------------------------------

N = 512


def _poisson(f: Tensor) -> Tensor:
    k = torch.arange(N) * (2 * torch.pi / N)
    eigen = 2 * (k.cos()[:, None] + k.cos() - 2)
    return torch.fft.ifft2(torch.where(eigen == 0, 0, torch.fft.fft2(f) / torch.where(eigen == 0, 1, eigen))).real


def _projected(u: Tensor, v: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Pressure that takes the divergence away."""
    divergence = (u.roll(-1, 0) - u.roll(1, 0) + v.roll(-1, 1) - v.roll(1, 1)) / 2
    for _ in range(4):
        p = (p.roll(1, 0) + p.roll(-1, 0) + p.roll(1, 1) + p.roll(-1, 1) - divergence) / 4
    return u - (p.roll(-1, 0) - p.roll(1, 0)) / 2, v - (p.roll(-1, 1) - p.roll(1, 1)) / 2


def _wave(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    around = [u.roll(s, d) for d in range(3) for s in (1, -1)]
    return u + 0.1 * v, v + 0.1 * (torch.stack(around).sum(0) - 6 * u)


def _energy(t: Tensor) -> Tensor:
    """Of the XY model."""
    return -((t - t.roll(1, 0)).cos() + (t - t.roll(1, 1)).cos()).sum()


def _separating(u: Tensor) -> Tensor:
    """Cahn and Hilliard."""
    curved = lambda x: x.roll(1, 0) + x.roll(-1, 0) + x.roll(1, 1) + x.roll(-1, 1) - 4 * x
    for _ in range(2):
        u = u + 0.01 * curved(u**3 - u - curved(u))
    return u


def _coupled(t: Tensor, w: Tensor, a: Tensor) -> Tensor:
    """Kuramoto's oscillators on a graph."""
    return t + 0.1 * (w + (a * (t[None] - t[:, None]).sin()).mean(1))


def _verlet(x: Tensor, v: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
    def force(x: Tensor) -> Tensor:
        d = x[i] - x[j]
        r = d.square().sum(-1, keepdim=True) + 0.1
        pull = d * (2 / r**7 - 1 / r**4)
        return torch.zeros_like(x).index_add(0, i, pull).index_add(0, j, -pull)

    before = force(x)
    x = x + 0.01 * v + 0.00005 * before
    return x, v + 0.005 * (before + force(x))


def _all_pairs(x: Tensor) -> Tensor:
    """Lennard and Jones."""
    r = (x[:, None] - x).square().sum(-1) + 0.1 + torch.eye(len(x))
    return (r**-6 - r**-3).sum() / 2


def _recalled(x: Tensor, patterns: Tensor, beta: Tensor) -> Tensor:
    """Hopfield networks (Ramsauer et al. 2020, arXiv:2008.02217)."""
    for _ in range(3):
        x = (beta * x @ patterns.t()).softmax(-1) @ patterns
    return x


def _equivariant(h: Tensor, x: Tensor, ends: Sequence[Tensor], w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """A layer of an EGNN (Satorras et al. 2021, arXiv:2102.09844)."""
    i, j = ends
    d = x[i] - x[j]
    m = F.silu(torch.cat([h[i], h[j], d.square().sum(-1, keepdim=True)], 1) @ w)
    return torch.zeros(len(h), m.shape[1]).index_add(0, j, m), x + torch.zeros_like(x).index_add(0, j, d * (m @ u))


def _light(e: Tensor, i: Tensor, j: Tensor, degree: Tensor) -> Tensor:
    """LightGCN (He et al. 2020, arXiv:2002.02126)."""
    x = total = e
    for _ in range(3):
        x = torch.zeros_like(e).index_add(0, j, (x * degree[:, None])[i]) * degree[:, None]
        total = total + x
    return total / 4


BODIES = (f32(8192, 3), f32(8192, 3), ints(1 << 17), ints(1 << 17))
NODES = (f32(1 << 14, 64), ints(1 << 18), ints(1 << 18), f32(1 << 14))

ROWS = [
    Row("gradients of a convolution with a stride, height cut", _of_loss(_strided, 0, 1), (IMAGE, f32(64, C, 3, 3)),
        (CUT, "..."), X, 2 * LINE + reduced(64 * C * 9 * 4, 8), 3),
    Row("gradients of a transposed convolution that overlaps, height cut", _of_loss(_transposed, 0, 1),
        (IMAGE, f32(C, 16, 4, 4)), (CUT, "..."), X, 4 * LINE + reduced(C * 16 * 16 * 4, 8), 5),
    Row("3 x 3, both dims cut", _convolved, (IMAGE, f32(C, C, 3, 3)), ("b c h@x w@y", "..."), PLANE,
        LINE + B * C * (H // 4 + 2) * 4, 3),
    Row("gradients of a convolution behind pixels twice as large, height cut", _of_loss(_enlarged, 0, 1),
        (IMAGE, f32(C, C, 3, 3)), (CUT, "..."), X, 6 * LINE + reduced(C * C * 9 * 4, 8), 5),
    Row("feature pyramid, height cut", _pyramid, PYRAMID, (CUT, *["..."] * 4), X, 2 * LINE, 2),
    Row("gradients of a feature pyramid, height cut", _of_loss(_pyramid, 1, 2, 3, 4), PYRAMID, (CUT, *["..."] * 4), X,
        2.5 * LINE + reduced(KERNELS, 8), 7),
    Row("gradient of a maximum pool that overlaps, height cut", _of_loss(lambda x: F.max_pool2d(x, 3, 2, 1)), (IMAGE,),
        (CUT,), X, 2 * LINE, 2),
    Row("bicubic, twice as large", lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), (IMAGE,), (CUT,), X,
        4 * LINE, 2),
    Row("median of neighbors, height cut", _median, (f32(2, 3, 128, 128),), (CUT,), X, 2 * 2 * 3 * 130 * 4, 2),
    Row("volume in 3 x 3 x 3, two dims cut", lambda x, w: F.conv3d(x, w, padding=1),
        (f32(2, 16, 32, 32, 32), f32(16, 16, 3, 3, 3)), ("b c d@x h@y w", "..."), PLANE,
        2 * 32 * 16 * 32 * 4 + 32 * 10 * 32 * 4, 3),
    Row("correlations of all pixels, height cut", _correlations, (f32(2, C, 32, 32),) * 2, (CUT, CUT), X,
        gathered(2 * C * 1024 * 4, 8), 1),
    Row("best of many boxes, boxes cut", _overlap, (f32(1 << 14, 4), f32(256, 4)), ("n@x c", "..."), X,
        reduced(256 * 12, 8), 2),
    Row("integral image, both dims cut", lambda x: x.cumsum(0).cumsum(1), (f32(1024, 1024),), ("h@x w@y",), PLANE,
        gathered(4 * 512 * 4, 4) + gathered(2 * 256 * 4, 2), 2),
    Row("wavelets level by level, time cut", _wavelets, (f32(8, 4096),), ("b t@x",), X),
    Row("gradients of shifted windows, height cut", _of_loss(_shifted, 1, 2, 3), SWIN, ("b h@x w c", *["..."] * 3), X,
        3 * HALF + reduced(SWIN_WEIGHTS, 8), 6),
    Row("gradients of shifted windows, both dims cut", _of_loss(_shifted, 1, 2, 3), SWIN,
        ("b h@x w@y c", *["..."] * 3), PLANE, 3 * HALF * (1 / 2 + 1 / 4) + reduced(SWIN_WEIGHTS, 8), 9),
    Row("Poisson by frequencies, rows cut", _poisson, (f32(N, N),), ("h@x w",), X, 2 * exchanged(N * N * 8, 8), 2,
        out_specs="h@x w"),
    Row("pressure projection, rows cut", _projected, (f32(N, N),) * 3, ("h@x w",) * 3, X, 12 * N * 4, 12),
    Row("pressure projection, both dims cut", _projected, (f32(N, N),) * 3, ("h@x w@y",) * 3, PLANE,
        12 * (N / 2 + N / 4) * 4, 24),
    Row("wave in a volume, on three axes", _wave, (f32(64, 64, 64),) * 2, ("a@x b@y c@z",) * 2,
        {"x": 2, "y": 2, "z": 2}, 6 * 32 * 32 * 4, 6),
    Row("gradient of an energy of spins, both dims cut", sl.grad(_energy), (f32(N, N),), ("h@x w@y",), PLANE,
        2 * (N / 2 + N / 4) * 4, 4),
    Row("separating fluids, rows cut", _separating, (f32(N, N),), ("h@x w",), X, 8 * N * 4, 8),
    Row("gradients of oscillators on a graph, rows cut", _of_loss(_coupled, 0, 1, 2),
        (f32(4096), f32(4096), f32(4096, 4096)), ("n@x", "n@x", "n@x m"), X, 2 * gathered(4096 * 4, 8), 2),
    Row("particles by a list of pairs, pairs cut", _verlet, BODIES, ("n c", "n c", "e@x", "e@x"), X,
        2 * reduced(8192 * 12, 8), 2, work=1.1),
    Row("particles by a list of pairs, both cut", _verlet, BODIES, ("n@x c", "n@x c", "e@x", "e@x"), X,
        4 * gathered(8192 * 12, 8), 4),
    Row("gradient of an energy of all pairs, particles cut", sl.grad(_all_pairs), (f32(2048, 3),), ("n@x c",), X,
        2 * gathered(2048 * 12, 8), 2),
    Row("patterns recalled, patterns cut", _recalled, (f32(256, 128), f32(1 << 16, 128), f32()),
        ("b d", "n@x d", ""), X, 3 * (2 * reduced(256 * 4, 8) + reduced(256 * 128 * 4, 8)), 9),
    Row("messages with distances, edges cut", lambda h, x, i, j, w, u: _equivariant(h, x, (i, j), w, u),
        (f32(1 << 13, 64), f32(1 << 13, 3), ints(1 << 17), ints(1 << 17), f32(129, 64), f32(64, 1)),
        ("n d", "n c", "e@x", "e@x", "...", "..."), X, reduced((1 << 13) * 67 * 4, 8), 2),
    Row("light graph network, columns cut", _light, NODES, ("n d@x", "...", "...", "..."), X),
    Row("light graph network, edges and columns cut", _light, NODES, ("n d@tensor", "e@data", "e@data", "..."),
        {"data": 2, "tensor": 4}, 3 * reduced((1 << 14) * 16 * 4, 2), 3, work=1.1),
]  # fmt: skip
