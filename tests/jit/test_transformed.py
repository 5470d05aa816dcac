"""Transforms of `torch.func` within each other, inside `jit` and around it, against plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import shardlib as sl
from shardlib import Mesh, ShardingError
from shardlib.core.torch_internals.torch_private import pytree
from tests.helpers.trace_runs import TraceRuns

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's forward mode calls it

D = torch.float64
Fn = Callable[..., Any]
W = torch.linspace(-1, 1, 9, dtype=D).reshape(3, 3).cos()
V = torch.linspace(-1, 1, 3, dtype=D)


def whole(out: Any) -> list[Any]:
    return [x.full_tensor() if isinstance(x, sl.ShardedTensor) else x for x in pytree.tree_leaves(out)]


def close(out: Any, want: Any) -> None:
    for x, y in zip(whole(out), whole(want), strict=True):
        torch.testing.assert_close(x, y)


# Inside: every pair of transforms, at every door ----------------------------------------------------------------------

FUNCTIONS: dict[str, Fn] = {
    "linear": lambda x: torch.roll(x, 1, -1) @ W,
    "fused": lambda x: torch.nn.functional.silu(x) * x.sum(),
    "detached": lambda x: x.detach() * x.sin(),
}


def _in_a_tree(f: Fn) -> Fn:
    def run(x: Tensor) -> Tensor:
        out, pull = vjp(lambda d: {"a": f(d["u"]), "b": d["v"] * d["u"]}, {"u": x, "v": x.cos()})
        (d,) = pull({"a": x, "b": x * 2})
        both: Tensor = d["u"] * d["v"] + out["b"]
        return both

    return run


def _of_two(f: Fn) -> Fn:
    def run(x: Tensor) -> Tensor:
        (value, aux), (a, b) = sl.value_and_grad(lambda y, z: ((f(y) * z).sum(), y.sin()), (0, 1), has_aux=True)(
            x, x.cos()
        )
        both: Tensor = a * b + aux * value
        return both

    return run


TRANSFORMS: dict[str, Callable[[Fn], Fn]] = {
    "vjp, its cotangent": lambda f: lambda x: vjp(f, torch.ones_like(x))[1](x)[0],
    "vjp, both": lambda f: lambda x: vjp(f, x)[1](x.sin())[0],
    "vjp, has_aux": lambda f: lambda x: vjp(lambda y: (f(y), y.cos()), x, has_aux=True)[1](x)[0],
    "vjp, a constant": lambda f: lambda x: vjp(f, x)[1](torch.ones_like(x))[0],
    "vjp, trees": _in_a_tree,
    "value_and_grad": _of_two,
    "grad": lambda f: lambda x: sl.grad(lambda y: f(y).square().sum())(x),
    "jacrev": lambda f: lambda x: jacrev(f)(x) @ x,
    "jvp": lambda f: lambda x: jvp(f, (x,), (x.sin(),))[1],
    "hessian": lambda f: lambda x: hessian(lambda y: f(y).square().sum())(x) @ x,
    "vmap": lambda f: lambda x: vmap(lambda a, b: f(a) * b, (1, None), 1)(torch.stack([x, 2 * x], 1), x).sum(1),
}


def _inside(f: Fn) -> Fn:
    return lambda x: sl.jit(f)(x)


def _gradient(f: Fn) -> Fn:
    return lambda x: sl.jit(grad(lambda y: f(y).sin().sum()))(x)


def _step(f: Fn) -> Fn:
    def step(x: Tensor) -> Tensor | None:
        y = x.detach().requires_grad_()
        f(y).sin().sum().backward()
        return y.grad

    return step


def _backward(f: Fn) -> Fn:
    return lambda x: sl.jit(_step(f))(x)


def _in_a_module(f: Fn) -> Fn:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return f(x)

    def run(x: Tensor) -> Tensor | None:
        y = x.clone().requires_grad_()
        sl.parallelize(Own(), {}, strategy=sl.strategies.ddp("x"))(y).sin().sum().backward()
        return y.grad

    return run


def _with_values(f: Fn) -> Fn:
    return f


def _with_gradient(f: Fn) -> Fn:
    return lambda x: grad(lambda y: f(y).sin().sum())(x)


DOORS: dict[str, tuple[Callable[[Fn], Fn], Callable[[Fn], Fn]]] = {
    "jit": (_inside, _with_values),
    "jit of grad": (_gradient, _with_gradient),
    "backward in a step": (_backward, _step),
    "a parallelized module": (_in_a_module, _step),
}


@pytest.mark.long
@pytest.mark.sampled(61)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("inner", TRANSFORMS)
@pytest.mark.parametrize("outer", TRANSFORMS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_compositions(function: str, outer: str, inner: str, door: str) -> None:
    f = TRANSFORMS[outer](TRANSFORMS[inner](FUNCTIONS[function]))
    mine, theirs = DOORS[door]
    try:
        want = theirs(f)(V)
    except RuntimeError:  # a constant requires no gradient
        return
    with Mesh(x=2):
        close(mine(f)(V), want)


def _adjoint(v: Tensor) -> Tensor:
    (t,) = vjp(FUNCTIONS["linear"], torch.zeros_like(v))[1](v)
    return t.square().sum()


def test_the_cotangent_of_vjp_at_other_doors() -> None:
    want, v = grad(_adjoint)(V), torch.cat([V, V])
    with Mesh(x=2):
        close(grad(_adjoint)(sl.shard(V, "_@x")), want)  # op by op
        body = sl.shard_map(grad(_adjoint), "_@x", "_@x")
        close(body(v), torch.cat([want, want]))
        close(sl.jit(body)(v), torch.cat([want, want]))
        total = sl.jit(grad(lambda v: sl.shard_map(lambda v: sl.psum(_adjoint(v), "x"), "_@x", "")(v)))
        close(total(v), torch.cat([want, want]))


# Around: every transform of a jitted function -------------------------------------------------------------------------

X = torch.linspace(-1, 1, 24, dtype=D).reshape(4, 6)
K = torch.linspace(-1, 1, 36, dtype=D).reshape(6, 6).sin()
TWO = torch.stack([X, 2 * X])
Jit = Callable[..., Any]


def _is_plain() -> bool:
    return sl.current_mesh() is None


def _at(x: Tensor, spec: str) -> Tensor:
    return x if _is_plain() else sl.shard(x, spec)


def loss(x: Tensor) -> Tensor:
    return (_at(torch.tanh(x @ K), "b@a _") * x).square().sum()


def rows(x: Tensor) -> Tensor:
    return _at(torch.tanh(x @ K) * x.sum(), "b@a _")


def tree(d: dict[str, Tensor], x: Tensor, scale: float = 2.0) -> dict[str, Tensor]:
    return {"loss": (_at(x @ d["w"], "b@a _") + d["b"]).sin().sum() * scale, "aux": x.sum()}


def _leaf(run: Callable[[Tensor], Tensor]) -> Tensor | None:
    x = X.clone().requires_grad_()
    run(x).backward()
    return x.grad


D0 = {"w": K, "b": X[0]}
AROUND: dict[str, Callable[[Jit], Any]] = {
    "grad": lambda j: sl.grad(j(loss))(X),
    "in_specs": lambda j: grad(j(lambda x: x.sin().sum(), in_specs=("b@a _",)))(X),
    "out_specs": lambda j: jacrev(j(lambda x: x.sin() * x.sum(), in_specs=("b@a _",), out_specs="_ c@a"))(X),
    "value_and_grad": lambda j: sl.value_and_grad(j(loss))(X),
    "has_aux": lambda j: grad(j(lambda x: (loss(x), x.cos())), has_aux=True)(X),
    "argnums": lambda j: grad(lambda d, x: j(tree)(d, x, scale=3.0)["loss"], (0, 1))(D0, X),
    "vmap": lambda j: vmap(j(rows), 1, 2)(TWO.transpose(0, 1)),
    "vmap, in_dims": lambda j: vmap(j(lambda a, b: rows(a) * b), (0, None))(TWO, X),
    "vmap of vmap": lambda j: vmap(vmap(j(rows)))(torch.stack([TWO, -TWO])),
    "vmap of grad": lambda j: vmap(grad(j(loss)))(TWO),
    "grad of vmap": lambda j: grad(lambda x: vmap(j(loss))(torch.stack([x, 2 * x])).sum())(X),
    "grad of grad": lambda j: grad(lambda x: grad(j(loss))(x).sin().sum())(X),
    "jacrev": lambda j: jacrev(j(rows))(X),
    "jacfwd": lambda j: jacfwd(j(rows))(X),
    "hessian": lambda j: hessian(j(loss))(X[:2]),
    "vjp": lambda j: grad(lambda c: vjp(j(rows), X)[1](c)[0].sin().sum())(X),
    "jvp": lambda j: jvp(j(rows), (X,), (X.cos(),)),
    "jvp of grad": lambda j: jvp(grad(j(loss)), (X,), (X.cos(),)),
    "jit in jit": lambda j: grad(j(lambda x: j(lambda x: torch.tanh(x) * x)(x).sin().sum()))(X),
    "grad of jit of grad of jit": lambda j: grad(j(lambda x: grad(j(loss))(x).sum()))(X),
    "backward": lambda j: _leaf(lambda x: vmap(j(loss))(torch.stack([x, 2 * x])).sum()),
    "a leaf in a closure": lambda j: _leaf(lambda x: vmap(j(lambda y: (x * y).sum()))(TWO).sum()),
    "a value in a closure": lambda j: grad(lambda u: j(lambda x: (x * u).sin().sum())(X))(X),
    "a placed tensor": lambda j: grad(j(loss))(_at(X, "b@a _")),
    "ops behind": lambda j: grad(lambda x: j(loss)(x) * x.sum())(X),
    "numbers": lambda j: [grad(j(lambda x, k: (x * k).sin().sum()))(X, float(k)) for k in range(2)],
    "static": lambda j: grad(j(lambda x, how: getattr(x, how)().sum(), static_argnums=(1,)))(X, "sin"),
    "donated": lambda j: grad(j(loss, donate_argnums=0))(_at(X, "b@a _")),
    "other results": lambda j: grad(lambda x: (lambda out: out[0].sum() * out[2])(j(lambda x: (x.sin(), None, 3))(x)))(
        X
    ),
    "no_grad": lambda j: torch.no_grad()(lambda: grad(j(loss))(X))(),
    "a scan": lambda j: grad(
        j(lambda x: (_steps if _is_plain() else sl.scan)(lambda h, _: (torch.tanh(h @ K), None), x, length=2)[0].sum())
    )(X),
    "a shard_map": lambda j: vmap(grad(j(lambda x: (torch.sin if _is_plain() else _mapped)(x).sum())))(TWO),
}


def _steps(fn: Fn, x: Tensor, length: int) -> Any:
    for _ in range(length):
        x, _ = fn(x, None)
    return x, None


def _mapped(x: Tensor) -> Any:
    return sl.shard_map(torch.sin, "b@a _", "b@a _")(x)


def _plain(fn: Fn, **_: Any) -> Fn:
    return fn


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", AROUND)
def test_around_a_jitted_function(name: str) -> None:
    want = AROUND[name](_plain)
    with Mesh(a=2):
        close(AROUND[name](sl.jit), want)


def test_gradients_of_plain_tensors_are_plain_and_computed_on_the_mesh() -> None:
    placed = TraceRuns()

    def f(x: Tensor) -> Tensor:
        placed.note()
        return loss(x)

    with Mesh(a=2):
        step = sl.jit(f)
        gradient = grad(step)(X)
        traces = len(placed)
        grad(step)(X.cos())
        vmap(step)(TWO)
    assert type(gradient) is Tensor
    assert traces == 2, "a program, and one for its gradient, which are there when it is called again"
    assert len(placed) == traces + 1


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach() for name, x in model.named_parameters()}


def _level(model: nn.Module, out: Tensor) -> Any:
    out.square().sum().backward()
    return {name: x.grad for name, x in model.named_parameters()}


MODELS: dict[str, Callable[[nn.Module], Any]] = {
    "vmap, parameters of a module": lambda m: _level(m, vmap(m)(X)),
    "grad, parameters of a module": lambda m: _level(m, grad(lambda x: m(x).square().sum())(X)),
    "MAML": lambda m: _maml(m),
    "an ensemble": lambda m: vmap(grad(lambda p: functional_call(m, p, (X,)).square().sum()))(
        {name: torch.stack([x, 2 * x]) for name, x in _values(m).items()}
    ),
    "a module as an argument": lambda m: grad(lambda x: sl.jit(lambda m, x: m(x).square().sum())(m, x))(X),
}


def _maml(m: nn.Module) -> Any:
    def outer(p: dict[str, Tensor]) -> Tensor:
        slope = grad(lambda p: functional_call(m, p, (X,)).square().sum())(p)
        out: Tensor = functional_call(m, {name: p[name] - 0.1 * slope[name] for name in p}, (X.cos(),))
        return out.square().sum()

    return grad(outer)(_values(m))


@pytest.mark.parametrize("name", MODELS)
def test_around_a_parallelized_module(name: str) -> None:
    with sl.no_mesh():
        want = MODELS[name](net())
    with Mesh(a=2):
        close(MODELS[name](sl.parallelize(net(), {"0.weight": "o@a _"})), want)


def test_what_draws_runs_op_by_op() -> None:
    torch.manual_seed(0)
    with Mesh(a=2):
        noisy = grad(sl.jit(lambda x: (torch.nn.functional.dropout(x, 0.5) * x).sum()))(X)
        assert bool(((noisy == 0) | torch.isclose(noisy, 4 * X)).all())
        with pytest.raises(ShardingError, match=r"sl\.jit\(sl\.grad\(f\)\)\(x\)"):
            grad(sl.jit(lambda x: (sl.shard(torch.rand_like(x), "b@a _") * sl.shard(x, "b@a _")).sum()))(X)


STATE: dict[str, Callable[..., Any]] = {
    "grad": lambda f, x: grad(f)(x),
    "vjp": lambda f, x: vjp(f, x)[1](torch.ones((), dtype=x.dtype))[0],
    "jvp": lambda f, x: jvp(f, (x,), (x,))[1],
    "vmap": lambda f, x: vmap(f)(torch.stack([x, 2 * x])),
    "hessian": lambda f, x: hessian(f)(x),
}


def _in_turns(transform: Callable[..., Any], wrap: Callable[..., Any]) -> list[Tensor]:
    """A function of what its Python says, and of what it counts, in three calls."""
    config, rows, calls = {"k": 2.0}, [1.0], [0]

    def reads(x: Tensor) -> Tensor:
        return (x**3).sum() * config["k"] * len(rows)

    def counts(x: Tensor) -> Tensor:
        calls[0] += 1
        return (x**3).sum() * calls[0]

    reader, counter, results = wrap(reads), wrap(counts), []
    for _ in range(3):
        results += [transform(reader, X[0]), transform(counter, X[0]), torch.tensor(calls[0])]
        config["k"] += 1
        rows.append(1.0)
    return results


@pytest.mark.parametrize("name", STATE)
def test_each_transformed_call_reads_what_its_python_says(name: str) -> None:
    with Mesh(a=2):
        close(_in_turns(STATE[name], sl.jit), _in_turns(STATE[name], lambda f: f))


@pytest.mark.parametrize("name", STATE)
def test_a_frozen_parameter_under_a_transform(name: str) -> None:
    def loss(m: nn.Module) -> Callable[[Tensor], Any]:
        return lambda x: m(x[None]).square().sum()

    plain, model = net(), net()
    model[0].weight.requires_grad_(False)
    with Mesh(a=2):
        close(STATE[name](loss(sl.parallelize(model, {})), X[0]), STATE[name](loss(plain), X[0]))
