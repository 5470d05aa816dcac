"""The collectives: one op over one group, all members at once (reference) and on ranks, against plain torch."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardlib.core.errors import ShardingError
from shardlib.ops.backend_choice import Choice
from shardlib.ops.collectives import all_gather, all_reduce, all_to_all, ppermute, reduce_scatter
from shardlib.ops.collectives.transport.groups import GroupHandle, group_for, prepare
from shardlib.ops.collectives.transport.request import CollectiveRequest
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.mesh.mesh import Mesh
from tests.helpers.ranks import only, run_ranks

OPS: dict[str, Any] = {
    m.__name__.rpartition(".")[2]: m for m in (all_gather, all_reduce, all_to_all, ppermute, reduce_scatter)
}
DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]
SIZES = {
    1: [(3,)],
    2: [(3, 3), (3, 2), (0, 4), (5, 0), (0, 0)],
    4: [(2, 2, 2, 2), (3, 3, 3, 1), (2, 0, 1, 0), (0, 0, 0, 5)],
}
UNEVEN = [(n, sizes) for n in SIZES for sizes in SIZES[n]]
WORLDS = [2, 4]
RANKED = pytest.mark.ranks


def tensor(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32, *, strided: bool = False) -> Tensor:
    """Small whole numbers, so that sums are exact in every dtype; `strided` has its dims reversed in memory."""
    generator = torch.Generator().manual_seed(seed)
    low, high = (0, 2) if dtype == torch.bool else (0, 9) if dtype == torch.uint8 else (-9, 9)
    value = torch.randint(low, high, shape[::-1] if strided else shape, generator=generator).to(dtype)
    return value.permute(tuple(reversed(range(len(shape))))) if strided else value


def shards_along(dim: int, sizes: tuple[int, ...], *, strided: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    shapes = [tuple(size if d == dim else 2 + d for d in range(3)) for size in sizes]
    return [tensor(shape, seed, dtype, strided=strided) for seed, shape in enumerate(shapes)]


def addends(
    shape: tuple[int, ...], n: int, *, strided: bool = False, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    return [tensor(shape, seed, dtype, strided=strided) for seed in range(n)]


def reduced(xs: list[Tensor], kind: str) -> Tensor:
    stacked = torch.stack(xs)
    if xs[0].dtype == torch.bool:
        return stacked.all(0) if kind == "min" else stacked.any(0)
    return stacked.sum(0).to(xs[0].dtype) if kind == "sum" else getattr(stacked, f"a{kind}")(0)


# On ranks. A case is the name of an op, all members' tensors and the op's arguments.


def on_ranks(op: str, shards: list[Tensor], args: tuple[Any, ...]) -> Tensor:
    mesh = Mesh(x=len(shards))
    group = group_for(mesh, (mesh.axis("x"),))
    return run_op(op, shards[group.position].clone(memory_format=torch.preserve_format), args, group)


def run_op(op: str, x: Tensor, args: tuple[Any, ...], group: GroupHandle) -> Tensor:
    if op in ("all_reduce", "reduce_scatter"):
        *head, kind = args
        handle = OPS[op].start(x, *head, group, kind)
    else:
        handle = OPS[op].start(x, *args, group)
    out: Tensor = handle.finish()
    assert out.is_contiguous()
    return out


def check_op(op: str, shards: list[Tensor], args: tuple[Any, ...], want: list[Tensor], *, ranks: bool = True) -> None:
    """Reference and ranks give `want`, in shape, dtype, values and contiguity."""
    n = len(shards)
    results = {"reference": OPS[op].reference(shards, *args)}
    if ranks and n > 1:
        results["ranks"] = run_ranks(on_ranks, n, op, shards, args)
    for where, got in results.items():
        for i in range(n):
            assert got[i].dtype == want[i].dtype, where
            torch.testing.assert_close(
                got[i], want[i], rtol=0, atol=0, equal_nan=True, msg=lambda m, w=where: f"{w}: {m}"
            )


@pytest.mark.sampled(5)
@pytest.mark.ranks
@RANKED
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(("n", "sizes"), UNEVEN)
def test_all_gather(n, sizes, dim, strided):
    shards = shards_along(dim, sizes, strided=strided)
    check_op("all_gather", shards, (dim, sizes), [torch.cat(shards, dim)] * n)


@pytest.mark.sampled(7)
@pytest.mark.ranks
@RANKED
@pytest.mark.parametrize("kind", ["sum", "max"])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(("n", "sizes"), UNEVEN)
def test_reduce_scatter(n, sizes, dim, strided, kind):
    xs = addends(tuple(sum(sizes) if d == dim else 2 + d for d in range(3)), n, strided=strided)
    check_op("reduce_scatter", xs, (dim, sizes, kind), list(reduced(xs, kind).split(sizes, dim)))


@pytest.mark.sampled(5)
@pytest.mark.ranks
@RANKED
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("shape", [(), (3, 5), (0, 3), (2, 3, 4)])
@pytest.mark.parametrize("kind", ["sum", "max", "min"])
@pytest.mark.parametrize("n", [1, *WORLDS])
def test_all_reduce(n, kind, shape, strided):
    xs = addends(shape, n, strided=strided)
    check_op("all_reduce", xs, (kind,), [reduced(xs, kind)] * n)


@pytest.mark.sampled(7)
@pytest.mark.ranks
@RANKED
@pytest.mark.parametrize(("split_dim", "concat_dim"), [*itertools.permutations(range(3), 2), (0, 0), (1, 1)])
@pytest.mark.parametrize(("n", "sizes"), UNEVEN)
def test_all_to_all(n, sizes, split_dim, concat_dim):
    split = tuple(reversed(sizes)) if n > 1 else sizes
    concat = sizes if split_dim != concat_dim else (sum(split),) * n
    shapes = [[2, 3, 4] for _ in range(n)]
    for i, shape in enumerate(shapes):
        shape[concat_dim] = concat[i]
        shape[split_dim] = sum(split)
    shards = [tensor(tuple(shape), seed, strided=bool(seed % 2)) for seed, shape in enumerate(shapes)]
    want = [torch.cat([s.split(split, split_dim)[i] for s in shards], concat_dim) for i in range(n)]
    check_op("all_to_all", shards, (split_dim, split, concat_dim, concat), want)


@pytest.mark.ranks
@RANKED
@pytest.mark.parametrize(
    ("n", "pairs"),
    [
        (1, [(0, 0)]),
        (1, []),
        (2, [(0, 1), (1, 0)]),
        (2, [(0, 1)]),
        (2, []),
        (4, [(0, 1), (1, 2), (2, 3), (3, 0)]),
        (4, [(0, 3), (2, 2)]),
        (4, [(3, 0), (0, 1), (1, 2)]),
    ],
)
@pytest.mark.parametrize("strided", [False, True])
def test_ppermute(n, pairs, strided):
    shards = addends((2, 3), n, strided=strided)
    source = {dst: src for src, dst in pairs}
    want = [shards[source[i]] if i in source else torch.zeros(2, 3) for i in range(n)]
    check_op("ppermute", shards, (pairs,), want)


@pytest.mark.ranks
@RANKED
def test_ppermute_of_different_shapes():
    shards = shards_along(0, (3, 1, 0, 2))
    shapes = [tuple(s.shape) for s in shards]
    got = run_ranks(ppermute_shapes, 4, shards, [(0, 1), (1, 2), (2, 0)], shapes)
    assert [tuple(g.shape) for g in got] == [shapes[2], shapes[0], shapes[1], shapes[3]]
    for i, src in ((0, 2), (1, 0), (2, 1)):
        torch.testing.assert_close(got[i], shards[src])
    assert not got[3].any()


def ppermute_shapes(shards: list[Tensor], pairs: Any, shapes: Any) -> Tensor:
    mesh = Mesh(x=4)
    group = group_for(mesh, (mesh.axis("x"),))
    return ppermute.start(shards[group.position], pairs, group, shapes).finish()


@pytest.mark.parametrize(
    ("pairs", "fault"),
    [
        ([(0, 4)], "pair (0, 4) names a member beyond 3"),
        ([(0, 1), (0, 2)], "member 0 sends 2 times"),
        ([(0, 1), (2, 1)], "member 1 receives 2 times"),
    ],
)
def test_ppermute_refuses(pairs, fault):
    with pytest.raises(ShardingError) as caught:
        ppermute.reference(addends((2,), 4), pairs)
    assert caught.value.offenders == (fault,)


def test_all_gather_refuses_other_sizes():
    with pytest.raises(ValueError, match=r"all_gather along dim 0: sizes are \[2, 2\], but the tensors have \[2, 3\]"):
        all_gather.reference(shards_along(0, (2, 3)), 0, [2, 2])


@pytest.mark.sampled(3)
@pytest.mark.ranks
@RANKED
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", WORLDS)
def test_dtypes(n, dtype):
    sizes = (2, 1) if n == 2 else (2, 1, 0, 2)
    shards = shards_along(1, sizes, dtype=dtype)
    check_op("all_gather", shards, (1, sizes), [torch.cat(shards, 1)] * n)
    xs = addends((2, sum(sizes), 3), n, dtype=dtype)
    for kind in ("sum",) if dtype.is_complex else ("sum", "max", "min"):
        check_op("all_reduce", xs, (kind,), [reduced(xs, kind)] * n)
        check_op("reduce_scatter", xs, (1, sizes, kind), list(reduced(xs, kind).split(sizes, 1)))
    want = [torch.cat([x.split(sizes, 1)[i] for x in xs], 0) for i in range(n)]
    check_op("all_to_all", xs, (1, sizes, 0, (2,) * n), want)
    check_op("ppermute", xs, ([(i, (i + 1) % n) for i in range(n)],), [xs[-1], *xs[:-1]])


@pytest.mark.sampled(5)
@pytest.mark.ranks
@RANKED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
@pytest.mark.parametrize("kind", ["sum", "max"])
@pytest.mark.parametrize("n", WORLDS)
def test_large_messages(n, kind, dtype):
    for columns in (50_000 * 4 // dtype.itemsize, 350_001):
        xs = addends((3, columns), n, dtype=dtype)
        check_op("all_reduce", xs, (kind,), [reduced(xs, kind)] * n)
    big = addends((1, 300_000), n, dtype=dtype)
    for dim in (0, 1):
        sizes = tuple(x.shape[dim] for x in big)
        assert (
            all_gather.choose(CollectiveRequest(n * big[0].nbytes, True, torch.float32, "", "gloo", n)).way == "native"
        )
        check_op("all_gather", big, (dim, sizes), [torch.cat(big, dim)] * n)


@pytest.mark.ranks
@RANKED
@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("size", [4, 100_000])
def test_nan_wins_a_maximum(kind, size):
    xs = addends((size,), 4)
    xs[2][size // 2] = torch.nan
    check_op("all_reduce", xs, (kind,), [reduced(xs, kind)] * 4)


def test_half_precision_sums_are_rounded_once():
    xs = [torch.tensor([v], dtype=torch.bfloat16) for v in (256.0, 1.0, 1.0, 1.0)]
    assert all_reduce.reference(xs)[0].item() == 260.0  # 259 to the nearest; one by one it would stay 256


@pytest.mark.ranks
@RANKED
def test_sums_have_the_bits_of_the_reference():
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(64, generator=generator) for _ in range(4)]
    check_op("all_reduce", xs, ("sum",), all_reduce.reference(xs))
    check_op("reduce_scatter", xs, (0, (16,) * 4, "sum"), reduce_scatter.reference(xs, 0, [16] * 4))


def test_references_share_what_is_the_same():
    xs = addends((2, 3), 4)
    assert len({id(t) for t in all_reduce.reference(xs)}) == 1
    assert len({id(t) for t in all_gather.reference(xs, 0, [2] * 4)}) == 1
    assert ppermute.reference(xs, [(0, 1)])[1] is xs[0]
    assert all(r(xs[:1])[0] is xs[0] for r in (all_reduce.reference, lambda s: all_gather.reference(s, 0, [2])))


# Several tensors in one message.

MIXED = [
    ((4, 6), torch.float32),
    ((3, 2, 2), torch.int16),
    ((), torch.float32),
    ((0, 2), torch.float32),
    ((5,), torch.bool),
]


def many(op: str, shards: list[list[Tensor]], args: tuple[Any, ...]) -> list[Tensor]:
    mesh = Mesh(x=len(shards))
    group = group_for(mesh, (mesh.axis("x"),))
    handle = OPS[op].start_many(shards[group.position], *args[: 2 * (op != "all_reduce")], group, *args[2:])
    out: list[Tensor] = handle.finish()
    assert all(x.is_contiguous() for x in out)
    return out


@pytest.mark.ranks
@RANKED
@pytest.mark.parametrize("n", WORLDS)
def test_all_reduce_many(n):
    shards = [[tensor(s, 7 * i + j, d, strided=bool(j % 2)) for j, (s, d) in enumerate(MIXED)] for i in range(n)]
    want = [all_reduce.reference(list(column))[0] for column in zip(*shards, strict=True)]
    for got in run_ranks(many, n, "all_reduce", shards, ()):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.ranks
@RANKED
@pytest.mark.parametrize("n", WORLDS)
def test_gather_and_scatter_many(n):
    dims = [0, 1, 1, 0]
    sizes = [[2] * n, [3, 1, 0, 2][:n], [1] * n, [0, 4, 1, 1][:n]]
    dtypes = [torch.float32, torch.float32, torch.int64, torch.float32]
    tables = list(zip(dims, sizes, dtypes, strict=True))
    shards = [[shards_along(d, tuple(s), dtype=t)[i] for d, s, t in tables] for i in range(n)]
    want = [torch.cat(column, d) for column, d in zip(zip(*shards, strict=True), dims, strict=True)]
    for got in run_ranks(many, n, "all_gather", shards, (dims, sizes)):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    wholes = [[tensor(tuple(w.shape), 9 * i + j, w.dtype) for j, w in enumerate(want)] for i in range(n)]
    columns = zip(zip(*wholes, strict=True), dims, sizes, strict=True)
    scattered = list(zip(*(reduce_scatter.reference(c, d, s) for c, d, s in columns), strict=True))
    for i, got in enumerate(run_ranks(many, n, "reduce_scatter", wholes, (dims, sizes))):
        torch.testing.assert_close(got, list(scattered[i]), rtol=0, atol=0)


def overlapped(n: int) -> list[list[Any]]:
    """Six collectives under way at once, waited for in another order, with nobody else holding the buffers."""
    mesh = Mesh(x=n)
    group = group_for(mesh, (mesh.axis("x"),))
    handles = []
    for seed in range(2):
        mine = [float(10 * dist.get_rank() + seed + i) for i in range(n)]
        handles.append(all_reduce.start(torch.tensor(mine), group))
        handles.append(all_gather.start(torch.tensor(mine), 0, [n] * n, group))
        handles.append(reduce_scatter.start(torch.tensor(mine), 0, [1] * n, group))
    order = [4, 0, 3, 5, 1, 2]
    results = {i: handles[i].finish().tolist() for i in order}
    return [results[i] for i in range(6)]


@pytest.mark.ranks
@RANKED
@pytest.mark.parametrize("n", WORLDS)
def test_collectives_overlap(n):
    for rank, got in enumerate(run_ranks(overlapped, n, n)):
        for seed in range(2):
            rows = [[float(10 * r + seed + i) for i in range(n)] for r in range(n)]
            total = [sum(column) for column in zip(*rows, strict=True)]
            assert got[3 * seed : 3 * seed + 3] == [total, [v for row in rows for v in row], [total[rank]]]


# Ways of other backends, as far as Gloo can go them.


def forced(op: str, shards: list[Tensor], args: tuple[Any, ...], way: str) -> Tensor:
    mesh = Mesh(x=len(shards))
    group = replace(group_for(mesh, (mesh.axis("x"),)), channel=None)
    kept, OPS[op].choose = OPS[op].choose, lambda *_: Choice("torch", way, "asked for")
    try:
        return run_op(op, shards[group.position], args, group)
    finally:
        OPS[op].choose = kept


@pytest.mark.ranks
@RANKED
@pytest.mark.parametrize(
    ("op", "way", "sizes"),
    [
        ("all_gather", "padded", (3, 0, 1, 2)),
        ("all_gather", "padded", (2, 2, 2, 2)),
        ("all_gather", "native", (2, 2, 2, 2)),
        ("reduce_scatter", "native", (2, 2, 2, 2)),
        ("all_reduce", "native", (3,) * 4),
        ("all_reduce", "scatter_gather", (3,) * 4),
    ],
)
@pytest.mark.parametrize("dim", [0, 1])
def test_every_way(op, way, sizes, dim):
    if op == "all_gather":
        shards = shards_along(dim, sizes)
        args, want = (dim, sizes), [torch.cat(shards, dim)] * 4
    else:
        shards = addends(tuple(sum(sizes) if d == dim else 2 + d for d in range(3)), 4)
        total = reduced(shards, "sum")
        args = ("sum",) if op == "all_reduce" else (dim, sizes, "sum")
        want = [total] * 4 if op == "all_reduce" else list(total.split(sizes, dim))
    for got, wanted in zip(run_ranks(forced, 4, op, shards, args, way), want, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


# Groups.


def members(axes: list[tuple[str, int, int, int]]) -> tuple[tuple[int, ...], int, int, bool]:
    """What this rank knows of its group on a 2x2 mesh, and the sum of ranks that an all-gather in it gives."""
    mesh = Mesh(data=2, tensor=2)
    group = group_for(mesh, tuple(Axis(*axis) for axis in axes))
    mine = torch.tensor([float(dist.get_rank())])
    gathered = all_gather.start(mine, 0, [1] * group.size, group).finish()
    assert gathered.tolist() == list(group.ranks)
    n = group.size
    scattered = reduce_scatter.start(torch.arange(n) * 1.0, 0, [1] * n, group).finish()
    assert scattered.item() == n * group.position
    received = ppermute.start(mine, [(i, (i + 1) % n) for i in range(n)], group).finish()
    assert received.item() == group.ranks[group.position - 1]
    pieces = torch.tensor([10.0 * dist.get_rank() + i for i in range(n)])
    exchanged = all_to_all.start(pieces, 0, [1] * n, 0, [n] * n, group).finish()
    assert exchanged.tolist() == [10.0 * r + group.position for r in group.ranks]
    assert group_for(mesh, tuple(Axis(*axis) for axis in axes)) is group
    return group.ranks, group.position, group.size, group.by_rank is None


@RANKED
@pytest.mark.parametrize(
    ("axes", "ranks", "in_order"),
    [
        ([("data", 2, 1, 2)], [(0, 2), (1, 3), (0, 2), (1, 3)], True),
        ([("tensor", 2, 1, 2)], [(0, 1), (0, 1), (2, 3), (2, 3)], True),
        ([("data", 2, 1, 2), ("tensor", 2, 1, 2)], [(0, 1, 2, 3)] * 4, True),
        ([("tensor", 2, 1, 2), ("data", 2, 1, 2)], [(0, 2, 1, 3)] * 4, False),
        ([], [(0,), (1,), (2,), (3,)], True),
    ],
)
def test_groups_over_axes(axes, ranks, in_order):
    for rank, (group, position, size, sorted_) in enumerate(run_ranks(members, 4, axes)):
        assert group == ranks[rank]
        assert group[position] == rank
        assert size == len(group)
        assert sorted_ is in_order


def sub_axes() -> list[tuple[int, ...]]:
    mesh = Mesh(x=4)
    parts = [(Axis("x", 2, 1, 4),), (Axis("x", 2, 2, 4),), (Axis("x", 2, 2, 4), Axis("x", 2, 1, 4))]
    prepare(mesh, parts)
    groups = [group_for(mesh, part) for part in parts]
    for group in groups:
        mine = torch.tensor([float(dist.get_rank())])
        out = all_gather.start(mine, 0, [1] * group.size, group).finish()
        assert out.tolist() == list(group.ranks)
    assert groups[2].pg is dist.group.WORLD
    return [group.ranks for group in groups]


@pytest.mark.ranks
@RANKED
def test_groups_over_parts_of_an_axis():
    minor, major = [(0, 1), (0, 1), (2, 3), (2, 3)], [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert run_ranks(sub_axes, 4) == [[major[r], minor[r], (0, 2, 1, 3)] for r in range(4)]


def reuse() -> tuple[bool, bool, int]:
    """Axes in another order use the same process group; a mesh axis uses the DeviceMesh's."""
    mesh, cube = Mesh(data=2, tensor=2), Mesh(a=1, b=2, c=2)
    one = group_for(cube, (cube.axis("b"), cube.axis("a")))
    two = group_for(cube, (cube.axis("a"), cube.axis("b")))
    three = group_for(mesh, (mesh.axis("tensor"),))
    return one.pg is two.pg, three.pg is mesh.device_mesh.get_group("tensor"), group_for(cube, (cube.axis("a"),)).size


