"""Pieces of a program that are more than they look: each program is what it is with every call traced as it comes."""

from __future__ import annotations

import contextvars
import copy
import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import shardlib as sl
from shardlib import Mesh
from shardlib.frontend.reuse import subgraph_reuse

PROGRAMS: dict[str, Callable[[], Any]] = {}


def program(fn: Callable[[], Any]) -> Callable[[], Any]:
    PROGRAMS[fn.__name__] = fn
    return fn


N = range(5)


class Base(nn.Module):
    def __init__(self, i=0):
        super().__init__()
        self.k = 1.0 + i


def seq(layers, x=None):
    def f(x):
        for l in layers:
            x = l(x)
        return x

    with Mesh(data=2):
        return sl.jit(f)(torch.ones(2) if x is None else x).full_tensor().tolist()


@program
def second():
    class A(nn.Module):
        def forward(self, x):
            return torch.tanh(x)

    acts = nn.Sequential(*[A() for _ in N])
    w = nn.Parameter(torch.full((2, 2), 0.3))

    @sl.jit
    def f(x):
        x = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(acts(x @ w).sum(), x, create_graph=True)
        (g * g).sum().backward()

    with Mesh(data=2):
        f(torch.ones(4, 2))
    return w.grad.tolist()


@program
def second_outside():
    class A(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(2, 2)

        def forward(self, x):
            return torch.tanh(self.l(x))

    torch.manual_seed(0)
    m = nn.Sequential(*[A() for _ in N])

    @sl.jit
    def f(x):
        x = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        return (g.norm(dim=1) - 1).pow(2).mean()

    with Mesh(data=2):
        f(torch.ones(4, 2)).backward()
    return m[0].l.weight.grad.tolist()


@program
def inlist():
    class H(Base):
        def forward(self, x):
            return x * self.k

    class A(Base):
        def __init__(self, i):
            super().__init__()
            self.h = [H(i)]

        def forward(self, x):
            return self.h[0](x)

    return seq([A(i) for i in N])


@program
def bound():
    class H(Base):
        def forward(self, x):
            return x * self.k

    class A(Base):
        def __init__(self, i):
            super().__init__()
            self.go = H(i).forward

        def forward(self, x):
            return self.go(x)

    return seq([A(i) for i in N])


@program
def hiddenhook():
    class H(Base):
        def forward(self, x):
            return x * 2

    class A(Base):
        def __init__(self, i):
            super().__init__()
            self.h = [H(i)]
            if i % 2:
                self.h[0].register_forward_hook(lambda m, a, o: o * 3)

        def forward(self, x):
            return self.h[0](x)

    return seq([A(i) for i in N])


@program
def backread():
    class Fn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, m):
            ctx.m = m
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g * ctx.m.k, None

    class A(Base):
        def forward(self, x):
            return Fn.apply(x, self)

    x = torch.ones(2, requires_grad=True)
    m = nn.Sequential(*[A(i) for i in N])
    with Mesh(data=2):
        sl.jit(lambda x: m(x).sum())(x).backward()
    return x.grad.tolist()


