"""A jitted call takes part in autograd: the same gradients as plain torch, whatever stands before and behind it."""

from __future__ import annotations

import copy
import functools
import gc
import queue
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import shardlib as sl
from shardlib import Mesh, P, ShardedTensor, ShardingError, no_mesh
from shardlib.core.context import single_device
from shardlib.frontend.trace import trace
from shardlib.jit.global_random import plain_program
from tests.helpers.oracle import same

X = torch.arange(24, dtype=torch.float64).view(6, 4).sin()
W = torch.arange(12, dtype=torch.float64).view(4, 3).cos()


@pytest.fixture(autouse=True)
def mesh() -> Iterator[Mesh]:
    with Mesh(data=2, tensor=2, rules={"batch": "data", "ff": "tensor"}) as mesh:
        yield mesh


PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x.clone(),
    "replicated": lambda x: sl.shard(x, sl.P()),
    "rows": lambda x: sl.shard(x, "batch _"),
    "columns": lambda x: sl.shard(x, "_ ff"),
}


def linear(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def several(x: Tensor, w: Tensor) -> dict[str, Any]:
    y = x @ w
    return {"y": y, "loss": y.square().sum(), "n": 3, "top": y.argmax(1), "fixed": y.detach()}


def softly(x: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(torch.tanh(x @ w), torch.tensor([0, 1, 2, 0, 1, 2]))


def its_input(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x, w.t()


def unused(x: Tensor, w: Tensor) -> Tensor:
    return (w * 2).sum()


def in_place(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    y[1:3] *= 2
    y.add_(1)
    return y


def own_gradient(x: Tensor, w: Tensor) -> Tensor:
    return sl.grad(lambda w: (x @ w).square().sum())(w) * w


def looped(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.relu(x @ w @ w.t())
    return x


FUNCTIONS = [linear, several, softly, its_input, unused, in_place, own_gradient, looped]


def total(out: Any) -> Tensor:
    leaves = [y for y in torch.utils._pytree.tree_leaves(out) if isinstance(y, Tensor) and y.requires_grad]
    return sum(((i + 2) * y.square().sum() for i, y in enumerate(leaves)), torch.zeros((), dtype=torch.float64))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fn", FUNCTIONS)
@pytest.mark.parametrize("place", PLACES)
def test_gradients_through_a_call(fn: Any, place: str) -> None:
    """Before, behind and beside the call stand other ops; gradients are where their values are."""
    step = sl.jit(fn)

    def run(step: Any, x: Tensor, w: Tensor) -> Tensor:
        loss = total(step(x * 2, w + 1)) + w.sum() + (x * x).sum()
        loss.backward()
        return loss

    for _ in range(2):
        plain = [X.clone().requires_grad_(), W.clone().requires_grad_()]
        mine = [PLACES[place](X).requires_grad_(), PLACES["columns" if place == "columns" else "plain"](W)]
        mine[1].requires_grad_()
        same(run(step, *mine), run(fn, *plain))
        for a, b in zip(mine, plain, strict=True):
            same(a.grad, b.grad)
            assert type(a.grad) is type(a) or type(a) is Tensor
            if isinstance(a, ShardedTensor):
                assert a.grad.sharding.canonical == a.sharding.canonical


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_gradients_of_leaves(fn: Any) -> None:
    step = sl.jit(fn)
    for place in PLACES:
        plain = [X.clone().requires_grad_(), W.clone().requires_grad_()]
        mine = [PLACES[place](X).requires_grad_(), W.clone().requires_grad_()]
        same(step(*mine), fn(*plain))
        total(step(*mine)).backward(), total(fn(*plain)).backward()
        for a, b in zip(mine, plain, strict=True):
            assert (a.grad is None) == (b.grad is None)
            if b.grad is not None:
                same(a.grad, b.grad)


def test_a_result_that_nobody_uses_gives_no_gradient() -> None:
    v, w = sl.shard(X, "batch _").requires_grad_(), W.clone().requires_grad_()
    a, _ = sl.jit(lambda v, w: (w * 2, v * 3))(v, w)
    a.sum().backward()
    same(w.grad, torch.full_like(W, 2.0))
    assert v.grad is None


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


ZEROS: dict[str, Any] = {
    "to the power of 0": lambda w, n: ((w**0).sum(),),
    "of an argument": lambda w, n: ((w**n).sum(),),
    "beside another result": lambda w, n: ((w**0).sum(), (w * 2).sum()),
    "behind another op": lambda w, n: (((w * 2) ** 0.0).sum(), w),
    "sign": lambda w, n: (w.sign().sum(),),
    "times 0": lambda w, n: ((w * 0).sum(),),
    "nothing of it": lambda w, n: (w[:0].sum(),),
    "chosen nowhere": lambda w, n: (torch.where(w.detach() > 1e3, w, 1.0).sum(),),
    "none, says a Function": lambda w, n: (_Nothing.apply(w).sum(), (w * 2).sum()),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ZEROS)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_gradient_of_zeros_is_no_missing_one(name: str, sharded: bool) -> None:
    fn, x = ZEROS[name], torch.arange(8.0).view(4, 2) - 2

    def gradient(f: Any, w: Tensor, n: int) -> Any:
        return torch.autograd.grad(f(w, n)[0], w, allow_unused=True)[0]

    with Mesh(data=2):
        for n in (0, 2):
            one = gradient(fn, x.clone().requires_grad_(), n)
            w = (sl.shard(x, "_@data _") if sharded else x.clone()).requires_grad_()
            same(gradient(sl.jit(fn), w, n), one)


def test_hooks_run_once() -> None:
    for place in PLACES.values():
        w = nn.Parameter(place(torch.ones(4, 4)))
        w.register_hook(lambda g: g * 10)
        sl.jit(lambda x, w=w: (w * x).sum())(torch.ones(4, 4)).backward()
        same(w.grad, torch.full((4, 4), 10.0))
        w.grad = None
        sl.jit(lambda w: (w * 2).sum().backward())(w)
        same(w.grad, torch.full((4, 4), 20.0))


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook", "of a result"])
@pytest.mark.parametrize("closed", [True, False])
def test_hooks_are_the_callers_own(kind: str, closed: bool) -> None:
    seen: list[Any] = []
    w = nn.Parameter(torch.ones(4, 4))
    y = w * w if kind == "of a result" else w
    handle = getattr(y, "register_hook" if kind == "of a result" else kind)(seen.append)
    step = sl.jit(lambda: (y * 2).sum()) if closed else sl.jit(lambda y: (y * 2).sum())
    given = () if closed else (y,)
    step.plan(*given)
    assert not seen, "nothing of the trace"
    for count in (1, 1, 0):
        if not count:
            handle.remove()
        seen.clear()
        step(*given).backward(retain_graph=True)
        assert len(seen) == count


def _returned_with_a_history(c: Tensor, w: Tensor) -> Tensor:
    c.add_(w * 2)
    return w.sum()


@pytest.mark.parametrize(
    ("fn", "what"),
    [
        (_returned_with_a_history, "c is written to, and what is written has a history"),
        (lambda c, w: c.requires_grad_().sum() + w.sum(), "c has requires_grad=True now"),
        (lambda c, w: (w.register_hook(lambda g: g), w.sum())[1], "w has another hook now"),
        (lambda c, w: ((w * 1).sum() + (CLOSED["y"] * 2).sum()).backward(), "has a history outside the function"),
    ],
)
def test_what_autograd_knows_of_inputs_stays(fn: Any, what: str) -> None:
    root = torch.ones(4, requires_grad=True)
    CLOSED["y"] = root * 3
    c, w = torch.zeros(4), torch.ones(4, requires_grad=True)
    with pytest.raises(ShardingError, match=what):
        sl.jit(fn)(c, w)
    held = {"c": c, "w": w}
    with pytest.raises(ShardingError, match=r"history|requires_grad|hook"):
        sl.jit(lambda x: fn(held["c"], held["w"]))(X)
    assert (c.requires_grad, c.grad_fn, w.grad, root.grad, w._backward_hooks or None) == (False, None, None, None, None)


CLOSED: dict[str, Tensor] = {}


def test_going_back_into_a_history_outside_is_refused() -> None:
    root = torch.ones(4, requires_grad=True)
    with pytest.raises(ShardingError, match="y is a result of other ops, and backward"):
        sl.jit(lambda y: (y * 2).sum().backward())(root * 3)
    assert root.grad is None


def test_a_result_of_other_ops_that_is_closed_over_has_its_gradient() -> None:
    root = torch.ones(4, requires_grad=True)
    y = root * 3
    (sl.jit(lambda x: (x * y).sum())(torch.arange(4.0)) + y.sum()).backward()
    same(root.grad, 3 * torch.arange(4.0) + 3)


@pytest.mark.parametrize("place", [lambda x: x, lambda x: sl.shard(x, "a@data")])
def test_what_is_closed_over_and_returned_has_a_history(place: Any) -> None:
    with Mesh(data=2):
        w = place(torch.arange(4.0)).requires_grad_()
        a, b, c = sl.jit(lambda x: (w, w, x * w))(torch.ones(4))
        assert a is b
        (a + 2 * b + c).sum().backward()
        same(w.grad, torch.full((4,), 4.0))


def test_leaves_that_a_function_makes_are_leaves() -> None:
    def makes(x: Tensor, w: Tensor) -> Any:
        return (x * 2).requires_grad_(), nn.Parameter(x + 1), x * w, w.detach()

    def after(fn: Any) -> Any:
        x, w = torch.arange(4.0), torch.ones(4, requires_grad=True)
        a, b, c, d = fn(x, w)
        (a * b * c * d).sum().backward()
        return [(t.requires_grad, t.is_leaf, isinstance(t, nn.Parameter)) for t in (a, b, c, d)], a.grad, b.grad, w.grad

    with Mesh(data=2):
        same(after(sl.jit(makes)), after(makes))

    def goes_back(x: Tensor) -> Tensor:
        y = (x * 2).requires_grad_()
        y.sum().backward()
        return y

    with Mesh(data=2), pytest.raises(ShardingError, match=r"result 0 has a gradient[\s\S]*return x.grad beside it"):
        sl.jit(goes_back)(torch.ones(4))


@pytest.mark.long
def test_an_lstm_goes_back() -> None:
    torch.manual_seed(0)
    net = nn.LSTM(4, 3).double()
    net(X)[0].square().sum().backward()
    expected = {k: p.grad for k, p in net.named_parameters()}
    net.zero_grad()
    sl.jit(lambda x: net(x)[0])(X).square().sum().backward()
    same({k: p.grad for k, p in net.named_parameters()}, expected)


def test_the_issue_of_lost_gradients() -> None:
    """`(f(w) + w.sum()).backward()` counts both."""
    for place in PLACES.values():
        w = place(torch.ones(4, 4)).requires_grad_()
        (sl.jit(lambda w: (2 * w).sum())(w) + w.sum()).backward()
        same(w.grad, torch.full((4, 4), 3.0))


def test_which_results_have_a_history() -> None:
    x = sl.shard(X, "batch _").requires_grad_()
    out = sl.jit(several)(x, W)
    assert {k: v.requires_grad for k, v in out.items() if k != "n"} == {
        "y": True,
        "loss": True,
        "top": False,
        "fixed": False,
    }
    with torch.no_grad():
        assert not sl.jit(several)(x, W)["y"].requires_grad
    assert not sl.jit(several)(x.detach(), W)["y"].requires_grad


def test_modes_have_programs_of_their_own() -> None:
    step, x = sl.jit(linear), sl.shard(X, "batch _").requires_grad_()
    for _ in range(2):
        with torch.no_grad():
            assert not step(x, W).requires_grad
        assert step(x, W).requires_grad
    assert step.retraces == ["gradient mode: False -> True"]


def test_modules_outside_and_inside() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(4, 8).double(), nn.Linear(8, 1).double()
    step = sl.jit(lambda h: second(h.relu()).square().mean())
    for _ in range(2):
        for p in (*first.parameters(), *second.parameters()):
            p.grad = None
        second(first(X).relu()).square().mean().backward()
        expected = [p.grad.clone() for p in (*first.parameters(), *second.parameters())]
        for p in (*first.parameters(), *second.parameters()):
            p.grad = None
        step(first(X)).backward()
        same([p.grad for p in (*first.parameters(), *second.parameters())], expected)


def test_an_optimizer_outside() -> None:
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).double()]
    import copy

    nets.append(copy.deepcopy(nets[0]))
    for i, net in enumerate(nets):
        opt = torch.optim.AdamW(net.parameters(), lr=0.1)
        forward = sl.jit(lambda x, net=net: net(x).square().mean()) if i else lambda x, net=net: net(x).square().mean()
        for _ in range(5):
            opt.zero_grad()
            forward(X).backward()
            opt.step()
    same(dict(nets[1].state_dict()), dict(nets[0].state_dict()))


def test_the_plan_shows_both_ways() -> None:
    x = sl.shard(X, "batch _").requires_grad_()
    plan = sl.jit(linear).plan(x, sl.shard(W, "_ ff").requires_grad_())
    text = plan.full
    assert "backward of" in text
    assert "gradient of x" in text
    assert "gradient of result" in text
    assert [c.kind for c in plan.collectives] == ["all_reduce", "all_reduce"]
    assert str(plan.layout_of("gradient of x")) == "6@data, 4"


def test_only_saved_values_cross() -> None:
    """The backward program reads what the forward program saved: no op of the forward pass runs again."""
    x = sl.shard(X, "batch _").requires_grad_()
    halves = sl.jit(lambda x: torch.tanh(x).sum()).plan(x).compiled.halves
    assert halves is not None
    first, second = (
        [getattr(s.target, "_schema", s).name for s in p.steps if hasattr(s, "target")]
        for p in (halves.forward, halves.backward)
    )
    assert "aten::tanh" in first
    assert "aten::tanh" not in second
    assert "aten::tanh_backward" in second


# --- what autograd refuses --------------------------------------------------------------------------------------------


def test_twice_through_one_graph() -> None:
    x = sl.shard(X, "batch _").requires_grad_()
    y = sl.jit(lambda x: torch.tanh(x).sum())(x)
    y.backward(retain_graph=True)
    y.backward()
    plain = X.clone().requires_grad_()
    (2 * torch.tanh(plain).sum()).backward()
    same(x.grad, plain.grad)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


@pytest.mark.parametrize("remat", ["none", "full"])
def test_twice_through_a_module(remat: str) -> None:
    """Two losses of one forward pass, one after the other and then both; what was kept is gone with the last one."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Dropout(0.5), torch.nn.Linear(4, 4))
    with Mesh(data=2):
        sl.parallelize(module, strategy="fsdp", remat=remat)
        y = module(torch.randn(8, 4))
        first, second = y.sum(), y.square().mean()
        found = []
        for loss, stays in ((first, True), (second, True), (first + second, False)):
            loss.backward(retain_graph=stays)
            found.append([p.grad.full_tensor() for p in module.parameters()])
            module.zero_grad()
        for a, b, both in zip(*found, strict=True):
            torch.testing.assert_close(a + b, both)
            assert a.abs().sum() > 0
        with pytest.raises(RuntimeError, match="second time"):
            (first + second).backward()


def test_writes_to_what_is_saved_are_noticed() -> None:
    x, w = X.clone().requires_grad_(), W.clone()
    y = sl.jit(linear)(x, w)
    w.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation:\n  \* w, f64\[4, 3\], is at version 1"):
        y.sum().backward()
    placed = sl.shard(W, "_ ff")
    y = sl.jit(linear)(x, placed)
    placed.add_(1)
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation:\n  \* w, f64\[4, 3@\w+\], is at version 1"
    ):
        y.sum().backward()


def test_a_function_that_goes_back_itself_leaves_no_history() -> None:
    w = W.clone().requires_grad_()

    def step(x: Tensor) -> Tensor:
        loss = (x @ w).square().sum()
        loss.backward()
        return loss

    loss = sl.jit(step)(X)
    expected = w.grad.clone()
    w.grad = None
    step(X)
    same(expected, w.grad)
    for lost in (loss, loss + w.sum()):
        with pytest.raises(ShardingError, match="the results of step have no gradient") as error:
            lost.backward()
        assert "second time" in str(error.value)


def test_what_torch_cannot_differentiate_is_refused_when_somebody_does() -> None:
    @torch.library.custom_op("border::opaque", mutates_args=())
    def opaque(x: Tensor) -> Tensor:
        return x * 3

    opaque.register_fake(lambda x: torch.empty_like(x))
    x = sl.shard(X, "batch _").requires_grad_()
    out = sl.jit(lambda x: opaque(x))(x)
    assert out.requires_grad
    with pytest.raises(ShardingError, match="no autograd formula was registered"):
        (out + x).sum().backward()


def test_memory_is_freed_by_the_backward_pass() -> None:
    x = sl.shard(X, "batch _").requires_grad_()
    kept = []

    def spy(x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(x)).sum()

    y = sl.jit(spy)(x)
    kept = [weakref.ref(t) for t in y.grad_fn.saved_tensors]
    assert kept
    y.backward()
    gc.collect()
    pieces = {id(p) for p in x._locals}
    assert all(r() is None or id(r()) in pieces for r in kept)


# --- torch's autograd while tracing -----------------------------------------------------------------------------------


class Cube(torch.autograd.Function):
    """Old style: no setup_context, so torch.func refuses it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad


INSIDE: dict[str, Callable[[Tensor], Tensor]] = {
    "one_hot": lambda x: (x * F.one_hot(torch.tensor([0, 1, 2, 3, 0, 1]), 4)).square().sum(),
    "checkpoint": lambda x: checkpoint(lambda x: torch.tanh(x).square(), x, use_reentrant=False).sum(),
    "old-style function": lambda x: Cube.apply(x).sum(),  # type: ignore[no-untyped-call]
    "detach": lambda x: (x.detach() * x).sum(),
    "no_grad": lambda x: _with_no_grad(x),
    "clamp": lambda x: x.clamp(-0.5, 0.5).square().sum(),
    "in place": lambda x: (x * 2).mul_(3).square().sum(),
    "nested": lambda x: (sl.grad(lambda y: (y**3).sum())(x) * x).sum(),
    "vmap": lambda x: sl.vmap(lambda row: row.square().sum())(x).sum(),
    "shard": lambda x: sl.shard(x * 2, "_ ff").square().sum(),
}


def _with_no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().max()
    return (x * scale).sum()


def _eager(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    with single_device():
        (grad,) = torch.autograd.grad(fn(x), x)
    return grad


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", INSIDE)
def test_gradients_inside_go_through_torchs_autograd(name: str) -> None:
    fn = INSIDE[name]
    expected = _eager(fn, X)
    for place in PLACES.values():
        x = place(X)
        same(sl.jit(sl.grad(fn))(x), expected)
        same(sl.jit(sl.value_and_grad(fn))(x)[1], expected)
        y = place(X).requires_grad_()
        sl.jit(lambda y: fn(y).backward())(y)
        same(y.grad, expected)


# --- checkpoints: what runs again finds the modes, the numbers and the masks of the first time ------------------------


def _attends(x: Tensor, w: Tensor, dropout: float = 0.0) -> Tensor:
    q = (x @ w @ w.t()).view(1, 1, 6, 4)
    return F.scaled_dot_product_attention(q, x[None, None], x.sin()[None, None], dropout_p=dropout).view(6, 4) * x


def _drops(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout(torch.tanh(x @ w), 0.5) @ w.t()


def _scaled(x: Tensor, w: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
    y = torch.tanh(x @ w @ w.t()) * scale
    return y if mask is None else y.masked_fill(mask, 0.0)


def _hooked(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w @ w.t()
    if y.requires_grad:
        y.register_hook(lambda g: g + _attends(g, w.detach()))  # type: ignore[no-untyped-call]
    return y.sin()


def _selective(fn: Any, *args: Tensor) -> Tensor:
    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    found: Tensor = checkpoint(fn, *args, use_reentrant=False, context_fn=contexts)
    return found


MASK = torch.tensor([True, False, False, True])
INDEX = torch.tensor([0, 2])
AGAIN: dict[str, Callable[..., Tensor]] = {  # of x, w and a checkpoint
    "attention": lambda x, w, again: again(_attends, x, w),
    "nested": lambda x, w, again: again(lambda x, w: again(_attends, x, w).sin() @ w, x, w),
    "twice": lambda x, w, again: again(_attends, again(_attends, x, w), w),
    "dropout": lambda x, w, again: again(_drops, again(_drops, x, w), w),
    "attention dropout": lambda x, w, again: again(_attends, x, w, 0.5),
    "closed over": lambda x, w, again: again(lambda x: _attends(x, w), x),
    "composite": lambda x, w, again: again(lambda x, w: (x @ w).index_fill(1, INDEX, w.sum()) @ w.t() * x, x, w),
    "autograd function": lambda x, w, again: again(lambda x, w: Cube.apply(x @ w), x, w),  # type: ignore[no-untyped-call]
    "in place": lambda x, w, again: again(lambda x, w: (x @ w).mul_(2).sin(), x, w),
    "shard": lambda x, w, again: again(lambda x, w: sl.shard(x @ w, "_ ff").sin(), x, w),
    "sequential": lambda x, w, again: checkpoint_sequential(
        [torch.sin, torch.tanh, lambda x: x @ w], 2, x, **again.keywords
    ),
}
LATER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "keywords": lambda x, w: checkpoint(_scaled, x, w, use_reentrant=False, scale=0.5, mask=MASK),
    "selective": lambda x, w: _selective(_scaled, x, w),
    "selective attention": lambda x, w: _selective(_attends, x, w),
    "selective dropout": lambda x, w: _selective(_drops, x, w),
    "debug": lambda x, w: checkpoint(_scaled, x, w, use_reentrant=False, debug=True),
    "hook": _hooked,
    "scan": lambda x, w: sl.scan(
        lambda c, _: (checkpoint(_attends, c, w, use_reentrant=False), None), x, torch.zeros(2, 1, dtype=x.dtype)
    )[0],
}
LATER |= {
    f"{name}, {how}": functools.partial(fn, again=functools.partial(checkpoint, use_reentrant=how == "reentrant"))
    for name, fn in AGAIN.items()
    for how in ("reentrant", "not reentrant")
}


@pytest.mark.long
@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", LATER)
def test_what_a_checkpoint_runs_again_is_the_same(name: str) -> None:
    fn = LATER[name]

    def inside(x: Tensor, w: Tensor) -> Tensor:
        out = fn(x, w)
        out.square().sum().backward()
        return out.detach()

    def outside(x: Tensor, w: Tensor) -> Tensor:
        out: Tensor = sl.jit(fn)(x, w)
        out.square().sum().backward()
        return out.detach()

    def run(how: Any, place: Callable[[Tensor], Tensor], program: Any = nullcontext) -> list[Any]:
        torch.manual_seed(1)
        with program():
            x, w = place(X).requires_grad_(), W.clone().requires_grad_()
            return [how(x, w), x.grad, w.grad]

    with single_device():
        expected = run(inside, PLACES["plain"], plain_program)
    same(run(sl.jit(inside), PLACES["rows"]), expected)
    same(run(outside, PLACES["rows"]), expected)


def test_a_selective_checkpoint_keeps_what_its_policy_says() -> None:
    graph = trace(sl.grad(lambda x, w: _selective(_scaled, x, w).sum()), (X, W)).graph.graph
    calls = [str(n.target) for n in graph.nodes]
    assert calls.count("aten.tanh.default") == 2  # forward, and again
    assert calls.count("aten.mm.default") == 2 + 2  # forward, and the gradient of x


def test_grad_takes_what_torch_func_takes() -> None:
    def loss(p: dict[str, Tensor], x: Tensor, n: int = 2) -> Tensor:
        return ((x @ p["w"] + p["b"]) ** n).sum()

    p = {"w": W, "b": torch.ones(3, dtype=torch.float64)}
    for argnums in (0, 1, (0, 1)):
        expected = torch.func.grad(loss, argnums)(p, X)
        same(sl.jit(sl.grad(loss, argnums))(p, X), expected)
        same(sl.jit(sl.value_and_grad(loss, argnums))(p, X), (loss(p, X), expected))
        aux = sl.value_and_grad(lambda p, x: (loss(p, x), {"n": x.sum()}), argnums, has_aux=True)
        (value, extra), grads = sl.jit(aux)(p, X)
        same((value, extra, grads), (loss(p, X), {"n": X.sum()}, expected))
        grads, extra = sl.jit(sl.grad(lambda p, x: (loss(p, x), {"n": x.sum()}), argnums, has_aux=True))(p, X)
        same((grads, extra), (expected, {"n": X.sum()}))
    same(sl.jit(lambda p, x: sl.grad(loss)(p, x, n=3))(p, X), torch.func.grad(loss)(p, X, n=3))


@pytest.mark.parametrize(
    ("fn", "what"),
    [
        (lambda x: x, "scalar"),
        (lambda x: 3.0, "Tensor|tensor"),
        (lambda x: {"loss": x.sum()}, "Tensor|tensor"),
    ],
)
def test_grad_of_what_is_no_loss_is_refused(fn: Any, what: str) -> None:
    for run in (sl.grad(fn), sl.jit(sl.grad(fn))):
        with pytest.raises((RuntimeError, ShardingError), match=what):
            run(X)


def test_unused_arguments_have_gradients_of_zeros() -> None:
    same(sl.jit(sl.grad(lambda x, w: w.sum(), (0, 1)))(X, W), (X * 0, torch.ones_like(W)))


def test_an_op_with_a_rule_and_a_gradient_trains() -> None:
    @torch.library.custom_op("border::triple", mutates_args=())
    def triple(x: Tensor) -> Tensor:
        return x * 3

    triple.register_fake(lambda x: torch.empty_like(x))
    triple.register_autograd(lambda ctx, grad: grad * 3)
    sl.rule("... -> ...")(triple)
    same(sl.jit(sl.grad(lambda x: triple(x).square().sum()))(X), 18 * X)
    x = sl.shard(X, "batch _").requires_grad_()
    sl.jit(lambda x: triple(x).square().sum())(x).backward()
    same(x.grad, 18 * X)


@pytest.mark.parametrize("take", [sl.grad, sl.value_and_grad])
@pytest.mark.parametrize("placed", [False, True])
def test_gradients_inside_have_the_history_of_what_the_function_closes_over(take: Any, placed: bool) -> None:
    def penalty(x: Tensor, w: Tensor) -> Tensor:
        h = w * 2

        def energy(x: Tensor) -> Tensor:
            return (x @ h).sin().square().sum()

        out = take(energy)(x)
        total: Tensor = sum(y.square().sum() for y in (out if isinstance(out, tuple) else (out,)))
        return total + w.sum()

    x, w = torch.arange(8.0).view(4, 2).cos(), torch.arange(6.0).view(2, 3).sin()
    plain = w.clone().requires_grad_()
    mine = (sl.shard(w, "a b@data") if placed else w.clone()).requires_grad_()
    penalty(x, plain).backward()
    step = sl.jit(lambda x: penalty(x, mine))
    step(x).backward()
    same(mine.grad, plain.grad)
    with torch.no_grad():
        assert not step(x).requires_grad


class _Nowhere(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def test_a_history_that_leads_nowhere() -> None:
    w = torch.ones(4, requires_grad=True)
    with sl.Mesh(data=2):
        out = sl.jit(lambda w, n: _Nowhere.apply(w) * n)(w, 0.5)
        assert out.requires_grad
        out.sum().backward()
    assert w.grad is None


class _Auxiliary(torch.autograd.Function):
    """Adds a loss whose gradient is 1, whatever follows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:  # type: ignore[override]
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, torch.ones(())


class _Balanced(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Auxiliary.apply(torch.tanh(self.up(x)), self.gate(x.detach()).square().sum())
        return y


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize("door", ["module", "step", "results"])
def test_a_gradient_in_which_no_cotangent_counts(layers: int, door: str) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Sequential(*[_Balanced() for _ in range(layers)])
    mine, x = copy.deepcopy(plain), torch.randn(4, 4)
    (plain(x) * 2).sum().backward()
    with Mesh(data=2):
        model = sl.parallelize(mine, strategy="fsdp")
        if door == "module":
            (model(x) * 2).sum().backward()
        elif door == "results":
            loss, _ = sl.jit(lambda m, x: ((m(x) * 2).sum(), x + 1))(model, x)
            loss.backward()
        else:
            sl.jit(lambda m, x: (m(x) * 2).sum().backward())(model, x)
    for p, q in zip(mine.parameters(), plain.parameters(), strict=True):
        same(p.grad, q.grad)


WITHIN: dict[str, Callable[[Any, Any], Any]] = {
    "retain_grad": lambda loss, h: h.retain_grad(),
    "register_hook": lambda loss, h: h.register_hook(print),
    "grad": lambda loss, h: torch.autograd.grad(loss, h, allow_unused=True),
    "backward": lambda loss, h: loss.backward(inputs=[h]),
}


@pytest.mark.parametrize("ask", WITHIN.values(), ids=WITHIN)
def test_what_a_program_does_not_know_of_its_results_is_refused(ask: Callable[[Any, Any], Any]) -> None:
    layer = torch.nn.Linear(8, 4)

    def fn(x: Tensor) -> Any:
        h = layer(x)
        return h.square().mean(), h

    with Mesh(data=2):
        loss, h = sl.jit(fn)(torch.ones(6, 8))
        with pytest.raises(ShardingError, match="a result of fn, from which fn computes another result: f32"):
            ask(loss, h)
        loss.register_hook(lambda g: g)
        loss.backward()
    assert layer.weight.grad is not None


def test_hooks_of_a_result_that_nobody_uses_are_not_called() -> None:
    x, seen = torch.ones(2, requires_grad=True), []
    with Mesh(data=2):
        a, b = sl.jit(lambda x: (x * 2, x * 3))(x)
        b.register_hook(lambda g: seen.append(g) or g * 0.5)
        a.sum().backward(retain_graph=True)
        assert seen == []
        b.sum().backward()
    assert len(seen) == 1
    same(x.grad, torch.full((2,), 2 + 1.5))


def test_prints_and_checks_stay_in_their_half(capsys: pytest.CaptureFixture[str]) -> None:
    """A print of the forward pass comes with it; a check of what only the backward pass knows, with that."""

    def printed(x: Tensor) -> Tensor:
        sl.debug_print("seen {}", x.sum())
        return (x * x).sum()

    class Looked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(w)
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            (w,) = ctx.saved_tensors
            return g * F.embedding((g[:, 0] > 0).long(), w), None

    x, w = torch.ones(4, 3, requires_grad=True), torch.arange(12.0).view(4, 3)
    with sl.Mesh(data=2):
        out = sl.jit(printed)(x)
        assert capsys.readouterr().out == "seen 12.0\n"
        out.backward()
        assert capsys.readouterr().out == ""
        x.grad = None
        sl.jit(lambda x, w: Looked.apply(x, w).sum(), in_specs=(None, "v@data _"))(x, w).backward()
    plain = x.detach().clone().requires_grad_()
    Looked.apply(plain, w).sum().backward()
    same(x.grad, plain.grad)


class _Counted(torch.autograd.Function):
    """Counts how often it goes back."""

    times = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        _Counted.times += 1
        return g * _Counted.times


def test_what_a_way_back_changes_is_refused_outside_and_counts_inside() -> None:
    x, fn = X.clone().requires_grad_(), lambda x: _Counted.apply(x).sum()
    with pytest.raises(ShardingError, match=r"when its results are differentiated(.|\n)*_Counted.times(.|\n)*inside"):
        sl.jit(fn)(x)
    assert _Counted.times == 0
    with torch.no_grad():
        assert float(sl.jit(fn)(x)) == float(X.sum())
    inside = sl.jit(lambda x: torch.autograd.grad(fn(x), x)[0])
    assert [float(inside(x).full_tensor().sum()) / X.numel() for _ in range(3)] == [1, 2, 3]
    assert _Counted.times == 3


class _Told(torch.autograd.Function):
    """Says whether the engine may hand its backward pass to a thread of its own, as it does with tensors of a GPU."""

    said: queue.SimpleQueue[bool]  # which is not looked into: a list would be what the backward pass changes

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        _Told.said.put(torch._C._is_multithreading_enabled())
        return g


def test_backward_passes_run_on_the_thread_that_knows_what_is_traced_and_on_which_mesh() -> None:
    _Told.said = queue.SimpleQueue()
    inside = lambda x: torch.autograd.grad(_Told.apply(leaf := x.detach().requires_grad_()).sum(), leaf)
    sl.jit(inside)(X)
    sl.jit(lambda x: _Told.apply(x).sum())(X.clone().requires_grad_()).backward()
    x = sl.shard(X, P("data", None)).requires_grad_()
    _Told.apply(x).sum().backward()
    _Told.apply(x).sum().full_tensor().backward()
    assert [_Told.said.get() for _ in range(_Told.said.qsize())] == [False] * 4
    with no_mesh():  # what is no business of ours
        _Told.apply(X.clone().requires_grad_()).sum().backward()
    assert _Told.said.get()
