"""Ways to update weights: second order, low rank, per sample, over tasks and replicas; and networks over cut graphs."""

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


D, FF, V, N = 1024, 4096, 32768, 8192
ACT = N * D * 4
n = 4096
MW = (f32(256, 512), f32(512, 64))


def _hvp2(w: Tensor, u: Tensor, vw: Tensor, vu: Tensor, x: Tensor, y: Tensor) -> Any:
    f = lambda w, u: F.mse_loss(F.gelu(x @ w) @ u, y)

    def dot(w: Any, u: Any) -> Any:
        a, b = torch.func.grad(f, (0, 1))(w, u)
        return (a * vw).sum() + (b * vu).sum()

    return torch.func.grad(dot, (0, 1))(w, u)


def _galore(x: Tensor, w: Tensor, p: Tensor, m: Tensor, y: Tensor) -> Any:
    g = torch.func.grad(lambda w: F.mse_loss(x @ w, y))(w)
    r = p.t() @ g
    m = 0.9 * m + 0.1 * r
    return (w - 0.1 * p @ m, m)


def _shampoo(w: Tensor, g: Tensor, l: Tensor, r: Tensor) -> Any:
    l, r = (l + g @ g.t(), r + g.t() @ g)
    return (l, r)


def _lamb(ws: Tensor, gs: Tensor) -> Any:
    out = []
    for w, g in zip(ws, gs, strict=True):
        u = g / (g.abs() + 1e-6) + 0.01 * w
        out.append(w - 0.1 * (w.norm() / u.norm()) * u)
    return out


def _sam(w: Tensor, x: Tensor, y: Tensor) -> Any:
    f = lambda w: F.cross_entropy(x @ w, y)
    g = torch.func.grad(f)(w)
    return w - 0.1 * torch.func.grad(f)(w + 0.05 * g / (g.norm() + 1e-12))


def _maml(w: Tensor, xs: Tensor, ys: Tensor, xt: Tensor, yt: Tensor) -> Any:

    def task(x: Any, y: Any, a: Any, b: Any) -> Any:
        f = lambda w, x, y: F.mse_loss(F.relu(x @ w[0]) @ w[1], y)
        g = torch.func.grad(f)(w, x, y)
        return f([p - 0.1 * q for p, q in zip(w, g, strict=True)], a, b)

    return torch.func.vmap(task)(xs, ys, xt, yt).mean()


def _dpsgd(w: Tensor, u: Tensor, x: Tensor, y: Tensor, z: Tensor) -> Any:
    f = lambda w, u, x, y: F.mse_loss(F.gelu(x @ w) @ u, y)
    a, b = torch.func.vmap(torch.func.grad(f, (0, 1)), (None, None, 0, 0))(w, u, x, y)
    s = (1 / (a.square().sum((1, 2)) + b.square().sum((1, 2))).sqrt()).clamp(max=1)
    return (torch.einsum("n,nij->ij", s, a) + z, torch.einsum("n,nij->ij", s, b))


def _diloco(w: Tensor, x: Tensor, y: Tensor, m: Tensor) -> Any:
    f = lambda w, x, y: F.mse_loss(F.relu(x @ w), y)

    def inner(w0: Any, x: Any, y: Any) -> Any:
        for t in range(2):
            w0 = w0 - 0.1 * torch.func.grad(f)(w0, x[t], y[t])
        return w0

    new = torch.func.vmap(inner, (None, 0, 0))(w, x, y).mean(0)
    m = 0.9 * m + (w - new)
    return (w - m, m)


def _byol(online: Tensor, target: Tensor, x: Tensor, y: Tensor) -> Any:
    p = F.normalize(x @ online, dim=-1)
    t = F.normalize(y @ target, dim=-1).detach()
    return (2 - 2 * (p * t).sum(-1)).mean()


def _byolstep(online: Tensor, target: Tensor, x: Tensor, y: Tensor) -> Any:
    g = torch.func.grad(_byol)(online, target, x, y)
    online = online - 0.1 * g
    return (online, 0.99 * target + 0.01 * online)


