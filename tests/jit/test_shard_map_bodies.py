"""What a shard_map body may be written with, over all axes of the mesh and over some, in jit, alone and on one device:
buffers that it fills, tensors that it closes over, checkpoints, custom derivatives and hooks. The oracle is plain torch
on each device's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import shardlib as sl
from shardlib import Mesh, ShardingError
from shardlib.core.context import single_device
from tests.helpers.ranks import run_ranks

ROWS, COLUMNS = 2, 3  # of one of two devices
W = torch.linspace(-1, 1, 9, dtype=torch.float64).view(3, 3)
NET = torch.nn.Linear(3, 3, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


# --- buffers ----------------------------------------------------------------------------------------------------------


def filled(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape)
    for i in range(x.shape[1]):
        out[:, i] = 2 * x[:, i]
    return out


def summed(x: Tensor) -> Tensor:
    total = torch.zeros(x.shape[1])
    for row in x:
        total += row
    return x + total


def masked(x: Tensor) -> Tensor:
    x = x.clone()
    x[x > 0.5] = 0
    x[x.sum(1) > 0] = torch.tensor([1.0, 2.0, 3.0])
    x[:, torch.tensor([True, False, True])] = 7
    return x.masked_fill_(x < -1, 5.0)


def placed(x: Tensor) -> Tensor:
    out = x.new_zeros(x.shape)
    out.index_put_((torch.tensor([0, 0]),), x, accumulate=True)
    out.scatter_(0, torch.tensor([[1, 0, 1]]), x[:1])
    out.scatter_add_(1, torch.zeros(x.shape, dtype=torch.int64), x)
    return out.index_add_(0, torch.tensor([1, 1]), x)


def through_views(x: Tensor) -> Tensor:
    out = torch.empty(x.shape)
    out.copy_(x[0])
    flat, columns = out.view(-1), out.t()
    flat[:3] = x[1]
    columns[1] += x[:, 1].exp()
    flat[::2].mul_(2)
    return out + flat.view(x.shape)


def several(x: Tensor) -> Tensor:
    buffers = [torch.zeros(COLUMNS) for _ in x]
    for buffer, row in zip(buffers, x, strict=True):
        buffer += row
        buffer[0] = 1
    return torch.stack(buffers)


def into_out(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape)
    torch.mul(x.detach(), 2, out=out)
    torch.add(x.detach()[0], 1, out=out[1])
    return x + out


def constants(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out.fill_(2)
    out[0, 0] = x[1, 1]
    out[1].zero_()
    return out * x + torch.ones(3, 3).triu_()[0]


def updated(x: Tensor) -> Tensor:
    y = x * 1
    y.pow_(2).clamp_(max=1.0)
    y[0] *= 2
    y[:, 1] -= x[:, 0]
    return y.squeeze_(0).unsqueeze_(0)[0].t_().t()


# --- what is around, and ways back ------------------------------------------------------------------------------------


def closed_over(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = (W * x.mean()).sum()
    return torch.where(W[:2] > 0, x, W.T[1:]) @ W + W[0] * scale


def module(x: Tensor) -> Tensor:
    y: Tensor = NET(x).relu()
    return y


def inner_gradient(x: Tensor) -> Tensor:
    slopes = torch.func.grad(lambda y: (y @ W).sin().sum())(x)
    free = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad((free**3).sum(), free)
    return slopes + torch.func.vmap(lambda row: row @ W)(x) + grad


def run_again(x: Tensor) -> Tensor:
    y: Tensor = checkpoint(lambda y: (y @ W).sin(), x, use_reentrant=False)
    if x.requires_grad:
        y = y + checkpoint(lambda y: NET(y).tanh(), x, use_reentrant=True)
    return y


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return 2 * grad @ w.t(), x.t() @ grad


def own_derivative(x: Tensor) -> Tensor:
    return Doubled.apply(x, NET.weight)  # type: ignore[no-any-return,no-untyped-call]


def hooked(x: Tensor) -> Tensor:
    y = x.sin()
    if y.requires_grad:
        y.register_hook(lambda grad: 3 * grad)
    return y


def on_the_cpu(x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return (x @ W).sin()


def scanned(x: Tensor) -> Tensor:
    return sl.scan(lambda total, row: (total + row * W[0], total * row), torch.zeros(3), x)[1]  # type: ignore[no-any-return]


def layers(x: Tensor) -> Tensor:
    x = torch.nn.functional.layer_norm(x, (3,)) + torch.nn.functional.gelu(x).softmax(-1)
    x = torch.nn.functional.conv1d(x[None], torch.ones(2, 2, 3), padding=1)[0]
    return x + torch.nn.functional.cross_entropy(x, torch.tensor([0, 2]))


BODIES = [
    *(filled, summed, masked, placed, through_views, several, into_out, constants, updated),
    *(closed_over, module, inner_gradient, run_again, own_derivative, hooked, on_the_cpu, scanned, layers),
]
WAYS = {
    "jit, all axes": ({"a": 2}, None),
    "alone, all axes": ({"a": 2}, None),
    "jit, some axes": ({"a": 2, "b": 2}, {"a"}),
    "alone, some axes": ({"a": 2, "b": 2}, {"a"}),
    "one device": ({"a": 2}, None),
}


def _whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, sl.ShardedTensor) else x


def _gradients(fn: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """The value, and the gradients of x and of all that bodies close over; zeros where there is none."""
    leaves = [x.clone().requires_grad_(), W.requires_grad_(), *NET.parameters()]
    for leaf in leaves:
        leaf.grad = None
    out = fn(leaves[0])
    (_whole(out) * torch.linspace(1, 2, x.numel()).view(x.shape)).square().sum().backward()
    return [_whole(out).detach(), *(torch.zeros_like(y) if y.grad is None else _whole(y.grad).clone() for y in leaves)]


def _run(way: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    def alone(*args: Any) -> Any:
        with single_device():
            return fn(*args)

    return sl.jit(fn) if "jit" in way else alone if way == "one device" else fn


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_body(body: Callable[[Tensor], Tensor], way: str) -> None:
    mesh, axes = WAYS[way]
    x = torch.randn(2 * ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    expected = _gradients(lambda x: torch.cat([body(x[:ROWS]), body(x[ROWS:])]), x)
    with Mesh(**mesh):
        mapped = sl.shard_map(body, ("_@a _",), "_@a _", axis_names=axes)
        torch.testing.assert_close(_gradients(_run(way, mapped), x), expected, rtol=1e-10, atol=1e-10)


# --- collectives in what runs later -----------------------------------------------------------------------------------


class Average(torch.autograd.Function):
    """Its backward pass communicates."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return sl.pmean(grad, "a")


