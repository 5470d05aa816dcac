"""`parallelize`: modules whose parameters live on a mesh train as on one device."""

from __future__ import annotations

import copy
import io
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import rnn

import shardlib as sl
from shardlib import Mesh, ShardedTensor, ShardingError
from shardlib.nn.forward import EagerWarning
from tests.helpers.ranks import only, run_ranks


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks, a tied table, statistics of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block(8, 12) for _ in range(2))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        x = self.norm(self.table(tokens).transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * scale


SPECS = {
    "*.up.weight": "ff@tensor embed",
    "*.up.bias": "ff@tensor",
    "*.down.weight": "embed ff@tensor",
    "table.weight": "vocab@tensor embed",
}
TOKENS = [torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(i)) for i in range(3)]


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def train(model: nn.Module, place: Callable[[Tensor], Tensor], make: Any = torch.optim.Adam) -> list[float]:
    opt, losses = make(model.parameters(), lr=0.05), []
    for tokens in map(place, TOKENS):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def whole(x: Tensor) -> Tensor:
    return x.detach().full_tensor() if isinstance(x, ShardedTensor) else x.detach()


def same(model: nn.Module, plain: nn.Module) -> None:
    mine, theirs = model.state_dict(), plain.state_dict()
    assert mine.keys() == theirs.keys()
    for name, x in theirs.items():
        torch.testing.assert_close(whole(mine[name]), x, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.long
@pytest.mark.sampled(6, first=2)
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize(
    "axes", [{"data": 2, "tensor": 2}, {"data": 2, "tensor": 4}, {"data": 1, "tensor": 3}], ids=str
)
def test_it_trains_as_on_one_device(axes: dict[str, int], make: Any) -> None:
    mesh, plain, model = Mesh(**axes), net(), net()
    assert sl.parallelize(model, SPECS, mesh=mesh) is model
    assert model.head.weight is model.table.weight
    assert all(isinstance(p, nn.Parameter) and isinstance(p, ShardedTensor) for p in model.parameters())
    expected = train(plain, lambda x: x, make)

    def place(x: Tensor) -> Tensor:
        with mesh:
            return sl.shard(x, "batch@data ...")

    found = train(model, place, make)
    assert found == pytest.approx(expected, rel=1e-10)
    same(model, plain)
    plain.eval(), model.eval()
    torch.testing.assert_close(whole(model(place(TOKENS[0]), scale=0.5)), plain(TOKENS[0], scale=0.5))


def _on_ranks() -> list[float]:
    mesh, model = Mesh(data=2, tensor=2), sl.parallelize(net(), SPECS, mesh=Mesh(data=2, tensor=2))
    with mesh:
        return train(model, lambda x: sl.shard(x, "batch@data ..."))


def _strategies_on_ranks(path: str) -> list[tuple[str, list[float], int]]:
    """Made on meta, trained a step, saved, and loaded under the next strategy, on another mesh."""
    found = []
    for axes, strategy in (({"data": 4}, "fsdp"), ({"replica": 2, "shard": 2}, "hsdp"), ({"data": 4}, "zero2")):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        with Mesh(axes):
            sl.parallelize(model, strategy=strategy)
            torch.manual_seed(3)
            sl.materialize(model)
            opt = torch.optim.AdamW(model.parameters(), lr=0.05)
            step(model, opt, torch.zeros(8, 8))  # whose moments are replaced
            if found:
                state = {"model": model.state_dict(), "opt": opt.state_dict()}
                dcp.load(state, checkpoint_id=path)
                model.load_state_dict(state["model"])
                opt.load_state_dict(state["opt"])
            losses = [step(model, opt, x) for x in INPUTS[len(found) :][:1]]
            dcp.save({"model": model.state_dict(), "opt": opt.state_dict()}, checkpoint_id=path)
            found.append((sl.typeof(model[0].weight), losses, model[0].weight.to_local().numel()))
    return found


INPUTS = [torch.randn(8, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def step(model: nn.Module, opt: Any, x: Tensor) -> float:
    loss = (model(x) - 1).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.item()


@pytest.mark.long
@pytest.mark.ranks
def test_strategies_and_checkpoints_on_ranks(tmp_path: Path) -> None:
    plain = made_whole(lambda: nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)))
    opt = torch.optim.AdamW(plain.parameters(), lr=0.05)
    step(plain, opt, torch.zeros(8, 8))
    expected = [step(plain, opt, x) for x in INPUTS]
    for found in run_ranks(_strategies_on_ranks, 4, str(tmp_path)):
        assert [text for text, _, _ in found] == ["f32[12@data, 8]", "f32[12@shard, 8]", "f32[12, 8]"]
        assert [n for _, _, n in found] == [24, 48, 96]
        assert [x for _, losses, _ in found for x in losses] == pytest.approx(expected, rel=1e-5)


@pytest.mark.long
@pytest.mark.ranks
def test_on_ranks_it_trains_as_on_one_device() -> None:
    expected = train(net(), lambda x: x)
    for found in run_ranks(_on_ranks, 4):
        assert found == pytest.approx(expected, rel=1e-10)


@pytest.mark.long
def test_a_step_of_it_is_one_program() -> None:
    plain, model = net(), net()
    train(plain, lambda x: x)
    with Mesh(data=2, tensor=2):
        sl.parallelize(model, SPECS)
        opt = torch.optim.Adam(model.parameters(), lr=0.05)

        @sl.jit
        def step(tokens: Tensor) -> Tensor:
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss

        for tokens in TOKENS:
            step(sl.shard(tokens, "batch@data ..."))
    same(model, plain)


def test_the_plan_is_megatron() -> None:
    with Mesh(data=1, tensor=2):
        block = sl.parallelize(Block(8, 12), {"up.*": "ff@tensor ...", "down.weight": "embed ff@tensor"})
        plan = block.forward.plan(torch.ones(4, 8, requires_grad=True))
    assert [c.kind for c in plan.collectives] == ["all_reduce", "all_reduce"], plan


def test_frozen_parameters_stay_so() -> None:
    model = net()
    model.table.weight.requires_grad_(False)
    with Mesh(tensor=2):
        sl.parallelize(model, SPECS)
        model(TOKENS[0]).sum().backward()
    assert model.table.weight.grad is None
    assert model.blocks[0].up.weight.grad is not None


def test_again_it_moves_them() -> None:
    with Mesh(tensor=2):
        model = sl.parallelize(nn.Linear(4, 6), {"weight": "out@tensor in"})
        sl.parallelize(model, {"weight": "out in@tensor"})
        assert sl.typeof(model.weight) == "f32[6, 4@tensor]"


def test_a_copy_is_a_module_of_its_own() -> None:
    with Mesh(tensor=2):
        model = sl.parallelize(nn.Linear(4, 6), {"weight": "out@tensor in"})
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.weight.zero_()
        x = torch.ones(2, 4)
        torch.testing.assert_close(whole(other(x)), whole(other.bias).expand(2, 6))
        assert not torch.equal(whole(model(x)), whole(other(x)))


def test_mistakes_are_told_all_at_once() -> None:
    model = net()
    before = dict(model.named_parameters())
    with Mesh(data=2, tensor=2):
        with pytest.raises(ShardingError) as said:
            sl.parallelize(model, {"*.upp.weight": "a b", "*.up.*": "ff@tensor ...", "blocks.0.up.bias": "ff"})
        assert "'*.upp.weight' matches no parameter; the nearest name is 'blocks.1.up.weight'" in str(said.value)
        assert "blocks.0.up.bias is 'ff@tensor ...' by '*.up.*' and 'ff' by 'blocks.0.up.bias'" in str(said.value)
        table = {"*.upp.weight": "a@dta b@tensr", "*.up.*": "ff@tensr ...", "*.running_mean": "a"}
        with pytest.raises(ShardingError) as said:
            sl.parallelize(model, {**table, "blocks.0.norm.weight": "a b"})
        assert str(said.value) == (
            "the table of specs does not fit the module:\n"
            "  * '*.upp.weight' matches no parameter; the nearest name is 'blocks.1.up.weight'\n"
            "  * '*.running_mean' matches no parameter; 'norm.running_mean' is a buffer, and buffers stay whole on "
            "every device\n"
            "  * '*.upp.weight' with spec 'a@dta b@tensr': dim 0 `a@dta`: the mesh has no axis 'dta'; "
            "did you mean 'data'?\n"
            "  * '*.upp.weight' with spec 'a@dta b@tensr': dim 1 `b@tensr`: the mesh has no axis 'tensr'; "
            "did you mean 'tensor'?\n"
            "  * blocks.0.norm.weight with spec 'a b': the spec has 2 dims, the tensor has 1 dim\n"
            + "".join(
                f"  * blocks.{i}.up.{kind} with spec 'ff@tensr ...': dim 0 `ff@tensr`: the mesh has no axis 'tensr'; "
                "did you mean 'tensor'?\n"
                for i in range(2)
                for kind in ("weight", "bias")
            )
            + "Rule: every pattern matches some parameter, and a parameter has one spec; a spec names axes of its "
            "mesh; a spec has as many dims as the tensor\n"
            "Remedy: mend the patterns: names are those of module.named_parameters(), and `*` stands for any text; "
            "use one of data, tensor; write `_` for a dim that stays whole, `...` for any number of them"
        )
        with pytest.raises(ShardingError) as said:
            sl.parallelize(model, {"*.up.weight": "ff@tensr embed", "*.norm.weight": "a b"})
        assert "parallelize: 4 of 4 specs do not fit" in str(said.value)
    assert {n: id(p) for n, p in model.named_parameters()} == {n: id(p) for n, p in before.items()}
    with pytest.raises(ShardingError, match="parallelize\\(Net\\) is outside any mesh"):
        sl.parallelize(model, SPECS)
    sl.parallelize(model, SPECS, mesh=Mesh(tensor=2))
    with pytest.raises(ShardingError, match="finds parameters on another mesh"):
        sl.parallelize(model, SPECS, mesh=Mesh(tensor=4))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_is_refused() -> None:
    with Mesh(data=2), pytest.raises(ShardingError, match=r"is given TorchScript\n.*\n.*that it was made of"):
        sl.parallelize(torch.jit.script(nn.Linear(4, 6)))


def test_an_optimizer_that_was_made_before_is_refused() -> None:
    model = nn.Linear(4, 6)
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    with Mesh(tensor=2):
        sl.parallelize(model, {"weight": "out@tensor in"})
        model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ShardingError) as said:
        early.step()
    assert "this SGD steps parameters that were replaced" in str(said.value)
    assert "parameter 0 was Linear.weight, in whose place is a parameter on the mesh" in str(said.value)
    assert "parameter 1 was Linear.bias" in str(said.value)
    assert "Remedy: make it after parallelize" in str(said.value)


