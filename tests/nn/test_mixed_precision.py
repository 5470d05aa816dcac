"""Mixed precision: what is gathered, computed and summed in which dtype, against casts on one device."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import shardlib as sl
from shardlib import Precision, ShardingError
from shardlib.compiler.program.steps import Collective, Start

f64, f32, bf16 = torch.float64, torch.float32, torch.bfloat16
X = torch.randn(4096, 16, dtype=f64, generator=torch.Generator().manual_seed(3))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return y


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def messages(plan: sl.Plan) -> list[Collective]:
    return [c for step in plan.compiled.program.steps if isinstance(step, Start) for c in step.moves]


MEGATRON = {"up.weight": "ff@tensor _", "up.bias": "ff@tensor", "down.weight": "_ ff@tensor"}


def loss_of(out: Tensor) -> Tensor:
    return out.double().square().mean()


def on_one_device(module: nn.Module, said: Precision, x: Tensor, whole: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of rows `x`, a part of `whole` of them, and gradients, of parameters that are cast where they enter."""
    compute = said.compute or f64
    sent = said.communication or compute
    own = dict(module.named_parameters())
    cast = {k: p.detach().to(sent).to(compute).requires_grad_() for k, p in own.items()}
    loss = loss_of(functional_call(module, cast, (x.to(compute),))) * (len(x) / whole)
    return loss.detach(), dict(zip(cast, torch.autograd.grad(loss, list(cast.values())), strict=True))


