"""Rows that are looked up in a cut table, and stay where they were found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from shardlib import Mesh
from shardlib.compiler.lower.partial_sums.gathered_rows import GatheredRows
from shardlib.sharding.mesh.machine import Link, Machine

V, D, B, L = 20000, 4, 16, 16  # rows of a table, features, samples, ids of each: to move the table is no way
NODE = Machine.preset("node")
SLOW = replace(NODE, inner=Link(NODE.inner.bandwidth / 10), outer=Link(NODE.outer.bandwidth / 10))
SPECS = ("v@x d", "b l")


def _interactions(t: Tensor, i: Tensor) -> Tensor:
    """A factorization machine's (Rendle 2010)."""
    e = F.embedding(i, t)
    return 0.5 * (e.sum(1).square() - e.square().sum(1)).sum(-1)


def _of_lists(t: Tensor, i: Tensor) -> Tensor:
    e = torch.stack([F.embedding(i[:, k], t * (k + 1)) for k in range(L)], 1)
    return (e.sum(1).square() - e.square().sum(1)).sum(-1)


def _side_by_side(t: Tensor, i: Tensor) -> Tensor:
    """Of lookups of several sizes, and parts that are none of them."""
    e = torch.cat([F.embedding(x, t * (k + 1)) for k, x in enumerate(i.split([1, L - 3, 2], 1))], 1)
    return (e.sum(1).square() - e.square().sum(1)).sum(-1)


def _across(t: Tensor, i: Tensor) -> Tensor:
    """Written where others were looked up."""
    e = torch.cat([t[i[0]], t[i[1]]]).exp()
    return t.index_add(0, i[0], e[L:]).index_add(0, i[1], e[:L])


def _gradient(program: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    gradient: Callable[[Tensor, Tensor], Tensor] = sl.grad(lambda t, i: program(t, i).sin().sum())
    return gradient


def _relu_of_rows(t: Tensor, i: Tensor) -> Tensor:
    return F.relu(t[i]).sum(1)


def _shifted(t: Tensor, i: Tensor) -> Tensor:
    """Rows that are 1 where a device has none."""
    return (F.embedding(i, t) + 1).square().sum(1)


def _divided(t: Tensor, i: Tensor) -> Tensor:
    e = F.embedding(i, t).square()
    return (e / (e + 1)).sum(1)


def _also_whole(t: Tensor, i: Tensor) -> Any:
    e = F.embedding(i, t)
    return e.square().sum(1), e @ t.detach().new_ones(D, D)


def _of_two(t: Tensor, i: Tensor) -> Tensor:
    """Rows of which devices have different ones."""
    return (F.embedding(i, t) * F.embedding(i.flip(1), t)).sum(1)


def _updated(t: Tensor, i: Tensor) -> Tensor:
    return t.index_add(0, i[0], t[i[0]].exp())


def _put(t: Tensor, i: Tensor) -> Tensor:
    return t.index_put((i[0] % V,), t[i[0] % V].cos())


def _written_elsewhere(t: Tensor, i: Tensor) -> Tensor:
    return t.index_add(0, i[0].flip(0), t[i[0]].exp())


def _penalized(t: Tensor, i: Tensor) -> Tensor:
    """Of tokens that were there before."""
    ids = torch.cat([i, i + 1]).t()[:D].t().contiguous()
    scores = t.gather(0, ids)
    return t.scatter(0, ids, torch.where(scores < 0, scores * 1.2, scores / 1.2))


def _of_two_tables(t: Tensor, i: Tensor) -> Tensor:
    """The same rows of two tables, written to one of them."""
    ids = i.flatten()[:L]
    mine, other = t[ids], (2 * t)[ids]
    return t.index_put((ids,), mine.cos() * other, accumulate=True)


def _of_a_later_table(t: Tensor, i: Tensor) -> Tensor:
    """Those of the second one are read where the first ones' way has been decided."""
    ids = i.flatten()[:L]
    rows = t[ids].cos()
    return t.index_put((ids,), rows * (2 * t)[ids], accumulate=True)


def _angles(t: Tensor, i: Tensor) -> Tensor:
    """Of which the sign of a zero decides."""
    e = F.embedding(i, t)
    return torch.atan2(e, e).sum(1)


def _smooth(t: Tensor, i: Tensor) -> Tensor:
    """Whose derivative has a kernel that takes tensors of one shape."""
    e = F.embedding(i, t)
    return (F.gelu(e) * e).sum(1)


def _rests(t: Tensor, i: Tensor) -> Tensor:
    """Of whole numbers, by what is not zero where it was looked up."""
    rows = t[i[0]]
    divisors = torch.where(rows.abs() > 0, torch.tensor(3), torch.tensor(0))
    return t.index_put((i[0],), torch.where(5 % divisors == 2, rows.cos(), 1.0))


def _transposed(t: Tensor, i: Tensor) -> Tensor:
    """Written to the rows of another place's index."""
    square = i[:L]
    return t.index_put((square,), t[square].transpose(0, 1).exp(), accumulate=True)


WHOLE = B * L * D * 8  # bytes of all that is looked up
LITTLE = B * D * 8  # of its sums
# Bytes on the wire, of two devices.
PROGRAMS: dict[str, tuple[Callable[[Tensor, Tensor], Any], int]] = {
    "interactions": (_interactions, 2 * LITTLE),
    "gradient of interactions": (_gradient(_interactions), 2 * LITTLE),
    "interactions of a list": (_of_lists, 2 * LITTLE),
    "gradient of interactions of a list": (_gradient(_of_lists), 2 * LITTLE),
    "gradient of interactions side by side": (_gradient(_side_by_side), 2 * LITTLE),
    "relu": (_relu_of_rows, LITTLE),
    "gradient of relu": (_gradient(_relu_of_rows), LITTLE),
    "updated": (_updated, 0),
    "put": (_put, 0),
    "penalized": (_penalized, 0),
    "gradient of smooth": (_gradient(_smooth), LITTLE),
    "of two tables": (_of_two_tables, 0),
    "of a later table": (_of_a_later_table, L * D * 8),
    # Somebody needs the rows, or would take what others have there.
    "shifted": (_shifted, WHOLE),
    "divided": (_divided, WHOLE),
    "rests": (_rests, L * D * 8),
    "angles": (_angles, WHOLE),
    "also whole": (_also_whole, WHOLE),
    "of two": (_of_two, WHOLE + LITTLE),
    "across": (_across, 2 * L * D * 8),
    "written elsewhere": (_written_elsewhere, L * D * 8),
    "transposed": (_transposed, L * L * D * 8),
}


@pytest.mark.parametrize("devices", [2, 3, 8])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_bytes(name: str, devices: int) -> None:
    program, nbytes = PROGRAMS[name]
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(V, D, dtype=torch.float64, generator=generator)
    args = table, torch.stack([torch.randperm(V - 1, generator=generator)[:L] for _ in range(B)])
    with Mesh({"x": devices}, machine=SLOW):
        step = sl.jit(program, in_specs=SPECS, out_specs=None)
        found = step(*args)
        sent = step.plan(*args).comm_bytes
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, program(*args))), strict=True):
        torch.testing.assert_close(a.full_tensor(), b)
    share = (devices - 1) / devices  # of an all-reduce twice, of a reduce-scatter once
    assert nbytes * share <= sent <= 2 * (nbytes + (nbytes > 0) * B * 8) * share


