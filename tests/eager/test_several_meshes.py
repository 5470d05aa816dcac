"""Ops outside jit over tensors on several meshes: numbers go from mesh to mesh, tensors with dims do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from shardlib import Mesh
from tests.helpers.ranks import run_ranks

OTHER = {"data": 2, "tensor": 2}


def _models(is_placed: bool) -> list[nn.Linear]:
    """An encoder on one mesh, a decoder on another, and a plain head."""
    torch.manual_seed(0)
    encoder, decoder, head = nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 3)
    if is_placed:
        sl.parallelize(encoder, strategy="fsdp", mesh=Mesh(data=4))
        sl.parallelize(decoder, {"weight": "o@tensor _"}, strategy="fsdp", mesh=Mesh(**OTHER))
    return [encoder, decoder, head]


def _whole(x: Any) -> Tensor:
    whole: Tensor = x.detach().full_tensor() if isinstance(x, sl.ShardedTensor) else x.detach()
    return whole


def _gradients(models: list[nn.Linear]) -> list[nn.Parameter]:
    x = torch.linspace(-1, 1, 32).view(8, 4)
    for model in models:
        out: Any = model(x)
        x = out.full_tensor() if isinstance(out, sl.ShardedTensor) else out
    (x * torch.tensor([1.0, -2.0, 3.0])).square().mean().backward()
    return [p for model in models for p in model.parameters()]


def _clipped(norm: float, foreach: bool | None, is_reversed: bool) -> None:
    every = [_gradients(_models(is_placed)) for is_placed in (False, True)]
    theirs, ours = (params[::-1] if is_reversed else params for params in every)
    how: Any = {"norm_type": norm, "foreach": foreach, "error_if_nonfinite": True}
    torch.testing.assert_close(
        _whole(nn.utils.clip_grad_norm_(ours, 0.1, **how)), nn.utils.clip_grad_norm_(theirs, 0.1, **how)
    )
    totals = [nn.utils.get_total_norm([p.grad for p in params], norm) for params in (theirs, ours)]  # type: ignore[misc]
    torch.testing.assert_close(_whole(totals[1]), totals[0])
    for params, total in zip((theirs, ours), totals, strict=True):
        nn.utils.clip_grads_with_norm_(params, 0.03, total, foreach=foreach)
        nn.utils.clip_grads_with_norm_(params, 0.01, torch.tensor(0.05), foreach=foreach)
        torch.optim.AdamW(params, foreach=foreach).step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(_whole(mine.grad), other.grad)
        torch.testing.assert_close(_whole(mine), other.detach())
    assert ours[0].grad is not None
    ours[0].grad.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(ours, 0.1, **how)


@pytest.mark.parametrize(
    ("norm", "foreach", "is_reversed"),
    [(2.0, None, False), (2.0, True, True), (1.0, False, False), (float("inf"), True, False), (3.0, False, True)],
)
def test_gradients_on_two_meshes_and_on_none_are_clipped(norm: float, foreach: bool | None, is_reversed: bool) -> None:
    _clipped(norm, foreach, is_reversed)


@pytest.mark.long
@pytest.mark.ranks
def test_gradients_on_two_meshes_are_clipped_on_ranks() -> None:
    run_ranks(_clipped, 4, 2.0, None, False)


def _operands() -> tuple[Any, Any, Any]:
    """A vector, and a number on the same mesh and on another one."""
    with Mesh(data=4):
        x, n = sl.shard(torch.arange(4.0), "_@data"), sl.shard(torch.tensor(3.0), "")
    with Mesh(**OTHER):
        return x, n, sl.shard(torch.tensor(5.0), "")


MIXED: dict[str, tuple[Callable[[Any, Any, Any], Any], list[float]]] = {
    "scale": (lambda x, n, m: x * m, [0, 5, 10, 15]),
    "scaled": (lambda x, n, m: m * x, [0, 5, 10, 15]),
    "stack": (lambda x, n, m: torch.stack([n, m]), [3, 5]),
    "stack, reversed": (lambda x, n, m: torch.stack([m, n]), [5, 3]),
    "where": (lambda x, n, m: torch.where(m > n, x, m), [0, 1, 2, 3]),
    "write": (lambda x, n, m: x.clone().add_(m), [5, 6, 7, 8]),
    "copy": (lambda x, n, m: x.clone().copy_(m), [5, 5, 5, 5]),
    "number": (lambda x, n, m: n.clone().add_(m), 8),  # type: ignore[dict-item]
    "lists": (lambda x, n, m: torch._foreach_mul([x, m], m)[0], [0, 5, 10, 15]),
    "average": (lambda x, n, m: (n + m + 2 * m) / 3, 6),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", MIXED)
def test_a_number_of_another_mesh_is_taken(name: str) -> None:
    form, want = MIXED[name]
    for _ in range(2):
        x, n, m = _operands()
        result = form(x, n, m)
        assert result.tolist() == want
        if result.dim() and "stack" not in name:
            assert result.mesh == x.mesh


@pytest.mark.parametrize(
    "form",
    [
        lambda x, n, m: x + m.expand(4),
        lambda x, n, m: torch.stack([x, m.expand(4)]),
        lambda x, n, m: torch.add(x.sum(), n, out=m) + m.mul_(x),
        lambda x, n, m: x * m.clone().requires_grad_(),
        lambda x, n, m: n.clone().requires_grad_() + m.clone().requires_grad_(),
    ],
    ids=["dims", "stack", "written", "gradient", "sum of losses"],
)
def test_others_are_refused_with_a_remedy(form: Callable[[Any, Any, Any], Any]) -> None:
    x, n, m = _operands()
    with pytest.raises(sl.ShardingError, match=r"(?s)takes tensors on 2 meshes.*Remedy: place one again: shard\(x"):
        form(x, n, m)


def test_the_remedy_has_a_gradient() -> None:
    x, _, m = _operands()
    m.requires_grad_()
    with x.mesh:
        (x * sl.shard(m.full_tensor(), "")).sum().backward()
    assert float(m.grad) == 6
    assert m.grad.mesh == m.mesh
