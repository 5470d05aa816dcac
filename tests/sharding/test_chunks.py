"""Pieces of chosen sizes, and parts of mesh axes: from the text of a spec to the values on every device."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import shardlib as sl
from shardlib import Mesh, P, ShardingError, shard
from shardlib.compiler.codegen import virtual
from shardlib.compiler.lower.builder import Builder
from shardlib.compiler.lower.emit_reshard import Mover
from shardlib.compiler.program.steps import Collective, Var
from shardlib.compiler.propagate.dim_factors import FactorClasses
from shardlib.core.context import single_device
from shardlib.integrations import checkpoint_chunks as dcp_chunks
from shardlib.ops.collectives.transport import groups
from shardlib.sharding import reshard
from shardlib.sharding.chunks import ShardSizes, is_even, is_nested, largest_shard, restrict_size, shard_range
from shardlib.sharding.layout import Factor, Layout
from shardlib.sharding.mesh.axis import Axis, group_size
from shardlib.sharding.reshard import Axes, FactorAxes, FactorSizes
from shardlib.sharding.spec import Spec, parse, resolve_many
from tests.helpers.examples import examples
from tests.helpers.ranks import run_ranks
from tests.validation.programs import campaign

A, B = Axis("a", 4), Axis("b", 3)
A0, A1 = A.primes()
DATA = Axis("data", 4)
BATCH = ShardSizes((5, 3, 8, 0), (DATA,))


@cache
def grid() -> Mesh:
    """Virtual devices: not made on ranks, which import this module."""
    return Mesh(a=4, b=3)


fast = settings(derandomize=True, database=None, deadline=None, max_examples=120)


# Sizes ----------------------------------------------------------------------------------------------------------------


def test_a_size_knows_its_pieces() -> None:
    assert [shard_range(BATCH, (DATA,), {"data": i}) for i in range(4)] == [(0, 5), (5, 8), (8, 16), (16, 16)]
    assert [shard_range(BATCH, DATA.primes()[:1], {"data": i}) for i in range(4)] == [(0, 8), (0, 8), (8, 16), (8, 16)]
    assert [shard_range(BATCH, DATA.primes()[1:], {"data": i}) for i in range(2)] == [
        (0, 8),
        (8, 16),
    ]  # not its axes: chunks
    assert BATCH + 0 == 16
    assert largest_shard(BATCH, (DATA,)) == 8
    assert not is_even(BATCH, (DATA,))
    assert is_even(BATCH, (A,))


def test_sizes_are_the_same_only_if_their_pieces_are() -> None:
    """What is remembered for one must not be found for the other."""
    assert ShardSizes([5, 3, 8, 0], [DATA]) == BATCH
    assert len({BATCH, 16, ShardSizes((5, 3, 0, 8), (DATA,)), ShardSizes((5, 3, 8, 0), (A,))}) == 4
    assert not any(a == b for a, b in itertools.permutations([BATCH, 16], 2))
    assert pickle.loads(pickle.dumps(BATCH)) == BATCH


def test_chunks_are_no_choice() -> None:
    assert type(ShardSizes.make_size((4, 4, 4, 4), (DATA,))) is int
    assert type(ShardSizes.make_size((3, 3, 3, 1), (DATA,))) is int
    assert Factor(BATCH, DATA.primes()[:1]) == Factor(16, DATA.primes()[:1])
    assert str(Factor(BATCH, (DATA, B))) == "16@(data b)=[2 2 1 1 1 1 3 3 2 0 0 0]"


@st.composite
def sizes(draw: st.DrawFn, n: int, axes: Axes) -> int:
    """n in chunks, or in random pieces over some of the first of `axes`."""
    k = draw(st.integers(0, len(axes)))
    if not k or n < 2:
        return n
    most = group_size(axes[:k]) - 1
    edges = sorted(draw(st.lists(st.integers(0, n), min_size=most, max_size=most)))
    return ShardSizes([b - a for a, b in itertools.pairwise([0, *edges, n])], axes[:k])


@st.composite
def cuts(draw: st.DrawFn, n: int, atoms: Sequence[Axis] = (A0, A1, B)) -> FactorAxes:
    """Some of the atoms, in any order, on n factors."""
    out: list[list[Axis]] = [[] for _ in range(n)]
    for atom in draw(st.permutations(atoms)):
        if (i := draw(st.integers(-1, n - 1))) >= 0:
            out[i].append(atom)
    return tuple(map(tuple, out))


SHAPES: list[FactorSizes] = [((9,),), ((6,), (5,)), ((8, 2), (3,)), ((2, 7),), ((3, 4, 2),)]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[FactorSizes, FactorAxes]:
    leaves = draw(st.sampled_from(SHAPES))
    cut = draw(cuts(sum(map(len, leaves))))
    return draw(sized(leaves, cut)), cut


@st.composite
def sized(draw: st.DrawFn, leaves: FactorSizes, cut: FactorAxes) -> FactorSizes:
    feed = iter(cut)
    return tuple(tuple(draw(sizes(n, next(feed))) for n in dim) for dim in leaves)


def layout(leaves: FactorSizes, cut: FactorAxes) -> Layout:
    feed = iter(cut)
    return Layout(tuple(tuple(Factor(n, Axis.merge(next(feed))) for n in dim) for dim in leaves))


@pytest.mark.long
@fast
@given(layouts())
def test_shards_make_the_whole_and_the_text_parses(given: tuple[FactorSizes, FactorAxes]) -> None:
    at = layout(*given)
    whole = torch.arange(math.prod(at.shape)).view(at.shape)
    for same in (at, at.canonical, Layout.parse(str(at), grid().axes), Layout.parse(str(at.canonical), grid().axes)):
        shards = [(c, same.scatter(whole, c)) for c in grid().all_coords()]
        assert all(tuple(x.shape) == at.local_shape(c) for c, x in shards)
        assert torch.equal(same.gather(shards), whole)
        assert all(torch.equal(x, at.scatter(whole, c)) for c, x in shards)
        assert same.max_local_numel() >= max(x.numel() for _, x in shards)
    assert at.canonical.canonical == at.canonical == Layout.parse(str(at.canonical), grid().axes)
    names = tuple((None,) * len(dim) for dim in at.dims)
    assert Spec.from_layout(at, names, pieces=True).resolve(at.shape, grid()).layout == at


@settings(fast, max_examples=examples(150))
@given(st.integers(2, 20), st.permutations((A0, A1, B)), cuts(1), st.data())
def test_steps_to_a_cut_are_slices(whole: int, order: list[Axis], cut: FactorAxes, data: st.DataObject) -> None:
    """Cutting by the minor axes, too, only ever cuts the pieces that there are; `restrict_size` changes no piece."""
    (axes,), n = cut, data.draw(sizes(whole, tuple(order)))
    for k in range(len(axes)):
        if is_nested(n, list(axes), k):
            for c in grid().all_coords():
                coarse, fine = shard_range(n, Axis.merge(axes[:k]), c), shard_range(n, Axis.merge(axes), c)
                assert coarse[0] <= fine[0] <= fine[1] <= coarse[1]
    assert all(
        shard_range(restrict_size(n, axes), Axis.merge(axes), c) == shard_range(n, Axis.merge(axes), c)
        for c in grid().all_coords()
    )


# Resharding -----------------------------------------------------------------------------------------------------------


def moved(
    leaves: FactorSizes, src: FactorAxes, into: FactorSizes, dst: FactorAxes, pending: Axes = ()
) -> list[Collective]:
    """Move a random value through Mover and virtual devices, and compare with where it ought to be."""
    have, want = layout(leaves, src), layout(into, dst)
    addends = torch.randint(-9, 9, (group_size(pending), *have.shape)).double()
    builder = Builder(grid())
    var = Var("x", have, addends.dtype)
    builder.inputs.append(var)
    for i, hop in enumerate(reshard.plan_route(leaves, 8, src, dst, pending, "sum", into)):
        feed = iter(hop.sizes)
        to = layout(tuple(tuple(next(feed) for _ in dim) for dim in leaves), hop.after)
        out = Var(f"x{i}", to, var.dtype)
        Mover(builder).step(hop.step, var, hop.dims, out, reason="", because=None)
        var = out
    builder.outputs.append(var)
    program = builder.finish()

    def piece(coords: Mapping[str, int]) -> Tensor:
        k = 0
        for axis in pending:
            k = k * axis.size + axis.coord(coords)
        return have.scatter(addends[k], coords)

    with campaign.counting() as calls:
        runner = virtual.load(program, grid(), share=False)
    (locals_,) = runner([[piece(c) for c in grid().all_coords()]])
    for coords, local in zip(grid().all_coords(), locals_, strict=True):
        expected = want.scatter(addends.sum(0), coords)
        assert local.shape == expected.shape, (str(have), str(want), coords)
        assert torch.equal(local, expected), (str(have), str(want), coords, program.collectives)
    assert not campaign.broken_promise(program.collectives, calls, grid())
    return program.collectives


@st.composite
def routes(draw: st.DrawFn) -> tuple[FactorSizes, FactorAxes, FactorSizes, FactorAxes, Axes]:
    leaves, src = draw(layouts())
    dst = draw(st.one_of(st.just(src), cuts(len(src))))
    plain = tuple(tuple(map(int, dim)) for dim in leaves)
    into = draw(st.one_of(st.just(leaves), sized(plain, dst)))
    rest = [a for a in (A0, A1, B) if all(a not in axes for axes in src)]
    pending = tuple(a for a in rest if draw(st.booleans()))
    return leaves, src, into, dst, pending


@pytest.mark.long
@settings(fast, max_examples=examples(80))
@given(routes())
def test_every_route_ends_where_it_should(route: tuple[FactorSizes, FactorAxes, FactorSizes, FactorAxes, Axes]) -> None:
    leaves, src, into, dst, pending = route
    moved(leaves, src, into, dst, pending)


@pytest.mark.parametrize("dst", [((A1,), ()), ((A1,), (A0,)), ((), (A1,)), ((), (A0,)), ((A1, A0), ())], ids=str)
@pytest.mark.parametrize("size", [(500, 300, 800, 0), (400, 400, 400, 400)], ids=["chosen", "even"])
def test_large_pieces_go_no_way_that_only_even_ones_can(size: tuple[int, ...], dst: FactorAxes) -> None:
    """As large as that, a way round is worth one more collective; over (A1, A0) the pieces would be others."""
    leaves = ((ShardSizes(size, (A,)) if len({*size}) > 1 else sum(size),), (64,))
    moved(leaves, ((A0, A1), ()), leaves, dst)


OTHER = ShardSizes((4, 4, 0, 8), (A,))
CHOSEN = ShardSizes((5, 3, 8, 0), (A,))


@pytest.mark.parametrize(
    ("have", "src", "want", "dst", "pending", "expected"),
    [
        (CHOSEN, [A0, A1], CHOSEN, [], (), ["all_gather[a] 96"]),
        (CHOSEN, [A0, A1], CHOSEN, [A0], (), ["all_gather[a:(2)2] 32"]),
        (CHOSEN, [], CHOSEN, [A0, A1], (), []),
        (16, [], CHOSEN, [A0, A1], (A0, A1), ["reduce_scatter[a] 192"]),
        # One row goes from member 0 to 1, eight from 2 to 3; the halves of 8 stay where they are.
        (CHOSEN, [A0, A1], OTHER, [A0, A1], (), ["all_to_all[a:(2)2] 64"]),
        (CHOSEN, [A0, A1], 16, [A0, A1], (), ["all_to_all[a:(2)2] 32"]),
        (ShardSizes((16, 0, 0, 0), (A,)), [A0, A1], 16, [A0, A1], (), ["all_to_all[a] 96"]),
        (CHOSEN, [A0, A1], 16, [B], (), ["all_gather[a] 96"]),
        (CHOSEN, [A0, A1], ShardSizes((2, 6, 8), (B,)), [B, A0, A1], (), ["all_gather[a] 96"]),
    ],
)
def test_collectives_between_pieces(
    have: int, src: list[Axis], want: int, dst: list[Axis], pending: Axes, expected: list[str]
) -> None:
    """16 numbers of 8 bytes; wire bytes of the device that sends most."""
    found = moved(((have,),), (tuple(src),), ((want,),), (tuple(dst),), pending)
    assert [f"{c.kind}[{' '.join(map(str, c.axes))}] {c.bytes:.0f}" for c in found] == expected


def test_an_uneven_dim_is_exchanged_for_another() -> None:
    """The 5 3 8 0 rows of 8 become all rows of 3 2 0 3 columns: of 48 numbers that a device ends with, three quarters
    come from others."""
    columns = ShardSizes((3, 2, 0, 3), (A,))
    (c,) = moved(((CHOSEN,), (8,)), ((A0, A1), ()), ((CHOSEN,), (columns,)), ((), (A0, A1)))
    assert (c.kind, c.bytes) == ("all_to_all", 16 * 3 * 8 * 3 / 4)


# What a user writes ---------------------------------------------------------------------------------------------------

MESH = Mesh.abstract(pod=2, data=4, tensor=16, rules={"batch": "data", "kv": "tensor:(1)8"})


@pytest.mark.parametrize(
    ("spec", "shape", "given", "text", "expected"),
    [
        ("batch@data seq", (16, 4), {"batch": [5, 3, 8, 0]}, "batch@data=[5 3 8 0] seq", "16@data=[5 3 8 0], 4"),
        ("batch seq", (16, 4), {"batch": (5, 3, 8, 0)}, "batch=[5 3 8 0] seq", "16@data=[5 3 8 0], 4"),
        ("batch=[5, 3, 8, 0] seq", (16, 4), {}, "batch=[5 3 8 0] seq", "16@data=[5 3 8 0], 4"),
        ("b@(pod data)=[1 2 3 4 5 1 0 0]?", (16,), {}, None, "16@(pod data)=[1 2 3 4 5 1 0 0]"),
        ("(three=3 heads=8@data=[1 0 3 4] hd)", (48,), {}, None, "(3 8@data=[1 0 3 4] 2)"),
        ("(three heads@data hd)", (48,), {"three": 3, "heads": [1, 0, 3, 4]}, None, "(3 8@data=[1 0 3 4] 2)"),
        ("a@data=[4 4 4 4]", (16,), {}, None, "16@data"),
        ("a heads@tensor:(1)8", (4, 8), {}, None, "4, 8@tensor:(1)8"),
        ("a kv", (4, 8), {}, None, "4, 8@tensor:(1)8"),
        ("a@tensor:(8)2 b@(data tensor:(1)4)", (4, 32), {}, None, "4@tensor:(8)2, 32@(data tensor:(1)4)"),
        ("a@(tensor:(1)4 tensor:(4)4)", (16,), {}, None, "16@tensor"),
        ("a@tensor:(2)2=[1 7]", (8,), {}, None, "8@tensor:(2)2=[1 7]"),
    ],
)
def test_specs(spec: str, shape: tuple[int, ...], given: dict[str, Any], text: str | None, expected: str) -> None:
    (found,) = resolve_many([("x", shape, spec, given)], MESH)
    assert str(found.layout) == expected
    assert Layout.parse(expected, MESH.axes) == found.layout
    if not given or text:
        assert str(found.spec) == (text or spec)
    assert parse(str(found.spec)) == found.spec
    again = Spec.from_layout(found.layout, found.names, pieces=True)
    assert parse(str(again)).resolve(shape, MESH).layout == found.layout


def test_positional_specs() -> None:
    p = P("data=[5 3 8 0]", ("pod", "tensor:(1)2"), None)
    assert str(Spec.convert(p)) == "_@data=[5 3 8 0] _@(pod tensor:(1)2) _ ..."
    assert P.parse(repr(p)) == p
    with pytest.raises(ShardingError) as error:
        P(("pod", "data=[1 2]"), "a b", "tensor:2")
    assert str(error.value) == (
        "P(('pod', 'data=[1 2]'), 'a b', 'tensor:2') cannot be read:\n"
        "  * 'a b' is not a mesh axis\n  * 'tensor:2' is not a mesh axis\n  * 'data=[1 2]' is not a mesh axis\n"
        'Rule: an entry of P is None, an axis "a" or several ("a", "b"), a part "a:(1)8", shard sizes "a=[5 3]"'
    )


WHOLE = "whose 16 devices are 2 x 2 x 2 x 2"
REFUSED: list[tuple[str, tuple[int, ...], dict[str, Any], list[str]]] = [
    ("a@data b", (16, 4), {"a": [5, 3, 8, 1]}, ["dim 0 `a@data=[5 3 8 1]`: 5 + 3 + 8 + 1 = 17, the dim has size 16"]),
    ("a@data b", (16, 4), {"a": [5, 3, 8]}, ["dim 0 `a@data=[5 3 8]`: it has 3 shard sizes, data has 4 devices"]),
    ("a@(pod data)=[16]", (16,), {}, ["dim 0 `a@(pod data)=[16]`: it has 1 shard sizes, pod x data has 8 devices"]),
    ("a@data b", (16, 4), {"a": [9, 8, 0, -1]}, ["dim 0 `a@data=[9 8 0 -1]`: 9, 8, 0, -1 are not sizes"]),
    ("a@data b", (16, 4), {"c": [1, 2]}, ["c=[1 2] is given, but the spec has no 'c'"]),
    ("bat@data", (16,), {"batt": [1]}, ["batt=[1] is given, but the spec has no 'batt'; did you mean 'bat'?"]),
    ("a@data b", (16, 4), {"b": [4]}, ["dim 1 `b=[4]`: it is not sharded, so it has no shard sizes"]),
    ("a@data=[1 2 3 10]", (16,), {"a": [4, 4, 4, 4]}, ["a=[4 4 4 4] is given, the spec says a=[1 2 3 10]"]),
    ("(x a=4@data=[5 3 8 0])", (32,), {}, ["dim 0 `(x a=4@data=[5 3 8 0])`: 5 + 3 + 8 + 0 = 16, a has size 4"]),
    ("a@data=[0 1 0 0]", (1,), {}, ["dim 0 `a@data=[0 1 0 0]`: it has size 1"]),
    ("a@tensor:(1)3", (6,), {}, [f"dim 0 `a@tensor:(1)3`: tensor:(1)3 is no part of 'tensor', {WHOLE}"]),
    ("a@tensor:(3)2", (6,), {}, [f"dim 0 `a@tensor:(3)2`: tensor:(3)2 is no part of 'tensor', {WHOLE}"]),
    ("a@tensor:(1)0", (6,), {}, [f"dim 0 `a@tensor:(1)0`: tensor:(1)0 is no part of 'tensor', {WHOLE}"]),
    (
        "a@tensor:(1)4 b@tensor:(2)2",
        (4, 4),
        {},
        [
            "tensor:(1)4 is used by dim 0 `a@tensor:(1)4` and tensor:(2)2 by dim 1 `b@tensor:(2)2`: they overlap",
        ],
    ),
    (
        "a@tensor:(1)4 b@tensor",
        (4, 16),
        {},
        ["tensor:(1)4 is used by dim 0 `a@tensor:(1)4` and tensor by dim 1 `b@tensor`: they overlap"],
    ),
    (
        "a@tensor:(1)4 b@tensor:(1)4",
        (4, 4),
        {},
        ["axis 'tensor:(1)4' is used by dim 0 `a@tensor:(1)4` and by dim 1 `b@tensor:(1)4`"],
    ),
    (
        "a@data=[1 2 3] b@tensr:(1)2 c@pod",
        (16, 4, 6),
        {"c": [5, 2], "d": [1]},
        [
            "d=[1] is given, but the spec has no 'd'",
            "dim 0 `a@data=[1 2 3]`: 1 + 2 + 3 = 6, the dim has size 16",
            "dim 0 `a@data=[1 2 3]`: it has 3 shard sizes, data has 4 devices",
            "dim 1 `b@tensr:(1)2`: the mesh has no axis 'tensr'; did you mean 'tensor'?",
            "dim 2 `c@pod=[5 2]`: 5 + 2 = 7, the dim has size 6",
        ],
    ),
]


@pytest.mark.parametrize(("spec", "shape", "given", "faults"), REFUSED)
def test_refusals(spec: str, shape: tuple[int, ...], given: dict[str, Any], faults: list[str]) -> None:
    with pytest.raises(ShardingError) as error:
        resolve_many([("x", shape, spec, given)], MESH)
    assert sorted(error.value.offenders) == sorted(faults)
    assert error.value.remedy


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a@data=[1 -1]", "'-' is not a size"),
        ("a@data=[1 2", "the ']' is missing"),
        ("a@data=", "the shard sizes, [5 3 8 0] must stand here"),
        ("a@tensor:8", "a part of an axis is written axis:(pre)size, as in tensor:(1)8"),
        ("a@tensor:(1)", "the size of the part is missing"),
    ],
)
def test_texts_that_cannot_be_read(text: str, fault: str) -> None:
    with pytest.raises(ShardingError, match="cannot be read") as error:
        parse(text)
    assert f"cannot be read: {fault}\n" in str(error.value)


# Dims -----------------------------------------------------------------------------------------------------------------


def test_a_dim_is_split_only_between_pieces() -> None:
    tokens, twin = ShardSizes((20, 12, 32, 0), (DATA,)), ShardSizes((16, 16, 0, 32), (DATA,))
    for minor, inner in ((4, "5 3 8 0"), (2, "10 6 16 0"), (8, None), (16, None)):
        dims = FactorClasses()
        whole = dims.new(64)
        dims.lock(whole[0], (2, 2), tokens)
        dims.choose(whole[0], tokens)
        parts = dims.refine(whole, (64 // minor, minor))
        assert (parts is None) == (inner is None)
        if parts is not None:
            major, rest = (dims.size(dims.resolve(p)[0]) for p in parts)
            assert str(Factor(major, (DATA,))) == f"{64 // minor}@data=[{inner}]"
            assert rest == minor
    # A second choice holds its class together as well, but the first one stands.
    dims = FactorClasses()
    a, b = dims.new(64), dims.new(64)
    for leaf, pieces in ((b, tokens), (a, twin)):
        dims.lock(leaf[0], (2, 2), pieces)
        dims.choose(leaf[0], pieces)
    assert dims.unify(a, b)
    assert dims.size(a[0]) == tokens
    assert dims.refine(a, (16, 4)) is not None
    assert dims.refine(a[:1], (4, 16)) is None


# Programs -------------------------------------------------------------------------------------------------------------

RULES = {"batch": "data", "heads": "tensor", "kv": "tensor", "ff": "tensor"}
WIDTH, HEAD, VOCAB, SEQ = 16, 4, 12, 6


def model(heads: int = 4, kv: int = 2) -> dict[str, Tensor]:
    """Parameters of one block of a decoder with grouped keys, embedding and head."""
    gen = torch.Generator().manual_seed(0)
    shapes = {
        "embed": (VOCAB, WIDTH), "q": (WIDTH, heads * HEAD), "k": (WIDTH, kv * HEAD), "v": (WIDTH, kv * HEAD),
        "o": (heads * HEAD, WIDTH), "up": (WIDTH, 32), "down": (32, WIDTH), "norm": (WIDTH,),
    }  # fmt: skip
    return {name: torch.randn(shape, generator=gen, dtype=torch.float64) / 4 for name, shape in shapes.items()}


def specs(kv: str = "kv") -> dict[str, str]:
    return {
        "embed": "vocab embed", "q": "embed (heads hd=4)", "k": f"embed ({kv} hd=4)", "v": f"embed ({kv} hd=4)",
        "o": "(heads hd=4) embed", "up": "embed ff", "down": "ff embed", "norm": "embed",
    }  # fmt: skip


def loss(p: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
    x = shard(p["embed"][tokens], "batch seq embed")
    h = F.layer_norm(x, (WIDTH,), p["norm"])
    q, k, v = (
        shard((h @ p[name]).unflatten(-1, (-1, HEAD)).transpose(1, 2), f"batch {dim} seq hd")
        for name, dim in (("q", "heads"), ("k", "_?"), ("v", "_?"))
    )
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + y.transpose(1, 2).flatten(2) @ p["o"]
    x = x + F.gelu(F.layer_norm(x, (WIDTH,), p["norm"]) @ p["up"]) @ p["down"]
    return F.cross_entropy((x @ p["embed"].T).flatten(0, 1), targets.flatten())


def step(p: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    value, grads = sl.value_and_grad(loss)(p, tokens, targets)
    return value, {name: p[name] - 0.1 * grads[name] for name in p}


def batch(n: int = 16) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(VOCAB, (n, SEQ), generator=gen) for _ in range(2))
    return tokens, targets


def alone(p: dict[str, Tensor], *data: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    with single_device():
        return step(p, *data)


def worst(found: Any, expected: Any) -> float:
    """The largest relative error of a loss and of updated parameters."""
    pairs = [(found[0], expected[0]), *((found[1][name], expected[1][name]) for name in expected[1])]
    return max(float((a.full_tensor() - b).abs().max() / b.abs().max()) for a, b in pairs)


CHOICES = {
    "first": ("batch=[5 3 8 0] seq", "batch seq"),
    "empty in front": ("batch=[0 16 0 0] seq", "batch seq"),
    "both": ("batch=[5 3 8 0] seq", "batch=[5 3 8 0] seq"),
    "second": ("batch seq", "batch=[5 3 8 0] seq"),
    "other": ("batch=[5 3 8 0] seq", "batch=[1 1 1 13] seq"),
}


@pytest.mark.long
@pytest.mark.sampled(4)
@pytest.mark.parametrize("choice", CHOICES)
def test_a_batch_in_chosen_pieces_stays_so(choice: str) -> None:
    """Loss and updated parameters are one device's; what moves is what moves without a choice, and no activation."""
    p, data = model(), batch()
    expected = alone(p, *data)
    with Mesh(data=4, tensor=2, rules=RULES):
        run = sl.jit(step, in_specs=(specs(), *CHOICES[choice]), out_specs=(None, specs()))
        assert worst(run(p, *data), expected) < 1e-12
        plan = run.plan(p, *data)
        chunks = sl.jit(step, in_specs=(specs(), "batch seq", "batch seq"), out_specs=(None, specs())).plan(p, *data)
    kinds = [c.kind for c in plan.collectives]
    exchanges = 1 if choice == "other" else 0  # of the targets
    assert kinds.count("all_to_all") == exchanges
    assert sorted(kinds) == sorted([*(c.kind for c in chunks.collectives), *["all_to_all"] * exchanges])


