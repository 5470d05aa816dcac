"""Programs around stages: on tensors of one stage or of several, transforms inside stages, double backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from shardlib import Mesh
from tests.helpers.ranks import run_ranks

X, V, W = torch.linspace(-1, 1, 32).view(8, 4), torch.linspace(-1, 1, 12).view(4, 3), torch.linspace(1, 2, 6).view(3, 2)


def _mesh() -> Mesh:
    return Mesh(stage=2, data=1 if torch.distributed.is_initialized() else 2, stages="stage")


def _loss(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    with sl.stage(0):
        h = torch.relu(x @ v)
    with sl.stage(1):
        return (h @ w).square().sum()


def _check_one_stage() -> None:
    mesh = _mesh()
    with mesh.at(stage=1):
        x, v = sl.shard(X, "n@data _"), sl.shard(V, "_ _")
    product = sl.jit(lambda a, b: (a.t() @ (a @ b)).sum(0))  # sums over data
    result: Any = product(x, v)
    assert result.mesh == mesh.at(stage=1)
    assert product.plan(x, v).compiled.staged is None
    torch.testing.assert_close(result.full_tensor(), (X.t() @ (X @ V)).sum(0))


def test_tensors_of_one_stage_run_there_and_nothing_is_cut() -> None:
    _check_one_stage()


def _check_several_stages() -> None:
    mesh = _mesh()
    x = sl.shard(X, "n@data _", mesh=mesh)
    v, w = sl.shard(V, "_ _", mesh=mesh.at(stage=0)), sl.shard(W, "_ _", mesh=mesh.at(stage=1))
    step = sl.jit(sl.value_and_grad(_loss, argnums=(1, 2)))
    loss, gradients = step(x, v, w)
    assert loss.mesh == mesh.at(stage=1)
    assert [g.mesh.stage for g in gradients] == [0, 1]
    assert step.plan(x, v, w).compiled.staged is not None
    expected = torch.func.grad_and_value(_loss, argnums=(1, 2))(X, V, W)
    torch.testing.assert_close((*(g.full_tensor() for g in gradients), loss.full_tensor()), (*expected[0], expected[1]))


def test_tensors_of_several_stages_run_on_all() -> None:
    _check_several_stages()


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("check", [_check_one_stage, _check_several_stages], ids=lambda check: check.__name__)
def test_on_ranks(check: Callable[[], None]) -> None:
    run_ranks(check, 2, timeout=400)


def test_tensors_of_two_meshes_are_refused() -> None:
    v, w = sl.shard(V, "_ _", mesh=_mesh().at(stage=0)), sl.shard(W, "_ _", mesh=Mesh(data=4))
    with pytest.raises(sl.ShardingError, match=r"(?s)finds tensors on Mesh\(stage=2.*finds tensors on Mesh\(data=4\)"):
        sl.jit(torch.mm)(v, w)


def _scanned(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    with sl.stage(0):
        h, _ = sl.scan(lambda c, _: (torch.tanh(c @ v @ v.t()), c.sum()), x, torch.arange(3))
    with sl.stage(1):
        return (h @ v @ w).sum()


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": sl.grad(_loss, argnums=1),
    "vmap": lambda x, v, w: torch.vmap(lambda row: _loss(row[None], v, w))(x),
    "scan": _scanned,
    "grad of scan": sl.grad(_scanned, argnums=2),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_around_stages(name: str) -> None:
    form = TRANSFORMS[name]
    expected = form(X, V, W)
    with _mesh():
        torch.testing.assert_close(sl.jit(form)(X, V, W).full_tensor(), expected)


def test_check_runs_stages() -> None:
    with _mesh():
        assert "the same as on one device" in str(sl.check(_loss, X, V, W))


def _module(is_placed: bool) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 2))
    return sl.parallelize(module, strategy="ddp", mesh=_mesh(), stages={"0": 0, "2": 1}) if is_placed else module


def test_a_module_without_gradients() -> None:
    with torch.no_grad():
        result: Any = _module(True)(X)
        torch.testing.assert_close(result.full_tensor(), _module(False)(X))
    assert not result.requires_grad
    assert result.mesh.stage == 1


def test_a_penalty_on_gradients_goes_back_through_stages_twice() -> None:
    modules = [_module(True), _module(False)]
    for module in modules:
        gradients = torch.autograd.grad(module(X).square().mean(), list(module.parameters()), create_graph=True)
        sum(g.square().sum() for g in gradients).backward()  # type: ignore[union-attr]
    for mine, theirs in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)  # type: ignore[union-attr]
