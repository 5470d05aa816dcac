"""shard_map over some axes of the mesh, the others left to the compiler: the oracle is plain torch on one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib import Mesh, P, ShardedTensor, ShardingError, shard
from shardlib.core.context import single_device
from tests.helpers.ranks import run_ranks

MESH = {"data": 2, "tensor": 4}


def manual(*axes: str, **more: Any) -> Callable[..., Any]:
    """`manual("data")(fn, in_specs, out_specs)`."""
    return lambda fn, in_specs, out_specs: sl.shard_map(fn, in_specs, out_specs, axis_names=axes, **more)


def mlp(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return (x @ w).relu() @ v


def annotated(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """The hidden values are cut over the axis that the body is not manual over."""
    return shard((x @ shard(w, "_ ff@tensor")).relu(), "_ ff@tensor") @ shard(v, "ff@tensor _")


def heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def pipeline(x: Tensor, w: Tensor) -> Tensor:
    """A GPipe of four stages: x `[microbatches, b, d]` goes through every stage's w in turn."""
    n, at = sl.axis_size("tensor"), sl.axis_index("tensor")
    state, out = torch.zeros_like(x[0]), []
    for i in range(len(x) + n - 1):
        state = torch.where(at == 0, x[min(i, len(x) - 1)], state)
        state = (state @ w[0]).tanh()
        out.append(state)
        state = sl.ppermute(state, "tensor", [(j, j + 1) for j in range(n - 1)])
    last = torch.stack(out[n - 1 :])
    return sl.psum(torch.where(at == n - 1, last, torch.zeros_like(last)), "tensor")


def stages(x: Tensor, w: Tensor) -> Tensor:
    for stage in w:
        x = (x @ stage).tanh()
    return x


def experts(x: Tensor, w: Tensor) -> Tensor:
    mine = sl.all_to_all(x, "tensor", 0, 0)
    return sl.all_to_all((mine @ w[0]).tanh(), "tensor", 0, 0)


def experts_whole(x: Tensor, w: Tensor) -> Tensor:
    routed = x.view(4, 4, -1, x.shape[-1])  # device, expert, token, d
    return torch.einsum("netd,edf->netf", routed, w).tanh().reshape(x.shape)


def softmax(x: Tensor) -> Tensor:
    e = (x - sl.pmax(x.detach().amax(-1, keepdim=True), "tensor")).exp()
    return e / sl.psum(e.sum(-1, keepdim=True), "tensor")


def row_slopes(x: Tensor) -> Tensor:
    """A vmap and a gradient of its own inside the body; every device differentiates the sum of all, so 4 times."""
    rows = torch.func.vmap(lambda row: sl.all_gather(row, "tensor").sin())(x)
    return rows + sl.all_gather(torch.func.grad(lambda x: sl.psum(x * x, "tensor").sum())(x), "tensor", 1)


@dataclass(frozen=True)
class Case:
    """`body`, manual over `axes`, computes `whole` of arguments of `shapes`, placed as `at` says (None: plain)."""

    axes: tuple[str, ...]
    body: Callable[..., Tensor]
    whole: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    in_specs: Any
    out_specs: Any
    sent: Any  # what a forward pass sends: kind, axes and wire bytes per device of float64
    at: tuple[str | None, ...] = ()
    check: bool = True


