"""The memory of one device by what holds it: groups partition it, and gradients are a group."""

from __future__ import annotations

import re

import torch

import shardlib as sl
from shardlib.compiler.plan.memory_table import GRADIENTS, OTHERS, group_values, memory_table
from shardlib.compiler.program.buffers import peak_by_group
from shardlib.compiler.program.steps import Compute


def test_memory_adds_up() -> None:
    """Groups partition the memory at the peak; a gradient is counted as one."""
    x, w = torch.empty(64, 512, device="meta"), torch.empty(512, 256, device="meta")

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return w - 0.1 * sl.grad(lambda w: (x @ w).square().sum())(w)

    with sl.Mesh.abstract(data=2):
        plan = sl.jit(step, in_specs=("batch@data _", "_ _")).plan(x, w)
    lines = [re.findall(r"\S+", line) for line in memory_table(plan)[1:]]
    assert [line[0] for line in lines] == ["x", "w", "activations", "gradients", "total"]
    groups = group_values(plan, plan.compiled.program)
    figures = peak_by_group(plan.compiled.program, lambda v: groups.get(v, OTHERS))
    assert sum(now for now, _ in figures.values()) == plan.peak_memory
    assert figures["x"] == (64 * 512 * 4 // 2,) * 2
    assert figures["w"] == (512 * 256 * 4,) * 2
    assert figures["gradients"][1] == 512 * 256 * 4


def test_a_copy_of_a_gradient_counts_as_one() -> None:
    """The backward pass of `view(8, 16).mT` reshapes a transposed gradient, which copies it."""
    x, w = torch.empty(16, 8, device="meta"), torch.empty(128, device="meta")

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return sl.grad(lambda w: (x * w.view(8, 16).mT).sum())(w)

    with sl.Mesh.abstract(data=2):
        plan = sl.jit(step).plan(x, w)
    program = plan.compiled.program
    (result,) = program.results
    assert [s.out_vars for s in program.steps if isinstance(s, Compute) and s.copies] == [(result,)]
    assert group_values(plan, program)[result] == GRADIENTS
