"""Random numbers on one thread beside torch's own generator, in one process.

    python -m tests.validation.benchmarks.random

Ratios of medians, with the quartiles of single rounds in brackets. `whole` draws as many numbers at once as torch does;
`8 parts` is what the eight devices of a mesh draw together, each its own columns of a matrix.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from shardlib.ops.random import op as draw
from shardlib.ops.random.philox import threshold
from tests.validation.benchmarks.timing import interleave, markdown, ms, ratio

CPU = torch.device("cpu")
COLUMNS = 1000
Kind = tuple[str, torch.dtype, int]

KINDS: dict[str, tuple[Callable[[int], Tensor], Kind]] = {
    "rand": (torch.rand, ("uniform", torch.float32, 24)),
    "rand float64": (lambda n: torch.rand(n, dtype=torch.float64), ("uniform", torch.float64, 53)),
    "randn": (torch.randn, ("normal", torch.float32, 0)),
    "randn float64": (lambda n: torch.randn(n, dtype=torch.float64), ("normal", torch.float64, 0)),
    "bernoulli_": (lambda n: torch.empty(n).bernoulli_(0.9), ("bernoulli", torch.float32, threshold(0.9))),
    "exponential_": (lambda n: torch.empty(n).exponential_(), ("exponential", torch.float32, 0)),
}


def _draw(kind: Kind, size: list[int], first: list[int], whole: list[int]) -> Tensor:
    name, dtype, p = kind
    return draw.forward(torch.tensor(1), None, 2, name, size, first, whole, dtype=dtype, device=CPU, p=p)


def _parts(kind: Kind, n: int) -> None:
    rows, width = n // COLUMNS, COLUMNS // 8
    for i in range(8):
        _draw(kind, [rows, width], [0, i * width], [rows, COLUMNS])


def rows(n: int, rounds: int) -> list[list[object]]:
    """A row for every kind of numbers."""
    table: list[list[object]] = []
    for name, (theirs, kind) in KINDS.items():
        samples = interleave(
            {
                "torch": lambda f=theirs: f(n),
                "whole": lambda k=kind: _draw(k, [n], [0], [n]),
                "parts": lambda k=kind: _parts(k, n),
            },
            rounds,
        )
        ours = [ratio(samples[way], samples["torch"]) for way in ("whole", "parts")]
        table.append([name, ms(samples["torch"]), *ours])
    x = torch.ones(n)
    with sl.Mesh(x=1):
        placed = sl.shard(x, "_")
        step = sl.jit(lambda x: F.dropout(x, 0.1))
        samples = interleave(
            {"torch": lambda: F.dropout(x, 0.1), "eager": lambda: F.dropout(placed, 0.1), "jit": lambda: step(placed)},
            rounds,
        )
    for way in ("eager", "jit"):
        table.append([f"dropout, {way}", ms(samples["torch"]), ratio(samples[way], samples["torch"]), ""])
    return table


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.validation.benchmarks.random")
    parser.add_argument("--numbers", type=int, default=10**7)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    torch.set_num_threads(1)
    title = f"{options.numbers:,} random numbers beside torch ({draw.choose(CPU)})"
    header = ["numbers", "torch", "whole", "8 parts"]
    print(markdown(title, header, rows(options.numbers, options.rounds)))


if __name__ == "__main__":
    main()