class OldAverage(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return sl.pmean(grad, "a")


def _by_hook(x: Tensor) -> Tensor:
    y = x * 1.0
    if y.requires_grad:
        y.register_hook(lambda grad: sl.pmean(grad, "a"))
    return y


class Hooked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_full_backward_hook(lambda module, into, out: (sl.pmean(into[0], "a"),))

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.0


AVERAGES = {"Function": Average.apply, "Function with ctx": OldAverage.apply, "hook": _by_hook, "module": Hooked()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", AVERAGES)
def test_backward_communicates(kind: str, way: str) -> None:
    mesh, axes = WAYS[way]
    x = torch.arange(8.0)
    with Mesh(**mesh):
        mapped = sl.shard_map(lambda x: AVERAGES[kind](x * 1.0).sin(), ("_@a",), "_@a", axis_names=axes)
        leaf = x.clone().requires_grad_()
        _run(way, mapped)(leaf).square().sum().backward()
    expected = (2 * x.sin() * x.cos()).view(2, 4).mean(0).repeat(2)
    torch.testing.assert_close(_whole(leaf.grad), expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_of_a_collective(way: str, reentrant: bool) -> None:
    mesh, axes = WAYS[way]
    x, w = torch.arange(24.0).view(3, 8) / 24, torch.ones(8, 2) / 8

    def body(x: Tensor, w: Tensor) -> Tensor:
        def block(x: Tensor, w: Tensor) -> Tensor:
            return torch.tanh(sl.psum(x @ w, "a") * (1 + sl.pmean(sl.axis_index("a") * 2.0, "a")))

        return checkpoint(block, x, w, use_reentrant=reentrant)  # type: ignore[no-any-return]

    expected = torch.func.grad(lambda w: torch.tanh(2 * x @ w).square().sum())(w)
    with Mesh(**mesh):
        mapped = sl.shard_map(body, ("_ k@a", "k@a _"), "_ _", axis_names=axes)
        leaf = w.clone().requires_grad_()
        _run(way, mapped)(x, leaf).square().sum().backward()
        torch.testing.assert_close(_whole(leaf.grad), expected)


# --- alone ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [None, {"a"}], ids=["all axes", "some axes"])
def test_what_the_closure_said_at_the_call(axes: Any) -> None:
    v = torch.arange(4.0).requires_grad_()
    with Mesh(a=2, b=2):
        total: Any = 0
        for k in (1.0, 2.0, 3.0):
            total = total + sl.shard_map(lambda x: k * x, ("_@a",), "_@a", axis_names=axes)(v).sum()  # noqa: B023
        total.backward()
        assert v.grad is not None
        torch.testing.assert_close(_whole(v.grad), torch.full((4,), 6.0))
        w = torch.tensor(2.0)
        out = sl.shard_map(lambda x: w * x, ("_@a",), "_@a", axis_names=axes)(v)
        w.fill_(5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("way", WAYS)
def test_second_derivative_and_transforms(way: str) -> None:
    mesh, axes = WAYS[way]
    x, w = torch.randn(4, 3), torch.randn(2, 3)

    def plain(x: Tensor) -> Tensor:
        return torch.tanh((x[:2] + x[2:]) * w)

    def twice(fn: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(fn(leaf).square().sum(), leaf, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), leaf)[0]

    with Mesh(**mesh):
        mapped = sl.shard_map(lambda x: torch.tanh(sl.psum(x * w, "a")), ("_@a _",), "_ _", axis_names=axes)
        run = _run(way, mapped)
        torch.testing.assert_close(_whole(twice(run)), twice(plain))
        if way.startswith("jit"):
            return
        for transform in (torch.func.grad, torch.func.jacrev):
            expected = transform(lambda x: plain(x).square().sum())(x)
            torch.testing.assert_close(_whole(transform(lambda x: run(x).square().sum())(x)), expected)
        torch.testing.assert_close(_whole(torch.func.vmap(run)(x[None])), plain(x)[None])


# --- closures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [way for way in WAYS if way != "one device"])
def test_closure_over_a_sharded_tensor(way: str) -> None:
    """A body sees the whole of it; the gradient lives where it does."""
    mesh, axes = WAYS[way]
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    with Mesh(**mesh):
        sharded = sl.shard(w, "_@a _").requires_grad_()
        out = _run(way, sl.shard_map(lambda x: x @ sharded, ("_@a _",), "_@a _", axis_names=axes))(x)
        torch.testing.assert_close(_whole(out).detach(), x @ w)
        out.square().sum().backward()
        assert isinstance(sharded.grad, sl.ShardedTensor)
        torch.testing.assert_close(_whole(sharded.grad), torch.func.grad(lambda w: (x @ w).square().sum())(w))


@pytest.mark.parametrize("way", WAYS)
def test_closure_of_a_value_of_the_program(way: str) -> None:
    mesh, axes = WAYS[way]
    x, w = torch.randn(4, 3), torch.randn(3, 3)

    def outer(x: Tensor, w: Tensor) -> Tensor:
        double = 2 * w
        mapped = sl.shard_map(lambda x: (x @ double).sin() * sl.psum(w[0], "a"), ("_@a _",), "_@a _", axis_names=axes)
        returned = sl.shard_map(lambda x: w, ("_@a _",), "_ _", axis_names=axes)(x)
        return mapped(x).square().sum() + returned.sum()  # type: ignore[no-any-return]

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ (2 * w)).sin() * 2 * w[0]).square().sum() + w.sum()

    leaves, expected = [y.clone().requires_grad_() for y in (x, w)], torch.func.grad(plain, (0, 1))(x, w)
    with Mesh(**mesh):
        _run(way, outer)(*leaves).backward()
    torch.testing.assert_close(tuple(_whole(y.grad) for y in leaves), expected)


@pytest.mark.parametrize("way", WAYS)
def test_one_body_in_another(way: str) -> None:
    """The inner one closes over a tensor of the program; the outer one fills a buffer."""
    x, scale = torch.randn(4, 6), torch.tensor(2.0, requires_grad=True)

    def outer(x: Tensor) -> Tensor:
        inner = sl.shard_map(lambda y: sl.psum((y * scale).sin(), "b"), "_ _@b", "_ _", axis_names={"b"})
        out = torch.zeros(2, 3)
        out += inner(x)
        return sl.psum(out, "a")

    def plain(x: Tensor) -> Tensor:
        y = (x * scale).sin()
        return (y[:, :3] + y[:, 3:]).view(2, 2, 3).sum(0)

    plain(x).square().sum().backward()
    expected, scale.grad = scale.grad, None
    with Mesh(a=2, b=2):
        mapped = sl.shard_map(outer, "_@a _", "_ _", axis_names={"a"})
        _run(way, mapped)(x).square().sum().backward()
    torch.testing.assert_close(_whole(scale.grad), expected)


def _counts(x: Tensor) -> Tensor:
    SEEN.add_(1)
    return sl.psum(x, "a")  # type: ignore[no-any-return]


def _counts_data(x: Tensor) -> Tensor:
    SEEN.data.add_(1)
    return sl.psum(x, "a")  # type: ignore[no-any-return]


SEEN = torch.zeros(3)
REFUSED = {
    "a write to a captured tensor": (_counts, "a shard_map body writes to a tensor of shape [3] of the program around"),
    "a write through .data": (_counts_data, "a shard_map body writes to a tensor of shape [3] of the program"),
    "a result that differs": (
        lambda x: torch.zeros(3).add_(x.sum(0)).expand(2, 3),
        "out_specs leave out axes over which the devices' results differ",
    ),
    "a draw": (torch.rand_like, "a shard_map body draws random numbers"),
    "a draw into a buffer": (lambda x: torch.empty(x.shape).normal_(), "a shard_map body draws random numbers"),
    "a shape that depends on values": (lambda x: x[x > 0], "makes a shape that depends on values, by x[mask]"),
}


@pytest.mark.parametrize("axes", [None, {"a"}], ids=["all axes", "some axes"])
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, axes: Any) -> None:
    body, text = REFUSED[name]
    with Mesh(a=2, b=2):
        mapped = sl.shard_map(body, ("_@a _",), "_ _", axis_names=axes)
        for run in (sl.jit(mapped), mapped):
            with pytest.raises(ShardingError) as error:
                run(torch.ones(4, 3))
            assert text in str(error.value)


def test_several_values_at_a_mask_are_refused() -> None:
    def body(x: Tensor) -> Tensor:
        x = x.clone()
        x[x > 0] = torch.arange(6.0)
        return x

    with Mesh(a=2), single_device(), pytest.raises(ShardingError, match=r"writes several values where a mask says"):
        sl.shard_map(body, ("_@a _",), "_@a _")(torch.ones(4, 3))


def test_check() -> None:
    x = torch.randn(4, 3)
    for body in (filled, masked, closed_over):
        with Mesh(a=2):
            sl.check(sl.shard_map(body, ("_@a _",), "_@a _"), x)


def _on_ranks() -> list[list[float]]:
    torch.manual_seed(0)
    x, w = torch.randn(4, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    out = []
    for mesh, axes in (Mesh(a=2), None), (Mesh(a=2, b=1), {"a"}):
        with mesh:
            leaf, net = x.clone().requires_grad_(), w.clone().requires_grad_()

            def body(x: Tensor, net: Tensor = net) -> Tensor:
                total = torch.zeros(3, dtype=x.dtype)
                for row in x:
                    total += row
                return checkpoint(  # type: ignore[no-any-return]
                    lambda x: OldAverage.apply(sl.psum(x @ net, "a") + total),  # type: ignore[no-untyped-call]
                    x,
                    use_reentrant=False,
                )

            result = sl.shard_map(body, ("_@a _",), "_@a _", axis_names=axes)(leaf)
            result.square().sum().backward()
            out += [_whole(y).detach().flatten().tolist() for y in (result, leaf.grad, net.grad)]
    torch.testing.assert_close(out[:3], out[3:])
    return out


@pytest.mark.long
@pytest.mark.ranks
def test_ranks() -> None:
    virtual = _on_ranks()
    for found in run_ranks(_on_ranks, 2):
        torch.testing.assert_close(found, virtual)


# --- memory and marks of values on one device -------------------------------------------------------------------------


def conjugated(x: Tensor) -> Tensor:
    z = torch.complex(x, x.cos())
    return (z.conj() * z * (1 + 2j)).imag + (z * z).real + sl.psum(z.conj() * z.exp(), "data").imag


def gathered_and_written(x: Tensor) -> Tensor:
    e = x.exp()
    sl.all_gather(e, "data").zero_()
    sl.all_to_all(e, "data", 0, 0).add_(1)
    return e


def with_other_data(x: Tensor) -> Tensor:
    y, value = x.detach() * 0, x.detach() * 2
    y.data = value
    value.add_(1)
    return y + x


def with_a_checkpoint(x: Tensor) -> Tensor:
    return checkpoint(lambda x: sl.psum(x.exp().sin(), "data") * x.exp().sin(), x, use_reentrant=False)


@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("body", [conjugated, gathered_and_written, with_other_data, with_a_checkpoint])
def test_values_of_a_body_are_those_of_devices(body: Callable[[Tensor], Tensor], some: bool) -> None:
    x = torch.linspace(-1, 1, 12).view(4, 3)
    with Mesh(data=2, tensor=2) if some else Mesh(data=2):
        mapped = sl.shard_map(body, "rows@data _", "rows@data _", axis_names={"data"} if some else None)
        sl.check(lambda x: mapped(x), x)
        own, whole = x.clone().requires_grad_(), x.clone().requires_grad_()
        mapped(own).square().sum().backward()
        devices = [body_of(body, whole, rows) for rows in (slice(0, 2), slice(2, 4))]
        torch.cat(devices).square().sum().backward()
        torch.testing.assert_close(own.grad, whole.grad)


def body_of(body: Callable[[Tensor], Tensor], x: Tensor, rows: slice) -> Tensor:
    """What a device's body gives, in plain torch."""
    mine, other = x[rows], x[2:] if rows.start == 0 else x[:2]
    if body is conjugated:
        z, z2 = torch.complex(mine, mine.cos()), torch.complex(other, other.cos())
        return (z.conj() * z * (1 + 2j)).imag + (z * z).real + (z.conj() * z.exp() + z2.conj() * z2.exp()).imag
    if body is gathered_and_written:
        return mine.exp()
    if body is with_other_data:
        return 2 * mine.detach() + 1 + mine
    return (mine.exp().sin() + other.exp().sin()) * mine.exp().sin()
