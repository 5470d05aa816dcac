"""In-place programs, traced into functional graphs: each computes to the last bit what it computes eagerly."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree

import shardlib as sl
from shardlib.compiler.simplify import normalize, verify
from shardlib.frontend.trace import trace
from shardlib.jit.global_random import plain_program

PROGRAMS = []


def program(fn):
    PROGRAMS.append(pytest.param(fn, id=fn.__name__))
    return fn


@program
def buffers(x):
    m = torch.zeros_like(x)
    m.mul_(0.9).add_(x)
    m.add_(x, alpha=0.1)
    return m, x - m


@program
def slices(x):
    y = x.clone()
    y[:, 1:] = x[:, :-1]
    y[0] = 1.0
    y[:, 0] += 2
    y[1:, -1] = y[0, :-1]
    y[None][0, 2] = y[3]
    y[::2, 1::2] -= x[::2, 1::2]
    return y


@program
def views_see_writes(x):
    y = x.clone()
    a, b = y[1:], y.t()
    y.add_(1)
    a.mul_(2)
    return a, b, y


@program
def views_of_views(x):
    y = x.clone()
    z = y.t()[1:]
    z[0].fill_(3)
    z.unsqueeze(0)[0, 1, 1] = 5.0
    y.view(-1)[2:7] = 0
    y.view(2, 3, 6).permute(2, 0, 1)[0].copy_(torch.ones(()))
    y.view(2, -1).squeeze().transpose(0, 1)[3] *= 4
    return y, z


@program
def pieces(x):
    y = x.clone()
    a, b = y.split([1, 5])
    a.zero_()
    b.mul_(2)
    y.unbind(1)[1].add_(1)
    c, d = y.chunk(2, 1)
    c.copy_(d)
    return a, b, y


@program
def diagonals(x):
    y = x[:4, :4].clone()
    y.diagonal().add_(3)
    z = x[:4, :4].clone()
    z.fill_diagonal_(7.0)
    return y, z


@program
def indices(x):
    y = x.clone()
    i = torch.tensor([0, 2])
    y[i] = 9.0
    y.index_add_(0, i, torch.ones_like(y[:2]))
    y.masked_fill_(x > 0, 2.0)
    y[x < 0] = 1.0
    y.scatter_(1, torch.zeros(6, 1, dtype=torch.int64), 4.0)
    return y


@program
def dtypes(x):
    y = torch.zeros(x.shape, dtype=torch.int64)
    y.copy_(x * 10)
    z = torch.ones(x.shape, dtype=torch.float32)
    z.mul_(x)
    z.copy_(y[0])
    return y, z


@program
def out_arguments(x):
    y = torch.empty_like(x)
    torch.add(x, 1, out=y)
    torch.mul(y, 2, out=y)
    return y


@program
def lists(x):
    a = [x.clone(), x.t().clone()]
    torch._foreach_add_(a, 1.0)
    torch._foreach_mul_(a, a)
    torch._foreach_lerp_(a, [x, x], 0.5)
    return a


@program
def returned_selves(x):
    y = x.clone()
    z = y.add_(1)
    z.mul_(2)
    return y, z, y.sub_(1)


@program
def read_before_and_after(x):
    y = x.clone()
    before = y + 1
    y.add_(1)
    return before, y + 1, y


@program
def written_once_read_expanded(x):
    y = x.clone()
    wide = y[:1].expand(3, -1)
    y[0, 0] = 100.0
    return wide * 1


@program
def unary(x):
    return x.clone().cumsum_(0).clamp_(min=0).sqrt_().triu_().neg_().exp_()


@program
def strides_change(x):
    y = torch.empty_like(x)
    y.copy_(x.t())
    return y.view(-1), y.view(3, 12)


@program
def gradient_through_slices(x):
    def f(x):
        y = x * 2
        y[:, 1:] = x[:, :-1] ** 2
        y[0].mul_(3.0)
        return (y**2).sum()

    return torch.func.grad(f)(x)


@program
def autograd_through_views(x):
    x = x.detach().requires_grad_()
    y = x * 2
    y[1:, ::2] = x[1:, ::2] ** 2
    y.t()[1].mul_(x[:, 0])
    y.select(0, 1)[1:3] = 0.0
    y.view(-1)[3] = x[0, 0]
    return torch.autograd.grad((y**3).sum(), x)[0]


@program
def batch_norm(x):
    mean, var = torch.zeros(6, dtype=x.dtype), torch.ones(6, dtype=x.dtype)
    return F.batch_norm(x, mean, var, training=True), mean, var


@program
def shapes_in_place(x):
    y = x.clone()
    y.unsqueeze_(0).transpose_(1, 2)
    y[0, 1] = 3.0
    z = y.squeeze_(0)
    z.t_().add_(1)
    return y, z


@program
def several_outs(x):
    v, i = torch.zeros_like(x), torch.zeros(6, 6, dtype=torch.int64)
    pair = torch.sort(x, out=(v, i))
    v.mul_(2)
    return pair, v, pair[0] + 1, i


@program
def factories_out(x):
    y = torch.zeros(5, dtype=torch.float64)
    torch.linspace(x[0, 0], x[1, 1], 5, out=y)
    z = torch.zeros(4, dtype=torch.float64)
    return y, torch.arange(0.5, 4, 1, out=z), torch.eye(3, out=torch.zeros(3, 3, dtype=torch.float64))


@program
def products_out(x):
    y = torch.zeros(12, 18, dtype=torch.float64)  # kron writes through a view that does not say that it is one
    torch.kron(x[:2, :3], x, out=y)
    return y, torch.polygamma(1, x.abs() + 1), (x.abs() + 1).polygamma_(2)


@program
def resizes(x):
    y = (x * 2).resize_(2, 3)
    z = torch.empty(0, dtype=torch.float64).resize_(3, 2).fill_(1)
    w = (x * 3).resize_as_(x)
    w[0] = 1
    return y, y.add_(1), z, w


@program
def strides(x):
    windows = x.as_strided((5, 3), (2, 1))
    y = torch.zeros(16, dtype=torch.float64)
    spread = y.as_strided((2, 3), (7, 2), 1)
    spread.copy_(windows[:2] * 2)
    return (
        windows.sum(1),
        y,
        torch.as_strided_scatter(x, x[:2, :2], (2, 2), (9, 4)),
        torch.as_strided_copy(x, (2, 4), (3, 1)),
    )


@program
def norm_outs(x):
    mean, var = torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    outs = [torch.zeros(6, 6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64), torch.zeros_like(var)]
    named = dict(zip(("out", "save_mean", "save_invstd"), outs, strict=True))
    torch.ops.aten.native_batch_norm.out(x, None, None, mean, var, True, 0.1, 1e-5, **named)
    legit = torch.ops.aten._native_batch_norm_legit.out(x, None, None, mean, var, True, 0.2, 1e-5, **named)
    return outs, legit[0] * 2, mean, var


@program
def complex_numbers(x):
    z = torch.view_as_complex(x[:, :4].reshape(-1, 2, 2)).clone()
    torch.view_as_real(z)[..., 0] = 1.0
    return torch.view_as_real(z * 2)


@pytest.mark.parametrize("fn", PROGRAMS)
def test_programs(fn):
    torch.manual_seed(0)
    x = torch.randn(6, 6, dtype=torch.float64)
    want, tree = pytree.tree_flatten(fn(x.clone()))
    for stage in (lambda traced: traced, normalize):
        traced = stage(trace(fn, (x,)))
        verify(traced.graph)
        got, got_tree = pytree.tree_flatten(traced(x.clone()))
        assert got_tree == tree
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


def test_random_writes():
    def f(x):
        return x.clone().bernoulli_(0.3), x.clone().normal_(), torch.empty(3).exponential_(), x.clone().bernoulli_()

    x = torch.zeros(50, dtype=torch.float64)
    traced = normalize(trace(f, (x,)))
    verify(traced.graph)
    torch.manual_seed(3)
    with plain_program():
        want = f(x)
    torch.manual_seed(3)
    for a, b in zip(traced(x), want, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "view",
    [
        lambda y: y.as_strided((6, 5), (6, 1), 1),
        lambda y: y.as_strided((3, 2), (12, 3), 7),
        lambda y: y.as_strided((2, 6), (1, 6), 3),
        lambda y: y.as_strided((36,), (1,), 0),
        lambda y: y.as_strided((4, 9), (9, 1)),
        lambda y: y.as_strided((6,), (7,), 0),
        lambda y: y.as_strided((5,), (1,), 4),
        lambda y: y.as_strided((1, 1), (1, 1), 8),
        lambda y: y.as_strided((), (), 8),
        lambda y: y.t().as_strided((2, 3), (6, 1), 2),
        lambda y: y[1:].as_strided((2, 3), (6, 1), 8),
        lambda y: y.as_strided((3, 4), (10, 2), 3),
        lambda y: y.t().as_strided((2, 3), (17, 5), 1),
    ],
)
def test_strided_views_name_dims(view):
    def f(x):
        y = x.clone()
        view(y).mul_(3)
        y[0] += 1
        return y, view(y)

    x = torch.randn(6, 6)
    traced = trace(f, (x,))
    assert not [n for n in traced.graph.graph.nodes if "strided" in str(n.target)]
    for a, b in zip(traced(x), f(x), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("shape", "size", "stride", "offset"),
    [
        ((4, 32, 8), (4, 7, 8, 8), (256, 32, 8, 1), 0),
        ((4, 32, 8), (4, 5, 12, 8), (256, 32, 8, 1), 16),
        ((4, 32, 8), (4, 8, 7, 8), (256, 8, 32, 1), 0),
        ((40,), (5, 16), (4, 1), 3),
        ((3, 4, 8, 2), (5, 8, 2, 3), (8, 2, 1, 64), 0),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_windows_of_memory_are_windows_of_a_dim(shape, size, stride, offset, turned):
    def windows(x):
        return (x.permute(*range(1, x.dim()), 0) if turned else x).as_strided(size, stride, offset)

    def grad(x):
        return torch.func.grad(lambda x: (windows(x) ** 2).sum())(x)

    x = torch.randint(-3, 4, shape).double()
    for run in (windows, grad):
        traced = normalize(trace(run, (x,)))
        verify(traced.graph)
        assert torch.equal(traced(x), run(x))
        names = [node.name for node in traced.graph.graph.nodes]
        assert any("unfold" in name for name in names)
        assert not any("index" in name for name in names)


@pytest.mark.parametrize(
    ("of", "where"),
    [
        (lambda x: x[2:], ([3, 3], [1, 1])),
        (lambda x: x[2:], ([3, 3], [1, 1], 0)),
        (lambda x: x[2:], ([2], [1], 0)),
        (lambda x: x[2:4], ([2, 2], [1, 2])),
        (lambda x: x[2:], ([2, 3], [2, 1])),
        (lambda x: x[:4], ([3, 3], [2, 1], 1)),
        (lambda x: x.view(2, 4)[:, 1:], ([2, 2], [4, 1])),
        (lambda x: x.view(2, 4).t()[1], ([2, 2], [0, 3])),
    ],
)
def test_memory_beside_what_is_strided(of: Any, where: Any) -> None:
    """Offsets count from the beginning of the memory, and from that of a view where none is said."""
    weights = torch.arange(1.0, 10.0)

    def read(x: torch.Tensor) -> torch.Tensor:
        found = of(x).as_strided(*where).flatten()
        return found * weights[: len(found)]

    x = torch.arange(8.0, requires_grad=True)
    (expected,) = torch.autograd.grad(read(x).square().sum(), x)
    with sl.Mesh(a=2):
        for spec in ("d@a", "d"):
            assert torch.equal(sl.jit(read, in_specs=(spec,))(x.detach()).full_tensor(), read(x.detach()))
            gradient = sl.jit(sl.grad(lambda x: read(x).square().sum()), in_specs=(spec,))(x.detach())
            torch.testing.assert_close(gradient.full_tensor(), expected)


def test_memory_that_nobody_gave_is_refused() -> None:
    with sl.Mesh(a=2), pytest.raises(sl.ShardingError, match="a strided view cannot be traced"):
        sl.jit(lambda x: x[:4].as_strided([9], [1]), in_specs=("d@a",))(torch.arange(16.0)[:8])
