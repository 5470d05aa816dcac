"""Rows in parts, worked on in turn: what can be, that values and what is sent stay, and when a machine asks for it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

import shardlib as sl
from shardlib.compiler import passes
from shardlib.compiler.codegen.op_callables import callable_of
from shardlib.compiler.passes.comm.row_overlap import _Writer
from shardlib.compiler.passes.comm.row_splits import Cut, Cutter
from shardlib.compiler.program.abstract_device import Device
from shardlib.compiler.program.steps import Compute, Program, Start, Var, Wait, makes
from shardlib.compiler.program.text import parse, show
from shardlib.sharding.layout import Layout
from tests.helpers.prover import Sample, call_of, here, mapped, same, target_of
from tests.helpers.ranks import run_ranks
from tests.models import w1, w1_sharded
from tests.rules.rule_samples import SAMPLES
from tests.validation.benchmarks.schedule import BIG, unscheduled, w1_plan

TINY = w1.Config(layers=2, d=32, heads=4, kv_heads=2, ff=48, vocab=64, batch=16, seq=8, dtype=torch.float64)


def in_parts(program: Program) -> int:
    """How many messages are of a part."""
    return sum(c.out.part is not None for c in program.collectives)


def planned(fn: Callable[..., Any], args: dict[str, Any], parts: int, axes: dict[str, int], **kept: Any) -> Any:
    """What a function of placed arguments makes, all at home, and its program."""
    with sl.Mesh(**axes):
        step = sl.jit(fn, schedule=sl.Schedule(parts=parts), **kept)
        given = [sl.shard(x, spec) for x, spec in args.values()]
        plan = step.plan(*given)
        out = [x.full_tensor() for x in pytree.tree_leaves(step(*given))]
        return out, plan


# What can be in parts ------------------------------------------------------------------------------------------------

ROWS = torch.randn(8, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
WIDE = torch.randn(16, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
BACK = torch.randn(32, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
NAMED = torch.arange(8 * 6).reshape(8, 6) % 7
TABLE = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
MEGATRON = {"x": (ROWS, "b@data _ _"), "w": (WIDE, "_ f@tensor"), "v": (BACK, "f@tensor _")}


def mlp(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    y = x + (x @ w).relu() @ v
    return y + (y @ w).relu() @ v


def loss_and_gradients(x: Tensor, w: Tensor, v: Tensor) -> Any:
    w, v = w.detach().requires_grad_(), v.detach().requires_grad_()
    loss = mlp(x, w, v).square().mean()
    return loss, *torch.autograd.grad(loss, (w, v))


def attended(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    q = (x @ w).unflatten(-1, (4, 8)).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(q, q.tanh(), q.exp(), is_causal=True)
    return x + mixed.transpose(1, 2).flatten(2) @ v


def flat_rows(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return (F.layer_norm((x.flatten(0, 1) @ w) @ v, (16,)) * 2).unflatten(0, (8, 6))


def classified(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    hidden = (x @ w).tanh() @ v
    return F.cross_entropy(hidden.flatten(0, 1), NAMED.flatten(), ignore_index=2)


def scattered(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Rows of all devices are gathered, used, and given back."""
    return sl.shard((sl.shard(x, "b _ _") @ w).relu() @ v, "b@data _ _")


