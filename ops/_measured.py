"""What was measured on GPUs: for which attention the kernels of cuda/ are the default, and how collectives are tuned.

`python -m tests.gpu.session --write` writes the tables from its records. Where a card has no row, torch's kernels are
the default and `Tuning`'s own figures hold, which are guesses.
"""

from __future__ import annotations

from typing import NamedTuple

WAYS = ("forward", "backward")


class Attention(NamedTuple):
    """A kind of attention that was timed on a card: of one direction, head dim, plain or general, grouped or not."""

    card: str
    direction: str
    head_dim: int
    general: bool  # something is added to logits, hidden by a mask, or dropped
    grouped: bool  # several query heads read one key head


# Times the speed of torch's best kernel: the least over the lengths that were timed.
ATTENTION: dict[Attention, float] = {
}  # fmt: skip

# Fields of `Tuning`, by card.
TUNING: dict[str, dict[str, int]] = {
}  # fmt: skip


def slower(card: str, head_dim: int, general: bool, grouped: bool) -> str:
    """Why the kernels are not the default for this; empty when they are faster in both directions.

    A head dim that was not timed counts as the next one above it, whose tiles it takes.

    Example:
        >>> slower("a new card", 64, general=False, grouped=True)
        "shardlib's own kernels are not yet measured on a new card"
    """
    timed = {key: ratio for key, ratio in ATTENTION.items() if key[0] == card and key[3:] == (general, grouped)}
    widths = [width for width in sorted({key.head_dim for key in timed}) if width >= head_dim]
    found = [timed.get(Attention(card, way, widths[0], general, grouped)) for way in WAYS] if widths else [None]
    if None in found:
        return f"shardlib's own kernels are not yet measured on {card}"
    return "" if min(ratio or 0.0 for ratio in found) >= 1 else f"torch's own kernels are faster for this on {card}"