def test_gradients_are_not_lost() -> None:
    model = nn.Linear(4, 6)
    model(torch.ones(2, 4)).sum().backward()
    with Mesh(tensor=2), pytest.raises(ShardingError) as said:
        sl.parallelize(model, {"weight": "out@tensor in"})
    text = "would lose what belongs to parameters:\n  * weight of [6, 4] has a gradient\n  * bias of [6] has a gradient"
    assert text in str(said.value)
    assert not isinstance(model.weight, ShardedTensor)


# Strategies, and nothing said -----------------------------------------------------------------------------------------

S = sl.strategies
STRATEGIES = [
    ({"data": 4}, None, {}),
    ({"data": 4}, "ddp", {}),
    ({"data": 4}, "zero1", {"moment": "data"}),
    ({"data": 4}, S.zero2, {"gradient": "data", "moment": "data"}),
    ({"data": 4}, "fsdp", {"weight": "data", "gradient": "data", "moment": "data"}),
    ({"x": 2, "y": 2}, S.fsdp("x", "y"), {"weight": "(x y)", "gradient": "(x y)", "moment": "(x y)"}),
    ({"replica": 2, "shard": 2}, "hsdp", {"weight": "shard", "gradient": "shard", "moment": "shard"}),
    ({"pod": 2, "x": 2}, S.hsdp("pod", "x"), {"weight": "x", "gradient": "x", "moment": "x"}),
    ({"data": 2, "seq": 2}, "zero1", {"moment": "data"}),
]


def plain_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 8), Block(8, 12), nn.LayerNorm(8), nn.Linear(8, 11)).double()


@pytest.mark.long
@pytest.mark.sampled(11)
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(("axes", "strategy", "cut"), STRATEGIES, ids=range(len(STRATEGIES)))
def test_strategies_train_as_one_device(axes: dict[str, int], strategy: Any, cut: dict[str, str], jitted: bool) -> None:
    plain, model, found = plain_net(), plain_net(), {}
    with Mesh(axes):
        sl.parallelize(model, strategy=strategy)

    def run(model: nn.Module) -> None:
        opt = torch.optim.AdamW(model.parameters(), lr=0.05)

        def step(model: nn.Module, opt: Any, tokens: Tensor) -> Tensor:
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            return loss

        call = sl.jit(step) if jitted and model is not plain else step
        for tokens in TOKENS:
            opt.zero_grad()
            call(model, opt, tokens)
        p = model[1].up.weight
        if model is not plain:
            found.update(weight=p, gradient=p.grad, moment=opt.state[p]["exp_avg"])

    run(plain)
    with Mesh(axes):
        run(model)
    same(model, plain)
    for name, x in found.items():
        assert (f"12@{cut[name]}" if name in cut else "[12, 8]") in sl.typeof(x), f"{name}: {sl.typeof(x)}"


def test_in_specs_may_be_a_function_of_the_leaves() -> None:
    def specs(leaves: Any) -> list[str | None]:
        return ["b@data ..." if isinstance(x, Tensor) else None for x in leaves]

    with Mesh(data=2):
        found = sl.jit(lambda x, n, more: (x * n, more["y"] + 1), in_specs=specs)(
            torch.ones(4, 2), 3, {"y": torch.ones(4)}
        )
        assert [sl.typeof(x) for x in found] == ["f32[4@data, 2]", "f32[4@data]"]
        with pytest.raises(ShardingError, match="in_specs, a function, returns 1 specs for 2 leaves"):
            sl.jit(torch.add, in_specs=lambda leaves: [None])(torch.ones(4), torch.ones(4))


def test_copies_keep_their_strategy() -> None:
    with Mesh(data=2):
        model = sl.parallelize(nn.Sequential(nn.Linear(8, 16)), strategy="zero2")
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for other in (copy.deepcopy(model), torch.load(stored, weights_only=False)):
        other(torch.ones(4, 8)).sum().backward()
        assert other.forward.fn.__self__ is other
        assert sl.typeof(other[0].weight.grad) == "f32[16@data, 8]"
        assert model[0].weight.grad is None


def test_where_a_gradient_lives_may_change_between_calls() -> None:
    with Mesh(data=2):
        model = sl.parallelize(nn.Linear(8, 16), strategy="zero2")
    for at, text in ((model.weight.gradient_at, "16@data, 8"), ("_ _@data", "16, 8@data")):
        model.weight.grad, model.weight.gradient_at = None, at
        model(torch.ones(4, 8)).sum().backward()
        assert sl.typeof(model.weight.grad) == f"f32[{text}]"


def bytes_on_each(tensors: Any) -> list[int]:
    """What every device holds of some tensors."""
    pieces = [[s.data.nbytes for s in x.shards] for x in tensors]
    return [sum(row) for row in zip(*pieces, strict=True)]


