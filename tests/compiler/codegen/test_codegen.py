"""Generated source: names, sharing between virtual devices, literals, and locals that live no longer than needed."""

from __future__ import annotations

import ast
import keyword
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib import Mesh
from shardlib.compiler.codegen import virtual
from shardlib.compiler.codegen.codegen import Generator
from shardlib.compiler.codegen.op_callables import callable_of
from shardlib.compiler.pipeline import compile_program
from shardlib.compiler.program.buffers import read_only
from shardlib.compiler.program.steps import Compute, Program, Var, makes
from tests.validation.programs import draw
from tests.validation.programs.campaign import compiled

aten = torch.ops.aten


def program_of(
    fn: Callable[..., Any], *args: Tensor, mesh: dict[str, int], in_specs: Any = None
) -> tuple[Program, Mesh]:
    with (made := Mesh(mesh)):
        return sl.jit(fn, in_specs=in_specs).plan(*args).compiled.program, made


def drawn(seed: int) -> tuple[Program, Mesh]:
    p = draw(random.Random(seed))
    args = [x.make() for x in p.inputs]
    return program_of(compiled(p.function), *args, mesh=dict(p.mesh), in_specs=tuple(x.spec for x in p.inputs))


def names(node: ast.AST, kind: type) -> list[str]:
    return [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, kind)]


@pytest.mark.long
@pytest.mark.sampled(13)
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("seed", range(15))
def test_locals_are_dropped_at_their_last_use(seed: int, share: bool) -> None:
    """Nothing is read before it is written or after it is dropped, and at the end only what is returned is there."""
    program, mesh = drawn(seed)
    source = virtual.source(program, mesh, share=share)
    (function,) = ast.parse(source.text).body
    assert isinstance(function, ast.FunctionDef)
    alive: set[str] = {"pieces", "leaves"}
    given: set[str] = set()
    written: set[str] = set()
    for statement in function.body:
        known = alive | set(source.namespace)
        assert known.issuperset(names(statement, ast.Load)), ast.unparse(statement)
        alive -= set(names(statement, ast.Del))
        stored = set(names(statement, ast.Store)) - {"_"}
        assert not stored & written, f"{stored & written} are written twice"
        alive |= stored
        written |= stored
        if {"pieces", "leaves"} & set(names(statement, ast.Load)):
            given |= stored
    ending = function.body[-1]
    assert isinstance(ending, ast.Return)
    kept = set(names(ending, ast.Load))
    assert alive - kept <= {"pieces", "leaves"} | given, "only results are left"


@pytest.mark.parametrize("name", ["class", "1x", "a.b", "pieces", "program", "x y", "é", "add", "_"])
def test_names_are_identifiers(name: str) -> None:
    x, y = torch.randn(3), torch.randn(3)
    program, mesh = program_of(lambda x, y: x + y, x, y, mesh={"a": 2})
    values = (*program.inputs, *(out for step in program.steps for out in makes(step)))
    program = program.with_vars({var: replace(var, name=name) for var in values})
    g = Generator(program, mesh.all_coords())
    found = [g.name(var, {"a": 0}) for var in program.inputs]
    assert len(set(found)) == 2
    assert all(
        n.isidentifier() and not keyword.iskeyword(n) and n not in ("pieces", "leaves", "program") for n in found
    )
    (result,) = virtual.load(program, mesh)([[x] * 2, [y] * 2])
    assert torch.equal(result[0], x + y)