def _expertchoice(x: Tensor, r: Tensor, up: Tensor, down: Tensor) -> Any:
    w, i = (x @ r).softmax(-1).t().topk(N // 16, -1)
    y = torch.bmm(F.gelu(torch.bmm(x[i], up)), down) * w[..., None]
    return torch.zeros_like(x).index_add(0, i.flatten(), y.flatten(0, 1))


EC = (f32(N, D), f32(D, 16), f32(16, D, FF), f32(16, FF, D))


def _gcn(ws: Tensor, x: Tensor, i: Tensor, j: Tensor, deg: Tensor) -> Any:
    for w in ws:
        h = x @ w * deg.rsqrt()[:, None]
        x = F.relu(torch.zeros_like(h).index_add(0, j, h[i]) * deg.rsqrt()[:, None])
    return x


ND, EG = 1 << 14, 1 << 18


def _sage(x: Tensor, i: Tensor, j: Tensor, w: Tensor, u: Tensor) -> Any:
    m = (
        torch.zeros_like(x).index_add(0, j, x[i])
        / torch.zeros(len(x)).index_add(0, j, torch.ones(len(j))).clamp(min=1)[:, None]
    )
    return F.relu(x @ w + m @ u)


def _pool(x: Tensor, b: Tensor) -> Any:
    return torch.zeros(256, 64).index_add(0, b, F.relu(x))


def _pointnet(x: Tensor, w: Tensor, u: Tensor) -> Any:
    return F.relu(F.relu(x @ w) @ u).amax(1)


ROWS = [
    Row("Hessian times a vector, twice in reverse, data parallel", _hvp2, (*MW, *MW, f32(n, 256), f32(n, 64)),
        (*["..."] * 4, "n@x d", "n@x o"), X, reduced((256 * 512 + 512 * 64) * 4, 8), 2),
    Row("GaLore, data parallel", _galore, (f32(N, D), f32(D, D), f32(D, 16), f32(16, D), f32(N, D)),
        ("n@x d", "...", "...", "...", "n@x e"), X, reduced(16 * D * 4, 8), 1, work=1.05),
    Row("Shampoo's statistics, rows cut", _shampoo, (f32(D, D),) * 4, ("m@x n", "m@x n", "m@x k", "n@x k"), X,
        gathered(D * D * 4, 8), 1, out_specs=("m@x k", "n@x k")),
    Row("LAMB's trust ratios, rows cut", _lamb, ([f32(D, D)] * 2, [f32(D, D)] * 2), (["d@x e"] * 2,) * 2, X,
        4 * reduced(4, 8), 4),
    Row("sharpness-aware step, data parallel", _sam, (f32(D, 256), f32(N, D), ints(N)), ("...", "n@x d", "n@x"), X,
        2 * reduced(D * 256 * 4, 8) + 2 * 7, 4),
    Row("MAML, tasks cut", sl.grad(_maml),
        ([f32(64, 256), f32(256, 8)], f32(64, 128, 64), f32(64, 128, 8), f32(64, 128, 64), f32(64, 128, 8)),
        (["..."] * 2, *["t@x n d"] * 4), X, reduced((64 * 256 + 256 * 8) * 4, 8), 2),
    Row("gradients clipped by sample, batch cut", _dpsgd,
        (f32(64, 128), f32(128, 8), f32(1024, 64), f32(1024, 8), f32(64, 128)),
        ("...", "...", "n@x d", "n@x o", "..."), X, reduced((64 * 128 + 128 * 8) * 4, 8), 2),
    Row("replicas that meet every few steps", _diloco,
        (f32(D, 256), f32(8, 2, 256, D), f32(8, 2, 256, 256), f32(D, 256)), ("...", "r@x t n d", "r@x t n o", "..."),
        X, reduced(D * 256 * 4, 8), 1),
    Row("BYOL step, data parallel", _byolstep, (f32(D, 256), f32(D, 256), f32(N, D), f32(N, D)),
        ("...", "...", "n@x d", "n@x d"), X, reduced(D * 256 * 4, 8), 1),
    Row("BYOL step, FSDP", _byolstep, (f32(D, 256), f32(D, 256), f32(N, D), f32(N, D)),
        ("d@x e", "d@x e", "n@x d", "n@x d"), X, 3 * gathered(D * 256 * 4, 8), 3, out_specs=("d@x e", "d@x e")),
    Row("experts choose tokens, experts cut", _expertchoice, EC, ("n d", "...", "e@x d f", "e@x f d"), X,
        gathered(ACT, 8) + gathered(N * 8, 8) + 2 * reduced(N * 4, 8), 4, out_specs="n d"),
    Row("gradients where experts choose tokens", _of_loss(_expertchoice, 2, 3), EC,
        ("n d", "...", "e@x d f", "e@x f d"), X, gathered(ACT, 8) + gathered(N * 8, 8) + 2 * reduced(N * 4, 8), 4),
    # Who has all nodes' values of a channel needs nothing of other nodes: channels are cut between the products.
    Row("gradients of a graph network of two layers, nodes and edges cut", _of_loss(_gcn, 0),
        ([f32(128, 64), f32(64, 64)], f32(ND, 128), ints(EG), ints(EG), f32(ND)),
        (["..."] * 2, "n@x d", "e@x", "e@x", "n@x"), X,
        2 * gathered(8 * EG, 8) + 6 * exchanged(ND * 64 * 4, 8) + gathered(ND * 4, 8) + reduced(192 * 64 * 4, 8), 11),
    # Everybody projects all nodes once, which takes less time than to gather what each projected of some.
    Row("gradients of a graph network of two layers, edges cut", _of_loss(_gcn, 0),
        ([f32(128, 64), f32(64, 64)], f32(ND, 128), ints(EG), ints(EG), f32(ND)),
        (["..."] * 2, "n d", "e@x", "e@x", "n"), X,
        7 * gathered(ND * 64 * 4, 8) + reduced((128 + 64) * 64 * 4, 8), 9, work=2.75),
    Row("means of neighbors, nodes and edges cut", _sage,
        (f32(ND, 64), ints(EG), ints(EG), f32(64, 64), f32(64, 64)), ("n@x d", "e@x", "e@x", "...", "..."), X,
        2 * gathered(ND * 64 * 4, 8) + gathered(ND * 4, 8), 3, out_specs="n@x d"),
    Row("graphs pooled, nodes cut", _pool, (f32(ND, 64), ints(ND)), ("n@x d", "n@x"), X, gathered(256 * 64 * 4, 8),
        1, short={"bytes": 2}, why="a result that nobody places is summed whole: no dim of it wants the axis"),
    Row("gradients of PointNet, clouds cut", _of_loss(_pointnet, 1, 2), (f32(64, 2048, 3), f32(3, 64), f32(64, 256)),
        ("b@x p c", "...", "..."), X, reduced((3 * 64 + 64 * 256) * 4, 8), 2),
]  # fmt: skip
