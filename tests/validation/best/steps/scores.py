"""Losses of single tokens, rankings, statistics of samples and contrast, on one and two axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from tests.validation.best import Row, exchanged, f32, gathered, ints, reduced

X, DT = {"x": 8}, {"data": 2, "tensor": 4}
B, S, D, V, N = 4, 1024, 512, 16384, 4096


def _of_loss(program: Callable[..., Tensor], *which: int) -> Callable[..., Any]:
    return sl.grad(lambda *args: program(*args).sin().sum(), which or 0)


# Losses of single tokens ----------------------------------------------------------------------------------------------


def _each(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy((h @ w).flatten(0, 1), y.flatten(), reduction="none").view(y.shape)


def _grpo(h: Tensor, w: Tensor, reference: Tensor, y: Tensor, advantage: Tensor, there: Tensor) -> Tensor:
    """Shao et al. 2024, arXiv:2402.03300, with the divergence's estimate that is never negative."""
    new, old = -_each(h, w, y), -_each(h, reference, y)
    ratio, apart = (new - new.detach()).exp(), (old - new).exp() - (old - new) - 1
    return ((0.04 * apart - ratio * advantage[:, None]) * there).sum(1).div(there.sum(1)).mean()


def _z_loss(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    logits, there = h @ w, (y != 0).float()
    total = logits.logsumexp(-1)
    loss = total - logits.gather(-1, y[..., None])[..., 0]
    return ((loss + 1e-4 * total**2) * there).sum() / there.sum()


def _ppo(
    h: Tensor, w: Tensor, a: Tensor, old: Tensor, gain: Tensor, before: Tensor, ret: Tensor, value: Tensor
) -> Tensor:
    """Schulman et al. 2017, arXiv:1707.06347, with clipped values and an entropy."""
    logp = (h @ w).log_softmax(-1)
    ratio = (logp.gather(-1, a[..., None])[..., 0] - old).exp()
    gain = (gain - gain.mean()) / (gain.std() + 1e-6)
    policy = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
    new = (h @ value)[..., 0]
    near = before + (new - before).clamp(-0.2, 0.2)
    return (
        0.5 * torch.max((new - ret) ** 2, (near - ret) ** 2).mean() - policy + 0.01 * (logp.exp() * logp).sum(1).mean()
    )


def _unlikely(h: Tensor, w: Tensor, y: Tensor, before: Tensor) -> Tensor:
    """Welleck et al. 2019, arXiv:1908.04319."""
    p = (h @ w).softmax(-1).gather(-1, before)
    return F.cross_entropy(h @ w, y) - (1 - p + 1e-6).log().sum(-1).mean()


def _margin(h: Tensor, w: Tensor, y: Tensor, there: Tensor) -> Tensor:
    return ((h @ w).log_softmax(-1).gather(-1, y[..., None])[..., 0] * there).sum(1) / there.sum(1)


def _simpo(h: Tensor, w: Tensor, y: Tensor, there: Tensor, h2: Tensor, y2: Tensor, there2: Tensor) -> Tensor:
    """Meng et al. 2024, arXiv:2405.14734."""
    return -F.logsigmoid(2 * (_margin(h, w, y, there) - _margin(h2, w, y2, there2)) - 0.5).mean()


def _verified(h: Tensor, w: Tensor, draft: Tensor, p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    q = (h @ w).softmax(-1)
    accepted = (u < q[:, :-1].gather(-1, draft[..., None])[..., 0] / p).long().cumprod(1).sum(1)
    return accepted, q.gather(1, accepted[:, None, None].expand(-1, 1, q.shape[-1]))[:, 0].argmax(-1)


# Rankings and statistics ----------------------------------------------------------------------------------------------


def _ranked(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """ListMLE (Xia et al. 2008)."""
    s = (x @ w)[..., 0].gather(-1, y.argsort(-1, descending=True))
    return (s.flip(-1).logcumsumexp(-1).flip(-1) - s).sum(-1).mean()


def _pairs(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    s, above = (x @ w)[:, 0], (y[:, None] > y[None]).float()
    return (F.softplus(s[None] - s[:, None]) * above).sum() / above.sum()


def _spread(x: Tensor) -> Tensor:
    """KoLeo (Sablayrolles et al. 2018, arXiv:1806.03198): how near the nearest of others is."""
    x = F.normalize(x, dim=-1)
    nearest = (x @ x.t() - 2 * torch.eye(len(x))).argmax(1)
    return -((x - x[nearest]).norm(dim=-1) + 1e-8).log().mean()


def _aligned(x: Tensor, y: Tensor) -> Tensor:
    """CKA (Kornblith et al. 2019, arXiv:1905.00414)."""
    x, y = x - x.mean(0), y - y.mean(0)
    return (y.t() @ x).square().sum() / ((x.t() @ x).norm() * (y.t() @ y).norm())


def _whitened(x: Tensor) -> Tensor:
    x = x - x.mean(0)
    triangle = torch.linalg.cholesky(x.t() @ x / len(x) + 1e-3 * torch.eye(x.shape[1]))
    return torch.linalg.solve_triangular(triangle, x.t(), upper=False).t()


def _swav(x: Tensor, c: Tensor, y: Tensor) -> Tensor:
    """Caron et al. 2020, arXiv:2006.09882."""
    q = (x @ c / 0.05).exp()
    for _ in range(3):
        q = q / q.sum(0, keepdim=True)
        q = q / q.sum(1, keepdim=True)
    return -(q.detach() * (y @ c / 0.1).log_softmax(-1)).sum(1).mean()


def _decoupled(a: Tensor, b: Tensor) -> Tensor:
    """Yeh et al. 2021, arXiv:2110.06848."""
    s = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).t() / 0.1
    return (s.masked_fill(torch.eye(len(a)).bool(), -torch.inf).logsumexp(1) - s.diagonal()).mean()


def _clip(a: Tensor, b: Tensor, wa: Tensor, wb: Tensor, scale: Tensor) -> Tensor:
    """Radford et al. 2021, arXiv:2103.00020."""
    scores = F.normalize(a @ wa, dim=-1) @ F.normalize(b @ wb, dim=-1).t() * scale.exp()
    y = torch.arange(len(a))
    return (F.cross_entropy(scores, y) + F.cross_entropy(scores.t(), y)) / 2


def _proxies(x: Tensor, p: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(-(torch.cdist(F.normalize(x, dim=-1), F.normalize(p, dim=-1)) ** 2), y)


def _ensemble(x: Tensor, y: Tensor) -> Tensor:
    """The continuous ranked probability score."""
    return (x - y[:, None]).abs().mean() - 0.5 * (x[:, :, None] - x[:, None]).abs().mean()


TOKENS = (f32(8, 512, D), f32(D, V), ints(8, 512))
GROUPS = (f32(8, 512, D), f32(D, V), f32(D, V), ints(8, 512), f32(8), f32(8, 512))
CHOSEN = (f32(8, 256, D), f32(D, V), ints(8, 256), f32(8, 256), f32(8, 256, D), ints(8, 256), f32(8, 256))
TWO_DIMS = "b@data s d", "d v@tensor", "b@data s"
ROW = reduced(N / 2 * 4, 4)  # of one number for each token
W = reduced(D * V, 2)  # of a piece of the last weights
H = reduced(N / 2 * D * 4, 4)
LISTS = (f32(1024, 64, 128), f32(128, 1), f32(1024, 64))
PAIRS = (f32(N, D), f32(N, D), f32(D, 256), f32(D, 256), f32())
NARROW = N * 256 * 4  # bytes of their embeddings

ROWS = [
    Row("losses of tokens, batch cut", _each, TOKENS, ("b@x s d", "...", "b@x s"), X),
    Row("gradients of GRPO, sequence cut", sl.grad(_grpo, (0, 1)), GROUPS,
        ("b s@x d", "...", "...", "b s@x", "b", "b s@x"), X, reduced(D * V * 4, 8) + reduced(8 * 4, 8), 2),
    Row("gradients of GRPO, batch and vocabulary cut", sl.grad(_grpo, (0, 1)), GROUPS,
        ("b@data s d", "d v@tensor", "d v@tensor", "b@data s", "b@data", "b@data s"), DT, 6 * ROW + H + W, 8),
    Row("gradients of a z-loss with holes, batch and vocabulary cut", sl.grad(_z_loss, (0, 1)),
        (f32(B, S, D), f32(D, V), ints(B, S)), TWO_DIMS, DT, 2 * ROW + H + W + 4, 5),
    Row("gradients of a z-loss with holes, sequence and vocabulary over one axis", sl.grad(_z_loss, (0, 1)),
        (f32(B, S, D), f32(D, V), ints(B, S)), ("b@data s@tensor d", "d v@tensor", "b@data s@tensor"), DT,
        gathered(N / 2 * 8, 4) + 2 * ROW + H + W + 4, 7),
    Row("gradients of PPO, batch and vocabulary cut", sl.grad(_ppo, (1, 7)),
        (f32(N, D), f32(D, V), ints(N), *[f32(N)] * 4, f32(D, 1)),
        ("n@data d", "d v@tensor", *["n@data"] * 5, "..."), DT, 4 * ROW + W + reduced(D * 4, 2) + 8, 8),
    Row("gradients of unlikelihood, vocabulary cut", sl.grad(_unlikely, (0, 1)),
        (f32(N, D), f32(D, V), ints(N), ints(N, 16)), ("n d", "d v@x", "n", "n k"), X,
        3 * reduced(N * 4, 8) + reduced(N * D * 4, 8), 4, short={"collectives": 1.5},
        why="log_softmax and softmax of the same logits each send a maximum and a sum"),
    Row("gradient of SimPO, batch and vocabulary cut", sl.grad(_simpo, 1), CHOSEN,
        ("b@data s d", "d v@tensor", "b@data s", "b@data s") + ("b@data s d", "b@data s", "b@data s"), DT,
        4 * ROW / 2 + 2 * reduced(4 * 4, 4) + W, 7),
    Row("drafts verified, vocabulary cut", _verified,
        (f32(16, 5, D), f32(D, 32768), ints(16, 4), f32(16, 4), f32(16, 4)), ("b k d", "d v@x", "...", "...", "..."), X,
        2 * reduced(16 * 5 * 4, 8) + reduced(16 * 4 * 4, 8) + reduced(16 * 12, 8), 5),
    Row("gradient of rankings, lists cut", sl.grad(_ranked, 1), LISTS, ("q@x k d", "...", "q@x k"), X,
        reduced(128 * 4, 8), 1),
    Row("gradient of rankings, items cut", sl.grad(_ranked, 1), LISTS, ("q k@x d", "...", "q k@x"), X,
        3 * exchanged(1024 * 64 * 4, 8) + reduced(128 * 4, 8), 4),
    Row("gradient of all pairs in order, samples cut", sl.grad(_pairs, 1), (f32(N, 256), f32(256, 1), f32(N)),
        ("n@x d", "...", "n@x"), X, 3 * gathered(N * 4, 8) + reduced(4, 8) + reduced(256 * 4, 8), 5),
    Row("gradient of how near others are, batch cut", sl.grad(_spread), (f32(N, 128),), ("n@x d",), X,
        2 * gathered(N * 128 * 4, 8), 2),
    Row("gradients of CKA, samples cut", sl.grad(_aligned, (0, 1)), (f32(N, 256), f32(N, 128)), ("n@x d", "n@x e"), X,
        reduced((256 * 256 + 256 * 128 + 128 * 128) * 4, 8) + 2 * reduced((256 + 128) * 4, 8), 7),
    Row("gradient of whitening, batch cut", _of_loss(_whitened), (f32(N, 64),), ("n@x d",), X,
        2 * reduced((64 * 64 + 64) * 4, 8), 4, work=1.1),
    Row("gradient of SwAV, batch cut", sl.grad(_swav, 1), (f32(N, 128), f32(128, 1024), f32(N, 128)),
        ("n@x d", "...", "n@x d"), X, 3 * reduced(1024 * 4, 8) + reduced(128 * 1024 * 4, 8), 4),
    Row("gradient of SwAV, batch and prototypes cut", sl.grad(_swav, 1), (f32(N, 128), f32(128, 1024), f32(N, 128)),
        ("n@data d", "d k@tensor", "n@data d"), DT, 6 * ROW + 3 * reduced(1024, 2) + reduced(128 * 1024, 2), 10),
    Row("gradients of decoupled contrast, batch cut", sl.grad(_decoupled, (0, 1)), (f32(N, 256), f32(N, 256)),
        ("n@x d", "n@x d"), X, 2 * gathered(N * 256 * 4, 8), 2),
    # Scores are cut in both dims: each device has rows of one tower and columns of the other.
    Row("gradients of CLIP, batch and features cut", sl.grad(_clip, (2, 3, 4)), PAIRS,
        ("n@data d", "n@data d", "d e@tensor", "d e@tensor", ""), DT,
        2 * (gathered(NARROW / 2, 4) + gathered(NARROW / 4, 2)) + 2 * (NARROW / 16 + gathered(NARROW / 8, 8))
        + 6 * ROW + 2 * reduced(D * 64 * 4, 2), 19),
    Row("gradients of proxies, classes cut", sl.grad(_proxies, (0, 1)), (f32(1024, 128), f32(V, 128), ints(1024)),
        ("n d", "v@x d", "n"), X, 3 * reduced(1024 * 4, 8) + reduced(1024 * 128 * 4, 8), 4),
    Row("gradient of ranked probabilities, members cut", sl.grad(_ensemble), (f32(1024, 64), f32(1024)),
        ("n m@x", "n"), X, 2 * exchanged(1024 * 64 * 4, 8), 2),
]  # fmt: skip
