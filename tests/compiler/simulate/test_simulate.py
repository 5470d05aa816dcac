"""Simulated steps against figures worked out by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import shardlib as sl
from shardlib.compiler.program.steps import Compute, Start, Wait
from shardlib.compiler.simulate.collectives import transfer
from shardlib.compiler.simulate.simulated import clock
from shardlib.compiler.simulate.special_functions import evaluated, tiled
from shardlib.compiler.simulate.timeline import COMPUTE, FAR, NEAR
from shardlib.frontend.trace import trace
from shardlib.jit.call import shared_trace
from shardlib.sharding.mesh.machine import Device, Link, Machine, Span

# Figures that one can do sums with: a FLOP takes as long as a byte, links are ten and a hundred times slower.
DEVICE = Device({"f32": 1e9}, bandwidth=1e9, memory=1e9, host=1e9)
SLOW = Machine(DEVICE, inner=Link(1e8, 1e-3), outer=Link(1e7, 1e-2, sharing=2), node=4)
MESH = sl.Mesh.abstract(far=2, near=4)


def plan(fn: Any, *args: Any, mesh: sl.Mesh = MESH, **kwargs: Any) -> sl.Plan:
    with mesh:
        return sl.jit(fn, **kwargs).plan(*args)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def span(*names: str) -> Any:
    return SLOW.span([MESH.axis(name) for name in names], MESH.axes)


@pytest.mark.parametrize(
    ("kind", "names", "wire", "how", "seconds"),
    [
        ("all_gather", ("near",), 3e6, "ring", 3 * 1e-3 + 3e6 / 1e8),
        ("reduce_scatter", ("near",), 3e6, "ring", 3 * 1e-3 + 3e6 / 1e8),
        ("all_reduce", ("near",), 6e6, "ring", 6 * 1e-3 + 6e6 / 1e8),
        ("all_reduce", ("near",), 6.0, "tree", 4 * 1e-3 + 8 / 1e8),  # up and down two levels
        ("all_to_all", ("near",), 3e6, "exchange", 1e-3 + 3e6 / 1e8),
        ("ppermute", ("near",), 3e6, "pass", 1e-3 + 3e6 / 1e8),
        ("all_gather", ("far",), 1e6, "ring", 2 * 1e-2 + 1e6 / 5e6),  # two devices share a card
        ("ppermute", ("far",), 1e6, "pass", 1e-2 + 1e6 / 5e6),
        # One hop outside, each with its like, and then 3 inside, of two pieces.
        ("all_gather", ("far", "near"), 7e6, "by node", 1e-2 + 1e6 / 5e6 + 3 * (1e-3 + 2e6 / 1e8)),
        # 4 of 7 pieces leave the node and share its cards.
        ("all_to_all", ("far", "near"), 7e6, "exchange", 1e-2 + 4e6 / 5e6),
    ],
)
def test_seconds_of_a_collective(kind: str, names: tuple[str, ...], wire: float, how: str, seconds: float) -> None:
    found = transfer(kind, wire, span(*names))
    assert (found.algorithm, found.far) == (how, "far" in names)
    assert found.seconds == pytest.approx(seconds)


def test_many_nodes_take_a_ring_through_each_card() -> None:
    found = transfer("all_gather", 63e6, Span(4, 16, Link(1e8), Link(1e7, sharing=2)))
    assert found == ("ring", pytest.approx(63e6 / 2e7), True)


def test_a_product_takes_its_flops_or_its_bytes() -> None:
    big = plan(lambda x, w: x @ w, meta(64, 64), meta(64, 64)).simulate(SLOW)
    assert big.seconds == pytest.approx(2 * 64**3 / 1e9)
    thin = plan(lambda x, w: x @ w, meta(64, 1), meta(1, 64)).simulate(SLOW)
    assert thin.seconds == pytest.approx(4 * (64 + 64 + 64 * 64) / 1e9)
    assert big.utilization.model == pytest.approx(1.0)


def test_views_take_no_time_and_calls_their_launch() -> None:
    launched = replace(SLOW, device=replace(DEVICE, launch=1.0))
    step = plan(lambda x: x.t().reshape(-1).view(2, -1).relu(), meta(1, 8)).simulate(launched)
    assert step.seconds == 1.0


def test_a_lookup_reads_what_it_looks_up() -> None:
    table, rows = meta(1 << 20, 4), torch.empty(8, dtype=torch.int64, device="meta")
    step = plan(torch.nn.functional.embedding, rows, table).simulate(SLOW)
    assert step.seconds == pytest.approx((2 * 8 * 4 * 4 + 8 * 8) / 1e9)


def test_a_cross_entropy_looks_up_a_logit_for_each_target() -> None:
    rows, classes = 8, 1 << 10
    logits, targets = meta(rows, classes), torch.zeros(rows, dtype=torch.int64, device="meta")
    fn = lambda x, i: torch.nn.functional.nll_loss(x, i, reduction="none")
    planned = plan(fn, logits, targets)
    assert planned.flops == 2 * rows
    assert planned.simulate(SLOW).seconds == pytest.approx(((4 + 8 + 4) * rows + 4) / 1e9)  # and no total weight
    back = plan(lambda x, i: sl.grad(lambda x: fn(x, i).sum())(x), logits, targets).simulate(SLOW)
    (last,) = (e for e in back.critical_path if e.name == "nll_loss_backward")
    assert last.seconds == pytest.approx((4 * classes + 8 + 4) * rows / 1e9, rel=1e-2)  # writes what it does not read


def test_a_dtype_has_its_rate() -> None:
    both = replace(DEVICE, flops={"f32": 1e9, "bf16": 4e9}, bandwidth=1e15)
    wide, narrow = (
        plan(lambda x: x @ x, meta(64, 64, dtype=dtype)).simulate(replace(SLOW, device=both)).seconds
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert wide == pytest.approx(4 * narrow)
    assert both.rate("f16", 2) == 4e9  # as wide as bf16
    assert both.rate("f8_e4m3", 1) == 4e9  # the next wider one


SPECIAL = replace(SLOW, device=replace(DEVICE, special=1e6))  # a function takes as long as a thousand bytes


@pytest.mark.parametrize(
    ("call", "each"),
    [
        (torch.exp, 1),
        (torch.tanh, 1),
        (torch.nn.functional.silu, 1),
        (torch.nn.functional.gelu, 1),
        (torch.nn.functional.softplus, 2),
        (torch.nn.functional.mish, 3),
        (lambda x: torch.log_softmax(x, 0), 1),
        (lambda x: torch.pow(2.0, x), 2),
        (lambda x: x**0.3, 2),
        (lambda x: torch.logsumexp(x, 1), 1),  # of what is read, not of what is made
    ],
)
def test_functions_take_the_time_of_their_unit(call: Any, each: int) -> None:
    assert plan(call, meta(64, 64)).simulate(SPECIAL).seconds == pytest.approx(each * 64 * 64 / 1e6, rel=0.01)


@pytest.mark.parametrize("call", [torch.relu, torch.sqrt, torch.rsqrt, lambda x: x**2, lambda x: x**-0.5, torch.neg])
def test_what_is_no_function_takes_its_memory(call: Any) -> None:
    assert plan(call, meta(64, 64)).simulate(SPECIAL).seconds == pytest.approx(2 * 4 * 64 * 64 / 1e9)


def test_functions_wait_for_products_and_memory_for_neither() -> None:
    """A unit does one after the other; a call that touches more memory than that takes is as long as without them."""
    q = meta(2, 4, 32, 8)
    scores, attention = 2 * 4 * 32 * 32, torch.nn.functional.scaled_dot_product_attention
    step = plan(attention, q, q, q).simulate(SPECIAL)
    assert step.seconds == pytest.approx(4 * 8 * scores / 1e9 + scores / 1e6)
    assert step.utilization.model == pytest.approx(4 * 8 * scores / 1e9 / step.seconds)  # functions are no FLOPs
    fast = replace(SLOW, device=replace(DEVICE, special=1e9))
    assert plan(torch.exp, meta(64, 64)).simulate(fast).seconds == pytest.approx(2 * 4 * 64 * 64 / 1e9)


def test_attention_has_its_share_of_the_rate_of_products() -> None:
    """The share holds for its exponentials, too; other products keep their rate."""
    machine = replace(SPECIAL, device=replace(SPECIAL.device, attention=0.25))
    q = meta(2, 4, 32, 8)
    step = plan(torch.nn.functional.scaled_dot_product_attention, q, q, q).simulate(machine)
    assert step.seconds == pytest.approx(4 * 2 * 4 * 32 * 32 * 8 / 0.25e9)
    product = plan(lambda x: x @ x, meta(64, 64))
    assert product.simulate(machine).seconds == product.simulate(SPECIAL).seconds


@pytest.mark.parametrize(("n", "keys"), [(32, 32), (128, 128), (1024, 512 + 64)])
def test_attention_works_on_whole_tiles(n: int, keys: int) -> None:
    """The half of the keys that a query sees on average ends inside a tile of 128, at worst the only one."""
    tiles, q = replace(SPECIAL, device=replace(SPECIAL.device, tile=128)), meta(2, 4, n, 8)
    attention = torch.nn.functional.scaled_dot_product_attention
    step = plan(lambda q: attention(q, q, q, is_causal=True), q, in_specs=("b@far ...",)).simulate(tiles)
    assert step.seconds == pytest.approx(4 * n * keys * (4 * 8 / 1e9 + 1 / 1e6))
    assert step.utilization.model == pytest.approx(4 * n * n / 2 * 4 * 8 / 1e9 / step.seconds)
    plain = plan(lambda q: attention(q, q, q, is_causal=True), q, in_specs=("b@far ...",)).simulate(SLOW)
    assert plain.seconds == 4 * n * n / 2 * 4 * 8 / 1e9  # of a machine that has no tiles, its FLOPs and no more


def test_a_device_that_is_its_own_host_is_called_for_views_too() -> None:
    host = replace(SLOW, device=replace(DEVICE, launch=1.0, overlaps=False))
    step = plan(lambda x: x.t().reshape(-1).view(2, -1).relu(), meta(1, 8))
    calls = sum(isinstance(s, Compute) for s in step.compiled.program.steps)
    assert calls > 1
    assert step.simulate(host).seconds == pytest.approx(calls, rel=1e-3)


def test_the_backward_pass_of_attention_takes_its_functions_again() -> None:
    q = meta(2, 4, 32, 8).requires_grad_()

    def step(q: torch.Tensor) -> Any:
        return torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(q, q, q).sum(), q)

    planned = plan(step, q)
    slow, fast = (planned.simulate(replace(SLOW, device=replace(DEVICE, special=s))) for s in (1e3, 2e3))
    assert slow.seconds - fast.seconds == pytest.approx(2 * 2 * 4 * 32 * 32 / 2e3, rel=1e-3)


def test_rows_are_of_ops_that_there_are() -> None:
    from shardlib.compiler.simulate.rooflines import BYTES
    from shardlib.compiler.simulate.special_functions import PER_ELEMENT, PRODUCTS

    there = lambda name: hasattr(torch.ops.aten, name) or hasattr(torch.ops.shardlib, name)
    assert [name for name in (*PER_ELEMENT, *BYTES, *PRODUCTS) if not there(name)] == []


def sums(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x @ w, v.exp()  # the second does not wait for the first one's sum


SPECS = ("_ k@near", "k@near _", "...")


def test_what_does_not_wait_hides_a_message() -> None:
    x, w = meta(16, 64), meta(64, 16)
    for side, hidden in ((8, False), (4096, True)):
        step = plan(sums, x, w, meta(side, side), in_specs=SPECS).simulate(SLOW)
        message = transfer("all_reduce", 2 * 16 * 16 * 4 * 3 / 4, span("near")).seconds
        first, second = 2 * 16 * 16 * 64 / 4 / 1e9, 8 * side**2 / 1e9
        assert step.timeline.busy(NEAR) == pytest.approx(message)
        assert step.exposed == pytest.approx(0.0 if hidden else message - second)
        assert step.seconds == pytest.approx(first + max(message, second))
        assert [e.stream for e in step.critical_path] == ([COMPUTE, COMPUTE] if hidden else [COMPUTE, NEAR])


def test_a_device_that_cannot_overlap_waits() -> None:
    serial = replace(SLOW, device=replace(DEVICE, overlaps=False))
    x, w, v = meta(8, 64), meta(64, 8), meta(4096, 4096)
    apart, together = (plan(sums, x, w, v, in_specs=SPECS).simulate(m) for m in (serial, SLOW))
    assert apart.exposed == pytest.approx(together.timeline.busy(NEAR))
    assert apart.seconds == pytest.approx(together.seconds + apart.exposed)


def test_all_wait_for_the_slowest_device() -> None:
    """The larger of two normal variables is 1 / sqrt(pi) above their mean; a message takes what it takes."""
    uneven = replace(SLOW, device=replace(DEVICE, spread=0.05))
    x, w, v = meta(8, 64), meta(64, 8), meta(4096, 4096)
    for size in (1, 2):
        with sl.Mesh.abstract(near=size):
            two = sl.jit(sums, in_specs=SPECS).plan(x, w, v)
        even, others = (two.simulate(m) for m in (SLOW, uneven))
        longer = 1 + 0.05 / math.sqrt(math.pi) if size == 2 else 1.0
        assert others.timeline.busy(COMPUTE) == pytest.approx(even.timeline.busy(COMPUTE) * longer, rel=1e-4)
        assert others.timeline.busy(NEAR) == even.timeline.busy(NEAR)


def test_links_are_streams_of_their_own() -> None:
    def both(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sum(0), y.sum(0)

    step = plan(both, meta(64, 1000), meta(64, 1000), in_specs=("a@far _", "a@near _")).simulate(SLOW)
    ends = {e.stream: e.end for e in step.timeline.events if e.stream != COMPUTE}
    assert set(ends) == {NEAR, FAR}
    assert step.seconds < step.timeline.busy(NEAR) + step.timeline.busy(FAR) + step.timeline.busy(COMPUTE)


def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w).exp().sum()


def test_what_is_done_again_is_no_use_of_the_model() -> None:
    def kept(x: torch.Tensor, w: torch.Tensor) -> Any:
        loss = chain(x, w)
        return loss, torch.autograd.grad(loss, (x, w))

    def again(x: torch.Tensor, w: torch.Tensor) -> Any:
        loss = checkpoint(chain, x, w, use_reentrant=False)
        return loss, torch.autograd.grad(loss, (x, w))

    x, w = meta(256, 256).requires_grad_(), meta(256, 256).requires_grad_()
    once, twice = (plan(fn, x, w).simulate(SLOW) for fn in (kept, again))
    products = 2 * 256**3
    assert once.utilization.model == once.utilization.hardware
    work = (twice.utilization.hardware - twice.utilization.model) * twice.seconds * 1e9
    assert work == pytest.approx(products, rel=0.01)  # one product of three was done again


def test_calls_that_a_compiler_joins_touch_memory_once() -> None:
    def steps(x: torch.Tensor) -> torch.Tensor:
        return (x * 2 + 1).tanh().exp()

    n, wide = 1 << 16, replace(SLOW, device=replace(DEVICE, launch=1e-5))
    apart, joined = (plan(steps, meta(n)).simulate(wide, fused=fused).seconds for fused in (False, True))
    assert apart == pytest.approx(4 * 8 * n / 1e9)
    assert joined == pytest.approx(max(8 * n, 4 * n) / 1e9, rel=0.6)
    assert joined < apart / 2


def test_the_peak_is_the_plan_s() -> None:
    planned = plan(sl.grad(chain, argnums=(0, 1)), meta(64, 64), meta(64, 64), in_specs=("a@near _", None))
    assert planned.simulate(SLOW).peak_memory == planned.peak_memory


def test_text_says_that_it_is_simulated() -> None:
    step = plan(torch.matmul, meta(64, 64), meta(64, 64), in_specs=("_ k@near", "k@near _")).simulate("h100")
    head, *rows = str(step).splitlines()
    assert head == "matmul on Mesh.abstract(far=2, near=4), machine h100: simulated, not measured"
    assert [row.split("  ")[1] for row in rows][:1] == ["step"]
    assert any("peak memory" in row and "74.5 GiB" in row for row in rows)
    assert any("all_reduce[near]" in row and "test_simulate.py" in row for row in rows)


def test_an_event_prints_without_those_before_it() -> None:
    path = plan(sums, meta(8, 64), meta(64, 8), meta(8, 8), in_specs=SPECS).simulate(SLOW).critical_path
    assert len(path) > 1
    assert all(repr(event).count("Event(") == 1 for event in path)


@pytest.mark.long
def test_pictures(tmp_path: Path) -> None:
    step = plan(sums, meta(8, 64), meta(64, 8), meta(8, 8), in_specs=SPECS).simulate(SLOW)
    step.to_perfetto(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(step.timeline.events)
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(1e6 * step.seconds)
    assert {e["args"]["line"].partition(":")[0] for e in spans} == {"tests/compiler/simulate/test_simulate.py"}
    assert max(e["args"]["bytes"] for e in events if e["ph"] == "C") == step.peak_memory
    for name in ("step.png", "step.svg"):
        step.plot(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step.json", "step.png", "step.svg"]


def test_a_machine_of_another_mesh_is_refused() -> None:
    wrong = replace(SLOW, links={"pod": Link(1e9), "near": Link(1e9)})
    with pytest.raises(sl.ShardingError) as error:
        plan(torch.relu, meta(4)).simulate(wrong).seconds  # noqa: B018
    assert "the machine has a link for axis 'pod', the mesh (far=2, near=4) has none" in str(error.value)
    assert "'near'" not in str(error.value)


def test_scaling() -> None:
    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).square().sum()

    step = sl.jit(sl.grad(loss, argnums=1), in_specs=("rows@data _", None))
    meshes, w = [sl.Mesh.abstract(data=n) for n in (2, 8)], meta(64, 64)
    strong = sl.scaling(step, meshes, SLOW, (meta(4096, 64), w))
    weak = sl.scaling(step, meshes, SLOW, lambda mesh: (meta(512 * mesh.size, 64), w))
    alone = [strong.steps[i].seconds for i in range(2)]
    assert strong.efficiency == (1.0, pytest.approx(alone[0] * 2 / (alone[1] * 8)))
    assert weak.efficiency == (1.0, pytest.approx(weak.seconds[0] / weak.seconds[1]))
    assert weak.steps[1].seconds == strong.steps[1].seconds  # 512 rows on each of 8 devices
    assert sl.scaling(step, iter(meshes), SLOW, (meta(4096, 64), w)).seconds == strong.seconds
    head, columns, *rows = str(weak).splitlines()
    assert head == f"weak scaling of loss on {SLOW!r}: simulated, not measured"
    assert columns.split() == ["mesh", "devices", "seconds", "exposed", "efficiency", "peak", "memory"]
    assert [row.split()[:2] for row in rows] == [["data=2", "2"], ["data=8", "8"]]


class Net(torch.nn.Module):
    """Layers, and a number by which it counts its calls, or that it asks the mesh for."""

    def __init__(self, *, asks: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64, device="meta") for _ in range(3))
        self.asks, self.calls = asks, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for layer in self.layers:
            x = sl.shard(torch.relu(layer(x)), "rows@data hidden@tensor")
        mesh = sl.current_mesh() if self.asks else None
        return x + torch.rand(64) * (self.calls if mesh is None else mesh["data"])


@pytest.mark.long
@pytest.mark.parametrize("asks", [False, True])
def test_scaling_traces_once_what_does_not_ask_for_the_mesh(asks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(net: Net, opt: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss = net(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    traced: list[Any] = []
    monkeypatch.setattr(shared_trace, "trace", lambda *args, **how: traced.append(trace(*args, **how)) or traced[-1])
    net = Net(asks=asks)
    call = net, torch.optim.AdamW(net.parameters()), meta(4096, 64)
    meshes = [sl.Mesh.abstract(data=n, tensor=m) for n, m in ((2, 2), (8, 4), (4, 1))]
    apart, train = (sl.jit(step, in_specs=(None, None, "rows@data _")) for _ in range(2))
    each, counts = [], []
    for mesh in meshes:
        with mesh:
            each.append(apart.plan(*call))
        counts.append(len(traced))
    found = sl.scaling(train, meshes, SLOW, call)
    assert len(traced) - counts[-1] == (counts[-1] if asks else counts[0])
    for mesh, plan, simulated in zip(meshes, each, found.steps, strict=True):
        with mesh:
            assert str(train.plan(*call)) == str(plan)
        assert simulated.seconds == plan.simulate(SLOW).seconds


def test_scaling_to_many_meshes_is_no_reason_to_warn() -> None:
    step = sl.jit(lambda x: (x * 2).sum(), in_specs=("b@data _",))
    meshes = [sl.Mesh.abstract(data=2**i) for i in range(12)]
    assert len(sl.scaling(step, meshes, SLOW, (meta(4096, 4),)).steps) == 12


def test_scaling_needs_meshes_and_a_plan() -> None:
    with pytest.raises(sl.ShardingError, match=r"got no mesh(.|\n)*sl\.jit\(step\)"):
        sl.scaling(sl.jit(torch.relu), [], SLOW, (meta(4),))
    with pytest.raises(sl.ShardingError, match="which has no plan"):
        sl.scaling(torch.relu, [MESH], SLOW, (meta(4),))
    with pytest.raises(sl.ShardingError, match="got one mesh, no list of them"):
        sl.scaling(sl.jit(torch.relu), MESH, SLOW, (meta(4),))
    with pytest.raises(sl.ShardingError, match="got 'data=8', no mesh"):
        sl.scaling(sl.jit(torch.relu), ["data=8"], SLOW, (meta(4),))
    with pytest.raises(sl.ShardingError, match=r"a tensor of shape \[4\] as args"):
        sl.scaling(sl.jit(torch.relu), [MESH], SLOW, meta(4))


def test_messages_that_are_waited_for_at_once_hide_behind_nothing() -> None:
    """As a published step is simulated whose tensor parallelism was not asynchronous."""
    pytest.importorskip("transformers")
    from tests.validation.benchmarks.published import waited

    with sl.Mesh.abstract(data=2, tensor=4):
        step = sl.jit(lambda x, y, w: (x @ y, y * 2, x @ w), in_specs=("b k@tensor", "k@tensor n", "k@tensor n"))
        program = step.plan(*[meta(512, 512)] * 3).compiled.program
    steps = waited(program, "tensor").steps
    assert sorted(map(id, steps)) == sorted(map(id, program.steps))
    assert waited(program, "data").steps == program.steps
    starts = [i for i, s in enumerate(steps) if isinstance(s, Start)]
    assert starts
    assert all(isinstance(steps[i + 1], Wait) and steps[i + 1].outs == steps[i].outs for i in starts)
    assert steps != program.steps


def test_special_functions_and_tiles_of_calls() -> None:
    pointwise = plan(lambda x: (x.exp() ** 2).relu(), meta(8, 4), mesh=sl.Mesh.abstract(data=2), in_specs=("b@data _",))
    calls = [step for step in pointwise.compiled.program.steps if isinstance(step, Compute)]
    assert [evaluated(step, 128) for step in calls] == [16.0, 0.0, 0.0]

    def causal(q: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    plans = [plan(causal, meta(1, 1, n, 64), mesh=sl.Mesh.abstract(data=2)) for n in (128, 1024)]
    assert [tiled(p.compiled.program.steps[0], 128) for p in plans] == [2.0, 1.125]  # type: ignore[arg-type]


def test_durations() -> None:
    assert (clock(0.00123), clock(65.4)) == ("1.23 ms", "65.4 s")
