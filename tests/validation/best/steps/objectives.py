"""What large models are trained by, and how they are asked: losses over cut vocabularies, optimizers, search."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from tests.validation.best import Row, f32, gathered, ints, reduced

X = {"x": 8}
D, FF, V, N = 1024, 4096, 32768, 8192
ACT = N * D * 4
OF_ROW = reduced(N * 4, 8)  # a number for each token


# Losses ---------------------------------------------------------------------------------------------------------------


def _smoothed(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x @ w, y, label_smoothing=0.1)


def _with_z(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """PaLM's, which also keeps small what normalizes a row."""
    logits = x @ w
    return F.cross_entropy(logits, y) + 1e-4 * logits.logsumexp(-1).square().mean()


def _from_best(w: Tensor, x: Tensor, logits: Tensor, i: Tensor) -> Tensor:
    """Distillation from a teacher's best logits."""
    p = logits.softmax(-1)
    return (p * (p.log() - (x @ w).log_softmax(-1).gather(-1, i))).sum() / len(x)


def _tied(w: Tensor, i: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.embedding(i, w) @ w.t(), y)


def _scores(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return (x @ w).log_softmax(-1).gather(-1, y[..., None])[..., 0]


def _preferred(w: Tensor, x: Tensor, y: Tensor, reference: Tensor) -> Tensor:
    """DPO: the first half is preferred to the second."""
    a, b = _scores(w, x, y).sum(-1).chunk(2)
    c, d = reference.chunk(2)
    return -F.logsigmoid(0.1 * ((a - c) - (b - d))).mean()


def _grouped(w: Tensor, x: Tensor, y: Tensor, reward: Tensor, old: Tensor) -> Tensor:
    """GRPO: eight samples are compared with each other."""
    groups = reward.view(-1, 8)
    better = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    ratio, better = (_scores(w, x, y) - old).exp(), better.view(-1, 1)
    return -torch.min(ratio * better, ratio.clamp(0.8, 1.2) * better).mean()


def _contrasted(a: Tensor, b: Tensor) -> Tensor:
    """SigLIP: each pair for itself."""
    return -F.logsigmoid((a @ b.t()) * (2 * torch.eye(len(a)) - 1)).sum() / len(a)


def _centered(student: Tensor, teacher: Tensor, center: Tensor) -> Any:
    """DINO."""
    loss = -(((teacher - center) / 0.04).softmax(-1) * (student / 0.1).log_softmax(-1)).sum(-1).mean()
    return loss, 0.9 * center + 0.1 * teacher.mean(0)


def _advantages(reward: Tensor, value: Tensor) -> Tensor:
    """Of returns discounted twice, normalized."""
    total, found = torch.zeros(len(reward)), []
    for t in reversed(range(reward.shape[1])):
        total = reward[:, t] + 0.99 * value[:, t + 1] - value[:, t] + 0.95 * 0.99 * total
        found.append(total)
    a = torch.stack(found[::-1], 1)
    return (a - a.mean()) / (a.std() + 1e-8)


def _of_tasks(w: Tensor, a: Tensor, b: Tensor, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    h = F.gelu(x @ w)
    return F.mse_loss(h @ a, y) + 0.1 * F.cross_entropy(h @ b, z, reduction="sum") + 0.01 * h.square().mean()


VOCABULARY = (f32(D, V), f32(N, D), ints(N))
TEXTS = (f32(D, 8192), f32(16, 256, D), ints(16, 256), f32(16))
GROUPS = (f32(D, 8192), f32(64, 128, D), ints(64, 128), f32(64), f32(64, 128))
CUT = ("d v@x", "n d", "n")
PAIRS = 4096
LOSSES = [
    Row("label smoothing, vocabulary cut", _smoothed, VOCABULARY, CUT, X, 2 * OF_ROW + reduced(8, 8), 3, out_specs="",
        short={"collectives": 1.34}, why="two numbers, each divided by a count that may be 0"),
    Row("gradients with label smoothing, vocabulary cut", sl.grad(_smoothed, (0, 1)), VOCABULARY, CUT, X,
        2 * OF_ROW + reduced(ACT, 8), 3),
    Row("gradients with z-loss, vocabulary cut", sl.grad(_with_z, (0, 1)), VOCABULARY, CUT, X,
        2 * OF_ROW + reduced(ACT, 8), 3, short={"collectives": 5 / 3},
        why="log_softmax and logsumexp of the same logits each send a maximum and a sum"),
    Row("gradients of distillation from the best logits", sl.grad(_from_best, (0, 1)),
        (f32(D, V), f32(N, D), f32(N, 16), ints(N, 16)), ("d v@x", "n d", "n k", "n k"), X,
        2 * OF_ROW + reduced(ACT, 8), 3),
    Row("gradient of tied embeddings, vocabulary cut", sl.grad(_tied), (f32(V, D), ints(N), ints(N)),
        ("v@x d", "n", "n"), X, 2 * reduced(ACT, 8) + 2 * OF_ROW, 4),
    # Both halves of the scores' sums, then what each is to the loss.
    Row("DPO, vocabulary cut", sl.grad(_preferred), TEXTS, ("d v@x", "b s d", "b s", "b"), X,
        2 * reduced(16 * 256 * 4, 8) + 2 * reduced(8 * 4, 8), 4),
    Row("GRPO, groups cut", sl.grad(_grouped), GROUPS, ("...", "b@x s d", "b@x s", "b@x", "b@x s"), X,
        reduced(D * 8192 * 4, 8), 1),
    Row("SigLIP, data parallel", sl.grad(_contrasted, (0, 1)), (f32(PAIRS, 512), f32(PAIRS, 512)),
        ("n@x d", "n@x d"), X, 2 * gathered(PAIRS * 512 * 4, 8), 2),
    Row("DINO, batch cut", _centered, (f32(N // 8, V), f32(N // 8, V), f32(V)), ("n@x k", "n@x k", "k"), X,
        reduced(4 + V * 4, 8), 2),
    Row("DINO, prototypes cut", _centered, (f32(N // 8, V), f32(N // 8, V), f32(V)), ("n k@x", "n k@x", "k@x"), X,
        4 * OF_ROW / 8 + reduced(4, 8), 5, out_specs=("", "k@x")),
    Row("advantages, normalized over a cut batch", _advantages, (f32(4096, 32), f32(4096, 33)), ("b@x t", "b@x t"), X,
        2 * reduced(4, 8), 2),
    Row("gradients of three tasks, data parallel", sl.grad(_of_tasks, (0, 1, 2)),
        (f32(D, D), f32(D, 8), f32(D, 100), f32(N, D), f32(N, 8), ints(N)),
        (*["..."] * 3, "n@x d", "n@x k", "n@x"), X, reduced((D * D + D * 108) * 4, 8), 3),
]  # fmt: skip


# Optimizers -----------------------------------------------------------------------------------------------------------


def _adafactor(w: Tensor, g: Tensor, r: Tensor, c: Tensor) -> Any:
    """Shazeer and Stern 2018, arXiv:1804.04235."""
    squares = g.square() + 1e-30
    r, c = 0.9 * r + 0.1 * squares.mean(1), 0.9 * c + 0.1 * squares.mean(0)
    u = g * (r / r.mean()).rsqrt()[:, None] * c.rsqrt()
    return w - 0.01 * u / u.square().mean().sqrt().clamp(min=1), r, c


def _clipped(gs: Sequence[Tensor]) -> list[Tensor]:
    norm = reduce(torch.add, [g.square().sum() for g in gs]).sqrt()
    return [g * (1 / (norm + 1e-6)).clamp(max=1.0) for g in gs]


def _averaged(ws: Sequence[Tensor], gs: Sequence[Tensor], means: Sequence[Tensor]) -> list[Tensor]:
    return [0.9 * m + 0.1 * (w - 0.1 * g) for w, g, m in zip(ws, _clipped(gs), means, strict=True)]


def _low_rank(x: Tensor, y: Tensor, q: Tensor) -> Any:
    """PowerSGD of a gradient."""
    g = x.t() @ y
    p = torch.linalg.qr(g @ q)[0]
    return p, g.t() @ p


def _spectral(w: Tensor, u: Tensor) -> Tensor:
    for _ in range(3):
        v = F.normalize(w.t() @ u, dim=0)
        u = F.normalize(w @ v, dim=0)
    return w / (u @ (w @ v))


SQUARE = [f32(D, D)] * 3
SQUARES = ["d@x e"] * 3
OPTIMIZERS = [
    Row("Adafactor, rows cut", _adafactor, (f32(D, FF), f32(D, FF), f32(D), f32(FF)), ("d@x f", "d@x f", "d@x", "f"), X,
        reduced(FF * 4, 8) + 2 * reduced(4, 8), 3, out_specs=("d@x f", "d@x", "f")),
    Row("moving average of weights behind clipped gradients", _averaged, (SQUARE,) * 3, (SQUARES,) * 3, X,
        reduced(4, 8), 1),
    Row("gradients clipped by groups", lambda groups: [_clipped(gs) for gs in groups], ([SQUARE, [f32(D)] * 2],),
        ([SQUARES, ["d@x"] * 2],), X, 2 * reduced(4, 8), 2),
    Row("PowerSGD of a data-parallel gradient", _low_rank, (f32(N, D), f32(N, D), f32(D, 4)),
        ("n@x d", "n@x e", "..."), X, 2 * reduced(D * 4 * 4, 8), 2),
    Row("spectral norm, rows cut", _spectral, (f32(FF, D), f32(FF)), ("f@x d", "f@x"), X,
        3 * (reduced(D * 4, 8) + reduced(4, 8)) + reduced(4, 8), 7),
]  # fmt: skip


# Search and decoding --------------------------------------------------------------------------------------------------


def _retrieved(q: Tensor, c: Tensor) -> Any:
    return (q @ c.t()).topk(10, -1)


def _late(q: Tensor, docs: Tensor) -> Any:
    """ColBERT's late interaction."""
    return torch.einsum("qie,dje->qdij", q, docs).amax(-1).sum(-1).topk(10, -1)


def _accepted(draft: Tensor, model: Tensor, tokens: Tensor, u: Tensor) -> Tensor:
    """How many of the tokens that were guessed stand."""
    p, q = (x.softmax(-1).gather(-1, tokens[..., None])[..., 0] for x in (model, draft))
    return (u < p / q).int().cumprod(-1).sum(-1)


def _penalized(logits: Tensor, ids: Tensor) -> Tensor:
    """Of tokens that were there before (Keskar et al. 2019, arXiv:1909.05858)."""
    scores = logits.gather(1, ids)
    return logits.scatter(1, ids, torch.where(scores < 0, scores * 1.2, scores / 1.2))


def _written(x: Tensor, keys: Tensor, values: Tensor, at: Tensor, *weights: Tensor) -> Any:
    q, k, v = ((x @ w).view(len(x), 16, 1, -1) for w in weights[:3])
    keys, values = keys.index_copy(2, at, k), values.index_copy(2, at, v)
    return F.scaled_dot_product_attention(q, keys, values).flatten(1) @ weights[3], keys, values


def _paged(q: Tensor, keys: Tensor, values: Tensor, pages: Tensor) -> Tensor:
    k, v = (x[pages].flatten(1, 2).transpose(1, 2) for x in (keys, values))
    return F.scaled_dot_product_attention(q, k, v)


def _latent(x: Tensor, cache: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    """DeepSeek's attention, its projections of the cache absorbed."""
    rows = torch.einsum("bhr,hrc->bhc", torch.einsum("bd,dhr->bhr", x, q), k)
    p = torch.einsum("bhc,btc->bht", rows, cache).softmax(-1)
    return torch.einsum("bhv,hvd->bd", torch.einsum("bhc,hcv->bhv", torch.einsum("bht,btc->bhc", p, cache), v), out)


CACHE = (f32(32, 16, 2048, 64),) * 2
HEADS = ("b h@x t e",) * 2
SEARCH = [
    Row("retrieval, corpus cut", _retrieved, (f32(256, D), f32(1 << 20, D)), ("q d", "n@x d"), X,
        gathered(256 * 80 * (4 + 8), 8), 2, out_specs="q k"),
    Row("retrieval, corpus and queries cut", _retrieved, (f32(256, D), f32(1 << 20, D)), ("q@data d", "n@x d"),
        {"data": 4, "x": 8}, gathered(64 * 80 * (4 + 8), 8), 2, out_specs="q@data k"),
    Row("late interaction, documents cut", _late, (f32(4, 32, 128), f32(8192, 64, 128)), ("q i e", "d@x j e"), X,
        gathered(4 * 80 * (4 + 8), 8), 2, out_specs="q k"),
    Row("accepted tokens of a draft, vocabulary cut", _accepted,
        (f32(64, 8, V), f32(64, 8, V), ints(64, 8), f32(64, 8)),
        ("b t v@x", "b t v@x", "b t", "b t"), X, 6 * reduced(64 * 8 * 4, 8), 6, out_specs="b"),
    # Each works on the scores of all tokens, of which it has some.
    Row("repetition penalty, vocabulary cut", _penalized, (f32(64, V), ints(64, 512)), ("b v@x", "b i"), X, work=5.67),
    Row("decoding that writes its cache, heads cut", _written, (f32(32, D), *CACHE, ints(1), *[f32(D, D)] * 4),
        ("b d", *HEADS, "_", *["d h@x"] * 3, "h@x d"), X, reduced(32 * D * 4, 8), 1,
        out_specs=("b d", None, None)),
    Row("attention to a paged cache, heads cut", _paged,
        (f32(32, 16, 1, 64), *[f32(1024, 16, 16, 64)] * 2, ints(32, 64)),
        ("b h@x q e", "p s h@x e", "p s h@x e", "..."), X),
    Row("latent attention, heads cut", _latent,
        (f32(32, D), f32(32, 2048, 128), f32(D, 16, 64), f32(16, 64, 128), f32(16, 128, 64), f32(16, 64, D)),
        ("b d", "b t c", "d h@x r", "h@x r c", "h@x c v", "h@x v d"), X, reduced(32 * D * 4, 8), 1, out_specs="b d"),
]  # fmt: skip

ROWS = [*LOSSES, *OPTIMIZERS, *SEARCH]
