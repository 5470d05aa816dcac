"""Ops over lists, and the optimizers that use them: on shards the same as on one device."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.optim.adam import adam

import shardlib as sl
from shardlib.eager import foreach as eager_foreach
from shardlib.rules.out_variants import op_named
from shardlib.rules.table import DECOMPOSITIONS
from shardlib.rules.tensor_ops import foreach

SHAPES = ((5, 3), (4,), ())
SPECS = (sl.P("x"), sl.P("x"), sl.P())
F64 = torch.float64


def draw(seed: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.rand(shape, generator=made, dtype=F64) * 0.8 + 0.1 for shape in SHAPES]


def placed(tensors: list[Tensor]) -> list[Tensor]:
    return [sl.shard(x, spec) for x, spec in zip(tensors, SPECS, strict=True)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    whole = [x.full_tensor() if isinstance(x, sl.ShardedTensor) else x for x in a]
    return all(x.shape == y.shape and torch.allclose(x, y, rtol=1e-12) for x, y in zip(whole, b, strict=True))


def arguments(name: str) -> list[Any]:
    """Something for every argument: lists of tensors or numbers, as many as there are parameters."""
    if name == "_foreach_mm":
        shapes = [[(3, 4), (1, 2)], [(4, 2), (2, 2)]]
        return [[torch.arange(math.prod(s), dtype=F64).view(s) for s in each] for each in shapes]
    out: list[Any] = []
    for a in op_named(name)._schema.arguments:
        kind = str(a.type)
        if a.kwarg_only or a.name in ("dtype", "non_blocking"):
            continue
        if kind == "List[Tensor]":
            out.append(draw(len(out)))
        elif a.name == "scalars" and kind == "Tensor":
            out.append(torch.tensor([0.5, 1.5, 2.0], dtype=F64))
        elif kind == "Tensor":
            out.append(torch.tensor(0.5, dtype=F64))
        else:
            out.append([0.5, 1.5, 2.0] if kind.startswith("List[") else 2)
    return out


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [*foreach._overloads()])
def test_lists_item_by_item(name: str) -> None:
    op = op_named(name)
    mine, torchs = arguments(name), arguments(name)
    found, expected = DECOMPOSITIONS[op](*mine), op(*torchs)
    if op._schema.is_mutable:
        found, expected = mine[0], torchs[0]
    assert same(list(found), list(expected))
    assert [x.dtype for x in found] == [x.dtype for x in expected]


def test_a_list_is_not_cast_in_place() -> None:
    with pytest.raises(RuntimeError, match="can't be cast"):
        DECOMPOSITIONS[torch.ops.aten._foreach_add_.Scalar]([torch.tensor(1)], 0.5)


def test_lists_in_a_jitted_function() -> None:
    def norms(xs: list[Tensor]) -> Tensor:
        return torch.stack(torch._foreach_norm(torch._foreach_mul(xs, 2.0)))

    with sl.Mesh(x=4):
        assert same([sl.jit(norms)(placed(draw(0)))], [norms(draw(0))])


def _rate(lr: float, fused: bool = False, **_: bool) -> Any:
    """The fused step takes a tensor, too."""
    return torch.tensor(lr) if fused else lr


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, **how: torch.optim.SGD(p, lr=0.1, **how),
    "sgd, momentum": lambda p, **how: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1, **how),
    "sgd, nesterov": lambda p, **how: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, maximize=True, **how),
    "adam": lambda p, **how: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, amsgrad=True, **how),
    "adamw": lambda p, **how: torch.optim.AdamW(p, lr=_rate(0.01, **how), weight_decay=0.1, **how),
    "adagrad": lambda p, **how: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, weight_decay=0.1, **how),
}


def steps(make: Callable[..., torch.optim.Optimizer], params: list[Tensor], place: Any, how: dict[str, bool]) -> None:
    optimizer = make(params, **how)
    for seed in range(1, 4):
        for p, g in zip(params, place(draw(seed)), strict=True):
            p.grad = g - 0.5
        optimizer.step()


@pytest.mark.parametrize("how", [{"foreach": True}, {"fused": True}, {}], ids=["foreach", "fused", "plain"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_on_shards(name: str, how: dict[str, bool]) -> None:
    whole = [x.requires_grad_() for x in draw(0)]
    steps(OPTIMIZERS[name], whole, lambda x: x, how)
    with sl.Mesh(x=4):
        mine = [x.requires_grad_() for x in placed(draw(0))]
        steps(OPTIMIZERS[name], mine, placed, how)
    assert same([x.detach() for x in mine], [x.detach() for x in whole])
    assert [x.spec for x in mine if isinstance(x, sl.ShardedTensor)] == [x.spec for x in _placed_in_mesh()]


def _placed_in_mesh() -> list[Any]:
    with sl.Mesh(x=4):
        return placed(draw(0))


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_a_step_is_skipped_where_a_gradient_was_not_finite(found: float) -> None:
    def step(params: list[Tensor], grads: list[Tensor]) -> None:
        state = [torch.zeros_like(p) for p in params]
        options = {"weight_decay": 0.0, "momentum": 0.9, "lr": 0.1, "dampening": 0.0}
        flags = {"nesterov": False, "maximize": False, "is_first_step": True}
        scale = {"grad_scale": torch.tensor(4.0), "found_inf": torch.tensor(found)}
        torch._fused_sgd_(params, grads, state, **options, **flags, **scale)

    whole, grads = draw(0), draw(1)
    step(whole, grads)
    with sl.Mesh(x=4):
        mine, my_grads = placed(draw(0)), placed(draw(1))
        step(mine, my_grads)
    assert same(mine, whole)
    assert same(my_grads, grads)


# Outside `jit`: at once where tensors are in the same pieces.


def in_pieces() -> list[Tensor]:
    """Uneven, even, empty and whole pieces."""
    made = torch.Generator().manual_seed(0)
    return [torch.rand(shape, generator=made, dtype=F64) + 0.1 for shape in ((5, 3), (4, 4), (2,), ())]


SPECS_OF = (sl.P("x"), sl.P("x", None), sl.P("x"), sl.P())


def both(fn: Callable[[list[Tensor], list[Tensor]], Any]) -> bool:
    """Whether a function does the same to sharded lists as to plain ones, and gives the same."""

    def run(place: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
        xs, ys = place(in_pieces()), place(in_pieces())
        return [*(fn(xs, ys) or []), *xs, *ys]

    with sl.Mesh(x=4):
        mine = run(lambda tensors: [sl.shard(x, spec) for x, spec in zip(tensors, SPECS_OF, strict=True)])
    return same(mine, run(lambda tensors: tensors))


SLICES = {"views": lambda xs: [x[1:] for x in xs[:2]], "aliases": lambda xs: [x.detach() for x in xs]}


@pytest.mark.parametrize(
    "fn",
    [
        lambda xs, ys: torch._foreach_add(xs, ys, alpha=2),
        lambda xs, ys: torch._foreach_add_(xs, ys),
        lambda xs, ys: torch._foreach_mul_(xs, [0.5, 1.0, 2.0, 3.0]),
        lambda xs, ys: torch._foreach_addcmul_(xs, ys, ys, 0.5),
        lambda xs, ys: torch._foreach_sqrt(xs),
        lambda xs, ys: torch._foreach_add_([xs[0], xs[0]], [ys[0], xs[0]]),  # each sees what was written before
        lambda xs, ys: torch._foreach_add_([xs[0], ys[0]], [ys[0], xs[0]]),
        lambda xs, ys: torch._foreach_add_(xs, xs),
        lambda xs, ys: torch._foreach_mul_(SLICES["views"](xs), 2.0),
        lambda xs, ys: torch._foreach_add_(SLICES["aliases"](xs), ys),
        lambda xs, ys: torch._foreach_add_(SLICES["aliases"](xs), xs),
        lambda xs, ys: torch._foreach_norm(xs),
        lambda xs, ys: torch._foreach_max(xs[:3]),
        lambda xs, ys: torch._foreach_pow(2.0, xs),
        lambda xs, ys: torch._foreach_copy_(xs, ys[::-1][::-1]),
        lambda xs, ys: torch._foreach_mm([xs[1]], [ys[1]]) if hasattr(torch, "_foreach_mm") else None,
    ],
)
def test_lists_outside_jit(fn: Callable[[list[Tensor], list[Tensor]], Any]) -> None:
    assert both(fn)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each call on the pieces of all, how many pieces of a list it has."""
    found: list[int] = []
    calls = eager_foreach._distinct_calls
    monkeypatch.setattr(
        eager_foreach, "_distinct_calls", lambda lists: found.append(len((it := calls(lists))[0])) or it
    )
    return found


