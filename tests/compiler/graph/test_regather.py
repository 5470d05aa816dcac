"""What is gathered for a pass is given up behind it, and so are sums: bytes by formula, memory, gradients."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardlib as sl
from shardlib import Mesh, ShardingError
from tests.helpers.ranks import run_ranks

D, ROWS = 32, 128


class Layers(nn.Module):
    """Linear layers without biases, the first of which has a gradient to pass on as well."""

    def __init__(self, n: int = 3, again: bool = False) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.layers = nn.ModuleList(nn.Linear(D, D, bias=False, dtype=torch.float64) for _ in range(n))
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.start
        for layer in self.layers:
            block = lambda y, layer=layer: torch.tanh(layer(y))
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x


def built(n: int = 3, again: bool = False) -> tuple[Layers, Layers, float]:
    """Two equal modules, and the bytes of their matrices."""
    torch.manual_seed(0)
    model = Layers(n, again)
    return model, copy.deepcopy(model), n * D * D * 8.0


def trained(model: Layers, x: torch.Tensor, compiled: bool, **options: Any) -> Any:
    """The function that takes one step on as many micro-batches as `x` has, and an optimizer."""
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for i in range(len(x)):
            loss = model(x[i]).square().mean()
            loss.backward()
            total = total + loss.detach()
        opt.step()
        opt.zero_grad()
        return total

    return sl.jit(step, **options) if compiled else step


def sent(plan: sl.Plan, least: float = 1000.0) -> Counter[Any]:
    """Bytes by kind and axes, without those of small things."""
    found: Counter[Any] = Counter()
    for c in plan.compiled.program.collectives:
        if c.out.nbytes >= least:
            found[c.kind, *(axis.name for axis in c.axes)] += c.bytes
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("s", [1, 2, 4])
def test_zero_3_by_formula(s: int) -> None:
    model, _, size = built()
    with Mesh(data=4):
        model = sl.parallelize(model, strategy="fsdp")
        x = torch.randn(s, ROWS, D, dtype=torch.float64)
        found = sent(trained(model, x, True).plan(x))
    one = 3 / 4 * size
    assert found == {("all_gather", "data"): 2 * s * one, ("reduce_scatter", "data"): s * one}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("s", [1, 2, 4])
def test_mics_by_formula(s: int) -> None:
    model, _, size = built()
    with Mesh(replica=2, shard=4):
        model = sl.parallelize(model, strategy="hsdp")
        x = torch.randn(s, 2 * ROWS, D, dtype=torch.float64)
        found = sent(trained(model, x, True).plan(x))
    one = 3 / 4 * size
    assert found == {
        ("all_gather", "shard"): 2 * s * one,
        ("reduce_scatter", "shard"): s * one,
        ("all_reduce", "replica"): 2 * (1 / 2) * size / 4,
    }


class Fused(nn.Module):
    """Three weights in one, of which no piece is one or two: behind a layer, so that it has a gradient to pass on."""

    def __init__(self, at_once: bool) -> None:
        super().__init__()
        make = lambda out: nn.Linear(D, out, bias=False, dtype=torch.float64)
        self.first, self.qkv, self.out, self.at_once = make(D), make(3 * D), make(D), at_once

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.qkv(torch.tanh(self.first(x)))
        q, k, v = y.view(*y.shape[:-1], 3, D).unbind(-2) if self.at_once else y.chunk(3, -1)
        out: torch.Tensor = self.out(torch.sigmoid(q) * torch.tanh(k) * v)
        return out


ADAM = lambda p: torch.optim.Adam(p, lr=1e-2)
MOMENTUM = lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("make", [ADAM, MOMENTUM], ids=["Adam", "momentum"])
@pytest.mark.parametrize("at_once", [True, False], ids=["view", "chunk"])
@pytest.mark.parametrize(("strategy", "times"), [("fsdp", 3), ("zero1", 2), ("zero2", 2)])
def test_three_weights_in_one(strategy: str, times: int, at_once: bool, make: Any, clipped: bool) -> None:
    """Gradients are summed to where weights and moments are, though ops inside take these apart otherwise."""

    def step(model: Any, opt: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        if clipped:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        opt.step()
        opt.zero_grad()
        return loss

    torch.manual_seed(0)
    model, x = Fused(at_once), torch.randn(8 * ROWS, D, dtype=torch.float64)
    plain = copy.deepcopy(model)
    with Mesh(data=4):
        sl.parallelize(model, strategy=strategy)
        opt, jitted = make(model.parameters()), sl.jit(step)
        found = sent(jitted.plan(model, opt, x))
        for _ in range(2):
            jitted(model, opt, x)
    one, first = 3 / 4 * sum(p.nbytes for p in plain.parameters()), 3 / 4 * D * D * 8.0
    gathered = 2 * one - first if times == 3 else one  # the first layer's weight is not read on the way back
    assert found == {("all_gather", "data"): gathered, ("reduce_scatter", "data"): one}
    opt = make(plain.parameters())
    for _ in range(2):
        step(plain, opt, x)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(ours, sl.ShardedTensor)
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("way", "times"), [("never", 1), ("always", 2), ("auto", 2)])
def test_the_module_by_itself(way: str, times: int) -> None:
    model, _, size = built()
    with Mesh(data=4):
        strategy = sl.strategies.fsdp(regather=way != "never")
        model = sl.parallelize(model, strategy=strategy)
        plan = model.forward.plan(torch.randn(ROWS, D, dtype=torch.float64))
    assert sent(plan) == {("all_gather", "data"): times * 3 / 4 * size, ("reduce_scatter", "data"): 3 / 4 * size}
    halves = plan.compiled.halves
    assert halves is not None
    whole = [v for v in halves.saved if v.nbytes == D * D * 8 and v.layout is not None and not v.layout.axes]
    assert len(whole) == (3 if way == "never" else 0)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("way", ["never", "always", "auto"])
def test_specs_alone(way: str, again: bool) -> None:
    """Of what no strategy says it, `auto` gathers again what a checkpoint runs again."""
    model, _, size = built(again=again)
    with Mesh(data=4):
        model = sl.parallelize(model, {"layers.*.weight": "out@data in"})
        x = torch.randn(1, ROWS, D, dtype=torch.float64)
        found = sent(trained(model, x, True, regather=way).plan(x))
    times = 2 if way == "always" or (way == "auto" and again) else 1
    assert found["all_gather", "data"] == times * 3 / 4 * size


@pytest.mark.long
def test_memory_is_that_of_few_layers() -> None:
    """With 16 layers in checkpoints, what is whole at once is a few of them."""
    peaks = {}
    for way in ("never", "auto"):
        model, _, size = built(16, again=True)
        with Mesh(data=8):
            model = sl.parallelize(model, {"layers.*.weight": "out@data in"})
            opt = torch.optim.SGD(model.parameters(), lr=1e-2)

            def step(model: Any, opt: Any, x: torch.Tensor) -> None:
                model(x).square().mean().backward()
                opt.step()
                opt.zero_grad()

            plan = sl.jit(step, regather=way).plan(model, opt, torch.randn(8 * D, D, dtype=torch.float64))
            peaks[way] = plan.peak_memory / size
    assert peaks["never"] > 1
    assert peaks["auto"] < peaks["never"] - 0.4


CASES = [
    ("fsdp", {"data": 4}),
    ("hsdp", {"replica": 2, "shard": 2}),
    (sl.strategies.fsdp(regather=False), {"data": 4}),
    ("zero2", {"data": 2}),
]


@pytest.mark.sampled(11)
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(("strategy", "axes"), CASES, ids=["fsdp", "hsdp", "kept", "zero2"])
def test_values(strategy: Any, axes: dict[str, int], again: bool, compiled: bool) -> None:
    assert_equal(strategy, Mesh(**axes), again, compiled)


def assert_equal(strategy: Any, mesh: Mesh, again: bool, compiled: bool) -> None:
    model, plain, _ = built(again=again)
    x = torch.randn(3, 2 * ROWS, D, dtype=torch.float64)
    with mesh:
        model = sl.parallelize(model, strategy=strategy)
        step = trained(model, x, compiled)
        losses = [step(x) for _ in range(2)]
        losses = [y.full_tensor() if isinstance(y, sl.ShardedTensor) else y for y in losses]
        mine = {k: p.full_tensor() for k, p in model.named_parameters()}
    step = trained(plain, x, False)
    torch.testing.assert_close(losses, [step(x) for _ in range(2)], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(mine, dict(plain.named_parameters()), rtol=1e-10, atol=1e-10)


def _on_ranks() -> None:
    assert_equal("fsdp", Mesh(shard=2), True, True)


@pytest.mark.long
@pytest.mark.ranks
def test_values_on_ranks() -> None:
    run_ranks(_on_ranks, 2)


class Parts(nn.Module):
    """One weight, of which each layer reads a part."""

    def __init__(self, part: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 2, D, D, dtype=torch.float64))
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(3):
            x = torch.tanh(x @ self.part(self.w, i))
        return x


PARTS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "select": lambda w, i: w[i, 0],
    "slice": lambda w, i: w[i : i + 1, 1:].reshape(D, D),
    "chunk": lambda w, i: w.chunk(3)[i].sum(1)[0],
    "a function of each element": lambda w, i: w.exp()[i, 0].t(),
    "flipped": lambda w, i: w.flip(0)[i, 1].t(),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", PARTS)
def test_parts_of_a_weight(name: str, compiled: bool) -> None:
    torch.manual_seed(0)
    plain = Parts(PARTS[name])
    model = copy.deepcopy(plain)
    x = torch.randn(2, 16 * ROWS, D, dtype=torch.float64)
    with Mesh(data=4):
        model = sl.parallelize(model, strategy="fsdp")
        step = trained(model, x, compiled)
        for _ in range(2):
            step(x)
        found = model.w.full_tensor()
        bytes_ = sent(step.plan(x))["all_gather", "data"] if compiled else 0
    other = trained(plain, x, False)
    for _ in range(2):
        other(x)
    torch.testing.assert_close(found, plain.w, rtol=1e-10, atol=1e-10)
    if name in ("select", "slice"):
        assert bytes_ == (4 * 3 - 2) * 3 / 4 * D * D * 8 * compiled, (
            "each part for each pass; the first has no gradient"
        )


@sl.rule("i j -> i j")
@torch.library.custom_op("tests_regather::dear", mutates_args=())
def dear(w: torch.Tensor) -> torch.Tensor:
    return w.sin()


dear.register_fake(torch.empty_like)
dear.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def test_an_op_of_ones_own_runs_once() -> None:
    """What it makes of a weight is kept: nobody knows what it takes."""
    torch.manual_seed(0)
    model = Parts(lambda w, i: dear(w[i, 0]))
    with Mesh(data=2):
        model = sl.parallelize(model, strategy="fsdp")
        x = torch.randn(1, 16 * ROWS, D, dtype=torch.float64)
        plan = trained(model, x, True).plan(x)
    assert sum("dear" in str(getattr(step, "target", "")) for step in plan.compiled.program.steps) == 3


@pytest.mark.parametrize("s", [1, 2])
def test_scattered_to_where_the_next_one_is_added(s: int) -> None:
    """Also where a bias, which nobody names, is cut over data along the dim that the weight has cut over tensor."""
    torch.manual_seed(0)
    with Mesh(data=4, tensor=2):
        model = sl.parallelize(nn.Linear(D, D).double(), {"weight": "out@tensor _"}, strategy="fsdp")
        found = sent(trained(model, torch.empty(0), True).plan(torch.empty(s, 64 * ROWS, D, dtype=torch.float64)))
    one = 3 / 4 * D * D * 8 / 2
    assert found == {("all_gather", "data"): s * one, ("reduce_scatter", "data"): s * one}


def test_gathered_in_16_bits() -> None:
    """Both times in the dtype in which it is read."""
    model, _, size = built()
    model = model.float()
    with Mesh(data=4):
        model = sl.parallelize(model, strategy="fsdp", precision=torch.bfloat16)
        plan = model.forward.plan(torch.randn(4 * ROWS, D))
    found = sent(plan)
    assert found["all_gather", "data"] == 2 * 3 / 4 * size / 4


def test_an_adapter_keeps_its_strategy() -> None:
    """What is copied, pickled or parallelized again without a strategy is gathered as before."""
    model, _, size = built()
    with Mesh(data=4):
        model = copy.deepcopy(sl.parallelize(model, strategy="fsdp"))
        model = sl.parallelize(model, {})
        plan = model.forward.plan(torch.randn(ROWS, D, dtype=torch.float64))
    assert sent(plan)["all_gather", "data"] == 2 * 3 / 4 * size


def test_a_way_that_is_none() -> None:
    with pytest.raises(ShardingError, match="regather='often' is none of auto, always, never"):
        sl.jit(lambda x: x, regather="often")


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("regather", ["auto", "always"])
def test_what_a_layer_adds_is_its_shards(regather: str) -> None:
    """Weights and their gradients in pieces, and what the checkpoint keeps; nothing whole, on the way or to be sent."""
    d, ff, n = 256, 1024, 64

    def block(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ a) @ b

    def loss(weights: list[tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
        for a, b in weights:
            x = checkpoint(block, x, a, b, use_reentrant=False)
        return x.square().sum()

    def peak(layers: int) -> int:
        x, *weights = (torch.empty(*of, device="meta") for of in ((64, 512, d), *[(d, ff), (ff, d)] * layers))
        with Mesh(data=n):
            step = sl.jit(sl.grad(loss), in_specs=("_@data _", "b@data s d"), regather=regather)
            return step.plan([*zip(weights[::2], weights[1::2], strict=True)], x).peak_memory

    shards, kept = 2 * d * ff * 4 // n, 64 * 512 * d * 4 // n
    assert (peak(16) - peak(8)) / 8 <= 1.05 * (2 * shards + kept)