def softmaxed(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return ((x @ w).softmax(-1) @ v).softmax(1)


PROGRAMS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "sums of products": (mlp, MEGATRON),
    "gradients": (loss_and_gradients, MEGATRON),
    "attention": (attended, MEGATRON),
    "rows of two dims": (flat_rows, MEGATRON),
    "a loss": (classified, MEGATRON),
    "gathered rows": (scattered, MEGATRON | {"w": (WIDE, "_ f@data"), "v": (BACK, "f@data _")}),
    "a softmax over cut columns": (softmaxed, MEGATRON),
    "rows of a cut table": (
        lambda t, w, v: (F.embedding(NAMED, t) @ w).relu() @ v,
        MEGATRON | {"x": (TABLE, "v@tensor _")},
    ),
}


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_what_is_sent_are_the_same(name: str, parts: int) -> None:
    fn, args = PROGRAMS[name]
    axes = {"data": 2} if name == "gathered rows" else {"data": 1, "tensor": 2}
    with sl.no_mesh():
        want = pytree.tree_leaves(fn(*(x for x, _ in args.values())))
    (_, whole), (out, plan) = (planned(fn, args, n, axes) for n in (1, parts))
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    before, after = (Counter(c.kind for c in p.compiled.program.collectives) for p in (whole, plan))
    more = {kind: after[kind] - n for kind, n in before.items() if after[kind] > n}
    assert in_parts(plan.compiled.program) >= parts
    assert all(n % (parts - 1) == 0 for n in more.values())
    assert not in_parts(whole.compiled.program)
    assert plan.comm_bytes == pytest.approx(whole.comm_bytes)
    assert plan.flops == pytest.approx(whole.flops, rel=1e-2)


@pytest.mark.parametrize(
    ("fn", "spec"),
    [
        (lambda x, w, v: ((x @ w).relu() @ v)[:3], "b@data _ _"),  # 3 rows are in no halves
        (lambda x, w, v: ((x @ w).relu() @ v).cumsum(0).sum(), "_ _ _"),
        (lambda x, w, v: ((x @ w).relu() @ v).sort(0).values.sort(1).values.sort(2).values, "_ _ _"),
    ],
)
def test_what_sees_all_rows_is_whole(fn: Callable[..., Any], spec: str) -> None:
    """What stands in front of it may be in parts; along its own dim it is not."""
    args = MEGATRON | {"x": (ROWS, spec)}
    out, plan = planned(fn, args, 2, {"data": 1, "tensor": 2})
    torch.testing.assert_close(out, [fn(*(x for x, _ in args.values()))], rtol=1e-12, atol=1e-12)
    for step in plan.compiled.program.steps:
        if isinstance(step, Compute) and str(step.target).split(".")[1] in ("cumsum", "sort"):
            (_, d, *_) = step.args
            assert all(v.layout.shape[d] == ROWS.shape[d] for v in (*step.operands, *step.out_vars))


HEAD = """mesh data=2, tensor=2
input x: f64[8, 16]
input w: f64[16, 4]
input s: f64[8, 8]
input i: i64[8]
input even: f64[12@data, 16]
input odd: f64[7@data, 16]
"""


