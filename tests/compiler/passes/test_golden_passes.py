"""Golden texts of single passes: a program before a pass, and after it.

A case is a file in `golden/`, `PASS.CASE.txt`: a comment, a program, a line of dashes, and the program that the pass
returns. `GOLDEN=write` replaces the second program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import shardlib as sl
from shardlib import Mesh
from shardlib.compiler.codegen import virtual
from shardlib.compiler.passes import PASSES
from shardlib.compiler.passes.comm import bucket_collectives, row_overlap
from shardlib.compiler.passes.memory import offload_saved, offload_state
from shardlib.compiler.passes.memory.remat import remade
from shardlib.compiler.passes.memory.saved_values import Crossing
from shardlib.compiler.program.steps import Compute, Program, Step, Var
from shardlib.compiler.program.text import parse, show
from shardlib.compiler.program.verify import verify
from tests.helpers.golden import assert_golden

FOLDER = Path(__file__).parent / "golden"
SEPARATOR = "\n----\n"


def _after_backward(program: Program) -> Program:
    """Marks the steps behind the first `ones_like` as the backward pass; texts do not show this."""
    steps, backward = list[Step](), False
    for step in program.steps:
        backward = backward or (isinstance(step, Compute) and step.target is torch.ops.aten.ones_like.default)
        steps.append(replace(step, backward=True) if backward and isinstance(step, Compute) else step)
    return replace(program, steps=tuple(steps))


def _offload(program: Program) -> Program:
    return offload_saved.offload(_after_backward(program), sl.Schedule(prefetch=0, offload="saved"))


def _recompute_all(program: Program) -> Program:
    crossing = Crossing.analyze(_after_backward(program))
    return remade(crossing, crossing.held)


# A pass by the name of its module; some take a schedule, or act only where a user asks for them.
BY_NAME: dict[str, Callable[[Program], Program]] = {one.__module__.rpartition(".")[2]: one for one in PASSES} | {
    "row_overlap": partial(row_overlap.parts, how=sl.Schedule(parts=2)),
    "bucket_collectives": partial(bucket_collectives.bundle, how=sl.Schedule(prefetch=1)),
    "offload_saved": _offload,
    "offload_state": partial(offload_state.offload_state, away=[0], how=sl.Schedule(prefetch=0)),
    "remat": _recompute_all,
}
CASES = sorted(path.name for path in FOLDER.glob("*.txt"))


@pytest.mark.parametrize("case", CASES)
def test_a_pass_rewrites_a_program(case: str) -> None:
    text = (FOLDER / case).read_text()
    before = verify(parse(text.partition(SEPARATOR)[0].partition("\n")[2]))
    after = verify(BY_NAME[case.partition(".")[0]](before))
    comment = text.splitlines()[0]
    assert comment.startswith("# ")
    assert_golden(FOLDER / case, f"{comment}\n{show(before)}{SEPARATOR}{show(after)}\n")
    assert show(parse(show(after))) == show(after)
    for share in (True, False):
        expected, results = (_run(program, share) for program in (before, after))
        assert len(results) == len(expected)
        for result, single in zip(results, expected, strict=True):
            torch.testing.assert_close(result, single)


def test_every_pass_has_a_golden_text() -> None:
    assert {case.partition(".")[0] for case in CASES} == BY_NAME.keys()


def _run(program: Program, share: bool) -> list[torch.Tensor]:
    """Returns every result of a program on virtual devices, where inputs are random numbers."""
    mesh = Mesh(program.mesh.axes)
    numbers = torch.Generator().manual_seed(0)
    inputs = [_shards(var, mesh, numbers) for var in program.inputs]
    function = virtual.load(replace(program, mesh=mesh), mesh, share=share)
    return [shard.clone() for shards in function(inputs, [0.5]) for shard in shards]  # 0.5 is `$0`


def _shards(var: Var, mesh: Mesh, numbers: torch.Generator) -> list[torch.Tensor]:
    """Returns one tensor per device: shards of random numbers; each addend of a partial sum has its own."""
    assert var.layout is not None
    wholes: dict[tuple[int, ...], torch.Tensor] = {}
    shards = []
    for coords in mesh.all_coords():
        place = tuple(axis.coord(coords) for axis in var.layout.pending_axes)
        if place not in wholes:
            wholes[place] = torch.randn(var.layout.shape, generator=numbers).to(var.dtype)
        shards.append(var.layout.scatter(wholes[place], coords).clone())
    return shards
