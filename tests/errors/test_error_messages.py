"""What a user sees after a mistake: one table of bad inputs, with the words that must be in the error.

Every error names what was asked, the tensor, its shape, the spec and both sizes, the rule and the remedy, and comes
before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib import Mesh, P, ShardingError, shard

X = torch.zeros(8, 6)
RULES = {"batch": "data", "ff": "tensor"}


@dataclass(frozen=True)
class Bad:
    """A call that is refused, the lines that its error must hold, and its repaired twin, which runs."""

    name: str
    run: Callable[[], Any]
    says: tuple[str, ...]
    good: Callable[[], Any] | None = None


def _jit(fn: Callable[..., Any], *args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: sl.jit(fn, **options).plan(*args)


def _same(x: Any) -> Any:
    return x * 2


def _branch(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x
    return -x


def _turns(x: torch.Tensor) -> torch.Tensor:
    x.unsqueeze_(0)
    return x


def _writes(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2


def _two(x: torch.Tensor, n: int) -> torch.Tensor:
    return x * n


def _tree(p: dict[str, torch.Tensor]) -> torch.Tensor:
    return p["w"].sum() + p["b"].sum()


TREE = {"w": X, "b": torch.zeros(6)}

TABLE = [
    Bad(
        "unknown mesh axis",
        lambda: shard(X, "batch ff@tensr"),
        (
            "shard(x) with spec 'batch ff@tensr' on shape [8, 6], mesh (data=2, tensor=2):",
            "  * dim 1 `ff@tensr`: the mesh has no axis 'tensr'; did you mean 'tensor'?",
            "Remedy: use one of data, tensor",
        ),
        lambda: shard(X, "batch ff@tensor"),
    ),
    Bad(
        "axis used twice",
        _jit(_same, X, in_specs=("a@data b@data",)),
        (
            "jit in_specs(x) with spec 'a@data b@data' on shape [8, 6], mesh (data=2, tensor=2):",
            "  * axis 'data' is used by dim 0 `a@data` and by dim 1 `b@data`",
            "Rule: a mesh axis shards a tensor once",
        ),
        _jit(_same, X, in_specs=("a@data b@tensor",)),
    ),
    Bad(
        "wrong rank",
        _jit(_same, X, in_specs=("batch seq embed",)),
        (
            "jit in_specs(x) with spec 'batch seq embed' on shape [8, 6]",
            "  * the spec has 3 dims, the tensor has 2 dims",
            "Remedy: write `_` for a dim that stays whole, `...` for any number of them",
        ),
        _jit(_same, X, in_specs=("batch ...",)),
    ),
    Bad(
        "all offenders at once",
        _jit(_tree, TREE, in_specs=({"w": "a@dat b", "b": "c d"},)),
        (
            "jit in_specs: 2 of 2 specs do not fit, mesh (data=2, tensor=2):",
            "  * p['w'] with spec 'a@dat b' on shape [8, 6]: dim 0 `a@dat`: the mesh has no axis 'dat'",
            "  * p['b'] with spec 'c d' on shape [6]: the spec has 2 dims, the tensor has 1 dim",
        ),
    ),
    Bad(
        "factor size that does not divide",
        lambda: shard(X, "batch (heads hd)", heads=4),
        (
            "shard(x) with spec 'batch (heads hd)', heads=4 on shape [8, 6]",
            "  * dim 1 `(heads hd)`: heads=4 does not divide the dim's size 6",
            "Rule: the sizes of a dim's factors multiply to the dim",
        ),
        lambda: shard(X, "batch (heads hd)", heads=3),
    ),
    Bad(
        "data-dependent control flow",
        _jit(_branch, X),
        (
            "the traced function needs the value of gt (bool[])",
            "tests/errors/test_error_messages.py:",
            "in _branch: if x.sum() > 0:",
            "Remedy: torch.where(condition, a, b) for an if; for an assert or a stop, return the condition",
        ),
        _jit(lambda x: torch.where(x.sum() > 0, x, -x), X),
    ),
    Bad(
        "an input in another shape in place",
        _jit(_turns, X),
        (
            "  * input x is written to at",
            "in _turns: x.unsqueeze_(0)",
            "Remedy: use the op without the underscore, and a name of its own: y = x.unsqueeze(...)",
        ),
        _jit(_writes, X),
    ),
    Bad(
        "a list of names where a spec was meant",
        _jit(_same, X, in_specs=(["batch", None],)),
        (
            "_same: in_specs do not fit the values:",
            "  * x: the specs have a list of 2, the values a Tensor",
            "Remedy: write the spec of one tensor as one string ('batch seq') or as P('data', None), never as a tuple",
        ),
        _jit(_same, X, in_specs=["batch _"]),
    ),
    Bad(
        "a tuple of names where in_specs was meant",
        _jit(_same, X, in_specs=("batch", "ff")),
        (
            "_same: in_specs has 2 entries, the call has 1 argument:",
            "  * 1: 'ff'",
            "Remedy: a spec is one string, 'batch seq', not a tuple of names",
        ),
        _jit(_same, X, in_specs="batch ff"),
    ),
    Bad(
        "a spec for a number",
        _jit(_two, X, 3, in_specs=("batch _", "_")),
        ("_two: in_specs do not fit the values:", "  * n: spec '_' for 3, which is no tensor"),
        _jit(_two, X, 3, in_specs=("batch _", None)),
    ),
    Bad(
        "a parameter that is not there",
        _jit(_two, X, 3, in_specs={"y": "batch _"}),
        (
            "_two: in_specs do not fit the arguments:",
            "  * 'y' is no parameter; they are x, n",
            "Rule: in_specs is a tuple with an entry (or None) per positional argument, or a dict by parameter name",
        ),
        _jit(_two, X, 3, in_specs={"x": "batch _"}),
    ),
    Bad(
        "a key that is not there",
        _jit(_tree, TREE, in_specs=({"v": "_"},)),
        ("_tree: in_specs do not fit the values:", "  * p has no 'v'; it has 'w', 'b'"),
        _jit(_tree, TREE, in_specs=({"w": "batch _"},)),
    ),
    Bad(
        "one spec for a tree of tensors of several ranks",
        _jit(_tree, TREE, in_specs=("batch _",)),
        ("jit in_specs: 1 of 2 specs do not fit", "  * p['b'] with spec 'batch _' on shape [6]: the spec has 2 dims"),
        _jit(_tree, TREE, in_specs=("batch ...",)),
    ),
    Bad(
        "out_specs of another structure",
        _jit(_same, X, out_specs=("batch _", None)),
        ("_same: out_specs do not fit the values:", "the specs have a tuple of 2"),
        _jit(_same, X, out_specs="batch _"),
    ),
    Bad(
        "an argument that lives elsewhere",
        lambda: sl.jit(_same, in_specs=("batch _",))(shard(X, "_ ff")),
        (
            "_same: 1 of 1 arguments with a spec is elsewhere:",
            "  * x of shape [8, 6] is laid out [8, 6@tensor], in_specs say [8@data, 6]",
            "Remedy: x.redistribute(spec) before the call",
        ),
        lambda: sl.jit(_same)(shard(X, "_ ff")),
    ),
    Bad(
        "a tensor of another mesh",
        lambda: sl.jit(_same)(_elsewhere()),
        (
            "_same takes tensors of another mesh than the current one, Mesh(data=2, tensor=2",
            "  * x, f32[8@data, 6], lives on Mesh(data=4)",
            "Rule: all tensors of a program live on one mesh",
            "Remedy: place it again: shard(x.full_tensor(), spec)",
        ),
    ),
    Bad(
        "meta tensors where values are needed",
        lambda: sl.jit(_same)(X.to("meta")),
        (
            "_same runs on Mesh(data=2, tensor=2",
            "  * x of shape [8, 6] is on meta",
            "Remedy: meta tensors have no values: plan with them (step.plan(...))",
        ),
        lambda: sl.jit(_same).plan(X.to("meta")),
    ),
    Bad(
        "a number from a tensor of many",
        lambda: float(sl.jit(_same)(X)),
        ("only one element tensors can be converted to Python scalars",),
        lambda: float(sl.jit(torch.sum)(X)),
    ),
    Bad(
        "a budget that is exceeded",
        lambda: sl.jit(_two, in_specs=("batch _",), out_specs=P(), comm_budget=sl.comm_budget(max_bytes=10))(X, 2),
        (
            "_two exceeds its communication budget:",
            "  * 96 bytes are sent per device, the budget is 10",
            "  * all_gather[data] 96 B",
        ),
        lambda: sl.jit(_two, in_specs=("batch _",), out_specs=P(), comm_budget=sl.comm_budget(max_bytes=96))(X, 2),
    ),
]


def _elsewhere() -> torch.Tensor:
    with Mesh(data=4):
        return shard(X, "_@data _")


@pytest.mark.parametrize("bad", TABLE, ids=lambda bad: bad.name)
def test_a_mistake_is_explained(bad: Bad) -> None:
    with Mesh(data=2, tensor=2, rules=RULES), pytest.raises(ValueError) as error:  # noqa: PT011  the words are below
        bad.run()
    for line in bad.says:
        assert line in str(error.value), f"{line!r} is not in:\n{error.value}"


@pytest.mark.parametrize("bad", [bad for bad in TABLE if bad.good], ids=lambda bad: bad.name)
def test_its_twin_runs(bad: Bad) -> None:
    assert bad.good is not None
    with Mesh(data=2, tensor=2, rules=RULES):
        bad.good()


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (lambda: shard(X, "batch _"), "shard(x, 'batch _') on shape [8, 6] is outside any mesh"),
        (lambda: sl.jit(_same)(X), "_same is called outside any mesh"),
        (lambda: sl.jit(_same).plan(X), "_same is called outside any mesh"),
    ],
    ids=["shard", "call", "plan"],
)
def test_outside_any_mesh(run: Callable[[], Any], says: str) -> None:
    with pytest.raises(ShardingError) as error:
        run()
    assert str(error.value).startswith(says)
    assert "`with Mesh(data=2, tensor=4):`" in str(error.value)


def test_an_abstract_mesh_cannot_run() -> None:
    with Mesh.abstract(data=512), pytest.raises(ShardingError, match="an abstract mesh has no devices") as error:
        sl.jit(_same)(X)
    assert "plan on it (step.plan(...))" in str(error.value)


def test_backward_of_a_jitted_loss() -> None:
    with Mesh(data=2):
        w = torch.ones(3, requires_grad=True)
        sl.jit(lambda w: (w * w).sum())(w).backward()
        assert torch.equal(w.grad, 2 * torch.ones(3))
        loss = sl.jit(lambda w: (w * w).sum())(torch.ones(3))
        with pytest.raises(ShardingError, match="has no history to go back through") as error:
            loss.backward()
    assert "Rule: a result has a history if an argument, or a parameter that is read, requires gradients" in str(
        error.value
    )
