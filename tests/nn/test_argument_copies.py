"""What a module's forward writes into its arguments reaches the caller, or the call is refused."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import shardlib as sl
from shardlib import Mesh, ShardingError

pytestmark = pytest.mark.filterwarnings("ignore::shardlib.nn.forward.EagerWarning")
X = torch.arange(24.0, dtype=torch.float64).view(6, 4) / 9


@dataclasses.dataclass
class Batch:
    x: Any
    aux: Any = None


pytree.register_dataclass(Batch)
Pair = collections.namedtuple("Pair", "x aux")


class Net(nn.Module):
    """A linear layer behind which `body` writes into the arguments; with `asks`, it runs op by op."""

    def __init__(self, body: Callable[..., Any], asks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l, self.body, self.asks = nn.Linear(4, 4, dtype=torch.float64), [body], asks

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        y: Tensor = self.l(x.clone())
        if self.asks and y.sum() > 1e9:
            y = y + 1
        out = self.body[0](y, *args, **kwargs)
        return y if out is None else y + out


def append(y: Tensor, x: Any, aux: list[Any]) -> None:
    aux.append(y.square().mean())


def put(y: Tensor, x: Any, aux: dict[str, Any]) -> None:
    aux["loss"] = y.square().mean()


def put_inside(y: Tensor, batch: dict[str, Any]) -> None:
    batch["aux"].append(y.mean())
    batch["more"] = {"k": [y.sum()]}
    del batch["x"]


def keyword(y: Tensor, x: Any, *, aux: Any) -> None:
    aux[0].append(y.mean())


def attribute(y: Tensor, batch: Any) -> None:
    batch.aux = y.mean()


def field(y: Tensor, pair: Any) -> None:
    pair.aux.append((pair.x, y.mean()))


def reorder(y: Tensor, xs: list[Any]) -> None:
    xs[1] = y
    xs.reverse()
    xs.append(xs[0])


CONTAINERS: list[tuple[Callable[..., Any], Callable[[Tensor], tuple[Any, dict[str, Any]]]]] = [
    (append, lambda x: ((x, []), {})),
    (append, lambda x: ((x, collections.deque()), {})),
    (put, lambda x: ((x, {}), {})),
    (put, lambda x: ((x, collections.OrderedDict(loss=x)), {})),
    (put_inside, lambda x: (({"x": x, "aux": []},), {})),
    (keyword, lambda x: ((x,), {"aux": ([],)})),
    (attribute, lambda x: ((Batch(x),), {})),
    (field, lambda x: ((Pair(x, []),), {})),
    (reorder, lambda x: (([x, 2 * x],), {})),
]


def add(y: Tensor, x: Tensor) -> None:
    x.add_(1)


def mask(y: Tensor, x: Tensor, z: Tensor) -> Tensor:
    z[x > 1] = 0
    x.view(-1)[0] = 5
    return z.sum()


def out(y: Tensor, x: Tensor, z: Tensor) -> None:
    torch.add(x, 1, out=z)


def data(y: Tensor, x: Tensor, z: Tensor) -> None:
    z.data.add_(1)
    x.detach().mul_(2)


def data_set(y: Tensor, x: Tensor, z: Tensor) -> None:
    z.data = 2 * x.detach()


def twice(y: Tensor, x: Tensor, xs: list[Tensor]) -> Tensor:
    xs[0].add_(1)
    return x


TENSORS: list[tuple[Callable[..., Any], Callable[[Tensor], tuple[Any, dict[str, Any]]]]] = [
    (add, lambda x: ((x,), {})),
    (mask, lambda x: ((x, 3 * x), {})),
    (mask, lambda x: ((x[:3], x[3:]), {})),
    (out, lambda x: ((x, torch.zeros_like(x)), {})),
    (data, lambda x: ((x, x.clone()), {})),
    (data_set, lambda x: ((x, x.clone()), {})),
    (twice, lambda x: ((x, [x]), {})),
]


def full(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, sl.ShardedTensor) else x


def step(model: nn.Module, make: Callable[[Tensor], tuple[Any, dict[str, Any]]]) -> list[Any]:
    """The loss, its gradient, and all that is in the arguments afterwards; the loss reads what was put there."""
    args, kwargs = make(X.clone())
    y = model(*args, **kwargs)
    leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    loss: Tensor = y.sum() + sum(x.sum() for x in leaves)
    loss.backward()
    return [loss.detach(), model.l.weight.grad, [x.detach() for x in leaves]]


def same(actual: list[Any], expected: list[Any], rtol: float = 1e-9) -> None:
    many, one = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
    assert len(many) == len(one)
    for x, y in zip(many, one, strict=True):
        torch.testing.assert_close(full(x).double(), y.double(), rtol=rtol, atol=rtol)


DOORS = ["jit", "op by op", "jit, precision", "op by op, precision"]


def through(door: str, body: Callable[..., Any], make: Any) -> list[Any]:
    low = torch.float32 if "precision" in door else None
    with Mesh(data=4):  # six rows are no multiple of it
        model = sl.parallelize(Net(body, "op by op" in door), strategy="fsdp", precision=low)
        run = sl.jit(step) if "jit" in door else step
        run(model, make)
        model.zero_grad()
        return run(model, make)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("body", "make"), CONTAINERS + TENSORS)
def test_what_a_forward_writes_reaches_the_caller(body: Any, make: Any, door: str) -> None:
    expected = step(Net(body), make)
    same(through(door, body, make), expected, 1e-4 if "precision" in door else 1e-9)


@pytest.mark.parametrize(("body", "make"), TENSORS)
def test_as_one_program_writes_to_tensors_reach_the_caller(body: Any, make: Any) -> None:
    same(through("own", body, make), step(Net(body), make))


@pytest.mark.parametrize("precision", [None, torch.float32])
@pytest.mark.parametrize(("body", "make"), CONTAINERS)
def test_as_one_program_a_filled_container_is_refused(body: Any, make: Any, precision: Any) -> None:
    with Mesh(data=2):
        model = sl.parallelize(Net(body), strategy="ddp", precision=precision)
        with pytest.raises(ShardingError, match="forward changes a container among its arguments") as error:
            step(model, make)
    assert "jit the function that makes the container" in str(error.value)


def test_as_one_program_an_attribute_of_an_argument_is_refused() -> None:
    def tag(y: Tensor, batch: Any) -> None:
        batch.tag = y.mean()

    with Mesh(data=2):
        model = sl.parallelize(Net(tag), strategy="ddp")
        with pytest.raises(ShardingError, match=r"argument \[0\].tag is another value now"):
            model(Batch(X))


def write_first(y: Tensor, x: Tensor, z: Tensor) -> Tensor:
    x.add_(1)
    return z.sum()


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("view", [lambda x: x.view(-1), lambda x: x.T, lambda x: x[1:]])
def test_a_write_that_another_argument_shows_is_refused(view: Callable[[Tensor], Tensor], door: str) -> None:
    with pytest.raises(ShardingError, match="writes to memory that one of its arguments shares") as error:
        through(door, write_first, lambda x: ((x, view(x)), {}))
    assert "argument args[0] of [6, 4] is written to, and shares memory with another argument" in str(error.value)


@pytest.mark.parametrize("door", ["jit", "op by op"])
def test_arguments_that_share_memory_are_read(door: str) -> None:
    read = lambda y, x, z: z.sum() * 2
    make = lambda x: ((x[:, :], x[:, 1:]), {})
    same(through(door, read, make), step(Net(read), make))


def transpose(y: Tensor, x: Tensor, z: Tensor) -> None:
    z.t_()


@pytest.mark.parametrize("door", DOORS)
def test_another_shape_of_an_argument_is_refused(door: str) -> None:
    with pytest.raises(ShardingError, match=r"forward changes an argument:\n.*\[4, 6\] now"):
        through(door, transpose, lambda x: ((x, x.clone()), {}))


def test_the_arguments_hold_their_own_tensors_after_an_error() -> None:
    def fail(y: Tensor, x: Tensor, xs: list[Tensor]) -> None:
        assert isinstance(xs[0], sl.ShardedTensor)
        raise KeyError("mine")

    with Mesh(data=2):
        model = sl.parallelize(Net(fail, asks=True), strategy="fsdp")
        x, xs = X.clone(), [X.clone()]
        first = xs[0]
        with pytest.raises(KeyError, match="mine"):
            model(x, xs)
        assert xs[0] is first


def test_layers_fill_a_list_in_check() -> None:
    with Mesh(data=2):
        layers = [sl.parallelize(Net(append), strategy="ddp") for _ in range(4)]

        def loss(x: Tensor) -> Tensor:
            aux: list[Tensor] = []
            for layer in layers:
                x = layer(x, aux)
            assert len(aux) == 4
            return x.mean() + sum(aux)  # type: ignore[return-value]

        assert "the same as on one device" in str(sl.check(loss, X))


def test_an_argument_that_is_returned_or_kept_is_the_callers() -> None:
    def keep(y: Tensor, x: Tensor, box: Any) -> None:
        if box.kept is not None:
            box.kept.add_(1)
        box.kept = x

    class Keeps(Net):
        kept: Any = None

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            y = super().forward(x, self)
            if self.kept is None or self.kept is not x:
                raise AssertionError
            return y, x

    def run(model: nn.Module) -> list[Tensor]:
        first, second = X.clone(), X.clone()
        model(first)
        returned = model(second)[1]
        returned.add_(2)
        model.kept = None
        return [first, second]

    class Asks(Keeps):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            if self.l(x).sum() > 1e9:
                raise AssertionError
            return super().forward(x)

    with Mesh(data=2):
        same(run(sl.parallelize(Asks(keep), strategy="ddp")), run(Asks(keep)))
        model = sl.parallelize(Keeps(keep), strategy="ddp")
        same(sl.jit(lambda: run(model))(), run(Keeps(keep)))


@pytest.mark.parametrize("door", DOORS)
def test_a_write_that_the_module_sees_by_another_name_is_refused(door: str) -> None:
    x = X.clone()

    def closes_over_it(y: Tensor, z: Tensor) -> Tensor:
        z.add_(1)
        return y + x.to(y.dtype)

    refused = "forward writes to memory.*\n.*written to, and the module reaches it by another name"
    with Mesh(data=2):
        low = torch.float32 if "precision" in door else None
        model = sl.parallelize(Net(closes_over_it, "op by op" in door), precision=low)
        run = sl.jit(lambda: model(x)) if "jit" in door else lambda: model(x)
        with pytest.raises(ShardingError, match=refused):
            run()


@pytest.mark.parametrize("door", DOORS)
def test_a_view_that_a_container_keeps_of_a_written_argument_is_refused(door: str) -> None:
    def keep_view(y: Tensor, x: Tensor, box: dict[str, Tensor]) -> None:
        box["view"] = box["k"][:2]
        box["k"].add_(1)

    with Mesh(data=4), pytest.raises(ShardingError, match="written to, and a container keeps a view of it"):
        through(door, keep_view, lambda x: ((x, {"k": x.clone()}), {}))


@pytest.mark.parametrize("door", DOORS)
def test_an_argument_that_begins_to_require_gradients_is_refused(door: str) -> None:
    def follow(y: Tensor, x: Tensor) -> Tensor:
        return x.requires_grad_()

    with Mesh(data=4), pytest.raises(ShardingError, match=r"args\[0\] of \[6, 4\] requires gradients now"):
        through(door, follow, lambda x: ((x,), {}))


@pytest.mark.parametrize("asks", [False, True])
def test_elements_that_nobody_wrote_keep_their_digits_in_another_precision(asks: bool) -> None:
    def clear(y: Tensor, x: Tensor) -> None:
        x[0].zero_()

    with Mesh(data=2):
        model = sl.parallelize(Net(clear, asks), strategy="ddp", precision=torch.bfloat16)
        x = X + 1e-5
        model(x)
    assert torch.equal(x[1:], (X + 1e-5)[1:])
    assert not x[0].any()


@pytest.mark.parametrize("precision", [None, torch.float32])
def test_writes_before_an_error_stay(precision: Any) -> None:
    def fail(y: Tensor, x: Tensor) -> None:
        x.add_(1)
        raise KeyError("mine")

    with Mesh(data=2):
        model = sl.parallelize(Net(fail, asks=True), strategy="ddp", precision=precision)
        x = torch.zeros_like(X)
        with pytest.raises(KeyError, match="mine"):
            model(x)
    assert bool((x == 1).all())
