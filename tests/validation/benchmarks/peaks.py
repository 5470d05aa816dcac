"""What gradients of means take while they run, on 4 Gloo processes, beside `mse_loss`'s.

`python -m tests.validation.benchmarks.peaks` cuts the rows of x over 4 processes and prints for each loss what the plan
says that a device needs beside its piece of x, the most that a rank's resident memory rose during a call (Linux's
high-water mark, of the rank where it rose most), and the time of a call. `--rows` and `--columns` make x smaller.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "mse_loss": lambda x: F.mse_loss(x, torch.zeros_like(x)),
    "mean of squares": lambda x: (x * x).mean(),
    "mean of rows": lambda x: (x * x).mean(0).square().sum(),
    "BCE with logits": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
    "mean after a quotient": lambda x: (x / (x * x).mean()).square().mean(),
}
ROUNDS = 5

Figures = tuple[float, float, float]  # bytes planned, bytes measured, seconds


def measured(rows: int, columns: int) -> dict[str, Figures]:
    """On a rank."""
    torch.set_num_threads(1)
    found = {}
    with sl.Mesh(data=4):
        x = sl.shard(torch.randn(rows, columns), "rows@data _")
        piece = x.to_local().nbytes
        for name, loss in LOSSES.items():
            step = sl.jit(sl.grad(loss))
            planned = step.plan(x).peak_memory - piece
            step(x)
            rises, seconds = [], []
            for _ in range(ROUNDS):
                gc.collect()
                before = _lowered()
                start = time.perf_counter()
                out = step(x)
                seconds.append(time.perf_counter() - start)
                rises.append(_status("VmHWM") - before)
                del out
            found[name] = planned, statistics.median(rises), statistics.median(seconds)
    return found


def _lowered() -> float:
    """Begin to watch for a peak: what is resident now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(what: str) -> float:
    """A line of what Linux says of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith(what))


if __name__ == "__main__":
    from tests.helpers.ranks import run_ranks

    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1 << 16)
    parser.add_argument("--columns", type=int, default=1024)
    arguments = parser.parse_args()
    from tests.validation.benchmarks.peaks import measured as on_a_rank  # by the name that other processes import it by

    ranks = run_ranks(on_a_rank, 4, arguments.rows, arguments.columns, timeout=600)
    bound = max(rank["mse_loss"][1] for rank in ranks)
    print(f"{'gradient of':24} {'planned':>10} {'measured':>10} {'of mse':>7} {'time':>9}")
    for name in LOSSES:
        planned, rise, seconds = (max(of) for of in zip(*(rank[name] for rank in ranks), strict=True))
        print(f"{name:24} {planned / 1e6:7.1f} MB {rise / 1e6:7.1f} MB {rise / bound:6.2f}x {seconds * 1e3:6.1f} ms")
