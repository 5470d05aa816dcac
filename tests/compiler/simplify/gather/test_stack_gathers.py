"""Lookups in all tables of a stack at once: values and gradients are those of one lookup after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from shardlib.compiler.simplify import normalize
from shardlib.frontend.trace import trace
from tests.validation.best import f32, ints
from tests.validation.best.blocks import recommenders as r

V, D, B, L = 12, 4, 10, 3
CUTS = ({"x": 4}, {"x": 3}, {"x": 8})


def _args(tables: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(tables, V, D, dtype=torch.float64, generator=generator)
    return w, torch.randint(V, (B, tables, L), generator=generator)


def _crossed(w: Tensor, i: Tensor) -> Tensor:
    """The same tables twice, the second time by others' ids."""
    ids = i.unbind(1)
    return r.listed(w, *ids) - r.listed(w, *ids[::-1])


def _with_rest(w: Tensor, i: Tensor) -> Tensor:
    """One result is read besides."""
    out = [F.embedding(i[:, k], w[k]).relu().sum(1) for k in range(len(w))]
    return torch.stack(out, 1) + out[0][:, None]


def _backwards(w: Tensor, i: Tensor) -> Tensor:
    """In another order than the tables are in."""
    return torch.stack([F.embedding(i[:, k], w[k]).sum(1) for k in reversed(range(len(w)))], 1)


def _from_behind(w: Tensor, i: Tensor) -> Tensor:
    """By ids that count from the end."""
    return r.counted(w, i - V) + r.rows(w, i - V).sum()


def _means(w: Tensor, i: Tensor) -> Tensor:
    return r.bags(w, i, "mean")


PROGRAMS = [r.by_table, r.bags, _means, r.rows, r.pooled, r.counted, r.mapped, _crossed, _with_rest, _backwards]
PROGRAMS.append(_from_behind)


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
    for program in (r.by_table, r.counted):
        with sl.Mesh(x=4), pytest.raises(Exception, match=r"out of (range|bounds)"):
            sl.jit(program, in_specs=("k@x v d", "..."))(w, i + V)


def _lookups(program: Callable[..., Any], *args: Any) -> list[str]:
    graph = normalize(trace(program, args)).graph.graph
    names = (str(node.target) for node in graph.nodes if node.op == "call_function")
    return [name.split(".")[1] for name in names if "gather" in name or "embedding" in name or "scatter" in name]


def test_what_is_rewritten() -> None:
    w, i = _args(4)
    assert _lookups(r.by_table, w, i) == ["gather"]
    assert _lookups(r.of_sines(r.by_table), w, i) == ["gather", "scatter_add"]
    # Others read one, or some tables are missing: they stay as they are.
    assert _lookups(_with_rest, w, i) == ["embedding"] * 4
    assert _lookups(lambda w, i: r.by_table(w[:3], i[:, :3]), w, i) == ["gather"]
    assert _lookups(lambda w, i: torch.stack([F.embedding(i[:, k], w[k]) for k in range(3)]), w, i) == ["embedding"] * 3


def _turned(w: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return r.listed(w, a, b, c) - r.listed(w, c, a, b)


def test_the_order_of_arguments_that_are_ids() -> None:
    w, i = _args(3)
    ids = [x.clone() for x in i.unbind(1)]
    with sl.Mesh(x=3):
        found = sl.jit(_turned, in_specs=("k@x v d", *["..."] * 3))(w, *ids).full_tensor()
    torch.testing.assert_close(found, _turned(w, *ids))
    assert _lookups(_turned, w, *ids) == ["gather", "gather"]


@pytest.mark.parametrize("spec", ["k v@x d", "k v d@x", "..."])
def test_tables_that_are_cut_otherwise_are_looked_up_each_where_it_is(spec: str) -> None:
    with sl.Mesh.abstract(x=8):
        plan = sl.jit(r.by_table, in_specs=(spec, "...")).plan(*r.TABLES)
    assert "embedding(" in str(plan)
    assert "gather(" not in str(plan)


def test_the_cut_of_what_only_has_the_size_of_a_stack_decides_nothing() -> None:
    w, i, dense = f32(8, 100, 64), ints(512, 8, 4), f32(8, 64)
    with sl.Mesh.abstract(x=8):
        program = lambda w, i, dense: (r.by_table(w, i), dense.sin())
        plan = sl.jit(program, in_specs=("k v d@x", "...", "b@x d")).plan(w, i, dense)
    assert "embedding(" in str(plan)
    assert "gather(" not in str(plan)


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
            assert "gather(" not in str(plan)
            assert "scatter_add(" not in str(plan)
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
