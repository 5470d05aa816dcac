"""Chains of ops with little arithmetic: what is owed goes where it costs least, and a chain moves as one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.validation.best import Row, exchanged, f32, gathered, ints, reduced

X = {"x": 8}
N, E, D, T = 1 << 16, 1 << 20, 64, 32


def _graph_layer(x: Tensor, sources: Tensor, targets: Tensor, w: Tensor) -> Tensor:
    return (torch.zeros(N, D).index_add(0, targets, x[sources]) @ w).relu()


def _projected(w: Tensor, i: Tensor, a: Tensor) -> Tensor:
    return (F.embedding(i, w) @ a).relu()


def _low_rank(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return ((x @ a) @ b).relu()


def _adapters(x: Tensor, a: Tensor, b: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("br,brf->bf", torch.einsum("bd,bdr->br", x, a[k]), b[k])


def _returns(rewards: Tensor) -> Tensor:
    total = torch.zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        total = rewards[:, t] + 0.99 * total
    return total


def _average(x: Tensor) -> Tensor:
    state, states = torch.zeros(x.shape[0], x.shape[2]), []
    for v in x.unbind(1):
        state = 0.9 * state + 0.1 * v
        states.append(state)
    return torch.stack(states, 1)


def _recurrence(x: Tensor, a: Tensor) -> Tensor:
    state, states = torch.zeros(x.shape[0], x.shape[2]), []
    for t in range(x.shape[1]):
        state = a[:, t] * state + x[:, t]
        states.append(state)
    return torch.stack(states, 1)


def _nucleus(logits: Tensor) -> Tensor:
    p, i = logits.softmax(-1).sort(-1, descending=True)
    keep = p.cumsum(-1) - p < 0.9
    return logits.masked_fill(~torch.zeros_like(keep).scatter(-1, i, keep), -torch.inf).softmax(-1)


def _beams(logits: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n, beams, words = logits.shape
    best, i = (scores[:, :, None] + logits.log_softmax(-1)).view(n, beams * words).topk(2 * beams)
    return best, i // words, i % words


SEQUENCE = f32(64, T, 4096)
MOVED = exchanged(SEQUENCE.nbytes, 8)
LOGITS = f32(256, 32768)
ADAPTERS = (f32(64, 1024), f32(64, 1024, 8), f32(64, 8, 1024), ints(64))
ROWS = [
    Row("layer of a graph network", _graph_layer, (f32(N, D), ints(E), ints(E), f32(D, D)),
        ("n@x d", "e@x", "e@x", "_ _"), X, 2 * gathered(N * D * 4, 8), 2, out_specs="n@x d"),
    Row("looked-up rows, projected", _projected, (f32(1 << 20, D), ints(8192), f32(D, D)), ("v@x d", "b", "_ _"), X,
        gathered(8192 * D * 4, 8), 1, out_specs="b@x d"),
    Row("two products, the first over cut rows", _low_rank, (f32(N, 512), f32(512, D), f32(D, D)),
        ("n k@x", "k@x d", "_ _"), X, gathered(N * D * 4, 8), 1, out_specs="n@x d"),
    Row("adapters of many users, cut by adapters", _adapters, ADAPTERS, ("b d", "k@x d r", "k@x r f", "b"), X,
        reduced(64 * 1024 * 4, 8) + reduced(64 * 8 * 4, 8), 2, 5.7, out_specs="b f",
        short={"bytes": 8.5, "collectives": 1.5}, why="a deferred sum is priced where it begins"),
    Row("discounted returns, cut in time", _returns, (f32(1 << 20, T),), ("b t@x",), X, exchanged(T * 4 << 20, 8), 1),
    Row("moving average, cut in time", _average, (SEQUENCE,), ("b t@x d",), X, 2 * MOVED, 2, out_specs="b t@x d"),
    Row("gated recurrence, cut in time", _recurrence, (SEQUENCE,) * 2, ("b t@x d",) * 2, X, 3 * MOVED, 3,
        out_specs="b t@x d"),
    # What is kept goes back as a mask.
    Row("nucleus of logits, vocabulary cut", _nucleus, (LOGITS,), ("n v@x",), X,
        exchanged(1.25 * LOGITS.nbytes, 8) + 2 * reduced(256 * 4, 8), 4, out_specs="n v@x"),
    Row("sorted logits, vocabulary cut", lambda x: x.sort(-1)[0], (LOGITS,), ("n v@x",), X,
        2 * exchanged(LOGITS.nbytes, 8), 2, out_specs="n v@x"),
    Row("beams of a cut vocabulary", _beams, (f32(8, 4, 32768), f32(8, 4)), ("n k v@x", "..."), X,
        2 * reduced(8 * 4 * 4, 8) + gathered(8 * 8 * 8 * (4 + 8), 8), 4),
    Row("median along a cut dim", lambda x: x.median(1)[0], (f32(N, 256),), ("n m@x",), X,
        exchanged(N * 256 * 4, 8), 1),
]  # fmt: skip
