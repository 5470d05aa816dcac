"""The verifier of programs: it finds what is planted, and lets alone what the compiler makes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib import Mesh
from shardlib.compiler.graph.ir import Op
from shardlib.compiler.program.check_order import ProgramError
from shardlib.compiler.program.steps import (
    Collective,
    Compute,
    Copy,
    Free,
    Program,
    Start,
    Step,
    Var,
    Wait,
    makes,
    reads,
)
from shardlib.compiler.program.sym_int import Sym
from shardlib.compiler.program.verify import verify
from shardlib.compiler.propagate import Decisions
from shardlib.sharding.layout import Layout, PartialSum
from shardlib.sharding.mesh.axis import Axis

pytestmark = pytest.mark.usefixtures("strict")

aten = torch.ops.aten


@functools.cache
def _program(sizes: str = "even") -> Program:
    """With every kind of collective, a table that is cut, and halos; planned once."""

    def fn(x: Tensor, w: Tensor, v: Tensor, table: Tensor, ids: Tensor) -> Any:
        h = sl.shard(x @ w, "rows@data ff@tensor")
        moved = sl.shard(h, "rows ff@(data tensor)")
        there = sl.shard(sl.shard(h, "rows@tensor ff"), "rows@data ff")
        turned = sl.shard(sl.shard(h, "rows@data ff@tensor"), "rows@tensor ff@data")
        looked = torch.nn.functional.embedding(ids, table)
        whole = sl.shard(sl.shard(x * 2, "rows@(data tensor) _"), "rows _")
        return h @ v, moved.sum(0), there, turned, looked, whole, torch.softmax(h, -1)

    n = 8 if sizes == "even" else 7
    args = (
        torch.ones(n, 6),
        torch.ones(6, n),
        torch.ones(n, 5),
        torch.ones(9 * n, 4),
        torch.zeros(n, dtype=torch.int64),
    )
    with Mesh(data=2, tensor=2):
        specs = ("rows@data _", "_ ff@tensor", "ff@tensor _", "v@tensor _", "_")
        return sl.jit(fn, in_specs=specs).plan(*args).compiled.program


Plant = Callable[[Program], Program]


def _at(program: Program, test: Callable[[Any], bool]) -> int:
    return next(i for i, s in enumerate(program.steps) if test(s))


def _put(program: Program, i: int, *new: Step) -> Program:
    """The program with other steps at i."""
    return replace(program, steps=(*program.steps[:i], *new, *program.steps[i + 1 :]))


def _mm(change: Callable[[Compute], Sequence[Step]]) -> Plant:
    """With other steps where a matmul stands."""

    def plant(program: Program) -> Program:
        i = _at(program, lambda s: isinstance(s, Compute) and s.target == aten.mm.default)
        step = program.steps[i]
        assert isinstance(step, Compute)
        return _put(program, i, *change(step))

    return plant


def _out(**other: Any) -> Plant:
    """With another result of a matmul."""

    def plant(program: Program) -> Program:
        i = _at(program, lambda s: isinstance(s, Compute) and s.target == aten.mm.default)
        (out,) = makes(program.steps[i])
        return program.with_vars({out: replace(out, **other)})

    return plant


def _collective(test: Callable[[Collective], bool], **other: Callable[[Collective], Any]) -> Plant:
    """With another collective where the first such one starts."""

    def plant(program: Program) -> Program:
        i = _at(program, lambda s: isinstance(s, Start) and any(map(test, s.moves)))
        start = program.steps[i]
        assert isinstance(start, Start)
        k = next(k for k, c in enumerate(start.moves) if test(c))
        c = replace(start.moves[k], **{key: change(start.moves[k]) for key, change in other.items()})
        return _put(program, i, Start((*start.moves[:k], c, *start.moves[k + 1 :])))

    return plant


def _told(kind: str, key: str, change: Callable[[Any], Any]) -> Plant:
    return _collective(
        lambda c: c.kind == kind and key in c.params, params=lambda c: {**c.params, key: change(c.params[key])}
    )


def _of(kind: str) -> Callable[[Collective], bool]:
    return lambda c: c.kind == kind


def _longer(sizes: Any) -> Any:
    return [_longer(sizes[0]) if isinstance(sizes[0], list) else sizes[0] + 1, *sizes[1:]]


def _longer_last(sizes: Any) -> Any:
    return [*sizes[:-1], sizes[-1] + 1]


def _too_late(program: Program) -> Program:
    i = _at(program, lambda s: isinstance(s, Compute) and s.target == aten.mm.default)
    return replace(program, steps=(*program.steps[:i], *program.steps[i + 1 :], program.steps[i]))


def _other_number(program: Program) -> Program:
    i = _at(program, lambda s: isinstance(s, Compute) and s.target == aten.narrow.default)
    step = program.steps[i]
    assert isinstance(step, Compute)
    return _put(program, i, replace(step, args=(*step.args[:3], 99)))


def _settles(c: Collective) -> bool:
    """Whether this reduces a value that is known to be a pending sum."""
    return c.source.layout is not None and bool(c.source.layout.pending)


def _still_pending(program: Program) -> Program:
    (c, *_) = filter(_settles, program.collectives)
    assert c.source.layout is not None
    assert c.out.layout is not None
    layout = replace(c.out.layout, pending=c.source.layout.pending)
    return program.with_vars({c.out: replace(c.out, layout=layout)})


def _step(kind: type[Step], change: Callable[[Any], Sequence[Step]], at: int = 0) -> Plant:
    """With other steps where the first step of a kind stands."""

    def plant(program: Program) -> Program:
        i = [i for i, s in enumerate(program.steps) if isinstance(s, kind)][at]
        return _put(program, i, *change(program.steps[i]))

    return plant


def _freed(which: Callable[[Program], Var], behind: type[Step]) -> Plant:
    """With a value freed behind the first step of a kind."""
    return lambda program: _step(behind, lambda s: [s, Free((which(program),))])(program)


def _over(program: Program, operand: Callable[[Program], Var]) -> Program:
    """With a call over an operand, in front of all others."""
    x = operand(program)
    return replace(
        program, steps=(Compute(aten.neg.default, (x,), {}, (replace(x, name="n"),), over=(0,)), *program.steps)
    )


def _over_what_is_read(program: Program) -> Program:
    i = _at(program, lambda s: isinstance(s, Compute) and s.target == aten.mm.default)
    (x,) = makes(program.steps[i])
    call = Compute(aten.neg.default, (x,), {}, (replace(x, name="n"),), over=(0,))
    return _put(program, i, program.steps[i], call)


def _over_what_flies(program: Program) -> Program:
    i = _at(program, lambda s: isinstance(s, Start))
    x = reads(program.steps[i])[0]
    call = Compute(aten.neg.default, (x,), {}, (replace(x, name="n"),), over=(0,))
    return _put(program, i, program.steps[i], call)


def _mixed(program: Program) -> Program:
    i = _at(program, lambda s: isinstance(s, Start))
    start = program.steps[i]
    assert isinstance(start, Start)
    c = replace(start.first, kind="ppermute", out=replace(start.first.out, name="other"))
    return _put(program, i, Start((*start.moves, c)))


def _more_results(step: Compute) -> Sequence[Step]:
    (out,) = step.out_vars
    return [replace(step, outs=(out, replace(out, name="more")))]


def _copied(**other: Any) -> Plant:
    """With a copy of a matmul's result, which is said to be another."""

    def change(step: Compute) -> Sequence[Step]:
        (out,) = step.out_vars
        return [step, Copy(out, replace(out, name="copied", **other))]

    return _mm(change)


