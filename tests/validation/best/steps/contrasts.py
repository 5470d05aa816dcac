"""Losses that compare samples, and classes of a cut vocabulary."""

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
OR = reduced(N * 4, 8)
n = 4096


def _clip(a: Tensor, b: Tensor) -> Any:
    a, b = (F.normalize(a, dim=-1), F.normalize(b, dim=-1))
    s = a @ b.t() * 14
    y = torch.arange(len(a))
    return (F.cross_entropy(s, y) + F.cross_entropy(s.t(), y)) / 2


def _ntxent(a: Tensor, b: Tensor) -> Any:
    z = F.normalize(torch.cat([a, b]), dim=-1)
    s = z @ z.t() / 0.5
    s = s.masked_fill(torch.eye(len(z)).bool(), -1000000000.0)
    return F.cross_entropy(s, (torch.arange(len(z)) + len(a)) % len(z))


def _supcon(z: Tensor, y: Tensor) -> Any:
    z = F.normalize(z, dim=-1)
    s = z @ z.t() / 0.1
    eye = torch.eye(len(z)).bool()
    lp = s - s.masked_fill(eye, -1000000000.0).logsumexp(1, keepdim=True)
    m = ((y[:, None] == y) & ~eye).float()
    return -((m * lp).sum(1) / m.sum(1).clamp(min=1)).mean()


def _towers(u: Tensor, i: Tensor, a: Tensor, b: Tensor) -> Any:
    q = F.embedding(a, u)
    k = F.embedding(b, i)
    s = q @ k.t()
    return F.cross_entropy(s, torch.arange(len(a)))


def _softcap(w: Tensor, x: Tensor, y: Tensor) -> Any:
    return F.cross_entropy(30 * torch.tanh(x @ w / 30), y)


VO = (f32(D, V), f32(N, D), ints(N))
CUT = "d v@x", "n d", "n"


def _entropy(w: Tensor, x: Tensor) -> Any:
    lp = (x @ w).log_softmax(-1)
    return -(lp.exp() * lp).sum(-1).mean()


def _focal(w: Tensor, x: Tensor, y: Tensor) -> Any:
    l = F.cross_entropy(x @ w, y, reduction="none")
    return ((1 - (-l).exp()) ** 2 * l).mean()


def _towards(w: Tensor, x: Tensor, teacher: Tensor) -> Any:
    return F.kl_div((x @ w).log_softmax(-1), teacher.softmax(-1), reduction="batchmean")


def _chunkedce(w: Tensor, x: Tensor, y: Tensor) -> Any:
    parts = zip(x.chunk(4), y.chunk(4), strict=True)
    return sum(F.cross_entropy(a @ w, b, reduction="sum") for a, b in parts) / len(x)


def _ignore(w: Tensor, x: Tensor, y: Tensor) -> Any:
    return F.cross_entropy(x @ w, y, ignore_index=-100)


def _acc(w: Tensor, x: Tensor, y: Tensor) -> Any:
    return ((x @ w).argmax(-1) == y).float().mean()


def _resid(p: Tensor, q: Tensor) -> Any:
    r = F.relu(p.softmax(-1) - q.softmax(-1))
    return r / r.sum(-1, keepdim=True)


def _gumbel(l: Tensor, g: Tensor) -> Any:
    return (l / 0.7 + g).argmax(-1)


def _dqn(w: Tensor, u: Tensor, tw: Tensor, tu: Tensor, s: Tensor, a: Tensor, r: Tensor, s2: Tensor) -> Any:
    q = lambda w, u, s: F.relu(s @ w) @ u
    t = r + 0.99 * q(tw, tu, s2).amax(-1).detach()
    return F.smooth_l1_loss(q(w, u, s).gather(1, a[:, None])[:, 0], t)


def _pairs(w: Tensor, u: Tensor, x: Tensor) -> Any:
    r = (F.gelu(x @ w) @ u)[:, 0]
    a, b = r.chunk(2)
    return -F.logsigmoid(a - b).mean()


def _din(t: Tensor, i: Tensor, h: Tensor, w: Tensor, u: Tensor) -> Any:
    q = F.embedding(i, t)
    k = F.embedding(h, t)
    a = (torch.cat([q[:, None].expand_as(k), k, q[:, None] * k], -1) @ w).relu() @ u
    return (a.softmax(1) * k).sum(1)


