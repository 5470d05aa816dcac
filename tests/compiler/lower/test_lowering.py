"""Lowering: integers that differ by device, local slices and groups, and what a lowered program must not do."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib import Mesh, shard
from shardlib.compiler.codegen import virtual
from shardlib.compiler.lower.builder import Builder
from shardlib.compiler.lower.emit_reshard import Mover
from shardlib.compiler.plan.plan import Plan
from shardlib.compiler.program.steps import Compute, Start, Var, makes
from shardlib.compiler.program.sym_int import Sym, local_size, local_value, of_member, offset, parse, product, tabulate
from shardlib.compiler.program.text import parse as parse_program
from shardlib.compiler.program.text import show
from shardlib.compiler.program.verify import verify
from shardlib.sharding.chunks import ShardSizes, shard_range
from shardlib.sharding.layout import Factor, Layout
from shardlib.sharding.mesh.axis import Axis, member_coords
from tests.validation.programs import draw
from tests.validation.programs.campaign import compiled

pytestmark = pytest.mark.usefixtures("strict")

A, B = Axis("a", 4), Axis("b", 3)
COORDS = [{"a": i, "b": j} for i in range(4) for j in range(3)]

# Sym ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["+", "-", "*", "//"])
@pytest.mark.parametrize("other", [2, 5, local_size(7, [B]), offset(9, [A, B])], ids=str)
def test_arithmetic_is_that_of_ints(op: str, other: Any) -> None:
    one = local_size(10, [A])
    assert isinstance(one, Sym)
    f: Callable[[Any, Any], Any] = eval(f"lambda x, y: x {op} y")
    for c in COORDS:
        y = other.at(c) if isinstance(other, Sym) else other
        if op == "//" and y == 0:
            continue
        assert f(one, other).at(c) == f(one.at(c), y)
        if op != "//":
            assert f(3, one).at(c) == f(3, one.at(c))


def test_a_sym_knows_its_axes() -> None:
    x, y = local_size(10, [A]), local_size(7, [B])
    assert isinstance(x, Sym)
    assert isinstance(y, Sym)
    assert (x.axes, (x * y + 1).axes) == (frozenset([A]), frozenset([A, B]))
    assert [x.eq(3).at(c) for c in COORDS[::3]] == [1, 1, 1, 0]
    assert str(x * 2 - y) == "((size(10@a) * 2) - size(7@b))"
    both = [tabulate(f, [A, B]) for f in (lambda c: c["a"] // 2, lambda c: c["b"], lambda c: c["a"] * c["b"])]
    assert [n.axes for n in both] == [{A}, {B}, {A, B}]
    assert [n.at({"a": 3, "b": 2}) for n in both] == [1, 2, 6]


MESH = {"a": 4, "b": 3}
POSITION = Sym("position", ((B, A), 0))
SYMS = [
    local_size(10, [A]),
    offset(10, A.primes()[1:]) * 2 + 1,
    POSITION.eq(0),
    3 - offset(9, [B, A]) // 2,
    local_size(ShardSizes((5, 0, 4, 1), [A]), [A]),
    tabulate(lambda c: c["b"] - c["a"] % 2, [B, A.primes()[1]]),
    of_member(POSITION, [A], 2),
]


@pytest.mark.parametrize("sym", SYMS, ids=str)
def test_a_sym_is_read_as_it_prints(sym: Any) -> None:
    assert isinstance(sym, Sym)
    assert parse(str(sym), MESH) == sym


@pytest.mark.parametrize("text", ["", "size(10)", "size(10@a", "(1 + 2", "[1 2]", "a", "1 2", "(1 / 2)", "size(x@a)"])
def test_what_is_no_sym_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse(text, MESH)


def test_a_table_covers_parts_of_axes_and_members_see_each_other() -> None:
    rank = tabulate(lambda c: 10 * c["a"] + c["b"], [B, A])
    for c in COORDS:
        assert rank.at(c) == 10 * c["a"] + c["b"]
        for i in range(4):
            assert local_value(of_member(rank, [A], i), c) == 10 * i + c["b"]
    assert tabulate(lambda c: c["a"] * 0 + 7, [A]) == 7
    assert of_member(tabulate(lambda c: c["a"], [A]), [A], 3) == 3


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 8, 10, 12])
@pytest.mark.parametrize(
    "axes", [(), (A,), (B,), (A, B), (B, A), A.primes(), A.primes()[:1], (A.primes()[1], B)], ids=str
)
def test_sizes_and_offsets(size: int, axes: tuple[Axis, ...]) -> None:
    n, start = local_size(size, axes), offset(size, axes)
    for c in COORDS:
        low, high = shard_range(size, Axis.merge(axes), c)
        assert (n.at(c) if isinstance(n, Sym) else n) == high - low
        assert (start.at(c) if isinstance(start, Sym) else start) == low
    assert isinstance(n, int) == (size % (Factor(size, axes).ways) == 0), "an int where all devices hold the same"


def test_product() -> None:
    x = local_size(5, [A])
    assert product([2, 3]) == 6
    assert product([]) == 1
    assert [product([2, x, 3]).at(c) for c in COORDS[::3]] == [12, 12, 6, 0]  # type: ignore[union-attr]


# Mover ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "group", [(A,), (B,), (A, B), (B, A), A.primes()[:1], A.primes()[1:], (A.primes()[1], B)], ids=str
)
def test_members_of_a_group(group: tuple[Axis, ...]) -> None:
    """Every device is in one group, at the place that its coordinates along the group's axes say, major first."""
    n = Factor(1, group).ways
    for c in COORDS:
        members = [member_coords(c, group, i) for i in range(n)]
        places = list(itertools.product(*(range(a.size) for a in group)))
        assert [tuple(a.coord(m) for a in group) for m in members] == places
        assert c in members
        assert all(member_coords(m, group, 0) == members[0] for m in members)