def test_a_list_in_the_same_pieces_is_one_call(parts: list[int]) -> None:
    with sl.Mesh(x=4):
        xs = [sl.shard(x, spec) for x, spec in zip(in_pieces(), SPECS_OF, strict=True)]
        whole = [sl.shard(x, sl.P()) for x in in_pieces()]
        for scale in (2.0, 3.0):
            torch._foreach_mul_(xs, scale)
            torch._foreach_mul_(whole, scale)
        different = sum(len({s.data.data_ptr() for s in x.shards}) for x in xs)
        assert 4 < different == parts[0] <= 13
        assert parts == [different, 4] * 2, "devices that hold the same share it"
        torch._foreach_add_(xs, whole)  # in other pieces
        assert len(parts) == 4


ADAM: dict[str, tuple[bool, Callable[..., dict[str, Any]]]] = {  # in one call, options
    "plain": (True, dict),
    "weight decay": (True, lambda: {"weight_decay": 0.1}),
    "uphill": (True, lambda: {"maximize": True}),
    "rate in a tensor": (False, lambda: {"lr": torch.tensor(0.01)}),
    "the most so far": (False, lambda: {"amsgrad": True}),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("name", ADAM)
def test_adam_outside_jit(name: str, kind: Any, dtype: torch.dtype, parts: list[int]) -> None:
    at_once, options = ADAM[name]

    def train(place: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
        params = [x.requires_grad_() for x in place([x.to(dtype) for x in in_pieces()])]
        opt = kind(params, **options())
        for _ in range(3):
            for p in params:
                p.grad = (p * p).detach()
            opt.step()
        assert all(opt.state[p]["step"] == 3 for p in params)
        return [x.detach() for p in params for x in (p, opt.state[p]["exp_avg"], opt.state[p]["exp_avg_sq"])]

    with sl.Mesh(x=4):
        mine = train(lambda xs: [sl.shard(x, spec) for x, spec in zip(xs, SPECS_OF, strict=True)])
    for x, y in zip(mine, train(lambda xs: xs), strict=True):
        torch.testing.assert_close(x.full_tensor(), y)
    assert len(parts) == (3 if at_once and dtype != torch.bfloat16 else 0)


def _saved(params: list[Tensor], opt: Any) -> list[Tensor]:
    ones = [torch.ones_like(p, requires_grad=True) for p in params]
    loss = sum(((p.grad * one).sum() for p, one in zip(params, ones, strict=True)), torch.zeros(()))
    opt.step()
    loss.backward()
    return [one.grad for one in ones]


def _shared(name: str, other: str | None = None) -> Callable[[list[Tensor], Any], list[Tensor]]:
    """Steps with one counter for all parameters, or with one tensor as both moments."""

    def run(params: list[Tensor], opt: Any) -> list[Tensor]:
        opt.step()
        for p in params:
            opt.state[p][name] = opt.state[p if other else params[0]][other or name]
        opt.step()
        return []

    return run


def _set(**options: Any) -> Callable[[list[Tensor], Any], list[Tensor]]:
    def run(params: list[Tensor], opt: Any) -> list[Tensor]:
        opt.param_groups[0].update(options)
        opt.step()
        return []

    return run


UNUSUAL: dict[str, Callable[[list[Tensor], Any], list[Tensor]]] = {
    "a graph has saved the gradients": _saved,
    "one counter for all": _shared("step"),
    "one tensor is both moments": _shared("exp_avg_sq", "exp_avg"),
    "a rate with three digits": _set(lr=numpy.float16(0.1)),
    "a decay with three digits": _set(weight_decay=numpy.float16(0.1)),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_adam_does_what_torchs_does(name: str) -> None:
    def run(place: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
        params = [x.requires_grad_() for x in place(draw(0))]
        for p, g in zip(params, place(draw(1)), strict=True):
            p.grad = g
        opt = torch.optim.AdamW(params, lr=0.1)
        found = UNUSUAL[name](params, opt)
        return [x.detach() for x in (*params, *found)] + [opt.state[p]["exp_avg_sq"] for p in params]

    with sl.Mesh(x=4):
        mine = run(placed)
    assert same(mine, run(lambda xs: xs))


def test_adam_refuses_a_scale_as_torch_does() -> None:
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
    flags = {"amsgrad": False, "maximize": False, "foreach": False, "fused": False}
    with sl.Mesh(x=4), torch.no_grad(), pytest.raises(AssertionError):
        adam(
            *(placed(draw(i)) for i in range(4)), [], [torch.tensor(1.0) for _ in SHAPES],
            **flags, **numbers, grad_scale=torch.tensor(2.0),
        )  # fmt: skip


def _adamw(x: Tensor, *state: Tensor) -> None:
    torch._fused_adamw_(
        [x], *([s] for s in state), [], [torch.tensor(1.0)], lr=0.5, beta1=0.9, beta2=0.9, weight_decay=0.1, eps=1e-8,
        amsgrad=False, maximize=False,
    )  # fmt: skip


@pytest.mark.parametrize("held", [False, True], ids=["alone", "held"])
@pytest.mark.parametrize("turned", range(4), ids=["parameter", "gradient", "mean", "square"])
def test_a_step_goes_through_pieces_in_order(turned: int, held: bool) -> None:
    """Those of a program's results may lie in memory as the strides do not say."""

    def step(xs: list[Tensor]) -> list[Tensor]:
        before = [x.clone() for x in xs] if held else []
        _adamw(*xs)
        return [*xs, *before]

    def turn(x: Tensor) -> Tensor:
        return sl.shard(x.t().contiguous(), "_@x _")

    whole = [torch.arange(1.0, 17).view(4, 4) + i for i in range(4)]
    with sl.Mesh(x=2):
        mine = [sl.shard(x, "_@x _") for x in whole]
        mine[turned] = sl.jit(turn)(sl.shard(whole[turned].t().contiguous(), "_ _@x"))
        (piece, *_), strides = mine[turned]._locals, mine[turned].stride()
        assert piece.stride() != strides == (4, 1), "else nothing is tested here"
        found = step(mine)
    for x, y in zip(found, step(whole), strict=True):
        torch.testing.assert_close(x.full_tensor(), y)


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "nobody": lambda x: None,
    "a copy": lambda x: x.clone(),
    "a copy of the object": copy.copy,
    "a deep copy": lambda x: copy.deepcopy(x.detach()),
    "another name": lambda x: x.detach(),
    "a view": lambda x: x[1:],
    "a view that was read": lambda x: (y := x.view(-1), y + 1)[0],
    "a result": lambda x: x.detach() + 0,
    "what a backward pass needs": lambda x: x * x,
    "another placement": lambda x: x.redistribute(sl.P("x")) if isinstance(x, sl.ShardedTensor) else x.clone(),
}


@pytest.mark.parametrize("spec", [sl.P("x"), sl.P()])
@pytest.mark.parametrize("name", HOLDERS)
def test_a_step_writes_over_what_nobody_else_holds(name: str, spec: sl.P) -> None:
    def run(place: Callable[[Tensor], Any]) -> tuple[Any, Any, list[int], list[int]]:
        x, grad, mean, square = (place(torch.arange(1.0, 9) + i) for i in range(4))
        x.requires_grad_()
        other = HOLDERS[name](x)
        before = [piece.data_ptr() for piece in getattr(x, "_locals", ())]
        with torch.no_grad():
            _adamw(x, grad, mean, square)
        return x, other, before, [piece.data_ptr() for piece in getattr(x, "_locals", ())]

    with sl.Mesh(x=4):
        x, other, before, after = run(lambda x: sl.shard(x, spec))
    expected, expected_other, *_ = run(lambda x: x)
    torch.testing.assert_close(x.detach().full_tensor(), expected.detach())
    if other is not None:
        torch.testing.assert_close(other.detach().full_tensor(), expected_other.detach())
    is_shared = name == "another placement" and spec == sl.P("x")
    assert (before == after) is not is_shared


def test_what_was_handed_out_of_a_tensor_stays() -> None:
    with sl.Mesh(x=4):
        x, *state = (sl.shard(torch.arange(1.0, 9) + i, "_@x") for i in range(4))
    local, shards = x.to_local(), x.shards[1:3]
    _adamw(x, *state)
    assert [local.tolist(), *(s.data.tolist() for s in shards)] == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    assert x.shards[0].data[0] < 1


@pytest.mark.parametrize("step", [_adamw, sl.jit(lambda x, *_: x.add_(1.0))], ids=["outside jit", "inside"])
def test_what_another_process_may_read_stays(step: Callable[..., Any]) -> None:
    with sl.Mesh(x=2):
        x, *state = (sl.shard(torch.arange(1.0, 5) + i, "_@x") for i in range(4))
        for written_over in (True, False):
            if not written_over:
                x.to_local().share_memory_()  # as a queue of torch.multiprocessing does
            before = x.to_local().data_ptr()
            step(x, *state)
            assert (x.to_local().data_ptr() == before) is written_over


def test_integers_are_not_cast_outside_jit() -> None:
    with sl.Mesh(x=2), pytest.raises(RuntimeError, match="can't be cast"):
        torch._foreach_add_([sl.shard(torch.tensor([1, 2]), "_@x")], 0.5)