@pytest.mark.parametrize(
    ("strategy", "weights", "gradients", "moments"), [("zero1", 1, 1, 4), ("zero2", 1, 4, 4), ("fsdp", 4, 4, 4)]
)
def test_what_a_device_holds(strategy: str, weights: int, gradients: int, moments: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    total = sum(p.nbytes for p in model.parameters())
    with Mesh(data=4):
        sl.parallelize(model, strategy=strategy)
    opt = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 16)).square().mean().backward()
    opt.step()
    held = [*model.parameters()]
    assert bytes_on_each(held) == [total // weights] * 4
    assert bytes_on_each(p.grad for p in held) == [total // gradients] * 4
    for key in ("exp_avg", "exp_avg_sq"):
        assert bytes_on_each(opt.state[p][key] for p in held) == [total // moments] * 4


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch says so of every save in one process
def test_a_checkpoint_goes_on_on_another_mesh(tmp_path: Path) -> None:
    plain, first, second = plain_net(), plain_net(), plain_net()
    with Mesh(data=4):
        sl.parallelize(first, strategy="fsdp")
    with Mesh(data=2, tensor=2):
        sl.parallelize(second, {"1.up.*": "ff@tensor ...", "1.down.weight": "_ ff@tensor"}, strategy="zero1")
    theirs, ours, then = (torch.optim.AdamW(m.parameters(), lr=0.05) for m in (plain, first, second))

    def step(model: nn.Module, opt: Any, tokens: Tensor) -> None:
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        opt.step()
        opt.zero_grad()

    step(plain, theirs, TOKENS[0])
    step(first, ours, TOKENS[0])
    step(second, then, TOKENS[1])  # whose state is replaced
    dcp.save({"model": first.state_dict(), "opt": ours.state_dict()}, checkpoint_id=tmp_path)
    read = {"model": second.state_dict(), "opt": then.state_dict()}
    dcp.load(read, checkpoint_id=tmp_path)
    second.load_state_dict(read["model"])
    then.load_state_dict(read["opt"])
    for tokens in TOKENS[1:]:
        step(plain, theirs, tokens)
        step(second, then, tokens)
    same(second, plain)


def test_a_batch_is_cut_where_nobody_has_placed_it() -> None:
    def forward(x: Tensor, mask: Tensor, table: Tensor, n: int = 2) -> tuple[Tensor, ...]:
        return x * n, mask * 1.0, table * 1.0

    class Own(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

    x, mask, table = torch.ones(6, 4, 3), torch.ones(6, 4), torch.ones(3)
    with Mesh(data=2, seq=2):
        model = sl.parallelize(Own())
        shapes = [sl.typeof(y) for y in model(x, mask, table=table)]
        assert shapes == ["f32[6@data, 4@seq, 3]", "f32[6@data, 4@seq]", "f32[3]"]
        assert [sl.typeof(y) for y in model(x[:1], mask[:1], table)][1] == "f32[1, 4@seq]"
        placed = model(sl.shard(x, "_ _ c@data"), mask, table)
        assert sl.typeof(placed[0]) == "f32[6, 4, 3@data]"
    with Mesh(a=2, b=2, rules={"batch": "b"}):
        assert sl.typeof(sl.parallelize(Own(), {})(x, mask, table)[1]) == "f32[6@b, 4]"


class Touches(nn.Module):
    """Does to its arguments what a module had better not."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.register_buffer("b", torch.ones(6, 4))

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        q.mul_(2)
        return self.l(k) * (3 if q is k else 1) * getattr(q, "scale", 1)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("door", ["eager", "jit", "op by op"])
@pytest.mark.parametrize("how", ["two", "one", "a buffer", "marked"])
def test_arguments_stay_what_they_are(how: str, door: str) -> None:
    torch.manual_seed(0)
    plain, jitted = Touches(), door == "jit"
    model = copy.deepcopy(plain)
    with Mesh(data=2):
        sl.parallelize(model)
    if door == "op by op":
        model.forward.version.eager.add(model.training)
    found = []
    for m in (plain, model):
        x, y = torch.arange(24.0).view(6, 4), torch.ones(6, 4)
        if how == "marked":
            x.scale = 5
        args = {"two": (x, y), "one": (x, x), "a buffer": (m.b, m.b), "marked": (x, y)}[how]
        call = sl.jit(lambda m, *args: m(*args)) if jitted and m is model else m
        with Mesh(data=2):
            found.append([whole(v) for v in (call(m, *args) if call is not m else m(*args), x, y, m.b)])
    for mine, theirs in zip(*reversed(found), strict=True):
        torch.testing.assert_close(mine, theirs)


class Experts(nn.Module):
    """The gradient of its weights is made in memory of another order than theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0)).double())

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bd,edf->ebf", x, self.w)


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.AdamW])
def test_steps_on_pieces_in_any_order_of_memory(make: Any, fused: bool | None) -> None:
    models = [Experts(), Experts()]
    with Mesh(data=2):
        sl.parallelize(models[0], strategy="fsdp")
        for model in models:
            opt = make(model.parameters(), lr=0.1, fused=fused)
            for x in torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1)).double():
                model(x).square().sum().backward()
                opt.step()
                opt.zero_grad()
    same(*models)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adafactor])
def test_the_state_of_another_models_optimizer_is_refused(make: Any) -> None:
    def trained(*widths: int) -> Any:
        model = sl.parallelize(nn.Sequential(nn.Linear(4, widths[0]), nn.Linear(widths[0], widths[1])), strategy="fsdp")
        opt = make(model.parameters(), lr=0.1)
        model(torch.ones(2, 4)).sum().backward()
        opt.step()
        return opt

    with Mesh(data=2):
        other, opt = trained(6, 2).state_dict(), trained(8, 2)
        opt.load_state_dict(trained(8, 2).state_dict())
        before = copy.deepcopy(opt.state_dict())
        with pytest.raises(ShardingError) as refused:
            opt.load_state_dict(other)
    text = str(refused.value)
    assert f"{make.__name__} cannot load this state" in text
    assert "parameter 0 of shape [8, 4] has" in text
    assert "of shape [6, 4]" in text or "of shape [6, 1]" in text
    assert {line.split()[2] for line in text.splitlines() if "of shape" in line} >= {"0", "1", "2"}, "all of them"
    assert str(before) == str(opt.state_dict()), "nothing was loaded"


def test_small_parameters_stay_whole() -> None:
    with Mesh(data=2):
        model = sl.parallelize(nn.Linear(8, 4), strategy=S.fsdp("data", threshold=8))
    assert [sl.typeof(p) for p in model.parameters()] == ["f32[4, 8@data]", "f32[4]"]


def test_strategies_that_do_not_fit() -> None:
    for axes, strategy, text in (
        ({"x": 4}, "fsdp", "none of its axes is called pod, replica, data"),
        ({"data": 4}, "hsdp", "it has no axis 'replica'\n  * it has no axis 'shard'"),
        ({"data": 4}, S.fsdp("dat"), "it has no axis 'dat'"),
        (
            {"data": 4},
            "zero3",
            "strategy='zero3' is no strategy\nRemedy: one of ddp, zero1, zero2, fsdp, hsdp (fsdp is ",
        ),
        ({"data": 2, "x": 2}, None, "nothing says what 'x' shards"),
        ({"data": 2, "tensor": 2}, None, "nothing says which weights 'tensor' shards: Linear has no tp_plan"),
    ):
        model = nn.Linear(8, 4)
        with Mesh(axes), pytest.raises(ShardingError) as said:
            sl.parallelize(model, strategy=strategy)
        assert text in str(said.value)
        assert not isinstance(model.weight, ShardedTensor)


def test_hooks_are_not_lost() -> None:
    model = nn.Linear(2, 2)
    model.weight.register_hook(lambda g: g * 2)
    with (
        Mesh(data=2),
        pytest.raises(ShardingError, match=r"would lose what belongs to parameters:\n  \* weight has hooks"),
    ):
        sl.parallelize(model)