@pytest.mark.parametrize(
    ("step", "at", "cut", "found"),
    [
        ("y: f64[8, 4] = aten.mm.default(x, w)", "x", Cut(0), {"y": Cut(0)}),
        ("y: f64[8, 4] = aten.mm.default(x, w)", "y", Cut(1), {"w": Cut(1)}),
        ("y: f64[8, 4] = aten.mm.default(x, w)", "x", Cut(1), {"w": Cut(0)}),  # y is a sum of parts
        ("y: f64[16, 8] = aten.t.default(x)", "x", Cut(0), {"y": Cut(1)}),
        ("y: f64[2, 4, 16] = aten.reshape.default(x, [2, 4, 16])", "x", Cut(0), {"y": Cut(0)}),
        ("y: f64[2, 4, 16] = aten.reshape.default(x, [2, 4, 16])", "x", Cut(0, 2), {"y": Cut(1)}),
        ("y: f64[2, 4, 16] = aten.reshape.default(x, [2, 4, 16])", "y", Cut(1, 2), {"x": Cut(0, 4)}),
        ("y: f64[128] = aten.reshape.default(x, [128])", "x", Cut(1), {"y": Cut(0, 8)}),
        ("y: f64[8, 16] = aten.cumsum.default(x, 0)", "x", Cut(1), {"y": Cut(1)}),
        ("y: f64[8, 16] = aten.cumsum.default(x, 0)", "x", Cut(0), None),
        ("y: f64[8] = aten.amax.default(x, [1])", "x", Cut(1), None),  # no sum
        ("y: f64[12@data, 16] = aten.neg.default(even)", "even", Cut(0), {"y": Cut(0)}),
        ("y: f64[12@data, 16] = aten.neg.default(even)", "even", Cut(0, 2), None),  # a device has 6 rows
        ("y: f64[7@data, 16] = aten.neg.default(odd)", "odd", Cut(1), None),  # and here not as many as another
        ("y: f64[12@data, 16] = aten.mul.Tensor(even, size(12@data))", "even", Cut(0), {"y": Cut(0)}),
        ("y: f64[12@data, 16] = aten.narrow.default(even, 0, 0, size(12@data))", "even", Cut(1), None),
        ("y: f64[8@data, 4] = aten.slice.Tensor(w, 0, offset(8@data), 4)", "w", Cut(1), None),
        ("t: f64<4, 8> = aten.slice.Tensor(odd, 1, 0, 8)\ny: f64<4, 8> = aten.neg.default(t)", "t", Cut(0), None),
        ("y: f64[8, 8] = aten.mm.default(s, s)", "s", Cut(1), {"y": Cut(1)}),  # not along what is summed up
        ("t: f64[8, 8] = aten.t.default(s)\ny: f64[8, 8] = aten.add.Tensor(s, t)", "s", Cut(0), {"t": Cut(1)}),
        ("y: f64[8] = aten._local_scalar_dense.default(i)", "i", Cut(0), None),
        ("y: f64[8, 16] = aten.mul.Tensor(x, x)", "x", Cut(0), {"y": Cut(0)}),
        ("y: f64[8, 8] = aten.mm.default(x, t)", "x", Cut(0), {"y": Cut(0)}),  # t is taken as a whole
    ],
)
def test_where_a_cut_leads(step: str, at: str, cut: Cut, found: dict[str, Cut] | None) -> None:
    t = "t: f64[16, 8] = aten.permute.default(w, [0, 1])\n" if "t)" in step else ""
    t = t.replace("aten.permute.default(w, [0, 1])", "aten.zeros.default([16, 8], dtype=torch.float64)")
    program = parse(f"{HEAD}{t}{step}\nreturn y")
    values = {v.name: v for s in program.steps for v in makes(s)} | {v.name: v for v in program.inputs}
    region = Cutter(program, 2).region(values[at], cut)
    assert {v.name: c for v, c in region.cuts.items() if v.name != at} == (found or {})
    assert bool(region.ways) == (found is not None)


@pytest.mark.parametrize(
    ("message", "there", "back"),
    [
        ("all_reduce[data] y: f64[8, 16] = p {}", Cut(0), Cut(0)),
        ("all_gather[data] y: f64[16, 16] = x {dim: 0, sizes: [8, 8]}", Cut(0), Cut(0, 2)),
        ("all_gather[data] y: f64[8, 32] = x {dim: 1, sizes: [16, 16]}", Cut(0), Cut(0)),
        ("reduce_scatter[data] y: f64[8@data, 16] = p {dim: 0, sizes: [4, 4]}", Cut(0, 2), Cut(0)),
        ("reduce_scatter[data] y: f64[8@data, 16] = p {dim: 0, sizes: [4, 4]}", Cut(0), None),
        (
            "all_to_all[data] y: f64[8, 16] = x "
            "{split_dim: 0, split_sizes: [4, 4], concat_dim: 0, concat_sizes: [8, 8]}",
            Cut(0, 2),
            None,
        ),
        ("all_gather[data] y: f64[15, 16] = x {dim: 0, sizes: [8, 7]}", Cut(0), None),
        ("ppermute[data] y: f64[8, 16] = x {pairs: [(0, 1)], shapes: [[8, 16], [6, 16]]}", Cut(0), None),
        ("ppermute[data] y: f64[8, 16] = x {pairs: [(0, 1)]}", Cut(0), Cut(0)),
    ],
)
def test_where_a_message_leads(message: str, there: Cut, back: Cut | None) -> None:
    kind, _, rest = message.partition(" ")
    pending = "input p: f64[8, 16 ] +data\n".replace("16 ] +data", "16 +data]")
    program = parse(f"{HEAD}{pending}start {kind} {rest} 1.0 B\nwait y\nreturn y")
    (start, _) = program.steps
    assert isinstance(start, Start)
    region = Cutter(program, 2).region(start.first.source, there)
    assert region.cuts.get(start.first.out) == back


