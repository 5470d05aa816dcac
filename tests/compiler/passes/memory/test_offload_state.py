"""What optimizers keep, and parameters, in the host's memory between calls: values, what is there when, and borders."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardlib as sl
from shardlib.compiler.passes.memory.offload_state import offload_state
from shardlib.compiler.program.check_order import check, faults
from shardlib.compiler.program.steps import Program, Start, Var, makes
from shardlib.compiler.program.text import parse, show
from shardlib.compiler.simulate.timeline import HOST
from shardlib.ops.offload import HOST_MEMORY
from shardlib.tensor.hooks import tensor_hooks
from shardlib.tensor.host_offload import OFFLOADED
from tests.helpers.ranks import run_ranks
from tests.validation.peaks import counting

WIDTH = 8
MOMENTS, BOTH = sl.Schedule(offload="moments"), sl.Schedule(offload=["moments", "parameters"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    """Blocks between a table and a head that are one tensor."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32, bias=False)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.table(ids)))
        return out


def step(model: Any, opt: Any, ids: Tensor) -> Tensor:
    loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    return loss


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "one by one": lambda ps: torch.optim.Adam(ps, lr=0.01, weight_decay=0.1, foreach=False),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9, nesterov=True),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.01),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.9),
}


def ids() -> Tensor:
    return torch.arange(8 * 4).view(8, 4) * 7 % 32


def trained(
    mesh: dict[str, int], how: sl.Schedule | None, opt: str = "adamw", layers: int = 1, **way: Any
) -> tuple[Any, Any, Any, sl.Mesh]:
    """A model, its optimizer and its step, three steps on; one device where the mesh has no axes."""
    torch.manual_seed(0)
    model = Model(layers).double()
    if not mesh:
        optimizer = OPTIMIZERS[opt](model.parameters())
        for _ in range(3):
            step(model, optimizer, ids())
        return model, optimizer, step, sl.Mesh.abstract(data=1)
    with sl.Mesh(**mesh) as on:
        specs = {"*.up.weight": "f@tensor _", "*.up.bias": "f@tensor", "*.down.weight": "_ f@tensor"}
        sl.parallelize(model, specs if "tensor" in mesh else None, strategy=way.pop("strategy", "fsdp"))
        optimizer, train = OPTIMIZERS[opt](model.parameters()), sl.jit(step, schedule=how, **way)
        for _ in range(3):
            train(model, optimizer, ids())
    return model, optimizer, train, on


def same(a: Any, b: Any) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q, rtol=0, atol=1e-10, msg=name)


def moments(optimizer: Any) -> list[Tensor]:
    return [x for kept in optimizer.state.values() for x in kept.values() if isinstance(x, Tensor) and x.dim()]


def held(xs: Iterator[Tensor] | list[Tensor]) -> int:
    """Bytes of pieces that are in the host's memory, each once."""
    pieces = {id(x): x.nbytes for one in xs for x in one.__dict__.get(OFFLOADED, ())}
    return sum(pieces.values())


@pytest.mark.sampled(24, first=2)
@pytest.mark.parametrize("words", [("moments",), ("parameters",), ("saved", "moments", "parameters")])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
@pytest.mark.parametrize("opt", OPTIMIZERS)
def test_values_are_the_same(opt: str, strategy: str, words: tuple[str, ...]) -> None:
    model, optimizer, *_ = trained({"data": 2, "tensor": 2}, sl.Schedule(offload=words), opt, strategy=strategy)
    one, plain, *_ = trained({}, None, opt)
    assert all(OFFLOADED in p.__dict__ for p in model.parameters()) == ("parameters" in words)
    assert all(OFFLOADED in x.__dict__ for x in moments(optimizer)) == ("moments" in words)
    same(model, one)
    for a, b in zip(moments(optimizer), moments(plain), strict=True):
        torch.testing.assert_close(a.full_tensor(), b, rtol=0, atol=1e-10)


def _here(program: Program) -> Iterator[int]:
    """Bytes of state on the device that came from the host, step by step."""
    now: dict[Var, int] = {}
    for one in program.steps:
        for v in one.outs if isinstance(one, Start) else makes(one):
            if isinstance(one, Start) and one.first.kind == "to_device":
                now[v] = v.nbytes
        yield sum(now.values())
        for v in getattr(one, "vars", ()):
            now.pop(v, None)


