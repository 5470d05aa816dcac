"""The verifier of programs: it finds what is planted, and lets alone what the compiler makes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib import Mesh
from shardlib.lower.memory import local_bytes
from shardlib.lower.program import Collective, Instr, Program, Var
from shardlib.lower.verify import ProgramError, verify
from shardlib.meshes.axis import Axis
from shardlib.specs.layout import Layout

pytestmark = pytest.mark.usefixtures("strict")

aten = torch.ops.aten


def _program(sizes: str = "even") -> Program:
    """With every kind of collective, a table that is cut, and halos."""

    def fn(x: Tensor, w: Tensor, v: Tensor, table: Tensor, ids: Tensor) -> Any:
        h = sl.shard(x @ w, "rows@data ff@tensor")
        moved = sl.shard(h, "rows ff@(data tensor)")
        there = sl.shard(sl.shard(h, "rows@tensor ff"), "rows@data ff")
        turned = sl.shard(sl.shard(h, "rows@data ff@tensor"), "rows@tensor ff@data")
        looked = torch.nn.functional.embedding(ids, table)
        return h @ v, moved.sum(0), there, turned, looked, torch.softmax(h, -1)

    n = 8 if sizes == "even" else 7
    args = (torch.ones(n, 6), torch.ones(6, n), torch.ones(n, 5), torch.ones(n, 4), torch.zeros(n, dtype=torch.int64))
    with Mesh(data=2, tensor=2):
        specs = ("rows@data _", "_ ff@tensor", "ff@tensor _", "v@tensor _", "_")
        return sl.jit(fn, in_specs=specs).plan(*args).compiled.program


def _first(program: Program, test: Callable[[Any], bool]) -> Any:
    return next(s for s in program.steps if test(s))


def _collective(kind: str, key: str = "") -> Callable[[Program], Collective]:
    return lambda p: _first(p, lambda s: isinstance(s, Collective) and s.kind == kind and (not key or key in s.params))


def _instr(target: Any) -> Callable[[Program], Instr]:
    return lambda p: _first(p, lambda s: isinstance(s, Instr) and s.target == target)


def _told(kind: str, key: str, change: Callable[[Any], Any]) -> Callable[[Program], None]:
    def plant(program: Program) -> None:
        step = _collective(kind, key)(program)
        step.params = {**step.params, key: change(step.params[key])}

    return plant


def _longer(sizes: Any) -> Any:
    return [_longer(sizes[0]) if isinstance(sizes[0], list) else sizes[0] + 1, *sizes[1:]]


def _dropped(program: Program) -> None:
    program.steps.remove(_instr(aten.mm.default)(program))


def _twice(program: Program) -> None:
    program.steps.append(copy.copy(_instr(aten.mm.default)(program)))


def _too_late(program: Program) -> None:
    step = _instr(aten.mm.default)(program)
    program.steps.remove(step)
    program.steps.append(step)


def _no_result(program: Program) -> None:
    program.outputs[0] = Var("nobody", Layout.replicated((1,)), torch.float32)


def _input_twice(program: Program) -> None:
    program.inputs.append(program.inputs[0])


def _other_operand(program: Program) -> None:
    step = _instr(aten.mm.default)(program)
    step.args = (step.args[1], step.args[0])


def _other_layout(program: Program) -> None:
    out = _instr(aten.mm.default)(program).outs[0]
    assert out is not None
    out.layout = Layout.replicated((8, 8))


def _other_dtype(program: Program) -> None:
    out = _instr(aten.mm.default)(program).outs[0]
    assert out is not None
    out.dtype = torch.float64


def _other_number(program: Program) -> None:
    step = _first(program, lambda s: isinstance(s, Instr) and s.target == aten.narrow.default)
    step.args = (*step.args[:3], 99)


def _settled(program: Program) -> Collective:
    """The reduction of a value that is known to be a pending sum."""

    def is_one(s: Any) -> bool:
        return isinstance(s, Collective) and s.source.layout is not None and bool(s.source.layout.pending)

    return _first(program, is_one)


def _still_pending(program: Program) -> None:
    step = _settled(program)
    step.out.layout = dataclasses.replace(step.out.layout, pending=step.source.layout.pending)


def _never_pending(program: Program) -> None:
    step = _settled(program)
    other = {"data": "tensor", "tensor": "data"}
    step.axes = tuple(Axis(other[a.name], 2) for a in step.axes)


def _no_axis(program: Program) -> None:
    _collective("all_gather")(program).axes = (Axis("pod", 2),)


def _axis_twice(program: Program) -> None:
    _collective("all_reduce")(program).axes = (Axis("tensor", 2), Axis("tensor", 2))


def _other_kind(program: Program) -> None:
    _collective("reduce_scatter", "sizes")(program).kind = "all_gather"


FAULTS: dict[str, tuple[Callable[[Program], None], str]] = {
    "a step is missing": (_dropped, "which is not made yet"),
    "a step stands twice": (_twice, "which is there"),
    "a step comes too late": (_too_late, "which is not made yet"),
    "nothing makes a result": (_no_result, "nobody is a result, and nothing makes it"),
    "an input stands twice": (_input_twice, "an input stands twice"),
    "operands change places": (_other_operand, "aten.mm.default"),
    "another layout": (_other_layout, r"is \[8, 8\]: \[8, 8\]"),
    "another dtype": (_other_dtype, "makes torch.float32, %.* is torch.float64"),
    "a slice that is too long": (_other_number, "narrow"),
    "a sum that stays pending": (_still_pending, "leaves pending over"),
    "a sum over other axes": (_never_pending, "leaves pending over"),
    "an axis that is none of the mesh's": (_no_axis, "none of the mesh's"),
    "an axis twice": (_axis_twice, "over one twice"),
    "a gather of other sizes": (_told("all_gather", "sizes", _longer), "a piece has the length|makes"),
    "a gather of fewer": (_told("all_gather", "sizes", lambda x: x[:1]), "so many members"),
    "a gather along another dim": (_told("all_gather", "dim", lambda d: 1 - d), "a piece has the length|makes"),
    "a scatter of other sizes": (_told("reduce_scatter", "sizes", _longer), "the whole has the length"),
    "a scatter that gathers": (_other_kind, "leaves pending over nothing what was pending over"),
    "an exchange of other sizes": (_told("all_to_all", "split_sizes", _longer), "a piece has the length"),
    "an exchange that gets others": (_told("all_to_all", "concat_sizes", _longer), "a piece has the length|makes"),
    "a hop to nobody": (_told("ppermute", "pairs", lambda pairs: [(0, 9), *pairs[1:]]), "told to send by"),
    "two hops to one": (_told("ppermute", "pairs", lambda pairs: [(0, 0), (1, 0)]), "told to send by"),
}


@pytest.mark.parametrize(("plant", "message"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found(plant: Callable[[Program], None], message: str) -> None:
    program = verify(_program())
    plant(program)
    with pytest.raises(ProgramError, match=message):
        verify(program)


@pytest.mark.parametrize("sizes", ["even", "uneven"])
def test_what_is_planned_is_right_and_every_value_has_a_size(sizes: str) -> None:
    program = _program(sizes)
    verify(program)
    values = [v for s in program.steps for v in s.outs if v is not None]
    assert all(local_bytes(v) > 0 for v in values)
    assert any(v.layout is None for v in values)
    assert {s.kind for s in program.collectives} >= {"all_reduce", "all_gather", "reduce_scatter"}


def test_all_faults_are_told_at_once() -> None:
    program = _program()
    _other_dtype(program)
    _told("all_gather", "sizes", _longer)(program)
    with pytest.raises(ProgramError) as error:
        verify(program)
    assert str(error.value).count("\n  * ") >= 2
