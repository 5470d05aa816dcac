"""What tests of the CUDA collectives share: groups of virtual ranks on the emulated machine, checks, planted bugs."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from shardlib.core.errors import CollectiveError
from shardlib.ops.collectives import all_gather, reduce_scatter
from shardlib.ops.collectives.transport import cuda_args as plans
from shardlib.ops.collectives.transport import cuda_peers
from shardlib.ops.collectives.transport.cuda_args import Tuning
from shardlib.ops.collectives.transport.cuda_peers import Peers
from tests.helpers.virtual_peers import virtual_peers
from tests.kernels import emulate
from tests.kernels.emulate import Build, Patch

SMALL = Tuning(ctas=2, threads=32, packet_bytes=256, window=2048, chunk=256)
SOURCES = ("all_gather.cu", "all_to_all.cu", "reduce_scatter.cu")
COPIED = ("packets", "staged", "direct")
SUMMED = ("packets", "staged", "direct")
GATHER, TO_ALL, SUM = SOURCES


def launcher(bug: int = 0, seed: int = 1) -> cuda_peers.Launch:
    return lambda op, out, x, plan: emulate.call(load(f"{op}.cu", bug, seed), f"shardlib_{op}", plan, None)


def make_group(ranks: int, tuning: Tuning = SMALL, seed: int = 1, bug: int = 0, **more: Any) -> Peers:
    return virtual_peers(ranks, "cpu", tuning, launch=launcher(bug, seed), **more)


def random_values(n: int, dtype: torch.dtype, seed: int) -> Tensor:
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


def random_sizes(ranks: int, longest: int, seed: int) -> list[int]:
    """Sizes of messages: one is the longest, the others are uneven, and in every second case one is empty."""
    generator = torch.Generator().manual_seed(seed)
    sizes: list[int] = torch.randint(0, longest + 1, (ranks,), generator=generator).tolist()
    first, second = torch.randperm(ranks, generator=generator)[:2].tolist()
    sizes[first] = longest
    if seed % 2:
        sizes[second] = 0
    return sizes


def check_gather(group: Peers, sizes: Sequence[int], dtype: torch.dtype, form: str, askew: int = 0) -> None:
    xs = [random_values(n, dtype, i) for i, n in enumerate(sizes)]
    messages = Guarded().messages(xs, askew, group if form == "direct" else None)
    outs = group.gather(messages, sizes, form)
    group.check()
    for out, expected in zip(outs, all_gather.reference(xs, 0, sizes), strict=True):
        assert torch.equal(out, expected)


def check_exchange(
    group: Peers, counts: Sequence[Sequence[int]], dtype: torch.dtype, form: str, askew: int = 0
) -> None:
    xs = [random_values(sum(row), dtype, i) for i, row in enumerate(counts)]
    messages = Guarded().messages(xs, askew, group if form == "direct" else None)
    pieces = [x.split_with_sizes(row) for x, row in zip(xs, counts, strict=True)]
    outs = group.exchange(messages, counts, form)
    group.check()
    for rank, out in enumerate(outs):
        assert torch.equal(out, torch.cat([of_rank[rank] for of_rank in pieces]))


def check_sum(group: Peers, counts: Sequence[int], dtype: torch.dtype, form: str, askew: int = 0) -> None:
    xs = [random_values(sum(counts), dtype, i) for i in range(group.size)]
    for x in xs:
        x[1::7] = -0.0
    messages = Guarded().messages(xs, askew, group if form == "direct" else None)
    expected = reduce_scatter.reference(xs, 0, counts)
    outs = group.scatter_sum(messages, counts, form)
    group.check()
    for out, part in zip(outs, expected, strict=True):
        assert torch.equal(out.view(torch.uint8), part.view(torch.uint8))  # the bits: 0 is not -0


# --- calls without a pause between them -------------------------------------------------------------------------------

# A rank's calls follow each other at once, while others are still at theirs: what launches one by one do not show.
# Every call fills the input first; where a rank's CTAs meet, one of its kernels ends and the next begins.
DRIVER = r"""
namespace shardlib {
namespace {
void next_kernel(uint32_t* arrived, uint32_t expected) {
  __syncthreads();
  if (threadIdx.x == 0) {
    add_release_device(arrived, 1u);
    while (load_acquire_system(arrived) < expected) pause_ns(1);
  }
  __syncthreads();
}
// Threads that dawdle now and then; rank 0 is the slowest.
struct Dawdling : AllGather {
  static bool chance(unsigned one_in) {
    static uint32_t random = 1;
    return ((random = random * 1664525u + 1013904223u) >> 8) % one_in == 0;
  }
  static void dawdle(unsigned one_in) {
    if (!chance(one_in)) return;
    for (int i = blockIdx.y == 0 ? 600 : 100; i > 0; --i) emulation::give_way(1);
  }
  int64_t taken(unsigned, unsigned) const { return dawdle(40), 0; }
  int64_t put(unsigned from, unsigned to) const { return dawdle(40), AllGather::put(from, to); }
};
void repeat(Dawdling a, Window w, int64_t form, int64_t calls, int64_t total, uint32_t* arrived) {
  const unsigned rank = blockIdx.y;
  for (int64_t call = 0; call < calls; ++call) {
    auto* input = const_cast<unsigned char*>(a.input[rank]);
    for (int64_t i = threadIdx.x; i < a.bytes_of[rank]; i += blockDim.x)
      if (i % gridDim.x == blockIdx.x) input[i] = static_cast<unsigned char>(16 * call + rank + 1);
    next_kernel(&arrived[rank], uint32_t(2 * call + 1) * gridDim.x);
    a.form = form < 0 ? call % 3 : form;
    if (a.chance(8)) a.dawdle(1);
    if (a.form == kPackets) {
      exchange_packets<Dawdling>(a);
    } else {
      exchange<Dawdling>(a, w);
    }
    next_kernel(&arrived[rank], uint32_t(2 * call + 2) * gridDim.x);
    a.output[rank] += total;
  }
}
// Rank 0 in a form of its own.
void part_ways(AllGather a, Window w, int64_t form) {
  if (blockIdx.y == 0) a.form = form;
  exchange<AllGather>(a, w);
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
  const Dawdling a{{*args}};
  int64_t total = 0, longest = 0;
  for (int r = 0; r < a.group.ranks; ++r) total += a.bytes_of[r], longest = max(longest, a.bytes_of[r]);
  return for_windows(a.group, longest, 1, true, [&](const Window& w) {
    return launch(shape_of(a.group), nullptr, repeat, a, w, form, calls, total, arrived);
  });
}
extern "C" int part_ways(shardlib::AllGatherArgs* args, int64_t form) {
  using namespace shardlib;
  return launch(shape_of(args->group), nullptr, part_ways, AllGather{*args}, Window{0, 128, 1}, form);
}
extern "C" int turns_of_gather(shardlib::AllGatherArgs* args, int64_t* turns) {
  using namespace shardlib;
  Probe a{{*args}, turns};
  return launch(shape_of(a.group), nullptr, exchange<Probe>, a, Window{0, 128, 1});
}
"""


def repeat_gather(sizes: Sequence[int], form: str, seed: int, bug: int = 0) -> None:
    ranks, calls, guarded = len(sizes), 6, Guarded()
    group = make_group(ranks, seed=seed, bug=bug)
    plan = plans.all_gather(group.group, "direct", sizes)
    inputs = guarded.messages([torch.zeros(n, dtype=torch.uint8) for n in sizes], askew=seed)
    outs = [guarded.memory.empty(calls, sum(sizes), dtype=torch.uint8) for _ in sizes]
    for rank, (x, out) in enumerate(zip(inputs, outs, strict=True)):
        plan.input[rank] = x.untyped_storage().data_ptr() + x.storage_offset()
        plan.output[rank] = out.data_ptr()
    loaded = load(GATHER, bug, seed)
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


def check_multicast(bug: int, op: str, dtype: torch.dtype = torch.float32) -> None:
    """Small integers have one sum whatever the order, so what else could be wrong shows."""
    group = make_group(4, bug=bug, multicast=True)
    xs = [torch.randint(-9, 9, (1600,), generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(4)]
    for _ in range(3):
        if op == "gather":
            assert all(torch.equal(out, torch.cat(xs)) for out in group.gather(xs, [1600] * 4, "multicast"))
        else:
            outs = group.scatter_sum(xs, [400, 803, 0, 397], "multicast")
            assert torch.equal(torch.cat(outs), sum(xs[1:], xs[0]))
    group.check()


def check_apart(bug: int = 0) -> None:
    """A rank that reads its peers' inputs and ranks that stage theirs never meet, whoever comes first."""
    for mine, theirs in (("direct", "staged"), ("staged", "direct"), ("multicast", "staged")):
        for seed in range(3):
            group, guarded = make_group(3, seed=seed, bug=bug, multicast=True, seconds=5.0), Guarded()
            plan = plans.all_gather(group.group, theirs, [96] * 3)
            inputs = guarded.messages([torch.full((96,), rank, dtype=torch.uint8) for rank in range(3)])
            outs = [guarded.memory.empty(288, dtype=torch.uint8) for _ in range(3)]
            for rank, (x, out) in enumerate(zip(inputs, outs, strict=True)):
                plan.input[rank], plan.output[rank] = x.data_ptr(), out.data_ptr()
            emulate.call(load(GATHER, bug, seed), "part_ways", plan, plans.FORMS.index(mine))
            given_up = [word for i, word in enumerate(group._words) if i % len(plans.REPORT) == 0]
            assert given_up == [1, 1, 1], "a rank went on"
            with pytest.raises(CollectiveError, match="is in another collective, or in another form of it") as caught:
                group.check()
            assert all(f"all_gather/{form} " in str(caught.value) for form in (mine, theirs))


# --- planted bugs -----------------------------------------------------------------------------------------------------

# (what is wrong, the kernel in which it is tried, file, where in it: what stands between the @ is replaced, by what)
BUGS = [
    ("no wait before staged data is read", GATHER, "exchange.cuh",
     "@if (!wait_all(c, kArrived, mark(c, round))) return;@", ""),
    ("flag before data", GATHER, "exchange.cuh",
     "@publish(c, a, w, round);\n      signal_all(c, kArrived, mark(c, round + 1));@",
     "signal_all(c, kArrived, mark(c, round + 1)); publish(c, a, w, round);"),
    ("a thread signals before the others have stored", GATHER, "peers.cuh",
     "@__syncthreads();@  // the stores of", ""),
    ("a chunk is read a round too early", GATHER, "exchange.cuh",
     "@fetch(c, a, w, round - 1);@", "fetch(c, a, w, round % w.rounds);"),
    ("the epoch stands still", GATHER, "peers.cuh", "@store_release_device(&c.control->epoch, c.epoch);@", ""),
    ("the first CTA to end ends the call", GATHER, "peers.cuh",
     "@add_acquire_release_device(&c.control->finished, 1u) == gridDim.x - 1@",
     "add_acquire_release_device(&c.control->finished, 1u) == 0"),
    ("one buffer instead of two", GATHER, "peers.cuh", "@int64_t(c.epoch & 1) * g.window@", "int64_t(0)"),
    ("packets in one buffer instead of two", GATHER, "peers.cuh",
     "@int64_t(c.epoch & 1) * g.ranks@ + from", "int64_t(0)"),
    ("a packet of an earlier call is taken", GATHER, "peers.cuh", "@seen == epoch@", "seen != 0"),
    ("nothing is sent for an empty message", GATHER, "peers.cuh",
     "@max(int64_t(1), (bytes + 3) / 4)@", "(bytes + 3) / 4"),
    ("no barrier at the end of a direct call", GATHER, "exchange.cuh", "@wait_all(c, kDone, mark(c, 1));@", ""),
    ("all begin at rank 0", GATHER, "exchange.cuh",
     "const unsigned from = @(rank + turn) % ranks@;\n    const Range", "turn - 1"),
    ("the last neighbor is left out", GATHER, "exchange.cuh",
     "@turn <= ranks@; ++turn) {\n    const unsigned from = (rank + turn) % ranks;\n    const Range", "turn < ranks"),
    ("the form is not in the flag", GATHER, "peers.cuh",
     "uint64_t(@c.group.op * kForms + c.form@)", "c.group.op * kForms"),
    ("nobody looks at the form", GATHER, "peers.cuh", "@return kElsewhere;@", ""),
    ("no alias fence before the multicast address is used", GATHER, "multicast.cuh",
     "@fence_alias();\n  body();@", "body();"),
    ("no alias fence behind it", GATHER, "multicast.cuh", "body();\n  @fence_alias();@", ""),
    ("a sum by the multicast address with no alias fence before", SUM, "multicast.cuh",
     "@fence_alias();\n  body();@", "body();"),
    ("tail lost", GATHER, "bytes.cuh", "for (int64_t i = tail + threadIdx.x; @i < bytes@;", "false"),
    ("head lost", GATHER, "bytes.cuh", "@i < head@", "false"),
    ("an askew word is cut from the wrong side", GATHER, "bytes.cuh", "@both >> 8 * past@", "both >> 8 * (3 - past)"),
    ("the last words are lost", GATHER, "bytes.cuh", "for (; @i < count@; i += threads) store_16", "false"),
    ("later windows begin at the first", GATHER, "exchange.cuh",
     "a.taken(rank, to) + @w.first + p.begin@", "p.begin"),
    ("the slot of another receiver", TO_ALL, "exchange.cuh", "a.segments() == 1 ? 0 : @to@;", "from"),
    ("added in the order of turns", SUM, "reduce_scatter.cu",
     "from.of(@base + p@) + begin", "(base + p + int(from.rank)) % ranks"),
    ("rounded at every addend", SUM, "reduce_scatter.cu",
     ": @sums[u][e] + more.x[e]@;", "to_float(from_float<T>(sums[u][e] + more.x[e]))"),
    ("the first addend is added to zero", SUM, "reduce_scatter.cu",
     "base + p == 0 ? @more.x[e]@", "0.0f + more.x[e]"),
    ("the last elements are not added", SUM, "reduce_scatter.cu", "sizeof(T); @at < bytes@;", "false"),
]  # fmt: skip


@functools.cache
def build_of(op: str, planted: bool = False) -> Build:
    """A source as it is, or with all of its bugs, of which `plant` chooses one at run time; 0 is none."""
    patches = []
    for file in {op, *(file for _, of, file, _, _ in BUGS if of == op)} if planted else ():
        text = (emulate.CUDA / file).read_text()
        changes = []
        for number, (_, of, where, place, new) in enumerate(BUGS, 1):
            if (of, where) == (op, file):
                before, old, after = place.split("@")
                assert text.count(before + old + after) == 1, (file, place)
                choice = f"(planted == {number} ? ({new}) : ({old}))"
                if ";" in old:
                    choice = f"if (planted == {number}) {{\n{new}\n}} else {{\n{old}\n}}"
                changes.append((text.index(before + old + after) + len(before), old, choice))
        changed = text
        for at, old, choice in sorted(changes, reverse=True):
            changed = changed[:at] + choice + changed[at + len(old) :]
        if file == op:
            changed = "namespace shardlib { static long planted = 0; }\n" + changed
        patches.append(Patch(file, text, changed))
    driver = DRIVER if op == GATHER else ""
    if planted:
        driver += 'extern "C" int plant(long bug) { shardlib::planted = bug; return 0; }'
    return Build(op, tuple(patches), driver=driver)


def load(op: str, bug: int = 0, seed: int = 1) -> ctypes.CDLL:
    build = build_of(op, bug > 0)
    loaded = emulate.library(build.source, patches=build.patches, driver=build.driver)
    emulate.configure(loaded, seed=seed, multiprocessors=128)
    if bug:
        emulate.call(loaded, "plant", bug)
    return loaded