@pytest.mark.long
@pytest.mark.sampled(4)
@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("words", ["moments", "parameters"])
def test_so_many_layers_are_on_the_device(words: str, ahead: int) -> None:
    how = sl.Schedule(prefetch=ahead, offload=words)
    model, optimizer, train, mesh = trained({"data": 4}, how, layers=3 + 2 * ahead)
    with mesh:
        program = train.plan(model, optimizer, ids()).compiled.program
    state = moments(optimizer) if words == "moments" else [*model.parameters()]
    total = sum(x.to_local().nbytes for x in state)
    layer = sum(p.to_local().nbytes for p in model.blocks[0].parameters()) * (2 if words == "moments" else 1)
    table = model.table.weight.to_local().nbytes * (2 if words == "moments" else 1)
    horizon = 1 + ahead if words == "moments" else 1 + 2 * ahead  # which are gathered, as far ahead as they come
    assert max(_here(program)) <= horizon * layer + 2 * table < total
    assert sum(v.nbytes for v in program.inputs if v.host) == total


def copied(plan: sl.Plan, kind: str) -> int:
    return sum(c.source.nbytes for c in plan.compiled.program.copied if c.kind == kind)


@pytest.mark.long
def test_copies_are_as_planned() -> None:
    before = HOST_MEMORY.held
    model, optimizer, train, mesh = trained({"data": 4}, BOTH)
    state = [*model.parameters(), *moments(optimizer)]
    assert HOST_MEMORY.held - before == held(state) == sum(x.nbytes for x in state)
    with mesh:
        plan = train.plan(model, optimizer, ids())
        start = HOST_MEMORY.sent, HOST_MEMORY.fetched
        train(model, optimizer, ids())
    moved = HOST_MEMORY.sent - start[0], HOST_MEMORY.fetched - start[1]
    assert moved == (4 * copied(plan, "to_host"), 4 * copied(plan, "to_device"))
    assert copied(plan, "to_host") == sum(x.nbytes for x in state) // 4, "what is new, once"
    assert plan.host_memory >= held(state) // 4
    assert "in the host's memory: at most" in plan.full
    assert plan.simulate("h100").timeline.busy(HOST) > 0


def test_the_first_call_has_them_there_as_well() -> None:
    """What an optimizer makes at its first step goes to the host as it is made, and comes as the plan says."""
    torch.manual_seed(0)
    model = Model(1).double()
    with sl.Mesh(data=4):
        sl.parallelize(model, strategy="fsdp")
        optimizer, train = OPTIMIZERS["adamw"](model.parameters()), sl.jit(step, schedule=MOMENTS)
        plan, start = train.plan(model, optimizer, ids()), HOST_MEMORY.fetched
        assert not optimizer.state
        train(model, optimizer, ids())
    assert HOST_MEMORY.fetched - start == 4 * copied(plan, "to_device")


