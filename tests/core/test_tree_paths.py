"""Pytree nodes that are registered without keys, as every output of diffusers is."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import shardlib as sl
from shardlib import Mesh, ShardingError
from shardlib.core.tree_paths import flatten_with_path

X = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


class BaseOutput(OrderedDict[str, Any]):
    """A dataclass that is an OrderedDict of its fields, as in diffusers."""

    def __init_subclass__(cls) -> None:
        unflatten = lambda values, context: cls(**pytree._dict_unflatten(values, context))
        pytree.register_pytree_node(cls, pytree._dict_flatten, unflatten)

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            if (value := getattr(self, field.name)) is not None:
                self[field.name] = value


@dataclass
class Output(BaseOutput):
    sample: Any
    extra: Any = None


class Point:
    """Of tensors only, which its constructor checks."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        assert isinstance(a, Tensor)
        assert isinstance(b, Tensor)
        self.a, self.b = a, b


class Reverse(dict[str, Any]):
    """A dict whose leaves are in the reverse order of its keys."""


pytree.register_pytree_node(Point, lambda p: ([p.a, p.b], None), lambda leaves, _: Point(*leaves))
pytree.register_pytree_node(
    Reverse,
    lambda x: ([x[k] for k in sorted(x, reverse=True)], sorted(x, reverse=True)),
    lambda leaves, keys: Reverse(zip(keys, leaves, strict=True)),
)

MAKERS = {
    "output": lambda y: Output(sample=y),
    "nested": lambda y: Output(sample=y, extra=(Output(sample=2 * y), {"p": Point(y, y + 1)})),
    "object": lambda y: Point(y, y.sum(0)),
    "reverse": lambda y: Reverse(a=y, c=y.sum(), b=3 * y),
}


class Net(nn.Linear):
    def __init__(self, make: Any) -> None:
        torch.manual_seed(0)
        super().__init__(8, 4)
        self.make = [make]

    def forward(self, x: Tensor, other: Any = None) -> Any:
        for leaf in pytree.tree_leaves(other):
            x = x + (0 if leaf is None else leaf.sum())
        return self.make[0](super().forward(x))


def leaves(tree: Any) -> list[Tensor]:
    return [x.full_tensor() if isinstance(x, sl.ShardedTensor) else x for x in pytree.tree_leaves(tree)]


@pytest.mark.parametrize("argument", [None, *MAKERS])
@pytest.mark.parametrize("result", MAKERS)
def test_they_are_results_and_arguments(result: str, argument: str | None) -> None:
    make, other = MAKERS[result], None if argument is None else MAKERS[argument](X)
    expected = Net(make)(X, other)
    with Mesh(data=2, tensor=2):
        model = sl.parallelize(Net(make), {"weight": "out@tensor in"})
        for actual in (model(X, other), sl.jit(lambda m, x, y: m(x, y))(model, X, other)):
            assert type(actual) is type(expected)
            torch.testing.assert_close(leaves(actual), leaves(expected))
        sl.check(lambda x, y: model(x, y), X, other)
        sum(x.sum() for x in pytree.tree_leaves(model(X, other))).backward()
    plain = Net(make)
    sum(x.sum() for x in pytree.tree_leaves(plain(X, other))).backward()
    torch.testing.assert_close(leaves(model.weight.grad), leaves(plain.weight.grad))


@pytest.mark.parametrize(
    ("value", "specs"),
    [
        (Output(sample=X, extra=X), Output(sample="b@data _", extra="_ f@data")),
        (Output(sample=X, extra=X), {"sample": "b@data _", "extra": "_ f@data"}),
        (Reverse(a=X, b=X), Reverse(a="_ f@data", b="b@data _")),
        (Reverse(a=X, b=X), {"a": "_ f@data", "b": "b@data _"}),
        (Point(X, X), (Point, "b@data _", "_ f@data")),
    ],
)
def test_they_are_trees_of_specs(value: Any, specs: Any) -> None:
    if isinstance(specs, tuple):  # its constructor takes tensors only
        specs, kind = Point.__new__(Point), specs
        specs.a, specs.b = kind[1:]
    with Mesh(data=2):
        actual = sl.jit(lambda x: x, in_specs=(specs,), out_specs=specs)(value)
    assert [sl.typeof(x) for x in pytree.tree_leaves(actual)] == ["f32[8@data, 8]", "f32[8, 8@data]"]


def test_errors_name_their_leaves() -> None:
    with Mesh(data=2):
        with pytest.raises(ShardingError, match=r"the value of x\['sample'\] "):
            sl.jit(lambda x: x["sample"].item())(Output(sample=X.sum()))
        with pytest.raises(ShardingError, match=r"the value of x\[0\] "):
            sl.jit(lambda x: x.a.item())(Point(X.sum(), X))
        with pytest.raises(ShardingError, match="has no 'b'; it has 'sample'"):
            sl.jit(lambda x: x, in_specs=({"b": "_"},))(Output(sample=X))


def test_shard_map_and_scan_take_them() -> None:
    with Mesh(data=2):
        specs = Output(sample="b@data _", extra="b@data _")
        body = sl.shard_map(
            lambda p: Output(sample=2 * p["sample"], extra=p["extra"]), in_specs=(specs,), out_specs=specs
        )
        actual = sl.jit(body)(Output(sample=X, extra=X))
        torch.testing.assert_close(leaves(actual), [2 * X, X])
        carry, _ = sl.scan(lambda c, x: (Point(c.a + x, c.b), c), Point(X[0], X[1]), X)
        torch.testing.assert_close(leaves(carry), [X[0] + X.sum(0), X[1]])


def test_paths_are_those_of_torch_where_there_are_keys() -> None:
    tree = {"a": [1, (2, None)], "b": OrderedDict(c=torch.return_types.max((X, X)))}
    ours, theirs = flatten_with_path(tree), pytree.tree_flatten_with_path(tree)
    assert [path for path, _ in ours[0]] == [path for path, _ in theirs[0]]
    assert ours[1] == theirs[1]
