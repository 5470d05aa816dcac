"""`shardlib plan --model`: configs of transformers are planned as whole training steps."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

import shardlib as sl
from shardlib.command_line.training_step import PlannedStep, plan_training_step
from shardlib.compiler.plan import memory_table
from tests.command_line.transformers_configs import CASES

QUICK = ("llama", "mixtral", "t5", "vit")
REAL = ("llama", "t5", "vit")


def plan(folder: Path, name: str, *, is_tiny: bool, **axes: int) -> PlannedStep:
    case = CASES[name]
    path = folder / "config.json"
    path.write_text(json.dumps(case.config(is_tiny=is_tiny)))
    options = argparse.Namespace(
        model=path, layers=2 if is_tiny else 4, batch=8 if is_tiny else 512, seq=case.seq[is_tiny], strategy="fsdp",
        remat="none", precision="bfloat16",
    )  # fmt: skip
    return plan_training_step(sl.Mesh.abstract(axes, machine="h100"), options)


def check(step: PlannedStep) -> None:
    """Memory of parameters and moments is that of their shards, and all groups add up to the plan's peak."""
    plan = step.plan
    groups = memory_table.group_values(plan, plan.compiled.program)
    figures = memory_table.peak_by_group(plan.compiled.program, lambda v: groups.get(v, memory_table.OTHERS))
    assert sum(now for now, _ in figures.values()) == plan.peak_memory
    assert figures.keys() == {"batch", "model", "optimizer", memory_table.GRADIENTS, memory_table.OTHERS}
    shards = {name: plan.layout_of(name).max_local_numel() for name, _ in plan.compiled.inputs}
    moments = {name: n for name, n in shards.items() if name.endswith("exp_avg']")}
    trained = {name.removeprefix("optimizer.state[").removesuffix("]['exp_avg']"): n for name, n in moments.items()}
    assert trained.items() <= shards.items(), "a moment lies where its parameter does"
    assert figures["model"][0] == sum(v.nbytes for v in plan.compiled.program.inputs if groups[v] == "model")
    assert figures["optimizer"][0] == sum(2 * 4 * n + 4 for n in moments.values())  # and a number of steps
    assert figures[memory_table.GRADIENTS][1] >= 4 * max(trained.values())
    assert plan.simulate().seconds > 0
    assert figures["batch"][0] > 0


@pytest.mark.parametrize(("architecture", "has_loss"), [("LlamaForCausalLM", True), ("LlamaModel", False)])
def test_the_loss_is_named(tmp_path: Path, architecture: str, has_loss: bool) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CASES["llama"].config(is_tiny=True) | {"architectures": [architecture]}))
    options = argparse.Namespace(
        model=path, layers=1, batch=8, seq=16, strategy="ddp", remat="none", precision="float32"
    )  # fmt: skip
    step = plan_training_step(sl.Mesh.abstract(data=2), options)
    losses = [line for line in step.facts if line.startswith("loss: ")]
    assert losses == (
        [] if has_loss else [f"loss: the mean square of each output, added up; {architecture} computes none here"]
    )
    assert step.counts == {"tokens": 128, "samples": 8}


def as_cases(names: tuple[str, ...] | dict[str, Any], quick: tuple[str, ...] = ()) -> list[Any]:
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.long]) for name in names]


@pytest.mark.parametrize("name", as_cases(CASES, QUICK))
def test_tiny(tmp_path: Path, name: str) -> None:
    check(plan(tmp_path, name, is_tiny=True, data=2, tensor=2))


@pytest.mark.parametrize("name", as_cases(REAL))
def test_real(tmp_path: Path, name: str) -> None:
    check(plan(tmp_path, name, is_tiny=False, data=64, tensor=8))


@pytest.mark.long
def test_every_layer_costs_the_same(tmp_path: Path) -> None:
    """`--layers` is the most layers of each stack: two more layers add twice what one adds."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CASES["llama"].config(is_tiny=True)))
    options = argparse.Namespace(
        model=path, batch=8, seq=16, strategy="ddp", remat="none", precision="float32"
    )  # fmt: skip
    flops = []
    for options.layers in (1, 2, 3, 8):
        flops.append(plan_training_step(sl.Mesh.abstract(data=2), options).plan.flops)
    assert flops[1] - flops[0] == flops[2] - flops[1] > 0
    assert flops[3] - flops[2] == flops[2] - flops[1], "the config has 4 layers"
