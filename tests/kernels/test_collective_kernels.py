"""The CUDA collectives on the emulated machine: all ranks of a group as virtual ranks, against the ops' references.

The whole path runs, from `Peers` to the launchers; only the torch op in between is left out. What the emulation cannot
see is the memory's ordering between GPUs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from shardlib.core.errors import CollectiveError
from shardlib.ops.collectives import all_to_all
from shardlib.ops.collectives.transport import cuda_args as plans
from shardlib.ops.collectives.transport.cuda_args import Tuning
from shardlib.ops.collectives.transport.cuda_peers import Peers, choose_form, find_kernel_fault
from shardlib.ops.collectives.transport.flat_messages import combine
from tests.kernels import emulate
from tests.kernels.collectives import (
    COPIED,
    SOURCES,
    SUMMED,
    Guarded,
    build_of,
    check_apart,
    check_exchange,
    check_gather,
    check_multicast,
    check_sum,
    launcher,
    make_group,
    random_sizes,
    random_values,
    repeat_gather,
)
from tests.kernels.emulate import EmulationError


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    emulate.prepare(build_of(op) for op in SOURCES)


# --- against the references -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", COPIED)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_all_gather_is_the_reference(ranks: int, form: str) -> None:
    group = make_group(ranks)
    for seed, longest in enumerate([1, 15, 33, 250] if form == "packets" else [1, 63, 3001]):
        check_gather(group, random_sizes(ranks, longest, seed), torch.uint8, form, askew=seed % 3)
    check_gather(group, [0] * ranks, torch.uint8, form)


@pytest.mark.parametrize("form", COPIED)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_all_to_all_is_the_reference(ranks: int, form: str) -> None:
    group = make_group(ranks)
    for seed, longest in enumerate([1, 33] if form == "packets" else [1, 700 // ranks]):
        counts = [random_sizes(ranks, longest, seed + row) for row in range(ranks)]
        check_exchange(group, counts, torch.uint8, form, askew=seed)
    check_exchange(group, [[0] * ranks] * ranks, torch.uint8, form)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", SUMMED)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_reduce_scatter_has_the_bits_of_the_reference(ranks: int, form: str, dtype: torch.dtype) -> None:
    group = make_group(ranks)
    for seed, longest in enumerate([1, 63] if form == "packets" else [1, 1100 // ranks]):
        check_sum(group, random_sizes(ranks, longest, seed), dtype, form, askew=seed)
    check_sum(group, [0] * ranks, dtype, form)


@pytest.mark.parametrize("total", [0, 1, 63, 128, 5001])
@pytest.mark.parametrize("ranks", [2, 3, 9])
def test_all_reduce_in_one_step_and_in_two(ranks: int, total: int) -> None:
    xs = [random_values(total, torch.bfloat16, i) for i in range(ranks)]
    for out in make_group(ranks, Tuning(ctas=2, threads=32, packet_bytes=256, one_step_bytes=256, window=4096)).reduce(
        Guarded().messages(xs)
    ):
        assert torch.equal(out, combine(xs, "sum"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.bfloat16, torch.complex64])
def test_copies_take_every_dtype(dtype: torch.dtype) -> None:
    xs = [random_values(n, torch.int64, n).to(dtype) for n in (5, 0, 20)]
    for form in ("packets", "staged"):
        outs = make_group(3).gather(Guarded().messages(xs), [5, 0, 20], form)
        assert all(torch.equal(out, torch.cat(xs)) for out in outs)


def test_a_shard_moves_from_one_dim_to_another() -> None:
    shards = [random_values(6 * size * 2, torch.float32, size).view(6, size, 2) for size in (2, 0, 3)]
    split, concat = [1, 2, 3], [2, 0, 3]
    counts = [[rows * size * 2 for rows in split] for size in concat]
    outs = make_group(3).exchange([shard.reshape(-1) for shard in shards], counts)
    for rank, (out, expected) in enumerate(zip(outs, all_to_all.reference(shards, 0, split, 1, concat), strict=True)):
        pieces = out.split_with_sizes([split[rank] * size * 2 for size in concat])
        found = torch.cat([p.view(split[rank], size, 2) for p, size in zip(pieces, concat, strict=True)], 1)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("ctas", [1, 3, 7])
def test_any_number_of_ctas(ctas: int) -> None:
    group, xs = make_group(3), [random_values(n, torch.uint8, n) for n in (2000, 77, 1300)]
    for form in ("staged", "packets"):
        if form == "packets":
            xs = [x[:200] for x in xs]
        outs = group.gather(xs, [len(x) for x in xs], form, ctas=ctas)
        assert all(torch.equal(out, torch.cat(xs)) for out in outs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_multicast_copies_all_and_sums_in_an_order_of_its_own(dtype: torch.dtype) -> None:
    for op in ("gather", "sum"):
        check_multicast(0, op, dtype)
    group, xs = make_group(4, multicast=True), [torch.zeros(1600, dtype=dtype)] * 4
    with pytest.raises(EmulationError, match="whole 16-byte words"):
        group.gather([x[:1599] for x in xs], [1599] * 4, "multicast")
    with pytest.raises(EmulationError, match="no multicast address"):
        make_group(4).gather(xs, [1600] * 4, "multicast")


# --- again and again --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_forms_and_collectives_follow_each_other_in_any_order(seed: int) -> None:
    """All calls share flags, packets and staging; each is given other sizes and must find nothing of those before."""
    generator = torch.Generator().manual_seed(seed)
    group = make_group(3, seed=seed)
    for call in range(14):
        pick = int(torch.randint(0, 9, (1,), generator=generator))
        if pick < 3:
            form = COPIED[pick]
            check_gather(
                group, random_sizes(3, 60 if form == "packets" else 900, seed + call), torch.uint8, form, call % 2
            )
        elif pick < 6:
            form = COPIED[pick - 3]
            longest = 60 if form == "packets" else 500
            check_exchange(group, [random_sizes(3, longest, call + i) for i in range(3)], torch.uint8, form)
        else:
            form = SUMMED[pick - 6]
            check_sum(group, random_sizes(3, 30 if form == "packets" else 300, call), torch.float16, form)


@pytest.mark.parametrize("form", SUMMED)
def test_the_order_of_events_does_not_change_a_bit(form: str) -> None:
    xs, counts = [random_values(120, torch.bfloat16, i) for i in range(4)], [40, 17, 3, 60]
    bits = set()
    for seed in range(5):
        group = make_group(4, seed=seed)
        messages = Guarded().messages(xs, share=group if form == "direct" else None)
        for _ in range(3):
            bits.add(bytes(torch.cat(group.scatter_sum(messages, counts, form)).view(torch.uint8).tolist()))
    assert len(bits) == 1


@pytest.mark.parametrize("sizes", [[64, 64], [0, 200, 70], [1, 0, 0, 17, 250, 3, 0, 90]], ids=str)
@pytest.mark.parametrize("form", ["packets", "staged", "direct", "mixed"])
def test_quick_ranks_do_not_overrun_slow_ones(form: str, sizes: list[int]) -> None:
    for seed in range(5):
        repeat_gather(sizes, form, seed)


# --- when it goes wrong -----------------------------------------------------------------------------------------------


def _missing(rank: int, ranks: int, form: str) -> Peers:
    present = range(ranks - 1) if rank == ranks - 1 else range(1, ranks)
    return make_group(ranks, present=present, seconds=5.0)


@pytest.mark.parametrize("form", COPIED)
@pytest.mark.parametrize("missing", [0, 3])
def test_a_rank_that_does_not_come_is_named(missing: int, form: str) -> None:
    group = _missing(missing, 4, form)
    messages = Guarded().messages([torch.zeros(50)] * 4, share=group if form == "direct" else None)
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


def test_ranks_in_different_forms_never_meet() -> None:
    check_apart()


def test_a_broken_rank_does_not_wait_again() -> None:
    group = make_group(2, present=range(1), seconds=1000.0)
    group.scatter_sum([torch.zeros(600)], [300, 300], "staged")
    words = (ctypes.c_uint64 * 8).from_address(group.group.report[0])
    assert words[plans.REPORT.index("peer")] == 1
    words[0] = 0  # as if nobody had looked
    before = group.memory[1].clone()  # the missing rank's: it gets no more signals
    group.scatter_sum([torch.zeros(600)], [300, 300], "staged")
    assert words[0] == 0
    assert torch.equal(group.memory[1], before)


def test_a_report_names_the_ranks_of_the_world() -> None:
    group = make_group(2, present=range(1))
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
        (lambda g: g.scatter_sum([torch.zeros(9)] * 3, [3] * 3, "direct"), "reads shared tensors"),
        (lambda g: g.gather([torch.zeros(9)] * 3, [9] * 3, "direct"), "reads shared tensors"),
        (lambda g: g.gather([torch.zeros(9)] * 3, [9, -9, 9], "staged"), "a message of -36 bytes"),
    ],
)
def test_what_cannot_be_done_is_refused(call: Callable[[Peers], object], text: str) -> None:
    group = make_group(3)
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
        ({"ctas": 43, "threads": 512}, "3 virtual ranks of 43 CTAs of 512 threads do not run at the same time"),
    ],
)
def test_a_wrong_group_is_refused(changed: dict[str, int], text: str) -> None:
    group = make_group(3)
    plan = plans.all_gather(group.group, "staged", [4] * 3)
    for name, value in changed.items():
        setattr(plan.group, name, value)
    with pytest.raises(EmulationError, match=text):
        launcher()("all_gather", torch.empty(0), torch.empty(0), plan)


def test_what_the_kernels_leave_to_nccl() -> None:
    assert find_kernel_fault("reduce_scatter", torch.bfloat16, "sum", 16) == ""
    assert find_kernel_fault("reduce_scatter", torch.bfloat16, "max", 8) == "the kernels form sums, no max"
    assert find_kernel_fault("all_gather", torch.uint8, "", 17) == "the kernels take up to 16 ranks, not 17"
    assert choose_form("all_gather", 1 << 20).way == "staged"
    assert choose_form("all_gather", 1 << 20, tuning=Tuning(packet_bytes=1 << 20)).way == "packets"


def test_python_and_the_kernels_mean_the_same_memory() -> None:
    """Sizes and offsets of the structures, and of the parts of a workspace."""
    lines = [f"sizeof(shardlib::{name})" for name in ("Group", "AllGatherArgs", "AllToAllArgs", "ReduceScatterArgs")]
    lines += ["offsetof(shardlib::AllToAllArgs, sizes)", "offsetof(shardlib::ReduceScatterArgs, count)"]
    lines += ["shardlib::kForms", "shardlib::kStepBits", "shardlib::kStepBits + shardlib::kWayBits"]
    lines += ["sizeof(shardlib::Control)", "shardlib::kMaxCtas", "shardlib::kCounters", "shardlib::kReportWords"]
    values = ", ".join(lines)
    loop = f"int64_t v[] = {{{values}}}; for (int64_t w : v) *x++ = w; return 0;"
    driver = f'#include <cstddef>\nextern "C" int sizes(int64_t* x) {{ {loop} }}'
    found = torch.zeros(len(lines), dtype=torch.int64)
    emulate.call(emulate.library("all_gather.cu", driver=driver), "sizes", found)
    ours = [*map(ctypes.sizeof, (plans.Group, plans.AllGather, plans.AllToAll, plans.ReduceScatter))]
    ours += [plans.AllToAll.sizes.offset, plans.ReduceScatter.count.offset]
    ours += [len(plans.FORMS), plans._STEP, plans._CALL]
    assert found.tolist() == [*ours, plans.CONTROL_BYTES, plans.MAX_CTAS, plans.COUNTERS, len(plans.REPORT)]
