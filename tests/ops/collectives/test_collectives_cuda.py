"""The collectives of GPUs through shardlib's kernels, on the emulated machine, against their references.

The members of a group are threads. Their handles' peers bring all messages together and hand them to a group of virtual
ranks, so each member runs the op as a rank does, down to the launchers.
"""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from shardlib.ops.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from shardlib.ops.collectives.transport import cuda_args as plans
from shardlib.ops.collectives.transport.cuda_peers import Peers
from shardlib.ops.collectives.transport.groups import GroupHandle
from tests.kernels import emulate
from tests.kernels.collectives import SMALL, SOURCES, build_of, load, make_group

SECONDS = 10.0  # until members that wait for one which failed are told


# --- members as threads -----------------------------------------------------------------------------------------------


class Meeting:
    """Virtual ranks whose members call one by one: the last to come runs the call for all."""

    def __init__(self, n: int) -> None:
        self.group, self.n = make_group(n, SMALL), n
        self.calls: list[str] = []
        self._said: list[tuple[str, Tensor, Any]] = [("", torch.empty(0), None)] * n
        self._outs: list[Tensor] = []
        self._barrier = threading.Barrier(n, self._run, timeout=SECONDS)

    def call(self, position: int, name: str, message: Tensor, counts: Any) -> list[Tensor]:
        self._said[position] = name, message, counts
        self._barrier.wait()
        mine = self._outs[position]
        self._barrier.wait()
        return [mine]

    def _run(self) -> None:
        if self._outs:  # the second meeting of a call: all have theirs
            self._outs = []
            return
        names, messages, counts = zip(*self._said, strict=True)
        assert len(set(names)) == 1, names
        assert all(c == counts[0] for c in counts), counts  # members that mean different sizes would hang on GPUs
        assert all(m.dim() == 1 and m.is_contiguous() and not m.is_conj() and not m.is_neg() for m in messages)
        self.calls.append(names[0])
        self._outs = getattr(self.group, names[0])(list(messages), *([] if counts[0] is None else [counts[0]]))
        self.group.check()

    def abort(self) -> None:
        self._barrier.abort()


class Member:
    """`Peers` of one member."""

    def __init__(self, meeting: Meeting, position: int) -> None:
        self.meeting, self.position = meeting, position

    def gather(self, messages: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        return self.meeting.call(self.position, "gather", *messages, list(counts))

    def exchange(self, messages: Sequence[Tensor], counts: Sequence[Sequence[int]]) -> list[Tensor]:
        return self.meeting.call(self.position, "exchange", *messages, [list(row) for row in counts])

    def scatter_sum(self, messages: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        return self.meeting.call(self.position, "scatter_sum", *messages, list(counts))

    def reduce(self, messages: Sequence[Tensor]) -> list[Tensor]:
        return self.meeting.call(self.position, "reduce", *messages, None)


def on_members(n: int, body: Callable[[GroupHandle], Any], by_rank: tuple[int, ...] | None = None) -> tuple[Any, ...]:
    """What `body` returns on every member, and the calls that were made."""
    meeting = Meeting(n)

    def member(position: int) -> Any:
        peers = cast(Peers, Member(meeting, position))
        try:
            return body(GroupHandle(tuple(range(n)), None, position, "nccl", by_rank, peers=peers))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(n) as pool:
        futures = [pool.submit(member, position) for position in range(n)]
    faults = [f.exception() for f in futures]
    first = next(
        (f for f in faults if f and not isinstance(f, threading.BrokenBarrierError)), next(filter(None, faults), None)
    )
    if first:
        raise first
    return [f.result() for f in futures], meeting.calls


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    emulate.prepare(build_of(op) for op in SOURCES)
    for source in SOURCES:  # before threads ask for it
        load(source)


@pytest.fixture(autouse=True)
def _ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDLIB_OPS", "all_gather=cuda,all_reduce=cuda,all_to_all=cuda,reduce_scatter=cuda")


def tensor(shape: Sequence[int], dtype: torch.dtype, seed: int, layout: str = "dense") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if layout == "strided":
        return tensor([*shape[:-1], 2 * shape[-1] + 1], dtype, seed)[..., 1::2]
    if layout == "turned":
        return tensor([*reversed(shape)], dtype, seed).permute(*reversed(range(len(shape))))
    if dtype.is_complex:
        return torch.randn(*shape, dtype=dtype, generator=generator).conj()
    if dtype.is_floating_point:
        return torch.randn(*shape, generator=generator).to(dtype)
    return torch.randint(0, 100, tuple(shape), generator=generator).to(dtype)


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)  # bits, but for the sign of 0


# --- the ops against their references ---------------------------------------------------------------------------------

SIZES = [(2, 2), (3, 0), (5, 1, 2), (1, 0, 0, 4), (0, 0)]
ORDERS = {2: (1, 0), 3: (2, 0, 1), 4: (3, 1, 0, 2)}  # of the process group, which must not matter
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.bool, torch.complex64]


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_all_gather(sizes: tuple[int, ...], dim: int) -> None:
    xs = [tensor([s if d == dim else 2 + d for d in range(3)], torch.float32, i) for i, s in enumerate(sizes)]
    run = lambda g: all_gather.start(xs[g.position], dim, sizes, g).finish()
    outs, calls = on_members(len(sizes), run, ORDERS[len(sizes)])
    same(outs, all_gather.reference(xs, dim, sizes))
    assert calls == ["gather"] * bool(sum(sizes))


