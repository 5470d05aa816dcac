"""The simulator beside this machine: 20 programs on 2 and 4 processes, over shared memory and Gloo.

`python -m tests.validation.benchmarks.simulator` measures the machine first (`Machine.measure()`, on as many processes
as the mesh has, all at once), simulates every program on it, runs it, and prints both, the median error and the rank
correlation. Times are lower quartiles of many calls. Nothing is fitted to the programs. It wants a machine that does
nothing else; `--cases 3` runs the first three of each.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import shardlib as sl
from shardlib.sharding.mesh.machine import Machine
from tests.helpers.ranks import run_ranks
from tests.models import w1

from .timing import markdown
from .w1_backends import groups_over

Made = tuple[Any, tuple[Any, ...]]  # a jitted function and its arguments
_AWHILE = 1.0  # seconds that a program runs


def mlp(rows: int, width: int, specs: Sequence[Any]) -> Made:
    """Gradients of two products, by specs of x, the first and the second weight."""

    def loss(u: torch.Tensor, d: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (torch.relu(x @ u) @ d).square().mean()

    x, u, d = torch.randn(rows, width), torch.randn(width, 4 * width), torch.randn(4 * width, width)
    return sl.jit(sl.grad(loss, argnums=(0, 1)), in_specs=(specs[1], specs[2], specs[0])), (u, d, x)


def decoder(mode: str, **sizes: Any) -> Made:
    """One step of W1."""
    from tests.models import w1_sharded

    config = w1.Config(**sizes)
    m = w1.modes(config, dist.get_world_size())[mode]
    with w1_sharded.mesh_of(m):
        params, *batch = w1_sharded.place(m, w1.init(config), *w1.batch(config))
        step = sl.jit(
            lambda params, tokens, targets: w1.step(params, tokens, targets, config)[0],
            in_specs=(m.params, m.batch, m.batch),
        )
    return step, (params, *batch)


def layer(rows: int, width: int) -> Made:
    """A transformer layer of torch, forward and backward, its batch cut."""
    torch.manual_seed(0)
    m = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)

    def step(m: Any, x: torch.Tensor) -> Any:
        loss = m(x).square().mean()
        loss.backward()
        return loss.detach()

    return sl.jit(step, in_specs=(None, "b@data _ _")), (m, torch.randn(rows, 64, width))


BATCH, WIDE = ("b@data _", None, None), (None, "_ f@data", "f@data _")
SHARDED = ("b@data _", "i@data _", "_ o@data")
CASES: Sequence[tuple[str, int, Callable[[], Made]]] = (
    ("MLP 256, batch cut", 2, lambda: mlp(2048, 256, BATCH)),
    ("MLP 512, width cut", 2, lambda: mlp(512, 512, WIDE)),
    ("W1 L=2 fsdp8", 2, lambda: decoder("fsdp8", layers=2)),
    ("W1 L=2 tp", 2, lambda: decoder("tp", layers=2)),
    ("transformer layer 256", 2, lambda: layer(16, 256)),
    ("MLP 256, batch cut", 4, lambda: mlp(4096, 256, BATCH)),
    ("MLP 512, weights sharded", 4, lambda: mlp(2048, 512, SHARDED)),
    ("W1 L=2 fsdp_tp", 4, lambda: decoder("fsdp_tp", layers=2)),
    ("W1 L=4 dp8", 4, lambda: decoder("dp8", layers=4)),
    ("transformer layer 384", 4, lambda: layer(16, 384)),
)


def measured(backend: str, numbers: Sequence[int]) -> tuple[str, list[tuple[float, float]]]:
    """On a rank: the machine, and of each case the seconds that are predicted and those that it takes."""
    found = []
    _keep_memory()
    with groups_over(backend):
        machine = Machine.measure()
        for i in numbers:
            with sl.Mesh(data=dist.get_world_size()) as mesh:
                step, given = CASES[i][2]()
            with getattr(given[-1], "mesh", mesh):
                found.append((step.plan(*given).simulate(machine).seconds, _seconds(partial(step, *given))))
    return repr(machine), found


def _keep_memory() -> None:
    """Freed memory stays the process's, as torch's CUDA allocator keeps it. glibc gives it back or not by the sizes
    that a process freed before, and then new pages take longer than what is written into them."""
    libc = ctypes.CDLL(None)
    for option in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
        libc.mallopt(option, 1 << 30)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h


def _seconds(call: Callable[[], Any]) -> float:
    """Of a call, the lower quartile of as many as fit into a while, as `Machine.measure` takes it; all ranks make as
    many."""
    call()
    start = time.perf_counter()
    call()
    count = torch.tensor(_AWHILE / (time.perf_counter() - start))
    dist.all_reduce(count, dist.ReduceOp.MAX)
    dist.barrier()
    ends = [time.perf_counter()]
    for _ in range(max(3, int(count))):
        call()
        ends.append(time.perf_counter())
    return statistics.quantiles((b - a for a, b in itertools.pairwise(ends)), n=4)[0]


def correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Of ranks (Spearman)."""
    places = [sorted(range(len(x)), key=x.__getitem__) for x in (a, b)]
    return statistics.correlation(*([order.index(i) for i in range(len(order))] for order in places))


def main(cases: int) -> None:
    rows: list[tuple[object, ...]] = []
    pairs: list[tuple[float, float]] = []
    for n in (2, 4):
        numbers = [i for i, (_, size, _) in enumerate(CASES) if size == n][:cases]
        for backend in ("shm", "torch"):
            machine, found = run_ranks(measured, n, backend, numbers, timeout=900.0)[0]
            print(f"{n} processes, {'shared memory' if backend == 'shm' else 'Gloo'}: {machine}\n", flush=True)
            for i, (predicted, real) in zip(numbers, found, strict=True):
                what = CASES[i][0], n, "shared memory" if backend == "shm" else "Gloo"
                rows.append((*what, f"{predicted * 1e3:.2f}", f"{real * 1e3:.2f}", f"{predicted / real - 1:+.0%}"))
            pairs += found
    header = ("program", "processes", "over", "predicted ms", "measured ms", "off by")
    print(markdown("Simulated and measured", header, rows))
    error = statistics.median(abs(predicted / real - 1) for predicted, real in pairs)
    print(f"median error {error:.1%}, rank correlation {correlation(*zip(*pairs, strict=True)):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=len(CASES), help="of each number of processes and transport")
    main(parser.parse_args().cases)
