"""Specs: the grammar and its text, `P`, what a spec means for a shape on a mesh, and every refusal's wording."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlib.core.errors import ShardingError
from shardlib.sharding.grammar import SpecDim, SpecFactor
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.spec import P, Spec, parse, resolve_many
from tests.helpers.examples import examples

RULES = {"batch": ("pod", "data"), "heads": "tensor", "ff": "tensor", "vocab": "tensor", "seq": None}
MESH = Mesh.abstract(pod=2, data=2, tensor=4, rules=RULES)
WIDE = Mesh.abstract(data=2, tensor=8, rules={"kv": "tensor", "heads": ("data", "tensor")})


def one(name: str | None, *axes: str, size: int | None = None, open: bool = False) -> SpecDim:
    return SpecDim((SpecFactor(name, axes or None, size),), open)


# ---- grammar


@pytest.mark.parametrize(
    ("text", "dims"),
    [
        ("", ()),
        ("batch seq", (one("batch"), one("seq"))),
        ("ff@tensor", (one("ff", "tensor"),)),
        ("ff@(pod data)", (one("ff", "pod", "data"),)),
        ("_ _@tensor", (one(None), one(None, "tensor"))),
        ("... ff", (..., one("ff"))),
        ("ff? _@tensor?", (one("ff", open=True), one(None, "tensor", open=True))),
        ("ff@()", (SpecDim((SpecFactor("ff", ()),)),)),
        ("(a b@x c)", (SpecDim((SpecFactor("a"), SpecFactor("b", ("x",)), SpecFactor("c"))),)),
        ("(a=3 b)?", (SpecDim((SpecFactor("a", None, 3), SpecFactor("b")), True),)),
        ("(_ b@(x y))", (SpecDim((SpecFactor(None), SpecFactor("b", ("x", "y")))),)),
    ],
)
def test_text_and_dims_are_the_same(text, dims):
    assert parse(text) == Spec(dims)
    assert str(Spec(dims)) == text


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("  batch   seq ", "batch seq"),
        ("(ff)", "ff"),
        ("(ff)?", "ff?"),
        ("ff@(tensor)", "ff@tensor"),
        ("( a  b )", "(a b)"),
        ("ff @ tensor ?", "ff@tensor?"),
    ],
)
def test_equivalent_texts(text, same):
    assert parse(text) == parse(same)
    assert str(parse(text)) == same


names = st.sampled_from(["a", "b_2", "Über", "_x"])
spec_factors = st.builds(
    SpecFactor,
    st.none() | names,
    st.none() | st.lists(names, max_size=2).map(tuple),
    st.none() | st.integers(0, 999),
)
spec_dims = st.builds(SpecDim, st.lists(spec_factors, min_size=1, max_size=3).map(tuple), st.booleans())


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(spec_dims, max_size=3), st.lists(spec_dims, max_size=2), st.booleans())
def test_every_spec_reads_back(before, after, rest):
    spec = Spec((*before, *([...] if rest else []), *after))
    assert parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "caret", "fault"),
    [
        ("embed ff@", 9, "a mesh axis is missing"),
        ("embed ff@?", 9, "a mesh axis must stand here, not '?'"),
        ("embed ff)", 8, "')' does not belong here"),
        ("(a b", 4, "the ')' of this dim is missing"),
        ("ff@(a b", 7, "the ')' of these axes is missing"),
        ("(a (b c))", 3, "a factor cannot hold factors"),
        ("(a ...)", 3, "'...' stands for whole dims"),
        ("(a b?)", 4, "'?' opens a whole dim, so it stands behind the ')'"),
        ("()", 1, "a dim needs a factor; write `_` for a dim of size 1"),
        ("batch, seq", 5, "',' does not belong here; dims are separated by spaces"),
        ("(a b)(c d)", 5, "dims are separated by spaces"),
        ("a(b c)", 1, "dims are separated by spaces"),
        ("... a ...", 6, "'...' may stand once"),
        ("...?", 3, "'?' does not belong here"),
        ("3", 0, "'3' does not belong here"),
        ("a=b", 2, "a size must stand here, not 'b'"),
        ("@tensor", 0, "'@' does not belong here"),
        ("a -> b", 2, "'-' does not belong here"),
    ],
)
def test_bad_text_is_pointed_at(text, caret, fault):
    with pytest.raises(ShardingError) as error:
        parse(text)
    assert str(error.value) == (
        f"spec {text!r} cannot be read: {fault}\n    {text}\n    {' ' * caret}^\n"
        "Rule: a spec is dims separated by spaces: name, name@axis, name@(a b)=[5 3], _, (a b), ..., ? behind open dims"
    )


# ---- P


@pytest.mark.parametrize(
    ("p", "text", "spec"),
    [
        (P(), "P()", "..."),
        (P(None, "tensor"), "P(None, 'tensor')", "_ _@tensor ..."),
        (P(("pod", "data"), None), "P(('pod', 'data'), None)", "_@(pod data) _ ..."),
        (P("data"), "P('data')", "_@data ..."),
        (P(()), "P(None)", "_ ..."),
        (P(("data",)), "P('data')", "_@data ..."),
    ],
)
def test_the_positional_form(p, text, spec):
    assert repr(p) == str(p) == text
    assert P.parse(text) == p
    assert hash(P.parse(text)) == hash(p)
    assert Spec.convert(p) == parse(spec)
    assert Spec.convert(spec) == Spec.convert(Spec.convert(spec)) == parse(spec)


def test_a_p_is_no_tuple():
    # Pytrees must take it for a leaf.
    assert not isinstance(P("data"), tuple)
    assert P("data") == ("data",)  # as in JAX


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: P(None, 3), "P(None, 3) cannot be read:\n  * 3 is not a mesh axis\nRule: an entry of P is None"),
        (lambda: P("a b"), "P('a b') cannot be read:\n  * 'a b' is not a mesh axis"),
        (lambda: P(("a", 1)), "1 is not a mesh axis"),
        (lambda: P.parse("P(None"), "'P(None' cannot be read as a P"),
        (lambda: P.parse("P(x)"), "'P(x)' cannot be read as a P"),
        (lambda: Spec.convert(("data", None)), "('data', None) is not a spec\nRemedy: write a string"),
        (lambda: Spec.convert(None), "None is not a spec"),
    ],
)
def test_what_is_not_a_spec(make, text):
    with pytest.raises(ShardingError) as error:
        make()
    assert text in str(error.value)


# ---- meaning


@pytest.mark.parametrize(
    ("spec", "shape", "sizes", "layout"),
    [
        ("", (), {}, ""),
        ("...", (3, 5), {}, "3, 5"),
        ("...", (), {}, ""),
        (P(), (3, 5), {}, "3, 5"),
        ("batch seq embed", (8, 6, 5), {}, "8@(pod data), 6, 5"),
        ("embed ff@tensor", (6, 8), {}, "6, 8@tensor"),
        (P(None, "tensor"), (6, 8), {}, "6, 8@tensor"),
        (P("tensor"), (8, 2, 2), {}, "8@tensor, 2, 2"),
        (P("tensor", None), (8, 2), {}, "8@tensor, 2"),
        ("... vocab", (2, 3, 8), {}, "2, 3, 8@tensor"),
        ("batch ... vocab", (4, 8), {}, "4@(pod data), 8@tensor"),
        ("batch@() ff", (4, 8), {}, "4, 8@tensor"),
        ("batch@data", (4,), {}, "4@data"),
        ("(three heads hd) embed", (384, 128), {"three": 3, "heads": 8}, "(3 8@tensor 16), 128"),
        ("(three=3 heads=8 hd) embed", (384, 128), {}, "(3 8@tensor 16), 128"),
        ("(three heads hd)", (384,), {"three": 3, "heads": 8, "hd": 16}, "(3 8@tensor 16)"),
        ("(batch seq@tensor)", (32,), {"batch": 4}, "(4@(pod data) 8@tensor)"),
        ("seq seq", (4, 4), {"seq": 4}, "4, 4"),
        # uneven and empty: tracked as they are
        ("ff", (10,), {}, "10@tensor"),
        ("ff", (3,), {}, "3@tensor"),
        ("ff", (0,), {}, "0@tensor"),
        ("batch", (3,), {}, "3@(pod data)"),
    ],
)
def test_resolved_layouts(spec, shape, sizes, layout):
    resolved = Spec.convert(spec).resolve(shape, MESH, sizes=sizes)
    assert str(resolved.layout) == layout
    assert resolved.layout.shape == shape
    assert [len(names) for names in resolved.names] == [len(dim) for dim in resolved.layout.dims]
    assert len(resolved.open) == len(shape)
    # the filled-in spec stands alone
    assert resolved.spec.resolve(shape, MESH).layout == resolved.layout


@pytest.mark.parametrize(
    ("spec", "shape", "layout"),
    [
        ("kv", (8,), "8@tensor"),
        ("kv", (16,), "16@tensor"),
        ("kv", (4,), "4@tensor:(1)4"),  # smaller, and divides: the major part; the rest replicates
        ("kv", (2,), "2@tensor:(1)2"),
        ("kv", (1,), "1"),
        ("kv", (3,), "3@tensor"),  # does not divide: uneven, with empty shards
        ("heads", (16,), "16@(data tensor)"),
        ("heads", (8,), "8@(data tensor:(1)4)"),  # what `data` leaves is smaller than `tensor`
        ("heads", (2,), "2@data"),
        ("heads", (1,), "1"),
        ("heads", (6,), "6@(data tensor)"),
        ("heads", (7,), "7@(data tensor:(1)4)"),  # chunks of 4 and 3
    ],
)
def test_a_small_factor_uses_the_major_part_of_an_axis(spec, shape, layout):
    assert str(parse(spec).resolve(shape, WIDE).layout) == layout


def test_the_part_of_an_axis_is_the_major_one():
    ((factor,),) = parse("kv").resolve((4,), WIDE).layout.dims
    assert factor.axes == (Axis("tensor", 4, pre=1, axis_size=8),)


def test_an_axis_of_one_device_stays_written():
    assert str(parse("ff@tensor").resolve((6,), Mesh(tensor=1)).layout) == "6@tensor"


def test_names_openness_and_spec():
    resolved = parse("batch? ... (heads hd)").resolve((4, 5, 6, 32), MESH, sizes={"heads": 8})
    assert resolved.names == (("batch",), (None,), (None,), ("heads", "hd"))
    assert resolved.open == (True, False, False, False)
    assert str(resolved.spec) == "batch? ... (heads=8 hd)"


# ---- refusals


def refusal(spec, shape, sizes=None, mesh=MESH, name="w") -> str:
    with pytest.raises(ShardingError) as error:
        Spec.convert(spec).resolve(shape, mesh, sizes=sizes, name=name)
    return str(error.value)


@pytest.mark.parametrize(
    ("spec", "shape", "sizes", "fault"),
    [
        ("embed ff@tensr", (4, 8), {}, "dim 1 `ff@tensr`: the mesh has no axis 'tensr'; did you mean 'tensor'?"),
        (P(None, "model"), (4, 8), {}, "dim 1 `_@model`: the mesh has no axis 'model'"),
        ("a@data b@data", (4, 8), {}, "axis 'data' is used by dim 0 `a@data` and by dim 1 `b@data`"),
        ("a@(data data)", (4,), {}, "axis 'data' is used twice by dim 0 `a@(data data)`"),
        (
            "heads ff",
            (4, 8),
            {},
            "axis 'tensor' is used by dim 0 `heads` (by the rule heads -> tensor) "
            "and by dim 1 `ff` (by the rule ff -> tensor)",
        ),
        (
            "(heads ff@tensor)",
            (32,),
            {"heads": 8},
            "axis 'tensor' is used by dim 0 `heads` (by the rule heads -> tensor)",
        ),
        ("a b c", (4, 8), {}, "the spec has 3 dims, the tensor has 2 dims"),
        ("a", (4, 8), {}, "the spec has 1 dim, the tensor has 2 dims"),
        ("", (4,), {}, "the spec has 0 dims, the tensor has 1 dim"),
        ("a ... b c", (4, 8), {}, "the spec has at least 3 dims, the tensor has 2 dims"),
        (P(None, None, "data"), (4, 8), {}, "the spec has at least 3 dims, the tensor has 2 dims"),
        ("(a b)", (12,), {}, "dim 0 `(a b)`: the sizes of a, b are not known (the dim has size 12)"),
        ("(a b)", (12,), {"a": 5}, "dim 0 `(a b)`: a=5 does not divide the dim's size 12"),
        ("(a b c)", (12,), {"a": 4, "b": 5}, "dim 0 `(a b c)`: a=4 * b=5 = 20 does not divide the dim's size 12"),
        ("(a b)", (12,), {"a": 3, "b": 5}, "dim 0 `(a b)`: a=3 * b=5 = 15, the dim has size 12"),
        ("(a b)", (12,), {"a": 0}, "dim 0 `(a b)`: a=0 does not divide the dim's size 12"),
        ("(a b)", (12,), {"a": -3}, "dim 0 `(a b)`: a=-3 is not a size"),
        ("(a b)", (12,), {"a": 1.5}, "dim 0 `(a b)`: a=1.5 is not a size"),
        ("(a=3 b)", (12,), {"a": 4}, "dim 0 `(a=3 b)`: a=4 is given, the spec says a=3"),
        ("(_ _)", (12,), {}, "dim 0 `(_ _)`: the sizes of _, _ are not known (the dim has size 12)"),
        ("batch", (12,), {"batch": 8}, "dim 0 `batch`: batch=8, the dim has size 12"),
        (
            "(heads hd)",
            (12,),
            {"head": 4, "hd": 3},
            "head=4 is given, but the spec has no 'head'; did you mean 'heads'?",
        ),
    ],
)
def test_refusals(spec, shape, sizes, fault):
    assert f"\n  * {fault}" in refusal(spec, shape, sizes)


def test_one_error_says_it_all():
    text = refusal("(three heads hd) ff@tensr heads", (384, 128, 8), {"three": 5, "head": 8})
    assert text == (
        "shard(w) with spec '(three heads hd) ff@tensr heads', three=5, head=8 on shape [384, 128, 8], "
        "mesh (pod=2, data=2, tensor=4):\n"
        "  * head=8 is given, but the spec has no 'head'; did you mean 'heads'?\n"
        "  * dim 0 `(three heads hd)`: the sizes of heads, hd are not known (the dim has size 384)\n"
        "  * dim 1 `ff@tensr`: the mesh has no axis 'tensr'; did you mean 'tensor'?\n"
        "  * axis 'tensor' is used by dim 0 `heads` (by the rule heads -> tensor) "
        "and by dim 2 `heads` (by the rule heads -> tensor)\n"
        "Rule: the sizes of a dim's factors multiply to the dim; a spec names axes of its mesh; "
        "a mesh axis shards a tensor once\n"
        "Remedy: give sizes by name, as in einops; one of a dim's factors may be left to be inferred; "
        "use one of pod, data, tensor; drop one of the two, or override a rule with `name@()`"
    )


def test_a_wrong_rank_hides_no_other_fault():
    text = refusal("a@modle b@data c@data", (4, 8))
    assert "no axis 'modle'" in text
    assert "axis 'data' is used by dim 1 `b@data` and by dim 2 `c@data`" in text
    assert "the spec has 3 dims, the tensor has 2 dims" in text


def test_the_positional_form_is_shown_as_written():
    items = [("x", (4,), P("modle"), None)]
    with pytest.raises(ShardingError) as error:
        resolve_many(items, MESH)
    assert str(error.value).startswith("shard(x) with spec P('modle') on shape [4], mesh (pod=2, data=2, tensor=4):\n")


def test_many_specs_resolve_together():
    items = [("x", (8, 6), "batch seq", None), ("w", (6, 8), P(None, "tensor"), {}), ("b", (8,), parse("ff"), None)]
    assert [str(r.layout) for r in resolve_many(items, MESH)] == ["8@(pod data), 6", "6, 8@tensor", "8@tensor"]
    assert resolve_many([], MESH) == []


def test_all_offenders_of_many_specs_come_at_once():
    items = [
        ("args[0]['w']", (6, 8), "embed ff@tensr", None),
        ("args[0]['b']", (8,), "ff", None),
        ("args[1]", (8, 6), P("data", None, None), None),
        ("args[2]", (12,), "(a b)", {"a": 5}),
    ]
    with pytest.raises(ShardingError) as error:
        resolve_many(items, MESH, call="jit(step), in_specs")
    assert str(error.value) == (
        "jit(step), in_specs: 3 of 4 specs do not fit, mesh (pod=2, data=2, tensor=4):\n"
        "  * args[0]['w'] with spec 'embed ff@tensr' on shape [6, 8]: "
        "dim 1 `ff@tensr`: the mesh has no axis 'tensr'; did you mean 'tensor'?\n"
        "  * args[1] with spec P('data', None, None) on shape [8, 6]: "
        "the spec has at least 3 dims, the tensor has 2 dims\n"
        "  * args[2] with spec '(a b)', a=5 on shape [12]: dim 0 `(a b)`: a=5 does not divide the dim's size 12\n"
        "Rule: a spec names axes of its mesh; a spec has as many dims as the tensor; "
        "the sizes of a dim's factors multiply to the dim\n"
        "Remedy: use one of pod, data, tensor; write `_` for a dim that stays whole, `...` for any number of them; "
        "give sizes by name, as in einops; one of a dim's factors may be left to be inferred"
    )


def test_a_spec_that_cannot_be_read_names_its_tensor():
    with pytest.raises(ShardingError) as error:
        resolve_many([("w", (4,), "ff@", None)], MESH)
    assert str(error.value).startswith(
        "shard(w): spec 'ff@' cannot be read: a mesh axis is missing\n    ff@\n       ^\nRule"
    )
