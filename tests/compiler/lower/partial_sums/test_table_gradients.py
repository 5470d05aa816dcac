"""Gradients of tables: rows and indices are gathered where that costs less than a sum of all rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from shardlib import Mesh, Plan
from shardlib.compiler.propagate import decision_units
from shardlib.core.context import single_device
from tests.helpers.ranks import run_ranks
from tests.validation.best import f32, ints

V, D, B, T = 4000, 4, 10, 3


def _bag(mode: str, **more: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda w, i: F.embedding_bag(i, w, mode=mode, **more)


def _weighted(w: Tensor, i: Tensor) -> Tensor:
    return F.embedding_bag(i, w, mode="sum", per_sample_weights=w[:, 0][i].sin(), padding_idx=3)


def _into(write: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """What is written to the places of a table that each row of the batch names."""
    return lambda w, i: write(torch.zeros(V, D, dtype=w.dtype), i[:, 0], w[:B].cos() * i[:, :1])


LOOKUPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "embedding": lambda w, i: F.embedding(i, w),
    "embedding, padded": lambda w, i: F.embedding(i, w, padding_idx=3),
    "embedding, by frequency": lambda w, i: F.embedding(i, w, scale_grad_by_freq=True),
    "index": lambda w, i: w[i],
    "index from the end": lambda w, i: w[i - V],
    "index of two dims": lambda w, i: w[i, i % D],
    "index_select": lambda w, i: w.index_select(0, i[:, 0]),
    "gather": lambda w, i: w.gather(0, i[:, :1].expand(B, D)),
    "bags": _bag("sum"),
    "bags of one": lambda w, i: F.embedding_bag(i[:, :1], w, mode="mean"),
    "bags, padded": _bag("sum", padding_idx=3),
    "bags, by frequency": _bag("sum", scale_grad_by_freq=True),
    "bags, means": _bag("mean"),
    "bags, padded means": _bag("mean", padding_idx=3),
    "bags, maxima": _bag("max"),
    "bags, padded maxima": _bag("max", padding_idx=3),
    "bags, weighted": _weighted,
    "index_add": _into(lambda x, i, rows: x.index_add(0, i, rows)),
    "scatter_add": _into(lambda x, i, rows: x.scatter_add(0, i[:, None].expand(B, D), rows)),
    "index_put": _into(lambda x, i, rows: x.index_put((i,), rows, accumulate=True)),
    "scatter_reduce": _into(lambda x, i, rows: x.scatter_reduce(0, i[:, None].expand(B, D), rows, "sum")),
    "index_reduce": _into(lambda x, i, rows: x.index_reduce(0, i, rows, "amax")),
}


def _table(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(V, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def _index(dtype: torch.dtype = torch.int64) -> Tensor:
    """With rows named again and again, and the padding among them."""
    drawn = torch.randint(0, 8, (B, T), generator=torch.Generator().manual_seed(1))
    return (drawn).where(drawn > 1, 3).to(dtype)


def both(lookup: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The value and the gradient of the table."""

    def program(w: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        return lookup(w, i), sl.grad(lambda w: (lookup(w, i).sin() * 2).sum())(w)

    return program


def worst(name: str, mesh: dict[str, int], spec: str, dtype: torch.dtype, index: torch.dtype) -> float:
    """The largest relative error on a mesh, the batch cut over `data`."""
    program, args = both(LOOKUPS[name]), (_table(dtype), _index(index))
    with Mesh(mesh):
        found = [x.full_tensor() for x in sl.jit(program, in_specs=(spec, "b@data _"))(*args)]
    with single_device():
        expected = program(*args)
    assert all(a.dtype == b.dtype for a, b in zip(found, expected, strict=True))
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.sampled(29)
@pytest.mark.parametrize("spec", ["...", "v@tensor _", "_ d@tensor", "v@data _"])
@pytest.mark.parametrize("name", LOOKUPS)
def test_same_as_on_one_device(name: str, spec: str) -> None:
    """10 rows over 4 devices are 3, 3, 3 and 1; over 6, two devices have none."""
    for n in (4, 6):
        assert worst(name, {"data": n, "tensor": 3}, spec, torch.float64, torch.int64) <= 1e-14


@pytest.mark.sampled(5)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", ["embedding, padded", "index"])
def test_bits_are_those_of_one_device(name: str, index: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are added up in the order of one device, in 16 bits, too; sums of four devices round once more."""
    assert worst(name, {"data": 4}, "...", torch.bfloat16, index) == 0
    monkeypatch.setattr(decision_units, "_reads_less", lambda op: False)
    assert worst(name, {"data": 4}, "...", torch.bfloat16, index) > 0


@pytest.mark.long
@pytest.mark.sampled(5)
@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", ["embedding, padded", "index", "bags, weighted", "bags, padded means", "bags", "index_add"]
)
@pytest.mark.parametrize("spec", ["v@data _", "..."])
def test_on_four_processes(spec: str, name: str) -> None:
    assert max(run_ranks(worst, 4, name, {"data": 4}, spec, torch.float64, torch.int64)) <= 1e-14


# What is sent ---------------------------------------------------------------------------------------------------------

ROWS, WIDE, BATCH = 1 << 20, 64, 512


def plan(lookup: Callable[[Tensor, Tensor], Tensor], spec: str = "...", rows: int = ROWS, **mesh: int) -> Plan:
    program = sl.grad(lambda w, i: lookup(w, i).sin().sum())
    with Mesh.abstract(**mesh or {"data": 8}):
        planned: Plan = sl.jit(program, in_specs=(spec, "b@data _")).plan(f32(rows, WIDE), ints(BATCH, T))
    return planned


@pytest.mark.parametrize("name", ["embedding", "index"])
def test_looked_up_rows_are_gathered(name: str) -> None:
    """Of rows and indices 7 of 8 parts; nothing but the gradient is as large as it."""
    planned = plan(LOOKUPS[name])
    assert planned.comm_bytes == BATCH * T * (8 + WIDE * 4) * 7 // 8
    assert {c.kind for c in planned.collectives} == {"all_gather"}
    assert planned.peak_memory < 1.02 * 2 * ROWS * WIDE * 4, "the table and its gradient"


def test_the_plan_says_why() -> None:
    said = plan(LOOKUPS["embedding"]).collectives[-1].reason
    assert said.endswith("b whole: read by embedding_dense_backward(mul, i); rows and indices are 355 kB, "
                         "a sum of the result 470 MB")  # fmt: skip


def test_a_small_table_is_summed_up() -> None:
    planned = plan(LOOKUPS["embedding"], rows=100)
    assert [(c.kind, c.bytes) for c in planned.collectives] == [("all_reduce", 2 * 100 * WIDE * 4 * 7 / 8)]
    assert "rows and indices" not in planned.full


def test_rows_of_a_cut_table_stay_where_they_are() -> None:
    """The batch is gathered along its own axis, each device keeps what is in its rows."""
    planned = plan(LOOKUPS["embedding"], "v@tensor _", data=4, tensor=8)
    rows = BATCH * T * WIDE * 4
    summed = 2 * rows / 4 * 7 / 8  # looked up, over tensor
    assert planned.comm_bytes == summed + (rows + BATCH * T * 8) * 3 / 4


@pytest.mark.long
def test_tables_decide_alone_and_share_messages() -> None:
    """26 tables, as of click logs: those of few rows are summed up."""
    sizes = [3, 4, 10, 14, 27, 36, 63, 108, 155, 305, 583, 633, 976, 1543, 2209, 5683, 7424, 11938, 12973, 17295, 39060,
             142572, 590152, 1460000, 2202608, 10131227]  # fmt: skip

    def program(tables: list[Tensor], indices: list[Tensor]) -> Tensor:
        return torch.stack([F.embedding(i, w).sum(1) for w, i in zip(tables, indices, strict=True)]).sin().sum()

    with Mesh.abstract(data=8):
        args = [f32(n, 16) for n in sizes], [ints(2048, 2) for _ in sizes]
        planned = sl.jit(sl.grad(program), in_specs=("...", "b@data _")).plan(*args)
    estimated, gathered = 2048 * 2 * (8 + 16 * 4), 2048 * (2 * 8 + 16 * 4)  # gradients are gathered, then repeated
    small = [n for n in sizes if 2 * n * 16 * 4 < estimated]
    assert planned.comm_bytes == (sum(2 * n * 16 * 4 for n in small) + gathered * (26 - len(small))) * 7 / 8
    kinds = [c.kind for c in planned.collectives]
    assert (kinds.count("all_reduce"), kinds.count("all_gather")) == (15, 2 * 11)


def test_a_sum_that_another_use_needs_is_one() -> None:
    """The table is also the head: its gradient is summed up anyway, and what was looked up with it."""

    def program(w: Tensor, i: Tensor) -> Tensor:
        return (F.embedding(i, w).sin() @ w.t()).logsumexp(-1).sum()

    with Mesh.abstract(data=8):
        planned = sl.jit(sl.grad(program), in_specs=("...", "b@data")).plan(f32(1 << 14, WIDE), ints(BATCH))
    assert [(c.kind, c.bytes) for c in planned.collectives] == [("all_reduce", 2 * (1 << 14) * WIDE * 4 * 7 / 8)]
