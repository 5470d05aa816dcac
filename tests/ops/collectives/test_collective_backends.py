"""Every collective on every backend against its reference: dtypes, shapes, dims, groups, sizes, bits."""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardlib.ops.collectives import all_gather, all_reduce, all_to_all, ppermute, reduce_scatter
from shardlib.ops.collectives.transport import shm_channel, shm_streams, shm_world
from shardlib.ops.collectives.transport.groups import GroupHandle, group_for
from shardlib.ops.collectives.transport.shm_world import Session
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.mesh.mesh import Mesh
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.ranks

OPS: dict[str, Any] = {
    m.__name__.rpartition(".")[2]: m for m in (all_gather, all_reduce, all_to_all, ppermute, reduce_scatter)
}
BACKENDS = ["torch", "shm"]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
DTYPES = [*FLOATS, *INTS, torch.complex64, torch.complex128]
Case = tuple[str, list[Tensor], tuple[Any, ...]]  # op, all members' operands, arguments

SIZES = {2: [(3, 2), (0, 4), (0, 0)], 3: [(2, 2, 2), (1, 0, 3)], 4: [(2, 2, 2, 2), (3, 0, 1, 2)]}
UNEVEN = [(n, sizes) for n in SIZES for sizes in SIZES[n]]


def tensor(shape: Sequence[int], dtype: torch.dtype, seed: int, layout: str = "dense") -> Tensor:
    """Random values with all their bits; `layout`: dense, reversed (dims, in memory), expanded or sliced."""
    generator = torch.Generator().manual_seed(seed)
    order = list(reversed(range(len(shape))))
    if layout == "expanded" and shape:
        return tensor((1, *shape[1:]), dtype, seed).expand(tuple(shape))
    if layout == "sliced" and shape:
        return tensor((*shape[:-1], 2 * shape[-1] + 1), dtype, seed)[..., 1::2]
    made = [shape[d] for d in order] if layout == "reversed" else shape
    if dtype.is_floating_point or dtype.is_complex:
        value = torch.randn(made, dtype=torch.complex128 if dtype.is_complex else torch.float64, generator=generator)
    else:
        value = torch.randint(0, 2 if dtype == torch.bool else 127, made, generator=generator)
    value = value.to(dtype)
    return value.permute(order) if layout == "reversed" else value


def gather(dim: int, sizes: Sequence[int], dtype: torch.dtype = torch.float32, layout: str = "dense") -> Case:
    shapes = [[size if d == dim else 2 + d for d in range(3)] for size in sizes]
    return "all_gather", [tensor(shape, dtype, i, layout) for i, shape in enumerate(shapes)], (dim, sizes)


def scatter(
    dim: int, sizes: Sequence[int], dtype: torch.dtype = torch.float32, layout: str = "dense", kind: str = "sum"
) -> Case:
    shape = [sum(sizes) if d == dim else 2 + d for d in range(3)]
    return "reduce_scatter", [tensor(shape, dtype, i, layout) for i in range(len(sizes))], (dim, sizes, kind)


def reduction(
    shape: Sequence[int], n: int, dtype: torch.dtype = torch.float32, layout: str = "dense", kind: str = "sum"
) -> Case:
    return "all_reduce", [tensor(shape, dtype, i, layout) for i in range(n)], (kind,)


def exchange(
    split: int, concat: int, sizes: Sequence[int], dtype: torch.dtype = torch.float32, layout: str = "dense"
) -> Case:
    splits = list(reversed(sizes))
    concats = list(sizes) if split != concat else [sum(splits)] * len(sizes)
    shapes = [[2, 3, 4] for _ in sizes]
    for i, shape in enumerate(shapes):
        shape[concat] = concats[i]
        shape[split] = sum(splits)
    return (
        "all_to_all",
        [tensor(shape, dtype, i, layout) for i, shape in enumerate(shapes)],
        (split, splits, concat, concats),
    )