D, T, DT = ("data",), ("tensor",), ("data", "tensor")
X, W, V = (8, 16), (16, 32), (32, 16)
CASES = {
    "no collective": Case(
        D, torch.matmul, torch.matmul, (X, W), ("b@data _", "_ _"), "b@data _", [], (None, "_ _@tensor"),
    ),
    "P": Case(D, torch.matmul, torch.matmul, (X, W), (P("data"), P()), P("data"), []),
    "by the compiler": Case(
        D, mlp, mlp, (X, W, V), ("b@data _", "_ _", "_ _"), "b@data _",
        [("all_reduce", T, 4 * 16 * 8 * 2 * 3 / 4)], (None, "_ ff@tensor", "ff@tensor _"),
    ),
    "by shard in the body": Case(
        D, annotated, mlp, (X, W, V), ("b@data _", "_ _", "_ _"), "b@data _",
        [("all_reduce", T, 4 * 16 * 8 * 2 * 3 / 4)],
    ),
    "psum": Case(
        D, lambda x, w: sl.psum(x @ w, "data"), torch.matmul, (X, W), ("_ k@data", "k@data _"), "_ _",
        [("all_to_all", D, 8 * 8 * 8 / 2)], (None, "_ _@tensor"),  # nobody says where the result lives
    ),
    "psum of what is the same": Case(
        D, lambda x: sl.psum(x, "data"), lambda x: 2 * x, (X,), "_ _", "_ _", [],
    ),
    "pmean of a scalar": Case(
        D, lambda x: sl.pmean(x.mean(), "data"), torch.mean, (X,), "b@data _", "", [("all_reduce", D, 8)],
    ),
    "all_gather": Case(
        D, lambda x, w: x @ sl.all_gather(w, "data"), torch.matmul, (X, W), ("b@data _", "k@data _"), "b@data _",
        [("all_gather", D, 16 * 8 * 8 / 2)], (None, "_ _@tensor"),
    ),
    "all_gather, stacked": Case(
        D, lambda x: sl.all_gather(x, "data", dim=-1, tiled=False), lambda x: torch.stack(x.chunk(2), -1), (X,),
        "b@data _", "_ _ _", [("all_gather", D, 8 * 16 * 8 / 2)],
    ),
    "reduce_scatter": Case(
        D, lambda x, w: sl.reduce_scatter(x @ w, "data", 1), torch.matmul, (X, W), ("_ k@data", "k@data _"), "_ n@data",
        [("reduce_scatter", D, 8 * 16 * 8)],
    ),
    "all_to_all": Case(
        D, lambda x: sl.all_to_all(x, "data", 1, 0), lambda x: x, (X,), "b@data _", "_ c@data",
        [("all_to_all", D, 4 * 16 * 8 / 2)],
    ),
    "experts": Case(
        T, experts, experts_whole, ((32, 3), (4, 3, 3)), ("t@tensor _", "e@tensor _ _"), "t@tensor _",
        [("all_to_all", T, 8 * 3 * 8 * 3 / 4)] * 2,
    ),
    "ppermute": Case(
        T, lambda x: sl.ppermute(x, "tensor", [(i, (i + 1) % 4) for i in range(4)]), lambda x: x.roll(2, 0), (X,),
        "b@tensor _", "b@tensor _", [("ppermute", T, 2 * 8 * 8)], ("_ _@data",),
    ),
    "pipeline": Case(
        T, pipeline, stages, ((5, 4, 64), (4, 64, 64)), ("_ _ _", "s@tensor _ _"), "_ _ _",
        [("ppermute", T, 2 * 64 * 8)] * 7 + [("all_reduce", T, 5 * 2 * 64 * 8 * 2 * 3 / 4)], ("_ b@data _", None),
    ),
    "softmax": Case(
        T, softmax, lambda x: x.softmax(-1), (X,), "_ k@tensor", "_ k@tensor",
        [("all_reduce", T, 4 * 8 * 2 * 3 / 4)] * 2, ("b@data k@tensor",),
    ),
    "attention": Case(
        D, heads, heads, ((4, 8, 6, 2),) * 3, "b@data _ _ _", "b@data _ _ _", [], ("_ h@tensor _ _",) * 3,
    ),
    "axis_index": Case(
        D, lambda x: x * (1 + sl.axis_index("data")), lambda x: x * torch.tensor([1, 2]).repeat_interleave(4)[:, None],
        (X,), "b@data _", "b@data _", [],
    ),
    "vmap and grad inside": Case(
        T, row_slopes, lambda x: x.sin() + 8 * x, (X,), "_ k@tensor", "_ _",
        None,
    ),
    "factors": Case(
        D, torch.sin, torch.sin, (X,), "(b@data c=2) _", "(b@data c=2) _", [],
    ),
    "check=False": Case(
        D, lambda x: sl.ppermute(sl.psum(x, "data"), "data", [(0, 1), (1, 0)]), lambda x: x[:, :8] + x[:, 8:], (X,),
        "_ k@data", "_ _", None, check=False,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _double() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def _whole(x: Any) -> Any:
    return torch.utils._pytree.tree_map_only(ShardedTensor, lambda t: t.full_tensor(), x)


def _same(found: Any, expected: Any) -> None:
    """What small elements are sums of may be as large as the largest of them."""
    largest = max(float(x.abs().max()) for x in torch.utils._pytree.tree_leaves(expected))
    torch.testing.assert_close(_whole(found), expected, rtol=1e-12, atol=1e-12 * max(1.0, largest))


def _args(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    plain = [torch.randn(shape) for shape in case.shapes]
    at = case.at or (None,) * len(plain)
    return plain, [x if spec is None else shard(x, spec) for x, spec in zip(plain, at, strict=True)]


def _weighed(fn: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """A number that weighs every element of the result differently."""
    out = fn(*args)
    return ((out * torch.linspace(1, 2, out.numel(), dtype=out.dtype).view(out.shape)) ** 2).sum()


@pytest.mark.sampled(17)
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # attention, plainly, for all devices at once
@pytest.mark.parametrize("mode", ["one device", "jit", "eager"])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, mode: str) -> None:
    case = CASES[name]
    with Mesh(**MESH):
        plain, placed = _args(case)
        mapped = manual(*case.axes, check=case.check)(case.body, case.in_specs, case.out_specs)
        every = tuple(range(len(plain)))
        slopes = torch.func.grad(lambda *args: _weighed(mapped, *args), every)
        expected = torch.func.grad(lambda *args: _weighed(case.whole, *args), every)(*plain)
        if mode == "one device":
            with single_device():
                _same(mapped(*plain), case.whole(*plain))
                _same(slopes(*plain), expected)
        else:
            run = sl.jit if mode == "jit" else (lambda fn: fn)
            _same(run(mapped)(*placed), case.whole(*plain))
            _same(run(slopes)(*placed), expected)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.sent is not None])
def test_sent(name: str) -> None:
    case = CASES[name]
    with Mesh(**MESH):
        _, placed = _args(case)
        plan = sl.jit(manual(*case.axes)(case.body, case.in_specs, case.out_specs)).plan(*placed)
    assert [(c.kind, c.axes, c.bytes) for c in plan.collectives] == case.sent


def test_pending_sums_are_one() -> None:
    """What the compiler owes over its axes and what psum adds over the body's is one all_reduce."""
    with Mesh(**MESH):
        w, v = shard(torch.randn(W), "_ ff@tensor"), shard(torch.randn(V), "ff@tensor _")
        mapped = manual("data")(lambda *args: sl.psum(mlp(*args), "data"), ("b@data _", "_ _", "_ _"), "_ _")
        plan = sl.jit(mapped).plan(torch.randn(X), w, v)
    assert [(c.kind, c.axes, c.bytes) for c in plan.collectives] == [
        ("all_reduce", ("data", "tensor"), 4 * 16 * 8 * 2 * 7 / 8)
    ]


def test_gradients_of_weights() -> None:
    """Of a weight that the body's axis does not cut: one all_reduce of the piece that the compiler's axis leaves."""
    with Mesh(**MESH):
        x, w = torch.randn(X), shard(torch.randn(W), "_ ff@tensor")
        mapped = manual("data")(torch.matmul, ("b@data _", "_ _"), "b@data _")
        plan = sl.jit(torch.func.grad(lambda w, x: _weighed(mapped, x, w))).plan(w, x)
        assert [(c.kind, c.axes, c.bytes) for c in plan.collectives] == [("all_reduce", D, 16 * 8 * 8 * 2 / 2)]
        w.requires_grad_()
        _weighed(mapped, x, w).backward()
        whole = w.detach().full_tensor()
        _same(w.grad, torch.func.grad(lambda w: _weighed(torch.matmul, x, w))(whole))


def test_gradient_of_all_gather() -> None:
    """It is scattered while it is summed, at the place of the piece."""
    with Mesh(**MESH):
        mapped = manual("data")(lambda x, w: x @ sl.all_gather(w, "data"), ("b@data _", "k@data _"), "b@data _")
        plan = sl.jit(torch.func.grad(lambda w, x: _weighed(mapped, x, w))).plan(torch.randn(W), torch.randn(X))
    half = 16 * 32 * 8 / 2
    assert [(c.kind, c.axes, c.bytes) for c in plan.collectives] == [
        ("all_gather", D, half),
        ("reduce_scatter", D, half),
    ]


def test_every_axis_named_is_a_body_of_one_device() -> None:
    """With nothing left to the compiler the body runs as it is written, and holds local tensors alone."""
    with Mesh(**MESH):
        mapped = manual("tensor", "data")(lambda x: sl.psum(x.sum(), DT), "b@data c@tensor", "")
        plan = sl.jit(mapped).plan(torch.randn(X))
    assert "written in a shard_map body" in plan.collectives[0].reason


@pytest.mark.long
def test_several_axes() -> None:
    """Manual over two of three axes: jointly numbered groups, values that vary over one of them, and a ragged rest."""
    x, w = torch.randn(8, 5), torch.randn(5, 7)

    def body(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y = x @ w
        at = sl.axis_index(("b", "a"))
        both = sl.all_gather(y, ("b", "a"))
        far = sl.ppermute(y, ("a", "b"), [(i, (i + 1) % 4) for i in range(4)])
        return both, sl.psum(y, "b"), far, y * at

    def whole(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = (x @ w).view(2, 2, 2, 7)  # a, b, rows
        at = torch.tensor([[0, 2], [1, 3]]).view(2, 2, 1, 1)
        both, summed, far = y.transpose(0, 1).reshape(8, 7), y.sum(1).flatten(0, 1), (x @ w).roll(2, 0)
        return both, summed, far, (y * at).reshape(8, 7)

    with Mesh(a=2, c=2, b=2):
        cut = "n@(a b) _"
        mapped = manual("a", "b")(body, (cut, "_ _"), ("_ _", "n@a _", cut, cut))
        for w_at in (w, shard(w, "_ _@c")):
            _same((mapped if w_at is w else sl.jit(mapped))(x, w_at), whole(x, w))
            slope = torch.func.grad(lambda x, w: sum((o**2).sum() for o in mapped(x, w)), (0, 1))
            expected = torch.func.grad(lambda x, w: sum((o**2).sum() for o in whole(x, w)), (0, 1))(x, w)
            _same(sl.jit(slope)(x, w_at), expected)


def test_a_group_with_an_axis_between() -> None:
    """One group over two axes, of values that vary over a third, which stands between them."""
    x = torch.randn(8, 3)
    with Mesh(a=2, b=2, c=2, d=1):
        cut = "n@(a b c) _"
        mapped = manual("a", "b", "c")(
            lambda x: sl.ppermute(x, ("a", "c"), [(i, (i + 1) % 4) for i in range(4)]), cut, cut
        )
        groups = x.view(2, 2, 2, 3).transpose(1, 2).flatten(0, 1)  # (a c), b
        _same(sl.jit(mapped)(x), groups.roll(1, 0).view(2, 2, 2, 3).transpose(1, 2).reshape(8, 3))


def test_one_in_another() -> None:
    """The axes that are left may be manual in a body inside; collectives there run over both bodies' axes."""

    def inner(x: Tensor) -> Tensor:
        return sl.psum(x.sum(1), ("data", "tensor")) * (1 + sl.axis_index("data"))

    def outer(x: Tensor) -> Tensor:
        return manual("tensor")(inner, "_ c@tensor", "_")(x * 2)

    x = torch.randn(X)
    with Mesh(**MESH):
        mapped = manual("data")(outer, "b@data _", "b@data")
        total = 2 * x.view(2, 4, 16).sum((0, 2))
        _same(sl.jit(mapped)(x), torch.cat([total, 2 * total]))
        _same(mapped(x), torch.cat([total, 2 * total]))


def test_around_and_inside() -> None:
    """vmap around, scan and pytrees inside, a method, arguments by name."""

    class Layer:
        @sl.shard_map(in_specs={"p": {"w": "_ _"}, "x": "b@data _"}, out_specs={"y": "b@data _"}, axis_names=["data"])
        def __call__(self, x: Tensor, p: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"y": sl.scan(lambda h, _: ((h @ p["w"]).tanh(), None), x, length=3)[0]}

    x, w = torch.randn(2, 4, 3), torch.randn(3, 3)
    expected = x
    for _ in range(3):
        expected = (expected @ w).tanh()
    with Mesh(**MESH):
        run = sl.vmap(lambda x: Layer()(x, p={"w": w})["y"])
        _same(sl.jit(run)(x), expected)
        _same(Layer()(x[0], p={"w": w}), {"y": expected[0]})
        slope = torch.func.grad(lambda w: (Layer()(x[0], p={"w": w})["y"] ** 2).sum())

        def plain(w: Tensor) -> Tensor:
            h = x[0]
            for _ in range(3):
                h = (h @ w).tanh()
            return (h**2).sum()

        _same(sl.jit(slope)(w), torch.func.grad(plain)(w))


def test_backward_through_a_module() -> None:
    """Parameters that the body closes over have gradients, in jit and outside."""
    net, x = torch.nn.Linear(16, 4), torch.randn(X)
    expected = torch.autograd.grad((net(x) ** 2).mean(), list(net.parameters()))
    with Mesh(**MESH):
        mapped = manual("data")(lambda x: sl.pmean((net(x) ** 2).mean(), "data"), "b@data _", "")

        def step(x: Tensor) -> Tensor:
            loss: Tensor = mapped(x)
            loss.backward()
            return loss

        for run in (sl.jit(step), lambda x: sl.jit(mapped)(x).backward(), lambda x: mapped(x).backward()):
            net.zero_grad(set_to_none=True)
            run(x)
            _same([p.grad for p in net.parameters()], list(expected))


def test_memory_of_its_own() -> None:
    """What a body writes to its arguments stays there, whether they are cut or not."""
    x, y = torch.ones(X), torch.ones(3)
    with Mesh(**MESH):
        mapped = manual("data")(lambda x, y: x.mul_(2) + y.add_(1).sum(), ("b@data _", "_"), "b@data _")
        for run in (sl.jit(mapped), mapped):
            _same(run(x, y), torch.full(X, 8.0))
        with single_device():
            _same(mapped(x, y), torch.full(X, 8.0))
    _same([x, y], [torch.ones(X), torch.ones(3)])


def _again(x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(lambda x: x.sin().sin(), x, use_reentrant=False)  # type: ignore[no-any-return]


def test_checkpoints() -> None:
    """Around the body, in a scan inside, and in the body itself."""
    x, data = torch.randn(X), manual("data")
    expected = torch.func.grad(lambda x: (x.sin().sin() ** 2).sum())(x)
    with Mesh(**MESH):
        around = data(lambda x: sl.pmean(x.sin().sin(), "data"), "_ _", "_ _")
        inside = data(lambda x: sl.scan(lambda h, _: (_again(h), None), x, length=1)[0], "b@data _", "b@data _")
        own = data(_again, "b@data _", "b@data _")
        for fn in (lambda x: torch.utils.checkpoint.checkpoint(around, x, use_reentrant=False), inside, own):
            _same(sl.jit(sl.grad(lambda x, fn=fn: (fn(x) ** 2).sum()))(x), expected)


def test_numbers() -> None:
    """Numbers go through a body: one program for all of them."""
    x = torch.randn(X)
    with Mesh(**MESH):
        step = sl.jit(manual("data")(lambda x, a: sl.psum(x.sum(0) * a, "data"), ("b@data _", None), "_"))
        for a in (0.5, 2.0):
            _same(step(x, a), x.sum(0) * a)
    assert not step.retraces


# --- refusals ---------------------------------------------------------------------------------------------------------


def _same_body(x: Tensor) -> Tensor:
    return x


NOT_MANUAL = (
    "Rule: the specs say how axis_names, 'data', cut the tensors; how other axes do is left to the compiler\n"
    "Remedy: leave that dim whole in the spec; shard(x, spec), outside the body or in it, says what cuts it"
)
BAD = {
    "in_specs": (
        D, _same_body, "b@data c@tensor", "b@data _",
        "shard_map(_same_body) in_specs name axes over which the body is not manual:\n"
        f"  * args[0] of shape [8, 16] with spec 'b@data c@tensor' names 'tensor'\n{NOT_MANUAL}",
    ),
    "in_specs, P": (D, _same_body, P("data", "tensor"), P("data"), "with spec \"P('data', 'tensor')\" names 'tensor'"),
    "in_specs, by a rule": (D, _same_body, "b@data ff", "b@data _", "with spec 'b@data ff' names 'tensor'"),
    "out_specs": (
        D, _same_body, "b@data _", "b@data c@tensor",
        "shard_map(_same_body) out_specs name axes over which the body is not manual:\n"
        "  * result of shape [4, 16] with spec 'b@data c@tensor' names 'tensor'",
    ),
    "unknown axis": (
        ("dta",), _same_body, "_ _", "_ _",
        "shard_map(_same_body) is manual over ['dta'], on Mesh(data=2, tensor=4):\n  * the mesh has no axis 'dta'\n"
        "Rule: axis_names are axes of the mesh; the others are left to the compiler\nRemedy: use axes of data, tensor",
    ),
    "no axis": ((), _same_body, "_ _", "_ _", "shard_map(_same_body) is manual over no axis"),
    "uneven": (D, _same_body, "b@data=[5 3] _", "b@data _", "dim 0 has pieces of 5, 3"),
    "a collective over the others": (
        D, lambda x: sl.psum(x, "tensor"), "b@data _", "b@data _",
        "psum over 'tensor':\n  * axis 'tensor' is left to the compiler\n"
        "Rule: a collective runs over one mesh axis, or several distinct ones, major first: those that the shard_map "
        "is manual over\nRemedy: use axes of data",
    ),
    "shard over a manual axis": (
        D, lambda x: shard(x, "_ _@data"), "b@data _", "b@data _",
        "shard(x, '_ _@data') on shape [4, 16] is inside a shard_map that is manual over 'data':\n  * it names 'data'\n"
        "Rule: along its manual axes a body holds one device's piece; the compiler places it over the other axes\n"
        "Remedy: name axes of tensor",
    ),
    "claim": (
        D, lambda x: x.sum(0), "b@data _", "_",
        "out_specs leave out axes over which the devices' results differ:\n"
        "  * result of shape [16] with spec '_' varies over 'data' (2 devices)\n"
        "Rule: an axis that an out_spec does not name is one along which all devices return the same\n"
        "Remedy: name the axis in out_specs, or make the result the same: sl.psum(x, 'data'), pmean, pmax, all_gather; "
        "shard_map(..., check=False) where the devices do return the same, but by other means",
    ),
    "claim of an index": (D, lambda x: sl.axis_index("data"), "b@data _", "", "varies over 'data' (2 devices)"),
    "claim of a scattered sum": (
        D, lambda x: sl.reduce_scatter(x, "data"), "_ _", "_ _", "varies over 'data' (2 devices)",
    ),
    "twice": (
        D, lambda x: manual("data")(_same_body, "_ _", "_ _")(x), "b@data _", "b@data _",
        "shard_map(_same_body) is inside the body of another shard_map:\n  * axis 'data' is manual there already\n"
        "Rule: a body holds one device's piece along its manual axes: there is nothing left to cut\n"
        "Remedy: axis_names=('tensor',)",
    ),
    "random numbers": (D, torch.rand_like, "b@data _", "b@data _", "a shard_map body draws random numbers"),
    "debug_print": (
        D, lambda x: sl.debug_print("{}", x) or x, "b@data _", "b@data _",
        "debug_print('{}') is inside a shard_map body",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mode", ["jit", "eager"])
@pytest.mark.parametrize("name", BAD)
def test_refused(name: str, mode: str) -> None:
    axes, body, in_specs, out_specs, text = BAD[name]
    with Mesh(**MESH, rules={"ff": "tensor"}) if "rule" in name else Mesh(**MESH):
        mapped = manual(*axes)(body, in_specs, out_specs)
        with pytest.raises(ShardingError) as error:
            (sl.jit(mapped) if mode == "jit" else mapped)(torch.ones(X))
    assert text in str(error.value)


# --- ranks ------------------------------------------------------------------------------------------------------------


def _on_ranks() -> list[list[float]]:
    torch.manual_seed(0)
    x, w = torch.randn(8, 16, dtype=torch.float64), torch.randn(16, 8, dtype=torch.float64)
    with Mesh(data=2, tensor=2):

        def body(x: Tensor, w: Tensor) -> Tensor:
            y = sl.psum(x @ sl.all_gather(w, "data"), "data")
            return y + sl.ppermute(y, "data", [(0, 1), (1, 0)])

        mapped = manual("data", check=False)(body, ("b@data _", "k@data _"), "_ _")
        slope = sl.jit(torch.func.grad(lambda w: _weighed(mapped, x, w)))
        out = [mapped(x, w), sl.jit(mapped)(x, shard(w, "_ _@tensor")), slope(shard(w, "_ _@tensor"))]
        return [o.full_tensor().flatten().tolist() for o in out]


@pytest.mark.long
@pytest.mark.ranks
def test_ranks() -> None:
    virtual = _on_ranks()
    assert all(found == virtual for found in run_ranks(_on_ranks, 4))
