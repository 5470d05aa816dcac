"""Halos: what devices fetch of each other, and convolutions and pools whose spatial dims are cut."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils import _pytree as pytree

import shardlib as sl
from shardlib import Mesh, P, shard
from shardlib.compiler.codegen import virtual
from shardlib.compiler.graph.ir import Op
from shardlib.compiler.lower.builder import Builder
from shardlib.compiler.lower.emit import Emitter
from shardlib.compiler.lower.local_forms.local_builder import LocalForm
from shardlib.compiler.program.steps import Var
from shardlib.compiler.program.sym_int import local_value
from shardlib.core.context import single_device
from shardlib.rules.local_forms.halo import add_to_owners, crop_or_pad, fetch, intersect, length
from shardlib.rules.rule import Call, Rule
from shardlib.sharding.layout import Factor, Layout, shard_range
from shardlib.sharding.mesh.axis import Axis
from shardlib.testing.check import run_unshared
from tests.helpers.ranks import run_ranks
from tests.validation.programs.campaign import broken_promise, counting

aten = torch.ops.aten


def r(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


# The primitive --------------------------------------------------------------------------------------------------------

LABELS = (("h",), ())
Ranges = list[tuple[int, int]]


class Ring:
    """A tensor `[size, 1]` whose rows are cut over `n` devices."""

    def __init__(self, size: int, n: int) -> None:
        self.x, self.n, axes = r(size, 1), n, (Axis("a", n),)
        self.devices = [{"a": i} for i in range(n)]
        self.mine = [shard_range(size, axes, c) for c in self.devices]
        self.mesh = Mesh.abstract(a=n)
        self.builder = Builder(self.mesh)
        rule = Rule((LABELS,), (LABELS,), {"h": size})
        call = Call(aten.log_sigmoid_forward.default, (), {}, (), ())  # an op whose results have any shape
        op = Op("x", call, rule, (), (), fx.Graph().placeholder("x"), None, False)
        propagation = SimpleNamespace(labels={op: {"h": ["h"]}}, dims=SimpleNamespace(size=lambda _: size))
        self.local = LocalForm(Emitter(self.builder, propagation), op, {("h", 0): axes}, (), {})
        self.cut = Layout(((Factor(size, axes),), (Factor(1),)))

    def by_device(self, ranges: Ranges) -> list[Any]:
        """Both ends of these, on the devices."""
        return [self.local.calc(lambda at, k=k: ranges[at][k], self.local.position("h")) for k in (0, 1)]

    def run(self, form: Any, start: list[Tensor], layout: Layout, *ranges: Ranges) -> list[Tensor]:
        """What a local form makes of the rows that devices have at the start, and of ranges."""
        x = Var("start", layout, torch.float64)
        self.builder.inputs.append(x)
        self.builder.outputs.append(self.local.run(form, x, *map(self.by_device, ranges)))
        program = self.builder.finish()
        self.messages = [self._sizes(c) for c in program.collectives]
        (found,) = virtual.load(program, self.mesh, share=False)([tuple(start)])
        return list(found)

    def _sizes(self, c: Any) -> list[int]:
        """Numbers in each message."""
        one = [int(c.bytes) // 8] * self.n
        shapes = c.params.get("shapes")
        if shapes is not None:
            one = [math.prod(local_value(n, at) for n in shape) for shape, at in zip(shapes, self.devices, strict=True)]
        return [one[source] for source, _ in c.params["pairs"]]


def some_range(rng: random.Random, size: int, n: int) -> Ranges:
    low = [rng.randint(-2, size + 1) for _ in range(n)]
    return [(a, a + rng.randint(0, size + 2)) for a in low]


CASES = [(size, n, seed) for size in (1, 3, 6, 9) for n in (2, 3, 5) for seed in range(3)]


@pytest.mark.parametrize(("size", "n", "seed"), CASES)
def test_any_range_is_fetched_and_nothing_else_is_sent(size: int, n: int, seed: int) -> None:
    ring, rng = Ring(size, n), random.Random(seed)
    need = some_range(rng, size, n)
    frame = [(a - rng.randint(0, 2), b + rng.randint(0, 2)) for a, b in need]
    within = lambda need: intersect((0, size), need)
    form = lambda x, need, frame: crop_or_pad(*fetch(x, 0, ("h",), [within(need)], "x"), 0, within(need), frame, 7.0)
    found = ring.run(form, [ring.x[a:b] for a, b in ring.mine], ring.cut, need, frame)
    for x, (a, b), (low, high) in zip(found, need, frame, strict=True):
        rows = [ring.x[i, 0] if a <= i < b and 0 <= i < size else torch.tensor(7.0) for i in range(low, high)]
        assert x.flatten().tolist() == [float(row) for row in rows]
    whole = [intersect((0, size), wanted) for wanted in need]
    foreign = [(b - a) - (d - c) for (a, b), (c, d) in zip(whole, map(intersect, ring.mine, need), strict=True)]
    assert sum(map(sum, ring.messages)) == sum(foreign)
    assert all(0 not in rows for rows in ring.messages)
    assert len(ring.messages) < n, "a ring of n turns n - 1 times at most, so that no fetch exceeds a gather"


def test_a_form_records_two_functions_of_one_argument() -> None:
    """The recordings of one form are told apart by their order."""
    ring, start = Ring(4, 2), [r(2, 1), r(2, 1)]
    x = Var("start", ring.cut, torch.float64)
    ring.builder.inputs.append(x)
    ring.builder.outputs += [ring.local.run(form, x) for form in (lambda x: x + 1, lambda x: x * 2)]
    more, twice = virtual.load(ring.builder.finish(), ring.mesh, share=False)([tuple(start)])
    for i, own in enumerate(start):
        assert torch.equal(more[i], own + 1)
        assert torch.equal(twice[i], own * 2)


@pytest.mark.parametrize(("size", "n", "seed"), CASES)
def test_giving_back_is_the_transpose(size: int, n: int, seed: int) -> None:
    ring, rng = Ring(size, n), random.Random(seed)
    need = some_range(rng, size, n)
    given = [r(2 * size + 4, 1) for _ in need]
    form = lambda x, need: add_to_owners(x.narrow(0, 0, length(need)), 0, ("h",), need, size)
    found = ring.run(form, given, Layout.replicated((2 * size + 4, 1)), need)
    expected = torch.zeros(size, 1, dtype=torch.float64)
    for x, (a, b) in zip(given, need, strict=True):
        low, high = intersect((0, size), (a, b))
        expected[low:high] += x[low - a : high - a]
    assert torch.allclose(torch.cat(found), expected, atol=1e-12)


# What a plan shows ----------------------------------------------------------------------------------------------------


def kinds(plan: Any) -> Counter[str]:
    return Counter(c.kind for c in plan.collectives)


def planned(fn: Any, args: Any, **mesh: int) -> Any:
    with Mesh(**mesh):
        return sl.jit(fn).plan(*args)


ROW = 2 * 8 * 32 * 8  # bytes of one row of the input below


@pytest.mark.parametrize(
    ("kernel", "how", "n", "messages", "rows"),
    [
        (1, {}, 4, 0, 0),
        (3, {"padding": 1}, 4, 2, 2),
        (3, {"padding": 1}, 2, 1, 1),
        (3, {"padding": 2, "dilation": 2}, 4, 2, 4),
        (5, {"padding": 2}, 8, 2, 4),
        (2, {"stride": 2}, 4, 0, 0),
        (3, {"stride": 2, "padding": 1}, 4, 1, 1),
        (2, {"stride": 4}, 4, 0, 0),
        (7, {"padding": 3}, 32, 4, 6),
        (33, {"padding": 16}, 4, 2, 32),
    ],
)
def test_a_cut_convolution_sends_its_borders(kernel: int, how: Any, n: int, messages: int, rows: int) -> None:
    x, w = r(2, 8, 64, 32), torch.empty(16, 8, kernel, 1, dtype=torch.float64)
    how = {k: (v, 1 if k != "padding" else 0) for k, v in how.items()}
    plan = planned(lambda x, w: F.conv2d(shard(x, "n c h@a w"), w, **how), (x, w), a=n)
    assert kinds(plan) == ({"ppermute": messages} if messages else {})
    assert plan.comm_bytes == rows * ROW
    assert plan.compiled.program.outputs[0].layout.dims[2][0].ways == n


def test_the_gradients_of_a_convolution_cost_one_more_exchange() -> None:
    def fn(x: Tensor, w: Tensor) -> Any:
        y = lambda x, w: F.conv2d(shard(x, "n c h@a w"), w, padding=1)
        dx, dw = torch.func.grad(lambda *t: y(*t).square().sum(), (0, 1))(x, w)
        return shard(dx, "n c h@a w"), dw

    x, w = r(2, 8, 64, 32), r(8, 8, 3, 3)
    plan = planned(fn, (x, w), a=4)
    assert kinds(plan) == {"ppermute": 4, "all_reduce": 1}
    assert sum(c.bytes for c in plan.collectives if c.kind == "ppermute") == 4 * ROW
    said = [c.reason for c in plan.collectives if c.kind == "ppermute"]
    assert all("h exchanged at the borders, inside convolution" in text for text in said)
    assert "ppermute[a] gradient" in plan.full


@pytest.mark.parametrize("pool", [F.max_pool2d, F.avg_pool2d])
def test_windows_that_lie_side_by_side_send_nothing(pool: Any) -> None:
    def fn(x: Tensor) -> Any:
        y = lambda x: pool(shard(x, "n c h@a w@b"), 2)
        return y(x), shard(torch.func.grad(lambda x: y(x).square().sum())(x), "n c h@a w@b")

    plan = planned(fn, (r(2, 8, 64, 32),), a=4, b=2)
    assert not kinds(plan)


def test_overlapping_windows_give_back_their_gradients() -> None:
    def fn(x: Tensor) -> Any:
        y = lambda x: F.max_pool2d(shard(x, "n c h@a w"), 3, 2, 1)
        return y(x), shard(torch.func.grad(lambda x: y(x).square().sum())(x), "n c h@a w")

    plan = planned(fn, (r(2, 8, 64, 32),), a=4)
    assert [c.bytes for c in plan.collectives] == [ROW, ROW]
    assert kinds(plan) == {"ppermute": 2}


def test_small_planes_are_gathered_instead() -> None:
    """A message costs more than a few numbers do."""
    plan = planned(lambda x, w: F.conv2d(shard(x, "n c h@a w"), w), (r(1, 1, 5, 1), r(1, 1, 4, 1)), a=4)
    assert set(kinds(plan)) <= {"all_gather"}


# The same as on one device --------------------------------------------------------------------------------------------


def params(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {k: 0.3 * torch.randn(n, dtype=torch.float64, generator=g) for k, n in shapes.items()}


CNN = params({"w1": (8, 4, 3, 3), "b1": (8,), "w2": (6, 8, 3, 3), "b2": (6,), "linear": (5, 6 * 4 * 4)})
UNET = params(
    {
        "in": (4, 3, 3, 3),
        "down": (6, 4, 3, 3),
        "depth": (6, 1, 3, 3),
        "up": (6, 4, 3, 3),
        "bias": (4,),
        "out": (2, 8, 3, 3),
    }
)


def cnn(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Convolution, batch norm, pool, convolution, linear."""
    y = F.conv2d(x, p["w1"], p["b1"], padding=1)
    y = F.batch_norm(y, None, None, training=True).relu()
    y = F.conv2d(F.max_pool2d(y, 3, 2, 1), p["w2"], p["b2"], stride=2, padding=1).relu()
    return F.cross_entropy(y.flatten(1) @ p["linear"].t(), torch.arange(len(x)) % 5)