def shift(shape: Sequence[int], n: int, dtype: torch.dtype = torch.float32, layout: str = "dense") -> Case:
    return "ppermute", [tensor(shape, dtype, i, layout) for i in range(n)], ([(i, (i + 1) % n) for i in range(n)],)


# On ranks.


def group_of(backend: str, axes: Sequence[tuple[str, int, int, int]] | None = None) -> GroupHandle:
    n = dist.get_world_size()
    mesh = Mesh(x=n) if axes is None else Mesh(data=2, tensor=2)
    group = group_for(mesh, (mesh.axis("x"),) if axes is None else tuple(Axis(*axis) for axis in axes))
    assert group.size == 1 or group.transport == "shm", group.why
    return replace(group, channel=None) if backend == "torch" else group


def run_op(op: str, x: Tensor, args: tuple[Any, ...], group: GroupHandle, shared: bool = False) -> Any:
    if op in ("all_reduce", "reduce_scatter"):
        *head, kind = args
        return OPS[op].start(x, *head, group, kind)
    if op == "all_gather":
        return all_gather.start(x, *args, group, shared)
    return OPS[op].start(x, *args, group)


def on_ranks(case: Case, backend: str, axes: Any = None) -> Tensor:
    op, shards, args = case
    group = group_of(backend, axes)
    x = shards[group.position]
    out: Tensor = run_op(op, x, args, group).finish()
    assert out.is_contiguous()
    return out.clone()


def check(case: Case, backend: str, axes: Any = None, members: Sequence[Sequence[int]] | None = None) -> None:
    """The ranks have the bits of the reference."""
    op, shards, args = case
    want = OPS[op].reference(shards, *args)
    n = len(shards) if members is None else 4
    got = run_ranks(on_ranks, n, case, backend, axes)
    for rank in range(n):
        same(got[rank], want[rank if members is None else members[rank].index(rank)])


def same(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


BACKEND = pytest.mark.parametrize("backend", BACKENDS)


SLOW = pytest.mark.slow
LAYOUTS = [
    pytest.param(b, lay, marks=[] if lay in ("dense", "sliced") else SLOW)
    for b in ("torch", "shm")
    for lay in ("dense", "reversed", "expanded", "sliced")
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("backend", "layout"), LAYOUTS)
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(("n", "sizes"), UNEVEN)
def test_gather_and_scatter(n, sizes, dim, layout, backend):
    check(gather(dim, sizes, layout=layout), backend)
    check(scatter(dim, sizes, layout=layout), backend)


# Gathers into one block that all members read.


@contextmanager
def any_size() -> Iterator[None]:
    """Results of any bytes are shared meanwhile."""
    kept, all_gather.SHARED_BYTES = all_gather.SHARED_BYTES, 1
    try:
        yield
    finally:
        all_gather.SHARED_BYTES = kept


def gathered_together(cases: Sequence[Case]) -> tuple[list[Tensor], bool]:
    """The operands of the cases in one message, and whether they lie in one block."""
    group = group_of("shm")
    xs = [shards[group.position] for _, shards, _ in cases]
    dims, sizes = zip(*(args for _, _, args in cases), strict=True)
    with any_size():
        outs = all_gather.start_many(xs, dims, sizes, group, shared=True).finish()
    at = [x.data_ptr() for x in outs if x.numel()]
    return [x.clone() for x in outs], max(at) - min(at) < sum(x.nbytes + 64 for x in outs)


@pytest.mark.parametrize("layout", ["dense", "reversed", "expanded", "sliced"])
@pytest.mark.parametrize(("n", "sizes"), [(2, (3, 2)), (2, (0, 4)), (3, (1, 0, 3)), (4, (2, 2, 2, 2))])
def test_shared_gathers(n, sizes, layout):
    dtypes = (torch.float32, torch.bfloat16, torch.bool)
    cases = [gather(dim, sizes, dtype, layout) for dim in range(3) for dtype in dtypes]
    cases.append(gather(0, [0] * n))
    for rank, (outs, together) in enumerate(run_ranks(gathered_together, n, cases)):
        for out, (_, shards, args) in zip(outs, cases, strict=True):
            same(out, all_gather.reference(shards, *args)[rank])
        assert together


@pytest.mark.long
def test_a_shared_gather_of_many_rounds():
    shards = [torch.arange(n, dtype=torch.float32).view(-1, 3).t() for n in (3 << 20, 6, 3 << 18)]
    case = ("all_gather", shards, (1, [x.shape[1] for x in shards]))
    for rank, ((out,), _) in enumerate(run_ranks(gathered_together, 3, [case])):
        same(out, all_gather.reference(shards, *case[2])[rank])


@pytest.mark.sampled(3)
@BACKEND
@pytest.mark.parametrize(("split", "concat"), [*itertools.permutations(range(3), 2), (0, 0), (2, 2)])
@pytest.mark.parametrize(("n", "sizes"), UNEVEN)
def test_all_to_all(n, sizes, split, concat, backend):
    check(exchange(split, concat, sizes, layout="reversed"), backend)


@BACKEND
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("table", [[[1, 4], [0, 3]], [[5, 0, 0], [3, 0, 0], [0, 4, 0]], [[0, 0], [0, 7]]], ids=str)
def test_all_to_all_of_different_sizes(table, dim, backend):
    """Row i is what member i sends to each, along the dim in which it arrives."""
    shapes = [[2, 3, 4] for _ in table]
    for shape, row in zip(shapes, table, strict=True):
        shape[dim] = sum(row)
    shards = [tensor(shape, torch.float32, i) for i, shape in enumerate(shapes)]
    check(("all_to_all", shards, (dim, table, dim, [])), backend)


@BACKEND
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (3, 5), (70, 200)])
def test_all_reduce_and_ppermute(shape, n, backend):
    check(reduction(shape, n), backend)
    check(shift(shape, n), backend)


