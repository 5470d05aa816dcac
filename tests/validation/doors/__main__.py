"""The command: every family, on every mesh, through both doors, and the report."""

from __future__ import annotations

import argparse
import itertools
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from tests.validation.doors import DOORS, FAMILIES, TOLERANCE, WAYS, error, rounding

REPORT = Path(__file__).parent / "REPORT.md"
HEAD = """# Families of models through both doors

Written by `python -m tests.validation.doors --report`, with transformers {version} and torch {torch}, on virtual
devices, each model small. Three steps of Adam: losses, all parameters and all that Adam keeps of them, against plain
torch on one device. A number is the largest difference in float64 / float32, relative to the largest element of each
tensor, of the worse of the two doors: the module's own loop after `parallelize`, and the whole step in `jit`. Bounds:
1e-10 / 1e-4.
*Rounding* is the same difference of one device in float32 from one device in float64: Adam divides a gradient by its
size, so that where it is nothing but rounding (GPT-2's bias of keys), the update is, too.

| family | rounding | {ways} |
|---|---|{rule}
"""


def _one(cell: tuple[str, str, str, torch.dtype]) -> tuple[float, str, float]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    family, way, door, dtype = cell
    begun = time.perf_counter()
    found, at = error(family, WAYS[way], door, dtype)
    return found, at, time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description="Families of models through both doors, against one device")
    parser.add_argument("--only", nargs="*", default=list(FAMILIES))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    cells = list(itertools.product(options.only, WAYS, DOORS, TOLERANCE))
    found = {}
    with ProcessPoolExecutor(options.workers) as pool:
        for cell, (value, at, seconds) in zip(cells, pool.map(_one, cells), strict=True):
            found[cell] = value
            right = "" if value <= TOLERANCE[cell[3]] else "  WRONG"
            print(*cell, f"{value:.1e} at {at}, {seconds:.1f} s{right}", flush=True)
    if options.report:
        REPORT.write_text(_written(options.only, found))


def _written(families: Sequence[str], found: dict[tuple[str, str, str, torch.dtype], float]) -> str:
    import transformers

    ways = [f"{way} ({', '.join(f'{a}={n}' for a, n in x.axes.items())})" for way, x in WAYS.items()]
    floor = {family: rounding(family) for family in families}
    head = HEAD.format(
        version=transformers.__version__,
        torch=torch.__version__.partition("+")[0],
        ways=" | ".join(ways),
        rule="---|" * len(ways),
    )
    rows = []
    for family in families:
        worst = [[max(found[family, way, door, dtype] for door in DOORS) for dtype in TOLERANCE] for way in WAYS]
        rows.append(
            f"| {family} | {floor[family]:.0e} | {' | '.join(' / '.join(f'{x:.0e}' for x in both) for both in worst)} |"
        )
    right = {cell for cell, x in found.items() if x <= TOLERANCE[cell[3]]}
    rounded = {cell for cell, x in found.items() if cell[3] is torch.float32 and x <= 2 * floor[cell[0]]} - right
    last = (
        f"{len(right)} of {len(found)} are within the bounds; {len(rounded)} others, in float32, within twice rounding."
    )
    return head + "\n".join([*rows, "", last, ""])


if __name__ == "__main__":
    main()
