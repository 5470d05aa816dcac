"""JAX's PartitionSpec where specs are, and the rules of Flax and MaxText; by stand-ins, and by JAX itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from shardlib.integrations.logical_axes import logical_to_mesh
from shardlib.sharding.spec import Spec

UNCONSTRAINED = object()


class Parts:
    """As JAX's class since 0.5: no tuple; it also names axes over which partial sums remain."""

    UNCONSTRAINED = UNCONSTRAINED

    def __init__(self, *parts: Any, unreduced: Any = frozenset()) -> None:
        self.parts, self.unreduced, self.reduced = parts, frozenset(unreduced), frozenset()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.parts)

    def __repr__(self) -> str:
        return f"PartitionSpec{self.parts}"


def new_tuple(cls: Any, *parts: Any) -> Any:
    return tuple.__new__(cls, parts)


Tuple: Any = type("PartitionSpec", (tuple,), {"UNCONSTRAINED": UNCONSTRAINED, "__new__": new_tuple})
Later: Any = type("PartitionSpec", (Parts,), {"__module__": "jax.sharding"})
Renamed: Any = type("P", (Parts,), {"__module__": "jax"})


def jax_class() -> Any:
    from jax.sharding import PartitionSpec

    return PartitionSpec


CLASSES = [
    pytest.param(lambda: Tuple, id="tuple"),
    pytest.param(lambda: Later, id="later"),
    pytest.param(lambda: Renamed, id="renamed"),
    pytest.param(jax_class, id="jax", marks=pytest.mark.peer),
]
each_class = pytest.mark.parametrize("get_class", CLASSES)


@each_class
def test_texts(get_class: Any) -> None:
    spec = get_class()
    texts = {
        spec(): "...",
        spec("data"): "_@data ...",
        spec(None, ("pod", "data")): "_ _@(pod data) ...",
        spec(spec.UNCONSTRAINED, "tensor"): "_? _@tensor ...",
    }
    for x, text in texts.items():
        assert str(Spec.convert(x)) == text


@each_class
def test_where_specs_are(get_class: Any) -> None:
    """In trees of a jitted function, in `shard`, a table of parameters, and `shard_map`; each gives what `P` gives."""
    results = []
    for spec in (get_class(), sl.P):
        with sl.Mesh(data=2, tensor=2):
            args = ({"x": torch.ones(4, 6)}, torch.ones(6, 8))
            step = sl.jit(
                lambda inputs, w: inputs["x"] @ w,
                in_specs=({"x": spec("data")}, spec(None, "tensor")),
                out_specs=spec("data"),
            )
            layer = sl.parallelize(nn.Linear(6, 8), {"weight": spec("tensor", None), "bias": spec("tensor")})
            twice = sl.shard_map(lambda x: 2 * x, in_specs=(spec("data"),), out_specs=spec("data"))
            tensors: list[Tensor] = [
                step(*args), sl.shard(torch.ones(4, 6), spec(("data", "tensor"))), layer.weight, twice(torch.ones(4))
            ]  # fmt: skip
            results.append([sl.typeof(x) for x in tensors])
    assert results[0] == results[1]
    assert results[0] == ["f32[4@data, 8]", "f32[4@(data tensor), 6]", "f32[8@tensor, 6]", "f32[4@data]"]


def test_an_open_dim() -> None:
    """The compiler may shard a dim that JAX calls unconstrained."""
    spec = Later
    with sl.Mesh(data=2):
        step = sl.jit(lambda x, y: x + y, in_specs=(spec(UNCONSTRAINED), "batch@data"))
        assert str(step.plan(torch.ones(4), torch.ones(4)).layout_of("result")) == "4@data"


def test_partial_sums_are_refused() -> None:
    with sl.Mesh(data=2, tensor=2), pytest.raises(sl.ShardingError) as error:
        sl.shard(torch.ones(4), Later("data", unreduced={"tensor"}))
    assert "because of unreduced={'tensor'}" in str(error.value)
    assert "leave these axes out" in str(error.value)