def test_attributes_of_parameters_stay() -> None:
    model = nn.Linear(4, 4)
    model.weight.no_decay, model.bias.group = True, "b"
    with Mesh(data=2):
        sl.parallelize(model, strategy="fsdp")
    assert model.weight.no_decay
    assert model.bias.group == "b"


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6, bias=False)
        self.more = [self.a.weight]  # which torch does not see

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) @ self.more[0]


def test_a_weight_that_is_held_elsewhere_is_not_read_from_there() -> None:
    model = Listed()
    before = sl.jit(lambda x: x @ model.more[0])
    with Mesh(data=2):
        before(torch.ones(4, 6))
        sl.parallelize(model)
        with pytest.raises(ShardingError, match="reads parameters that were replaced"):
            before(torch.ones(4, 6))
        text = r"reads parameters that were replaced:\n  \* .*more\[0\].* was Listed.a.weight, in whose place"
        for call in (model, sl.jit(lambda x: model(x))):
            with pytest.raises(ShardingError, match=text):
                call(torch.ones(4, 6))
        model.more[0] = model.a.weight
        assert model(torch.ones(4, 6)).shape == (4, 6)


def test_tied_weights_of_modules_that_come_one_by_one() -> None:
    model = nn.ModuleDict({"b": nn.Linear(6, 6, bias=False), "h": nn.Linear(6, 6, bias=False)})
    model["h"].weight = model["b"].weight
    with Mesh(data=2):
        sl.parallelize(model["b"])
        late = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ShardingError, match="take the module that holds all places of a tied weight"):
            late.step()
        sl.parallelize(model["h"], strategy="zero1")
    assert model["h"].weight is model["b"].weight


def test_parameters_without_a_shape() -> None:
    with Mesh(data=2), pytest.raises(ShardingError, match=r"weight has no shape yet\n.*bias has no shape yet"):
        sl.parallelize(nn.LazyLinear(4))


def test_a_module_is_called_on_its_own_mesh() -> None:
    with Mesh(data=2):
        model = sl.parallelize(nn.Linear(4, 4))
    with Mesh(x=4), pytest.raises(ShardingError, match=r"forward is called on Mesh\(x=4\)(.|\n)*live, Mesh\(data=2\)"):
        model(torch.ones(4, 4))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_moments_of_a_plain_checkpoint_are_cut(jitted: bool) -> None:
    plain, model = plain_net(), plain_net()
    first = torch.optim.Adam(plain.parameters())

    def step(model: nn.Module, opt: Any, tokens: Tensor) -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        opt.step()
        return loss

    step(plain, first, TOKENS[0])
    model.load_state_dict(plain.state_dict())
    with Mesh(data=4):
        sl.parallelize(model, strategy="zero1")
        opt = torch.optim.Adam(model.parameters())
        opt.load_state_dict(copy.deepcopy(first.state_dict()))
        call = sl.jit(step) if jitted else step
        for tokens in TOKENS[1:]:
            call(model, opt, tokens)
            step(plain, first, tokens)
    same(model, plain)
    assert sl.typeof(opt.state[model[1].up.weight]["exp_avg"]) == "f64[12@data, 8]"


def test_what_a_function_places_stays_placed() -> None:
    kept, x = {"m": torch.ones(8, 6)}, torch.arange(48.0).view(8, 6)

    @sl.jit
    def step(x: Tensor) -> Tensor:
        kept["m"] = sl.shard(kept["m"] + x, "r@data c")
        return x.sum()

    with Mesh(data=4):
        for n in (1, 2, 3):
            step(x)
            assert sl.typeof(kept["m"]) == "f32[8@data, 6]"
            assert torch.equal(whole(kept["m"]), 1 + n * x)


def test_a_second_time_moves_only_what_is_said() -> None:
    with Mesh(data=2, tensor=2):
        model = sl.parallelize(nn.Linear(8, 4), {"weight": "out@tensor in"}, strategy="zero1")
        weight = model.weight
        sl.parallelize(model, {"bias": "out@tensor"})
    assert [sl.typeof(p) for p in model.parameters()] == ["f32[4@tensor, 8]", "f32[4@tensor]"]
    assert model.weight is weight
    assert model.weight.moments_at == "out@tensor in@data"


@pytest.mark.parametrize("given", ["plain", "meta before", "on the mesh", "laid out otherwise", "shared"])
def test_what_is_assigned_lives_where_the_parameter_did(given: str) -> None:
    """With what a strategy says of it, and in its own dtype, as torch has it."""
    specs = {"0.weight": "(x=2 y=4@tensor) in", "1.weight": "_ in@tensor"}
    plain, model = (nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).double() for _ in range(2))
    if given == "meta before":
        model.to("meta")
    with Mesh(data=2, tensor=2):
        sl.parallelize(model.float(), specs, strategy="zero1")
        other = sl.parallelize(copy.deepcopy(plain), {} if given == "laid out otherwise" else specs, strategy="zero1")
    types, homes = ([get(p) for p in model.parameters()] for get in (sl.typeof, lambda p: p.moments_at))
    is_plain = given in ("plain", "meta before")
    model.load_state_dict((plain if is_plain else other).state_dict(keep_vars=given == "shared"), assign=True)
    assert [sl.typeof(p) for p in model.parameters()] == [said.replace("f32", "f64") for said in types]
    assert [p.moments_at for p in model.parameters()] == homes
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(whole(p), q)
        assert p.requires_grad
    assert (model[0].weight is other[0].weight) == (given == "shared")
    x = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(whole(model(x)), plain(x))


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x).tanh())
        return out


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("given", ["a parameter", "a tensor", "its own", "its own parameter"])
def test_what_is_assigned_to_two_names_is_one(given: str, strategy: str) -> None:
    x, w = torch.randn(8, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    found: list[tuple[int, bool, Tensor, Tensor]] = []
    for is_plain in (True, False):
        torch.manual_seed(1)
        model = _Tied().double()
        if not is_plain:
            with sl.Mesh(data=2):
                sl.parallelize(model, strategy=strategy)
        one = nn.Parameter(w.clone()) if given == "a parameter" else w.clone()
        own = model.state_dict(keep_vars=given == "its own parameter")
        model.load_state_dict(own if given.startswith("its own") else {"a.weight": one, "b.weight": one}, assign=True)
        opt = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()
        pair: list[Any] = [model.a.weight, model.b.weight]
        a, b = (p if is_plain else p.full_tensor() for p in pair)
        found.append((len(list(model.parameters())), model.a.weight is model.b.weight, a.detach(), b.detach()))
    (count, is_one, plain, _), (many, same, a, b) = found
    assert (many, same) == (count, is_one)
    torch.testing.assert_close(a, plain)
    assert torch.equal(a, b)


def test_one_tensor_is_not_assigned_to_two_layouts() -> None:
    model, w = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)), torch.randn(4, 4)
    with sl.Mesh(tensor=2):
        sl.parallelize(model, {"0.weight": "f@tensor _", "1.weight": "_ f@tensor"})
    before = model[1].weight
    with pytest.raises(RuntimeError, match=r"1\.weight lives as .*, 0\.weight as .*, and both are assigned one tensor"):
        model.load_state_dict({"0.weight": w, "1.weight": w}, assign=True)
    assert model[1].weight is before


def test_what_is_assigned_from_another_mesh_is_told_at_once() -> None:
    with Mesh(data=2):
        model = sl.parallelize(nn.Linear(6, 8), strategy="fsdp")
    with Mesh(data=4):
        other = sl.parallelize(nn.Linear(6, 8), strategy="fsdp")
    weight = model.weight
    with pytest.raises(RuntimeError, match=r"(?s)weight lives on Mesh\(data=2\), and .*bias lives on .*full_tensor"):
        model.load_state_dict(other.state_dict(), assign=True)
    assert model.weight is weight


