"""Operations on ShardedTensors outside jit: the oracle is the same line of plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from shardlib import Mesh, ShardedTensor, ShardingError, eager, shard


@pytest.fixture(autouse=True)
def _mesh() -> Iterator[None]:
    with Mesh(data=2, tensor=2):
        yield


def _whole(x: Any) -> Any:
    return torch.utils._pytree.tree_map_only(ShardedTensor, lambda t: t.full_tensor(), x)


X = torch.arange(48.0).view(4, 12).sin()

OPS: dict[str, Callable[[Tensor], Any]] = {
    "pointwise": lambda x: x * 2 + x.exp(),
    "plain operand": lambda x: x + torch.ones(12),
    "plain first": lambda x: torch.ones(12) - x,
    "matmul": lambda x: x @ x.t(),
    "plain matmul": lambda x: x @ torch.ones(12, 3),
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(1, keepdim=True),
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (12,)),
    "views": lambda x: x.view(2, 2, 3, 4).transpose(0, 2).flatten(),
    "slice": lambda x: x[1:3, ::2],
    "select": lambda x: x[2],
    "split": lambda x: x.split(5, 1),
    "topk": lambda x: tuple(x.topk(3)),
    "cat": lambda x: torch.cat([x, torch.ones(1, 12), x]),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "compare": lambda x: x == x,
    "dtype": lambda x: x.to(torch.float64).sum(0),
    "one": lambda x: x.new_ones(3) + torch.zeros_like(x)[0, :3],
    "int or float": lambda x: (x // 1, x // 1.0, x.long() * 1, x.long() * 1.0, x.long() * True),
    "signed zeros": lambda x: (1 / (x * 0 + 0.0), x.new_full((), 0.0), x.new_full((), -0.0)),
    "detach": lambda x: x.detach() + 1,
    "attention": lambda x: F.scaled_dot_product_attention(*(x.view(2, 2, 3, 4),) * 3, is_causal=True),
}


@pytest.mark.parametrize("spec", ["_ _", "b@data f@tensor", "_ f@(data tensor)", "(a=2 b@data) _"])
@pytest.mark.parametrize("name", OPS)
def test_ops(name: str, spec: str) -> None:
    out = OPS[name](shard(X, spec))
    assert all(isinstance(x, ShardedTensor) for x in torch.utils._pytree.tree_leaves(out))
    torch.testing.assert_close(_whole(out), OPS[name](X))


def test_layouts_follow() -> None:
    x, w = shard(X, "b@data _"), shard(torch.ones(12, 6), "_ f@tensor")
    assert sl.typeof(x @ w) == "f32[4@data, 6@tensor]"
    assert sl.typeof((x @ w).t()) == "f32[6@tensor, 4@data]"
    assert sl.typeof((x @ w).view(2, 2, 6)) == "f32[2@data, 2, 6@tensor]"


def test_programs_are_kept() -> None:
    x = shard(X, "b@data _")
    x * 3
    n = len(eager._programs)
    x * 3
    shard(X, "_ f@tensor") * 3
    assert len(eager._programs) == n
    x * 3.0
    assert len(eager._programs) == n + 1


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_numbers() -> None:
    total = shard(X, "b@data _").sum()
    assert float(total) == total.item() == pytest.approx(float(X.sum()))
    assert bool(total > -100)
    assert int(shard(torch.arange(4), "_@data").sum()) == 6
    assert f"{total.item():.3f}" == f"{X.sum():.3f}"
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(shard(X, "b@data _"))


def test_repr() -> None:
    x = shard(X, "b@data f@tensor")
    assert repr(x) == str(x) == f"{x}" == "ShardedTensor(f32[4@data, 12@tensor] on Mesh(data=2, tensor=2))"


# --- writes in place --------------------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda x: x.add_(1.5),
    "mul_": lambda x: x.mul_(torch.linspace(0, 1, 12)),
    "copy_": lambda x: x.copy_(torch.ones(4, 12)),
    "fill_": lambda x: x.fill_(3.0),
    "zero_": lambda x: x.zero_(),
    "setitem": lambda x: x.masked_fill_(x > 0, 0.0),
    "addcmul_": lambda x: x.addcmul_(x, x, value=0.5),
    "out=": lambda x: torch.sin(x + 1, out=x),
    "operator": lambda x: x.__iadd__(x),
    "itself": lambda x: x.sub_(x).add_(x, alpha=2).copy_(x + 1),
}


@pytest.mark.parametrize("spec", ["_ _", "b@data f@tensor", "_ f@(data tensor)"])
@pytest.mark.parametrize("name", WRITES)
def test_writes(name: str, spec: str) -> None:
    expected, x = X.clone(), shard(X, spec)
    before = x.sharding
    WRITES[name](expected)
    assert WRITES[name](x) is x
    assert x.sharding == before
    torch.testing.assert_close(x.full_tensor(), expected)


def test_a_write_does_not_reach_the_tensor_that_was_placed() -> None:
    plain = torch.ones(4)
    shard(plain, "_").add_(1)
    assert torch.equal(plain, torch.ones(4))


def test_a_write_reaches_aliases() -> None:
    x = shard(torch.ones(4), "_@data")
    alias = x.detach()
    x.add_(1)
    alias.mul_(3)
    x.data.add_(1)
    assert float(x.sum()) == float(alias.sum()) == 28


def test_lists() -> None:
    xs = [shard(torch.ones(4), "_@data"), shard(torch.ones(6), "_")]
    torch._foreach_add_(xs, [torch.ones(4), torch.ones(6)])
    assert [float(x.sum()) for x in xs] == [8, 12]


STALE = r"uses a ShardedTensor whose memory was written to through another view:\n  \* f32"


def test_views_are_values() -> None:
    """A view may be written to, or its tensor; the other is not used afterwards, rather than being silently old."""
    x = shard(torch.ones(4, 2), "b@data _")
    view, other = x[1], x.t()
    assert float(view.add_(1).sum()) == 4
    for old in (x, other):
        with pytest.raises(ShardingError, match=STALE):
            old.sum()
    y = shard(torch.ones(4, 2), "b@data _")
    view = y.detach()[1]
    y.add_(1)
    with pytest.raises(ShardingError, match=r"aten.sum.default " + STALE + r"\[2\]"):
        view.sum()
    assert float(y[1].sum()) == 4
    z = shard(torch.ones(4, 2), "b@data _")
    z[0] = 5.0
    with pytest.raises(ShardingError, match=STALE):
        z.sum()


def test_inference_mode() -> None:
    with torch.inference_mode():
        x = shard(X, "b@data _")
        torch.testing.assert_close((x * 2).full_tensor(), X * 2)
        torch.testing.assert_close(x[0].full_tensor(), X[0])
        torch.testing.assert_close(F.linear(x, torch.ones(3, 12)).full_tensor(), X @ torch.ones(12, 3))


# --- gradients --------------------------------------------------------------------------------------------------------


def mlp(x: Tensor, w: Tensor, b: Tensor, v: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.layer_norm(F.gelu(x @ w + b) @ v, (6,)), target)


def _mlp() -> tuple[list[Tensor], Tensor, Tensor]:
    params = [torch.randn(12, 8), torch.randn(8), torch.randn(8, 6)]
    return params, torch.randn(4, 12), torch.tensor([0, 5, 2, 2])


SPECS = ["_ ff@tensor", "ff@tensor", "ff@tensor _"]


def test_backward() -> None:
    params, x, target = _mlp()
    plain = [p.clone().requires_grad_() for p in params]
    placed = [shard(p.clone().requires_grad_(), spec) for p, spec in zip(params, SPECS, strict=True)]
    assert all(p.is_leaf and p.requires_grad for p in placed)
    for _ in range(2):  # gradients add up
        expected = mlp(x, *plain, target)
        expected.backward()
        loss = mlp(shard(x, "b@data _"), *placed, shard(target, "b@data"))
        loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for p, q in zip(placed, plain, strict=True):
        assert isinstance(p.grad, ShardedTensor)
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)
        assert p.grad.sharding == p.sharding


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_optimizers(optimizer: Any, set_to_none: bool) -> None:
    params, x, target = _mlp()
    plain = [p.clone().requires_grad_() for p in params]
    placed = [shard(p.clone().requires_grad_(), spec) for p, spec in zip(params, SPECS, strict=True)]
    options = {"lr": 0.1, **({"momentum": 0.9} if optimizer is torch.optim.SGD else {})}
    for tensors in (plain, placed):
        step = optimizer(tensors, **options)
        for _ in range(2):
            step.zero_grad(set_to_none=set_to_none)
            mlp(x, *tensors, target).backward()
            step.step()
    for p, q in zip(placed, plain, strict=True):
        torch.testing.assert_close(p.full_tensor(), q.detach(), rtol=1e-4, atol=1e-5)


def test_functional_gradient() -> None:
    params, x, target = _mlp()
    placed = [shard(p, spec) for p, spec in zip(params, SPECS, strict=True)]
    expected = torch.func.grad(mlp, argnums=(1, 2, 3))(x, *params, target)
    found = torch.func.grad(mlp, argnums=(1, 2, 3))(shard(x, "b@data _"), *placed, target)
    torch.testing.assert_close(_whole(found), expected)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_two_meshes() -> None:
    x = shard(X, "b@data _")
    with Mesh(data=4):
        y = shard(X, "b@data _")
    with pytest.raises(ShardingError, match="all tensors of a program live on one mesh"):
        x + y


def test_closed_over() -> None:
    x = shard(X, "b@data _")
    with pytest.raises(ShardingError, match=r"a traced function closes over f32\[4@data, 12\]"):
        sl.jit(lambda y: x + y)(X)