@pytest.mark.sampled(3)
@BACKEND
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype, backend):
    n, sizes = 3, (2, 0, 3)
    check(gather(1, sizes, dtype), backend)
    check(exchange(0, 2, sizes, dtype), backend)
    check(shift((2, 3), n, dtype), backend)
    for kind in ("sum",) if dtype.is_complex else ("sum", "max", "min"):
        check(scatter(1, sizes, dtype, kind=kind), backend)
        check(reduction((5, 3), n, dtype, kind=kind), backend)
        check(reduction((150, 301), n, dtype, kind=kind), backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_half_precision_number_is_added_right(dtype):
    """All bit patterns, each to one of 13 numbers, in the ways that rounding, overflow and NaN need."""
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    more = torch.tensor([0.0, -0.0, 1.0, -1.0, 3e-8, 6e-5, 1e-40, 0.1, 2048.0, 6e4, -6e4, torch.inf, torch.nan])
    shards = [every, more.to(dtype).repeat(5042)[: 1 << 16], torch.full((1 << 16,), 2.0**-8, dtype=dtype)]
    for kind in ("sum", "max", "min"):
        check(("all_reduce", shards, (kind,)), "shm")
        check(("reduce_scatter", shards, (0, (1 << 14, 1 << 15, 1 << 14), kind)), "shm")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["sum", "max", "min"])
def test_nan_and_infinity(dtype, kind):
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 1.0, -1e38], dtype=dtype)
    shards = [x.contiguous().view(-1) for x in torch.meshgrid(special, special, special, indexing="ij")]
    check(("all_reduce", shards, (kind,)), "shm")


def lazily(op: str) -> Tensor:
    """A collective of a tensor whose conjugation (or negation) torch has only noted."""
    group = group_of("shm")
    x = tensor((4,), torch.complex64, group.position)
    flagged = x.conj() if op == "conj" else x.conj().imag
    assert flagged.is_conj() or flagged.is_neg()
    return all_reduce.start(flagged, group).finish()


@pytest.mark.parametrize("op", ["conj", "neg"])
def test_conjugations_that_are_only_noted(op):
    xs = [tensor((4,), torch.complex64, i).conj_physical() for i in range(2)]
    for got in run_ranks(lazily, 2, op):
        same(got, sum(x if op == "conj" else x.imag for x in xs))