def test_pieces_over_a_product_of_axes() -> None:
    p, data = model(), batch()
    with Mesh(pod=2, data=4, rules={"batch": ("pod", "data")}):
        placed = shard(data[0], "batch seq", sizes={"batch": [1, 2, 3, 4, 5, 1, 0, 0]})
        assert [len(s.data) for s in placed.shards] == [1, 2, 3, 4, 5, 1, 0, 0]
        run = sl.jit(step, in_specs=({name: P() for name in p}, None, "batch seq"))
        assert worst(run(p, placed, data[1]), alone(p, *data)) < 1e-12
        assert not [c for c in run.plan(p, placed, data[1]).collectives if c.kind != "all_reduce"]


def test_placed_tensors_are_where_they_are() -> None:
    """Chunks that were placed beside chosen pieces are moved, once, at the door; and as they were, on return."""
    with Mesh(data=4) as mesh:
        x = shard(torch.arange(16.0), "n@data", sizes={"n": [5, 3, 8, 0]})
        y = shard(torch.arange(16.0) * 2, "n@data")
        add = sl.jit(lambda x, y: (x + y, y), out_specs=(None, "n@data=[4 4 4 4]"))
        total, same = add(x, y)
        assert str(total.sharding) == "16@data=[5 3 8 0]"
        assert str(same.sharding) == "16@data"
        assert torch.equal(total.full_tensor(), torch.arange(16.0) * 3)
        assert torch.equal(same.full_tensor(), y.full_tensor())
        assert [(c.kind, c.axes) for c in add.plan(x, y).collectives][:1] == [("all_to_all", ("data:(2)2",))]
        assert "n in other pieces" in add.plan(x, y).full
        assert torch.equal((x + y).full_tensor(), total.full_tensor())
        assert mesh.size == 4


