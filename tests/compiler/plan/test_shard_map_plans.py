"""Plans of shard_map bodies: arithmetic counts, specs are annotations, values have names and local shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib import Mesh, Plan
from shardlib.compiler.program.steps import Compute


def body(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    return sl.psum(torch.relu(y), "tensor")


def loss_of(x: Tensor, w: Tensor) -> Tensor:
    h = sl.shard_map(body, ("batch@data k@tensor", "k@tensor n"), "batch@data n")(x, w)
    return h.sum()


def planned(fn: Any, *shapes: tuple[int, ...], specs: Any = None) -> Plan:
    with Mesh.abstract(data=2, tensor=4):
        plan: Plan = sl.jit(fn, in_specs=specs).plan(*(torch.empty(shape, device="meta") for shape in shapes))
    return plan


def test_arithmetic_of_a_body_counts() -> None:
    """A device multiplies [8, 16] by [16, 32], and the transposes of both in the backward pass."""
    plan = planned(lambda x, w: sl.grad(loss_of)(x, w), (16, 64), (64, 32))
    product, pointwise = 2.0 * 8 * 16 * 32, 8.0 * 32
    counted = {}
    for step in plan.compiled.program.steps:
        if isinstance(step, Compute) and step.flops:
            counted[str(step.target), step.backward] = step.flops
    assert counted["aten.mm.default", False] == counted["aten.mm.default", True] == product
    assert counted["aten.relu.default", False] == pointwise
    assert plan.flops == sum(s.flops for s in plan.compiled.program.steps if isinstance(s, Compute)) > 2 * product
    costs = {line.line.rpartition(":")[2]: line.flops for line in planned(loss_of, (16, 64), (64, 32)).diff(plan).lines}
    assert (0.0, product) in costs.values(), "per line"


def annotated(x: Tensor) -> Tensor:
    return sl.shard(x, "batch@data _") * 2


@pytest.mark.parametrize(
    ("fn", "shapes", "specs", "words"),
    [
        (loss_of, ((16, 64), (64, 32)), None, ["annotated", "annotated"]),
        (annotated, ((16, 64),), None, ["annotated"]),
        (lambda x: annotated(x.view(4, 4, 64).view(16, 64)), ((16, 64),), None, ["annotated"]),
        (lambda x, w: annotated(x) @ w, ((16, 64), (64, 8)), None, ["annotated", "inferred"]),
        (lambda x: annotated(x + 1), ((16, 64),), None, ["inferred"]),
    ],
    ids=["shard_map", "shard", "shard of a view", "another input", "shard of a result"],
)
def test_specs_inside_of_the_program_annotate_inputs(fn: Any, shapes: Any, specs: Any, words: list[str]) -> None:
    plan = planned(fn, *shapes, specs=specs)
    inputs = plan.full.partition("inputs\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[-1] for line in inputs] == words
    assert str(plan).count("(inferred)") == words.count("inferred")
    free = [w for w in plan.warnings if w.text.startswith("not annotated")]
    assert bool(free) == ("inferred" in words and "w" in plan.rows.naming.inputs)


def test_an_input_that_lives_elsewhere_is_not_annotated_by_its_reader() -> None:
    def fn(x: Tensor) -> Tensor:
        by_rows = sl.shard_map(torch.relu, "batch@data k", "batch@data k")(x)
        by_columns = sl.shard_map(torch.neg, "batch k@tensor", "batch k@tensor")(x)
        return by_rows.sum() + by_columns.sum()

    plan = planned(fn, (16, 64))
    assert str(plan.layout_of("x")) == "16@data, 64@tensor", "each body gathers the other dim"
    assert plan.items.annotated == set()
    assert planned(fn, (16, 64), specs=("batch@data k@tensor",)).items.annotated == {0}


def test_values_of_a_body_have_the_names_and_shapes_of_a_device() -> None:
    lines = [line.split() for line in planned(loss_of, (16, 64), (64, 32)).full.splitlines()]
    assert ["y", "=", "mm(x,", "w)", "f32[8,", "32]"] in lines
    plan = planned(loss_of, (16, 64), (64, 32))
    assert plan.explain("h").startswith("h is f32[batch=16@data, n=32]\n  fixed by shard_map(..., 'batch@data n') at ")
    text = plan.explain("x")
    assert "annotated where it is read" in text
    assert "read by to_local = shard_map(x, 'batch@data k@tensor')" in text
    assert "no rule" not in text