def test_devices_share_what_is_the_same() -> None:
    """x is cut over a: of 4 devices 2 hold the same; w is whole: what is made of it alone is made once."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.sin(x) * torch.cos(w)

    program, mesh = program_of(fn, torch.randn(4), torch.randn(1), mesh={"a": 2, "b": 2}, in_specs=("_@a", "_"))
    counts = {share: virtual.source(program, mesh, share=share).text for share in (True, False)}
    for share, expected in ((True, (2, 1)), (False, (4, 4))):
        text = counts[share]
        assert tuple(len(re.findall(rf"= {name}\w*\(", text)) for name in ("sin", "cos")) == expected, text


@pytest.mark.parametrize(
    "value", [0, -3, True, None, 1.5, "tanh", float("inf"), float("nan"), torch.float64, [1, [2, None]]], ids=str
)
def test_literals(value: Any) -> None:
    program = Program(Mesh(a=2))
    g = Generator(program, program.mesh.all_coords())
    again = eval(g.literal(value, {"a": 0}), g.namespace)
    assert again == value or again != again


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.index.Tensor, (torch.randn(3, 4), [None, torch.tensor([1, 2])])),
        (aten.index_put.default, (torch.zeros(3, 4), [None, torch.tensor([1, 2])], torch.ones(3, 2))),
        (aten.view.default, (torch.randn(6, 4).t(), [24])),
        (aten.add.Tensor, (torch.randn(3), torch.randn(3))),
        (aten.mm.default, (torch.randn(3, 2), torch.randn(2, 3))),
        (aten.sum.dim_IntList, (torch.randn(3, 2), [0], True)),
        (aten.split_with_sizes.default, (torch.randn(5), [2, 3])),
        (aten.new_zeros.default, (torch.randn(5), [2, 3])),
        (aten.expand.default, (torch.randn(1, 5), [4, -1])),
        (aten.native_layer_norm.default, (torch.randn(2, 3), [3], None, None, 1e-5)),
        (aten.where.self, (torch.randn(3) > 0, torch.randn(3), torch.randn(3))),
        (aten.scalar_tensor.default, (2.0,)),
        (aten.slice.Tensor, (torch.randn(5), 0, 1, 3)),
        (aten.binary_cross_entropy_with_logits.default, (torch.randn(3, 2), torch.rand(3, 2))),
        (aten.view.dtype, (torch.randn(3), torch.int32)),
    ],
    ids=lambda x: str(x) if not isinstance(x, tuple) else "",
)
def test_callables_are_the_op(target: Any, args: Any) -> None:
    reference = args if target is not aten.view.default else (args[0].contiguous(), args[1])
    expected, found = target(*reference), callable_of(target)(*args)
    for e, f in zip(*((r if isinstance(r, tuple | list) else [r]) for r in (expected, found)), strict=True):
        assert torch.equal(e, f)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("run", [lambda fn: fn, sl.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("spec", ["b@data t v", "b t v@tensor", "b@data t v@tensor"])
def test_kernels_get_memory_in_order_where_they_want_it(spec: str, run: Any) -> None:
    x, classes = torch.randn(4, 5, 12, dtype=torch.float64, requires_grad=True), torch.arange(20).view(4, 5) % 12

    def loss(x: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(x.transpose(1, 2), classes)

    loss(x).backward()
    with Mesh(data=2, tensor=2):
        placed = sl.shard(x.detach(), spec).requires_grad_()
        run(loss)(placed).backward()
    assert x.grad is not None
    torch.testing.assert_close(placed.grad.full_tensor(), x.grad)


def test_results_that_nobody_reads_have_no_name() -> None:
    x = torch.randn(4, 4)
    program, mesh = program_of(lambda x: x.max(0).values, x, mesh={"a": 2})
    (step,) = (s for s in program.steps if isinstance(s, Compute))
    text = virtual.source(program, mesh).text
    assert len([o for o in step.outs if o is not None]) == 2
    assert re.search(r"del .*max\w*_1", text), text


def test_captured_tensors_are_bound_once() -> None:
    table = torch.arange(4.0)
    with Mesh(a=2) as mesh:  # without the state of a call, which would make it an input
        program = compile_program(lambda x: x * table, (torch.ones(4),), {}, mesh, in_specs=("_",)).program
    source = virtual.source(program, mesh)
    assert sum(v is table or (isinstance(v, Tensor) and torch.equal(v, table)) for v in source.namespace.values()) == 1
    (result,) = virtual.load(program, mesh)([[torch.ones(4)] * 2])
    assert torch.equal(result[0], table)


def test_each_unshared_device_has_memory_of_its_own() -> None:
    """What a collective gives to all is the same tensor, unless every device shall be on its own."""
    program, mesh = program_of(lambda x: x.sum(0), torch.ones(4, 3), mesh={"a": 2}, in_specs=("_@a _",))
    out = program.outputs[0]
    assert isinstance(out, Var)
    pieces = [torch.ones(2, 3), torch.ones(2, 3)]
    for share, apart in ((True, False), (False, True)):
        (one, two) = virtual.load(program, mesh, share=share)([pieces])[0]
        assert (one.data_ptr() != two.data_ptr()) == (apart or len(out.layout.axes if out.layout else ()) > 0)


def _whole(x: Tensor) -> Tensor:
    return sl.shard(x, "_ _")


@torch.library.custom_op("codegen_test::note", mutates_args=())
def note(x: Tensor) -> None:
    """An op that may keep what it is given."""


note.register_fake(lambda x: None)


def _noted(x: Tensor) -> Tensor:
    note(y := _whole(x))
    return y @ x.t()


@pytest.mark.parametrize(
    ("fn", "shared"),
    [
        (lambda x: _whole(x) @ x.t(), True),
        (lambda x: (_whole(x).t().exp() @ x, x.sum()), True),
        (lambda x: _whole(x), False),  # a result
        (lambda x: (_whole(x).t()[1:], x), False),  # what shows it is one
        (lambda x: (_whole(x)[0].sort()[0], torch.exp(_whole(x)[0]).sort()[0]), True),
        (lambda x: (_whole(x).sort()[0], torch.exp(_whole(x)).sort()[0]), False),  # written over
        (lambda x: torch.exp(_whole(x)), True),
        (_noted, False),
    ],
)
def test_who_may_read_what_is_gathered_with_others(fn: Callable[..., Any], shared: bool) -> None:
    program, _ = program_of(fn, torch.randn(4, 4), mesh={"data": 2}, in_specs=("_ _@data",))
    gathers = {c.out for c in program.collectives if c.kind == "all_gather"}
    assert gathers
    assert read_only(program) == (gathers if shared else set())