@pytest.mark.parametrize(
    "dims",
    [
        (((5, (A,)),), ((4, (B,)),)),
        (((2, A.primes()[:1]), (3, (B,)), (4, A.primes()[1:])),),
        (((3, ()), (5, (A,)), (2, ())), ((7, (B,)),)),
        (((2, ()), (4, (B, A))), ((1, ()),)),
    ],
    ids=str,
)
def test_slice_all(dims: Any) -> None:
    mesh = Mesh(a=4, b=3)
    layout = Layout(tuple(tuple(Factor(n, Axis.merge(axes)) for n, axes in dim) for dim in dims))
    whole = torch.arange(Layout.replicated(layout.shape).max_local_numel()).view(layout.shape)
    builder = Builder(mesh)
    builder.inputs.append(Var("x", Layout.replicated(layout.shape), whole.dtype))
    builder.outputs.append(Var("y", None, whole.dtype))
    Mover(builder).slice_all(builder.inputs[0], dims, builder.outputs[0])
    program = builder.finish()
    for share in (True, False):
        (locals_,) = virtual.load(program, mesh, share=share)([[whole] * mesh.size])
        for c, local in zip(mesh.all_coords(), locals_, strict=True):
            assert torch.equal(local, layout.scatter(whole, c)), c


# Programs -------------------------------------------------------------------------------------------------------------


def planned(
    fn: Callable[..., Any], *shapes: tuple[int, ...], mesh: dict[str, int], in_specs: Any, **options: Any
) -> Plan:
    """The plan of `fn` on tensors of `shapes`, after `check` has run it."""
    args = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    with Mesh(mesh):
        sl.check(fn, *args, in_specs=in_specs, rtol=1e-10, **options)
        return sl.jit(fn, in_specs=in_specs, **options).plan(*args)


def kinds(plan: Plan) -> list[str]:
    return [f"{c.kind} {' '.join(c.axes)}" for c in plan.collectives]


def test_pending_sums_are_added_first() -> None:
    def fn(x: Tensor, w: Tensor, y: Tensor, v: Tensor) -> Tensor:
        return x @ w + y @ v

    specs = ("_ k@a", "k@a _", "_ k@a", "k@a _")
    shapes = [(6, 4), (4, 8), (6, 8), (8, 8)]
    plan = planned(fn, *shapes, mesh={"a": 2}, in_specs=specs, out_specs="_ _")
    assert kinds(plan) == ["all_reduce a"]
    plan = planned(fn, *shapes, mesh={"a": 2}, in_specs=specs, out_specs="_@a _")
    assert kinds(plan) == ["reduce_scatter a"]