def test_views_keep_pieces_or_gather() -> None:
    whole = torch.arange(64.0).view(16, 4)
    with Mesh(data=4):
        x = shard(whole, "n@data c", sizes={"n": [5, 3, 8, 0]})
        cases: list[tuple[Callable[[Tensor], Tensor], str, int]] = [
            (lambda x: x.flatten(), "64@data=[20 12 32 0]", 0),
            (lambda x: x.view(16, 2, 2), "16@data=[5 3 8 0], 2, 2", 0),
            (lambda x: x.t(), "4, 16@data=[5 3 8 0]", 0),
            (lambda x: x.flatten().view(16, 4), "16@data=[5 3 8 0], 4", 0),
            (lambda x: x.flatten().view(32, 2), "32@data=[10 6 16 0], 2", 0),
            (lambda x: x.view(8, 8), "8, 8", 1),
        ]
        for fn, text, moved_ in cases:
            run = sl.jit(fn)
            assert str(run(x).sharding.canonical) == text
            assert torch.equal(run(x).full_tensor(), fn(whole))
            assert len(run.plan(x).collectives) == moved_


def test_sums_are_scattered_into_chosen_pieces() -> None:
    a, b = torch.randn(6, 8, dtype=torch.float64), torch.randn(8, 16, dtype=torch.float64)
    with Mesh(data=4):
        run = sl.jit(torch.mm, in_specs=("m k@data", "k@data n"), out_specs="m n@data=[5 3 8 0]")
        assert torch.allclose(run(a, b).full_tensor(), a @ b)
        assert [s.data.shape[1] for s in run(a, b).shards] == [5, 3, 8, 0]
        assert [(c.kind, c.bytes) for c in run.plan(a, b).collectives] == [("reduce_scatter", 6 * 8 * 8 * 3)]


