"""What depends on no input is made in pieces; sums travel as far as they can, and are taken once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from tests.validation.best import Row, bf16, f32, gathered, ints, reduced

N, D = 1024, 256  # of x, cut 8 ways
PIECE = N * D * 4 / 8
W = D * D * 4  # bytes of a matrix of weights
DATA = {"data": 8}


def _of_x(name: str, loss: Callable[[Tensor], Tensor], pieces: float, nbytes: float = 0, collectives: int = 0) -> Row:
    """The gradient of a function of x `[1024@data, 256]`; its peak is in pieces of x."""
    grad = sl.grad(loss)
    return Row(name, grad, (f32(N, D),), ("_@data _",), DATA, nbytes, collectives, peak=pieces * PIECE)


def _of_weights(
    name: str,
    program: Callable[..., Any],
    nbytes: float = reduced(W, 8),
    *,
    make: Any = f32,
    stack: int = 0,
    **more: Any,
) -> Row:
    """A program of x `[1024@data, 256]` and weights `[256, 256]` (or a stack of them), with one sum over data."""
    w = make(stack, D, D) if stack else make(D, D)
    return Row(name, program, (make(N, D), w), ("_@data _", "..."), DATA, nbytes, 1, **more)


def _loss(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).sin().sum()


def _parts(x: Tensor, w: Tensor) -> list[Tensor]:
    """Gradients of three losses."""
    return [torch.func.grad(lambda w, k=k: (x @ w * k).sin().sum())(w) for k in (1.0, 2.0, 3.0)]


def _from_zero(x: Tensor, w: Tensor) -> Any:
    g: Any = 0
    for part in _parts(x, w):
        g = g + part
    return g


def _from_zeros(x: Tensor, w: Tensor) -> Tensor:
    g = torch.zeros_like(w)
    for part in _parts(x, w):
        g = g + part
    return g


def _in_place(x: Tensor, w: Tensor) -> Tensor:
    g = torch.zeros_like(w)
    for part in _parts(x, w):
        g += part / 3
    return g


def _wide(x: Tensor, w: Tensor) -> Tensor:
    g = torch.zeros(w.shape, dtype=torch.float32)
    for part in _parts(x, w):
        g = g + part.float()
    return g


def _layers(x: Tensor, w: Tensor) -> Tensor:
    for i in range(len(w)):
        x = (x @ w[i]).sin()
    return x.sum()


def _mask(x: Tensor) -> Tensor:
    return (x * torch.ones(N, D).tril()).sum(1)


def _outer(x: Tensor) -> Tensor:
    return x + torch.arange(N)[:, None] * torch.arange(D)


def _positions(x: Tensor) -> Tensor:
    angle = torch.arange(N)[:, None] / 10000 ** (torch.arange(D // 2) / (D // 2))
    return x * torch.cat([angle.sin(), angle.cos()], -1)


def _far(x: Tensor) -> Tensor:
    """Weighted by how far it is to the end, normalized."""
    return x * torch.arange(1.0, N + 1).flip(0).softmax(0)[:, None]


def _plain(name: str, program: Callable[[Tensor], Tensor], pieces: float) -> Row:
    return Row(name, program, (f32(N, D),), ("_@data _",), DATA, peak=pieces * PIECE)


def degrees(rank: Tensor, target: Tensor) -> Tensor:
    """The ranks of nodes, over how many edges come in."""
    ones = torch.ones_like(target, dtype=rank.dtype)
    return rank / torch.zeros_like(rank).index_add(0, target, ones).clamp(min=1)


def pagerank(rank: Tensor, source: Tensor, target: Tensor, degree: Tensor) -> Tensor:
    """Three rounds of ranks along edges."""
    for _ in range(3):
        rank = 0.15 + 0.85 * torch.zeros_like(rank).index_add(0, target, (rank / degree)[source])
    return rank


NODES, EDGES = 1 << 16, 1 << 20
GRAPH = (f32(NODES), ints(EDGES), ints(EDGES), f32(NODES))


ROWS = [
    _of_x("gradient of mean(x*x)", lambda x: (x * x).mean(), 3),
    _of_x("gradient of mean(0)", lambda x: (x.mean(0) ** 2).sum(), 3, reduced(D * 4, 8), 1),
    _of_x("gradient of mse against zeros", lambda x: F.mse_loss(x, torch.zeros_like(x)), 3),
    _of_x("gradient of BCE with logits", lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)), 5),
    _of_x("gradient of x / x.mean()", lambda x: (x / x.mean()).sin().sum(), 4, 2 * reduced(4, 8), 2),
    _of_x("gradient of the deviation", lambda x: x.std(), 4, reduced(12, 8), 3),
    _plain("lower triangle of ones", _mask, 3),
    _plain("outer product of ranges", _outer, 4),
    _plain("sines of positions", _positions, 4),
    Row("weights of distances to the end", _far, (f32(N, D),), ("_@data _",), DATA, work=1.12, peak=2.1 * PIECE),
    _of_weights("gradient of data-parallel weights", sl.grad(_loss, 1)),
    _of_weights("gradients added to 0", _from_zero),
    _of_weights("gradients added by sum()", lambda x, w: sum(_parts(x, w))),
    _of_weights("gradients added to zeros", _from_zeros),
    _of_weights("gradients accumulated in place", _in_place),
    _of_weights("mean of stacked gradients", lambda x, w: torch.stack(_parts(x, w)).mean(0)),
    _of_weights("16-bit gradients added in 32 bits", _wide, make=bf16),
    _of_weights("gradient where a mask allows", lambda x, w: sl.grad(_loss, 1)(x, w).where(torch.eye(D) > 0, 0.0)),
    _of_weights("gradient of stacked weights", sl.grad(_layers, 1), reduced(4 * W, 8), stack=4),
    Row("degrees of nodes", degrees, (f32(NODES), ints(EDGES)), ("n@x", "e@x"), {"x": 8}, gathered(NODES * 4, 8), 1),
    Row("ranks of nodes", pagerank, GRAPH, ("n@x", "e@x", "e@x", "n@x"), {"x": 8}, 6 * gathered(NODES * 4, 8), 6, 1.3),
    Row("sums where a tensor lives", lambda table, i, rows: torch.zeros_like(table).index_add(0, i, rows),
        (f32(NODES, 8), ints(EDGES), f32(EDGES, 8)), ("n@x _", "e@x", "e@x _"), {"x": 8},
        gathered(NODES * 8 * 4, 8), 1),
]  # fmt: skip
