"""Loops in Python: equal rounds are traced once, and every program is the one that tracing each round makes."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import shardlib as sl
from shardlib.compiler import pipeline
from shardlib.frontend import trace as tracing
from shardlib.frontend import trace_attempt
from shardlib.frontend.reuse import python_loops

LAYERS, WIDTH = 8, 8
Params = list[dict[str, Tensor]]


def params() -> Params:
    torch.manual_seed(0)
    shapes = {"up": (WIDTH, WIDTH), "down": (WIDTH, WIDTH), "scale": (WIDTH,)}
    return [{name: torch.randn(shape) / 3 for name, shape in shapes.items()} for _ in range(LAYERS)]


def norm(x: Tensor, scale: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * scale


def block(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    h = F.linear(norm(x, p["scale"]), p["up"]).view(4, 2, 2, 4).transpose(1, 2)
    return x + F.linear(F.gelu(h.softmax(-1).transpose(1, 2).reshape(4, 2, WIDTH)), p["down"])


def plain(ps: Params, x: Tensor) -> Tensor:
    for p in ps:
        x = block(x, p)
    return x.square().mean()


def same_ops_behind(ps: Params, x: Tensor) -> Tensor:
    for p in ps:
        x = block(x, p)
    return norm(x, ps[0]["scale"]).square().mean()


def written_out(ps: Params, x: Tensor) -> Tensor:
    for p in ps:
        h = norm(x, p["scale"])
        h = F.linear(h, p["up"])
        h.mul_(2.0)
        x = x + F.linear(F.gelu(h), p["down"])
    return x.square().mean()


def last_round_read(ps: Params, x: Tensor) -> Tensor:
    for p in ps:
        h = norm(x, p["scale"])
        x = x + F.linear(F.gelu(F.linear(h, p["up"])), p["down"])
    return (x * h).square().mean()


def ends_inside(ps: Params, x: Tensor) -> Tensor:
    for i, p in enumerate(ps):
        q = F.linear(norm(x, p["scale"]), p["up"]).view(4, 2, 2, 4).transpose(1, 2)
        if i == LAYERS - 1:
            break
        x = x + F.linear(q.transpose(1, 2).reshape(4, 2, WIDTH), p["down"])
    return q.sum() + x.square().mean()


def another_layer_late(ps: Params, x: Tensor) -> Tensor:
    for i, p in enumerate(ps):
        x = block(x, p).sin() if i == LAYERS - 2 else block(x, p)
    return x.square().mean()


def another_number(ps: Params, x: Tensor) -> Tensor:
    for i, p in enumerate(ps):
        x = block(x, p) * (2.0 if i == LAYERS - 2 else 1.5)
    return x.square().mean()


def tied_late(ps: Params, x: Tensor) -> Tensor:
    layers = [*ps[:-1], dict(ps[-1], down=ps[-1]["up"])]
    for p in layers:
        x = block(x, p)
    return x.square().mean()


def error_caught(ps: Params, x: Tensor) -> Tensor:
    for i, p in enumerate(ps):
        h = norm(x, p["scale"])
        try:
            x = x + F.linear(F.gelu(h), p["down"] if i < LAYERS - 2 else torch.zeros(3, 3))
        except RuntimeError:
            x = x * 2
    return x.square().mean()


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * -0.5


def own_gradient(ps: Params, x: Tensor) -> Tensor:
    for p in ps:
        x = Reverse.apply(block(x, p))
    return x.square().mean()


def own_gradient_late(ps: Params, x: Tensor) -> Tensor:
    for i, p in enumerate(ps):
        h = norm(x, p["scale"])
        h = Reverse.apply(h) if i == LAYERS - 2 else h
        x = x + F.linear(F.gelu(h), p["down"])
    return x.square().mean()


def hooked(ps: Params, x: Tensor) -> Tensor:
    for p in ps:
        x = block(x, p)
        if x.requires_grad:
            x.register_hook(lambda grad: grad * 0.9)
    return x.square().mean()


def written_to(ps: Params, x: Tensor) -> Tensor:
    x = x.clone()
    for p in ps:
        x += F.linear(F.gelu(norm(x.clone(), p["scale"])), p["down"])
    return x.square().mean()


def filled(ps: Params, x: Tensor) -> Tensor:
    rows = torch.zeros(LAYERS, *x.shape)
    for i, p in enumerate(ps):
        x = block(x, p)
        rows[i] = x
    return rows.square().mean()


def without_gradients_inside(ps: Params, x: Tensor) -> Tensor:
    for p in ps:
        with torch.no_grad():
            s = x.abs().mean()
        x = block(x, p) / (1 + s)
    return x.square().mean()


def differentiated_inside(ps: Params, x: Tensor) -> Tensor:
    for p in ps:
        y = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(block(y, p).square().sum(), y)
        x = x - 0.01 * g * p["scale"]
    return x.square().mean()


def kept_views(ps: Params, x: Tensor) -> Tensor:
    views = []
    for p in ps:
        h = F.linear(norm(x, p["scale"]), p["up"])
        views.append(h.view(4, 2, 2, 4).transpose(1, 2))
        x = x + F.linear(F.gelu(h), p["down"])
    return torch.stack(views).square().mean() + x.sum()


def constrained(ps: Params, x: Tensor) -> Tensor:
    for p in ps:
        x = sl.shard(block(x, p), "batch@data _ _")
    return x.square().mean()


SAME = [
    constrained,
    plain,
    same_ops_behind,
    written_out,
    last_round_read,
    ends_inside,
    another_layer_late,
    another_number,
]
SAME += [tied_late, error_caught, own_gradient, own_gradient_late, hooked, written_to, filled]
SAME += [without_gradients_inside, differentiated_inside, kept_views]


def step_of(loss: Callable[..., Tensor]) -> Callable[..., Any]:
    def step(ps: Params, x: Tensor) -> Any:
        value, grads = sl.value_and_grad(loss)(ps, x)
        return value, torch.utils._pytree.tree_map(lambda p, g: p - 0.1 * g, ps, grads)

    return step


def graph_of(fn: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The traced graph, before it is simplified: nodes with their operands and lines."""
    texts: list[str] = []
    normalize = pipeline.normalize

    def noted(traced: Any) -> Any:
        for node in traced.graph.graph.nodes:
            texts.append(f"{node.format_node()} {node.meta.get('line')} {node.meta.get('backward')}")
        return normalize(traced)

    with monkeypatch.context() as patched, sl.Mesh.abstract(data=2):
        patched.setattr(pipeline, "normalize", noted)
        sl.jit(fn, in_specs=(None, "batch@data _ _")).plan(params(), torch.empty(4, 2, WIDTH, device="meta"))
    names: dict[str, str] = {}
    return [re.sub(r"%\w+", lambda m: names.setdefault(m[0], f"%{len(names)}"), text) for text in texts]


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the rounds that are written out; nothing is remembered of other tests."""
    count = [0]
    write = python_loops.LoopReuse._write_round

    def counted(*args: Any) -> None:
        write(*args)
        count[0] += 1

    monkeypatch.setattr(python_loops.LoopReuse, "_write_round", counted)
    monkeypatch.setattr(python_loops, "_NOT_FOLLOWED", set())
    return count


@pytest.mark.long
@pytest.mark.parametrize("loss", SAME, ids=lambda f: f.__name__)
def test_the_graph_is_that_of_every_round_traced(
    loss: Callable[..., Tensor], rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = graph_of(step_of(loss), monkeypatch)
    monkeypatch.setattr(trace_attempt, "LoopReuse", lambda *args: None)
    assert followed == graph_of(step_of(loss), monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize(
    ("loss", "traces"),
    [(plain, 1), (same_ops_behind, 1), (constrained, 1), (last_round_read, 2), (ends_inside, 2)],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_rounds_are_written_out(
    loss: Callable[..., Tensor], traces: int, rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    count, trace = [0], tracing._trace

    def counted(*args: Any) -> Any:
        count[0] += 1
        return trace(*args)

    monkeypatch.setattr(tracing, "_trace", counted)
    graph_of(step_of(loss), monkeypatch)
    assert count == [traces]
    assert rounds[0] >= (LAYERS - 5 if traces == 1 else 1)


def collected(ps: Params, x: Tensor) -> Tensor:
    values = []
    for p in ps:
        x = block(x, p)
        values.append(x)
    return torch.stack(values).square().mean()


def recurrent(ps: Params, x: Tensor) -> Tensor:
    h = torch.zeros(4, WIDTH)
    for _ in range(12):
        h = torch.tanh(h @ ps[0]["up"] + torch.sin(h @ ps[0]["up"]) * ps[0]["scale"] + x[:, 0])
    return h.sum()


def added_up(ps: Params, x: Tensor) -> Tensor:
    loss = torch.zeros(())
    for p in ps:
        x = block(x, p)
        loss = loss + x.square().mean()
    return loss


def backward(ps: Params, x: Tensor) -> Any:
    leaves, tree = torch.utils._pytree.tree_flatten(ps)
    leaves = [p.detach().requires_grad_() for p in leaves]
    loss = plain(torch.utils._pytree.tree_unflatten(leaves, tree), x)
    loss.backward()
    return loss.detach(), [p.grad for p in leaves]


def checkpointed(ps: Params, x: Tensor) -> Any:
    leaves, tree = torch.utils._pytree.tree_flatten(ps)
    leaves = [p.detach().requires_grad_() for p in leaves]
    for i, p in enumerate(torch.utils._pytree.tree_unflatten(leaves, tree)):
        x = block(x, p) if i < LAYERS - 2 else checkpoint(block, x, p, use_reentrant=False)
    return torch.autograd.grad(x.square().mean(), leaves)


def second_derivative(ps: Params, x: Tensor) -> Tensor:
    y = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(plain(ps, y), y, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), y)[0]


def kept_on_object(ps: Params, x: Tensor) -> Any:
    box: dict[str, Tensor] = {}
    for p in ps:
        x = block(x, p)
        box["norm"] = norm(x, p["scale"])
    return x, box["norm"]


def updated_by_hand(ps: Params, x: Tensor) -> Any:
    leaves, tree = torch.utils._pytree.tree_flatten(ps)
    leaves = [p.detach().requires_grad_() for p in leaves]
    plain(torch.utils._pytree.tree_unflatten(leaves, tree), x).backward()
    results = []
    with torch.no_grad():
        for p in leaves[::3]:
            assert p.grad is not None
            results.append((p - 0.1 * p.grad * 2 + 1).sin().cos().tanh())
    return results


def twelve(h: Tensor) -> Tensor:
    for _ in range(12):
        h = (h * 0.5).sin()
    return h * 3000.0


def leaf(ps: Params) -> Tensor:
    return ps[0]["up"].detach().requires_grad_()


def second_gradient_caught(ps: Params, x: Tensor) -> Any:
    h, w = x, leaf(ps)
    for _ in range(8):
        h = twelve(h @ w)
    with suppress(Exception):
        return torch.autograd.grad(h.sum(), w, create_graph=True)[0]
    return torch.zeros_like(w)


def part_of_gradient_caught(ps: Params, x: Tensor) -> Any:
    h, w, hs = x, leaf(ps), []
    for _ in range(8):
        hs.append(twelve(h @ w))
        h = hs[-1].cos() + torch.cat([hs[-1], hs[-1]])[: len(x)]
    with suppress(Exception):
        return torch.autograd.grad(hs[6].sum(), w)[0]
    return torch.zeros_like(w)


def batched_gradients(ps: Params, x: Tensor) -> Any:
    h, w = torch.ones(WIDTH, WIDTH), leaf(ps)
    for _ in range(8):
        h = twelve(h @ w)
    return torch.autograd.grad(h.sum(0), w, grad_outputs=torch.eye(WIDTH), is_grads_batched=True)[0]


def conjugates_of_what_changes(ps: Params, x: Tensor) -> Any:
    base, h, views = torch.complex(ps[0]["up"], ps[0]["down"]) * 1, x, []
    for _ in range(8):
        views.append(base.mH)
        h = twelve(h)
    base.mul_(2)
    return h, torch.view_as_real(views[6] * 1)


def windows_of_what_changes(ps: Params, x: Tensor) -> Any:
    base, h, views = ps[0]["up"] * 1, x, []
    for _ in range(8):
        views.append(base.as_strided((3, 2), (1, 1)))
        h = twelve(h)
    base.mul_(2)
    return h, views[6] * 1


def compare(fn: Callable[..., Any]) -> None:
    """Compares what a function returns in two shards with what it returns in plain torch."""
    x = torch.randn(4, 2, WIDTH, generator=torch.Generator().manual_seed(1))
    with sl.Mesh(data=2):
        out = sl.jit(fn, in_specs=(None, "batch@data _ _"))(params(), x)
    leaves = torch.utils._pytree.tree_leaves(out)
    values = [y.full_tensor() if isinstance(y, sl.ShardedTensor) else y for y in leaves]
    expected = torch.utils._pytree.tree_leaves(fn(params(), x))
    torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-5)


FUNCTIONS = [*map(step_of, (collected, recurrent, added_up)), backward, checkpointed, second_derivative]
FUNCTIONS += [kept_on_object, updated_by_hand]
ANEW = [second_gradient_caught, part_of_gradient_caught, batched_gradients]
ANEW += [conjugates_of_what_changes, windows_of_what_changes]


@pytest.mark.long
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_values_are_those_of_one_device(fn: Callable[..., Any], rounds: list[int]) -> None:
    compare(fn)


@pytest.mark.long
@pytest.mark.parametrize("fn", ANEW)
def test_other_ways_back_and_views_trace_every_round(fn: Callable[..., Any], rounds: list[int]) -> None:
    compare(fn)


def kept(ps: Params, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    x, values = x.clone().requires_grad_(), []
    for p in ps:
        h = torch.tanh(norm(x, p["scale"]))
        values.append(h)
        x = x + F.linear(F.gelu(h), p["down"])
    return x.square().mean() + torch.stack(values).sum(), values


def cell(ps: Params, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    h, c = x.clone().requires_grad_(), x.clone().requires_grad_()
    for _ in range(10):
        gate, new = torch.sigmoid(h @ ps[0]["up"]), torch.tanh(h @ ps[0]["down"] + ps[0]["scale"])
        c = torch.sigmoid(gate + 1) * c + gate * new
        h = gate * torch.tanh(c)
    return h.sum() + c.sum(), [c]


def backward_of(loss: Tensor, values: list[Tensor]) -> Any:
    torch.autograd.backward(loss, inputs=values)
    return [x.grad for x in values]


def retained(loss: Tensor, values: list[Tensor]) -> Any:
    for x in values:
        x.retain_grad()
    loss.backward()
    return [x.grad for x in values]


def hooked_late(loss: Tensor, values: list[Tensor]) -> Any:
    values[-1].register_hook(lambda grad: grad * 0.0)
    return torch.autograd.grad(loss, values[0])


def edges(loss: Tensor, values: list[Tensor]) -> Any:
    return torch.autograd.grad(loss, [torch.autograd.graph.get_gradient_edge(x) for x in values])


def places(loss: Tensor, values: list[Tensor]) -> Any:
    return loss, [(x.is_leaf, x.requires_grad, x.storage_offset(), x.is_conj()) for x in values]


def written(loss: Tensor, values: list[Tensor]) -> Any:
    for x in values:
        x.detach_().mul_(2.0)
    return loss, values


USES = [torch.autograd.grad, backward_of, retained, hooked_late, edges, places, written]


@pytest.mark.parametrize(("loop", "use"), [*((kept, use) for use in USES), (cell, torch.autograd.grad)])
def test_values_of_rounds_that_are_more_than_computed_with(
    loop: Callable[..., Any], use: Callable[..., Any], rounds: list[int]
) -> None:
    compare(lambda ps, x: use(*loop(ps, x)))
    assert rounds[0]


def cut_leaves(ps: Params, x: Tensor) -> Any:
    leaves = []
    for p in ps:
        leaves.append(x.detach().requires_grad_())
        x = block(leaves[-1], p)
        x.square().mean().backward()
    return [y.grad for y in leaves]


def new_parameters(ps: Params, x: Tensor) -> Any:
    leaves = []
    for p in ps:
        leaves.append(torch.nn.Parameter(p["down"]))
        x = block(x, {**p, "down": leaves[-1]})
    x.square().mean().backward()
    return [y.grad for y in leaves]


def set_leaves(ps: Params, x: Tensor) -> Any:
    leaves = []
    for p in ps:
        leaves.append(p["down"].detach())
        leaves[-1].requires_grad = True
        x = block(x, {**p, "down": leaves[-1]})
    x.square().mean().backward()
    return [y.grad for y in leaves]


class Doubled(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.gelu.default else out


def under(mode: Callable[[], Any], ps: Params, x: Tensor) -> Tensor:
    x = leaf = x.clone().requires_grad_()
    for p in ps:
        with mode():
            x = block(x, p)
    return torch.autograd.grad(x.square().mean(), leaf)[0]


def dispatched(ps: Params, x: Tensor) -> Tensor:
    return under(Doubled, ps, x)


def saved_otherwise(ps: Params, x: Tensor) -> Tensor:
    return under(lambda: saved_tensors_hooks(lambda y: y * 1.5, lambda y: y), ps, x)


@pytest.mark.parametrize("fn", [cut_leaves, new_parameters, set_leaves, dispatched, saved_otherwise])
def test_rounds_that_do_more_than_compute_are_not_followed(fn: Callable[..., Any], rounds: list[int]) -> None:
    compare(fn)
    assert not rounds[0]


def dropout(ps: Params, x: Tensor) -> Tensor:
    for p in ps:
        x = F.dropout(block(x, p), 0.5, training=True)
    return x.square().mean()


def drawn_again(ps: Params, x: Tensor) -> Tensor:
    for p in ps:
        state = torch.get_rng_state()
        noise = torch.randn(WIDTH)
        torch.set_rng_state(state)
        x = block(x, p) + noise - torch.randn(WIDTH)
    return x.square().mean()


@pytest.mark.long
@pytest.mark.parametrize("loss", [dropout, drawn_again])
def test_rounds_that_draw_are_not_followed(
    loss: Callable[..., Tensor], rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = graph_of(loss, monkeypatch)
    assert not rounds[0]
    monkeypatch.setattr(trace_attempt, "LoopReuse", lambda *args: None)
    assert graph == graph_of(loss, monkeypatch)


def test_a_loop_without_inputs(rounds: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def ramp() -> Tensor:
        x = torch.arange(WIDTH) / WIDTH
        for _ in range(40):
            x = torch.sin(x) * 2 + 1
        return x

    with sl.Mesh(data=2):
        torch.testing.assert_close(sl.jit(ramp)().full_tensor(), ramp())
    assert rounds[0]
