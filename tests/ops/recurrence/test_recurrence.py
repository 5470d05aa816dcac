"""RNN, GRU and LSTM layers: an op per layer and direction, with torch's values and gradients."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vmap
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils import _pytree as pytree

import shardlib as sl
from shardlib import Mesh, ShardedTensor
from shardlib.ops.recurrence.autograd import Recurrence
from tests.helpers.ranks import run_ranks

F64 = torch.float64
CELLS: dict[str, Callable[..., Any]] = {
    "tanh": lambda **how: nn.RNN(3, 4, **how),
    "relu": lambda **how: nn.RNN(3, 4, nonlinearity="relu", **how),
    "gru": lambda **how: nn.GRU(3, 4, **how),
    "lstm": lambda **how: nn.LSTM(3, 4, **how),
    "projected": lambda **how: nn.LSTM(3, 4, proj_size=2, **how),
}
HOW: dict[str, tuple[dict[str, Any], tuple[int, ...], bool]] = {  # a layer's arguments, x's shape, given first states
    "plain": ({}, (5, 4, 3), False),
    "two layers, both ways": ({"num_layers": 2, "bidirectional": True, "batch_first": True}, (3, 5, 3), True),
    "no bias, one row": ({"bias": False, "bidirectional": True}, (5, 1, 3), False),
    "one step": ({"num_layers": 2}, (1, 4, 3), True),
    "unbatched": ({}, (5, 3), False),
}


def whole(tree: Any) -> Any:
    return pytree.tree_map(lambda x: x.full_tensor() if isinstance(x, ShardedTensor) else x, tree)


def total(tree: Any) -> Tensor:
    leaves = [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]
    return torch.stack([(x * (i + 1)).square().sum() + x.sum() for i, x in enumerate(leaves)]).sum()


def first_states(m: Any, rows: int) -> Any:
    many = m.num_layers * (1 + m.bidirectional)
    h = torch.randn(many, rows, m.proj_size or m.hidden_size, dtype=F64)
    return (h, torch.randn(many, rows, m.hidden_size, dtype=F64)) if isinstance(m, nn.LSTM) else h


def pulled(m: Any, x: Tensor, hx: Any, *, call: Callable[..., Any] | None = None) -> list[Any]:
    """Results, and the gradients of x, of first states and of parameters."""
    x, hx = pytree.tree_map_only(Tensor, lambda t: t.detach().requires_grad_(), (x, hx))
    out = (call or m)(x, hx)
    total(out).backward()
    leaves = [t for t in pytree.tree_leaves((x, hx)) if t is not None]
    grads = [t.grad for t in (*leaves, *m.parameters())]
    m.zero_grad()
    return [*pytree.tree_leaves(whole(out)), *whole(grads)]


def same(ours: Any, theirs: Any, tolerance: float = 1e-10) -> None:
    for a, b in zip(pytree.tree_leaves(whole(ours)), pytree.tree_leaves(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def recurrences(plan: Any) -> Counter[str]:
    """How often the plan calls each op of this kind."""
    names = [line.split(" = ")[1].partition("(")[0] for line in plan.full.splitlines() if " = " in line]
    return Counter(name for name in names if name.startswith("recurrence"))


@pytest.mark.parametrize(
    ("cell", "how"),
    [
        pytest.param(cell, how, marks=[] if (i + k) % len(CELLS) == 1 else pytest.mark.long)
        for i, cell in enumerate(CELLS)
        for k, how in enumerate(HOW)
    ],
)
def test_layers_of_cells_are_those_of_torch(cell: str, how: str) -> None:
    torch.manual_seed(0)
    options, shape, has_states = HOW[how]
    m = CELLS[cell](**options).double()
    x = torch.randn(shape, dtype=F64)
    hx = first_states(m, shape[0 if m.batch_first else 1]) if has_states else None
    expected = pulled(m, x, hx)
    with Mesh(data=2):
        model = sl.parallelize(copy.deepcopy(m), strategy="fsdp")
        same(pulled(model, x, hx), expected)


@pytest.mark.parametrize("cell", CELLS)
def test_layers_of_cells_outside_jit(cell: str) -> None:
    torch.manual_seed(0)
    m = CELLS[cell](num_layers=2).double()
    x = torch.randn(5, 3, 3, dtype=F64)
    expected = pulled(m, x, None)
    with Mesh(data=2):
        same(pulled(m, sl.shard(x, "_ b@data _"), None), expected)
        out = m(sl.shard(x, "_ b@data _"))[0]
        assert str(sl.typeof(out)) == f"f64[5, 3@data, {out.shape[2]}]"


def test_the_plan_does_not_grow_with_steps() -> None:
    m = nn.GRU(4, 8, num_layers=2, bidirectional=True)
    with Mesh.abstract(data=2, tensor=2):
        plans = [sl.jit(lambda x: m(x)[0]).plan(torch.empty(steps, 8, 4)) for steps in (2, 128)]
    assert all(recurrences(plan) == {"recurrence": 4, "recurrence_backward": 4} for plan in plans)
    assert len(plans[1].full.splitlines()) <= len(plans[0].full.splitlines())


def test_rows_of_a_batch_do_not_move() -> None:
    with Mesh.abstract(data=2):
        x = sl.shard(torch.empty(64, 256, 64, device="meta"), "_ b@data _")
        m = sl.parallelize(nn.LSTM(64, 64, bidirectional=True, device="meta"), strategy="ddp")
        plan = sl.jit(lambda m, x: m(x)[0].sum().backward()).plan(m, x)
    assert not plan.replicated_ops
    calls = [line for line in plan.full.splitlines() if " = recurrence" in line]
    assert len(calls) == 4
    assert all("256@data" in line for line in calls)
    assert {c.kind for c in plan.collectives} <= {"all_reduce", "all_to_all"}  # of gradients of weights alone


@pytest.mark.parametrize("name", ["gru", "lstm", "rnn_tanh", "rnn_relu"])
def test_functions_of_torch_and_aten(name: str) -> None:
    torch.manual_seed(0)
    m = {"gru": nn.GRU, "lstm": nn.LSTM}.get(name, nn.RNN)(3, 4)
    x, h, params = torch.randn(5, 4, 3), torch.randn(1, 4, 4), [p.detach() for p in m.parameters()]
    states: Any = [h, 2 * h] if name == "lstm" else h
    for fn in (getattr(torch, name), getattr(torch.ops.aten, name), getattr(torch.ops.aten, name).input):
        run = lambda x, fn=fn: fn(x, states, params, True, 1, 0.0, True, False, False)
        with Mesh(data=2):
            jitted = sl.jit(run)
            assert recurrences(jitted.plan(x)) == {"recurrence": 1}
            same(jitted(x), run(x), 1e-5)


@pytest.mark.parametrize("cell", ["tanh", "gru", "lstm", "projected"])
@pytest.mark.parametrize("door", ["jit", "eager"])
def test_packed_sequences(cell: str, door: str) -> None:
    torch.manual_seed(0)
    m = CELLS[cell](num_layers=2, bidirectional=True).double()
    packed = pack_padded_sequence(torch.randn(5, 4, 3, dtype=F64), torch.tensor([5, 4, 4, 1]))
    hx = first_states(m, 4)
    layers: Any = torch.lstm if isinstance(hx, tuple) else torch.gru if cell == "gru" else torch.rnn_tanh
    run = lambda data, hx: layers(data, packed.batch_sizes, hx, m._flat_weights, True, 2, 0.0, True, True)
    expected = pulled(
        m,
        packed.data,
        hx,
        call=lambda data, hx: (lambda out, last: (out.data, last))(*m(PackedSequence(data, packed.batch_sizes), hx)),
    )
    with Mesh(data=2):
        x = packed.data if door == "jit" else sl.shard(packed.data, "n@data _")
        same(pulled(m, x, hx, call=sl.jit(run) if door == "jit" else run), expected)


PROGRAMS: dict[str, Callable[[Callable[..., Tensor], Any], Any]] = {
    "per-example gradients": lambda f, a: vmap(grad(f, (0, 1)), (0, None))(torch.stack([a[0], 2 * a[0]]), a[1]),
    "examples of weights": lambda f, a: vmap(grad(f, (0, 1)), (None, 0))(a[0], [torch.stack([p, 2 * p]) for p in a[1]]),
    "tangents": lambda f, a: jvp(lambda x: f(x, a[1]), (a[0],), (a[0].cos(),)),
    "tangents of gradients": lambda f, a: jvp(lambda x: grad(f, 1)(x, a[1]), (a[0],), (a[0].cos(),)),
    "second derivatives": lambda f, a: grad(lambda x, ps: total(grad(f, (0, 1))(x, ps)), (0, 1))(*a),
}
_LOOPS: dict[str, Callable[[Callable[..., Tensor], Any], Any]] = {  # torch has no rule of vmap for these layers
    "per-example gradients": lambda f, a: pytree.tree_map(
        lambda *g: torch.stack(g), *(grad(f, (0, 1))(k * a[0], a[1]) for k in (1, 2))
    ),
    "examples of weights": lambda f, a: pytree.tree_map(
        lambda *g: torch.stack(g), *(grad(f, (0, 1))(a[0], [k * p for p in a[1]]) for k in (1, 2))
    ),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch.func.jvp calls it
@pytest.mark.parametrize(
    "cell", ["tanh", *(pytest.param(cell, marks=pytest.mark.long) for cell in ("gru", "projected"))]
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_transforms_and_second_derivatives(program: str, cell: str) -> None:
    torch.manual_seed(0)
    m = CELLS[cell]().double()
    layers = {"tanh": torch.rnn_tanh, "gru": torch.gru, "projected": torch.lstm}[cell]
    states: Any = first_states(m, 2)
    states = [*states] if isinstance(states, tuple) else states

    def loss(x: Tensor, params: list[Tensor]) -> Tensor:
        return total(layers(x, states, params, True, 1, 0.0, True, False, False))

    args = torch.randn(2, 2, 3, dtype=F64), [p.detach() for p in m.parameters()]
    expected = _LOOPS.get(program, PROGRAMS[program])(loss, args)
    with Mesh(data=2):
        same(sl.jit(lambda *a: PROGRAMS[program](loss, a))(sl.shard(args[0], "_ b@data _"), args[1]), expected)


def test_several_cotangents_at_once() -> None:
    torch.manual_seed(0)
    m = nn.GRU(3, 4).double()
    x = torch.randn(5, 4, 3, dtype=F64)

    def rows(x: Tensor, batched: bool) -> Any:
        x = x.detach().requires_grad_()
        y = m(x)[0].sum((0, 1))
        if batched:
            return torch.autograd.grad(y, x, torch.eye(4, dtype=F64), is_grads_batched=True)[0]
        return torch.stack([torch.autograd.grad(one, x, retain_graph=True)[0] for one in y])

    with Mesh(data=2):
        same(sl.jit(lambda x: rows(x, True))(x), rows(x, False))


@pytest.mark.parametrize("cell", CELLS)
def test_autocast_has_the_dtypes_of_written_out_steps(cell: str) -> None:
    torch.manual_seed(0)
    m, x = CELLS[cell](), torch.randn(5, 4, 3)

    def run(m: Any, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return m(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.backends.mkldnn.flags(enabled=False):  # it needs AVX-512
            expected = run(m, x)
    with Mesh(data=2):
        ours = whole(sl.jit(run)(sl.parallelize(copy.deepcopy(m), strategy="fsdp"), x))
    for a, b in zip(pytree.tree_leaves(ours), pytree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


@pytest.mark.long
def test_dropout_between_layers() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 4, 3)
    m = nn.GRU(3, 4, num_layers=3, dropout=0.5)
    model = copy.deepcopy(m)
    drawn = []
    for mesh in (Mesh(data=2), Mesh(data=4)):
        with mesh:
            torch.manual_seed(1)
            run = sl.jit(lambda x: model(x)[0])
            drawn.append([whole(run(x)).detach() for _ in range(2)])
    same(drawn[0], drawn[1], 1e-6)
    assert not torch.equal(*drawn[0])
    model.eval(), m.eval()
    with Mesh(data=2):
        same(sl.jit(lambda x: model(x)[0])(x), m(x)[0], 1e-5)


def test_what_does_not_fit_is_refused_in_the_words_of_torch() -> None:
    with Mesh(data=2), pytest.raises(sl.ShardingError, match="Expected sequence length to be larger than 0 in RNN"):
        sl.jit(nn.GRU(3, 4))(torch.empty(0, 4, 3))


def _steps_of_a_tagger(steps: int) -> list[float]:
    torch.manual_seed(0)
    m = nn.GRU(3, 4)

    def step(m: Any, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = m(x)[0].square().mean()
        loss.backward()
        optimizer.step()
        return loss

    x = torch.randn(5, 3, 3)
    plain = copy.deepcopy(m)
    expected = step(plain, torch.optim.AdamW(plain.parameters(), 0.1), x).item()
    with Mesh(data=2):
        sl.parallelize(m, strategy="fsdp")
        jitted, optimizer = sl.jit(step), torch.optim.AdamW(m.parameters(), 0.1)
        losses = [jitted(m, optimizer, x).item() for _ in range(steps)]
    assert abs(losses[0] - expected) < 1e-6
    return losses


def test_a_step_with_an_optimizer() -> None:
    losses = _steps_of_a_tagger(3)
    assert losses == sorted(losses, reverse=True)


@pytest.mark.long
@pytest.mark.ranks
def test_a_step_on_ranks() -> None:
    ranks = run_ranks(_steps_of_a_tagger, 2, 3)
    assert ranks[0] == ranks[1] == pytest.approx(_steps_of_a_tagger(3), rel=1e-5)


def test_the_op_by_itself() -> None:
    """Gradients by finite differences, with rows of different lengths, and the checks that torch has for ops."""
    torch.manual_seed(0)
    lengths = torch.tensor([3, 1, 2])
    parts = [torch.randn(s, dtype=F64).requires_grad_() for s in ((3, 3, 8), (8, 1), (8,), (1, 2), (3, 1), (3, 2))]
    run = lambda *p: Recurrence.apply(*p, lengths, "lstm", True)[:2]
    assert torch.autograd.gradcheck(run, parts)
    torch.library.opcheck(
        torch.ops.shardlib.recurrence.default,
        (*(p.detach() for p in parts), lengths, "lstm", False),
        test_utils=("test_schema", "test_faketensor"),
    )
