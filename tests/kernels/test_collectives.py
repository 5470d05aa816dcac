"""The CUDA collectives on the emulated machine: all ranks of a group as virtual ranks, against the ops' references.

The whole path runs, from `Peers` to the launchers; only the torch op in between is left out. What the emulation cannot
see is the memory's ordering between GPUs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from shardlib.ops import _cuda_peers as cuda_peers
from shardlib.ops import _cuda_plan as plans
from shardlib.ops import all_gather, all_to_all, reduce_scatter
from shardlib.ops._cuda_peers import Peers, choose, unserved
from shardlib.ops._cuda_plan import Plan, Tuning
from shardlib.ops._wire import CollectiveError, combine
from tests.kernels import emulate
from tests.kernels.emulate import Build, EmulationError, Patch

SMALL = Tuning(ctas=2, threads=32, packet_bytes=256, window=4096, chunk=256)
SOURCES = ("all_gather.cu", "all_to_all.cu", "reduce_scatter.cu")
COPIED = ("packets", "staged", "direct", "engine")
SUMMED = ("packets", "staged", "direct")


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    emulate.prepare([_build(op, ()) for op in SOURCES] + [_build(op, [Patch(*patch)]) for _, op, *patch in BUGS])


def _launcher(patches: Sequence[Patch] = (), seed: int = 1, multiprocessors: int = 128) -> cuda_peers.Launch:
    def launch(op: str, out: Tensor, x: Tensor, plan: Plan) -> None:
        loaded = emulate._load(_build(f"{op}.cu", patches))
        emulate.configure(loaded, seed=seed, multiprocessors=multiprocessors)
        emulate.call(loaded, f"shardlib_{op}", plan, None)

    return launch


def _group(
    ranks: int, tuning: Tuning = SMALL, seed: int = 1, patches: Sequence[Patch] = (), **more: Any
) -> Peers:
    return cuda_peers.virtual(ranks, "cpu", tuning, launch=_launcher(patches, seed), **more)


def _random(n: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:  # of all sizes, so that another order of addends gives other bits
        return (torch.randn(n, generator=generator) * 2.0 ** torch.randint(-8, 8, (n,), generator=generator)).to(dtype)
    return torch.randint(-128, 127, (n,), generator=generator, dtype=torch.int64).to(dtype)


class Guarded:
    """Messages in guarded memory, some elements past a multiple of 16 bytes, and shared with a group if asked for."""

    def __init__(self) -> None:
        self.memory = emulate.Memory()

    def messages(self, xs: Sequence[Tensor], askew: int = 0, share: Peers | None = None) -> list[Tensor]:
        whole = [self.memory.tensor(torch.cat([x.new_zeros(askew), x, x.new_zeros(1)]), "an input") for x in xs]
        if share is not None:
            share.share(whole[share.present[0]], [x.data_ptr() for x in whole])
        return [x[askew:-1] for x in whole]


def _sizes(ranks: int, longest: int, seed: int) -> list[int]:
    """Sizes of messages: one is the longest, one is empty, the others are uneven."""
    sizes = torch.randint(0, longest + 1, (ranks,), generator=torch.Generator().manual_seed(seed)).tolist()
    sizes[seed % ranks], sizes[(seed + 1) % ranks] = longest, 0
    return sizes


# --- against the references -------------------------------------------------------------------------------------------


def _check_gather(group: Peers, sizes: Sequence[int], dtype: torch.dtype, form: str, askew: int = 0) -> None:
    xs = [_random(n, dtype, i) for i, n in enumerate(sizes)]
    messages = Guarded().messages(xs, askew, group if form in ("direct", "engine") else None)
    outs = group.gather(messages, sizes, form)
    group.check()
    for out, expected in zip(outs, all_gather.reference(xs, 0, sizes), strict=True):
        assert torch.equal(out, expected)


def _check_exchange(group: Peers, counts: Sequence[Sequence[int]], dtype: torch.dtype, form: str, askew: int = 0) -> None:
    xs = [_random(sum(row), dtype, i) for i, row in enumerate(counts)]
    messages = Guarded().messages(xs, askew, group if form in ("direct", "engine") else None)
    pieces = [x.split_with_sizes(row) for x, row in zip(xs, counts, strict=True)]
    outs = group.exchange(messages, counts, form)
    group.check()
    for rank, out in enumerate(outs):
        assert torch.equal(out, torch.cat([of_rank[rank] for of_rank in pieces]))


def _check_sum(group: Peers, counts: Sequence[int], dtype: torch.dtype, form: str, askew: int = 0) -> None:
    xs = [_random(sum(counts), dtype, i) for i in range(group.size)]
    for x in xs:
        x[1::7] = -0.0
    messages = Guarded().messages(xs, askew, group if form == "direct" else None)
    expected = reduce_scatter.reference(xs, 0, counts)
    outs = group.scatter_sum(messages, counts, form)
    group.check()
    for out, part in zip(outs, expected, strict=True):
        assert torch.equal(out.view(torch.uint8), part.view(torch.uint8))  # the bits: 0 is not -0


@pytest.mark.parametrize("form", COPIED)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_all_gather_is_the_reference(ranks: int, form: str) -> None:
    group = _group(ranks)
    for seed, longest in enumerate([1, 15, 33, 250] if form == "packets" else [1, 63, 3001]):
        _check_gather(group, _sizes(ranks, longest, seed), torch.uint8, form, askew=seed % 3)
    _check_gather(group, [0] * ranks, torch.uint8, form)


@pytest.mark.parametrize("form", COPIED)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_all_to_all_is_the_reference(ranks: int, form: str) -> None:
    group = _group(ranks)
    for seed, longest in enumerate([1, 33] if form == "packets" else [1, 700 // ranks]):
        counts = [_sizes(ranks, longest, seed + row) for row in range(ranks)]
        _check_exchange(group, counts, torch.uint8, form, askew=seed)
    _check_exchange(group, [[0] * ranks] * ranks, torch.uint8, form)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", SUMMED)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_reduce_scatter_has_the_bits_of_the_reference(ranks: int, form: str, dtype: torch.dtype) -> None:
    group = _group(ranks)
    for seed, longest in enumerate([1, 63] if form == "packets" else [1, 1100 // ranks]):
        _check_sum(group, _sizes(ranks, longest, seed), dtype, form, askew=seed)
    _check_sum(group, [0] * ranks, dtype, form)


@pytest.mark.parametrize("total", [0, 1, 63, 128, 5001])
@pytest.mark.parametrize("ranks", [2, 3, 9])
def test_all_reduce_in_one_step_and_in_two(ranks: int, total: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_peers, "ONE_STEP_BYTES", 256)
    xs = [_random(total, torch.bfloat16, i) for i in range(ranks)]
    for out in _group(ranks).reduce(Guarded().messages(xs)):
        assert torch.equal(out, combine(xs, "sum"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.bfloat16, torch.complex64])
def test_copies_take_every_dtype(dtype: torch.dtype) -> None:
    xs = [_random(n, torch.int64, n).to(dtype) for n in (5, 0, 20)]
    for form in ("packets", "staged"):
        outs = _group(3).gather(Guarded().messages(xs), [5, 0, 20], form)
        assert all(torch.equal(out, torch.cat(xs)) for out in outs)


def test_a_shard_moves_from_one_dim_to_another() -> None:
    shards = [_random(6 * size * 2, torch.float32, size).view(6, size, 2) for size in (2, 0, 3)]
    split, concat = [1, 2, 3], [2, 0, 3]
    counts = [[rows * size * 2 for rows in split] for size in concat]
    outs = _group(3).exchange([shard.reshape(-1) for shard in shards], counts)
    for rank, (out, expected) in enumerate(
        zip(outs, all_to_all.reference(shards, 0, split, 1, concat), strict=True)
    ):
        pieces = out.split_with_sizes([split[rank] * size * 2 for size in concat])
        found = torch.cat([p.view(split[rank], size, 2) for p, size in zip(pieces, concat, strict=True)], 1)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("ctas", [1, 3, 7])
def test_any_number_of_ctas(ctas: int) -> None:
    group, xs = _group(3), [_random(n, torch.uint8, n) for n in (2000, 77, 1300)]
    for form in ("staged", "packets"):
        if form == "packets":
            xs = [x[:200] for x in xs]
        outs = group.gather(xs, [len(x) for x in xs], form, ctas=ctas)
        assert all(torch.equal(out, torch.cat(xs)) for out in outs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_multicast_copies_all_and_sums_in_an_order_of_its_own(dtype: torch.dtype) -> None:
    """Small integers have one sum whatever the order, so what else could be wrong shows."""
    group = _group(4, multicast=True)
    xs = [torch.randint(-9, 9, (1600,), generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(4)]
    for _ in range(3):
        assert all(torch.equal(out, torch.cat(xs)) for out in group.gather(xs, [1600] * 4, "multicast"))
        outs = group.scatter_sum(xs, [400, 803, 0, 397], "multicast")
        assert torch.equal(torch.cat(outs), sum(xs[1:], xs[0]))
    with pytest.raises(EmulationError, match="whole 16-byte words"):
        group.gather([x[:1599] for x in xs], [1599] * 4, "multicast")
    with pytest.raises(EmulationError, match="no multicast address"):
        _group(4).gather(xs, [1600] * 4, "multicast")


# --- again and again --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_forms_and_collectives_follow_each_other_in_any_order(seed: int) -> None:
    """All calls share flags, packets and staging; each is given other sizes and must find nothing of those before."""
    generator = torch.Generator().manual_seed(seed)
    group = _group(3, seed=seed)
    for call in range(14):
        pick = int(torch.randint(0, 11, (1,), generator=generator))
        if pick < 4:
            form = COPIED[pick]
            _check_gather(group, _sizes(3, 60 if form == "packets" else 900, seed + call), torch.uint8, form, call % 2)
        elif pick < 8:
            form = COPIED[pick - 4]
            longest = 60 if form == "packets" else 500
            _check_exchange(group, [_sizes(3, longest, call + i) for i in range(3)], torch.uint8, form)
        else:
            form = SUMMED[pick - 8]
            _check_sum(group, _sizes(3, 30 if form == "packets" else 300, call), torch.float16, form)


@pytest.mark.parametrize("form", SUMMED)
def test_the_order_of_events_does_not_change_a_bit(form: str) -> None:
    xs, counts = [_random(120, torch.bfloat16, i) for i in range(4)], [40, 17, 3, 60]
    bits = set()
    for seed in range(5):
        group = _group(4, seed=seed)
        messages = Guarded().messages(xs, share=group if form == "direct" else None)
        for _ in range(3):
            bits.add(bytes(torch.cat(group.scatter_sum(messages, counts, form)).view(torch.uint8).tolist()))
    assert len(bits) == 1


# A rank's calls follow each other at once, while others are still at theirs: what launches one by one do not show. Every
# call fills the input first; the meeting of a rank's CTAs stands for the end of one kernel and the beginning of its next.
DRIVER = r"""
namespace shardlib {
namespace {
void next_kernel(uint32_t* arrived, uint32_t expected) {
  __syncthreads();
  if (threadIdx.x == 0) {
    add_release_system(arrived, 1u);
    while (load_acquire_system(arrived) < expected) pause_ns(1);
  }
  __syncthreads();
}
void repeat(AllGather a, Window w, int64_t form, int64_t calls, int64_t total, uint32_t* arrived) {
  const unsigned rank = blockIdx.y;
  for (int64_t call = 0; call < calls; ++call) {
    auto* input = const_cast<unsigned char*>(a.input[rank]);
    for (int64_t i = threadIdx.x; i < a.bytes_of[rank]; i += blockDim.x)
      if (i % gridDim.x == blockIdx.x) input[i] = static_cast<unsigned char>(16 * call + rank + 1);
    next_kernel(&arrived[rank], uint32_t(2 * call + 1) * gridDim.x);
    a.form = form < 0 ? call % 3 : form;
    if (a.form == kPackets) {
      exchange_packets<AllGather>(a);
    } else {
      exchange<AllGather>(a, w);
    }
    next_kernel(&arrived[rank], uint32_t(2 * call + 2) * gridDim.x);
    a.output[rank] += total;
  }
}
struct Probe : AllGather {
  int64_t* turns;
  __host__ __device__ int64_t taken(unsigned from, unsigned to) const {
    if (threadIdx.x == 0 && blockIdx.x == 0) turns[to * (group.ranks + 1) + ++turns[to * (group.ranks + 1)]] = from;
    return 0;
  }
};
}
}
extern "C" int repeat_gather(shardlib::AllGatherArgs* args, int64_t form, int64_t calls, uint32_t* arrived) {
  using namespace shardlib;
  const AllGather a{*args};
  int64_t total = 0, longest = 0;
  for (int r = 0; r < a.group.ranks; ++r) total += a.bytes_of[r], longest = max(longest, a.bytes_of[r]);
  return for_windows(a.group, longest, 1, true, [&](const Window& w) {
    return launch(shape_of(a.group), nullptr, repeat, a, w, form, calls, total, arrived);
  });
}
extern "C" int turns_of_gather(shardlib::AllGatherArgs* args, int64_t* turns) {
  using namespace shardlib;
  Probe a{{*args}, turns};
  return launch(shape_of(a.group), nullptr, exchange<Probe>, a, Window{0, 128, 1});
}
"""


def _repeat(sizes: Sequence[int], form: str, seed: int, patches: Sequence[Patch] = ()) -> None:
    ranks, calls, guarded = len(sizes), 6, Guarded()
    group = _group(ranks, seed=seed, patches=patches)
    plan = plans.all_gather(group.group, "direct", sizes)
    inputs = guarded.messages([torch.zeros(n, dtype=torch.uint8) for n in sizes], askew=seed)
    outs = [guarded.memory.empty(calls, sum(sizes), dtype=torch.uint8) for _ in sizes]
    for rank, (x, out) in enumerate(zip(inputs, outs, strict=True)):
        plan.input[rank] = x.untyped_storage().data_ptr() + x.storage_offset()
        plan.output[rank] = out.data_ptr()
    loaded = emulate._load(_build(GATHER, patches))
    emulate.configure(loaded, seed=seed, multiprocessors=128)
    number = plans.FORMS.index(form) if form != "mixed" else -1
    emulate.call(loaded, "repeat_gather", plan, number, calls, torch.zeros(ranks, dtype=torch.int32))
    group.check()
    guarded.memory.check()
    of_rank = torch.repeat_interleave(torch.arange(ranks), torch.tensor(sizes)) + 1
    expected = torch.stack([of_rank + 16 * call for call in range(calls)]).to(torch.uint8)
    for out in outs:
        assert torch.equal(out, expected)
    if form == "direct":
        turns = torch.zeros(ranks, ranks + 1, dtype=torch.int64)
        emulate.call(loaded, "turns_of_gather", plan, turns)
        assert turns[:, 1:].tolist() == [[(r + turn) % ranks for turn in range(1, ranks + 1)] for r in range(ranks)]


@pytest.mark.parametrize("sizes", [[64, 64], [0, 200, 70], [1, 0, 0, 17, 250, 3, 0, 90]], ids=str)
@pytest.mark.parametrize("form", ["packets", "staged", "direct", "mixed"])
def test_quick_ranks_do_not_overrun_slow_ones(form: str, sizes: list[int]) -> None:
    for seed in range(5):
        _repeat(sizes, form, seed)


# --- when it goes wrong -----------------------------------------------------------------------------------------------


def _missing(rank: int, ranks: int, form: str) -> Peers:
    present = range(ranks - 1) if rank == ranks - 1 else range(1, ranks)
    return _group(ranks, present=present, seconds=5.0)


@pytest.mark.parametrize("form", ["packets", "staged", "direct", "engine"])
@pytest.mark.parametrize("missing", [0, 3])
def test_a_rank_that_does_not_come_is_named(missing: int, form: str) -> None:
    group = _missing(missing, 4, form)
    messages = Guarded().messages([torch.zeros(50)] * 4, share=group if form in ("direct", "engine") else None)
    messages = [messages[r] for r in group.present]
    group.gather(messages, [50] * 4, form)
    flag = "packet" if form == "packets" else "arrived"
    with pytest.raises(CollectiveError) as caught:
        group.check()
    text = str(caught.value)
    assert f"gave up waiting for rank {missing}, which is gone, late, or runs other code" in text
    assert text.startswith(f"all_gather: rank {group.present[0]} gave up")
    assert f'(flag "{flag}" of CTA ' in text
    assert "call 1" in text.split(" was due")[0]
    with pytest.raises(CollectiveError, match=f"waiting for rank {missing}"):  # and so does every later call
        group.gather(messages, [50] * 4, form)


def test_a_broken_rank_does_not_wait_again() -> None:
    group = _group(2, present=range(1), seconds=1000.0)
    group.scatter_sum([torch.zeros(600)], [300, 300], "staged")
    words = (ctypes.c_uint64 * 8).from_address(group.group.report[0])
    assert words[plans.REPORT.index("peer")] == 1
    words[0] = 0  # as if nobody had looked
    before = group.memory[1].clone()  # the missing rank's: it gets no more signals
    group.scatter_sum([torch.zeros(600)], [300, 300], "staged")
    assert words[0] == 0
    assert torch.equal(group.memory[1], before)


def test_a_report_names_the_ranks_of_the_world() -> None:
    group = _group(2, present=range(1))
    group.ranks = (40, 44)
    group.exchange([torch.zeros(4)], [[2, 2], [2, 2]])
    with pytest.raises(CollectiveError, match=r"^all_to_all: rank 40 gave up waiting for rank 44,"):
        group.check()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda g: g.gather([torch.zeros(99)] * 3, [99] * 3, "packets"), "396 bytes is too large for packets"),
        (lambda g: g.scatter_sum([torch.zeros(99)] * 3, [99, 0, 0], "packets"), "396 bytes is too large for packets"),
        (lambda g: g.gather([torch.zeros(9)] * 3, [9] * 3, ctas=200), ""),
        (lambda g: g.scatter_sum([torch.zeros(9)] * 3, [3] * 3, "engine"), "reads shared tensors"),
        (lambda g: g.gather([torch.zeros(9)] * 3, [9] * 3, "direct"), "reads shared tensors"),
        (lambda g: g.gather([torch.zeros(9)] * 3, [9, -9, 9], "staged"), "a message of -36 bytes"),
    ],
)
def test_what_cannot_be_done_is_refused(call: Callable[[Peers], object], text: str) -> None:
    group = _group(3)
    if not text:
        call(group)
        return
    with pytest.raises((EmulationError, ValueError, RuntimeError), match=text):
        call(group)
    group.check()


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"ranks": 17}, "a group has 2 to 16 ranks, not 17"),
        ({"ranks": 1}, "a group has 2 to 16 ranks, not 1"),
        ({"present": 4}, "a launch of ranks 0 to 3 in a group of 3"),
        ({"ctas": 257}, "a rank has 1 to 256 CTAs, not 257"),
        ({"threads": 48}, "a multiple of 32 threads up to 512, not 48"),
        ({"window": 1000}, "multiples of 128 bytes, not 1000 and 256"),
        ({"window": 128}, "a window of 128 bytes is too small for 1 messages"),
        ({"ctas": 250}, "3 virtual ranks of 250 CTAs do not run at the same time"),
    ],
)
def test_a_wrong_group_is_refused(changed: dict[str, int], text: str) -> None:
    group = _group(3)
    plan = plans.all_gather(group.group, "staged", [4] * 3)
    for name, value in changed.items():
        setattr(plan.group, name, value)
    with pytest.raises(EmulationError, match=text):
        _launcher()("all_gather", torch.empty(0), torch.empty(0), plan)


def test_what_the_kernels_leave_to_nccl() -> None:
    assert unserved("reduce_scatter", torch.bfloat16, "sum", 16) == ""
    assert unserved("reduce_scatter", torch.bfloat16, "max", 8) == "the kernels form sums, no max"
    assert unserved("all_gather", torch.uint8, "", 17) == "the kernels take up to 16 ranks, not 17"
    assert choose("all_gather", 1 << 20).way == "staged"
    assert choose("all_gather", 1 << 20, tuning=Tuning(packet_bytes=1 << 20)).way == "packets"


def test_python_and_the_kernels_mean_the_same_memory() -> None:
    """Sizes and offsets of the structures, and of the parts of a workspace."""
    lines = [f"sizeof(shardlib::{name})" for name in ("Group", "AllGatherArgs", "AllToAllArgs", "ReduceScatterArgs")]
    lines += ["offsetof(shardlib::AllToAllArgs, sizes)", "offsetof(shardlib::ReduceScatterArgs, count)"]
    lines += ["sizeof(shardlib::Control)", "shardlib::kMaxCtas", "shardlib::kCounters", "shardlib::kReportWords"]
    values = ", ".join(lines)
    driver = f'#include <cstddef>\nextern "C" int sizes(int64_t* x) {{ int64_t v[] = {{{values}}}; for (int64_t w : v) *x++ = w; return 0; }}'
    found = torch.zeros(len(lines), dtype=torch.int64)
    emulate.call(emulate.library("all_gather.cu", driver=driver), "sizes", found)
    ours = [*map(ctypes.sizeof, (plans.Group, plans.AllGather, plans.AllToAll, plans.ReduceScatter))]
    ours += [plans.AllToAll.sizes.offset, plans.ReduceScatter.count.offset]
    assert found.tolist() == [*ours, plans.CONTROL_BYTES, plans.MAX_CTAS, plans.COUNTERS, len(plans.REPORT)]


# --- planted bugs -----------------------------------------------------------------------------------------------------

GATHER, TO_ALL, SUM = SOURCES


def _scenario_gather(patches: Sequence[Patch]) -> None:
    for form in COPIED:
        group = _group(3, patches=patches)
        for askew, sizes in enumerate(([1, 0, 250], [33, 250, 47])):
            _check_gather(group, sizes, torch.uint8, form, askew)
    for form in ("packets", "staged", "direct", "mixed"):
        for seed in range(4):
            _repeat([0, 200, 70], form, seed, patches)
            _repeat([64, 64], form, seed, patches)


def _scenario_all_to_all(patches: Sequence[Patch]) -> None:
    for form in COPIED:
        group = _group(3, patches=patches)
        for seed in range(2):
            counts = [_sizes(3, 60 if form == "packets" else 700, seed + row) for row in range(3)]
            _check_exchange(group, counts, torch.uint8, form)


def _scenario_sum(patches: Sequence[Patch]) -> None:
    for form in SUMMED:
        group = _group(3, patches=patches)
        for _ in range(3):
            _check_sum(group, [37, 0, 100], torch.bfloat16, form, 1)


SCENARIOS = {GATHER: _scenario_gather, TO_ALL: _scenario_all_to_all, SUM: _scenario_sum}

# (what is wrong, in which kernel it is tried, file, old text, new text)
BUGS = [
    ("no wait before staged data is read", GATHER, "exchange.cuh",
     "if (!wait_all(c, kArrived, mark(c, round))) return;", ""),
    ("flag before data", GATHER, "exchange.cuh",
     "publish(c, a, w, round);\n      signal_all(c, kArrived, mark(c, round + 1));",
     "signal_all(c, kArrived, mark(c, round + 1));\n      publish(c, a, w, round);"),
    ("a signal does not wait for the CTA's other threads", GATHER, "peers.cuh",
     "  __syncthreads();\n  const unsigned peer = threadIdx.x;", "  const unsigned peer = threadIdx.x;"),
    ("a chunk is read a round too early", GATHER, "exchange.cuh",
     "fetch(c, a, w, round - 1);", "fetch(c, a, w, min(round, w.rounds - 1)), fetch(c, a, w, round - 1 - (round > 1));"),
    ("the epoch stands still", GATHER, "peers.cuh", "store_release_device(&c.control->epoch, c.epoch);", ""),
    ("the first CTA to end ends the call", GATHER, "peers.cuh", "== gridDim.x - 1)", "== 0)"),
    ("one buffer instead of two", GATHER, "peers.cuh", "int64_t(c.epoch & 1) * g.window", "int64_t(0)"),
    ("packets of one buffer instead of two", GATHER, "peers.cuh", "int64_t(c.epoch & 1) * g.ranks + from", "from"),
    ("a packet of an earlier call is taken", GATHER, "peers.cuh", "seen == epoch;", "seen != 0;"),
    ("nothing is sent for an empty message", GATHER, "peers.cuh",
     "return max(int64_t(1), (bytes + 3) / 4);", "return (bytes + 3) / 4;"),
    ("no barrier at the end of a direct call", GATHER, "exchange.cuh", "  wait_all(c, kDone, mark(c, 1));", ""),
    ("neighbours in the wrong order", GATHER, "exchange.cuh",
     "const unsigned from = (rank + turn) % ranks;\n    const Range", "const unsigned from = turn - 1;\n    const Range"),
    ("the last neighbour is left out", GATHER, "exchange.cuh",
     "for (unsigned turn = 1; turn <= ranks; ++turn) {\n    const unsigned from = (rank + turn) % ranks;\n    const Range",
     "for (unsigned turn = 1; turn < ranks; ++turn) {\n    const unsigned from = (rank + turn) % ranks;\n    const Range"),
    ("tail lost", GATHER, "bytes.cuh", "for (int64_t i = tail + threadIdx.x; i < bytes;", "for (int64_t i = tail + threadIdx.x; i < 0;"),
    ("head lost", GATHER, "bytes.cuh", "i < head;", "i < 0;"),
    ("an askew word is cut from the wrong side", GATHER, "bytes.cuh", "both >> 8 * past", "both >> 8 * (3 - past)"),
    ("the last words of a slice are not copied", GATHER, "bytes.cuh", "for (; i < count; i += threads) store_16", "for (; i < 0; i += threads) store_16"),
    ("later windows begin at the first", GATHER, "exchange.cuh",
     "a.taken(rank, to) + w.first + p.begin", "a.taken(rank, to) + p.begin"),
    ("the slot of another receiver", TO_ALL, "exchange.cuh", "a.segments() == 1 ? 0 : to;", "a.segments() == 1 ? 0 : from;"),
    ("order of arrival", SUM, "reduce_scatter.cu",
     "from.of(base + p) + begin", "from.of(int((base + p + from.rank) % ranks)) + begin"),
    ("order of arrival among packets", SUM, "reduce_scatter.cu",
     "    for (unsigned p = 0; p < ranks && whole; ++p) {\n", "    for (unsigned q = 0; q < ranks && whole; ++q) {\n      const unsigned p = (rank + q) % ranks;\n"),
    ("rounded at every addend", SUM, "reduce_scatter.cu",
     "sums[u][e] + more.x[e];", "to_float(from_float<T>(sums[u][e] + more.x[e]));"),
    ("the first addend counts as zero plus it", SUM, "reduce_scatter.cu",
     "base + p == 0 ? more.x[e]", "base + p == 0 ? 0.0f + more.x[e]"),
]  # fmt: skip


def _build(op: str, patches: Sequence[Patch]) -> Build:
    return Build(op, tuple(patches), driver=DRIVER if op == GATHER else "")


@pytest.mark.parametrize("op", SOURCES)
def test_the_scenarios_hold_for_the_sources(op: str) -> None:
    SCENARIOS[op](())


@pytest.mark.parametrize(("name", "op", "file", "old", "new"), BUGS, ids=[bug[0] for bug in BUGS])
def test_a_planted_bug_is_caught(name: str, op: str, file: str, old: str, new: str) -> None:
    with pytest.raises((AssertionError, CollectiveError)):  # an EmulationError is an AssertionError
        SCENARIOS[op]((Patch(file, old, new),))
