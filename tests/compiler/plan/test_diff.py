"""What changed between two plans: exact texts, figures, plain data."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from shardlib import Mesh, ShardingError
from shardlib.compiler.plan.diff import Total
from tests.compiler.plan.test_plan import GRID, LINE, MLP, RULES, SPECS, _w1, meta, mlp, plan

BEFORE = plan(mlp, *MLP, in_specs=SPECS)


def test_another_mesh() -> None:
    after = plan(mlp, *MLP, in_specs=SPECS, mesh=Mesh.abstract(data=4, tensor=2, rules=RULES))
    assert (
        str(BEFORE.diff(after))
        == f"""\
mlp on data=2, tensor=4 (8 devices, abstract)
-> mlp on data=4, tensor=2 (8 devices, abstract)

totals            before     after
sent per device   3.07 kB    1.02 kB    -66.7 %
collectives       1          1          as before
FLOPs per device  132 kFLOP  132 kFLOP  as before
redundant FLOPs   0 FLOP     0 FLOP     as before
peak memory       38.9 kB    69.6 kB    +78.9 %

program (- gone, + new, ~ other bytes)
  tests/compiler/plan/test_plan.py:{LINE + 2}  return hidden @ down
    ~ all_reduce[tensor] mm  3.07 kB -> 1.02 kB"""
    )


def test_an_annotation_less() -> None:
    """`x` is no longer cut over data: layouts, the FLOPs of both lines, the bytes of the sum."""
    after = plan(mlp, *MLP, in_specs=(None, *SPECS[1:]))
    assert (
        str(BEFORE.diff(after))
        == f"""\
mlp on data=2, tensor=4 (8 devices, abstract)

totals            before     after
sent per device   3.07 kB    6.14 kB    +100 %
collectives       1          1          as before
FLOPs per device  132 kFLOP  263 kFLOP  +100 %
redundant FLOPs   0 FLOP     132 kFLOP  new
peak memory       38.9 kB    45.1 kB    +15.8 %

inputs
  x  f32[batch=16@data, embed=64]  -> f32[16, embed=64]

outputs
  result  f32[batch=16@data, embed=64]  -> f32[16, embed=64]

program (- gone, + new, ~ other bytes)
  tests/compiler/plan/test_plan.py:{LINE + 1}  hidden = torch.relu(x @ up)
      66 kFLOP -> 132 kFLOP (+100 %)
  tests/compiler/plan/test_plan.py:{LINE + 2}  return hidden @ down
      65.5 kFLOP -> 131 kFLOP (+100 %)
    ~ all_reduce[tensor] mm  3.07 kB -> 6.14 kB"""
    )


@pytest.mark.parametrize(
    ("total", "cells"),
    [
        (Total("collectives", "", 1234, 1235), ("collectives", "1,234", "1,235", "+0.081 %")),
        (Total("collectives", "", 0, 1), ("collectives", "0", "1", "new")),
        (Total("peak memory", "B", 1234, 0), ("peak memory", "1.23 kB", "0 B", "-100 %")),
        (Total("simulated step", "s", 0.5, 0.5, "all"), ("simulated step (all)", "500 ms", "500 ms", "as before")),
    ],
)
def test_cells_of_a_total(total: Total, cells: tuple[str, ...]) -> None:
    """Counts are exact, other figures have three digits."""
    assert total.cells == cells


@pytest.mark.parametrize("other", [None, "plan", BEFORE.to_dict])
def test_another_object_is_refused(other: Any) -> None:
    with pytest.raises(ShardingError) as error:
        BEFORE.diff(other)
    assert str(error.value) == (
        f"the plan of mlp is compared with {other!r}\nRule: plans are compared with plans\n"
        "Remedy: plan.diff(step.plan(*args)), where step is jitted"
    )


def test_nothing_changed() -> None:
    same = BEFORE.diff(plan(mlp, *MLP, in_specs=SPECS))
    assert not same
    assert str(same) == (
        "mlp on data=2, tensor=4 (8 devices, abstract)\n\n"
        "nothing changed: layouts, collectives, FLOPs and memory are the same"
    )


def test_backwards_is_the_opposite() -> None:
    after = plan(mlp, *MLP, in_specs=(None, *SPECS[1:]))
    there, back = BEFORE.diff(after), after.diff(BEFORE)
    assert (there.before, there.after) == (back.after, back.before)
    assert [(t.before, t.after) for t in there.totals] == [(t.after, t.before) for t in back.totals]
    assert [line.flops for line in there.lines] == [line.flops[::-1] for line in back.lines]
    assert [(n, a, b) for n, a, b in there.inputs] == [(n, a, b) for n, b, a in back.inputs]


class First:
    @staticmethod
    def run(x: Tensor, w: Tensor) -> Tensor:
        x = x @ w
        return F.relu(x)


class Edited:
    """The same lines, elsewhere in the file, and one between them."""

    @staticmethod
    def run(x: Tensor, w: Tensor) -> Tensor:
        x = x @ w
        x = x @ w.t()
        return F.relu(x)


def test_an_edit_that_moves_lines() -> None:
    """Only the new line is named, and the one whose sum has moved."""
    args, specs = (meta(16, 64), meta(64, 256)), ("b@data _", "_ o@tensor")
    change = plan(First.run, *args, in_specs=specs).diff(plan(Edited.run, *args, in_specs=specs))
    product, relu = change.lines
    start = Edited.run.__code__.co_firstlineno
    assert (
        str(product) == f"tests/compiler/plan/test_diff.py:{start + 3}  x = x @ w.t()\n    0 FLOP -> 65.5 kFLOP (new)"
    )
    assert (
        str(relu)
        == f"tests/compiler/plan/test_diff.py:{start + 4}  return F.relu(x)\n  + all_reduce[tensor] x  3.07 kB"
    )


def test_collectives_come_go_and_change() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    args = (meta(16, 64), meta(64, 32))
    summed = plan(fn, *args, in_specs=("_ k@tensor", "k@tensor _"))
    gathered = plan(fn, *args, in_specs=("m@tensor _", None), out_specs="_ _")
    (line,) = summed.diff(gathered).lines
    assert [str(c) for c in line.collectives] == [
        "- all_reduce[tensor] mm  3.07 kB",
        "+ all_gather[tensor] mm  1.54 kB",
    ]
    assert line.flops[0] == line.flops[1]
    (moved, _) = line.collectives
    assert (moved.times, moved.bytes) == ((1, 0), (3072, 0))


@pytest.mark.long
def test_layers_are_counted() -> None:
    """A deeper model is the same lines more often; the inputs that come are folded."""
    change = _w1("tp", 2).diff(_w1("tp", 4))
    text = str(change)
    assert "params.layers[*].wq x 2              not there  -> f32[heads=256@tensor, embed=256]" in text
    assert "    ~ all_reduce[tensor] mm  2 times, 1.57 MB -> 4 times, 3.15 MB" in text


@pytest.mark.parametrize("other", [BEFORE, plan(mlp, *MLP, in_specs=(None, *SPECS[1:]), mesh=GRID)])
def test_plain_data(other: Any) -> None:
    data = BEFORE.diff(other).to_dict()
    assert json.loads(json.dumps(data)) == data
    assert set(data) == {"before", "after", "totals", "inputs", "outputs", "lines"}