def _gathered_in_other_order(program: Program) -> Program:
    """A gather over two axes, with the minor one first."""
    wrong = _collective(lambda c: c.kind == "all_gather" and len(c.axes) > 1, axes=lambda c: c.axes[::-1])
    return wrong(program)


def _no_longer_owed(program: Program) -> Program:
    """What a matmul leaves to be summed is said to be whole."""
    source = next(c.source for c in program.collectives if _settles(c))
    assert source.layout is not None
    return program.with_vars({source: replace(source, layout=replace(source.layout, pending=()))})


OTHER = {"data": "tensor", "tensor": "data"}
FAULTS: dict[str, tuple[Plant, str]] = {
    "a step is missing": (_mm(lambda s: []), "which is not made yet"),
    "a step stands twice": (_mm(lambda s: [s, replace(s)]), "which is there"),
    "a step comes too late": (_too_late, "which is not made yet"),
    "nothing makes a result": (
        lambda p: replace(p, outputs=(Var("nobody", Layout.replicated((1,)), torch.float32), *p.outputs[1:])),
        "nobody is a result, and it is not made yet",
    ),
    "an input stands twice": (lambda p: replace(p, inputs=(*p.inputs, p.inputs[0])), "an input stands twice"),
    "operands change places": (_mm(lambda s: [replace(s, args=s.args[::-1])]), "aten.mm.default"),
    "another layout": (_out(layout=Layout.replicated((8, 8))), "makes pieces over data tensor of pieces over nothing"),
    "another dtype": (_out(dtype=torch.float64), "makes torch.float32, %.* is torch.float64"),
    "a slice that is too long": (_other_number, "narrow"),
    "a sum that stays pending": (_still_pending, "leaves pending over"),
    "a sum over other axes": (
        _collective(_settles, axes=lambda c: tuple(Axis(OTHER[a.name], 2) for a in c.axes)),
        "leaves pending over",
    ),
    "an axis that is none of the mesh's": (
        _collective(_of("all_gather"), axes=lambda c: (Axis("pod", 2),)),
        "none of the mesh's",
    ),
    "an axis twice": (_collective(_of("all_reduce"), axes=lambda c: (Axis("tensor", 2),) * 2), "over one twice"),
    "a gather of other sizes": (_told("all_gather", "sizes", _longer), "a piece has the length|makes"),
    "a gather of other sizes for the last": (_told("all_gather", "sizes", _longer_last), "a piece has the length"),
    "a gather of fewer": (_told("all_gather", "sizes", lambda x: x[:1]), "so many members"),
    "a gather along another dim": (_told("all_gather", "dim", lambda d: 1 - d), "a piece has the length|makes"),
    "a scatter of other sizes": (_told("reduce_scatter", "sizes", _longer), "the whole has the length"),
    "a scatter that gathers": (
        _collective(_of("reduce_scatter"), kind=lambda c: "all_gather"),
        "leaves pending over nothing what was pending over",
    ),
    "an exchange of other sizes": (_told("all_to_all", "split_sizes", _longer), "a piece has the length"),
    "an exchange that gets others": (_told("all_to_all", "concat_sizes", _longer), "a piece has the length|makes"),
    "a hop to nobody": (_told("ppermute", "pairs", lambda pairs: [(0, 9), *pairs[1:]]), "told to send by"),
    "two hops to one": (_told("ppermute", "pairs", lambda pairs: [(0, 0), (1, 0)]), "told to send by"),
    "kinds that travel together": (_mixed, "begins collectives of several kinds or groups together"),
    "nobody waits": (_step(Wait, lambda s: []), "is in flight"),
    "somebody waits twice": (_step(Wait, lambda s: [s, s]), "waits for what did not begin together|which is there"),
    "something else is waited for": (
        _step(Wait, lambda s: [Wait((*s.outs, replace(s.outs[0], name="x")))]),
        "waits for what did not begin together",
    ),
    "a message starts twice": (_step(Start, lambda s: [s, s]), "brings %.*, which is there"),
    "what is in flight is freed": (_freed(lambda p: p.collectives[0].source, Start), "is freed, and it is in flight"),
    "freed before it is read": (
        lambda p: _mm(lambda s: [s, Free(tuple(makes(s)))])(p),
        "which is freed",
    ),
    "freed twice": (_step(Free, lambda s: [s, s]), "is freed, and it is freed"),
    "a result is freed": (
        lambda p: replace(p, steps=(*p.steps, Free((next(p.results),)))),
        "is a result, and it is freed",
    ),
    "written over an input": (lambda p: _over(p, lambda p: p.inputs[0]), "writes over %.*, which others hold"),
    "written over what is read": (_over_what_is_read, "which was written over by"),
    "written over what is in flight": (_over_what_flies, "writes over %.*, which others hold"),
    "a sum by maxima": (_collective(_settles, reduce=lambda c: "max"), "reduces by max what is pending by sum"),
    "a sum of what is whole": (_no_longer_owed, "reduces over .* what is pending over nothing|leaves .* pending over"),
    "a sum that nothing owes": (
        lambda p: _out(layout=replace(next(v.layout for v in p.inputs), pending=(PartialSum((Axis("tensor", 2),)),)))(
            p
        ),
        "along which nothing differs|leaves pending over",
    ),
    "another reduction": (_collective(_settles, reduce=lambda c: "median"), "reduces by median, which is unknown"),
    "a kind that is none": (_collective(_of("all_gather"), kind=lambda c: "broadcast"), "is of no kind that is known"),
    "a gather that is told nothing": (_collective(_of("all_gather"), params=lambda c: {}), "KeyError of 'dim'"),
    "a gather along a dim that is none": (_told("all_gather", "dim", lambda d: 7), "IndexError of"),
    "pieces in another order": (_gathered_in_other_order, "joins pieces over data tensor in another order"),
    "a message of nothing": (lambda p: replace(p, steps=(Start(()), *p.steps)), "a message of nothing begins"),
    "a wait for nothing": (lambda p: replace(p, steps=(Wait(()), *p.steps)), "waits for what did not begin together"),
    "a message from the host's memory": (
        lambda p: p.with_vars({p.collectives[0].source: replace(p.collectives[0].source, host=True)}),
        "is of what is in the host's memory|which is in the host's memory",
    ),
    "more results than an op has": (_mm(_more_results), "makes 1 values"),
    "a copy of another dtype": (_copied(dtype=torch.int8), "copy is another tensor than %mm"),
    "a copy in the host's memory": (_copied(host=True), "copy is another tensor than %mm"),
    "two values of one name": (_out(name="x"), "%x is several values"),
    "an op that cannot write over its operand": (_mm(lambda s: [replace(s, over=(0,))]), "cannot write %mm over"),
    "an operand that is none is written over": (
        _mm(lambda s: [replace(s, over=(7,))]),
        "writes over an operand that it has not",
    ),
    "an input is given up that is none": (
        lambda p: replace(p, donated=frozenset({99})),
        "an input is given up that is none",
    ),
    "a result replaces that is none": (lambda p: replace(p, replaced={0: 99}), "a result is spoken of that is none"),
    "a copy of nothing": (
        lambda p: replace(p, steps=(Copy(replace(p.inputs[0], name="y"), replace(p.inputs[0], name="z")), *p.steps)),
        "copy reads %y, which is not made yet",
    ),
}


