"""Plans a training step of a transformers model: forward, backward, and an update by AdamW, as one program."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardlib.command_line.model_inputs import make_inputs
from shardlib.command_line.transformers_config import build_model, read_config
from shardlib.compiler.plan.plan import Plan
from shardlib.core.errors import ShardingError
from shardlib.core.text_tables import format_si
from shardlib.core.torch_internals.torch_private import pytree
from shardlib.jit.jit import jit
from shardlib.nn import hf_tp_plan
from shardlib.nn.parallelize import parallelize
from shardlib.nn.strategies import DATA, SEQUENCE, TENSOR, StrategyAxes, axes_for, resolve_strategy
from shardlib.nn.suggest import suggest
from shardlib.sharding.mesh.mesh import Mesh

ARGUMENT_NAMES = {"model": "parameters", "optimizer": "optimizer state", "batch": "batch"}  # by argument of the step

LOSS_INPUTS = {"labels", "return_loss"}  # with one of these, a model computes its loss
MEAN_SQUARE = "the mean square of each output, added up"


@dataclass(frozen=True)
class PlannedStep:
    """The plan of a step, lines of `facts` about it, its `counts` by their unit, `labels` of its arguments."""

    plan: Plan
    facts: Sequence[str]
    counts: Mapping[str, int]
    labels: Mapping[str, str]


def plan_training_step(mesh: Mesh, options: argparse.Namespace) -> PlannedStep:
    """Builds the model of `options.model` on the meta device and plans one step of it on a mesh."""
    strategy = resolve_strategy(options.strategy).on(mesh)
    _check_axes(mesh, strategy)
    model = build_model(read_config(options.model, options.layers))
    batch = make_inputs(model, options.batch, options.seq)
    _check_divisible(mesh, strategy.batch, options.batch, options.seq if "input_ids" in batch else None)
    elements = sum(x.numel() for x in model.parameters())
    dtype = getattr(torch, options.precision)
    with mesh:
        specs, origin = _tensor_specs(model, mesh, batch)
        parallelize(model, specs, strategy=options.strategy, precision=None if dtype == torch.float32 else dtype)
        optimizer = torch.optim.AdamW(model.parameters())
        plan: Plan = jit(train_step, remat=options.remat).plan(model, optimizer, batch)
    shapes = [f"{name} {list(x.shape)}" for name, x in batch.items() if isinstance(x, Tensor)]
    facts = [
        f"{type(model).__name__}: {format_si(elements, ' parameters')}, {options.strategy}, AdamW in float32, "
        f"computed in {options.precision}",
        f"batch: {', '.join(shapes)}",
        *([f"tensor axis: {origin}"] if origin else []),
        *([] if LOSS_INPUTS & batch.keys() else [f"loss: {MEAN_SQUARE}; {type(model).__name__} computes none here"]),
    ]
    tokens = {"tokens": options.batch * options.seq} if "input_ids" in batch else {}
    return PlannedStep(plan, facts, tokens | {"samples": options.batch}, ARGUMENT_NAMES)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Mapping[str, Any]) -> Tensor:
    """Runs one step; the loss is the model's own, or else the mean square of each of its outputs, added up."""
    outputs = model(**batch)
    loss = getattr(outputs, "loss", None)
    if loss is None:
        leaves = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor) and x.is_floating_point()]
        loss = torch.stack([x.square().mean() for x in leaves]).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _tensor_specs(model: nn.Module, mesh: Mesh, batch: Mapping[str, Any]) -> tuple[dict[str, str] | None, str]:
    """Returns specs over the mesh's tensor axis and their origin; None leaves them to the model's own `tp_plan`."""
    axis = next((axis for axis in mesh.axes if axis in TENSOR), None)
    if axis is None:
        return None, ""
    if any("*" in name for name in hf_tp_plan.table_of(model)):
        return None, "specs of the model's tp_plan"
    return suggest(model, mesh, axis=axis, **batch), "specs of sl.suggest"


def _check_axes(mesh: Mesh, strategy: StrategyAxes) -> None:
    """Raises `ShardingError` for axes over which the step would be repeated."""
    used = {*strategy.batch, *strategy.parameters, *SEQUENCE, *TENSOR}
    if unused := [axis for axis in mesh.axes if axis not in used]:
        raise ShardingError(
            "the step is not sharded over all axes of the mesh",
            [f"{axis}={mesh.axes[axis]}" for axis in unused],
            rule=f"the batch is sharded over {', '.join(DATA)}; tokens over {', '.join(SEQUENCE)}; "
            f"weights over {', '.join(TENSOR)}",
            remedy="--mesh data=512,tensor=8",
        )


def _check_divisible(mesh: Mesh, batch_axes: Sequence[str], batch: int, seq: int | None) -> None:
    """Raises `ShardingError` if devices would have unequal shares of the batch, or of its sequences."""
    wrong, remedies = [], []
    for name, size, axes in (("batch", batch, batch_axes), ("seq", seq, axes_for("seq", SEQUENCE, mesh))):
        ways = math.prod(mesh.axes[axis] for axis in axes)
        if size is not None and size % ways:
            grid = " x ".join(f"{axis}={mesh.axes[axis]}" for axis in axes)
            near = f"{size // ways * ways} or {-(-size // ways) * ways}" if size > ways else f"{ways}"
            product = f" = {ways}" if len(axes) > 1 else ""
            wrong.append(f"--{name} {size} is no multiple of {grid}{product}")
            remedies.append(f"--{name} {near}")
    if wrong:
        raise ShardingError(
            "devices would have unequal shares of the step", wrong,
            rule="the strategy shards samples over the data axes, and an axis seq shards tokens",
            remedy=", ".join(remedies),
        )  # fmt: skip
