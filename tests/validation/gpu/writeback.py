"""What the session's records say of a card, written to where it is read: `ops/measured.json`, and the table of tiles.

ATTENTION   by card, direction, head dim, plain or general, grouped or not: the least speed beside torch's kernel
TUNING      by card: the fewest CTAs within 3 % of the best
tiles       keys of a tile of the forward, for Hopper
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from shardlib.ops.tuning import MEASURED, WAYS, Attention
from tests.validation.gpu import sweeps
from tests.validation.gpu.figures import CTAS_SWEEP, TILES, speeds, tiles_of
from tests.validation.gpu.records import Record

ROOT = Path(__file__).resolve().parents[3]
TILE_TABLE = ROOT / "cuda" / sweeps.TABLE
NEARLY = 0.97


def attention(records: Sequence[Record], card: str) -> dict[Attention, float]:
    """The least ratio of every kind of which all figures were timed, beside the kernel of torch that runs else.

    Nothing where an error was too large, or not measured.
    """
    errors = [r.ok for r in records if "error against float64" in r.figure]
    if not errors or not all(errors):
        return {}
    values = {r.figure: r.value for r in records}
    found: dict[Attention, list[float | None]] = {}
    for case in (case for way in WAYS for case in speeds(way)):
        key = Attention(card, case.direction, case.width, case.general, case.grouped)
        found.setdefault(key, []).append(values.get(case.name))
    least = {key: min(r or 0.0 for r in ratios) for key, ratios in found.items() if None not in ratios}
    return {key: math.floor(100 * ratio) / 100 for key, ratio in least.items()}


def tuning(records: Sequence[Record]) -> dict[str, int]:
    """Fields of `Tuning`; a sweep that has gaps says nothing. From which sizes on packets, or one step, are slower,
    links decide, which virtual ranks of one GPU have not: those sweeps are only reported."""
    rates = _tried(records, CTAS_SWEEP)
    return {"ctas": min(n for n, rate in rates.items() if rate >= NEARLY * max(rates.values()))} if rates else {}


def tiles(records: Sequence[Record]) -> dict[tuple[int, bool], int]:
    """The keys of the fastest tile, where every tile was tried; one that does not compile counts as tried."""
    best = {}
    for kind, candidates in TILES.items():
        of_kind = [r for r in records if r.figure == tiles_of(*kind)]
        rates = {int(r.case): r.value for r in of_kind if r.value is not None}
        tried = {int(r.case) for r in of_kind if r.value is not None or r.ok is False}
        if rates and tried == set(candidates):
            best[kind] = max(rates, key=lambda keys: rates[keys])
    return best


def _tried(records: Sequence[Record], figure: str) -> dict[int, float]:
    of_figure = [r for r in records if r.figure == figure]
    values = {int(r.case): r.value for r in of_figure if r.value is not None}
    return values if len(values) == len(of_figure) else {}


def write(records: Sequence[Record], card: str, measured: Path = MEASURED, table: Path = TILE_TABLE) -> None:
    """Puts this card's rows into the tables, in place of those that it had; rows of other cards stay."""
    cards = json.loads(measured.read_text())
    speeds = {key.text: ratio for key, ratio in attention(records, card).items()}
    cards[card] = {"attention": speeds, "tuning": tuning(records)}
    measured.write_text(json.dumps(cards, indent=1) + "\n")
    lines = table.read_text()
    for (width, general), keys in tiles(records).items():
        lines = sweeps.changed(lines, width, general, keys)
    table.write_text(lines)