def _assign(others: bool) -> tuple[str, list[str]]:
    """On a rank: assign what all have, or what one has otherwise."""
    torch.manual_seed(0)
    with Mesh(data=2):
        model = sl.parallelize(nn.Sequential(nn.Linear(6, 8)), strategy="fsdp")
    weight, state, said = model[0].weight, {"0.weight": torch.ones(8, 6), "0.bias": torch.ones(8)}, ""
    if others and dist.get_rank() == 1:
        state["0.bias"][3] = 2
    try:
        model.load_state_dict(state, assign=True)
    except sl.ShardingError as error:
        said = str(error)
        assert model[0].weight is weight
    return said, [sl.typeof(p) for p in model.parameters()]


@pytest.mark.ranks
def test_ranks_assign_the_same() -> None:
    types = ["f32[8@data, 6]", "f32[8@data]"]
    assert only(run_ranks(_assign, 2, False)) == ("", types)
    said, found = only(run_ranks(_assign, 2, True))
    assert "load_state_dict(assign=True): the ranks have different values:\n  * 0.bias of shape [8]: rank 0" in said
    assert "0.weight" not in said
    assert found == types


def hooked() -> tuple[nn.Sequential, nn.Sequential, Tensor]:
    """A module for hooks, the same on a mesh, and what both are called with."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()
    model = copy.deepcopy(plain)
    with Mesh(data=2, tensor=2):
        sl.parallelize(model, {"0.weight": "out@tensor _"})
    x = torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8)
    return plain, model, x


def test_hooks_keep_values_of_the_forward_pass() -> None:
    plain, model, x = hooked()

    def step(net: nn.Module, *, keeps: bool) -> list[Tensor]:
        kept: list[Tensor] = []
        hook = net[1].register_forward_hook(lambda _, __, out: kept.append(out)) if keeps else None
        loss = net(x).square().mean() + sum(y.abs().mean() for y in kept)
        if hook is not None:
            hook.remove()
        net.zero_grad()
        loss.backward()
        return [whole(y) for y in kept]

    kept = step(model, keeps=True)
    torch.testing.assert_close(kept, step(plain, keeps=True))
    for keeps in (True, False):
        torch.testing.assert_close(step(model, keeps=keeps), step(plain, keeps=keeps))
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(p.grad), q.grad)
    assert model(x).grad_fn.name() == "_ApplyBackward"  # a program again


class _Log:
    """What backward hooks write."""

    def __init__(self) -> None:
        self.times, self.scale, self.norms = 0, 1.0, [0.0]


def _scales(log: _Log, grads: Any) -> Any:
    log.times += 1
    log.scale *= 0.5
    return tuple(None if g is None else g * log.scale for g in grads)


BACKWARD_HOOKS: dict[str, Callable[[nn.Module, _Log], Any]] = {
    "full": lambda m, log: m.register_full_backward_hook(lambda _, given, __: _scales(log, given)),
    "pre": lambda m, log: m.register_full_backward_pre_hook(lambda _, given: _scales(log, given)),
    "of a tensor": lambda m, log: m.register_forward_hook(
        lambda _, __, out: (out.register_hook(lambda g: _scales(log, (g,))[0]) and None) if out.requires_grad else None
    ),
    "a log of norms": lambda m, log: m.register_full_backward_hook(
        lambda _, __, given: log.norms.append(float(given[0].norm()))
    ),
}


@pytest.mark.parametrize("kind", BACKWARD_HOOKS)
def test_what_backward_hooks_change_changes_when_gradients_go_back(kind: str) -> None:
    plain, model, x = hooked()

    def run(net: nn.Module) -> list[Any]:
        log, found = _Log(), []
        BACKWARD_HOOKS[kind](net[2], log)
        for times in (1, 0, 2):
            loss = net(x).square().mean()
            log.times += 10
            for i in range(times):
                loss.backward(retain_graph=i < times - 1)
            found.append((log.times, log.scale, list(log.norms), [whole(p.grad).clone() for p in net.parameters()]))
        with torch.no_grad():
            found.append(whole(net(x)))
        return found

    with pytest.warns(EagerWarning, match="changes what is no tensor|the backward pass of forward is no program: .*_1"):
        ours = run(model)
    torch.testing.assert_close(ours, run(plain), rtol=1e-10, atol=1e-10)
    with torch.no_grad(), Mesh(data=2, tensor=2):
        assert model.forward.plan(x).collectives, "without a backward pass it is a program"


# What a model says itself ---------------------------------------------------------------------------------------------


class Said(nn.Module):
    """As models of transformers do, by modules and parameters, `*` for a number."""

    def __init__(self) -> None:
        super().__init__()
        self.tp_plan = {
            "layers.*.up": "packed_colwise", "layers.*.down": "rowwise", "table": "embedding_rowwise",
            "head": "colwise_gather_output", "layers.*.norm": "replicated_with_grad_allreduce",
        }  # fmt: skip
        self.table = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(8), "up": nn.Linear(8, 24), "down": nn.Linear(12, 8)}) for _ in range(2)
        )
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            gate, up = layer["up"](layer["norm"](x)).chunk(2, -1)
            x = x + layer["down"](F.silu(gate) * up)
        return self.head(x)


@pytest.mark.long
def test_the_models_own_table() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Said()).double()
    model = copy.deepcopy(plain)
    with Mesh(data=2, tensor=2):
        sl.parallelize(model, strategy="zero1")
    at = {name: sl.typeof(p)[3:] for name, p in model.named_parameters()}
    assert at["0.layers.1.up.weight"] == "[(2 12@tensor), 8]"
    assert at["0.layers.1.up.bias"] == "[24@tensor]"
    assert at["0.layers.0.down.weight"] == "[8, 12@tensor]"
    assert at["0.layers.0.down.bias"] == at["0.layers.0.norm.weight"] == "[8]"
    assert at["0.table.weight"] == "[11@tensor, 8]"
    train(plain, lambda x: x)
    train(model, lambda x: x)
    same(model, plain)


class SaidLittle(Said):
    """Its table says nothing of its layers."""

    dummy_inputs = {"tokens": torch.arange(6).view(2, 3)}  # as transformers has it

    def __init__(self, look: Callable[[nn.Module, Tensor], object] = lambda self, tokens: None) -> None:
        super().__init__()
        self.tp_plan, self.look = {"table": "embedding_rowwise", "head": "colwise_gather_output"}, look

    def forward(self, tokens: Tensor) -> Tensor:
        self.look(self, tokens)
        return super().forward(tokens)


def asks(module: nn.Module, tokens: Tensor) -> None:
    if float(module.layers[0]["norm"].weight.detach().sum()) < 0:
        raise ValueError("it is negative")


def asserts(module: nn.Module, tokens: Tensor) -> None:
    assert tokens.shape[1] > 3, "sequences are longer"


def counts(module: nn.Module, tokens: Tensor) -> None:
    raise TypeError("it takes words")


def test_layers_of_which_the_table_says_nothing_are_cut_as_suggested() -> None:
    torch.manual_seed(0)
    plain = SaidLittle().double()
    state, model = torch.get_rng_state(), copy.deepcopy(plain)
    with Mesh(data=2, tensor=2):
        sl.parallelize(model)
    assert torch.equal(torch.get_rng_state(), state)
    at = {name: sl.typeof(p)[3:] for name, p in model.named_parameters()}
    assert at["layers.1.up.weight"] == "[(2 12@tensor), 8]"
    assert at["layers.0.down.weight"] == "[8, 12@tensor]"
    assert at["table.weight"] == "[11@tensor, 8]"  # and what is added to what it makes is whole
    assert at["layers.0.down.bias"] == at["layers.0.norm.weight"] == "[8]"
    train(plain, lambda x: x)
    train(model, lambda x: x)
    same(model, plain)


@pytest.mark.parametrize("look", [asks, asserts, counts])
def test_layers_stay_whole_where_nothing_can_be_suggested(look: Callable[[nn.Module, Tensor], object]) -> None:
    with (
        Mesh(data=2, tensor=2),
        pytest.warns(UserWarning, match="layers of SaidLittle stay whole, since its dummy_inputs cannot be traced"),
    ):
        model = sl.parallelize(SaidLittle(look))
    at = {name: sl.typeof(p)[3:] for name, p in model.named_parameters()}
    assert (at["layers.1.up.weight"], at["table.weight"]) == ("[24, 8]", "[11@tensor, 8]")


def test_what_a_trial_call_appends_to_is_not_the_models() -> None:
    model = SaidLittle(lambda self, tokens: self.log.append(len(tokens)))
    model.log = []
    with Mesh(data=2, tensor=2):
        sl.parallelize(model)
    assert model.log == []
    assert sl.typeof(model.layers[1]["up"].weight)[3:] == "[(2 12@tensor), 8]"


def test_example_inputs_of_other_names_are_none() -> None:
    model = SaidLittle()
    model.dummy_inputs = {"input_ids": torch.arange(6).view(2, 3)}
    with Mesh(data=2, tensor=2):
        sl.parallelize(model)
    assert sl.typeof(model.layers[1]["up"].weight)[3:] == "[24, 8]"


# Values made where they live ------------------------------------------------------------------------------------------


def made_whole(make: Callable[[], nn.Module]) -> nn.Module:
    model = make()
    torch.manual_seed(3)
    with sl.global_random():
        model.apply(lambda m: getattr(m, "reset_parameters", lambda: None)())
    return model


def several() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8), nn.Linear(8, 16))
    model[3].weight = model[0].weight
    return model


@pytest.mark.parametrize("axes", [{"data": 4}, {"data": 2, "tensor": 2}], ids=str)
def test_values_are_those_of_one_device(axes: dict[str, int]) -> None:
    with torch.device("meta"):
        model = several()
    with Mesh(axes):
        sl.parallelize(model, {"0.weight": "ff@tensor _"} if "tensor" in axes else {}, strategy="fsdp")
        torch.manual_seed(3)
        assert sl.materialize(model) is model
    assert model[3].weight is model[0].weight
    same(model, made_whole(several))
    assert all(x.device.type == "cpu" for x in model.state_dict().values())
    assert max(s.data.numel() for s in model[0].weight.shards) == 8 * 16 // 4


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp"])
def test_a_strategy_outlives_the_meta_device(strategy: str) -> None:
    with torch.device("meta"):
        model = nn.Linear(6, 8)
    model.weight.tag = 1
    with Mesh(data=4):
        sl.parallelize(model, strategy=strategy)
        early = torch.optim.Adam(model.parameters())
        sl.materialize(model)
    opt = torch.optim.Adam(model.parameters())
    model(torch.ones(8, 6)).sum().backward()
    opt.step()
    assert sl.typeof(opt.state[model.weight]["exp_avg"]) == "f32[8@data, 6]"
    assert sl.typeof(model.weight.grad) == ("f32[8, 6]" if strategy == "zero1" else "f32[8@data, 6]")
    assert model.weight.tag == 1
    with pytest.raises(ShardingError, match="steps parameters that were replaced"):
        early.step()


@pytest.mark.parametrize("rows", [8, 3], ids=["all", "some"])
def test_values_are_written_through_data(rows: int) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.empty(8, 6))

        def reset_parameters(self) -> None:
            self.w.data[:rows].fill_(2.0) if rows < 8 else self.w.data.fill_(2.0)

    with torch.device("meta"):
        model = Own()
    with Mesh(data=2):
        sl.parallelize(model, strategy="fsdp")
        if rows == 8:
            assert whole(sl.materialize(model).w).unique().tolist() == [2.0]
        else:
            with pytest.raises(ShardingError, match=r"without some, or elsewhere:\n  \* w of f32\[8@data, 6\]"):
                sl.materialize(model)


def test_a_parameter_that_is_made_anew_has_to_be_placed() -> None:
    class Own(nn.Linear):
        def reset_parameters(self) -> None:
            self.weight = nn.Parameter(torch.ones(4, 4, device="cpu"))
            nn.init.zeros_(self.bias)

    with torch.device("meta"):
        model = Own(4, 4)
    model.weight = nn.Parameter(torch.empty(4, 4, device="meta"))
    with Mesh(data=2):
        sl.parallelize(model, strategy="fsdp")
        with pytest.raises(ShardingError, match=r"weight of f32\[4@data, 4\] is a plain tensor now"):
            sl.materialize(model)


def test_what_nobody_writes_is_refused() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(4))
            self.register_buffer("steps", torch.ones(3))
            self.inner = nn.Linear(4, 4)

    with torch.device("meta"):
        model = Own()
    with Mesh(data=2):
        sl.parallelize(model)
        with pytest.raises(ShardingError) as said:
            sl.materialize(model)
        assert "  * scale of f32[4]\n  * steps of f32[3]\n" in str(said.value)
        assert model.inner.weight.is_meta

        def init(m: nn.Module) -> None:
            for x in (*m.parameters(recurse=False), *m.buffers(recurse=False)):
                nn.init.ones_(x)

        sl.materialize(model, init)
    assert whole(model.scale).tolist() == [1.0] * 4


def _in_use(what: str) -> int:
    """Bytes of memory that this process has (`VmRSS`), or had at most (`VmHWM`)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[what].split()[0]) * 1024


