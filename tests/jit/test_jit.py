"""`jit`: what goes in and out of a compiled function, when it is compiled again, and what happens to donated memory."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

import shardlib as sl
from shardlib import Mesh, P, ShardedTensor, ShardingError, shard
from tests.helpers.ranks import RankError, run_ranks
from tests.helpers.trace_runs import TraceRuns

X = torch.arange(24.0).view(8, 3)


@pytest.fixture(autouse=True)
def mesh() -> Iterator[Mesh]:
    with Mesh(data=2, tensor=2, rules={"batch": "data", "ff": "tensor"}) as mesh:
        yield mesh


def whole(x: Any) -> Any:
    return pytree.tree_map_only(ShardedTensor, lambda t: t.full_tensor(), x)


# --- arguments and results --------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class State:
    w: Any
    step: Any


pytree.register_dataclass(State)


@pytest.mark.parametrize(
    "tree",
    [
        {"a": X, "b": [X, (X, {"c": X})]},
        [X, X],
        (X,),
        Pair(X, X),
        State(X, X),
        {"b": X, "a": X},
        X,
        [],
        {1: X, (2, 3): X},
    ],
    ids=["nested", "list", "tuple", "namedtuple", "dataclass", "unsorted", "leaf", "empty", "odd keys"],
)
def test_pytrees_in_and_out(tree: Any) -> None:
    step = sl.jit(lambda t: pytree.tree_map(lambda x: x + 1, t))
    expected = pytree.tree_map(lambda x: x + 1, tree)
    for given in (tree, step(tree), tree):  # plain, sharded, and again by the warm path
        found = step(given)
        assert pytree.tree_structure(found) == pytree.tree_structure(expected)
    for a, b in zip(pytree.tree_leaves(whole(step(tree))), pytree.tree_leaves(expected), strict=True):
        assert torch.equal(a, b)


def test_results_that_are_no_tensors() -> None:
    def fn(x: Tensor) -> Any:
        return {"y": x + 1, "n": 3, "none": None, "name": "a", "sizes": (x.shape[0], [None])}

    step = sl.jit(fn, in_specs=("batch _",))
    for _ in range(2):
        out = step(X)
        assert {k: v for k, v in out.items() if k != "y"} == {"n": 3, "none": None, "name": "a", "sizes": (8, [None])}


def test_none_among_arguments() -> None:
    step = sl.jit(lambda x, bias=None: x if bias is None else x + bias, in_specs=("batch _", None))
    assert torch.equal(step(X, None).full_tensor(), X)
    assert torch.equal(step(X, torch.ones(3)).full_tensor(), X + 1)
    assert torch.equal(step(X, None).full_tensor(), X)
    assert len(step.retraces) == 1


def test_keyword_arguments() -> None:
    step = sl.jit(lambda x, *, scale, offset=0.0: x * scale + offset, in_specs={"x": "batch _", "scale": "_"})
    scale = torch.tensor([1.0, 2.0, 3.0])
    for call in (lambda: step(X, scale=scale, offset=1.0), lambda: step(scale=scale, x=X, offset=1.0)):
        assert torch.equal(call().full_tensor(), X * scale + 1)
        assert torch.equal(call().full_tensor(), X * scale + 1)
    assert str(step.plan(x=X, scale=scale).layout_of("x")) == "8@data, 3"
    assert str(step.plan(X, scale=scale).layout_of("x")) == "8@data, 3"


def test_a_tuple_of_specs_reaches_arguments_given_by_name() -> None:
    step = sl.jit(lambda x, y: x @ y, in_specs=("batch _", "_ ff"))
    plan = step.plan(X, y=torch.ones(3, 4))
    assert (str(plan.layout_of("x")), str(plan.layout_of("y"))) == ("8@data, 3", "3, 4@tensor")


def test_prefix_specs() -> None:
    step = sl.jit(
        lambda state, pair: (state.w * pair.a, {"b": pair.b + state.step}),
        in_specs=(State("batch _", None), Pair("batch _", P("tensor"))),
        out_specs=("batch _", P()),
    )
    plan = step.plan(State(X, torch.ones(())), Pair(X, X))
    assert str(plan.layout_of("state.w")) == str(plan.layout_of("pair.a")) == "8@data, 3"
    assert str(plan.layout_of("pair.b")) == "8@tensor, 3"
    assert (str(plan.layout_of("result[0]")), str(plan.layout_of("result[1]['b']"))) == ("8@data, 3", "8, 3")


@pytest.mark.parametrize("static", [{"static_argnums": 1}, {"static_argnames": "n"}, {"static_argnums": -1}])
def test_static_arguments(static: Any) -> None:
    """A static argument stays whole, is compared by value, and may be given by position or by name."""
    seen = TraceRuns()

    def fn(x: Tensor, n: Any) -> Tensor:
        seen.note(n)
        return x * n[0]

    step = sl.jit(fn, in_specs=("batch _",), **static)
    assert torch.equal(step(X, (2, "a")).full_tensor(), 2 * X)
    assert torch.equal(step(X, (2, "a")).full_tensor(), 2 * X)
    assert torch.equal(step(X, n=(3, "a")).full_tensor(), 3 * X)
    assert seen.notes == [(2, "a"), (3, "a")]


def test_modules() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    params = dict(model.named_parameters())
    specs = {"0.weight": "ff _", "0.bias": "ff", "2.weight": "_ ff", "2.bias": "_"}
    step = sl.jit(lambda p, x: functional_call(model, p, (x,)), in_specs=(specs, "batch _"))
    torch.testing.assert_close(step(params, X).full_tensor(), model(X).detach())
    assert str(step.plan(params, X).layout_of("p['0.weight']")) == "8@tensor, 3"


class Model:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    @sl.jit
    def double(self, x: Tensor) -> Tensor:
        return 2 * self.scale * x

    @sl.jit(in_specs=(None, "batch _"))
    def triple(self, x: Tensor) -> Tensor:
        """Three times."""
        return 3 * self.scale * x


def test_methods_and_decorators() -> None:
    one, two = Model(1.0), Model(2.0)
    for _ in range(2):
        assert torch.equal(one.double(X).full_tensor(), 2 * X)
        assert torch.equal(two.double(X).full_tensor(), 4 * X)
        assert torch.equal(two.triple(X).full_tensor(), 6 * X)
    assert Model.triple.__doc__ == "Three times."
    assert str(Model.triple.plan(one, X).layout_of("x")) == "8@data, 3"


def test_nested() -> None:
    inner = sl.jit(lambda x: x * 2, in_specs=("_ _@tensor",))
    outer = sl.jit(lambda x: inner(x) + 1, in_specs=("batch _",))
    assert torch.equal(outer(X).full_tensor(), 2 * X + 1)
    assert str(outer.plan(X).layout_of("mul")) == "8@data, 3", "an inner jit is part of the outer program"


def test_transforms() -> None:
    step = sl.jit(lambda x: (x * x).sum(), in_specs=("batch _",))
    assert torch.equal(sl.grad(step)(X), 2 * X), "under a transform it is the plain function"
    assert torch.equal(sl.jit(sl.grad(step), in_specs=("batch _",))(X).full_tensor(), 2 * X)
    assert torch.equal(sl.vmap(sl.jit(torch.sum))(X), X.sum(1))
    value, grad = sl.jit(sl.value_and_grad(step))(X)
    assert (float(value), torch.equal(grad.full_tensor(), 2 * X)) == (float((X * X).sum()), True)


# --- compiling again --------------------------------------------------------------------------------------------------


def test_retraces_have_reasons() -> None:
    traced = TraceRuns()

    def fn(x: Tensor, n: int = 1) -> Tensor:
        traced.note()
        return x * n

    step = sl.jit(fn)
    step(X), step(X), step(X + 1)
    assert (len(traced), step.retraces) == (1, [])
    step(X[:4])
    step(X[:4].double())
    step(X[:4].double(), 2)
    step(shard(X[:4].double(), "batch _"), 2)
    with Mesh(data=4):
        step(X)
    assert len(traced) == 6
    assert step.retraces == [
        "x: f32[8, 3] -> f32[4, 3]",
        "x: f32[4, 3] -> f64[4, 3]",
        "the arguments have another structure: now with n",
        "x: f64[4, 3] -> f64[4, 3] [4@data, 3]",
        "the mesh was Mesh(data=2, tensor=2, rules={'batch': 'data', 'ff': 'tensor'}), is Mesh(data=4)",
    ]
    step(X)
    assert len(traced) == 6, "every program is kept"


def test_flags_and_numbers_are_told_apart() -> None:
    step = sl.jit(lambda x, flag: x + 1 if flag is True else x + 10 * flag)
    assert [float(step(torch.zeros(()), f)) for f in (True, 1, 1.0, True, 1, 0)] == [1, 10, 10, 1, 10, 0]


def test_plans_are_kept() -> None:
    step = sl.jit(lambda x: x.sum(), in_specs=("batch _",))
    assert step.plan(X) is step.plan(X)
    assert step.plan(X.to("meta")) is not step.plan(X)


def test_a_budget_holds_for_warm_calls() -> None:
    step = sl.jit(lambda x: x.sum(), in_specs=("batch _",))
    step(X)
    with sl.comm_budget(forbid=("all_reduce",)), pytest.raises(ShardingError, match="exceeds its communication budget"):
        step(X)
    step(X)


def test_threads() -> None:
    step, failures = sl.jit(lambda x: x.sin().sum(), in_specs=("batch _",)), []
    inside = sl.current_mesh()
    assert inside is not None

    def work(n: int) -> None:
        with inside:
            for i in range(5):
                x = torch.full((8 + 2 * (i % 2), 3), float(n))
                if abs(float(step(x)) - float(x.sin().sum())) > 1e-4:
                    failures.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not failures
    assert len(step.programs.entries) == 2


# --- donation ---------------------------------------------------------------------------------------------------------


def _update(w: Tensor, g: Tensor) -> Tensor:
    return w - 0.5 * g


def _pointers(x: ShardedTensor) -> list[int]:
    return [s.data.data_ptr() for s in x.shards]


def test_a_donated_result_is_updated_in_place() -> None:
    step, g = sl.jit(_update, in_specs=("batch _", "batch _"), donate_argnums=0), shard(torch.ones(8, 3), "batch _")
    w = step(shard(X, "batch _"), g)
    before = _pointers(w)
    for i in range(3):
        w = step(w, g)
        assert torch.equal(w.full_tensor(), X - 0.5 * (i + 2))
    assert _pointers(w) == before


def test_reading_what_was_donated_is_refused() -> None:
    step, g = sl.jit(_update, donate_argnums=0), shard(torch.ones(8, 3), "batch _")
    old = step(shard(X, "batch _"), g)
    new = step(old, g)
    for read in (old.full_tensor, old.to_local, lambda: step(old, g), lambda: old.shards):
        with pytest.raises(ShardingError, match="a tensor is read after it was donated to _update") as error:
            read()
    assert "read the function's result instead" in str(error.value)
    assert torch.equal(new.full_tensor(), X - 1)
    assert repr(old) == repr(new), "what it was can still be said"


def test_memory_of_others_is_never_written_to() -> None:
    """Plain tensors, placed ones, second names, local pieces in somebody's hands: all keep their values."""
    step, ones = sl.jit(_update, donate_argnums=0), torch.ones(8, 3)
    plain = X.clone()
    step(plain, ones)
    placed = shard(plain, P())
    step(placed, ones)
    step(shard(plain, "batch _"), ones)
    assert torch.equal(plain, X)
    mine = step(plain, ones)
    local = mine.to_local()
    kept, view = local.clone(), local[1:]
    after = step(mine, ones)
    assert torch.equal(local, kept)
    assert torch.equal(after.full_tensor(), X - 1)
    del local
    again = step(after, ones)
    assert torch.equal(view, kept[1:])
    alias = again.detach()
    step(again, ones)
    assert torch.equal(alias.full_tensor(), X - 1.5)