@pytest.mark.parametrize("dtype", INTS[:-1], ids=str)
def test_integers_wrap_around(dtype):
    largest = torch.full((300,), torch.iinfo(dtype).max, dtype=dtype)
    check(("all_reduce", [largest, largest, largest], ("sum",)), "shm")


@pytest.mark.parametrize("backend", ["torch", "shm"])
@pytest.mark.parametrize(
    ("axes", "members"),
    [
        ([("data", 2, 1, 2)], [(0, 2), (1, 3), (0, 2), (1, 3)]),
        ([("tensor", 2, 1, 2)], [(0, 1), (0, 1), (2, 3), (2, 3)]),
        ([("data", 2, 1, 2), ("tensor", 2, 1, 2)], [(0, 1, 2, 3)] * 4),
        ([("tensor", 2, 1, 2), ("data", 2, 1, 2)], [(0, 2, 1, 3)] * 4),
        ([], [(0,), (1,), (2,), (3,)]),
    ],
)
def test_groups(axes, members, backend):
    sizes = (3, 1, 0, 2)[: len(members[0])]
    for case in (gather(1, sizes), scatter(2, sizes), exchange(0, 1, sizes), shift((2, 3), len(sizes))):
        check(case, backend, axes, members)
    check(reduction((40, 300), len(sizes)), backend, axes, members)


