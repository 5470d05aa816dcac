"""shard_map: the oracle is the same computation on the whole tensors, in plain torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib import Mesh, P, ShardingError, shard
from shardlib.core.context import single_device, tracing
from shardlib.frontend.trace import trace
from shardlib.jit.shard_map import shard_map
from shardlib.primitives.body import Communication
from shardlib.primitives.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    reduce_scatter,
)
from shardlib.primitives.vmap_body import REPLICATED, run_collective

MESH = {"data": 2, "tensor": 4}
N = 4  # devices along tensor


# --- bodies, and what they compute ------------------------------------------------------------------------------------


def contraction(x: Tensor, w: Tensor) -> Tensor:
    return psum(x @ w, "tensor")


def contraction_scattered(x: Tensor, w: Tensor) -> Tensor:
    return reduce_scatter(x @ w, "tensor", dim=1)


def fsdp(x: Tensor, w: Tensor) -> Tensor:
    return x @ all_gather(w, "data", dim=-1)


def ring(x: Tensor) -> Tensor:
    """all_gather by neighbors: after i steps a device holds what the i-th device before it had."""
    pieces = [x]
    for _ in range(axis_size("tensor") - 1):
        pieces.append(ppermute(pieces[-1], "tensor", [(i, (i + 1) % N) for i in range(N)]))
    order = (axis_index("tensor") - torch.arange(N)) % N
    return torch.stack(pieces).index_select(0, order).movedim(0, 1).flatten(1)


def experts(x: Tensor, w: Tensor) -> Tensor:
    """x: [experts x tokens, d] on each device, ordered by expert; w: [1, d, d], one expert a device."""
    mine = all_to_all(x, "tensor", 0, 0)
    return all_to_all((mine @ w[0]).tanh(), "tensor", 0, 0)


def experts_whole(x: Tensor, w: Tensor) -> Tensor:
    routed = x.view(N, N, -1, x.shape[-1])  # device, expert, token, d
    return torch.einsum("netd,edf->netf", routed, w).tanh().reshape(x.shape)


def softmax(x: Tensor) -> Tensor:
    e = (x - pmax(x.detach().amax(-1, keepdim=True), "tensor")).exp()
    return e / psum(e.sum(-1, keepdim=True), "tensor")


def halo(x: Tensor) -> Tensor:
    """Each element minus its left neighbor, zero at the left end."""
    left = ppermute(x[:, -1:], "tensor", [(i, i + 1) for i in range(N - 1)])
    return x - torch.cat([left, x[:, :-1]], 1)


def halo_whole(x: Tensor) -> Tensor:
    return x - torch.nn.functional.pad(x, (1, 0))[:, :-1]


def tree(params: dict[str, Tensor], scale: float, x: Tensor) -> dict[str, Any]:
    return {"y": psum(x @ params["w"], "tensor") * scale + params["b"], "scale": scale}


@dataclass(frozen=True)
class Case:
    body: Callable[..., Any]
    whole: Callable[..., Any]
    args: tuple[Any, ...]  # shapes of tensors, or other arguments
    in_specs: Any
    out_specs: Any
    id: str = ""
    check: bool = True


TREE = {"w": (8, 6), "b": (6,)}
CASES = [
    Case(contraction, torch.matmul, ((4, 8), (8, 6)), ("b@data k@tensor", "k@tensor _"), "b@data _"),
    Case(contraction, torch.matmul, ((4, 8), (8, 6)), (P("data", "tensor"), P("tensor")), P("data")),
    Case(contraction, torch.matmul, ((4, 8), (8, 6)), ("_ k@tensor", "k@tensor _"), "_ _"),
    Case(contraction_scattered, torch.matmul, ((4, 8), (8, 12)), ("b@data k@tensor", "k@tensor _"), "b@data n@tensor"),
    Case(fsdp, torch.matmul, ((4, 8), (8, 6)), ("b@data _", "_ n@data"), "b@data _"),
    Case(fsdp, torch.matmul, ((8, 8), (8, 6)), ("b@(data tensor) _", "_ n@data"), "b@(data tensor) _"),
    Case(ring, lambda x: x, ((4, 8),), "b@data k@tensor", "b@data _", check=False),
    Case(experts, experts_whole, ((32, 3), (4, 3, 3)), ("t@tensor _", "e@tensor _ _"), "t@tensor _"),
    Case(softmax, lambda x: x.softmax(-1), ((4, 8),), "b@data k@tensor", "b@data k@tensor"),
    Case(halo, halo_whole, ((4, 8),), "b@data k@tensor", "b@data k@tensor"),
    Case(
        lambda x: pmean(x.mean(), ("data", "tensor")), torch.mean,
        ((4, 8),), "b@data k@tensor", P(), "pmean of a scalar",
    ),
    Case(
        lambda x: x * (axis_index(("tensor", "data")) + 1).to(x.dtype),
        lambda x: x * (torch.arange(8).view(4, 2).t().repeat_interleave(2, 0).repeat_interleave(2, 1) + 1),
        ((4, 8),), "b@data k@tensor", "b@data k@tensor", "axis_index, joint",
    ),
    Case(
        lambda x: all_gather(x, ("tensor", "data")),
        lambda x: x.view(2, 4, 1, 3).transpose(0, 1).reshape(8, 3),
        ((8, 3),), "b@(data tensor) _", "_ _", "all_gather, joint",
    ),
    Case(
        lambda x: all_gather(x, "data", dim=-1, tiled=False),
        lambda x: torch.stack(x.chunk(2), -1),
        ((4, 3),), "b@data _", "_ _ _", "all_gather, stacked",
    ),
    Case(
        lambda x: x * psum(torch.ones(()), "tensor"), lambda x: 4 * x,
        ((4, 8),), "b@data _", "b@data _", "psum of a constant",
    ),
    Case(
        lambda x: psum(x * x, "tensor"), lambda x: 4 * x * x,
        ((4, 8),), "b@data _", "b@data _", "psum of equal values",
    ),
    Case(
        lambda x: (x.sin(), x.cos()), lambda x: (x.sin(), x.cos()),
        ((4, 8),), "(b@data c=2) _", ("(b@data c=2) _",) * 2, "factors",
    ),
    Case(
        tree, lambda p, s, x: {"y": x @ p["w"] * s + p["b"], "scale": s}, (TREE, 0.5, (4, 8)),
        ({"w": "k@tensor _", "b": P()}, None, "b@data k@tensor"), {"y": "b@data _", "scale": None}, "pytrees",
    ),
]  # fmt: skip


def _id(case: Case) -> str:
    return case.id or f"{case.body.__name__} {case.in_specs}"


def _args(case: Case) -> tuple[Any, ...]:
    def make(x: Any) -> Any:
        if isinstance(x, dict):
            return {k: make(v) for k, v in x.items()}
        return torch.randn(x, dtype=torch.float64) if isinstance(x, tuple) else x

    torch.set_default_dtype(torch.float64)
    return tuple(map(make, case.args))


@pytest.fixture(autouse=True)
def _double() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def _whole(x: Any) -> Any:
    return torch.utils._pytree.tree_map_only(sl.ShardedTensor, lambda t: t.full_tensor(), x)


def _run(mode: str, fn: Callable[..., Any], *args: Any) -> Any:
    if mode == "one device":
        with single_device():
            return fn(*args)
    return _whole((sl.jit(fn) if mode == "jit" else fn)(*args))


def _same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def _loss(fn: Callable[..., Any], *args: Any) -> Tensor:
    """A number that weighs every element of every result differently."""
    tensors = [x for x in torch.utils._pytree.tree_leaves(fn(*args)) if isinstance(x, Tensor)]
    return sum(((x * torch.linspace(1, 2, x.numel()).view(x.shape)) ** 2).sum() for x in tensors)  # type: ignore[return-value]


MODES = ["one device", "jit", "eager"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES, ids=_id)
def test_values(case: Case, mode: str) -> None:
    args = _args(case)
    with Mesh(**MESH):
        mapped = shard_map(case.body, case.in_specs, case.out_specs, check=case.check)
        _same(_run(mode, mapped, *args), case.whole(*args))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES, ids=_id)
def test_gradients(case: Case, mode: str) -> None:
    args = _args(case)
    argnums = tuple(i for i, x in enumerate(args) if not isinstance(x, float))
    expected = torch.func.grad(lambda *a: _loss(case.whole, *a), argnums)(*args)
    with Mesh(**MESH):
        mapped = shard_map(case.body, case.in_specs, case.out_specs, check=case.check)
        _same(_run(mode, torch.func.grad(lambda *a: _loss(mapped, *a), argnums), *args), expected)


@pytest.mark.parametrize("mode", ["jit", "eager"])
def test_sharded_arguments(mode: str) -> None:
    x, w = torch.randn(4, 8), torch.randn(8, 6)
    with Mesh(**MESH):
        mapped = shard_map(contraction, ("b@data k@tensor", "k@tensor _"), "b@data _")
        out = (sl.jit(mapped) if mode == "jit" else mapped)(shard(x, "b@data _"), shard(w, "k@tensor _"))
        assert sl.typeof(out) == "f64[4@data, 6]"
        _same(out.full_tensor(), x @ w)


def test_a_constant_goes_in_in_pieces() -> None:
    x, body = torch.randn(8, 6), lambda x, n: x * n[:, None]
    with Mesh(**MESH):
        mapped = shard_map(body, ("b@data _", "b@data"), "b@data _")
        step = sl.jit(lambda x: mapped(x, torch.arange(8)), in_specs=("b@data _",))
        assert not step.plan(x).collectives
        _same(step(x).full_tensor(), body(x, torch.arange(8)))


def test_backward_of_an_eager_call() -> None:
    x, w = torch.randn(4, 8), torch.randn(8, 6, requires_grad=True)
    expected = torch.autograd.grad((x @ w).sin().sum(), w)[0]
    with Mesh(**MESH):
        placed = shard(w, "k@tensor _")
        mapped = shard_map(contraction, ("b@data k@tensor", "k@tensor _"), "b@data _")
        mapped(x, placed).sin().sum().backward()
        _same(placed.grad.full_tensor(), expected)
        mapped(x, w).sin().sum().backward()
        _same(_whole(w.grad), expected)


@pytest.mark.parametrize("mode", MODES)
def test_second_derivative(mode: str) -> None:
    x = torch.randn(4, 8)

    def twice(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        inner = torch.func.grad(lambda x: (f(x) ** 2).sum())
        return torch.func.grad(lambda x: (inner(x) ** 2).sum())

    with Mesh(**MESH):
        mapped = shard_map(softmax, "b@data k@tensor", "b@data k@tensor")
        _same(_run(mode, twice(mapped), x), twice(lambda x: x.softmax(-1))(x))


@pytest.mark.parametrize("mode", MODES)
def test_vmap_around(mode: str) -> None:
    x, w = torch.randn(3, 4, 8), torch.randn(8, 6)
    with Mesh(**MESH):
        mapped = shard_map(contraction, ("b@data k@tensor", "k@tensor _"), "b@data _")
        _same(_run(mode, sl.vmap(mapped, (0, None)), x, w), x @ w)
        _same(_run(mode, sl.vmap(mapped, (1, None)), x.transpose(0, 1), w), x @ w)


@pytest.mark.parametrize("mode", ["one device", "jit"])
def test_vmap_and_grad_inside(mode: str) -> None:
    """The body maps over its rows, and takes a gradient of its own: the transposed collective runs in the body."""
    x = torch.randn(4, 8)

    def body(x: Tensor) -> Tensor:
        rows = torch.func.vmap(lambda row: all_gather(row, "tensor").sin())(x)
        slopes = torch.func.grad(lambda x: psum(x * x, "tensor").sum())(x)
        return all_gather(slopes, "tensor", 1) + rows

    with Mesh(**MESH):
        # Every device asks for the gradient of its own copy of the sum, so the sum of all is differentiated: 4 times.
        _same(_run(mode, shard_map(body, "b@data k@tensor", "b@data _"), x), x.sin() + N * 2 * x)


# --- transposes -------------------------------------------------------------------------------------------------------

CALLS = [
    Communication("all_reduce", ("tensor",), ("sum",)),
    Communication("all_reduce", ("tensor", "data"), ("sum",)),
    Communication("all_gather", ("tensor",), (0, 4)),
    Communication("all_gather", ("data",), (1, 2)),
    Communication("all_gather", ("tensor", "data"), (1, 8)),
    Communication("reduce_scatter", ("tensor",), (0, 4)),
    Communication("reduce_scatter", ("data",), (1, 2)),
    Communication("all_to_all", ("tensor",), (0, 1, 4)),
    Communication("all_to_all", ("data",), (1, 0, 2)),
    Communication("all_to_all", ("tensor",), (0, 0, 4)),
    Communication("ppermute", ("tensor",), ((0, 1, 1, 2, 3, 0),)),
    Communication("ppermute", ("tensor", "data"), ((0, 7, 7, 1),)),
]


def _run_call(x: Tensor, call: Communication) -> Tensor:
    """One collective on the tensors of all devices, stacked over the axes of the mesh."""
    here = [i for i, name in enumerate(MESH) if name in call.axes]
    groups = [i for i in range(2) if i not in here]
    members = x.movedim(groups, [*range(-len(groups), 0)]) if groups else x
    out = run_collective(members, [[*MESH][i] for i in here], call.axes, call.kind, call.args)
    if call.kind in REPLICATED:
        out = out.expand(*([*MESH.values()][i] for i in here), *out.shape)
    return out.movedim([*range(-len(groups), 0)], groups) if groups else out


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_transpose(call: Communication) -> None:
    """<y, A x> == <A' y, x> over the tensors of all devices, and A'' == A."""

    x = torch.randn(2, 4, 8, 8)
    out = _run_call(x, call)
    y = torch.randn(out.shape)
    back = call.transposed()
    torch.testing.assert_close((y * out).sum(), (_run_call(y, back) * x).sum())
    assert back.transposed() == call


