"""What is like a tensor is a constant; where it is returned it lives where the tensor does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import shardlib as sl
from tests.validation.best.numerics.constants import degrees, pagerank


def _written(x: Tensor, i: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out.zero_()
    out[i] = x[: len(i)]
    out[1:] += x[:-1]
    return out


def _state(x: Tensor, i: Tensor) -> dict[str, Tensor]:
    """What an optimizer begins with, and what it makes of it."""
    first = torch.zeros_like(x)
    return {
        "first": first,
        "then": first.lerp(x.sin(), 0.1),
        "counts": torch.zeros_like(x).index_add(0, i, x[: len(i)]),
    }


def _unused(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    return sl.grad(lambda x, w: x.sin().sum(), (0, 1))(x, x.cos())


def _turned(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    turned = x.t()
    return torch.ones_like(turned) * 2, torch.full_like(turned, 3).reshape(-1) + x.reshape(-1), turned.new_zeros(3) + 1


PROGRAMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "degrees": lambda x, i: degrees(x[:, 0], i),
    "ranks": lambda x, i: pagerank(x[:, 0], i, i.flip(0), x[:, 1]),
    "written to": _written,
    "state": _state,
    "unused": _unused,
    "turned": _turned,
    "in another dtype": lambda x, i: x + torch.ones_like(x, dtype=torch.int32) * torch.full_like(i[:1], 2),
    "where": lambda x, i: torch.where(x > 0, torch.ones_like(x), torch.zeros_like(x)) * x,
    "side by side": lambda x, i: torch.cat([torch.zeros_like(x[:1]), x[:-1], torch.ones_like(x)]),
    "gradient": sl.grad(lambda x, i: (torch.zeros_like(x).index_add(0, i, x[: len(i)]) * x).sum()),
    "identity": lambda x, i: x + torch.eye(300, 6)[:10],
    "placed": lambda x, i: sl.shard(torch.zeros_like(x), "_ d@y") + torch.ones_like(x),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("spec", ["n@x d", "n@x d@y", "n d@(x y)"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values(name: str, spec: str) -> None:
    program = PROGRAMS[name]
    x, i = torch.rand(10, 6, dtype=torch.float64) + 0.5, torch.randperm(10)[:8]
    with sl.no_mesh():
        want = pytree.tree_leaves(program(x, i))
    with sl.Mesh(x=2, y=2):
        found = pytree.tree_leaves(sl.jit(program)(sl.shard(x, spec), sl.shard(i, "e@x")))
    for a, b in zip(found, want, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a.full_tensor(), b, rtol=1e-12, atol=1e-12)


def test_results_live_where_the_tensor_does() -> None:
    with sl.Mesh(x=2, y=2):
        x = sl.shard(torch.randn(16, 8), "n@x d@y")
        found = sl.jit(_state)(x, sl.shard(torch.arange(12), "e@x"))
        assert {sl.typeof(y) for y in found.values()} == {sl.typeof(x)}


def test_in_per_device_code() -> None:
    def body(x: Tensor) -> Tensor:
        return torch.zeros_like(x).add(x) + sl.psum(torch.ones_like(x), "x") + torch.ones_like(x).cumsum(1)

    x = torch.randn(8, 3, dtype=torch.float64)
    with sl.Mesh(x=4):
        found = sl.jit(sl.shard_map(body, in_specs="n@x d", out_specs="n@x d"))(x).full_tensor()
    torch.testing.assert_close(found, x + 4 + torch.arange(1, 4))