def test_results_that_nobody_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a gradient of several tensors, wherever it is taken of looked-up rows."""
    monkeypatch.setattr(GatheredRows, "_pays", lambda self, region: True)
    rows = torch.linspace(0, 1, L * D, dtype=torch.float64).reshape(L, D).sin()
    mean, scale = rows.mean(-1, keepdim=True), rows.var(-1, keepdim=True, correction=0).rsqrt()

    def program(t: Tensor, i: Tensor) -> Tensor:
        back = torch.ops.aten.native_layer_norm_backward.default
        made: Tensor = back(t[i], rows, [D], mean, scale, None, None, [True, False, False])[0]
        return made

    args = torch.linspace(-1, 1, V * D, dtype=torch.float64).reshape(V, D), torch.arange(L) * (V // L)
    with Mesh(x=2):
        torch.testing.assert_close(sl.jit(program, in_specs=("v@x d", "l"))(*args).full_tensor(), program(*args))


def _ends(u: Tensor) -> Tensor:
    """Of second order at either end, by rows of the device that has it."""
    low, high = 2 * u[1:2] - u[2:3] / 3, u[-1:].exp() + u[-2:-1].flip(1)
    return torch.cat([low, u[2:] - u[:-2], high])


def _written_ends(u: Tensor) -> Tensor:
    """With what is no zero of zeros on the way, in views."""
    v, first, second = u.square(), u[0], u[1]
    v[0], v[-1] = (second + 1).cos() / first, u[-1][:, None].cos()[:, 0]
    return v


def _of_both_ends(u: Tensor) -> Tensor:
    """Nobody has all that is in it."""
    return torch.cat([(u[:1] * u[-1:]).cos(), u[1:]])


def _at_another(u: Tensor) -> Tensor:
    """Made where it is not put."""
    return torch.cat([u[-1:].cos() + u[-2:-1], u.sin()])


def _also_returned(u: Tensor) -> Any:
    low = u[1:2] - u[:1]
    return torch.cat([low, u[1:]]), low


# Sums over devices, of rows that somebody else needs; None where something else may be cheaper.
ENDS: dict[str, tuple[Callable[[Tensor], Any], int | None]] = {
    "ends": (_ends, 0),
    "gradient of ends": (sl.grad(lambda u: _ends(u).sin().sum()), 0),
    "written ends": (_written_ends, 0),
    "gradient of written ends": (sl.grad(lambda u: _written_ends(u).sin().sum()), None),
    "of both ends": (_of_both_ends, 2),
    "at another": (_at_another, None),
    "also returned": (_also_returned, 1),
}


@pytest.mark.parametrize(("spec", "size"), [("n@(x y) w", 61), ("n@x w@y", 64)])
@pytest.mark.parametrize("name", ENDS)
def test_single_rows_stay_with_who_has_them(name: str, size: int, spec: str) -> None:
    program, sums = ENDS[name]
    size *= 100 if sums == 2 else 1  # few rows are all gathered in the time of one sum
    u = torch.rand(size, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1
    with Mesh(x=4, y=2):
        step = sl.jit(program, in_specs=spec)
        found, plan = step(u), step.plan(u)
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, program(u))), strict=True):
        torch.testing.assert_close(a.full_tensor(), b)
    assert sums is None or sum(c.kind == "all_reduce" for c in plan.collectives) == sums
