"""Tensors on one stage of a mesh, outside jit: ops, gradients, optimizers, files. The oracle is plain torch."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from shardlib import Mesh, ShardedTensor
from tests.helpers.ranks import run_ranks

X, Y = torch.arange(8.0).view(4, 2), torch.full((4, 2), 2.0)


def _mesh() -> Mesh:
    """Two stages; on virtual devices, the axis of stages varies fastest."""
    return Mesh(data=1 if torch.distributed.is_initialized() else 2, stage=2, stages="stage")


def _placed(mesh: Mesh) -> list[Any]:
    """X on all stages, X on stage 0, Y on stage 1."""
    return [sl.shard(x, "n@data _", mesh=part) for x, part in ((X, mesh), (X, mesh.at(stage=0)), (Y, mesh.at(stage=1)))]


def _write_row(x: Tensor) -> Tensor:
    x = x.clone()
    x[0].fill_(9.0)
    return x


# name: a function of a tensor on all stages, one on stage 0, and one on stage 1; and the stage of its result
OPS: dict[str, tuple[Callable[[Any, Any, Any], Tensor], int | None]] = {
    "all + one": (lambda w, x, y: w + y, 1),
    "two stages": (lambda w, x, y: x * y, None),
    "plain": (lambda w, x, y: y * X + torch.tensor(3.0), 1),
    "with messages inside": (lambda w, x, y: y.t() @ y, 1),
    "scalars": (lambda w, x, y: torch.stack([w.sum(), x.sum(), y.sum()]), None),
    "cat": (lambda w, x, y: torch.cat([x, y]), None),
    "comparison": (lambda w, x, y: x == y, None),
    "all.copy_(one)": (lambda w, x, y: w.clone().copy_(y), None),
    "one.copy_(all)": (lambda w, x, y: y.clone().copy_(w), 1),
    "one.copy_(other)": (lambda w, x, y: y.clone().copy_(x), 1),
    "one.copy_(plain)": (lambda w, x, y: y.clone().copy_(X), 1),
    "one.add_(other)": (lambda w, x, y: y.clone().add_(x), 1),
    "out": (lambda w, x, y: torch.add(x, w, out=y.clone()), 1),
    "view": (lambda w, x, y: _write_row(y), 1),
    "as_strided": (lambda w, x, y: y.clone().as_strided((2,), (1,)), 1),
    "zeros_like": (lambda w, x, y: torch.zeros_like(y), 1),
    "shape of values": (lambda w, x, y: y[y > 1], 1),
    "list": (lambda w, x, y: torch.stack(torch._foreach_mul([w, x, y], 2.0)), None),
    "list in place": (lambda w, x, y: _scaled([w.clone(), x.clone(), y.clone()], w.sum()), None),
    "deepcopy": (lambda w, x, y: copy.deepcopy(y), 1),
    "pickle": (lambda w, x, y: pickle.loads(pickle.dumps(y)), 1),
    "redistribute": (lambda w, x, y: y.redistribute("_ m@data") if isinstance(y, ShardedTensor) else y, 1),
}


def _scaled(tensors: list[Tensor], factor: Tensor) -> Tensor:
    torch._foreach_mul_(tensors, factor)
    return torch.stack(tensors)


def _check_ops(names: list[str]) -> None:
    mesh = _mesh()
    for name in names:
        form, stage = OPS[name]
        for _ in range(2):  # the second call is cached
            result: Any = form(*_placed(mesh))
            assert result.mesh.stage == stage, name
            is_here = not result.mesh.is_elsewhere
            assert all(s.data.is_meta != is_here for s in result.shards), name
            assert torch.equal(result.full_tensor(), form(X, X, Y)), name


@pytest.mark.parametrize("name", OPS)
def test_ops(name: str) -> None:
    _check_ops([name])


def _check_values() -> None:
    mesh = _mesh()
    w, _, y = _placed(mesh)
    assert y.sum().item() == 16
    assert y.tolist() == Y.tolist()
    assert torch.equal(w, w.clone())
    assert not torch.allclose(w, y)
    assert f"{w.sum():.1f}" == "28.0"
    on_stage = f"{y.sum():.1f}"
    assert on_stage == ("rank 0 holds nothing: the tensor is on stage 1" if y.mesh.is_elsewhere else "16.0")
    assert str(y).startswith(f"ShardedTensor f32[4@data, 2] on Mesh(data={mesh['data']}, stage=2).at(stage=1)\n")
    shards = [Y] if mesh.kind == "distributed" else [Y[:2], Y[2:]]
    with mesh.at(stage=1):
        z = sl.from_local(shards if len(shards) > 1 else shards[0], "n@data _")
    assert z.mesh == y.mesh
    assert torch.equal(z.full_tensor(), Y)
    for part in (mesh, mesh.at(stage=0), mesh.at(stage=1)):
        assert sl.shard(y, "_ m@data", mesh=part).mesh == part
        assert torch.equal(sl.shard(y, "_ m@data", mesh=part).full_tensor(), Y)
    with mesh:
        assert sl.shard(y, "_ _").mesh == y.mesh  # the mesh of all stages moves nothing
    with mesh.at(stage=0):
        assert sl.shard(y, "_ _").mesh == mesh.at(stage=0)


def test_values_and_moves() -> None:
    _check_values()


def _loss(w: Any, x: Any, y: Any) -> Tensor:
    moved = sl.shard(y, "_ m@data", mesh=x.mesh) if isinstance(y, ShardedTensor) else y
    last = y.full_tensor() if isinstance(y, ShardedTensor) else y
    whole: Tensor = (w * y + x * y).square().sum() + (moved * x).sum() + (last * X).sum().detach()
    return whole


def _check_gradients() -> None:
    inputs = [x.requires_grad_() for x in _placed(_mesh())]
    plain = [x.clone().requires_grad_() for x in (X, X, Y)]
    for _ in range(2):
        for tensors in (inputs, plain):
            _loss(*tensors).backward()  # type: ignore[no-untyped-call]
    for x, expected in zip(inputs, plain, strict=True):
        assert torch.equal(x.grad.full_tensor(), expected.grad)


def test_gradients() -> None:
    _check_gradients()


def _check_file() -> None:
    mesh, file = _mesh(), io.BytesIO()
    w, _, y = _placed(mesh)
    torch.save({"w": w, "y": nn.Parameter(y)}, file)
    for current in (mesh, mesh.whole):
        file.seek(0)
        with current:
            back = torch.load(file)
        assert (back["w"].mesh, back["y"].mesh) == (w.mesh, y.mesh)
        assert isinstance(back["y"], nn.Parameter)
        assert torch.equal(back["y"].full_tensor() + back["w"].full_tensor(), X + Y)


def test_files() -> None:
    _check_file()


def test_a_file_of_virtual_devices_comes_back_without_stages() -> None:
    file = io.BytesIO()
    torch.save(_placed(_mesh()), file)
    file.seek(0)
    with Mesh(data=2) as mesh:
        tensors = torch.load(file)
    assert {x.mesh for x in tensors} == {mesh}
    assert [x.tolist() for x in tensors] == [X.tolist(), X.tolist(), Y.tolist()]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw for-loop": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
}


def _train(name: str) -> None:
    """Steps with clipping, a skipped step of a scaler, and a copy of the state in between."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    model = sl.parallelize(copy.deepcopy(plain), strategy="fsdp", mesh=_mesh(), stages={"0": 0, "1": 1})
    runs = [(m, OPTIMIZERS[name](m.parameters()), torch.amp.GradScaler("cpu", init_scale=4.0)) for m in (plain, model)]
    for i in range(3):
        batch = torch.randn(8, 4)
        norms = []
        for module, optimizer, scaler in runs:
            optimizer.zero_grad()
            scaler.scale(module(batch).square().mean()).backward()
            if i == 1:
                list(module.parameters())[-1].grad.fill_(float("inf"))  # type: ignore[union-attr]
            scaler.unscale_(optimizer)
            norms.append(nn.utils.clip_grad_norm_(module.parameters(), 0.05))
            scaler.step(optimizer)
            scaler.update()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if i != 1:
            torch.testing.assert_close(norms[1].full_tensor(), norms[0])  # type: ignore[attr-defined]
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), theirs.detach())  # type: ignore[attr-defined]
    optimizer = runs[1][1]
    for p, stage in zip(model.parameters(), (0, 0, 1, 1), strict=True):
        state = [x for x in optimizer.state[p].values() if isinstance(x, ShardedTensor)]
        assert {x.mesh.stage for x in (p, p.grad, *state)} == {stage}  # type: ignore[union-attr]
    model.load_state_dict({k: x * 2 for k, x in plain.state_dict().items()})
    for mine, theirs in zip(copy.deepcopy(model).parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), 2 * theirs.detach())  # type: ignore[attr-defined]


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training(name: str) -> None:
    _train(name)


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("check", [_check_values, _check_gradients, _check_file], ids=lambda check: check.__name__)
def test_on_ranks(check: Callable[[], None]) -> None:
    run_ranks(check, 2, timeout=400)


@pytest.mark.long
@pytest.mark.ranks
def test_ops_on_ranks() -> None:
    run_ranks(_check_ops, 2, [*OPS], timeout=400)


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("name", ["adamw foreach", "adamw fused"])
def test_training_on_ranks(name: str) -> None:
    run_ranks(_train, 2, name, timeout=400)


def test_writes_to_several_stages_are_refused() -> None:
    _, x, y = _placed(_mesh())
    with pytest.raises(sl.ShardingError, match=r"(?s)takes tensors on 2 meshes.*at\(stage=0\).*at\(stage=1\)"):
        torch.frexp(x, out=(x.clone(), y.clone().int()))