def one_op(target: Any, args: Any, kwargs: Any, results: Sequence[Any]) -> tuple[Program, list[Tensor]]:
    """One call as a program of the only device there is, and its operands."""
    tensors: list[Tensor] = []

    def var(x: Tensor, name: str) -> Var:
        return Var(name, Layout.replicated(tuple(x.shape)), x.dtype)

    def given(x: Tensor) -> Var:
        tensors.append(x)
        inputs.append(var(x, f"x{len(inputs)}"))
        return inputs[-1]

    inputs: list[Var] = []
    args, kwargs = mapped((tuple(args), dict(kwargs)), given)
    outs = tuple(var(x, f"y{i}") if isinstance(x, Tensor) else None for i, x in enumerate(results))
    step = Compute(target, args, kwargs, outs)
    return Program(sl.Mesh.abstract(x=1), (step,), tuple(inputs), outputs=step.out_vars), tensors


def run(program: Program, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Calls, one after the other."""
    env: dict[Var, Any] = dict(zip(program.inputs, tensors, strict=True))
    for step in program.steps:
        assert isinstance(step, Compute)
        args, kwargs = mapped((step.args, dict(step.kwargs)), env.__getitem__, Var)
        out = callable_of(step.target)(*args, **kwargs)
        env |= zip(step.outs, out if isinstance(out, list | tuple) else (out,), strict=False)
    return [env[v] for v in program.outputs]


@pytest.mark.parametrize("family", SAMPLES, ids=lambda g: g.__name__)
def test_every_op_in_parts(family: Callable[[], Iterator[Sample]]) -> None:
    """Every dim of every operand of every sample, in as many parts as divide it."""
    wrong = []
    for name, args, kwargs in family():
        target = target_of(name)
        _, _, results = call_of(target, args, kwargs)
        program, tensors = one_op(target, args, kwargs, results)
        if "empty" in name or not program.steps[0].is_pure:
            continue
        for v in program.inputs:
            for d, n in itertools.product(range(len(v.layout.shape)), (2, 3)):
                if v.layout.shape[d] % n == 0 < v.layout.shape[d]:
                    cutter = Cutter(program, n)
                    region = cutter.region(v, Cut(d))
                    made = _Writer(program, region, cutter).run()
                    with here(target):
                        found = run(made, tensors)
                    want = [x for x in results if isinstance(x, Tensor)]
                    if not all(same(x, y, 1e-9) for x, y in zip(found, want, strict=True)):
                        wrong.append(f"{name}, dim {d} of {v} in {n}: {show(made)}")
    assert not wrong, "\n".join([f"{len(wrong)} are wrong", *wrong[:3]])


# What is written ------------------------------------------------------------------------------------------------------


def test_a_part_computes_while_another_is_in_flight() -> None:
    _, plan = planned(mlp, MEGATRON, 2, {"data": 1, "tensor": 2})
    order = []
    for step in plan.compiled.program.steps:
        if isinstance(step, Start) and step.first.out.part:
            order.append(f"start {step.first.out.part[0]}")
        elif isinstance(step, Wait):
            order.append(f"wait {step.outs[0].part[0]}")
        elif isinstance(step, Compute) and str(step.target) in ("aten.mm.default", "aten.addmm.default"):
            (out,) = step.out_vars
            order.append(f"product {out.part[0]}")
    first, second = ["product 1", "product 1", "start 1"], ["product 2", "product 2", "start 2"]
    assert order == [*first, *second, "wait 1", *first, "wait 2", *second, "wait 1", "wait 2"]


def test_products_are_added_where_they_are_made() -> None:
    """The gradient of a weight is one product in place of the other's sum, not a third pass over memory."""
    _, plan = planned(loss_and_gradients, MEGATRON, 2, {"data": 1, "tensor": 2})
    added = [s for s in plan.compiled.program.steps if isinstance(s, Compute) and str(s.target) == "aten.addmm.default"]
    assert len(added) == 4  # of two weights that are read twice
    assert all(step.over == (0,) for step in added)


def test_a_plan_says_which_part() -> None:
    _, plan = planned(mlp, MEGATRON, 2, {"data": 1, "tensor": 2})
    text = plan.full
    for part in ("(1 of 2)", "(2 of 2)"):
        assert text.count(part) >= 2
    assert "rows in 2 parts, worked on in turn: 4 messages" in text


def test_a_program_in_parts_reads_back() -> None:
    _, plan = planned(mlp, MEGATRON, 2, {"data": 1, "tensor": 2})
    text = show(plan.compiled.program)
    assert show(parse(text)) == text


@pytest.mark.long
@pytest.mark.parametrize(
    "kept", [{"remat": "full"}, {"memory": 420_000}, {"schedule": sl.Schedule(parts=2, offload="saved")}]
)
def test_beside_what_saves_memory(kept: dict[str, Any]) -> None:
    mode = w1.modes(TINY, 4)["fsdp_tp"]
    found = []
    for said in ({"schedule": sl.Schedule(parts=2)} | kept, {}):
        with w1_sharded.mesh_of(mode):
            step = w1_sharded.sharded_step(mode, TINY, **said)
            value, state = step(*w1_sharded.place(mode, w1.init(TINY), *w1.batch(TINY)))
            found.append([x.full_tensor() for x in pytree.tree_leaves((value, state))])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_what_waits_in_the_hosts_memory_is_whole() -> None:
    """A budget that moves values says which: of parts nobody would know."""
    program, other = (parse(f"{HEAD}y: f64[8, 4] = aten.mm.default(x, w)\nreturn y") for _ in range(2))
    seen: list[sl.Schedule] = []
    spy = mock.patch.object(passes.row_overlap, "parts", lambda program, how: seen.append(how) or program)
    with spy, mock.patch.object(passes, "PASSES", (passes.row_overlap.parts,)):
        passes.run_passes(program, sl.Schedule(parts=2))
        passes.run_passes(other, sl.Schedule(parts=2), hosted=passes.Hosted(values=[other.inputs[0]]))
    assert [how.parts for how in seen] == [2, 1]


def test_gradients_of_a_call_that_is_differentiated_outside() -> None:
    with sl.Mesh(data=1, tensor=2):
        x, *weights = [sl.shard(x, spec) for x, spec in MEGATRON.values()]
        weights = [x.requires_grad_() for x in weights]
        sl.jit(mlp, schedule=sl.Schedule(parts=2))(x, *weights).square().sum().backward()
        got = [x.grad.full_tensor() for x in weights]
    plain = [x.clone().requires_grad_() for x in (WIDE, BACK)]
    mlp(ROWS, *plain).square().sum().backward()
    torch.testing.assert_close(got, [x.grad for x in plain], rtol=1e-12, atol=1e-12)


def trained(name: str) -> tuple[float, bool]:
    """On ranks: how far a step is from one device, and whether it is in parts."""
    mode = w1.modes(TINY, 4)[name]
    with w1_sharded.mesh_of(mode):
        step = w1_sharded.sharded_step(mode, TINY, schedule=sl.Schedule(parts=2))
        args = w1_sharded.place(mode, w1.init(TINY), *w1.batch(TINY))
        is_cut = in_parts(step.plan(*args).compiled.program) > 0
        got = [x.full_tensor() for x in pytree.tree_leaves(step(*args))]
    want = pytree.tree_leaves(w1.step(w1.init(TINY), *w1.batch(TINY), TINY))
    return max((x - y).abs().max().item() for x, y in zip(got, want, strict=True)), is_cut


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("name", ["fsdp_tp", "tp_sp"])
def test_ranks_work_in_parts(name: str) -> None:
    for apart, is_cut in run_ranks(trained, 4, name):
        assert apart < 1e-12
        assert is_cut


# Who asks for it ------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("name", ["tp", "tp_sp", "fsdp_tp"])
def test_a_machine_asks_for_parts_where_that_takes_less(name: str) -> None:
    """Sums of tensor parallelism, which nothing else hides."""
    sizes = {**BIG, "dtype": torch.bfloat16}
    with unscheduled():
        before = w1_plan(name, 8, machine="h100", **sizes).simulate()
    plan = w1_plan(name, 8, machine="h100", **sizes)
    assert in_parts(plan.compiled.program)
    assert plan.simulate().exposed < 0.1 * before.exposed
    assert plan.simulate().seconds < 0.82 * before.seconds


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "machine", "sizes"),
    [
        ("tp", None, BIG),  # no machine is named: as on a node
        ("tp", "node", BIG),  # calls begin for nothing there: who knows what more of them take
        ("tp", "cpu", BIG),  # nothing flies while it computes
        ("fsdp8", "h100", BIG),  # all is hidden as it is
        ("tp", "h100", {}),  # calls take longer to begin than messages to fly
    ],
)
def test_rows_stay_together_where_nothing_is_won(name: str, machine: str | None, sizes: dict[str, Any]) -> None:
    assert not in_parts(w1_plan(name, 8, 2, machine, **sizes).compiled.program)