RULES = [("batch", "X"), ("features", "X"), ("heads", "Y"), ("batch", "Z")]  # of flax's docstring
MAXTEXT = [
    ("activation_batch", ["data", "fsdp", "fsdp_transpose", "expert"]), ("activation_length", ["sequence"]),
    ("activation_embed", ["tensor"]), ("mlp", ["fsdp_transpose", "tensor", "tensor_sequence"]),
    ("embed", ["fsdp", "fsdp_transpose", "sequence"]), ("embed", ["fsdp", "sequence"]), ("norm", ["tensor"]),
]  # fmt: skip
NAMES = [
    (RULES, ("batch", "length", "heads", "features"), ("X", None, "Y", None)),
    (RULES, ("features", "batch"), (None, "X")),
    (RULES, ("features",), ("X",)),
    (RULES, (None, "heads"), (None, "Y")),
    ([("a", None), ("a", "X")], ("a",), (None,)),
    ([("b", "X"), ("a", ("X", "Y")), ("a", "Y")], ("a", "b"), ("Y", "X")),
    (MAXTEXT, ("embed", "mlp"), (("fsdp", "sequence"), ("fsdp_transpose", "tensor", "tensor_sequence"))),
    ([("a", "X"), ("b", "Y")], ("a", ("X", "Z"), "b"), (None, ("X", "Z"), "Y")),
    (MAXTEXT, ("mlp", "norm"), (("fsdp_transpose", "tensor", "tensor_sequence"), None)),
]


@pytest.mark.parametrize(("rules", "names", "axes"), NAMES)
def test_rules(rules: Any, names: Any, axes: Any) -> None:
    assert logical_to_mesh(Tuple(*names), rules) == sl.P(*axes)
    assert logical_to_mesh([sl.P(*names), None], rules) == [sl.P(*axes), None]


@pytest.mark.peer
@pytest.mark.parametrize(("rules", "names", "axes"), NAMES)
def test_rules_as_flax_reads_them(rules: Any, names: Any, axes: Any) -> None:
    """`axes` are what flax returns."""
    flax = pytest.importorskip("flax.linen")
    converted = flax.logical_to_mesh_axes(
        names, tuple((name, tuple(x) if isinstance(x, list) else x) for name, x in rules)
    )
    assert sl.P(*converted) == sl.P(*axes)


def test_axes_that_a_mesh_lacks() -> None:
    mesh = sl.Mesh.abstract(fsdp=4, tensor=2)
    tree = {"x": sl.P("activation_batch", "activation_length", "activation_embed"), "w": sl.P("embed", "mlp")}
    converted = logical_to_mesh(tree, MAXTEXT, mesh)
    assert converted == {"x": sl.P("fsdp", None, "tensor"), "w": sl.P("fsdp", "tensor")}


@pytest.mark.parametrize(
    ("spec", "rules", "text"),
    [
        (sl.P("a", "a"), [("a", "X")], r"P\('a', 'a'\) names a dim twice:\n  \* a\n.*\nRemedy: another name for one"),
        (
            {"w": ("embed", "mlp"), "x": sl.P("embed")},
            [("e", "X")],
            r"these leaves are no specs:\n  \* tree\['w'\]\[0\]: 'embed'\n  \* tree\['w'\]\[1\]: 'mlp'\n"
            r'(.|\n)*P\("embed", "mlp"\) for',
        ),
        ("embed", [], r"these leaves are no specs:\n  \* tree: 'embed'"),
        (sl.P("a"), [("a", "X"), "b", ("c", 3)], r"these are no rules:\n  \* 'b'\n  \* \('c', 3\)\n.*\nRemedy: write "),
    ],
)
def test_refused_rules(spec: Any, rules: Any, text: str) -> None:
    with pytest.raises(sl.ShardingError, match=text):
        logical_to_mesh(spec, rules)
