"""Tracers and exporters of torch around jitted functions and parallelized modules: refused, never a constant."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import shardlib as sl

X = torch.arange(12.0).view(2, 6)


@pytest.fixture(autouse=True)
def _mesh() -> Iterator[None]:
    with sl.Mesh(data=2), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is deprecated
        warnings.simplefilter("ignore", FutureWarning)
        yield


class OpByOp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else x


def op_by_op() -> nn.Module:
    module = sl.parallelize(OpByOp(), strategy="ddp")
    with pytest.warns(UserWarning, match="its ops run one by one"):
        module(X)
    return module


class Around(nn.Module):
    """A plain module that calls something."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


CALLS: dict[str, Callable[[], Any]] = {
    "jit": lambda: sl.jit(lambda x: x * 2, in_specs="n@data _"),
    "warm jit": lambda: [f := sl.jit(lambda x: x * 2, in_specs="n@data _"), f(X)][0],
    "module": lambda: sl.parallelize(nn.Linear(6, 2), strategy="fsdp"),
    "op by op": op_by_op,
    "inner module": lambda: nn.Sequential(sl.parallelize(nn.Linear(6, 2), strategy="fsdp"), nn.ReLU()),
    "shard_map": lambda: sl.shard_map(lambda x: x * 2, "n@data _", "n@data _"),
}
RECORDERS: dict[str, Callable[[Any], Any]] = {
    "make_fx": lambda f: make_fx(lambda x: f(x))(X),
    "make_fx fake": lambda f: make_fx(lambda x: f(x), tracing_mode="fake")(X),
    "make_fx symbolic": lambda f: make_fx(lambda x: f(x), tracing_mode="symbolic")(X),
    "make_fx pre-dispatch": lambda f: make_fx(lambda x: f(x), pre_dispatch=True)(X),
    "linearize": lambda f: torch.func.linearize(lambda x: f(x), X),
    "jit.trace": lambda f: torch.jit.trace(f, X),
    "jit.script": lambda f: torch.jit.script(f),
    "export": lambda f: torch.export.export(f if isinstance(f, nn.Module) else Around(f), (X,)),
    "onnx": lambda f: torch.onnx.export(f if isinstance(f, nn.Module) else Around(f), (X,), "/dev/null", dynamo=False),
    "fake tensors": lambda f: f(FakeTensorMode(allow_non_fake_inputs=True).from_tensor(X)),
}


@pytest.mark.parametrize("recorder", RECORDERS)
@pytest.mark.parametrize("name", CALLS)
def test_a_tracer_around_a_program_is_refused(name: str, recorder: str) -> None:
    call = CALLS[name]()
    with pytest.raises(sl.ShardingError) as raised:
        RECORDERS[recorder](call)
    assert "give it the plain function or module instead" in str(raised.value)


def test_a_fake_mode_around_a_call_is_refused() -> None:
    with FakeTensorMode(), pytest.raises(sl.ShardingError, match=r"^<lambda> is recorded by a FakeTensorMode"):
        CALLS["jit"]()(X)


def test_an_export_names_what_is_placed() -> None:
    module = nn.Sequential(sl.parallelize(nn.Linear(6, 2), strategy="fsdp"), nn.ReLU())
    with pytest.raises(sl.ShardingError) as raised:
        torch.export.export(module, (X,))
    assert str(raised.value).splitlines()[:4] == [
        "torch.export of a parallelized module:",
        "  * 0.weight is f32[2, 6@data]",
        "  * 0.bias is f32[2@data]",
        "  * 0.forward is a program for a mesh",
    ]


MOVES: dict[str, tuple[Callable[[Any], Any], bool]] = {  # with whether the argument is placed
    "shard": (lambda x: sl.shard(x, "n@data _"), False),
    "from_local": (lambda x: sl.from_local([x, x], "n@data _"), False),
    "full_tensor": (lambda x: x.full_tensor() * 2, True),
    "redistribute": (lambda x: x.redistribute("_ _"), True),
    "to_local": (lambda x: x.to_local() * 2, True),
}


@pytest.mark.parametrize("name", MOVES)
def test_moves_of_recorded_tensors_are_refused(name: str) -> None:
    fn, is_placed = MOVES[name]
    x = sl.shard(X, "n@data _") if is_placed else X
    with pytest.raises(sl.ShardingError, match=r"recorded by torch\.fx"):
        make_fx(fn)(x)


def test_ops_of_recorded_placed_tensors_are_recorded() -> None:
    x = sl.shard(X, "n@data _")
    graph = make_fx(lambda x: x * 2 + 1)(x)
    torch.testing.assert_close(graph(sl.shard(2 * X, "n@data _")).full_tensor(), 4 * X + 1)


def test_a_recorded_function_may_read_placed_constants() -> None:
    placed = sl.shard(X, "n@data _")
    graph = make_fx(lambda x: x + placed.full_tensor())(X)
    torch.testing.assert_close(graph(2 * X), 3 * X)


@pytest.mark.long
def test_symbolic_trace_of_a_module_and_torch_compile_run_it() -> None:
    module = sl.parallelize(nn.Linear(6, 2), strategy="fsdp")
    want = module(X).full_tensor()
    torch.testing.assert_close(torch.fx.symbolic_trace(module)(X).full_tensor(), want)
    torch.testing.assert_close(torch.compile(module, backend="eager")(X).full_tensor(), want)
    double = sl.jit(lambda x: x * 2, in_specs="n@data _")
    torch.testing.assert_close(torch.compile(lambda x: double(x) + 1, backend="eager")(X).full_tensor(), 2 * X + 1)
    torch.testing.assert_close(torch.func.functionalize(lambda x: double(x))(X), 2 * X)
    with pytest.raises(sl.ShardingError, match=r"recorded by torch\.fx\.symbolic_trace"):
        torch.fx.symbolic_trace(Around(sl.jit(lambda x: x * 2)))


def test_plain_modules_are_exported_as_before() -> None:
    plain = nn.Linear(6, 2)
    torch.testing.assert_close(torch.export.export(plain, (X,)).module()(X), plain(X))
    torch.testing.assert_close(torch.jit.script(plain)(X), plain(X))
    torch.testing.assert_close(torch.jit.trace(plain, X)(X), plain(X))