def test_a_pending_sum_passes_what_is_linear_and_stops_before_what_is_not() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh((-(x @ w)).t() * 2)

    plan = planned(fn, (6, 4), (4, 8), mesh={"a": 2}, in_specs=("_ k@a", "k@a _"), out_specs="_ _")
    assert kinds(plan) == ["all_reduce a"]
    steps = plan.compiled.program.steps
    names = [s.first.kind if isinstance(s, Start) else str(getattr(s, "target", "")) for s in steps]
    assert names.index("all_reduce") > names.index("aten.neg.default")
    assert names.index("all_reduce") < names.index("aten.tanh.default")


PLACES = torch.tensor([3, 0, 3, 2, 5, 1, 1, 4])
ONTO: dict[str, Callable[..., Tensor]] = {
    "addmm": lambda x, w: torch.addmm(x @ w, x, w, beta=3),
    "addmm, half": lambda x, w: torch.addmm(x @ w, x, w, beta=0.5, alpha=2).addmm(x, w),
    "addmv": lambda x, w: torch.addmv((x @ w)[:, 0], x, w[:, 1]),
    "addbmm": lambda x, w: torch.addbmm(x @ w, torch.stack([x, -x]), torch.stack([w, w * w])),
    "baddbmm": lambda x, w: torch.baddbmm((x @ w)[None], x[None], w[None])[0],
    "index_add": lambda x, w: w[0].index_add(0, PLACES, x[0]).index_add(0, PLACES.flip(0), x[1]),
    "scatter_add": lambda x, w: (x @ w)[0].scatter_add(0, PLACES, x[0]),
    "index_put": lambda x, w: (x @ w)[0].index_put((PLACES,), x[0], accumulate=True),
}


@pytest.mark.parametrize("fn", ONTO.values(), ids=list(ONTO))
def test_a_sum_is_added_onto_one_over_the_same_axes(fn: Callable[..., Tensor]) -> None:
    specs = {"in_specs": ("_ k@(a b)", "k@(a b) _"), "out_specs": "..."}
    assert kinds(planned(fn, (6, 8), (8, 8), mesh={"a": 2, "b": 2}, **specs)) == ["all_reduce a b"]


@pytest.mark.parametrize("cut", ["b", "(b a)"])
def test_a_sum_over_other_axes_is_added_up_before(cut: str) -> None:
    def fn(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return (x @ w).addmm(y, y)

    specs = "_ k@a", "k@a _", f"_ j@{cut}"
    plan = planned(fn, (6, 8), (8, 6), (6, 6), mesh={"a": 2, "b": 2}, in_specs=specs, out_specs="...")
    assert kinds(plan)[0] == "all_reduce a"


def test_a_sum_that_others_read_is_added_up_once() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        return y.addmm(x, w), y.sin()

    plan = planned(fn, (6, 8), (8, 8), mesh={"a": 2}, in_specs=("_ k@a", "k@a _"), out_specs="...")
    assert kinds(plan) == ["all_reduce a"] * 2


ZEROS, INF = torch.tensor([0.0, 2.0, 0.0, 1.0], dtype=torch.float64), float("inf")
DIVIDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "div": lambda x, w: (x.sum(0) / ZEROS).sum() + w.sum(),
    "div, one by one": lambda x, w: x.sum(0) / ZEROS + w.sum(0),
    "div, by 0": lambda x, w: (x.sum(0) / 0).amax(0) + w.sum(),
    "addcdiv": lambda x, w: torch.addcdiv(w.sum(0), x.sum(0), ZEROS).sum(),
    "mul, by inf": lambda x, w: (x.sum(0) * INF).sum() + w.sum(),
    "gradient of a root": lambda x, w: sl.grad(lambda z: (z.sqrt() @ x.mT).sum())(ZEROS.abs()).sum(),
    "looked up": lambda x, w: (w[torch.tensor([0, 5, 2])] / ZEROS[:3, None]).sum(0),
}


