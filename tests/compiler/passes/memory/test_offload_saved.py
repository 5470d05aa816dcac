"""Saved values in the host's memory: how many stay, what is copied and counted, and that values are the same."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardlib as sl
from shardlib.compiler import run_passes
from shardlib.compiler.passes.memory.offload_saved import offload
from shardlib.compiler.program.buffers import alive
from shardlib.compiler.program.check_order import check
from shardlib.compiler.program.steps import Free, Program, Start, Var, makes
from shardlib.compiler.program.text import parse, show
from shardlib.compiler.simulate.timeline import HOST
from shardlib.ops.offload import HOST_MEMORY
from shardlib.sharding.mesh.machine import Device, Link, Machine
from tests.compiler.passes.comm.test_schedule import WIDTH, Model, step
from tests.helpers.ranks import run_ranks
from tests.models import w1

LAYERS, ROWS, DEVICES = 4, 512, 4
VALUE = 4 * ROWS * WIDTH // DEVICES  # bytes of one saved value: a layer keeps two
SAVE = "b@data _"
# Copies take less than to make anything again.
NEAR_HOST = Machine(Device({"f32": 1e9}, bandwidth=1e12, memory=1e9, host=1e12), Link(1e9), Link(1e9))


def built(how: sl.Schedule | None, mesh: sl.Mesh, memory: int | None = None) -> tuple[Any, tuple[Any, ...]]:
    torch.manual_seed(0)
    m, x = Model(LAYERS), torch.randn(ROWS, WIDTH)
    with mesh:
        optimizer, placed = torch.optim.SGD(m.parameters(), lr=0.1), sl.shard(x, SAVE)
        return sl.jit(step, schedule=how, memory=memory), (m, optimizer, placed)


@functools.cache
def planned(how: sl.Schedule | None) -> Program:
    mesh = sl.Mesh(data=DEVICES)
    train, given = built(how, mesh)
    with mesh:
        program: Program = train.plan(*given).compiled.program
    return program


def trained(how: sl.Schedule | None, memory: int | None = None) -> list[torch.Tensor]:
    mesh = sl.Mesh(data=dist.get_world_size() if dist.is_initialized() else DEVICES, machine=NEAR_HOST)
    train, given = built(how, mesh, memory)
    with mesh:
        losses = [train(*given).full_tensor() for _ in range(2)]
        return [*losses, *(p.detach().clone() for p in given[0].parameters())]


@functools.cache
def plain() -> list[torch.Tensor]:
    return trained(None)


def resident(program: Program, saved: set[str]) -> Iterator[int]:
    """Bytes of saved values on the device, step by step."""
    held: dict[Var, int] = {}
    for one in program.steps:
        for v in one.outs if isinstance(one, Start) else makes(one):
            if v.name.removesuffix(".back") in saved and not v.host:
                held[v] = v.nbytes
        yield sum(held.values())
        for v in one.vars if isinstance(one, Free) else ():
            held.pop(v, None)


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_so_many_layers_stay(ahead: int) -> None:
    plain, moved = planned(None), planned(sl.Schedule(prefetch=ahead, offload="saved"))
    sent = [c for c in moved.copied if c.kind == "to_host"]
    saved = {c.source.name for c in planned(sl.Schedule(prefetch=0, offload="saved")).copied}
    assert [c.source.nbytes for c in sent] == [VALUE] * 2 * (LAYERS - 1 - ahead), "the last layers stay"
    assert sum(c.kind == "to_device" for c in moved.copied) == len(sent)
    assert max(resident(plain, saved)) == 2 * VALUE * (LAYERS - 1)
    reads = 0 if ahead else VALUE  # the input of a layer, which this still reads
    assert max(resident(moved, saved)) <= 2 * VALUE * (1 + ahead) + reads
    assert max(alive(moved, host=True)) == sum(c.source.nbytes for c in sent)
    assert max(alive(moved)) < max(alive(plain))


@pytest.mark.long
def test_values_and_counts_are_as_planned() -> None:
    how = sl.Schedule(offload="saved")
    sent = sum(c.source.nbytes for c in planned(how).copied if c.kind == "to_host")
    before = plain()
    start = HOST_MEMORY.sent, HOST_MEMORY.fetched, HOST_MEMORY.held
    HOST_MEMORY.peak = HOST_MEMORY.held
    after = trained(how)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    moved = HOST_MEMORY.sent - start[0], HOST_MEMORY.fetched - start[1]
    assert moved == (2 * DEVICES * sent,) * 2, "two steps, on all devices"
    assert HOST_MEMORY.held == start[2], "nothing stays there"
    assert HOST_MEMORY.peak - start[2] == DEVICES * sent


def _counted() -> tuple[int, int, int, bool]:
    before = trained(None)
    start = HOST_MEMORY.sent, HOST_MEMORY.fetched
    after = trained(sl.Schedule(offload="saved"))
    same = all(torch.equal(a, b) for a, b in zip(before[:2], after[:2], strict=True))
    sent, fetched = HOST_MEMORY.sent - start[0], HOST_MEMORY.fetched - start[1]
    under = trained(None, 280_000)  # three quarters of what it needs
    same = same and all(torch.equal(a, b) for a, b in zip(before[:2], under, strict=False))
    assert HOST_MEMORY.sent > start[0] + sent
    return sent, fetched, HOST_MEMORY.held, same


@pytest.mark.long
@pytest.mark.ranks
def test_on_ranks() -> None:
    sent = 2 * (LAYERS - 2) * VALUE * DEVICES // 2
    assert run_ranks(_counted, 2) == [(2 * sent, 2 * sent, 0, True)] * 2


@pytest.mark.long
def test_a_budget_moves_what_is_copied_faster_than_it_is_made_again() -> None:
    with sl.Mesh(data=DEVICES, machine=NEAR_HOST) as mesh:
        train, given = built(None, mesh)
        most = train.plan(*given).peak_memory
        train, given = built(None, mesh, budget := int(0.8 * most))
        plan, start = train.plan(*given), HOST_MEMORY.sent
        losses = [train(*given).full_tensor() for _ in range(2)]
    told, copied = plan.compiled.recomputed, plan.compiled.program.copied
    assert 0 < told.moved == len(copied) // 2
    assert plan.peak_memory <= budget < most
    assert f"memory={budget:,} B" in plan.summary()
    assert f"{told.moved} values wait in the host's memory" in plan.summary()
    assert all(torch.equal(a, b) for a, b in zip(plain(), [*losses, *given[0].parameters()], strict=True))
    assert HOST_MEMORY.sent - start == 2 * DEVICES * sum(c.source.nbytes for c in copied if c.kind == "to_host")


@pytest.mark.long
def test_a_budget_moves_nothing_where_the_schedule_or_nobody_may() -> None:
    """What the schedule names is moved alone; of a backward pass outside there is no copy."""
    with sl.Mesh(data=DEVICES, machine=NEAR_HOST) as mesh:
        most = built(None, mesh)[0].plan(*built(None, mesh)[1]).peak_memory
        train, given = built(sl.Schedule(offload="add"), mesh, int(0.8 * most))
        copied = train.plan(*given).compiled.program.copied
        assert {c.source.name.split("_")[0] for c in copied if c.kind == "to_host"} == {"add"}
        x, w = torch.empty(512, 64), torch.empty(64, 64, requires_grad=True)
        chain = lambda x, w: (((x @ w).tanh() @ w).tanh() @ w).tanh().sum()
        most = sl.jit(chain, in_specs=(SAVE, None)).plan(x, w).peak_memory
        plan = sl.jit(chain, in_specs=(SAVE, None), memory=int(0.9 * most)).plan(x, w)
        assert plan.compiled.recomputed.values
        assert not plan.compiled.program.copied


@pytest.mark.long
@pytest.mark.parametrize(
    ("names", "made"),
    [(("tanh",), {"tanh"}), (("add",), {"add"}), (("mm",), set()), (("tanh", "add"), {"tanh", "add"})],
)
def test_ops_by_name(names: tuple[str, ...], made: set[str]) -> None:
    program = planned(sl.Schedule(offload=names))
    assert {c.source.name.split("_")[0] for c in program.copied if c.kind == "to_host"} == made
    assert show(parse(show(program))) == show(program)


@pytest.mark.long
def test_a_model_with_views_and_state() -> None:
    """W1 keeps views of what it saves, and writes new parameters over old ones."""
    from tests.models import w1_sharded

    config = replace(w1.TINY, layers=2, batch=8)
    mode = w1.modes(config)["tp"]
    params, batch = w1.init(config), w1.batch(config)
    found = []
    for how in (None, sl.Schedule(prefetch=0, offload="saved")):
        with w1_sharded.mesh_of(mode):
            state, *placed = w1_sharded.place(mode, params, *batch)
            run = sl.jit(
                lambda params, tokens, targets: w1.step(params, tokens, targets, config),
                in_specs=(mode.params, mode.batch, mode.batch), out_specs=(None, mode.params), schedule=how,
            )  # fmt: skip
            plan = run.plan(state, *placed)
            value, new = run(state, *placed)
            found.append([value.full_tensor(), *(x.full_tensor() for x in torch.utils._pytree.tree_leaves(new))])
    assert plan.compiled.program.copied
    assert plan.host_memory > 0
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.long
def test_micro_batches_each_have_their_own() -> None:
    def twice(m: Any, x: torch.Tensor) -> torch.Tensor:
        losses = [m(part).square().mean() for part in x.chunk(2)]
        for loss in losses:
            loss.backward()
        return sum(losses).detach()

    def apart(m: Any, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for part in x.chunk(2):
            loss = m(part).square().mean()
            loss.backward()
            total = total + loss.detach()
        return total

    for fn in (twice, apart):
        found = []
        for how in (None, sl.Schedule(offload="saved")):
            torch.manual_seed(0)
            m, x = Model(), torch.randn(ROWS, WIDTH)
            with sl.Mesh(data=2):
                run = sl.jit(fn, in_specs=(None, SAVE), schedule=how)
                copied = run.plan(m, x).compiled.program.copied
                found.append([run(m, x).full_tensor(), *(p.grad for p in m.parameters())])
        assert copied
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


FORWARD = """
    mesh a=2
    input x: f32[8]
    h: f32[8] = aten.exp.default(x)
    v: f32[4, 2] = aten.reshape.default(h, [4, 2])
    k: f32[8] = aten.neg.default(h)
    return k, v
