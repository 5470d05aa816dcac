"""Small words at the border: a mesh that reads as a mapping, rules as pairs, strict meshes, `P` as a sequence, lengths
of any name, code without a mesh."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import shardlib as sl
from shardlib import Mesh, P, ShardingError, shard, typeof
from tests.helpers.ranks import run_ranks

X = torch.arange(24.0).view(4, 6)
RULES = {"batch": "data", "ff": "tensor", "whole": None}


# --- a mesh reads as a mapping ----------------------------------------------------------------------------------------


def test_a_mesh_reads_as_its_shape() -> None:
    mesh = Mesh(pod=1, data=2, tensor=3)
    assert list(mesh.shape.items()) == [("pod", 1), ("data", 2), ("tensor", 3)]
    assert (mesh.shape["data"], mesh["data"], len(mesh), mesh.size) == (2, 2, 3, 6)
    assert list(mesh) == list(mesh.keys()) == ["pod", "data", "tensor"]
    assert dict(mesh) == {**mesh} == {"pod": 1, "data": 2, "tensor": 3}
    assert ("data" in mesh, "dat" in mesh, 2 in mesh) == (True, False, False)
    assert bool(Mesh(one=1))
    assert Mesh.abstract(data=64)["data"] == 64
    with pytest.raises(TypeError):
        mesh.shape["data"] = 4  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dta", "Mesh(data=2) has no axis 'dta'; did you mean 'data'?"),
        ("x", "Mesh(data=2) has no axis 'x'"),
        (0, "Mesh(data=2) has no axis 0"),
    ],
)
def test_an_axis_that_a_mesh_lacks(name: Any, message: str) -> None:
    with pytest.raises(ShardingError) as error:
        Mesh(data=2)[name]
    assert str(error.value) == message


# --- rules as pairs ---------------------------------------------------------------------------------------------------

PAIRS: list[tuple[Any, Any]] = [
    ([("batch", "data"), ("ff", "tensor"), ("whole", None)], RULES),
    ((["batch", ("data", "tensor")],), {"batch": ("data", "tensor")}),
    ([("batch", ["data"]), ("batch", "data")], {"batch": "data"}),  # twice the same
    (iter([("batch", "data")]), {"batch": "data"}),
    ([], {}),
]


@pytest.mark.parametrize(("pairs", "rules"), PAIRS)
def test_rules_as_pairs_are_those_of_a_dict(pairs: Any, rules: Any) -> None:
    mesh = Mesh(data=2, tensor=2, rules=pairs)
    assert mesh == Mesh(data=2, tensor=2, rules=rules)
    assert dict(mesh.rules) == rules


@pytest.mark.parametrize(
    ("rules", "faults"),
    [
        ([("batch", "data"), ("batch", None)], ["rule 'batch' is given twice: 'data' and None"]),
        (["ab", ("x",)], ["rule 'ab' is not a pair of a logical name and", "rule ('x',) is not a pair"]),
        ([(["batch"], "data")], ["rule (['batch'], 'data') is not a pair"]),
        ([("batch", "dta")], ["rule 'batch' -> 'dta': the mesh (data=2, tensor=2) has no axis 'dta'; did you mean"]),
        ({"batch": 2}, ["rule 'batch' -> 2: 2 is not a mesh axis"]),
    ],
)  # fmt: skip
def test_rules_that_cannot_be_read(rules: Any, faults: list[str]) -> None:
    with pytest.raises(ShardingError) as error:
        Mesh(data=2, tensor=2, rules=rules)
    assert len(error.value.offenders) == len(faults)
    for fault in faults:
        assert fault in str(error.value)


# --- strict -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def strict() -> Mesh:
    return Mesh(data=2, tensor=2, rules=RULES, strict=True)


def test_strict_is_part_of_the_value(strict: Mesh) -> None:
    loose = Mesh(data=2, tensor=2, rules=RULES)
    assert loose != strict
    assert hash(loose) != hash(strict)
    assert str(strict).endswith(", strict=True)")
    assert "strict" not in str(loose)
    for again in (Mesh.parse(str(strict)), pickle.loads(pickle.dumps(strict)), copy.deepcopy(strict)):
        assert again == strict
        assert again.strict
    odd = Mesh({"strict": 2}, strict=True)
    assert Mesh.parse(str(odd)) == odd
    assert Mesh.abstract(data=2, strict=True).strict


@pytest.mark.parametrize("spec", ["batch ff", "batch whole", "batch _", "batch embed@()", "embed@data _", P("data")])
def test_a_strict_mesh_takes(spec: Any, strict: Mesh) -> None:
    with strict:
        x = shard(X, spec)
        assert torch.equal(shard(x * 1, x.spec).full_tensor(), X)  # what a tensor says of itself is taken back
        assert torch.equal(sl.jit(lambda x: shard(x + 1, spec), in_specs=(spec,))(X).full_tensor(), X + 1)


def test_a_strict_mesh_refuses_names_without_a_rule(strict: Mesh) -> None:
    message = (
        "shard(x) with spec 'btach embed' on shape [4, 6], mesh (data=2, tensor=2):\n"
        "  * dim 0 `btach`: 'btach' has no rule; did you mean 'batch'?\n"
        "  * dim 1 `embed`: 'embed' has no rule\n"
        "Rule: on a strict mesh a logical name has a rule, or says its axes itself\n"
        "Remedy: give it one, rules={'btach': None} where it stays whole, or write btach@(); "
        "give it one, rules={'embed': None} where it stays whole, or write embed@()"
    )
    with strict:
        with pytest.raises(ShardingError) as error:
            shard(X, "btach embed")
        assert str(error.value) == message
        x = shard(X, "batch ff")
        for refused in (
            lambda: x.redistribute("embed _"),
            lambda: sl.jit(torch.sin, in_specs=("embed _",)).plan(X),
            lambda: sl.jit(torch.sin, out_specs="embed _").plan(X),
            lambda: sl.jit(lambda x: shard(x, "embed _")).plan(X),
            lambda: sl.shard_map(torch.sin, in_specs=("embed _",), out_specs="batch _")(X),
        ):
            with pytest.raises(ShardingError, match="`embed`: 'embed' has no rule"):
                refused()


def _strict_device_mesh() -> str:
    with Mesh.from_device_mesh(
        init_device_mesh("cpu", (2,), mesh_dim_names=("data",)), rules=[("batch", "data")], strict=True
    ) as mesh:
        assert mesh["data"] == 2
        try:
            shard(X, "batch embed")
        except ShardingError as error:
            return str(error)
        return "taken"


@pytest.mark.ranks
def test_a_strict_mesh_of_ranks() -> None:
    assert all("'embed' has no rule" in text for text in run_ranks(_strict_device_mesh, 2))


# --- P ----------------------------------------------------------------------------------------------------------------


def test_p_is_a_sequence() -> None:
    p = P("data", None, ("x", "y"))
    rows, none, columns = p
    assert (rows, none, columns) == ("data", None, ("x", "y"))
    assert (len(p), p[0], p[-1], p[:2], list(p)) == (3, "data", ("x", "y"), ("data", None), ["data", None, ("x", "y")])
    assert (None in p, "x" in p, p.index(None), p.count("data")) == (True, False, 1, 1)
    assert [*P()] == []
    assert not P()
    with pytest.raises(IndexError):
        p[3]
    with pytest.raises(ValueError):  # noqa: PT011 # as a tuple's
        p.index("tensor")


def test_p_compares_as_in_jax() -> None:
    assert P(("data",)) == P("data")
    assert P(()) == P(None)
    assert P("data") != P("data", None)
    assert P(["x", "y"]) == P(("x", "y")) != P("x", "y")
    assert P("data", ("x", "y")) == ("data", ("x", "y"))
    assert P(None) == ((),)
    assert P("data") != "data"
    assert P("data") != ["data"]
    for a, b in ((P(("data",)), P("data")), (P("data"), ("data",))):
        assert hash(a) == hash(b)
    assert {P("data"): 1}[P(("data",))] == 1


def test_p_adds() -> None:
    assert P("data") + P(None, "x") == P("data", None, "x")
    assert P("data") + (None,) == (*P("data"), None) == P("data", None)
    assert ("pod",) + P("data") == P("pod", "data")
    assert isinstance(("pod",) + P("data"), P)
    with pytest.raises(TypeError):
        P("data") + "x"  # type: ignore[operator]


def test_p_is_one_spec_wherever_a_spec_may_stand() -> None:
    with Mesh(data=2, tensor=2):
        plan = sl.jit(lambda x, y: (x * 2, y), in_specs=P("data"), out_specs=(P("data", "tensor"), None)).plan(X, X)
        assert [str(plan.layout_of(name)) for name in ("x", "y")] == ["4@data, 6"] * 2
        assert str(plan.layout_of("result[0]")) == "4@data, 6@tensor"


# --- lengths of any name ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x", "spec", "self", "sizes", "mesh", "tensor", "what", "cls", "name"])
def test_factors_of_any_name_have_lengths(name: str) -> None:
    spec = f"({name} y) e"
    with Mesh(data=2):
        x = shard(X, f"({name}@data y) e", **{name: 2})
        assert typeof(x) == "f32[(2@data 2), 6]"
        assert typeof(x.redistribute(spec, **{name: 4})) == "f32[4, 6]"
        assert typeof(sl.jit(lambda x: shard(x + 1, f"({name}@data y) e", **{name: 2}))(X)) == "f32[4@data, 6]"
        with pytest.raises(ShardingError, match=f"{name}=3 does not divide the dim's size 4"):
            shard(X, spec, **{name: 3})
        with pytest.raises(ShardingError, match=f"{name}=3 does not divide the dim's size 4"):
            x.redistribute(spec, **{name: 3})


def test_sizes_are_a_mapping_or_a_length() -> None:
    with Mesh(data=2):
        assert typeof(shard(X, "(sizes y@data) e", sizes={"sizes": 2})) == "f32[(2 2@data), 6]"
        assert typeof(shard(X, "b@data e", sizes={"b": [3, 1]})) == "f32[4@data=[3 1], 6]"
        with pytest.raises(ShardingError, match="sizes=2 is given, but the spec has no 'sizes'"):
            shard(X, "b e", sizes=2)


def test_jitted_functions_have_arguments_of_any_name() -> None:
    def step(self: torch.Tensor, fn: torch.Tensor) -> torch.Tensor:
        return self + fn

    with Mesh(data=2):
        jitted = sl.jit(step, in_specs={"self": "b@data _"})
        assert torch.equal(jitted(self=X, fn=X).full_tensor(), 2 * X)
        assert str(jitted.plan(self=X, fn=X).layout_of("self")) == "4@data, 6"
        assert sl.check(step, self=X, fn=X).max_error == 0


# --- without a mesh ---------------------------------------------------------------------------------------------------


def _layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return shard(torch.relu(shard(x @ w, "batch (heads@tensor hd)", heads=2)), "batch _")


W = torch.linspace(-1, 1, 48).view(6, 8)
ONE = torch.relu(X @ W)


def test_a_layer_without_a_mesh_is_plain_torch() -> None:
    with sl.no_mesh():
        out = _layer(X, W)
        assert shard(X, "batch _") is X
        assert sl.current_mesh() is None
        assert sl.jit(_layer, in_specs=("batch _",))(X, W).equal(ONE)
    assert type(out) is torch.Tensor
    assert out.equal(ONE)


def test_the_innermost_block_counts() -> None:
    with sl.no_mesh(), Mesh(data=2, tensor=2) as mesh:
        assert sl.current_mesh() is mesh
        assert typeof(shard(X, "b@data _")) == "f32[4@data, 6]"
        with sl.no_mesh():
            assert shard(X, "b@data _") is X
        assert typeof(shard(X, "b@data _")) == "f32[4@data, 6]"
        step = sl.jit(_layer)
        assert step(X, W).full_tensor().equal(ONE)
        assert [str(c) for c in step.plan(X, W).collectives] != []
    with pytest.raises(ShardingError, match=r"is outside any mesh.*\n.*\n.*no_mesh\(\)"):
        shard(X, "b _")


def test_without_a_mesh_inside_jit() -> None:
    def plainly(x: torch.Tensor) -> torch.Tensor:
        with sl.no_mesh():
            return shard(x, "b@nowhere _") + 1

    with Mesh(data=2):
        step = sl.jit(plainly, in_specs=("b@data _",))
        assert step(X).full_tensor().equal(X + 1)
        assert str(step.plan(X).layout_of("result")) == "4@data, 6"
        with pytest.raises(ShardingError, match="no axis 'nowhere'"):
            sl.jit(lambda x: shard(x, "b@nowhere _")).plan(X)


@pytest.mark.parametrize(
    ("spec", "sizes", "message"),
    [
        ("batch", {}, "the spec has 1 dim, the tensor has 2 dims"),
        ("batch ff@", {}, "a mesh axis is missing"),
        ("(a b) _", {"a": 3}, "a=3 does not divide the dim's size 4"),
        ("(a b) _", {}, "the sizes of a, b are not known"),
        ("a _", {"b": 2}, "b=2 is given, but the spec has no 'b'"),
        ("a@data=[3 2] _", {}, "3 + 2 = 5, the dim has size 4"),
    ],
)
def test_specs_are_read_without_a_mesh(spec: str, sizes: Any, message: str) -> None:
    with sl.no_mesh(), pytest.raises(ShardingError) as error:
        shard(X, spec, **sizes)
    assert message in str(error.value)


@pytest.mark.parametrize("spec", ["a@anything b@else", "a@data=[3 1] _", "a@(x y) _", P("x"), "..."])
def test_axes_are_not_looked_up_without_a_mesh(spec: Any) -> None:
    with sl.no_mesh():
        assert shard(X, spec) is X


def test_a_jitted_function_without_a_mesh_keeps_its_gradient() -> None:
    w = W.clone().requires_grad_()
    with sl.no_mesh():
        sl.jit(_layer)(X, w).sum().backward()
    again = W.clone().requires_grad_()
    torch.relu(X @ again).sum().backward()
    assert torch.equal(w.grad, again.grad)  # type: ignore[arg-type]


def test_one_spec_is_that_of_all_arguments_by_name_too() -> None:
    def add(x: torch.Tensor, y: torch.Tensor, *, w: torch.Tensor) -> torch.Tensor:
        return x + y + w

    x, y, w = torch.ones(3, 4).unbind()
    with Mesh(data=2):
        text = sl.jit(add, in_specs="a@data").plan(x, y=y, w=w).full
    assert text.count("f32[a=4@data]  annotated") == 3