def _peak_of_a_share() -> float:
    """The most memory that a rank takes to make its pieces, in units of these."""

    def grown(n: int) -> float:
        with torch.device("meta"):
            pairs = [(nn.Linear(1024, 3072, bias=False), nn.Linear(3072, 1024, bias=False)) for _ in range(n)]
            net = nn.Sequential(*(x for pair in pairs for x in pair)).bfloat16()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is in use now
        before = _in_use("VmRSS")
        with Mesh(data=2):
            sl.materialize(sl.parallelize(net, strategy="fsdp"))
        return (_in_use("VmHWM") - before) / sum(x.nbytes for p in net.parameters() for x in p._locals)

    grown(1)  # what the first ever takes
    return grown(16)


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="/proc says what is in use, and glibc's malloc gives it back"
)
def test_a_rank_takes_little_more_than_its_share() -> None:
    assert max(run_ranks(_peak_of_a_share, 2)) < 1.25


# Values that Python asks for ------------------------------------------------------------------------------------------


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).relu()
        if self.training and h.sum() > 1e9:  # a guard
            raise ValueError("too large")
        seen = h.sum(-1) > 0
        return self.down(h[seen]) if self.training else self.down(h)


def test_a_module_that_asks_for_values_runs_op_by_op() -> None:
    torch.manual_seed(0)
    plain = Decides().double()
    model = copy.deepcopy(plain)
    with Mesh(data=2, tensor=2):
        sl.parallelize(model, {"up.*": "ff@tensor ...", "down.weight": "_ ff@tensor"})
    x = torch.randn(6, 8, dtype=torch.float64)
    ours, theirs = (torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, plain))

    def steps() -> None:
        for _ in range(3):
            for m, opt in ((model, ours), (plain, theirs)):
                m(x).square().sum().backward()
                opt.step()
                opt.zero_grad()

    said = r"forward needs the value of .*, at .*test_parallelize.py:\d+ in Decides.forward: .*one by one"
    with pytest.warns(match=said) as w:
        steps()
    assert len(w) == 1
    same(model, plain)
    torch.testing.assert_close(whole(model.eval()(x)), plain.eval()(x), rtol=1e-10, atol=1e-10)
    assert model.forward.plan(x).collectives  # evaluation is a program
    with Mesh(data=2, tensor=2), pytest.raises(ShardingError, match="needs the value of"):
        sl.jit(lambda m, x: m(x))(model.train(), x)


