"""Optimizers whose parameters are cut in several ways, linear algebra on cut matrices, and mixers of cut sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from tests.validation.best import Row, exchanged, f32, gathered, ints, reduced

X, DT, CUBE = {"x": 8}, {"data": 2, "tensor": 4}, {"pod": 2, "data": 2, "tensor": 2}
B, S, D, N = 4, 1024, 512, 4096


def _of_loss(program: Callable[..., Tensor], *which: int) -> Callable[..., Any]:
    return sl.grad(lambda *args: program(*args).sin().sum(), which or 0)


# Updates --------------------------------------------------------------------------------------------------------------


def _clipped(gs: Sequence[Tensor]) -> Any:
    norm = sum(g.square().sum() for g in gs) ** 0.5
    return [g / norm for g in gs]


def _step(ps: Sequence[Tensor], x: Tensor, y: Tensor) -> Any:
    gs = torch.func.grad(lambda ps: F.cross_entropy(F.gelu(x @ ps[0]) @ ps[1], y))(ps)
    norm = sum(g.square().sum() for g in gs) ** 0.5
    return [p - 0.1 * g / (norm + 1) for p, g in zip(ps, gs, strict=True)]


def _adafactor(w: Tensor, g: Tensor, r: Tensor, c: Tensor) -> Any:
    square = g * g + 1e-30
    r, c = 0.9 * r + 0.1 * square.mean(1), 0.9 * c + 0.1 * square.mean(0)
    u = g * (r / r.mean()).rsqrt()[:, None] * c.rsqrt()
    u = u / u.square().mean().sqrt().clamp(min=1)
    return w - 0.01 * w.square().mean().sqrt().clamp(min=1e-3) * u, r, c


def _lars(ws: Sequence[Tensor], gs: Sequence[Tensor]) -> Any:
    return [w - 0.1 * (w.norm() / (g.norm() + 1e-4 * w.norm())) * g for w, g in zip(ws, gs, strict=True)]


def _muon(g: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    m = 0.95 * m + g
    x = m / m.norm(dim=(-2, -1), keepdim=True)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4 * x + (-4.7 * a + 2 * (a @ a)) @ x
    return x, m


def _normed(v: Tensor, g: Tensor, x: Tensor) -> Tensor:
    return x @ (g * v / v.norm(dim=0, keepdim=True))


def _noise(w: Tensor, x: Tensor, y: Tensor) -> Any:
    """How much gradients of micro-batches differ, and their mean, by which one then steps."""
    gs = torch.func.vmap(torch.func.grad(lambda w, x, y: F.mse_loss(x @ w, y)), (None, 0, 0))(w, x, y)
    return gs.square().sum((1, 2)).mean(), gs.mean(0).square().sum(), gs.mean(0)


def _row_wise(table: Tensor, h: Tensor, i: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Adagrad with one number for each row."""
    u = torch.zeros_like(table).index_add(0, i, g)
    h = h + u.square().mean(1)
    return table - 0.1 * u / (h.sqrt() + 1e-8)[:, None], h


# Matrices -------------------------------------------------------------------------------------------------------------


def _sketched(a: Tensor, o: Tensor) -> tuple[Tensor, Tensor]:
    q = torch.linalg.qr(a @ o)[0]
    u, s, _ = torch.linalg.svd(q.t() @ a, full_matrices=False)
    return q @ u, s


def _subspace(a: Tensor, q: Tensor) -> Tensor:
    for _ in range(2):
        q = torch.linalg.qr(a @ q)[0]
    return q


def _cholesky_qr(a: Tensor) -> Tensor:
    r = torch.linalg.cholesky(a.t() @ a + 1e-3 * torch.eye(a.shape[1]))
    return torch.linalg.solve_triangular(r, a.t(), upper=False).t()


def _nystrom(x: Tensor, marks: Tensor) -> Tensor:
    k = torch.exp(-(torch.cdist(x, marks) ** 2))
    among = torch.exp(-(torch.cdist(marks, marks) ** 2)) + 0.01 * torch.eye(len(marks))
    return k @ torch.linalg.solve(among, k.t() @ x)