"""


def test_what_is_not_saved_is_left() -> None:
    """Without a backward pass; results; what nobody is asked to move."""
    program = parse(FORWARD)
    assert offload(program, sl.Schedule(offload="saved")) is program
    assert offload(program, chosen=program.entry_values) is program
    assert offload(program) is program


@pytest.mark.long
def test_chosen_values_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered: list[Program] = []
    kept = run_passes.run_passes
    monkeypatch.setattr(run_passes, "run_passes", lambda p, **how: (lowered.append(p), kept(p, **how))[1])
    planned.__wrapped__(None)
    (bare,) = lowered
    one = {v for s in bare.steps for v in makes(s) if v.name in ("tanh_1", "tanh_5")}
    made = check(offload(bare, sl.Schedule(prefetch=0), one))
    assert [(c.kind, c.source.name) for c in made.copied] == [("to_host", "tanh_1"), ("to_device", "tanh_1.host")]


@pytest.mark.long
def test_copies_have_a_stream_of_their_own() -> None:
    mesh = sl.Mesh(data=DEVICES)
    train, given = built(sl.Schedule(offload="saved"), mesh)
    h100 = Machine.preset("h100")
    with mesh:
        plan = train.plan(*given)
    for host in (h100.device.host, h100.device.host / 1e6):
        machine = replace(h100, device=replace(h100.device, host=host))
        found = plan.simulate(machine)
        each = machine.device.launch + VALUE / host
        assert found.timeline.busy(HOST) == pytest.approx(len(plan.compiled.program.copied) * each)
        assert (found.exposed > len(plan.compiled.program.copied) / 2 * each) == (host < 1e9), (
            "slow links are waited for"
        )
    assert HOST in str(found)
    assert plan.comm_bytes == sum(c.bytes for c in plan.collectives), "copies are none of them"
    assert "! to_host" in plan.full
    assert "in the host's memory: at most" in plan.summary()


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("parts", [lambda x: x.chunk(3, -1), lambda x: x.view(-1, 8, 3).unbind(-1)])
def test_views_with_several_results(parts: Any, ahead: int) -> None:
    """Each is read by itself, and all are taken again at once."""
    torch.manual_seed(0)
    ws, x = [torch.randn(8, 24, dtype=torch.float64) for _ in range(4)], torch.randn(8, 8, dtype=torch.float64)

    def loss(ws: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        for w in ws:
            a, b, c = parts(x @ w)
            x = torch.tanh(a * b) + c.sin()
        return x.square().mean()

    how = sl.Schedule(offload="saved", prefetch=ahead)
    with sl.Mesh(data=2):
        made = sl.jit(torch.func.grad(loss), in_specs=(None, "b@data _"), schedule=how)
        found, plan = made(ws, x), made.plan(ws, x)
    assert plan.host_memory
    for have, want in zip(found, torch.func.grad(loss)(ws, x), strict=True):
        torch.testing.assert_close(have.full_tensor(), want)


def test_names_of_nothing() -> None:
    with pytest.raises(sl.ShardingError) as error:
        planned(sl.Schedule(offload=["tanhh", "mm", "nosuch"]))
    assert "'tanhh' is none; near it are 'tanh'" in str(error.value)
    assert "'nosuch' is none" in str(error.value)
    assert "'mm'" not in str(error.value)


OUTSIDE = {
    "saved": {"schedule": sl.Schedule(offload="saved")},
    "at once": {"schedule": sl.Schedule(prefetch=0, offload="saved")},
    "by name": {"schedule": sl.Schedule(offload=["tanh"])},
    "made again": {"schedule": sl.Schedule(offload="saved"), "remat": "full"},
}


def outside(way: dict[str, Any], model: Model, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """A loss whose backward pass is the caller's."""
    sl.parallelize(model, strategy="fsdp", **way)
    return sl.shard(model(x), SAVE).square().mean(), model


