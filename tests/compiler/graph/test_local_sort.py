"""Rows in an order that nobody sees: each device may sort its own. Small whole numbers: no rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib.compiler.graph.local_sort import DisorderError, Noted, check
from shardlib.sharding.mesh.axis import Axis

T, K, E, D = 16, 2, 4, 16  # tokens, experts of each, experts, features


def numbers(*shape: int, seed: int = 0, high: int = 2) -> Tensor:
    return torch.randint(-1, high, shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def chosen(t: int = T) -> Tensor:
    return torch.rand(t, E, generator=torch.Generator().manual_seed(1)).topk(K).indices


def ends_of(ids: Tensor) -> Tensor:
    return (ids[:, None] == torch.arange(E)).sum(0).cumsum(0, dtype=torch.int32)


def counted(ids: Tensor) -> Tensor:
    return torch.histc(ids.float(), bins=E, min=0, max=E - 1).cumsum(0, dtype=torch.int32)


def scattered(ids: Tensor) -> Tensor:
    return torch.zeros(E, dtype=torch.int64).scatter_add(0, ids, torch.ones_like(ids)).cumsum(0).int()


def put_back(rows: Tensor, order: Tensor) -> Tensor:
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return rows[back]


def sorted_back(rows: Tensor, order: Tensor) -> Tensor:
    return rows[order.argsort()]


def written(rows: Tensor, order: Tensor) -> Tensor:
    return torch.zeros_like(rows).index_put((order,), rows)


def mixture(
    x: Tensor,
    ids: Tensor,
    w: Tensor,
    *,
    ends: Callable[[Tensor], Tensor] = ends_of,
    back: Callable[[Tensor, Tensor], Tensor] = put_back,
    between: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda rows, ids, order: (rows + 1).relu() % 3,
) -> Tensor:
    ids, order = ids.flatten().clamp(0).sort()
    rows = between(torch._grouped_mm(x[order // K], w, ends(ids)), ids, order)
    return back(torch._grouped_mm(rows, w, ends(ids)), order).view(-1, K, D).sum(1)


def added(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    ids, order = ids.flatten().clamp(0).sort(stable=True)
    rows = torch._grouped_mm(x.index_select(0, order.div(K, rounding_mode="floor")), w, ends_of(ids))
    return torch.zeros_like(x).index_put((order // K,), rows, accumulate=True)


def grads(x: Tensor, ids: Tensor, w: Tensor) -> Any:
    loss = lambda x, w: (mixture(x, ids, w).float() % 5).sum()
    return sl.grad(loss, (0, 1))(x, w)


BIAS = numbers(E, D, seed=3)
FREE: dict[str, Callable[..., Any]] = {
    "mixture": mixture,
    "rows added to tokens": added,
    "counts by histogram": lambda *a: mixture(*a, ends=counted),
    "counts up to each": lambda *a: mixture(
        *a, ends=lambda ids: (ids[:, None] <= torch.arange(E)).sum(0, dtype=torch.int32)),
    "counts that are written": lambda *a: mixture(*a, ends=scattered),
    "back by another sort": lambda *a: mixture(*a, back=sorted_back),
    "written back": lambda *a: mixture(*a, back=written),
    "bias of the group": lambda *a: mixture(*a, between=lambda rows, ids, _: (rows + BIAS[ids]) % 3),
    "sum of every row": lambda *a: mixture(*a, between=lambda rows, *_: rows - rows.amax(1, keepdim=True)),
    "weights by place": lambda x, ids, w: mixture(
        x, ids, w, between=lambda rows, _, order: rows * (x[:, :K].flatten())[order][:, None]),
}  # fmt: skip
SEEN: dict[str, Callable[..., Any]] = {
    "rows are a result": lambda x, ids, w: torch._grouped_mm(
        x[(order := ids.flatten().sort())[1] // K], w, ends_of(order[0])),
    "order is a result": lambda x, ids, w: (mixture(x, ids, w), ids.flatten().sort().indices),
    "sums along the order": lambda *a: mixture(*a, between=lambda rows, *_: rows.cumsum(0) % 3),
    "places in the order": lambda *a: mixture(
        *a, between=lambda rows, *_: rows * (torch.arange(len(rows)) % 2)[:, None]),
    "first rows only": lambda *a: mixture(*a, between=lambda rows, *_: torch.cat([rows[:4], rows[4:] * 0])),
    "rows the other way round": lambda *a: mixture(*a, between=lambda rows, *_: rows.flip(0)),
    "rows beside unsorted ones": lambda x, ids, w: mixture(
        x, ids, w, between=lambda rows, *_: rows + x.repeat_interleave(K, 0)),
    "counts are a result": lambda x, ids, w: (mixture(x, ids, w), ends_of(ids.flatten().sort().values)),
    "counts are used": lambda *a: mixture(*a, between=lambda rows, ids, _: rows * (ends_of(ids).sum() % 3)),
    "places that are added up": lambda x, ids, w: mixture(x, ids, w, back=lambda rows, order: rows[
        torch.zeros_like(order).index_put((order,), torch.arange(len(order)), accumulate=True)]),
    "largest row": lambda *a: mixture(*a, between=lambda rows, *_: rows * (rows[:, 0].argmax(0) % 3)),
    "one row": lambda *a: mixture(*a, between=lambda rows, *_: rows - rows[2]),
    "two rows": lambda *a: mixture(*a, between=lambda rows, *_: rows - rows[torch.tensor([2, 5])].sum(0)),
    "one key": lambda *a: mixture(*a, between=lambda rows, ids, _: rows * ids[3]),
    "one place": lambda *a: mixture(*a, between=lambda rows, _, order: rows * (order[3] % 3)),
    "a diagonal": lambda *a: mixture(*a, between=lambda rows, *_: rows - rows.diagonal().sum()),
    "rows by their keys": lambda *a: mixture(*a, between=lambda rows, ids, _: rows + rows[ids]),
    "rows gathered by keys": lambda *a: mixture(
        *a, between=lambda rows, ids, _: rows.gather(0, ids[:, None].expand(-1, D))),
    "back by the order of others": lambda x, ids, w: mixture(
        x, ids, w, back=lambda rows, _: rows[(1 - ids.flatten()).argsort(stable=True)]),
    "back by a shuffled range": lambda *a: mixture(*a, back=lambda rows, order: rows[
        torch.zeros_like(order).index_put((order,), torch.arange(T * K).view(2, -1, 2).transpose(1, 2).reshape(-1))]),
    "back by one place": lambda *a: mixture(*a, back=lambda rows, order: rows[
        torch.zeros_like(order).index_put((order,), torch.arange(1).expand(T * K))]),
    "back by places further on": lambda *a: mixture(*a, back=lambda rows, order: rows[
        torch.zeros_like(order).index_put((order,), torch.arange(2 * T * K)[T * K:]) - T * K]),
    "back by the place of a place": lambda *a: mixture(
        *a, back=lambda rows, order: rows[order.argsort().argsort().argsort()]),
    "counts the other way round": lambda *a: mixture(*a, ends=lambda ids: (
        ids[:, None] == torch.arange(E)).sum(0).flip(0).cumsum(0, dtype=torch.int32)),
    "groups of one size": lambda *a: mixture(*a, ends=lambda ids: (
        torch.arange(1, E + 1) * (ids >= 0).sum() // E).int()),
    "room for so many": lambda *a: mixture(*a, ends=lambda ids: torch.where(
        torch.arange(E) < E - 1, (ids[:, None] <= torch.arange(E)).sum(0).clamp(max=5), T * K).int()),
    "keys from behind": lambda x, ids, w: written(torch._grouped_mm(x[(order := (
        found := ids.flatten().clamp(0).sort(descending=True))[1]) // K], w, ends_of(found[0])), order),
    "sorted by something else": lambda x, ids, w: written(torch._grouped_mm(x.repeat_interleave(K, 0)[(
        order := x.repeat_interleave(K, 0)[:, 0].sort(stable=True)[1])], w, ends_of(ids.flatten()[order])), order),
    "keys that may be below 0": lambda x, ids, w: written(torch._grouped_mm(x[(order := (
        found := ids.flatten().sort())[1]) // K], w, ends_of(found[0])), order),
    "keys in few bits": lambda *a: mixture(*a, ends=lambda ids: ends_of(ids.to(torch.int8))),
}  # fmt: skip
MESHES = [{"data": 2}, {"data": 3}, {"data": 8}, {"data": 2, "expert": 2}, {"expert": 2, "data": 3}]


def jitted(program: Callable[..., Any]) -> Any:
    mesh = sl.current_mesh()
    assert mesh is not None
    weights = "e@expert _ _" if "expert" in mesh.axes else "..."
    return sl.jit(program, in_specs=("t@data _", "t@data _", weights))


@pytest.mark.sampled(11)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", [*FREE, *SEEN])
def test_same_as_on_one_device(name: str, mesh: dict[str, int]) -> None:
    program, args = (FREE | SEEN)[name], (numbers(T, D), chosen(), numbers(E, D, D, seed=2))
    with sl.Mesh(mesh):
        found = jitted(program)(*args)
    expected = program(*args)
    for x, y in zip(*(z if isinstance(z, tuple) else (z,) for z in (found, expected)), strict=True):
        assert torch.equal(x.full_tensor(), y)


@pytest.mark.parametrize("name", [*FREE, *SEEN])
def test_nothing_is_sent_unless_somebody_sees_the_order(name: str) -> None:
    with sl.Mesh(data=4):
        plan = jitted((FREE | SEEN)[name]).plan(numbers(T, D), chosen(), numbers(E, D, D))
    assert bool(plan.collectives) == (name in SEEN), plan


@pytest.mark.parametrize(
    ("mesh", "specs"),
    [
        ({"data": 4}, ("t@data _", "t@data _", "...")),
        ({"data": 3}, ("t@data _", "t@data _", "...")),
        ({"data": 2, "expert": 2}, ("t@data _", "t@data _", "e@expert _ _")),
        ({"data": 2, "expert": 2}, ("t@(data expert) _", "t@(data expert) _", "e@expert _ _")),
        ({"data": 4}, ("t@data _", "t@data _", "e@data _ _")),
        ({"data": 2, "tensor": 2}, ("t@data _", "t@data _", "_ _ n@tensor")),
        ({"data": 2, "tensor": 2}, ("t@data _", "t@data _", "_ k@tensor _")),
        ({"data": 2, "tensor": 2}, ("t@data _", "t@tensor _", "_ k@tensor _")),
        ({"data": 2, "tensor": 2}, ("t@data k@tensor", "...", "_ k@tensor _")),
        ({"data": 4}, ("t@data _", "_ k@data", "...")),
    ],
    ids=str,
)
def test_gradients(mesh: dict[str, int], specs: Any) -> None:
    args = numbers(T, D), chosen(), numbers(E, D, D, seed=2) * (torch.arange(D) % 4 == 0)
    with sl.Mesh(mesh):
        found = sl.jit(grads, in_specs=specs)(*args)
    for x, y in zip(found, grads(*args), strict=True):
        assert torch.equal(x.full_tensor(), y)


def test_gradients_of_weights_are_all_that_is_sent() -> None:
    with sl.Mesh(data=4):
        plan = jitted(grads).plan(numbers(T, D), chosen(), numbers(E, D, D))
    (collective,) = plan.collectives
    assert collective.kind == "all_reduce"
    assert collective.bytes == 2 * E * D * D * 2 * 3 // 4


@pytest.mark.parametrize("specs", ["b@data s@seq _", "b@data s _", "b s@seq _"])
def test_tokens_of_several_dims(specs: str) -> None:
    def program(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        return mixture(x.flatten(0, 1), ids.flatten(0, 1), w).view_as(x)

    args = numbers(4, 6, D), chosen(24).view(4, 6, K), numbers(E, D, D, seed=2)
    with sl.Mesh(data=2, seq=3):
        step = sl.jit(program, in_specs=(specs, specs, "..."))
        assert not step.plan(*args).collectives
        assert torch.equal(step(*args).full_tensor(), program(*args))


def test_what_is_counted_is_not_sent() -> None:
    data, expert = (Axis("data", 2),), (Axis("expert", 2),)
    check([Noted("sort", {1: data}, rows=True), Noted("sort", {2: expert}, rows=False)])
    for noted in [Noted("sort", {2: data}, rows=False), Noted("other", {}, rows=False)]:
        with pytest.raises(DisorderError):
            check([Noted("sort", {1: data}, rows=True), noted])