def _rewritten(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    for i, x in enumerate(moments(optimizer)):
        [x.zero_, lambda x=x: x.fill_(0.001), lambda x=x: x.add_(0.001)][i % 3]()


def _given_data(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.data = p.detach() * 0.5


def _loaded(model: Any, optimizer: Any) -> None:
    kept = {k: x * 0.5 for k, x in model.state_dict().items()}
    model.load_state_dict(kept)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _frozen(model: Any, optimizer: Any) -> None:
    for p in model.blocks[0].parameters():
        p.requires_grad_(False)


def _looked_at(model: Any, optimizer: Any) -> None:
    repr(model.table.weight)
    [x.sum() for x in moments(optimizer)]
    model(ids())


def _slower(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


@pytest.mark.long
@pytest.mark.sampled(3)
@pytest.mark.parametrize("between", [_rewritten, _given_data, _loaded, _frozen, _looked_at, _slower])
def test_what_happens_between_calls(between: Any) -> None:
    one, plain, *_ = trained({}, None)
    model, optimizer, train, mesh = trained({"data": 2, "tensor": 2}, BOTH)
    between(one, plain)
    step(one, plain, ids())
    with mesh:
        between(model, optimizer)
        train(model, optimizer, ids())
    assert all(OFFLOADED in p.__dict__ for p in model.parameters())
    same(model, one)


def test_who_shows_its_memory_keeps_it_on_the_device() -> None:
    one, plain, *_ = trained({}, None)
    model, optimizer, train, mesh = trained({"data": 4}, BOTH)
    with mesh:
        bias, shown = model.blocks[0].up.bias, [m.blocks[0].up.bias.detach()[:4] for m in (model, one)]
        step(one, plain, ids())
        train(model, optimizer, ids())
        assert OFFLOADED not in bias.__dict__
        torch.testing.assert_close(shown[0].full_tensor(), shown[1], rtol=0, atol=1e-10)
        shown.clear()
        step(one, plain, ids())
        train(model, optimizer, ids())
        assert OFFLOADED in bias.__dict__
    same(model, one)


def test_copies_of_a_model_are_its_own() -> None:
    model, optimizer, train, mesh = trained({"data": 4}, BOTH)
    with mesh:
        other = copy.deepcopy(model)
        before = [p.full_tensor() for p in other.parameters()]
        train(model, optimizer, ids())
        assert all(torch.equal(p.full_tensor(), x) for p, x in zip(other.parameters(), before, strict=True))
        assert not torch.equal(model.table.weight.full_tensor(), before[0])


def test_results_that_are_state() -> None:
    """A parameter that is returned, a view of one, and one that nothing trains."""
    with sl.Mesh(data=4):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()
        one = copy.deepcopy(model)
        for m in (model, one):
            m[1].weight.requires_grad_(False)
        sl.parallelize(model, strategy="fsdp")

        def returning(m: Any, opt: Any, x: Tensor) -> tuple[Tensor, ...]:
            m(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
            return m[1].weight, m[1].weight.t()[1:], m[0].weight.detach(), m[1].bias.detach() + 1

        x, train = torch.randn(8, 8).double(), sl.jit(returning, schedule=BOTH)
        a, b = (torch.optim.Adam([p for p in m.parameters() if p.requires_grad]) for m in (model, one))
        for _ in range(2):
            for got, want in zip(train(model, a, x), returning(one, b, x), strict=True):
                torch.testing.assert_close(got.full_tensor(), want, rtol=0, atol=1e-12)
    same(model, one)


def test_a_step_without_gradients() -> None:
    """Weights come in for a forward pass alone, and stay on the host."""
    torch.manual_seed(0)
    model = Model(1)
    want = model(ids())
    with sl.Mesh(data=2):
        sl.parallelize(model, strategy="fsdp")
        run = torch.no_grad()(sl.jit(lambda m, x: m(x), schedule=sl.Schedule(offload="parameters")))
        for _ in range(2):
            torch.testing.assert_close(run(model, ids()).full_tensor(), want)
    assert all(OFFLOADED in p.__dict__ for p in model.parameters())


@pytest.mark.long
def test_under_a_budget() -> None:
    _, _, _, mesh = plain = trained({"data": 4}, None)
    with mesh:
        peak = plain[2].plan(plain[0], plain[1], ids()).peak_memory
    model, optimizer, train, mesh = trained({"data": 4}, MOMENTS, memory=int(0.8 * peak))
    with mesh:
        plan = train.plan(model, optimizer, ids())
    assert plan.peak_memory <= 0.8 * peak
    same(model, trained({}, None)[0])


@pytest.mark.long
def test_programs_are_checked_and_print_and_parse() -> None:
    model, optimizer, train, mesh = trained({"data": 2}, BOTH)
    with mesh:
        program: Program = train.plan(model, optimizer, ids()).compiled.program
    assert show(parse(show(program))) == show(program)
    assert "away" in show(program)
    assert check(program) is program
    wrong = parse(show(program).replace(" away", "", 1).replace("start to_device", "start to_host", 1))
    assert any("is in the host's memory" in fault or "is not made yet" in fault for fault in faults(wrong))
    assert offload_state(program, ()) is program


def _on_ranks() -> tuple[bool, bool]:
    model, optimizer, *_ = trained({"data": dist.get_world_size()}, BOTH)
    away = all(OFFLOADED in x.__dict__ for x in (*model.parameters(), *moments(optimizer)))
    pairs = zip(model.parameters(), trained({}, None)[0].parameters(), strict=True)
    return away, all(torch.allclose(p.full_tensor(), q, atol=1e-10) for p, q in pairs)


@pytest.mark.long
@pytest.mark.ranks
def test_on_ranks() -> None:
    assert run_ranks(_on_ranks, 2) == [(True, True)] * 2


def test_what_there_is_not() -> None:
    model = nn.Linear(4, 4)
    with sl.Mesh(data=2), pytest.raises(sl.ShardingError) as error:
        sl.jit(step_of_one, schedule=BOTH).plan(model, torch.ones(2, 4))
    assert str(error.value) == (
        "offload=('moments', 'parameters') moves what there is not:\n"
        "  * step_of_one is given no optimizer\n"
        "  * model.weight of shape [4, 4] is a plain tensor\n"
        "  * model.bias of shape [4] is a plain tensor\n"
        'Rule: "moments" are what a torch.optim optimizer keeps of parameters on a mesh, "parameters" these; they live '
        "in the host's memory between the calls of a function that takes them\n"
        "Remedy: sl.parallelize(model) first, then sl.jit(step, schedule=...)(model, optimizer, batch)"
    )


def step_of_one(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).sum()
    loss.backward()
    return loss


@pytest.mark.parametrize("mesh", [{"data": 1}, {"data": 2, "tensor": 1}])
def test_axes_of_one_device(mesh: dict[str, int]) -> None:
    model, optimizer, *_ = trained(mesh, BOTH)
    assert all(OFFLOADED in x.__dict__ for x in (*model.parameters(), *moments(optimizer)))


@pytest.mark.long
def test_moments_that_come_later() -> None:
    """Of an optimizer that makes them in its first step, and of one that is not stepped in each call."""

    def now_and_then(model: Any, opt: Any, ids: Tensor, steps: bool) -> None:
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        if steps:
            opt.step()
            opt.zero_grad()

    torch.manual_seed(0)
    models = [Model(1).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    with sl.Mesh(data=2):
        sl.parallelize(models[0], strategy="fsdp")
        opts = [torch.optim.Rprop(m.parameters(), lr=0.01) for m in models]
        train = sl.jit(now_and_then, schedule=MOMENTS, static_argnums=3)
        for steps in (False, True, False, True):
            train(models[0], opts[0], ids(), steps)
            now_and_then(models[1], opts[1], ids(), steps)
    assert all(OFFLOADED in x.__dict__ for x in moments(opts[0]))
    same(*models)


@pytest.mark.long
def test_its_own_data() -> None:
    model, _, _, mesh = trained({"data": 2}, BOTH)
    bias = model.blocks[0].up.bias
    with mesh:
        before = copy.deepcopy(bias).full_tensor()
        bias.data = bias
    assert torch.equal(bias.full_tensor(), before)


def test_data_that_is_exchanged() -> None:
    model, optimizer, train, mesh = trained({"data": 2}, BOTH)
    a, b = model.blocks[0].norm.weight, model.blocks[0].norm.bias
    with mesh:
        a.data, b.data = b.data, a.data
        train(model, optimizer, ids())
    assert OFFLOADED in a.__dict__
    assert OFFLOADED in b.__dict__


@pytest.mark.long
def test_who_reads_in_between_delays_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that began before a step ends with what the step made."""
    one, plain, *_ = trained({}, None)
    step(one, plain, ids())
    step(one, plain, ids())
    model, optimizer, train, mesh = trained({"data": 2}, BOTH)
    with mesh:
        bias, remake = model.blocks[0].up.bias, tensor_hooks.restore_shards

        def slow(x: Any) -> Any:
            made = remake(x)
            if x is bias:
                monkeypatch.setattr(tensor_hooks, "restore_shards", remake)
                train(model, optimizer, ids())
            return made

        monkeypatch.setattr(tensor_hooks, "restore_shards", slow)
        bias.to_local()
        assert OFFLOADED in bias.__dict__
        train(model, optimizer, ids())
    same(model, one)


def _other_data(model: Any, opt: Any, ids: Tensor) -> None:
    """Each parameter, and what the optimizer keeps, is another tensor after it."""
    step(model, opt, ids)
    with torch.no_grad():
        for p in model.parameters():
            p.data = p * 0.9
            opt.state[p]["exp_avg"] = opt.state[p]["exp_avg"] * 0.5


@pytest.mark.long
def test_what_is_put_in_place_of_state_lives_there_as_well() -> None:
    one, plain, *_ = trained({}, None)
    model, optimizer, _, mesh = trained({"data": 2, "tensor": 2}, BOTH)
    train = sl.jit(_other_data, schedule=BOTH)
    for _ in range(3):
        _other_data(one, plain, ids())
        with mesh:
            train(model, optimizer, ids())
        assert all(OFFLOADED in x.__dict__ for x in (*model.parameters(), *moments(optimizer)))
    same(model, one)
    for a, b in zip(moments(optimizer), moments(plain), strict=True):
        torch.testing.assert_close(a.full_tensor(), b, rtol=0, atol=1e-10)


def test_an_alias_of_what_is_away_is_away() -> None:
    want, (model, *_, mesh) = trained({}, None)[0].table.weight, trained({"data": 2}, BOTH)
    with mesh, torch.no_grad():
        p, start = model.table.weight, HOST_MEMORY.fetched
        alias, other = p.detach(), p.data
        assert HOST_MEMORY.fetched == start
        assert all(OFFLOADED in x.__dict__ for x in (p, alias, other))
        alias.mul_(2)
        for x in (p, alias, other):
            assert OFFLOADED not in x.__dict__
            torch.testing.assert_close(x.full_tensor(), 2 * want)


@pytest.mark.long
@pytest.mark.parametrize("background", [False, True])
def test_checkpoints_are_written_from_there(tmp_path: Any, background: bool) -> None:
    model, optimizer, train, mesh = trained({"data": 4}, BOTH)
    with mesh:
        train(model, optimizer, ids())
        start, checkpoints = HOST_MEMORY.fetched, sl.Checkpoints(tmp_path)
        checkpoints.save(1, {"model": model, "opt": optimizer}, background=background)
        checkpoints.wait()
        assert HOST_MEMORY.fetched == start
        assert all(OFFLOADED in x.__dict__ for x in (*model.parameters(), *moments(optimizer)))
        train(model, optimizer, ids())
        checkpoints.load({"model": model, "opt": optimizer})
    one, plain, *_ = trained({}, None)
    step(one, plain, ids())
    same(model, one)
    for a, b in zip(moments(optimizer), moments(plain), strict=True):
        torch.testing.assert_close(a.full_tensor(), b, rtol=0, atol=1e-10)


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_state_elsewhere_holds_what_the_plan_says_and_less(strategy: str) -> None:
    def step(m: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
        opt.zero_grad()
        loss: Tensor = m(x)
        loss.backward()
        opt.step()
        return loss.detach()

    def trained(offload: Any) -> tuple[int, list[Tensor]]:
        found: dict[Any, dict[Any, int]] = {}
        with sl.Mesh(data=4), counting(found):
            model = sl.parallelize(_Stack(), {}, strategy=strategy)
            opt = torch.optim.Adam(model.parameters(), lr=1e-2)
            jitted = sl.jit(step, schedule=sl.Schedule(offload=offload))
            losses = [jitted(model, opt, torch.ones(8, 16) / n) for n in (1, 2, 3)]
            planned = jitted.plan(model, opt, torch.ones(8, 16)).peak_memory
        assert planned in [max(by_device.values()) for by_device in found.values() if by_device]
        return planned, [x.full_tensor() for x in (*losses, *model.parameters())]

    most, expected = trained(None)
    peaks = {}
    for offload in ("moments", "parameters", ("moments", "parameters")):
        peaks[offload], values = trained(offload)
        torch.testing.assert_close(values, expected, rtol=0, atol=0)
    assert peaks["moments", "parameters"] < min(peaks["moments"], peaks["parameters"])
    assert max(peaks.values()) < most