@BACKEND
@pytest.mark.parametrize("nbytes", [1, 2, 63, 64, 65, 4097, (1 << 20) + 1])
def test_sizes_from_one_byte_up(nbytes, backend):
    parts = [nbytes // 2, nbytes - nbytes // 2]
    shards = [tensor((nbytes,), torch.uint8, i) for i in range(2)]
    check(("all_gather", [x[:size] for x, size in zip(shards, parts, strict=True)], (0, parts)), backend)
    check(("reduce_scatter", shards, (0, parts, "sum")), backend)
    check(("all_reduce", shards, ("sum",)), backend)
    check(("all_to_all", shards, (0, parts, 0, [nbytes] * 2)), backend)
    check(("ppermute", shards, ([(1, 0)],)), backend)


@pytest.mark.long
def test_larger_than_the_staging():
    """Results of this size are written past the caches."""
    count = (shm_world.STAGING >> 2) + (1 << 20) + 3
    shards = [torch.arange(count, dtype=torch.float32) % 1009 + i for i in range(2)]
    parts = [count // 2 + 5, count - count // 2 - 5]
    check(("all_gather", [x[: count // 2] for x in shards], (0, [count // 2] * 2)), "shm")
    check(("reduce_scatter", shards, (0, parts, "sum")), "shm")
    check(("all_reduce", shards, ("sum",)), "shm")
    check(("all_to_all", [x.view(1, -1) for x in shards], (1, parts, 0, [1, 1])), "shm")


# In small staging, so that everything is larger than it, and many at once.


@functools.cache
def small_session() -> Session:
    kept, shm_world.STAGING = shm_world.STAGING, 1 << 14
    try:
        return Session(dist.get_rank(), dist.get_world_size())
    finally:
        shm_world.STAGING = kept


@functools.cache
def small_group(axes: tuple[tuple[str, int, int, int], ...]) -> GroupHandle:
    """A group with a staging of 16 KB, in rounds of 4 KB."""
    shm_streams.ROUND = 1 << 12
    group = group_of("shm", axes)
    mesh = Mesh(data=2, tensor=2)
    groups = {tuple(mesh.group_ranks(tuple(Axis(*axis) for axis in axes), c)) for c in mesh.all_coords()}
    channel = small_session().channel(sorted(groups))
    assert isinstance(channel, shm_channel.Channel), channel
    return replace(group, channel=channel)


GROUPS = (
    (("data", 2, 1, 2),),
    (("tensor", 2, 1, 2),),
    (("data", 2, 1, 2), ("tensor", 2, 1, 2)),
    (("tensor", 2, 1, 2), ("data", 2, 1, 2)),
)


def draw_program(seed: int, count: int) -> list[tuple[int, Case]]:
    """Collectives over random groups, from nothing to many times the staging."""
    rng = random.Random(seed)
    program = []
    for _ in range(count):
        which = rng.randrange(len(GROUPS))
        n = 2 if which < 2 else 4
        rows = rng.choice([1, 3, 40, 700])
        sizes = [rng.choice([0, rows, 2 * rows]) for _ in range(n)]
        dim = rng.randrange(3)
        layout = rng.choice(["dense", "reversed", "sliced"])
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.uint8])
        kinds = [
            lambda d=dim, s=sizes, t=dtype, lay=layout: gather(d, s, t, lay),
            lambda d=dim, s=sizes, t=dtype, lay=layout: scatter(d, s, t, lay),
            lambda r=rows, m=n, t=dtype, lay=layout: reduction((r, 5), m, t, lay),
            lambda r=rows, m=n, t=dtype, lay=layout: shift((r, 3), m, t, lay),
            lambda d=dim, s=[i % 60 for i in sizes], t=dtype, lay=layout: exchange(d, (d + 1) % 3, s, t, lay),
        ]
        program.append((which, rng.choice(kinds)()))
    return program


def many_in_flight(seed: int, count: int, shared: bool) -> None:
    """All are started, in one order; each rank waits for them in an order of its own."""
    program = draw_program(seed, count)
    handles = []
    for which, (op, shards, args) in program:
        group = small_group(GROUPS[which])
        with any_size():
            handles.append(run_op(op, shards[group.position], args, group, shared=shared))
    order = list(range(count))
    random.Random(f"{seed} {dist.get_rank()}").shuffle(order)
    for i in order:
        which, (op, shards, args) = program[i]
        same(handles[i].finish(), OPS[op].reference(shards, *args)[small_group(GROUPS[which]).position])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_many_in_flight_that_do_not_fit(seed, shared):
    run_ranks(many_in_flight, 4, seed, 60, shared)


def waiting(count: int) -> None:
    """More collectives at once than a channel has notes for; the last rank comes when the others have started all."""
    group = group_of("shm")
    if group.position == group.size - 1:
        time.sleep(0.1)
    xs = [torch.full((3,), 1000.0 * group.position + i) for i in range(count)]
    handles = [all_gather.start(x, 0, [3] * group.size, group) for x in xs]
    for i, handle in enumerate(handles):
        assert handle.finish().view(-1, 3)[:, 0].tolist() == [1000.0 * m + i for m in range(group.size)]


def test_many_small_ones_at_once():
    run_ranks(waiting, 3, 300)


def woken(look: float) -> float:
    """Seconds that 30 collectives take whose last member comes 5 ms late each time, and waits sleep for `look`."""
    group = group_of("shm")
    begin, before = time.monotonic(), shm_channel.POLL_SECONDS
    shm_channel.POLL_SECONDS = look
    for i in range(30):
        if i % group.size == group.position:
            time.sleep(0.005)
        all_gather.start(torch.zeros(1), 0, [1] * group.size, group).finish()
    shm_channel.POLL_SECONDS = before
    return time.monotonic() - begin


def test_those_who_wait_are_woken():
    assert max(run_ranks(woken, 4, 60.0)) < 60  # a single one who is not woken sleeps as long as that


def forgotten() -> int:
    """Collectives that nobody waits for: those after them are right, and their tensors are not kept for ever."""
    group = group_of("shm")
    assert group.shm is not None
    for i in range(600):
        all_gather.start(torch.full((3,), float(i)), 0, [3] * group.size, group)
        if i % 100 == 99:
            out = all_gather.start(torch.full((1,), float(i)), 0, [1] * group.size, group).finish()
            assert out.tolist() == [float(i)] * group.size
    return len(group.shm.session.transfers)


def test_forgotten_collectives():
    assert max(run_ranks(forgotten, 2)) <= shm_channel.MAX_TRANSFERS + 100