@pytest.mark.filterwarnings(
    "ignore::shardlib.compiler.passes.memory.recompute.RematWarning"
)  # so small a model's peak is elsewhere
@pytest.mark.parametrize("way", OUTSIDE)
def test_a_backward_pass_outside(way: str) -> None:
    torch.manual_seed(0)
    model, x = Model(6), torch.randn(ROWS, WIDTH)
    plain = copy.deepcopy(model)
    want = plain(x).square().mean()
    for _ in range(2):
        want.backward(retain_graph=True)
    with sl.Mesh(data=DEVICES):
        held = HOST_MEMORY.held
        loss, _ = outside(OUTSIDE[way], model, x)
        moved = HOST_MEMORY.held - held
        assert moved > 0
        for _ in range(2):  # what was saved is there as long as the graph
            loss.backward(retain_graph=True)
        assert HOST_MEMORY.held - held == moved
    torch.testing.assert_close(loss.full_tensor(), want)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    del loss
    assert HOST_MEMORY.held == held


@pytest.mark.long
def test_figures_of_a_backward_pass_outside() -> None:
    plans = {}
    for how in (None, sl.Schedule(offload="saved")):
        torch.manual_seed(0)
        model, x = Model(6), torch.randn(ROWS, WIDTH)
        with sl.Mesh(data=DEVICES):
            plans[how] = sl.jit(model, schedule=how).plan(sl.shard(x, SAVE))
    before, after = plans.values()
    halves = after.compiled.halves
    sent = [c for c in halves.forward.copied if c.kind == "to_host"]
    assert [c.kind for c in halves.backward.copied] == ["to_device"] * len(sent)
    assert len(sent) > 4
    assert sum(c.source.nbytes for c in sent) == after.host_memory > 0 == before.host_memory
    assert after.peak_memory < before.peak_memory
    assert show(parse(show(halves.joint))) == show(halves.joint)
    assert "in the host's memory: at most" in after.summary()


