"""The two ceilings of the card, and the collectives of virtual ranks beside copy_.

All ranks share one card's memory here: what counts is how much of its bandwidth a kernel can use, and with how many
CTAs. Nothing of it is a figure of NVLink.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from shardlib.ops.collectives.transport.cuda_args import MAX_CTAS
from tests.validation.gpu.clock import Times, race
from tests.validation.gpu.figures import (
    BANDWIDTH,
    CTAS_OF_LINK,
    LATENCY,
    LATENCY_RANKS,
    bandwidth_of,
    latency_of,
    of_part,
)
from tests.validation.gpu.kernels import Kernels, find, served
from tests.validation.gpu.records import Outcome, Recorder

RANKS, SHARD = 4, 64 << 20
CTAS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
LINK = 450e9  # bytes per second and direction of an H100's NVLink


def ceilings(run: Recorder) -> None:
    """What a copy and a matmul of torch's reach."""
    small = run.device == "cpu"

    def copy() -> Outcome:
        x = torch.randint(0, 255, (1 << 16 if small else 1 << 30,), dtype=torch.uint8, device=run.device)
        y = torch.empty_like(x)
        seconds = race({"copy_": lambda: y.copy_(x)}, run.device)["copy_"]
        return Outcome(None, f"{seconds.rate(2 * x.nbytes, 1e9)} GB/s")

    def matmul() -> Outcome:
        n = 64 if small else 8192
        a, b = (torch.randn(n, n, device=run.device, dtype=torch.bfloat16) for _ in range(2))
        seconds = race({"matmul": lambda: a @ b}, run.device)["matmul"]
        return Outcome(None, f"{seconds.rate(2 * n**3, 1e12)} TFLOP/s")

    for figure, measure in zip(of_part("ceilings"), (copy, matmul), strict=True):
        run.attempt(figure, "", measure)


def collectives(run: Recorder) -> None:
    """Bandwidth, CTAs and latency."""
    kernels = find(run.device == "cpu")
    if isinstance(kernels, str):
        return run.absent(of_part("collective speed"), kernels)
    if not all(served(kernels, op) for op in BANDWIDTH):
        return run.absent(of_part("collective speed"), "the library has no collectives")
    for op in BANDWIDTH:
        for form in ("direct", "staged"):
            run.attempt(bandwidth_of(op, form), "", functools.partial(_bandwidth, kernels, op, form), seconds=60)
    run.attempt(CTAS_OF_LINK, "", functools.partial(_ctas, kernels), seconds=60)
    for ranks in LATENCY_RANKS:
        run.attempt(latency_of(ranks, "eager"), "", functools.partial(_eager, kernels, ranks))
        if kernels.device == "cuda":
            run.attempt(latency_of(ranks, "in a CUDA graph"), "", functools.partial(_graph, kernels, ranks))
    return None


def _calls(kernels: Kernels, op: str, form: str, ranks: int, size: int, ctas: int = 0) -> Callable[[], object]:
    """A call on random messages of `size` bytes a rank: what it gathers, or what it sums to parts of."""
    group = kernels.group(ranks)
    messages = [torch.randn(size // 2, device=kernels.device).bfloat16() for _ in range(ranks)]
    if form == "direct":
        group.share(messages[0], [x.data_ptr() for x in messages])
    if op == "all_gather":
        return lambda: group.gather(messages, [size // 2] * ranks, form, ctas)
    return lambda: group.scatter_sum(messages, [size // 2 // ranks] * ranks, form, ctas)


def _bandwidth(kernels: Kernels, op: str, form: str) -> Outcome:
    """Bytes that the ranks must read and write, over the time, over what copy_ moves of the same bytes.

    All-gather: every rank reads and writes all messages, which copy_ does one by one. Reduce-scatter: all messages are
    read once, and one message's size is written; beside it, copy_ moves as many bytes. The ranks have all of the card's
    multiprocessors between them, as copy_ has.
    """
    size = SHARD if not kernels.rehearsal else 1 << 12
    call = _calls(kernels, op, form, RANKS, size, MAX_CTAS)
    if op == "all_gather":
        moved = 2 * RANKS * RANKS * size
        whole = torch.randint(0, 255, (RANKS, size), dtype=torch.uint8, device=kernels.device)
        outs = torch.empty(RANKS, RANKS, size, dtype=torch.uint8, device=kernels.device)
        copy = lambda: [out[r].copy_(whole[r]) for out in outs for r in range(RANKS)]
    else:
        moved = (RANKS + 1) * size
        x = torch.randint(0, 255, (moved // 2,), dtype=torch.uint8, device=kernels.device)
        y = torch.empty_like(x)
        copy = lambda: y.copy_(x)
    times = race({"ours": call, "copy_": copy}, kernels.device, rounds=3 if kernels.rehearsal else 15)
    share = times["copy_"].median / times["ours"].median
    text = f"{share:.2f}x; {times['ours'].rate(moved, 1e9)} GB/s, copy_ {times['copy_'].rate(moved, 1e9)}"
    judged = form == "direct" and kernels.device == "cuda"
    return Outcome(share >= BANDWIDTH[op] if judged else None, text)


def _ctas(kernels: Kernels) -> Outcome:
    """Two ranks, so that one card's memory has the bandwidth for both; a rank's own message counts as the other's."""
    size = SHARD if not kernels.rehearsal else 1 << 12
    rates: dict[int, float] = {}
    for ctas in CTAS[:2] if kernels.rehearsal else CTAS:
        call = _calls(kernels, "all_gather", "direct", 2, size, ctas)
        seconds = race({"ours": call}, kernels.device, rounds=3 if kernels.rehearsal else 8)["ours"].median
        rates[ctas] = 2 * size / seconds
    enough = [ctas for ctas, rate in rates.items() if rate >= LINK]
    said = ", ".join(f"{ctas}: {rate / 1e9:.0f}" for ctas, rate in rates.items())
    return Outcome(None, f"{enough[0] if enough else 'none of these'} (GB/s by CTAs: {said})")


def _empty(kernels: Kernels, ranks: int) -> Callable[[], object]:
    group = kernels.group(ranks)
    messages = [torch.ones(1, device=kernels.device) for _ in range(group.size)]
    return lambda: group.gather(messages, [1] * group.size)


def _eager(kernels: Kernels, ranks: int) -> Outcome:
    """Calls in a row through Python, which makes an output for every rank; the host may be what takes the time."""
    calls = 2 if kernels.rehearsal else 200
    rounds = 3 if kernels.rehearsal else 15
    seconds = race({"ours": _empty(kernels, ranks)}, kernels.device, rounds=rounds, calls=calls)["ours"]
    return Outcome(seconds.median <= LATENCY if kernels.device == "cuda" else None, _microseconds(seconds))


def _graph(kernels: Kernels, ranks: int) -> Outcome:
    call, calls = _empty(kernels, ranks), 100
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # a capture needs everything warm
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    seconds = race({"ours": graph.replay}, kernels.device, rounds=15)["ours"]
    return Outcome(None, _microseconds(Times(*(t / calls for t in (seconds.median, seconds.low, seconds.high)))))


def _microseconds(seconds: Times) -> str:
    return f"{seconds.median * 1e6:.1f} us ({seconds.low * 1e6:.1f}-{seconds.high * 1e6:.1f})"
