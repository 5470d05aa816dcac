"""Memory over many calls: numbers and variables that change, and more lengths than programs are kept for.

python -m tests.validation.stress.memory_growth --calls 2000
"""

from __future__ import annotations

import argparse
import gc
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import shardlib as sl
from shardlib.jit.jit import RetraceWarning
from tests.helpers.oracle import same

LENGTHS = 200


def _step(x: Any, rate: float, n: int) -> Any:
    return (x * rate + n).sum(0)


def _closure(by: float) -> Any:
    return lambda x: x * by


def calls(count: int) -> Iterator[tuple[int, int]]:
    """Make the calls, and compare each; after each, its number, and how often a changing number was compiled again."""
    numbers, lengths, closures = (sl.jit(fn) for fn in (_step, _step, lambda fn, x: fn(x)))
    x = torch.arange(12.0).view(3, 4)
    for i in range(count):
        rate = 1 / (i + 1)
        same(numbers(x, rate, i), (x * rate + i).sum(0))
        rows = torch.ones(1 + i % LENGTHS, 4)
        same(lengths(rows, rate, i), (rows * rate + i).sum(0))
        same(closures(_closure(rate), x), x * rate)
        yield i + 1, len(numbers.retraces)


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def campaign(count: int, every: int = 100) -> tuple[list[tuple[int, int, int]], int]:
    """`(calls, bytes, objects)` after every so many calls, and how often a changing number was compiled again."""
    seen, retraces = [], 0
    with warnings.catch_warnings(), sl.Mesh(data=2):
        warnings.simplefilter("ignore", RetraceWarning)
        for i, again in calls(count):
            retraces = again
            if i % every == 0:
                gc.collect()
                seen.append((i, resident(), len(gc.get_objects())))
    return seen, retraces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=2000)
    args = parser.parse_args()
    seen, retraces = campaign(args.calls)
    print("| calls of each of three functions | MiB | objects |\n|---|---|---|")
    for i, size, objects in seen:
        print(f"| {i:,} | {size / 2**20:.1f} | {objects:,} |")
    print(f"a changing number was compiled again {retraces} times")


if __name__ == "__main__":
    main()