@pytest.mark.long
def test_what_does_not_fit_in_parts_stays_whole() -> None:
    """The peak is never more than was asked for because of parts."""
    mode = w1.modes(TINY, 4)["fsdp_tp"]
    with w1_sharded.mesh_of(mode, abstract=True):
        plans = [
            w1_sharded.sharded_step(mode, TINY, schedule=sl.Schedule(parts=n), memory=memory).plan(*w1.abstract(TINY))
            for n, memory in ((1, None), (2, 420_000))
        ]
    assert plans[1].peak_memory <= 420_000 < plans[0].peak_memory


def test_what_only_moves_stays_whole() -> None:
    """Nothing could be computed meanwhile."""
    _, plan = planned(lambda x: sl.shard(x, "a b@data"), {"x": (WIDE, "a@data b")}, 2, {"data": 2})
    assert [c.kind for c in plan.compiled.program.collectives] == ["all_to_all"]


def test_results_without_elements() -> None:
    def fn(x: Tensor, w: Tensor, v: Tensor) -> Any:
        y = (x @ w).relu() @ v
        return torch.cat([y[..., :0], y[..., :0]], -1), y

    out, _ = planned(fn, MEGATRON, 2, {"data": 1, "tensor": 2})
    torch.testing.assert_close(out, list(fn(ROWS, WIDE, BACK)))


