"""Collectives over shared memory beside the same over Gloo: `python -m tests.validation.benchmarks.collectives`.

All take turns in the same processes, one thread each: Gloo's own collective, shardlib's way over Gloo (which is the
faster of the two, and what runs without shared memory) and shared memory. A call's time is that of its slowest rank.
Bytes are those of the whole tensor: an all-gather's result, a reduce-scatter's operand, the sum of all pieces in an
all-to-all. "shared" is an all-gather into one result that all ranks read, as in programs where nothing writes over it.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from shardlib.ops.collectives import all_gather, all_reduce, all_to_all, ppermute, reduce_scatter
from shardlib.ops.collectives.transport.groups import GroupHandle, group_for
from shardlib.sharding.mesh.mesh import Mesh
from tests.helpers.ranks import run_ranks

from .timing import Ratio, markdown

SIZES = (1, 1 << 10, 1 << 14, 1 << 17, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
GATHERS = ("all_gather", "shared")
TARGETS = {**dict.fromkeys(GATHERS, 4.0), "reduce_scatter": 6.0}  # from 4 MB up; never below 1 for any size
Call = Callable[[], object]


def _all_gather(x: torch.Tensor, group: GroupHandle) -> Any:
    return all_gather.start(x, 0, [len(x)] * group.size, group)


def _shared(x: torch.Tensor, group: GroupHandle) -> Any:
    return all_gather.start(x, 0, [len(x)] * group.size, group, shared=True)


def _reduce_scatter(x: torch.Tensor, group: GroupHandle) -> Any:
    return reduce_scatter.start(x, 0, _parts(len(x), group.size), group)


def _all_to_all(x: torch.Tensor, group: GroupHandle) -> Any:
    return all_to_all.start(x, 0, _parts(len(x), group.size), 0, [len(x)] * group.size, group)


def _ppermute(x: torch.Tensor, group: GroupHandle) -> Any:
    return ppermute.start(x, [(i, (i + 1) % group.size) for i in range(group.size)], group)


OPS: dict[str, Callable[[torch.Tensor, GroupHandle], Any]] = {
    "all_gather": _all_gather,
    "shared": _shared,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": all_reduce.start,
    "all_to_all": _all_to_all,
    "ppermute": _ppermute,
}


def _native(op: str, x: torch.Tensor, n: int) -> Call:
    """Gloo's own collective with a result of its own; there is none for a ppermute."""
    c10d, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    calls: dict[str, Call] = {
        **dict.fromkeys(GATHERS, lambda: c10d.all_gather_into_tensor(x, n, name)),
        "reduce_scatter": lambda: c10d.reduce_scatter_tensor(x, "sum", n, name),
        "all_reduce": lambda: c10d.all_reduce(x, "sum", name),
        "all_to_all": lambda: c10d.all_to_all_single(x, _parts(len(x), n), _parts(len(x), n), name),
    }
    start = calls[op]
    return lambda: c10d.wait_tensor(start())


def _parts(whole: int, n: int) -> list[int]:
    return [whole * (i + 1) // n - whole * i // n for i in range(n)]


def measure(op: str, nbytes: int, dtype: torch.dtype, rounds: int) -> dict[str, list[float]]:
    """Seconds of every call on this rank, by backend; a sample of small messages is the mean of many."""
    n = dist.get_world_size()
    mesh = Mesh(x=n)
    shm = group_for(mesh, (mesh.axis("x"),))
    assert shm.shm is not None, shm.why
    count = -(-nbytes // dtype.itemsize)
    count = -(-count // n) if op in (*GATHERS, "all_to_all") else count
    x = torch.ones(count, dtype=dtype)
    contestants: dict[str, Call] = {
        "over Gloo": functools.partial(_call, op, x, replace(shm, channel=None)),
        "shm": functools.partial(_call, op, x, shm),
    }
    if op == "shared":
        contestants["shm, a result each"] = functools.partial(_call, "all_gather", x, shm)
    if op != "ppermute" and (op in GATHERS or count % n == 0):
        contestants["Gloo"] = _native(op, x, n)
    repeats = max(1 if nbytes > 32 << 20 else 4, min(20, (1 << 17) // nbytes))
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for i in range(-1, rounds):
        for name, call in contestants.items():
            dist.barrier()
            call()  # the ranks leave the barrier one by one; now they are together
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            if i >= 0:
                samples[name].append((time.perf_counter() - start) / repeats)
    return samples


def _call(op: str, x: torch.Tensor, group: GroupHandle) -> None:
    OPS[op](x, group).finish()


def slowest(results: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """The slowest rank's time of every call."""
    return {name: [max(times) for times in zip(*(r[name] for r in results), strict=True)] for name in results[0]}


def advantage(gloo: Sequence[float], shm: Sequence[float]) -> Ratio:
    """How many times faster shm is: ratio of medians, with the quartiles of single rounds."""
    low, _, high = statistics.quantiles([a / b for a, b in zip(gloo, shm, strict=True)], n=4)
    return Ratio(statistics.median(gloo) / statistics.median(shm), low, high)


def row(op: str, n: int, nbytes: int, dtype: torch.dtype, rounds: int) -> list[object]:
    samples = slowest(run_ranks(measure, n, op, nbytes, dtype, rounds))
    target = TARGETS.get(op, 1.0) if nbytes >= 4 << 20 else 1.0
    cells: list[object] = [op, n, f"{nbytes:,}", *(_ms(samples.get(name)) for name in ("Gloo", "over Gloo", "shm"))]
    peers = ("Gloo", "over Gloo", "shm, a result each")
    cells += [advantage(samples[name], samples["shm"]) if name in samples else "-" for name in peers]
    return [*cells, f">= {target:g}x"]


def _ms(seconds: Sequence[float] | None) -> str:
    return f"{statistics.median(seconds) * 1e3:.3f}" if seconds else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description="Collectives over shared memory beside the same over Gloo.")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--bytes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=9)
    a = parser.parse_args()
    from tests.validation.benchmarks import collectives  # ranks find functions by the name of their module

    dtype = getattr(torch, a.dtype)
    rows = [collectives.row(op, n, nbytes, dtype, a.rounds) for n in a.ranks for op in a.ops for nbytes in a.bytes]
    header = ["collective", "ranks", "bytes", "Gloo ms", "over Gloo ms", "shm ms"]
    header += ["faster than Gloo (quartiles)", "than over Gloo (quartiles)", "than shm with a result each", "target"]
    print(markdown(f"{a.dtype}, torch {torch.__version__}", header, rows))


if __name__ == "__main__":
    main()
