"""What is tried to find the best: CTAs of collectives, sizes up to which one way beats another, tiles of attention.

A case is one thing that was tried, its value what counts. `writeback.py` makes tables of the best ones. Collectives are
those of virtual ranks on one card: they know its memory and nothing of links between cards.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from shardlib.build import build_cache, library
from shardlib.build.build_recipe import SOURCES, Missing, make_recipe
from shardlib.ops.attention import cuda as attention_cuda
from shardlib.ops.attention.variant import Variant
from tests.kernels import emulate
from tests.kernels.attention_forward_bugs import ENTRY, SOURCE
from tests.kernels.emulate import Patch
from tests.validation.gpu.clock import race
from tests.validation.gpu.figures import (
    CTAS_SWEEP,
    PACKETS_SWEEP,
    STEPS_SWEEP,
    SWEPT_BYTES,
    SWEPT_CTAS,
    TILES,
    of_part,
    tiles_of,
)
from tests.validation.gpu.kernels import Kernels, find
from tests.validation.gpu.records import Outcome, Recorder

ROOT = Path(__file__).resolve().parents[3]
TABLE = "attention_forward_tiles.h"


# --- collectives ------------------------------------------------------------------------------------------------------


def collectives(run: Recorder) -> None:
    """CTAs of large messages, and the sizes of small ones."""
    kernels = find(run.device == "cpu")
    if isinstance(kernels, str):
        return run.absent(of_part("collective sweeps"), kernels)
    small = kernels.rehearsal
    for ctas in SWEPT_CTAS[:2] if small else SWEPT_CTAS:
        run.attempt(CTAS_SWEEP, f"{ctas}", functools.partial(_ctas, kernels, ctas))
    for nbytes in SWEPT_BYTES[:2] if small else SWEPT_BYTES:
        run.attempt(PACKETS_SWEEP, f"{nbytes}", functools.partial(_packets, kernels, nbytes))
        run.attempt(STEPS_SWEEP, f"{nbytes}", functools.partial(_steps, kernels, nbytes))
    return None


def _ctas(kernels: Kernels, ctas: int) -> Outcome:
    """The slower of both collectives counts."""
    count = (1 << 10) if kernels.rehearsal else (64 << 20) // 2
    group, rates = kernels.group(4), []
    messages = [torch.randn(count, device=kernels.device).bfloat16() for _ in range(4)]
    calls: list[tuple[int, Callable[[], object]]] = [
        (2 * 16 * 2 * count, lambda: group.gather(messages, [count] * 4, "staged", ctas)),
        (5 * 2 * count, lambda: group.scatter_sum(messages, [count // 4] * 4, "staged", ctas)),
    ]
    for moved, call in calls:
        rates.append(moved / race({"": call}, kernels.device, rounds=_rounds(kernels))[""].median / 1e9)
    return Outcome(None, ", ".join(f"{rate:.0f} GB/s" for rate in rates), min(rates))


def _packets(kernels: Kernels, nbytes: int) -> Outcome:
    tuning = replace(kernels.group(2).tuning, packet_bytes=nbytes)
    group = kernels.group(4, tuning=tuning)
    messages = [torch.randn(nbytes // 4, device=kernels.device) for _ in range(4)]
    forms = {form: functools.partial(group.gather, messages, [nbytes // 4] * 4, form) for form in ("packets", "staged")}
    return _compared(kernels, forms, "packets", "staged")


def _steps(kernels: Kernels, nbytes: int) -> Outcome:
    messages = [torch.randn(nbytes // 4, device=kernels.device) for _ in range(4)]
    ways: dict[str, Callable[[], object]] = {}
    for name, most in (("one", nbytes), ("two", 0)):
        tuning = replace(kernels.group(2).tuning, one_step_bytes=most)
        ways[name] = functools.partial(kernels.group(4, tuning=tuning).reduce, messages)
    return _compared(kernels, ways, "one", "two")


def _compared(kernels: Kernels, ways: dict[str, Callable[[], object]], one: str, other: str) -> Outcome:
    times = race(ways, kernels.device, rounds=_rounds(kernels), calls=1 if kernels.rehearsal else 20)
    said = ", ".join(f"{name} {t.median * 1e6:.1f} us" for name, t in times.items())
    return Outcome(None, said, times[other].median / times[one].median)


def _rounds(kernels: Kernels) -> int:
    return 3 if kernels.rehearsal else 15


# --- tiles ------------------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """A candidate: keys of a tile of the forward, for a head dim, plain or general."""

    width: int
    general: bool
    keys: int


def tiles(run: Recorder) -> None:
    """Keys of a tile of the forward: each is a library of its own, all compiled at once, then timed one by one."""
    kernels = find(run.device == "cpu")
    if isinstance(kernels, str) or "sm_90a" not in kernels.cards:
        why = kernels if isinstance(kernels, str) else "this card does not run sm_90a kernels"
        return run.absent(of_part("tile sweeps"), why)
    most = 1 if kernels.rehearsal else None
    candidates = [Tile(*kind, keys) for kind, sizes in TILES.items() for keys in sizes[:most]]
    with tempfile.TemporaryDirectory(prefix="shardlib-tiles-") as scratch:
        caches = {tile: Path(scratch, "-".join(map(str, tile))) for tile in candidates}
        if not kernels.rehearsal:
            with ThreadPoolExecutor() as pool:
                list(pool.map(_compiled, caches.values(), candidates))
        for tile, folder in caches.items():
            trial = (
                functools.partial(_rehearsed, tile) if kernels.rehearsal else functools.partial(_tried, folder, tile)
            )
            run.attempt(tiles_of(tile.width, tile.general), f"{tile.keys}", trial, seconds=100)
    return None


def row(width: int, general: bool, keys: str) -> str:
    """A line of the table of tiles; `keys` may be a pattern."""
    return f"kForwardKeys<{width}, {str(general).lower()}> = {keys};"


def changed(text: str, width: int, general: bool, keys: int) -> str:
    """The table with another number of keys."""
    new, times = re.subn(row(width, general, r"\d+"), row(width, general, str(keys)), text)
    assert times == 1, row(width, general, "?")
    return new


def _rehearsed(tile: Tile) -> Outcome:
    """Emulated: the tile compiles. Its value says nothing."""
    text = (SOURCES / TABLE).read_text()
    one = f"return run<bf16, {tile.width}, {str(tile.general).lower()}>(*args, stream);"
    patches = [Patch(TABLE, text, changed(text, *tile) + "\n"), Patch(SOURCE, ENTRY, one)]
    emulate.library(SOURCE, patches=patches)
    return Outcome(None, "it compiles", float(tile.keys))


def _compiled(folder: Path, tile: Tile) -> None:
    """The tile's library in a cache of its own, with the objects that there are: caches are built one by one."""
    home = build_cache.writable_folder()
    if isinstance(home, Path) and (home / "objects").is_dir():
        shutil.copytree(home / "objects", folder / "objects")
    _process(folder, tile, "build")