def test_a_second_choice_is_a_move() -> None:
    def twice(x: Tensor) -> Tensor:
        return shard(x, "n@data=[8 8 0 0]") * 2

    x = torch.arange(16.0)
    with Mesh(data=4):
        moved = sl.jit(twice, in_specs=("n@data=[5 3 8 0]",))
        assert [c.kind for c in moved.plan(x).collectives] == ["all_to_all"]
        assert str(moved(x).sharding) == "16@data=[8 8 0 0]"
        assert torch.equal(moved(x).full_tensor(), x * 2)
        follows = sl.jit(lambda x: shard(x, "n@data") * 2, in_specs=("n@data=[5 3 8 0]",))
        assert str(follows(x).sharding) == "16@data=[5 3 8 0]"
        assert torch.equal(sl.jit(twice)(shard(x, "n@data=[5 3 8 0]")).full_tensor(), x * 2)


def test_equal_devices_need_equal_pieces() -> None:
    """The code of a shard_map body has one shape: its arguments are in chunks, whatever the rest has."""
    x = torch.arange(16.0)
    with Mesh(data=4):
        with pytest.raises(ShardingError, match="has pieces of 5, 3, 8, 0"):
            sl.shard_map(lambda x: x, in_specs=("n@data=[5 3 8 0]",), out_specs="n@data")(x)
        body = sl.shard_map(lambda x: x * 2, in_specs=("n@data",), out_specs="n@data")
        run = sl.jit(lambda x: body(x) + x, in_specs=("n@data=[5 3 8 0]",))
        assert torch.equal(run(x).full_tensor(), x * 3)