@pytest.mark.parametrize("kind", ["dense", "strided", "turned"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_gather_of_any_dtype_and_layout(dtype: torch.dtype, kind: str) -> None:
    xs = [tensor([s, 3], dtype, i, kind) for i, s in enumerate((70, 41))]
    outs, calls = on_members(2, lambda g: all_gather.start(xs[g.position], 0, (70, 41), g).finish())
    same(outs, all_gather.reference(xs, 0, (70, 41)))
    assert calls == ["gather"]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_reduce_scatter(sizes: tuple[int, ...], dim: int) -> None:
    shape = [sum(sizes) if d == dim else 3 for d in range(2)]
    xs = [tensor(shape, torch.float32, i) for i in range(len(sizes))]
    run = lambda g: reduce_scatter.start(xs[g.position], dim, sizes, g).finish()
    outs, calls = on_members(len(sizes), run, ORDERS[len(sizes)])
    same(outs, reduce_scatter.reference(xs, dim, sizes))
    assert calls == ["scatter_sum"] * bool(sum(sizes))


@pytest.mark.parametrize("layout", ["dense", "strided", "turned"])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("shape", [(1,), (7, 33), (150, 150), (0, 4)], ids=str)
def test_all_reduce(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> None:
    xs = [tensor(shape, dtype, i, layout) for i in range(3)]
    outs, calls = on_members(3, lambda g: all_reduce.start(xs[g.position], g).finish(), ORDERS[3])
    same(outs, all_reduce.reference(xs))
    assert calls == ["reduce"] * (0 not in shape)


@pytest.mark.parametrize(("split", "concat"), [*itertools.product(range(3), repeat=2)])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_all_to_all(sizes: tuple[int, ...], split: int, concat: int) -> None:
    n, splits, concats = len(sizes), sizes[::-1], sizes  # the last say nothing where both dims are one
    shapes = [[2, 3, 4] for _ in sizes]
    for shape, size in zip(shapes, concats, strict=True):
        shape[concat] = size
        shape[split] = sum(splits)
    xs = [tensor(shape, torch.bfloat16, i) for i, shape in enumerate(shapes)]
    run = lambda g: all_to_all.start(xs[g.position], split, splits, concat, concats, g).finish()
    outs, calls = on_members(n, run, ORDERS[n])
    same(outs, all_to_all.reference(xs, split, splits, concat, concats))
    assert calls == ["exchange"] * bool(sum(sizes))


def test_several_tensors_share_a_message() -> None:
    sizes, dims = [(3, 0, 2), (1, 1, 4), (2, 2, 2)], (0, 1, 0)
    dtypes = torch.float32, torch.bfloat16, torch.float32

    def operands(shapes: Callable[[int, int], list[int]]) -> list[list[Tensor]]:
        return [[tensor(shapes(j, i), dtypes[j], 3 * i + j) for j in range(3)] for i in range(3)]

    def shape(dim: int, size: int) -> list[int]:
        return [size, 5] if dim == 0 else [5, size]

    parts = operands(lambda j, i: shape(dims[j], sizes[j][i]))
    outs, calls = on_members(3, lambda g: all_gather.start_many(parts[g.position], dims, sizes, g).finish())
    for j in range(3):
        same([out[j] for out in outs], all_gather.reference([x[j] for x in parts], dims[j], sizes[j]))
    assert calls == ["gather"] * 2  # one of each dtype

    wholes = operands(lambda j, i: shape(dims[j], sum(sizes[j])))
    outs, calls = on_members(3, lambda g: reduce_scatter.start_many(wholes[g.position], dims, sizes, g).finish())
    for j in range(3):
        same([out[j] for out in outs], reduce_scatter.reference([x[j] for x in wholes], dims[j], sizes[j]))
    assert calls == ["scatter_sum"] * 2

    outs, calls = on_members(3, lambda g: all_reduce.start_many(wholes[g.position], g).finish())
    for j in range(3):
        same([out[j] for out in outs], all_reduce.reference([x[j] for x in wholes]))
    assert calls == ["reduce"] * 2


def test_a_negated_view_is_summed_as_it_reads() -> None:
    xs = [torch._neg_view(tensor([6], torch.float32, i)) for i in range(2)]
    outs, _ = on_members(2, lambda g: reduce_scatter.start(xs[g.position], 0, (3, 3), g).finish())
    same(outs, reduce_scatter.reference(xs, 0, (3, 3)))
    outs, _ = on_members(2, lambda g: all_reduce.start(xs[g.position], g).finish())
    same(outs, all_reduce.reference(xs))


def test_what_the_kernels_do_not_do_goes_over_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member with peers still sends a maximum, or doubles to be added, through torch."""
    sent: list[str] = []

    def refuse(*_: Any, **__: Any) -> Any:
        sent.append("torch")
        raise NotImplementedError

    for module in (all_reduce, reduce_scatter):
        monkeypatch.setattr(module, "exchange", refuse)
    monkeypatch.setattr(all_reduce, "gather", refuse)
    group = GroupHandle((0, 1), None, 0, "nccl", peers=cast(Peers, Member(Meeting(2), 0)))
    with pytest.raises(NotImplementedError):
        all_reduce.start(torch.ones(4), group, "max")
    with pytest.raises(NotImplementedError):
        reduce_scatter.start(torch.ones(4, dtype=torch.float64), 0, (3, 1), group)
    assert sent == ["torch"] * 2


def test_plans_that_nobody_keeps_are_gone() -> None:
    group = plans.Group(ranks=2)
    made = [plans.all_gather(group, "staged", [4, 4]), plans.reduce_scatter(group, "staged", [4, 4], torch.float32)]
    made += [plans.all_to_all(group, "staged", [[4, 4]] * 2)]
    assert all(plan.words[0] == plan.group.ranks == 2 for plan in made)
    kept = [weakref.ref(plan) for plan in made]
    del made
    gc.collect()
    assert [plan() for plan in kept] == [None] * 3
