"""Numbers of eager ops are inputs of their programs: another number compiles nothing, and is that of plain torch."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from shardlib.eager import inplace, prepare
from shardlib.frontend.guards.recompile_reasons import RetraceWarning
from shardlib.tensor.eager_cache import PROGRAMS
from tests.helpers.ranks import run_ranks

INF, NAN = float("inf"), float("nan")
FLOATS = (0.5, 0.0, -0.0, 1.0, 2.0, -1.5, INF, NAN, 1e300, 1 / 3)
INTS = (3, 0, 1, 2, -3, 2**24 + 1)
Op = Callable[[Tensor, Tensor, Any], Tensor]


def _second_row(write: Callable[[Tensor], Any]) -> Op:
    def run(x: Tensor, y: Tensor, n: Any) -> Tensor:
        out = x.clone()
        write(out[1], n)  # type: ignore[call-arg]
        return out

    return run


# Operands lie elsewhere, or a view is written to: a program moves something.
OPS: dict[str, Op] = {
    "addcmul": lambda x, y, n: x.addcmul(y, x, value=n),
    "addcdiv_": lambda x, y, n: x.clone().addcdiv_(y, y + 3, value=n),
    "add alpha": lambda x, y, n: x.add(y, alpha=n),
    "rsub alpha": lambda x, y, n: torch.rsub(x, y, alpha=n),
    "lerp_": lambda x, y, n: x.clone().lerp_(y, n),
    "masked_fill": lambda x, y, n: x.masked_fill(y > 0, n),
    "where": lambda x, y, n: torch.where(y > 0, x, n),
    "mul_": _second_row(lambda row, n: row.mul_(n)),
    "fill_": _second_row(lambda row, n: row.fill_(n)),
    "pow_": _second_row(lambda row, n: row.pow_(n)),
    "clamp_": _second_row(lambda row, n: row.clamp_(min=n)),
    "floor division": _second_row(lambda row, n: row.div_(n, rounding_mode="floor")),
    "lt_": _second_row(lambda row, n: row.lt_(n)),
}  # fmt: skip


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The ops that were compiled."""
    ops: list[Any] = []
    single = prepare.compile_op

    def counting(op: Any, *args: Any) -> Any:
        ops.append(op)
        return single(op, *args)

    for module in (inplace, prepare):
        monkeypatch.setattr(module, "compile_op", counting)
    return ops


def _outcome(op: Op, *args: Any) -> Any:
    try:
        out = op(*args)
    except RuntimeError as error:
        return type(error).__name__
    return out.full_tensor() if isinstance(out, sl.ShardedTensor) else out


@pytest.mark.sampled(3)
@pytest.mark.parametrize("numbers", [FLOATS, INTS], ids=["floats", "ints"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_another_number_compiles_nothing(
    name: str, dtype: torch.dtype, numbers: tuple[Any, ...], compiled: list[Any]
) -> None:
    op, x, y = OPS[name], (torch.arange(12.0) - 5).reshape(3, 4).to(dtype), torch.ones(3, 4, dtype=dtype).tril()
    with sl.Mesh(data=2, tensor=2):
        sharded = sl.shard(x, "rows@data _"), sl.shard(y, "_ columns@tensor")
    for i, n in enumerate(numbers):
        expected, actual = _outcome(op, x, y, n), _outcome(op, *sharded, n)
        if isinstance(expected, str):
            assert actual == expected
        else:
            if name != "mul_":  # its row is a partial sum, of which 0 is never negative
                assert torch.equal(torch.signbit(expected), torch.signbit(actual)) or expected.isnan().any()
            torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
        if i == 0 or n == 1 or not 0 < abs(n) < 1e38:  # torch leaves a default out; special numbers are constants
            compiled.clear()
        assert compiled == []


def test_numbers_keep_their_types() -> None:
    x, y = torch.arange(6).reshape(2, 3), torch.ones(2, 3, dtype=torch.int64)
    with sl.Mesh(data=2):
        a, b = sl.shard(x, "rows@data _"), sl.shard(y, "_ _")
    for n in (2, 2.0, True):
        torch.testing.assert_close(torch.where(b > 0, n, a).full_tensor(), torch.where(y > 0, n, x), rtol=0, atol=0)
    with pytest.raises((RuntimeError, ValueError), match="alpha"):
        a.add(b, alpha=2.0)
    half = a.bfloat16().where(b > 0, 0.1)
    assert half.dtype == x.bfloat16().where(y > 0, 0.1).dtype == torch.bfloat16


# --- optimizers -------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, **how: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, **how),
    "adam": lambda p, **how: torch.optim.Adam(p, lr=0.01, amsgrad=True, **how),
    "adamw": lambda p, **how: torch.optim.AdamW(p, lr=0.01, **how),
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": lambda p, **how: torch.optim.RAdam(p, lr=0.01, **how),
    "adagrad": lambda p, **how: torch.optim.Adagrad(p, lr_decay=0.1, **how),
    "adadelta": torch.optim.Adadelta,
    "rmsprop": lambda p, **how: torch.optim.RMSprop(p, momentum=0.9, centered=True, **how),
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "adafactor": torch.optim.Adafactor,
}
AXES = {"hsdp": {"replica": 2, "shard": 2}}
WAYS: list[dict[str, Any]] = [{}, {"foreach": True}, {"foreach": False}]


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))  # 5 and 3 are uneven over 4 devices