def test_one_tensor_given_twice_and_donated() -> None:
    step = sl.jit(lambda a, b: (a - 1, b * 2), donate_argnums=(0, 1))
    x = step(X, X)[0]
    a, b = step(x, x)
    assert torch.equal(a.full_tensor(), X - 2)
    assert torch.equal(b.full_tensor(), 2 * (X - 1))
    same = sl.jit(lambda x: (y := x + 1, y))(X)
    a, b = step(*same)
    assert torch.equal(a.full_tensor(), X)
    assert torch.equal(b.full_tensor(), 2 * (X + 1))


def test_devices_that_share_a_constant() -> None:
    zeros = sl.jit(lambda: torch.zeros(8, 3), out_specs="batch _")()
    step = sl.jit(lambda z: z + 1, donate_argnums=0)
    assert torch.equal(step(zeros).full_tensor(), torch.ones(8, 3))


def test_donation_by_name() -> None:
    step = sl.jit(_update, donate_argnums=0)
    w = step(X, torch.ones(8, 3))
    step(w=w, g=torch.ones(8, 3))
    with pytest.raises(ShardingError, match="donated"):
        w.full_tensor()


# --- ranks ------------------------------------------------------------------------------------------------------------


def _disagree() -> None:
    import torch.distributed as dist

    rank = dist.get_rank()
    with Mesh(data=2):
        n = 8 if rank == 0 else 4
        sl.jit(lambda x: x.reshape(n, -1).sum(0), in_specs=("_@data _",))(torch.ones(8, 4))