# Parts of axes --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_eight_kv_heads_on_sixteen_devices() -> None:
    """Keys are cut on 8 and replicated on 2; written out it is what the compiler finds by itself."""
    p, data = model(heads=16, kv=8), batch(8)
    meta = {name: x.to("meta") for name, x in p.items()}
    plans = []
    for kv, rule in (("kv@tensor:(1)8", "tensor"), ("kv", "tensor:(1)8"), ("kv", "tensor")):
        with Mesh.abstract(data=2, tensor=16, rules=RULES | {"kv": rule}):
            run = sl.jit(step, in_specs=(specs(kv), "batch seq", "batch seq"), out_specs=(None, specs(kv)))
            plans.append(run.plan(meta, *data))
    assert "8@tensor:(1)8" in plans[0].full
    assert [len(plan.collectives) for plan in plans] == [len(plans[2].collectives)] * 3
    assert [plan.comm_bytes for plan in plans] == [plans[2].comm_bytes] * 3


@pytest.mark.long
def test_two_kv_heads_on_four_devices() -> None:
    p, data = model(heads=4, kv=2), batch(4)
    with Mesh(data=2, tensor=4, rules=RULES):
        named = specs("kv@tensor:(1)2")
        run = sl.jit(step, in_specs=(named, "batch=[3 1] seq", "batch seq"), out_specs=(None, named))
        found = run(p, *data)
        assert str(found[1]["k"].spec) == "embed@() _@tensor:(1)2"  # (2 4) cut in two
        assert worst(found, alone(p, *data)) < 1e-12