def _tried(folder: Path, tile: Tile) -> Outcome:
    done = _process(folder, tile, "time")
    found = re.search(r"^TFLOP/s (\S+)$", done.stdout, re.MULTILINE)
    if found is None:
        raise RuntimeError((done.stderr or done.stdout).strip()[-300:])
    return Outcome(None, f"{float(found[1]):.0f} TFLOP/s", float(found[1]))


def _process(folder: Path, tile: Tile, what: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.validation.gpu.sweeps", *(str(int(x)) for x in tile), what]
    environment = {**os.environ, "SHARDLIB_CACHE": str(folder)}
    try:
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=95
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, -9, "", f"to {what} it took more than 95 s")


def main(tile: Tile, what: str) -> int:
    """The process of one tile: the geometric mean of causal and full, 8k tokens of 2048 numbers."""
    with tempfile.TemporaryDirectory(prefix="shardlib-tile-") as name:
        folder = Path(name, "cuda")
        shutil.copytree(SOURCES, folder)
        (folder / TABLE).write_text(changed((folder / TABLE).read_text(), *tile))
        wanted = make_recipe("cuda", folder)
        built = wanted if isinstance(wanted, Missing) else library.build_or_load(wanted)
    if isinstance(built, Missing):
        print(built, built.log.read_text()[-2000:] if built.log else "", file=sys.stderr)
        return 1
    if what == "build":
        return 0
    torch.ops.load_library(str(built.path))
    width = tile.width
    q, k, v = (torch.randn(2, 2048 // width, 8192, width, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask = torch.ones(1, 1, 1, 8192, device="cuda", dtype=torch.bool) if tile.general else None
    rate = 1.0
    for causal in (False, True):
        variant = Variant(mask=mask, causal=causal, scale=width**-0.5)
        call = functools.partial(attention_cuda.forward, q, k, v, variant, "sm_90a")
        flop = 4 * q.numel() * 8192 * (0.5 if causal else 1.0)
        rate *= flop / race({"": call}, "cuda")[""].median / 1e12
    print(f"TFLOP/s {rate**0.5:.1f}")
    return 0


if __name__ == "__main__":
    _width, _general, _keys, _what = sys.argv[1:]
    sys.exit(main(Tile(int(_width), _general == "1", int(_keys)), _what))