def unet(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """One level down and up again, at odd sizes, with a skip and a depthwise convolution in the middle."""
    y = F.conv2d(x, p["in"], padding=1).tanh()
    z = F.conv2d(y, p["down"], stride=2).tanh()
    z = F.conv2d(z, p["depth"], padding=2, dilation=2, groups=6)
    z = F.conv_transpose2d(z, p["up"], p["bias"], stride=2, output_padding=(0, 1))
    y = F.conv2d(torch.cat([y, z], 1), p["out"], padding=1)
    return F.avg_pool2d(y, 2, ceil_mode=True).square().mean()


def trained(model: Any, spec: str) -> Any:
    """One step of gradient descent."""

    def step(p: dict[str, Tensor], x: Tensor) -> Any:
        grads, loss = torch.func.grad_and_value(lambda p: model(p, shard(x, spec)))(p)
        return {k: p[k] - 0.1 * grads[k] for k in p}, loss

    return step


def error(step: Any, args: Any, **mesh: int) -> float:
    """How far the sharded results are off; refuses a run whose communication differs from its plan."""
    with single_device():
        expected = pytree.tree_leaves(step(*args))
    with Mesh(**mesh) as devices:
        jitted = sl.jit(step)
        plan = jitted.plan(*args)
        assert not plan.replicated_ops
        with counting() as calls:
            found = run_unshared(jitted, devices, args, {})
        assert not broken_promise(plan.compiled.program.collectives, calls, devices)
    out = pytree.tree_leaves(found)
    return max(float((a.full_tensor() - b).abs().max()) for a, b in zip(out, expected, strict=True))


def specs(axes: str) -> list[str]:
    return [
        " ".join(f"{dim}@{axes[chosen.index(dim)]}" if dim in chosen else dim for dim in "nchw")
        for chosen in itertools.combinations("nchw", len(axes))
    ]


MESHES = [
    *[(spec, {"a": 4}) for spec in specs("a")],
    *[(spec, {"a": 2, "b": 2}) for spec in specs("ab")],
    *[(spec, {"a": 2, "b": 2, "c": 2}) for spec in specs("abc")],
    ("n c h@(b a) w", {"a": 2, "b": 3}),
]


@pytest.mark.long
@pytest.mark.sampled(11)
@pytest.mark.parametrize(("spec", "mesh"), MESHES, ids=lambda x: str(x))
def test_a_small_network_is_trained(spec: str, mesh: dict[str, int]) -> None:
    assert error(trained(cnn, spec), (CNN, r(4, 4, 16, 16)), **mesh) < 1e-12


@pytest.mark.long
@pytest.mark.sampled(7)
@pytest.mark.parametrize(("spec", "mesh"), MESHES[::2], ids=lambda x: str(x))
def test_down_and_up_again(spec: str, mesh: dict[str, int]) -> None:
    assert error(trained(unet, spec), (UNET, r(4, 3, 15, 14)), **mesh) < 1e-12


def test_a_cut_is_carried_from_size_to_size() -> None:
    """The result of every convolution has a size of its own; the annotation of the first input cuts them all."""

    def fn(x: Tensor, w: Tensor) -> Any:
        for _ in range(3):
            x = F.conv1d(x, w, stride=2).relu()
        return x

    x, w = torch.empty(1, 64, 4096, device="meta"), torch.empty(64, 64, 3, device="meta")
    with Mesh(a=4) as mesh:
        plan = sl.jit(fn, in_specs=(P(None, None, "a"), None)).plan(x, w)
        back = sl.jit(fn, out_specs=P(None, None, "a")).plan(x, w)
    assert mesh.size == 4
    assert kinds(plan) == {"ppermute": 3}
    assert str(plan.compiled.program.outputs[0].layout) == "1, 64, 511@a"
    assert "all_gather" not in kinds(back)


def test_the_older_form_of_the_op() -> None:
    """With its choice of kernels, which means nothing here."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        x = shard(x, "n c h@a w")
        return torch._convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, False, False, False, False)

    assert kinds(planned(fn, (r(2, 8, 64, 32), r(8, 8, 3, 3)), a=4)) == {"ppermute": 2}
    assert error(fn, (r(1, 2, 9, 4), r(3, 2, 3, 3)), a=4) < 1e-12


# Slices and their like ------------------------------------------------------------------------------------------------


def next_token(x: Tensor, w: Tensor, tokens: Tensor) -> Tensor:
    """The loss of a language model: logits without the last, labels without the first."""
    logits, tokens = shard(x, "b s@a e") @ w, shard(tokens, "b s@a")
    return F.cross_entropy(logits[:, :-1].reshape(-1, w.shape[1]), tokens[:, 1:].reshape(-1))


@pytest.mark.long
def test_labels_that_are_shifted_move_one_column() -> None:
    tokens = torch.randint(0, 7, (4, 1024))
    plan = planned(next_token, (r(4, 1024, 8), r(8, 64), tokens), a=4)
    assert kinds(plan) == {"ppermute": 1, "all_reduce": 2}
    assert sum(c.bytes for c in plan.collectives if c.kind == "ppermute") == 4 * tokens.itemsize
    step = lambda x, w, t: torch.func.grad_and_value(next_token, (0, 1))(x, w, t)
    assert error(step, (r(4, 22, 8), r(8, 7), tokens[:, :22]), a=4) < 1e-12


SHIFTS = {
    "difference": lambda x: x[1:] - x[:-1],
    "every third": lambda x: x[2:-1:3],
    "token shift": lambda x: torch.cat([x.new_zeros(1, 4), x[:-1]]),
    "class token": lambda x: torch.cat([x[:1] * 2, x]),
    "padding": lambda x: F.pad(x, (0, 0, 2, 1), value=1.5),
    "cropping": lambda x: F.pad(x, (0, 0, -3, 1)),
    "roll": lambda x: x.roll(-5, 0) * x,
    "halves": lambda x: torch.cat([-x[len(x) // 2 :], x[: len(x) // 2]]),
}


def test_constants_are_not_sent() -> None:
    """What every device can make itself is cut to what it needs where it is made."""

    def fn(x: Tensor) -> Tensor:
        return torch.cat([torch.zeros(5, 4), shard(x, "s@a e"), torch.ones(3, 4)])

    x = torch.randn(4096, 4)
    plan = planned(fn, (x,), a=4)
    assert kinds(plan) == {"ppermute": 2}
    rows = 3 + 1  # the second device wants three of the first, the third one of the last
    assert plan.comm_bytes == rows * 4 * x.itemsize
    assert error(fn, (torch.randn(23, 4),), a=4) == 0


@pytest.mark.long
@pytest.mark.sampled(5)
@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("n", [3, 4])
def test_what_moves_along_a_cut_dim(shift: str, n: int) -> None:
    f = SHIFTS[shift]

    def step(x: Tensor) -> Any:
        y = lambda x: f(shard(x, "s@a e"))
        return y(x), torch.func.grad(lambda x: y(x).square().sum())(x)

    assert error(step, (r(22, 4),), a=n) < 1e-12
    long = planned(step, (r(8192, 4),), a=4)
    assert "all_gather" not in kinds(long)


# Outside jit, and real processes --------------------------------------------------------------------------------------


def eager(spec: P) -> tuple[Tensor, Tensor]:
    x, w = r(2, 3, 9, 8).requires_grad_(), r(4, 3, 3, 3).requires_grad_()
    with Mesh(a=2, b=2):
        a, b = (shard(t.detach(), s).requires_grad_() for t, s in ((x, spec), (w, P())))
        for i, j in ((a, b), (x, w)):
            F.max_pool2d(F.conv2d(i, j, stride=2, padding=1), 2, return_indices=False).square().sum().backward()
        return a.grad.full_tensor() - x.grad, b.grad.full_tensor() - w.grad


@pytest.mark.long
@pytest.mark.parametrize("spec", [P(None, None, "a", "b"), P("a", None, "b"), P(None, "a", None, "b")], ids=str)
def test_outside_jit(spec: P) -> None:
    assert all(float(difference.abs().max()) < 1e-12 for difference in eager(spec))


def on_ranks(axes: dict[str, int], spec: str) -> float:
    torch.manual_seed(0)
    step, args = trained(unet, spec), (UNET, r(4, 3, 15, 14))
    with single_device():
        expected = pytree.tree_leaves(step(*args))
    with Mesh(axes):
        found = [x.full_tensor() for x in pytree.tree_leaves(sl.jit(step)(*args))]
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("axes", "spec"),
    [({"a": 2}, "n c h@a w"), pytest.param({"a": 2, "b": 2}, "n c h@a w@b", marks=pytest.mark.slow)],
)
def test_on_ranks(axes: dict[str, int], spec: str) -> None:
    assert max(run_ranks(on_ranks, math.prod(axes.values()), axes, spec)) < 1e-12


# What one block of a cut dim is ---------------------------------------------------------------------------------------

ONE: dict[str, Any] = {
    "select": lambda x: x[1],
    "slice": lambda x: x[1:2],
    "index": lambda x: x[[1, 2]],
    "gather": lambda x: x.gather(0, torch.tensor([[1, 2], [0, 1]])),
}


def signs(name: str, dtype: torch.dtype, n: int) -> bool:
    """Whether zeros keep their signs where `n` devices have a row between them."""
    x = torch.tensor([[1.0, 2.0], [-0.0, 3.0], [0.0, -0.0], [4.0, 5.0]])
    x = x if not dtype.is_complex else torch.complex(x, x.flip(1).t().reshape(4, 2))
    with Mesh(a=n):
        found = sl.jit(ONE[name], in_specs="h@a _")(x).full_tensor()
    with single_device():
        want = ONE[name](x)
    pairs = (torch.view_as_real(x) if dtype.is_complex else x for x in (found, want))
    return torch.equal(*map(torch.signbit, pairs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("name", ONE)
def test_zeros_keep_their_signs(name: str, dtype: torch.dtype) -> None:
    """One device has the row, the others add nothing: that is -0.0."""
    assert signs(name, dtype, 2)
    assert signs(name, dtype, 4)


@pytest.mark.ranks
@pytest.mark.parametrize("transport", ["shm", "torch"])
def test_zeros_keep_their_signs_on_ranks(transport: str) -> None:
    for name in ONE:
        assert all(run_ranks(signs_over, 4, name, transport))


def signs_over(name: str, transport: str) -> bool:
    """The same on ranks, by one transport."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDLIB_OPS", f"all_reduce={transport}")
        return signs(name, torch.complex64, 4)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.bool])
def test_what_cannot_be_added_up_is_whole(dtype: torch.dtype) -> None:
    x = torch.arange(8).reshape(4, 2).to(dtype)
    with Mesh(a=2):
        for fn in (lambda x: x[2], lambda x: x[3:4]):
            assert torch.equal(sl.jit(fn, in_specs="h@a _")(x).full_tensor().float(), fn(x).float())


def test_an_empty_operand_has_a_say_in_the_dtype() -> None:
    b, c = torch.arange(18).reshape(6, 3), torch.arange(15).reshape(5, 3)
    fn = lambda b, c: torch.cat([torch.tensor([]), b, c])
    with Mesh(a=2):
        found = sl.jit(fn, in_specs=("d@a _", "_ _"))(b, c).full_tensor()
    assert found.dtype == torch.float32
    assert torch.equal(found, fn(b, c))