@pytest.mark.parametrize("fn", DIVIDED.values(), ids=list(DIVIDED))
def test_what_is_divided_by_zero_is_infinite(fn: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Not NaN, though a device that has nothing to add would make 0 / 0."""
    x, w = torch.zeros(8, 4, dtype=torch.float64), torch.arange(1.0, 33, dtype=torch.float64).view(8, 4)
    x[1] = 1
    with Mesh(a=4):
        found = sl.jit(fn, in_specs="b@a _")(x, w).full_tensor()
    torch.testing.assert_close(found, fn(x, w), equal_nan=True)


BIG = torch.tensor([10**9 + 1, 3, -(10**9), 5])
IDS = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 5, 5, 5, 6])
HALVES = torch.tensor([[50.0], [50.0], [-48.0], [-50.0]]).half()
TERMS = torch.tensor([[1.0], [1], [1], [1]]).half()
OTHER_DTYPES: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "whole numbers, divided": (lambda x: x.sum() / 2, BIG),
    "whole numbers, times a fraction": (lambda x: x.sum() * 0.5, BIG),
    "whole numbers among others": (lambda x: torch.cat([x.sum()[None], torch.zeros(1)]), BIG),
    "whole numbers, added to others": (lambda x: torch.zeros(()) + x.sum(), BIG),
    "products of whole numbers": (lambda x: (x @ torch.ones(4, 2, dtype=torch.long)) * 0.5, BIG),
    "whole numbers that wrap": (lambda x: x.sum(dtype=torch.int32) * 0.5, torch.full((8,), 2**30, dtype=torch.int32)),
    "narrow whole numbers that wrap": (lambda x: x[:, None].repeat(1, 16).sum(0, dtype=torch.uint8).sum(), IDS + 50),
    "float64, times float32": (lambda x: x.sum() * torch.ones(1), BIG.double()),
    "float32, times float16": (lambda x: x.sum() * torch.ones(1).half(), torch.tensor([100000.0, 3, -100000, 5])),
    "truth values, counted": (lambda x: (x[:, None] == torch.arange(9)).sum(0, dtype=torch.bool).sum(), IDS),
    "truth values, written": (
        lambda x: torch.zeros(9, dtype=torch.bool).index_put((x,), torch.tensor(True), accumulate=True).sum(),
        IDS,
    ),
    "truth values, times numbers": (
        lambda x: (x[:, None] == torch.arange(9)).sum(0, dtype=torch.bool) * torch.ones(9, dtype=torch.int8), IDS,
    ),
    "float16, times a number": (lambda x: x.sum(0) * 2000, HALVES),
    "float16, divided": (lambda x: x.sum(0) / 0.0005, HALVES),
    "float16, times a tensor": (lambda x: x.sum(0) * torch.full((1,), 2000).half(), HALVES),
    "float16, added onto": (lambda x: torch.addmm(x.mT @ TERMS, x.mT, TERMS, beta=4), 800 * HALVES),
}  # fmt: skip


@pytest.mark.parametrize(("fn", "x"), OTHER_DTYPES.values(), ids=list(OTHER_DTYPES))
def test_a_sum_passes_no_dtype_that_cannot_hold_it(fn: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with Mesh(a=4):
        found = sl.jit(fn, in_specs="b@a" + " _" * (x.dim() - 1))(x).full_tensor()
    torch.testing.assert_close(found, fn(x))


def test_a_mean_of_whole_numbers_is_none_of_terms() -> None:
    numbers = torch.Generator().manual_seed(0)
    a, b, c, d = (torch.randint(-9, 9, (6, 6), generator=numbers) for _ in range(4))
    fn = lambda a, b, c, d: (a @ b).scatter_reduce(0, a.abs().remainder(6), c @ d, "mean")
    with Mesh(k=3):
        found = sl.jit(fn, in_specs=("_ k@k", "k@k _", "_ q@k", "q@k _"))(a, b, c, d).full_tensor()
    assert torch.equal(found, fn(a, b, c, d))


def test_two_pending_operands_take_no_axis_twice() -> None:
    places = torch.tensor([0, 1, 2, 3, 0, 1]), torch.tensor([0, 1, 2, 3, 4, 0])
    fn = lambda a, b, v: (a @ b).index_put(places, v.sum(0), accumulate=True)
    a, b, v = torch.arange(16.0).view(4, 4), torch.arange(20.0).view(4, 5), torch.ones(5, 6)
    with Mesh(d=2, t=2):
        found = sl.jit(fn, in_specs=("_ k@t", "k@t n@d", "q@t e@d"))(a, b, v).full_tensor()
    assert torch.equal(found, fn(a, b, v))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16])
def test_numbers_without_arithmetic_are_cast_and_looked_up(dtype: torch.dtype) -> None:
    x = torch.arange(32.0).view(8, 4)
    fn = lambda x: x.to(dtype)[torch.tensor([1, 5])].float()
    with Mesh(a=4):
        assert torch.equal(sl.jit(fn, in_specs="b@a _")(x).full_tensor(), fn(x))
        assert torch.equal(fn(sl.shard(x, "b@a _")).full_tensor(), fn(x))


def test_a_sum_passes_division_by_a_number() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return x.sum(0) / 3 + y.sum(0) / 5

    assert kinds(planned(fn, (8, 4), (8, 4), mesh={"a": 2}, in_specs="b@a _", out_specs="_")) == ["all_reduce a"]


def test_a_value_is_gathered_once_for_all_its_views() -> None:
    def fn(w: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x @ w, y @ w.t(), x @ w.reshape(4, 2, 4).flatten(1)

    plan = planned(fn, (4, 8), (6, 4), (6, 8), mesh={"a": 2}, in_specs=("_@a _", "_ _", "_ _"), out_specs=("_ _",) * 3)
    assert kinds(plan).count("all_gather a") <= 1


def test_constants_are_made_in_pieces() -> None:
    """Neither an arange nor zeros are made whole where only a shard is read, and none is sent."""

    def fn(x: Tensor) -> Tensor:
        return x + torch.zeros(8, 6, dtype=torch.float64) + torch.ones_like(x)

    plan = planned(fn, (8, 6), mesh={"a": 4}, in_specs=("_@a _",))
    assert not plan.collectives
    made = [s for s in plan.compiled.program.steps if isinstance(s, Compute) and "zeros" in str(s.target)]
    assert all(out.layout is not None and out.layout.max_local_numel() == 12 for s in made for out in s.outs if out)


@torch.library.custom_op("test_lower::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    return x.flip(0).clone()


turned.register_fake(torch.empty_like)

MADE_OF: dict[str, Callable[[Tensor], Tensor]] = {
    "an op without a rule": turned,
    "flip": lambda c: c.flip(0),
    "roll": lambda c: c.roll(3),
    "cumsum": lambda c: c.cumsum(0),
    "softmax": lambda c: c.softmax(0),
    "sort": lambda c: c.sort(descending=True)[0],
}


@pytest.mark.parametrize("made", MADE_OF.values(), ids=list(MADE_OF))
def test_nothing_is_sent_to_make_a_constant(made: Callable[[Tensor], Tensor]) -> None:
    table = torch.randn(8, dtype=torch.float64)
    plan = planned(lambda x: x * made(table), (8,), mesh={"a": 4}, in_specs="n@a")
    assert not plan.collectives


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "new_full": lambda x: x.new_full((3,), 2.0),
    "new_zeros": lambda x: x.new_zeros(x.shape),
    "new_empty": lambda x: x.new_empty((2, 5)).fill_(1),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
@pytest.mark.parametrize("reduced", [lambda x: x.sum(0), lambda x: x.amax(0)], ids=["sum", "max"])
def test_what_takes_a_form_alone_waits_for_no_sum(
    form: Callable[[Tensor], Tensor], reduced: Callable[[Tensor], Tensor]
) -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    with Mesh(a=2):
        step = sl.jit(lambda x: form(reduced(x)), in_specs="_@a _")
        assert not step.plan(x).collectives
        assert torch.equal(step(x).full_tensor(), form(reduced(x)))


def test_an_annotation_may_have_other_factors_than_the_value() -> None:
    """A dim of 10 as one factor and as (5 2) have no cut in common: between them the dim is whole."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = shard(x * 2, "_ _@a")
        return y, y

    plan = planned(fn, (10, 10), mesh={"a": 2}, in_specs=("_ (_=5 _=2@a)",), out_specs=("_ (_=5@a _=2)", "_ _@a"))
    assert [str(plan.layout_of(f"result[{i}]")) for i in range(2)] == ["10, (5@a 2)", "10, 10@a"]


def test_one_input_in_two_output_layouts() -> None:
    plan = planned(lambda x: (x, x), (6, 8), mesh={"a": 2}, in_specs=("_@a _",), out_specs=("_ _@a", "(_=2 _=3@a) _"))
    assert [str(plan.layout_of(f"result[{i}]")) for i in range(2)] == ["6, 8@a", "(2 3@a), 8"]


@pytest.mark.parametrize("size", [3, 6])
def test_a_dim_smaller_than_its_axis_uses_whole_primes(size: int) -> None:
    """3 on an axis of 6 = 2 x 3 is cut by the part of 3, whatever else is cut by the part of 2."""
    plan = planned(lambda x, y: x + y.sum(1), (size, 2), (size, 4, 2), mesh={"a": 6}, in_specs=("_@a _", "_ _ _@a"))
    assert str(plan.layout_of("x")) == {3: "3@a:(2)3, 2", 6: "6@a, 2"}[size]
    assert str(plan.layout_of("y")) == f"{size}, 4, 2@a:(1)2"


@pytest.mark.long
@pytest.mark.sampled(9)
@pytest.mark.parametrize("seed", range(25))
def test_what_is_lowered_is_right_and_read_as_it_prints(seed: int) -> None:
    p = draw(random.Random(seed))
    with Mesh(dict(p.mesh)):
        plan = sl.jit(compiled(p.function), in_specs=tuple(x.spec for x in p.inputs)).plan(
            *(x.make() for x in p.inputs)
        )
    program = plan.compiled.program
    verify(program)
    assert all(a.size > 1 for c in program.collectives for a in c.axes)
    assert all(c.reason for c in program.collectives)
    values = [*program.inputs, *(v for step in program.steps for v in makes(step))]
    assert len({v.name for v in values}) == len(values), "every value has a name of its own"
    text = show(program)
    assert show(parse_program(text)) == text


@pytest.mark.parametrize("sizes", [(2, 3), (4, 3), (2, 2, 5), (1, 5), (3, 4)], ids=str)
def test_the_short_form_of_a_layout_holds_the_same(sizes: tuple[int, ...]) -> None:
    """Parts of one axis on neighboring leaves melt only where that cuts at the same places."""
    (a0, a1), whole = A.primes(), torch.arange(Layout.replicated(sizes).max_local_numel())
    for where in itertools.product(range(-1, len(sizes)), repeat=3):
        cuts = [tuple(x for x, w in zip((a0, B, a1), where, strict=True) if w == i) for i in range(len(sizes))]
        layout = Layout((tuple(Factor(n, Axis.merge(axes)) for n, axes in zip(sizes, cuts, strict=True)),))
        for c in COORDS:
            assert torch.equal(layout.scatter(whole, c), layout.canonical.scatter(whole, c)), (str(layout), c)


def test_constants_with_nothing_in_them() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        rows = torch.arange(8.0).view(2, 4)
        return x * 2, rows[:, 4:], torch.arange(4)[4:], torch.cat([rows[:, :0], rows[:, 1:]], 1)

    def loss(x: Tensor) -> Tensor:
        return torch.cat([x, x[:, :0]], 1).square().sum()

    x = torch.randn(4, 4)
    with Mesh(data=2):
        for spec in (None, "a@data b", "a b@data"):
            got = sl.jit(fn, in_specs=(spec,))(x)
            assert all(torch.equal(a.full_tensor(), b) for a, b in zip(got, fn(x), strict=True))
            grad = sl.jit(torch.func.grad(loss), in_specs=(spec,))(x)
            assert torch.equal(grad.full_tensor(), torch.func.grad(loss)(x))


@pytest.mark.long
def test_a_sum_of_nothing_and_one_beside_a_long_chain() -> None:
    def beside(a: Tensor, w: Tensor, state: Tensor) -> Tensor:
        for _ in range(600):
            state = state * 0.5 + state
        return ((a @ w) * 2.0 + state).relu()

    with Mesh(x=4):
        step = sl.jit(lambda a, w: ((a @ w) * 2.0).relu(), in_specs=("n k@x", "k@x d"), out_specs="n d@x")
        assert step(torch.zeros(0, 8), torch.ones(8, 4)).shape == (0, 4)
        args = torch.ones(8, 8), torch.ones(8, 4), torch.zeros(8, 4)
        found = sl.jit(beside, in_specs=("n k@x", "k@x d", None), out_specs="n d@x")(*args)
    assert torch.equal(found.full_tensor(), torch.full((8, 4), 16.0))