def _parallel(strategy: str) -> nn.Sequential:
    with sl.Mesh(**AXES.get(strategy, {"data": 4})):
        return sl.parallelize(_net(), strategy=strategy)


def _train(model: nn.Module, make: Callable[..., Any], steps: int, after: Callable[[], None] = lambda: None) -> Any:
    """Steps with a rate that changes in each, clipped gradients and a moving average; returns all values."""
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
    average = [p.detach().clone() for p in model.parameters()]
    for i in range(steps):
        torch.manual_seed(i)
        model(torch.randn(8, 6)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, p in zip(average, model.parameters(), strict=True):
                mean.lerp_(p, 1 / (2 + i))
        after()
    return [x.full_tensor() if isinstance(x, sl.ShardedTensor) else x.detach() for x in (*model.parameters(), *average)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp", "hsdp"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_op_is_compiled_in_the_third_step(
    name: str, strategy: str, how: dict[str, Any], compiled: list[Any]
) -> None:
    def make(parameters: Iterator[Any]) -> torch.optim.Optimizer:
        return OPTIMIZERS[name](parameters, **how)

    counts: list[tuple[int, int, int]] = []
    actual = _train(
        _parallel(strategy), make, 4, lambda: counts.append((len(compiled), len(PROGRAMS), len(inplace._programs)))
    )
    assert counts[1] == counts[2] == counts[3]
    torch.testing.assert_close(actual, _train(_net(), make, 4), rtol=1e-4, atol=1e-6)


def test_parameters_are_where_they_were_behind_a_step() -> None:
    model, plain = _parallel("zero1"), _net()
    weight = model[0].weight
    alias, view = weight.detach(), weight.detach()[1:3]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    other = torch.optim.AdamW(plain.parameters(), lr=0.1)
    types = [sl.typeof(p) for p in model.parameters()]
    for _ in range(3):
        for module, steps in ((model, optimizer), (plain, other)):
            steps.zero_grad()
            module(torch.ones(4, 6)).square().sum().backward()
        gradient = weight.grad
        before = sl.typeof(gradient), gradient.full_tensor()
        optimizer.step()
        other.step()
        assert weight.grad is gradient
        assert sl.typeof(gradient) == before[0]
        torch.testing.assert_close(gradient.full_tensor(), before[1], rtol=0, atol=0)
        assert [sl.typeof(p) for p in model.parameters()] == types
        assert sl.typeof(optimizer.state[weight]["exp_avg"]) == "f32[5, 6@data]"
        torch.testing.assert_close(weight.full_tensor(), plain[0].weight.detach())
        torch.testing.assert_close(alias.full_tensor(), plain[0].weight.detach())
        torch.testing.assert_close(view.full_tensor(), plain[0].weight.detach()[1:3])
    with torch.no_grad():
        alias.zero_()
    assert float(weight.abs().sum()) == 0


class _Fails(torch.optim.SGD):
    fails = True

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            self.param_groups[0]["params"][0].mul_(0.5)
        if self.fails:
            raise ValueError("no step")


def test_a_step_that_fails_leaves_values() -> None:
    model = _parallel("zero1")
    weight, expected = model[0].weight, _net()[0].weight.detach()
    optimizer = _Fails(model.parameters(), lr=0.1)
    model(torch.ones(4, 6)).sum().backward()
    with pytest.raises(ValueError, match="no step"):
        optimizer.step()
    torch.testing.assert_close(weight.full_tensor(), expected / 2)
    optimizer.fails = False
    optimizer.step()
    torch.testing.assert_close(weight.full_tensor(), expected / 4)
    assert sl.typeof(weight) == "f32[5, 6]"


def test_two_threads_step_two_optimizers() -> None:
    results: dict[str, Any] = {}
    models = {strategy: _parallel(strategy) for strategy in ("zero1", "zero2")}

    def run(strategy: str) -> None:
        optimizer = OPTIMIZERS["adamw"](models[strategy].parameters())
        for x in batches:
            models[strategy](x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results[strategy] = [p.full_tensor() for p in models[strategy].parameters()]

    batches = [torch.randn(8, 6) for _ in range(4)]
    plain = _net()
    optimizer = OPTIMIZERS["adamw"](plain.parameters())
    for x in batches:
        plain(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = [p.detach() for p in plain.parameters()]
    threads = [threading.Thread(target=run, args=(strategy,)) for strategy in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    torch.testing.assert_close(results, {"zero1": expected, "zero2": expected}, rtol=1e-4, atol=1e-6)


def _on_ranks() -> list[Tensor]:
    model = sl.parallelize(_net(), strategy="zero1", mesh=sl.Mesh(data=2))
    result: list[Tensor] = _train(model, OPTIMIZERS["adamw"], 3)
    return result


@pytest.mark.ranks
def test_zero1_on_ranks() -> None:
    expected = _train(_net(), OPTIMIZERS["adamw"], 3)
    for actual in run_ranks(_on_ranks, 2, timeout=120):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


# --- the warning ------------------------------------------------------------------------------------------------------


def _rows(n: int) -> Any:
    with sl.Mesh(data=2):
        return sl.shard(torch.ones(n, 4), "rows@data _")


CHANGES: dict[str, tuple[Callable[[Any, int], Any], str]] = {
    "a slice": (lambda x, n: x[:n], r"slice has been compiled 33 times outside jit, .* the argument end: 32 -> 33"),
    "a window": (lambda x, n: x[n : n + 4], r"slice .* the argument start: 32 -> 33"),
    "an index": (lambda x, n: x[n], r"select .* the argument index: 32 -> 33.\nRemedy: keep to a few values"),
    "a shape": (lambda x, n: _rows(n) * 2, r"mul .* the size of dim 0 of self: 32 -> 33.\nRemedy: pad to a few shapes"),
    "an order": (lambda x, n: x.norm(n + 0.5), r"linalg_vector_norm .* the argument ord: 32.5 -> 33.5"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", CHANGES)
def test_an_op_compiled_again_and_again_warns_once(name: str) -> None:
    run, message = CHANGES[name]
    x = _rows(64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in range(1, 40):
            run(x, n)
    (warning,) = caught
    assert warning.category is RetraceWarning
    assert warning.filename == __file__
    with pytest.raises(RetraceWarning, match=message):
        raise warning.message  # type: ignore[misc]


def test_layers_of_many_shapes_do_not_warn() -> None:
    with sl.Mesh(data=2):
        model = sl.parallelize(nn.Sequential(*[nn.Linear(a, a + 1) for a in range(4, 14)]), strategy="zero1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(4, 4)).sum().backward()
    optimizer.step()


def test_norms_of_many_widths_do_not_warn() -> None:
    """They differ in one size, from one to the next."""
    with sl.Mesh(data=2):
        norms = sl.parallelize(nn.ModuleList([nn.LayerNorm(n) for n in range(4, 24)]), strategy="fsdp")
    with torch.no_grad():
        for p in norms.parameters():
            p.mul_(0.5)