def _woodbury(u: Tensor, d: Tensor, b: Tensor) -> Tensor:
    scaled = u / d[:, None]
    return b / d - scaled @ torch.linalg.solve(torch.eye(u.shape[1]) + u.t() @ scaled, u.t() @ (b / d))


def _shortest(d: Tensor) -> Tensor:
    for _ in range(2):
        d = (d[:, :, None] + d[None]).amin(1)
    return d


STACK = f32(64, 16, 16)

# Sequences ------------------------------------------------------------------------------------------------------------


def _free(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Transformers free of attention (Zhai et al. 2021, arXiv:2105.14103)."""
    over = w.exp().tril()
    return q.sigmoid() * torch.einsum("ts,bsd->btd", over, k.exp() * v) / torch.einsum("ts,bsd->btd", over, k.exp())


def _gated(x: Tensor, wf: Tensor, wi: Tensor, wo: Tensor) -> Tensor:
    """HGRN (Qin et al. 2023, arXiv:2311.04823)."""
    f = (x @ wf).sigmoid()
    decay = f.log().cumsum(1)
    return (decay.exp() * (F.silu(x @ wi) * (1 - f) * (-decay).exp()).cumsum(1)) @ wo


def _shorter(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """An hourglass (Nawrot et al. 2021, arXiv:2110.13711): half as many tokens, of what is before them."""
    y = F.pad(x, (0, 0, 1, 0))[:, :-1].unflatten(1, (-1, 2)).mean(2)
    return x + (F.gelu(y @ up) @ down).repeat_interleave(2, 1)


def _decayed(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """RWKV-6 (Peng et al. 2024, arXiv:2404.05892)."""
    state, out = torch.zeros(*k[:, 0].shape, v.shape[-1]), []
    for t in range(k.shape[1]):
        new = k[:, t, :, :, None] * v[:, t, :, None]
        out.append(torch.einsum("bhe,bhef->bhf", r[:, t], state + u[:, :, None] * new))
        state = w[:, t, :, :, None] * state + new
    return torch.stack(out, 1)


def _in_slots(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, slot: Tensor, n: Tensor, o: Tensor) -> Any:
    kc, vc = kc.index_put((slot, n), k), vc.index_put((slot, n), v)
    there = (torch.arange(kc.shape[1]) <= n[:, None])[:, None, None]
    keys, values = kc[slot].transpose(1, 2), vc[slot].transpose(1, 2)
    return F.scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=there)[:, :, 0].flatten(1) @ o, kc, vc


def _soft(x: Tensor, slots: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Soft mixtures (Puigcerver et al. 2023, arXiv:2308.00951)."""
    scores = x @ slots.flatten(1)
    s = (scores.softmax(0).t() @ x).unflatten(0, (len(up), -1))
    return scores.softmax(1) @ torch.bmm(F.gelu(torch.bmm(s, up)), down).flatten(0, 1)


def _adapted(x: Tensor, w: Tensor, a: Tensor, b: Tensor, v: Tensor, c: Tensor, d: Tensor) -> Tensor:
    h = F.gelu(x @ w + (x @ a) @ b)
    return h @ v + (h @ c) @ d


def _attention(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor) -> Tensor:
    q, k, v = ((x @ w).unflatten(-1, (8, -1)).transpose(1, 2) for w in (wq, wk, wv))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) @ wo


MIXED = [f32(D, 2 * D), f32(2 * D, D), f32(D, D), f32(D, D)]
TURNED = ["d@data f@tensor", "f@tensor d@data"] * 2
SLOTS = (*[f32(32, 16, 64)] * 3, *[f32(64, S, 16, 64)] * 2, ints(32), ints(32), f32(1024, D))
ADAPTED = (f32(N, D), f32(D, 4 * D), f32(D, 8), f32(8, 4 * D), f32(4 * D, D), f32(4 * D, 8), f32(8, D))
TABLE = (f32(1 << 16, 64), f32(1 << 16), ints(8192), f32(8192, 64))
ACT = B * S * D * 4
WEIGHTS = (f32(8, S, D), *[f32(D, D)] * 4)

