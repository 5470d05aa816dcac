"""Draws in gradients, under checkpointing and vmap, and in attention: forward and backward drop the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardlib as sl
from shardlib import Mesh, ShardingError
from tests.helpers.ranks import run_ranks
from tests.primitives.random.test_random import MESHES, data, whole

# --- gradients --------------------------------------------------------------------------------------------------------


def layer(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout(torch.tanh(x @ w), 0.4) @ w.T


def gradients(again: bool | None) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    """Of two layers; computed again in the backward pass by one checkpointing or the other, or not at all."""

    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = x
        for _ in range(2):
            y = layer(y, w) if again is None else checkpoint(layer, y, w, use_reentrant=again)  # type: ignore[assignment]
            y = F.dropout(y, 0.2)
        return torch.autograd.grad(y.square().sum(), [x, w])

    return step


@pytest.mark.long
@pytest.mark.parametrize("jitted", [True, False])
def test_checkpointing_draws_again_what_it_drew(jitted: bool) -> None:
    x, w = data((7, 5)).double(), data((5, 6)).double()
    found = []
    with Mesh(MESHES["2x2x2"]):
        a, b = sl.shard(x, "_@a _"), sl.shard(w, "_ _@b")
        for again in (None, False) if not jitted else (None, False, False):
            torch.manual_seed(5)
            step = gradients(again)
            found.append([whole(g) for g in (sl.jit(step) if jitted else step)(a, b)])
    for other in found[1:]:
        for g, h in zip(found[0], other, strict=True):
            torch.testing.assert_close(g, h, rtol=1e-12, atol=1e-12)


def test_reentrant_checkpointing_of_operations() -> None:
    found = []
    with Mesh(MESHES["2x2x2"]):
        for again in (True, None):
            x = sl.shard(data((7, 5)).double(), "_@a _").requires_grad_()
            w = sl.shard(data((5, 6)).double(), "_ _@b").requires_grad_()
            torch.manual_seed(5)
            y = layer(x, w) if again is None else checkpoint(layer, x, w, use_reentrant=again)
            y.square().sum().backward()  # type: ignore[union-attr]
            found.append([whole(x.grad), whole(w.grad)])  # type: ignore[arg-type]
    assert all(torch.equal(g, h) for g, h in zip(*found, strict=True))


def block(x: Tensor, w: Tensor) -> Tensor:
    q = F.dropout(x @ w, 0.1).unflatten(-1, (4, -1)).transpose(1, 2)
    o = F.scaled_dot_product_attention(q, q, q, dropout_p=0.3, is_causal=True)
    return (o.transpose(1, 2).flatten(2) + torch.randn_like(x)).square().mean()


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("specs", [("b@a _ _", None), ("_ s@b _", None), ("b@a _ _", "_ h@b"), ("b@c s@a _", "_ h@b")])
def test_check_draws_on_one_device_what_the_mesh_draws(specs: Any) -> None:
    x, w = torch.randn(4, 8, 16, dtype=torch.float64), torch.randn(16, 16, dtype=torch.float64)
    with Mesh(MESHES["2x2x2"]):
        assert len(sl.check(block, x, w, in_specs=specs).leaves) == 4


def test_gradients_of_what_normal_numbers_are_made_of() -> None:
    """torch's are zero, by definition."""
    mean = data((4, 3))
    with Mesh(MESHES["8"]):
        grads = sl.jit(sl.grad(lambda m, s: torch.normal(m, s).sum(), argnums=(0, 1)))(mean, mean)
    assert all(not whole(g).any() for g in grads)


@pytest.mark.long
def test_multi_head_attention() -> None:
    mha = nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True).double()
    for weights in (False, True):
        with Mesh(MESHES["8"]):
            sl.check(
                lambda x, w=weights: mha(x, x, x, need_weights=w)[0].sum(),
                torch.randn(8, 6, 8, dtype=torch.float64),
                in_specs=("_@a _ _",),
            )


KERNELS = {
    "flash": lambda q: torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, 0.4)[0],
    "efficient": lambda q: torch.ops.aten._scaled_dot_product_efficient_attention(q, q, q, None, True, 0.4)[0],
}


@pytest.mark.long
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_by_name_drop_the_same_forward_and_backward(kernel: str) -> None:
    q = torch.randn(2, 4, 6, 8, dtype=torch.float64)

    def step(q: Tensor) -> tuple[Tensor, Tensor]:
        return sl.grad(lambda q: KERNELS[kernel](q).square().sum())(q), sl.value_and_grad(
            lambda q: KERNELS[kernel](q).square().sum()
        )(q)[1]

    with Mesh(MESHES["2x4"]):
        torch.manual_seed(2)
        one, other = map(whole, sl.jit(step, in_specs=("b@a h@b _ _",))(q))
        assert not torch.equal(one, other)
        torch.manual_seed(2)
        f = sl.jit(
            lambda q: sl.value_and_grad(lambda q: KERNELS[kernel](q).square().sum())(q), in_specs=("b@a h@b _ _",)
        )
        grad, small = whole(f(q)[1]), torch.zeros_like(q)
        small[1, 2, 3, 4] = 1e-6
        ends = []
        for sign in (1, -1):
            torch.manual_seed(2)
            ends.append(float(f(q + sign * small)[0]))
    assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(grad[1, 2, 3, 4].item(), rel=1e-6)


# --- vmap -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["different", "same"])
def test_vmap(mode: str) -> None:
    def f(x: Tensor) -> Tensor:
        return sl.vmap(lambda row: F.dropout(torch.ones_like(row)) + torch.rand(5), randomness=mode)(x)  # type: ignore[arg-type]

    with Mesh(MESHES["8"]):
        drawn = whole(sl.jit(f, in_specs=("_@a _",))(torch.ones(8, 5)))
        sl.check(f, torch.ones(8, 5), in_specs=("_@a _",))
    # torch draws dropout's own mask for every example in both modes when it fills a tensor that has the batch dim
    assert len(drawn.unique(dim=0)) == (8 if mode == "different" else 1)


def test_vmap_refuses_by_itself() -> None:
    with Mesh(MESHES["8"]), pytest.raises(RuntimeError, match="randomness"):
        sl.jit(lambda x: sl.vmap(F.dropout)(x))(torch.ones(8, 5))


def drop(q: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)


@pytest.mark.parametrize("mode", ["error", "same", "different"])
def test_vmap_of_attention(mode: str) -> None:
    q = torch.ones(3, 2, 2, 6, 4)
    f = sl.vmap(drop, randomness=mode)  # type: ignore[arg-type]
    with Mesh(MESHES["8"]):
        if mode != "different":
            with pytest.raises(ShardingError) as e:
                sl.jit(f)(q)
            assert f"attention with dropout under vmap(..., randomness='{mode}')" in str(e.value)
            return
        torch.manual_seed(1)
        assert len(whole(sl.jit(f)(q)).flatten(1).unique(dim=0)) == 3


def checked(specs: Any) -> float:
    torch.manual_seed(1)
    x, w = torch.randn(4, 8, 16, dtype=torch.float64), torch.randn(16, 16, dtype=torch.float64)
    with Mesh(a=2, b=2) as mesh:
        torch.manual_seed(mesh.rank)
        return sl.check(block, x, w, in_specs=specs).max_error


@pytest.mark.long
@pytest.mark.ranks
def test_check_on_ranks() -> None:
    assert max(run_ranks(checked, 4, ("b@a _ _", "_ h@b"))) < 1e-12