@pytest.mark.parametrize("call", [*CALLS, Communication("all_reduce", ("data",), ("max",))], ids=str)
def test_fake_shape(call: Communication) -> None:
    """What the op promises is what the collective gives, also with a batch dim in front."""
    op = getattr(torch.ops.shardlib, f"manual_{call.kind}")
    for batch, c in (((), call), ((3,), call.batched())):
        x = torch.randn(2, 4, *batch, 8, 8)
        fake = op(x[0, 0].to("meta"), list(c.axes), *c.args)
        assert fake.shape == _run_call(x, c)[0, 0].shape


# --- what is traced ---------------------------------------------------------------------------------------------------


def test_trace() -> None:
    """The whole body is in the graph, forward and backward, in JAX's convention for values that devices share."""
    mapped = shard_map(contraction, ("b@data k@tensor", "k@tensor _"), "b@data _")
    with Mesh(**MESH), tracing():
        graph = trace(
            torch.func.grad(lambda w, x: mapped(x, w).sum()), (torch.empty(8, 6), torch.empty(4, 8))
        ).graph.graph
    calls = [(n.target._opname, *n.args[1:]) for n in graph.nodes if "shardlib" in str(n.target)]
    assert calls == [
        ("to_local", "b@data k@tensor", [2, 2]),
        ("to_local", "k@tensor _", [2, 6]),
        ("manual_all_reduce", ["tensor"], "sum"),
        ("from_local", "b@data _", [4, 6], "shard_map(contraction): result"),
        ("to_local", "b@data _", [2, 6]),
        ("manual_all_reduce", ["tensor"], "sum"),  # psum is its own transpose
        ("manual_all_reduce", ["data"], "sum"),  # w is not cut over data
        ("from_local", "k@tensor _", [8, 6]),
    ]
    assert any(n.target is torch.ops.aten.div.Tensor and n.args[1] == 4 for n in graph.nodes), "each copy has its share"