@pytest.mark.parametrize(("plant", "message"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found(plant: Plant, message: str) -> None:
    wrong = plant(verify(_program()))
    with pytest.raises(ProgramError, match=message):
        verify(wrong)


@pytest.mark.long
@pytest.mark.parametrize("sizes", ["even", "uneven"])
def test_what_is_planned_is_right_and_every_value_has_a_size(sizes: str) -> None:
    program = _program(sizes)
    verify(program)
    values = [v for s in program.steps for v in makes(s)]
    assert all(v.nbytes > 0 for v in values)
    assert any(v.layout is None for v in values)
    assert {s.kind for s in program.collectives} >= {"all_reduce", "all_gather", "reduce_scatter"}


def test_a_fault_of_the_last_device_is_found() -> None:
    with pytest.raises(ProgramError, match=r"on data=\d tensor=1: a piece has the length 3, and it is told 4"):
        verify(_told("all_gather", "sizes", _longer_last)(_program("uneven")))
    wrong = _told("all_gather", "sizes", lambda sizes: [sizes[0], *([Sym("at", ((Axis("data", 2),), (2, 1)))] * 3)])
    with pytest.raises(ProgramError, match=r"on data=1 tensor=0: a piece has the length 2, and it is told 1"):
        verify(wrong(_program("even")))


@pytest.mark.parametrize("name", ["a", "b", "c", "d"])
def test_every_axis_is_looked_at_from_both_ends(name: str) -> None:
    """Also where not all corners of the mesh are."""
    with Mesh(a=2, b=2, c=2, d=2):
        gathered = sl.jit(lambda x: sl.shard(x, "i j k l"), in_specs="i@a j@b k@c l@d")
        program = gathered.plan(torch.ones(3, 3, 3, 3)).compiled.program
    wrong = _collective(lambda c: c.axes[0].name == name, params=lambda c: {**c.params, "sizes": [2, 2]})
    with pytest.raises(ProgramError, match="a piece has the length 1, and it is told 2"):
        verify(wrong(program))


@pytest.mark.parametrize(
    ("kind", "factor", "axis", "message"),
    [
        ("embedding", "v", "data", r"embedding at .*test_verify.py:\d+: .*v are cut over one axis"),
        ("mm", "n", "data", "m, n are cut over one axis"),
        ("linalg_matrix_exp", "_2", "tensor", "_2 is cut, and has to be whole"),
    ],
)
def test_what_a_rule_does_not_allow_is_not_lowered(kind: str, factor: str, axis: str, message: str) -> None:
    def fn(x: Tensor, w: Tensor, table: Tensor, ids: Tensor) -> Any:
        return x @ w, torch.nn.functional.embedding(ids, table), torch.linalg.matrix_exp(w @ x)

    decided = Decisions.assignment

    def wrong(self: Decisions, op: Op) -> Any:
        return {**decided(self, op), (factor, 0): (Axis(axis, 2),)} if op.kind == kind else decided(self, op)

    args = torch.ones(8, 6), torch.ones(6, 8), torch.ones(12, 4), torch.zeros(8, dtype=torch.int64)
    step = sl.jit(fn, in_specs=("b@data _", "_ f@tensor", "_ _", "n@data"))
    with Mesh(data=2, tensor=2):
        step.plan(*args)
        with mock.patch.object(Decisions, "assignment", wrong), pytest.raises(ProgramError, match=message):
            sl.jit(fn, in_specs=("b@data _", "_ f@tensor", "_ _", "n@data")).plan(*args)


def test_all_faults_are_told_at_once() -> None:
    program = _told("all_gather", "sizes", _longer)(_out(dtype=torch.float64)(_program()))
    with pytest.raises(ProgramError) as error:
        verify(program)
    assert str(error.value).count("\n  * ") >= 2
