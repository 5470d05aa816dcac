"""`SHARDLIB_DUMP`: every stage of a program as a numbered text file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardlib as sl
from shardlib import Mesh
from shardlib.compiler.passes import PASSES
from shardlib.compiler.program.text import parse, show


def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).relu().sum()


def test_every_stage_is_a_numbered_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHARDLIB_DUMP", str(tmp_path / "dump"))
    x, w = torch.ones(4, 6), torch.ones(6, 8)
    with Mesh(data=2, tensor=2):
        planned = sl.jit(step, in_specs=("b@data d", "d f@tensor"))
        plan = planned.plan(x, w)
        planned.plan(x.requires_grad_(), w.requires_grad_())
    first, second = sorted((tmp_path / "dump").iterdir())
    assert (first.name, second.name) == ("001_step", "002_step")
    passes = [one.__module__.rpartition(".")[2] for one in PASSES]
    stages = ["traced", "simplified", "graph", "decisions", "lowered", "rematerialized", *passes]
    files = sorted(first.iterdir())
    assert [file.name for file in files] == [f"{i:02}_{stage}.txt" for i, stage in enumerate(stages, 1)]
    texts = [file.read_text().strip() for file in files]
    assert [text.splitlines()[0] for text in texts] == [
        *["class <lambda>(torch.nn.Module):"] * 2,
        "input x: f32[4, 6]",
        "input x: 4#0@data 6#1",
        *["mesh data=2, tensor=2"] * (2 + len(passes)),
    ]
    assert "mm: f32[4, 8] = aten.mm.default(x, w)  # m k, k n -> m n; m=4 k=6 n=8" in texts[2].splitlines()
    assert "mm mm: m#0@data k#1 n#2@tensor" in texts[3].splitlines()
    assert texts[-1] == show(parse(texts[-1])) == show(plan.compiled.program)
    halves = [file.stem[3:].partition("_")[0] for file in sorted(second.iterdir())[6:]]
    assert halves == ["forward"] * len(passes) + ["backward"] * len(passes)


def test_nothing_is_written_without_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SHARDLIB_DUMP", raising=False)
    monkeypatch.chdir(tmp_path)
    with Mesh(data=2):
        sl.jit(step).plan(torch.ones(4, 6), torch.ones(6, 8))
    assert not [*tmp_path.iterdir()]
