"""Tables whose rows are cut, and what follows them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from tests.validation.best import Row, exchanged, f32, gathered, ints, reduced

V, D, B, T = 1 << 20, 64, 512, 16
DATA, TENSOR = {"data": 8}, {"tensor": 8}
BOTH = {"data": 4, "tensor": 8}


def _embed(w: Tensor, i: Tensor) -> Tensor:
    return F.embedding(i, w)


def _by_tokens(w: Tensor, x: Tensor, i: Tensor) -> Tensor:
    return (w[i.flatten()] * x.flatten(0, 1)).sum()


def _loss(w: Tensor, i: Tensor) -> Tensor:
    return F.embedding(i, w).sin().sum()


def _bag(w: Tensor, i: Tensor) -> Tensor:
    return F.embedding_bag(i, w, mode="sum")


def _dlrm(w: Tensor, i: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (F.embedding_bag(i, w, mode="sum") @ a).relu() @ b


def _step(w: Tensor, i: Tensor) -> Tensor:
    return w - 0.1 * sl.grad(_loss)(w, i)


OUT = B * T * D * 4  # bytes of what is looked up
BAGS = B * D * 4
H = 1024
ALIKE = "what is done to looked-up rows, element by element, is repeated: two messages for one would spare it"
GATHERED = 11 / 4  # one of four operations on each element, adding it to its row, is done by all eight devices
ROWS = [
    Row("lookup in a table of cut rows", _embed, (f32(V, D), ints(B, T)), ("v@tensor _", "..."), TENSOR,
        gathered(OUT, 8), 1, out_specs="b@tensor ..."),
    Row("lookup in a table, batch over data", _embed, (f32(V, D), ints(B, T)), ("v@tensor _", "b@data _"), BOTH,
        gathered(OUT / 4, 8), 1, out_specs="b@(data tensor) _ _"),
    Row("gradient of a table of cut rows", sl.grad(_loss), (f32(V, D), ints(B, T)), ("v@tensor _", "..."), TENSOR,
        work=4.5),  # each has the cosines of rows that it has, and of zeros
    Row("gradient of a table, batch over data", sl.grad(_loss), (f32(V, D), ints(B, T)), ("v@tensor _", "b@data _"),
        BOTH, reduced(OUT / 4, 8) + gathered(OUT + B * T * 8, 4), 3, short={"work": 5.3}, why=ALIKE),
    Row("gradient of a whole table, batch over data", sl.grad(_loss), (f32(V, D), ints(B, T)), ("...", "b@data _"),
        DATA, gathered(OUT + B * T * 8, 8), 2, work=GATHERED, peak=2 * V * D * 4),
    Row("gradient of a small table, batch and sequence cut", sl.grad(_by_tokens),
        (f32(64, D), f32(B, T, D), ints(B, T)), ("...", "b@data s@tensor _", "b@data s@tensor"), BOTH,
        reduced(64 * D * 4, 32), 1),
    Row("gradient of a whole table, by an index", sl.grad(lambda w, i: w[i].sin().sum()), (f32(V, D), ints(B, T)),
        ("...", "b@data _"), DATA, gathered(OUT + B * T * 8, 8), 2, work=GATHERED, peak=2 * V * D * 4),
    Row("gradient of a table's bags, batch over data", sl.grad(lambda w, i: _bag(w, i).sin().sum()),
        (f32(V, D), ints(B, T)), ("...", "b@data _"), DATA, gathered(BAGS + B * T * 8, 8), 2,
        work=1 + 7 * T / (2 * T + 2), peak=2 * V * D * 4, short={"work": 1.9},
        why="all devices compute all bags, whose batch torch's op does not show"),
    Row("SGD step of a table of cut rows", _step, (f32(V, D), ints(B, T)), ("v@tensor _", "..."), TENSOR,
        work=1.11),
    Row("gradient of a table by columns", sl.grad(_loss), (f32(V, D), ints(B, T)), ("_ d@tensor", "..."), TENSOR),
    Row("bags from a table of cut rows", _bag, (f32(V, D), ints(B, T)), ("v@tensor _", "..."), TENSOR,
        reduced(BAGS, 8), 1, out_specs="_ _"),
    Row("DLRM: bags, then an MLP", _dlrm, (f32(V, D), ints(B, T), f32(D, H), f32(H, 1)),
        ("v@tensor _", "...", "...", "..."), {"tensor": 64}, gathered(BAGS, 64) + gathered(B * 4, 64), 2,
        out_specs="_ _"),
    Row("DLRM: bags of columns, then an MLP over rows", _dlrm, (f32(V, D), ints(B, T), f32(D, H), f32(H, 1)),
        ("_ d@tensor", "b@tensor _", "...", "..."), TENSOR, gathered(B * T * 8, 8) + exchanged(BAGS, 8), 2),
    Row("rows of a table by an index", lambda w, i: w[i].sin(), (f32(V, D), ints(B)), ("v@tensor _", "..."),
        TENSOR, gathered(BAGS, 8), 1, out_specs="b@tensor _"),
]  # fmt: skip
