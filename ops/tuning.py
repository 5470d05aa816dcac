"""Measurements on GPUs: the speed of the attention kernels of cuda/, and the tuning of collectives.

`python -m tests.validation.gpu.session --write` writes `measured.json` from its records. For a card without a row,
torch's kernels are the default, and `Tuning` has its own figures, which are guesses.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

WAYS = ("forward", "backward")
SHORTEST = 2048  # queries that were timed


class Attention(NamedTuple):
    """A kind of attention that was timed on a card."""

    card: str
    direction: str
    head_dim: int
    general: bool  # has a mask, a bias, ALiBi or dropout
    grouped: bool  # several query heads read one key head

    @property
    def text(self) -> str:
        """Returns the kind without the card, as `parse` reads it: `forward 64 general grouped`."""
        return f"{self.direction} {self.head_dim}{' general' * self.general}{' grouped' * self.grouped}"

    @staticmethod
    def parse(card: str, text: str) -> Attention:
        direction, head_dim, *flags = text.split()
        return Attention(card, direction, int(head_dim), "general" in flags, "grouped" in flags)


MEASURED = Path(__file__).with_name("measured.json")
_CARDS = json.loads(MEASURED.read_text())
# The speed relative to torch's flash kernel or, if general, its memory-efficient one, which are the alternatives here
# (plain torch may take cuDNN): the least over the timed lengths, in bf16.
ATTENTION: dict[Attention, float] = {
    Attention.parse(card, kind): speed for card, row in _CARDS.items() for kind, speed in row["attention"].items()
}
# Fields of `Tuning`, by card.
TUNING: dict[str, dict[str, int]] = {card: row["tuning"] for card, row in _CARDS.items() if row["tuning"]}


def find_speed_fault(card: str, head_dim: int, general: bool, grouped: bool) -> str:
    """Returns why the kernels are not the default; empty if they are faster in both directions.

    A head dim that was not timed counts as the next larger one, whose tiles it uses.
    """
    timed = {key: ratio for key, ratio in ATTENTION.items() if key[0] == card and key[3:] == (general, grouped)}
    widths = [width for width in sorted({key.head_dim for key in timed}) if width >= head_dim]
    ratios = [timed.get(Attention(card, way, widths[0], general, grouped)) for way in WAYS] if widths else [None]
    if None in ratios:
        return f"shardlib's own kernels are not yet measured on {card}"
    return "" if min(ratio or 0.0 for ratio in ratios) >= 1 else f"torch's own kernels are faster for this on {card}"
