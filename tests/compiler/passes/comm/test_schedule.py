"""Schedules: what they say, how far ahead weights are gathered and how many are held, and that values are the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.compiler import run_passes
from shardlib.compiler.passes.comm import bucket_collectives
from shardlib.compiler.passes.comm.gather_units import units
from shardlib.compiler.program.buffers import peak_bytes
from shardlib.compiler.program.steps import Free, Program, Start, Var
from shardlib.compiler.program.text import parse
from shardlib.sharding.mesh.machine import Link, Machine
from tests.validation.benchmarks.schedule import trained, unscheduled, w1_plan

# What is said --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", [sl.Schedule(), sl.Schedule(prefetch=0), sl.Schedule(2, "25MiB", "1.5 GB"), sl.Schedule(bucket=100)]
)
def test_a_schedule_is_read_as_it_prints(how: sl.Schedule) -> None:
    assert sl.Schedule.parse(str(how)) == how
    assert sl.jit(torch.relu, schedule=str(how)).options.schedule == how


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ({"prefetch": -1}, "prefetch=-1 is no number of layers, 0 or more"),
        ({"prefetch": True}, "prefetch=True is no number of layers"),
        ({"cap": "72"}, "cap='72' is no size"),
        ({"cap": "72 Gib"}, "cap='72 Gib' is no size"),
        ({"bucket": 0}, "bucket=0 is no size"),
        ({"bucket": "0MB"}, "bucket='0MB' is no size"),
        ({"bucket": 2.5}, "bucket=2.5 is no size"),
        ({"bucket": "1.2.3 MB"}, "bucket='1.2.3 MB' is no size"),
    ],
)
def test_what_is_no_schedule(said: dict[str, Any], fault: str) -> None:
    with pytest.raises(sl.ShardingError) as error:
        sl.Schedule(**said)
    assert f"* {fault}" in str(error.value)
    assert 'Remedy: Schedule(prefetch=1, bucket="25MiB", cap="2GiB")' in str(error.value)


def test_all_faults_at_once() -> None:
    with pytest.raises(sl.ShardingError) as error:
        sl.Schedule(-1, "5", "6")
    assert str(error.value).count("  * ") == 3


@pytest.mark.parametrize("what", ["Schedule(1)", "Schedule(ahead=1)", "Machine()", "fast", "Schedule("])
def test_what_is_read_as_no_schedule(what: str) -> None:
    with pytest.raises(sl.ShardingError, match="cannot be read as a schedule"):
        sl.jit(torch.relu, schedule=what)
    nothing: Any = None
    with pytest.raises(sl.ShardingError, match="None cannot be read as a schedule"):
        sl.Schedule.parse(nothing)


def test_what_is_no_schedule_at_all() -> None:
    with pytest.raises(sl.ShardingError, match="schedule=3 is no schedule"):
        sl.jit(torch.relu, schedule=3)


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ("tababh", [0, 1, 1, 2, 2, 3]),
        ("qkvgudqkvgud", [0] * 6 + [1] * 6),
        ("qkuudqkuud", [0] * 5 + [1] * 5),  # one line reads two of a layer's weights
        ("ababxcdcdcd", [0, 0, 1, 1, 2, 3, 3, 4, 4, 5, 5]),  # an encoder, and a decoder
        ("aaa", [0, 1, 2]),
        ("", []),
    ],
)
def test_units_are_what_repeats(keys: str, found: list[int]) -> None:
    assert units(keys, [1] * len(keys), 0) == found


# What is held --------------------------------------------------------------------------------------------------------

LAYERS, WIDTH, ROWS = 6, 32, 2048
WEIGHT = 4 * WIDTH * WIDTH  # bytes


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(x))
        return x + self.down(h)


class Model(torch.nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def step(m: Model, opt: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = m(x).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def planned(**how: Any) -> sl.Plan:
    with torch.device("meta"):
        m, x = Model(), torch.empty(ROWS, WIDTH)
    with sl.Mesh.abstract(data=4):
        sl.parallelize(m, strategy="fsdp")
        opt = torch.optim.SGD(m.parameters(), lr=0.1)
        plan: sl.Plan = sl.jit(step, **how).plan(m, opt, x)
    return plan


def gathered(program: Program) -> Iterator[int]:
    """Bytes of gathered weights that are there, or on their way, step by step."""
    held: dict[Var, int] = {}
    for one in program.steps:
        if isinstance(one, Start) and one.first.kind == "all_gather":
            held |= {c.out: c.out.nbytes for c in one.moves}
        yield sum(held.values())
        for v in one.vars if isinstance(one, Free) else ():
            held.pop(v, None)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_no_more_layers_are_held_than_asked(ahead: int) -> None:
    plan = planned(schedule=sl.Schedule(prefetch=ahead))
    assert max(gathered(plan.compiled.program)) == (1 + ahead) * 2 * WEIGHT
    assert plan.comm_bytes == planned().comm_bytes, "the same is sent"


@pytest.mark.long
def test_a_layer_is_a_message_up_to_its_bucket() -> None:
    def messages(how: sl.Schedule) -> list[int]:
        steps = planned(schedule=how).compiled.program.steps
        return [len(s.moves) for s in steps if isinstance(s, Start) and s.first.kind == "all_gather"]

    whole = messages(sl.Schedule(prefetch=1))
    assert whole == [2] * (2 * LAYERS - 1) + [1], "nobody needs the gradient of x"
    assert set(messages(sl.Schedule(prefetch=1, bucket=WEIGHT))) == {1}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cap", [2, 3, 4, 5])
def test_gathered_bytes_stay_under_a_cap(cap: int) -> None:
    held = max(gathered(planned(schedule=sl.Schedule(prefetch=4, cap=cap * WEIGHT)).compiled.program))
    assert held <= cap * WEIGHT


@pytest.mark.long
def test_what_does_not_fit_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered: list[Program] = []
    kept = run_passes.run_passes
    monkeypatch.setattr(run_passes, "run_passes", lambda p, **how: (lowered.append(p), kept(p, **how))[1])
    planned()
    (bare,) = lowered
    with unscheduled():
        least = peak_bytes(kept(bare))
    most = peak_bytes(kept(bare, sl.Schedule(prefetch=4)))
    one = peak_bytes(kept(bare, sl.Schedule(prefetch=0)))
    assert least <= one < most
    assert peak_bytes(kept(bare, sl.Schedule(prefetch=4), memory=most)) == most
    assert peak_bytes(kept(bare, sl.Schedule(prefetch=4), memory=most - 1)) == one
    assert peak_bytes(kept(bare, sl.Schedule(prefetch=4), memory=0)) == least, "nothing fits: the least is taken"
    cpu = Machine.preset("cpu")
    for room, held in ((most, most), (most - 1, one), (1, most)):  # of a device; where nothing fits nothing is given up
        mesh = sl.Mesh.abstract(data=4, machine=replace(cpu, device=replace(cpu.device, memory=room)))
        assert peak_bytes(kept(replace(bare, mesh=mesh), sl.Schedule(prefetch=4))) == held


def test_gradients_are_reduced_while_the_backward_pass_runs() -> None:
    steps = planned(schedule=sl.Schedule(bucket=2 * WEIGHT)).compiled.program.steps
    sums = [i for i, s in enumerate(steps) if isinstance(s, Start) and s.first.kind == "reduce_scatter"]
    products = [i for i, s in enumerate(steps) if getattr(s, "target", None) is torch.ops.aten.mm.default]
    assert len(sums) == LAYERS
    assert sum(i < products[-1] for i in sums) == LAYERS - 1


# What is hidden -------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["fsdp8", "fsdp_tp"])
def test_half_of_what_was_exposed_is_hidden(mode: str) -> None:
    with unscheduled():
        before = w1_plan(mode, 8, layers=3).simulate("h100")
    after = w1_plan(mode, 8, layers=3).simulate("h100")
    assert after.exposed <= 0.5 * before.exposed
    assert after.seconds < before.seconds


@pytest.mark.peer
def test_a_llama_hides_its_messages() -> None:
    from tests.validation.benchmarks.schedule import llama

    def exposed() -> float:
        with sl.Mesh.abstract(data=8, machine="h100"):
            ids = torch.zeros(16, 1024, dtype=torch.int64, device="meta")
            run, given = trained(llama(1024, 3, device="meta"), ids)
            return float(run.plan(*given).simulate().exposed)

    with unscheduled():
        before = exposed()
    assert exposed() <= 0.5 * before


@pytest.mark.parametrize(("latency", "messages"), [(1e-1, 1), (1e-9, 4)])
def test_the_machine_says_how_long_a_message_is(latency: float, messages: int) -> None:
    """Where a hop takes longer, more travels together."""
    size = 1 << 21
    text = "\n".join(
        [
            f"mesh a=4\ninput x: f32[{size} +a]",
            *(f"start all_reduce[a] s{i}: f32[{size}] = x {{}} 12582912.0 B\nwait s{i}" for i in range(4)),
            "return s0, s1, s2, s3",
        ]
    )
    link = Link(1e9, latency)
    mesh = sl.Mesh.abstract(a=4, machine=Machine(Machine.preset("cpu").device, link, link))
    made = bucket_collectives.bundle(replace(parse(text), mesh=mesh))
    assert sum(isinstance(s, Start) for s in made.steps) == messages


# Values ---------------------------------------------------------------------------------------------------------------


def run(how: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    m, x = Model(), torch.randn(ROWS, WIDTH)
    with sl.Mesh(data=4):
        sl.parallelize(m, strategy="fsdp")
        opt = torch.optim.SGD(m.parameters(), lr=0.1)
        train = sl.jit(step, schedule=how)
        losses = [train(m, opt, x).full_tensor() for _ in range(2)]
        return [*losses, *(p.full_tensor().detach() for p in m.parameters())]


@pytest.mark.long
def test_values_are_the_same_whatever_the_schedule() -> None:
    ways = ("Schedule()", "Schedule(prefetch=0)", "Schedule(prefetch=3, bucket=4096)", "Schedule(cap=1)")
    found = [run(how) for how in ways]
    with unscheduled():
        found.append(run("Schedule()"))
    for one, other in itertools.pairwise(found):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