@pytest.mark.ranks
def test_ranks_with_different_code() -> None:
    with pytest.raises(RankError) as error:
        run_ranks(_disagree, 2)
    for refused in error.value.errors.values():
        text = str(refused)
        assert text.startswith("the ranks are about to run different programs")
        assert "rank 1" in text
        assert "Remedy: start all ranks from the same code" in text


def test_a_single_spec_is_every_arguments() -> None:
    with sl.Mesh(data=2):
        plan = sl.jit(lambda x, y, z: x + y + z, in_specs="batch@data _").plan(
            *(torch.ones(4, 3),) * 2, z=torch.ones(4, 3)
        )
    assert [str(plan.layout_of(name)) for name in "xyz"] == ["4@data, 3"] * 3


@pytest.mark.parametrize(
    ("args", "named"), [((X,), {}), ((X, None), {}), ((X,), {"z": X}), ((X, None, X), {}), ((X, X), {"z": X})]
)
def test_specs_of_parameters_that_are_left_out(args: Any, named: Any) -> None:
    def scaled(x: Tensor, y: Tensor | None = None, z: Tensor | None = None) -> Any:
        return x * 2, y, z

    found = sl.jit(scaled, in_specs=("a@data b", None, "a b@data"))(*args, **named)
    pytree.tree_map(torch.testing.assert_close, whole(found), scaled(*args, **named))
    assert str(found[0].spec) == "a@data b@()"
    assert found[2] is None or str(found[2].spec) == "a@() b@data"
    with pytest.raises(sl.ShardingError, match=r"in_specs has 4 entries(.|\n)*3: 'c'"):
        sl.jit(scaled, in_specs=("a@data b", None, None, "c"))(X)
