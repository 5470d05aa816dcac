"""Layouts: every layout of small shapes scatters and gathers exactly, and its text reads back.

Oracle for what a device holds: `torch.chunk`, once per axis, on the tensor viewed with one dim per factor.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlib.core.errors import ShardingError
from shardlib.sharding.layout import Factor, Layout, PartialSum, shard_range
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.mesh.mesh import Mesh
from tests.helpers.examples import examples

A, B, C = Axis("a", 2), Axis("b", 3), Axis("c", 4)
C_MAJOR, C_MINOR = Axis("c", 2, pre=1, axis_size=4), Axis("c", 2, pre=2, axis_size=4)
MESHES = {
    "two axes": (Mesh.abstract(a=2, b=3), (A, B)),
    "an axis in parts": (Mesh.abstract(c=4, a=2), (C_MAJOR, C_MINOR, A)),
    "a wide axis": (Mesh.abstract(c=4), (C,)),
    "three axes": (Mesh.abstract(a=2, b=3, c=4), (A, B, C)),
    "an axis of one": (Mesh.abstract(one=1, b=3), (Axis("one", 1), B)),
}
SHAPES = [
    (),
    (0,),
    (1,),
    (2,),
    (3,),
    (4,),
    (5,),
    (6,),
    (7,),
    (8,),
    (12,),
    (2, 3),
    (3, 4),
    (5, 2),
    (1, 4),
    (0, 3),
    (2, 1, 3),
]


def factorizations(n: int, most: int = 3) -> list[tuple[int, ...]]:
    """All ways to write n as an ordered product of factors above 1, at most `most` of them."""
    found = [(n,)]
    for first in range(2, n) if most > 1 else ():
        if n % first == 0:
            found += [(first, *rest) for rest in factorizations(n // first, most - 1)]
    return found


def placements(axes: tuple[Axis, ...], slots: int) -> list[tuple[tuple[Axis, ...], ...]]:
    """All ways to put some of the axes, in any order, on `slots` factors."""
    found = []
    for count in range(len(axes) + 1 if slots else 1):
        for order in itertools.permutations(axes, count):
            for cuts in itertools.combinations_with_replacement(range(count + 1), max(slots - 1, 0)):
                edges = (0, *cuts, count)
                found.append(tuple(order[i:j] for i, j in itertools.pairwise(edges)) if slots else ())
    return found


def layouts(shape: tuple[int, ...], axes: tuple[Axis, ...]) -> list[Layout]:
    found = []
    for sizes in itertools.product(*map(factorizations, shape)):
        for placed in placements(axes, sum(map(len, sizes))):
            cuts = iter(placed)
            found.append(Layout(tuple(tuple(Factor(n, next(cuts)) for n in dim) for dim in sizes)))
    return found


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


def chunked(whole: torch.Tensor, layout: Layout, coords: dict[str, int]) -> torch.Tensor:
    local = whole.reshape([f.size for f in layout.factors])
    for i, f in enumerate(layout.factors):
        for axis in f.axes:
            chunks, at = local.chunk(axis.size, i), axis.coord(coords)
            local = chunks[at] if at < len(chunks) else local.narrow(i, 0, 0)
    return local


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", MESHES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_layout_scatters_and_gathers(shape, case):
    mesh, axes = MESHES[case]
    devices, whole = mesh.all_coords(), numbered(shape)
    for layout in layouts(shape, axes):
        shards = [(coords, layout.scatter(whole, coords)) for coords in devices]
        for coords, local in shards:
            assert local.shape == layout.local_shape(coords)
            assert local.flatten().tolist() == chunked(whole, layout, coords).flatten().tolist(), layout
        assert torch.equal(layout.gather(shards), whole), layout
        copies = mesh.size // math.prod(axis.size for axis in layout.axes)
        assert sum(local.numel() for _, local in shards) == copies * whole.numel(), layout
        assert max(local.numel() for _, local in shards) == layout.max_local_numel(), layout
        assert layout.shape == shape
        assert Layout.parse(str(layout), mesh.axes) == layout


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", MESHES)
@pytest.mark.parametrize("shape", [(4,), (5,), (7,), (8,), (3, 4)], ids=str)
def test_dropping_a_minor_axis_is_concatenation_over_it(shape, case):
    mesh, axes = MESHES[case]
    whole = numbered(shape)
    for layout in layouts(shape, axes):
        for i, f in enumerate(layout.factors):
            if f.axes:
                fewer = without_minor(layout, i)
                for coords in mesh.all_coords():
                    peers = [mesh.coords(rank) for rank in mesh.group_ranks(f.axes[-1:], coords)]
                    parts = [layout.scatter(whole, peer).reshape(sizes(layout, peer)) for peer in peers]
                    joined = torch.cat(parts, i).reshape(fewer.local_shape(coords))
                    assert torch.equal(joined, fewer.scatter(whole, coords)), (layout, i)


def without_minor(layout: Layout, index: int) -> Layout:
    factors = iter(Factor(f.size, f.axes[:-1]) if i == index else f for i, f in enumerate(layout.factors))
    return Layout(tuple(tuple(next(factors) for _ in dim) for dim in layout.dims))


def sizes(layout: Layout, coords: dict[str, int]) -> list[int]:
    return [stop - start for start, stop in (shard_range(f.size, f.axes, coords) for f in layout.factors)]


def test_a_nested_cut_splits_each_chunk_by_its_own_length():
    held = [shard_range(10, (C, A), coords) for coords in Mesh(c=4, a=2).all_coords()]
    assert held == [(0, 2), (2, 3), (3, 5), (5, 6), (6, 8), (8, 9), (9, 10), (10, 10)]


def test_more_devices_than_elements_leave_empty_shards():
    layout = Layout(((Factor(2, (C,)),), (Factor(3),)))
    assert [layout.local_shape(c) for c in Mesh(c=4).all_coords()] == [(1, 3), (1, 3), (0, 3), (0, 3)]


@pytest.mark.parametrize(
    ("axis", "coords"),
    [
        (Axis("t", 8), [0, 1, 2, 3, 4, 5, 6, 7]),
        (Axis("t", 2, pre=1, axis_size=8), [0, 0, 0, 0, 1, 1, 1, 1]),
        (Axis("t", 2, pre=2, axis_size=8), [0, 0, 1, 1, 0, 0, 1, 1]),
        (Axis("t", 2, pre=4, axis_size=8), [0, 1, 0, 1, 0, 1, 0, 1]),
        (Axis("t", 4, pre=2, axis_size=8), [0, 1, 2, 3, 0, 1, 2, 3]),
        (Axis("t", 4, pre=1, axis_size=8), [0, 0, 1, 1, 2, 2, 3, 3]),
    ],
    ids=str,
)
def test_the_coordinate_along_a_part_of_an_axis(axis, coords):
    assert [axis.coord({"t": i}) for i in range(8)] == coords


@pytest.mark.parametrize(("size", "parts"), [(1, []), (2, [2]), (12, [2, 2, 3]), (7, [7]), (30, [2, 3, 5])])
def test_prime_parts_melt_back_into_the_axis(size, parts):
    axis = Axis("t", size)
    assert [part.size for part in axis.primes()] == parts
    assert Axis.merge(axis.primes()) == ((axis,) if parts else ())
    for i in range(size):
        at = 0
        for part in axis.primes():
            at = at * part.size + part.coord({"t": i})
        assert at == i


def test_parts_out_of_order_do_not_melt():
    major, minor = Axis("t", 2, pre=1, axis_size=4), Axis("t", 2, pre=2, axis_size=4)
    assert Axis.merge((minor, major)) == (minor, major)
    assert Axis.merge((major, Axis("u", 2), minor)) == (major, Axis("u", 2), minor)
    assert Axis.merge((major, minor)) == (Axis("t", 4),)


@pytest.mark.parametrize("bad", [(3, 1, 8), (4, 4, 8), (0, 1, 8), (2, 3, 8)])
def test_a_part_must_divide_its_axis(bad):
    size, pre, of = bad
    with pytest.raises(ShardingError, match="axis 't' of size 8 cannot be split"):
        Axis("t", size, pre=pre, axis_size=of)


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [("sum", [1, 2, 3, 4], 10), ("max", [1, 4, 3, 2], 4), ("min", [3, 2, 1, 4], 1)],
)
def test_gather_reduces_what_is_pending(kind, values, expected):
    layout = Layout(((Factor(1),),), (PartialSum((C,), kind),))
    shards = [({"c": i, "a": j}, torch.tensor([float(v)])) for i, v in enumerate(values) for j in range(2)]
    assert layout.gather(shards).tolist() == [expected]  # the copies along `a` count once


@pytest.mark.parametrize("kind", ["sum", "max", "min"])
def test_scatter_into_a_pending_layout_gathers_back(kind):
    mesh, whole = Mesh(a=2, b=3, c=4), torch.arange(5.0) + 1
    layout = Layout(((Factor(5, (B,)),),), (PartialSum((A, C_MINOR), kind),))
    assert torch.equal(layout.gather([(c, layout.scatter(whole, c)) for c in mesh.all_coords()]), whole)


def test_gather_refuses_missing_shards():
    devices, whole = Mesh(c=4).all_coords(), torch.arange(8.0)
    cut, pending = Layout(((Factor(8, (C,)),),)), Layout(((Factor(8),),), (PartialSum((C,)),))
    with pytest.raises(ShardingError, match="they hold 6 of 8 elements"):
        cut.gather([(c, cut.scatter(whole, c)) for c in devices[:3]])
    with pytest.raises(ShardingError, match="addends are missing"):
        pending.gather([(c, pending.scatter(whole, c)) for c in devices[:3]])


def test_one_value_is_pending_in_one_way():
    layout = Layout(((Factor(1),),), (PartialSum((A,)), PartialSum((B,), "max")))
    with pytest.raises(ShardingError, match="two kinds of partial sums: max, sum"):
        layout.gather([(c, torch.ones(1)) for c in Mesh(a=2, b=3).all_coords()])
    with pytest.raises(ShardingError, match="'mean' is no kind of partial sum"):
        PartialSum((A,), "mean")


PARTS = {"a": [A], "b": [B], "c": [C, C_MAJOR, C_MINOR], "max": [Axis("max", 6), Axis("max", 3, pre=2, axis_size=6)]}
SIZES = {"a": 2, "b": 3, "c": 4, "max": 6}
axes_of = st.lists(st.sampled_from([p for parts in PARTS.values() for p in parts]), max_size=3).map(tuple)
factors = st.builds(Factor, st.integers(0, 100), axes_of)
pendings = st.builds(PartialSum, axes_of, st.sampled_from(["sum", "max", "min"]))
any_layout = st.builds(
    Layout,
    st.lists(st.lists(factors, max_size=3).map(tuple), max_size=4).map(tuple),
    st.lists(pendings, max_size=2).map(tuple),
)


@pytest.mark.long
@settings(max_examples=examples(120), deadline=None)
@given(any_layout)
def test_text_reads_back(layout):
    assert Layout.parse(str(layout), SIZES) == layout


@pytest.mark.parametrize(
    "text",
    [
        "",
        "()",
        "8",
        "8@a",
        "8@(a b)",
        "(2@a 4), 3",
        "+a",
        "8 +a",
        "8 max+a",
        "8@a max+(b c)",
        "4@c:(1)2 +c:(2)2",
        "1, ()",
    ],
)
def test_text_is_kept(text):
    assert str(Layout.parse(text, SIZES)) == text


@pytest.mark.parametrize(
    ("text", "fault", "caret"),
    [
        ("8@t", "the mesh (a=2, b=3, c=4, max=6) has no axis 't'", 2),
        ("8@", "a mesh axis is missing", 2),
        ("(8 4", "a size is missing", 4),
        ("8 8", "a reduction must stand here, not '8'", 2),
        ("8 mean", "'+' and the axes of a reduction must stand here", 6),
        ("8@c:2", "a part of an axis is written axis:(pre)size, as in tensor:(1)8", 4),
        ("8 +", "a mesh axis is missing", 3),
        ("8)", "a reduction must stand here, not ')'", 1),
        ("8,", "a size is missing", 2),
    ],
)
def test_bad_text_is_pointed_at(text, fault, caret):
    with pytest.raises(ShardingError) as error:
        Layout.parse(text, SIZES)
    head, shown, pointer, _rule = str(error.value).split("\n")
    assert head == f"layout {text!r} cannot be read: {fault}"
    assert (shown, pointer) == (f"    {text}", "    " + " " * caret + "^")
