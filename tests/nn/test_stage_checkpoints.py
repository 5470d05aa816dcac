"""Checkpoints and meta modules on meshes with stages: files do not depend on the number of stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from shardlib import Mesh
from tests.helpers.ranks import run_ranks

STAGES: dict[int, dict[str, int] | None] = {1: None, 2: {"0": 0, "2": 1}, 4: {"0": 0, "1": 1, "2": 2, "3": 3}}


def _model(stages: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    devices = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 2 * stages
    sizes = {"stage": stages} if stages > 1 else {}
    mesh = Mesh(**sizes, data=devices // stages, stages="stage" if stages > 1 else None)
    layers = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 4), nn.Linear(4, 2))
    model = sl.parallelize(layers, strategy="fsdp", mesh=mesh, stages=STAGES[stages])
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    pairs = [(p, optimizer.state[p]) for p in model.parameters()]
    tensors: list[Any] = [x for p, s in pairs for x in (p.detach(), s["exp_avg"], s["exp_avg_sq"], s["step"])]
    return [x.full_tensor() if isinstance(x, sl.ShardedTensor) else x.clone() for x in tensors]


def _save(folder: Path, stages: int) -> list[Tensor]:
    torch.manual_seed(0)
    model, optimizer = _model(stages)
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    sl.Checkpoints(folder).save(1, {"model": model, "optimizer": optimizer})
    return _values(model, optimizer)


def _load(folder: Path, stages: int) -> list[Tensor]:
    torch.manual_seed(1)
    model, optimizer = _model(stages)
    sl.Checkpoints(folder).load({"model": model, "optimizer": optimizer})
    values = _values(model, optimizer)
    model(torch.randn(8, 4)).square().mean().backward()  # what was loaded also trains
    optimizer.step()
    return values


def _assert_equal(values: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(x, y) for x, y in zip(values, expected, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("saved", STAGES)
def test_a_checkpoint_loads_with_any_number_of_stages(tmp_path: Path, saved: int) -> None:
    expected = _save(tmp_path, saved)
    for stages in STAGES:
        _assert_equal(_load(tmp_path, stages), expected)


@pytest.mark.long
@pytest.mark.ranks
def test_a_checkpoint_of_ranks_loads_with_any_number_of_stages(tmp_path: Path) -> None:
    for saved, loaded in ((2, 1), (1, 2)):
        folder = tmp_path / str(saved)
        expected = run_ranks(_save, 2, folder, saved, timeout=400)[0]
        for values in run_ranks(_load, 2, folder, loaded, timeout=400):
            _assert_equal(values, expected)
        _assert_equal(_load(folder, 4), expected)


def _materialize() -> list[bool]:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 2))
    mesh = Mesh(stage=2, data=1, stages="stage")
    sl.materialize(sl.parallelize(module, strategy="fsdp", mesh=mesh, stages={"0": 0, "2": 1}))
    parameters: list[Any] = [*module.parameters()]
    assert all(p.full_tensor().abs().sum().item() > 0 for p in parameters)
    return [p.to_local().is_meta for p in parameters]


@pytest.mark.long
@pytest.mark.ranks
def test_a_rank_has_memory_for_its_stage_alone() -> None:
    assert run_ranks(_materialize, 2, timeout=400) == [[False, False, True, True], [True, True, False, False]]


def test_a_meta_module_of_stages_is_materialized() -> None:
    assert not any(_materialize())