# Other processes ------------------------------------------------------------------------------------------------------


def dcp(fn: Callable[..., Any], state: dict[str, Tensor], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of running on one process
        fn(state, checkpoint_id=folder, no_dist=not torch.distributed.is_initialized())


LAYOUTS = (
    "n@data=[5 3 8 0] c",
    "n@data c",
    "n (c=2 d@data=[0 1 0 3])",
    "n (c=2 d@data:(1)2)",
    "n@data:(2)2=[3 13] c",
    "n c",
)


@pytest.mark.parametrize(("saved", "loaded"), list(itertools.permutations(LAYOUTS, 2)))
def test_checkpoints_load_into_another_layout(saved: str, loaded: str, tmp_path: Path) -> None:
    whole = torch.arange(16.0 * 8).view(16, 8)
    with Mesh(data=4):
        dcp(dcp_save, {"x": shard(whole, saved)}, tmp_path)
    zeros = torch.zeros(16, 8)
    with Mesh(data=4, tensor=2):
        x = shard(zeros, loaded)
        alias = x.detach()
        dcp(dcp_load, {"x": alias}, tmp_path)
        assert torch.equal(x.full_tensor(), whole)
        assert all(torch.equal(s.data, x.sharding.scatter(whole, s.coords)) for s in x.shards)
        assert not zeros.any()


def test_views_cannot_be_loaded_into() -> None:
    with Mesh(data=4):
        x = shard(torch.zeros(16, 8), LAYOUTS[0])
        with pytest.raises(ShardingError, match="is a view, and cannot be loaded into"):
            dcp_chunks.chunk_list(x.t())  # type: ignore[arg-type]
        assert len(dcp_chunks.chunk_list(x)) == 3  # type: ignore[arg-type] # one holds nothing


def test_pickles_keep_pieces_and_parts() -> None:
    whole = torch.arange(16.0 * 8).view(16, 8)
    with Mesh(data=4):
        for spec in LAYOUTS:
            x = shard(whole, spec)
            for same in (pickle.loads(pickle.dumps(x)), copy.deepcopy(x)):
                assert (same.sharding, same.spec) == (x.sharding, x.spec)
                assert torch.equal(same.full_tensor(), whole)


def test_no_dtensor_has_chosen_pieces() -> None:
    with Mesh(data=4), pytest.raises(ShardingError, match="DTensor shards in chunks"):
        sl.to_dtensor(shard(torch.zeros(16), "n@data=[5 3 8 0]"))


def on_ranks(transport: str, folder: str) -> float:
    """The worst error of a step on 4 ranks; tensors move between layouts, and to files and back, as they should."""
    p, data = model(), batch()
    found = groups.group_for
    wired = lambda mesh, axes: replace(found(mesh, axes), channel=None) if transport == "gloo" else found(mesh, axes)
    # A mesh of its own for each transport: programs are kept by mesh.
    with (
        mock.patch.object(groups, "group_for", wired),
        Mesh(data=4, rules={"batch": "data", transport: "data"}) as mesh,
    ):
        assert groups.group_for(mesh, (mesh.axis("data"),)).transport == transport
        whole = {name: P() for name in p}
        run = sl.jit(step, in_specs=(whole, "batch=[5 3 8 0] seq", "batch seq"))
        error = worst(run(p, *data), alone(p, *data))
        x = torch.arange(16.0 * 8).view(16, 8)
        at = shard(x, "n@data c", sizes={"n": [5, 3, 8, 0]})
        assert at.to_local().shape[0] == [5, 3, 8, 0][mesh.rank]
        first, second = "n@data=[0 9 0 7] c", "n@data=[5 3 8 0] c"
        for spec in ("n@data c", first, "n c@data=[1 0 4 3]", "n@data:(1)2 c", "n c", second, first):
            at = at.redistribute(spec)
            assert torch.equal(at.full_tensor(), x), spec
            local = Spec.convert(spec).resolve(x.shape, mesh).layout.scatter(x, mesh.coords(mesh.rank))
            assert torch.equal(at.to_local(), local), spec
        dcp(dcp_save, {"x": at}, Path(folder))
        other = shard(torch.zeros(16, 8), "n (c=2 d@data=[0 1 0 3])")
        dcp(dcp_load, {"x": other}, Path(folder))
        assert torch.equal(other.full_tensor(), x)
    return error


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.ranks
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_four_ranks_compute_what_one_device_computes(transport: str, tmp_path: Path) -> None:
    assert max(run_ranks(on_ranks, 4, transport, str(tmp_path))) < 1e-12