ROWS = [
    Row("gradients clipped, cut in both orders of the axes", _clipped, (MIXED,), (TURNED,), DT, reduced(4, 8), 1),
    Row("step of clipped gradients, cut in both orders of the axes", _step,
        ([f32(D, 2 * D), f32(2 * D, 64)], f32(N, D), ints(N)), (TURNED[:2], "n@data d", "n@data"), DT,
        2 * gathered(D * 2 * D + 2 * D * 64, 2) + reduced(N / 2 * 64 * 4, 4) + reduced(4, 8) + 4, 7),
    Row("Adafactor, both dims cut", _adafactor, (f32(D, 2 * D), f32(D, 2 * D), f32(D), f32(2 * D)),
        ("m@data n@tensor", "m@data n@tensor", "m@data", "n@tensor"), DT,
        reduced(D / 2 * 4, 4) + reduced(2 * D, 2) + 4 + 2 * 7, 5),
    Row("LARS, both dims cut", _lars, ([f32(D, D)] * 3,) * 2, (["d@data f@tensor"] * 3,) * 2, DT, 6 * 7, 6),
    Row("Muon, stack over data and rows over tensor", _muon, (f32(8, D, D),) * 2, ("l@data m@tensor n",) * 2, DT,
        exchanged(4 * D * D * 4, 4), 1),
    Row("Muon, rows over both axes", _muon, (f32(8, D, D),) * 2, ("l m@(data tensor) n",) * 2, DT,
        exchanged(8 * D * D * 4, 8), 1),
    Row("gradients of normed columns, columns and batch cut", _of_loss(_normed, 0, 1),
        (f32(D, 256), f32(256), f32(N, D)), ("d f@tensor", "f@tensor", "n@data d"), DT, reduced(D * 64 * 4, 2), 1),
    Row("noise of gradients, micro-batches cut", _noise, (f32(D, 64), f32(32, 128, D), f32(32, 128, 64)),
        ("...", "m@x n d", "m@x n o"), X, reduced(D * 64 * 4, 8) + 7, 2),
    Row("row-wise Adagrad, rows cut", _row_wise, TABLE, ("v@x d", "v@x", "b", "b d"), X),
    Row("row-wise Adagrad, rows and batch cut", _row_wise, TABLE, ("v@x d", "v@x", "b@x", "b@x d"), X,
        gathered(8192 * (64 * 4 + 8), 8), 2),
    Row("sketched singular vectors, rows cut", _sketched, (f32(1 << 15, D), f32(D, 16)), ("m@x n", "..."), X,
        gathered(9 * 16 * 16 * 4, 8) + reduced(16 * D * 4, 8), 2),
    Row("subspace iteration, rows cut", _subspace, (f32(N, N), f32(N, 8)), ("m@x n", "m@x k"), X,
        2 * gathered(N * 8 * 4, 8) + 2 * gathered(9 * 8 * 8 * 4, 8), 4),
    Row("QR by Cholesky, rows cut", _cholesky_qr, (f32(1 << 16, 64),), ("n@x d",), X, reduced(64 * 64 * 4, 8), 1),
    Row("Nystrom's method, samples cut", _nystrom, (f32(1 << 15, 16), f32(128, 16)), ("n@x d", "..."), X,
        reduced(128 * 16 * 4, 8), 1, work=1.1),
    Row("diagonal and low rank, solved, rows cut", _woodbury, (f32(1 << 16, 32), f32(1 << 16), f32(1 << 16)),
        ("n@x k", "n@x", "n@x"), X, reduced((32 * 32 + 32) * 4, 8), 2),
    Row("shortest paths by squares, rows cut", _shortest, (f32(256, 256),), ("m@x n",), X,
        2 * gathered(256 * 1024, 8), 2),
    Row("singular values of a cut stack", torch.linalg.svdvals, (STACK,), ("n@x i j",), X),
    Row("triangles of a cut stack", lambda a: torch.linalg.qr(a, mode="r")[1], (STACK,), ("n@x i j",), X),
    Row("gradients of least squares of a cut stack", _of_loss(lambda a, b: torch.linalg.lstsq(a, b).solution, 0, 1),
        (f32(64, 32, 8), f32(64, 32, 4)), ("n@x i j", "n@x i k"), X),
    Row("gradients of exponentials of a cut stack", _of_loss(lambda a, b: torch.linalg.matrix_exp(a) @ b, 0, 1),
        (STACK, f32(64, 16, 4)), ("n@x i j", "n@x j k"), X),
    # Channels are cut meanwhile.
    Row("free of attention, sequence cut", _free, (*[f32(B, S, D)] * 3, f32(S, S)), (*["b s@x d"] * 3, "..."), X,
        3 * exchanged(ACT, 8), 3),
    Row("gradients of one free of attention, sequence cut", _of_loss(_free, 0, 1, 2), (*[f32(B, S, D)] * 3, f32(S, S)),
        (*["b s@x d"] * 3, "..."), X, 6 * exchanged(ACT, 8), 6),
    Row("gradients of one free of attention, channels cut", _of_loss(_free, 0, 1, 2, 3),
        (*[f32(B, S, D)] * 3, f32(S, S)), (*["b s d@x"] * 3, "..."), X, reduced(S * S * 4, 8), 1),
    Row("gradients of hierarchical gates, sequence cut", _of_loss(_gated, 1, 2, 3), (f32(B, S, D), *[f32(D, D)] * 3),
        ("b s@x d", *["..."] * 3), X, 4 * gathered(8 * B * D * 4, 8) + reduced(3 * D * D * 4, 8), 7),
    Row("gradients of an hourglass, sequence cut", _of_loss(_shorter, 1, 2),
        (f32(B, S, D), f32(D, 2 * D), f32(2 * D, D)), ("b s@x d", "...", "..."), X,
        B * D * 4 + reduced(4 * D * D * 4, 8), 3),
    Row("gradients of RWKV-6 step by step, batch and heads cut", _of_loss(_decayed, 0, 1, 2, 3, 4),
        (*[f32(8, 16, 8, 16)] * 4, f32(8, 16)), (*["b@data t h@tensor e"] * 4, "h@tensor e"), DT,
        reduced(2 * 16 * 4, 2), 1),
    Row("cache with slots, heads cut", _in_slots, SLOTS,
        (*["b h@x e"] * 3, *["s t h@x e"] * 2, "...", "...", "h@x d"), X, reduced(32 * D * 4, 8), 1),
    Row("soft experts, tokens and experts cut", _soft, (f32(N, D), f32(D, 8, 16), f32(8, D, D), f32(8, D, D)),
        ("n@x d", "...", "e@x d f", "e@x f d"), X, 2 * reduced(128 * 4, 8) + 2 * gathered(128 * D * 4, 8), 4),
    Row("gradients of adapters, Megatron", _of_loss(_adapted, 2, 3, 5, 6), ADAPTED,
        ("n d", "d f@x", "...", "r f@x", "f@x d", "f@x r", "..."), X,
        reduced((N * D + N * 8 + 8 * D) * 4, 8), 3, work=1.05),
    Row("gradients of adapters, data and tensor", _of_loss(_adapted, 2, 3, 5, 6), ADAPTED,
        ("n@data d", "d f@tensor", "...", "r f@tensor", "f@tensor d", "f@tensor r", "..."), DT,
        reduced((N * D + N * 8) / 2 * 4, 4) + reduced(8 * D * 4, 8) + reduced((2 * D + 4 * D / 2) * 8 * 2, 2), 6),
    # Heads, then batch are cut in place of what a product adds up: weights are less than activations.
    Row("gradients of attention, data and context and tensor", _of_loss(_attention, 1, 2, 3, 4), WEIGHTS,
        ("b@pod s@data d", *["d h@tensor"] * 3, "h@tensor d"), CUBE,
        6 * exchanged(ACT / 2, 2) + 2 * exchanged(ACT, 4) + 2 * gathered(D * D * 4, 2) + reduced(2 * D * D * 4, 4), 14),
]  # fmt: skip
