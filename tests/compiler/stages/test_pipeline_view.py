"""The pipeline of a plan: its figures against counts of its programs, its timetable, and its text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from shardlib.compiler.plan.memory_table import memory_table
from shardlib.compiler.plan.pipeline_view import PipelineView
from shardlib.compiler.plan.plan import Plan
from shardlib.compiler.plan.stage_modules import _block, _ranges
from shardlib.compiler.plan.totals import figures
from shardlib.compiler.program.buffers import owners, peak_bytes
from shardlib.compiler.program.flops import flops
from shardlib.compiler.program.steps import Compute, Program, makes, reads
from shardlib.compiler.stages.fragment_tags import fragment_order, fragments_of
from shardlib.compiler.stages.fragments import Fragment
from shardlib.compiler.stages.staged import Staged
from shardlib.compiler.stages.timetable import Timetable, make_timetable
from shardlib.core.text_tables import format_si


class MLP(nn.Module):
    """Layers of one width, an equal number per stage; the last one may have the weight of the first one."""

    def __init__(self, width: int, layers: int, *, tied: bool = False, named: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.named = named
        if tied:
            self.layers[-1].weight = self.layers[0].weight

    def forward(self, x: Tensor, stages: int) -> Tensor:
        per = len(self.layers) // stages
        for i, layer in enumerate(self.layers):
            if self.named:
                with sl.stage(i // per):
                    x = torch.tanh(layer(x))
            else:
                x = torch.tanh(layer(x))
        return x


@cache
def planned(
    schedule: str = "1f1b",
    n: int = 4,
    *,
    stages: int = 2,
    layers: int = 4,
    width: int = 8,
    rows: int = 16,
    tied: bool = False,
    named: bool = True,
    data: int = 1,
    trains: bool = True,
) -> Plan:
    """Plans a step of SGD on abstract devices."""
    with torch.device("meta"):
        model, batch = MLP(width, layers, tied=tied, named=named), torch.empty(rows, width)

    def step(model: nn.Module, opt: Any, batch: Tensor) -> Any:
        def loss_of(rows: Tensor) -> Any:
            loss = model(rows, stages).square().mean()
            if trains:
                (loss / n).backward()
            return loss.detach()

        loss = sl.microbatch(loss_of, batch, n=n, schedule=schedule)
        if trains:
            opt.step()
            opt.zero_grad()
        return loss

    with sl.Mesh.abstract(stage=stages, data=data, stages="stage", machine="h100"):
        homes = {f"layers.{i}": i * stages // layers for i in range(layers)} if tied else None
        sl.parallelize(model, strategy="ddp", stages=homes)
        plan = sl.jit(step).plan(model, torch.optim.SGD(model.parameters(), lr=0.1), batch)
    assert isinstance(plan, Plan)
    return plan


def staged(plan: Plan) -> Staged:
    assert plan.compiled.staged is not None
    return plan.compiled.staged


def view(plan: Plan) -> PipelineView:
    assert plan.pipeline is not None
    return plan.pipeline


def orders_that_run(pipeline: Staged) -> list[list[Fragment]]:
    return [fragment_order(p.steps, fragments_of(p.steps, pipeline.shape)) for p in pipeline.programs]


def count_units(pipeline: Staged) -> Timetable:
    """Simulates unit seconds on the order that runs, with the messages between fragments and the chain's needs.

    A fragment without a step (of the first stage, which needs no gradient of its input) takes a unit, too.
    """
    needs = {f: {*pipeline.shape.needs(f)} for order in pipeline.orders for f in order}
    for m in pipeline.messages:
        if m.source is not None and m.target is not None:
            needs[m.target].add(m.source)
    return make_timetable(pipeline.orders, needs.__getitem__, lambda f: 1 / pipeline.shape.chunks)


@pytest.mark.parametrize(("stages", "n"), [(2, 4), (4, 8)])
@pytest.mark.parametrize(
    ("schedule", "chunks", "idle"),  # of each stage, per stage that follows
    [("gpipe", 1, 2.0), ("1f1b", 1, 2.0), ("interleaved_1f1b", 2, 2.0 / 2), ("zb_h1", 1, 3.0 / 3)],
)
def test_bubbles_of_the_order_that_runs(stages: int, n: int, schedule: str, chunks: int, idle: float) -> None:
    pipeline = staged(planned(schedule, n, stages=stages, layers=stages * chunks, named=chunks == 1))
    assert pipeline.shape.chunks == chunks
    for order, scheduled in zip(orders_that_run(pipeline), pipeline.orders, strict=True):
        assert order == [f for f in scheduled if f in {*order}]
    table = count_units(pipeline)
    assert [table.idle(i) for i in range(stages)] == [pytest.approx((stages - 1) * idle)] * stages
    if schedule in ("gpipe", "1f1b"):
        assert table.bubble == pytest.approx((stages - 1) / (stages - 1 + n))


def test_no_stage_of_zb_v_waits_in_the_steady_state() -> None:
    pipeline = staged(planned("zb_v", 4, named=False))
    table = count_units(pipeline)
    for order in pipeline.orders:
        spans = [table.spans[f] for f in order]
        assert [a for _, a in spans[:-1]] == [pytest.approx(b) for b, _ in spans[1:]]


@pytest.mark.parametrize(
    ("schedule", "stages", "live"),
    [
        ("1f1b", 4, [4, 3, 2, 1]),
        ("1f1b", 2, [2, 1]),
        ("gpipe", 2, [4, 4]),
        ("zb_h1", 2, [2, 2]),
    ],
)
def test_live_microbatches(schedule: str, stages: int, live: Sequence[int]) -> None:
    plan = planned(schedule, 4, stages=stages, layers=stages)
    assert [s.live for s in view(plan).stages] == live
    counts = [count_live(p, staged(plan)) for p in staged(plan).programs]
    assert counts == live


def count_live(program: Program, pipeline: Staged) -> int:
    """Counts the microbatches between the first step of their forward pass and their last read of a saved value."""
    fragments = fragments_of(program.steps, pipeline.shape)
    source = {v: f for step, f in zip(program.steps, fragments, strict=True) for v in makes(step)}
    first, last = dict[int, int](), dict[int, int]()
    for i, (step, f) in enumerate(zip(program.steps, fragments, strict=True)):
        if f is not None and f.kind == "F" and isinstance(step, Compute) and step.flops:
            first.setdefault(f.microbatch, i)
        if f is not None and f.kind != "F":
            saved = (source.get(v) for v in reads(step))
            last |= {g.microbatch: i for g in saved if g == f._replace(kind="F")}
    return max(sum(first[m] <= i <= last[m] for m in last) for i in first.values())


@pytest.mark.parametrize(("schedule", "stages"), [("gpipe", 2), ("1f1b", 2), ("1f1b", 4)])
def test_memory_is_that_of_live_microbatches(schedule: str, stages: int) -> None:
    """Within 10 %: inputs, gradients, what live microbatches save, and the operand and result of the running call."""
    plan = planned(schedule, 8, stages=stages, layers=2 * stages, width=64, rows=8 * 1024)
    for s, program in zip(view(plan).stages, staged(plan).programs, strict=True):
        inputs = sum(v.nbytes for v in program.inputs)
        running = 2 * 1024 * 64 * 4
        expected = inputs + s.parameter_bytes + s.live * saved_bytes(program, staged(plan)) + running
        assert s.peak_memory == pytest.approx(expected, rel=0.1)
    assert plan.peak_memory == max(s.peak_memory for s in view(plan).stages)


def saved_bytes(program: Program, pipeline: Staged) -> int:
    """Counts the bytes of microbatch 0 that its forward fragment makes and its backward fragment reads."""
    owner = owners(program.steps, exact=True)
    fragments = fragments_of(program.steps, pipeline.shape)
    pairs = [(step, f) for step, f in zip(program.steps, fragments, strict=True) if f is not None and not f.microbatch]
    values = {owner[v] for step, f in pairs if f.kind == "F" for v in makes(step) if v in owner} - {*program.inputs}
    later = {owner.get(v, v) for step, f in pairs if f.kind != "F" for v in reads(step)}
    return sum(v.nbytes for v in values & later)


def test_figures_add_up() -> None:
    plan = planned()
    pipeline = view(plan)
    assert [s.modules for s in pipeline.stages] == [("layers.0-1",), ("layers.2-3",)]
    assert [s.parameters for s in pipeline.stages] == [2 * (8 * 8 + 8)] * 2
    assert [s.parameter_bytes for s in pipeline.stages] == [2 * 4 * (8 * 8 + 8)] * 2
    assert plan.flops == max(s.flops for s in pipeline.stages)
    for s in pipeline.stages:
        assert s.seconds + s.idle == pytest.approx(pipeline.timetable.seconds)
    step = plan.simulate()
    assert step.seconds == pytest.approx(pipeline.seconds)
    assert step.peak_memory == plan.peak_memory
    assert "waited for" in str(step)
    assert plan.simulate("a100-40").seconds != step.seconds


def test_totals_name_their_stages() -> None:
    """Figures of one device are those of the stage that has most of each; sums over the program are labeled."""
    plan = planned(stages=2, data=2)
    programs = staged(plan).programs
    sent = [sum(c.bytes for c in p.collectives) for p in programs]
    flop, held = ([measure(p) for p in programs] for measure in (flops, peak_bytes))
    assert sent[0] < sum(sent)
    assert (plan.comm_bytes, plan.flops, plan.peak_memory) == (max(sent), max(flop), max(held))
    most = {"sent per device": sent, "FLOPs per device": flop, "peak memory": held}
    assert {x.name: (x.value, x.where) for x in figures(plan) if x.name in most} == {
        name: (max(each), f"stage {each.index(max(each))} has most") for name, each in most.items()
    }
    assert [x.where for x in figures(plan) if x.name == "redundant FLOPs"] == ["all stages"]
    lines = [re.split(r"  +", line) for line in plan.full.splitlines()]
    assert ["collective", "axes", "times", "wire bytes per device, all stages"] in lines
    assert ["total", f"{len(plan.collectives)}", format_si(sum(sent), "B")] in lines
    (line,) = (line for line in plan.full.splitlines() if line.startswith("per device: "))
    assert [part.partition(" (")[2] for part in line.split(", ")] == [
        f"stage {each.index(max(each))} has most)" for each in (sent, flop, held)
    ]
    heads = {line.partition("  ")[0]: line for line in plan.text(width=120).splitlines()}
    assert [name for name in most if " has most)" not in heads[name]] == []
    assert heads["sent per device"].endswith(" has most), besides messages to other stages")
    assert "all stages" in heads["inputs"]
    assert memory_table(plan)[0].startswith(f"memory per device (stage {held.index(max(held))} has most)")
    changes = {t.figure: t.cells[0] for t in plan.diff(planned(stages=2)).totals}
    assert changes["FLOPs per device"] == f"FLOPs per device (stage {flop.index(max(flop))} has most)"
    assert changes["sent per device"] == "sent per device (stage 1 has most -> stage 0 has most)"


def test_budgets_of_stages() -> None:
    """A share is that of all stages; bytes, and the collectives that send them, are those of one stage."""
    plan = planned(stages=2, data=2)
    share = sum(r.flops for r in plan.redundant) / flops(plan.compiled.program)
    sl.redundancy_budget(max_share=share).check(plan)
    with pytest.raises(sl.ShardingError, match=r"146 FLOP of 13.5 kFLOP per device \(1.08 %, all stages\) are done"):
        sl.redundancy_budget(max_share=0.99 * share).check(plan)
    with pytest.raises(sl.ShardingError, match=r"580 bytes are sent per device \(stage 1 has most\), the") as error:
        sl.comm_budget(max_bytes=100).check(plan)
    assert len(error.value.offenders) == 1 + len(staged(plan).programs[1].collectives)


def test_messages_per_pair() -> None:
    there, back = view(planned(stages=2, data=2)).crossings
    nbytes = 4 * 16 // 4 // 2 * 8  # a device's rows of one microbatch
    assert (there.sender, there.receiver, there.per_microbatch, there.per_step) == (0, 1, (1, nbytes), (0, 0))
    assert (back.sender, back.receiver, back.per_microbatch, back.total[0]) == (1, 0, (1, nbytes), 4 + back.per_step[0])


def test_tied_parameters_have_an_owner() -> None:
    (tied,) = view(planned(tied=True)).tied
    assert str(tied).endswith("layers.0.weight lives on stage 0 and travels to stage 1: 1 message (256 B) per step")
    assert [s.parameters for s in view(planned(tied=True)).stages] == [2 * (8 * 8 + 8), 8 * 8 + 2 * 8]


def test_reasons_of_the_cut() -> None:
    assert str(view(planned())).count("cut: named by the code") == 1
    automatic = view(planned(named=False))
    assert automatic.partition is not None
    assert f"cut: automatic: {automatic.partition}" in str(automatic)


def test_a_forward_pass_holds_no_microbatch() -> None:
    pipeline = view(planned(trains=False))
    assert [s.live for s in pipeline.stages] == [0, 0]
    assert [s.parameters for s in pipeline.stages] == [2 * (8 * 8 + 8)] * 2
    assert {f.kind for f in pipeline.timetable.spans} == {"F"}


def test_pictures_have_a_row_per_stage(tmp_path: Path) -> None:
    pipeline = view(planned())
    pipeline.to_perfetto(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["stage 0", "stage 1"]
    pipeline.plot(tmp_path / "stages.svg")
    assert (tmp_path / "stages.svg").stat().st_size > 1000


def test_a_mesh_without_stages_has_no_pipeline() -> None:
    with sl.Mesh.abstract(data=2):
        plan = sl.jit(lambda x: x.sum()).plan(torch.empty(4, 2))
    assert plan.pipeline is None
    assert plan.full.endswith(plan.summary())


@pytest.mark.parametrize(
    ("function", "args", "result"),
    [
        (_block, ("h.0.attn.q",), "h.0"),
        (_block, ("0.weight",), "0"),
        (_ranges, (["0", "1", "3"], set()), ["0-1", "3"]),
        (_ranges, (["h.0", "h.1", "head", "h.2"], {"h.1"}), ["h.0", "part of h.1", "head", "h.2"]),
    ],
)
def test_ranges_of_modules(function: Callable[..., Any], args: Any, result: Any) -> None:
    value = function(*args)
    assert (value if isinstance(value, str) else list(value)) == result


def test_text() -> None:
    plan = planned(width=1024, rows=4 * 4096)
    assert str(view(plan)) == TEXT
    section = plan.full.split("\n\n")[-1].splitlines()
    assert section[0] == "pipeline"
    assert 3 <= len(section) <= 8


TEXT = """\
2 stages, 4 microbatches, schedule 1f1b: 6.12 ms per step, bubble 26.2% (simulated)
stage  modules     parameters          FLOPs      work     idle     otherwise  peak memory  live
0      layers.0-1  2.1 M       8.4 MB  172 GFLOP  4.02 ms  2.09 ms  13.6 us    185 MB       2
1      layers.2-3  2.1 M       8.4 MB  206 GFLOP  4.99 ms  1.11 ms  13.6 us    168 MB       1
stage 0 -> 1  1 message (16.8 MB) per microbatch (tanh_1)  in all 4 messages (67.1 MB)
stage 1 -> 0  1 message (16.8 MB) per microbatch (mm_2)    in all 4 messages (67.1 MB)
cut: named by the code
6.11 ms, bubble 26.2%, a column is 395 us
stage 0  01  aa2 b3 c  d
stage 1   0aa1bb2ccc3dd"""