@pytest.mark.ranks
@RANKED
def test_process_groups_are_shared():
    assert only(run_ranks(reuse, 4)) == (True, True, 1)


def test_virtual_meshes_have_no_groups():
    mesh = Mesh(data=2)
    with pytest.raises(ShardingError, match="has no process groups") as caught:
        group_for(mesh, (mesh.axis("data"),))
    assert "it is virtual" in caught.value.offenders[0]
    assert "torchrun --nproc-per-node 2" in str(caught.value)


# Choices.


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        (("all_reduce", 100, True, torch.float32, "sum", "gloo", 4), "torch/exchange: a small message"),
        (("all_reduce", 10**6, True, torch.float32, "sum", "gloo", 4), "torch/scatter_gather: a middling message"),
        (("all_reduce", 10**7, True, torch.float32, "sum", "gloo", 4), "torch/native: a large message"),
        (("all_reduce", 10**7, True, torch.float32, "sum", "gloo", 2), "torch/exchange: two members"),
        (
            ("all_reduce", 10**7, True, torch.float32, "max", "gloo", 4),
            "torch/scatter_gather: gloo loses NaNs in a max",
        ),
        (("all_reduce", 10**7, True, torch.int32, "max", "nccl", 4), "torch/native: "),
        (("all_reduce", 100, True, torch.bfloat16, "sum", "nccl", 4), "torch/native: "),
        (
            ("all_reduce", 100, True, torch.complex64, "sum", "nccl", 4),
            "torch/exchange: nccl does not reduce complex64",
        ),
        (("all_reduce", 100, True, torch.float32, "sum", "shm", 4), "shm/one_step: a small message"),
        (("all_reduce", 10**6, True, torch.bfloat16, "sum", "shm", 4), "shm/two_steps: "),
        (("all_reduce", 10**6, True, torch.complex64, "max", "shm", 4), "torch/scatter_gather: "),
        (("all_gather", 100, False, torch.float32, "", "nccl", 4), "torch/padded: sizes differ"),
        (("all_gather", 100, False, torch.float32, "", "gloo", 4), "torch/exchange: sizes differ"),
        (("all_gather", 100, False, torch.float32, "", "shm", 4), "shm: each member's part"),
        (("all_gather", 100, True, torch.float32, "", "virtual", 4), "torch: all members are in this process"),
        (("all_gather", 100, True, torch.float32, "", "none", 1), "torch: one member"),
        (
            ("all_gather", 100, True, torch.float32, "", "open", 4),
            "shm: each member's part is copied to its place; torch/exchange if the ranks find",
        ),
        (
            ("all_reduce", 100, True, torch.complex64, "max", "open", 4),
            "torch/exchange: gloo does not reduce complex64",
        ),
        (("reduce_scatter", 100, True, torch.float32, "sum", "nccl", 4), "torch/native: sizes are equal"),
        (("reduce_scatter", 100, False, torch.float32, "sum", "nccl", 4), "torch/exchange: sizes differ"),
        (("reduce_scatter", 100, False, torch.bfloat16, "sum", "shm", 4), "shm: each member adds up"),
        (("all_to_all", 100, True, torch.float32, "", "shm", 4), "shm: each member reads its pieces"),
        (("ppermute", 100, True, torch.float32, "", "gloo", 4), "torch/exchange: tensors are sent pairwise"),
    ],
)
def test_choices_say_why(choice, text, monkeypatch):
    monkeypatch.delenv("SHARDLIB_OPS", raising=False)
    op, *case = choice
    assert str(OPS[op].choose(CollectiveRequest(*case))).startswith(text)
