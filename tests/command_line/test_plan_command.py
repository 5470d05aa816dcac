"""`shardlib plan`: what it prints, and what it says about bad input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.command_line import memory_table
from shardlib.command_line.main import main
from shardlib.command_line.plan_command import parse_axes
from tests.command_line.transformers_configs import CASES

HERE = "tests.command_line.plan_targets"
MESH = ("--mesh", "data=2,tensor=4")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The exit status, stdout and stderr of `shardlib plan`."""
    try:
        status = main(["plan", *arguments])
    except SystemExit as error:  # of argparse
        status = int(error.code or 0)
    text = capsys.readouterr()
    return status, text.out, text.err


@pytest.mark.parametrize("name", ["product", "planned"])
def test_function(capsys: pytest.CaptureFixture[str], name: str) -> None:
    status, out, err = run(capsys, f"{HERE}:{name}", *MESH, "--machine", "h100")
    assert (status, err) == (0, "")
    assert "f32[batch=64@data, 512]" in out
    assert "memory per device" in out
    assert "simulated step on h100: " in out


def test_plain_function(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, f"{HERE}:plain", "--mesh", "data=4")
    assert (status, err) == (0, "")
    assert "relu on data=4 (4 devices, abstract)" in out
    assert "simulated" not in out


def test_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    assert run(capsys, f"{HERE}:product", *MESH, "--html", str(path))[0] == 0
    assert "batch=64@data" in path.read_text()


def test_memory_adds_up() -> None:
    """Groups partition the memory at the peak; a gradient is counted as one."""
    x, w = torch.empty(64, 512, device="meta"), torch.empty(512, 256, device="meta")

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return w - 0.1 * sl.grad(lambda w: (x @ w).square().sum())(w)

    with sl.Mesh.abstract(data=2):
        plan = sl.jit(step, in_specs=("batch@data _", "_ _")).plan(x, w)
    lines = [re.findall(r"\S+", line) for line in memory_table.memory_table(plan)[1:]]
    assert [line[0] for line in lines] == ["x", "w", "activations", "gradients", "total"]
    groups = memory_table.group_values(plan, plan.compiled.program)
    figures = memory_table.peak_by_group(plan.compiled.program, lambda v: groups.get(v, memory_table.OTHERS))
    assert sum(now for now, _ in figures.values()) == plan.peak_memory
    assert figures["x"] == (64 * 512 * 4 // 2,) * 2
    assert figures["w"] == (512 * 256 * 4,) * 2
    assert figures["gradients"][1] == 512 * 256 * 4
