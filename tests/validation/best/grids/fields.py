"""Fields on grids whose rows are cut: stencils send borders, sweeps along a cut dim move it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from tests.validation.best import Row, exchanged, f32, reduced

X = {"x": 8}


def _of_loss(program: Callable[..., Tensor], *which: int) -> Callable[..., Any]:
    return sl.grad(lambda *args: program(*args).sin().sum(), which or 0)


N, W = 1024, 512
LINE = W * 4


def _lap(u: Tensor) -> Any:
    p = F.pad(u, (1, 1, 1, 1))
    return p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:] - 4 * u


def _smooth(u: Tensor, f: Tensor) -> Any:
    return u + 0.2 * (f - _lap(u)) * -1


def _vcycle(u: Tensor, f: Tensor, levels: int = 3) -> Any:
    u = _smooth(u, f)
    if levels > 1:
        r = f - _lap(u)
        c = F.avg_pool2d(r[None, None], 2)[0, 0]
        e = _vcycle(torch.zeros_like(c), c, levels - 1)
        u = u + F.interpolate(e[None, None], scale_factor=2.0)[0, 0]
    return _smooth(u, f)


def _adi(u: Tensor, a: Tensor, b: Tensor) -> Any:
    for _ in range(2):
        u = a @ (u + 0.1 * u.roll(1, 1))
        u = u @ b
    return u


def _lbm(f: Tensor) -> Any:
    cx = [0, 1, 0, -1, 0, 1, -1, -1, 1]
    cy = [0, 0, 1, 0, -1, 1, 1, -1, -1]
    w = torch.tensor([4 / 9] + [1 / 9] * 4 + [1 / 36] * 4)
    X_ = torch.tensor(cx) * 1.0
    Y_ = torch.tensor(cy) * 1.0
    for _ in range(2):
        f = torch.stack([f[i].roll((cy[i], cx[i]), (0, 1)) for i in range(9)])
        rho = f.sum(0)
        u = torch.einsum("i,ihw->hw", X_, f) / rho
        v = torch.einsum("i,ihw->hw", Y_, f) / rho
        e = X_[:, None, None] * u + Y_[:, None, None] * v
        f = f + 0.6 * (w[:, None, None] * rho * (1 + 3 * e + 4.5 * e * e - 1.5 * (u * u + v * v)) - f)
    return f


def _gray(u: Tensor, v: Tensor) -> Any:
    l = lambda z: z.roll(1, 0) + z.roll(-1, 0) + z.roll(1, 1) + z.roll(-1, 1) - 4 * z
    for _ in range(3):
        r = u * v * v
        u, v = (u + 0.16 * l(u) - r + 0.03 * (1 - u), v + 0.08 * l(v) + r - 0.09 * v)
    return (u, v)


def _yee(ez: Tensor, hx: Tensor, hy: Tensor) -> Any:
    for _ in range(3):
        hx = hx - 0.5 * (ez.roll(-1, 1) - ez)
        hy = hy + 0.5 * (ez.roll(-1, 0) - ez)
        ez = ez + 0.5 * (hy - hy.roll(1, 0) - (hx - hx.roll(1, 1)))
    return (ez, hx, hy)


def _cg(b: Tensor) -> Any:
    x = torch.zeros_like(b)
    r = p = b
    o = (r * r).sum()
    for _ in range(3):
        q = -_lap(p)
        a = o / (p * q).sum()
        x, r = x + a * p, r - a * q
        n = (r * r).sum()
        p, o = r + n / o * p, n
    return x


def _redblack(u: Tensor) -> Any:
    m = ((torch.arange(N)[:, None] + torch.arange(W)) % 2).bool()
    for _ in range(2):
        for c in (m, ~m):
            p = F.pad(u, (1, 1, 1, 1))
            u = torch.where(c, (p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:]) / 4, u)
    return u


def _wave(u: Tensor, v: Tensor) -> Any:
    for _ in range(3):
        u, v = (2 * u - v + 0.1 * _lap(u), u)
    return u


def _life(x: Tensor) -> Any:
    k = torch.ones(1, 1, 3, 3)
    for _ in range(2):
        n = F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), k) - x
        x = ((n == 3) | (n == 2) & (x > 0)).float()
    return x


def _shallow(h: Tensor, u: Tensor, v: Tensor) -> Any:
    dx = lambda z: (z.roll(-1, 0) - z.roll(1, 0)) / 2
    dy = lambda z: (z.roll(-1, 1) - z.roll(1, 1)) / 2
    for _ in range(2):
        h, u, v = (
            h - 0.1 * (dx(h * u) + dy(h * v)),
            u - 0.1 * (u * dx(u) + v * dy(u) + dx(h)),
            v - 0.1 * (u * dx(v) + v * dy(v) + dy(h)),
        )
    return h


def _deposited(x: Tensor, q: Tensor, field: Tensor) -> Any:
    """Particles in cells: charges go to the four corners around, and the field there moves them."""
    (n, m), at = field.shape, x.floor()
    i, f = at.long(), x - at
    corners = [(a, b) for a in (0, 1) for b in (0, 1)]
    places = [(i[:, 0] + a) % n * m + (i[:, 1] + b) % m for a, b in corners]
    shares = [(f[:, 0] if a else 1 - f[:, 0]) * (f[:, 1] if b else 1 - f[:, 1]) for a, b in corners]
    charge = torch.zeros(n * m)
    for place, share in zip(places, shares, strict=True):
        charge = charge.index_add(0, place, q * share)
    charge = charge.view(n, m)
    force = torch.stack([charge.roll(-1, d) - charge.roll(1, d) for d in (0, 1)], -1).view(-1, 2)
    return x + 0.1 * sum(force[p] * s[:, None] for p, s in zip(places, shares, strict=True))


PARTICLES = (f32(1 << 16, 2), f32(1 << 16), f32(64, 64))
ROWS = [
    Row("V-cycle of three grids, rows cut", _vcycle, (f32(N, W),) * 2, ("h@x w",) * 2, X,
        2 * LINE * (3 + 2 / 2 + 1 / 4), 2 * (3 + 2 + 1)),
    Row("alternating directions, rows cut", _adi, (f32(2048, 2048),) * 3, ("h@x w", "...", "..."), X,
        4 * exchanged(2048 * 2048 * 4, 8), 4, out_specs="h@x w"),
    Row("lattice Boltzmann, rows cut", _lbm, (f32(9, N, W),), ("i h@x w",), X, 2 * 6 * LINE, 2 * 6),
    Row("lattice Boltzmann, both dims cut", _lbm, (f32(9, N, W),), ("i h@x w@y",), {"x": 4, "y": 2},
        2 * (6 * LINE / 2 + 6 * N), 2 * 12),
    Row("reaction and diffusion, rows cut", _gray, (f32(N, W),) * 2, ("h@x w",) * 2, X, 3 * 4 * LINE, 3 * 4),
    Row("Maxwell on a staggered grid, rows cut", _yee, (f32(N, W),) * 3, ("h@x w",) * 3, X, 3 * 2 * LINE, 6),
    Row("conjugate gradients of a stencil, rows cut", _cg, (f32(N, W),), ("h@x w",), X,
        3 * 2 * LINE + 6 * reduced(4, 8), 6 + 6),
    Row("Gauss-Seidel in two colors, rows cut", _redblack, (f32(N, W),), ("h@x w",), X, 4 * 2 * LINE, 8),
    Row("gradient of wave steps, rows cut", _of_loss(_wave), (f32(N, W),) * 2, ("h@x w",) * 2, X,
        6 * 2 * LINE, 12),
    Row("game of life, rows cut", _life, (f32(1, 1, N, W),), ("b c h@x w",), X, 2 * 2 * LINE, 4),
    Row("particles in cells, particles cut", _deposited, PARTICLES, ("p@x d", "p@x", "..."), X,
        reduced(64 * 64 * 4, 8), 1),
    Row("gradients of particles in cells", _of_loss(_deposited), PARTICLES, ("p@x d", "p@x", "..."), X,
        2 * reduced(64 * 64 * 4, 8), 2),
    # What flows is a product: its borders are made of those of its factors, as long as both are needed.
    Row("shallow water, rows cut", _shallow, (f32(N, W),) * 3, ("h@x w",) * 3, X, (6 + 2) * LINE, 6 + 2),
]  # fmt: skip