SAID = {
    "a dtype": (f32, Precision(compute=f32)),
    "sums in the parameter's": (Precision(compute=f32), Precision(compute=f32)),
    "sums in the computation's": (Precision(compute=f32, reduction=f32), Precision(compute=f32, reduction=f32)),
    "sums in less": (Precision(reduction=f32), Precision(reduction=f32)),
    "sent in less": (Precision(communication=bf16, compute=f32), Precision(communication=bf16, compute=f32)),
}
STRATEGIES = ["ddp", "zero1", "zero2", "fsdp"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", SAID)
def test_what_is_summed_in_which_dtype(name: str, strategy: str) -> None:
    """Gradients of each device's rows, in the dtype of the computation; then their sum, in that of the reduction."""
    given, said = SAID[name]
    ways = 4
    parts = [on_one_device(net(), said, rows, len(X)) for rows in X.chunk(ways)]
    with sl.Mesh(data=ways):
        model = sl.parallelize(net(), strategy=strategy, precision=given)
        loss_of(model(X)).backward()
        plan = model.forward.plan(X)
    sums = said.reduction or f64
    for key, p in model.named_parameters():
        each = [grads[key].to(sums) for _, grads in parts]
        want = sum(each[1:], start=each[0]).to(f64)
        assert p.dtype == p.grad.dtype == f64
        is_sum = sums is f64 and key != "down.bias"  # whose gradient one device may take of all rows
        close = {"rtol": 1e-13, "atol": 1e-15} if is_sum else {"rtol": 1e-5, "atol": 1e-7}
        torch.testing.assert_close(p.grad.full_tensor(), want, **close)
    gathered = {c.source.dtype for c in messages(plan) if c.kind == "all_gather" and not c.backward}
    reduced = {c.source.dtype for c in messages(plan) if c.kind in ("reduce_scatter", "all_reduce")}
    sent = said.communication or said.compute or f64
    assert gathered <= {sent}
    assert not plan.compiled.traced.after.gradients or reduced <= {sums, f64}
    assert sums in reduced or strategy == "zero1"


def test_on_every_axis_with_a_tensor_axis_too() -> None:
    said = Precision(compute=f32, reduction=f64)
    with sl.Mesh(data=2, tensor=2):
        model = sl.parallelize(net(), MEGATRON, strategy="fsdp", precision=said)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        @sl.jit
        def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
            loss = loss_of(model(x))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        plan = step.plan(model, optimizer, X)
        losses = [float(step(model, optimizer, X)) for _ in range(3)]
    gradients = [c for c in messages(plan) if "cast_terms" in str(c.source.value)]
    assert gradients, "sums of gradients"
    assert {c.source.dtype for c in gradients} == {f64}
    assert {c.source.dtype for c in messages(plan) if c.kind == "all_gather"} == {f32}
    plain = net()
    torch_optimizer, want = torch.optim.AdamW(plain.parameters(), lr=0.1), []
    for _ in range(3):
        loss, grads = on_one_device(plain, said, X, len(X))
        want.append(float(loss))
        for key, p in plain.named_parameters():
            p.grad = grads[key].to(f64)
        torch_optimizer.step()
    assert losses == pytest.approx(want, rel=1e-6)
    moments = [x for state in optimizer.state.values() for k, x in state.items() if k.startswith("exp_avg")]
    assert {x.dtype for x in moments} == {f64}, "master weights, and their moments"


@pytest.mark.long
def test_parameters_results_and_patterns() -> None:
    with sl.Mesh(data=2):
        kept = sl.parallelize(net(), precision=Precision(parameter=f32, compute=bf16, output=f32))
        assert {p.dtype for p in kept.parameters()} == {f32}
        assert kept(X).dtype == f32
        sl.parallelize(kept, strategy="fsdp")
        assert kept(X.float()).dtype == f32, "what was said stays"
        other = copy.deepcopy(kept)
        with torch.no_grad():
            other.up.weight.zero_()
            other.up.bias.zero_()
        (one, two), (mine, yours) = other(X).full_tensor()[:2], kept(X).full_tensor()[:2]
        assert torch.equal(one, two), "a copy has its own weights"
        assert not torch.equal(mine, yours)
        some = sl.parallelize(net(), precision={"up.*": Precision(communication=f32, reduction=f32)}, strategy="fsdp")
        out = some(X)
        assert out.dtype == f64
        plan = some.forward.plan(X)
    sent = {(c.source.dtype, tuple(c.source.value.shape)) for c in messages(plan) if c.kind == "all_gather"}
    assert (f32, (32, 16)) in sent
    assert (f64, (16, 32)) in sent


class Recomputing(nn.Module):
    """Two layers, of which a checkpoint runs the second again, with a gain of its own."""

    def __init__(self, way: bool | None, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.up, self.down, self.gain = nn.Linear(16, 32), nn.Linear(32, 16), nn.Parameter(torch.rand(16))
        self.way = way

    def block(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(x)) * self.gain

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.block(h) if self.way is None else checkpoint(self.block, h, use_reentrant=self.way, **self.how)


def selective() -> tuple[Any, Any]:
    """Contexts of a checkpoint that keeps what tanh makes."""
    return create_selective_checkpoint_contexts([torch.ops.aten.tanh.default])


CASTS = {
    "bf16": bf16,
    "sums in less": Precision(compute=bf16, reduction=bf16),
    "sent in less": Precision(communication=bf16),
}


@pytest.mark.sampled(14)
@pytest.mark.parametrize("door", ["parallelize", "jit", "op by op"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", CASTS)
def test_what_a_checkpoint_runs_again_finds_the_same_casts(name: str, strategy: str, door: str) -> None:
    found = []
    for way, how in ((None, {}), (False, {}), (True, {}), (False, {"context_fn": selective})):
        with sl.Mesh(data=2):
            model = sl.parallelize(Recomputing(way, **how), strategy=strategy, precision=CASTS[name])

            def step(run: Any, x: Tensor) -> None:
                run(x).float().square().mean().backward()

            if door == "op by op":
                step(model.forward.run, sl.shard(X.float(), "batch@data _"))
            else:
                (sl.jit(step) if door == "jit" else step)(model, X.float())
        assert {p.dtype for p in model.parameters()} == {f32}
        found.append({key: p.grad.full_tensor() for key, p in model.named_parameters()})
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-6, atol=1e-7)


def test_autocast_inside() -> None:
    with sl.Mesh(data=2):
        model = sl.parallelize(net().float(), precision=Precision(reduction=f32))
        with torch.autocast("cpu", dtype=bf16):
            out = model(X.float())
    assert out.dtype == bf16
    with torch.autocast("cpu", dtype=bf16):
        torch.testing.assert_close(out.full_tensor(), net().float()(X.float()), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("given", [(f32, f32, bf16), (f32, f32, f32), (torch.float64,) * 3])
def test_attention_under_autocast(given: tuple[torch.dtype, ...], masked: bool) -> None:
    """Rotated queries and keys are wider than values, as positions are worked out in full."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 6, 8).to(dtype) for dtype in given)
    mask = torch.randn(6, 6).to(given[0]) if masked else None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=bf16):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    with sl.Mesh(data=2):
        out = sl.jit(attend, in_specs="batch@data _ _ _")(q, k, v)
    want = attend(q, k, v)
    assert out.dtype == want.dtype
    torch.testing.assert_close(out.full_tensor(), want, rtol=2e-2, atol=2e-2)


def test_one_thread_at_a_time_sees_the_casts() -> None:
    inside, over = threading.Event(), threading.Event()

    class Waits(Net):
        def forward(self, x: Tensor) -> Tensor:
            inside.set()
            over.wait(30)
            return super().forward(x)

    module = Waits().double()
    with sl.Mesh(data=2):
        sl.parallelize(module, precision=f32)
    own = list(module.parameters())
    first = threading.Thread(target=module, args=(X,))
    first.start()
    assert inside.wait(60)
    with sl.Mesh(data=2), sl.no_mesh(), pytest.raises(ShardingError, match="two threads run the forward of one Waits"):
        module.forward.run(X)
    over.set()
    first.join(60)
    assert all(x is y for x, y in zip(module.parameters(), own, strict=True))


NORMS: dict[str, Callable[[], list[nn.Module]]] = {
    "1d": lambda: [nn.Linear(16, 8), nn.BatchNorm1d(8)],
    "2d": lambda: [nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4)],
    "nothing learned": lambda: [nn.Linear(16, 8), nn.BatchNorm1d(8, affine=False)],
    "nothing tracked": lambda: [nn.Linear(16, 8), nn.BatchNorm1d(8, track_running_stats=False)],
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [bf16, torch.float16])
@pytest.mark.parametrize("name", NORMS)
def test_batch_normalization_keeps_its_dtype(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*NORMS[name]())
    model, x = copy.deepcopy(plain), X[:8].float()
    with sl.Mesh(data=2):
        sl.parallelize(model, strategy="fsdp", precision=dtype)
        for mode in (True, False):
            norm = plain.train(mode)[-1]
            cast = {k: p if k.startswith(f"{len(plain) - 1}.") else p.to(dtype) for k, p in plain.named_parameters()}
            want = functional_call(plain, cast, (x.to(dtype),))
            out = model.train(mode)(x)
            assert out.dtype == want.dtype == dtype
            torch.testing.assert_close(out.full_tensor(), want, rtol=2e-2, atol=2e-2)
            weights = torch.randn(want.shape)
            gradients = torch.autograd.grad((want.float() * weights).sum(), list(plain.parameters()))
            model.zero_grad()
            (out.float() * weights).sum().backward()
            for p, q in zip(model.parameters(), gradients, strict=True):
                assert p.grad.dtype == f32
                torch.testing.assert_close(p.grad.full_tensor(), q, rtol=5e-2, atol=0.02 * float(q.abs().max()) + 0.05)
            for mine, its in zip(model[-1].buffers(), norm.buffers(), strict=True):
                torch.testing.assert_close(mine, its, rtol=1e-2, atol=1e-2)


def test_batch_normalization_that_is_named() -> None:
    low = Precision(compute=bf16)

    def make(tracks: bool) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8, track_running_stats=tracks))

    with sl.Mesh(data=2):
        module = make(True)
        with pytest.raises(ShardingError) as error:
            sl.parallelize(module, precision={"0.*": low, "1.*": low})
        assert "1 of BatchNorm1d: 1.running_mean in torch.float32" in str(error.value)
        assert "1.weight in torch.bfloat16" in str(error.value)
        with pytest.raises(ShardingError, match=r"the activations in torch\.bfloat16"):
            sl.parallelize(make(True).double(), precision=bf16)
        assert sl.parallelize(module, precision={"*": low}).forward.policy.by_name.keys() == {"0.weight", "0.bias"}
        said = sl.parallelize(make(False), precision={"0.*": low, "1.*": low})
        assert said(X[:8].to(bf16)).dtype == bf16
        assert "1.weight" in said.forward.policy.by_name


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        (lambda: Precision(compute=torch.int64, reduction="f32"), "compute=torch.int64 is no dtype"),
        (lambda: "bfloat16", "precision='bfloat16' is none"),
        (lambda: {"up.*": f32}, "is none"),
        (lambda: {"nothing.*": Precision(compute=f32)}, "'nothing.*' matches no parameter"),
        (lambda: {"up.*": Precision(compute=f32), "*.weight": Precision(compute=bf16)}, "up.weight is"),
    ],
)
def test_what_is_no_precision(precision: Any, message: str) -> None:
    module = net()
    with sl.Mesh(data=2), pytest.raises(ShardingError) as error:
        sl.parallelize(module, precision=precision())
    assert message in str(error.value)
    assert not any(isinstance(p, sl.ShardedTensor) for p in module.parameters()), "nothing is placed"


# --- loss scaling -----------------------------------------------------------------------------------------------------

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
}


def _scaled(make: Make, bad: int, strategy: str | None, *, clips: bool = False) -> tuple[list[Any], Any, Any]:
    """Losses and parameters of five steps, of which one overflows; the scaler's state; the plan."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()
    batches = [torch.randn(16, 8, dtype=f64) for _ in range(5)]
    batches[bad][3, 2] = float("inf")

    def step(model: Any, optimizer: Any, scaler: Any, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean() * x.mean()  # which is infinite
        scaler.scale(loss).backward()
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    if strategy is None:
        optimizer = make(model.parameters())
        losses = [float(step(model, optimizer, scaler, x)) for x in batches]
        return [*losses, *model.parameters()], scaler.state_dict(), None
    with sl.Mesh(data=4):
        sl.parallelize(model, strategy=strategy)
        optimizer, jitted = make(model.parameters()), sl.jit(step)
        losses = [float(jitted(model, optimizer, scaler, x)) for x in batches]
        plan = jitted.plan(model, optimizer, scaler, batches[0])
        whole = [x.full_tensor() for x in model.parameters()]
    return [*losses, *whole], scaler.state_dict(), plan


@pytest.mark.long
@pytest.mark.sampled(23)
@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_overflows_is_skipped_everywhere(name: str, bad: int) -> None:
    want, state, _ = _scaled(OPTIMIZERS[name], bad, None)
    found, scaled, plan = _scaled(OPTIMIZERS[name], bad, "fsdp")
    assert scaled == state
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b).detach(), equal_nan=True)
    checks = [c for c in messages(plan) if c.source.dtype == f32]
    assert len(checks) == 1, "one sum says whether all gradients are finite"


@pytest.mark.long
def test_clipping_between() -> None:
    want, state, _ = _scaled(OPTIMIZERS["SGD, momentum"], 2, None, clips=True)
    found, scaled, _ = _scaled(OPTIMIZERS["SGD, momentum"], 2, "zero2", clips=True)
    assert scaled == state
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b).detach(), equal_nan=True)


class Own(torch.optim.Optimizer):
    """An optimizer of the user's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(0.1 * p.grad)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Own, "a gradient scaler steps Own inside a traced function"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1), "the first step of SGD with dampening"),
    ],
    ids=["one's own", "dampening"],
)
def test_what_cannot_be_skipped_is_refused(make: Make, message: str) -> None:
    with pytest.raises(ShardingError) as error:
        _scaled(make, 0, "ddp")
    assert message in str(error.value)


@pytest.mark.long
def test_half_precision_with_a_scaler() -> None:
    """Parameters in float32, computation and messages in float16, sums in float32; an overflow is of float16."""

    def step(model: Any, optimizer: Any, scaler: Any, x: Tensor) -> Tensor:
        loss: Tensor = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    with sl.Mesh(data=2):
        model = sl.parallelize(net().float(), strategy="fsdp", precision=torch.float16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=100)
        jitted = sl.jit(step)
        losses = [float(jitted(model, optimizer, scaler, X.float())) for _ in range(24)]
    assert losses[0] == losses[1], "the first steps overflow"
    assert losses[-1] < 0.9 * losses[0]
    assert scaler.get_scale() < 2.0**24