@pytest.mark.long
def test_gradients_of_gradients() -> None:
    torch.manual_seed(0)
    w, x = torch.randn(8, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)

    def deep(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = torch.tanh(x @ w)
        return x.square().sum()

    def penalty(fn: Any, w: torch.Tensor) -> torch.Tensor:
        (grad,) = torch.autograd.grad(fn(w, x), w, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), w)
        return second

    with sl.Mesh(data=2):
        placed = sl.shard(w, "_ f@data").requires_grad_()
        found = penalty(sl.jit(deep, schedule=sl.Schedule(prefetch=0, offload="saved")), placed)
    torch.testing.assert_close(found.full_tensor(), penalty(deep, w.requires_grad_()))


def test_state_of_a_step_outside() -> None:
    m = torch.nn.Linear(4, 4)
    with sl.Mesh(data=2), pytest.raises(sl.ShardingError, match="a backward pass is outside of the jitted function"):
        sl.jit(lambda x: m(x).tanh(), schedule=sl.Schedule(offload=["saved", "parameters"]))(torch.ones(4, 4))


def test_a_name_is_one_of_names() -> None:
    assert sl.Schedule(offload="mm") == sl.Schedule(offload=["mm"]) == sl.Schedule(offload=("mm",))


@pytest.mark.parametrize("said", ["", ("",), (), (3,), 3])
def test_what_is_no_choice(said: Any) -> None:
    with pytest.raises(sl.ShardingError, match="is none of 'saved', 'moments', 'parameters', and no names of ops"):
        sl.Schedule(offload=said)