class Scales(nn.Module):
    """What it changes before it asks for a value is as it was when it runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(8, 8), 0
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.train(not self.training)
        self.calls += 1
        y: Tensor = self.inner(x)
        self.seen += y.detach().sum(0)
        x.add_(1)
        return 2 * y if y.sum() > -1e9 else y


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("made_outside", [True, False])
def test_what_runs_op_by_op_may_run_in_any_mode(mode: Any, made_outside: bool) -> None:
    torch.manual_seed(0)
    plain = Scales().double()
    model = copy.deepcopy(plain)
    with Mesh(data=2, tensor=2):
        sl.parallelize(model, {"inner.weight": "o@tensor _"})

    def run(net: nn.Module) -> list[Tensor]:
        x = torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8)
        found = []
        with mode():
            for _ in range(4):
                y = x if made_outside else x.clone()
                out = net(y)
                found += [whole(out.detach()), y.clone(), whole(net.seen), torch.tensor([net.calls, net.training])]
                assert out.is_inference() == torch.is_inference_mode_enabled()
        return found

    with pytest.warns(EagerWarning) as said:
        ours = run(model)
    assert len(said) == 2, "training and evaluation, each noted as it was called"
    torch.testing.assert_close(ours, run(plain), rtol=1e-10, atol=1e-10)


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else x


def test_a_budget_is_kept_or_refused() -> None:
    """Op by op nobody keeps to it."""
    with Mesh(data=2):
        model = sl.parallelize(Deciding(), {}, memory="1GiB")
    with pytest.raises(ShardingError) as said:
        model(torch.ones(4, 4))
    assert str(said.value).startswith("forward needs the value of gt (bool[]), and memory=1073741824 is said of it:\n")
    assert str(said.value).endswith("Remedy: write that line so that it is traced, or say no memory")
    with torch.no_grad(), pytest.warns(EagerWarning):
        assert model(torch.ones(4, 4)).shape == (4, 4)


class Sentences(nn.Module):
    def __init__(self, kind: Any, is_sorted: bool) -> None:
        super().__init__()
        self.rnn, self.is_sorted = kind(8, 12, 2, batch_first=True, bidirectional=True), is_sorted

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=self.is_sorted)
        found, _ = rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True, padding_value=0.5, total_length=9)
        return found


class Skipping(nn.Module):
    """Layers of which each call leaves out some, by a number that Python, or numpy, draws."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(4))
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[1:]:
            x = x + torch.tanh(layer(x)) if self.draw() < 0.5 else x
        y: Tensor = self.layers[0](x)
        return y


@pytest.mark.parametrize("draw", [lambda: random.random(), lambda: np.random.rand(), random.Random(0).random])
def test_numbers_that_python_draws_are_those_of_one_device(draw: Callable[[], float]) -> None:
    torch.manual_seed(0)
    plain = Skipping(draw)
    model, x = copy.deepcopy(plain), torch.randn(4, 6, dtype=torch.float64)
    own = getattr(draw, "__self__", random)
    random.seed(3), np.random.seed(3), own.seed(3)
    theirs = [plain(x) for _ in range(4)]
    random.seed(3), np.random.seed(3), own.seed(3)
    model.draw = draw
    with Mesh(data=2):
        sl.parallelize(model, strategy="fsdp")
        with pytest.warns(match="draws random numbers from .*: its ops run one by one"):
            ours = [model(x)]
        ours += [model(x) for _ in range(3)]
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.full_tensor(), other, rtol=1e-12, atol=0)


