"""Tables that one tensor holds, cut by table: each device looks up in its own, for all, and sends what others need."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from tests.validation.best import Row, exchanged, f32, gathered, ints, reduced

K, V, D, B, L, H = 8, 100_000, 64, 4096, 4, 256  # tables, rows, features, samples, ids of each, hidden features
X = {"x": 8}
CUT = ("k@x v d", "b k l")


def rows(w: Tensor, i: Tensor) -> Tensor:
    """All tables at once, by an index that counts them; lookups in one table after the other would move whole ones."""
    return w[torch.arange(len(w))[:, None], i]


def counted(w: Tensor, i: Tensor) -> Tensor:
    """Sums of the rows of each table."""
    return rows(w, i).sum(2)


def mapped(w: Tensor, i: Tensor) -> Tensor:
    """The same under vmap."""
    return torch.func.vmap(lambda table, ids: F.embedding(ids, table).sum(1), (0, 1), 1)(w, i)


def dlrm(w: Tensor, i: Tensor, dense: Tensor, m: Tensor) -> Tensor:
    """Naumov et al. 2019, arXiv:1906.00091, without interactions."""
    return (torch.cat([dense, rows(w, i).mean(2).flatten(1)], 1) @ m).relu().sum(1)


def step(w: Tensor, i: Tensor, dense: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """SGD on tables and weights."""
    grads = sl.grad(lambda w, m: dlrm(w, i, dense, m).sin().sum(), (0, 1))(w, m)
    return w - 0.1 * grads[0], m - 0.1 * grads[1]


def of_sines(program: Any) -> Any:
    """The gradient of the tables."""
    return sl.grad(lambda w, *ids: program(w, *ids).sin().sum())


def last(x: Tensor, n: Tensor) -> Tensor:
    """The last token of each row."""
    return x[torch.arange(len(x)), n - 1]


# Rows that are cut: each device has what it found of all samples' ids, works on that, and adds up little --------------


def _interactions(e: Tensor) -> Tensor:
    """Rendle 2010, as in DeepFM (Guo et al. 2017, arXiv:1703.04247)."""
    return 0.5 * (e.sum(1).square() - e.square().sum(1)).sum(-1)


def machine(w: Tensor, i: Tensor) -> Tensor:
    return _interactions(F.embedding(i, w))


def machine_of_tables(ws: list[Tensor], i: Tensor) -> Tensor:
    return _interactions(torch.stack([F.embedding(i[:, k], w) for k, w in enumerate(ws)], 1))


def wide(w: Tensor, v: Tensor, i: Tensor) -> Tensor:
    return machine(w, i) + F.embedding(i, v)[..., 0].sum(1)


def updated(w: Tensor, i: Tensor) -> Tensor:
    """Rows that become others."""
    return w.index_add(0, i, w[i].tanh() - 1)


TABLES = (f32(K, V, D), ints(B, K, L))
OUT = B * K * D * 4  # bytes of what is looked up
IDS = B * K * L * 8
DENSE = (*TABLES, f32(B, D), f32((K + 1) * D, H))
HYBRID = ("k@x v d", "b@x k l", "b@x d", "_ _")
BEST = (exchanged(OUT, 8), 1)
ROWS_CUT = 10_000_000
SUMS = B * D * 4
BY_ALL = 5.8  # squares and sums of rows that other devices have, too: zeros, but who has a row is not known beforehand
ROWS = [
    Row("tables by an index that counts them", counted, TABLES, CUT, X, *BEST, out_specs="b@x k d"),
    Row("tables by an index that counts them, cut by features", counted, TABLES, ("k v d@x", "..."), X),
    Row("tables under vmap", mapped, TABLES, CUT, X, *BEST, out_specs="b@x k d"),
    Row("sum over tables", lambda w, i: counted(w, i).sum(1), TABLES, CUT, X, gathered(OUT / 8, 8), 1,
        out_specs="b@x d"),
    Row("more tables than devices", counted, (f32(16, V, D), ints(B, 16, L)), CUT, X, 2 * BEST[0], 1,
        out_specs="b@x k d"),
    Row("gradients of tables by an index that counts them", of_sines(counted), TABLES, CUT, X),
    Row("gradients of rows by an index that counts", of_sines(rows), TABLES, CUT, X),
    Row("DLRM: tables by table, the rest by batch", dlrm, DENSE, HYBRID, X, exchanged(OUT, 8) + exchanged(IDS, 8), 2),
    Row("step of DLRM: tables by table, the rest by batch", step, DENSE, HYBRID, X,
        2 * exchanged(OUT, 8) + exchanged(IDS, 8) + reduced(DENSE[3].nbytes, 8), 4, out_specs=("k@x v d", "_ _"),
        short={"collectives": 1.25}, why="ids are sent for the lookups and again for their gradients"),
    Row("factorization machine, rows cut", machine, (f32(ROWS_CUT, D), ints(B, K)), ("v@x d", "..."), X,
        2 * gathered(SUMS, 8) + reduced(B * 4, 8), 3, work=BY_ALL),
    Row("gradient of a factorization machine", of_sines(machine), (f32(ROWS_CUT, D), ints(B, K)), ("v@x d", "..."), X,
        2 * reduced(SUMS, 8), 2, work=6.4),
    Row("factorization machine of many tables", machine_of_tables, ([f32(ROWS_CUT, D)] * K, ints(B, K)),
        (["v@x d"] * K, "..."), X, 2 * gathered(SUMS, 8), 2, work=BY_ALL, out_specs="b@x"),
    Row("factorization machine with weights, rows cut", wide, (f32(ROWS_CUT, D), f32(ROWS_CUT, 1), ints(B, K)),
        ("v@x d", "v@x _", "..."), X, 2 * gathered(SUMS, 8) + reduced(B * 4, 8), 3, work=BY_ALL),
    Row("update of looked-up rows", updated, (f32(ROWS_CUT, D), ints(B)), ("v@x d", "..."), X, work=4.5),
    Row("last token of each row", last, (f32(64, 128, D), ints(64)), ("b@x s d", "b@x"), X),
]  # fmt: skip
