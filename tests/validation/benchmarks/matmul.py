"""Products of float32 matrices on one thread, oneDNN's beside torch's: `python -m tests.validation.benchmarks.matmul`.

Ratios of medians, with the quartiles of single rounds in brackets, and what `ops.matmul` takes on this machine.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from shardlib.ops import matmul
from tests.validation.benchmarks.timing import interleave, markdown, ms, ratio

SIZES = ((64, 64, 64), (96, 96, 96), (128, 128, 128), (1024, 256, 172), (172, 1024, 256), (16, 1024, 1024))
SIZES += ((1024, 1024, 4), (1024, 1024, 1024), (4096, 512, 2048))
ORDERS: dict[str, Callable[[int, int], Tensor]] = {
    "rows": lambda m, n: torch.randn(m, n),
    "columns": lambda m, n: torch.randn(n, m).t(),
}
SECONDS = 0.005  # of a round


def _often(product: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor, times: int) -> None:
    for _ in range(times):
        product(a, b)


def rows(rounds: int) -> list[list[object]]:
    """A row for every product."""
    table: list[list[object]] = []
    for (m, k, n), (first, second) in itertools.product(SIZES, itertools.product(ORDERS, ORDERS)):
        a, b = ORDERS[first](m, k), ORDERS[second](k, n)
        times = max(1, int(SECONDS * 1e11 / (2 * m * k * n)))
        ways = {"torch": torch.mm, "onednn": partial(matmul.linear, row=None), "taken": matmul.mm}
        samples = interleave({name: partial(_often, way, a, b, times) for name, way in ways.items()}, rounds)
        each = [t / times for t in samples["torch"]]
        ours = (ratio(samples[way], samples["torch"]) for way in ("onednn", "taken"))
        table.append([f"[{m}, {k}] in {first} by [{k}, {n}] in {second}", ms(each), *ours])
    return table


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.validation.benchmarks.matmul")
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    torch.set_num_threads(1)
    header = ["product", "torch", "oneDNN beside it", "what is taken beside it"]
    print(markdown(f"Products of matrices ({matmul.choose()})", header, rows(options.rounds)))


if __name__ == "__main__":
    main()