@pytest.mark.long
@pytest.mark.sampled(13)
@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("placed", ["by parallelize", "x", "x and lengths"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_sequences_of_lengths_that_are_values(kind: Any, placed: str, is_sorted: bool) -> None:
    torch.manual_seed(0)
    plain = Sentences(kind, is_sorted).double()
    model = copy.deepcopy(plain)
    x = torch.randn(4, 7, 8, dtype=torch.float64)
    lengths = torch.tensor([7, 5, 5, 2] if is_sorted else [5, 2, 7, 5])
    with Mesh(data=2):
        sl.parallelize(model, strategy="fsdp")
        mine = x if placed == "by parallelize" else sl.shard(x, "b@data ...")
        with pytest.warns(match="a shape that depends on values, by _pack_padded_sequence"):
            ours = model(mine, sl.shard(lengths, "b@data") if placed == "x and lengths" else lengths)
        ours.square().sum().backward()
    theirs = plain(x, lengths)
    theirs.square().sum().backward()
    assert isinstance(ours, ShardedTensor)
    torch.testing.assert_close(whole(ours), theirs, rtol=1e-10, atol=1e-10)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-10, atol=1e-10)


class Writes(nn.Linear):
    """It has a cache that grows, as language models have."""

    def generate(self, steps: int) -> None:
        for i in range(steps):
            self(torch.ones(2, i + 1, self.in_features))


@pytest.mark.long
def test_a_model_that_is_compiled_for_each_token_is_named_with_the_remedy() -> None:
    with Mesh(data=2):
        model = sl.parallelize(Writes(4, 4), strategy="fsdp")
        with pytest.warns(match=r"^Writes\.forward has been compiled 9 times") as told:
            model.generate(9)
    (said,) = (str(w.message) for w in told)
    assert 'Remedy: in generate(), cache_implementation="static" keeps the shapes of what is cached' in said
    assert said.endswith("Writes.forward.retraces lists all reasons")
    assert len(model.forward.retraces) == 8


# A table from the traced graph ----------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv: int) -> None:
        super().__init__()
        self.heads, self.kv, size = heads, kv, width // heads
        self.q, self.k, self.v = (nn.Linear(width, n * size) for n in (heads, kv, kv))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (
            f(x).view(b, t, n, -1).transpose(1, 2)
            for f, n in ((self.q, self.heads), (self.k, self.kv), (self.v, self.kv))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class Decoder(nn.Module):
    def __init__(self, kv: int) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(nn.ModuleList([Attention(32, 4, kv), Block(32, 96)]) for _ in range(2))
        self.head = nn.Linear(32, 64, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for attention, block in self.layers:
            x = block(x + attention(x))
        return self.head(x)


MEGATRON = {
    "table.weight": "in@tensor _",
    "layers.*.0.q.weight": "out@tensor _", "layers.*.0.q.bias": "out@tensor",
    "layers.*.0.k.weight": "out@tensor _", "layers.*.0.k.bias": "out@tensor",
    "layers.*.0.v.weight": "out@tensor _", "layers.*.0.v.bias": "out@tensor",
    "layers.*.0.out.weight": "_ in@tensor",
    "layers.*.1.up.weight": "out@tensor _", "layers.*.1.up.bias": "out@tensor",
    "layers.*.1.down.weight": "_ in@tensor",
    "head.weight": "out@tensor _",
}  # fmt: skip


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv", [4, 2])
def test_columns_and_rows_of_a_decoder_are_found(kv: int) -> None:
    torch.manual_seed(0)
    plain = Decoder(kv).double()
    tokens = torch.randint(0, 64, (4, 8))
    table = sl.suggest(copy.deepcopy(plain).to("meta"), Mesh.abstract(data=2, tensor=2), tokens.to("meta"))
    assert dict(table) == MEGATRON
    assert table.why["layers.*.1.down.weight"] == "rows: the sum over devices is left, 8.19 kB of [32, 32]"
    assert "layers.0.1.down.weight contracts what it makes" in table.why["layers.*.1.up.weight"]
    assert str(table).startswith("'table.weight': 'in@tensor _',            # rows: the sum over devices is left")
    model = copy.deepcopy(plain)
    with Mesh(data=2, tensor=2):
        sl.parallelize(model, table)
    torch.testing.assert_close(whole(model(tokens)), plain(tokens), rtol=1e-12, atol=1e-12)


def test_a_deep_net_of_linears_alternates() -> None:
    net = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))
    table = sl.suggest(net, Mesh.abstract(model=4), torch.ones(8, 16))
    assert list(table.values()) in (
        ["out@model _", "_ in@model", "out@model _", "_ in@model"],
        ["_ in@model", "out@model _", "_ in@model", "out@model _"],
    )


def test_a_packed_weight_is_cut_inside() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48, bias=False), nn.Linear(16, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(4, 8, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
            return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    assert sl.suggest(Packed(), Mesh.abstract(tensor=2), torch.ones(4, 8, 16)) == {
        "qkv.weight": "(f0=3 out@tensor f2=4) _",
        "out.weight": "_ in@tensor",
    }


class Many(nn.Module):
    """More pairs than are combined."""

    def __init__(self, pairs: int) -> None:
        super().__init__()
        self.ups = nn.ModuleDict({f"u{i}x": nn.Linear(16, 64 + i, bias=False) for i in range(pairs)})
        self.downs = nn.ModuleDict({f"d{i}x": nn.Linear(64 + i, 16, bias=False) for i in range(pairs)})

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.ups.values(), self.downs.values(), strict=True):
            x = x + down(up(x).relu())
        return x


@pytest.mark.parametrize("pairs", [3, 20])
def test_many_unequal_layers(pairs: int) -> None:
    table = sl.suggest(Many(pairs), Mesh.abstract(tensor=4), torch.ones(8, 16))
    assert {(name[:3], spec) for name, spec in table.items()} == {("ups", "out@tensor _"), ("dow", "_ in@tensor")}


def test_frozen_weights_are_weights() -> None:
    net = nn.Sequential(nn.Linear(16, 64, bias=False), nn.ReLU(), nn.Linear(64, 16, bias=False)).requires_grad_(False)
    assert sl.suggest(net, Mesh.abstract(tensor=4), torch.ones(8, 16)) == {
        "0.weight": "out@tensor _",
        "2.weight": "_ in@tensor",
    }


def test_square_weights_behind_residuals() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(16, 16, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.a(x)
            x = x + self.b(x).relu()
            return x + self.c(x)

    table = sl.suggest(Residual(), Mesh.abstract(tensor=4), torch.ones(8, 16))
    assert table == dict.fromkeys(["a.weight", "b.weight", "c.weight"], "out@tensor _")
    assert {*table.why.values()} == {"columns: what it makes is gathered where it comes back"}


class Cells(nn.Module):
    def __init__(self, kind: Any, inner: int, hidden: int) -> None:
        super().__init__()
        self.cells, self.out = kind(inner, hidden, bias=False), nn.Linear(hidden, inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cells(x)[0])


def test_a_step_of_cells_is_one_program() -> None:
    """They list their parameters a second time, and look whether these are still the ones that they have."""
    with Mesh(data=2):
        model = sl.parallelize(nn.GRU(4, 4), strategy="fsdp")
        step = sl.jit(lambda m, x: m(x)[0].sum().backward())
        for _ in range(2):
            step(model, torch.ones(3, 2, 4))
            model.zero_grad()
    assert step.retraces == []


def test_weights_of_cells_on_a_gpu_stay_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """There torch puts weights into one memory, whose addresses it asks for."""
    cells = nn.GRU(4, 4)
    with Mesh(data=2):
        model = sl.parallelize(cells, strategy="fsdp")
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda x: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    model.flatten_parameters()
    assert isinstance(model.weight_ih_l0, sl.ShardedTensor)


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_cells_are_cut_by_rows_between_their_matmuls(kind: Any) -> None:
    """Gates are computed by columns, one exchange makes them rows of the batch, and no step communicates."""
    with torch.device("meta"):
        model, x = Cells(kind, 256, 1024), torch.ones(3, 256, 256)
    with Mesh.abstract(tensor=8) as mesh:
        table = sl.suggest(model, mesh, x)
        assert table == {"cells.weight_ih_l0": "out@tensor _", "out.weight": "out@tensor _"}
        sl.parallelize(model, table)
        plan = sl.jit(lambda m, x: m(x).square().sum().backward()).plan(model, x)
    gates = [c.kind for c in plan.collectives if "recurrence" in str(c) and "m.out" not in str(c)]
    assert gates == ["all_to_all", "all_to_all"]
    assert len(plan.collectives) <= 6

    plain = Cells(kind, 4, 8).double()
    model, x = copy.deepcopy(plain), torch.randn(3, 3, 4, dtype=torch.float64)
    with Mesh(tensor=4):
        ours = sl.parallelize(model, table)(x)
        ours.square().sum().backward()
    (theirs := plain(x)).square().sum().backward()
    torch.testing.assert_close(whole(ours), theirs, rtol=1e-10, atol=1e-10)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-10, atol=1e-10)


def test_names_with_marks_of_patterns() -> None:
    net = nn.ModuleDict({"a[0]": nn.Linear(4, 4), "b?": nn.Linear(4, 4), "b1": nn.Linear(4, 4)})
    with Mesh(tensor=2):
        sl.parallelize(net, {"b?.weight": "out@tensor _", "a[0].bias": "out@tensor"})
    assert {name for name, p in net.named_parameters() if "@" in sl.typeof(p)} == {"b?.weight", "a[0].bias"}


def test_what_suggest_cannot_do() -> None:
    for module, mesh, text in (
        (nn.Linear(8, 8), Mesh.abstract(data=2), "none of its axes is called tensor, model, tp"),
        (nn.Linear(8, 8), Mesh.abstract(data=2), r'data axes need no table: parallelize\(module, strategy="fsdp"\)'),
        (nn.Linear(2, 2), Mesh.abstract(tensor=8), "finds no weight that 'tensor' could shard"),
    ):
        with pytest.raises(ShardingError, match=text):
            sl.suggest(module, mesh, torch.ones(4, module.in_features))


class Asking(nn.Module):
    """Asks for what its arguments, or its weights, hold, and draws Python's numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor, labels: Tensor | None = None, largest: float | None = None) -> Tensor:
        if labels is not None and labels.max() >= len(x):
            raise ValueError("no such class")
        x = x if random.random() < 0.5 else 2 * x
        if largest is not None and self.layers[0].weight.max() > largest:
            raise ValueError("a weight is too large")
        out: Tensor = self.layers(x)
        return out


def test_suggest_takes_the_way_of_its_example() -> None:
    mesh, x, drawn = Mesh.abstract(tensor=2), torch.ones(4, 8), random.getstate()
    table = sl.suggest(Asking(), mesh, x, labels=torch.arange(4))
    assert table == {"layers.0.weight": "out@tensor _", "layers.0.bias": "out@tensor", "layers.2.weight": "_ in@tensor"}
    assert random.getstate() == drawn
    with pytest.raises(ValueError, match="no such class"):
        sl.suggest(Asking(), mesh, x, labels=torch.arange(5))
    for more in ({"labels": torch.arange(4, device="meta")}, {"largest": 9.0}):
        with pytest.raises(ShardingError, match=r"suggest\(Asking\) traces a call: .* needs the value of [gl][et]"):
            sl.suggest(Asking(), mesh, x, **more)


class Counting(nn.Module):
    """A layer that counts its calls, and notes the counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.seen = nn.Linear(8, 8), 0, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        out: Tensor = self.layer(x)
        return out


def test_what_a_forward_pass_notes_is_none_of_the_way_back() -> None:
    with Mesh(data=2):
        model = sl.parallelize(Counting())
        for _ in range(3):  # a warning, of ops that run one by one, would be an error
            model(torch.ones(4, 8)).sum().backward()
    assert model.seen == [1, 2, 3]
