"""Statistics of samples that are cut: what is small is added up, and all else stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from tests.validation.best import Row, f32, gathered, ints, reduced

X = {"x": 8}


def _of_loss(program: Callable[..., Tensor], *which: int) -> Callable[..., Any]:
    return sl.grad(lambda *args: program(*args).sin().sum(), which or 0)


n, d, k = 65536, 256, 32


def _nmf(v: Tensor, w: Tensor, h: Tensor) -> Any:
    for _ in range(2):
        h = h * (w.t() @ v) / (w.t() @ w @ h + 1e-9)
        w = w * (v @ h.t()) / (w @ (h @ h.t()) + 1e-9)
    return (w, h)


def _irls(x: Tensor, y: Tensor, b: Tensor) -> Any:
    for _ in range(2):
        p = torch.sigmoid(x @ b)
        w = p * (1 - p)
        b = b + torch.linalg.solve(x.t() @ (w[:, None] * x), x.t() @ (y - p))
    return b


def _gmm(x: Tensor, mu: Tensor, pi: Tensor) -> Any:
    r = (-0.5 * (x[:, None] - mu).square().sum(-1) + pi.log()).softmax(1)
    t = r.sum(0)
    mu = r.t() @ x / t[:, None]
    var = r.t() @ x.square() / t[:, None] - mu.square()
    return (mu, var, t / len(x))


def _ridge(x: Tensor, y: Tensor) -> Any:
    return torch.linalg.solve(x.t() @ x + 0.1 * torch.eye(d), x.t() @ y)


def _lanczos(a: Tensor, v: Tensor) -> Any:
    v = v / v.norm()
    p = torch.zeros_like(v)
    b = 0
    for _ in range(3):
        w = a @ v
        al = (w * v).sum()
        w = w - al * v - b * p
        b = w.norm()
        p, v = v, w / b
    return v


def _ica(x: Tensor, w: Tensor) -> Any:
    y = x @ w.t()
    g = y.tanh()
    w = g.t() @ x / len(x) - (1 - g * g).mean(0)[:, None] * w
    u, _, v = torch.linalg.svd(w)
    return u @ v


def _als(r: Tensor, v: Tensor) -> Any:
    g = v.t() @ v + 0.1 * torch.eye(k)
    u = torch.linalg.solve(g, (r @ v).t()).t()
    h = u.t() @ u + 0.1 * torch.eye(k)
    return (u, torch.linalg.solve(h, u.t() @ r).t())


def _hist(x: Tensor) -> Any:
    return torch.bucketize(x, torch.linspace(-3, 3, 63))


def _ece(logits: Tensor, y: Tensor) -> Any:
    p, c = logits.softmax(-1).max(-1)
    b = (p * 15).long().clamp(max=14)
    ok = (c == y).float()
    z = torch.zeros(15)
    return ((z.index_add(0, b, p) - z.index_add(0, b, ok)).abs() / len(y)).sum()


def _particles(x: Tensor, y: Tensor, key: Tensor) -> Any:
    x = 0.9 * x + key
    lw = -0.5 * (y - x).square().sum(-1)
    w = lw.softmax(0)
    return (w @ x, 1 / (w * w).sum(), x, w)


def _es(theta: Tensor, eps: Tensor, f: Tensor) -> Any:
    a = (f - f.mean()) / (f.std() + 1e-8)
    return theta + 0.01 * (a @ eps) / len(f)


def _hmc(q: Tensor, p: Tensor, x: Tensor, y: Tensor) -> Any:
    g = lambda q: x.t() @ (torch.sigmoid(x @ q) - y) + q
    p = p - 0.05 * g(q)
    for _ in range(2):
        q = q + 0.1 * p
        p = p - 0.1 * g(q)
    return (q, p)


def _knn(q: Tensor, c: Tensor, y: Tensor) -> Any:
    i = (q.square().sum(1, keepdim=True) - 2 * q @ c.t() + c.square().sum(1)).topk(8, -1, largest=False)[1]
    return F.one_hot(y[i], 16).sum(1).argmax(1)


def _spectral(a: Tensor, v: Tensor) -> Any:
    dg = a.sum(1).rsqrt()
    for _ in range(3):
        v = torch.linalg.qr(dg[:, None] * (a @ (dg[:, None] * v)))[0]
    return v


def _shrunk(x: Tensor) -> Any:
    x = x - x.mean(0)
    c = x.t() @ x / len(x)
    return 0.9 * c + 0.1 * c.diagonal().mean() * torch.eye(d)


def _discrepancy(x: Tensor, y: Tensor) -> Any:
    pairs = (x, x, 1), (y, y, 1), (x, y, -2)
    return sum(s * (-torch.cdist(a, b).square()).exp().mean() for a, b, s in pairs)


ROWS = [
    Row("non-negative factors, rows cut", _nmf, (f32(n, d), f32(n, k), f32(k, d)), ("n@x d", "n@x k", "..."), X,
        2 * reduced((k * d + k * k) * 4, 8), 4),
    Row("logistic regression by Newton, samples cut", _irls, (f32(n, d), f32(n), f32(d)), ("n@x d", "n@x", "..."), X,
        2 * reduced((d * d + d) * 4, 8), 4),
    Row("mixture of Gaussians, samples cut", _gmm, (f32(n, 16), f32(k, 16), f32(k)), ("n@x d", "...", "..."), X,
        reduced((k + 2 * k * 16) * 4, 8), 3),
    Row("ridge regression, samples cut", _ridge, (f32(n, d), f32(n, 8)), ("n@x d", "n@x o"), X,
        reduced((d * d + d * 8) * 4, 8), 2),
    Row("random features, then ridge, samples cut",
        lambda x, w, y: _ridge(torch.cat([(x @ w).cos(), (x @ w).sin()], 1), y),
        (f32(n, 16), f32(16, 128), f32(n, 8)), ("n@x d", "...", "n@x o"), X, reduced((d * d + d * 8) * 4, 8), 2),
    Row("Lanczos, rows cut", _lanczos, (f32(8192, 8192), f32(8192)), ("m@x n", "m@x"), X,
        3 * gathered(8192 * 4, 8) + 7 * reduced(4, 8), 10),
    Row("independent components, samples cut", _ica, (f32(n, 64), f32(64, 64)), ("n@x d", "..."), X,
        reduced((64 * 64 + 64) * 4, 8), 2),
    Row("alternating least squares, rows cut", _als, (f32(n, d), f32(d, k)), ("n@x d", "..."), X,
        reduced((k * k + k * d) * 4, 8), 2),
    Row("jackknife of a mean, samples cut", lambda x: ((x.sum() - x) / (len(x) - 1)).var(), (f32(n),), ("n@x",), X,
        3 * reduced(4, 8), 3),
    Row("histogram by bins and counts, samples cut",
        lambda x: torch.zeros(64).index_add(0, _hist(x), torch.ones(len(x))), (f32(n),), ("n@x",), X,
        reduced(64 * 4, 8), 1),
    Row("histogram by one-hot rows, samples cut", lambda x: F.one_hot(_hist(x), 64).sum(0), (f32(n),), ("n@x",), X,
        reduced(64 * 8, 8), 1),
    Row("histc, samples cut", lambda x: torch.histc(x, 64, -3, 3), (f32(n),), ("n@x",), X, reduced(64 * 4, 8), 1,
        out_specs="_"),
    Row("calibration error, samples cut", _ece, (f32(n, 64), ints(n)), ("n@x c", "n@x"), X, reduced(15 * 4, 8), 1),
    Row("confusion matrix, samples cut",
        lambda a, b: torch.zeros(64 * 64).index_add(0, a * 64 + b, torch.ones(len(a))).view(64, 64),
        (ints(n), ints(n)), ("n@x", "n@x"), X, reduced(64 * 64 * 4, 8), 1),
    Row("particle filter's estimates, particles cut", _particles, (f32(n, 16), f32(16), f32(n, 16)),
        ("n@x d", "...", "n@x d"), X, 2 * reduced(4, 8) + reduced((16 + 1) * 4, 8), 4),
    Row("evolution strategies, population cut", _es, (f32(65536), f32(256, 65536), f32(256)), ("d", "p@x d", "p@x"),
        X, reduced(65536 * 4, 8) + 2 * reduced(4, 8), 3),
    Row("Hamiltonian Monte Carlo, data cut", _hmc, (f32(d), f32(d), f32(n, d), f32(n)),
        ("...", "...", "n@x d", "n@x"), X, 3 * reduced(d * 4, 8), 3),
    Row("votes of nearest neighbors, corpus cut", _knn, (f32(256, 128), f32(1 << 18, 128), ints(1 << 18)),
        ("q d", "n@x d", "n@x"), X, gathered(256 * 8 * 8 * 12, 8) + reduced(256 * 8 * 8, 8), 3),
    Row("votes of nearest neighbors, queries cut", _knn, (f32(2048, 128), f32(1 << 16, 128), ints(1 << 16)),
        ("q@x d", "n d", "n"), X),
    Row("spectral clustering, rows cut", _spectral, (f32(8192, 8192), f32(8192, 16)), ("m@x n", "m@x k"), X,
        3 * gathered(8192 * 16 * 4, 8) + 3 * gathered(9 * 16 * 16 * 4, 8), 6),
    Row("covariance with shrinkage, samples cut",
        _shrunk, (f32(n, d),), ("n@x d",), X, reduced(d * 4, 8) + reduced(d * d * 4, 8), 2),
    Row("correlation of features, samples cut", lambda x: torch.corrcoef(x.t()), (f32(n, d),), ("n@x d",), X,
        reduced(d * 4, 8) + reduced(d * d * 4, 8), 2),
    Row("standardized by median and deviation, features cut",
        lambda x: (x - x.median(0)[0]) / (x - x.median(0)[0]).abs().median(0)[0], (f32(4096, d),), ("n d@x",), X),
    Row("maximum mean discrepancy, samples cut", _discrepancy,
        (f32(4096, 64),) * 2, ("n@x d",) * 2, X, 2 * gathered(4096 * 64 * 4, 8) + reduced(4, 8), 3),
]  # fmt: skip