def _dcn(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Any:
    y = x
    for k in range(3):
        y = x * (y @ v[k] @ w[k] + b[k]) + y
    return y


def _fm_list(ws: Tensor, i: Tensor) -> Any:
    e = torch.stack([F.embedding(i[:, k], w) for k, w in enumerate(ws)], 1)
    return 0.5 * (e.sum(1).square() - e.square().sum(1)).sum(-1)


def _inter(e: Tensor, x: Tensor) -> Any:
    z = torch.cat([x[:, None], e], 1)
    i, j = torch.tril_indices(z.shape[1], z.shape[1], -1)
    return torch.cat([x, torch.bmm(z, z.mT)[:, i, j]], 1)


ROWS = [
    Row("gradients of CLIP, both directions, batch cut", sl.grad(_clip, (0, 1)), (f32(n, 512),) * 2, ("n@x d",) * 2,
        X, 2 * gathered(n * 512 * 4, 8) + 2 * reduced(n * 4, 8), 4),
    Row("SimCLR, batch cut", _ntxent, (f32(n, 512),) * 2, ("n@x d",) * 2, X,
        2 * gathered(n * 512 * 4, 8) + reduced(4, 8), 2),
    Row("gradients of SimCLR, batch cut", sl.grad(_ntxent, (0, 1)), (f32(n, 512),) * 2, ("n@x d",) * 2, X,
        4 * gathered(n * 512 * 4, 8), 2),
    Row("gradient of supervised contrast, batch cut", sl.grad(_supcon), (f32(n, 512), ints(n)), ("n@x d", "n@x"), X,
        2 * gathered(n * 512 * 4, 8) + gathered(n * 8, 8), 3),
    Row("two towers with negatives of the batch, rows and batch cut", _towers,
        (f32(1 << 20, 64), f32(1 << 20, 64), ints(n), ints(n)), ("v@x d", "v@x d", "n@x", "n@x"), X,
        2 * gathered(n * 8, 8) + gathered(n * 64 * 4, 8) + reduced(n * 64 * 4, 8) + reduced(4, 8), 5),
    Row("gradients with capped logits, vocabulary cut", sl.grad(_softcap, (0, 1)), VO, CUT, X,
        2 * OR + reduced(ACT, 8), 3),
    Row("gradients of an entropy, vocabulary cut", sl.grad(_entropy, (0, 1)), VO[:2], CUT[:2], X,
        3 * OR + reduced(ACT, 8), 4),
    Row("gradients of a focal loss, vocabulary cut", sl.grad(_focal, (0, 1)), VO, CUT, X,
        2 * OR + reduced(ACT, 8) + OR / 1, 4),
    Row("gradients of distillation from a teacher's logits, vocabulary cut", sl.grad(_towards, (0, 1)),
        (*VO[:2], f32(N, V)), (*CUT[:2], "n v@x"), X, 4 * OR + reduced(ACT, 8), 5),
    Row("gradients in four chunks of tokens, vocabulary cut", sl.grad(_chunkedce, (0, 1)), VO, CUT, X,
        2 * OR + reduced(ACT, 8), 8 + 1),
    Row("gradients of cross entropy with holes, vocabulary cut", sl.grad(_ignore, (0, 1)), VO, CUT, X,
        2 * OR + reduced(ACT, 8), 3),
    Row("gradients of cross entropy with holes, batch cut", sl.grad(_ignore, (0, 1)), VO, ("d v", "n@x d", "n@x"), X,
        reduced(D * V * 4, 8) + reduced(8, 8), 2),
    Row("accuracy, vocabulary cut", _acc, VO, CUT, X, 3 * OR, 2, out_specs=""),
    Row("what is left of a rejected draft, vocabulary cut", _resid, (f32(64, V),) * 2, ("b v@x",) * 2, X,
        5 * reduced(64 * 4, 8), 5),
    Row("sampling by Gumbel noise, vocabulary cut", _gumbel, (f32(64, V),) * 2, ("b v@x",) * 2, X,
        reduced(64 * 12, 8), 2, out_specs="b"),
    Row("gradients of a reward model, pairs in halves of a cut batch", sl.grad(_pairs, (0, 1)),
        (f32(D, D), f32(D, 1), f32(N, D)), ("...", "...", "n@x d"), X, reduced((D * D + D) * 4, 8) + N * 4 / 8, 3),
    Row("gradients of a Q-network, data parallel", sl.grad(_dqn, (0, 1)),
        (f32(64, 256), f32(256, 16), f32(64, 256), f32(256, 16), f32(n, 64), ints(n), f32(n), f32(n, 64)),
        (*["..."] * 4, "n@x s", "n@x", "n@x", "n@x s"), X, reduced((64 * 256 + 256 * 16) * 4, 8), 2),
    Row("gradients of crosses of low rank, data parallel", _of_loss(_dcn, 1, 2, 3),
        (f32(n, 512), f32(3, 32, 512), f32(3, 512, 32), f32(3, 512)), ("n@x d", "...", "...", "..."), X,
        reduced(3 * (2 * 32 * 512 + 512) * 4, 8), 3),
    Row("gradients of dot interactions, batch cut", _of_loss(_inter, 0, 1), (f32(n, 26, 64), f32(n, 64)),
        ("n@x k d", "n@x d"), X),
    Row("gradients of a factorization machine over a list of tables",
        sl.grad(lambda ws, i: _fm_list(ws, i).sin().sum()), ([f32(1 << 20, 64)] * 8, ints(n, 8)),
        (["v@x d"] * 8, "..."), X, 2 * reduced(n * 64 * 4, 8), 2, work=6.4),
    Row("attention to what users did, table by columns", _din,
        (f32(1 << 18, 64), ints(512), ints(512, 50), f32(192, 64), f32(64, 1)),
        ("v d@x", "b@x", "b@x l", "...", "..."), X, gathered(512 * 51 * 8, 8) + exchanged(512 * 51 * 64 * 4, 8), 4),
]  # fmt: skip
