"""Plans whose pages are tested: functions, modules, uneven shards, copies to the host, and a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import shardlib as sl
from tests.models import w1, w1_sharded


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    h = torch.relu(x @ up)
    return h @ down


def train_mlp(params: list[Tensor], x: Tensor) -> tuple[Tensor, list[Tensor]]:
    def loss(params: list[Tensor]) -> Tensor:
        return (mlp(x, *params) ** 2).mean()

    value, grads = sl.value_and_grad(loss)(params)
    return value, [p - 0.1 * g for p, g in zip(params, grads, strict=True)]


def plan_mlp(ff: str = "ff@tensor", **axes: int) -> sl.Plan:
    """The step of a small MLP: its weights are sharded over `ff`, its rows over data."""
    params = [torch.empty(64, 256, device="meta"), torch.empty(256, 64, device="meta")]
    with sl.Mesh.abstract(axes or {"data": 2, "tensor": 4}):
        step = sl.jit(train_mlp, in_specs=([f"embed {ff}", f"{ff} embed"], "batch@data embed"))
        return step.plan(params, torch.empty(16, 64, device="meta"))  # type: ignore[no-any-return]


def plan_uneven() -> sl.Plan:
    """Rows of 10 in chunks over 4 devices, and columns of 9 in chosen shards."""
    with sl.Mesh(data=4, tensor=2):
        step = sl.jit(lambda x, w: torch.relu(x @ w), in_specs=("rows@data _", "_ ff@tensor"))
        return step.plan(torch.empty(10, 6), torch.empty(6, 9))  # type: ignore[no-any-return]


def plan_module(layers: int = 4, **options: Any) -> sl.Plan:
    """The training step of a module with AdamW, its parameters sharded over data."""
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(layers)]
        model = nn.Sequential(nn.Linear(8, 32), *blocks)
    mesh = sl.Mesh.abstract(data=4, tensor=2)
    with mesh:
        sl.parallelize(model, {"*.0.weight": "ff@tensor _", "*.2.weight": "_ ff@tensor"}, strategy="fsdp")
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with mesh:
        return sl.jit(step, **options).plan(model, optimizer, torch.empty(4096, 8, device="meta"))  # type: ignore[no-any-return]


def plan_w1(mode: str, layers: int = 3, **kept: Any) -> sl.Plan:
    """The step of a small language model written as functions."""
    config = w1.Config(layers=layers)
    with w1_sharded.mesh_of(w1.modes(config)[mode], abstract=True):
        step = w1_sharded.sharded_step(w1.modes(config)[mode], config, **kept)
        return step.plan(*w1.abstract(config))  # type: ignore[no-any-return]


def plan_pipeline() -> sl.Plan:
    """Two stages of a stack of products."""
    ws = [torch.ones(8, 8) for _ in range(4)]

    def stack(x: Tensor, *ws: Tensor) -> Tensor:
        for i, w in enumerate(ws):
            with sl.stage(i // 2):
                x = torch.tanh(x @ w)
        return x.sum()

    with sl.Mesh(stage=2, data=2, stages="stage"):
        return sl.jit(sl.grad(stack, argnums=(1, 2, 3, 4)), in_specs=("rows@data _", *[None] * 4)).plan(
            torch.ones(4, 8), *ws
        )  # type: ignore[no-any-return]


def plan_empty() -> sl.Plan:
    with sl.Mesh(data=2):
        return sl.jit(lambda x: (x, 3)).plan(torch.ones(3))  # type: ignore[no-any-return]


PLANS: Mapping[str, Callable[[], sl.Plan]] = {
    "mlp": plan_mlp,
    "uneven": plan_uneven,
    "module": plan_module,
    "offload": lambda: plan_module(2, schedule=sl.Schedule(offload="saved")),
    "tp": lambda: plan_w1("tp"),
    "remat": lambda: plan_w1("tp", 2, remat="full"),
    "pipeline": plan_pipeline,
    "empty": plan_empty,
}


def read_table(data: Mapping[str, Any], table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a table's rows as records, as page.js does."""
    strings = data["strings"]
    return [
        {
            name: strings[x] if kind == "text" else x
            for x, (name, kind) in zip(row, table["columns"].items(), strict=True)
        }
        for row in table["rows"]
    ]
