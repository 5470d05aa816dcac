"""Lookups in several tables of one tensor: devices look up in their own tables, values and gradients are plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib.compiler.simplify import normalize
from shardlib.frontend.trace import trace
from tests.validation.best.blocks import recommenders as r

V, D, B, L = 12, 4, 10, 3
CUTS = ({"x": 4}, {"x": 3}, {"x": 8})


def _args(tables: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(tables, V, D, dtype=torch.float64, generator=generator)
    return w, torch.randint(V, (B, tables, L), generator=generator)


def _from_behind(w: Tensor, i: Tensor) -> Tensor:
    """By ids that count from the end."""
    return r.counted(w, i - V)


PROGRAMS = [r.rows, r.counted, r.mapped, _from_behind]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mesh", CUTS, ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_values(program: Callable[..., Any], mesh: dict[str, int]) -> None:
    w, i = _args(4)
    for f in (program, r.of_sines(program)):
        with sl.Mesh(mesh):
            found = sl.jit(f, in_specs=("k@x v d", "..."))(w, i).full_tensor()
        torch.testing.assert_close(found, f(w, i))


@pytest.mark.parametrize("cut", ["k@x v d", "k v@x d", "k v d@x", "..."])
def test_values_whatever_is_cut(cut: str) -> None:
    w, i = _args(4)
    dense, m = torch.randn(B, D, dtype=torch.float64), torch.randn(5 * D, 6, dtype=torch.float64)
    with sl.Mesh(x=4):
        found = sl.jit(r.step, in_specs=(cut, "b@x k l", "b@x d", "_ _"))(w, i, dense, m)
    for mine, plain in zip(found, r.step(w, i, dense, m), strict=True):
        torch.testing.assert_close(mine.full_tensor(), plain)


def test_ids_out_of_range_are_refused() -> None:
    w, i = _args(4)
    with sl.Mesh(x=4), pytest.raises(Exception, match=r"out of (range|bounds)"):
        sl.jit(r.counted, in_specs=("k@x v d", "..."))(w, i + V)


def _lookups(program: Callable[..., Any], *args: Any) -> list[str]:
    graph = normalize(trace(program, args)).graph.graph
    names = (str(node.target) for node in graph.nodes if node.op == "call_function")
    return [name.split(".")[1] for name in names if "gather" in name or "embedding" in name or "scatter" in name]


def test_what_is_rewritten() -> None:
    w, i = _args(4)
    assert _lookups(r.counted, w, i) == ["gather"]
    assert _lookups(r.of_sines(r.counted), w, i) == ["gather", "scatter_add"]


@pytest.mark.parametrize(("table", "index"), [("k v d@x", "k b"), ("k v d", "k b@x"), ("...", "...")])
def test_whole_tables_by_an_index_that_counts_them_are_read_as_they_are(table: str, index: str) -> None:
    def read(w: Tensor, i: Tensor) -> Tensor:
        return w[torch.arange(len(w))[:, None], i]

    def pulled(w: Tensor, i: Tensor) -> Tensor:
        return sl.grad(lambda w: read(w, i).sin().sum())(w)

    with sl.Mesh(x=4):
        for program in (read, pulled):
            w, i = torch.randn(8, 5, 8, dtype=torch.float64), torch.randint(-5, 5, (8, 12))
            plan = sl.jit(program, in_specs=(table, index)).plan(w, i)
            assert "gather(" not in plan.full
            assert "scatter_add(" not in plan.full
            sl.check(program, w, i, in_specs=(table, index))


@pytest.mark.parametrize("index", ["k b", "k@x b"])
def test_a_table_that_is_cut_where_it_is_read_is_no_whole_one(index: str) -> None:
    """What an annotation in the function says counts, and a square stack that is turned is another."""

    def placed(w: Tensor, i: Tensor) -> Tensor:
        return sl.shard(w, "k@x v d")[torch.arange(len(w))[:, None], i]

    def turned(w: Tensor, i: Tensor) -> Tensor:
        return w.transpose(0, 1)[torch.arange(len(w))[:, None], i]

    w, i = torch.randn(8, 8, 4, dtype=torch.float64), torch.randint(8, (8, 12))
    with sl.Mesh(x=4):
        for program, spec in ((placed, "k v d"), (turned, "v k@x d")):
            sl.check(program, w, i, in_specs=(spec, index))
            assert sl.jit(program, in_specs=(spec, index)).plan(w, i).comm_bytes == 0
