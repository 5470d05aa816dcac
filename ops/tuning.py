"""Measurements on GPUs: the speed of the attention kernels of cuda/, and the tuning of collectives.

`python -m tests.validation.gpu.session --write` writes the tables from its records. For a card without a row,
torch's kernels are the default, and `Tuning` has its own figures, which are guesses.
"""

from __future__ import annotations

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


# The speed relative to torch's flash kernel or, if general, its memory-efficient one, which are the alternatives here
# (plain torch may take cuDNN): the least over the timed lengths, in bf16.
ATTENTION: dict[Attention, float] = {
    Attention(card='NVIDIA H100 80GB HBM3', direction='forward', head_dim=64, general=False, grouped=False): 1.31,
    Attention(card='NVIDIA H100 80GB HBM3', direction='forward', head_dim=128, general=False, grouped=False): 1.65,
    Attention(card='NVIDIA H100 80GB HBM3', direction='forward', head_dim=64, general=True, grouped=False): 1.22,
    Attention(card='NVIDIA H100 80GB HBM3', direction='forward', head_dim=64, general=False, grouped=True): 1.53,
    Attention(card='NVIDIA H100 80GB HBM3', direction='forward', head_dim=96, general=False, grouped=False): 1.31,
    Attention(card='NVIDIA H100 80GB HBM3', direction='forward', head_dim=96, general=True, grouped=False): 1.41,
    Attention(card='NVIDIA H100 80GB HBM3', direction='forward', head_dim=96, general=False, grouped=True): 1.59,
    Attention(card='NVIDIA H100 80GB HBM3', direction='forward', head_dim=112, general=False, grouped=False): 2.0,
    Attention(card='NVIDIA H100 80GB HBM3', direction='forward', head_dim=112, general=True, grouped=False): 1.79,
    Attention(card='NVIDIA H100 80GB HBM3', direction='forward', head_dim=112, general=False, grouped=True): 2.06,
    Attention(card='NVIDIA H100 80GB HBM3', direction='forward', head_dim=128, general=True, grouped=False): 1.54,
    Attention(card='NVIDIA H100 80GB HBM3', direction='forward', head_dim=128, general=False, grouped=True): 1.92,
    Attention(card='NVIDIA H100 80GB HBM3', direction='forward', head_dim=256, general=False, grouped=False): 1.68,
    Attention(card='NVIDIA H100 80GB HBM3', direction='forward', head_dim=256, general=True, grouped=False): 2.56,
    Attention(card='NVIDIA H100 80GB HBM3', direction='forward', head_dim=256, general=False, grouped=True): 2.24,
    Attention(card='NVIDIA H100 80GB HBM3', direction='backward', head_dim=64, general=False, grouped=False): 1.35,
    Attention(card='NVIDIA H100 80GB HBM3', direction='backward', head_dim=128, general=False, grouped=False): 1.48,
    Attention(card='NVIDIA H100 80GB HBM3', direction='backward', head_dim=64, general=True, grouped=False): 2.0,
    Attention(card='NVIDIA H100 80GB HBM3', direction='backward', head_dim=64, general=False, grouped=True): 1.58,
    Attention(card='NVIDIA H100 80GB HBM3', direction='backward', head_dim=96, general=False, grouped=False): 1.5,
    Attention(card='NVIDIA H100 80GB HBM3', direction='backward', head_dim=96, general=True, grouped=False): 2.56,
    Attention(card='NVIDIA H100 80GB HBM3', direction='backward', head_dim=96, general=False, grouped=True): 1.43,
    Attention(card='NVIDIA H100 80GB HBM3', direction='backward', head_dim=112, general=False, grouped=False): 1.8,
    Attention(card='NVIDIA H100 80GB HBM3', direction='backward', head_dim=112, general=True, grouped=False): 2.68,
    Attention(card='NVIDIA H100 80GB HBM3', direction='backward', head_dim=112, general=False, grouped=True): 1.58,
    Attention(card='NVIDIA H100 80GB HBM3', direction='backward', head_dim=128, general=True, grouped=False): 2.6,
    Attention(card='NVIDIA H100 80GB HBM3', direction='backward', head_dim=128, general=False, grouped=True): 1.54,
    Attention(card='NVIDIA H100 80GB HBM3', direction='backward', head_dim=256, general=False, grouped=False): 1.11,
    Attention(card='NVIDIA H100 80GB HBM3', direction='backward', head_dim=256, general=True, grouped=False): 9.98,
    Attention(card='NVIDIA H100 80GB HBM3', direction='backward', head_dim=256, general=False, grouped=True): 1.02,
    Attention(card='NVIDIA H200', direction='forward', head_dim=64, general=False, grouped=False): 1.31,
    Attention(card='NVIDIA H200', direction='forward', head_dim=128, general=False, grouped=False): 1.67,
    Attention(card='NVIDIA H200', direction='forward', head_dim=64, general=True, grouped=False): 1.21,
    Attention(card='NVIDIA H200', direction='forward', head_dim=64, general=False, grouped=True): 1.57,
    Attention(card='NVIDIA H200', direction='forward', head_dim=64, general=True, grouped=True): 1.4,
    Attention(card='NVIDIA H200', direction='forward', head_dim=96, general=False, grouped=False): 1.35,
    Attention(card='NVIDIA H200', direction='forward', head_dim=96, general=True, grouped=False): 1.41,
    Attention(card='NVIDIA H200', direction='forward', head_dim=96, general=False, grouped=True): 1.59,
    Attention(card='NVIDIA H200', direction='forward', head_dim=96, general=True, grouped=True): 1.76,
    Attention(card='NVIDIA H200', direction='forward', head_dim=112, general=False, grouped=False): 1.99,
    Attention(card='NVIDIA H200', direction='forward', head_dim=112, general=True, grouped=False): 1.79,
    Attention(card='NVIDIA H200', direction='forward', head_dim=112, general=False, grouped=True): 2.09,
    Attention(card='NVIDIA H200', direction='forward', head_dim=112, general=True, grouped=True): 1.79,
    Attention(card='NVIDIA H200', direction='forward', head_dim=128, general=True, grouped=False): 1.54,
    Attention(card='NVIDIA H200', direction='forward', head_dim=128, general=False, grouped=True): 1.95,
    Attention(card='NVIDIA H200', direction='forward', head_dim=128, general=True, grouped=True): 1.79,
    Attention(card='NVIDIA H200', direction='forward', head_dim=256, general=False, grouped=False): 1.69,
    Attention(card='NVIDIA H200', direction='forward', head_dim=256, general=True, grouped=False): 2.51,
    Attention(card='NVIDIA H200', direction='forward', head_dim=256, general=False, grouped=True): 2.28,
    Attention(card='NVIDIA H200', direction='forward', head_dim=256, general=True, grouped=True): 2.64,
    Attention(card='NVIDIA H200', direction='backward', head_dim=64, general=False, grouped=False): 1.4,
    Attention(card='NVIDIA H200', direction='backward', head_dim=128, general=False, grouped=False): 1.55,
    Attention(card='NVIDIA H200', direction='backward', head_dim=64, general=True, grouped=False): 1.97,
    Attention(card='NVIDIA H200', direction='backward', head_dim=64, general=False, grouped=True): 1.61,
    Attention(card='NVIDIA H200', direction='backward', head_dim=64, general=True, grouped=True): 1.83,
    Attention(card='NVIDIA H200', direction='backward', head_dim=96, general=False, grouped=False): 1.53,
    Attention(card='NVIDIA H200', direction='backward', head_dim=96, general=True, grouped=False): 2.54,
    Attention(card='NVIDIA H200', direction='backward', head_dim=96, general=False, grouped=True): 1.5,
    Attention(card='NVIDIA H200', direction='backward', head_dim=96, general=True, grouped=True): 2.25,
    Attention(card='NVIDIA H200', direction='backward', head_dim=112, general=False, grouped=False): 1.88,
    Attention(card='NVIDIA H200', direction='backward', head_dim=112, general=True, grouped=False): 2.65,
    Attention(card='NVIDIA H200', direction='backward', head_dim=112, general=False, grouped=True): 1.69,
    Attention(card='NVIDIA H200', direction='backward', head_dim=112, general=True, grouped=True): 2.27,
    Attention(card='NVIDIA H200', direction='backward', head_dim=128, general=True, grouped=False): 2.58,
    Attention(card='NVIDIA H200', direction='backward', head_dim=128, general=False, grouped=True): 1.6,
    Attention(card='NVIDIA H200', direction='backward', head_dim=128, general=True, grouped=True): 2.22,
    Attention(card='NVIDIA H200', direction='backward', head_dim=256, general=False, grouped=False): 1.12,
    Attention(card='NVIDIA H200', direction='backward', head_dim=256, general=True, grouped=False): 9.02,
    Attention(card='NVIDIA H200', direction='backward', head_dim=256, general=False, grouped=True): 1.03,
    Attention(card='NVIDIA H200', direction='backward', head_dim=256, general=True, grouped=True): 7.94,
}  # fmt: skip

# Fields of `Tuning`, by card.
TUNING: dict[str, dict[str, int]] = {
    'NVIDIA H200': {'ctas': 24},
}  # fmt: skip


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
