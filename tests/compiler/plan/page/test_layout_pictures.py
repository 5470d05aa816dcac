"""Pictures of layouts: each device holds the elements that its shard has."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

import shardlib as sl
from shardlib.compiler.plan.names import Naming
from shardlib.compiler.plan.page.layout_pictures import MOST, layout_picture

SPECS = [
    ("a b", (6, 8)),
    ("a@data b@tensor", (6, 8)),
    ("a@data b", (10, 3)),  # uneven: 3 3 3 1
    ("a@(data tensor) b", (17, 2)),
    ("(a@data c=4) b", (24, 2)),
    ("(a=3 c@tensor) b@data", (12, 5)),
    ("a@data=[5 3 8 0] b", (16, 2)),
    ("(a=2 c@data d=3) b", (24, 2)),
    ("a@(data tensor) b", (1, 2)),  # one device has it
]


def coords_of(devices: str) -> list[dict[str, int]]:
    """Parses `data=0-2, tensor=1`, and several of these between semicolons."""
    if ";" in devices:
        return [place for part in devices.split(";") for place in coords_of(part)]
    axes = []
    for name, text in re.findall(r"(\w+)=([\d,-]+)", devices):
        values: list[int] = []
        for part in filter(None, text.split(",")):
            low, _, high = part.partition("-")
            values += range(int(low), int(high or low) + 1)
        axes.append([(name, value) for value in values])
    return [dict(pairs) for pairs in itertools.product(*axes)]


@pytest.mark.parametrize(("spec", "shape"), SPECS)
def test_devices_hold_the_elements_of_their_shards(spec: str, shape: tuple[int, int]) -> None:
    mesh = sl.Mesh(data=4, tensor=2)
    with mesh:
        plan = sl.jit(lambda x: x, in_specs=(spec,)).plan(torch.empty(shape))
    (var,) = plan.compiled.program.inputs
    picture = layout_picture(Naming(plan.compiled), var, mesh)
    assert var.layout is not None
    for d, dim in enumerate(picture["dims"]):
        whole = torch.arange(dim["size"]).view([-1 if i == d else 1 for i in range(2)]).expand(shape)
        assert dim["count"] == len(dim["shards"])
        for shard in dim["shards"]:
            runs = [x for start, stop in shard["runs"] for x in range(start, stop)]
            for place in coords_of(shard["devices"]):
                held = var.layout.scatter(whole, {"data": 0, "tensor": 0} | place)
                if 0 not in held.shape:
                    assert sorted({*held.flatten().tolist()}) == runs


def test_many_shards_show_the_first_and_the_last() -> None:
    mesh = sl.Mesh.abstract(data=512)
    with mesh:
        plan = sl.jit(lambda x: x, in_specs=("a@data",)).plan(torch.empty(1024, device="meta"))
    (dim,) = layout_picture(Naming(plan.compiled), plan.compiled.program.inputs[0], mesh)["dims"]
    assert (dim["count"], len(dim["shards"])) == (512, MOST)
    assert dim["shards"][-1] == {"devices": "data=511", "runs": [(1022, 1024)]}


def test_copies_and_partial_sums_are_named() -> None:
    mesh = sl.Mesh(data=4, tensor=2)
    with mesh:
        plan = sl.jit(lambda x: x.sum(0), in_specs=("a@data b",)).plan(torch.empty(8, 4))
    layout = layout_picture(Naming(plan.compiled), plan.compiled.program.collectives[0].source, mesh)
    assert (layout["sums"], layout["copies"], layout["alike"]) == (["+data"], ["tensor"], 2)