@program
def unused():
    class A(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(2, 2)

        def forward(self, x):
            y = torch.tanh(self.l(x))
            return y, (y * 0).norm().sqrt()

    torch.manual_seed(0)
    L = nn.ModuleList([A() for _ in range(4)])

    @sl.jit
    def f(x):
        for l in L:
            x, _ = l(x)
        return x.sum()

    with Mesh(data=2):
        f(torch.ones(4, 2)).backward()
    return L[0].l.weight.grad.tolist()


@program
def unusedparam():
    class A(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(2, 2)
            self.m = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return torch.tanh(self.l(x)), self.m * 2

    torch.manual_seed(0)
    L = nn.ModuleList([A() for _ in range(5)])

    @sl.jit
    def f(x):
        for l in L:
            x, _ = l(x)
        x.sum().backward()

    with Mesh(data=2):
        f(torch.ones(4, 2))
    return [l.m.grad is None for l in L]


@program
def hookinput():
    class A(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(2, 2)

        def forward(self, x):
            if x.requires_grad:
                x.register_hook(lambda g: g * 2)
            return torch.tanh(self.l(x))

    torch.manual_seed(0)
    L = nn.ModuleList([A() for _ in N])

    @sl.jit
    def f(x):
        for l in L:
            x = x + l(x)
        return x.sum()

    with Mesh(data=2):
        f(torch.ones(4, 2)).backward()
    return L[0].l.bias.grad.tolist()


V = contextvars.ContextVar("V")


@program
def ctxvar():
    class A(Base):
        def forward(self, x):
            return x * V.get()

    L = [A() for _ in N]

    @sl.jit
    def f(x):
        for i, l in enumerate(L):
            t = V.set(1.0 + i)
            x = l(x)
            V.reset(t)
        return x

    with Mesh(data=2):
        return f(torch.ones(2)).full_tensor().tolist()


@program
def iterarg():
    class A(Base):
        def forward(self, x, it):
            return x * next(it)

    L = [A() for _ in N]

    @sl.jit
    def f(x):
        it = itertools.count(1)
        for l in L:
            x = l(x, it)
        return x

    with Mesh(data=2):
        return f(torch.ones(2)).full_tensor().tolist()


@program
def iterbox():
    box = [None]

    class A(Base):
        def forward(self, x):
            return x * next(box[0])

    L = [A() for _ in N]

    @sl.jit
    def f(x):
        box[0] = itertools.count(1)
        for l in L:
            x = l(x)
        box[0] = None
        return x

    with Mesh(data=2):
        return f(torch.ones(2)).full_tensor().tolist()


@program
def copied():
    class A(Base):
        def forward(self, x):
            return x * copy.copy(self).k

    return seq([A(i) for i in N])


@program
def deep():
    class A(Base):
        def forward(self, x):
            return x * copy.deepcopy(self).k

    return seq([A(i) for i in N])


@program
def replicate():
    class A(Base):
        def forward(self, x):
            return x * self._replicate_for_data_parallel().k

    return seq([A(i) for i in N])


@program
def ownget():
    class A(Base):
        def __getattribute__(self, n):
            return object.__getattribute__(self, n)

        def forward(self, x):
            return x * self.k

    return seq([A(i) for i in N])


@program
def dirr():
    class A(Base):
        def __init__(self, i):
            super().__init__(i)
            setattr(self, f"a{i}", 1)

        def forward(self, x):
            return x * (1 + len([n for n in dir(self) if n in ("a0", "a3")]))

    return seq([A(i) for i in N])


@program
def gradfn():
    class A(Base):
        def forward(self, x):
            return x * (1.0 if x.grad_fn is None else 2.0)

    L = [A() for _ in N]

    def f(x):
        for l in L:
            x = l(x)
        return x

    with Mesh(data=2):
        return sl.jit(f)(torch.ones(2, requires_grad=True)).full_tensor().tolist()


@program
def offset():
    g = sl.jit(lambda x: x.abs() * 2 + x._is_view() * 10 + x.storage_offset() * 100)
    with Mesh(data=2):
        return [
            y.full_tensor().tolist() for y in sl.jit(lambda x: [g((x * 2)[i : i + 1]) for i in range(5)])(torch.ones(5))
        ]


@program
def isparam():
    ps = [nn.Parameter(torch.ones(2)) for _ in N]
    g = sl.jit(lambda x: x * (1 if isinstance(x, nn.Parameter) else 2))
    with Mesh(data=2):
        return [y.full_tensor().tolist() for y in sl.jit(lambda: [g(p) for p in ps])()]


@program
def attr():
    class A(Base):
        def forward(self, x):
            y = x * 2
            y.factor = 3.0
            return y

    L = [A() for _ in N]

    def f(x):
        for l in L:
            x = l(x * getattr(x, "factor", 1.0))
        return x

    with Mesh(data=2):
        return sl.jit(f)(torch.ones(2)).full_tensor().tolist()


@program
def leafres():
    class A(Base):
        def forward(self, x):
            return torch.tanh(x).detach().requires_grad_()

    L = [A() for _ in N]

    def f(x):
        return [l(x).requires_grad for l in L]

    with Mesh(data=2):
        return sl.jit(f)(torch.ones(2))


@program
def passinfo():
    class A(Base):
        def forward(self, x, info):
            info2 = info
            return x * 2, info2

    L = [A() for _ in N]

    def f(x):
        out = []
        for l in L:
            info = {"a": 1}
            x, b = l(x, info)
            out.append(b is info)
        return x, out

    with Mesh(data=2):
        return sl.jit(f)(torch.ones(2))[1]


@program
def gradmode():
    class A(Base):
        def forward(self, x):
            torch.set_grad_enabled(False)
            return x * 2

    L = [A() for _ in N]

    def f(x):
        out = []
        for l in L:
            torch.set_grad_enabled(True)
            x = l(x)
            out.append(torch.is_grad_enabled())
        torch.set_grad_enabled(True)
        return x, out

    with Mesh(data=2):
        return sl.jit(f)(torch.ones(2))[1]


@program
def modecount():
    n = [0]

    class M(TorchFunctionMode):
        def __torch_function__(self, f, t, a=(), k=None):
            n[0] += 1
            return f(*a, **(k or {}))

    class A(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(2, 2)

        def forward(self, x):
            return torch.tanh(self.l(x))

    torch.manual_seed(0)
    L = nn.ModuleList([A() for _ in N])

    def f(x):
        with M():
            for l in L:
                x = l(x)
        return x * n[0]

    with Mesh(data=2):
        return sl.jit(f)(torch.ones(2, 2)).full_tensor().tolist()


@program
def inplace_out():
    class A(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(2, 2)

        def forward(self, x):
            return self.l(x)

    torch.manual_seed(0)
    L = nn.ModuleList([A() for _ in range(4)])

    @sl.jit
    def f(x):
        for l in L:
            y = l(x)
            y += x
            x = y
        return x.sum()

    with Mesh(data=2):
        f(torch.ones(4, 2)).backward()
    return L[0].l.weight.grad.tolist()


@program
def callobj():
    @dataclasses.dataclass
    class S:
        k: float

        def __call__(self, x):
            return x * self.k

    g = sl.jit(S(2.0))
    with Mesh(data=2):
        return sl.jit(lambda x: g(x))(torch.ones(2)).full_tensor().tolist()


@program
def rnd():
    class A(Base):
        def forward(self, x, r):
            return x * 1.0

    L = [A() for _ in N]

    def f(x):
        for l in L:
            x = l(x, random)
        return x

    with Mesh(data=2):
        return sl.jit(f)(torch.ones(2)).full_tensor().tolist()


@pytest.mark.sampled(5)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_the_program_that_it_looks_like(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for after in (1 << 30, 2, 0):
        monkeypatch.setattr(subgraph_reuse, "AFTER", after)
        subgraph_reuse._IMPURE.clear()
        try:
            found.append(repr(PROGRAMS[name]()))
        except sl.ShardingError as error:  # the same one
            found.append(str(error))
    assert found[1:] == found[:1] * 2