def test_the_cut_that_hides_most_is_taken() -> None:
    """Rows, not features: along these every product would be two, added up."""

    def fn(x: Tensor, *weights: Tensor) -> Tensor:
        for w, v in zip(weights[::2], weights[1::2], strict=True):
            x = x + F.gelu(x @ w) @ v
        return x

    x, w, v = (
        torch.empty(*n, device="meta", dtype=torch.bfloat16) for n in ((16384, 2048), (2048, 8192), (8192, 2048))
    )
    with sl.Mesh.abstract(data=2, tensor=8, machine="h100"):
        step = sl.jit(fn, in_specs=("n@data _", *("_ f@tensor", "f@tensor _") * 4), schedule=sl.Schedule(parts=2))
        program = step.plan(x, *(w, v) * 4).compiled.program
    parts = {c.source.layout.shape for c in program.collectives}
    assert parts == {(8192, 2048)}
    assert not any(str(s.target) == "aten.addmm.default" for s in program.steps if isinstance(s, Compute))


@pytest.mark.parametrize("said", [0, True, -1, 2.0, "2"])
def test_what_is_no_number_of_parts(said: Any) -> None:
    with pytest.raises(sl.ShardingError, match="is no number of parts, 1 or more"):
        sl.Schedule(parts=said)


def test_who_exchanges_along_one_dim_has_as_much_as_before() -> None:
    told = "{split_dim: 0, split_sizes: [4, 4], concat_dim: 0, concat_sizes: [8, 8]}"
    program = parse(f"{HEAD}start all_to_all[data] y: f64[8, 16] = x {told} 1.0 B\nwait y\nreturn y")
    (exchange,) = program.collectives
    made = Device(program.mesh, {}).collective(exchange)
    assert made is not None
    assert made.shape == (8, 16)