# --- errors -----------------------------------------------------------------------------------------------------------

X = (4, 8)


def _same_body(*args: Any) -> Any:
    return args if len(args) > 1 else args[0]


BAD = {
    "uneven": (
        _same_body, ("b@data k@tensor", "b@(data tensor)"), P(), ((3, 6), (4,)),
        "in_specs do not divide the tensors:\n"
        "  * args[0] of shape [3, 6] with spec 'b@data k@tensor': dim 0 has size 3, data has 2 devices\n"
        "  * args[0] of shape [3, 6] with spec 'b@data k@tensor': dim 1 has size 6, tensor has 4 devices\n"
        "  * args[1] of shape [4] with spec 'b@(data tensor)': dim 0 has size 4, data x tensor has 8 devices\n"
        "Rule: every device runs the same code on the same shapes, so axes must divide what they cut\n"
        "Remedy: pad the tensor to a multiple, or leave that dim whole",
    ),
    "smaller than the axis": (_same_body, "_ _@tensor", P(), ((4, 2),), "dim 1 has size 2, tensor has 4 devices"),
    "uneven factor": (
        _same_body, "(three=3 h@tensor) _", P(), ((6, 8),), "a factor of dim 0 has size 2, tensor has 4 devices"
    ),
    "count of in_specs": (_same_body, (P(), P()), P(), (X,), "in_specs has 2 entries, the call has 1 arguments"),
    "structure of results": (
        _same_body, P(), (P(), P()), (X,),
        "shard_map(_same_body) out_specs do not fit the values",
    ),
    "no spec": (_same_body, (None,), P(), (X,), "args[0] of shape [4, 8] has no spec"),
    "no spec of a result": (_same_body, P(), None, (X,), "result of shape [4, 8] has no spec"),
    "open": (_same_body, "b@data _?", P(), (X,), "args[0] of shape [4, 8] has the open spec 'b@data _?'"),
    "unknown axis": (_same_body, "b@dta _", P(), (X,), "the mesh has no axis 'dta'; did you mean 'data'?"),
    "rank": (_same_body, "b@data", P(), (X,), "the spec has 1 dim, the tensor has 2 dims"),
    "rank of a result": (_same_body, "b@data _", "b@data", (X,), "the spec has 1 dim, the tensor has 2 dims"),
    "collective's axis": (
        lambda x: psum(x, "dta"), P(), P(), (X,), "psum over 'dta':\n  * Mesh(data=2, tensor=4) has no axis 'dta'"
    ),
    "axis twice": (lambda x: psum(x, ("data", "data")), P(), P(), (X,), "axis 'data' is named twice"),
    "no axis": (lambda x: psum(x, ()), P(), P(), (X,), "psum over ():\n  * no axis is named"),
    "uneven scatter": (
        lambda x: reduce_scatter(x, "tensor", 1), "b@data k@tensor", "b@data _", ((4, 8),),
        "reduce_scatter of a local tensor of shape [2, 2] along dim 1:\n  * dim 1 has size 2, tensor has 4 devices",
    ),
    "uneven all_to_all": (
        lambda x: all_to_all(x, "tensor", 0, 1), "b@data k@tensor", P(), (X,),
        "all_to_all of a local tensor of shape [2, 2] along dim 0",
    ),
    "dim": (lambda x: all_gather(x, "data", 2), P(), P(), (X,), "all_gather along dim 2 of a local tensor of 2 dims"),
    "permutation": (
        lambda x: ppermute(x, "tensor", [(0, 1), (2, 1)]), P(), P(), (X,), "member 1 receives 2 times",
    ),
    "nested": (
        lambda x: shard_map(_same_body, P(), P())(x), P(), P(), (X,),
        "shard_map(_same_body) is inside the body of another shard_map",
    ),
    "axis_index of nothing": (
        lambda: axis_index("data"), (), P(), (), "axis_index('data') in a shard_map without tensor arguments"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad(name: str) -> None:
    body, in_specs, out_specs, shapes, text = BAD[name]
    with Mesh(**MESH), pytest.raises(ShardingError) as error:
        shard_map(body, in_specs, out_specs)(*map(torch.ones, shapes))
    assert text in str(error.value)


@pytest.mark.parametrize("call", [pmax, pmin])
def test_gradient_of_a_maximum(call: Callable[..., Tensor]) -> None:
    with Mesh(**MESH):
        mapped = shard_map(lambda x: call(x, "tensor"), "b@data k@tensor", "b@data _")
        with pytest.raises(ShardingError, match=rf"gradient flows through {call.__name__} over 'tensor'"):
            sl.jit(torch.func.grad(lambda x: mapped(x).sum()))(torch.ones(4, 8))


def test_outside() -> None:
    with pytest.raises(ShardingError, match="psum over 'data' is outside any shard_map"):
        psum(torch.ones(2), "data")
    with pytest.raises(ShardingError, match=r"shard_map\(contraction\) is outside any mesh"):
        shard_map(contraction, P(), P())(torch.ones(2))
    with (
        Mesh(**MESH),
        pytest.raises(ShardingError, match="on Mesh\\(x=2\\), the program on Mesh\\(data=2, tensor=4\\)"),
    ):
        sl.jit(shard_map(_same_body, P(), P(), mesh=Mesh(x=2)))(torch.ones(2))
    with Mesh(**MESH):
        _same(sl.vmap(shard_map(_same_body, P(), P()))(torch.ones(2)), _same_body(torch.ones(2)))


def test_own_mesh() -> None:
    out = shard_map(lambda x: psum(x.sum(), "x"), "_@x", P(), mesh=Mesh(x=2))(torch.ones(4))
    assert float(out) == 4
    assert math.prod(out.mesh.axes.values()) == 2


@pytest.mark.long
@pytest.mark.parametrize("call", [pmax, pmin])
@pytest.mark.parametrize("layers", [1, 2], ids=["a scan", "a scan in a scan"])
def test_a_maximum_in_steps_of_a_scan(call: Callable[..., Tensor], layers: int) -> None:
    """It runs, though a gradient is followed; who takes one is told."""

    def step(c: Tensor) -> Tensor:
        e = (c - call(c.amax(0, keepdim=True), "tensor")).exp()
        out: Tensor = e / sl.psum(e.sum(0, keepdim=True), "tensor") + c
        return out

    def scanned(c: Tensor, layers: int) -> Tensor:
        inner = step if layers == 1 else lambda c: scanned(c, layers - 1)
        out: Tensor = sl.scan(lambda c, _: (inner(c), None), c, None, length=2)[0]
        return out

    x = torch.randn(4, 4, dtype=torch.float64)
    with sl.Mesh(data=2, tensor=2):
        by_hand = sl.shard_map(
            lambda c: functools.reduce(lambda c, _: step(c), range(2**layers), c), "n@tensor k", "n@tensor k"
        )
        mapped = sl.shard_map(lambda c: scanned(c, layers), "n@tensor k", "n@tensor k")
        for leaf in (x, x.clone().requires_grad_()):
            torch.testing.assert_close(sl.jit(mapped)(leaf), by_hand(leaf), rtol=0, atol=0)
        for differentiated in (
            lambda: mapped(leaf).sum().backward(),
            lambda: sl.jit(sl.grad(lambda x: mapped(x).sum()))(x),
        ):
            with pytest.raises(ShardingError, match=rf"gradient flows through {call.__name__} over 'tensor'"):
                differentiated()


@pytest.mark.parametrize(
    "body",
    [
        lambda c: sl.ppermute(c, "tensor", [(0, 1), (1, 0)]) * 2,
        lambda c: sl.psum(c, "tensor") / 2 + c,
        lambda c: c * (1 + sl.axis_index("tensor")),
    ],
    ids=["ppermute", "psum", "axis_index"],
)
def test_steps_of_a_scan_communicate(body: Callable[[Tensor], Tensor]) -> None:
    def scanned(x: Tensor) -> Tensor:
        out: Tensor = sl.scan(lambda c, _: (body(c), None), x, None, length=3)[0]
        return out

    x = torch.randn(4, 4, dtype=torch.float64)
    found = []
    with sl.Mesh(data=2, tensor=2):
        for function in (scanned, lambda x: body(body(body(x)))):
            mapped = sl.shard_map(function, in_specs="n@tensor k", out_specs="n@tensor k")
            leaf = x.clone().requires_grad_()
            out = mapped(leaf).full_tensor()
            out.square().sum().backward()
            found.append((out.detach(), leaf.grad))
    torch.testing.assert_close(*found, rtol=0, atol=0)
