"""What a traced function, and a module that runs op by op, sees when it asks for the class of a tensor."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl

X = torch.arange(24.0).view(6, 4)


@functools.singledispatch
def kind(x: Any) -> str:
    return "object"


kind.register(Tensor, lambda x: "tensor")
kind.register(nn.Parameter, lambda x: "parameter")


def matched(x: Any) -> str:
    match x:
        case nn.Parameter():
            return "parameter"
        case Tensor():
            return "tensor"
    return "other"


def metaclasses(x: Any) -> tuple[Any, ...]:
    class Meta(type):
        pass

    class Made(metaclass=Meta):
        pass

    made = type("made", (), {"n": 1})
    return (
        type(Made) is Meta,
        made.n,
        type(made) is type,
        isinstance(int, type),
        type(x) is type,
        type[int] == type[int],
    )


QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "is": lambda x: (type(x) is Tensor, type(x) is nn.Parameter),
    "==": lambda x: (type(x) == Tensor, type(x) != nn.Parameter),  # noqa: E721 as users write it
    "in": lambda x: type(x) in (Tensor, list),
    "class": lambda x: (x.__class__ is Tensor, x.__class__.__name__),
    "name": lambda x: (type(x).__name__, type(x).__module__, str(type(x))),
    "isinstance": lambda x: (isinstance(x, Tensor), isinstance(x, nn.Parameter), isinstance(type(x), type)),
    "dict": lambda x: {Tensor: 1, nn.Parameter: 2}.get(type(x)),
    "map": lambda x: list(map(type, [x, 1, 2.0, True, None])) == [Tensor, int, float, bool, type(None)],
    "singledispatch": kind,
    "match": matched,
    "subclass": lambda x: (issubclass(type(x), Tensor), type(x).__mro__[0] is Tensor, type(type(x)).__name__),
    "torch's": lambda x: (torch.is_tensor(x), torch.overrides.is_tensor_like(x), torch.typename(x), x.type()),
    "metaclasses": metaclasses,
}


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Asks(nn.Module):
    """Answers all questions about its tensors in each call."""

    def __init__(self, answers: list[Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.scale, self.inner = nn.Linear(4, 4), nn.Parameter(torch.ones(4)), Inner()
        self.register_buffer("table", torch.ones(4))
        self.answers = answers

    def forward(self, x: Tensor, n: int = 3) -> Tensor:
        y = self.inner(self.linear(x) * self.scale)
        values = x, self.linear.weight, self.scale, self.table, y, x[0], self.scale.detach(), self.linear.weight.T
        self.answers.append({question: [ask(v) for v in values] for question, ask in QUESTIONS.items()})
        self.answers[-1]["numbers"] = [(type(v) is int, type(v) is float, type(v) is bool) for v in (n, 2.5, True)]
        return y.sum() * n


class OpByOp(Asks):
    def forward(self, x: Tensor, n: int = 3) -> Tensor:
        out = super().forward(x, n)
        return out if out < 1e9 else out * 2


def step(model: nn.Module, x: Tensor, n: int) -> Any:
    return model(x, n)


def train(model: Asks, x: Tensor, n: int) -> Any:
    model(x, n).backward()
    return model.scale.grad


DOORS: dict[str, Callable[[list[Any]], Any]] = {
    "jit of a module": lambda seen: sl.jit(Asks(seen))(X, 3),
    "jit of a step": lambda seen: sl.jit(step)(Asks(seen), X, 3),
    "jit with backward": lambda seen: sl.jit(train)(Asks(seen), X, 3),
    "parallelize": lambda seen: sl.parallelize(Asks(seen), strategy="fsdp")(X, 3),
    "a step of a parallelized module": lambda seen: sl.jit(step)(sl.parallelize(Asks(seen), strategy="fsdp"), X, 3),
    "a placed argument": lambda seen: sl.jit(Asks(seen))(sl.shard(X, "rows@data _"), 3),
    "op by op": lambda seen: sl.parallelize(OpByOp(seen), strategy="fsdp")(X, 3),
    "op by op again": lambda seen: [m := sl.parallelize(OpByOp(seen), strategy="fsdp"), m(X, 3), m(X, 3)],
}


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.filterwarnings("ignore::shardlib.nn.forward.EagerWarning")
def test_types_are_those_of_plain_torch(door: str, n: int) -> None:
    plain: list[Any] = []
    Asks(plain)(X)
    seen: list[Any] = []
    with sl.Mesh(data=n):
        DOORS[door](seen)
    for question, answers in plain[0].items():
        assert seen[-1][question] == answers, question
    assert "type" not in globals()


def doubled(x: Any) -> Any:
    """Doubles tensors in containers, which it tells by their types."""
    if type(x) is Tensor:
        return x * 2
    if type(x) in (list, tuple):
        return [doubled(y) for y in x]
    return {k: doubled(y) for k, y in x.items()} if type(x) is dict else x


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2 if type(x) is Tensor else x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * 5 if type(g) is Tensor else g


def with_hook(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(lambda g: g * 3 if type(g) is Tensor else g)
    return y


inside = sl.jit(lambda x: x + 1 if x.__class__ is Tensor else x)
evaluated: dict[str, Any] = {"torch": torch}
exec("def f(x):\n    return x * 2 if type(x) is torch.Tensor else x", evaluated)

FUNCTIONS: dict[str, tuple[Callable[..., Any], Any]] = {
    "a tensor": (doubled, X),
    "a list": (doubled, [X, X]),
    "a dict": (doubled, {"a": X, "b": (X, [X])}),
    "an inner jitted function": (lambda x: inside(x) + doubled(x), X),
    "scan": (lambda x: sl.scan(lambda h, y: (h + doubled(y), h), torch.zeros(4), x), X),
    "vmap": (lambda x: torch.func.vmap(doubled)(x), X),
    "grad": (lambda x: torch.func.grad(lambda y: doubled(y).sum())(x), X),
    "checkpoint": (lambda x: torch.utils.checkpoint.checkpoint(doubled, x, use_reentrant=False), X),
    "evaluated text": (evaluated["f"], X),
    "a partial": (functools.partial(lambda n, x: doubled(x) + n, 2.0), X),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_branches_on_types_go_as_in_plain_torch(name: str) -> None:
    fn, x = FUNCTIONS[name]
    with sl.no_mesh():
        want = torch.utils._pytree.tree_flatten(fn(x))
    with sl.Mesh(data=2):
        leaves, tree = torch.utils._pytree.tree_flatten(sl.jit(fn)(x))
    assert tree == want[1]
    for got, expected in zip(leaves, want[0], strict=True):
        torch.testing.assert_close(got.full_tensor(), expected)


@pytest.mark.parametrize("fn", [Doubled.apply, with_hook, lambda x: doubled(x) * x], ids=["Function", "hook", "branch"])
def test_gradients_of_code_that_asks_for_types(fn: Callable[[Tensor], Tensor]) -> None:
    def gradient(f: Callable[[Tensor], Tensor]) -> Any:
        x = X.clone().requires_grad_()
        f(x).sum().backward()
        return x.grad

    with sl.Mesh(data=2):
        torch.testing.assert_close(gradient(sl.jit(fn)), gradient(fn))


def test_a_shard_map_body_sees_tensors() -> None:
    with sl.Mesh(data=2):
        out = sl.shard_map(doubled, "rows@data _", "rows@data _")(X)
    torch.testing.assert_close(out.full_tensor(), X * 2)


def test_a_variable_named_type_is_the_users() -> None:
    space: dict[str, Any] = {"torch": torch, "type": lambda x: "mine"}
    exec("def f(x):\n    return x * 2 if type(x) == 'mine' else x", space)
    mine = space["type"]
    with sl.Mesh(data=2):
        step = sl.jit(space["f"])
        torch.testing.assert_close(step(X).full_tensor(), X * 2)
        assert space["type"] is mine
        del space["type"]  # Python's own from now on: another program
        torch.testing.assert_close(step(X).full_tensor(), X)
        assert "type" not in space


def test_other_threads_see_their_own_types() -> None:
    wrong: list[str] = []
    done = threading.Event()
    with sl.Mesh(data=2):
        placed = sl.shard(X, "rows@data _")

        def look() -> None:
            while not done.is_set():
                if type(placed) is not sl.ShardedTensor or placed.__class__ is not sl.ShardedTensor:
                    wrong.append("type")
                if torch.compiler.is_compiling():
                    wrong.append("is_compiling")

        thread = threading.Thread(target=look)
        thread.start()
        for n in range(3):
            sl.jit(lambda x, n=n: doubled(x) + n)(X)
        done.set()
        thread.join()
    assert not wrong


def test_questions_about_compilers_have_bools_for_answers() -> None:
    answers: list[Any] = []

    def ask(x: Tensor) -> Tensor:
        answers.extend([torch.compiler.is_compiling(), torch._dynamo.is_compiling()])
        answers.extend([torch.compiler.is_exporting(), torch.jit.is_tracing(), torch.jit.is_scripting()])
        return x * 1

    with sl.Mesh(data=2):
        sl.jit(ask)(X)
    assert [*map(repr, answers)] == ["True", "True", "False", "False", "False"]
    assert torch.compiler.is_compiling() is False


def compiling(x: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return x
    return x + 1


def test_is_compiling_stays_torchs_for_its_own_compilers() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        torch.testing.assert_close(torch.jit.script(compiling)(X), X + 1)
    torch.testing.assert_close(torch.compile(compiling, backend="eager", fullgraph=True)(X), X)
