"""Stages know ops by their rules and traits: none of them asks for an op by its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardlib

ROOT = Path(shardlib.__file__).parent
STAGES = ("propagate", "graph/ir.py", "lower", "program", "passes", "plan", "codegen", "pipeline.py")
STAGES = (*(f"compiler/{stage}" for stage in STAGES), "eager", "jit/call")
FORMS = {"eager/special_ops.py", "eager/composite_hooks.py"}  # what eager ops stand for


def named(source: str) -> Iterator[str]:
    """The ops that a source names: `torch.ops.aten.add`, `aten.add.Tensor`, `op.kind == "add"`."""
    for node in ast.walk(ast.parse(source)):
        text = ast.unparse(node) if isinstance(node, ast.Attribute | ast.Compare) else ""
        if (
            isinstance(node, ast.Attribute) and text.startswith(("aten.", "torch.ops.aten.", "torch.ops.shardlib."))
        ) or (isinstance(node, ast.Compare) and ast.unparse(node.left) == "op.kind"):
            yield text


def files() -> Iterator[Path]:
    for stage in STAGES:
        path = ROOT / stage
        yield from [path] if path.is_file() else sorted(path.rglob("*.py"))


def test_no_stage_asks_for_an_op_by_its_name() -> None:
    found = {str(p.relative_to(ROOT)): list(named(p.read_text())) for p in files()}
    assert len(found) > 50
    assert {path: names for path, names in found.items() if names and path not in FORMS} == {}


@pytest.mark.parametrize("line", ["x = torch.ops.aten.add.Tensor", "aten.mm.default", 'if op.kind == "mm": pass'])
def test_a_name_is_found(line: str) -> None:
    assert list(named(line))
