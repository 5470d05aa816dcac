"""Meshes with an axis of stages: values, text, parts, and refusals."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardlib as sl
from shardlib import Mesh, ShardingError
from tests.helpers.ranks import run_ranks

MESHES = [  # as text: on ranks, this module is imported in worlds of other sizes
    "Mesh(stage=2, data=2, stages='stage')",
    "Mesh(data=2, pipe=3, rules={'batch': 'data'}, stages='pipe')",
    "Mesh.abstract(stage=8, data=8, tensor=8, stages='stage')",
    "Mesh({'stages': 2, 'data': 1}, stages='stages')",
]


@pytest.mark.parametrize("text", MESHES)
def test_a_mesh_and_its_parts_are_values(text: str) -> None:
    mesh = Mesh.parse(text)
    assert str(mesh) == text
    parts = [mesh, *(mesh.on_stage(i) for i in range(mesh.stages))]
    assert len(set(parts)) == mesh.stages + 1
    for part in parts:
        assert Mesh.parse(str(part)) == part == copy.deepcopy(part) == pickle.loads(pickle.dumps(part))
        assert hash(Mesh.parse(str(part))) == hash(part)
        assert part.whole == mesh
        assert dict(part) == dict(mesh.shape)
        assert part.size == mesh.stages * part.stage_size


@pytest.mark.parametrize("text", MESHES)
def test_the_ranks_of_parts_divide_those_of_the_mesh(text: str) -> None:
    mesh = Mesh.parse(text)
    members = [mesh.on_stage(i).member_ranks for i in range(mesh.stages)]
    assert sorted(rank for ranks in members for rank in ranks) == mesh.member_ranks == [*range(mesh.size)]
    for stage, ranks in enumerate(members):
        part = mesh.on_stage(stage)
        assert [part.rank_of(coords) for coords in part.all_coords()] == ranks
        assert [part.coords(rank) for rank in ranks] == part.all_coords()
        assert {part.stage_of(rank) for rank in ranks} == {stage}


def test_text() -> None:
    mesh = Mesh(stage=2, data=2, rules={"batch": "data"}, stages="stage")
    assert str(mesh.at(stage=1)) == "Mesh(stage=2, data=2, rules={'batch': 'data'}, stages='stage').at(stage=1)"
    assert str(Mesh(stage=2, data=-1, stages="stage")) == "Mesh(stage=2, data=1, stages='stage')"
    assert str(Mesh(stage=-1, data=2, stages="stage")) == "Mesh(stage=1, data=2, stages='stage')"


def test_one_stage_is_no_pipeline() -> None:
    mesh = Mesh(stage=1, data=2, stages="stage")
    with mesh:
        assert sl.shard(torch.arange(4.0), "n@data").full_tensor().tolist() == [0, 1, 2, 3]
    with mesh.at(stage=0):
        assert sl.shard(torch.arange(4.0), "n@data").sum().item() == 6


def _sharded(spec: str) -> None:
    with _staged():
        sl.shard(torch.ones(4, 2), spec)


def _staged() -> Mesh:
    return Mesh(stage=2, data=2, stages="stage")


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "spec": (lambda: _sharded("n@stage _"), r"dim 0 `n@stage`: 'stage' is the axis of stages, which shards no tensor"),
    "part": (lambda: _sharded("n@stage:(1)2 _"), r"'stage' is the axis of stages, which shards no tensor"),
    "rule": (
        lambda: Mesh(stage=2, data=2, stages="stage", rules={"batch": "stage"}),
        r"rule 'batch' -> 'stage': 'stage' is the axis of stages, which shards no tensor",
    ),
    "strategy": (
        lambda: sl.parallelize(nn.Linear(2, 2), strategy=sl.strategies.fsdp("stage"), mesh=_staged()),
        r"(?s)the strategy does not fit the mesh.*'stage' is its axis of stages, which shards no tensor",
    ),
    "name": (lambda: Mesh(data=2, stages="stage"), r"stages='stage' names no axis"),
    "axis": (lambda: _staged().axis("stage"), r"cannot shard a tensor over 'stage'"),
    "at another axis": (lambda: _staged().at(data=1), r"(?s)has no part at\(data=1\).*stage=0 to 1"),
    "at no stage": (lambda: _staged().at(stage=2), r"(?s)has no part at\(stage=2\).*stage=0 to 1"),
    "at without stages": (lambda: Mesh(data=2).at(stage=0), r"it has no axis of stages"),
    "mapping": (lambda: _staged()["tensor"], r"has no axis 'tensor'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_axis_of_stages_shards_nothing(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ShardingError, match=message):
        call()


def test_no_axis_of_stages_counts_as_unused() -> None:
    mesh = Mesh(stage=2, tensor=2, stages="stage")
    with Mesh(tensor=2):
        expected = str(sl.suggest(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), Mesh(tensor=2), torch.ones(2, 4)))
    assert str(sl.suggest(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), mesh, torch.ones(2, 4))) == expected
    model = sl.parallelize(nn.Sequential(nn.Linear(4, 8)), mesh=_staged())  # not refused
    assert [sl.typeof(p) for p in model.parameters()] == ["f32[8, 4]", "f32[8]"]


@pytest.mark.parametrize(
    ("strategy", "inside", "size"),
    [("ddp", {"data": 2}, 4096), ("fsdp", {"data": 2}, 2048), ("hsdp", {"replica": 2, "shard": 2}, 2048)],
    ids=["ddp", "fsdp", "hsdp"],
)
def test_strategies_shard_inside_stages(strategy: str, inside: dict[str, int], size: int) -> None:
    mesh = Mesh(stage=2, stages="stage", **inside)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    sl.parallelize(model, strategy=strategy, mesh=mesh, stages={"0": 0, "1": 1})
    weights: list[sl.ShardedTensor] = [model[0].weight, model[1].weight]  # type: ignore[list-item]
    assert [x.mesh for x in weights] == [mesh.at(stage=0), mesh.at(stage=1)]
    assert {s.data.numel() for x in weights for s in x.shards} == {size}


def test_pictures_name_the_ranks_of_the_stage() -> None:
    mesh = Mesh(data=2, stage=2, stages="stage")
    with mesh.at(stage=1):
        x = sl.shard(torch.zeros(4, 6), "batch@data _")
    assert str(sl.visualize(x)) == (
        "f32[4@data, 6] on Mesh(data=2, stage=2).at(stage=1)\n"
        "     0:6\n"
        "    ┌───┐\n"
        "0:2 │ 1 │\n"
        "    ├───┤\n"
        "2:4 │ 3 │\n"
        "    └───┘"
    )
    with mesh:
        assert "│ 0,1 │" in str(sl.visualize(sl.shard(torch.zeros(4, 6), "batch@data _")))
    assert repr(x) == "ShardedTensor(f32[4@data, 6] on Mesh(data=2, stage=2).at(stage=1))"


def _from_device_mesh() -> tuple[str, bool]:
    device_mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "data"))
    mesh = Mesh.from_device_mesh(device_mesh, stages="stage")
    assert mesh == Mesh(stage=-1, data=1, stages="stage")
    return str(mesh), mesh.at(stage=1).is_elsewhere


@pytest.mark.ranks
def test_a_device_mesh_becomes_a_staged_mesh() -> None:
    text = "Mesh(stage=2, data=1, stages='stage')"
    assert run_ranks(_from_device_mesh, 2, timeout=400) == [(text, True), (text, False)]
